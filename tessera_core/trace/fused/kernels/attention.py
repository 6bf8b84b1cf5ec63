"""Attention with sinks over a prompt, and one token's attention to a cache split over its rows.

The sums follow FlashAttention (arXiv 2205.14135): one pass over the rows with a running maximum. A token's
rows are split so that a small batch fills a GPU too, and a second launch joins the parts.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the kernels' parameter types from the launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl

# A tensor core's least tile.
_LEAST = 16
# Blocks that fill any GPU of today once: rows are split until there are so many.
_ENOUGH_BLOCKS = 256
# Rows of a cache that make a part worth its own block.
_PART_ROWS = 128

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def fold_scores(scores, highest, total):
    """One step of a running softmax over columns, in powers of two.

    Returns the weights of ``scores``, what the sums so far fade by, and the new highest score and sum of weights.
    """
    top = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - top[:, None])
    fade = tl.exp2(highest - top)
    return weights, fade, top, total * fade + tl.sum(weights, axis=1)


@triton.jit
def sink_prompt_kernel(
    query,
    key,
    value,
    sinks,
    result,
    query_batch,
    query_head,
    query_token,
    query_lane,
    key_batch,
    key_head,
    key_row,
    key_lane,
    value_batch,
    value_head,
    value_row,
    value_lane,
    sink_stride,
    heads,
    shared,
    tokens,
    rows,
    width,
    scale,
    window,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One block: QUERIES tokens of one head; the grid is (blocks of tokens, batch * heads)."""
    first = tl.program_id(0) * QUERIES
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    own = first + tl.arange(0, QUERIES)
    lanes = tl.arange(0, WIDTH)
    inside = (own < tokens)[:, None] & (lanes < width)[None, :]
    start = query + batch * query_batch + head * query_head
    queries = tl.load(
        start + own.to(tl.int64)[:, None] * query_token + lanes[None, :] * query_lane, mask=inside, other=0.0
    )
    keys = key + batch * key_batch + (head // shared) * key_head
    values = value + batch * value_batch + (head // shared) * value_head
    # The sink is a score whose value is zero, so it opens the running sums.
    highest = tl.zeros((QUERIES,), tl.float32) + tl.load(sinks + head * sink_stride).to(tl.float32) * LOG2E
    total = tl.full((QUERIES,), 1.0, tl.float32)
    mixed = tl.zeros((QUERIES, WIDTH), tl.float32)
    low = tl.maximum(first - window + 1, 0) // ROWS * ROWS
    high = tl.minimum(first + QUERIES, rows)
    for row in range(low, high, ROWS):
        columns = row + tl.arange(0, ROWS)
        there = (columns < rows)[:, None] & (lanes < width)[None, :]
        far = columns.to(tl.int64)[:, None]
        block = tl.load(keys + far * key_row + lanes[None, :] * key_lane, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(block), input_precision="ieee") * (scale * LOG2E)
        seen = (columns[None, :] <= own[:, None]) & (columns[None, :] > own[:, None] - window)
        scores = tl.where(seen & (columns < rows)[None, :], scores, float("-inf"))
        weights, fade, highest, total = fold_scores(scores, highest, total)
        block = tl.load(values + far * value_row + lanes[None, :] * value_lane, mask=there, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(block.dtype), block, input_precision="ieee")
    target = result + ((batch * tokens + own.to(tl.int64)) * heads + head)[:, None] * width + lanes[None, :]
    tl.store(target, mixed / total[:, None], mask=inside)


@triton.jit
def sink_part_kernel(
    query,
    key,
    value,
    position,
    parts,
    sums,
    query_batch,
    query_head,
    query_lane,
    key_batch,
    key_head,
    key_row,
    key_lane,
    value_batch,
    value_head,
    value_row,
    value_lane,
    heads,
    shared,
    rows,
    width,
    scale,
    window,
    part_rows,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One block: one part of the rows for the query heads of a key head; HEADS of them at most.

    The grid is (parts, batch, blocks of heads). ``parts`` (batch, heads, parts, width) and ``sums`` (batch,
    heads, parts, 2), the part's highest score and its sum of weights, are float32.
    """
    part = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(shared, HEADS)
    group = tl.program_id(2) // blocks
    inner = tl.program_id(2) % blocks * HEADS + tl.arange(0, HEADS)
    head = group * shared + inner
    lanes = tl.arange(0, WIDTH)
    inside = (inner < shared)[:, None] & (lanes < width)[None, :]
    queries = tl.load(
        query + batch * query_batch + head[:, None] * query_head + lanes[None, :] * query_lane,
        mask=inside,
        other=0.0,
    )
    own = tl.load(position).to(tl.int32)
    low = tl.maximum(own - window + 1, 0) + part * part_rows
    high = tl.minimum(tl.minimum(low + part_rows, own + 1), rows)
    keys = key + batch * key_batch + group * key_head
    values = value + batch * value_batch + group * value_head
    highest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, WIDTH), tl.float32)
    for row in range(low, high, ROWS):
        columns = row + tl.arange(0, ROWS)
        there = (columns < high)[:, None] & (lanes < width)[None, :]
        far = columns.to(tl.int64)[:, None]
        block = tl.load(keys + far * key_row + lanes[None, :] * key_lane, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(block), input_precision="ieee") * (scale * LOG2E)
        scores = tl.where((columns < high)[None, :], scores, float("-inf"))
        weights, fade, highest, total = fold_scores(scores, highest, total)
        block = tl.load(values + far * value_row + lanes[None, :] * value_lane, mask=there, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(block.dtype), block, input_precision="ieee")
    place = (batch * heads + head) * tl.num_programs(0) + part
    tl.store(parts + place[:, None] * width + lanes[None, :], mixed, mask=inside)
    tl.store(sums + place * 2, highest, mask=inner < shared)
    tl.store(sums + place * 2 + 1, total, mask=inner < shared)


@triton.jit
def latent_part_kernel(
    query,
    cache,
    position,
    parts,
    sums,
    query_batch,
    query_head,
    query_lane,
    cache_batch,
    cache_row,
    cache_lane,
    heads,
    rows,
    latent,
    rotary,
    scale,
    part_rows,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """One block: one part of the rows for HEADS heads; a row's latent channels are key and value.

    The grid is (parts, batch, blocks of heads); ``parts`` and ``sums`` as in :func:`sink_part_kernel`.
    """
    part = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, LATENT)
    turns = tl.arange(0, ROTARY)
    inside = (head < heads)[:, None] & (lanes < latent)[None, :]
    turning = (head < heads)[:, None] & (turns < rotary)[None, :]
    start = query + batch * query_batch + head[:, None] * query_head
    queries = tl.load(start + lanes[None, :] * query_lane, mask=inside, other=0.0)
    turned = tl.load(start + (latent + turns)[None, :] * query_lane, mask=turning, other=0.0)
    own = tl.load(position).to(tl.int32)
    low = part * part_rows
    high = tl.minimum(tl.minimum(low + part_rows, own + 1), rows)
    highest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, LATENT), tl.float32)
    for row in range(low, high, ROWS):
        columns = row + tl.arange(0, ROWS)
        there = columns < high
        far = cache + batch * cache_batch + columns.to(tl.int64)[:, None] * cache_row
        block = tl.load(
            far + lanes[None, :] * cache_lane, mask=there[:, None] & (lanes < latent)[None, :], other=0.0
        )
        rotated = tl.load(
            far + (latent + turns)[None, :] * cache_lane,
            mask=there[:, None] & (turns < rotary)[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, tl.trans(block), input_precision="ieee")
        scores += tl.dot(turned, tl.trans(rotated), input_precision="ieee")
        scores = tl.where(there[None, :], scores * (scale * LOG2E), float("-inf"))
        weights, fade, highest, total = fold_scores(scores, highest, total)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(block.dtype), block, input_precision="ieee")
    place = (batch * heads + head) * tl.num_programs(0) + part
    tl.store(parts + place[:, None] * latent + lanes[None, :], mixed, mask=inside)
    tl.store(sums + place * 2, highest, mask=head < heads)
    tl.store(sums + place * 2 + 1, total, mask=head < heads)


@triton.jit
def join_parts_kernel(
    parts,
    sums,
    sinks,
    result,
    sink_stride,
    heads,
    count,
    width,
    SINK: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One block: the parts of one head of one request; the grid is (heads, batch). An empty part weighs 0."""
    head = tl.program_id(0)
    place = (tl.program_id(1).to(tl.int64) * heads + head) * count
    numbers = tl.arange(0, PARTS)
    lanes = tl.arange(0, WIDTH)
    filled = numbers < count
    highest = tl.load(sums + (place + numbers) * 2, mask=filled, other=float("-inf"))
    totals = tl.load(sums + (place + numbers) * 2 + 1, mask=filled, other=0.0)
    top = tl.max(highest, axis=0)
    total = 0.0
    if SINK:
        sink = tl.load(sinks + head * sink_stride).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    fade = tl.exp2(highest - top)
    total += tl.sum(fade * totals, axis=0)
    inside = filled[:, None] & (lanes < width)[None, :]
    mixed = tl.load(parts + (place + numbers)[:, None] * width + lanes[None, :], mask=inside, other=0.0)
    whole = tl.sum(mixed * fade[:, None], axis=0) / total
    tl.store(result + (place // count) * width + lanes, whole, mask=lanes < width)


def sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    position: torch.Tensor | None,
    scale: float,
    window: int,
) -> torch.Tensor:
    """``tessera::sink_attention``: one launch for a prompt, two for a token."""
    batch, heads, tokens, width = query.shape
    groups, rows = key.shape[1], key.shape[2]
    shared, padded = heads // groups, _padded(width)
    result = query.new_empty((batch, tokens, heads, width))
    limit = window or max(tokens, rows)
    if position is None:
        queries = 64 if tokens >= 64 else max(_LEAST, triton.next_power_of_2(tokens))
        sink_prompt_kernel[triton.cdiv(tokens, queries), batch * heads](
            *(query, key, value, sinks, result),
            *(*query.stride(), *key.stride(), *value.stride(), sinks.stride(0)),
            *(heads, shared, tokens, rows, width, scale, limit),
            QUERIES=queries,
            ROWS=32,
            WIDTH=padded,
            num_warps=4,
            num_stages=2,
        )
        return result
    blocks = groups * triton.cdiv(shared, _LEAST)
    count, part_rows = _split(min(limit, rows), batch * blocks)
    parts, sums = _parts(query, (batch, heads, count), width)
    sink_part_kernel[count, batch, blocks](
        *(query, key, value, position, parts, sums),
        *(query.stride(0), query.stride(1), query.stride(3), *key.stride(), *value.stride()),
        *(heads, shared, rows, width, scale, limit, part_rows),
        HEADS=_LEAST,
        ROWS=32,
        WIDTH=padded,
        num_warps=4,
        num_stages=2,
    )
    _join(parts, sums, sinks, result)
    return result


def latent_attention(
    query: torch.Tensor, cache: torch.Tensor, position: torch.Tensor, scale: float, latent: int
) -> torch.Tensor:
    """``tessera::latent_attention``, in two launches."""
    batch, heads, width = query.shape
    rows = cache.shape[1]
    result = query.new_empty((batch, heads, latent))
    blocks = triton.cdiv(heads, _LEAST)
    count, part_rows = _split(rows, batch * blocks)
    parts, sums = _parts(query, (batch, heads, count), latent)
    latent_part_kernel[count, batch, blocks](
        *(query, cache, position, parts, sums, *query.stride(), *cache.stride()),
        *(heads, rows, latent, width - latent, scale, part_rows),
        HEADS=_LEAST,
        ROWS=64 // query.element_size(),
        LATENT=_padded(latent),
        ROTARY=_padded(width - latent),
        num_warps=4,
        num_stages=2,
    )
    _join(parts, sums, None, result)
    return result


def _padded(width: int) -> int:
    """Lanes of a tile that holds ``width`` elements."""
    return max(_LEAST, triton.next_power_of_2(width))  # type: ignore[no-any-return]


def _split(rows: int, blocks: int) -> tuple[int, int]:
    """Number of parts of the rows, and rows in a part, for ``blocks`` blocks of each part."""
    count = max(1, min(triton.cdiv(rows, _PART_ROWS), _ENOUGH_BLOCKS // blocks))
    return count, triton.cdiv(rows, count)


def _parts(query: torch.Tensor, outer: tuple[int, int, int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        query.new_empty((*outer, width), dtype=torch.float32),
        query.new_empty((*outer, 2), dtype=torch.float32),
    )


def _join(parts: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None, result: torch.Tensor) -> None:
    batch, heads, count, width = parts.shape
    join_parts_kernel[heads, batch](
        *(parts, sums, sinks, result, 0 if sinks is None else sinks.stride(0), heads, count, width),
        SINK=sinks is not None,
        PARTS=triton.next_power_of_2(count),
        WIDTH=triton.next_power_of_2(width),
        num_warps=4,
    )
