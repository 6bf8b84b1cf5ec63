"""Attention that PyTorch's own operator does not express: sinks with a sliding window, and latent keys."""

from __future__ import annotations

import torch

from tessera_core.trace.fused.kernels import on_cuda


@torch.library.custom_op("tessera::sink_attention", mutates_args=())
def sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    position: torch.Tensor | None,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Grouped-query attention in which each head may also attend to a sink that has no value.

    ``query`` (batch, heads, tokens, width); ``key`` and ``value`` (batch, key heads, rows, width); ``sinks``
    (heads,), the sink's score. ``position`` None: token i of a prompt attends to rows up to i. Else int64
    (1,): the row of the only token. ``window`` 0: all rows before, else so many, its own included. Scores and
    sums are float32. Returns (batch, tokens, heads, width), contiguous.
    """
    batch, heads, tokens, width = query.shape
    groups, rows = key.shape[1], key.shape[2]
    shared = heads // groups
    folded = query.float().reshape(batch, groups, shared * tokens, width)
    scores = (folded @ key.float().transpose(-1, -2) * scale).view(batch, groups, shared, tokens, rows)
    columns = torch.arange(rows, device=query.device)
    own = torch.arange(tokens, device=query.device) if position is None else position
    hidden = columns > own.unsqueeze(1)
    if window:
        hidden |= columns <= own.unsqueeze(1) - window
    scores = scores.masked_fill(hidden, float("-inf"))
    sink = sinks.float().view(1, groups, shared, 1, 1).expand(batch, groups, shared, tokens, 1)
    weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    mixed = weights.reshape(batch, groups, shared * tokens, rows) @ value.float()
    result = query.new_empty((batch, tokens, heads, width))
    return result.copy_(mixed.view(batch, heads, tokens, width).transpose(1, 2))


@sink_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    position: torch.Tensor | None,
    scale: float,
    window: int,
) -> torch.Tensor:
    batch, heads, tokens, width = query.shape
    return query.new_empty((batch, tokens, heads, width))


@torch.library.custom_op("tessera::latent_attention", mutates_args=())
def latent_attention(
    query: torch.Tensor, cache: torch.Tensor, position: torch.Tensor, scale: float, latent: int
) -> torch.Tensor:
    """One token's multi-head latent attention with absorbed projections (arXiv 2405.04434, section 2.1).

    ``query`` (batch, heads, latent + rotary) attends to the rows of ``cache`` (batch, rows, latent + rotary)
    up to ``position``, int64 (1,): a row is the key of all heads, and its first ``latent`` channels their
    value. Scores and sums are float32. Returns (batch, heads, latent), contiguous.
    """
    keys = cache.float()
    scores = query.float() @ keys.transpose(1, 2) * scale
    later = torch.arange(cache.shape[1], device=query.device) > position
    weights = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)
    result = query.new_empty((*query.shape[:2], latent))
    return result.copy_(weights @ keys[..., :latent])


@latent_attention.register_fake
def _(
    query: torch.Tensor, cache: torch.Tensor, position: torch.Tensor, scale: float, latent: int
) -> torch.Tensor:
    return query.new_empty((*query.shape[:2], latent))


on_cuda(sink_attention, "attention", "sink_attention")
on_cuda(latent_attention, "attention", "latent_attention")
