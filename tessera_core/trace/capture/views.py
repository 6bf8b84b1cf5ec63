"""Recorded views as chains of view operators, so that a compiler can see through them.

A trace knows a view as shape, strides and offset in a storage. ``as_strided`` says just that, but compilers
stop fusing at it; permutations, slices and expansions that give the same view are found here instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

Step = tuple[str, tuple[Any, ...]]
"""An ATen view operator (``permute.default``) and its arguments after the tensor."""


def view_steps(
    base_shape: Sequence[int],
    base_stride: Sequence[int],
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> tuple[Step, ...] | None:
    """Operators that turn a dense base at offset 0 into the view; all sizes in elements.

    None where there is no such chain: the base has gaps, or the view overlaps itself or crosses rows.
    """
    if same_layout(base_shape, base_stride, shape, stride) and offset == 0:
        return ()
    total = prod(base_shape)
    order = _dense_order(base_shape, base_stride)
    if order is None or not total or not prod(shape):
        return None
    wide = [axis for axis, extent in enumerate(shape) if extent > 1 and stride[axis] > 0]
    wide.sort(key=lambda axis: -stride[axis])
    steps: list[Step] = []
    if order != list(range(len(order))):
        steps.append(("permute.default", (order,)))
    radices, digits = [], []
    above, rest = total, offset
    for axis in wide:
        step = stride[axis]
        if above % step:
            return None
        digit, rest = divmod(rest, step)
        if digit + shape[axis] > above // step:
            return None
        radices.append(above // step)
        digits.append((digit, shape[axis]))
        above = step
    steps.append(("view.default", ([*radices, above],)))
    if rest >= above:
        return None
    steps.append(("select.int", (len(radices), rest)))
    for axis, ((start, count), radix) in enumerate(zip(digits, radices)):
        if count != radix:
            steps.append(("slice.Tensor", (axis, start, start + count)))
    wanted = [wide.index(axis) for axis in sorted(wide)]
    if wanted != sorted(wanted):
        steps.append(("permute.default", (wanted,)))
    for axis in range(len(shape)):
        if axis not in wide:
            steps.append(("unsqueeze.default", (axis,)))
    if any(extent > 1 and axis not in wide for axis, extent in enumerate(shape)):
        steps.append(("expand.default", (list(shape),)))
    return tuple(steps)


def same_layout(
    first_shape: Sequence[int], first_stride: Sequence[int], shape: Sequence[int], stride: Sequence[int]
) -> bool:
    """Whether two layouts address the same elements alike; strides of extents up to 1 say nothing."""
    return list(first_shape) == list(shape) and all(
        extent <= 1 or one == other for extent, one, other in zip(shape, first_stride, stride)
    )


def _dense_order(shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Axes from the slowest to the fastest of a dense layout; None where it has gaps or overlaps."""
    order = sorted(range(len(shape)), key=lambda axis: (-stride[axis], shape[axis] == 1, axis))
    expected = 1
    for axis in reversed(order):
        if shape[axis] != 1 and stride[axis] != expected:
            return None
        expected *= shape[axis]
    return order
