"""timm's networks with gates: by name, and in timm's slot for attention."""

import copy
import warnings

import pytest
import torch
from torch import nn

import attractor as at
from attractor.residual import gated_blocks, resnet34, resnet50, resnet101, resnet_cifar
from attractor.residual.attach import SharedGate
from attractor.residual.gates import BY_NAME
from attractor.residual.insert import insert_gates

timm = pytest.importorskip("timm")
from attractor.integrations.timm import GATES, NAMES, attn_layer, register  # noqa: E402

register()
SLOT = ("se", "cbam", "eca", "sem", "srm", "fca", "sge")
OURS = {"resnet34": resnet34, "resnet50": resnet50, "resnet101": resnet101}


def unsettled(model):
    """Normalisations as of a trained network: no branch is 0."""
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.normal_(norm.running_mean, 0, 0.2)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        nn.init.uniform_(norm.weight, 0.3, 1.0)
        nn.init.normal_(norm.bias, 0, 0.2)
    return model


def stirred(model):
    """All gates away from their start, so that what they compute is seen."""
    for gate in gated_blocks(model).values():
        for parameter in gate.parameters():
            nn.init.normal_(parameter, 0, 0.5)
    return model


def count(model):
    return sum(p.numel() for p in model.parameters())


def images(size=64, channels=3):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


def train_once(model, x):
    model.train()(x).square().mean().backward()
    lacking = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not lacking


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    return unsettled(timm.create_model("resnet34", num_classes=1000)).eval()


# Names


def test_registering_again_changes_nothing():
    before = {name: timm.model_entrypoint(name) for name in NAMES}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert register() == list(NAMES)
    assert before == {name: timm.model_entrypoint(name) for name in NAMES}


def test_timm_lists_them():
    assert set(timm.list_models("*stepnet*")) == {
        "resnet34_stepnet",
        "resnet50_stepnet",
        "resnet101_stepnet",
        "resnet83_cifar_stepnet",
        "resnet164_cifar_stepnet",
    }
    assert set(NAMES) <= set(timm.list_models())
    assert not set(NAMES) & set(timm.list_models(pretrained=True, include_tags=False))
    assert at.integrations.timm.resnet50_stepnet is timm.model_entrypoint("resnet50_stepnet")


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_plain_networks_and_the_gates(name):
    backbone, gate = NAMES[name]
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=10)
        if backbone in OURS:
            bare = timm.create_model(backbone, num_classes=10)
            assert count(bare) == count(OURS[backbone](10))
            assert count(model) == count(OURS[backbone](10, gate=gate)) > count(bare)
        else:
            depth = int(backbone.removeprefix("resnet").removesuffix("_cifar"))
            assert count(model) == count(resnet_cifar(depth, 10, gate))


def test_parameters_of_the_paper():
    with torch.device("meta"):
        assert count(timm.create_model("resnet164_cifar")) == 1_704_154
        assert count(timm.create_model("resnet164_cifar_stepnet")) == 1_749_850
        assert count(timm.create_model("resnet164_cifar_stepnet", num_classes=100)) == 1_772_980
        difference = count(timm.create_model("resnet50_stepnet")) - count(timm.create_model("resnet50"))
    # 6 C in the blocks with an identity shortcut
    assert difference == 6 * (2 * 256 + 3 * 512 + 5 * 1024 + 2 * 2048)


# What they compute


@pytest.mark.parametrize("gate", GATES)
def test_forward_and_backward(gate):
    model = timm.create_model(f"resnet34_{gate}", num_classes=10)
    assert len(gated_blocks(model)) == (13 if gate == "stepnet" else 16)
    assert model(images()).shape == (2, 10)
    train_once(model, images())


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet50_stepnet", 64),
        ("resnet83_cifar", 16),
        ("resnet83_cifar_stepnet", 16),
        ("resnet101_stepnet", 64),
        ("resnet164_cifar_stepnet", 16),
    ],
)
def test_other_depths(name, size):
    model = timm.create_model(name, num_classes=10)
    assert model(images(size)).shape == (2, 10)
    train_once(model, images(size))


@pytest.mark.parametrize("gate", GATES)
def test_the_same_network_as_ours(gate):
    ours = stirred(unsettled(resnet34(10, gate=gate))).eval()
    theirs = timm.create_model(f"resnet34_{gate}", num_classes=10).eval()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(theirs(images()), ours(images()), rtol=1e-4, atol=1e-4)


def test_small_networks_are_ours_too():
    ours = stirred(unsettled(resnet_cifar(83, 10, "stepnet"))).eval()
    theirs = timm.create_model("resnet83_cifar_stepnet").eval()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(theirs(images(32)), ours(images(32)), rtol=1e-4, atol=1e-4)
        assert theirs.forward_features(images(32)).shape == (2, 256, 8, 8)
    assert theirs.pretrained_cfg["input_size"] == (3, 32, 32)


def test_options_of_timm():
    model = timm.create_model("resnet34_stepnet", num_classes=7, in_chans=1, drop_path_rate=0.1)
    assert model(images(32, 1)).shape == (2, 7)
    model.reset_classifier(3)
    assert model(images(32, 1)).shape == (2, 3)
    model.reset_classifier(0, "")
    assert model(images(32, 1)).shape == (2, 512, 1, 1)
    assert model.pretrained_cfg["architecture"] == "resnet34_stepnet"
    assert model.pretrained_cfg["mean"] == timm.create_model("resnet34").pretrained_cfg["mean"]


def test_options_of_gates():
    with torch.device("meta"):
        model = timm.create_model(
            "resnet34_stepnet", where=["layer3.1"], gate_options={"inputs": "difference"}
        )
    (gate,) = gated_blocks(model).values()
    assert gate.inputs == "difference"
    with pytest.raises(ValueError, match=r"inputs='nothing'.*it is one of"):
        timm.create_model("resnet34_stepnet", gate_options={"inputs": "nothing"})


def test_state_and_copies():
    model = stirred(unsettled(timm.create_model("resnet34_dia", num_classes=5))).eval()
    again = timm.create_model("resnet34_dia", num_classes=5).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = model(images(32))
        assert torch.equal(again(images(32)), expected)
        assert torch.equal(copy.deepcopy(model)(images(32)), expected)
    assert any(isinstance(gate, SharedGate) for gate in gated_blocks(again).values())


def test_checkpointed_blocks_have_the_same_gradients():
    model = unsettled(timm.create_model("resnet34_stepnet", num_classes=5, where="all")).eval()
    gradients = []
    for enabled in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enabled)
        model(images(32)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*gradients)


# Features


@pytest.mark.parametrize("kind", ["list", "dict", "hook", "getter", "fx"])
def test_features(kind):
    whole = stirred(unsettled(timm.create_model("resnet34_dia", num_classes=0))).eval()
    model = timm.create_model("resnet34_dia", features_only=True, feature_cls=kind).eval()
    inside = {"hook": "body", "getter": "model", "fx": "graph_module"}.get(kind, "")
    # In a traced network, whether a gate is doubled is a constant.
    keys = model.get_submodule(inside).load_state_dict(whole.state_dict(), strict=kind != "fx")
    assert not keys.missing_keys
    assert all(key.endswith(".doubled") for key in keys.unexpected_keys)
    with torch.no_grad():
        found, expected = model(images()), whole.forward_intermediates(images(), intermediates_only=True)
    found = list(found.values()) if isinstance(found, dict) else found
    assert [tuple(f.shape) for f in found] == [
        (2, 64, 32, 32), (2, 64, 16, 16), (2, 128, 8, 8), (2, 256, 4, 4), (2, 512, 2, 2),
    ]  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_features_of_small_networks():
    model = timm.create_model("resnet83_cifar_stepnet", features_only=True)
    shapes = [tuple(f.shape[1:]) for f in model(images(32))]
    assert shapes == [(16, 32, 32), (64, 32, 32), (128, 16, 16), (256, 8, 8)]
    assert model.feature_info.channels() == [16, 64, 128, 256]
    assert model.feature_info.reduction() == [1, 1, 2, 4]


# Trained weights


@pytest.mark.parametrize("gate", GATES)
def test_trained_networks_stay_what_they_are(plain, gate):
    weights = {"state_dict": plain.state_dict()}
    model = timm.create_model(
        f"resnet34_{gate}", pretrained=True, identity=True, pretrained_cfg_overlay=weights
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(images()), plain(images()), rtol=0, atol=1e-5)


def test_trained_weights_for_other_classes_and_channels(plain):
    weights = {"state_dict": plain.state_dict()}
    options = {"pretrained": True, "pretrained_cfg_overlay": weights, "num_classes": 7}
    model = timm.create_model("resnet34_stepnet", identity=True, in_chans=1, **options)
    assert model(images(32, 1)).shape == (2, 7)
    assert torch.equal(model.layer4[0].conv1.weight, plain.layer4[0].conv1.weight)
    with pytest.raises(ValueError, match=r"resnet34_stepnet: these are weights .* give identity=True"):
        timm.create_model("resnet34_stepnet", **options)


def test_weights_with_gates_are_loaded_as_they_are():
    trained = stirred(timm.create_model("resnet34_stepnet", num_classes=1000))
    weights = trained.state_dict()
    overlay = {"state_dict": weights}
    model = timm.create_model("resnet34_stepnet", pretrained=True, pretrained_cfg_overlay=overlay)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    del weights["layer1.1.gate.mix"]
    with pytest.raises(RuntimeError, match=r"Missing key.*layer1\.1\.gate\.mix"):
        timm.create_model("resnet34_stepnet", pretrained=True, pretrained_cfg_overlay=overlay)


def test_tags_are_the_plain_networks():
    with torch.device("meta"):
        tagged = timm.create_model("resnet50_stepnet.a1_in1k")
    assert tagged.pretrained_cfg["hf_hub_id"] == "timm/resnet50.a1_in1k"
    with pytest.raises(RuntimeError, match="Invalid pretrained tag"):
        timm.create_model("resnet50_stepnet.nothing")


def test_nobody_trained_the_small_networks():
    with pytest.raises(RuntimeError, match="No pretrained weights exist for resnet83_cifar_stepnet"):
        timm.create_model("resnet83_cifar_stepnet", pretrained=True)


# timm's slot


@pytest.mark.parametrize("name", SLOT)
def test_gates_in_the_slot(name):
    direct = timm.create_model("resnet18", block_args={"attn_layer": BY_NAME[name]}, num_classes=5)
    assert type(direct.layer1[0].se) is BY_NAME[name]
    train_once(direct, images())
    with torch.device("meta"):
        bare = timm.create_model("resnet18", num_classes=5)
        gates = sum(count(BY_NAME[name](block.bn2.num_features)) for layer in
                    (bare.layer1, bare.layer2, bare.layer3, bare.layer4) for block in layer)  # fmt: skip
        assert count(direct) == count(bare) + gates
        adapted = timm.create_model(
            "resnet18", block_args={"attn_layer": attn_layer(name)}, num_classes=5
        )
        assert count(adapted) == count(direct)


@pytest.mark.parametrize("name", SLOT)
def test_identity_in_the_slot(name):
    torch.manual_seed(0)
    bare = unsettled(timm.create_model("resnet18", num_classes=5)).eval()
    block_args = {"attn_layer": attn_layer(name, identity=True)}
    model = timm.create_model("resnet18", num_classes=5, block_args=block_args).eval()
    missing, unknown = model.load_state_dict(bare.state_dict(), strict=False)
    assert not unknown
    assert all(".se." in key for key in missing)
    with torch.no_grad():
        torch.testing.assert_close(model(images(32)), bare(images(32)), rtol=0, atol=1e-5)


def test_the_slot_does_what_insertion_does():
    torch.manual_seed(0)
    inserted = insert_gates(
        unsettled(timm.create_model("resnet18", num_classes=5)), "se", identity=False
    )
    slot = timm.create_model("resnet18", num_classes=5, block_args={"attn_layer": at.gates.SE})
    slot.load_state_dict({k.replace(".gate.", ".se."): v for k, v in inserted.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(slot.eval()(images(32)), inserted.eval()(images(32)))


def test_options_in_the_slot():
    layer = attn_layer("se", reduction=4)
    assert layer(64).excitation.reduce.out_features == 16
    assert layer(64, rd_ratio=1 / 16, act_layer=nn.SiLU).excitation.reduce.out_features == 16
    assert layer(64, device="meta", dtype=torch.float64).excitation.reduce.weight.dtype == torch.float64
    with pytest.raises(TypeError, match="ratio"):
        layer(64, ratio=4)
    with pytest.raises(ValueError, match="no gate is called 'nothing'"):
        attn_layer("nothing")


def test_stepnet_in_the_slot():
    layer = attn_layer("stepnet", inputs="difference")
    model = timm.create_model("resnet18", block_args={"attn_layer": layer}, num_classes=5)
    train_once(model, images())


@pytest.mark.parametrize(
    ("gate", "why"),
    [
        ("stepnet", "StepNet cannot be .* it looks at the shortcut"),
        (at.gates.StepNet, "StepNet cannot be .* inputs='difference'"),
        ("dia", "DIA cannot be .* shared by the blocks of a stage"),
        ("iebn", "IEBN cannot be .* batch normalisations"),
    ],
)
def test_gates_that_do_not_fit_the_slot(gate, why):
    with pytest.raises(ValueError, match=rf"{why}.*; use insert_gates"):
        timm.create_model("resnet18", block_args={"attn_layer": attn_layer(gate)})


# Stiffness


def test_probe_finds_blocks_and_gates():
    model = timm.create_model("resnet50_stepnet", num_classes=5, zero_init_last=False)
    found = at.probe(model, [images()])
    assert torch.bincount(found.stage).tolist() == [3, 4, 6, 3]
    gated = (~found.gates.isnan()).all(0)
    firsts = torch.tensor([0, 3, 7, 13])
    assert gated.sum() == 12
    assert not gated[firsts].any()
