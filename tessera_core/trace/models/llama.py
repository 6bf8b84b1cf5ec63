"""Llama from the library ``transformers``: its layers, with our cache and attention behind its interfaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from tessera_core.program.weights import initialise_module
from tessera_core.trace.models.language import POSITION, LanguageModel, append, attention, decode_mask
from tessera_core.trace.models.shapes import Shape

_ATTENTION = "tessera_grouped_query"


class LlamaModel(LanguageModel):
    """``LlamaForCausalLM`` of a given shape; weights are normal with the library's own deviation."""

    def __init__(self, shape: Shape, *, dtype: torch.dtype, seed: int) -> None:
        super().__init__(shape, dtype=dtype)
        AttentionInterface.register(_ATTENTION, _attend)
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads,
            max_position_embeddings=shape.positions,
            rms_norm_eps=shape.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=False,
        )
        config._attn_implementation = _ATTENTION
        with torch.device("meta"):
            module = LlamaForCausalLM(config)
        _materialise(module, dtype)
        self.module = module.eval()
        deviation = float(config.initializer_range)
        self.recipes = {
            **{name: _recipe(name, deviation) for name, _ in self.module.named_parameters()},
            **{
                name: {"kind": "inverse_frequencies", "theta": shape.rope_theta}
                for name, _ in self.module.named_buffers()
            },
        }
        initialise_module(self.module, self.recipes, seed)

    def logits(self, tokens: torch.Tensor, state: Mapping[str, torch.Tensor], prefill: bool) -> torch.Tensor:
        """See the base class."""
        if prefill:
            positions = torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device)
        else:
            positions = state[POSITION]
        result = self.module(
            tokens,
            None if prefill else decode_mask(state, self.dtype),
            positions.unsqueeze(0),
            _StateCache(state, self.shape.layers, prefill),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = result.logits[:, -1]
        return logits


def _materialise(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give a model built on the meta device memory: parameters in ``dtype``, buffers in their own.

    Rotary frequencies are such buffers: in float32, because they decide positions of thousands of tokens;
    registered as persistent, so that a trace knows them as weights with a recipe.
    (``Module.to_empty`` cannot swap the tensors of a model that was built under a fake-tensor mode.)
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            fresh = torch.empty(parameter.shape, dtype=dtype, device="cpu")
            setattr(part, name, torch.nn.Parameter(fresh, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            part.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))


class _StateCache(Cache):
    """The library's cache interface over the state tensors of one program."""

    def __init__(self, state: Mapping[str, torch.Tensor], layers: int, prefill: bool) -> None:
        super().__init__(layers=[_StateLayer(state, layer, prefill) for layer in range(layers)])


class _StateLayer(CacheLayerMixin):
    """Keys and values of one layer in the state."""

    is_compileable = False

    def __init__(self, state: Mapping[str, torch.Tensor], layer: int, prefill: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state, self.layer, self.prefill = state, layer, prefill
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the state exists before the model runs."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return the keys and values to attend to."""
        return append(self.state, self.layer, key_states, value_states, self.prefill)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows of the cache, and the first one."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Rows in use; only asked where positions are not given, and they always are."""
        return 0

    def get_max_length(self) -> int:
        """Capacity in tokens."""
        return int(self.state[f"layers.{self.layer}.key"].shape[2])


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as the library calls it; it wants (batch, tokens, heads, head width) back."""
    return attention(query, key, value, attention_mask).transpose(1, 2), None


def _recipe(name: str, deviation: float) -> dict[str, Any]:
    if name.endswith("norm.weight"):
        return {"kind": "ones"}
    return {"kind": "normal", "mean": 0.0, "std": deviation}
