"""A language model over a sequence that several processes hold together.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Without torchrun it runs in one process. On GPUs each process takes its own, and tensors stay on it.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from attractor.attention import LanguageModel, Parts, context_parallel_attention
from attractor.train import parameter_groups

several = int(os.environ.get("WORLD_SIZE", "1")) > 1
if several:
    dist.init_process_group()
rank, processes = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if several and torch.cuda.is_available()
    else "cpu"
)

tokens, vocabulary = 1001, 64
parts = Parts.split(tokens - 1, processes, zigzag=True)  # an early and a late run each: equal work
torch.manual_seed(0)  # the same weights everywhere
model = LanguageModel(
    vocabulary, dim=64, heads=4, layers=2, hidden=128, max_tokens=tokens, dropout=0.0, pde="diffusion",
    attention=context_parallel_attention, parts=parts,
).to(device)  # fmt: skip
optimiser = torch.optim.AdamW(parameter_groups(model, 1e-3))  # which do not decay coefficients

text = (torch.arange(tokens) ** 2 // 7 % vocabulary)[None]  # [batch, tokens]
ids, targets = (parts.take(x, rank, dim=1).to(device) for x in (text[:, :-1], text[:, 1:]))
positions = parts.positions(rank, device)  # in the whole sequence

for step in range(3):
    x = model.embed.tokens(ids) + model.embed.positions(positions)
    loss = cross_entropy(model.logits(model.stack(x)).flatten(0, 1), targets.flatten(), reduction="sum")
    loss = loss / (tokens - 1)  # this process's share of the mean
    optimiser.zero_grad()
    loss.backward()
    if several:  # shares add up, of the loss and of every gradient, the PDE's coefficients' among them
        loss = loss.detach()
        for shared in (loss, *(p.grad for p in model.parameters())):
            dist.all_reduce(shared)
    optimiser.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.6f}")

if several:
    dist.destroy_process_group()
