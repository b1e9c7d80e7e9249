"""Fine data on a disk or in an object store: a folder of shards, each of which has its own hash."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Self

import torch

from attractor.core.rates import Rate, call_rate
from attractor.core.step import with_parameters
from attractor.ode.serialization import RATE
from attractor.ode.trajectories import Plan, Run, with_noise
from attractor.storage.files import names_in, open_plain
from attractor.storage.objects import AnyPath, path_of
from attractor.storage.schema import any_of, check, listing, null, number, record, text, text_number
from attractor.storage.tensor_specs import TensorSpec, check_tensors
from attractor.train.checkpoint import CheckpointError
from attractor.train.tensors import parse, read_annotated, read_json

MANIFEST = 1 << 20  # bytes that one may have
SHARDS = 100_000  # files per folder, at most
LARGEST_PLAN = 2**53
WHOLE, MATRIX = number(1, LARGEST_PLAN, whole=True), listing(listing(number(), 1), 1)
PLAN = {
    "dt": number(5e-324), "steps": WHOLE, "substeps": WHOLE,
    "seed": number(-(2**63), 2**63 - 1, whole=True), "shard_size": WHOLE,
    "period": any_of(number(5e-324), null), "stream": text(),
}  # fmt: skip
WITNESS = record(
    {"states": MATRIX, "times": listing(number(), 1), "slopes": listing(MATRIX, 1)},
    {"parameters": MATRIX},
)
WITNESSES = {
    "states": TensorSpec(("states", "dim")), "times": TensorSpec(("times",)),
    "slopes": TensorSpec(("times", "states", "dim")), "parameters": TensorSpec(("states", "parameters")),
}  # fmt: skip
# Data of the first versions have a "count" of trajectories, and neither reference nor witness.
SCHEMA = record(
    {"rate": RATE, "plan": any_of(*(record(PLAN | {key: WHOLE}) for key in ("trajectories", "count")))},
    {"kind": text(choices=("fine trajectories",)), "reference": text(), "code": text(),
     "witness": any_of(WITNESS, null)},
)  # fmt: skip
ABOUT = record({"shard": number(0, SHARDS, whole=True), "t0": text_number(), "sha256": text(64)})


@dataclass(frozen=True)
class FineData:
    """A folder of finished shards."""

    folder: AnyPath
    plan: Plan
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        rate = self.manifest.get("rate", {})
        told = f"{self.plan.trajectories:,} trajectories of {rate.get('system') or rate.get('name')}"
        return f"FineData({told}, dt {self.plan.dt:g}, {self.plan.steps} steps, in {self.folder})"

    @classmethod
    def open(cls, folder: AnyPath | str) -> Self:
        """Return the data in a folder.

        Raises:
            CheckpointError: There are none, they are damaged, or shards are still missing.
        """
        folder = path_of(folder)
        try:
            manifest, _ = read_json(folder / "manifest.json", MANIFEST, link=False)
            check(manifest, SCHEMA, "its manifest.json")
            entries = dict(manifest["plan"])
            if "count" in entries:
                entries["trajectories"] = entries.pop("count")
            plan = Plan(**entries)
            check_shards(plan)
            witness = manifest.get("witness") or {}
            tensors = {name: torch.tensor(x, dtype=torch.float64) for name, x in witness.items()}
            check_tensors(tensors, WITNESSES, "its manifest.json", optional=WITNESSES)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} holds no fine data: {error}") from None
        data = cls(folder, plan, manifest)
        missing = data.missing()
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {plan.shards} shards; the call that began it goes on "
                "where it was interrupted"
            )
        return data

    def missing(self) -> list[int]:
        """Return the shards that do not exist yet."""
        present = names_in(self.folder)
        return [k for k in range(self.plan.shards) if shard_name(k) not in present]

    @property
    def hash(self) -> str:
        """SHA-256 of all files and their names: equal for equal data."""
        total = hashlib.sha256()
        for name in ("manifest.json", *map(shard_name, range(self.plan.shards))):
            with open_plain(self.folder / name) as file:
                total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    def check_rate(self, rate: Rate, device: torch.device | str | None = None) -> None:
        """Raise if the data are clearly of another equation.

        Args:
            device: Where the rate is evaluated.

        Raises:
            ValueError: The rate has other values at the states that were saved with the data.
        """
        seen = self.manifest.get("witness")  # data of the first versions have none
        if seen is None:
            return
        tensor = lambda key: torch.tensor(seen[key], dtype=torch.float64, device=device)
        parameters = tensor("parameters") if "parameters" in seen else None
        try:
            now = slopes_at(rate, tensor("states"), seen["times"], parameters)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{self.folder} holds data of another equation: this rate cannot be called with the "
                f"states that were saved with the data ({reason})"
            ) from None
        if not is_close(now, seen["slopes"]):
            raise ValueError(
                f"{self.folder} holds data of another equation: at u = {short(seen['states'][0])} its "
                f"rate was {short(seen['slopes'][0][0])}, and this one gives {short(now[0][0])}"
            )

    def runs(
        self, fraction: float = 1.0, noise: float = 0.0, device: torch.device | str | None = None
    ) -> list[Run]:
        """Return the runs of the first trajectories.

        Args:
            fraction: Share of the trajectories to return.
            noise: Standard deviation of the normal noise that is added to each state. It depends on the
                seed and the shard only.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction = {fraction} must be above 0 and at most 1")
        if not 0 <= noise < math.inf:
            raise ValueError(f"noise = {noise} must be a finite number, and not negative")
        left, found = max(1, round(fraction * self.plan.trajectories)), []
        for k in range(self.plan.shards):
            if left <= 0:
                break
            run = read_shard(self.folder / shard_name(k), self.plan, k)
            if noise:
                run = with_noise(run, noise, self.plan.generator(k, "noise"))
            found.append(run.part(left).to(device))
            left -= self.plan.size(k)
        return found


def read_shard(path: AnyPath, plan: Plan, shard: int) -> Run:
    """Return the trajectories of a file.

    Raises:
        CheckpointError: The file cannot be read, or does not match its own hash or the plan.
    """
    tensors, metadata = read_annotated(path, link=False)
    about = parse(metadata.get("about", "null").encode(), path)
    check(about, ABOUT, f"{path}: the entry about", CheckpointError)
    size = plan.size(shard)
    specs = {
        "u": TensorSpec((plan.steps + 1, size, "components"), (torch.float64,)),
        "parameters": TensorSpec((size, "parameters"), (torch.float64,)),
    }
    check_tensors(tensors, specs, path, CheckpointError, optional=("parameters",))
    known = [tensors[name] for name in specs if name in tensors]
    if about["sha256"] != tensor_hash(*known) or about["shard"] != shard:
        raise CheckpointError(f"{path} is damaged: it does not match its own hash or the plan")
    return Run(float.fromhex(about["t0"]), tensors["u"], tensors.get("parameters"))


def is_good(path: AnyPath, plan: Plan, shard: int) -> bool:
    """Return whether a file holds a shard of the plan."""
    try:
        read_shard(path, plan, shard)
    except CheckpointError:
        return False
    return True


def tensor_hash(*tensors: torch.Tensor) -> str:
    """Return the SHA-256 of all numbers."""
    total = hashlib.sha256()
    for x in tensors:
        total.update(x.cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def check_shards(plan: Plan) -> None:
    """Raise a ValueError if a plan has more than `SHARDS` shards."""
    if plan.shards > SHARDS:
        raise ValueError(
            f"{plan.trajectories:,} trajectories in shards of {plan.shard_size:,} are {plan.shards:,} "
            f"files, and a folder holds at most {SHARDS:,}; use a larger shard_size"
        )


def slopes_at(
    rate: Any, u: torch.Tensor, times: list[float], parameters: torch.Tensor | None
) -> list[list[list[float]]]:
    """Return the rate of states ``[n, d]`` with parameters ``[n, k]`` at each time."""
    bound = with_parameters(rate, parameters)
    with torch.no_grad():
        return [call_rate(bound, torch.tensor(t).to(u), u).tolist() for t in times]


def is_close(one: Any, other: Any) -> bool:
    """Return whether numbers are equal up to the rounding of another machine."""
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (one, other))
    return a.shape == b.shape and torch.allclose(a, b, 1e-6, 1e-9 * b.abs().max().item())


def short(numbers: list[float]) -> str:
    """Return the first numbers as text, for a message."""
    more = ", ..." if len(numbers) > 4 else ""
    return f"[{', '.join(f'{x:.6g}' for x in numbers[:4])}{more}]"


def shard_name(shard: int) -> str:
    """Return the name of the file of a shard."""
    return f"shard-{shard:05d}.safetensors"
