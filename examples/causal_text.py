# %% [markdown]
"""A small language model with PDE attention, and what becomes of it if its maps flow through the mask.

With walls, attention spreads among the tokens before and stays there. Without, every token sees the next
one: the loss looks far better, and the model cannot write a line. `assert_causal` tells them apart.
"""

# %%
import warnings

import torch
from torch.nn.functional import cross_entropy

import attractor as at
from attractor.train import parameter_groups

PARTS = """the farmer sowing his corn, that kept
the cock that crowed in the morn, that waked
the priest all shaven and shorn, that married
the man all tattered and torn, that kissed
the maiden all forlorn, that milked
the cow with the crumpled horn, that tossed
the dog, that worried
the cat, that killed
the rat, that ate
the malt that lay in
the house that Jack built.""".splitlines()
TEXT = "".join("This is " + " ".join(PARTS[-n:]) + "\n" for n in range(1, len(PARTS) + 1))
DATA = torch.tensor(list(TEXT.encode()))  # a token is a byte
TOKENS, BATCH, UPDATES = 64, 16, 150


def train(walls: str) -> tuple[at.attention.LanguageModel, float]:
    torch.manual_seed(0)
    model = at.attention.LanguageModel(
        128, dim=64, heads=4, layers=2, hidden=128, max_tokens=TOKENS, dropout=0.0,
        pde="diffusion", steps=4, walls=walls,
    )  # fmt: skip
    optimiser = torch.optim.AdamW(parameter_groups(model, lr=5e-3), betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimiser, 0.05, total_iters=20)
    for _ in range(UPDATES):
        starts = torch.randint(len(DATA) - TOKENS, (BATCH, 1))
        ids = DATA[starts + torch.arange(TOKENS + 1)]
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        warm_up.step()
    return model, loss.item()


# %%
warnings.filterwarnings("ignore", message="walls='sequence'")  # it would say what is shown here
for walls in ("mask", "sequence"):
    model, loss = train(walls)
    print(f'walls="{walls}": loss {loss:.2f} at the end of training')
    try:
        at.assert_causal(model, DATA[None, :48])
        print("  causal: no bit of any output changes with a later token")
    except at.CausalityError as error:
        print(f"  {error}")
    start = torch.tensor([list(b"This is the ")])
    written = model.generate(start, tokens=100, temperature=0)[0].tolist()
    print("  writes:", bytes(written).decode().replace("\n", " / "))
