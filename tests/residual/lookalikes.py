"""Networks written as those of torchvision and timm are, which the tests may not find installed."""

import torch
from torch import Tensor, nn


class Basic(nn.Module):
    """torchvision's BasicBlock."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride > 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)

        if self.downsample is not None:
            identity = self.downsample(x)

        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's ResNet, with two stages."""

    def __init__(self, width: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Basic(width, width), Basic(width, width))
        self.layer2 = nn.Sequential(Basic(width, 2 * width, 2), Basic(2 * width, 2 * width))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, num_classes)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)

        x = self.layer1(x)
        x = self.layer2(x)

        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


class Hidden(Basic):
    """A block whose forward does not name the end of its branch."""

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for conv, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2)):
            out = norm(conv(out))
            if norm is self.bn1:
                out = self.relu(out)
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class HiddenResNet(ResNet):
    """The same function by blocks whose forward does not show where their branch ends."""

    def __init__(self, width: int = 8, num_classes: int = 3) -> None:
        super().__init__(width, num_classes)
        for block in (*self.layer1, *self.layer2):
            block.__class__ = Hidden


class GhostModule(nn.Module):
    """timm's: half of the channels are made from the other half."""

    def __init__(self, in_chs, out_chs, ratio=2, act_layer=nn.ReLU):
        super().__init__()
        self.out_chs = out_chs
        init_chs = -(-out_chs // ratio)
        new_chs = init_chs * (ratio - 1)
        self.primary_conv = nn.Sequential(
            nn.Conv2d(in_chs, init_chs, 1, bias=False), nn.BatchNorm2d(init_chs), act_layer()
        )
        self.cheap_operation = nn.Sequential(
            nn.Conv2d(init_chs, new_chs, 3, 1, 1, groups=init_chs, bias=False),
            nn.BatchNorm2d(new_chs),
            act_layer(),
        )

    def forward(self, x):
        x1 = self.primary_conv(x)
        x2 = self.cheap_operation(x1)
        out = torch.cat([x1, x2], dim=1)
        return out[:, : self.out_chs, :, :]


class GhostBottleneck(nn.Module):
    """timm's, without its squeeze and excitation."""

    def __init__(self, in_chs, mid_chs, out_chs, stride=1):
        super().__init__()
        self.stride = stride
        self.ghost1 = GhostModule(in_chs, mid_chs)
        if self.stride > 1:
            self.conv_dw = nn.Conv2d(mid_chs, mid_chs, 3, stride, 1, groups=mid_chs, bias=False)
            self.bn_dw = nn.BatchNorm2d(mid_chs)
        else:
            self.conv_dw = None
            self.bn_dw = None
        self.ghost2 = GhostModule(mid_chs, out_chs, act_layer=nn.Identity)
        if in_chs == out_chs and self.stride == 1:
            self.shortcut = nn.Sequential()
        else:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_chs, in_chs, 3, stride, 1, groups=in_chs, bias=False),
                nn.BatchNorm2d(in_chs),
                nn.Conv2d(in_chs, out_chs, 1, bias=False),
                nn.BatchNorm2d(out_chs),
            )

    def forward(self, x):
        shortcut = x
        x = self.ghost1(x)
        if self.conv_dw is not None:
            x = self.conv_dw(x)
            x = self.bn_dw(x)
        x = self.ghost2(x)
        x += self.shortcut(shortcut)
        return x


class GhostNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, 1, 1)
        self.blocks = nn.Sequential(
            nn.Sequential(GhostBottleneck(10, 10, 10)),
            nn.Sequential(GhostBottleneck(10, 24, 14, 2), GhostBottleneck(14, 36, 14)),
        )

    def forward(self, x):
        return self.blocks(self.stem(x))


class DlaBasic(nn.Module):
    """timm's: the shortcut may be an argument."""

    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.stride = stride

    def forward(self, x, shortcut: Tensor | None = None, children: list[Tensor] | None = None):
        if shortcut is None:
            shortcut = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out += shortcut
        return self.relu(out)


class DlaBottleneck(nn.Module):
    """timm's."""

    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        mid = planes // 2
        self.conv1, self.bn1 = nn.Conv2d(inplanes, mid, 1, bias=False), nn.BatchNorm2d(mid)
        self.conv2, self.bn2 = nn.Conv2d(mid, mid, 3, stride, 1, bias=False), nn.BatchNorm2d(mid)
        self.conv3, self.bn3 = nn.Conv2d(mid, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x, shortcut: Tensor | None = None, children: list[Tensor] | None = None):
        if shortcut is None:
            shortcut = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += shortcut
        return self.relu(out)


class DlaRoot(nn.Module):
    """timm's: it takes a list, and adds its first element where `shortcut` says so."""

    def __init__(self, in_channels, out_channels, shortcut):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut

    def forward(self, x_children: list[Tensor]):
        x = self.conv(torch.cat(x_children, 1))
        x = self.bn(x)
        if self.shortcut:
            x += x_children[0]
        return self.relu(x)


class DlaTree(nn.Module):
    """timm's."""

    def __init__(self, levels, block, inputs, outputs, stride=1, root_dim=0, root_shortcut=False):
        super().__init__()
        root_dim = root_dim or 2 * outputs
        self.downsample = nn.MaxPool2d(stride, stride) if stride > 1 else nn.Identity()
        self.project = nn.Identity()
        if levels == 1:
            self.tree1 = block(inputs, outputs, stride)
            self.tree2 = block(outputs, outputs, 1)
            if inputs != outputs:
                self.project = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
                )
            self.root = DlaRoot(root_dim, outputs, root_shortcut)
        else:
            tree = lambda *args, **kwargs: DlaTree(
                levels - 1, block, *args, **kwargs, root_shortcut=root_shortcut
            )
            self.tree1 = tree(inputs, outputs, stride)
            self.tree2 = tree(outputs, outputs, root_dim=root_dim + outputs)
            self.root = None

    def forward(self, x, shortcut: Tensor | None = None, children: list[Tensor] | None = None):
        if children is None:
            children = []
        bottom = self.downsample(x)
        shortcut = self.project(bottom)
        x1 = self.tree1(x, shortcut)
        if self.root is not None:
            x2 = self.tree2(x1)
            x = self.root([x2, x1, *children])
        else:
            children.append(x1)
            x = self.tree2(x1, None, children)
        return x


class DLA(nn.Module):
    def __init__(self, block=DlaBasic, root_shortcut=False):
        super().__init__()
        self.base_layer = nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.level2 = DlaTree(1, block, 6, 8, 2, root_shortcut=root_shortcut)
        self.level3 = DlaTree(2, block, 8, 12, 2, root_shortcut=root_shortcut)

    def forward(self, x):
        return self.level3(self.level2(self.base_layer(x)))
