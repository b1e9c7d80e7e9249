"""ResNets with gates on their residual branches.

`resnet_cifar` returns a network of depth 9n + 2 for small images, with post-activation or pre-activation
("Identity Mappings in Deep Residual Networks", He et al. 2016). `resnet34`, `resnet50` and `resnet101`
are those for ImageNet; their parameters have torchvision's names, so its weights can be loaded. All are
instances of `ResNet`, into which `insert_gates` inserts the gates.

>>> import torch
>>> model = resnet_cifar(depth=20, num_classes=10, gate="stepnet")
>>> model(torch.rand(2, 3, 32, 32)).shape
torch.Size([2, 10])
>>> [list(stage.shape) for stage in model.features(torch.rand(2, 3, 32, 32))]
[[2, 64, 32, 32], [2, 128, 16, 16], [2, 256, 8, 8]]
>>> [name for name, block in model.blocks if block.gate is not None]  # StepNet: identity shortcuts only
['layer1.1', 'layer2.1', 'layer3.1']

With the same seed, a network starts with the same weights for every gate.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor.common.checks import MOST_PARTS, check_input, check_whole
from attractor.residual.insert import Where, insert_gates
from attractor.residual.weights import load_weights, read_weights


class BasicBlock(nn.Module):
    """``relu(x + gate(f(x)))`` with two 3x3 convolutions; the first carries the stride.

    Args:
        inputs: Number of channels of x.
        planes: Number of channels of f.
        stride: Stride of f and the shortcut. If it is not 1, or `inputs` are not the channels of f, the
            shortcut is projected.
        **factory: Device and dtype.
    """

    expansion, last = 1, "bn2"  # channels of f relative to `planes`; the part that returns f

    def __init__(self, inputs: int, planes: int, stride: int = 1, **factory: Any) -> None:
        super().__init__()
        self.conv1 = conv(3, inputs, planes, stride, **factory)
        self.bn1 = nn.BatchNorm2d(planes, **factory)
        self.conv2 = conv(3, planes, planes, **factory)
        self.bn2 = nn.BatchNorm2d(planes, **factory)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(inputs, planes, stride, **factory)
        self.gate: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state ``[batch, planes, height / stride, width / stride]``."""
        f = self.relu(self.bn1(self.conv1(x)))
        f = self.bn2(self.conv2(f))
        if self.downsample is not None:
            x = self.downsample(x)
        if self.gate is not None:
            f = self.gate(f, x)
        return self.relu(x + f)


class Bottleneck(nn.Module):
    """``relu(x + gate(f(x)))`` with convolutions 1x1, 3x3 (which carries the stride), 1x1.

    Arguments as in `BasicBlock`, but f has ``4 planes`` channels.
    """

    expansion, last = 4, "bn3"

    def __init__(self, inputs: int, planes: int, stride: int = 1, **factory: Any) -> None:
        super().__init__()
        self.conv1 = conv(1, inputs, planes, **factory)
        self.bn1 = nn.BatchNorm2d(planes, **factory)
        self.conv2 = conv(3, planes, planes, stride, **factory)
        self.bn2 = nn.BatchNorm2d(planes, **factory)
        self.conv3 = conv(1, planes, 4 * planes, **factory)
        self.bn3 = nn.BatchNorm2d(4 * planes, **factory)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(inputs, 4 * planes, stride, **factory)
        self.gate: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state ``[batch, 4 planes, height / stride, width / stride]``."""
        f = self.relu(self.bn1(self.conv1(x)))
        f = self.relu(self.bn2(self.conv2(f)))
        f = self.bn3(self.conv3(f))
        if self.downsample is not None:
            x = self.downsample(x)
        if self.gate is not None:
            f = self.gate(f, x)
        return self.relu(x + f)


class PreActivation(nn.Module):
    """``x + gate(f(x))`` with convolutions 1x1, 3x3, 1x1, each after a normalisation and an activation.

    A projected shortcut takes the activated x and has no normalisation. Arguments as in `Bottleneck`.
    """

    expansion, last = 4, "conv3"

    def __init__(self, inputs: int, planes: int, stride: int = 1, **factory: Any) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs, **factory)
        self.conv1 = conv(1, inputs, planes, **factory)
        self.bn2 = nn.BatchNorm2d(planes, **factory)
        self.conv2 = conv(3, planes, planes, stride, **factory)
        self.bn3 = nn.BatchNorm2d(planes, **factory)
        self.conv3 = conv(1, planes, 4 * planes, **factory)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(inputs, 4 * planes, stride, norm=False, **factory)
        self.gate: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state ``[batch, 4 planes, height / stride, width / stride]``."""
        activated = self.relu(self.bn1(x))
        if self.downsample is not None:
            x = self.downsample(activated)
        f = self.conv2(self.relu(self.bn2(self.conv1(activated))))
        f = self.conv3(self.relu(self.bn3(f)))
        if self.gate is not None:
            f = self.gate(f, x)
        return x + f


class ResNet(nn.Module):
    """A stem, stages of residual blocks, global average pooling, and a linear classifier.

    Args:
        block: Class of the blocks: `BasicBlock`, `Bottleneck` or `PreActivation`.
        depths: Number of blocks per stage.
        planes: Argument `planes` of the blocks per stage. From the second stage on, the first block has
            stride 2.
        num_classes: Number of classes.
        stem: "small" is a 3x3 convolution; "large" is a 7x7 convolution and 3x3 max pooling, both with
            stride 2.
        in_channels: Number of channels of the images.
        zero_init_residual: Start with f = 0 in each block, by the weight of its last part.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck] | type[PreActivation],
        depths: Sequence[int],
        planes: Sequence[int],
        num_classes: int,
        *,
        stem: str = "small",
        in_channels: int = 3,
        zero_init_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if stem not in ("small", "large"):
            raise ValueError(f"stem {stem!r} is not one of small, large")
        for name, sizes, most in (("depths", depths, MOST_PARTS), ("planes", planes, None)):
            if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
                raise TypeError(f"{name} = {sizes!r}; pass a list with one whole number per stage")
            for size in sizes:
                check_whole(name, size, 1, most=most)
        if len(planes) < len(depths):
            raise ValueError(
                f"depths {depths} has {len(depths)} stages and planes {planes} {len(planes)}"
            )
        check_whole("num_classes", num_classes, 1)
        check_whole("in_channels", in_channels, 1)
        if not (isinstance(block, type) and hasattr(block, "expansion")):
            raise TypeError(f"block = {block!r}; pass BasicBlock, Bottleneck or PreActivation")
        factory: Any = {"device": device, "dtype": dtype}
        large, preactivation = stem == "large", block is PreActivation
        # torchvision's IntermediateLayerGetter requires that parts are called in this order.
        width = planes[0]
        self.conv1 = conv(7 if large else 3, in_channels, width, 2 if large else 1, **factory)
        self.bn1 = nn.Identity() if preactivation else nn.BatchNorm2d(width, **factory)
        self.relu = nn.Identity() if preactivation else nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        for stage, (depth, inside) in enumerate(zip(depths, planes)):
            blocks = []
            for i in range(depth):
                blocks.append(block(width, inside, 2 if stage > 0 and i == 0 else 1, **factory))
                width = inside * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.norm = (
            nn.Sequential(nn.BatchNorm2d(width, **factory), nn.ReLU())
            if preactivation
            else nn.Identity()
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes, **factory)
        self.inplanes, self.num_stages = width, len(depths)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # N(0, sqrt(2 / (k² c_out)))
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if zero_init_residual:
            for _, module in self.blocks:
                nn.init.zeros_(getattr(module, module.last).weight)

    @property
    def stages(self) -> list[nn.Sequential]:
        """The stages, from the first to the last."""
        return [getattr(self, f"layer{stage + 1}") for stage in range(self.num_stages)]

    @property
    def blocks(self) -> list[tuple[str, Any]]:
        """All residual blocks with their names, from the first to the last."""
        return [
            (f"layer{stage + 1}.{i}", block)
            for stage, blocks in enumerate(self.stages)
            for i, block in enumerate(blocks)
        ]

    def features(self, images: Tensor) -> list[Tensor]:
        """Return the output of each stage for images ``[batch, in_channels, height, width]``."""
        check_images(images, self.conv1)
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[batch, num_classes]`` for images ``[batch, in_channels, height, width]``."""
        x = self.norm(self.features(images)[-1])
        return self.fc(self.avgpool(x).flatten(1))


def check_images(images: Any, first: nn.Conv2d, size: tuple[int, int] | None = None) -> None:
    """Raise an error unless images fit a network's first convolution, and `size` if it is not None."""
    if isinstance(images, torch.fx.Proxy):  # torch.fx records the network
        return
    channels = first.in_channels
    shape = f"[batch, {channels}, height, width]"
    check_input("images", images, shape, "this network", first.weight)
    if images.dim() != 4 or images.shape[1] != channels or not images.shape[2] * images.shape[3]:
        raise ValueError(f"images have shape {list(images.shape)}; this network takes {shape}")
    if size is not None and images.shape[-2:] != size:
        raise ValueError(
            f"images have {' x '.join(map(str, images.shape[-2:]))} pixels, but this model has position "
            f"embeddings for {' x '.join(map(str, size))}; resize them, or pass image_size= to the model"
        )


def conv(kernel: int, inputs: int, outputs: int, stride: int = 1, **factory: Any) -> nn.Conv2d:
    """Return a convolution without bias and with padding; the image size is divided by the stride."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False, **factory)


def projection(
    inputs: int, outputs: int, stride: int, norm: bool = True, **factory: Any
) -> nn.Sequential | None:
    """Return a 1x1 convolution with a normalisation for the shortcut; None if x needs no projection."""
    if stride == 1 and inputs == outputs:
        return None
    norms = [nn.BatchNorm2d(outputs, **factory)] if norm else []
    return nn.Sequential(conv(1, inputs, outputs, stride, **factory), *norms)


def resnet_cifar(
    depth: int = 164,
    num_classes: int = 10,
    gate: Any = "none",
    *,
    preactivation: bool = False,
    where: Where = "default",
    gate_options: Mapping[str, Any] | None = None,
    width: int = 16,
    in_channels: int = 3,
    zero_init_residual: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ResNet:
    """Return a ResNet with three stages of bottlenecks for small images.

    Args:
        depth: 9n + 2, for n blocks per stage.
        num_classes: Number of classes.
        gate: Name or class of a gate, or a function from channels to one, see `insert_gates`.
        preactivation: Normalise and activate before the convolutions instead of after them.
        where: Blocks that get a gate, see `insert_gates`.
        gate_options: Further arguments of the gate.
        width: Number of channels of the stem, and inside the blocks of the first stage.
        in_channels: Number of channels of the images.
        zero_init_residual: Start with f = 0 in each block.
        device, dtype: Device and dtype of the parameters.

    Raises:
        ValueError: depth is not 9n + 2.
    """
    check_whole("depth", depth, 1, most=MOST_PARTS)
    check_whole("width", width, 1)
    n, rest = divmod(depth - 2, 9)
    if rest or n < 1:
        nearest = [9 * m + 2 for m in (n, n + 1) if m > 0]
        raise ValueError(
            f"depth = {depth} is not 9 n + 2 (n blocks of three convolutions in each of three stages, a "
            f"stem and a classifier); use {' or '.join(map(str, nearest))}"
        )
    model = ResNet(
        PreActivation if preactivation else Bottleneck,
        [n] * 3,
        [width, 2 * width, 4 * width],
        num_classes,
        in_channels=in_channels,
        zero_init_residual=zero_init_residual,
        device=device,
        dtype=dtype,
    )
    insert_gates(model, gate, where, **{"identity": False, **(gate_options or {})})
    return model


def resnet34(num_classes: int = 1000, gate: Any = "none", **options: Any) -> ResNet:
    """Return torchvision's ResNet34 with a gate; arguments as in `resnet50`."""
    return _imagenet("resnet34", BasicBlock, [3, 4, 6, 3], num_classes, gate, **options)


def resnet50(num_classes: int = 1000, gate: Any = "none", **options: Any) -> ResNet:
    """Return torchvision's ResNet50 (the 3x3 convolutions have the strides) with a gate.

    Args:
        num_classes: Number of classes.
        gate: Name or class of a gate, or a function from channels to one, see `insert_gates`.
        **options: Further options.

            - `where`: Blocks that get a gate, see `insert_gates`.
            - `gate_options`: A dict of further arguments of the gate.
            - `weights`: A safetensors file, or "torchvision" to download its weights. The gate then
              starts at exactly 1 unless `gate_options` contain `identity`; a file with gates sets
              their `identity`. A classifier of another size keeps its random weights.
            - `in_channels`, `zero_init_residual`, `device` and `dtype`: As in `ResNet`.
    """
    return _imagenet("resnet50", Bottleneck, [3, 4, 6, 3], num_classes, gate, **options)


def resnet101(num_classes: int = 1000, gate: Any = "none", **options: Any) -> ResNet:
    """Return torchvision's ResNet101 with a gate; arguments as in `resnet50`."""
    return _imagenet("resnet101", Bottleneck, [3, 4, 23, 3], num_classes, gate, **options)


def _imagenet(
    name: str,
    block: type[BasicBlock] | type[Bottleneck],
    depths: Sequence[int],
    num_classes: int,
    gate: Any,
    *,
    where: Where = "default",
    gate_options: Mapping[str, Any] | None = None,
    weights: Path | str | None = None,
    **options: Any,
) -> ResNet:
    model = ResNet(block, depths, [64, 128, 256, 512], num_classes, stem="large", **options)
    plain = set(model.state_dict())
    insert_gates(model, gate, where, **{"identity": weights is not None, **(gate_options or {})})
    if weights is not None:
        load_weights(model, read_weights(name, weights), plain)
    return model
