"""Images that do not fit into memory, such as ImageNet: one folder per class, decoded on demand."""

import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from attractor.storage.files import check_source

LARGEST_PICTURE = 2**26  # pixels; a file of some kilobytes may have as many as it likes
ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff"}


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """A folder with one subfolder per class; item i is a normalised image and its label.

    An item is float32 ``[3, size, size]``. `loader` returns the batches that training needs.

    Args:
        folder: its subfolders, sorted by name, are the classes; images may be in deeper folders. Names
            that begin with a dot are ignored.
        train: if True, an item is a random crop of 8 to 100 % of the image, with an aspect ratio from
            3:4 to 4:3, and is flipped with probability 1/2; otherwise the central square, 7/8 of the
            shorter side.
        size: height and width of an item.
        mean, std: mean and standard deviation of the channels; by default those of ImageNet.
        classes: names of the subfolders in the order of their labels, for a test set that must have the
            labels of the training set and may lack a class; None: all subfolders, each with an image.
    """

    def __init__(
        self,
        folder: Path | str,
        train: bool = False,
        size: int = 224,
        mean: tuple[float, ...] = (0.485, 0.456, 0.406),
        std: tuple[float, ...] = (0.229, 0.224, 0.225),
        classes: Sequence[str] | None = None,
    ) -> None:
        self.folder, self.train, self.size, self.mean, self.std = Path(folder), train, size, mean, std
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is not a folder; it should hold a subfolder for each class"
            )
        there = subfolders(self.folder)
        self.classes = there if classes is None else list(classes)
        if extra := sorted(set(there) - set(self.classes)):
            raise ValueError(
                f"{folder} has subfolders that are not in classes: {', '.join(extra)}; the classes are "
                f"{', '.join(self.classes)}"
            )
        files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((self.folder / name).rglob("*"))
            if path.suffix.lower() in ENDINGS and not _is_hidden(path, self.folder) and path.is_file()
        ]
        if not files:
            raise FileNotFoundError(
                f"no images in subfolders of {folder} ({', '.join(sorted(ENDINGS))})"
            )
        labels_present = {label for _, label in files}
        empty = [name for label, name in enumerate(self.classes) if label not in labels_present]
        if empty and classes is None:
            raise FileNotFoundError(
                f"no images of {', '.join(empty)} in {folder} ({', '.join(sorted(ENDINGS))}); remove "
                "folders that are no class, or name the classes with classes="
            )
        self.paths = [path for path, _ in files]
        self.labels = torch.tensor([label for _, label in files])

    @property
    def fingerprint(self) -> str:
        """A digest of names, sizes and labels of the files, and of the preprocessing.

        It does not depend on the path of the folder, so that an interrupted training can continue after
        the folder has moved.
        """
        settings = (
            self.train,
            self.size,
            list(self.mean),
            list(self.std),
            self.classes,
            self.labels.tolist(),
        )
        digest = hashlib.sha256(repr(settings).encode())
        for path in self.paths:
            entry = f"{path.relative_to(self.folder).as_posix()} {path.stat().st_size}\n"
            digest.update(entry.encode("utf8", "surrogateescape"))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            from PIL import Image
        except ImportError:
            raise ImportError("decoding images needs Pillow: pip install 'attractor[vision]'") from None
        picture: Any = decoded(self.paths[index])
        box = random_box(*picture.size) if self.train else centre_box(*picture.size)
        side = (self.size, self.size)
        pixels = np.asarray(picture.resize(side, Image.Resampling.BILINEAR, box=box, reducing_gap=2.0))
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255
        if self.train and torch.rand(()) < 0.5:
            image = image.flip(-1)
        mean, std = (torch.tensor(x)[:, None, None] for x in (self.mean, self.std))
        return (image - mean) / std, int(self.labels[index])

    def loader(self, batch: int = 256, workers: int | None = None) -> DataLoader[tuple[Tensor, int]]:
        """Return a loader of batches ``[batch, 3, size, size]`` and labels.

        In training, images are shuffled and an incomplete last batch is dropped.

        Args:
            batch: images per batch.
            workers: number of processes that decode; None: one per core, at most eight. They are started
                anew for every epoch, so that random crops depend on the epoch's seed only, and training
                can be resumed.
        """
        if workers is None:
            workers = min(8, os.cpu_count() or 1)
        return DataLoader(
            self, batch, shuffle=self.train, drop_last=self.train, num_workers=workers,
            pin_memory=torch.cuda.is_available(),
        )  # fmt: skip


def _is_hidden(path: Path, folder: Path) -> bool:
    """Return whether a name in the path below `folder` begins with a dot."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def subfolders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in a folder, without hidden ones."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def decoded(path: Path | str) -> Any:
    """Return a picture in RGB, rotated according to EXIF, with transparent pixels on white."""
    from PIL import Image, ImageOps

    try:
        check_source(path, link=True)
        with Image.open(path) as file:
            if math.prod(file.size) > LARGEST_PICTURE:
                raise ValueError(
                    f"it has {math.prod(file.size):,} pixels, and {LARGEST_PICTURE:,} are read"
                )
            ImageOps.exif_transpose(file, in_place=True)
            picture: Any = file
            if picture.mode.startswith("I"):  # 16 bits, which PIL would clip to 255
                picture = Image.fromarray((np.asarray(picture) / 257).clip(0, 255).astype(np.uint8))
            if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
                picture = picture.convert("RGBA")
                white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
                picture = Image.alpha_composite(white, picture)
            return picture.convert("RGB")
    except Exception as error:  # PIL raises many types of errors, few of which name the file
        raise OSError(
            f"{path} cannot be decoded ({type(error).__name__}: {error}); repair it or remove it"
        ) from error


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a random crop, or of the centre if ten draws fail."""
    for _ in range(10):
        area = width * height * torch.empty(()).uniform_(0.08, 1.0).item()
        ratio = math.exp(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3)).item())
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(torch.randint(width - w + 1, ()))
            top = int(torch.randint(height - h + 1, ()))
            return left, top, left + w, top + h
    return centre_box(width, height, 1.0)


def centre_box(width: int, height: int, part: float = 7 / 8) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the central square, `part` of the shorter side."""
    side = part * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
