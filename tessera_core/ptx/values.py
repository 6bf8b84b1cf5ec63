"""What the interpreter knows of a register, for all threads of a group of blocks at once.

A :class:`Known` value is exact for every thread: ``base + block[i] + thread[j]``, where i runs over the blocks and
j over the threads of a block. Addresses of real kernels nearly always have this form, so that a launch of millions
of threads costs two short arrays a register; where they don't, the sum is laid out densely while it is small. An
:class:`Unknown` value is bounded by an interval if at all, and remembers which allocations it may point into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

NO_BASE = -1  # a plain number, as opposed to a pointer into a buffer
ZERO: Int = np.zeros((1, 1), dtype=np.int64)
ALWAYS: Bool = np.ones((1, 1), dtype=np.bool_)
NEVER: Bool = np.zeros((1, 1), dtype=np.bool_)

# Sums of block and thread parts are laid out as one array only up to this many elements (8 MB of int64); beyond it
# the blocks are first divided into groups.
DENSE_ELEMENTS_LIMIT = 1 << 20


class BlocksDiffer(Exception):  # noqa: N818 - a signal between our own parts, not an error
    """Signal: the blocks of this group must be interpreted apart. ``classes`` has one integer per block."""

    def __init__(self, classes: Int) -> None:
        super().__init__()
        self.classes = classes


@dataclass(frozen=True, slots=True)
class Known:
    """``base + block + thread`` by broadcasting: ``block`` is (1, 1), (blocks, 1) or dense (blocks, threads),
    ``thread`` is (1, 1) or (1, threads). ``low`` and ``high`` bound the number (both are attained)."""

    base: int
    block: Int
    thread: Int
    low: int
    high: int


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """Bits [start, start + bits) of ``source``, as part of a longer bit string."""

    source: Known
    start: int
    bits: int


@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """Any of ``bases`` plus any number in ``[low, high]`` (None: unbounded). ``fields``: the same bits exactly, as
    pieces of pointers and numbers, least significant first, where they are known (`fields.py`)."""

    bases: frozenset[int]
    low: int | None
    high: int | None
    fields: tuple[Field, ...] = ()


@dataclass(frozen=True, slots=True)
class Predicate:
    """Per thread, whether it can be true and whether it can be false, as broadcastable arrays."""

    true: Bool
    false: Bool


Value = Known | Unknown | Predicate

_WIDTHS = frozenset({"8", "16", "32", "64", "128"})

NUMBER = frozenset({NO_BASE})
EITHER = Predicate(ALWAYS, ALWAYS)


@dataclass(frozen=True, slots=True)
class Shape:
    """The group of blocks under interpretation. ``divisible``: whether :class:`BlocksDiffer` may be raised."""

    blocks: int
    threads: int
    divisible: bool

    def dense_allowed(self) -> bool:
        """Whether one array per register over all threads is small enough."""
        return self.blocks * self.threads <= DENSE_ELEMENTS_LIMIT

    def divide(self) -> None:
        """Ask for smaller groups, where that is allowed and would help."""
        if self.divisible and self.blocks > 1:
            width = max(1, DENSE_ELEMENTS_LIMIT // self.threads)
            raise BlocksDiffer(np.arange(self.blocks, dtype=np.int64) // width)


def known(block: Int, thread: Int = ZERO, base: int = NO_BASE) -> Known:
    """A known value with its bounds computed."""
    low = int(block.min()) + int(thread.min())
    return Known(base, block, thread, low, int(block.max()) + int(thread.max()))


def constant(value: int, base: int = NO_BASE) -> Known:
    """The same number for every thread; beyond 63 bits, the signed number of the same 64 bits."""
    value = (value + (1 << 63)) % (1 << 64) - (1 << 63)
    return Known(base, np.full((1, 1), value, dtype=np.int64), ZERO, value, value)


def unknown(width: int = 64, bases: frozenset[int] = NUMBER) -> Unknown:
    """Nothing known but the width in bits."""
    if bases != NUMBER or not 0 < width < 64:
        return Unknown(bases, None, None)
    return Unknown(bases, -(1 << (width - 1)), (1 << (width - 1)) - 1)


def bases_of(value: Value) -> frozenset[int]:
    """Allocations that a value may point into."""
    if isinstance(value, Known):
        return frozenset({value.base})
    return value.bases if isinstance(value, Unknown) else NUMBER


def mixed(values: tuple[Value, ...], width: int = 64) -> Unknown:
    """An unknown result computed from ``values``: it may point wherever one of them does."""
    pointers = frozenset[int]().union(*(bases_of(value) for value in values)) - NUMBER
    return unknown(width, pointers or NUMBER)


def is_constant(value: Value) -> bool:
    """Whether a value is one known number."""
    return isinstance(value, Known) and value.base == NO_BASE and value.low == value.high


def wrap(values: Int, width: int) -> Int:
    """Reduce to the signed range of ``width`` bits."""
    if width >= 64:
        return values
    half = np.int64(1 << (width - 1))
    return ((values + half) & np.int64((1 << width) - 1)) - half


def fit(value: Known, width: int, shape: Shape) -> Value:
    """Bring a sum into the signed range of ``width`` bits, exactly."""
    half = 1 << (width - 1)
    if -half <= value.low and value.high < half:
        return value
    if value.base != NO_BASE:
        return Unknown(frozenset({value.base}), None, None)
    turns = (value.low + half) >> width
    if width >= 64:
        return unknown(64)  # past 64 bits the arrays themselves may have wrapped: their bounds mean nothing
    if turns == (value.high + half) >> width and -(1 << 63) <= turns << width < 1 << 63:
        return known(value.block - np.int64(turns << width), value.thread)
    return elementwise(shape, lambda x: wrap(x, width), (value,), width)


def unsigned(value: Value, width: int, shape: Shape) -> Value:
    """Reinterpret a number in its signed range as unsigned. 64-bit numbers beyond 2**63 become unknown."""
    if isinstance(value, Predicate):
        return unknown(width)
    if isinstance(value, Unknown):
        if value.bases == NUMBER and value.low is not None and value.low >= 0 and value.high is not None:
            return value
        return (
            Unknown(value.bases, 0, (1 << width) - 1)
            if value.bases == NUMBER
            else Unknown(value.bases, None, None)
        )
    if value.low >= 0 or value.base != NO_BASE:
        return value
    if width >= 64:
        return Unknown(NUMBER, 0, None)
    if value.high < 0:
        return known(value.block + np.int64(1 << width), value.thread)
    mask = np.int64((1 << width) - 1)
    return elementwise(shape, lambda x: x & mask, (value,), width + 1)


def elementwise(shape: Shape, function: Callable[..., Any], values: tuple[Known, ...], width: int) -> Value:
    """Apply an array function to plain numbers, over blocks, over threads or densely, whichever suffices."""
    if all(value.thread.size == 1 for value in values):
        return known(function(*(value.block + value.thread for value in values)))
    if all(value.block.size == 1 for value in values):
        return known(ZERO, function(*(value.block + value.thread for value in values)))
    if not shape.dense_allowed():
        shape.divide()
        return unknown(width)
    full = (shape.blocks, shape.threads)
    return known(function(*(np.broadcast_to(value.block + value.thread, full) for value in values)))


def add(shape: Shape, x: Value, y: Value, width: int, sign: int = 1) -> Value:
    """``x + y`` or, with ``sign`` -1, ``x - y``; a pointer plus a number stays a pointer."""
    if isinstance(x, Predicate) or isinstance(y, Predicate):
        return unknown(width)
    if isinstance(x, Known) and isinstance(y, Known):
        if sign < 0:
            if x.base == y.base:
                base = NO_BASE
            elif y.base == NO_BASE:
                base = x.base
            else:
                return mixed((x, y), width)
            y = Known(base, -y.block, -y.thread, -y.high, -y.low)
        elif x.base != NO_BASE and y.base != NO_BASE:
            return mixed((x, y), width)
        else:
            base = x.base if y.base == NO_BASE else y.base
        total = Known(base, x.block + y.block, x.thread + y.thread, x.low + y.low, x.high + y.high)
        if total.block.shape[1] > 1 and total.thread.size > 1:
            total = known(total.block + total.thread, ZERO, base)
        elif (
            min(x.block.size, y.block.size) > 1
            or min(x.thread.size, y.thread.size) > 1
            or total.block.shape[1] > 1
        ):
            # both vary together, so that the sum of the bounds need not be attained
            total = known(total.block, total.thread, base)
        return fit(total, width, shape)
    first, second = bases_of(x), bases_of(y)
    if first != NUMBER and second != NUMBER:
        return mixed((x, y), width)
    if sign < 0 and second != NUMBER:
        return mixed((x, y), width)
    bases = first if second == NUMBER else second
    (a, b), (c, d) = (x.low, x.high), (y.low, y.high)
    if sign < 0:
        c, d = (None if d is None else -d), (None if c is None else -c)
    low = None if a is None or c is None else a + c
    high = None if b is None or d is None else b + d
    return clip(Unknown(bases, low, high), width)


def clip(value: Unknown, width: int) -> Unknown:
    """Forget bounds that do not fit ``width`` bits (the number would have wrapped)."""
    half = 1 << (min(width, 64) - 1)
    if value.low is None or value.high is None or value.low < -half or value.high >= half:
        return unknown(width, value.bases)
    return value


def hull(old: Value, new: Value, widen: bool) -> Value:
    """The join of two values of one register. ``widen``: drop bounds that still move."""
    if isinstance(old, Predicate) or isinstance(new, Predicate):
        if isinstance(old, Predicate) and isinstance(new, Predicate):
            return EITHER if widen else Predicate(*_either(old, new))
        bases = bases_of(old) | bases_of(new)
        return EITHER if bases == NUMBER else Unknown(bases, None, None)
    if old is new or (isinstance(old, Known) and isinstance(new, Known) and _equal(old, new)):
        return old
    bases = bases_of(old) | bases_of(new)
    if isinstance(old, Unknown) and not old.fields and bases == old.bases and _within(new, old):
        return old
    if widen or old.low is None or new.low is None or old.high is None or new.high is None:
        return Unknown(bases, None, None)
    return Unknown(bases, min(old.low, new.low), max(old.high, new.high))


def _either(old: Predicate, new: Predicate) -> tuple[Bool, Bool]:
    if any(array.size > 1 for array in (old.true, old.false, new.true, new.false)):
        return (ALWAYS, ALWAYS) if not _same(old, new) else (old.true, old.false)
    return old.true | new.true, old.false | new.false


def _same(old: Predicate, new: Predicate) -> bool:
    return np.array_equal(old.true, new.true) and np.array_equal(old.false, new.false)


def _equal(x: Known, y: Known) -> bool:
    if (x.base, x.low, x.high) != (y.base, y.low, y.high):
        return False
    return np.array_equal(x.block, y.block) and np.array_equal(x.thread, y.thread)


def _within(inner: Known | Unknown, outer: Unknown) -> bool:
    if outer.low is None or outer.high is None:
        return True
    return (
        inner.low is not None
        and inner.high is not None
        and outer.low <= inner.low
        and inner.high <= outer.high
    )


def width_of(type_name: str) -> int:
    """Bits of an integer type, 0 for any other type."""
    return int(type_name[1:]) if type_name[:1] in ("s", "u", "b") and type_name[1:] in _WIDTHS else 0
