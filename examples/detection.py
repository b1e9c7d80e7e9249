"""Faster R-CNN on COCO with a gated ResNet as its backbone.

    python examples/detection.py --data /data/coco --gate stepnet --weights torchvision --epochs 12
    python examples/detection.py --dry                 # two steps on random images, to check the set-up

/data/coco holds `train2017/` and `annotations/instances_train2017.json`; torchvision and pycocotools are
needed. Without --data it runs dry. Each epoch ends with a checkpoint, from which --resume goes on (with
momentum starting anew).
"""

import argparse
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from attractor.residual.backbone import resnet_backbone
from attractor.train import checkpoint

CLASSES = 91  # COCO's numbers go up to 90; 0 is the background


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of COCO")
    parser.add_argument("--dry", action="store_true", help="two steps on random images")
    parser.add_argument("--depth", type=int, default=50, help="34, 50 or 101")
    parser.add_argument("--gate", default="stepnet")
    parser.add_argument("--weights", help='a safetensors file, or "torchvision"')
    parser.add_argument(
        "--frozen-stages", type=int, default=-1, help="0: the stem, 1: and the first stage, ..."
    )
    parser.add_argument("--norm-eval", action="store_true", help="keep all batch statistics")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--batch", type=int, default=4, help="at least 2 for gates that normalise over it"
    )
    parser.add_argument("--lr", type=float, default=0.005, help="0.02 for 16 images, in proportion")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/detection"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser.parse_args()


class Coco(Dataset):
    """Images with at least one box; (image [3, height, width] in 0 to 1, {"boxes" [n, 4], "labels" [n]})."""

    def __init__(self, folder: Path, part: str = "train2017") -> None:
        from torchvision.datasets import CocoDetection
        from torchvision.transforms.functional import to_tensor

        self.to_tensor = to_tensor
        self.coco = CocoDetection(str(folder / part), str(folder / f"annotations/instances_{part}.json"))
        keep = [
            i for i, image in enumerate(self.coco.ids) if self.boxes(self.coco.coco.imgToAnns[image])
        ]
        self.indices = keep

    @staticmethod
    def boxes(annotations: list) -> list:
        """(x1, y1, x2, y2, class) of every object that has an area and is not a crowd."""
        found = []
        for one in annotations:
            x, y, width, height = one["bbox"]
            if not one.get("iscrowd") and width > 1 and height > 1:
                found.append((x, y, x + width, y + height, one["category_id"]))
        return found

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple:
        image, annotations = self.coco[self.indices[index]]
        numbers = torch.tensor(self.boxes(annotations), dtype=torch.float32)
        image = self.to_tensor(image)
        if torch.rand(()) < 0.5:  # mirrored
            image = image.flip(-1)
            numbers[:, [0, 2]] = image.shape[-1] - numbers[:, [2, 0]]
        return image, {"boxes": numbers[:, :4], "labels": numbers[:, 4].long()}


class Noise(Dataset):
    """Random images with two boxes each."""

    def __init__(self, size: int, images: int) -> None:
        self.size, self.images = size, images

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple:
        corners = torch.rand(2, 2) * self.size / 2
        boxes = torch.cat((corners, corners + self.size / 4), 1)
        return torch.rand(3, self.size, self.size), {"boxes": boxes, "labels": torch.tensor([1, 2])}


def collate(items: list) -> tuple:
    """Images differ in size: a list of them, and a list of targets."""
    return tuple(zip(*items))


def rate(epoch: int, epochs: int, step: int) -> float:
    """The usual schedule: warm-up over 500 steps, a tenth after 8 and after 11 of 12 epochs."""
    drops = (epoch >= epochs * 2 // 3) + (epoch >= epochs * 11 // 12) if epochs > 1 else 0
    return 0.1**drops * (min(1.0, step / 500) if epoch == 0 else 1.0)


def train_epoch(model, loader, optimiser, lr, amp) -> float:
    """One pass over the data, with ``lr(step)`` for each step; the mean loss."""
    model.train()
    device = next(model.parameters()).device
    total, started = 0.0, time.perf_counter()
    for step, (images, targets) in enumerate(loader, 1):
        images = [image.to(device, non_blocking=True) for image in images]
        targets = [{k: v.to(device, non_blocking=True) for k, v in target.items()} for target in targets]
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            loss = sum(model(images, targets).values())
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss is {loss.item()} at step {step}; lower --lr")
        for group in optimiser.param_groups:
            group["lr"] = lr(step)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += loss.item()
        if step % 50 == 0 or step == len(loader):
            speed = step * loader.batch_size / (time.perf_counter() - started)
            print(f"  step {step}/{len(loader)}: loss {total / step:.3f}, {speed:.1f} images/s")
    return total / len(loader)


def main() -> None:
    args = arguments()
    try:
        from torchvision.models.detection import FasterRCNN
    except ImportError:
        print("this example needs torchvision, whose Faster R-CNN it trains: pip install torchvision")
        return
    dry = args.dry or args.data is None
    if dry:
        print("a dry run on random images; give --data for COCO")
        data, epochs, sizes = Noise(64, 4), 1, {"min_size": 64, "max_size": 64}
        args.batch, args.workers = 2, 0
    else:
        data, epochs, sizes = Coco(args.data), args.epochs, {}

    torch.manual_seed(0)
    device = torch.device(args.device)
    backbone = resnet_backbone(
        args.depth, args.gate, weights=args.weights,
        frozen_stages=args.frozen_stages, norm_eval=args.norm_eval,
    )  # fmt: skip
    model = FasterRCNN(backbone.with_fpn(), num_classes=CLASSES, **sizes).to(device)
    loader = DataLoader(
        data, args.batch, shuffle=True, drop_last=True, num_workers=args.workers,
        collate_fn=collate, pin_memory=device.type == "cuda",
    )  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, args.lr, momentum=0.9, weight_decay=1e-4)
    first = 0
    if args.resume:
        tensors, config = checkpoint.load(args.out / "model", "faster-rcnn")
        checkpoint.fill(model, tensors, args.out / "model")
        first = config["epochs"]
    for epoch in range(first, epochs):
        print(f"epoch {epoch + 1}/{epochs}")
        schedule = lambda step, epoch=epoch: args.lr * rate(epoch, epochs, step)
        loss = train_epoch(model, loader, optimiser, schedule, amp=device.type == "cuda")
        if not dry:
            about = {"epochs": epoch + 1, "loss": loss, "depth": args.depth, "gate": args.gate}
            folder = checkpoint.save(args.out / "model", "faster-rcnn", model.state_dict(), about)
            print(f"  saved to {folder}")
    print("done")


if __name__ == "__main__":
    main()
