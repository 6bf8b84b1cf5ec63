"""What the models from the library ``transformers`` share: memory for a module that was built without any,
our cache behind the library's interface, and recipes by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tessera_core.trace.models.language import append, attention, cache_names

GROUPED_QUERY = "tessera_grouped_query"
"""Name under which :func:`attend` is registered with the library."""


def materialise(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give a model built on the meta device memory: parameters in ``dtype``, buffers in their own.

    Rotary frequencies are such buffers: in float32, because they decide positions of thousands of tokens;
    registered as persistent, so that a trace knows them as weights with a recipe. A buffer that the library
    itself saves with the weights gets ``dtype`` as well.
    (``Module.to_empty`` cannot swap the tensors of a model that was built under a fake-tensor mode.)
    """
    saved = set(module.state_dict())
    for prefix, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            fresh = torch.empty(parameter.shape, dtype=dtype, device="cpu")
            setattr(part, name, torch.nn.Parameter(fresh, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            kept = f"{prefix}.{name}".removeprefix(".") in saved and buffer.dtype.is_floating_point
            part.register_buffer(
                name, torch.empty(buffer.shape, dtype=dtype if kept else buffer.dtype, device="cpu")
            )


def recipe_for(name: str, deviation: float) -> dict[str, Any]:
    """Gains of norms are ones, all else is normal with the library's own deviation."""
    part = name.split(".")[-2]
    if ("norm" in part or part.startswith("ln_")) and name.endswith("weight"):
        return {"kind": "ones"}
    return {"kind": "normal", "mean": 0.0, "std": deviation}


def keep_frequencies(module: torch.nn.Module, config: Any) -> None:
    """Write a configuration's scaled rotary frequencies into the module's buffers for them."""
    frequencies, _ = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, torch.device("cpu"))
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name.endswith("inv_freq"):
                buffer.copy_(frequencies)


class StateCache(Cache):
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
        return int(self.state[cache_names(self.layer)[0]].shape[2])


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as the library calls it; it wants (batch, tokens, heads, head width) back."""
    return attention(query, key, value, attention_mask).transpose(1, 2), None
