"""Backbones for detectors: maps of the stages, frozen parts, and torchvision's Faster R-CNN on top."""

import pytest
import torch
from torch import nn

from attractor.residual.backbone import Backbone, resnet_backbone
from attractor.residual.insert import insert_gates
from attractor.residual.resnet import resnet50, resnet_cifar

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def small(gate="none", **options):
    torch.manual_seed(1)
    return Backbone(resnet_cifar(20, 5, gate, width=4), **{"out_indices": (0, 1, 2), **options})


def test_maps_are_the_stages():
    model = resnet_cifar(20, 5, "stepnet", width=4).eval()
    backbone = Backbone(model, (0, 1, 2)).eval()
    assert all(torch.equal(a, b) for a, b in zip(backbone(IMAGES), model.features(IMAGES), strict=True))
    assert backbone.out_channels == [16, 32, 64] == [x.shape[1] for x in backbone(IMAGES)]
    one = Backbone(model, [1])
    assert one.out_channels == [32]
    assert torch.equal(one(IMAGES)[0], model.features(IMAGES)[1])
    assert not any(name.startswith(("layer3", "fc")) for name in one.state_dict())  # not needed
    assert set(backbone.state_dict()) == {n for n in model.state_dict() if not n.startswith("fc.")}


@pytest.mark.slow
def test_maps_of_a_resnet50():
    backbone = resnet_backbone(50, "stepnet")
    maps = backbone(torch.rand(2, 3, 64, 64))
    assert [tuple(x.shape) for x in maps] == [
        (2, 256, 16, 16),
        (2, 512, 8, 8),
        (2, 1024, 4, 4),
        (2, 2048, 2, 2),
    ]
    assert backbone.out_channels == [256, 512, 1024, 2048]
    sum(x.mean() for x in maps).backward()
    assert all(p.grad is not None for p in backbone.parameters())


@pytest.mark.parametrize("frozen", [-1, 0, 1, 2, 3])
def test_frozen_stages(frozen):
    backbone = small("stepnet", frozen_stages=frozen)
    before = {name: t.clone() for name, t in backbone.state_dict().items()}
    backbone.train()
    out = backbone(IMAGES)[-1]
    parts = ["conv1", "bn1", "layer1", "layer2", "layer3"]
    still = parts[: 2 + frozen] if frozen >= 0 else []
    for name, t in backbone.state_dict().items():
        if "running" in name:
            assert torch.equal(t, before[name]) == (name.split(".")[0] in still), name
    for name, p in backbone.named_parameters():
        assert p.requires_grad != (name.split(".")[0] in still)
    if frozen < 3:
        out.sum().backward()
    assert not backbone.eval().training
    assert backbone.train().layer1.training == (frozen < 1)


def test_norm_eval_keeps_statistics():
    backbone = small("srm", norm_eval=True).train()
    before = {name: t.clone() for name, t in backbone.state_dict().items()}
    backbone(IMAGES[:1])  # one image is enough
    assert all(torch.equal(t, before[name]) for name, t in backbone.state_dict().items())
    assert all(p.requires_grad for p in backbone.parameters())


def test_parts_are_registered_in_the_order_of_their_calls():
    """What torchvision's IntermediateLayerGetter does with a ResNet."""
    model = resnet_cifar(20, 5, "dia", width=4).eval()
    x = IMAGES
    for name, part in model.named_children():
        x = part(x)
        if name == "layer3":
            break
    assert torch.equal(x, model.features(IMAGES)[-1])
    assert model.inplanes == 64


def test_refused_arguments():
    with pytest.raises(ValueError, match=r"out_indices \(3,\) must be among 0 to 2"):
        small(out_indices=(3,))
    with pytest.raises(ValueError, match="frozen_stages = 5"):
        small(frozen_stages=5)
    with pytest.raises(ValueError, match=r"Linear has no parts conv1, \.\.\., layer1"):
        Backbone(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="depth = 18 is not one of 34, 50, 101"):
        resnet_backbone(18)


def targets():
    boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0], [20.0, 10.0, 60.0, 50.0]])
    return [
        {"boxes": boxes, "labels": torch.tensor([1, 2])},
        {"boxes": boxes[:1], "labels": torch.tensor([2])},
    ]


def test_faster_rcnn():
    detection = pytest.importorskip("torchvision.models.detection")
    pyramid = resnet_backbone(50, "stepnet", frozen_stages=1).with_fpn(64)
    assert pyramid.out_channels == 64
    model = detection.FasterRCNN(pyramid, num_classes=3, min_size=64, max_size=64)
    images = [torch.rand(3, 64, 64), torch.rand(3, 60, 64)]
    losses = model(images, targets())
    sum(losses.values()).backward()
    for name, p in pyramid.named_parameters():
        assert p.requires_grad == (p.grad is not None), name
        assert p.grad is None or p.grad.isfinite().all()
    gates = [p for name, p in pyramid.named_parameters() if ".gate." in name and p.requires_grad]
    assert gates
    assert any(p.grad.abs().max() > 0 for p in gates)
    found = model.eval()(images)
    assert [set(f) for f in found] == [{"boxes", "labels", "scores"}] * 2


def test_names_of_torchvisions_detector():
    detection = pytest.importorskip("torchvision.models.detection")
    theirs = detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    ours = detection.FasterRCNN(resnet_backbone(50).with_fpn(), 91)
    counters = {name for name in ours.state_dict() if name.endswith("num_batches_tracked")}
    assert set(ours.state_dict()) - counters == set(theirs.state_dict()) - counters


def test_torchvisions_helpers():
    utils = pytest.importorskip("torchvision.models._utils")
    from torchvision.models import resnet50 as theirs
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    stages = {f"layer{i + 1}": str(i) for i in range(4)}
    model = resnet50(gate="stepnet").eval()
    images = torch.rand(1, 3, 64, 64)
    maps = utils.IntermediateLayerGetter(model, stages)(images)
    assert all(torch.equal(a, b) for a, b in zip(maps.values(), model.features(images), strict=True))
    width = model.inplanes // 8
    pyramid = BackboneWithFPN(model, stages, [width, 2 * width, 4 * width, 8 * width], 32)
    assert list(pyramid(images)) == ["0", "1", "2", "3", "pool"]
    gated = Backbone(insert_gates(theirs(weights=None), "stepnet", "all")).eval()
    assert gated.out_channels == [256, 512, 1024, 2048] == [x.shape[1] for x in gated(images)]
