"""PDE attention: attention maps that evolve under a PDE before they multiply the values.

Arguments become a `Call` (`call.py`), the call gets a `Plan` (`plan.py`), and the plan's engine computes
it (`engines/`, or `kernels/` on a GPU). A wall is where a mask ends: nothing flows through it, so that a
causal map stays exactly causal. A face is the place between two neighbouring keys.

>>> import torch
>>> from attractor.attention import assert_causal, pde_attention, pdes
>>> query, key, value = torch.randn(3, 2, 8, 16, 64)      # 2 texts, 8 heads, 16 tokens
>>> pde_attention(query, key, value, is_causal=True, pde=pdes.Diffusion(alpha=0.1), steps=4).shape
torch.Size([2, 8, 16, 64])
>>> assert_causal(lambda x: pde_attention(x, x, x, is_causal=True, pde="wave"), value)
"""

from attractor.attention import pdes
from attractor.attention.cache import PDECache
from attractor.attention.causality import CausalityError, assert_causal
from attractor.attention.context_parallel import Parts, context_parallel_attention
from attractor.attention.diagnostics import PDETrace, coefficients, hybrid_errors, trace
from attractor.attention.models import Classifier, LanguageModel, PDEAttention, Stack
from attractor.attention.pde_attention import explain, pde_attention
from attractor.attention.performer import (
    PerformerAttention,
    RandomFeatures,
    performer_attention,
    performer_dense,
)
from attractor.attention.plan import Choice, Plan
from attractor.attention.windows import window_attention

__all__ = [
    "CausalityError",
    "Choice",
    "Classifier",
    "LanguageModel",
    "PDEAttention",
    "PDECache",
    "PDETrace",
    "Parts",
    "PerformerAttention",
    "Plan",
    "RandomFeatures",
    "Stack",
    "assert_causal",
    "coefficients",
    "context_parallel_attention",
    "explain",
    "hybrid_errors",
    "pde_attention",
    "pdes",
    "performer_attention",
    "performer_dense",
    "trace",
    "window_attention",
]
