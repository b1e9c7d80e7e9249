"""ResNets as backbones of detectors: the feature maps of their stages.

`Backbone` returns a tuple of maps, as MMDetection's detectors expect. `Backbone.with_fpn` adds
torchvision's feature pyramid, for its `FasterRCNN`:

    backbone = resnet_backbone(50, "stepnet", weights="torchvision", frozen_stages=1)
    model = torchvision.models.detection.FasterRCNN(backbone.with_fpn(), num_classes=91)

For MMDetection, register the function once and name it in a configuration:

    mmdet.registry.MODELS.register_module("GatedResNet", module=resnet_backbone)
    model = dict(backbone=dict(type="GatedResNet", depth=50, gate="stepnet", norm_eval=True), ...)

Parts keep the network's names (`body.conv1`, `body.layer1.0.conv1`, ...), so that weights of
torchvision's detectors can be loaded. Gates that normalise over the batch (StepNet, SRM) need at least
two images per batch in training; with ``norm_eval=True`` one is sufficient.

>>> import torch
>>> backbone = resnet_backbone(34, "se")
>>> [list(x.shape) for x in backbone(torch.rand(1, 3, 64, 64))]
[[1, 64, 16, 16], [1, 128, 8, 8], [1, 256, 4, 4], [1, 512, 2, 2]]
>>> backbone.out_channels
[64, 128, 256, 512]
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from attractor.residual.finder import residual_blocks
from attractor.residual.resnet import check_images, resnet34, resnet50, resnet101


class Backbone(nn.Module):
    """The stages of a ResNet, without its classifier.

    Args:
        model: A ResNet of this library or torchvision, with or without gates. Its parts are shared, not
            copied.
        out_indices: Stages whose maps are returned, from 0.
        frozen_stages: Parts that are not trained and whose normalisations keep their statistics, with
            their gates: -1 is none, 0 the stem, n the stem and the first n stages.
        norm_eval: Keep the statistics of all batch normalisations.
    """

    def __init__(
        self,
        model: nn.Module,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_stages: int = -1,
        norm_eval: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; pass a ResNet, an nn.Module")
        if not isinstance(out_indices, Sequence):
            raise TypeError(f"out_indices = {out_indices!r}; pass a list such as (0, 1, 2, 3)")
        names = [name for name, _ in model.named_children()]
        stages = [name for name in names if name.startswith("layer")]
        if not stages or "conv1" not in names:
            raise ValueError(
                f"{type(model).__name__} has no parts conv1, ..., layer1, layer2, ... as torchvision's "
                f"ResNets have; it has {', '.join(names)}"
            )
        if not out_indices or not set(out_indices) <= set(range(len(stages))):
            raise ValueError(f"out_indices {tuple(out_indices)} must be among 0 to {len(stages) - 1}")
        if not -1 <= frozen_stages <= len(stages):
            raise ValueError(f"frozen_stages = {frozen_stages} must be among -1 (none) to {len(stages)}")
        stages = stages[: max(out_indices) + 1]
        for name, part in model.named_children():
            self.add_module(name, part)
            if name == stages[-1]:
                break
        self.stages, self.out_indices = stages, tuple(sorted(out_indices))
        self.frozen_stages, self.norm_eval = frozen_stages, norm_eval
        width = {block.stage: block.channels for block in residual_blocks(self)}
        self.out_channels = [width[stages[i]] for i in self.out_indices]
        for part in self.frozen():
            part.requires_grad_(False)
        self.train(self.training)

    def frozen(self) -> list[nn.Module]:
        """Return the parts that are not trained."""
        if self.frozen_stages < 0:
            return []
        trained = self.stages[self.frozen_stages :]
        return [part for name, part in self.named_children() if name not in trained]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the maps ``[batch, channels, height / s, width / s]`` of the stages.

        The images are ``[batch, 3, height, width]``; s is 4, 8, 16 and 32 for the four stages.
        """
        check_images(images, next(m for m in self.modules() if isinstance(m, nn.Conv2d)))
        maps, x = [], images
        for name, part in self.named_children():
            x = part(x)
            if name in self.stages:
                maps.append(x)
        return tuple(maps[i] for i in self.out_indices)

    def train(self, mode: bool = True) -> "Backbone":
        """Set training or evaluation mode; frozen parts stay in evaluation mode."""
        if not isinstance(mode, bool):
            raise TypeError(f"mode = {mode!r}; it must be True or False")
        super().train(mode)
        for part in self.frozen():
            part.eval()
        if self.norm_eval:
            for part in self.modules():
                if isinstance(part, _BatchNorm):
                    part.eval()
        return self

    def with_fpn(self, out_channels: int = 256) -> "Pyramid":
        """Return this backbone with torchvision's feature pyramid, for its detectors."""
        return Pyramid(self, out_channels)


class Pyramid(nn.Module):
    """A backbone, torchvision's `FeaturePyramidNetwork`, and one more map by max pooling.

    For images ``[batch, 3, height, width]`` it returns a dict of maps with `out_channels` channels; its
    keys are "0", "1", ..., "pool".
    """

    def __init__(self, body: Backbone, out_channels: int = 256) -> None:
        super().__init__()
        try:
            from torchvision.ops import feature_pyramid_network as fpn  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ImportError("a feature pyramid needs torchvision: pip install torchvision") from None
        self.body, self.out_channels = body, out_channels
        self.fpn = fpn.FeaturePyramidNetwork(
            body.out_channels, out_channels, extra_blocks=fpn.LastLevelMaxPool()
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the maps by name, from the finest to the coarsest."""
        return self.fpn({str(i): x for i, x in enumerate(self.body(images))})


def resnet_backbone(
    depth: int = 50,
    gate: Any = "none",
    *,
    out_indices: Sequence[int] = (0, 1, 2, 3),
    frozen_stages: int = -1,
    norm_eval: bool = False,
    **options: Any,
) -> Backbone:
    """Return a backbone of ResNet34, 50 or 101.

    Args:
        depth: 34, 50 or 101.
        gate: As in `resnet50`.
        out_indices, frozen_stages, norm_eval: As in `Backbone`.
        **options: Further arguments of `resnet50`.
    """
    networks = {34: resnet34, 50: resnet50, 101: resnet101}
    if depth not in networks:
        raise ValueError(f"depth = {depth} is not one of {', '.join(map(str, networks))}")
    return Backbone(networks[depth](gate=gate, **options), out_indices, frozen_stages, norm_eval)
