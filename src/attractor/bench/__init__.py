"""How quick this is on your machine, always beside what it stands in for.

`attention` times PDE attention beside `scaled_dot_product_attention` and the map built whole; `solvers`
a hybrid step beside a plain one; `model` a whole transformers model beside itself with
``attn_implementation="sdpa"``. `timing` has what they share: everybody runs in turn, round by round,
and a ratio is the median of the rounds' ratios. Nothing is timed before it was compared with float64.

>>> from attractor.bench import attention
>>> row = attention.measure("causal", tokens=64, batch=1, rounds=2, device="cpu", heads=2, dim=16)
>>> row["forward"]["ratio"] > 0
True
"""
