"""Gates, residual networks, probing and profiles."""

import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attractor as at
from attractor.residual import (
    Backbone,
    ResNet,
    StiffnessProfile,
    ViT,
    compare_profiles,
    gated_blocks,
    kendall,
    resnet34,
    resnet50,
    resnet101,
    resnet_backbone,
    resnet_cifar,
    spearman,
    vit,
)
from attractor.residual.gates import get_gate, make_gate
from attractor.residual.resnet import BasicBlock, Bottleneck, PreActivation
from tests.fuzz.judging import Call, calling, shaped, target
from tests.fuzz.strategies import WIDE, Maker

NAMES = list(at.gates.BY_NAME)


@cache
def gate(name: str, channels: int, dtype: torch.dtype, identity: bool = False) -> Any:
    state = torch.get_rng_state()
    made = at.gates.BY_NAME[name](channels, identity=identity, dtype=dtype).eval().requires_grad_(False)
    torch.set_rng_state(state)
    return made


OPTIONS: dict[str, dict[str, Any]] = {
    "cbam": {"reduction": (1, 4), "kernel_size": [3, 7, 1]},
    "dia": {"reduction": (1, 4)},
    "eca": {"kernel_size": [None, 3, 5]},
    "fca": {"frequencies": [1, 2, 4, 8, 16], "reduction": (1, 4)},
    "iebn": {"eps": 1e-5, "momentum": 0.1},
    "se": {"reduction": (1, 20)},
    "sem": {"reduction": (1, 4), "kernel_size": [None, 3]},
    "sge": {"groups": [None, 1, 2], "eps": 1e-5},
    "srm": {"eps": 1e-5},
    "stepnet": {"inputs": ["pair", "x", "next", "difference"], "adaptor": ["stepnet", "a", "b", "c", "d"],
                "iebn": ["after", "inside"], "reduction": (1, 4)},
}  # fmt: skip


def drawn(m: Maker, allowed: Any) -> Any:
    if isinstance(allowed, tuple):
        return m.whole(*allowed)
    return m.choice(allowed, odd=(2, -1, 0, 1.5)) if isinstance(allowed, list) else m.number(1e-5, 0.2)


for _name in NAMES:
    _class = at.gates.BY_NAME[_name].__name__
    _place = f"attractor.residual.gates.{_class}"

    @target(_place, random=True)
    def _construct(m: Maker, name: str = _name) -> Call:
        m.seed()
        options = {k: drawn(m, v) for k, v in OPTIONS[name].items() if m.flag()}
        if m.chance(40):
            options["identity"] = m.boolean()
        if m.chance(30):
            options["dtype"] = m.choice([None, torch.float64], odd=(torch.int64, "double"))
        return calling(at.gates.BY_NAME[name], m.whole(1, 40), **options)

    def _arguments(m: Maker, name: str) -> tuple[Any, Any, Any]:
        channels, dtype = m.pick((4, 8, 16)), m.pick(WIDE)
        made = gate(name, channels, dtype, m.flag())
        shape = (m.pick((2, 1, 0)), channels, m.whole_number(1, 5), m.whole_number(1, 5))
        fill = m.pick(("normal", "large", "zeros", "tiny"))
        return made, m.tensor(shape, [dtype], fill), m.tensor(shape, [dtype], fill)

    @target(f"{_place}.forward")
    def _forward(m: Maker, name: str = _name) -> Call:
        made, f, x = _arguments(m, name)
        made.start()

        def run(f: Any, x: Any) -> Any:
            made.start()
            return made(f, x)

        return calling(run, f, x, check=lambda r: shaped(*f.shape, dtype=f.dtype)(r), tolerance=1e-3)

    @target(f"{_place}.weights")
    def _weights(m: Maker, name: str = _name) -> Call:
        made, f, x = _arguments(m, name)

        def run(f: Any, x: Any) -> Any:
            made.start()
            return made.weights(f, x)

        return calling(
            run, f, x, check=lambda r: torch.broadcast_shapes(r.shape, f.shape), tolerance=1e-3
        )


@target("attractor.residual.gates.IEBN.of")
def _iebn_of(m: Maker) -> Call:
    m.seed()
    return calling(
        at.gates.IEBN.of,
        m.choice([nn.BatchNorm2d(3), nn.BatchNorm2d(2, affine=False)], odd=(nn.ReLU(),)),
    )


for _class in ("DIA", "IEBN"):

    @target(f"attractor.residual.gates.{_class}.start")
    def _start(m: Maker, name: str = _class) -> Call:
        m.seed()
        return calling(gate(name.lower(), 4, torch.float32).start)

    @target(f"attractor.residual.gates.{_class}.resume")
    def _resume(m: Maker, name: str = _class) -> Call:
        m.seed()
        made, x = gate(name.lower(), 4, torch.float32), m.tensor((2, 4, 3, 3), [torch.float32])
        return calling(made.resume, m.choice([x, None]))


@target("attractor.residual.gates.get_gate")
def _get_gate(m: Maker) -> Call:
    m.seed()
    return calling(get_gate, m.choice(NAMES), finite=False)


@target("attractor.residual.gates.make_gate", random=True)
def _make_gate(m: Maker) -> Call:
    m.seed()
    what = m.choice([*NAMES, "none", None, at.gates.SE], odd=(nn.ReLU(), lambda c: 3, nn.ReLU))
    return calling(make_gate, what, m.whole(1, 20), **({"unknown": 1} if m.chance(5) else {}))


# Networks


@cache
def small(kind: str, name: str = "none", dtype: torch.dtype = torch.float32) -> Any:
    state = torch.get_rng_state()
    blocks: dict[str, Any] = {"basic": BasicBlock, "bottleneck": Bottleneck, "before": PreActivation}
    made = ResNet(blocks[kind], [2, 2], [4, 8], 3, dtype=dtype)
    if name != "none":
        at.insert_gates(made, name)
    torch.set_rng_state(state)
    return made.eval().requires_grad_(False)


def images(m: Maker, dtype: torch.dtype, channels: int = 3, least: int = 4) -> Any:
    shape = (m.pick((2, 1, 0)), channels, m.whole_number(least, 9), m.whole_number(least, 9))
    return m.tensor(shape, [dtype], fill=m.pick(("normal", "large", "zeros")))


@target("attractor.residual.ResNet", random=True)
def _resnet(m: Maker) -> Call:
    m.seed()
    block = m.choice([BasicBlock, Bottleneck, PreActivation])
    depths = m.choice([[1], [1, 2], (1, 1)], odd=([], [0], [-1], ["a"], 3))
    planes = m.choice([[4, 4], [4, 8, 9]], odd=([], [0, 0], [-4, 2], [2.5, 1]))
    options = {
        "stem": m.choice(["small", "large"]),
        "in_channels": m.whole(1, 4),
        "zero_init_residual": m.boolean(),
    }
    return calling(ResNet, block, depths, planes, m.whole(1, 5), **options)


for _name in ("forward", "features"):

    @target(f"attractor.residual.ResNet.{_name}")
    def _resnet_forward(m: Maker, name: str = _name) -> Call:
        dtype = m.pick(WIDE)
        model = small(
            m.pick(("basic", "bottleneck", "before")), m.pick(("none", "se", "stepnet", "dia")), dtype
        )
        x = images(m, dtype)
        check = (lambda r: shaped(x.shape[0], 3, dtype=dtype)(r)) if name == "forward" else None
        return calling(
            getattr(model, name) if name != "forward" else model, x, check=check, tolerance=1e-3
        )


@target("attractor.residual.resnet_cifar", random=True, slow=True)
def _cifar(m: Maker) -> Call:
    m.seed()
    options: dict[str, Any] = {
        "depth": m.choice([11, 20], odd=(12, 2, -7, 11.0)),
        "num_classes": m.whole(1, 4),
    }
    options |= {
        "gate": m.choice([*NAMES, "none", None]),
        "preactivation": m.boolean(),
        "width": m.whole(2, 4),
    }
    if m.chance(40):
        options["where"] = m.choice(
            ["default", "all", "identity", [0], ["layer1.0"]], odd=([99], [], "layer1.0")
        )
    return calling(resnet_cifar, **options)


for _make in (resnet34, resnet50, resnet101, resnet_backbone):

    @target(
        f"attractor.residual.{_make.__name__}",
        random=True,
        slow=True,
        raises=(FileNotFoundError, ImportError),
    )
    def _imagenet(m: Maker, make: Any = _make) -> Call:
        m.seed()
        options: dict[str, Any] = {"gate": m.choice([*NAMES, "none"]), "device": "meta"}
        if make is not resnet_backbone:
            options["num_classes"] = m.whole(1, 4)
        else:
            options["depth"] = m.choice([34, 50], odd=(18, 51))
            options["out_indices"] = m.choice([(0,), (1, 3)], odd=((), (9,), 3))
            options["frozen_stages"] = m.choice([-1, 0, 2], odd=(9, -2))
        if m.chance(10):
            options["weights"] = m.pick(("nowhere.safetensors", Path(__file__), 3))
        if m.chance(5):
            options["unknown"] = 1
        return calling(make, finite=False, **options)


@target("attractor.residual.Backbone")
def _backbone(m: Maker) -> Call:
    m.seed()
    model = m.choice([small("basic"), small("bottleneck", "se")], odd=(nn.Linear(2, 2), nn.ReLU()))
    return calling(
        Backbone,
        model,
        m.choice([(0,), (0, 1), [1]], odd=((), (5,), (-1,), 1)),
        m.choice([-1, 0, 1], odd=(7,)),
        m.flag(),
    )


@cache
def backbone() -> Backbone:
    return Backbone(small("basic"), (0, 1))


@target("attractor.residual.Backbone.forward")
def _backbone_forward(m: Maker) -> Call:
    return calling(backbone(), images(m, torch.float32), tolerance=1e-3)


@target("attractor.residual.Backbone.frozen")
def _frozen(m: Maker) -> Call:
    m.seed()
    return calling(backbone().frozen)


@target("attractor.residual.Backbone.train")
def _train(m: Maker) -> Call:
    m.seed()
    return calling(
        lambda mode: Backbone(small("basic"), (0, 1)).train(mode) and None, m.choice([False, True])
    )


@target("attractor.residual.Backbone.with_fpn", raises=(ImportError,))
def _with_fpn(m: Maker) -> Call:
    m.seed()
    return calling(backbone().with_fpn, m.whole(1, 9))


@target("attractor.residual.vit", random=True, slow=True)
def _vit(m: Maker) -> Call:
    m.seed()
    options: dict[str, Any] = {
        "image_size": m.choice([8, (8, 4)], odd=(7, 0, (8,), -8)),
        "patch": m.choice([4, 2], odd=(0, 3)),
    }
    options |= {
        "dim": m.choice([4, 8], odd=(0, 5)),
        "depth": m.whole(1, 2),
        "heads": m.choice([1, 2], odd=(0, 3)),
    }
    options |= {"num_classes": m.whole(1, 3), "gate": m.choice(["none", "se", "stepnet"])}
    return calling(vit, **options)


@cache
def small_vit(name: str, dtype: torch.dtype) -> ViT:
    state = torch.get_rng_state()
    made = vit(8, 4, 8, 1, 2, 3, gate=name).to(dtype).eval().requires_grad_(False)
    torch.set_rng_state(state)
    return made


@target("attractor.residual.ViT.forward")
def _vit_forward(m: Maker) -> Call:
    dtype = m.pick(WIDE)
    x = m.tensor((m.pick((2, 1, 0)), 3, 8, 8), [dtype], fill=m.pick(("normal", "large")))
    return calling(
        small_vit(m.pick(("none", "se")), dtype),
        x,
        check=lambda r: shaped(x.shape[0], 3)(r),
        tolerance=1e-3,
    )


@target("attractor.insert_gates", random=True, slow=True)
def _insert_gates(m: Maker) -> Call:
    m.seed()
    model = m.choice([ResNet(BasicBlock, [2], [4], 2)], odd=(nn.Linear(2, 2), small("basic", "se")))
    where = m.choice(["default", "all", "identity", [0], ["layer1.1"], lambda n, b: True],
                     odd=([99], [], "layer9", [None], lambda n, b: False, 3))  # fmt: skip
    return calling(
        at.insert_gates,
        model,
        m.choice([*NAMES, "none"], odd=(lambda c: 3, nn.ReLU())),
        where,
        identity=m.boolean(),
    )


@target("attractor.residual.gated_blocks")
def _gated_blocks(m: Maker) -> Call:
    m.seed()
    return calling(
        lambda model: list(gated_blocks(model)),
        m.choice([small("basic", "se"), small("before")], odd=(nn.ReLU(),)),
    )


# Probing


@cache
def probed(width: int, blocks: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(width, width, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(x).tanh()

    state = torch.get_rng_state()
    made = nn.Sequential(*(Block() for _ in range(blocks)))
    torch.set_rng_state(state)
    return made


@target("attractor.probe", slow=True, raises=(RuntimeError,))  # what the network itself raises
def _probe(m: Maker) -> Call:
    model = m.choice([probed(4, 3)], odd=(nn.Linear(4, 4), None, probed, nn.Sequential()))
    batch = m.tensor((m.pick((3, 1, 2, 0)), 4), [torch.float32], fill="normal")
    batches = (
        m.pick(([batch], batch, [(batch, None)], (batch, "names"), [batch, batch]))
        if not m.strange()
        else m.pick(([], None, 3, ["a"], [None], [(batch, 3)], (batch, batch)))
    )
    options: dict[str, Any] = {"step": m.choice(["one", "gate"])}
    if m.chance(40):
        options["granularity"] = m.choice(["block", "addition"])
    if m.chance(30):
        options["limit"] = m.whole(1, 3)
    if m.chance(20):
        options["mean"] = m.choice(["input", "stage"])
    if m.chance(20):
        options["within"] = m.choice(["", "1"], odd=("nowhere",))
    if m.chance(20):
        options["device"] = m.choice([None, "cpu"], odd=("nowhere:1",))
    return Call(lambda: at.probe(model, batches, **options).nsi)


def a_profile(m: Maker, sane: bool = True) -> StiffnessProfile:
    inputs, blocks = m.pick((3, 1, 2)), m.whole_number(1, 5)
    table = lambda: torch.rand(inputs, blocks, generator=m.generator()) + 0.01
    gates = table() if m.flag() else torch.full((inputs, blocks), torch.nan)
    stage = torch.sort(torch.randint(2, (blocks,), generator=m.generator())).values
    names = tuple(f"layer{int(s) + 1}.{i}" for i, s in enumerate(stage))
    return StiffnessProfile(table(), table(), gates, stage, names)


@target("attractor.residual.StiffnessProfile")
def _profile(m: Maker) -> Call:
    inputs, blocks = m.pick((3, 1)), m.whole_number(1, 4)
    table = lambda: m.tensor((inputs, blocks), WIDE)
    stage = m.integers((blocks,), 0, 1)
    names = m.choice([tuple(map(str, range(blocks)))], odd=((),))
    options = {"step": m.choice(["one", "gate"]), "mean": m.choice(["input", "stage"])}
    return calling(
        StiffnessProfile, table(), table(), table(), stage, names, finite=False, layouts=False, **options
    )


for _name in ("total", "correlation", "stages", "totals", "summary", "numbers"):

    @target(f"attractor.residual.StiffnessProfile.{_name}")
    def _method(m: Maker, name: str = _name) -> Call:
        profile = a_profile(m)
        arguments = [m.boolean()] if name == "total" else []
        return calling(getattr(profile, name), *arguments, finite=False)


for _name in ("proportion", "surface"):

    @target(f"attractor.residual.StiffnessProfile.{_name}")
    def _over(m: Maker, name: str = _name) -> Call:
        one = lambda: m.number(0.0, 1.0) if m.flag() else m.tensor((2,), WIDE)
        return calling(getattr(a_profile(m), name), one(), one(), m.boolean())


for _name, _allowed in (("with_step", ["one", "gate"]), ("with_mean", ["input", "stage"])):

    @target(f"attractor.residual.StiffnessProfile.{_name}")
    def _with(m: Maker, name: str = _name, allowed: Any = _allowed) -> Call:
        return calling(getattr(a_profile(m), name), m.choice(allowed), finite=False)


@target("attractor.residual.StiffnessProfile.beside")
def _beside(m: Maker) -> Call:
    profile = a_profile(m)
    return calling(profile.beside, m.choice([None, profile, a_profile(m)]), finite=False)


@target("attractor.residual.StiffnessProfile.plot", slow=True, needs="matplotlib")
def _plot(m: Maker) -> Call:
    profile = a_profile(m)
    return calling(lambda kind: profile.plot(kind) and None, m.choice(["nsi", "surface"]))


@target("attractor.residual.StiffnessProfile.save", slow=True, raises=(OSError,))
def _save(m: Maker) -> Call:
    profile, place = a_profile(m), m.choice(["", "a"], odd=("file",))

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "file").write_text("a file")
            profile.save(Path(folder) / place if isinstance(place, str) else place)

    return Call(run)


@target("attractor.residual.StiffnessProfile.load", slow=True, raises=(OSError,))
def _load(m: Maker) -> Call:
    profile, place = a_profile(m), m.choice([""], odd=("nothing", "file"))

    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            profile.save(folder)
            (Path(folder) / "file").write_text("a file")
            return StiffnessProfile.load(Path(folder) / place if isinstance(place, str) else place).one

    return Call(run)


@target("attractor.residual.compare_profiles")
def _compare_profiles(m: Maker) -> Call:
    profiles: Any = {name: a_profile(m) for name in "abcd"[: m.whole_number(1, 4)]}
    profiles = m.pick((None, {}, [1], {"a": 3})) if m.strange() else profiles
    accuracy = None
    if m.flag():
        accuracy = (
            {n: 50.0 + i for i, n in enumerate(profiles or ())}
            if not m.strange()
            else m.pick(({}, {"z": 1.0}, {"a": "b"}, {"a": math.nan}))
        )
    return calling(compare_profiles, profiles, accuracy, finite=False)


for _name, _function in (("kendall", kendall), ("spearman", spearman)):

    @target(f"attractor.residual.{_name}")
    def _rank(m: Maker, function: Any = _function) -> Call:
        n = m.whole_number(0, 6)
        x, y = (
            m.tensor((n,), (*WIDE, torch.int64), fill=m.pick(("normal", "whole", "ones")))
            for _ in range(2)
        )

        def check(r: Any) -> None:  # NaN where one is constant
            assert isinstance(r, float)
            assert math.isnan(r) or abs(r) <= 1 + 1e-6

        return calling(function, x, y, check=check, finite=False, tolerance=1e-3)
