"""Importing this module registers every fused operator with PyTorch."""

from __future__ import annotations

from tessera_core.trace.fused.attention import latent_attention, sink_attention
from tessera_core.trace.fused.experts import clamped_experts, clamped_experts_part, gated_experts
from tessera_core.trace.fused.recurrence import (
    causal_convolution,
    causal_convolution_step,
    selective_scan,
    selective_step,
)

__all__ = [
    "causal_convolution",
    "causal_convolution_step",
    "clamped_experts",
    "clamped_experts_part",
    "gated_experts",
    "latent_attention",
    "selective_scan",
    "selective_step",
    "sink_attention",
]
