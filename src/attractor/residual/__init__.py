"""Residual networks as time stepping (StepNet).

A residual block is one step, ``x + f(x)``. Channel attention multiplies f by a gate, which makes the
step size adaptive. `gates` contains the gates; `resnet_cifar`, `resnet34` to `resnet101` and `vit` are
networks with an argument ``gate=``; `insert_gates` inserts gates into an existing network; `probe`
measures the stiffness of the trajectory of features in any residual network.

>>> import torch
>>> import attractor as at
>>> model = at.residual.resnet_cifar(depth=20, num_classes=10, gate="stepnet")
>>> profile = at.probe(model, [torch.rand(4, 3, 32, 32)])
>>> len(profile.names), profile.stage.tolist()
(6, [0, 0, 1, 1, 2, 2])
"""

from attractor.residual import gates, pretrained
from attractor.residual.backbone import Backbone, resnet_backbone
from attractor.residual.comparison import compare_profiles
from attractor.residual.insert import gated_blocks, insert_gates
from attractor.residual.probing import probe
from attractor.residual.profile import StiffnessProfile
from attractor.residual.ranks import kendall, spearman
from attractor.residual.resnet import ResNet, resnet34, resnet50, resnet101, resnet_cifar
from attractor.residual.vit import ViT, vit

__all__ = [
    "Backbone",
    "ResNet",
    "StiffnessProfile",
    "ViT",
    "compare_profiles",
    "gated_blocks",
    "gates",
    "insert_gates",
    "kendall",
    "pretrained",
    "probe",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet_backbone",
    "resnet_cifar",
    "spearman",
    "vit",
]
