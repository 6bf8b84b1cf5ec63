"""Mixtures of experts as serving runs them: one grouped product over the tokens that the router has chosen.

On a CPU each chosen expert multiplies the tokens that were routed to it, experts in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera_core.trace.fused.kernels import on_cuda


def _grouped(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    run: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Sum over each token's experts of weight times ``run(expert, rows)``, in float32."""
    result = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    per_token = chosen.shape[1]
    flat = chosen.reshape(-1)
    factors = weights.reshape(-1, 1).float()
    for expert in flat.unique().tolist():
        places = (flat == expert).nonzero().squeeze(1)
        tokens = places // per_token
        result.index_add_(0, tokens, run(int(expert), hidden[tokens]).float() * factors[places])
    return result.to(hidden.dtype)


def _clamped_inner(
    rows: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor, alpha: float, limit: float
) -> torch.Tensor:
    """One gpt-oss expert up to its second product: (rows, inner)."""
    both = torch.addmm(bias, rows, gate_up)
    gate = both[:, ::2].clamp(max=limit)
    up = both[:, 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@torch.library.custom_op("tessera::clamped_experts", mutates_args=())
def clamped_experts(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """gpt-oss's experts: ``(up + 1) * gate * sigmoid(alpha * gate)`` with clamped gate and up.

    ``hidden`` (tokens, width); ``chosen`` int64 and ``weights`` (tokens, experts per token); ``gate_up``
    (experts, width, 2 inner) with gate and up interleaved, ``down`` (experts, inner, width), and their biases
    (experts, 2 inner) and (experts, width). Gate is clamped from above, up on both sides. Returns like
    ``hidden``.
    """

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        inner = _clamped_inner(rows, gate_up[expert], gate_up_bias[expert], alpha, limit)
        return torch.addmm(down_bias[expert], inner, down[expert])

    return _grouped(hidden, chosen, weights, run)


@clamped_experts.register_fake
def _(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op("tessera::clamped_experts_part", mutates_args=())
def clamped_experts_part(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """:func:`clamped_experts` without the second bias: a partial sum over some of the inner columns.

    The ranks that share a layer's columns add up what each returns, and the bias is added by one of them.
    """

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return _clamped_inner(rows, gate_up[expert], gate_up_bias[expert], alpha, limit) @ down[expert]

    return _grouped(hidden, chosen, weights, run)


@clamped_experts_part.register_fake
def _(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op("tessera::gated_experts", mutates_args=())
def gated_experts(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Experts with a SiLU gate: ``down(silu(gate) * up)``.

    ``hidden`` (tokens, width); ``chosen`` int64 and ``weights`` (tokens, experts per token); ``gate_up``
    (experts, 2 inner, width), gates first, and ``down`` (experts, width, inner). Returns like ``hidden``.
    """

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = torch.nn.functional.linear(rows, gate_up[expert]).chunk(2, dim=-1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down[expert])

    return _grouped(hidden, chosen, weights, run)


@gated_experts.register_fake
def _(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


on_cuda(clamped_experts, "experts", "clamped_experts")
on_cuda(gated_experts, "experts", "gated_experts")
