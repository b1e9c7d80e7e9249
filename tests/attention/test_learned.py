"""Learnt coefficients: exact starts, stable for ever, float32 always; and the paper's scaling advice."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from attractor.attention import pde_attention
from attractor.attention.pdes import (
    AdvectionDiffusion,
    Diffusion,
    LearnedPDE,
    ReactionDiffusion,
    Wave,
    for_length,
)

NAMES = ["diffusion", "wave", "reaction_diffusion", "advection_diffusion"]
STARTS = [Diffusion(0.3), Wave(0.7), ReactionDiffusion(0.2, -0.3), ReactionDiffusion(0.2, 0.9, split=True),
          AdvectionDiffusion(0.2, -0.35)]  # fmt: skip


@dataclass(frozen=True)
class Smoothing:
    """A PDE of one's own that can be learnt."""

    kappa: float = 0.02
    linear = True
    reach = 2

    def max_dt(self, axis="key"):
        return 0.125 / self.kappa

    def check(self, dt, axis="key"):
        assert isinstance(self.kappa, torch.Tensor) or dt <= self.max_dt(axis)

    def interval(self, name, dt, axis="key"):
        return 0.0, 0.125 / dt

    def step(self, u, velocity, line, dt):
        return u - dt * self.kappa * line.laplacian(line.laplacian(u)), velocity


def numbers(pde):
    names = [n for n in ("alpha", "beta", "c", "kappa") if hasattr(pde, n)]
    return {n: torch.as_tensor(getattr(pde, n)).detach().flatten().tolist() for n in names}


@pytest.mark.parametrize("start", [*STARTS, Smoothing(0.05)], ids=repr)
def test_starts_at_the_given_numbers(start):
    learned = LearnedPDE(start, heads=2)()
    assert type(learned) is type(start)
    assert getattr(learned, "split", None) == getattr(start, "split", None)
    for name, (value, *_) in numbers(start).items():
        assert numbers(learned)[name] == pytest.approx([value] * 2, rel=3e-7)


def test_each_head_may_start_elsewhere():
    alpha = torch.tensor([0.05, 0.2, 0.4])[:, None, None]
    learned = LearnedPDE(AdvectionDiffusion(alpha, 0.03), heads=3)()
    torch.testing.assert_close(learned.alpha, alpha)
    torch.testing.assert_close(learned.beta, torch.full_like(alpha, 0.03))
    with pytest.raises(
        ValueError, match="alpha of Diffusion has 3 numbers; pass one, or one for each of heads=2"
    ):
        LearnedPDE(Diffusion(alpha), heads=2)


IDENTITIES = [Diffusion(0.0), Wave(0.0), ReactionDiffusion(0.0, 0.0), AdvectionDiffusion(0.0, 0.0)]


@pytest.mark.parametrize("start", [*IDENTITIES, Smoothing(0.0)], ids=repr)
def test_coefficients_of_zero_change_nothing_and_have_gradients(start):
    learned = LearnedPDE(start, heads=2)
    q, k, v = torch.randn(3, 1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    out = pde_attention(q, k, v, is_causal=True, pde=learned(), steps=4)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
    # The gradient is that of a coefficient (of c² for a wave), times the largest one.
    gradients = torch.autograd.grad(out.square().sum(), learned.parameters())
    assert all(g.isfinite().all() for g in gradients)
    assert all((g.abs() > 1e-4).all() for g in gradients)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", [*IDENTITIES, Diffusion(0.001)], ids=repr)
def test_small_coefficients_reach_what_the_data_want(start):
    """With the logistic of earlier versions, these 250 updates moved alpha from 0.001 to 0.0013."""
    kind = type(start)
    q, k, v = torch.randn(3, 4, 1, 12, 4, generator=torch.Generator().manual_seed(0))
    truth = kind(0.3, 0.2) if len(numbers(start)) == 2 else kind(0.3)
    want = pde_attention(q, k, v, is_causal=True, pde=truth, steps=2)
    learned = LearnedPDE(start)
    optimiser = torch.optim.AdamW(learned.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(250):
        found = pde_attention(q, k, v, is_causal=True, pde=learned(), steps=2)
        optimiser.zero_grad()
        (found - want).square().mean().backward()
        optimiser.step()
    for (value, *_), (goal, *_) in zip(numbers(learned()).values(), numbers(truth).values()):
        assert 0.05 < value <= goal * 1.01


@pytest.mark.parametrize("kind", [Diffusion, Wave, Smoothing])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_coefficient_pushed_below_zero_stays_there_and_comes_back(kind, make):
    learned = LearnedPDE(kind(0.0))
    optimiser = make(learned.parameters(), lr=1e-3, weight_decay=0.0)
    (name,) = numbers(learned())
    high = kind().interval(name, 1.0)[1]
    power = 2 if kind is Wave else 1  # of c, a wave feels the square

    def push(direction, updates):
        for _ in range(updates):
            optimiser.zero_grad()
            (direction * (getattr(learned(), name) / high) ** power).sum().backward()
            optimiser.step()
            yield (numbers(learned())[name][0] / high) ** power

    assert max(push(1.0, 300)) < 3e-3
    *_, after = push(-1.0, 300)
    assert 0.15 < after < 1


def test_state_dicts_with_logits_have_the_same_coefficients():
    """In earlier versions: high * sigmoid(logit), or the middle plus half the width * tanh(logit / 2)."""
    alphas, betas = torch.tensor([-9.0, -1.4, 0.3]), torch.tensor([-4.0, 0.2, 2.0])
    state = {"alpha_logit": alphas, "beta_logit": betas}
    for kind in (AdvectionDiffusion, ReactionDiffusion):
        learned = LearnedPDE(kind(0.1, 0.1), heads=3)
        learned.load_state_dict(state)
        alpha = 0.5 * alphas.double().sigmoid() * (1 - 1e-6)
        half = 2 * alpha if kind is AdvectionDiffusion else 1 - 1e-6 - 2 * alpha
        found = numbers(learned())
        assert found["alpha"] == pytest.approx(alpha.tolist(), rel=1e-6)
        beta = half * (betas.double() / 2).tanh() * (1 - 2e-6)
        assert found["beta"] == pytest.approx(beta.tolist(), rel=1e-6)
    assert [*state] == ["alpha_logit", "beta_logit"]  # it is the caller's
    for logit, c in ((-1.4, 0.19781605), (1e3, 1.0), (-1e3, 0.0)):
        model = nn.ModuleList([nn.Linear(1, 1), LearnedPDE("wave")])
        state = {
            n.replace("raw", "logit"): torch.full_like(p, logit) for n, p in model.state_dict().items()
        }
        assert all(not keys for keys in model.load_state_dict(state))
        assert numbers(model[1]())["c"] == pytest.approx([c], abs=2e-6)
    with pytest.raises(RuntimeError, match=r'Missing key.*"beta_raw"'):
        LearnedPDE("advection_diffusion").load_state_dict({"alpha_logit": torch.zeros(1)})


@pytest.mark.parametrize("name", NAMES)
def test_no_optimiser_can_make_it_unstable(name):
    learned = LearnedPDE(name, heads=4, dt=1.3)
    optimiser = torch.optim.Adam(learned.parameters(), lr=5.0)
    generator = torch.Generator().manual_seed(0)
    seen = [numbers(learned())]
    for _ in range(200):
        pde = learned()
        push = torch.randn(4, generator=generator)
        sum((getattr(pde, n).flatten() * push).sum() for n in numbers(pde)).backward()
        optimiser.step()
        optimiser.zero_grad()
        seen.append(numbers(learned()))
        heads = [type(pde)(**{n: v[h] for n, v in seen[-1].items()}) for h in range(4)]
        for head in heads:
            head.check(1.3)
            if name == "advection_diffusion":
                assert abs(head.beta) <= 2 * head.alpha
    first = [s[next(iter(s))] for s in seen]
    assert max(map(max, first)) > 2 * min(map(min, first))  # it did move


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_models_keep_float32(name, half):
    learned = LearnedPDE(name, heads=2)
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.add_(0.001)  # bfloat16 could not tell
    before = numbers(learned())
    model = nn.ModuleList([nn.Linear(2, 2), learned]).to(half)
    assert model[0].weight.dtype == half
    assert all(p.dtype == torch.float32 for p in learned.parameters())
    assert numbers(learned()) == before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert numbers(learned()) == before
    assert all(p.dtype == torch.float64 for p in learned.double().parameters())
    for parameter in learned.parameters():  # as loaders do that put tensors in place
        parameter.data = parameter.data.to(half)
    assert all(getattr(learned(), n).dtype == torch.float32 for n in before)


def test_saved_and_copied():
    for start in STARTS:
        learned = LearnedPDE(start, heads=2)
        with torch.no_grad():
            for parameter in learned.parameters():
                parameter.normal_()
        again = LearnedPDE(
            type(start)(**({"split": True} if getattr(start, "split", 0) else {})), heads=2
        )
        again.load_state_dict(learned.state_dict())  # another start does not matter
        assert numbers(again()) == numbers(learned()) == numbers(copy.deepcopy(learned)())


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [STARTS[-1], *(pytest.param(x, marks=pytest.mark.slow) for x in STARTS[:-1])],
    ids=str,
)
def test_compiled(start):
    learned = LearnedPDE(start, heads=2)
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.normal_()

    def attend(x):
        return pde_attention(x, x, x, is_causal=True, pde=learned(), steps=2, method="dense")

    whole = torch.compile(attend, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 2, 5, 4)
    torch.testing.assert_close(whole(x), attend(x))
    whole(x).square().sum().backward()
    assert all(p.grad.abs().min() > 0 for p in learned.parameters())


@pytest.mark.parametrize("start", STARTS, ids=repr)
def test_made_without_numbers(start):
    """As loaders make modules before they read weights."""
    truth = LearnedPDE(start, heads=2)
    with torch.device("meta"):
        learned = LearnedPDE(start, heads=2)
    assert all(p.is_meta for p in learned.parameters())
    learned.load_state_dict(truth.state_dict(), assign=True)
    assert numbers(learned()) == numbers(truth())


def test_vectors_escape_weight_decay():
    assert all(p.ndim == 1 for p in LearnedPDE("reaction_diffusion", heads=2).parameters())


@dataclass(frozen=True)
class Unbounded:
    kappa: float = 0.02

    def step(self, u, velocity, line, dt):
        return u, velocity


WRONG = {
    r"alpha = 0.7 of Diffusion must lie between 0 and 0.5, the upper end excluded": (Diffusion(0.7), {}),
    r"alpha = 0.5 of Diffusion must lie": (Diffusion(0.5), {}),
    r"alpha = -1 of Diffusion must lie": (Diffusion(torch.tensor(-1.0)), {}),
    r"beta = 0.5 of ReactionDiffusion must lie between -0.499999 and": (ReactionDiffusion(0.25, 0.5), {}),
    r"alpha = 0.3 .* between 0 and 0.25, .* with dt = 1 on axis 'both'": (Diffusion(0.3), {"axis": "both"}),
    r"beta = 0.3 of AdvectionDiffusion must lie between -0.2 and 0.2": (AdvectionDiffusion(0.1, 0.3), {}),
    "no PDE is called 'heat'": ("heat", {}),
    "is not an equation; pass one such as": (Diffusion, {}),
    "dt = 0 must be more than 0": ("wave", {"dt": 0}),
    r"the stable values of kappa of Unbounded are unknown: add a method interval\(name, dt, axis\)": (Unbounded(), {}),
    "axis 'keys' is not one of key": ("wave", {"axis": "keys"}),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_errors_teach(message):
    pde, options = WRONG[message]
    with pytest.raises(ValueError, match=message):
        LearnedPDE(pde, **options)


def test_without_fields_there_is_nothing_to_learn():
    class Fixed:
        def step(self, u, velocity, line, dt):
            return u, velocity

    with pytest.raises(ValueError, match="Fixed has nothing to learn: make it a frozen dataclass"):
        LearnedPDE(Fixed())


@pytest.mark.parametrize("tokens", [128, 512, 4096])
def test_scaling_advice(tokens):
    ratio = tokens / 512
    pde, dt = for_length("reaction_diffusion", tokens) if ratio >= 1 else (None, None)
    if pde:
        assert (pde.alpha, pde.beta, dt) == pytest.approx((0.1 / ratio**2, 0.02 / ratio**2, 1 / ratio))
    wave, dt = for_length(Wave(0.2), tokens, dt=0.5, gamma=0.5)
    assert (wave.c, dt) == pytest.approx((0.2 * ratio**0.5, 0.5 / ratio))
    assert for_length(Wave(0.2), 512) == (Wave(0.2), 1.0)


def test_scaling_keeps_to_what_is_stable_and_known():
    for tokens in (512, 10**6):
        wave, dt = for_length(Wave(1.0), tokens, gamma=1.0)
        assert dt <= wave.max_dt() * (1 + 1e-12)
    with pytest.raises(ValueError, match="is unstable for Diffusion"):
        for_length("diffusion", 64)  # 64 times the diffusion, 8 times the step
    with pytest.raises(ValueError, match="no other coefficients than alpha, beta, c"):
        for_length(Smoothing(), 1024)
    with pytest.raises(ValueError, match="must be at least 1"):
        for_length("wave", 0)
