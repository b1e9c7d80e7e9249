"""Damaged and hostile checkpoints: each must raise `CheckpointError`, soon, and take little memory.

2,000 of them, made from a saved solver and from a training's checkpoint: truncated files, single bits
flipped, headers that lie about sizes, swapped tensors, other manifests and files, and 20 hostile pickles
under the names of our files. Where a hash would give it away at once, half of them come with hashes made
anew, so that the checks behind it have to find it. No code may run: Python's audit events are listened
to, and the pickles would make a file. Limits: 2 s, and 64 MB above the size of the folder's files.
"""

import hashlib
import io
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attractor import CheckpointError, HybridSolver, corrections, systems
from attractor.storage.files import json_bytes
from attractor.train import checkpoint
from benchmarks.results import save

COUNTS = {
    "flipped": 800,
    "truncated": 400,
    "lying": 400,
    "swapped": 200,
    "other": 150,
    "huge": 30,
    "pickle": 20,
}
SECONDS, MEGABYTES = 2.0, 64
TENSORS, CONFIG, MANIFEST = "tensors.safetensors", "config.json", "manifest.json"
RUNS_CODE = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen",
             "exec", "compile", "marshal.loads", "code.__new__"}  # fmt: skip
Damage = Callable[[Path, random.Random], str]


# What is damaged, and how it is loaded


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 32), nn.Linear(32, 10)
    )


def save_solver(folder: Path) -> None:
    torch.manual_seed(0)
    HybridSolver(systems.ElasticPendulum(), "rk4", corrections.AttNS(4, width=64), 0.1).save(folder)


def save_training(folder: Path) -> None:
    tensors = {f"model.{k}": v for k, v in network().state_dict().items()}
    checkpoint.save(folder, "training", tensors, {"rows": [{"epoch": i} for i in range(20)]})


def load_training(folder: Path) -> None:
    tensors, _ = checkpoint.load(folder, "training")
    own = {k.removeprefix("model."): v for k, v in tensors.items()}
    checkpoint.fill(network(), own, folder)


CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "solver": (save_solver, HybridSolver.load),
    "training": (save_training, load_training),
}


# Damage


def sealed(folder: Path, **changes: Any) -> None:
    """Make the manifest anew, so that hashes and sizes are true again."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest.pop("own")
    for name in (TENSORS, CONFIG):
        content = (folder / name).read_bytes()
        manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
        manifest["bytes"][name] = len(content)
    manifest |= changes
    own = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_bytes(json_bytes({**manifest, "own": own}))


def flipped(folder: Path, draw: random.Random) -> str:
    sizes = {path: path.stat().st_size for path in sorted(folder.iterdir())}
    # Half of them anywhere, half in a file of its own choosing: most bytes are numbers.
    path = draw.choices(list(sizes), list(sizes.values()) if draw.random() < 0.5 else None)[0]
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return path.name


def truncated(folder: Path, draw: random.Random) -> str:
    path = folder / draw.choice((TENSORS, CONFIG, MANIFEST))
    content = path.read_bytes()
    cut = draw.choice((0, 1, 7, 8, len(content) - 1, draw.randrange(len(content))))
    path.write_bytes(content[:cut])
    whole = path.name == CONFIG and cut == len(content) - 1  # but for its last newline
    if path.name != MANIFEST and not whole and draw.random() < 0.5:
        sealed(folder)
        return f"{path.name}, sealed"
    return path.name


def parts(folder: Path) -> tuple[dict[str, Any], bytes]:
    content = (folder / TENSORS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(folder: Path, header: Any, numbers: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / TENSORS).write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + numbers
    )


def lying(folder: Path, draw: random.Random) -> str:
    header, numbers = parts(folder)
    name = draw.choice(sorted(header))
    entry = header[name]
    big = draw.choice((2**31, 2**40, 2**60, 2**63 - 1, 2**64, 10**30))
    begin, end = entry["data_offsets"]
    lies: dict[str, Callable[[], Any]] = {
        "length": lambda: None,
        "end": lambda: entry.update(data_offsets=[begin, big]),
        "start": lambda: entry.update(data_offsets=[-big, end]),
        "backwards": lambda: entry.update(data_offsets=[end + 1, begin]),
        "overlap": lambda: entry.update(data_offsets=[max(0, begin - 4), max(0, end - 4)] if begin else [4, end + 4]),
        "shape": lambda: entry.update(shape=[big]),
        "shapes": lambda: entry.update(shape=[2**32, 2**32]),
        "zero and huge": lambda: entry.update(shape=[0, big]),
        "negative": lambda: entry.update(shape=[-1, *entry["shape"]]),
        "fraction": lambda: entry.update(shape=[1.5]),
        "true": lambda: entry.update(shape=[True, True, *entry["shape"], 2]),
        "dtype": lambda: entry.update(dtype=draw.choice(("F128", "", None, 7, ["F32"], "OBJECT"))),
        "no dtype": lambda: entry.pop("dtype"),
        "no place": lambda: entry.pop("data_offsets"),
        "text": lambda: header.update({name: "F32"}),
        "more": lambda: header.update(more={"dtype": "F32", "shape": [big], "data_offsets": [len(numbers), big]}),
        "itself": lambda: header.update(more=dict(entry)),
        "empty": lambda: header.clear(),
    }  # fmt: skip
    lie = draw.choice([*lies, "deep", "list", "wide", "no JSON", "digits", "twice"])
    length = big % 2**64 if lie == "length" else None
    if lie in lies:
        lies[lie]()
        write(folder, header, numbers, length)
    else:
        entry_text = json.dumps({name: entry})[1:-1]
        texts = {
            "deep": b"[" * 500_000, "list": b"[]", "no JSON": b"{" + os.urandom(100),
            "wide": b'{"a":[' + b"{}," * 400_000 + b"{}]}", "digits": b'{"a":' + b"9" * 100_000 + b"}",
            "twice": ("{" + entry_text + "," + json.dumps(header)[1:-1] + "," + entry_text.replace("[", "[0,", 1) + "}").encode(),
        }  # fmt: skip
        write(folder, texts[lie], numbers)
    if draw.random() < 0.5:
        sealed(folder)
        lie += ", sealed"
    return lie


def swapped(folder: Path, draw: random.Random) -> str:
    header, numbers = parts(folder)
    kind = lambda name: (header[name]["dtype"], header[name]["shape"])
    one = draw.choice(sorted(header))
    others = [name for name in sorted(header) if kind(name) != kind(one)]
    how = draw.choice(("names", "renamed", "numbers", "dropped", "dtype"))
    seal = draw.random() < 0.5
    if how == "names":
        two = draw.choice(others)
        header[one], header[two] = header[two], header[one]
    elif how == "renamed":
        header[one + "x"] = header.pop(one)
    elif how == "numbers":  # two of the same shape, where there are: only the hash can tell
        seal, half = False, len(numbers) // 2
        numbers = numbers[half:] + numbers[:half]
    elif how == "dropped":
        name = max(header, key=lambda n: header[n]["data_offsets"])
        numbers = numbers[: header.pop(name)["data_offsets"][0]]
    else:
        wide = {"F64": "I64", "F32": "I32", "I64": "F64"}
        header[one]["dtype"] = wide[header[one]["dtype"]]
    write(folder, header, numbers)
    if seal:
        sealed(folder)
        how += ", sealed"
    return how


def other(folder: Path, draw: random.Random) -> str:
    path = folder / draw.choice((TENSORS, CONFIG, MANIFEST))
    elsewhere = folder.parent / "elsewhere"
    how = draw.choice(("format", "kind", "missing", "extra", "link", "pipe", "folder", "device", "empty config",
                       "no hashes", "list", "no config"))  # fmt: skip
    if how == "format":
        sealed(folder, format=draw.choice((0, 3, 99, -1, "2", None, [2], 10**20)))
    elif how == "kind":
        sealed(folder, kind=draw.choice(("", "profile", None, 3, {"a": 1}, "x" * 10_000)))
    elif how == "missing":
        path.unlink()
    elif how == "extra":
        (folder / draw.choice(("extra.py", "data.pkl", ".hidden", "pytorch_model.bin"))).write_bytes(
            b"x"
        )
    elif how == "link":
        shutil.move(path, elsewhere)
        path.symlink_to(elsewhere)
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "device":
        path.unlink()
        path.symlink_to("/dev/zero")
    elif how == "no hashes":
        sealed(folder, sha256=draw.choice(({}, None, [], {TENSORS: "0"})))
    elif how == "list":
        path.write_bytes(b"[1, 2, 3]\n")
        if path.name != MANIFEST:
            sealed(folder)
    else:
        config = {"empty config": b"{}\n", "no config": b"null\n"}[how]
        (folder / CONFIG).write_bytes(config)
        if how == "no config" or "hybrid" in (folder / MANIFEST).read_text():
            sealed(folder)
    return how


def huge(folder: Path, draw: random.Random) -> str:
    name, size = draw.choice(
        ((MANIFEST, 2**30), (CONFIG, 2**30), (TENSORS, 2**40), (MANIFEST, 10**6), (CONFIG, 10**7))
    )
    path = folder / name
    os.truncate(path, size)  # sparse: no disk is taken
    if name == CONFIG and size < 2**30:  # JSON, and its hash is right
        path.write_bytes(b"[" + b"{}," * (size // 3) + b"{}]")
        sealed(folder)
    return f"{name} of {size}"


def hostile(marker: Path) -> Iterator[bytes]:
    """Pickles that would make a file, written by hand: this program does not import what reads them."""
    command = f"touch {marker}".encode()
    python = f"open({str(marker)!r}, 'w').close()".encode()
    text = lambda s: b"X" + struct.pack("<I", len(s)) + s
    yield b"cos\nsystem\n(S'" + command + b"'\ntR."
    yield b"cposix\nsystem\n(S'" + command + b"'\ntR."
    yield b"(S'" + command + b"'\nios\nsystem\n."
    yield b"\x80\x02cos\nsystem\n" + text(command) + b"\x85R."
    yield b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text(command) + b"\x85R."
    yield b"cbuiltins\nexec\n(V" + python.replace(b"\n", b"") + b"\ntR."
    yield b"\x80\x02cbuiltins\neval\n" + text(python) + b"\x85R."
    yield b"\x80\x03csubprocess\ncall\n(" + text(b"touch") + text(str(marker).encode()) + b"e\x85R."
    for payload in (
        b"cos\nsystem\n(S'" + command + b"'\ntR.",
        b"cbuiltins\nexec\n(V" + python + b"\ntR.",
    ):
        kept = io.BytesIO()  # as torch.save packs it
        with zipfile.ZipFile(kept, "w") as file:
            file.writestr("archive/data.pkl", payload)
            file.writestr("archive/version", b"3\n")
        yield kept.getvalue()


def pickles(folder: Path, draw: random.Random, number: int) -> str:
    every = list(hostile(folder.parent / "marker"))
    content, again = every[number % len(every)], number >= len(every)
    name = (TENSORS, CONFIG, MANIFEST)[number % 3]
    (folder / name).write_bytes(content)
    if again and name == MANIFEST:
        for path in folder.iterdir():
            path.write_bytes(content)
    elif again:
        sealed(folder)
    return f"{name}{', sealed' * again}"


# What it takes


def resident() -> tuple[int, int]:
    """Bytes of memory now, and the most since `clear`."""
    lines = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(lines[k].split()[0]) * 1024 for k in ("VmRSS", "VmHWM"))
    return now, most


def clear() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def size_of(folder: Path) -> int:
    """Of all files, as far as they take room on the disk."""
    return sum(p.stat().st_blocks * 512 for p in folder.iterdir() if p.is_file() and not p.is_symlink())


def campaign(counts: dict[str, int], seed: int = 1) -> dict[str, Any]:
    """Damage so many of each kind; what they raised, and what the worst of them took."""
    draw = random.Random(seed)
    found: dict[str, Any] = {
        "raised": Counter(),
        "not_caught": [],
        "too_slow": [],
        "too_much": [],
        "code_ran": [],
    }
    worst = {"seconds": 0.0, "megabytes": 0.0}
    heard: list[str] = []
    listening = False

    def hear(event: str, arguments: Any) -> None:
        if listening and event in RUNS_CODE:
            heard.append(event)

    sys.addaudithook(hear)
    ways = {
        "flipped": flipped,
        "truncated": truncated,
        "lying": lying,
        "swapped": swapped,
        "other": other,
        "huge": huge,
    }
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for case, (make, load) in CASES.items():
            make(place / case)
            load(place / case)  # whole as it is; and whatever is imported late is imported now
        for kind, count in counts.items():
            for number in range(count):
                case = list(CASES)[number % len(CASES)]
                folder = place / "it" / "checkpoint"
                shutil.rmtree(folder.parent, ignore_errors=True)
                shutil.copytree(place / case, folder)
                what = pickles(folder, draw, number) if kind == "pickle" else ways[kind](folder, draw)
                size, label = size_of(folder), f"{kind} {case}: {what}"
                clear()
                before, began = resident()[0], time.perf_counter()
                listening = True
                try:
                    CASES[case][1](folder)
                    found["not_caught"].append(label)
                except Exception as error:
                    found["raised"][type(error).__name__] += 1
                    if (
                        type(error) is not CheckpointError
                        or "\n" in str(error)
                        or len(str(error)) > 1000
                    ):
                        found["not_caught"].append(f"{label}: {type(error).__name__}: {error}"[:300])
                finally:
                    listening = False
                took, more = time.perf_counter() - began, resident()[1] - before - size
                worst["seconds"] = max(worst["seconds"], took)
                worst["megabytes"] = max(worst["megabytes"], more / 1e6)
                if took > SECONDS:
                    found["too_slow"].append(label)
                if more > MEGABYTES * 1e6:
                    found["too_much"].append(label)
                if heard or (folder.parent / "marker").exists():
                    found["code_ran"].append(f"{label}: {heard}")
                    heard.clear()
    return {"count": sum(counts.values()), "kinds": counts, **found, "worst": worst}


def main() -> None:
    found = campaign(COUNTS)
    for key, value in found.items():
        print(f"{key}: {value if not isinstance(value, list) else value[:20] or 'none'}")
    save("damage", found)


if __name__ == "__main__":
    main()
