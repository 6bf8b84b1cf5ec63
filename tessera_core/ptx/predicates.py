"""Comparisons, Boolean logic and selection on per-thread predicates, and the masks of threads made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tessera_core.ptx.values import (
    ALWAYS,
    EITHER,
    NEVER,
    ZERO,
    BlocksDiffer,
    Bool,
    Known,
    Predicate,
    Shape,
    Unknown,
    Value,
    add,
    bases_of,
    elementwise,
    is_constant,
    known,
    unknown,
    unsigned,
    width_of,
)

# Above this many threads, blocks that a comparison decides as a whole are interpreted apart from those on its edge.
DIVIDE_ELEMENTS = 1 << 11

_COMPARISONS: Mapping[str, Callable[[Any], Any]] = {
    "eq": lambda d: d == 0,
    "ne": lambda d: d != 0,
    "lt": lambda d: d < 0,
    "le": lambda d: d <= 0,
    "gt": lambda d: d > 0,
    "ge": lambda d: d >= 0,
}
_UNSIGNED_COMPARISONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def choose(shape: Shape, predicate: Predicate, yes: Value, no: Value) -> Value:
    """``yes`` where the predicate holds, else ``no``."""
    if not predicate.false.any():
        return yes
    if not predicate.true.any():
        return no
    if isinstance(yes, Predicate) and isinstance(no, Predicate):
        chosen = combine(shape, "and", (predicate, yes))
        other = combine(shape, "and", (Predicate(predicate.false, predicate.true), no))
        return combine(shape, "or", (chosen, other))
    if isinstance(yes, Predicate) or isinstance(no, Predicate):
        return unknown()
    decided = not (predicate.true & predicate.false).any()
    if decided and isinstance(yes, Known) and isinstance(no, Known) and yes.base == no.base:
        apart = _chosen_apart(predicate.true, yes, no)
        if apart is not None:
            return apart
        flag = predicate.true.astype(np.int64)
        condition = known(ZERO, flag) if flag.shape[0] == 1 else known(flag)
        picked = elementwise(shape, lambda c, a, b: np.where(c != 0, a, b), (condition, yes, no), 64)
        if isinstance(picked, Known):
            return Known(yes.base, picked.block, picked.thread, picked.low, picked.high)
    bases = bases_of(yes) | bases_of(no)
    if yes.low is None or no.low is None or yes.high is None or no.high is None:
        return Unknown(bases, None, None)
    return Unknown(bases, min(yes.low, no.low), max(yes.high, no.high))


def _chosen_apart(flag: Bool, yes: Known, no: Known) -> Known | None:
    """The choice where it moves one part of the sum only: a loop that blocks leave one after the other must not lay
    every register out for all threads. None where it does not."""
    if flag.shape[1] == 1 and np.array_equal(yes.thread, no.thread):
        return known(np.where(flag, yes.block, no.block), yes.thread, yes.base)
    if flag.shape[0] == 1 and yes.block.shape[1] == 1 and np.array_equal(yes.block, no.block):
        return known(yes.block, np.where(flag, yes.thread, no.thread), yes.base)
    return None


def compare(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``setp`` with one destination, and its optional Boolean combination with a third operand."""
    kind, comparison = parts[-1], parts[1]
    result = EITHER
    if width_of(kind):
        is_unsigned = kind[0] == "u" or comparison in _UNSIGNED_COMPARISONS
        comparison = _UNSIGNED_COMPARISONS.get(comparison, comparison)
        pair = sources[:2]
        if is_unsigned and comparison not in ("eq", "ne"):
            pair = tuple(unsigned(value, width_of(kind), shape) for value in pair)
        result = _decide(shape, comparison, pair[0], pair[1])
    if len(sources) > 2:
        operation = next((part for part in parts[2:] if part in ("and", "or", "xor")), "and")
        third = sources[2]
        return combine(shape, operation, (result, third if isinstance(third, Predicate) else EITHER))
    return result


def _decide(shape: Shape, comparison: str, x: Value, y: Value) -> Predicate:
    test = _COMPARISONS.get(comparison)
    if test is None or isinstance(x, Predicate) or isinstance(y, Predicate):
        return EITHER
    if comparison in ("eq", "ne"):
        for pointer, number in ((x, y), (y, x)):
            if is_constant(number) and number.low == 0 and isinstance(pointer, Known) and pointer.base >= 0:
                return Predicate(NEVER, ALWAYS) if comparison == "eq" else Predicate(ALWAYS, NEVER)
    first, second = bases_of(x), bases_of(y)
    if (
        first != second
        or len(first) != 1
        or x.low is None
        or x.high is None
        or y.low is None
        or y.high is None
    ):
        return EITHER
    low, high = x.low - y.high, x.high - y.low
    if low < -(1 << 63) or high >= 1 << 63:
        return EITHER
    if comparison in ("eq", "ne"):
        certain = low > 0 or high < 0 or low == high
    else:
        certain = bool(test(low)) == bool(test(high))
    if certain:
        return Predicate(ALWAYS, NEVER) if test(low) else Predicate(NEVER, ALWAYS)
    if not isinstance(x, Known) or not isinstance(y, Known):
        return EITHER
    difference = add(shape, x, y, 64, -1)
    if not isinstance(difference, Known):
        return EITHER
    if difference.block.size > 1 and difference.thread.size > 1:
        return _decide_by_block(shape, comparison, difference)
    true: Bool = test(difference.block + difference.thread)
    return Predicate(true, ~true)


def _decide_by_block(shape: Shape, comparison: str, difference: Known) -> Predicate:
    test = _COMPARISONS[comparison]
    if shape.divisible and shape.blocks * shape.threads > DIVIDE_ELEMENTS and comparison not in ("eq", "ne"):
        at_low = test(difference.block[:, 0] + difference.thread.min())
        at_high = test(difference.block[:, 0] + difference.thread.max())
        classes = np.where(at_low & at_high, 1, np.where(at_low | at_high, 2, 0))
        if len(np.unique(classes)) > 1:
            raise BlocksDiffer(classes)
    if not shape.dense_allowed():
        shape.divide()
        return EITHER
    true: Bool = test(difference.block + difference.thread)
    return Predicate(true, ~true)


def combine(shape: Shape, operation: str, sources: tuple[Value, ...]) -> Predicate:
    """``and``, ``or`` or ``xor`` of two predicates."""
    x, y = (value if isinstance(value, Predicate) else EITHER for value in sources[:2])
    if operation == "and":
        return Predicate(both(shape, x.true, y.true), ~both(shape, ~x.false, ~y.false))
    if operation == "or":
        return Predicate(~both(shape, ~x.true, ~y.true), both(shape, x.false, y.false))
    either = both(shape, x.true, y.false), both(shape, x.false, y.true)
    same = both(shape, x.true, y.true), both(shape, x.false, y.false)
    return Predicate(~both(shape, ~either[0], ~either[1]), ~both(shape, ~same[0], ~same[1]))


def both(shape: Shape, x: Bool, y: Bool) -> Bool:
    """``x & y``, dividing the blocks where a large dense array would be needed."""
    if x.size == 1:
        return y if x[0, 0] else NEVER
    if y.size == 1:
        return x if y[0, 0] else NEVER
    if x.shape != y.shape:
        for mask, other in ((x, y), (y, x)):
            if mask.all():
                return other
            if not mask.any():
                return NEVER
            if mask.shape[1] == 1 and shape.divisible and shape.blocks * shape.threads > DIVIDE_ELEMENTS:
                raise BlocksDiffer(mask[:, 0].astype(np.int64))
    return x & y


def either(shape: Shape, x: Bool, y: Bool) -> Bool:
    """``x | y``."""
    return invert(both(shape, invert(x), invert(y)))


def invert(x: Bool) -> Bool:
    """``~x``, keeping the two constant masks what they are."""
    if x is ALWAYS:
        return NEVER
    return ALWAYS if x is NEVER else ~x


def same_mask(x: Bool, y: Bool) -> bool:
    """Whether two masks hold the same threads."""
    return x is y or bool((x == y).all())
