"""Transfer functions of integer arithmetic (PTX ISA 9.0, sections 9.7.1 and 9.7.2), on the values of `values.py`.

Numbers are kept in the signed range of their register's width; unsigned instructions reinterpret their operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera_core.ptx.values import (
    NO_BASE,
    NUMBER,
    ZERO,
    Int,
    Known,
    Predicate,
    Shape,
    Unknown,
    Value,
    add,
    bases_of,
    clip,
    constant,
    elementwise,
    fit,
    is_constant,
    known,
    mixed,
    unknown,
    unsigned,
    width_of,
)

_CARRY = Unknown(NUMBER, 0, 1)


def numbers_of(*values: Value) -> tuple[Known, ...] | None:
    """The values as known plain numbers, or None."""
    found = tuple(value for value in values if isinstance(value, Known) and value.base == NO_BASE)
    return found if len(found) == len(values) else None


def operand(shape: Shape, value: Value, type_name: str) -> Value:
    """A source operand as an instruction of this type reads it."""
    return unsigned(value, width_of(type_name), shape) if type_name[0] == "u" else value


def refit(shape: Shape, value: Value, width: int) -> Value:
    """A result brought into the signed range of its width."""
    return fit(value, width, shape) if isinstance(value, Known) else value


def apply(
    shape: Shape,
    function: Callable[..., Any],
    sources: tuple[Value, ...],
    width: int,
    within: Value | None = None,
) -> Value:
    """``function`` of known numbers, thread by thread; of anything else ``within``, or any number of ``width`` bits."""
    numbers = numbers_of(*sources)
    if numbers is None:
        return mixed(sources, width) if within is None or bases_of(mixed(sources)) != NUMBER else within
    result = refit(shape, elementwise(shape, function, numbers, width), width)
    return result if isinstance(result, Known) or within is None else within


def total(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``add`` and ``sub``, ``addc`` and ``subc`` (whose third source is the carry)."""
    width = width_of(parts[-1])
    if not width:
        return mixed(sources)
    sign = -1 if parts[0] in ("sub", "subc") else 1
    if "sat" in parts:
        return _saturated(shape, sources[0], sources[1], width, sign)
    result = add(shape, sources[0], sources[1], width, sign)
    return add(shape, result, sources[2], width, sign) if len(sources) > 2 else result


def _saturated(shape: Shape, x: Value, y: Value, width: int, sign: int) -> Value:
    if width > 32 or bases_of(x) != NUMBER or bases_of(y) != NUMBER:
        return mixed((x, y), width)
    low, high = -(1 << (width - 1)), (1 << (width - 1)) - 1
    return _extremes(
        shape, _extremes(shape, add(shape, x, y, 64, sign), constant(high), min), constant(low), max
    )


def carry(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """What an instruction with ``.cc`` leaves in the carry: 0 or 1."""
    width = width_of(parts[-1])
    if parts[0] in ("mad", "madc"):
        sources = (multiply(shape, parts, sources[:2]), *sources[2:])
    numbers = numbers_of(*sources)
    if width != 32 or numbers is None:
        return _CARRY
    mask = np.int64((1 << 32) - 1)
    sign = np.int64(-1 if parts[0] in ("sub", "subc") else 1)

    def out(x: Int, y: Int, *was: Int) -> Int:
        moved: Int = ((x & mask) + sign * ((y & mask) + (was[0] if was else 0))) >> np.int64(32)
        return moved & np.int64(1)

    return elementwise(shape, out, numbers, 32)


def multiply(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``mul`` in its low, high and wide forms."""
    width = width_of(parts[-1])
    if not width:
        return mixed(sources)
    if "lo" in parts:
        return product(shape, sources[0], sources[1], width)
    if "wide" in parts:
        pair = tuple(operand(shape, value, parts[-1]) for value in sources[:2])
        return product(shape, pair[0], pair[1], 2 * width)
    if width > 32:
        high = _high_unsigned if parts[-1][0] == "u" else _high_signed
        return apply(shape, high, sources[:2], width, unknown(width))
    pair = tuple(operand(shape, value, parts[-1]) for value in sources[:2])
    bounds = _product_bounds(pair[0], pair[1])
    within = unknown(width) if bounds is None else Unknown(NUMBER, bounds[0] >> width, bounds[1] >> width)
    return apply(shape, lambda x, y: _high(x, y, width), pair, width, clip(within, width))


def _high(x: Int, y: Int, width: int) -> Int:
    # 32 x 32 bits may exceed a signed 64-bit product, so the upper half is built from 16-bit pieces
    low, high = y & np.int64(0xFFFF), y >> np.int64(16)
    product: Int = (x * high + ((x * low) >> np.int64(16))) >> np.int64(width - 16)
    return product


def _high_unsigned(x: Int, y: Int) -> Int:
    """Upper 64 bits of a 64 by 64 bit product, from 32-bit pieces."""
    a, b = x.astype(np.uint64), y.astype(np.uint64)
    half, mask = np.uint64(32), np.uint64((1 << 32) - 1)
    low = (a & mask) * (b & mask)
    first = (a >> half) * (b & mask) + (low >> half)
    second = (a & mask) * (b >> half) + (first & mask)
    high = (a >> half) * (b >> half) + (first >> half) + (second >> half)
    signed: Int = high.astype(np.int64)
    return signed


def _high_signed(x: Int, y: Int) -> Int:
    return _high_unsigned(x, y) - np.where(x < 0, y, 0) - np.where(y < 0, x, 0)


def _product_bounds(x: Value, y: Value) -> tuple[int, int] | None:
    if isinstance(x, Predicate) or isinstance(y, Predicate) or bases_of(x) != NUMBER or bases_of(y) != NUMBER:
        return None
    if x.low is None or x.high is None or y.low is None or y.high is None:
        return None
    ends = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    return min(ends), max(ends)


def product(shape: Shape, x: Value, y: Value, width: int) -> Value:
    """``x * y`` in ``width`` bits."""
    if isinstance(x, Predicate) or isinstance(y, Predicate):
        return unknown(width)
    if is_constant(x):
        x, y = y, x
    bounds = _product_bounds(x, y)
    if bounds is None:
        return mixed((x, y), width)
    low, high = bounds
    if isinstance(x, Unknown) or isinstance(y, Unknown):
        return clip(Unknown(NUMBER, low, high), width)
    if low < -(1 << 63) or high >= 1 << 63:
        return unknown(width)
    if is_constant(y):
        factor = np.int64(y.low)
        if _part_bound(x) * abs(y.low) >= 1 << 63:
            return unknown(width)
        return fit(Known(NO_BASE, x.block * factor, x.thread * factor, low, high), width, shape)
    return refit(shape, elementwise(shape, lambda a, b: a * b, (x, y), width), width)


def _part_bound(value: Known) -> int:
    """Largest magnitude in either part of a sum."""
    return max(abs(int(bound)) for part in (value.block, value.thread) for bound in (part.min(), part.max()))


def multiply_add(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``mad`` and ``madc``."""
    width = width_of(parts[-1])
    if not width:
        return mixed(sources)
    result = multiply(shape, parts, sources[:2])
    if "sat" in parts:
        return _saturated(shape, result, sources[2], width, 1)
    width = 2 * width if "wide" in parts else width
    result = add(shape, result, sources[2], width)
    return add(shape, result, sources[3], width) if len(sources) > 3 else result


def multiply_24(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``mul24`` and ``mad24``: of the low 24 bits of the factors."""
    half = np.int64(1 << 23 if parts[-1] == "s32" else 0)
    mask = np.int64((1 << 24) - 1)
    shift = np.int64(16 if "hi" in parts else 0)
    result = apply(
        shape,
        lambda x, y: ((((x + half) & mask) - half) * (((y + half) & mask) - half)) >> shift,
        sources[:2],
        32,
    )
    if len(sources) < 3:
        return result
    return (
        _saturated(shape, result, sources[2], 32, 1) if "sat" in parts else add(shape, result, sources[2], 32)
    )


def negate(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``neg``."""
    width = width_of(parts[-1])
    return add(shape, constant(0), sources[0], width, -1) if width else mixed(sources)


def absolute(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``abs``; the least number stays what it is."""
    width = width_of(parts[-1])
    if not width:
        return mixed(sources)
    value = sources[0]
    if (
        not isinstance(value, Unknown)
        or value.low is None
        or value.high is None
        or value.low == -(1 << (width - 1))
    ):
        return apply(shape, np.abs, sources, width)
    return (
        mixed(sources, width)
        if value.bases != NUMBER
        else Unknown(NUMBER, 0, max(abs(value.low), abs(value.high)))
    )


def difference(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``sad``: |a - b| + c."""
    width = width_of(parts[-1])
    pair = tuple(operand(shape, value, parts[-1]) for value in sources[:2])
    if any(isinstance(value, Predicate) or not _halfway(value) for value in pair):
        return mixed(sources, width)  # the difference itself might wrap
    return add(shape, apply(shape, lambda x, y: np.abs(x - y), pair, width), sources[2], width)


def _halfway(value: Known | Unknown) -> bool:
    """Whether a number leaves a bit of 64 to spare."""
    limit = 1 << 62
    return value.low is not None and value.high is not None and -limit <= value.low and value.high < limit


def dot(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``dp4a`` and ``dp2a``: c plus the products of packed bytes (of halves and bytes)."""
    wide, lanes = (16, 2) if parts[0] == "dp2a" else (8, 4)
    first = 2 if "hi" in parts else 0

    def lane(x: Int, index: int, bits: int, kind: str) -> Int:
        taken: Int = (x >> np.int64(index * bits)) & np.int64((1 << bits) - 1)
        half = np.int64(1 << (bits - 1))
        return taken if kind[0] == "u" else (taken ^ half) - half

    def summed(x: Int, y: Int, z: Int) -> Int:
        for i in range(lanes):
            z = z + lane(x, i, wide, parts[-2]) * lane(y, first + i, 8, parts[-1])
        return z

    return apply(shape, summed, sources[:3], 32)


def extreme(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``min`` and ``max``."""
    width = width_of(parts[-1])
    if not width:
        return mixed(sources)
    chosen = min if parts[0] == "min" else max
    result, *others = (_limited(operand(shape, source, parts[-1]), parts[-1]) for source in sources)
    for other in others:
        result = _extremes(shape, result, other, chosen)
    if "relu" in parts:
        result = _extremes(shape, result, constant(0), max)
    if isinstance(result, Unknown):
        return clip(result, width)
    return refit(shape, result, width)


def _limited(value: Value, type_name: str) -> Value:
    """An unknown signed number with the bounds of its type where it has none of its own: a clamp keeps one of them."""
    if not isinstance(value, Unknown) or value.bases != NUMBER or type_name[0] == "u":
        return value
    half = 1 << (width_of(type_name) - 1)
    if value.low is None or value.high is None or value.low < -half or value.high >= half:
        return Unknown(NUMBER, -half, half - 1)
    return value


def _extremes(shape: Shape, x: Value, y: Value, chosen: Callable[..., int]) -> Value:
    """The lesser or greater of two numbers of any width."""
    if isinstance(x, Predicate) or isinstance(y, Predicate) or bases_of(x) != NUMBER or bases_of(y) != NUMBER:
        return mixed((x, y))
    smallest = chosen is min
    numbers = numbers_of(x, y)
    if numbers is not None:
        first, second = numbers
        if first.high <= second.low or second.high <= first.low:
            lesser, greater = (first, second) if first.high <= second.low else (second, first)
            return lesser if smallest else greater
        return elementwise(shape, np.minimum if smallest else np.maximum, numbers, 64)
    lows = [bound for bound in (x.low, y.low) if bound is not None]
    highs = [bound for bound in (x.high, y.high) if bound is not None]
    # the lesser of two numbers is at most each of them, and at least both lower bounds
    low = chosen(lows) if lows and (len(lows) == 2 or not smallest) else None
    high = chosen(highs) if highs and (len(highs) == 2 or smallest) else None
    return Unknown(NUMBER, low, high)


def divide(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``div`` and ``rem``, towards zero."""
    width = width_of(parts[-1])
    if not width:
        return mixed(sources)
    x, y = (operand(shape, value, parts[-1]) for value in sources[:2])
    remainder = parts[0] == "rem"
    numbers = numbers_of(x, y)
    least = -(1 << 63)  # has no magnitude in 64 bits
    if numbers is None or _may_vanish(shape, numbers[1]) or least in (numbers[0].low, numbers[1].low):
        return _quotient_bounds(x, y, remainder, width)
    x, y = numbers
    if y.low == y.high and y.low > 0 and x.low >= 0 and x.block.size > 1 and x.thread.size > 1:
        divisor = np.int64(y.low)
        if not (x.block % divisor).any() and int(x.thread.min()) >= 0:
            if remainder:
                return refit(shape, known(ZERO, x.thread % divisor), width)
            return refit(shape, known(x.block // divisor, x.thread // divisor), width)
    return refit(
        shape, elementwise(shape, _truncated_remainder if remainder else _truncated, (x, y), width), width
    )


def _may_vanish(shape: Shape, value: Known) -> bool:
    if not value.low <= 0 <= value.high:
        return False
    return not shape.dense_allowed() or not (value.block + value.thread).all()


def _quotient_bounds(x: Value, y: Value, remainder: bool, width: int) -> Value:
    if isinstance(x, Predicate) or isinstance(y, Predicate) or bases_of(x) != NUMBER or bases_of(y) != NUMBER:
        return mixed((x, y), width)
    if x.low is None or x.high is None or y.low is None or y.high is None or y.low <= 0:
        return unknown(width)  # a division by zero gives anything
    if not remainder:
        ends = [_towards_zero(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
        return clip(Unknown(NUMBER, min(ends), max(ends)), width)
    limit = y.high - 1
    low = 0 if x.low >= 0 else max(x.low, -limit)
    return clip(Unknown(NUMBER, low, min(max(x.high, 0), limit)), width)


def _towards_zero(x: int, y: int) -> int:
    return x // y if x >= 0 else -(-x // y)


def _truncated(x: Int, y: Int) -> Int:
    quotient: Int = np.abs(x) // np.abs(y)
    return np.where((x < 0) != (y < 0), -quotient, quotient)


def _truncated_remainder(x: Int, y: Int) -> Int:
    return x - y * _truncated(x, y)


def or_of(values: Int) -> int:
    """Every bit that is set in some element."""
    return int(np.bitwise_or.reduce(values, axis=None))


def parts_disjoint(value: Known) -> bool:
    """Whether block and thread part share no bit, so that their sum is their union."""
    if value.low < 0 or int(value.block.min()) < 0 or int(value.thread.min()) < 0:
        return False
    return or_of(value.block) & or_of(value.thread) == 0
