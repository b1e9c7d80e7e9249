"""One process of context-parallel attention, compared with the whole sequence in this one.

``torchrun --nproc-per-node 4 attention_worker.py FOLDER CASES SEED``
"""

import random
import sys
from functools import partial
from itertools import pairwise, product

import torch
import torch.distributed as dist

from attractor.attention import LanguageModel, PDEAttention, pde_attention, pdes
from attractor.attention.context_parallel import Parts, context_parallel_attention
from benchmarks.scale import counted
from tests.distributed.launching import write_result

PDES = {"diffusion": pdes.Diffusion, "wave": pdes.Wave, "advection_diffusion": pdes.AdvectionDiffusion}


def tensors(batch, heads, tokens, dim, value_dim, dtype=torch.float64, seed=0, ratio=1):
    """Query, key, value and the gradient of the output; key and value have heads / ratio heads."""
    g = torch.Generator().manual_seed(seed)
    make = lambda heads, size: torch.randn(
        batch, heads, tokens, size, generator=g, dtype=torch.float64
    ).to(dtype)
    few = heads // ratio
    return make(heads, dim), make(few, dim), make(few, value_dim), make(heads, value_dim)


def leaves(*given):
    return [x.clone().requires_grad_() for x in given]


def largest(x, y):
    return (x - y).abs().max().item() if x.numel() else 0.0


def compare(parts, group, given, coefficients, kind, ask=False, **options):
    """The largest difference from one process in output and in every gradient."""
    rank = dist.get_rank(group)
    query, key, value, upstream = given
    mine = lambda x: parts.take(x, rank)
    equation = lambda c: PDES[kind](*c[: 2 if kind == "advection_diffusion" else 1])
    *whole, a, b = leaves(query, key, value, *coefficients)
    expected = pde_attention(*whole, pde=equation((a, b)), method="dense", **options)
    expected.backward(upstream)
    *own, own_a, own_b = leaves(mine(query), mine(key), mine(value), *coefficients)
    found = context_parallel_attention(
        *own, equation((own_a, own_b)), parts=None if ask else parts, group=group, **options
    )
    found.backward(mine(upstream))
    errors = {"output": largest(found.detach(), mine(expected.detach()))}
    for name, x, y in zip("qkv", own, whole):
        errors[name] = largest(x.grad, mine(y.grad))
    for name, x, y in (("first", own_a, a), ("second", own_b, b)):
        if y.grad is not None:
            total = torch.zeros_like(x) if x.grad is None else x.grad.clone()
            dist.all_reduce(total, group=group)
            errors[name] = largest(total, y.grad) / (1 + y.grad.abs().max().item())
    return errors


def compare_worst(worst, *arguments, **options):
    """Compare one process with the group, and keep the largest errors in `worst`."""
    for name, error in compare(*arguments, **options).items():
        worst[name] = max(worst.get(name, 0.0), error)


def random_cases(groups, cases, seed):
    """Random lengths, layouts, PDEs, heads and groups; the same in all processes."""
    chance, worst, told = random.Random(seed), {}, {"cases": 0, "short": 0, "uneven": 0, "zigzag": 0}
    for case in range(cases):
        processes = chance.choice(list(groups))
        layout = chance.choice(["even", "uneven", "zigzag", "asked"])
        tokens = chance.randint(2 * processes, chance.choice([20, 70, 200]))
        steps, heads = chance.choice([0, 1, 2, 4, 7]), chance.choice([1, 3])
        kind, is_causal, dt = chance.choice(list(PDES)), chance.random() < 0.6, chance.choice([0.5, 1.0])
        sizes = chance.choice([1, 2]), heads, tokens, chance.choice([4, 8]), chance.choice([4, 6])
        ends = [0, *sorted(chance.sample(range(1, tokens), processes - 1)), tokens]
        per_head = chance.choice([1, heads])
        parts = Parts.split(tokens, processes, layout == "zigzag")
        if layout in ("uneven", "asked"):
            parts = Parts(tuple((run,) for run in pairwise(ends)))
        group = groups[processes]
        if dist.get_rank(group) < 0:
            continue
        g = torch.Generator().manual_seed(case)
        alpha = 0.05 + 0.3 * torch.rand(per_head, 1, 1, generator=g, dtype=torch.float64)
        beta = 0.2 * torch.rand(per_head, 1, 1, generator=g, dtype=torch.float64) - 0.1
        compare_worst(
            worst, parts, group, tensors(*sizes, seed=case), (alpha, beta), kind, ask=layout == "asked",
            steps=steps, dt=dt, is_causal=is_causal,
        )  # fmt: skip
        told["cases"] += 1
        told["short"] += any(b - a < steps for runs in parts.runs for a, b in runs)
        told["uneven"] += layout in ("uneven", "asked")
        told["zigzag"] += layout == "zigzag"
    return {"worst": worst, **told}


def grouped_heads(groups):
    """Return the largest errors and the bytes sent, by number of query heads per key head.

    The bytes are those of all messages of a forward and a backward, the halo included.
    """
    report = {"worst": {}, "bytes": []}
    cases = product(groups, PDES, [False, True], [False, True], [False, True])
    for case, (processes, kind, is_causal, per_head, zigzag) in enumerate(cases):
        group, parts = groups[processes], Parts.split(31, processes, zigzag)
        if dist.get_rank(group) < 0:
            continue
        g = torch.Generator().manual_seed(case)
        shape = (4 if per_head else 1), 1, 1
        alpha = 0.05 + 0.3 * torch.rand(shape, generator=g, dtype=torch.float64)
        beta = 0.2 * torch.rand(shape, generator=g, dtype=torch.float64) - 0.1
        sent = {}
        for ratio in (1, 2, 4):
            inputs = tensors(2, 4, 31, 4, 6, seed=case, ratio=ratio)
            run = partial(
                compare_worst, report["worst"], parts, group, inputs, (alpha, beta), kind,
                steps=3, is_causal=is_causal, enable_gqa=True,
            )  # fmt: skip
            sent[ratio] = counted(run)
        report["bytes"].append({"per_head": per_head, "sent": sent})
    return report


def causality(rank, processes):
    """Outputs of this process when only later processes' tokens change, and their gradients: exact."""
    parts = Parts.split(40, processes)
    given = tensors(1, 2, 40, 8, 8)
    first = parts.runs[rank][0][1]  # the first token after this process's own
    changed = [torch.cat((x[..., :first, :], x[..., first:, :] + 1e6), -2) for x in given]
    outputs = []
    for turn in range(processes):  # everyone's later tokens in turn; all have to take part
        for version in (given, changed) if turn == rank else (None, None):
            own = _from(turn, version, parts, rank)
            out = context_parallel_attention(*own[:3], "wave", is_causal=True, parts=parts)
            if turn == rank:
                outputs.append(out)
    return bool(torch.equal(*outputs))


def _from(turn, version, parts, rank):
    """What process `turn` has for all, each its part."""
    shared = torch.stack(version[:3]) if version is not None else torch.empty(3, 1, 2, 40, 8).double()
    dist.broadcast(shared, turn)
    return [parts.take(x, rank) for x in shared]


def modules(rank, processes):
    """A whole language model whose layers are context parallel: logits, and gradients of all weights."""
    size = {"dim": 16, "heads": 4, "layers": 2, "hidden": 32, "dropout": 0.0, "max_tokens": 64}
    parts = Parts.split(37, processes, zigzag=True)
    torch.manual_seed(3)
    whole = LanguageModel(50, **size, pde="wave", per_head=True, steps=3).double()
    torch.manual_seed(3)
    mine = LanguageModel(
        50, **size, pde="wave", per_head=True, steps=3, attention=context_parallel_attention, parts=parts
    ).double()
    ids = torch.arange(2 * 37).view(2, 37) * 7 % 50
    expected = whole(ids)
    expected.square().sum().backward()
    own = parts.take(ids, rank, dim=1)
    x = mine.embed.tokens(own) + mine.embed.positions(parts.positions(rank))
    found = mine.logits(mine.stack(x))
    found.square().sum().backward()
    errors = [largest(found.detach(), parts.take(expected.detach(), rank, dim=1))]
    for a, b in zip(mine.parameters(), whole.parameters(), strict=True):
        total = a.grad.clone()
        dist.all_reduce(total)
        errors.append(largest(total, b.grad) / (1 + b.grad.abs().max().item()))
    # Without a PDE it is standard attention, as PDEAttention asks for it.
    torch.manual_seed(4)
    plain = PDEAttention(16, 4, pde=None, causal=True).double()
    torch.manual_seed(4)
    shared = PDEAttention(
        16, 4, pde=None, causal=True, attention=context_parallel_attention, parts=parts
    ).double()
    x = torch.randn(2, 37, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    errors.append(largest(shared(parts.take(x, rank)), parts.take(plain(x), rank)))
    return max(errors)


def types(rank, processes):
    """Half and single precision, autocast, grouped heads, three dimensions, no gradients."""
    parts, found = Parts.split(30, processes), {}
    given = tensors(2, 4, 30, 8, 8)[:3]
    expected = parts.take(pde_attention(*given, is_causal=True, pde="diffusion"), rank)
    call = lambda *x, **o: context_parallel_attention(*x, "diffusion", is_causal=True, parts=parts, **o)
    own = [parts.take(x, rank) for x in given]
    for dtype in (torch.float32, torch.bfloat16):
        out = call(*(x.to(dtype) for x in own))
        assert out.dtype == dtype
        found[str(dtype)] = largest(out.double(), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*(x.float() for x in own)).dtype == torch.bfloat16
    with torch.no_grad():
        found["no gradients"] = largest(call(*own), expected)
    found["three dimensions"] = largest(call(*(x[0] for x in own)), expected[0])
    few = [own[0], own[1][:, ::2], own[2][:, ::2]]
    repeated = [own[0], *(x.repeat_interleave(2, 1) for x in few[1:])]
    found["grouped heads"] = largest(call(*few, enable_gqa=True), call(*repeated))
    return found


def refusals(rank, processes, pair):
    """What every process is told."""
    query, key, value, _ = tensors(1, 2, 6, 4, 4)
    told = {}

    def ask(name, *given, error=ValueError, **options):
        try:
            context_parallel_attention(*given, **options)
        except error as found:
            told[name] = str(found)

    ask("reaction", query, key, value, "reaction_diffusion")
    ask("unstable", query, key, value, pdes.Diffusion(0.9))
    ask("cross", query[..., :3, :], key, value, "wave")
    ask("one", query[..., : 4 - rank % 2], key, value, "wave")  # a mistake of some
    ask("heads", *(x[:, : 1 + rank % 2] for x in (query, key, value)), "wave")
    ask("key heads", query, *(x[:, : 1 + rank % 2] for x in (key, value)), "wave", enable_gqa=True)
    ask("nothing", *(x[..., : rank * 3, :] for x in (query, key, value)), "wave")
    ask("parts", query, key, value, "wave", parts=Parts.split(7 * processes, processes))
    ask("processes", query, key, value, "wave", parts=Parts.split(100, processes + 1))
    if pair is not None and dist.get_rank(pair) < 0:
        ask("outside", query, key, value, "wave", group=pair)
    x = query.clone().requires_grad_()
    out = context_parallel_attention(x, key, value, "wave", is_causal=True)
    try:
        torch.autograd.grad(out.sum(), x, create_graph=True)
    except RuntimeError as error:
        told["twice"] = str(error)
    return told


def main():
    folder, cases, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    groups = {processes: None}
    if processes == 4:
        groups |= {2: dist.new_group([0, 1]), 3: dist.new_group([1, 2, 3])}
    result = {
        "grouped_heads": grouped_heads(groups),
        "random": random_cases(groups, cases, seed),
        "causality": causality(rank, processes),
        "modules": modules(rank, processes),
        "types": types(rank, processes),
        "refusals": refusals(rank, processes, groups.get(2)),
    }
    write_result(folder, rank, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
