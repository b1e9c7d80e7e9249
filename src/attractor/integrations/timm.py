"""Gates for timm: networks by name, and gates as the attention layers of timm's blocks.

::

    import timm
    import attractor as at

    at.integrations.timm.register()
    timm.list_models("*stepnet*")  # resnet34_stepnet, resnet50_stepnet, ..., resnet164_cifar_stepnet
    timm.create_model("resnet50_stepnet", num_classes=10)
    timm.create_model("resnet50_stepnet", pretrained=True, identity=True)  # computes what resnet50 does

The networks are timm's own ResNets with gates from `insert_gates`, so `features_only`, `drop_path_rate`,
`in_chans`, `reset_classifier` and timm's training script work as usual.

A gate that depends on the branch f only can also be the attention layer of other networks of timm::

    timm.create_model("resnet50", block_args=dict(attn_layer=at.gates.SRM))
    timm.create_model("resnet50", block_args=dict(attn_layer=attn_layer("se", reduction=8)))
    timm.create_model("nf_seresnet50", attn_layer=attn_layer("fca"))

A name alone, such as ``attn_layer="srm"``, is not possible: timm compares names in a chain of ifs, and
"se", "eca" and "cbam" are layers of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from attractor.residual.gates import get_gate, make_gate
from attractor.residual.insert import Where, insert_gates
from attractor.residual.resnet import conv

__all__ = ["attn_layer", "register"]  # timm appends the names of the networks

GATES = ("stepnet", "iebn", "sem", "dia", "fca", "srm", "sge")  # timm has SE, ECA and CBAM itself
LAYERS = {"resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
CIFAR = {"resnet83_cifar": 9, "resnet164_cifar": 18}  # blocks per stage
NAMES = {f"{backbone}_{gate}": (backbone, gate) for backbone in LAYERS for gate in GATES}
NAMES |= {f"{backbone}_stepnet": (backbone, "stepnet") for backbone in CIFAR}
NAMES |= {backbone: (backbone, "none") for backbone in CIFAR}  # for comparisons; not part of timm
OF_TIMM = ("act_layer", "rd_divisor", "rd_ratio")  # arguments for timm's own layers


def register() -> list[str]:
    """Register the networks with gates in timm, and return their names. A second call has no effect.

    They are resnet34, resnet50 and resnet101 with ``_stepnet``, ``_iebn``, ``_sem``, ``_dia``, ``_fca``,
    ``_srm`` or ``_sge``, and for images of 32 x 32 resnet83_cifar and resnet164_cifar, plain and with
    ``_stepnet`` (the networks of `resnet_cifar`, whose weights fit). In addition to the arguments of a
    ResNet, `timm.create_model` accepts:

        identity: Whether the gates start at exactly 1. This is required with ``pretrained=True``, which
            loads the weights of timm's plain network. Checkpoints of networks with gates contain it.
        where: Blocks that get a gate, see `insert_gates`.
        gate_options: A dict of further arguments of the gate.

    To load weights of a network with gates, use ``checkpoint_path=``, or ``pretrained=True`` with timm's
    ``hf-hub:`` and ``local-dir:``.
    """
    if find_spec("timm") is None:
        raise ImportError("register() needs timm, 1.0.8 or later: pip install 'attractor[vision]'")
    from timm.models import is_model, register_model

    for name, (backbone, gate) in NAMES.items():
        if not is_model(name):
            globals()[name] = register_model(_entrypoint(name, backbone, gate))
    return list(NAMES)


def attn_layer(gate: str | Callable[..., nn.Module], **options: Any) -> Callable[..., nn.Module]:
    """Return a gate as timm's ``attn_layer``, a function from the number of channels to a new gate.

    The arguments rd_ratio, rd_divisor and act_layer, which some networks of timm pass to their own
    layers, have no effect. Networks may initialise a layer's weights again; timm's ResNet keeps
    `identity`.

    Args:
        gate: A name such as "srm", or a class.
        **options: Arguments of the gate.

    Raises:
        ValueError: The gate needs more than the branch; raised when a network is made. StepNet uses the
            shortcut (but not with inputs="difference"), DIA is shared by the blocks of a stage, and IEBN
            replaces batch normalisations.
    """
    if isinstance(gate, str):
        gate = get_gate(gate)

    def layer(channels: int, **kwargs: Any) -> nn.Module:
        arguments = {k: v for k, v in kwargs.items() if k not in OF_TIMM and v is not None}
        module: Any = make_gate(gate, channels, **{**arguments, **options})
        if reason := _needs_more(module):
            raise ValueError(
                f"{type(module).__name__} cannot be timm's attn_layer, which gets the branch alone: "
                f"{reason}; use insert_gates(model, ...), or a network of register()"
            )
        return module

    return layer


def _needs_more(gate: nn.Module) -> str | None:
    """Return what a gate needs besides the branch, or None."""
    if getattr(gate, "normalisation", False):
        return "it replaces batch normalisations"
    if getattr(gate, "shared", False):
        return "one gate is shared by the blocks of a stage"
    if getattr(gate, "needs_x", False) and getattr(gate, "inputs", None) != "difference":
        return "it uses the shortcut as well (StepNet not with inputs='difference')"
    return None


def _entrypoint(name: str, backbone: str, gate: str) -> Callable[..., nn.Module]:
    """Return the function that timm calls to make the network of that name."""

    def make(
        pretrained: bool = False,
        pretrained_cfg: Any = None,
        *,
        identity: bool = False,
        where: Where = "default",
        gate_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> nn.Module:
        from timm.models import build_model_with_cfg

        if pretrained_cfg is None or isinstance(pretrained_cfg, str):  # a tag, such as "a1_in1k"
            pretrained_cfg = replace(_configuration(backbone, pretrained_cfg), architecture=name)
        plain: set[str] = set()

        def build(**arguments: Any) -> nn.Module:
            model = (
                _cifar(backbone, **arguments) if backbone in CIFAR else _resnet(backbone, **arguments)
            )
            plain.update(model.state_dict())
            return insert_gates(model, gate, where, identity=identity, **(gate_options or {}))

        def complete(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
            gates = {key: value for key, value in model.state_dict().items() if key not in plain}
            if gates.keys() & weights.keys():
                return weights
            if not identity and gates:
                raise ValueError(
                    f"{name}: these are weights of a network without gates, which must then start at 1; "
                    "give identity=True"
                )
            return {**weights, **gates}

        return build_model_with_cfg(
            build,
            name,
            pretrained,
            pretrained_cfg=pretrained_cfg,
            pretrained_filter_fn=complete,
            feature_cfg={"out_indices": tuple(range(4 if backbone in CIFAR else 5))},
            **options,
        )

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"timm's {backbone} with the gate {gate!r}; see `register` for its arguments."
    return make


def _configuration(backbone: str, tag: str | None) -> Any:
    """Return timm's configuration of a plain network: weights, size and statistics of the images."""
    from timm.models import PretrainedCfg, get_pretrained_cfg

    if backbone not in CIFAR:
        return get_pretrained_cfg(f"{backbone}.{tag}" if tag else backbone)
    return PretrainedCfg(
        input_size=(3, 32, 32),
        pool_size=(8, 8),
        crop_pct=1.0,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        num_classes=10,
        first_conv="conv1",
        classifier="fc",
    )


def _resnet(backbone: str, **options: Any) -> Any:
    """Return timm's plain ResNet for ImageNet."""
    from timm.models.resnet import BasicBlock, Bottleneck, ResNet

    block = BasicBlock if backbone == "resnet34" else Bottleneck
    return ResNet(block, LAYERS[backbone], **options)


def _cifar(backbone: str, in_chans: int = 3, zero_init_last: bool = False, **options: Any) -> Any:
    """Return timm's ResNet for small images: the stem is one 3x3 convolution, and stage 4 is missing."""
    from timm.models.resnet import Bottleneck, ResNet

    model: Any = ResNet(
        Bottleneck,
        (CIFAR[backbone],) * 3,
        in_chans=in_chans,
        channels=(16, 32, 64),
        stem_type="deep",  # the only one with a free width, which is twice `stem_width`
        stem_width=8,
        zero_init_last=zero_init_last,
        **options,
    )
    factory = {"device": model.bn1.weight.device, "dtype": model.bn1.weight.dtype}
    model.conv1 = conv(3, in_chans, 16, **factory)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool, model.layer4 = nn.Identity(), nn.Identity()
    for info in model.feature_info:
        info["reduction"] = max(1, info["reduction"] // 4)
    return model
