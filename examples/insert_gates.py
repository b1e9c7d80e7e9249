# %% [markdown]
"""Gates in a network you have: nothing changes on the day they go in."""

# %%
import torch

import attractor as at

torch.manual_seed(0)
network = at.residual.resnet34(
    num_classes=10
).eval()  # or torchvision.models.resnet34(weights="DEFAULT")
images = torch.rand(2, 3, 64, 64)
before = network(images)
count = sum(p.numel() for p in network.parameters())

# %% [markdown]
# Gates start at exactly 1, and all parameters keep their names.

# %%
at.insert_gates(network, "stepnet", where=lambda name, block: name.startswith(("layer3", "layer4")))
print("the same output:", torch.equal(network(images), before))
print("gated:", ", ".join(at.residual.gated_blocks(network)))
print("parameters:", count, "and", sum(p.numel() for p in network.parameters()) - count, "of gates")

# %% [markdown]
# What each gate does can be read: one number a channel and image.

# %%
name, gate = next(iter(at.residual.gated_blocks(network).items()))
f, x = torch.randn(2, 2, 256, 4, 4)
print(name, "F is", list(gate.weights(f, x).shape), "all", gate.weights(f, x).unique().tolist())
