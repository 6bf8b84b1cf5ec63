"""In which number formats matrix products and experts can be asked for, and what that makes of a kernel.

Names ending in ``_wo`` quantise weights only: they are read in the small format and multiplied in bfloat16. In the
others weights and activations are of that format. Everything that is no product keeps the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tessera_core.profile.work import Experts, Product, Work
from tessera_core.program.ir import Kernel


@dataclass(frozen=True, slots=True)
class Precision:
    """``rate``: the dtype whose rate products reach. ``weight_bytes``: of one element, scales left out."""

    rate: str
    weight_bytes: float


PRECISIONS: Mapping[str, Precision] = {
    "float32": Precision("float32", 4),
    "bfloat16": Precision("bfloat16", 2),
    "float16": Precision("float16", 2),
    "float8": Precision("float8", 1),
    "float8_block": Precision("float8", 1),
    "float4": Precision("float4", 0.5),
    "int8": Precision("int8", 1),
    "int8_wo": Precision("bfloat16", 1),
    "int4_wo": Precision("bfloat16", 0.5),
    "mxfp4_wo": Precision("bfloat16", 0.5),
}
"""By the name that ``/dtype=`` takes."""

RATES = tuple(dict.fromkeys([*(precision.rate for precision in PRECISIONS.values()), "float64"]))
"""Dtypes of which a device type can state a rate."""


def converts(work: Work) -> bool:
    """Whether ``/dtype=`` concerns it: products with a weight, and experts."""
    return isinstance(work, Experts) or (isinstance(work, Product) and work.weight)


def computed_in(kernel: Kernel, work: Work, dtype: str | None) -> tuple[Kernel, Work]:
    """``kernel`` and its work with products in ``dtype``; as they are where that does not concern them.

    Of the bytes only those of the weights shrink: what is computed before and after keeps its dtype.
    """
    if dtype is None or not converts(work) or work.dtype not in PRECISIONS:
        return kernel, work
    saved = PRECISIONS[work.dtype].weight_bytes - PRECISIONS[dtype].weight_bytes
    read = round(kernel.read_bytes - saved * _weights(work))
    changed = replace(kernel, dtype=PRECISIONS[dtype].rate, read_bytes=max(0, read))
    return changed, replace(work, dtype=dtype)


def _weights(work: Work) -> int:
    """Elements of the weights that are read once."""
    if isinstance(work, Product):
        return work.count * work.n * work.k
    assert isinstance(work, Experts)
    reached = min(work.experts, work.tokens * work.top_k)
    return 3 * reached * work.hidden * work.intermediate
