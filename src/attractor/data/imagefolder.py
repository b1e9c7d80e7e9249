"""Images too many for memory, such as ImageNet's: a folder a class, decoded when they are needed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm"}


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """A folder with a subfolder for each class; item i is a normalised image and its label.

    Args:
        folder: its subfolders, sorted by name, are the classes; images may lie deeper.
        train: in training a random part of 8 to 100 % of the image, of a ratio from 3:4 to 4:3, and a
            flip half of the time; otherwise the centre, 7/8 of the shorter side.
        size: height and width of an item.
        mean, std: of the channels; ImageNet's by default.

    An item is float32 ``[3, size, size]``. `loader` gives batches, which is what training takes.
    """

    def __init__(
        self,
        folder: Path | str,
        train: bool = False,
        size: int = 224,
        mean: tuple[float, ...] = (0.485, 0.456, 0.406),
        std: tuple[float, ...] = (0.229, 0.224, 0.225),
    ) -> None:
        self.folder, self.train, self.size, self.mean, self.std = Path(folder), train, size, mean, std
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is not a folder; it should hold a subfolder for each class"
            )
        self.classes = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        found = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((self.folder / name).rglob("*"))
            if path.suffix.lower() in ENDINGS
        ]
        if not found:
            raise FileNotFoundError(
                f"no images in subfolders of {folder} ({', '.join(sorted(ENDINGS))})"
            )
        self.paths = [path for path, _ in found]
        self.labels = torch.tensor([label for _, label in found])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            from PIL import Image
        except ImportError:
            raise ImportError("decoding images needs Pillow: pip install 'attractor[vision]'") from None
        with Image.open(self.paths[index]) as file:
            picture: Any = file.convert("RGB")
        box = random_box(*picture.size) if self.train else centre_box(*picture.size)
        side = (self.size, self.size)
        pixels = np.asarray(picture.resize(side, Image.Resampling.BILINEAR, box=box, reducing_gap=2.0))
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255
        if self.train and torch.rand(()) < 0.5:
            image = image.flip(-1)
        mean, std = (torch.tensor(x)[:, None, None] for x in (self.mean, self.std))
        return (image - mean) / std, int(self.labels[index])

    def loader(self, batch: int = 256, workers: int = 8) -> DataLoader[tuple[Tensor, int]]:
        """Batches ``[batch, 3, size, size]`` and labels; in training shuffled, the last one dropped."""
        return DataLoader(
            self, batch, shuffle=self.train, drop_last=self.train, num_workers=workers,
            pin_memory=torch.cuda.is_available(), persistent_workers=workers > 0,
        )  # fmt: skip


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
