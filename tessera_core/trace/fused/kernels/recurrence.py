"""Mamba-2's recurrence on a CUDA device: the one-token update, and the chunked scan of a prompt.

The scan is the block decomposition of arXiv 2405.21060, section 6: what each chunk adds to the state, the
states passed from chunk to chunk, and each token's output from its chunk and from the state before that.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the kernels' parameter types from the launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LEAST = 16


@triton.jit
def softplus(values):
    """``log(1 + exp(values))``, which is ``values`` where that is large (as in PyTorch, above 20)."""
    return tl.where(values > 20.0, values, tl.log(1.0 + tl.exp(tl.minimum(values, 20.0))))


@triton.jit
def step_kernel(
    source,
    step,
    decay,
    enter,
    leave,
    skip,
    step_bias,
    state,
    result,
    source_batch,
    source_head,
    source_lane,
    step_batch,
    step_head,
    decay_stride,
    enter_batch,
    enter_group,
    enter_lane,
    leave_batch,
    leave_group,
    leave_lane,
    skip_stride,
    bias_stride,
    state_batch,
    state_head,
    state_lane,
    state_place,
    heads,
    shared,
    width,
    places,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
):
    """One block: WIDTH channels of one head and request; the grid is (blocks of channels, heads, batch)."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    place = tl.arange(0, PLACES)
    there, full = lane < width, place < places
    size = softplus(
        tl.load(step + batch * step_batch + head * step_head).to(tl.float32)
        + tl.load(step_bias + head * bias_stride).to(tl.float32)
    )
    kept = tl.exp(-size * tl.exp(tl.load(decay + head * decay_stride).to(tl.float32)))
    entering = enter + batch * enter_batch + (head // shared) * enter_group + place * enter_lane
    leaving = leave + batch * leave_batch + (head // shared) * leave_group + place * leave_lane
    inner = tl.load(entering, mask=full, other=0.0).to(tl.float32)
    outer = tl.load(leaving, mask=full, other=0.0).to(tl.float32)
    values = tl.load(
        source + batch * source_batch + head * source_head + lane * source_lane, mask=there, other=0.0
    )
    values = values.to(tl.float32)
    cell = (
        state
        + batch * state_batch
        + head * state_head
        + lane[:, None] * state_lane
        + place[None, :] * state_place
    )
    inside = there[:, None] & full[None, :]
    current = tl.load(cell, mask=inside, other=0.0).to(tl.float32)
    current = current * kept + (size * values)[:, None] * inner[None, :]
    mixed = (
        tl.sum(current * outer[None, :], axis=1) + tl.load(skip + head * skip_stride).to(tl.float32) * values
    )
    tl.store(cell, current, mask=inside)
    tl.store(result + (batch * heads + head) * width + lane, mixed, mask=there)


@triton.jit
def chunk_steps_kernel(
    step,
    decay,
    step_bias,
    sizes,
    sums,
    step_batch,
    step_token,
    step_head,
    decay_stride,
    bias_stride,
    heads,
    tokens,
    chunk,
    CHUNK: tl.constexpr,
):
    """One block: one chunk of one head; the grid is (chunks, heads, batch).

    ``sizes`` (batch, heads, tokens): softplus of the steps; ``sums``: the logarithm of what is left of the
    state before the chunk after each of its tokens. Both are float32.
    """
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, CHUNK)
    token = tl.program_id(0) * chunk + inner
    there = (inner < chunk) & (token < tokens)
    given = tl.load(
        step + batch * step_batch + token.to(tl.int64) * step_token + head * step_head, mask=there, other=0.0
    )
    size = softplus(given.to(tl.float32) + tl.load(step_bias + head * bias_stride).to(tl.float32))
    rate = tl.exp(tl.load(decay + head * decay_stride).to(tl.float32))
    lost = tl.cumsum(tl.where(there, -size * rate, 0.0), axis=0)
    place = (batch * heads + head) * tokens + token
    tl.store(sizes + place, size, mask=there)
    tl.store(sums + place, lost, mask=there)


@triton.jit
def chunk_state_kernel(
    source,
    enter,
    sizes,
    sums,
    added,
    source_batch,
    source_token,
    source_head,
    source_lane,
    enter_batch,
    enter_token,
    enter_group,
    enter_lane,
    heads,
    shared,
    tokens,
    chunk,
    chunks,
    width,
    places,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    STEP: tl.constexpr,
):
    """One block: WIDTH x PLACES of what one chunk adds to one head's state.

    ``added`` (batch, chunks, heads, width, places), float32; the grid is (chunks * heads, tiles of a
    state, batch).
    """
    blocks = tl.cdiv(places, PLACES)
    head = tl.program_id(0) % heads
    number = tl.program_id(0) // heads
    batch = tl.program_id(2).to(tl.int64)
    lane = tl.program_id(1) // blocks * WIDTH + tl.arange(0, WIDTH)
    place = tl.program_id(1) % blocks * PLACES + tl.arange(0, PLACES)
    first = number * chunk
    end = tl.minimum(first + chunk, tokens)
    row = (batch * heads + head) * tokens
    whole = tl.load(sums + row + end - 1)
    mixed = tl.zeros((WIDTH, PLACES), tl.float32)
    for start in range(first, end, STEP):
        token = start + tl.arange(0, STEP)
        there = token < end
        far = token.to(tl.int64)
        values = tl.load(
            source
            + batch * source_batch
            + head * source_head
            + far[None, :] * source_token
            + lane[:, None] * source_lane,
            mask=(lane < width)[:, None] & there[None, :],
            other=0.0,
        )
        inner = tl.load(
            enter
            + batch * enter_batch
            + (head // shared) * enter_group
            + far[:, None] * enter_token
            + place[None, :] * enter_lane,
            mask=there[:, None] & (place < places)[None, :],
            other=0.0,
        )
        size = tl.load(sizes + row + token, mask=there, other=0.0)
        left = tl.exp(whole - tl.load(sums + row + token, mask=there, other=0.0))
        weighted = inner.to(tl.float32) * tl.where(there, size * left, 0.0)[:, None]
        mixed = tl.dot(values, weighted.to(values.dtype), mixed, input_precision="ieee")
    target = added + ((batch * chunks + number) * heads + head) * width * places
    inside = (lane < width)[:, None] & (place < places)[None, :]
    tl.store(target + lane[:, None] * places + place[None, :], mixed, mask=inside)


@triton.jit
def pass_states_kernel(
    added,
    sums,
    before,
    state,
    state_batch,
    state_head,
    state_lane,
    state_place,
    heads,
    tokens,
    chunk,
    chunks,
    width,
    places,
    CELLS: tl.constexpr,
):
    """One block: CELLS cells of one head's state through all chunks; the grid is (blocks of cells, heads, batch).

    ``before`` has the shape of ``added``: the state before each chunk.
    """
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    inside = cell < width * places
    row = (batch * heads + head) * tokens
    current = tl.zeros((CELLS,), tl.float32)
    for number in range(chunks):
        place = ((batch * chunks + number) * heads + head) * width * places + cell
        tl.store(before + place, current, mask=inside)
        left = tl.exp(tl.load(sums + row + tl.minimum((number + 1) * chunk, tokens) - 1))
        current = current * left + tl.load(added + place, mask=inside, other=0.0)
    start = state + batch * state_batch + head * state_head
    tl.store(start + cell // places * state_lane + cell % places * state_place, current, mask=inside)


@triton.jit
def chunk_scan_kernel(
    source,
    enter,
    leave,
    skip,
    sizes,
    sums,
    before,
    result,
    source_batch,
    source_token,
    source_head,
    source_lane,
    enter_batch,
    enter_token,
    enter_group,
    enter_lane,
    leave_batch,
    leave_token,
    leave_group,
    leave_lane,
    skip_stride,
    heads,
    shared,
    tokens,
    chunk,
    chunks,
    width,
    places,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    STEP: tl.constexpr,
):
    """One block: TOKENS tokens of one chunk and head, WIDTH channels of them.

    The grid is (chunks * heads, blocks of a chunk's tokens * blocks of channels, batch).
    """
    blocks = tl.cdiv(width, WIDTH)
    head = tl.program_id(0) % heads
    number = tl.program_id(0) // heads
    batch = tl.program_id(2).to(tl.int64)
    first = number * chunk
    end = tl.minimum(first + chunk, tokens)
    begin = first + tl.program_id(1) // blocks * TOKENS
    token = begin + tl.arange(0, TOKENS)
    lane = tl.program_id(1) % blocks * WIDTH + tl.arange(0, WIDTH)
    place = tl.arange(0, PLACES)
    full, there = place < places, token < end
    row = (batch * heads + head) * tokens
    own = tl.load(sums + row + token, mask=there, other=0.0)
    outer = tl.load(
        leave
        + batch * leave_batch
        + (head // shared) * leave_group
        + token.to(tl.int64)[:, None] * leave_token
        + place[None, :] * leave_lane,
        mask=there[:, None] & full[None, :],
        other=0.0,
    )
    old = before + ((batch * chunks + number) * heads + head) * width * places
    state = tl.load(
        old + lane[None, :] * places + place[:, None], mask=full[:, None] & (lane < width)[None, :], other=0.0
    )
    mixed = tl.dot(outer, state.to(outer.dtype), input_precision="ieee") * tl.exp(own)[:, None]
    sources = source + batch * source_batch + head * source_head + lane[None, :] * source_lane
    inners = enter + batch * enter_batch + (head // shared) * enter_group
    for start in range(first, tl.minimum(begin + TOKENS, end), STEP):
        other = start + tl.arange(0, STEP)
        known = other < end
        far = other.to(tl.int64)
        inner = tl.load(
            inners + far[None, :] * enter_token + place[:, None] * enter_lane,
            mask=full[:, None] & known[None, :],
            other=0.0,
        )
        scores = tl.dot(outer, inner, input_precision="ieee")
        size = tl.load(sizes + row + other, mask=known, other=0.0)
        theirs = tl.load(sums + row + other, mask=known, other=0.0)
        seen = (other[None, :] <= token[:, None]) & known[None, :] & there[:, None]
        # Later tokens would be raised, not faded, so they are masked before the exponential.
        fade = tl.exp(tl.where(seen, own[:, None] - theirs[None, :], float("-inf")))
        scores = scores * fade * size[None, :]
        values = tl.load(
            sources + far[:, None] * source_token, mask=known[:, None] & (lane < width)[None, :], other=0.0
        )
        mixed = tl.dot(scores.to(values.dtype), values, mixed, input_precision="ieee")
    inside = there[:, None] & (lane < width)[None, :]
    values = tl.load(sources + token.to(tl.int64)[:, None] * source_token, mask=inside, other=0.0)
    mixed += tl.load(skip + head * skip_stride).to(tl.float32) * values.to(tl.float32)
    target = result + ((batch * tokens + token.to(tl.int64)) * heads + head)[:, None] * width + lane[None, :]
    tl.store(target, mixed, mask=inside)


def selective_step(
    source: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    enter: torch.Tensor,
    leave: torch.Tensor,
    skip: torch.Tensor,
    step_bias: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """``tessera::selective_step``, in one launch."""
    batch, heads, width = source.shape
    groups, places = enter.shape[1:]
    result = source.new_empty((batch, heads, width))
    padded = triton.next_power_of_2(places)
    # About 4,096 cells of the state in a block.
    lanes = max(1, min(triton.next_power_of_2(width), 4096 // padded))
    step_kernel[triton.cdiv(width, lanes), heads, batch](
        *(source, step, decay, enter, leave, skip, step_bias, state, result),
        *(*source.stride(), *step.stride(), decay.stride(0), *enter.stride(), *leave.stride()),
        *(skip.stride(0), step_bias.stride(0), *state.stride()),
        *(heads, heads // groups, width, places),
        WIDTH=lanes,
        PLACES=padded,
        num_warps=4,
    )
    return result


def selective_scan(
    source: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    enter: torch.Tensor,
    leave: torch.Tensor,
    skip: torch.Tensor,
    step_bias: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    """``tessera::selective_scan``, in four launches."""
    batch, tokens, heads, width = source.shape
    groups, places = enter.shape[2:]
    shared, chunk = heads // groups, min(chunk, tokens)
    chunks = triton.cdiv(tokens, chunk)
    result = source.new_empty((batch, tokens, heads, width))
    sizes, sums = (source.new_empty((batch, heads, tokens), dtype=torch.float32) for _ in range(2))
    added, before = (
        source.new_empty((batch, chunks, heads, width, places), dtype=torch.float32) for _ in range(2)
    )
    chunk_steps_kernel[chunks, heads, batch](
        *(step, decay, step_bias, sizes, sums, *step.stride(), decay.stride(0), step_bias.stride(0)),
        *(heads, tokens, chunk),
        CHUNK=triton.next_power_of_2(chunk),
        num_warps=4,
    )
    lanes, cells, block = _tile(width), _tile(places), _tile(chunk)
    chunk_state_kernel[chunks * heads, triton.cdiv(width, lanes) * triton.cdiv(places, cells), batch](
        *(source, enter, sizes, sums, added, *source.stride(), *enter.stride()),
        *(heads, shared, tokens, chunk, chunks, width, places),
        WIDTH=lanes,
        PLACES=cells,
        STEP=32,
        num_warps=4,
        num_stages=2,
    )
    pass_states_kernel[triton.cdiv(width * places, 1024), heads, batch](
        *(added, sums, before, state, *state.stride()),
        *(heads, tokens, chunk, chunks, width, places),
        CELLS=1024,
        num_warps=4,
    )
    chunk_scan_kernel[chunks * heads, triton.cdiv(chunk, block) * triton.cdiv(width, lanes), batch](
        *(source, enter, leave, skip, sizes, sums, before, result),
        *(*source.stride(), *enter.stride(), *leave.stride(), skip.stride(0)),
        *(heads, shared, tokens, chunk, chunks, width, places),
        TOKENS=block,
        WIDTH=lanes,
        PLACES=max(_LEAST, triton.next_power_of_2(places)),
        STEP=32,
        num_warps=4,
        num_stages=2,
    )
    return result


def _tile(size: int) -> int:
    """Edge of a tile over ``size`` elements."""
    return max(_LEAST, min(64, triton.next_power_of_2(size)))  # type: ignore[no-any-return]
