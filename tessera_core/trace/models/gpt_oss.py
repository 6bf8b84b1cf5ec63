"""gpt-oss from the library ``transformers``; experts and attention with sinks are fused operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tessera_core.trace.fused.operators import clamped_experts, clamped_experts_part, sink_attention
from tessera_core.trace.models.language import POSITION
from tessera_core.trace.models.library import keep_frequencies
from tessera_core.trace.models.llama import LlamaModel
from tessera_core.trace.models.shapes import GptOssShape
from tessera_core.trace.parallel.plan import ParallelPlan, Split
from tessera_core.trace.parallel.shares import Dimension

SINK_ATTENTION = "tessera_sink_attention"
EXPERTS = "tessera_experts"
MXFP4_BLOCK = 32
"""Weights that share a scale (OCP Microscaling Formats 1.0)."""


class GptOssModel(LlamaModel):
    """``GptOssForCausalLM`` of a given shape."""

    config_class = GptOssConfig
    model_class = GptOssForCausalLM
    attention = SINK_ATTENTION
    experts = EXPERTS
    shape: GptOssShape

    def __init__(self, shape: GptOssShape, *, dtype: torch.dtype, seed: int) -> None:
        AttentionInterface.register(SINK_ATTENTION, _attend)
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
        super().__init__(shape, dtype=dtype, seed=seed)
        name = str(dtype).removeprefix("torch.")
        self.notes = (
            f"experts are one fused operator per layer (tessera::clamped_experts) with weights in {name};"
            " the published checkpoint holds them in MXFP4",
            "attention with sinks and sliding window is one fused operator (tessera::sink_attention)",
            "on CUDA both are Triton kernels of this package (tessera_core.trace.fused.kernels)",
            f"keys and values of all layers are kept for the whole context, in {name}",
        )

    def settings(self, shape: Any) -> dict[str, Any]:
        """See the base class."""
        assert isinstance(shape, GptOssShape)
        return {
            **super().settings(shape),
            "head_dim": shape.head_width,
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "sliding_window": shape.window,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": shape.rope_theta,
                "factor": shape.rope_factor,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": shape.rope_positions,
            },
        }

    def buffer_recipes(self, config: Any) -> dict[str, dict[str, Any]]:
        """YaRN's frequencies follow from the configuration, and go into the trace as constants."""
        keep_frequencies(self.module, config)
        return {}

    def parallel_plan(self) -> ParallelPlan:
        """Each expert is shared by its inner columns; its second bias is the first rank's."""
        plan, experts = super().parallel_plan(), "model.layers.*.mlp.experts"
        columns = [("gate_up_proj", -1), ("gate_up_proj_bias", -1), ("down_proj", -2)]
        return replace(
            plan,
            splits=(
                *plan.splits,
                *(
                    Split(tensor=f"{experts}.{name}", axis=axis, dimension="columns")
                    for name, axis in columns
                ),
                Split(tensor="model.layers.*.self_attn.sinks", axis=0, dimension="key-value heads"),
            ),
            first_only=(f"{experts}.down_proj_bias",),
        )

    def parallel_styles(self) -> dict[str, str]:
        """The library publishes the vocabulary's styles only; attention is shared as everywhere."""
        attention = {f"{name}_proj": "colwise" for name in ("q", "k", "v")} | {"o_proj": "rowwise"}
        return {
            **super().parallel_styles(),
            **{f"model.layers.*.self_attn.{name}": style for name, style in attention.items()},
            "model.layers.*.mlp.experts": "moe_tp_experts",
        }

    def parallel_columns(self) -> Dimension:
        """In whole blocks of MXFP4, as the published weights are."""
        return Dimension(name="columns", extent=self.shape.intermediate, unit=MXFP4_BLOCK)

    def mask(self, state: Mapping[str, torch.Tensor], prefill: bool) -> Any:
        """The position in the mask's place: the fused operator knows what it may see."""
        position = None if prefill else state[POSITION]
        return {"full_attention": position, "sliding_attention": position}


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None,
    s_aux: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as the library calls it; it wants (batch, tokens, heads, head width) back."""
    return sink_attention(query, key, value, s_aux, attention_mask, scaling, sliding_window or 0), None


def _experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A layer's experts as the library calls them; a rank without the second bias leaves it to another."""
    if module.down_proj_bias is None:
        part: torch.Tensor = clamped_experts_part(
            hidden,
            chosen,
            weights,
            module.gate_up_proj,
            module.gate_up_proj_bias,
            module.down_proj,
            float(module.alpha),
            float(module.limit),
        )
        return part
    result: torch.Tensor = clamped_experts(
        hidden,
        chosen,
        weights,
        module.gate_up_proj,
        module.gate_up_proj_bias,
        module.down_proj,
        module.down_proj_bias,
        float(module.alpha),
        float(module.limit),
    )
    return result
