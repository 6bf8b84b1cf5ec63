"""Mixtures of experts with a SiLU gate from the library ``transformers``; experts are a fused operator."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tessera_core.trace.fused.operators import gated_experts
from tessera_core.trace.models.llama import LlamaModel
from tessera_core.trace.models.shapes import MixtureShape

GATED_EXPERTS = "tessera_gated_experts"
"""Name under which :func:`experts` is registered with the library."""

NOTE = (
    "experts are one fused operator per layer (tessera::gated_experts), on CUDA Triton kernels of this package"
    " (tessera_core.trace.fused.kernels)"
)


class QwenMixtureModel(LlamaModel):
    """``Qwen3MoeForCausalLM`` of a given shape."""

    config_class = Qwen3MoeConfig
    model_class = Qwen3MoeForCausalLM
    experts = GATED_EXPERTS

    def __init__(self, shape: MixtureShape, *, dtype: torch.dtype, seed: int) -> None:
        ALL_EXPERTS_FUNCTIONS.register(GATED_EXPERTS, experts)
        super().__init__(shape, dtype=dtype, seed=seed)
        self.notes = (NOTE,)

    def settings(self, shape: Any) -> dict[str, Any]:
        """See the base class."""
        assert isinstance(shape, MixtureShape)
        return {
            **super().settings(shape),
            "head_dim": shape.head_width,
            "moe_intermediate_size": shape.intermediate,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


def experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A layer's experts as the library calls them."""
    return gated_experts(hidden, chosen, weights, module.gate_up_proj, module.down_proj)  # type: ignore[no-any-return]
