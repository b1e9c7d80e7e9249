"""ResNets whose residual branches have a gate.

`resnet_cifar` makes those of depth 9n + 2 for small images (post-activation; or pre-activation,
"Identity Mappings in Deep Residual Networks", He et al. 2016), `resnet34`, `resnet50` and `resnet101`
those for ImageNet, with the names of torchvision's parameters, so that its weights load. All are one
class, `ResNet`; `insert_gates` puts the gate on f, the output of a block's branch, before the addition.

>>> import torch
>>> model = resnet_cifar(depth=20, num_classes=10, gate="stepnet")
>>> model(torch.rand(2, 3, 32, 32)).shape
torch.Size([2, 10])
>>> [list(stage.shape) for stage in model.features(torch.rand(2, 3, 32, 32))]
[[2, 64, 32, 32], [2, 128, 16, 16], [2, 256, 8, 8]]
>>> [name for name, block in model.blocks if block.gate is not None]  # StepNet: identity shortcuts only
['layer1.1', 'layer2.1', 'layer3.1']

With one seed, a network starts with the same weights whatever its gate is.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core.checks import check_input, check_whole
from attractor.residual.insert import Where, insert_gates


class BasicBlock(nn.Module):
    """``relu(x + gate(f(x)))`` with two 3x3 convolutions; the first carries the stride.

    Args:
        inputs: channels of x.
        planes: channels of f.
        stride: of f and the shortcut; with one, or with other channels, the shortcut is projected.
        factory: device and dtype.
    """

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int = 1, **factory: Any) -> None:
        super().__init__()
        self.conv1 = conv(3, inputs, planes, stride, **factory)
        self.bn1 = nn.BatchNorm2d(planes, **factory)
        self.conv2 = conv(3, planes, planes, **factory)
        self.bn2 = nn.BatchNorm2d(planes, **factory)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(inputs, planes, stride, **factory)
        self.gate: nn.Module | None = None

    @property
    def last(self) -> nn.Module:
        """The part whose output is f."""
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        """The next state ``[batch, planes, height / stride, width / stride]``."""
        f = self.relu(self.bn1(self.conv1(x)))
        f = self.bn2(self.conv2(f))
        if self.downsample is not None:
            x = self.downsample(x)
        if self.gate is not None:
            f = self.gate(f, x)
        return self.relu(x + f)


class Bottleneck(nn.Module):
    """``relu(x + gate(f(x)))`` with convolutions 1x1, 3x3 (which carries the stride), 1x1.

    Args:
        inputs: channels of x.
        planes: channels inside; f has four times as many.
        stride: of f and the shortcut; with one, or with other channels, the shortcut is projected.
        factory: device and dtype.
    """

    expansion = 4

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

    @property
    def last(self) -> nn.Module:
        """The part whose output is f."""
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        """The next state ``[batch, 4 planes, height / stride, width / stride]``."""
        f = self.relu(self.bn1(self.conv1(x)))
        f = self.relu(self.bn2(self.conv2(f)))
        f = self.bn3(self.conv3(f))
        if self.downsample is not None:
            x = self.downsample(x)
        if self.gate is not None:
            f = self.gate(f, x)
        return self.relu(x + f)


class PreActivation(nn.Module):
    """``x + gate(f(x))``, normalised and activated before each convolution of f: 1x1, 3x3, 1x1.

    A projected shortcut starts from the activated x and has no normalisation.

    Args:
        inputs: channels of x.
        planes: channels inside; f has four times as many.
        stride: of f and the shortcut; with one, or with other channels, the shortcut is projected.
        factory: device and dtype.
    """

    expansion = 4

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

    @property
    def last(self) -> nn.Module:
        """The part whose output is f."""
        return self.conv3

    def forward(self, x: Tensor) -> Tensor:
        """The next state ``[batch, 4 planes, height / stride, width / stride]``."""
        activated = self.relu(self.bn1(x))
        if self.downsample is not None:
            x = self.downsample(activated)
        f = self.conv2(self.relu(self.bn2(self.conv1(activated))))
        f = self.conv3(self.relu(self.bn3(f)))
        if self.gate is not None:
            f = self.gate(f, x)
        return x + f


class ResNet(nn.Module):
    """A stem, stages of residual blocks, the mean over space, and a linear classifier.

    Args:
        block: class of the blocks: `BasicBlock`, `Bottleneck` or `PreActivation`.
        depths: number of blocks in each stage.
        planes: `planes` of the blocks in each stage; from the second stage on, the first block has
            stride 2.
        num_classes: of the classifier.
        stem: "small" is a 3x3 convolution, "large" a 7x7 one of stride 2 and a 3x3 maximum of stride 2.
        in_channels: of the images.
        zero_init_residual: start with f = 0 in every block, by what comes last in it.
        device, dtype: of the parameters.
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
        for name, sizes in (("depths", depths), ("planes", planes)):
            if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
                raise TypeError(f"{name} = {sizes!r}; give a list with a whole number for each stage")
            for size in sizes:
                check_whole(name, size, 1)
        if len(planes) < len(depths):
            raise ValueError(
                f"depths {depths} has {len(depths)} stages and planes {planes} {len(planes)}"
            )
        check_whole("num_classes", num_classes, 1)
        check_whole("in_channels", in_channels, 1)
        if not (isinstance(block, type) and hasattr(block, "expansion")):
            raise TypeError(f"block = {block!r}; give BasicBlock, Bottleneck or PreActivation")
        factory: Any = {"device": device, "dtype": dtype}
        large, before = stem == "large", block is PreActivation
        # Parts are called in this order, which torchvision's IntermediateLayerGetter relies on.
        width = planes[0]
        self.conv1 = conv(7 if large else 3, in_channels, width, 2 if large else 1, **factory)
        self.bn1 = nn.Identity() if before else nn.BatchNorm2d(width, **factory)
        self.relu = nn.Identity() if before else nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        for stage, (depth, inside) in enumerate(zip(depths, planes)):
            blocks = []
            for i in range(depth):
                blocks.append(block(width, inside, 2 if stage > 0 and i == 0 else 1, **factory))
                width = inside * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.norm = (
            nn.Sequential(nn.BatchNorm2d(width, **factory), nn.ReLU()) if before else nn.Identity()
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes, **factory)
        self.inplanes, self.num_stages = width, len(depths)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # N(0, sqrt(2 / (k² c_out)))
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if zero_init_residual:
            for _, made in self.blocks:
                nn.init.zeros_(made.last.weight)

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
        """What each stage makes of images ``[batch, in_channels, height, width]``."""
        check_images(images, self.conv1)
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, in_channels, height, width]``."""
        x = self.norm(self.features(images)[-1])
        return self.fc(self.avgpool(x).flatten(1))


def check_images(images: Any, first: nn.Conv2d, size: tuple[int, int] | None = None) -> None:
    """Raise unless images are what a network's first convolution takes, and of `size` if it is given."""
    if isinstance(images, torch.fx.Proxy):  # torch.fx writes the network down
        return
    channels = first.in_channels
    shape = f"[batch, {channels}, height, width]"
    check_input("images", images, shape, "this network", first.weight)
    if images.dim() != 4 or images.shape[1] != channels or not images.shape[2] * images.shape[3]:
        raise ValueError(f"images have shape {list(images.shape)}; this network takes {shape}")
    if size is not None and images.shape[-2:] != size:
        raise ValueError(
            f"images of {' x '.join(map(str, images.shape[-2:]))}; this model has positions for "
            f"{' x '.join(map(str, size))}: resize them, or make it with image_size="
        )


def conv(kernel: int, inputs: int, outputs: int, stride: int = 1, **factory: Any) -> nn.Conv2d:
    """A convolution without bias that keeps the size of an image (with a stride, divides it)."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False, **factory)


def projection(
    inputs: int, outputs: int, stride: int, norm: bool = True, **factory: Any
) -> nn.Sequential | None:
    """A shortcut to another shape: 1x1 convolution and normalisation; None if x fits as it is."""
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
    """A ResNet of three stages of bottlenecks for small images.

    Args:
        depth: 9n + 2, for n blocks a stage.
        num_classes: of the classifier.
        gate: name or class of a gate, or a function from channels to one, see `insert_gates`.
        preactivation: normalise and activate before the convolutions instead of after.
        where: which blocks have the gate, see `insert_gates`.
        gate_options: more arguments of the gate.
        width: channels of the stem, and inside the first stage's blocks.
        in_channels: of the images.
        zero_init_residual: start with f = 0 in every block.
        device, dtype: of the parameters.

    Raises:
        ValueError: if depth is not 9n + 2.
    """
    check_whole("depth", depth, 1)
    check_whole("width", width, 1)
    n, rest = divmod(depth - 2, 9)
    if rest or n < 1:
        near = [9 * m + 2 for m in (n, n + 1) if m > 0]
        raise ValueError(
            f"depth = {depth} is not 9 n + 2 (n blocks of three convolutions in each of three stages, a "
            f"stem and a classifier); near it are {' and '.join(map(str, near))}"
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
    """ResNet34 as in torchvision, and with a gate; options as in `resnet50`."""
    return _imagenet("resnet34", BasicBlock, [3, 4, 6, 3], num_classes, gate, **options)


def resnet50(num_classes: int = 1000, gate: Any = "none", **options: Any) -> ResNet:
    """ResNet50 as in torchvision (the 3x3 convolutions carry the strides), and with a gate.

    Args:
        num_classes: of the classifier.
        gate: name or class of a gate, or a function from channels to one, see `insert_gates`.
        **options: `where`: which blocks have the gate, see `insert_gates`. `gate_options`: a dict of
            more arguments of the gate. `weights`: a safetensors file, or "torchvision" for what it
            downloads; the gate then starts at exactly 1 unless gate_options say otherwise, a file with
            gates of its own brings their `identity` too, and a classifier of another size keeps its
            random weights. `in_channels`, `zero_init_residual`,
            `device` and `dtype` as in `ResNet`.
    """
    return _imagenet("resnet50", Bottleneck, [3, 4, 6, 3], num_classes, gate, **options)


def resnet101(num_classes: int = 1000, gate: Any = "none", **options: Any) -> ResNet:
    """ResNet101 as in torchvision, and with a gate; options as in `resnet50`."""
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
        _load(model, _read(name, weights), plain)
    return model


def _read(name: str, weights: Path | str) -> dict[str, Tensor]:
    """Tensors of a safetensors file, or of torchvision's network of that name."""
    if weights == "torchvision":
        try:
            from torchvision.models import get_model_weights  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ImportError(
                'weights="torchvision" needs torchvision (pip install torchvision); or give a file'
            ) from None
        return get_model_weights(name).DEFAULT.get_state_dict(check_hash=True, weights_only=True)
    if not Path(weights).is_file():
        raise FileNotFoundError(f'weights {str(weights)!r} is neither a file nor "torchvision"')
    from attractor.train.tensors import read_tensors

    return read_tensors(weights)


def _load(model: ResNet, tensors: dict[str, Tensor], plain: set[str]) -> None:
    """Load saved tensors: only gates may be missing, only a classifier of another size is left out."""
    own = model.state_dict()
    for part in ("fc.weight", "fc.bias"):
        if part in tensors and tensors[part].shape != own[part].shape:
            tensors = {**tensors, part: own[part]}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    lacking = [key for key in missing if key in plain]
    if lacking or unknown:
        raise ValueError(
            f"these weights do not belong to this network: {len(lacking)} tensors are missing "
            f"({', '.join(lacking[:3])}, ...), {len(unknown)} unknown ({', '.join(unknown[:3])}, ...)"
        )
