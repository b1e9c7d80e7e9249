import pytest

import attractor as at
from attractor.ode.recipes import Paper, Ridge, get_recipe


def test_a_name_is_a_recipe_with_its_usual_options():
    assert get_recipe("default") == Ridge() == Ridge(adam_steps=0)
    assert get_recipe("paper") == Paper() == Paper(epochs=500, loss_scale=1.0)
    own = Paper(epochs=3)
    assert get_recipe(own) is own


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ridge(adam_steps=-1), "adam_steps = -1"),
        (lambda: Ridge(adam_steps=0.5), r"adam_steps = 0\.5"),
        (lambda: Paper(epochs=0), "epochs = 0"),
        (lambda: Paper(loss_scale=0.0), r"loss_scale = 0\.0 must be a positive number"),
        (lambda: Paper(loss_scale=float("nan")), "loss_scale = nan"),
        (lambda: get_recipe("fast"), r"recipe = 'fast'; it is 'default' or 'paper'"),
        (lambda: get_recipe(None), "recipe = None"),
    ],
)
def test_options_are_checked_when_a_recipe_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.filterwarnings("ignore:the correction makes held-out trajectories worse")
def test_options_of_the_papers_recipe_reach_the_training():
    how = dict(dt=0.5, horizon=2.0, width=8, trajectories=20, scheme="euler")
    system = at.systems.Logistic(growth=2.0)
    plain, scaled = (at.fit(system, recipe=Paper(2, scale), **how).history for scale in (1.0, 4.0))
    assert [row["epoch"] for row in plain[:-1]] == [0, 1]
    assert scaled[0]["loss"] == pytest.approx(4 * plain[0]["loss"], rel=1e-5)
