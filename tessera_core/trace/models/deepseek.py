"""DeepSeek-V3 from the library ``transformers``, with latent attention as serving runs it.

Prefill expands the prompt's latent rows to keys and values of every head; decode multiplies the query by the
key projection instead, and attends to the cached latent rows themselves (arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RMSNorm,
    apply_rotary_pos_emb_interleave,
)

from tessera_core.program.ir import State
from tessera_core.trace.fused.operators import latent_attention
from tessera_core.trace.models.language import POSITION
from tessera_core.trace.models.library import keep_frequencies
from tessera_core.trace.models.llama import LlamaModel
from tessera_core.trace.models.mixtures import GATED_EXPERTS, NOTE, experts
from tessera_core.trace.models.shapes import DeepSeekShape
from tessera_core.trace.parallel.plan import Count, ParallelPlan
from tessera_core.trace.parallel.shares import Dimension
from tessera_core.trace.request import ProgramRequest

_ATTENTION = "model.layers.*.self_attn"


class DeepSeekModel(LlamaModel):
    """``DeepseekV3ForCausalLM`` of a given shape, without its head for several tokens at once."""

    config_class = DeepseekV3Config
    model_class = DeepseekV3ForCausalLM
    experts = GATED_EXPERTS
    shape: DeepSeekShape

    def __init__(self, shape: DeepSeekShape, *, dtype: torch.dtype, seed: int) -> None:
        ALL_EXPERTS_FUNCTIONS.register(GATED_EXPERTS, experts)
        super().__init__(shape, dtype=dtype, seed=seed)
        zeros = {"kind": "zeros"}
        self.states = (
            State(name=POSITION, batch_axis=None, sequence_axis=None, init=zeros),
            *(
                State(name=_cache_name(layer), batch_axis=0, sequence_axis=1, init=zeros)
                for layer in range(shape.layers)
            ),
        )
        name = str(dtype).removeprefix("torch.")
        self.notes = (
            NOTE,
            f"weights are {name}; the published checkpoint holds most of them in FP8",
            "decode attends to latent rows with absorbed projections (tessera::latent_attention), on CUDA by Triton"
            " kernels of this package too",
        )

    def settings(self, shape: Any) -> dict[str, Any]:
        """See the base class."""
        assert isinstance(shape, DeepSeekShape)
        return {
            **super().settings(shape),
            "intermediate_size": shape.dense_intermediate,
            "moe_intermediate_size": shape.intermediate,
            "n_routed_experts": shape.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": shape.experts_per_token,
            "n_group": shape.expert_groups,
            "topk_group": shape.groups_per_token,
            "routed_scaling_factor": shape.routed_scale,
            "first_k_dense_replace": shape.dense_layers,
            "norm_topk_prob": True,
            "q_lora_rank": shape.query_rank,
            "kv_lora_rank": shape.latent_rank,
            "qk_nope_head_dim": shape.head_width,
            "qk_rope_head_dim": shape.rotary_width,
            "v_head_dim": shape.value_width,
            "num_mtp_layers": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": shape.rope_theta,
                "factor": shape.rope_factor,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": shape.rope_positions,
            },
        }

    def adapt(self, module: Any) -> None:
        """See the base class."""
        for number, layer in enumerate(module.model.layers):
            layer.self_attn = _LatentAttention(module.config, number)

    def buffer_recipes(self, config: Any) -> dict[str, dict[str, Any]]:
        """YaRN's frequencies go into the trace as constants; the router's corrections are small numbers."""
        keep_frequencies(self.module, config)
        recipe = {"kind": "normal", "mean": 0.0, "std": 0.02}
        return {
            name: recipe
            for name, _ in self.module.named_buffers()
            if name.endswith("e_score_correction_bias")
        }

    def parallel_plan(self) -> ParallelPlan:
        """Attention is shared by heads; latent rows, which all heads read, are on every rank."""
        plan = super().parallel_plan()
        heads = Dimension(name="key-value heads", extent=self.shape.heads, exact=True)
        return replace(
            plan,
            dimensions=(heads, *plan.dimensions[1:]),
            states=(),
            counts=(Count(module=_ATTENTION, attribute="num_heads", dimension=heads.name),),
            notes=("latent rows and the projections to them are whole on every rank",),
        )

    def parallel_styles(self) -> dict[str, str]:
        """The library publishes the feed-forward layers' styles only."""
        attention = {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
        return {
            **super().parallel_styles(),
            **{f"{_ATTENTION}.{name}": style for name, style in attention.items()},
        }

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """Empty caches, (batch, context, latent + rotary channels) each, and position zero."""
        size = (request.batch, request.context, self.shape.latent_rank + self.shape.rotary_width)
        state = {POSITION: torch.zeros(1, dtype=torch.int64)}
        for layer in range(self.shape.layers):
            state[_cache_name(layer)] = torch.zeros(size, dtype=self.dtype)
        return state

    def mask(self, state: Mapping[str, torch.Tensor], prefill: bool) -> Any:
        """None: attention knows what it may see."""
        return None

    def cache(self, state: Mapping[str, torch.Tensor], prefill: bool) -> Any:
        """See the base class."""
        return _LatentCache(
            tuple(state[_cache_name(layer)] for layer in range(self.shape.layers)),
            None if prefill else state[POSITION],
        )


@dataclass(frozen=True, slots=True)
class _LatentCache:
    """Latent rows of every layer; ``position`` is None in prefill."""

    layers: tuple[torch.Tensor, ...]
    position: torch.Tensor | None


class _LatentAttention(DeepseekV3Attention):
    """The library's projections, around attention as serving runs it."""

    q_a_proj: torch.nn.Linear
    q_a_layernorm: DeepseekV3RMSNorm
    q_b_proj: torch.nn.Linear
    v_head_dim: int

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """``hidden_states`` (batch, tokens, hidden) after attention; appends to ``cache``."""
        batch, tokens, _ = hidden_states.shape
        own, rotary = self.qk_nope_head_dim, self.qk_rope_head_dim
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(batch, tokens, self.num_heads, own + rotary).transpose(1, 2)
        query_own, query_rotary = query.split([own, rotary], dim=-1)
        latent, key_rotary = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, rotary], dim=-1)
        latent = self.kv_a_layernorm(latent)
        query_rotary, key_rotary = apply_rotary_pos_emb_interleave(
            query_rotary, key_rotary.unsqueeze(1), *position_embeddings
        )
        row = torch.cat([latent, key_rotary.squeeze(1)], dim=-1)
        rows, position = cache.layers[self.layer_idx], cache.position
        if position is None:
            rows.copy_(row)
            mixed = self._prompt(query_own, query_rotary, latent, key_rotary)
        else:
            rows.index_copy_(1, position, row)
            mixed = self._token(query_own, query_rotary, rows, position)
        return self.o_proj(mixed), None

    def _prompt(
        self,
        query_own: torch.Tensor,
        query_rotary: torch.Tensor,
        latent: torch.Tensor,
        key_rotary: torch.Tensor,
    ) -> torch.Tensor:
        batch, heads, tokens, own = query_own.shape
        expanded = self.kv_b_proj(latent).view(batch, tokens, heads, own + self.v_head_dim).transpose(1, 2)
        key_own, value = expanded.split([own, self.v_head_dim], dim=-1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            torch.cat([query_own, query_rotary], dim=-1),
            torch.cat([key_own, key_rotary.expand(-1, heads, -1, -1)], dim=-1),
            value,
            is_causal=True,
            scale=self.scaling,
        )
        return mixed.transpose(1, 2).reshape(batch, tokens, heads * self.v_head_dim)

    def _token(
        self, query_own: torch.Tensor, query_rotary: torch.Tensor, rows: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        batch, heads, _, own = query_own.shape
        weight = self.kv_b_proj.weight.view(heads, own + self.v_head_dim, self.kv_lora_rank)
        absorbed = torch.bmm(query_own.squeeze(2).transpose(0, 1), weight[:, :own]).transpose(0, 1)
        query = torch.cat([absorbed, query_rotary.squeeze(2)], dim=-1)
        mixed = latent_attention(query, rows, position, self.scaling, self.kv_lora_rank)
        values = torch.bmm(mixed.transpose(0, 1), weight[:, own:].transpose(1, 2))
        return values.transpose(0, 1).reshape(batch, 1, heads * self.v_head_dim)


def _cache_name(layer: int) -> str:
    """State family of a layer's latent rows."""
    return f"layers.{layer}.latent"
