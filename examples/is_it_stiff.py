# %% [markdown]
"""Is a network stiff? The size of every residual step on every image, and which blocks stand out."""

# %%
import torch

import attractor as at
from attractor.data import images

torch.manual_seed(0)
network = at.residual.resnet_cifar(depth=29, num_classes=10, in_channels=1, width=8)
digits = images.load("digits", "test").normalised(slice(64))

# %% [markdown]
# `probe` finds the residual additions by itself, in networks of timm, torchvision and transformers as well. NSI is
# `|x' - x| / |x|`: how far a block goes.

# %%
profile = at.probe(network, [digits])
print(profile)
for name, size in zip(profile.names, profile.nsi.mean(0).tolist()):
    print(f"{name:10} {'#' * round(20 * size)} {size:.2f}")

# %% [markdown]
# One number for the network is TNS: how much single blocks stand out of their stage. It depends on how a network is
# initialised, so compare it with the same network before training: `at.probe(trained, batches, initial=fresh)`.

# %%
print(f"TNS {profile.tns:.3f}; blocks beyond 0.5 and 0.1: {100 * profile.proportion(0.5, 0.1):.0f} %")
