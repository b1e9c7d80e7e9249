"""Gates against hand-written references, the papers' parameter counts, and what only some gates do."""

import itertools
import math
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from attractor.residual import gates
from attractor.residual.gates import (
    CBAM,
    DIA,
    ECA,
    FCA,
    IEBN,
    SE,
    SEM,
    SGE,
    SRM,
    StepNet,
    fca,
    make_gate,
)
from attractor.residual.gates.fca import TOP, cosines
from attractor.train import checkpoint

STAGES = (64, 128, 256)  # channels of ResNet164's branches, 18 blocks each


def count(module):
    return sum(p.numel() for p in module.parameters())


def pair(batch=4, channels=8, size=(5, 6), dtype=torch.float64):
    return torch.randn(2, batch, channels, *size, dtype=dtype).unbind(0)


def stir(gate, scale=0.5):
    """Random parameters and statistics, so that nothing is hidden by a zero."""
    with torch.no_grad():
        for p in gate.parameters():
            p.copy_(scale * torch.randn_like(p))
        for name, b in gate.named_buffers():
            if "running" in name:
                b.copy_(torch.rand_like(b) + 0.5)
    return gate


def sigma(z):
    return 1 / (1 + math.exp(-z))


# ---- parameter counts


@pytest.mark.parametrize(
    ("name", "total", "blocks"),
    [
        ("se", (1_906_258, 1_929_388), 18),
        ("cbam", (1_911_658, 1_934_788), 18),
        ("eca", (1_704_388, 1_727_518), 18),
        ("sem", (1_946_974, 1_970_104), 18),
        ("srm", (1_736_410, 1_759_540), 18),
        ("fca", (1_906_258, 1_929_388), 18),
        ("sge", (1_711_066, 1_734_196), 18),
        ("stepnet", (1_749_850, 1_772_980), 17),  # not on a stage's first block
    ],
)
def test_parameters_in_resnet164_are_the_papers(name, total, blocks):
    plain = (1_704_154, 1_727_284)
    added = sum(blocks * count(make_gate(name, c)) for c in STAGES)
    assert (plain[0] + added, plain[1] + added) == total
    assert count(make_gate(name, 64, identity=True)) == count(make_gate(name, 64))


def test_parameters_of_iebn_in_resnet164_are_the_papers():
    """It replaces the normalisations of the stem and the branches, not the shortcuts'."""
    widths = [16] + [w for p in (16, 32, 64) for w in (p, p, 4 * p) for _ in range(18)]
    added = sum(count(IEBN(w)) - count(nn.BatchNorm2d(w)) for w in widths)
    assert 1_704_154 + added == 1_728_378
    assert count(IEBN(5)) == 4 * 5


def test_parameters_of_dia_are_ten_channels_squared_over_the_reduction():
    for c in STAGES:
        assert count(DIA(c)) == 10 * c * c // 4 + 2 * (c // 4) + 8 * c


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 6), ({"iebn": "inside"}, 6),
        ({"inputs": "x"}, 5), ({"inputs": "next"}, 5), ({"inputs": "difference"}, 5),
        ({"adaptor": "a"}, 4), ({"adaptor": "c"}, 4),
        ({"adaptor": "d"}, 8), ({"adaptor": "d", "iebn": "inside"}, 8), ({"adaptor": "d", "inputs": "x"}, 4),
    ],
)  # fmt: skip
def test_parameters_of_the_adaptors(options, expected):
    assert count(StepNet(64, **options)) == expected * 64


def test_parameters_of_the_adaptor_with_two_layers():
    assert count(StepNet(64, adaptor="b")) == 128 * 4 + 4 + 4 * 64 + 64
    assert count(StepNet(64, adaptor="b", inputs="difference")) == count(SE(64))


# ---- hand-written references


def test_se_is_two_layers_on_the_means():
    gate, (f, _) = stir(SE(8, reduction=4, dtype=torch.float64)), pair()
    w1, b1, w2, b2 = gate.parameters()
    for n in range(4):
        means = [f[n, c].mean().item() for c in range(8)]
        hidden = [
            max(0.0, b1[h].item() + sum(w1[h, c].item() * means[c] for c in range(8))) for h in range(2)
        ]
        for c in range(8):
            z = b2[c].item() + sum(w2[c, h].item() * hidden[h] for h in range(2))
            assert gate.weights(f)[n, c, 0, 0].item() == pytest.approx(sigma(z), rel=1e-12)


def test_reduction_leaves_at_least_one_channel():
    assert count(SE(5)) == 5 + 1 + 5 + 5
    with pytest.raises(ValueError, match=r"SE\(reduction=0\)"):
        SE(5, reduction=0)


def test_eca_uses_neighbours_and_pads_with_zeros():
    gate, (f, _) = stir(ECA(8, kernel_size=3, dtype=torch.float64)), pair()
    kernel, f_weights = gate.conv.weight[0, 0], gate.weights(f)
    for n, c in itertools.product(range(4), range(8)):
        near = [f[n, j].mean().item() if 0 <= j < 8 else 0.0 for j in (c - 1, c, c + 1)]
        z = sum(k.item() * v for k, v in zip(kernel, near))
        assert f_weights[n, c, 0, 0].item() == pytest.approx(sigma(z), rel=1e-12)


def test_eca_kernel_is_the_papers():
    for channels in range(1, 2100):
        t = int(abs((math.log2(channels) + 1) / 2))
        assert ECA(channels, device="meta").conv.kernel_size == (t if t % 2 else t + 1,)
    with pytest.raises(ValueError, match="pass an odd number"):
        ECA(8, kernel_size=4)


def test_sem_multiplies_three_weighted_excitations():
    gate, (f, _) = stir(SEM(8, reduction=4, kernel_size=3, dtype=torch.float64)), pair()
    mean = f.mean((2, 3))
    w = torch.sigmoid(mean @ gate.decide.weight.T + gate.decide.bias)
    se, eca = SE(8, reduction=4, dtype=torch.float64), ECA(8, kernel_size=3, dtype=torch.float64)
    se.excitation, eca.conv = gate.excitation, gate.conv
    logits = (
        se.weights(f)[..., 0, 0].logit(),
        eca.weights(f)[..., 0, 0].logit(),
        gate.scale * mean + gate.shift,
    )
    expected = torch.ones(4, 8, dtype=torch.float64)
    for i, z in enumerate(logits):
        expected = expected * torch.sigmoid(z * w[:, i : i + 1])
    torch.testing.assert_close(gate.weights(f)[..., 0, 0], expected)


def test_cbam_gates_channels_then_pixels():
    gate, (f, _) = stir(CBAM(8, reduction=4, dtype=torch.float64)).eval(), pair()
    layers = lambda z: gate.excitation.expand(gate.excitation.reduce(z).relu())
    channels = torch.sigmoid(layers(f.mean((2, 3))) + layers(f.flatten(2).max(2).values))[
        ..., None, None
    ]
    g = f * channels
    seen = torch.stack((g.mean(1), g.max(1).values), 1)
    pixels = torch.sigmoid(gate.norm(nn.functional.conv2d(seen, gate.conv.weight, padding=3)))
    torch.testing.assert_close(gate(f), g * pixels)
    torch.testing.assert_close(gate.weights(f), channels * pixels)


def test_srm_normalises_a_sum_of_mean_and_deviation():
    gate, (f, _) = stir(SRM(8, dtype=torch.float64)), pair()
    factor = gate.weights(f)
    for c in range(8):
        z = []
        for n in range(4):
            values = f[n, c].flatten().tolist()
            mean = sum(values) / 30
            deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / 30 + 1e-5)
            z.append(gate.style[0, c].item() * mean + gate.style[1, c].item() * deviation)
        centre = sum(z) / 4
        spread = math.sqrt(sum((v - centre) ** 2 for v in z) / 4 + 1e-5)
        for n in range(4):
            y = gate.norm.weight[c].item() * (z[n] - centre) / spread + gate.norm.bias[c].item()
            assert factor[n, c, 0, 0].item() == pytest.approx(sigma(y), rel=1e-10)


@pytest.mark.parametrize("make", [SRM, StepNet])
def test_means_in_half_precision_are_accumulated_in_float32(make):
    """Every value is a bfloat16, but a mean of 200.25 is not: the nearest are 200 and 201."""
    f = torch.full((2, 8, 4, 4), 200.0)
    f[1, :, 0] = 201.0
    x, gate = torch.zeros_like(f), make(8).eval()
    with torch.no_grad():
        for p in gate.parameters():
            p.fill_(1.0)
        for norm in gate.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.fill_(200.0)
    with torch.autocast("cpu", torch.bfloat16):
        half = gate.weights(f.bfloat16(), x.bfloat16())
    assert (half[0] != half[1]).all()
    torch.testing.assert_close(half.float(), gate.weights(f, x), rtol=4e-3, atol=0)


def test_sge_compares_pixels_with_the_mean_of_their_group():
    gate, (f, _) = stir(SGE(8, groups=2, dtype=torch.float64)), pair()
    factor = gate.weights(f)
    for n, g in itertools.product(range(4), range(2)):
        group = f[n, 4 * g : 4 * g + 4]
        likeness = sum(group[c] * group[c].mean() for c in range(4))
        standard = (likeness - likeness.mean()) / likeness.std(correction=0)
        expected = torch.sigmoid(gate.scale[g] * standard + gate.shift[g])
        for c in range(4 * g, 4 * g + 4):
            torch.testing.assert_close(factor[n, c], expected)


def test_sge_in_half_precision_of_maps_that_do_not_vary():
    gate = stir(SGE(8, groups=2, dtype=torch.float16))
    for f in (torch.randn(2, 8, 1, 1), torch.ones(2, 8, 3, 3)):  # the deviation is eps alone
        want = gate.weights(f.double())
        torch.testing.assert_close(gate.weights(f.half()).double(), want, rtol=2e-3, atol=0)


def test_default_groups_of_sge_have_equal_size():
    assert [SGE(c).groups for c in (1, 6, 64, 96, 128, 67, 2048)] == [1, 6, 64, 48, 64, 1, 64]
    with pytest.raises(ValueError, match=r"SGE\(96, groups=64\).*divisor of 96"):
        SGE(96, groups=64)


# ---- FCA


def test_fca_is_se_on_cosine_coefficients():
    gate, (f, _) = stir(FCA(32, dtype=torch.float64)), pair(channels=32, size=(7, 14))
    z = torch.zeros(4, 32, dtype=torch.float64)
    for c in range(32):
        u, v = TOP[c // 2][0], 2 * TOP[c // 2][1]  # 14 is twice the grid
        for i, j in itertools.product(range(7), range(14)):
            wave = math.cos(math.pi * u * (i + 0.5) / 7) * math.cos(math.pi * v * (j + 0.5) / 14)
            z[:, c] += f[:, c, i, j] * wave * math.sqrt(2) ** ((u > 0) + (v > 0)) / 98
    expected = torch.sigmoid(gate.excitation(z))
    torch.testing.assert_close(gate.weights(f)[..., 0, 0], expected)


def test_fca_of_the_lowest_frequency_is_se():
    one, all16, se = (
        FCA(32, frequencies=1, dtype=torch.float64),
        FCA(32, dtype=torch.float64),
        SE(32, dtype=torch.float64),
    )
    one.excitation = all16.excitation = se.excitation
    f, _ = pair(channels=32, size=(9, 11))
    torch.testing.assert_close(one(f), se(f))
    assert (all16(f) - se(f)).abs().max() > 1e-3
    dot = f[..., :1, :1]
    torch.testing.assert_close(all16(dot), se(dot))


@pytest.mark.parametrize("length", [1, 2, 3, 6, 7, 8, 32, 56, 100])
def test_fca_waves_are_orthonormal_frequencies_of_the_size(length):
    waves = cosines(torch.arange(7), length, torch.float64)
    used = [u * length // 7 for u in range(7)]
    assert max(used) < length
    product = waves @ waves.T / length
    same = torch.tensor([[float(a == b) for b in used] for a in used], dtype=torch.float64)
    torch.testing.assert_close(product, same, rtol=0, atol=1e-12)
    torch.testing.assert_close(cosines(torch.arange(7), length, torch.float32), waves.float())


@pytest.mark.parametrize("channels", [1, 5, 16, 40, 100])
def test_fca_splits_any_number_of_channels_evenly(channels):
    found = FCA(channels).frequency.T.tolist()
    used = min(16, channels)
    sizes = [found.count(list(TOP[i])) for i in range(used)]
    assert sum(sizes) == channels
    assert max(sizes) - min(sizes) <= 1
    assert found == sorted(found, key=lambda uv: TOP.index(tuple(uv)))  # neighbours together
    with pytest.raises(ValueError, match="pass 1 to 16"):
        FCA(channels, frequencies=17)


def test_fca_caches_a_bounded_number_of_waves():
    gate, f = FCA(16), torch.rand(2, 16, 8, 8)
    fca.cached_cosines.cache_clear()
    with torch.inference_mode():
        gate(f)
    made = fca.cached_cosines.cache_info().misses
    gate(f.requires_grad_()).sum().backward()  # waves made in inference serve in training
    assert fca.cached_cosines.cache_info().misses == made == 2
    for size in range(1, 100):
        gate(torch.rand(1, 16, size, size + 1))
    assert fca.cached_cosines.cache_info().currsize <= 128


def test_fca_does_not_cache_waves_of_transforms():
    """Those of FakeTensorMode and of transforms of torch.func; a later call gets numbers."""
    gate, f = stir(FCA(16)), torch.rand(2, 16, 9, 11)
    with torch.no_grad():
        want = gate(f)
    fca.cached_cosines.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert gate(mode.from_tensor(f)).shape == f.shape
    torch.func.grad(lambda f: gate(f).sum())(f)
    torch.vmap(gate)(f[:, None])
    torch.func.functional_call(gate, dict(gate.named_parameters()), (f,))
    with torch.no_grad():
        assert torch.equal(gate(f), want)


def test_fca_loads_other_frequencies():
    gate, other, f = FCA(16), FCA(16, frequencies=1), torch.rand(2, 16, 8, 8)
    assert not torch.equal(gate(f), other(f))
    gate.load_state_dict(other.state_dict())
    assert torch.equal(gate(f), other(f))


# ---- IEBN


def test_iebn_scales_what_is_normalised_and_not_its_shift():
    norm, (f, _) = stir(IEBN(8, dtype=torch.float64)), pair()
    out = norm(f)
    mean, variance = f.mean((0, 2, 3)), f.var((0, 2, 3), correction=0)
    for c in range(8):
        for n in range(4):
            delta = sigma(norm.scale[c].item() * f[n, c].mean().item() + norm.shift[c].item())
            standard = (f[n, c] - mean[c]) / (variance[c] + 1e-5).sqrt()
            torch.testing.assert_close(out[n, c], norm.weight[c] * standard * delta + norm.bias[c])


@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None, "eps": 1e-3},
     {"affine": False, "track_running_stats": False}],
)  # fmt: skip
def test_iebn_of_a_batch_normalisation_equals_it_before_training(options):
    plain = nn.BatchNorm2d(8, dtype=torch.float64, **options)
    stir(plain)
    plain.requires_grad_(False)
    for training in (True, False):
        made = IEBN.of(plain.train(training))
        if plain.affine or plain.track_running_stats:
            assert made.scale.dtype == torch.float64
        made, twin = made.double(), deepcopy(plain)
        for _ in range(2):
            f = pair()[0] * 3 + 1
            assert torch.equal(made(f), twin(f))
        assert made.training == training
        for name, value in twin.state_dict().items():
            assert torch.equal(made.state_dict()[name], value)
        assert (made.eps, made.momentum) == (plain.eps, plain.momentum)
        assert [n for n, p in made.named_parameters() if p.requires_grad] == ["scale", "shift"]
    assert IEBN.of(plain, identity=False).shift.eq(-1).all()


def test_iebn_contains_a_batch_normalisation_for_conversions():
    """What looks for batch normalisations must not take IEBN for one, and so drop its scale and shift."""
    gate, f = stir(IEBN(8)).eval(), pair(dtype=torch.float32)[0]
    before = gate(f)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(deepcopy(gate))
    assert isinstance(synced, IEBN)
    assert isinstance(synced.norm, nn.SyncBatchNorm)
    torch.testing.assert_close(synced(f), before, rtol=1e-6, atol=1e-6)
    assert synced.state_dict().keys() == gate.state_dict().keys()
    state = gate.state_dict()
    assert set(state) - {"scale", "shift", "doubled"} == set(nn.BatchNorm2d(8).state_dict())
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(state[name], getattr(gate, name))
        assert torch.equal(state[name], getattr(gate.norm, name))
    with pytest.raises(AttributeError):
        gate.momentum = 0.5  # is set where it counts: gate.norm.momentum
    torch.optim.swa_utils.update_bn([f, f], gate.train())
    torch.testing.assert_close(gate.running_mean, f.mean((0, 2, 3)))


def test_iebn_lists_missing_weights_of_a_batch_normalisation():
    state = {k: v for k, v in nn.BatchNorm2d(8).state_dict().items() if k != "bias"}
    missing, unexpected = nn.ModuleDict({"bn": IEBN(8)}).load_state_dict(
        {f"bn.{k}": v for k, v in state.items()}, strict=False
    )
    assert (sorted(missing), unexpected) == (["bn.bias", "bn.scale", "bn.shift"], [])
    del state["num_batches_tracked"]  # as in states of old versions of torch
    state["bias"] = torch.zeros(8)
    assert IEBN(8).load_state_dict(state, strict=False).missing_keys == ["scale", "shift"]


def test_iebn_loads_a_batch_normalisation():
    plain, made = stir(nn.BatchNorm2d(8)), IEBN(8)
    missing, unexpected = made.load_state_dict(plain.state_dict(), strict=False)
    assert (missing, unexpected) == (["scale", "shift"], [])
    assert torch.equal(made.running_var, plain.running_var)
    for wrong in (made, nn.BatchNorm1d(8), nn.GroupNorm(2, 8)):
        with pytest.raises(TypeError, match=r"IEBN.of takes an nn.BatchNorm2d, not a"):
            IEBN.of(wrong)


# ---- StepNet


@pytest.mark.parametrize("training", [True, False])
def test_stepnet_against_a_loop_over_channels(training):
    gate, (f, x) = stir(StepNet(8, dtype=torch.float64)).train(training), pair()
    ((norm, ie),) = gate.heads
    running = norm.running_mean.clone(), norm.running_var.clone()
    factor = gate.weights(f, x)
    ahead = x + f
    for c in range(8):
        z = [
            gate.mix[c, 0].item() * x[n, c].mean().item()
            + gate.mix[c, 1].item() * ahead[n, c].mean().item()
            for n in range(4)
        ]
        centre, variance = (
            (sum(z) / 4, sum((v - sum(z) / 4) ** 2 for v in z) / 4)
            if training
            else (r[c].item() for r in running)
        )
        for n in range(4):
            y = (
                norm.weight[c].item() * (z[n] - centre) / math.sqrt(variance + 1e-5)
                + norm.bias[c].item()
            )
            expected = sigma(ie.scale[c].item() * y + ie.shift[c].item())
            assert factor[n, c, 0, 0].item() == pytest.approx(expected, rel=1e-10)


def test_stepnet_is_the_papers_group_convolution_of_interleaved_states():
    gate, (f, x) = stir(StepNet(8, dtype=torch.float64)).eval(), pair()
    conv = nn.Conv2d(16, 8, 1, groups=8, bias=False, dtype=torch.float64)
    conv.weight.data = gate.mix.data[..., None, None].clone()
    pooled = [t.mean((2, 3), keepdim=True) for t in (x, x + f)]
    interleaved = torch.stack(pooled, 2).flatten(1, 2)
    torch.testing.assert_close(gate.weights(f, x), torch.sigmoid(gate.heads[0](conv(interleaved))))
    concatenated = torch.cat(pooled, 1)  # groups of two then hold channels 0 and 1 of x
    assert (gate.weights(f, x) - torch.sigmoid(gate.heads[0](conv(concatenated)))).abs().max() > 1e-2


def test_a_step_size_of_stepnet_depends_on_its_channel_only():
    gate = stir(StepNet(6, dtype=torch.float64)).eval()
    f, x = (t.requires_grad_() for t in pair(1, 6))
    factor = gate.weights(f, x).flatten()
    for c in range(6):
        for seen in torch.autograd.grad(factor[c], (f, x), retain_graph=True):
            assert [bool(seen[0, k].abs().max() > 0) for k in range(6)] == [k == c for k in range(6)]


@pytest.mark.parametrize("inputs", ["pair", "x", "next", "difference"])
@pytest.mark.parametrize("adaptor", ["stepnet", "a", "b", "c", "d"])
def test_adaptors_depend_on_their_inputs_only(inputs, adaptor):
    gate = stir(StepNet(8, inputs=inputs, adaptor=adaptor, reduction=1, dtype=torch.float64), 2).eval()
    f, x = pair(size=(1, 2))
    other, factor = torch.randn_like(f), gate.weights(f, x)
    changed = {"f": (other, x), "x": (f, other), "x, not x + f": (f + 1, x - 1)}
    seen = {
        what for what, given in changed.items() if (gate.weights(*given) - factor).abs().max() > 1e-6
    }
    unseen = {"pair": set(), "x": {"f"}, "next": {"x, not x + f"}, "difference": {"x"}}
    assert seen == changed.keys() - unseen[inputs]


def test_adaptors_are_built_as_described():
    f, x = pair()
    now, ahead = x.mean((2, 3), keepdim=True), (x + f).mean((2, 3), keepdim=True)
    make = lambda **options: stir(StepNet(8, reduction=2, dtype=torch.float64, **options)).eval()
    a, b, c, d = (make(adaptor=name) for name in "abcd")
    mixed = lambda gate: gate.mix[:, :1, None] * now + gate.mix[:, 1:, None] * ahead
    torch.testing.assert_close(a.weights(f, x), torch.sigmoid(a.heads[0][0](mixed(a))))
    z = b.excitation(torch.cat((now, ahead), 1)[..., 0, 0])
    torch.testing.assert_close(b.weights(f, x)[..., 0, 0], torch.sigmoid(z))
    ((ie,),) = c.heads
    expected = torch.sigmoid(ie.scale[:, None, None] * mixed(c) + ie.shift[:, None, None])
    torch.testing.assert_close(c.weights(f, x), expected)
    first, second = d.heads
    torch.testing.assert_close(d.weights(f, x), torch.sigmoid(first(now) + second(ahead)))
    inside = make(iebn="inside")
    ((norm,),) = inside.heads
    z = mixed(inside)
    delta = torch.sigmoid(norm.scale[:, None, None] * z + norm.shift[:, None, None])
    standard = (z - norm.running_mean[:, None, None]) / (
        norm.running_var[:, None, None] + norm.eps
    ).sqrt()
    y = norm.weight[:, None, None] * standard * delta + norm.bias[:, None, None]
    torch.testing.assert_close(inside.weights(f, x), torch.sigmoid(y))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"adaptor": a, "inputs": i}
        for a in ("stepnet", "a", "b", "c", "d")
        for i in ("pair", "difference")
    ]
    + [{"iebn": "inside"}, {"iebn": "inside", "adaptor": "d"}],
)
def test_every_adaptor_can_start_at_one_and_learn(options, training):
    f, x = pair(dtype=torch.float32)
    gate = StepNet(8, identity=True, **options).train(training)
    out = gate(f, x)
    assert torch.equal(out, f)
    out.square().sum().backward()
    assert any(p.grad.abs().max() > 0 for p in gate.parameters())


def test_stepnet_starts_where_the_paper_says():
    f, x = pair()
    factor = StepNet(8, dtype=torch.float64).weights(f, x)
    torch.testing.assert_close(factor, torch.full_like(factor, sigma(-1)))


def test_error_messages_of_stepnet():
    f, x = pair(dtype=torch.float32)
    gate = StepNet(8)
    with pytest.raises(ValueError, match=r"looks at the shortcut as well; call gate\(f, x\)"):
        gate(f)
    assert StepNet(8, inputs="difference")(f).shape == f.shape
    with pytest.raises(ValueError, match="projected shortcut is the projection"):
        gate(f, x[:, :, ::2])
    for name, choice in (("inputs", "both"), ("adaptor", "e"), ("iebn", "before")):
        with pytest.raises(ValueError, match=rf"StepNet\({name}='{choice}'\); it is one of"):
            StepNet(8, **{name: choice})
    with pytest.raises(ValueError, match="does not have both BN and IE"):
        StepNet(8, adaptor="a", iebn="inside")


@pytest.mark.parametrize(
    "make", [StepNet, SRM, CBAM, IEBN, lambda c: StepNet(c, adaptor="d", iebn="inside")]
)
def test_one_sample_cannot_be_normalised_in_training(make):
    gate, (f, x) = make(8), pair(1, size=(1, 1), dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"one sample in training.*batches of at least 2.*or call \.eval\(\)"
    ):
        gate(f, x)
    assert gate.eval()(f, x).isfinite().all()
    free = StepNet(8, adaptor="c")
    assert free(f, x).isfinite().all()


def test_frozen_statistics_need_no_second_sample():
    gate, (f, x) = StepNet(8), pair(1, dtype=torch.float32)
    for module in gate.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    assert gate.training
    assert gate(f, x).isfinite().all()


# ---- DIA


def test_dia_is_the_papers_cell():
    gate = stir(DIA(8, dtype=torch.float64), 0.8)
    branches = [pair()[0] for _ in range(3)]
    h = c = torch.zeros(4, 8, dtype=torch.float64)
    gate.start()
    for f in branches:
        z = gate.read(f.mean((2, 3))) + gate.recall(h)
        i, forget, candidate, o = z[:, :8], z[:, 8:16], z[:, 16:24], z[:, 24:]
        c = torch.sigmoid(forget) * c + torch.sigmoid(i) * torch.tanh(candidate)
        h = torch.sigmoid(o) * torch.sigmoid(c)
        torch.testing.assert_close(gate.weights(f)[..., 0, 0], h)


def test_the_memory_of_dia_lasts_for_one_stage():
    gate, (f, g) = stir(DIA(8), 0.8), pair(dtype=torch.float32)
    run = lambda *branches: [gate(b) for b in branches][-1]
    gate.start()
    alone = run(g)
    gate.start()
    after_f = run(f, g)
    assert (alone - after_f).abs().max() > 1e-4
    for _ in range(2):  # a second forward repeats the first, and its graph is its own
        gate.start()
        out = run(f, g)
        assert torch.equal(out, after_f)
        out.sum().backward()


def test_dia_without_start_raises():
    gate, (f, _) = DIA(8), pair(dtype=torch.float32)
    gate(f)
    with pytest.raises(ValueError, match=r"DIA has a memory of 4 samples.*but f has 2.*call start\(\)"):
        gate(f[:2])
    gate.start()
    assert gate(f[:2]).shape == (2, 8, 5, 6)
    assert deepcopy(gate).memory is None
    assert not [k for k in gate.state_dict() if "memory" in k]


class Stage(nn.Module):
    """Three blocks that share a gate."""

    def __init__(self, gate):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.gate = gate

    def forward(self, x):
        self.gate.start()
        for conv in self.convs:
            x = x + self.gate(conv(x), x)
        self.gate.start()
        return x


@pytest.mark.parametrize(
    "name", ["dia", *(pytest.param(x, marks=pytest.mark.slow) for x in ("stepnet", "fca"))]
)
@pytest.mark.slow
def test_a_stage_compiles_without_graph_breaks_and_trains(name):
    stage = Stage(stir(make_gate(name, 8)))
    twin = deepcopy(stage)
    whole = torch.compile(twin, fullgraph=True, backend="aot_eager")
    optimisers = [torch.optim.SGD(s.parameters(), 0.1) for s in (stage, twin)]
    for step, batch in enumerate((4, 4, 2)):  # the last batch of an epoch is small
        x = torch.randn(batch, 8, 5, 5, generator=torch.Generator().manual_seed(step))
        outputs = []
        for run, optimiser in zip((stage, whole), optimisers):
            out = run(x)
            optimiser.zero_grad()
            out.square().mean().backward()
            optimiser.step()
            outputs.append(out)
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


# ---- the way in


def test_make_gate_takes_names_classes_and_functions():
    assert make_gate(None, 8) is None
    assert make_gate("none", 8) is None
    assert type(make_gate("se", 8)) is type(make_gate(SE, 8)) is SE
    assert (
        count(make_gate("se", 8, reduction=2))
        == count(make_gate(SE, 8, reduction=2))
        == 2 * 8 * 4 + 4 + 8
    )
    assert isinstance(make_gate(lambda c: nn.Conv2d(c, c, 1), 8), nn.Conv2d)
    assert make_gate(lambda c: None, 8) is None
    with pytest.raises(ValueError, match="no gate is called 'SE'; the names are none, se"):
        make_gate("SE", 8)
    with pytest.raises(TypeError, match="is a SE, but each block needs a gate of its own"):
        make_gate(SE(8), 8)
    with pytest.raises(TypeError, match="gate returned a int for 8 channels"):
        make_gate(lambda c: c, 8)
    with pytest.raises(TypeError, match="gate = 3 is not a name"):
        make_gate(3, 8)


@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("name", gates.BY_NAME)
def test_a_gate_adopts_identity_from_a_state_dict(name, identity):
    saved = stir(make_gate(name, 8, identity=identity)).eval()
    f, x = pair(dtype=torch.float32)
    expected = saved(f, x)
    for state in (saved.state_dict(), dict(saved.state_dict())):  # as safetensors: without metadata
        other = make_gate(name, 8, identity=not identity).eval()
        other.load_state_dict(state)
        assert other.identity is identity
        assert torch.equal(other(f, x), expected)
    older = {key: value for key, value in saved.state_dict().items() if key != "doubled"}
    kept = dict(older)
    same, other = (make_gate(name, 8, identity=i).eval() for i in (identity, not identity))
    for gate in (same, other):  # nothing is told: nothing changes
        gate.load_state_dict(older, strict=True)
    assert older.keys() == kept.keys()
    assert torch.equal(same(f, x), expected)
    assert other.identity is not identity
    assert checkpoint.completed(same, older).keys() == same.state_dict().keys()
    with torch.device("meta"):
        shell = make_gate(name, 8, identity=not identity)
    shell.load_state_dict(saved.state_dict(), assign=True)
    assert shell.identity is identity


def test_attributes_of_gate_classes():
    kinds = lambda fact: {name for name, cls in gates.BY_NAME.items() if getattr(cls, fact)}
    assert kinds("identity_blocks_only") == kinds("needs_x") == {"stepnet"}
    assert kinds("shared") == {"dia"}
    assert kinds("normalisation") == {"iebn"}
    assert {n for n, cls in gates.BY_NAME.items() if not issubclass(cls, gates.Gate)} == {"iebn"}


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", gates.BY_NAME)
def test_gates_compile_with_inductor(name, device):
    f, x = (t.to(device, memory_format=torch.channels_last) for t in pair(8, 64, (8, 8), torch.float32))
    one = make_gate(name, 64, identity=True, device=device)
    plain = nn.BatchNorm2d(64, device=device) if name == "iebn" else nn.Identity()
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
            one.start()
            out = one(f.to(dtype), x.to(dtype))
            assert torch.equal(out, plain(f.to(dtype)))
            assert out.is_contiguous(memory_format=torch.channels_last)
    gate = stir(make_gate(name, 64), 0.2)
    twin = deepcopy(gate).to(device)
    whole = torch.compile(twin, fullgraph=True)
    exact = deepcopy(gate).double()(f.cpu().double(), x.cpu().double())
    for run in (twin, whole):
        twin.start()
        torch.testing.assert_close(run(f, x).double().cpu(), exact, rtol=1e-3, atol=1e-4)
