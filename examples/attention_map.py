# %% [markdown]
"""A causal attention map in pseudo-time, with walls and without: what it keeps, and what leaks."""

# %%
import torch

import attractor as at

torch.manual_seed(3)
query, key = 2 * torch.randn(2, 1, 1, 16, 8)  # one text, one head, 16 tokens
look = lambda **options: at.attention.trace(query, key, is_causal=True, steps=8, **options)
seen = {
    "diffusion": look(pde=at.pdes.Diffusion(alpha=0.2)),
    "diffusion, no walls": look(pde=at.pdes.Diffusion(alpha=0.2), walls="sequence"),
    "wave": look(pde=at.pdes.Wave(c=0.4)),
    "reaction-diffusion": look(pde=at.pdes.ReactionDiffusion(alpha=0.2, beta=0.1)),
}

# %% [markdown]
# `mass` is the mean row sum, `leaked` the weight on keys that the mask forbids, `spread` how far a row looks.

# %%
for name, trace in seen.items():
    mass, leaked, spread = (getattr(trace, m)[-1].item() for m in ("mass", "leaked", "spread"))
    print(
        f"{name:20} mass {mass:.3f}  leaked {leaked:.3f}  spread {trace.spread[0].item():.2f} to {spread:.2f}"
    )

# %% [markdown]
# With matplotlib it is a picture: `from attractor.report import figures, maps` and
# `figures.write(maps.through_time(seen), "maps.png")`.
