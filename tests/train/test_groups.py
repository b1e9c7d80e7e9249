"""Learnt coefficients are never decayed; matrices are, and vectors by choice."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import attractor
from attractor.attention import LanguageModel, PDEAttention
from attractor.attention.pdes import LearnedPDE
from attractor.train import Recipe, parameter_groups
from attractor.train.groups import undecayed


def a_model():
    size = {"dim": 16, "heads": 2, "layers": 2, "hidden": 16, "max_tokens": 8}
    return LanguageModel(11, **size, pde="advection_diffusion", per_head=True)


def coefficients(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("_raw")}


def take_steps(model, optimiser, steps=50):
    """Updates without a gradient: what moves is moved by decay."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(steps):
        optimiser.step()


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize("decay_vectors", [None, True, False])
def test_no_optimiser_of_a_recipe_moves_coefficients_without_a_gradient(optimiser, decay_vectors):
    model = a_model()
    before, weight = coefficients(model), model.embed.tokens.weight.detach().clone()
    assert len(before) == 4
    recipe = Recipe(
        optimiser=optimiser, weight_decay=0.1, learning_rate=0.1, decay_vectors=decay_vectors
    )
    take_steps(model, recipe.make_optimiser(model))
    for name, x in coefficients(model).items():
        assert torch.equal(x, before[name]), name
    assert model.embed.tokens.weight.norm() < 0.9 * weight.norm()


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RAdam])
def test_groups_for_any_optimiser(make):
    model = a_model()
    groups = parameter_groups(model, 0.1, weight_decay=0.1, coefficient_lr=0.5)
    rows = [(g["lr"], g["weight_decay"], {p.dim() for p in g["params"]}) for g in groups]
    assert rows == [(0.1, 0.1, {2}), (0.1, 0.0, {1}), (0.5, 0.0, {1})]
    together = [p for g in groups for p in g["params"]]
    assert len(together) == len({*together}) == len([*model.parameters()])
    assert {*groups[-1]["params"]} == {p for n, p in model.named_parameters() if n.endswith("_raw")}
    before = coefficients(model)
    take_steps(model, make(groups))
    assert all(torch.equal(x, before[name]) for name, x in coefficients(model).items())
    assert parameter_groups(model, 0.1)[-1]["lr"] == 0.1


def test_copies_and_wrappers_keep_what_is_declared():
    model = nn.Sequential(copy.deepcopy(PDEAttention(8, 2)), nn.Linear(8, 8))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for net in (model, averaged):
        assert len(undecayed(net)) == 1


def test_frozen_parameters_and_vectors():
    layer = PDEAttention(8, 2)
    layer.pde.requires_grad_(False)
    assert len(parameter_groups(layer, 0.1)) == 2
    (group,) = parameter_groups(layer, 0.1, decay_vectors=True)
    assert len(group["params"]) == 4
    (only,) = parameter_groups(LearnedPDE("wave"), 0.1, decay_vectors=True)
    assert only["weight_decay"] == 0.0


def test_other_libraries_methods_of_that_name_are_not_ours():
    class Timm(nn.Linear):
        def no_weight_decay(self):
            return {"weight"}

    assert undecayed(Timm(2, 2)) == []


def test_errors_teach():
    layer = PDEAttention(8, 2)
    with pytest.raises(TypeError, match="model is a list; give a module"):
        parameter_groups([layer], 0.1)
    for wrong in ({"lr": -1.0}, {"lr": 0.1, "weight_decay": -1.0}, {"lr": 0.1, "coefficient_lr": -1.0}):
        with pytest.raises(ValueError, match="must be a finite number of at least 0"):
            parameter_groups(layer, **wrong)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        parameter_groups(layer.requires_grad_(False), 0.1)


def test_the_library_makes_no_other_optimiser_that_decays():
    """An optimiser with decay gets groups; all parameters alike are for Adam without decay."""
    made = re.compile(r"optim\.(AdamW|SGD|RMSprop|NAdam|RAdam)\(\s*[\w.]*parameters\(")
    for path in Path(attractor.__file__).parent.rglob("*.py"):
        assert not made.search(path.read_text()), path
