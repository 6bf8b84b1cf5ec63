"""What the catalogue's language models share: state families, inputs, guards, and greedy choice.

A prefill iteration reads a whole prompt of ``context`` tokens into a fresh cache of that capacity; a decode
iteration reads one token per request and appends to a cache of capacity ``context``. All requests of a batch
stand at the same position, which is a counter in the state, so that an iteration never asks the host.
Models without a KV cache share tokens and greedy choice only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch

from tessera_core.program.ir import Guard, State
from tessera_core.trace.models.shapes import DecoderShape, TokenShape
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import InputError

POSITION = "position"
"""State family: tokens that the cache holds, int64 of shape (1,)."""


class TokenModel(ABC):
    """A :class:`~tessera_core.trace.model.TraceableModel` from tokens to the next token."""

    module: torch.nn.Module
    recipes: Mapping[str, dict[str, Any]] | None
    feeds: Mapping[str, str]
    states: tuple[State, ...]
    shape: TokenShape
    notes: tuple[str, ...] = ()
    """What a reader of the trace should know, such as where a fused operator stands for eager code."""

    def __init__(self, shape: TokenShape, *, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.feeds = {"next_token": "tokens"}

    @abstractmethod
    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """Fresh state of a batch."""

    def make_inputs(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """``tokens``: int64, (batch, context) for prefill and (batch, 1) for decode."""
        count = request.context if is_prefill(request) else 1
        tokens = torch.arange(request.batch * count, dtype=torch.int64) % self.shape.vocabulary
        return {"tokens": tokens.reshape(request.batch, count)}

    def guards(self, request: ProgramRequest) -> tuple[Guard, ...]:
        """The prompt's exact length for prefill."""
        if not is_prefill(request):
            return ()
        return (_guard("prompt_tokens", "eq", request.context, "the prompt's length is fixed"),)

    def step(
        self, request: ProgramRequest, inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """One iteration; returns ``logits`` (batch, vocabulary) and ``next_token`` int64 (batch, 1)."""
        logits = self.logits(inputs, state, is_prefill(request))
        return {"logits": logits, "next_token": logits.argmax(dim=-1, keepdim=True)}

    @abstractmethod
    def logits(
        self, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], prefill: bool
    ) -> torch.Tensor:
        """Logits of the last token, (batch, vocabulary); updates the state."""


class LanguageModel(TokenModel):
    """A token model with a KV cache."""

    shape: DecoderShape

    def __init__(self, shape: DecoderShape, *, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype=dtype)
        zeros = {"kind": "zeros"}
        self.states = (
            State(name=POSITION, batch_axis=None, sequence_axis=None, init=zeros),
            *(
                State(name=name, batch_axis=0, sequence_axis=2, init=zeros)
                for layer in range(shape.layers)
                for name in cache_names(layer)
            ),
        )

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """Empty caches, (batch, key heads, context, head width) each, and position zero."""
        size = (request.batch, self.shape.key_heads, request.context, self.shape.head_width)
        state = {POSITION: torch.zeros(1, dtype=torch.int64)}
        for layer in range(self.shape.layers):
            for name in cache_names(layer):
                state[name] = torch.zeros(size, dtype=self.dtype)
        return state

    def guards(self, request: ProgramRequest) -> tuple[Guard, ...]:
        """The prompt's exact length for prefill; for decode the cache's capacity and the last token, unwritten."""
        if is_prefill(request):
            return super().guards(request)
        reason = f"the KV cache holds {request.context} tokens, all but the last one"
        return (_guard("total_tokens", "le", request.context + 1, reason),)

    def step(
        self, request: ProgramRequest, inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """See the base class; moves the position on."""
        logits = self.logits(inputs, state, is_prefill(request))
        if is_prefill(request):
            state[POSITION].fill_(request.context)
        else:
            state[POSITION].add_(1)
        return {"logits": logits, "next_token": logits.argmax(dim=-1, keepdim=True)}


def cache_names(layer: int) -> tuple[str, str]:
    """State families of a layer's keys and values."""
    return f"layers.{layer}.key", f"layers.{layer}.value"


def append(
    state: Mapping[str, torch.Tensor], layer: int, key: torch.Tensor, value: torch.Tensor, prefill: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store new keys and values, (batch, key heads, tokens, head width); returns those to attend to."""
    keys, values = (state[name] for name in cache_names(layer))
    if prefill:
        # The prompt fills a cache of its own length, and attention need not wait for the copy.
        keys.copy_(key)
        values.copy_(value)
        return key, value
    keys.index_copy_(2, state[POSITION], key)
    values.index_copy_(2, state[POSITION], value)
    return keys, values


def decode_mask(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Additive mask over the cache's rows, (1, 1, 1, context): 0 up to the current position, -inf after it."""
    keys = state[cache_names(0)[0]]
    rows = torch.arange(keys.shape[2], dtype=torch.int64, device=keys.device)
    mask = torch.zeros(keys.shape[2], dtype=dtype, device=keys.device).masked_fill_(
        rows > state[POSITION], float("-inf")
    )
    return mask.view(1, 1, 1, -1)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Grouped-query attention, (batch, heads, tokens, head width); causal where there is no mask.

    The query heads that share a key head are laid out as its query rows in decode, so that no back end has
    to repeat keys and values in memory.
    """
    if mask is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
    batch, heads, _, width = query.shape
    rows = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    mixed = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
    return mixed.reshape(batch, heads, 1, width)


def is_prefill(request: ProgramRequest) -> bool:
    """Whether a request is for prefill; raises :class:`InputError` for what is neither that nor decode."""
    if request.phase not in ("prefill", "decode"):
        raise InputError(f"program {request.name}: a language model has phases prefill and decode")
    return request.phase == "prefill"


def _guard(subject: str, comparison: Literal["eq", "le"], value: int, reason: str) -> Guard:
    return Guard(subject=subject, index=None, comparison=comparison, value=value, reason=reason)
