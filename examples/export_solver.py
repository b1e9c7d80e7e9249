# %% [markdown]
"""A solver as a file that runs without attractor."""

# %%
from pathlib import Path
from tempfile import mkdtemp

import torch

import attractor as at
from attractor.integrations.onnx import export

solver = at.fit(
    at.systems.VanDerPol(mu=1.0), dt=0.2, horizon=2.0, trajectories=50, width=32, correction="neurvec"
)
path = Path(mkdtemp()) / "oscillator.pt2"  # or .onnx, with pip install 'attractor[onnx]'
print(export(solver, path, steps=5).difference, "is how far the file's states are from the solver's")

# %% [markdown]
# From here on only torch is needed. One call takes five steps of 0.2.

# %%
step = torch.export.load(path).module()
u = torch.tensor([[1.0, 0.0], [0.1, 2.0]], dtype=torch.float64)
for k in range(3):
    print(f"t = {k}", u.tolist())
    u = step(u)
