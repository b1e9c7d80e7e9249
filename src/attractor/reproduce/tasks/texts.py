"""Texts: language models that are asked whether they read their answers, and classifiers.

`language` trains one `LanguageModel` and evaluates it twice: by teacher forcing, as the paper does, on
whole texts; and left to right, each token from nothing but the text before it. A causal model has one
perplexity, one that sees its future has two. `classify` trains one `Classifier`.

What is tokenised is kept beside the results, in a folder ``.tokens``, and mapped into memory from there.
"""

import hashlib
import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from attractor.attention import CausalityError, Classifier, LanguageModel, assert_causal
from attractor.attention.diagnostics import coefficients
from attractor.attention.windows import window_attention
from attractor.core.files import write_json, write_text
from attractor.core.limits import read_json, read_json_lines
from attractor.data import text
from attractor.reproduce.tasks import Context, Outcome
from attractor.reproduce.tasks.mixed import MixedValues
from attractor.train import Classify, DivergedError, Recipe, evaluate, train
from attractor.train.loop import restored

Config = dict[str, Any]
Rows = list[dict[str, Any]]

CHUNK = 1 << 14  # tokens whose logits are held at a time: 2 GB of a vocabulary of 30,522
CHECKED = 48  # tokens of a text that `assert_causal` is given
LAYERS = 4  # whose coefficients are among the metrics
HELD_OUT = 0.1  # of a training set without a validation set, as in the paper


def language(config: Config, context: Context) -> Outcome:
    """A language model, trained and evaluated.

    Configuration:
        data: "wikitext2", "wikitext103", or "toy", a text made here. tokenizer: "wordpiece", "bytes".
        part: how much of the training text is used, from its beginning; 1 is all.
        size: dim, heads, layers, hidden and dropout of the model.
        length: tokens of a text, divided by `shorten` (what a scale makes smaller).
        model: what is special about it, see `_special`.
        recipe: a name in `recipes`, each of which has learning_rate, warmup (part of the training),
            floor, weight_decay, norm, batch_tokens, and either updates, of texts drawn anywhere, or
            epochs, and with these perhaps patience, as in `classify`.
        evaluations: how often on the way, with `updates`; with epochs, after each.
        valid_tokens: of the validation text, from its beginning, the same for all lengths.
        honest: [texts, positions of each] of the sample that is also predicted left to right.

    Metrics: perplexity (teacher forcing), sample_forced and left_to_right (both of the sample), causal
    (1 if `assert_causal` passes), train_loss, updates, parameters, finite, coefficient_0 ... and beta_0
    ... of the layers. Curves: update, perplexity, left_to_right, train_loss.
    """
    ids, vocabulary, hashes = _streams(config["data"], config["tokenizer"], *_places(context))
    recipe, tokens = config["recipes"][config["recipe"]], config["length"] // config["shorten"]
    device = context.device
    train_ids = ids["train"][: round(config["part"] * len(ids["train"]))].to(device)
    count = max(1, config["valid_tokens"] // tokens)
    pieces = text.windows(ids["valid"], tokens)[:count].to(device)
    evaluations = recipe.get("epochs") or config["evaluations"]
    steps = recipe["updates"] // evaluations if "updates" in recipe else None
    batches = Windows(train_ids, tokens, max(1, recipe["batch_tokens"] // tokens), steps)
    torch.manual_seed(context.seed)
    options = {**config["size"], **_special(config), "norm": recipe["norm"], "max_tokens": tokens}
    model = LanguageModel(vocabulary, **options).to(device)
    texts, positions = config["honest"]
    sample = torch.linspace(0, len(pieces) - 1, min(texts, len(pieces))).long().to(device)
    look = lambda model: left_to_right(model, pieces[sample], positions)
    valid = list(pieces.split(max(1, CHUNK // tokens)))
    training_recipe = _recipe(recipe, evaluations, context)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="walls='sequence' lets attention flow")
        rows, finite = train_epochs(
            model,
            batches,
            valid,
            training_recipe,
            next_token,
            context,
            patience=recipe.get("patience"),
            look=look,
        )
        causal = is_causal_model(model, pieces[:1, : min(CHECKED, tokens)]) if finite else math.nan
    last = rows[-1] if finite else {}
    return {
        "metrics": {
            "perplexity": perplexity_of(last.get("valid_loss")),
            "left_to_right": last.get("left_to_right", math.nan),
            "sample_forced": last.get("sample_forced", math.nan),
            "causal": float(causal),
            "train_loss": last.get("train_loss", math.nan),
            "updates": float(len(batches) * len(rows)),
            "parameters": float(sum(p.numel() for p in model.parameters())),
            "finite": float(finite),
            **_coefficient_metrics(model),
        },
        "curves": {
            "update": [len(batches) * row["epoch"] for row in rows],
            "perplexity": [six_digits(perplexity_of(row.get("valid_loss"))) for row in rows],
            "left_to_right": [six_digits(row.get("left_to_right")) for row in rows],
            "train_loss": [six_digits(row["train_loss"]) for row in rows],
        },
        "data": hashes,
    }


def classify(config: Config, context: Context) -> Outcome:
    """A classifier of texts, trained and tested.

    Configuration:
        data: "imdb", "ag_news" or "sst2"; synthetic: texts made here instead. tokenizer: "wordpiece",
            "bytes".
        tokens: the longest text, for each data set; longer ones are cut.
        size: dim, heads, layers, hidden and dropout of the model.
        model: its pde, steps.
        recipe: a name in `recipes`, each of which has learning_rate, warmup (part of the training),
            weight_decay, norm, batch, epochs, and may have patience: training ends when the loss of the
            validation set has not fallen for so many epochs.
        limit: [training texts, test texts] that are used; null: all.

    The validation set is the data set's own, else a tenth of its training set, the same for all seeds.
    Metrics: accuracy, of the test set after the last epoch, and valid_accuracy, in percent; train_loss,
    valid_loss, epochs; coefficient_0 ... and beta_0 ... as in `language`. Curves: train_loss,
    valid_loss, valid_accuracy.
    """
    name = "toy" if config.get("synthetic") else config["data"]
    recipe, tokens = config["recipes"][config["recipe"]], config["tokens"][config["data"]]
    device = context.device
    parts, tokenizer, hashes = _classification_data(name, config["tokenizer"], tokens, *_places(context))
    (ids, labels), (test_ids, test_labels) = parts["train"], parts["test"]
    limit, test_limit = config["limit"] or (len(ids), len(test_ids))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    if "valid" in parts:
        valid_set = parts["valid"]
    else:
        count = round(HELD_OUT * len(ids))
        valid_set, order = (ids[order[:count]], labels[order[:count]]), order[count:]
    train_rows = order[:limit]
    test_rows = torch.randperm(len(test_ids), generator=torch.Generator().manual_seed(1))[:test_limit]
    batch = recipe["batch"]
    data = {
        "train": Texts(ids[train_rows].to(device), labels[train_rows].to(device), batch, shuffled=True),
        "valid": Texts(valid_set[0].to(device), valid_set[1].to(device), batch),
        "test": Texts(test_ids[test_rows].to(device), test_labels[test_rows].to(device), batch),
    }
    torch.manual_seed(context.seed)
    options = {**config["size"], **config["model"], "norm": recipe["norm"]}
    model = Classifier(
        tokenizer.size, text.CLASSES.get(name, 2), padding=tokenizer.padding,
        max_tokens=tokens, **options,
    ).to(device)  # fmt: skip
    training_recipe = _recipe(recipe, recipe["epochs"], context)
    rows, finite = train_epochs(
        model,
        data["train"],
        data["valid"],
        training_recipe,
        labels_of,
        context,
        patience=recipe.get("patience"),
    )
    precision = "bf16" if device.startswith("cuda") else "fp32"
    test_metrics = evaluate(model, data["test"], loss=labels_of, precision=precision)
    last = rows[-1] if finite else {}
    return {
        "metrics": {
            "accuracy": 100 * test_metrics["accuracy"] if finite else math.nan,
            "valid_accuracy": 100 * last.get("valid_accuracy", math.nan),
            "train_loss": last.get("train_loss", math.nan),
            "valid_loss": last.get("valid_loss", math.nan),
            "epochs": float(len(rows)),
            **_coefficient_metrics(model),
        },
        "curves": {
            n: [six_digits(row[n]) for row in rows]
            for n in ("train_loss", "valid_loss", "valid_accuracy")
        },
        "data": hashes,
    }


def language_data(config: Config, context: Context) -> dict[str, str]:
    """Hashes of what `language` reads."""
    return _streams(config["data"], config["tokenizer"], *_places(context))[2]


def classify_data(config: Config, context: Context) -> dict[str, str]:
    """Hashes of what `classify` reads."""
    name = "toy" if config.get("synthetic") else config["data"]
    tokens = config["tokens"][config["data"]]
    return _classification_data(name, config["tokenizer"], tokens, *_places(context))[2]


class Windows:
    """Batches ``[batch, tokens + 1]`` of a stream of ids; each epoch draws anew.

    Args:
        ids: ``[n]``, where the model is.
        steps: batches of an epoch, of texts that begin anywhere; None: every text of the stream once,
            one after another, as far as they fill batches.
    """

    def __init__(self, ids: Tensor, tokens: int, batch: int, steps: int | None = None) -> None:
        self.count = (len(ids) - 1) // tokens
        if self.count < 1:
            raise ValueError(f"{len(ids)} tokens are no text of {tokens} + 1; use more of the data")
        self.ids, self.tokens, self.anywhere = ids, tokens, steps is not None
        self.batch = batch if steps else min(batch, self.count)
        self.steps = steps or self.count // self.batch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        count = self.steps * self.batch
        if self.anywhere:
            starts = torch.randint(len(self.ids) - self.tokens, (count,))
        else:
            starts = torch.randperm(self.count)[:count] * self.tokens
        offsets = torch.arange(self.tokens + 1, device=self.ids.device)
        for rows in starts.to(self.ids.device).split(self.batch):
            yield self.ids[rows[:, None] + offsets]


class Texts:
    """Batches (ids ``[batch, tokens]``, labels ``[batch]``).

    Shuffled ones, for training, are all of one size: as many as batches of `batch` texts would be, the
    last one included. What does not go in is left out, another part of the texts in every epoch.
    """

    def __init__(self, ids: Tensor, labels: Tensor, batch: int, shuffled: bool = False) -> None:
        self.ids, self.labels, self.shuffled = ids, labels, shuffled
        self.steps = math.ceil(len(ids) / batch)
        self.batch = len(ids) // self.steps if shuffled else batch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.ids)
        order = torch.randperm(count) if self.shuffled else torch.arange(count)
        for rows in order.to(self.ids.device).split(self.batch)[: self.steps]:
            yield self.ids[rows], self.labels[rows]


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of every token but the first of texts ``[batch, tokens + 1]``, all given at once."""
    net: Any = model
    states, targets = net.states(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
    if len(targets) <= CHUNK:
        return _loss(net, states, targets)
    parts = [
        checkpoint(_loss, net, s, t, use_reentrant=False, preserve_rng_state=False)
        for s, t in zip(states.split(CHUNK), targets.split(CHUNK))
    ]
    return torch.cat(parts)


def labels_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Cross-entropy and accuracy of texts whose ids may have a narrow type."""
    ids, labels = batch
    return Classify()(model, (ids.long(), labels))


@torch.no_grad()
def left_to_right(model: LanguageModel, pieces: Tensor, positions: int) -> dict[str, float]:
    """Perplexities of a sample of tokens: given the whole text, and given what is before them only.

    Args:
        pieces: texts ``[texts, tokens + 1]``.
        positions: tokens of each that are predicted, spread evenly.
    """
    tokens = pieces.shape[1] - 1
    lengths = sorted({max(1, round(tokens * (i + 1) / (positions + 1))) for i in range(positions)})
    autocast = torch.autocast("cuda", torch.bfloat16) if pieces.is_cuda else nullcontext()
    model.eval()
    forced_losses, prefix_losses = [], []
    for chunk in pieces.split(max(1, CHUNK // tokens)):
        with autocast:
            states = model.states(chunk[:, :-1])
            for n in lengths:
                forced_losses.append(_loss(model, states[:, n - 1], chunk[:, n]))
                prefix_losses.append(_loss(model, model.states(chunk[:, :n])[:, -1], chunk[:, n]))
    perplexity = lambda parts: torch.cat(parts).double().mean().exp().item()
    return {"sample_forced": perplexity(forced_losses), "left_to_right": perplexity(prefix_losses)}


def toy_lines(split: str, count: int = 400) -> list[str]:
    """Lines of a made-up text: a name, a verb, the same name again and a full stop."""
    draw = random.Random(f"toy {split}")
    names, verbs = ("anna", "ben", "carl", "dora"), ("sees", "hears", "likes")
    lines = []
    for _ in range(count):
        name = draw.choice(names)
        lines.append(f"{name} {draw.choice(verbs)} {name} .")
    return lines


def toy_labelled(split: str, count: int = 240) -> tuple[list[str], list[int]]:
    """Texts that one word decides, among others that mean nothing."""
    draw = random.Random(f"toy {split}")
    labels = [i % 2 for i in range(count)]
    words = lambda: [draw.choice(("the", "a", "it", "was", "so")) for _ in range(draw.randint(1, 3))]
    texts = [" ".join([*words(), ("bad", "good")[label], *words()]) for label in labels]
    return texts, labels


def _loss(model: Any, states: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model.logits(states).float(), targets, reduction="none")


def train_epochs(
    model: nn.Module, batches: Any, valid: Any, recipe: Recipe, loss: Any, context: Context, *,
    patience: int | None = None, look: Callable[[Any], dict[str, float]] | None = None,
) -> tuple[Rows, bool]:  # fmt: skip
    """Train a model, and go on from the checkpoint in ``context.scratch`` if there is one.

    Args:
        batches: training batches, as `attractor.train.train` takes them.
        valid: validation batches; None for no validation loss.
        patience: end the training when the validation loss has not fallen for this many epochs.
        look: called after each epoch; the numbers it returns are added to the row of the epoch. One of
            them must be "left_to_right".

    Returns:
        One row per epoch, and whether all losses were finite.
    """
    scratch = context.scratch
    out = None if scratch is None else scratch / "training"
    every = max(1, recipe.epochs // 5)
    rows: Rows = []
    if scratch is not None and out is not None and out.exists():
        rows, saved_model = (
            _read_rows(scratch),
            deepcopy(model),
        )  # the model itself stays as it is to begin with
        options: Any = {"loss": loss, "device": context.device, "out": out}
        saved_epochs = len(
            restored(saved_model, batches, valid, recipe, **options)
        )  # rows may be ahead of it
        if 0 < saved_epochs <= len(rows):
            if look is not None and "left_to_right" not in rows[saved_epochs - 1]:
                rows[saved_epochs - 1] |= look(saved_model)
            if patience is not None and _stale(_losses(rows[:saved_epochs]), patience):
                model.load_state_dict(saved_model.state_dict())
                model.eval()
                return rows[:saved_epochs], True

    def tell(progress: Any) -> None:
        if progress.row is None:
            return
        del rows[progress.epoch - 1 :]  # of epochs after the last checkpoint, if it was interrupted
        rows.append({**progress.row, **({} if look is None else look(model))})
        if scratch is not None:
            write_json(scratch / "rows.json", rows)
        if progress.epoch % every == 0:
            context.tell(str(progress))
        if patience is not None and _stale(_losses(rows), patience):
            raise _EnoughError

    try:
        train(
            model, batches, valid, recipe, loss=loss, device=context.device, out=out, tell=tell,
            save_every=every,
        )  # fmt: skip
    except _EnoughError:
        pass
    except DivergedError as error:
        context.tell(str(error))
        return rows, False
    return rows, True


def _read_rows(scratch: Path) -> Rows:
    """Rows of a training that was interrupted: those of its log, with what had been seen of each."""
    log, look_log = scratch / "training" / "log.jsonl", scratch / "rows.json"
    rows: Rows = read_json_lines(log) if log.exists() else []
    look_rows: Rows = read_json(look_log) if look_log.exists() else []
    return [{**row, **(look_rows[i] if i < len(look_rows) else {})} for i, row in enumerate(rows)]


class _EnoughError(Exception):
    """Ends a training whose validation loss no longer falls."""


def _losses(rows: Rows) -> list[float | None]:
    return [row["valid_loss"] for row in rows]


def _stale(losses: list[float | None], patience: int) -> bool:
    """Whether the lowest of these is `patience` epochs ago or more."""
    numbers = [math.inf if loss is None else loss for loss in losses]
    return len(numbers) - 1 - numbers.index(min(numbers)) >= patience


def _recipe(config: Config, epochs: int, context: Context) -> Recipe:
    return Recipe(
        epochs=epochs, learning_rate=config["learning_rate"], warmup=config["warmup"] * epochs,
        floor=config.get("floor", 0.0), optimiser="adamw", betas=(0.9, 0.95),
        weight_decay=config["weight_decay"], clip=1.0, seed=context.seed,
    )  # fmt: skip


def _special(config: Config) -> Config:
    """Options of a model: pde, steps, walls and layers as they are; of a Longformer also window (tokens
    that a query sees, itself included), global_tokens and two_sided (half of the window is after the
    query, as in the Longformer that the paper takes, which is no causal model); of one whose values are
    mixed, without a PDE, mixed (how many) and perhaps each_channel (not one mixture for a layer)."""
    model = dict(config["model"])
    window, mixture_size = model.pop("window", None), model.pop("mixed", None)
    if mixture_size is not None:
        heads, dim = (config["size"][name] for name in ("heads", "dim"))
        channels = (heads, dim // heads) if model.pop("each_channel", False) else ()
        return {**model, "attention": MixedValues(mixture_size, *channels)}
    if window is None:
        return model
    two_sided = model.pop("two_sided")
    window = max(2, window // config["shorten"])
    sides = (window // 2, window // 2) if two_sided else (window - 1, 0)
    return {**model, "attention": both_sides if two_sided else window_attention, "window": sides}


def both_sides(*tensors: Tensor, is_causal: bool, **options: Any) -> Tensor:
    """`window_attention` that is not causal, whatever it is asked for."""
    return window_attention(*tensors, is_causal=False, **options)


def is_causal_model(model: nn.Module, ids: Tensor) -> bool:
    """Return whether `assert_causal` passes for texts ``[batch, tokens]``."""
    try:
        assert_causal(model, ids)
    except CausalityError:
        return False
    return True


def _coefficient_metrics(model: nn.Module) -> dict[str, float]:
    """The coefficients of the first layers, one for all heads: diffusion's or the wave's, and beta."""
    metrics = {f"{name}_{i}": math.nan for name in ("coefficient", "beta") for i in range(LAYERS)}
    rows = coefficients(model)
    for name, kinds in (("coefficient", ("alpha", "c")), ("beta", ("beta",))):
        for i, row in enumerate(r for r in rows if r["coefficient"] in kinds):
            if i < LAYERS:
                metrics[f"{name}_{i}"] = row["mean"]
    return metrics


def _places(context: Context) -> tuple[Path | None, Path | None]:
    """Where data are, and where tokens are kept."""
    cache = context.cache
    if cache is not None and not (cache / ".gitignore").exists():
        write_text(cache / ".gitignore", "*\n")  # they are made again, and large
    return context.folder, cache


def tokenizer_of(name: str, folder: Path | None) -> Any:
    """Return the tokenizer "bytes" or "wordpiece"; the latter reads its vocabulary from the folder."""
    if name not in ("bytes", "wordpiece"):
        raise ValueError(f"tokenizer {name!r} is not one of bytes, wordpiece")
    return text.Bytes() if name == "bytes" else text.WordPiece(folder)


@lru_cache(maxsize=2)
def _streams(
    name: str, kind: str, folder: Path | None, cache: Path | None
) -> tuple[dict[str, Tensor], int, dict[str, str]]:
    """Ids of the training and the validation text, how many there are, and hashes."""
    tokenizer = tokenizer_of(kind, folder)
    ids = {}
    for split in ("train", "valid"):
        lines = toy_lines(split) if name == "toy" else text.lines(name, split, folder)
        ids[split] = text.stream(lines, tokenizer, None if name == "toy" else cache)
    return ids, tokenizer.size, {f"{name} {split}": hash_of(x) for split, x in ids.items()}


@lru_cache(maxsize=4)
def _classification_data(
    name: str, kind: str, tokens: int, folder: Path | None, cache: Path | None
) -> tuple[dict[str, tuple[Tensor, Tensor]], Any, dict[str, str]]:
    """(ids, labels) of every split, the tokenizer, and hashes."""
    tokenizer, parts = tokenizer_of(kind, folder), {}
    for split in ("train", "test") if name == "toy" else text.FILES[name]:
        if name == "toy":
            (texts, labels), cache_folder = toy_labelled(split), None
        else:
            (texts, labels), cache_folder = text.labelled(name, split, folder), cache
        parts[split] = text.padded(texts, tokenizer, tokens, cache_folder)[0], torch.tensor(labels)
    hashes = {f"{name} {split}": hash_of(*both) for split, both in parts.items()}
    return parts, tokenizer, hashes


def hash_of(*tensors: Tensor) -> str:
    """Return the SHA-256 digest of integer tensors."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.to(torch.int32).numpy().tobytes())
    return digest.hexdigest()


def perplexity_of(loss: float | None) -> float:
    """Return the perplexity of a loss in nats: NaN without a loss, infinity where exp overflows."""
    return math.nan if loss is None else math.exp(loss) if loss < 700 else math.inf


def six_digits(x: float | None) -> float | None:
    """Return a number to six digits, for curves; None if it is not finite."""
    return None if x is None or not math.isfinite(x) else float(f"{x:.6g}")
