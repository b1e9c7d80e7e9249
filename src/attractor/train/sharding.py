"""Sharded training: each process holds a part of all parameters, gradients and optimiser states.

The parts are those of torch's FSDP2 (`torch.distributed.fsdp.fully_shard`): rows of every parameter, as
`DTensor`. A group of parameters is whole only while its block computes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attractor.train.capture import Blocks, repeated_blocks
from attractor.train.recipe import Recipe

SHARDINGS = ("none", "full")


def check_sharding(model: nn.Module, recipe: Recipe, precision: str) -> None:
    """Raise a ValueError unless a model can be trained with sharding="full".

    Args:
        model: the model.
        recipe: the recipe of the training.
        precision: the precision in use.
    """
    if precision == "fp16":
        raise ValueError(
            "precision = 'fp16' with sharding = 'full'; the scaling of fp16 needs whole gradients: use "
            "'bf16' or 'fp32'"
        )
    if recipe.ema:
        raise ValueError(f"ema = {recipe.ema} with sharding = 'full' is not implemented; use ema=0")
    if recipe.capture == "graph":
        raise ValueError(
            "capture = 'graph' with sharding = 'full'; steps of several processes are never captured: "
            "use capture='auto', 'none' or 'compile'"
        )
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise ValueError(
            "the model is the result of torch.compile, which cannot be sharded; pass the model itself, "
            "and capture='compile' in the recipe"
        )
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ValueError(
                f"parameter {name!r} is a DTensor, so the model is sharded already, or was left sharded "
                "by a training that raised an error; make the model anew"
            )
        if parameter.dim() == 0:
            raise ValueError(
                f"parameter {name!r} is a scalar, which FSDP cannot shard; make it a tensor of shape [1]"
            )
    dtypes = {str(p.dtype) for p in model.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        raise ValueError(
            f"the trained parameters have the dtypes {', '.join(sorted(dtypes))}; sharding = 'full' "
            "needs one: convert the model, for example by model.float()"
        )


def shard(model: nn.Module, device: torch.device, blocks: Blocks | None = None) -> Callable[[], None]:
    """Shard a model in place over all processes, and return a function that makes it whole again.

    All processes must call both. The model may be on the CPU: one block at a time is moved to the
    device, where only the part of this process remains. The returned function gives the model its
    classes and its parameter objects back, with whole parameters on the device.

    Args:
        model: the model, with the same parameters in every process.
        device: the device of training.
        blocks: ``model -> modules`` returns the blocks whose parameters are gathered together; None:
            `repeated_blocks`. The remaining parameters form one more group.
    """
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (get_world_size(),))
    modules = list(model.modules())
    places = [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    originals = [(module, type(module), set(vars(module))) for module in modules]
    whole = {id(parameter): parameter for *_, parameter in places}
    for module in (*_separate_blocks(model, blocks), model):
        parameters = [whole.pop(id(p)) for p in module.parameters() if id(p) in whole]
        for parameter in parameters:
            parameter.data = parameter.data.contiguous()  # FSDP accepts no other layout
        # Also the model itself, so that all parameters are parts between two calls of the model.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)  # the object remains, without its memory
    attributes = [set(vars(module)) - names for module, _, names in originals]

    def gather() -> None:
        """Make the model whole again; a second call has no effect."""
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()
        parts: dict[int, Any] = {id(p): module._parameters[name] for module, name, p in places}
        for module, name, parameter in places:
            if id(parameter) in parts:  # a shared parameter has several places
                parameter.data = parts.pop(id(parameter)).detach().full_tensor()
            module._parameters[name] = parameter
        for (module, own_class, _), names in zip(originals, attributes):
            module.__class__ = own_class
            for name in names:
                delattr(module, name)
            _remove_hooks(module)
        places.clear()
        originals.clear()
        modules.clear()

    return gather


def shard_optimiser(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give an optimiser of sharded parameters this process's part of the state of another optimiser.

    Args:
        source: an optimiser of the same parameters in the same order, before they were sharded.
        target: the optimiser of the sharded parameters.
    """
    parameters = [p for group in target.param_groups for p in group["params"]]
    state = {
        index: {key: _part_like(value, parameters[index]) for key, value in entries.items()}
        for index, entries in source.state_dict()["state"].items()
    }
    target.load_state_dict({"state": state, "param_groups": target.state_dict()["param_groups"]})


def _part_like(value: Any, parameter: nn.Parameter) -> Any:
    """Return this process's part of a tensor, sharded as a parameter of the same shape is."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    sharded: Any = parameter
    part: Any = torch.empty_like(parameter, requires_grad=False)
    # Every process has the whole tensor, so none is sent one.
    own = distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
    part.to_local().copy_(own.to_local())
    return part


def gather_tensors(tensors: Mapping[str, Any], keep: bool) -> dict[str, Tensor]:
    """Return tensors with whole ones, on the CPU, in place of sharded ones.

    All processes must call it if a tensor is sharded. They gather one tensor at a time.

    Args:
        tensors: the tensors by name.
        keep: whether this process needs the result; if False, return an empty dictionary.
    """
    result = {}
    for name, value in tensors.items():
        tensor = value.detach().full_tensor().cpu() if is_sharded(value) else value
        if keep:
            result[name] = tensor
    return result


def is_sharded(value: Any) -> bool:
    """Return whether a tensor is a `DTensor`."""
    return hasattr(value, "full_tensor")


def local(value: Any) -> Tensor:
    """Return this process's part of a sharded tensor, and any other tensor as it is."""
    return value.detach().to_local() if is_sharded(value) else value


def equal_steps(
    steps: Iterable[tuple[Tensor, ...]], anywhere: Callable[[bool], bool]
) -> Iterator[tuple[tuple[Tensor, ...], bool]]:
    """Yield the inputs of all steps, then repeat the last ones until every process has finished.

    Processes with a sharded model must call it equally often, because they gather its parameters then.

    Args:
        steps: the inputs of the steps of this process.
        anywhere: returns whether a condition holds in any process; all processes must call it.

    Yields:
        The inputs of a step, and whether the step counts.
    """
    inputs: tuple[Tensor, ...] | None = None
    for inputs in steps:
        anywhere(True)
        yield inputs, True
    while anywhere(False):
        if inputs is None:
            raise ValueError(
                "this process has no batch, but others have; give data of at least one batch per process"
            )
        yield inputs, False


def _separate_blocks(model: nn.Module, blocks: Blocks | None) -> list[nn.Module]:
    """Return the blocks that share no parameter with the rest of the model, the innermost first."""
    block_ids = {id(block) for block in (repeated_blocks if blocks is None else blocks)(model)}
    uses = _uses(model)
    return [
        module
        for module in reversed(list(model.modules()))
        if id(module) in block_ids
        and module is not model
        and all(uses[parameter] == count for parameter, count in _uses(module).items())
    ]


def _uses(model: nn.Module) -> Counter[int]:
    """Return how many names each parameter has, by the identity of the parameter."""
    return Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))


def _remove_hooks(module: nn.Module) -> None:
    """Remove the hooks that `fully_shard` has registered, and its record of the module."""
    from torch.distributed._composable_state import _module_state_mapping

    _module_state_mapping.pop(module, None)
    tables = [x for name, x in vars(module).items() if "_hooks" in name and isinstance(x, dict)]
    for table in tables:
        for key, hook in list(table.items()):
            if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp."):
                for other in tables:
                    other.pop(key, None)
