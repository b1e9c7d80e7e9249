"""assert_causal passes what is causal and names what is not, for any model, input and output."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from attractor import CausalityError, assert_causal
from attractor.attention import causality


class Model(nn.Module):
    """A small language model; `ahead` tokens of the future are allowed in."""

    def __init__(self, ahead=0, wrap=lambda logits: logits, dropout=0.5):
        super().__init__()
        self.embed, self.dropout = nn.Embedding(11, 8), nn.Dropout(dropout)
        self.frozen, self.head = nn.Dropout(0.5), nn.Linear(8, 11)
        self.ahead, self.wrap = ahead, wrap
        self.frozen.eval()

    def forward(self, x):
        x = x if x.is_floating_point() else self.embed(x)
        mask = torch.ones(x.shape[-2], x.shape[-2]).tril(self.ahead).bool()
        x = nn.functional.layer_norm(x, (8,))
        x = x + nn.functional.scaled_dot_product_attention(x, x, x, mask)
        return self.wrap(self.head(self.frozen(self.dropout(x))))


@dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor


WRAPS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (torch.tensor(1.0), y, None),
    "dict": lambda y: {"ids": torch.zeros(y.shape[:-1], dtype=torch.long), "deep": [{"logits": y}]},
    "dataclass": lambda y: Answer(y.mean(), y),
}
INPUTS = {
    "ids": torch.arange(24).reshape(2, 12) % 11,
    "one text": torch.arange(9) % 11,
    "int32": torch.randint(0, 11, (2, 9), dtype=torch.int32),
    "one id": torch.zeros(1, 6, dtype=torch.long),
    "embeddings": torch.randn(2, 12, 8),
    "long": torch.arange(300)[None] % 11,
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_any_model_input_and_output(inputs, wrap):
    assert_causal(Model(0, WRAPS[wrap]), INPUTS[inputs])
    assert_causal(Model(-1 if inputs == "embeddings" else 0, WRAPS[wrap]), INPUTS[inputs])
    with pytest.raises(CausalityError, match="output 0 sees its future") as caught:
        assert_causal(Model(1, WRAPS[wrap]), INPUTS[inputs])
    assert isinstance(caught.value, AssertionError)
    assert caught.value.position == 0
    assert caught.value.size > 0


def test_first_position_and_size_are_named():
    def planted(x):  # only output 5 looks ahead
        y = x.cumsum(-2)
        return torch.cat((y[:, :5], y[:, 5:6] + 1e-3 * x[:, 7:8], y[:, 6:]), 1)

    with pytest.raises(
        CausalityError, match=r"output 5 sees its future: it changes by .* tokens after 5"
    ) as caught:
        assert_causal(planted, torch.rand(2, 9, 3))
    assert caught.value.position == 5
    assert 1e-5 < caught.value.size < 1e-1
    assert_causal(planted, torch.rand(2, 9, 3), tolerance=0.1)


def test_gradients_find_what_rounding_hides():
    hidden = lambda x: x.cumsum(-2) + 1e-30 * x.sum(-2, keepdim=True)
    causality._check_outputs(hidden, torch.rand(2, 9, 3), 1, 0.0)  # no bit changes
    with pytest.raises(CausalityError, match="output 0 sees its future: its gradient"):
        assert_causal(hidden, torch.rand(2, 9, 3))


def test_gradients_that_cancel_in_a_sum_are_found():
    hidden = lambda x: x.cumsum(-2) + 1e-30 * nn.functional.layer_norm(x.flip(-2), (3,))
    with pytest.raises(CausalityError, match="gradient"):
        assert_causal(hidden, torch.rand(2, 9, 3))


def test_modes_and_gradients_are_left_as_they_were():
    model = Model()
    for wrong in (False, True):
        model.ahead = int(wrong)
        before = [m.training for m in model.modules()]
        state = torch.get_rng_state()
        try:
            assert_causal(model, INPUTS["embeddings"])
        except CausalityError:
            assert wrong
        assert [m.training for m in model.modules()] == before
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(torch.get_rng_state(), state)
    assert before.count(False) == 1


def test_what_cannot_be_tested_says_so():
    with pytest.raises(ValueError, match="it is random, so its causality"):
        assert_causal(lambda x: nn.functional.dropout(x), torch.rand(2, 9, 3))
    with pytest.raises(ValueError, match="no floating tensor with 9 positions in dimension 1"):
        assert_causal(lambda x: x.mean(1), torch.rand(2, 9, 3))
    with pytest.raises(ValueError, match="must be ids"):
        assert_causal(Model(), torch.rand(4))


def test_nan_that_comes_from_the_future_is_a_leak():
    poisoned = lambda x: x / (x[:, -1:] == 0.5).double()
    x = torch.rand(1, 5, 2).double()
    x[:, -1] = 0.5
    with pytest.raises(CausalityError):
        assert_causal(poisoned, x)


def test_single_tokens_have_no_future():
    assert_causal(lambda x: x, torch.rand(1, 1, 3))
    assert_causal(Model(), torch.zeros(1, 1, dtype=torch.long))
