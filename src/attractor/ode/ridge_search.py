"""The search of recipe "default": candidates with a last layer in closed form, judged by rollouts."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from attractor.ode.closed_form import ClosedForm
from attractor.ode.corrections import BY_NAME, get_correction
from attractor.ode.pairs import Pairs
from attractor.ode.rollouts import Rollouts
from attractor.ode.serialization import history_from_json
from attractor.ode.unfinished import Unfinished
from attractor.storage.schema import Schema, flag, number, pair, record, text, text_number
from attractor.train import checkpoint, generators
from attractor.train.tensors import JSON, described

SCALES = (0.25, 0.15, 0.4, 0.08, 0.7)  # of the random first layer, for standardised inputs
ADAM_ROUNDS = 5  # the last layer is solved, and rollouts are judged, after each

OPTIONS = {"state": flag, "stages": number(1, whole=True)}
KEPT: dict[str, Schema] = {  # what is kept of a search beside tensors
    "done": number(1, whole=True),
    "best": record(
        {
            "rollout": text_number(0, math.inf), "scale": number(0),
            "kind": pair(text(choices=BY_NAME), record({}, OPTIONS)),
        }
    ),
    "history": text(JSON),
}  # fmt: skip

Kind = tuple[str, dict[str, Any]]  # name of a correction, and its own options


class Best(NamedTuple):
    """The best candidate so far: its error on rollouts, its correction, and what it is."""

    rollout: float
    model: nn.Module
    scale: float
    kind: Kind


@dataclass
class RidgeSearch:
    """Candidates of the default recipe, and the best one so far.

    Attributes:
        pairs: Plain steps and their errors, to which candidates are fitted.
        held_out: The rollouts that choose.
        options: Options that all candidates share.
        adam_steps: As in `Ridge`.
        unfinished: Where the search is kept while it runs.
        budget: Seconds after which no further candidate is tried.
        progress: Called with a message per candidate.
        generator: Draws the hidden weights.
    """

    pairs: Pairs
    held_out: Rollouts
    options: dict[str, Any]
    adam_steps: int
    unfinished: Unfinished
    budget: float | None
    progress: Callable[[str], None]
    generator: torch.Generator
    asked: int = 0  # candidates
    done: int = 0
    best: Best | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    def run(self, kinds: Sequence[Kind]) -> Best:
        """Try the corrections, then other scales of the best one; return the best candidate."""
        self._load()
        self.held_out.crew.wait()  # until all processes have read what was kept
        for kind in kinds:
            self._attempt(kind, SCALES[0])
        assert self.best is not None
        kind = self.best.kind
        if hasattr(self.best.model.net, "spread"):  # otherwise nothing in it is random
            for scale in SCALES[1:]:
                self._attempt(kind, scale)
        self._save(last=True)
        return self.best

    def _attempt(self, kind: Kind, scale: float) -> None:
        """Try one candidate, unless it is done, or time is up and there is one already."""
        self.asked += 1
        if self.asked <= self.done:
            return
        crew, (name, own) = self.held_out.crew, kind
        spent = crew.agreed_number(self.unfinished.seconds, self.pairs.u)
        if self.history and self.budget is not None and spent > self.budget:
            return
        state = (
            "slope and state" if own.get("state") else {"attns": "slope", "neurvec": "state"}.get(name)
        )
        self.progress(f"{name}{f' of {state}' if state else ''}, weights of scale {scale:g}")
        closed = ClosedForm(self._make(kind), self.pairs, scale, self.generator, crew)
        rounds = ADAM_ROUNDS if self.adam_steps else 0
        part, least = math.ceil(self.adam_steps / ADAM_ROUNDS), math.inf
        for i in range(rounds + 1):
            if i:
                closed.train_hidden(part, (i - 1) * part, rounds * part, self.generator)
            solution = closed.solve()
            folded = closed.fold()
            error = self.held_out.error(folded)
            self.history.append(
                {"correction": name, **own, "scale": scale, **solution, "adam_steps": i * part,
                 "rollout": error, "seconds": self.unfinished.seconds}
            )  # fmt: skip
            if self.best is None or not self.best.rollout <= error:
                self.best = Best(error, folded, scale, kind)
            if i > 1 and error > least:  # training makes rollouts worse: stop
                break
            least = min(least, error)
        self.done = self.asked
        self._save()

    def _make(self, kind: Kind) -> nn.Module:
        """Return the correction of a candidate."""
        (name, own), like = kind, self.pairs.u
        correction = get_correction(name)
        options = {**correction.fit_defaults, **self.options, **own}
        with generators.own():  # the weights that are drawn here are not kept
            return correction(like.shape[-1], **options, dtype=torch.float64, device=like.device)

    def _save(self, last: bool = False) -> None:
        """Keep the best candidate, and the state of the generator."""
        if self.best is None:
            return
        tensors = {f"best.{k}": v for k, v in self.best.model.state_dict().items()}
        tensors["generator"] = self.generator.get_state()
        rollout, _, scale, kind = self.best
        best = {"rollout": rollout.hex(), "scale": scale, "kind": kind}
        # As text, for a rollout may be infinite.
        numbers = {"done": self.done, "best": best, "history": json.dumps(self.history)}
        self.unfinished.save(self.done, tensors, numbers, last)

    def _load(self) -> None:
        """Continue where the search was interrupted."""
        saved = self.unfinished.load(KEPT)
        if saved is None:
            return
        tensors, config = saved
        best, (name, own) = config["best"], config["best"]["kind"]
        with described("the unfinished fit", "a search"):
            if "generator" not in tensors:
                raise ValueError("it has no state of the generator")
            model = self._make((name, own))
            weights = {k.removeprefix("best."): v for k, v in tensors.items() if k != "generator"}
            checkpoint.fill(model, weights, "the unfinished fit")
            self.generator.set_state(tensors["generator"])
        self.history = history_from_json(config["history"], "the unfinished fit")
        self.done = config["done"]
        self.best = Best(float.fromhex(best["rollout"]), model, best["scale"], (name, own))
