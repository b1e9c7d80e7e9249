"""The stiffness of a residual network's trajectory of features, for any network without changes to it.

A residual network moves a state, ``x_{t+1} = x_t + f(x_t)``. `probe` runs it on batches and returns the
neural stiffness index of each block and input, ``NSI = |x_{t+1} - x_t| / |x_t|``, as a
`StiffnessProfile`. Norms are computed during the pass; no features are stored.

A first pass with two inputs shows where the network adds (see `finder`). The following passes only
count operations and measure at the additions. If a batch makes the network run other operations, its
graph is read again.

- *State.* x is the operand of the addition that the other operand depends on, or the projected
  shortcut of a stage. In a network with an activation or a norm after the sum, x is its output, and
  x_{t+1} is the sum before it.
- *Blocks.* Several additions in one block, such as attention and MLP, are one step from the first x to
  the last sum. Only that first x is held until the block ends. ``granularity="addition"`` measures each
  addition.
- *Steps.* ``step="one"`` is the formula above. ``step="gate"`` uses a gate F as the step size, and so
  the norm of the tensor that F multiplies, ``|f| / |x|``. One pass records both.
- *Padding.* Tokens that ``attention_mask`` excludes do not count, if the trunk depends on ``input_ids``
  or ``inputs_embeds``, or if a mapping has neither. In a decoder beside an encoder the mask is
  ``decoder_attention_mask``.
- *Before training*, batch normalisations have no statistics, and in evaluation mode the network is not
  the one that training starts from. For `initial`, and with ``settle=True``, normalisations without
  statistics use those of the first batch during the probe.
- *Inputs* are counted along the first axis of the features that has as many entries as the batch, or in
  parts of the first axis if windows or tokens were folded into it.

Limitations:

- *Other forms of sums*, such as ``stack([x, f]).sum(0)``, a kernel that adds internally, and a highway
  ``g f + (1 - g) x``, are not recognised. Learnt latents and queries are a state only after an addition
  of something that depends on the input.
- *Older states*, as in ``x + x_0`` or ``a x + b x_0``, and a shortcut around several blocks are not
  steps, as the branch is not a function of x. With a convolution at the end of the shortcut they are:
  the trunk then leads around the blocks, as in a U-Net that adds, and `within` selects the inner ones.
- *Several streams* side by side (RevNet, HRNet, CrossViT): the trunk is the stream with the most steps,
  or among equal ones the one that ends last.
- *Parts of one block* are separate blocks if they are stored in several lists (XLM's ``attentions`` and
  ``ffns``), or if axes are permuted twice or cut into windows between them.

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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attractor.core.stiffness import Mean
from attractor.residual.batch import Batch, Call, Padding, batches_of
from attractor.residual.evaluation import PROCESS_LOCK, evaluation_mode, fresh_norms
from attractor.residual.meter import Meter
from attractor.residual.profile import Step, StiffnessProfile
from attractor.residual.trunk import Granularity


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
    """Return the NSI of each residual block of a network for each input.

    Args:
        model: Any module with residual additions. It runs in evaluation mode without gradients, and its
            state is restored.
        batches: One batch, or an iterable of batches such as a list, a generator or a DataLoader. The
            first axis counts inputs. Floating-point inputs are converted to the dtype of the model.

            - A tensor ``[batch, ...]`` is one batch.
            - A mapping is one batch, the keyword arguments of the model. Labels, and entries that
              forward does not accept, are omitted.
            - A tuple is one batch as a loader yields it: first the inputs, as many as forward has
              parameters without a default, then labels and others, which are omitted. In
              ``(inputs, labels)`` the inputs may be a mapping, or a list of several inputs.
            - A list holds batches, each in one of the forms above and all in the same form. Inside it,
              as a DataLoader yields them, a list is treated as a tuple.

            A tuple of similar elements, such as ``x.split(64)`` or an input with a target of its shape,
            is ambiguous and raises an error; pass ``[batch]`` or a list. Only if the lengths of their
            first axes differ are the elements several batches.
        step: "one", or "gate" to use gates as step sizes; `StiffnessProfile.with_step` converts.
        granularity: "block", or "addition" to measure each addition.
        device: Device to run on; by default the model's.
        initial: The same network before its training, which is probed on the same inputs.
        limit: Maximum number of inputs.
        padding: A function from the batch to a mask of valid tokens ``[batch, tokens]``, or such a mask
            if there is one batch; False counts every token. By default the ``attention_mask`` of a
            mapping, if it belongs to the trunk (see above).
        within: Path of a module, such as "encoder". Only additions inside it are measured.
        call: Function ``(model, batch)`` that calls the model, if its arguments are unusual.
        mean: The mean with which TNS compares the NSI of a block; see `attractor.stiffness`.
        settle: Give batch normalisations without statistics those of the first batch. One image is
            sufficient if its maps are larger than one pixel.
        progress: Function that is called with the number of inputs so far.

    Raises:
        ValueError: The model has no residual blocks, its inputs cannot be separated, it has no module
            `within`, or `batches` is ambiguous.
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
            "initial is the model itself; pass a copy from before its training, copy.deepcopy(model)"
        )
    if not isinstance(within, str):
        raise TypeError(
            f"within is a {type(within).__name__}; pass the path of a module, such as layer1"
        )
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}; it must be at least 1")
    count = 0
    with PROCESS_LOCK, evaluation_mode(model, device) as net, evaluation_mode(initial, device) as first:
        meters = [Meter(m, granularity, within, call) for m in (net, first) if m is not None]
        for data in batches_of(batches, meters[0].model):
            if count and isinstance(padding, Tensor):
                raise ValueError(
                    "padding is a tensor, which marks the tokens of one batch, but there are several; "
                    "pass a function that takes a batch and returns its mask"
                )
            batch = Batch.of(data, meters[0].model, padding, call)
            if limit is not None:
                batch = batch.first(limit - count)
            for meter in meters:
                if not count and (settle or meter is not meters[0]):
                    settle_norms(meter, batch)
                meter.measure(batch)
            count += batch.size
            if progress is not None:
                progress(count)
            if count == limit:
                break
    if not count:
        raise ValueError("batches held nothing; pass at least one batch of inputs")
    profiles = [meter.profile(step, mean, granularity) for meter in meters]
    return profiles[0].beside(profiles[1]) if len(profiles) > 1 else profiles[0]


def settle_norms(meter: Meter, batch: Batch) -> None:
    """Give batch normalisations without statistics those of a batch.

    Raises:
        ValueError: The batch has one input, from which they cannot be computed.
    """
    norms = fresh_norms(meter.model)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.training, norm.momentum = True, 1.0
        meter.call(meter.model, batch.data)
    except ValueError as error:
        if batch.size > 1:
            raise
        raise ValueError(
            "the first batch has one input, from which batch normalisations without statistics cannot "
            f"take them ({str(error).split(';')[0]}); begin with a larger batch"
        ) from None
    finally:
        for norm, momentum in zip(norms, momenta):
            norm.training, norm.momentum = False, momentum
