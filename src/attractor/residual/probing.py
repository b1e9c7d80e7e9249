"""How stiff a residual network's trajectory of features is, for any network, without touching its code.

A residual network moves a state, ``x_{t+1} = x_t + f(x_t)``. `probe` runs it on batches and returns the
neural stiffness index of every block and input, ``NSI = |x_{t+1} - x_t| / |x_t|``, as a
`StiffnessProfile`. No features are kept: norms are taken at each addition, and only they remain.

The first batch's first inputs show where the network adds (see `graph`); after that the pass is only
counted, operation by operation, and stopped at those that matter. Where a batch makes the network take
another way, its graph is looked at anew.

- *What x is.* The operand of the addition that the other was made from, or a stage's projected
  shortcut. In a network with an activation or a norm after the sum, x is what comes out of it, and
  x_{t+1} is the sum before it.
- *Blocks.* Several additions in one block, such as attention and MLP, are one step from the block's
  first x to its last sum; only that first x is held, until the block ends. ``granularity="addition"``
  takes each by itself.
- *Steps.* ``step="one"`` is the formula as above; ``step="gate"`` takes a gate F for the step size, and
  so the norm of what is multiplied by it, ``|f| / |x|``. Both are recorded in one pass.
- *Padding.* Tokens that ``attention_mask`` leaves out are left out of all norms, where the trunk is made
  from ``input_ids`` or ``inputs_embeds`` or a mapping has neither; in a decoder beside an encoder it is
  ``decoder_attention_mask``.
- *Before training* batch normalisations know no statistics, and in eval mode a network without them is
  not the one that training starts from. For `initial`, and with ``settle=True``, those that have never
  seen a batch work with the first batch's, while the probe lasts.
- *Inputs* are counted along the first axis of features that has as many entries as the batch, or in
  parts of the first axis where windows or tokens were moved into it.

What it cannot know:

- *What is no sum of two tensors*, as ``stack([x, f]).sum(0)`` or a kernel that adds by itself, and a
  highway, ``g f + (1 - g) x``, are not seen. Learnt latents and queries are a state only after something
  that varies was added to them.
- *Older states* that are mixed in, ``x + x_0`` or ``a x + b x_0``, or a shortcut around several blocks,
  are no steps, as nothing was made of x. With a convolution at the end of the shortcut's branch they
  are: the trunk then goes around the blocks, as in a U-Net that adds, and `within` shows those.
- *Several streams* side by side (RevNet, HRNet, CrossViT): the trunk is the one with most steps, of
  equal ones the one that ends last.
- *Parts of one block* that are kept in several lists (XLM's ``attentions`` and ``ffns``), or between
  which axes change places twice or are cut into windows, are blocks of their own.

>>> import torch
>>> from torch import nn
>>> class Block(nn.Module):
...     def __init__(self, width):
...         super().__init__()
...         self.f = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
...     def forward(self, x):
...         return x + self.f(x)
>>> profile = probe(nn.Sequential(*[Block(8) for _ in range(4)]), [torch.randn(16, 8)])
>>> profile.nsi.shape, profile.names, profile.stage.tolist()
(torch.Size([16, 4]), ('0', '1', '2', '3'), [0, 0, 0, 0])
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from attractor.core.stiffness import Mean
from attractor.residual.meter import Batch, Call, Meter, Padding, batches_of
from attractor.residual.profile import Step, StiffnessProfile
from attractor.residual.trunk import Granularity

SWITCHES = RLock()  # fused layers and compilation are switched off for the whole process


def probe(
    model: nn.Module,
    batches: Any,
    step: Step = "one",
    *,
    granularity: Granularity = "block",
    device: torch.device | str | None = None,
    initial: nn.Module | None = None,
    limit: int | None = None,
    padding: Padding = None,
    within: str = "",
    call: Call | None = None,
    mean: Mean = "input",
    settle: bool = False,
    progress: Callable[[int], None] | None = None,
) -> StiffnessProfile:
    """NSI of every residual block of a network, input by input.

    Args:
        model: any module with residual additions. It runs in eval mode without gradients, and is left
            as it was found.
        batches: one batch, or an iterable of batches such as a list, a generator or a DataLoader. The
            first axis counts inputs; floating inputs take the dtype of the model's first parameter.

            - A tensor ``[batch, ...]`` is one batch.
            - A mapping is one batch: arguments of the model by name. Labels, and what forward does not
              take, are left out.
            - A tuple is one batch, as loaders yield it: first the inputs, as many as forward has
              parameters without a default, then labels and others, which are left out.
              ``(inputs, labels)`` may have a mapping, or a list of several inputs, for its inputs.
            - A list holds batches, each of one of the kinds above and all of one form. Inside it, as a
              DataLoader yields them, a list is a tuple.

            A tuple of elements that look alike, such as ``x.split(64)`` or an input with a target of
            its shape, may mean one batch or several and raises: pass ``[batch]`` or a list. Only where
            their first axes differ, which those of one batch do not, are they several batches.
        step: "one", or "gate" for gates as step sizes; `StiffnessProfile.with_step` gives the other.
        granularity: "block", or "addition" for each addition by itself.
        device: where to run; by default where the model is.
        initial: the same network as it was before training, probed on the same inputs.
        limit: so many inputs at most.
        padding: what takes a batch and returns True or 1 for real tokens ``[batch, tokens]``, or such a
            tensor if there is one batch; False counts every token. By default a mapping's
            ``attention_mask``, where it is the trunk's own (see above).
        within: keep to additions inside the module of that path, such as "encoder".
        call: how the model is called, ``(model, batch)``, where its arguments are unusual.
        mean: what a block's NSI is compared with in TNS, see `attractor.stiffness`.
        settle: give batch normalisations that have never seen a batch the statistics of the first one;
            a single image will do, as long as its maps are larger than one pixel.
        progress: told the number of inputs done.

    Raises:
        ValueError: nothing is added to what it came from, the inputs cannot be told apart, there is
            no module `within`, or `batches` may mean several things.
        TypeError: `batches` is neither a batch nor an iterable of batches.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; probe takes an nn.Module")
    for name, value, allowed in (
        ("step", step, ("one", "gate")),
        ("granularity", granularity, ("block", "addition")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}; it is one of {', '.join(map(repr, allowed))}")
    if initial is model:
        raise ValueError(
            "initial is the model itself; give a copy from before its training, copy.deepcopy(model)"
        )
    if not isinstance(within, str):
        raise TypeError(
            f"within is a {type(within).__name__}; give the path of a module, such as layer1"
        )
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}; at least one input is needed")
    done = 0
    with SWITCHES, at_rest(model, device) as net, at_rest(initial, device) as fresh:
        meters = [Meter(m, granularity, within, call) for m in (net, fresh) if m is not None]
        for given in batches_of(batches, meters[0].model):
            if done and isinstance(padding, Tensor):
                raise ValueError(
                    "padding is a tensor, which marks the tokens of one batch, but there are several; "
                    "pass a function that takes a batch and returns its mask"
                )
            batch = Batch.of(given, meters[0].model, padding, call)
            if limit is not None:
                batch = batch.first(limit - done)
            for meter in meters:
                if not done and (settle or meter is not meters[0]):
                    settle_norms(meter, batch)
                meter.see(batch)
            done += batch.size
            if progress is not None:
                progress(done)
            if done == limit:
                break
    if not done:
        raise ValueError("batches held nothing; give at least one batch of inputs")
    profiles = [meter.profile(step, mean, granularity) for meter in meters]
    return profiles[0].beside(profiles[1]) if len(profiles) > 1 else profiles[0]


@contextmanager
def at_rest(model: nn.Module | None, device: torch.device | str | None) -> Iterator[nn.Module | None]:
    """A model in eval mode on the device, eager and without fused layers; then as it was before."""
    if model is None:
        yield None
        return
    inner = (
        model.module
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        else model
    )
    modes = [(module, module.training) for module in inner.modules()]
    untouched = [(norm, {k: b.clone() for k, b in norm.named_buffers()}) for norm in unseen(inner)]
    homes = {p.device for p in inner.parameters()} or {torch.device("cpu")}
    if device is not None and len(homes) > 1:
        raise ValueError(
            f"the model lies on {', '.join(sorted(map(str, homes)))}, so device={str(device)!r} would "
            "not be undone; leave device out, it runs where it is"
        )
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        if device is not None:
            move(inner, device)
        for module, _ in modes:
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield inner
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in modes:
            module.training = training
        for norm, buffers in untouched:
            for name, buffer in norm.named_buffers():
                buffer.copy_(buffers[name])
        if device is not None:
            inner.to(next(iter(homes)))


def move(model: nn.Module, device: Any) -> None:
    """Put a model on a device, with a clear error where there is none."""
    try:
        model.to(torch.device(device))
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device = {device!r} cannot be used here: {reason}") from None


def unseen(model: nn.Module) -> list[_BatchNorm]:
    """Batch normalisations whose statistics are still those they were made with."""
    found = []
    for norm in model.modules():
        if (
            isinstance(norm, _BatchNorm)
            and norm.running_mean is not None
            and norm.running_var is not None
        ):
            still = not bool(norm.running_mean.any()) and bool((norm.running_var == 1).all())
            if still and not norm.num_batches_tracked:
                found.append(norm)
    return found


def settle_norms(meter: Meter, batch: Batch) -> None:
    """Give batch normalisations that have never seen a batch the statistics of this one.

    Raises:
        ValueError: it has one input, and that is too little.
    """
    norms = unseen(meter.model)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.training, norm.momentum = True, 1.0
        meter.call(meter.model, batch.given)
    except ValueError as error:
        if batch.size > 1:
            raise
        raise ValueError(
            "the first batch has one input, from which batch normalisations that have never seen any "
            f"cannot take their statistics ({str(error).split(';')[0]}); begin with a larger batch"
        ) from None
    finally:
        for norm, momentum in zip(norms, momenta):
            norm.training, norm.momentum = False, momentum
