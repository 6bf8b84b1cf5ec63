"""Grouped products of a mixture of experts: tokens sorted by expert, each tile of them against one expert.

Five launches whatever the router chose: count, sort into tiles, product with the gate, product back, sum over a
token's experts. PyTorch's own grouped product takes bfloat16 alone, has no bias per expert and carries no PTX.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the kernels' parameter types from the launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Pairs of token and expert that a sorting block looks at in one step.
_SCANNED = 1024
_TILE_COLUMNS = 64
# Of a product's inner dimension, in one step.
_TILE_BYTES = 128


@triton.jit
def count_kernel(chosen, counts, token_stride, slot_stride, pairs, slots, SCANNED: tl.constexpr):
    """One block: how many pairs have chosen its expert; the grid is (experts,)."""
    expert = tl.program_id(0)
    found = tl.zeros((SCANNED,), tl.int32)
    for start in range(0, pairs, SCANNED):
        pair = start + tl.arange(0, SCANNED)
        place = chosen + (pair // slots).to(tl.int64) * token_stride + pair % slots * slot_stride
        found += (tl.load(place, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit
def sort_kernel(
    chosen,
    counts,
    order,
    owners,
    token_stride,
    slot_stride,
    pairs,
    slots,
    experts,
    tiles,
    ROWS: tl.constexpr,
    SCANNED: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One block: the pairs of its expert in ascending order, from the expert's first tile on.

    ``order`` (tiles * ROWS) holds pairs, ``pairs`` where a tile is not full; ``owners`` (tiles,) a tile's
    expert, -1 for those that are left over. The grid is (experts,).
    """
    expert = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS)
    sizes = tl.load(counts + numbers, mask=numbers < experts, other=0)
    used = (sizes + ROWS - 1) // ROWS
    first = tl.sum(tl.where(numbers < expert, used, 0), axis=0)
    mine = tl.sum(tl.where(numbers == expert, used, 0), axis=0)
    size = tl.sum(tl.where(numbers == expert, sizes, 0), axis=0)
    written = first * ROWS
    for start in range(0, pairs, SCANNED):
        pair = start + tl.arange(0, SCANNED)
        place = chosen + (pair // slots).to(tl.int64) * token_stride + pair % slots * slot_stride
        equal = (tl.load(place, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        rank = tl.cumsum(equal, axis=0) - equal
        tl.store(order + written + rank, pair, mask=equal == 1)
        written += tl.sum(equal, axis=0)
    rest = size + tl.arange(0, ROWS)
    tl.store(order + first * ROWS + rest, pairs, mask=rest < mine * ROWS)
    # The last expert's block also marks the tiles that nobody uses.
    last = tl.where(expert == experts - 1, tiles, first + mine)
    for start in range(first, last, SCANNED):
        tile = start + tl.arange(0, SCANNED)
        tl.store(owners + tile, tl.where(tile < first + mine, expert, -1), mask=tile < last)


@triton.jit
def gate_up_kernel(
    hidden,
    weight,
    bias,
    order,
    owners,
    result,
    hidden_token,
    hidden_lane,
    weight_expert,
    weight_inner,
    weight_outer,
    bias_expert,
    bias_lane,
    pairs,
    slots,
    width,
    inner,
    alpha,
    limit,
    CLAMPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One block: COLUMNS gated channels of one tile; the grid is (blocks of channels, tiles).

    Gate and up are computed as neighbouring columns, and parted after the product. CLAMPED: gpt-oss's
    activation, biases, and columns that are neighbours in ``weight`` too; else SiLU, all gates before all ups.
    """
    expert = tl.load(owners + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
    token = (pair // slots).to(tl.int64)
    column = tl.program_id(0) * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)
    there = column < 2 * inner
    if not CLAMPED:
        column = column // 2 + column % 2 * inner
    step = tl.arange(0, STEP)
    products = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
    for start in range(0, width, STEP):
        lane = start + step
        rows = tl.load(
            hidden + token[:, None] * hidden_token + lane[None, :] * hidden_lane,
            mask=(pair < pairs)[:, None] & (lane < width)[None, :],
            other=0.0,
        )
        block = tl.load(
            weight + expert * weight_expert + lane[:, None] * weight_inner + column[None, :] * weight_outer,
            mask=(lane < width)[:, None] & there[None, :],
            other=0.0,
        )
        products = tl.dot(rows, block, products, input_precision="ieee")
    if CLAMPED:
        added = tl.load(bias + expert * bias_expert + column * bias_lane, mask=there, other=0.0)
        products += added.to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(products, (ROWS, COLUMNS, 2)))
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        mixed = (up + 1.0) * gate * tl.sigmoid(gate * alpha)
    else:
        mixed = up * gate * tl.sigmoid(gate)
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    target = result + pair.to(tl.int64)[:, None] * inner + channel[None, :]
    tl.store(target, mixed, mask=(pair < pairs)[:, None] & (channel < inner)[None, :])


@triton.jit
def down_kernel(
    gated,
    weight,
    bias,
    order,
    owners,
    result,
    weight_expert,
    weight_inner,
    weight_outer,
    bias_expert,
    bias_lane,
    pairs,
    width,
    inner,
    CLAMPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One block: COLUMNS channels of one tile's results, by pair; the grid is (blocks of channels, tiles)."""
    expert = tl.load(owners + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
    far = pair.to(tl.int64)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    step = tl.arange(0, STEP)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, STEP):
        lane = start + step
        rows = tl.load(
            gated + far * inner + lane[None, :],
            mask=(pair < pairs)[:, None] & (lane < inner)[None, :],
            other=0.0,
        )
        block = tl.load(
            weight + expert * weight_expert + lane[:, None] * weight_inner + column[None, :] * weight_outer,
            mask=(lane < inner)[:, None] & there[None, :],
            other=0.0,
        )
        products = tl.dot(rows, block, products, input_precision="ieee")
    if CLAMPED:
        added = tl.load(bias + expert * bias_expert + column * bias_lane, mask=there, other=0.0)
        products += added.to(tl.float32)[None, :]
    tl.store(result + far * width + column[None, :], products, mask=(pair < pairs)[:, None] & there[None, :])


@triton.jit
def sum_slots_kernel(
    source,
    weights,
    result,
    token_stride,
    slot_stride,
    width,
    slots,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One block: COLUMNS channels of one token, summed over its experts; the grid is (tokens, blocks of channels)."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    inside = (slot < slots)[:, None] & (lane < width)[None, :]
    values = tl.load(source + (token * slots + slot)[:, None] * width + lane[None, :], mask=inside, other=0.0)
    factors = tl.load(weights + token * token_stride + slot * slot_stride, mask=slot < slots, other=0.0)
    mixed = tl.sum(values.to(tl.float32) * factors.to(tl.float32)[:, None], axis=0)
    tl.store(result + token * width + lane, mixed, mask=lane < width)


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
    """``tessera::clamped_experts``."""
    return _experts(
        hidden, chosen, weights, gate_up, down, biases=(gate_up_bias, down_bias), alpha=alpha, limit=limit
    )


def gated_experts(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """``tessera::gated_experts``."""
    return _experts(hidden, chosen, weights, gate_up.transpose(1, 2), down.transpose(1, 2))


def _experts(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """``gate_up`` (experts, width, 2 inner) and ``down`` (experts, inner, width), in whatever strides."""
    tokens, width = hidden.shape
    experts, inner, _ = down.shape
    slots = chosen.shape[1]
    pairs = tokens * slots
    rows = 64 if pairs > 16 * experts else 16
    # Every expert that is chosen at all may leave its last tile nearly empty.
    tiles = (pairs + min(experts, pairs) * (rows - 1)) // rows
    result = hidden.new_empty((tokens, width))
    counts, order, owners = (
        hidden.new_empty(size, dtype=torch.int32) for size in (experts, tiles * rows, tiles)
    )
    gated, apart = hidden.new_empty((pairs, inner)), hidden.new_empty((pairs, width))
    step = _TILE_BYTES // hidden.element_size()
    first, second = biases or (None, None)
    count_kernel[(experts,)](chosen, counts, *chosen.stride(), pairs, slots, SCANNED=_SCANNED, num_warps=4)
    sort_kernel[(experts,)](
        *(chosen, counts, order, owners, *chosen.stride(), pairs, slots, experts, tiles),
        ROWS=rows,
        SCANNED=_SCANNED,
        EXPERTS=triton.next_power_of_2(experts),
        num_warps=4,
    )
    gate_up_kernel[triton.cdiv(inner, _TILE_COLUMNS), tiles](
        *(hidden, gate_up, first, order, owners, gated, *hidden.stride(), *gate_up.stride()),
        *((0, 0) if first is None else first.stride()),
        *(pairs, slots, width, inner, alpha, limit),
        CLAMPED=first is not None,
        ROWS=rows,
        COLUMNS=_TILE_COLUMNS,
        STEP=step,
        num_warps=4,
        num_stages=3,
    )
    down_kernel[triton.cdiv(width, _TILE_COLUMNS), tiles](
        *(gated, down, second, order, owners, apart, *down.stride()),
        *((0, 0) if second is None else second.stride()),
        *(pairs, width, inner),
        CLAMPED=second is not None,
        ROWS=rows,
        COLUMNS=_TILE_COLUMNS,
        STEP=step,
        num_warps=4,
        num_stages=3,
    )
    columns = min(1024, triton.next_power_of_2(width))
    sum_slots_kernel[tokens, triton.cdiv(width, columns)](
        *(apart, weights, result, *weights.stride(), width, slots),
        SLOTS=triton.next_power_of_2(slots),
        COLUMNS=columns,
        num_warps=4,
    )
    return result
