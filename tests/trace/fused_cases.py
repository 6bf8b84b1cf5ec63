"""Calls of the fused operators over odd sizes and strides: what their kernels are compared on, and how closely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative error (Euclidean norm): low precision rounds weights and sums between two products."""


@dataclass(frozen=True, slots=True)
class Case:
    """A call of ``operator``, whose sizes ``sizes`` names."""

    operator: str
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """For a test's name."""
        return f"{self.operator}-{'x'.join(map(str, self.sizes))}"

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """The same values at every call, on the CPU."""
        maker: dict[str, Any] = {
            "sink_attention": _sink_attention,
            "latent_attention": _latent_attention,
            "clamped_experts": _clamped_experts,
            "gated_experts": _gated_experts,
            "causal_convolution": _convolution,
            "causal_convolution_step": _convolution_step,
            "selective_scan": _scan,
            "selective_step": _step,
        }
        return tuple(maker[self.operator](_Draw(dtype), *self.sizes))


class _Draw:
    """Random tensors of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def chosen(self, tokens: int, experts: int, slots: int) -> torch.Tensor:
        """Distinct experts of each token."""
        order = torch.rand(tokens, experts, generator=self.generator).argsort(dim=1)
        return order[:, :slots].contiguous()


# Batch, heads, key heads, tokens, rows, width, window; position -1: a prompt.
def _sink_attention(
    draw: _Draw, b: int, h: int, g: int, t: int, rows: int, width: int, window: int, position: int
) -> Iterator[Any]:
    yield draw(b, t, h, width).transpose(1, 2)
    yield draw(b, g, rows, 2 * width)[..., ::2]
    yield draw(b, rows, g, width).transpose(1, 2)
    yield draw(h)
    yield None if position < 0 else torch.tensor([position])
    yield from (width**-0.5, window)


def _latent_attention(
    draw: _Draw, b: int, h: int, rows: int, latent: int, rotary: int, position: int
) -> Iterator[Any]:
    yield draw(b, h, latent + rotary)
    yield draw(rows, b, latent + rotary).transpose(0, 1)
    yield torch.tensor([position])
    yield from ((latent + rotary) ** -0.5, latent)


def _clamped_experts(
    draw: _Draw, tokens: int, width: int, inner: int, experts: int, slots: int
) -> Iterator[Any]:
    yield draw(tokens, width)
    yield draw.chosen(tokens, experts, slots)
    yield draw(tokens, slots).softmax(-1)
    yield draw(experts, width, 2 * inner) * width**-0.5
    yield draw(experts, 2 * inner)
    yield draw(experts, inner, width) * inner**-0.5
    yield draw(experts, width)
    yield from (1.702, 0.5)


def _gated_experts(
    draw: _Draw, tokens: int, width: int, inner: int, experts: int, slots: int
) -> Iterator[Any]:
    yield draw(tokens, 2 * width)[:, ::2]
    yield draw.chosen(tokens, experts, slots)
    yield draw(slots, tokens).softmax(0).t()
    yield draw(experts, 2 * inner, width) * width**-0.5
    yield draw(experts, width, inner) * inner**-0.5


def _convolution(draw: _Draw, b: int, tokens: int, channels: int, taps: int) -> Iterator[Any]:
    yield draw(b, tokens, channels + 3)[..., 3:]
    yield draw(channels, taps)
    yield draw(channels)
    yield draw(b, channels, taps - 1)


def _convolution_step(draw: _Draw, b: int, channels: int, taps: int) -> Iterator[Any]:
    yield draw(b, channels + 3)[..., 3:]
    yield draw(channels, taps)
    yield draw(channels)
    yield draw(b, channels, taps - 1)


def _vectors(draw: _Draw, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logarithm of A, D, and the steps' bias, as a model has them."""
    return draw(heads).abs(), draw(heads), draw(heads) - 2


def _scan(
    draw: _Draw, b: int, tokens: int, heads: int, width: int, groups: int, places: int, chunk: int
) -> Iterator[Any]:
    decay, skip, bias = _vectors(draw, heads)
    both = draw(b, tokens, groups, 2 * places)
    yield draw(b, tokens, heads * width + 5)[..., 5:].unflatten(2, (heads, width))
    yield draw(b, tokens, heads)
    yield decay
    yield from both.split(places, dim=-1)
    yield from (skip, bias)
    yield draw(b, heads, width, places)
    yield chunk


def _step(draw: _Draw, b: int, heads: int, width: int, groups: int, places: int) -> Iterator[Any]:
    decay, skip, bias = _vectors(draw, heads)
    both = draw(b, groups, 2 * places)
    yield draw(b, heads * width + 5)[..., 5:].unflatten(1, (heads, width))
    yield draw(b, heads)
    yield decay
    yield from both.split(places, dim=-1)
    yield from (skip, bias)
    yield draw(b, heads, width, places)


SMALL = (
    Case("sink_attention", (1, 1, 1, 1, 1, 1, 0, -1)),
    Case("sink_attention", (2, 6, 2, 70, 70, 24, 0, -1)),
    Case("sink_attention", (2, 4, 1, 70, 75, 16, 9, -1)),
    Case("sink_attention", (1, 8, 8, 5, 5, 40, 3, -1)),
    Case("sink_attention", (2, 8, 2, 1, 40, 16, 0, 0)),
    Case("sink_attention", (3, 6, 2, 1, 300, 24, 0, 299)),
    Case("sink_attention", (1, 34, 2, 1, 300, 16, 140, 200)),
    Case("sink_attention", (1, 2, 1, 1, 1000, 16, 0, 130)),
    Case("latent_attention", (2, 4, 40, 32, 8, 7)),
    Case("latent_attention", (1, 20, 500, 24, 0, 499)),
    Case("latent_attention", (1, 1, 1, 1, 3, 0)),
    Case("clamped_experts", (1, 1, 1, 1, 1)),
    Case("clamped_experts", (5, 96, 33, 8, 2)),
    Case("clamped_experts", (67, 40, 70, 3, 2)),
    Case("gated_experts", (7, 50, 24, 5, 3)),
    Case("gated_experts", (550, 17, 9, 2, 2)),
    Case("gated_experts", (2, 16, 16, 40, 4)),
    Case("causal_convolution", (2, 5, 7, 4)),
    Case("causal_convolution", (1, 2, 130, 4)),
    Case("causal_convolution", (2, 33, 20, 2)),
    Case("causal_convolution", (1, 1, 1, 3)),
    Case("causal_convolution_step", (3, 130, 4)),
    Case("causal_convolution_step", (1, 1, 2)),
    Case("causal_convolution_step", (2, 50, 5)),
    Case("selective_scan", (2, 37, 4, 8, 2, 6, 8)),
    Case("selective_scan", (1, 3, 2, 20, 1, 40, 64)),
    Case("selective_scan", (1, 100, 2, 70, 2, 16, 40)),
    Case("selective_scan", (1, 1, 1, 1, 1, 1, 1)),
    Case("selective_step", (2, 4, 8, 2, 6)),
    Case("selective_step", (1, 2, 70, 1, 130)),
    Case("selective_step", (1, 1, 1, 1, 1)),
)
"""Sizes that an interpreter gets through."""

LARGE = (
    Case("sink_attention", (1, 64, 8, 1024, 1024, 64, 128, -1)),
    Case("sink_attention", (1, 64, 8, 777, 777, 64, 0, -1)),
    Case("sink_attention", (16, 64, 8, 1, 1024, 64, 128, 700)),
    Case("sink_attention", (16, 64, 8, 1, 1024, 64, 0, 1023)),
    Case("latent_attention", (8, 128, 1024, 512, 64, 801)),
    Case("clamped_experts", (64, 720, 720, 32, 4)),
    Case("clamped_experts", (500, 720, 720, 32, 4)),
    Case("gated_experts", (500, 512, 384, 64, 8)),
    Case("causal_convolution", (2, 1000, 1280, 4)),
    Case("causal_convolution_step", (64, 10240, 4)),
    Case("selective_scan", (1, 1000, 16, 64, 2, 128, 256)),
    Case("selective_step", (64, 128, 64, 8, 128)),
)
"""Sizes of real layers."""
