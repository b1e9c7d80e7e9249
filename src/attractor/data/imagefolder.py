"""Images too many for memory, such as ImageNet's: a folder a class, decoded when they are needed."""

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

from attractor.core.files import check_source

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff"}


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """A folder with a subfolder for each class; item i is a normalised image and its label.

    Args:
        folder: its subfolders, sorted by name, are the classes; images may lie deeper. Names that begin
            with a dot are left out.
        train: in training a random part of 8 to 100 % of the image, of a ratio from 3:4 to 4:3, and a
            flip half of the time; otherwise the centre, 7/8 of the shorter side.
        size: height and width of an item.
        mean, std: of the channels; ImageNet's by default.
        classes: names of the subfolders in the order of their labels, for a test set that must have the
            training set's labels and may lack a class; None: all there are, each with an image.

    An item is float32 ``[3, size, size]``. `loader` gives batches, which is what training takes.
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
        if unknown := sorted(set(there) - set(self.classes)):
            raise ValueError(
                f"{folder} has subfolders that are no classes: {', '.join(unknown)}; there are "
                f"{', '.join(self.classes)}"
            )
        found = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((self.folder / name).rglob("*"))
            if path.suffix.lower() in ENDINGS and not _hidden(path, self.folder) and path.is_file()
        ]
        if not found:
            raise FileNotFoundError(
                f"no images in subfolders of {folder} ({', '.join(sorted(ENDINGS))})"
            )
        full = {label for _, label in found}
        empty = [name for label, name in enumerate(self.classes) if label not in full]
        if empty and classes is None:
            raise FileNotFoundError(
                f"no images of {', '.join(empty)} in {folder} ({', '.join(sorted(ENDINGS))}); remove "
                "what is no class, or name the classes with classes="
            )
        self.paths = [path for path, _ in found]
        self.labels = torch.tensor([label for _, label in found])

    @property
    def fingerprint(self) -> str:
        """A digest of names, sizes and labels of the files and of how images are made of them.

        It does not depend on where the folder is, so that a training that was interrupted goes on after
        the folder has moved.
        """
        how = (
            self.train,
            self.size,
            list(self.mean),
            list(self.std),
            self.classes,
            self.labels.tolist(),
        )
        digest = hashlib.sha256(repr(how).encode())
        for path in self.paths:
            told = f"{path.relative_to(self.folder).as_posix()} {path.stat().st_size}\n"
            digest.update(told.encode("utf8", "surrogateescape"))
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
        """Batches ``[batch, 3, size, size]`` and labels; in training shuffled, the last one dropped.

        Args:
            workers: processes that decode; None: one a core, eight at most. They are made anew for every
                epoch, so that its random parts depend on its seed alone, and training can be resumed.
        """
        if workers is None:
            workers = min(8, os.cpu_count() or 1)
        return DataLoader(
            self, batch, shuffle=self.train, drop_last=self.train, num_workers=workers,
            pin_memory=torch.cuda.is_available(),
        )  # fmt: skip


def _hidden(path: Path, folder: Path) -> bool:
    """Whether it, or a folder that it is in, begins with a dot."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def decoded(path: Path | str) -> Any:
    """A picture in RGB as a viewer shows it: turned as EXIF says, what is transparent on white."""
    from PIL import Image, ImageOps

    try:
        check_source(path, link=True)
        with Image.open(path) as file:
            ImageOps.exif_transpose(file, in_place=True)
            picture: Any = file
            if picture.mode.startswith("I"):  # 16 bits, of which PIL would only keep the darkest values
                picture = Image.fromarray((np.asarray(picture) / 257).clip(0, 255).astype(np.uint8))
            if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
                picture = picture.convert("RGBA")
                white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
                picture = Image.alpha_composite(white, picture)
            return picture.convert("RGB")
    except Exception as error:  # PIL raises many kinds, few of which name the file
        raise OSError(
            f"{path} cannot be decoded ({type(error).__name__}: {error}); mend it or remove it"
        ) from error


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a random part; the centre if ten draws did not fit in."""
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
    """Left, top, right, bottom of the square in the middle, `part` of the shorter side."""
    side = part * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
