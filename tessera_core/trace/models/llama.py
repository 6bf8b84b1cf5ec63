"""Dense decoders from the library ``transformers``: its layers, with our cache and attention behind its
interfaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tessera_core.program.weights import initialise_module
from tessera_core.trace.models.language import POSITION, LanguageModel, decode_mask
from tessera_core.trace.models.library import GROUPED_QUERY, StateCache, attend, materialise, recipe_for
from tessera_core.trace.models.shapes import DecoderShape
from tessera_core.trace.parallel.plan import ParallelPlan, Split
from tessera_core.trace.parallel.published import published_plan
from tessera_core.trace.parallel.shares import Dimension


def parallel_dimension(pattern: str) -> str:
    """What a tensor of a decoder is cut along, by where it stands."""
    if ".self_attn." in pattern:
        return "key-value heads"
    return "columns" if ".mlp." in pattern else "vocabulary"


class LlamaModel(LanguageModel):
    """``LlamaForCausalLM`` of a given shape; weights are normal with the library's own deviation."""

    config_class: type[PreTrainedConfig] = LlamaConfig
    model_class: type[PreTrainedModel] = LlamaForCausalLM
    attention = GROUPED_QUERY
    experts: str | None = None
    """Name under which the operator for mixtures of experts is registered with the library."""

    def __init__(self, shape: DecoderShape, *, dtype: torch.dtype, seed: int) -> None:
        super().__init__(shape, dtype=dtype)
        AttentionInterface.register(GROUPED_QUERY, attend)
        config = self.config_class(**self.settings(shape))
        config._attn_implementation = self.attention
        config._experts_implementation = self.experts
        with torch.device("meta"):
            module = self.model_class(config)
            self.adapt(module)
        materialise(module, dtype)
        self.module = module.eval()
        deviation = float(config.get_text_config().initializer_range)
        self.recipes = {
            **{name: recipe_for(name, deviation) for name, _ in self.module.named_parameters()},
            **self.buffer_recipes(config),
        }
        initialise_module(self.module, self.recipes, seed)

    def adapt(self, module: Any) -> None:
        """Replace what the library's own module lacks; called on the meta device."""

    def buffer_recipes(self, config: Any) -> dict[str, dict[str, Any]]:
        """Recipes of the rotary frequencies; a buffer that is left out keeps its values in the trace."""
        recipe = {"kind": "inverse_frequencies", "theta": config.rope_parameters["rope_theta"]}
        return {name: recipe for name, _ in self.module.named_buffers()}

    def settings(self, shape: DecoderShape) -> dict[str, Any]:
        """The shape in the words of the library's configuration."""
        return {
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.key_heads,
            "max_position_embeddings": shape.positions,
            "rms_norm_eps": shape.norm_epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def parallel_plan(self) -> ParallelPlan:
        """Attention is shared by key-value heads with their query heads, all else by columns."""
        shape = self.shape
        heads = Dimension(name="key-value heads", extent=shape.key_heads, exact=True)
        splits, joins, lookups = published_plan(self.module, self.parallel_styles(), parallel_dimension)
        return ParallelPlan(
            dimensions=(
                heads,
                self.parallel_columns(),
                Dimension(name="vocabulary", extent=shape.vocabulary),
            ),
            splits=splits,
            joins=joins,
            lookups=lookups,
            states=tuple(
                Split(tensor=f"layers.*.{name}", axis=1, dimension=heads.name) for name in ("key", "value")
            ),
        )

    def parallel_styles(self) -> dict[str, str]:
        """The library's own plan for the model: style by pattern of a module or parameter."""
        module: Any = self.module
        return dict(module.tp_plan)

    def parallel_columns(self) -> Dimension:
        """Columns between a feed-forward's two products, in runs of 128 bytes: a cache line, half a tile."""
        return Dimension(name="columns", extent=self.shape.intermediate, unit=128 // self.dtype.itemsize)

    def mask(self, state: Mapping[str, torch.Tensor], prefill: bool) -> Any:
        """What the library is given as the mask; it hands it on to :func:`attend`."""
        return None if prefill else decode_mask(state, self.dtype)

    def cache(self, state: Mapping[str, torch.Tensor], prefill: bool) -> Any:
        """What the library is given as the cache."""
        return StateCache(state, self.shape.layers, prefill)

    def logits(
        self, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], prefill: bool
    ) -> torch.Tensor:
        """See the base class."""
        tokens = inputs["tokens"]
        if prefill:
            positions = torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device)
        else:
            positions = state[POSITION]
        result = self.module(
            tokens,
            self.mask(state, prefill),
            positions.unsqueeze(0),
            self.cache(state, prefill),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = result.logits[:, -1]
        return logits


class QwenModel(LlamaModel):
    """``Qwen2ForCausalLM``: Llama's layers with biases on queries, keys and values."""

    config_class = Qwen2Config
    model_class = Qwen2ForCausalLM
