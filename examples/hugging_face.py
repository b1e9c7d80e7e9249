# %% [markdown]
"""PDE attention in a Hugging Face model: a name, a learnt coefficient a layer, and a test that it is causal."""

# %%
import sys

import torch

import attractor as at

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    print("this example needs transformers: pip install 'attractor[text]'")
    sys.exit()
from attractor.integrations import transformers as hf

print("names for attn_implementation:", ", ".join(hf.register()))

# %% [markdown]
# Any model that takes `attn_implementation`; here a small GPT-2 without a download.

# %%
torch.manual_seed(0)
tiny = GPT2Config(
    n_layer=2, n_head=2, n_embd=32, n_positions=64, vocab_size=100, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(tiny).eval()
ids = torch.randint(100, (1, 32))
before = model(ids).logits
model = hf.add_pde(model, "diffusion", steps=4)  # alpha starts at 0, and has a gradient there
print("outputs move by", (model(ids).logits - before).abs().max().item())

# %%
at.assert_causal(model, ids)
print("bypassed:", hf.check(model))

# %% [markdown]
# Coefficients have a learning rate of their own, and no weight decay.

# %%
groups = hf.parameter_groups(model, lr=5e-5, coefficient_lr=1e-3)
optimiser = torch.optim.AdamW(groups)
for _ in range(20):
    optimiser.zero_grad()
    model(ids, labels=ids).loss.backward()
    optimiser.step()
for row in at.attention.coefficients(model):
    print(row["name"], row["coefficient"], round(row["mean"], 4))
