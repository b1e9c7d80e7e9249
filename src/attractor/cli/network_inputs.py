"""Inputs of networks, for the command line: noise, images, texts, and the inputs in a user's file."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from attractor.cli.network_names import Network, fetch, import_package
from attractor.data import images
from attractor.data.imagefolder import ENDINGS, centre_box, decoded
from attractor.residual.batch import Batch, is_batch
from attractor.storage.files import read_text
from attractor.storage.limits import check_memory

TOKENS = 64  # length of a random text


def noise(network: Network, n: int, batch: int, seed: int, size: int) -> Iterator[Any]:
    """Yield batches of normal noise, or of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    channels = channels_of(network.model)
    _check_images(min(n, batch), channels, size)
    for start in range(0, n, batch):
        count = min(batch, n - start)
        if network.vocabulary is not None:
            shape = (count, TOKENS)
            ids = torch.randint(network.vocabulary, shape, generator=generator)
            by_name = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            yield by_name if network.name.startswith("transformers:") else ids
        else:
            yield torch.randn(count, channels, size, size, generator=generator)


def _check_images(count: int, channels: int, size: int) -> None:
    """Raise if images ``[count, channels, size, size]`` in float32 do not fit into memory."""
    check_memory(
        f"images [{count:,}, {channels}, {size:,}, {size:,}]",
        4 * count * channels * size**2,
        "use a smaller --size or --batch",
    )


def own_inputs(network: Network, n: int, batch: int, seed: int) -> Iterator[Any]:
    """Yield batches of the attribute `inputs` beside a user's network.

    A single batch, as defined by `is_batch`, is split into batches of the size `batch`. The batches of a
    list or an iterator are not changed.
    """
    inputs, where = network.inputs, f"inputs in {network.place}"
    if callable(inputs) and not isinstance(inputs, Mapping):
        generator = torch.Generator().manual_seed(seed)
        try:
            inspect.signature(inputs).bind(n, generator)
        except TypeError:
            raise ValueError(
                f"{where} is called as inputs(n, generator), but takes {inspect.signature(inputs)}; "
                "write def inputs(n, generator), which returns n inputs"
            ) from None
        inputs = inputs(n, generator)
    if not is_batch(inputs, network.model, where):
        yield from inputs
        return
    size = Batch.of(inputs, network.model, None).size
    last = min(n, size)
    for start in range(0, last, batch):
        yield _rows(inputs, slice(start, min(start + batch, last)), size)


def _rows(inputs: Any, rows: slice, size: int) -> Any:
    """Return some rows of a batch; tensors without a batch axis of that size are not changed."""
    if isinstance(inputs, Mapping):
        return {key: _rows(value, rows, size) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(_rows(value, rows, size) for value in inputs)
    return inputs[rows] if isinstance(inputs, Tensor) and inputs.shape[:1] == (size,) else inputs


def advice(network: Network, source: str = "") -> str:
    """Return what to do if a network rejected its inputs.

    Args:
        source: The option that named the source of the inputs; empty if there was none.
    """
    if network.place is None:
        return "give --size, or --images, --data or --texts that fit it"
    if network.inputs is not None:
        own = f"inputs in {network.place}"
        return (
            f"leave {source} out, and it gets {own}" if source else f"change {own} so that they fit it"
        )
    ids = f"torch.randint({network.vocabulary or 1000}, (n, 64), generator=generator)"
    return (
        f"give --size, or --images or --data that fit it, or write a function inputs(n, generator) into "
        f"{network.place} that returns n inputs: for a network on texts token ids, such as {ids}"
    )


def data_set(
    network: Network, name: str, folder: Path | None, n: int, batch: int, seed: int, size: int | None
) -> Iterator[Tensor]:
    """Yield batches of the test images of a data set, resized to `size` if it is not None."""
    if name == "imagefolder":
        raise ValueError("--data imagefolder is not supported here; use --images FOLDER")
    try:
        test_set = images.load(name, "test", folder)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    test_set = test_set.subset(min(n, len(test_set)), seed)
    if channels_of(network.model) == 3:
        test_set = test_set.rgb()
    for start in range(0, len(test_set), batch):
        pictures = test_set.normalised(slice(start, start + batch))
        resize = size is not None and (size, size) != tuple(pictures.shape[2:])
        _check_images(len(pictures), pictures.shape[1], size or 1)
        yield interpolate(pictures, size, mode="bilinear", antialias=True) if resize else pictures


def folder_of_images(network: Network, folder: Path, n: int, batch: int, size: int) -> Iterator[Tensor]:
    """Yield batches of the central squares of the images in a folder and its subfolders."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; --images takes one with image files")
    paths = [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in ENDINGS][:n]
    if not paths:
        raise ValueError(f"{folder} holds no image files ({', '.join(sorted(ENDINGS))})")
    image = import_package("PIL.Image", "vision").Image
    _check_images(min(len(paths), batch), 3, size)
    mean, std = (torch.tensor(x)[:, None, None] for x in (network.mean, network.std))
    for start in range(0, len(paths), batch):
        pictures = []
        for path in paths[start : start + batch]:
            picture = decoded(path)
            resized = picture.resize((size, size), image.Resampling.BILINEAR, centre_box(*picture.size))
            pictures.append(torch.from_numpy(np.array(resized)).permute(2, 0, 1))
        normalised = (torch.stack(pictures) / 255 - mean) / std
        yield normalised.mean(1, keepdim=True) if channels_of(network.model) == 1 else normalised


def texts(network: Network, path: Path, n: int, batch: int) -> Iterator[Any]:
    """Yield batches of the lines of a file, tokenized and padded."""
    if network.tokenizer is None:
        remedy = "leave it out"
        if network.place is not None:
            remedy = (
                f"write a function inputs(n, generator) into {network.place} that returns n texts as "
                "token ids"
            )
        raise ValueError(f"{network.name} has no tokenizer, so --texts cannot be read; {remedy}")
    if not path.is_file():
        raise ValueError(f"there is no file {path}; --texts takes a file with one text per line")
    name = network.tokenizer
    auto = import_package("transformers", "text").AutoTokenizer
    tokenizer = fetch(lambda: auto.from_pretrained(name, trust_remote_code=False), network.name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lines = [line for line in read_text(path, link=True).splitlines() if line.strip()][:n]
    for start in range(0, len(lines), batch):
        part = lines[start : start + batch]
        yield tokenizer(part, padding=True, truncation=True, max_length=512, return_tensors="pt")


def channels_of(model: nn.Module) -> int:
    """Return the number of channels of a network's images, that of its first convolution."""
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    return next((c.in_channels for c in convolutions), 3)
