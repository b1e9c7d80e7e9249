"""Compile every kernel for a GPU that need not be there: ``python tests/kernels_ahead.py 90 4``.

The two numbers are its compute capability and steps of a PDE. Launches do not run: their arguments say
what to compile. Prints a line of JSON for each kernel: its name, and bytes of shared memory.

It must be a process of its own: where kernels are interpreted, as in the other tests, there is no compiler.
"""

import json
import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


class Ahead:
    """What takes the place of a launch."""

    def __init__(self, capability: int) -> None:
        self.target, self.done = GPUTarget("cuda", capability, 32), set[str]()

    def __call__(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        """Compile a kernel for these arguments, once for each kind of them."""
        options = {name: more.pop(name) for name in ("num_warps", "num_stages") if name in more}
        given = dict(zip(kernel.arg_names, args, strict=False)) | more
        signature, constants = {}, {}
        for p in kernel.params:
            x = given.get(p.name, p.default if p.has_default else None)
            signature[p.name] = "constexpr" if p.is_constexpr or x is None else kind(x)
            if signature[p.name] == "constexpr":
                constants[(p.num,)] = x
        name = f"{kernel.fn.__module__.removeprefix('attractor.')}.{kernel.fn.__name__}"
        key = f"{name} {signature} {constants} {options}"
        if key not in self.done:
            self.done.add(key)
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            found = triton.compile(source, target=self.target, options=options)
            assert found.asm["cubin"]
            print(json.dumps({"kernel": name, "shared": found.metadata.shared}), flush=True)


def kind(x: Any) -> str:
    """The type of an argument, in Triton's words."""
    if isinstance(x, torch.Tensor):
        return f"*{TYPES[x.dtype]}"
    return {bool: "i1", int: "i32", float: "fp32"}[type(x)]


def main(capability: int, steps: int) -> None:
    """Everything forward and backward, in the sizes of a transformer and of a fit."""
    from importlib import import_module

    from attractor import HybridSolver, corrections, pdes, systems
    from attractor.attention import kernels, pde_attention, window_attention
    from attractor.ode import fused as networks

    # Before kernels are said to be interpreted: that is asked for when they are imported.
    for name in ("boundary", "causal", "reaction", "stencils", "values", "window"):
        import_module(f"attractor.attention.kernels.{name}")
    for name in ("gradients", "perceptron", "steps"):
        import_module(f"attractor.ode.fused.{name}")
    kernels.DEVICES, kernels.INTERPRETED = ("cuda", "cpu"), True  # a CPU's tensors go to kernels
    networks.INTERPRETED = networks.EVERYWHERE = True
    ahead = Ahead(capability)
    JITFunction.run = lambda kernel, *args, **more: ahead(kernel, *args, **more)

    coefficient = torch.full((2, 1, 1), 0.1, requires_grad=True)
    common = {"steps": steps, "is_causal": True}
    tensors = lambda: (
        torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    )
    equations = [
        pdes.Diffusion(coefficient), pdes.ReactionDiffusion(coefficient, 0.02),
        pdes.ReactionDiffusion(coefficient, 0.02, split=True),
    ]  # fmt: skip
    for pde in equations:
        pde_attention(*tensors(), pde=pde, method="fused", **common).float().sum().backward()
    for dtype in (torch.bfloat16, torch.float32):  # one query, with few keys and with many
        for keys in (256, 65_536):
            one, many = torch.zeros(1, 8, 1, 64, dtype=dtype), torch.zeros(1, 2, keys, 64, dtype=dtype)
            row = {"pde": "diffusion", "steps": steps, "method": "fused", "enable_gqa": True}
            for valid in (None, torch.ones(1, keys, dtype=torch.bool)):
                pde_attention(one, many, many, key_padding=valid, **row)
    shared = torch.zeros(1, 1, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    query = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    pde_attention(
        query, shared, shared, pde="diffusion", method="fused", enable_gqa=True, **common
    ).float().sum().backward()
    ids = torch.arange(256)[None] // 100  # walls inside a text
    pde_attention(
        *tensors(), pde=equations[0], documents=ids, method="fused", **common
    ).float().sum().backward()
    torch.use_deterministic_algorithms(True)  # other launches of the backward of reaction-diffusion
    pde_attention(*tensors(), pde=equations[1], method="fused", **common).float().sum().backward()
    torch.use_deterministic_algorithms(False)
    window_attention(
        *tensors(), window=64, global_tokens=1, pde=equations[0], **common
    ).float().sum().backward()

    pendulum, u = systems.ElasticPendulum(), torch.zeros(4096, 4)
    for dim, width in ((4, 128), (20, 128)):
        correction = corrections.AttNS(dim, width=width)
        networks.network(correction.net, torch.zeros(4096, dim)).sum().backward()
    correction = corrections.AttNS(4, width=128).requires_grad_(False)
    HybridSolver(pendulum, "rk4", correction, 0.1).capture(u, steps=4, compile=True).advance()
    chain = systems.PendulumChain(5)
    correction = corrections.AttNS(10, width=1024).requires_grad_(False)
    HybridSolver(chain, "rk4", correction, 0.1).capture(
        torch.zeros(64, 10), steps=2, compile=True
    ).advance()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
