"""The demo model's Triton kernels, each with what it does on a CPU.

Addresses are affine in the block's and the lane's index and masks are bounds on a range, so that which bytes
a launch touches follows from its parameters alone.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton reads the kernels' parameter types from the launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera_core.trace.declare import triton_cpu


@triton.jit
def rms_norm_kernel(source, weight, result, columns, epsilon, BLOCK: tl.constexpr):
    """One block normalises one row of ``source`` (rows, columns), contiguous; BLOCK >= columns."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < columns
    values = tl.load(source + row * columns + lanes, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + epsilon)
    gains = tl.load(weight + lanes, mask=inside, other=0.0)
    tl.store(result + row * columns + lanes, values * scale * gains, mask=inside)


def rms_norm_cpu(
    source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, columns: int, epsilon: float, BLOCK: int
) -> None:
    """``result = source * rsqrt(mean(source ** 2) + epsilon) * weight`` over rows of ``columns`` elements."""
    scale = torch.rsqrt(source.square().mean(dim=-1, keepdim=True) + epsilon)
    torch.mul(source * scale, weight, out=result)


@triton.jit
def rotary_kernel(source, cosines, sines, result, tokens, heads, HALF: tl.constexpr):
    """One block rotates one head of one token.

    ``source`` is (batch, tokens, heads, 2 HALF), ``result`` (batch, heads, tokens, 2 HALF), ``cosines`` and
    ``sines`` (tokens, HALF), all contiguous; the grid is (heads, tokens, batch).
    """
    head = tl.program_id(0)
    token = tl.program_id(1)
    request = tl.program_id(2)
    lanes = tl.arange(0, HALF)
    read = source + ((request * tokens + token) * heads + head) * (2 * HALF)
    write = result + ((request * heads + head) * tokens + token) * (2 * HALF)
    cosine = tl.load(cosines + token * HALF + lanes)
    sine = tl.load(sines + token * HALF + lanes)
    low = tl.load(read + lanes)
    high = tl.load(read + HALF + lanes)
    tl.store(write + lanes, low * cosine - high * sine)
    tl.store(write + HALF + lanes, high * cosine + low * sine)


def rotary_cpu(
    source: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    result: torch.Tensor,
    tokens: int,
    heads: int,
    HALF: int,
) -> None:
    """Rotate pairs (i, i + HALF) of every head by its token's angle, and put heads before tokens."""
    low, high = source.transpose(1, 2).split(HALF, dim=-1)
    result[..., :HALF] = low * cosines - high * sines
    result[..., HALF:] = high * cosines + low * sines


@triton.jit
def silu_multiply_kernel(gate, up, result, elements, BLOCK: tl.constexpr):
    """One block computes BLOCK elements of ``silu(gate) * up``; the last block has a tail."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < elements
    gates = tl.load(gate + lanes, mask=inside, other=0.0)
    ups = tl.load(up + lanes, mask=inside, other=0.0)
    tl.store(result + lanes, gates / (1.0 + tl.exp(-gates)) * ups, mask=inside)


def silu_multiply_cpu(
    gate: torch.Tensor, up: torch.Tensor, result: torch.Tensor, elements: int, BLOCK: int
) -> None:
    """``result = gate * sigmoid(gate) * up``, element by element."""
    torch.mul(torch.nn.functional.silu(gate), up, out=result)


triton_cpu(rms_norm_kernel, rms_norm_cpu, reads=("source", "weight"), writes=("result",), must=("result",))
triton_cpu(
    rotary_kernel, rotary_cpu, reads=("source", "cosines", "sines"), writes=("result",), must=("result",)
)
triton_cpu(
    silu_multiply_kernel, silu_multiply_cpu, reads=("gate", "up"), writes=("result",), must=("result",)
)
