"""Tasks on texts: train language models and classifiers, and test whether language models are causal.

`language` trains one `LanguageModel` and evaluates it in two ways: by teacher forcing on whole texts, as
the paper does, and from left to right, where each token is predicted from the previous tokens alone. The
two perplexities of a causal model are equal; those of a model that sees later tokens differ. `classify`
trains one `Classifier`.

Token ids are saved in a folder ``.tokens`` in the folder of results, and memory-mapped from there.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from attractor.attention import CausalityError, Classifier, LanguageModel, assert_causal
from attractor.attention.diagnostics import coefficients
from attractor.attention.windows import window_attention
from attractor.data import text
from attractor.reproduce.tasks import Context, Outcome
from attractor.reproduce.tasks.mixed import MixedValues
from attractor.reproduce.tasks.text_data import (
    Texts,
    Windows,
    classification_data,
    folders_of,
    perplexity_of,
    six_digits,
    token_streams,
)
from attractor.train import Classify, DivergedError, Recipe, evaluate, train
from attractor.train.loop import restored

Config = dict[str, Any]
Rows = list[dict[str, Any]]

CHUNK = 1 << 14  # tokens per chunk of logits, which takes 2 GB with a vocabulary of 30,522
CHECKED = 48  # number of tokens of a text that `assert_causal` checks
LAYERS = 4  # number of layers whose coefficients are metrics
HELD_OUT = 0.1  # share for validation of a training set without a validation set, as in the paper


def language(config: Config, context: Context) -> Outcome:
    """Train and evaluate a language model.

    Configuration:
        data: "wikitext2", "wikitext103", or "toy" for a generated text.
        tokenizer: "wordpiece" or "bytes".
        part: share of the training text to use, from its beginning.
        size: dim, heads, layers, hidden and dropout of the model.
        length: tokens per text, divided by `shorten`, which a scale sets.
        model: options of the model, see `_model_options`.
        recipe: a name in `recipes`. A recipe has learning_rate, warmup (share of the training), floor,
            weight_decay, norm, batch_tokens, and either updates, for texts that start anywhere, or
            epochs, optionally with patience as in `classify`.
        evaluations: number of evaluations for a recipe with updates. A recipe with epochs evaluates
            after each epoch.
        valid_tokens: number of tokens of the validation text to use, from its beginning.
        honest: [texts, positions per text] of the sample that is also predicted from left to right.

    Metrics:
        perplexity: by teacher forcing on the validation text.
        sample_forced, left_to_right: perplexities on the sample, by teacher forcing and from left to
            right.
        causal: 1 if `assert_causal` passes.
        coefficient_0, beta_0, ...: mean coefficients of the PDE per layer.
        train_loss, updates, parameters, finite.

    Curves: update, perplexity, left_to_right, train_loss.
    """
    ids, vocabulary, hashes = token_streams(config["data"], config["tokenizer"], *folders_of(context))
    recipe, tokens = config["recipes"][config["recipe"]], config["length"] // config["shorten"]
    device = context.device
    train_ids = ids["train"][: round(config["part"] * len(ids["train"]))].to(device)
    count = max(1, config["valid_tokens"] // tokens)
    pieces = text.windows(ids["valid"], tokens)[:count].to(device)
    evaluations = recipe.get("epochs") or config["evaluations"]
    steps = recipe["updates"] // evaluations if "updates" in recipe else None
    batches = Windows(train_ids, tokens, max(1, recipe["batch_tokens"] // tokens), steps)
    torch.manual_seed(context.seed)
    options = {**config["size"], **_model_options(config), "norm": recipe["norm"], "max_tokens": tokens}
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
    """Train and test a classifier of texts.

    The validation set is that of the data set, or else a tenth of its training set, the same for all
    seeds.

    Configuration:
        data: "imdb", "ag_news" or "sst2".
        synthetic: whether to use generated texts in place of the data set; optional.
        tokenizer: "wordpiece" or "bytes".
        tokens: maximum number of tokens per text, by data set. Longer texts are cut.
        size: dim, heads, layers, hidden and dropout of the model.
        model: pde and steps of the model.
        recipe: a name in `recipes`. A recipe has learning_rate, warmup (share of the training),
            weight_decay, norm, batch, epochs, and optionally patience: the training ends if the
            validation loss has not fallen for this number of epochs.
        limit: [training texts, test texts] to use; null for all.

    Metrics:
        accuracy: of the test set after the last epoch, in percent.
        valid_accuracy: of the validation set after the last epoch, in percent.
        coefficient_0, beta_0, ...: as in `language`.
        train_loss, valid_loss, epochs.

    Curves: train_loss, valid_loss, valid_accuracy.
    """
    name = "toy" if config.get("synthetic") else config["data"]
    recipe, tokens = config["recipes"][config["recipe"]], config["tokens"][config["data"]]
    device = context.device
    parts, tokenizer, hashes = classification_data(
        name, config["tokenizer"], tokens, *folders_of(context)
    )
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
    """Return the hashes of the data that `language` reads."""
    return token_streams(config["data"], config["tokenizer"], *folders_of(context))[2]


def classify_data(config: Config, context: Context) -> dict[str, str]:
    """Return the hashes of the data that `classify` reads."""
    name = "toy" if config.get("synthetic") else config["data"]
    tokens = config["tokens"][config["data"]]
    return classification_data(name, config["tokenizer"], tokens, *folders_of(context))[2]


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the losses ``[batch * tokens]`` of texts ``[batch, tokens + 1]`` by teacher forcing."""
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
    """Return cross-entropy and accuracy of a batch of texts, with ids of any integer dtype."""
    ids, labels = batch
    return Classify()(model, (ids.long(), labels))


@torch.no_grad()
def left_to_right(model: LanguageModel, pieces: Tensor, positions: int) -> dict[str, float]:
    """Return perplexities of a sample of tokens, by teacher forcing and from the previous tokens only.

    Args:
        model: The language model.
        pieces: Texts ``[texts, tokens + 1]``.
        positions: Number of evenly spaced tokens per text to predict.
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


def _loss(model: Any, states: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model.logits(states).float(), targets, reduction="none")


def train_epochs(
    model: nn.Module, batches: Any, valid: Any, recipe: Recipe, loss: Any, context: Context, *,
    patience: int | None = None, look: Callable[[Any], dict[str, float]] | None = None,
) -> tuple[Rows, bool]:  # fmt: skip
    """Train a model, and resume from the checkpoint in ``context.scratch`` if there is one.

    Args:
        model: The model, which is trained in place.
        batches: Training batches, as for `attractor.train.train`.
        valid: Validation batches; None for no validation loss.
        recipe: The recipe.
        loss: Loss function, as for `attractor.train.train`.
        context: Device, scratch folder and progress function of the run.
        patience: Number of epochs without a lower validation loss after which the training ends; None
            for no early end.
        look: Function of the model that is called after each epoch and returns further numbers for the
            row of the epoch.

    Returns:
        One row per epoch, and whether all losses were finite.
    """
    out = None if context.scratch is None else context.scratch / "training"
    interval = max(1, recipe.epochs // 5)
    rows: Rows = []
    if out is not None and out.exists():
        saved_model = deepcopy(model)  # gets the weights of the checkpoint; `model` is unchanged
        options: Any = {"loss": loss, "device": context.device, "out": out}
        rows = list(restored(saved_model, batches, valid, recipe, **options))
        if rows and patience is not None and _stale(_losses(rows), patience):
            model.load_state_dict(saved_model.state_dict())
            model.eval()
            return rows, True

    def tell(progress: Any) -> None:
        if progress.row is None:
            return
        del rows[progress.epoch - 1 :]
        rows.append(progress.row)
        if progress.epoch % interval == 0:
            context.tell(str(progress))
        if patience is not None and _stale(_losses(rows), patience):
            raise _EnoughError

    after_epoch = None if look is None else (lambda model, row: look(model))
    try:
        history = train(
            model, batches, valid, recipe, loss=loss, device=context.device, out=out, tell=tell,
            after_epoch=after_epoch, save_every=interval,
        )  # fmt: skip
    except _EnoughError:
        return rows, True
    except DivergedError as error:
        context.tell(str(error))
        return list(error.history), False
    return list(history), True


class _EnoughError(Exception):
    """Raised to end a training whose validation loss no longer falls."""


def _losses(rows: Rows) -> list[float | None]:
    return [row["valid_loss"] for row in rows]


def _stale(losses: list[float | None], patience: int) -> bool:
    """Return whether the lowest of the losses is at least `patience` epochs old."""
    numbers = [math.inf if loss is None else loss for loss in losses]
    return len(numbers) - 1 - numbers.index(min(numbers)) >= patience


def _recipe(config: Config, epochs: int, context: Context) -> Recipe:
    return Recipe(
        epochs=epochs, learning_rate=config["learning_rate"], warmup=config["warmup"] * epochs,
        floor=config.get("floor", 0.0), optimiser="adamw", betas=(0.9, 0.95),
        weight_decay=config["weight_decay"], clip=1.0, seed=context.seed,
    )  # fmt: skip


def _model_options(config: Config) -> Config:
    """Return the options of `LanguageModel` from the entry "model" of a configuration.

    Entries:
        pde, steps, walls, layers, global_tokens: passed on unchanged.
        window: number of tokens that a query attends to, itself included, for a Longformer.
        two_sided: whether half of the window follows the query, as in the paper's Longformer, which is
            not causal.
        mixed: number of mixed values, for `MixedValues` in place of a PDE.
        each_channel: whether each channel has its own mixture, not each layer; optional.
    """
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
    """Call `window_attention` with ``is_causal=False``, whatever is passed for `is_causal`."""
    return window_attention(*tensors, is_causal=False, **options)


def is_causal_model(model: nn.Module, ids: Tensor) -> bool:
    """Return whether `assert_causal` passes for texts ``[batch, tokens]``."""
    try:
        assert_causal(model, ids)
    except CausalityError:
        return False
    return True


def _coefficient_metrics(model: nn.Module) -> dict[str, float]:
    """Return the mean coefficients over heads of the first layers: alpha of diffusion or c, and beta."""
    metrics = {f"{name}_{i}": math.nan for name in ("coefficient", "beta") for i in range(LAYERS)}
    rows = coefficients(model)
    for name, kinds in (("coefficient", ("alpha", "c")), ("beta", ("beta",))):
        for i, row in enumerate(r for r in rows if r["coefficient"] in kinds):
            if i < LAYERS:
                metrics[f"{name}_{i}"] = row["mean"]
    return metrics
