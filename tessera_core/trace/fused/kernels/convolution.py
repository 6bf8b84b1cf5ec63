"""Mamba-2's short convolutions on a CUDA device: over a prompt, and for one token."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton reads the kernels' parameter types from the launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def convolution_kernel(
    source,
    weight,
    bias,
    state,
    result,
    source_batch,
    source_token,
    source_channel,
    weight_channel,
    weight_tap,
    bias_stride,
    state_batch,
    state_channel,
    state_tap,
    tokens,
    channels,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One block: TOKENS tokens of CHANNELS channels; the grid is (blocks of tokens, blocks of channels, batch).

    The blocks of the first tokens also fill the state.
    """
    batch = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    start = source + batch * source_batch + channel[None, :] * source_channel
    mixed = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        row = token - (TAPS - 1) + tap
        seen = (row >= 0) & (row < tokens)
        values = tl.load(
            start + row.to(tl.int64)[:, None] * source_token, mask=seen[:, None] & there[None, :], other=0.0
        )
        factors = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=there, other=0.0)
        mixed += values.to(tl.float32) * factors.to(tl.float32)[None, :]
    mixed += tl.load(bias + channel * bias_stride, mask=there, other=0.0).to(tl.float32)[None, :]
    target = result + (batch * tokens + token.to(tl.int64))[:, None] * channels + channel[None, :]
    tl.store(target, mixed * tl.sigmoid(mixed), mask=(token < tokens)[:, None] & there[None, :])
    if tl.program_id(0) == 0:
        kept = state + batch * state_batch + channel * state_channel
        # A row per channel, because a size of 1 is a constant to the compiler, and has no type.
        oldest = tl.full((CHANNELS,), 1 - TAPS, tl.int64) + tokens
        for tap in tl.static_range(TAPS - 1):
            last = source + batch * source_batch + (oldest + tap) * source_token + channel * source_channel
            newest = tl.load(last, mask=there & (oldest + tap >= 0), other=0.0)
            tl.store(kept + tap * state_tap, newest, mask=there)


@triton.jit
def convolution_step_kernel(
    source,
    weight,
    bias,
    state,
    result,
    source_batch,
    source_channel,
    weight_channel,
    weight_tap,
    bias_stride,
    state_batch,
    state_channel,
    state_tap,
    channels,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One block: CHANNELS channels of one request; the grid is (blocks of channels, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    tap = tl.arange(0, PADDED)
    newest = tl.load(source + batch * source_batch + channel * source_channel, mask=there, other=0.0)
    newest = newest.to(state.dtype.element_ty)
    kept = state + batch * state_batch + channel[:, None] * state_channel + tap[None, :] * state_tap
    # The window before this token, and the same without its oldest place: what the state becomes.
    old = tl.load(kept, mask=there[:, None] & (tap < TAPS - 1)[None, :], other=0.0)
    moved = tl.load(kept + state_tap, mask=there[:, None] & (tap < TAPS - 2)[None, :], other=0.0)
    moved = tl.where((tap == TAPS - 2)[None, :], newest[:, None], moved)
    factors = tl.load(
        weight + channel[:, None] * weight_channel + tap[None, :] * weight_tap,
        mask=there[:, None] & (tap < TAPS - 1)[None, :],
        other=0.0,
    )
    mixed = tl.sum(old.to(tl.float32) * factors.to(tl.float32), axis=1)
    last = tl.load(weight + channel * weight_channel + (TAPS - 1) * weight_tap, mask=there, other=0.0)
    mixed += newest.to(tl.float32) * last.to(tl.float32)
    mixed += tl.load(bias + channel * bias_stride, mask=there, other=0.0).to(tl.float32)
    tl.store(result + batch * channels + channel, mixed * tl.sigmoid(mixed), mask=there)
    # Another thread may read the place that this one writes.
    tl.debug_barrier()
    tl.store(kept, moved, mask=there[:, None] & (tap < TAPS - 1)[None, :])


def causal_convolution(
    source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """``tessera::causal_convolution``, in one launch."""
    batch, tokens, channels = source.shape
    result = source.new_empty((batch, tokens, channels))
    convolution_kernel[triton.cdiv(tokens, 16), triton.cdiv(channels, 128), batch](
        *(source, weight, bias, state, result),
        *(*source.stride(), *weight.stride(), bias.stride(0), *state.stride(), tokens, channels),
        TAPS=weight.shape[1],
        TOKENS=16,
        CHANNELS=128,
        num_warps=4,
    )
    return result


def causal_convolution_step(
    source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """``tessera::causal_convolution_step``, in one launch."""
    batch, channels = source.shape
    taps = weight.shape[1]
    result = source.new_empty((batch, channels))
    convolution_step_kernel[triton.cdiv(channels, 128), batch](
        *(source, weight, bias, state, result),
        *(*source.stride(), *weight.stride(), bias.stride(0), *state.stride(), channels),
        TAPS=taps,
        PADDED=triton.next_power_of_2(taps),
        CHANNELS=128,
        num_warps=4,
    )
    return result
