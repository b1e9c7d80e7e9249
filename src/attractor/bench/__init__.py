"""Benchmarks of attractor on this machine, always relative to a peer in the same run.

`attention` compares PDE attention with `scaled_dot_product_attention` and with the dense map, `solvers`
compares a hybrid step with a plain one, and `model` a whole transformers model with itself under
``attn_implementation="sdpa"``. `timing` has the shared clock: all calls run in turn, round by round, and
a ratio is the median of the ratios of the rounds. Results are compared with float64 before timing.

>>> from attractor.bench import attention
>>> row = attention.measure("causal", tokens=64, batch=1, rounds=2, device="cpu", heads=2, dim=16)
>>> row["forward"]["ratio"] > 0
True
"""
