"""Sizes of the catalogued models, written out; no library is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer with grouped-query attention, RMSNorm, rotary embedding and gated SiLU.

    ``source``: ``catalogue`` (the library ``transformers`` defines the layers) or ``embedded`` (this package
    does). ``dtype``: of the weights unless the user asks for another. Widths count elements.
    """

    name: str
    summary: str
    source: Literal["catalogue", "embedded"]
    dtype: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    vocabulary: int
    rope_theta: float
    norm_epsilon: float
    positions: int

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads


CATALOGUE: tuple[Shape, ...] = (
    Shape(  # Meta-Llama-3-8B, config.json as published with the weights (April 2024)
        name="llama-3-8b",
        summary="Meta Llama 3 8B",
        source="catalogue",
        dtype="bfloat16",
        layers=32,
        hidden=4096,
        intermediate=14336,
        heads=32,
        key_heads=8,
        vocabulary=128256,
        rope_theta=500000.0,
        norm_epsilon=1e-5,
        positions=8192,
    ),
    # The same structure at a size for CPU workers. All weights together (21 MB) stay in a shared last-level
    # cache of 32 MB: streamed from memory, a kernel's time would depend on what else the machine is doing.
    Shape(
        name="llama-tiny",
        summary="Llama 3's structure at a size for CPU workers",
        source="catalogue",
        dtype="float32",
        layers=4,
        hidden=320,
        intermediate=1024,
        heads=10,
        key_heads=2,
        vocabulary=1024,
        rope_theta=500000.0,
        norm_epsilon=1e-5,
        positions=8192,
    ),
    Shape(
        name="demo",
        summary="embedded Llama block stack with hand-written Triton kernels",
        source="embedded",
        dtype="float32",
        layers=4,
        hidden=256,
        intermediate=704,  # no multiple of the block of 256: the tail mask is real
        heads=8,
        key_heads=4,
        vocabulary=1024,
        rope_theta=10000.0,
        norm_epsilon=1e-5,
        positions=4096,
    ),
)
