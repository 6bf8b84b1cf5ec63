"""A kernel's work as the physical model takes it: its class, and its sizes as columns of one row."""

from __future__ import annotations

from typing import assert_never

import numpy as np

from tessera_core.profile.model.demand import Sizes
from tessera_core.profile.work import Attention, Experts, Product, Scan, Streaming, Work

ITEM_BYTES = {"float64": 8.0, "float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int64": 8.0, "int32": 4.0}
"""Bytes of an element by dtype."""

WEIGHT_ONLY_BYTES = {"int8_wo": 1.0, "int4_wo": 0.5, "mxfp4_wo": 0.5}
"""Bytes of a weight where only weights are narrow; such products are computed in bfloat16."""

NARROW_BYTES = {"float4": 0.5}

ALIGNMENT_BYTES = 16
"""What tensor cores' loads are made of (CUTLASS, "Efficient GEMM in CUDA"); vectors of one column aside."""


def item_bytes(dtype: str) -> float:
    """Bytes of an element of what a kernel in ``dtype`` reads most of; of an unknown dtype 1, as int8's."""
    for known in (ITEM_BYTES, WEIGHT_ONLY_BYTES, NARROW_BYTES):
        if dtype in known:
            return known[dtype]
    return 1.0


def compute_dtype(dtype: str) -> str:
    """In which dtype the tensor cores of a kernel in ``dtype`` multiply."""
    return "bfloat16" if dtype in WEIGHT_ONLY_BYTES else dtype


def aligned(work: Product) -> bool:
    """Whether the rows of both factors fill multiples of 16 bytes, as a library's fast kernels want them."""
    return all(size * item_bytes(work.dtype) % ALIGNMENT_BYTES == 0 for size in (work.n, work.k))


def sizes_of(work: Work) -> tuple[str, Sizes] | None:
    """The class of ``work`` and its sizes; None where it is bounded by its bytes alone."""
    match work:
        case Product():
            return "products", _columns(m=work.m, n=work.n, k=work.k, count=work.count)
        case Attention():
            kind = "attention-decode" if work.phase == "decode" else "attention-prefill"
            return kind, _columns(
                batch=work.batch,
                heads=work.heads,
                kv_heads=work.kv_heads,
                head_dim=work.head_dim,
                queries=work.queries,
                context=work.context,
                window=work.window or 0,
                causal=float(work.phase == "prefill"),
            )
        case Experts():
            return "experts", _columns(
                tokens=work.tokens,
                hidden=work.hidden,
                intermediate=work.intermediate,
                experts=work.experts,
                top_k=work.top_k,
            )
        case Scan() | Streaming():
            return None
        case _:
            assert_never(work)


def _columns(**sizes: float) -> Sizes:
    return {name: np.array([float(size)]) for name, size in sizes.items()}


def streamed(work: Scan | Streaming) -> Streaming:
    """A scan as the bytes and flops that it needs: its inputs once, its state read and written once."""
    if isinstance(work, Streaming):
        return work
    tokens, item = work.batch * work.length, item_bytes(work.dtype)
    if work.part == "convolution":
        # Four taps: the kernel width that every published Mamba-2 has.
        read, flops = tokens * work.channels * item, 8 * tokens * work.channels
        written = read
    else:
        inner, state = (
            work.heads * work.head_dim,
            work.state_item_bytes * work.batch * work.heads * work.head_dim * work.state,
        )
        read = tokens * (inner + 2 * work.groups * work.state + work.heads) * item + state
        written = tokens * inner * item + state
        flops = 6 * tokens * inner * work.state
    return Streaming(
        dtype=work.dtype,
        read_bytes=round(read),
        written_bytes=round(written),
        flops=flops,
        pointwise=False,
        ops=1,
    )
