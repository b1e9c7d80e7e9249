"""The residual blocks of a network: one search for `probe` and `insert_gates`.

Both read the graph of a run (see `graph`), in which an addition of x and a function of x is a residual
step, and both name its block by `block_path`. `probe` runs the whole network and measures the trunk, the
longest chain of steps. `insert_gates` needs every module whose own forward adds a branch. With an
example, these are read from a run of the whole network too. Without one, modules are run by themselves
on made-up inputs: first those with the names of torchvision, timm and transformers, and if none of these
is a residual block, all modules with convolutions.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from attractor.residual.batch import Batch, Call, call_model
from attractor.residual.blocks import ResidualBlock, block_by_names
from attractor.residual.branch import Arguments, Branch, NoBranchError, place_of, read_branch
from attractor.residual.dispatch import Calls, Path, split_path
from attractor.residual.evaluation import PROCESS_LOCK, evaluation_mode
from attractor.residual.graph import Graph
from attractor.residual.trunk import find_trunk, merge_lists_of_parts, merge_parts


def trace(model: nn.Module, batch: Batch, call: Call = call_model, within: str = "") -> Graph:
    """Return the graph of one run of a model in evaluation mode; arguments as in `probe`."""
    calls = Calls(model)
    graph = Graph(calls, batch.varying(), batch.size, within)
    with calls.watched(), graph:
        call(model, batch.data)
    return graph


@dataclass
class Search:
    """The residual blocks of a network.

    Attributes:
        model: The network.
        blocks: The blocks in the order of its modules, also those that a gate cannot be inserted into.
        lookalikes: Modules that resemble a residual block; each has the reason why it is none.
    """

    model: nn.Module
    blocks: list[ResidualBlock] = field(default_factory=list)
    lookalikes: dict[str, str] = field(default_factory=dict)

    @property
    def open(self) -> list[ResidualBlock]:
        """The blocks that a gate can be inserted into."""
        return [block for block in self.blocks if not block.obstacle]

    @property
    def reasons(self) -> dict[str, str]:
        """Why modules get no gate, by their names."""
        obstacles = {block.name: block.obstacle for block in self.blocks if block.obstacle}
        return {**obstacles, **self.lookalikes}

    def examine(self, block: ResidualBlock, arguments: dict[str, Arguments] | None) -> None:
        """Run a block and add it to the blocks or lookalikes."""
        try:
            self.blocks.append(_read(block, arguments))
        except NoBranchError as error:
            if error.adds:
                self.blocks.append(replace(block, obstacle=str(error)))
            else:
                self.lookalikes[block.name] = str(error)

    def error(self) -> ValueError:
        """The error for a network without blocks that a gate can be inserted into."""
        reasons = [
            f"{name or 'the network itself'} {reason}"
            for name, reason in self.reasons.items()
            if name or len(self.reasons) == 1
        ]
        text = summarise(reasons) or "no module with convolutions adds the output of a part to its input"
        return ValueError(f"{type(self.model).__name__} has no residual blocks of convolutions: {text}")


def find_blocks(model: nn.Module, example: Any = None) -> Search:
    """Search a network for residual blocks.

    Args:
        model: The network.
        example: A batch in a form that `probe` accepts, or None to run modules by themselves.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass an nn.Module")
    return _run_modules(model) if example is None else _run_network(model, example)


def residual_blocks(model: nn.Module, example: Any = None) -> list[ResidualBlock]:
    """Return the residual blocks of a network, in the order of its modules.

    Without an example only blocks with convolutions are found. Blocks that a gate cannot be inserted
    into have the reason in their attribute `obstacle`.

    Args:
        model: The network.
        example: A batch in a form that `probe` accepts. Requires: without it, blocks can be run on one
            input map by themselves.

    Raises:
        ValueError: The network has no residual blocks.
    """
    search = find_blocks(model, example)
    if not search.blocks:
        raise search.error()
    return search.blocks


def summarise(reasons: list[str]) -> str:
    """Join the first three reasons, and count the others."""
    more = f", and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return "; ".join(reasons[:3]) + more


def _run_network(model: nn.Module, example: Any) -> Search:
    """Search the graph of one run of the whole network."""
    with PROCESS_LOCK, evaluation_mode(model):
        batch = Batch.of(example, model, False)
        arguments = _arguments(model, batch)
        graph = trace(model, batch)
    homes: dict[Path, list[Path]] = defaultdict(list)  # of the trunk's additions, by place
    trunk = merge_parts(find_trunk(graph.steps)) if graph.steps else []
    for step in merge_lists_of_parts(trunk, model) if trunk else ():
        homes[place_of(graph, step)].append(step.home)
    places = {place_of(graph, step) for step in graph.steps.values()}
    modules = {split_path(name): (name, module) for name, module in model.named_modules()}
    search, obstacles = Search(model), set()
    for place, (name, module) in modules.items():
        by_names = block_by_names(name, module)
        if (by_names is None and place not in places) or "gate" in place:
            continue
        count = len(search.blocks)
        search.examine(by_names or ResidualBlock(name, module), arguments)
        block = search.blocks[-1] if len(search.blocks) > count else None
        if place in homes and (block is None or block.obstacle):
            del search.blocks[count:]
            reason = search.lookalikes.pop(name, "") or (block.obstacle if block else "")
            for home in dict.fromkeys(homes[place]):  # a forward may add the outputs of several blocks
                own = home if len(home) > len(place) else place
                if own not in obstacles:
                    obstacles.add(own)
                    search.blocks.append(ResidualBlock(*modules[own], obstacle=reason))
        elif by_names is None and (block is None or block.obstacle):  # a sum inside a branch
            del search.blocks[count:]
            search.lookalikes.pop(name, None)
    for i, block in enumerate(search.blocks):
        merged = set(homes.get(split_path(block.name), ()))
        if len(merged) == 1:
            search.blocks[i] = replace(block, merged=merged.pop())
    return search


def _run_modules(model: nn.Module) -> Search:
    """Search modules one by one."""
    search = Search(model)
    for name, module in model.named_modules():
        if (block := block_by_names(name, module)) is not None:
            search.examine(block, None)
    if search.open:
        return search
    inside = lambda name, blocks: any(not name or b.name.startswith(f"{name}.") for b in blocks)
    failures: dict[str, str] = {}
    for name, module in reversed(list(model.named_modules())):  # inner modules first
        examined = name in search.reasons or "gate" in name.split(".")
        if examined or inside(name, search.open) or not _may_be_block(module):
            continue
        search.examine(ResidualBlock(name, module), None)
        if search.blocks and search.blocks[-1].failure and search.blocks[-1].module is module:
            failures[name] = f"could not be run by itself ({search.blocks.pop().failure}); pass example="
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    search.blocks.sort(key=lambda block: order[block.name])
    if search.open:
        others = {name: reason for name, reason in failures.items() if not inside(name, search.open)}
        search.lookalikes = {name: others[name] for name in order if name in others}
    else:
        reasons = {**search.lookalikes, **failures}
        resembles = lambda name: (
            "only inside its part" not in reasons[name]
            and (sum(isinstance(part, _ConvNd) for part in model.get_submodule(name).modules()) > 1)
        )
        relevant = [n for n in order if n in reasons and (n in failures or resembles(n))]
        search.lookalikes = {name: reasons[name] for name in relevant}
    return search


def _read(block: ResidualBlock, arguments: dict[str, Arguments] | None) -> ResidualBlock:
    """Complete a block by a run, unless it is a block of this library or has a gate already."""
    inserted: Branch | None = vars(block.module).get("gated_branch")
    if inserted is not None:
        return _complete(block, inserted)
    ours = type(block.module).__module__.startswith("attractor.")
    if (ours and block.end) or ((ours or block.end) and block.gate() is not None):
        return block
    if arguments is not None and block.name not in arguments:
        return replace(block, failure="the network does not call it on the example")
    try:
        call = arguments[block.name] if arguments is not None else None
        branch = read_branch(block.module, call, block.end, split_path(block.name))
    except NoBranchError:
        raise
    except Exception as error:
        return replace(block, failure=f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")
    return _complete(block, branch)


def _complete(block: ResidualBlock, branch: Branch) -> ResidualBlock:
    names = ("channels", "end", "shortcut", "identity", "axes", "path")
    return replace(block, branch=branch, **{name: getattr(branch, name) for name in names})


def _arguments(model: nn.Module, batch: Batch) -> dict[str, Arguments]:
    """Return the arguments of the first call of each module, on the meta device."""
    arguments: dict[str, Arguments] = {}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors: dict[int, Tensor] = {}  # a tensor that occurs twice remains one tensor

        def to_meta(value: Any) -> Any:
            if isinstance(value, Tensor):
                return tensors.setdefault(id(value), value.detach().to("meta"))
            return [to_meta(v) for v in value] if isinstance(value, list | tuple) else value

        if name not in arguments:
            arguments[name] = tuple(map(to_meta, args)), {k: to_meta(v) for k, v in kwargs.items()}

    hooks = []
    try:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # these accept no hooks
                hook = partial(record, name)
                hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        call_model(model, batch.data)
    finally:
        for handle in hooks:
            handle.remove()
    return arguments


def _may_be_block(module: nn.Module) -> bool:
    """Whether a module has parts, convolutions among them, and a forward of its own."""
    kind: Any = type(module)
    has_forward = kind.forward not in (nn.Sequential.forward, nn.Module.forward)
    return has_forward and any(isinstance(m, _ConvNd) for m in module.modules() if m is not module)
