"""Measurements: accuracy beside a known truth, speed beside a peer in the same run.

Each file runs by itself (``python -m benchmarks.order``), prints a table and writes
``benchmarks/results/<name>.json``. The documentation takes its numbers from there.
"""
