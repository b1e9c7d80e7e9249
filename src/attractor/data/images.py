"""Images and their labels: CIFAR-10 and -100, STL-10, the digits that come with the library, any folder.

`load` returns an `ImageSet`, with all images in memory as bytes, from the first available source:

- sheets: ``cifar10_part_a.webp``, ``cifar10_part_b.webp`` and ``cifar10_labels.npz``; for CIFAR-100
  parts a, b and c. Images are tiled row by row in lossless WebP. Part b alone is a smaller CIFAR-10
  (20,000 training images), part a alone a smaller CIFAR-100; both hold the whole test set;
- the binary files of the official archives: ``data_batch_1.bin`` and so on, ``train.bin``,
  ``train_X.bin``, in the folder or in the subfolder of the archive;
- torchvision, then the `datasets` library, if installed; both download missing files.

``load("imagefolder")`` returns an `ImageFolder` instead, whose images are decoded on demand.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from attractor.common.checks import check_beside, check_tensor, check_whole, is_whole, nearest
from attractor.data.folders import Folder, folder_of
from attractor.data.imagefolder import ImageFolder, subfolders

Raw = tuple[np.ndarray, np.ndarray, list[str]]  # uint8 [n, c, h, w], labels [n], names of the classes
NAMES = ("digits", "cifar10", "cifar100", "stl10", "imagefolder")
CACHE = Path("~/.cache/attractor")  # where torchvision stores files if no folder is passed
# Mean and standard deviation of the official training sets; others are computed by `load`.
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.491400, 0.482158, 0.446531), (0.247032, 0.243485, 0.261588)),
    "cifar100": ((0.507075, 0.486549, 0.440918), (0.267334, 0.256438, 0.276150)),
}
BINARY = {
    "cifar10": ("cifar-10-batches-bin", {"train": [f"data_batch_{i}.bin" for i in range(1, 6)],
                                         "test": ["test_batch.bin"]}, "batches.meta.txt"),
    "cifar100": ("cifar-100-binary", {"train": ["train.bin"], "test": ["test.bin"]},
                 "fine_label_names.txt"),
    "stl10": ("stl10_binary", {"train": ["train_X.bin", "train_y.bin"],
                               "test": ["test_X.bin", "test_y.bin"]}, "class_names.txt"),
}  # fmt: skip
HUB = {
    "cifar10": ("uoft-cs/cifar10", "img", "label"),
    "cifar100": ("uoft-cs/cifar100", "img", "fine_label"),
    "stl10": ("tanganke/stl10", "image", "label"),
}
DIGITS_TRAIN = 1437  # of 1,797; the last 360, by other writers, are for testing


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images as bytes, with labels and statistics.

    Attributes:
        images: uint8 ``[n, channels, height, width]``.
        labels: int64 ``[n]``, from 0.
        classes: names of the classes.
        mean, std: mean and standard deviation per channel over the training set, of values scaled to
            0..1; test images have those of the training images, by which they must be normalised.
        name: name of the data set; it shows if the set is incomplete.
    """

    images: Tensor
    labels: Tensor
    classes: list[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str = "images"

    def __repr__(self) -> str:
        n, channels, height, width = self.images.shape
        size = f"{channels} x {height} x {width}"
        return f"ImageSet({self.name}: {n:,} images {size}, {len(self.classes)} classes)"

    def __post_init__(self) -> None:
        check_tensor("images", self.images, "uint8 [n, channels, height, width]", floating=False)
        check_tensor("labels", self.labels, "int64 [n]", floating=False)
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            description = f"{self.images.dtype} {list(self.images.shape)}"
            raise ValueError(
                f"images are {description}; they must be uint8 [n, channels, height, width]"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            description = f"{self.labels.dtype} {list(self.labels.shape)}"
            raise ValueError(f"labels are {description}; they must be int64 [{len(self.images)}]")
        if not len(self.mean) == len(self.std) == self.images.shape[1]:
            description = f"{len(self.mean)} means and {len(self.std)} deviations"
            raise ValueError(
                f"{description} for {self.images.shape[1]} channels; there must be one for each"
            )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: Tensor) -> "ImageSet":
        """Return the images at these positions, in this order."""
        if not isinstance(index, Tensor):
            try:
                index = torch.as_tensor(index)
            except (RuntimeError, TypeError, ValueError) as error:
                raise TypeError(f"index is a {type(index).__name__}; give positions [k]") from error
        self._check_index(index)
        return replace(self, images=self.images[index], labels=self.labels[index])

    def subset(self, n: int, seed: int = 0) -> "ImageSet":
        """Return n random images without replacement; they depend on the seed only."""
        return self.hold_out(n, seed)[1]

    def hold_out(self, n: int, seed: int = 0) -> tuple["ImageSet", "ImageSet"]:
        """Split off n random images; return the others, for training, and the n, for validation."""
        check_whole("seed", seed, 0)
        if not is_whole(n) or not 0 <= n <= len(self):
            raise ValueError(f"cannot split off {n!r} images of {self.name}, which has {len(self)}")
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.take(order[n:]), self.take(order[:n])

    def rgb(self) -> "ImageSet":
        """Return the set with grey images repeated to three channels; coloured ones are unchanged."""
        if self.images.shape[1] == 3:
            return self
        if self.images.shape[1] != 1:
            raise ValueError(
                f"images have {self.images.shape[1]} channels; only images with 1 channel can be "
                "converted to RGB"
            )
        return replace(self, images=self.images.repeat(1, 3, 1, 1), mean=self.mean * 3, std=self.std * 3)

    def normalised(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Return normalised images, float32 with mean 0 and deviation 1 ``[k, channels, h, w]``."""
        if not isinstance(index, slice):
            self._check_index(index)
        mean, std = (
            torch.tensor(x, device=self.images.device)[:, None, None] for x in (self.mean, self.std)
        )
        return (self.images[index] / 255 - mean) / std

    def _check_index(self, index: Any) -> None:
        """Raise unless index is a tensor of positions, or of one bool per image."""
        check_tensor("index", index, "of positions [k]", floating=False)
        check_beside("index", index, "the images", self.images)
        if index.dtype == torch.bool:
            valid = index.shape == self.labels.shape
        else:
            valid = index.dtype in (torch.int64, torch.int32) and index.dim() == 1
            if valid and index.device.type == "cpu":  # on a GPU this would wait for the device
                valid = bool(((index >= -len(self)) & (index < len(self))).all())
        if not valid:
            raise ValueError(
                f"index {list(index.shape)} of {index.dtype} must be positions from 0 to {len(self) - 1}"
            )


@overload
def load(  # type: ignore[overload-overlap]
    name: Literal["imagefolder"], split: str = ..., folder: Folder = ...
) -> ImageFolder: ...
@overload
def load(name: str, split: str = ..., folder: Folder = ...) -> ImageSet: ...
def load(name: str, split: str = "train", folder: Folder = None) -> ImageSet | ImageFolder:
    """Return the training or test images of a data set.

    Args:
        name: ``"digits"`` (1,437 and 360 grey images of 8 x 8; comes with the library), ``"cifar10"``,
            ``"cifar100"``, ``"stl10"`` or ``"imagefolder"``.
        split: ``"train"`` or ``"test"``; for an image folder the name of a subfolder, such as ``"val"``,
            which gets the labels of the subfolder ``"train"``.
        folder: the folder of the files; None: the folder in ``ATTRACTOR_DATA``.

    Raises:
        FileNotFoundError: the data set was not found; the message lists all places that were searched.
    """
    if not isinstance(name, str) or name not in NAMES:
        hint = nearest(name, NAMES)
        raise ValueError(f"no image data set is called {name!r}; there are {', '.join(NAMES)}{hint}")
    place = folder_of(folder)
    if name == "imagefolder":
        if place is None:
            raise FileNotFoundError(
                f"give the folder of {split}/<class>/<image> with folder= or in ATTRACTOR_DATA"
            )
        train_classes = (
            subfolders(place / "train") if split != "train" and (place / "train").is_dir() else None
        )
        return ImageFolder(place / split, train=split == "train", classes=train_classes)
    if split not in ("train", "test"):
        raise ValueError(
            f"{name} has no split {split!r}; it has train and test, and ImageSet.hold_out splits one of "
            "them"
        )
    images, labels, classes = _read_split(name, split, place)
    if name in STATISTICS:
        mean, std = STATISTICS[name]
    else:
        mean, std = _statistics(images if split == "train" else _read_split(name, "train", place)[0])
    official = {"cifar10": 50_000, "cifar100": 50_000}.get(name, 0)
    part = f" ({len(images):,} of {official:,})" if split == "train" and len(images) < official else ""
    return ImageSet(
        torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64)),
        classes, mean, std, name + part,
    )  # fmt: skip


def _read_split(name: str, split: str, place: Path | None) -> Raw:
    """Read a split from the first available source. A source returns the data, or a reason."""
    reasons = []
    for source in SOURCES[name]:
        result = source(name, split, place)
        if not isinstance(result, str):
            return result
        reasons.append(result)
    where = "no folder is named with folder= or in ATTRACTOR_DATA" if place is None else f"in {place}"
    raise FileNotFoundError(f"no {split} images of {name}: {where}; {'; '.join(reasons)}")


def _digits(name: str, split: str, place: Path | None) -> Raw:
    # UCI "Optical Recognition of Handwritten Digits", test part (E. Alpaydin, C. Kaynak; CC BY 4.0, see
    # NOTICE).
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["x"], file["y"]
    part = slice(DIGITS_TRAIN) if split == "train" else slice(DIGITS_TRAIN, None)
    pixels = np.round(images[part, None] * (255 / 16)).astype(np.uint8)  # 17 levels of grey
    return pixels, labels[part], [str(i) for i in range(10)]


def _sheets(name: str, split: str, place: Path | None) -> Raw | str:
    """Read CIFAR from the sheets in a folder, in the official order."""
    parts = "ab" if name == "cifar10" else "abc"
    test_part = "b" if name == "cifar10" else "a"  # the part with the test images
    reason = f"looked for {name}_part_{test_part}.webp and {name}_labels.npz"
    if place is None or not (place / f"{name}_labels.npz").is_file():
        return reason
    files = {p: path for p in parts if (path := place / f"{name}_part_{p}.webp").is_file()}
    if test_part not in files:
        return reason
    with np.load(place / f"{name}_labels.npz") as file:
        labels = {key: file[key] for key in file}
    if name == "cifar10":
        classes, last = labels["names"].tolist(), _sheet(files["b"])
        if split == "test":
            return last[20_000:], labels["test"], classes
        if "a" not in files:
            return last[:20_000], labels["train"][30_000:], classes
        return np.concatenate((_sheet(files["a"]), last[:20_000])), labels["train"], classes
    classes = labels["fine_names"].tolist()
    if split == "test":
        return _sheet(files["a"])[:10_000], labels["test"], classes
    images = np.concatenate([_sheet(path)[10_000 * (p == "a") :] for p, path in files.items()])
    order = np.argsort(np.concatenate([labels[f"index_{p}"] for p in files]))
    return images[order], np.concatenate([labels[f"train_{p}"] for p in files])[order], classes


def _sheet(path: Path) -> np.ndarray:
    """Return the images ``[n, 3, 32, 32]`` of a sheet."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(f"reading {path.name} needs Pillow: pip install 'attractor[vision]'") from None
    with Image.open(path) as picture:
        sheet = np.asarray(picture.convert("RGB"))
    rows, columns = sheet.shape[0] // 32, sheet.shape[1] // 32
    return sheet.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def _binary(name: str, split: str, place: Path | None) -> Raw | str:
    """Read the binary files of the official archive."""
    inner, files, names = BINARY[name]
    reason = f"looked for {files[split][0]}, also in {inner}"
    if place is None:
        return reason
    for folder in (place, place / inner):
        paths = [folder / file for file in files[split]]
        if all(path.is_file() for path in paths):
            break
    else:
        return reason
    classes = (folder / names).read_text().split() if (folder / names).is_file() else []
    blocks = [np.fromfile(path, np.uint8) for path in paths]
    image_size = {"cifar10": 3073, "cifar100": 3074, "stl10": 3 * 96 * 96}[name]  # bytes per image
    for path, block in zip(paths, blocks[:1] if name == "stl10" else blocks):
        if not len(block) or len(block) % image_size:
            raise ValueError(
                f"{path} has {len(block):,} bytes, no whole images of {image_size:,}; fetch it again"
            )
    if name == "stl10":  # columns first; labels from 1
        images = blocks[0].reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2)
        labels = blocks[1] - 1
    else:
        label_bytes = 1 if name == "cifar10" else 2  # CIFAR-100: coarse, then fine label
        rows = np.concatenate(blocks).reshape(-1, label_bytes + 3 * 32 * 32)
        images, labels = rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]
    return images, labels, classes or [str(i) for i in range(int(labels.max()) + 1)]


def _torchvision(name: str, split: str, place: Path | None) -> Raw | str:
    try:
        from torchvision import datasets
    except ImportError:
        return "torchvision is not installed"
    root = place or CACHE.expanduser()
    try:
        if name == "stl10":
            data: Any = datasets.STL10(root, split=split, download=True)
            return data.data, data.labels, data.classes
        make = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
        data = make(root, train=split == "train", download=True)
    except Exception as error:
        return f"torchvision could not fetch it ({type(error).__name__}: {error})"
    return data.data.transpose(0, 3, 1, 2), np.array(data.targets), data.classes


def _hub(name: str, split: str, place: Path | None) -> Raw | str:
    try:
        from datasets import load_dataset
    except ImportError:
        return "the datasets library is not installed"
    path, image, label = HUB[name]
    try:
        rows = load_dataset(path, split=split)
    except Exception as error:
        return f"{path} could not be fetched ({type(error).__name__}: {error})"
    images = np.stack([np.asarray(row[image].convert("RGB")) for row in rows])
    return images.transpose(0, 3, 1, 2), np.array(rows[label]), list(rows.features[label].names)


SOURCES: dict[str, tuple[Callable[[str, str, Path | None], Raw | str], ...]] = {
    "digits": (_digits,),
    "cifar10": (_sheets, _binary, _torchvision, _hub),
    "cifar100": (_sheets, _binary, _torchvision, _hub),
    "stl10": (_binary, _torchvision, _hub),
}


def _statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of uint8 images, scaled to 0..1."""
    values = np.arange(256) / 255
    mean, std = [], []
    for channel in range(images.shape[1]):
        parts = np.array_split(images[:, channel], max(1, len(images) // 1000))
        counts = sum(np.bincount(part.ravel(), minlength=256) for part in parts)
        share = counts / np.sum(counts)
        mean.append(float(share @ values))
        std.append(float(np.sqrt(share @ (values - mean[-1]) ** 2)))
    return tuple(mean), tuple(std)
