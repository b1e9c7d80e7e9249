"""Adapters to other libraries, where these are installed."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

import attractor as at
from attractor.attention.pdes import LearnedPDE
from attractor.integrations import onnx, onnx_networks, timm
from attractor.integrations import scipy as scipys
from attractor.integrations import transformers as transformers_
from tests.fuzz.judging import Call, calling, target
from tests.fuzz.strategies import WIDE, Maker
from tests.fuzz.targets.attention import NAMES, a_pde
from tests.fuzz.targets.ode import solver
from tests.fuzz.targets.residual import NAMES as GATES


@target("attractor.integrations.scipy.hybrid", needs="scipy", slow=True)
def _hybrid(m: Maker) -> Call:
    y0 = m.tensor((2,), WIDE, fill="normal", layout="plain")
    span = (0.0, m.number(0.1, 1.0))
    made = m.choice([solver(torch.float64), solver(torch.float32)])
    options = {"t_eval": [0.0, 0.05]} if m.chance(30) else {}

    def run() -> Any:
        from scipy.integrate import solve_ivp

        method = scipys.hybrid(made)
        good = isinstance(y0, torch.Tensor) and y0.shape == (2,) and y0.is_floating_point()
        good = good and y0.device.type == "cpu" and bool(y0.isfinite().all())
        if not (
            good and y0.device.type == "cpu" and isinstance(span[1], float) and 0.1 <= span[1] <= 1.0
        ):
            return None  # scipy's own business
        return solve_ivp(lambda t, y: y, span, y0.double().numpy(), method=method, **options).y

    return Call(run)


@target("attractor.integrations.timm.attn_layer", random=True)
def _attn_layer(m: Maker) -> Call:
    m.seed()
    what = m.choice(GATES, odd=(lambda c: 3, at.gates.SE))
    channels = m.whole(1, 9)
    return calling(lambda what: timm.attn_layer(what)(channels, rd_ratio=0.5), what)


@target("attractor.integrations.timm.register", raises=(ImportError,))
def _timm_register(m: Maker) -> Call:
    m.seed()
    return calling(timm.register)


@target("attractor.integrations.transformers.register", needs="transformers", warns=True)
def _register(m: Maker) -> Call:
    m.seed()
    name = m.choice(["pde_one", "pde_two"], odd=("sdpa", "eager", "flash_x", "a/b"))
    names = {str(name): a_pde(m)}
    options = (
        {"walls": m.choice(["mask", "sequence"]), "method": m.choice(["auto", "dense"])}
        if m.flag()
        else {}
    )
    return calling(transformers_.register, m.whole(0, 4), m.number(0.1, 1.0), names=names, **options)


@target("attractor.integrations.transformers.Setting")
def _setting(m: Maker) -> Call:
    m.seed()
    return calling(
        transformers_.Setting,
        a_pde(m),
        m.whole(0, 4),
        m.number(0.1, 1.0),
        m.choice(["mask"]),
        m.choice(["auto"]),
    )


@target("attractor.integrations.transformers.Setting.options")
def _setting_options(m: Maker) -> Call:
    m.seed()
    return calling(
        transformers_.Setting(at.pdes.Wave(), m.whole_number(0, 3), 1.0).options, finite=False
    )


@target("attractor.integrations.transformers.Refinement")
def _refinement(m: Maker) -> Call:
    m.seed()
    setting = m.choice([transformers_.Setting(at.pdes.Diffusion(), 2, 1.0)])
    return calling(transformers_.Refinement, setting, m.choice([None, 1, 3], odd=(0, -1)), m.boolean())


@target("attractor.integrations.transformers.Refinement.forward")
def _refinement_forward(m: Maker) -> Call:
    m.seed()
    setting = transformers_.Setting(at.pdes.Diffusion(), 2, 1.0)
    return calling(transformers_.Refinement(setting, m.pick((None, 2)), m.flag()))


@cache
def small_model() -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

    state = torch.get_rng_state()
    transformers_.register()
    config = GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, attn_implementation="pde_diffusion"
    )
    made = AutoModelForCausalLM.from_config(config).eval()
    torch.set_rng_state(state)
    return made


@target("attractor.integrations.transformers.add_pde", needs="transformers", slow=True)
def _add_pde(m: Maker) -> Call:
    m.seed()
    model = m.choice([small_model()], odd=(torch.nn.Linear(2, 2),))
    pde, steps, dt = (
        m.choice([*NAMES], odd=(at.pdes.Wave(0.1), at.pdes.Diffusion(9.0))),
        m.whole(0, 4),
        m.number(0.1, 1.0),
    )
    per_head, learn = m.boolean(), m.boolean()
    return Call(
        lambda: transformers_.add_pde(model, pde, steps, dt, per_head=per_head, learn=learn) and None
    )


@target("attractor.integrations.transformers.parameter_groups", needs="transformers")
def _parameter_groups(m: Maker) -> Call:
    model = m.choice([LearnedPDE("wave"), torch.nn.Linear(2, 2)], odd=("model", torch.nn.Identity()))
    lr, coefficient_lr = m.number(0.0, 1.0), m.number(0.0, 1.0)
    return calling(
        transformers_.parameter_groups,
        model,
        lr,
        weight_decay=m.number(0.0, 1.0),
        coefficient_lr=coefficient_lr,
    )


@target("attractor.integrations.transformers.check", needs="transformers", slow=True, warns=True)
def _check(m: Maker) -> Call:
    ids = torch.randint(11, (2, m.whole_number(1, 8)), generator=m.generator())
    model = m.choice([small_model()], odd=(torch.nn.Linear(2, 2),))
    return Call(lambda: transformers_.check(model, input_ids=ids))


@target("attractor.integrations.transformers.load", needs="transformers", slow=True, raises=(OSError,))
def _load(m: Maker) -> Call:
    m.seed()
    from transformers import GPT2LMHeadModel

    folder = m.choice(["/nowhere/at/all", str(Path(tempfile.gettempdir()) / "not-there")])
    return calling(transformers_.load, GPT2LMHeadModel, folder, local_files_only=True)


@target("attractor.integrations.onnx.export", needs="onnx", slow=True, raises=(OSError, ImportError))
def _export(m: Maker) -> Call:
    """What it refuses; tests/integrations/test_onnx.py has what it does, which takes seconds."""
    m.seed()
    steps = m.choice([0, -1, 33, 2.5, "1", None])
    what = m.choice([solver(torch.float64)], odd=(torch.nn.Linear(2, 2),))
    path = m.choice(["model.onnx", "model.pt2"], odd=("model.txt", "model", ""))

    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return onnx.export(what, Path(folder) / path if isinstance(path, str) else path, steps=steps)

    return Call(run)


@target(
    "attractor.integrations.onnx_networks.export_network",
    needs="onnx",
    slow=True,
    raises=(OSError, ImportError),
)
def _export_network(m: Maker) -> Call:
    """What it refuses; tests/integrations/test_onnx_networks.py has what it does, which takes seconds."""
    network = m.choice([torch.nn.Linear(2, 2)], odd=(None, "net", torch.nn.Linear))
    inputs = m.choice([{}, {"input": 3}], odd=(None, [torch.zeros(2)], torch.zeros(2)))
    path = m.choice(["model.onnx", "model.pt2"], odd=("model", ""))

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            where = Path(folder) / path if isinstance(path, str) else path
            onnx_networks.export_network(network, where, inputs)

    return Call(run)
