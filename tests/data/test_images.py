"""Images from every kind of file, on tiny ones; the real CIFAR where ATTRACTOR_DATA names its folder."""

import hashlib
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attractor.data import images
from attractor.data.imagefolder import ImageFolder, centre_box, decoded, random_box
from attractor.data.images import ImageSet, load

DATA = os.environ.get("ATTRACTOR_DATA")


@pytest.fixture(autouse=True)
def _no_folder_no_network(monkeypatch):
    monkeypatch.delenv("ATTRACTOR_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "datasets", None)


def pixels(n, size=32, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 3, size, size), dtype=np.uint8)


def test_digits_come_with_the_library():
    train, test = load("digits"), load("digits", "test")
    assert train.images.shape == (1437, 1, 8, 8)
    assert test.images.shape == (360, 1, 8, 8)
    assert train.images.dtype == torch.uint8
    assert train.labels.dtype == torch.int64
    assert (train.mean, train.std) == (test.mean, test.std)
    scaled = train.images.double() / 255
    assert train.mean[0] == pytest.approx(scaled.mean().item(), abs=1e-12)
    assert train.std[0] == pytest.approx(scaled.std(correction=0).item(), abs=1e-12)
    assert set(train.images.unique().tolist()) == {round(v * 255 / 16) for v in range(17)}
    assert train.classes == [str(i) for i in range(10)]
    assert torch.cat((train.labels, test.labels)).bincount().tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # fmt: skip
    seen = train.normalised()
    assert abs(seen.mean()) < 1e-5
    assert seen.std(correction=0) == pytest.approx(1, abs=1e-5)


def test_parts_of_a_set():
    digits = load("digits")
    rest, held = digits.hold_out(100, seed=3)
    assert (len(rest), len(held)) == (1337, 100)
    assert torch.equal(digits.subset(100, seed=3).images, held.images)
    assert not torch.equal(digits.subset(100, seed=4).images, held.images)
    both = torch.cat((rest.images, held.images)).flatten(1), torch.cat((rest.labels, held.labels))
    key = lambda x, y: sorted((*row, label) for row, label in zip(x.tolist(), y.tolist()))
    assert key(*both) == key(digits.images.flatten(1), digits.labels)
    with pytest.raises(ValueError, match="2000 images of digits, which has 1437"):
        digits.subset(2000)
    coloured = held.rgb()
    assert coloured.images.shape == (100, 3, 8, 8)
    assert torch.equal(coloured.images[:, 2], held.images[:, 0])
    assert coloured.mean == held.mean * 3
    assert coloured.rgb() is coloured
    pairs = ImageSet(
        torch.zeros(1, 2, 4, 4, dtype=torch.uint8), torch.zeros(1).long(), ["a"], (0.5,) * 2, (0.2,) * 2
    )
    with pytest.raises(
        ValueError, match="images have 2 channels; only images with 1 channel can be converted"
    ):
        pairs.rgb()


def test_an_image_set_checks_itself():
    good = dict(images=torch.zeros(2, 3, 4, 4, dtype=torch.uint8), labels=torch.zeros(2, dtype=torch.int64),
                classes=["a"], mean=(0.5,) * 3, std=(0.2,) * 3)  # fmt: skip
    assert len(ImageSet(**good)) == 2
    with pytest.raises(ValueError, match=r"torch.float32 \[2, 3, 4, 4\]; they must be uint8"):
        ImageSet(**good | {"images": torch.zeros(2, 3, 4, 4)})
    with pytest.raises(ValueError, match=r"labels are torch.int64 \[3\]; they must be int64 \[2\]"):
        ImageSet(**good | {"labels": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(ValueError, match="1 means and 3 deviations for 3 channels"):
        ImageSet(**good | {"mean": (0.5,)})


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_binary_cifar10(tmp_path, inner):
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    x, y = pixels(12), np.arange(12) % 10
    rows = np.concatenate((y[:, None].astype(np.uint8), x.reshape(12, -1)), 1)
    for i in range(5):
        rows[2 * i : 2 * i + 2].tofile(folder / f"data_batch_{i + 1}.bin")
    rows[10:].tofile(folder / "test_batch.bin")
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    train, test = load("cifar10", "train", tmp_path), load("cifar10", "test", tmp_path)
    assert torch.equal(train.images, torch.from_numpy(x[:10]))
    assert train.labels.tolist() == list(range(10))
    assert torch.equal(test.images, torch.from_numpy(x[10:]))
    assert test.labels.tolist() == [0, 1]
    assert train.classes == list("abcdefghij")
    assert train.name == "cifar10 (10 of 50,000)"


def test_binary_cifar100_and_stl10(tmp_path):
    x, fine = pixels(4), np.array([3, 99, 0, 7], dtype=np.uint8)
    rows = np.concatenate((np.full((4, 1), 5, np.uint8), fine[:, None], x.reshape(4, -1)), 1)
    rows.tofile(tmp_path / "test.bin")
    found = load("cifar100", "test", tmp_path)
    assert torch.equal(found.images, torch.from_numpy(x))
    assert found.labels.tolist() == [3, 99, 0, 7]
    x = pixels(3, 96)
    for split in ("train", "test"):  # columns first, labels from 1
        x.transpose(0, 1, 3, 2).tofile(tmp_path / f"{split}_X.bin")
        np.array([10, 1, 2], dtype=np.uint8).tofile(tmp_path / f"{split}_y.bin")
    found = load("stl10", "test", tmp_path)
    assert torch.equal(found.images, torch.from_numpy(x))
    assert found.labels.tolist() == [9, 0, 1]
    assert found.std == pytest.approx((x / 255).std((0, 2, 3)).tolist(), abs=1e-12)


def test_a_sheet_is_read_row_by_row(tmp_path):
    image = pytest.importorskip("PIL.Image")
    x = pixels(6)
    sheet = x.reshape(2, 3, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(64, 96, 3)
    image.fromarray(sheet).save(tmp_path / "sheet.webp", lossless=True)
    assert (images._sheet(tmp_path / "sheet.webp") == x).all()


def test_sheets_are_put_in_the_official_order(tmp_path, monkeypatch):
    """With images of one pixel, whose value tells where they belong."""
    mark = lambda place: np.broadcast_to(
        (np.asarray(place) % 251)[:, None, None, None], (len(place), 3, 1, 1)
    )
    order = np.random.default_rng(0).permutation(50_000)
    parts = {"a": order[:20_000], "b": order[20_000:35_000], "c": order[35_000:]}
    sheets = {
        "cifar10_part_a": mark(np.arange(30_000)),
        "cifar10_part_b": mark(np.r_[30_000:50_000, 0:10_000]),
        "cifar100_part_a": mark(np.concatenate((np.arange(10_000), parts["a"]))),
        "cifar100_part_b": mark(parts["b"]),
        "cifar100_part_c": mark(parts["c"]),
    }
    monkeypatch.setattr(images, "_sheet", lambda path: sheets[path.stem].astype(np.uint8))
    np.savez(tmp_path / "cifar10_labels.npz", train=np.arange(50_000) % 251, test=np.arange(10_000) % 251,
             names=np.array(["cat", "dog"]))  # fmt: skip
    np.savez(tmp_path / "cifar100_labels.npz", test=np.arange(10_000) % 251, fine_names=np.array(["x"]),
             **{f"train_{p}": i % 251 for p, i in parts.items()}, **{f"index_{p}": i for p, i in parts.items()})  # fmt: skip

    def check(name, split, count):
        found = load(name, split, tmp_path)
        assert len(found) == count
        assert torch.equal(found.images[:, 0, 0, 0].long(), found.labels)
        return found.labels

    for stem in ("cifar10_part_b", "cifar100_part_a"):  # the smaller sets
        (tmp_path / f"{stem}.webp").touch()
    assert torch.equal(check("cifar10", "train", 20_000), torch.arange(30_000, 50_000) % 251)
    check("cifar100", "train", 20_000)
    assert load("cifar100", "train", tmp_path).name == "cifar100 (20,000 of 50,000)"
    for stem in sheets:
        (tmp_path / f"{stem}.webp").touch()
    for name in ("cifar10", "cifar100"):
        assert torch.equal(check(name, "train", 50_000), torch.arange(50_000) % 251)
        assert torch.equal(check(name, "test", 10_000), torch.arange(10_000) % 251)
        assert load(name, "train", tmp_path).name == name


def test_what_is_not_there_says_what_was_looked_for(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"no train images of cifar10: in .*; looked for cifar10_part_b.webp and cifar10_labels.npz; "
        r"looked for data_batch_1.bin, also in cifar-10-batches-bin; torchvision is not installed; the",
    ):
        load("cifar10", "train", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"of stl10: no folder is named with folder= or in ATTR"):
        load("stl10")
    with pytest.raises(
        ValueError, match="no image data set is called 'mnist'; there are digits, cifar10"
    ):
        load("mnist")
    with pytest.raises(
        ValueError, match=r"digits has no split 'valid'; it has train and test, and ImageSet\.hold_out"
    ):
        load("digits", "valid")
    with pytest.raises(FileNotFoundError, match="give the folder of val/<class>/<image>"):
        load("imagefolder", "val")


def test_torchvision_and_the_hub_are_asked_last(tmp_path, monkeypatch):
    x = pixels(2)

    class CIFAR100:
        def __init__(self, root, train, download):
            assert (root, train, download) == (tmp_path, False, True)
            self.data, self.targets, self.classes = x.transpose(0, 2, 3, 1), [4, 2], list("abcde")

    def refused(*args, **options):
        raise OSError("no network")

    datasets = SimpleNamespace(CIFAR100=CIFAR100, CIFAR10=refused)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(datasets=datasets))
    found = load("cifar100", "test", tmp_path)
    assert torch.equal(found.images, torch.from_numpy(x))
    assert found.labels.tolist() == [4, 2]

    class Rows(list):
        features = {"label": SimpleNamespace(names=["a", "b"])}  # noqa: RUF012

        def __getitem__(self, key):
            return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    class Picture(SimpleNamespace):
        def convert(self, mode):
            return np.full((32, 32, 3), self.grey, np.uint8)

    asked = []
    rows = Rows([{"img": Picture(grey=7), "label": 1}, {"img": Picture(grey=9), "label": 0}])
    hub = SimpleNamespace(load_dataset=lambda path, split: asked.append((path, split)) or rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    found = load("cifar10", "test", tmp_path)
    assert asked == [("uoft-cs/cifar10", "test")]
    assert found.images[:, 0, 0, 0].tolist() == [7, 9]
    assert found.labels.tolist() == [1, 0]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=refused))
    with pytest.raises(
        FileNotFoundError, match=r"torchvision could not fetch it \(OSError: no network\); uoft"
    ):
        load("cifar10", "test", tmp_path)


@pytest.fixture
def folder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, grey in (("cat", 51), ("dog", 204)):
        (tmp_path / "train" / name / "deep").mkdir(parents=True)
        for i, size in enumerate([(40, 30), (17, 50)]):
            image.new("RGB", size, (grey, grey, grey)).save(
                tmp_path / "train" / name / "deep" / f"{i}.png"
            )
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no image")
    return tmp_path


def test_a_folder_of_images(folder):
    found = load("imagefolder", "train", folder)
    assert isinstance(found, ImageFolder)
    assert found.classes == ["cat", "dog"]
    assert len(found) == 4
    assert found.labels.tolist() == [0, 0, 1, 1]
    small = ImageFolder(folder / "train", train=True, size=16, mean=(0.5,) * 3, std=(0.25,) * 3)
    for image, label in (small[i] for i in range(4)):  # of one colour, so every part is the same
        torch.testing.assert_close(image, torch.full((3, 16, 16), (0.2, 0.8)[label] * 4 - 2))
    (batch,) = list(small.loader(batch=3, workers=0))  # the incomplete one is left out in training
    assert batch[0].shape == (3, 3, 16, 16)
    still = ImageFolder(folder / "train", size=16)
    assert sum(len(y) for _, y in still.loader(batch=3, workers=0)) == 4
    with pytest.raises(
        FileNotFoundError, match="not a folder; it should hold a subfolder for each class"
    ):
        load("imagefolder", "val", folder)
    with pytest.raises(FileNotFoundError, match="no images in subfolders of"):
        ImageFolder(folder / "train" / "dog" / "deep")


def test_a_folder_of_images_is_known_by_its_content(folder, tmp_path):
    """So that a training goes on after the folder has moved, and not with other images."""
    moved = shutil.copytree(folder / "train", tmp_path / "elsewhere")
    first = ImageFolder(folder / "train", size=8)
    assert first.fingerprint == ImageFolder(moved, size=8).fingerprint
    assert first.fingerprint != ImageFolder(moved, size=9).fingerprint
    assert first.fingerprint != ImageFolder(moved, size=8, train=True).fingerprint
    last = ImageFolder(moved).paths[-1]
    last.write_bytes(last.read_bytes() + b" ")
    assert first.fingerprint != ImageFolder(moved, size=8).fingerprint


def test_labels_of_a_test_folder_are_those_of_the_training_folder(folder):
    image = pytest.importorskip("PIL.Image")
    (folder / "val" / "dog").mkdir(parents=True)
    image.new("RGB", (9, 9)).save(folder / "val" / "dog" / "a.png")
    found = load("imagefolder", "val", folder)  # without cats
    assert found.classes == ["cat", "dog"]
    assert found.labels.tolist() == [1]
    (folder / "val" / "fish").mkdir()
    with pytest.raises(
        ValueError, match="subfolders that are not in classes: fish; the classes are cat, dog"
    ):
        load("imagefolder", "val", folder)


def test_hidden_names_are_no_classes_and_a_class_without_images_is_told(folder):
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    (folder / "train" / "cat" / "._0.png").write_bytes(b"of another system")
    (folder / "train" / "cat" / ".ipynb_checkpoints").mkdir()
    (folder / "train" / "cat" / ".ipynb_checkpoints" / "0-checkpoint.png").write_bytes(b"a copy")
    (folder / "train" / "dog" / "more.png").mkdir()
    found = ImageFolder(folder / "train")
    assert found.classes == ["cat", "dog"]
    assert len(found) == 4
    (folder / "train" / "fish").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"no images of fish in .*; remove folders that are no class, or name"
    ):
        ImageFolder(folder / "train")
    assert ImageFolder(folder / "train", classes=["fish", "dog", "cat"]).labels.tolist() == [1, 1, 2, 2]


def test_pictures_of_all_kinds_are_seen_as_a_viewer_shows_them(tmp_path):
    image = pytest.importorskip("PIL.Image")
    colour = lambda name: np.asarray(decoded(tmp_path / name))[0, 0].tolist()
    image.new("L", (4, 4), 100).save(tmp_path / "grey.png")
    image.new("1", (4, 4), 1).save(tmp_path / "bits.png")
    image.new("LA", (4, 4), (0, 128)).save(tmp_path / "veil.png")
    image.new("RGBA", (4, 4), (10, 20, 30, 0)).save(tmp_path / "clear.png")
    image.new("RGBA", (4, 4), (10, 20, 30, 255)).save(tmp_path / "solid.png")
    image.fromarray(np.full((4, 4), 100 * 257, np.uint16)).save(tmp_path / "deep.png")
    image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "print.jpg", quality=100)
    palette = image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    palette.save(tmp_path / "palette.png")
    palette.save(tmp_path / "hole.png", transparency=1)
    assert colour("grey.png") == [100] * 3
    assert colour("bits.png") == [255] * 3
    assert colour("veil.png") == pytest.approx([127] * 3, abs=1)
    assert colour("clear.png") == [255] * 3  # on white, whatever colour lies hidden
    assert colour("solid.png") == [10, 20, 30]
    assert colour("deep.png") == [100] * 3
    assert colour("palette.png") == [200, 100, 50]
    assert colour("hole.png") == [255] * 3
    red, green, blue = colour("print.jpg")
    assert red > 200 > 60 > max(green, blue)
    turned = image.new("RGB", (6, 3), (255, 0, 0))
    turned.paste((0, 0, 255), (3, 0, 6, 3))
    exif = image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    seen = np.asarray(decoded(tmp_path / "turned.png"))
    assert seen.shape == (6, 3, 3)
    assert (seen[0, 0].tolist(), seen[5, 0].tolist()) == ([255, 0, 0], [0, 0, 255])


def test_a_broken_picture_is_named(folder):
    path = folder / "train" / "cat" / "deep" / "0.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(OSError, match=r"0\.png cannot be decoded \(.*\); repair it or remove it"):
        ImageFolder(folder / "train")[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_of_random_parts_depend_on_their_seed_alone(tmp_path, workers):
    """As resuming needs it: a loader that has been gone through before gives the same batches."""
    image = pytest.importorskip("PIL.Image")
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(3):
            image.fromarray(pixels(1, 20, i)[0].transpose(1, 2, 0)).save(tmp_path / name / f"{i}.png")
    found = ImageFolder(tmp_path, train=True, size=8)

    def epoch(loader, seed):
        torch.manual_seed(seed)
        return torch.cat([x for x, _ in loader])

    used, fresh = found.loader(3, workers), found.loader(3, workers)
    first = epoch(used, 1)
    assert torch.equal(epoch(used, 2), epoch(fresh, 2))
    assert not torch.equal(first, epoch(used, 2))


def test_a_damaged_binary_file_is_named(tmp_path):
    (tmp_path / "test_batch.bin").write_bytes(bytes(3073 * 2 + 5))
    with pytest.raises(ValueError, match=r"test_batch.bin has 6,151 bytes, no whole images"):
        load("cifar10", "test", tmp_path)


def test_a_home_folder_may_be_written_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ATTRACTOR_DATA", "~/data")
    with pytest.raises(FileNotFoundError, match=f"in {tmp_path}/data;"):
        load("stl10")


def test_parts_of_an_image_lie_in_it():
    assert centre_box(80, 40, 0.5) == (30, 10, 50, 30)
    for _ in range(200):
        left, top, right, bottom = random_box(60, 41)
        assert 0 <= left < right <= 60
        assert 0 <= top < bottom <= 41
        assert (right - left) * (bottom - top) >= 0.07 * 60 * 41
    assert random_box(1, 1000)[2:] > (0, 0)


@pytest.mark.skipif(
    not DATA or not Path(DATA, "cifar10_part_b.webp").is_file(), reason="no CIFAR-10 here"
)
def test_real_cifar10_is_the_published_one(tmp_path):
    test = load("cifar10", "test", DATA)
    rows = torch.cat((test.labels[:, None].to(torch.uint8), test.images.flatten(1)), 1).numpy()
    assert hashlib.sha1(rows.tobytes()).hexdigest().startswith("67eb016d")
    rows.tofile(tmp_path / "test_batch.bin")
    again = load("cifar10", "test", tmp_path)
    assert torch.equal(again.images, test.images)
    assert test.classes[3] == "cat"
    if Path(DATA, "cifar10_part_a.webp").is_file():
        train = load("cifar10", "train", DATA)
        first = train.take(torch.arange(10_000))
        rows = torch.cat((first.labels[:, None].to(torch.uint8), first.images.flatten(1)), 1).numpy()
        assert hashlib.sha1(rows.tobytes()).hexdigest().startswith("aadd24ac")
        mean, std = images._statistics(train.images.numpy())
        assert train.mean == pytest.approx(mean, abs=1e-6)
        assert train.std == pytest.approx(std, abs=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(
    not DATA or not Path(DATA, "cifar100_part_c.webp").is_file(), reason="no CIFAR-100 here"
)
def test_real_cifar100_is_the_published_one():
    train = load("cifar100", "train", DATA)
    with np.load(Path(DATA, "cifar100_labels.npz")) as file:
        coarse = torch.from_numpy(file["fine_to_coarse"])[train.labels]
    rows = torch.cat(
        (coarse[:, None], train.labels[:, None].to(torch.uint8), train.images.flatten(1)), 1
    )
    assert hashlib.sha1(rows.numpy().tobytes()).hexdigest().startswith("e207cd2e")
    mean, std = images._statistics(train.images.numpy())
    assert train.mean == pytest.approx(mean, abs=1e-6)
    assert train.std == pytest.approx(std, abs=1e-6)
