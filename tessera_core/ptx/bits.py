"""Transfer functions of logic, shifts and bit fields (PTX ISA 9.0, sections 9.7.1.14 to 9.7.1.22, 9.7.8, 9.7.9.21)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera_core.ptx.arithmetic import apply, numbers_of, operand, or_of, parts_disjoint, product, refit
from tessera_core.ptx.fields import (
    BASE_ALIGNMENT,
    aligned,
    either_fields,
    fields_of,
    join_fields,
    masked_fields,
    select_bits,
    slice_fields,
    zeros,
)
from tessera_core.ptx.predicates import combine
from tessera_core.ptx.values import (
    EITHER,
    NO_BASE,
    NUMBER,
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
    width_of,
    wrap,
)


def amount_of(value: Value) -> int | None:
    """The one number that a value is for all threads, None where it isn't."""
    return value.low if isinstance(value, Known) and is_constant(value) else None


def _pointed(*values: Value) -> bool:
    return any(bases_of(value) != NUMBER for value in values)


def shift_left(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``shl``: amounts beyond the width give zero."""
    width = width_of(parts[-1])
    amount = amount_of(sources[1])
    if amount is not None:
        amount &= 0xFFFFFFFF
        if amount >= width:
            return constant(0)
        fields = fields_of(sources[0], width) if _pointed(sources[0]) else None
        if fields is not None:
            return join_fields(shape, (*zeros(amount), *slice_fields(fields, 0, width - amount)), width)
        result = product(shape, sources[0], constant(1 << amount) if amount < 63 else unknown(64), width)
        if isinstance(result, Known) or not isinstance(sources[0], Known):
            return result
    return apply(shape, lambda x, y: _shifted_left(x, y, width), sources, width)


def _shifted_left(x: Int, y: Int, width: int) -> Int:
    amount = y & np.int64(0xFFFFFFFF)
    return np.where(amount >= width, np.int64(0), wrap(x << np.minimum(amount, np.int64(63)), width))


def shift_right(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``shr``: amounts beyond the width give zero or the sign."""
    width, is_signed = width_of(parts[-1]), parts[-1][0] == "s"
    shift = amount_of(sources[1])
    if shift is not None:
        shift &= 0xFFFFFFFF
        if shift >= width and not is_signed:
            return constant(0)
        shift = min(shift, width - 1)
        if _pointed(sources[0]):
            fields = None if is_signed else fields_of(sources[0], width)
            if fields is None:
                return mixed(sources, width)
            return join_fields(shape, (*slice_fields(fields, shift, width - shift), *zeros(shift)), width)
    value = operand(shape, sources[0], parts[-1].replace("b", "u"))
    if isinstance(value, Predicate) or bases_of(value) != NUMBER:
        return mixed(sources, width)
    if shift is None:
        nonnegative = value.low is not None and value.low >= 0 and value.high is not None
        within = Unknown(NUMBER, 0, value.high) if nonnegative else unknown(width)
        if not is_signed and isinstance(value, Unknown):
            return clip(within, width)
        least = np.int64(width - 1 if is_signed else 63)
        return apply(
            shape,
            lambda x, y: np.where(
                (y & 0xFFFFFFFF) >= width,
                np.int64(-is_signed) & (x >> np.int64(63)),
                x >> np.minimum(y & 0xFFFFFFFF, least),
            ),
            (value, sources[1]),
            width,
            clip(within, width),
        )
    if isinstance(value, Unknown):
        low = None if value.low is None else value.low >> shift
        high = (
            (1 << (width - shift)) - 1 if value.high is None and low is not None and low >= 0 else value.high
        )
        high = high if value.high is None or high is None else value.high >> shift
        return clip(Unknown(NUMBER, low, high), width)
    steps = np.int64(shift)
    if parts_disjoint(value):
        return refit(shape, known(value.block >> steps, value.thread >> steps), width)
    if not or_of(value.block) & ((1 << shift) - 1) or not or_of(value.thread) & ((1 << shift) - 1):
        # nothing is carried out of the bits that are lost
        return refit(shape, known(value.block >> steps, value.thread >> steps), width)
    return refit(shape, elementwise(shape, lambda x: x >> steps, (value,), width), width)


def _possible_bits(value: Known) -> int | None:
    """A mask of the bits that may be set, None for negative numbers."""
    if value.low < 0:
        return None
    if value.block.size == 1 or value.thread.size == 1:
        return or_of(value.block + value.thread)
    if parts_disjoint(value):
        return or_of(value.block) | or_of(value.thread)
    combined = or_of(value.block) | or_of(value.thread)
    lowest = combined & -combined
    return ((1 << value.high.bit_length()) - 1) & ~(lowest - 1) if combined else 0


def logic(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``and``, ``or`` and ``xor``."""
    operation = parts[0]
    if parts[-1] == "pred":
        return combine(shape, operation, sources)
    width = width_of(parts[-1])
    x, y = sources
    if isinstance(x, Predicate) or isinstance(y, Predicate):
        return unknown(width)
    if _pointed(x, y):
        return _tagged(shape, operation, x, y, width)
    numbers = numbers_of(x, y)
    if numbers is None:
        return _bounded(operation, x, y, width)
    x, y = numbers
    if y.low != y.high:
        x, y = y, x
    if operation in ("or", "xor"):
        left, right = _possible_bits(x), _possible_bits(y)
        if left is not None and right is not None and left & right == 0:
            return add(shape, x, y, width)
    if operation == "and" and y.low == y.high:
        mask = np.int64(y.low)
        if parts_disjoint(x):
            return known(x.block & mask, x.thread & mask)
        if mask < 0 and mask & -mask == -mask:
            # a multiple of the alignment in either part is not touched by clearing the bits below it
            low = int(-mask) - 1
            if not or_of(x.block) & low or not or_of(x.thread) & low:
                return known(x.block & mask, x.thread & mask)
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation]
    return elementwise(shape, function, (x, y), width)


def _tagged(shape: Shape, operation: str, x: Value, y: Value, width: int) -> Value:
    """Logic on a pointer or a piece of one, and a constant or a piece that it shares no bit with."""
    if not _pointed(x):
        x, y = y, x
    mask = amount_of(y)
    if isinstance(x, Known) and x.base >= 0 and width == 64 and mask is not None:
        # the low bits of the address are those of its offset
        offset = Known(NO_BASE, x.block, x.thread, x.low, x.high)
        if 0 <= mask < BASE_ALIGNMENT:
            low = logic(shape, (operation, "b64"), (offset, y))
            return low if operation == "and" else add(shape, constant(0, x.base), low, 64)
        if operation == "and" and -BASE_ALIGNMENT <= mask < 0:
            if mask & -mask == -mask:
                return aligned(shape, x, (-mask).bit_length() - 1)
            return add(shape, constant(0, x.base), logic(shape, (operation, "b64"), (offset, y)), 64)
    first, second = fields_of(x, width), fields_of(y, width)
    found = None
    if first is not None and second is not None:
        if operation != "and":
            found = either_fields(first, second, operation == "xor")
        elif mask is not None:
            found = masked_fields(first, mask)
    return mixed((x, y), width) if found is None else join_fields(shape, found, width)


def _bounded(operation: str, x: Known | Unknown, y: Known | Unknown, width: int) -> Value:
    """Bounds of a result of unknown numbers: a mask that is not negative bounds ``and``, a power of two the others."""
    highs = [
        value.high for value in (x, y) if value.low is not None and value.low >= 0 and value.high is not None
    ]
    if operation == "and" and highs:
        return Unknown(NUMBER, 0, min(highs))
    if operation != "and" and len(highs) == 2:
        return clip(Unknown(NUMBER, 0, (1 << max(highs).bit_length()) - 1), width)
    return unknown(width)


def complement(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``not``."""
    if parts[-1] == "pred":
        value = sources[0]
        return Predicate(value.false, value.true) if isinstance(value, Predicate) else EITHER
    return add(shape, constant(-1), sources[0], width_of(parts[-1]), -1)


def convert(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``cvt`` among integers, wrapping or, with ``.sat``, clamped."""
    to, origin = width_of(parts[-2]), width_of(parts[-1])
    if not to or not origin or len(sources) > 1:
        return mixed(sources, to or 64)
    value = sources[0]
    if _pointed(value):
        return _convert_pieces(shape, value, parts[-2], parts[-1])
    if isinstance(value, Predicate):
        return unknown(to)
    value = operand(
        shape, fit(value, origin, shape) if isinstance(value, Known) else clip(value, origin), parts[-1]
    )
    if isinstance(value, Predicate):
        return unknown(to)
    if "sat" in parts:
        low, high = (0, (1 << to) - 1) if parts[-2][0] == "u" else (-(1 << (to - 1)), (1 << (to - 1)) - 1)
        if isinstance(value, Known):
            low, high = max(low, -(1 << 63)), min(high, (1 << 63) - 1)
            return refit(shape, elementwise(shape, lambda x: np.clip(x, low, high), (value,), to + 1), to)
        least = low if value.low is None else min(max(value.low, low), high)
        most = high if value.high is None else min(max(value.high, low), high)
        return clip(Unknown(NUMBER, least, most), to)
    if isinstance(value, Unknown):
        return clip(value, to)
    return refit(shape, value, to)


def _convert_pieces(shape: Shape, value: Value, to: str, origin: str) -> Value:
    """Truncation and zero extension of a pointer or a piece of one."""
    width, before = width_of(to), width_of(origin)
    if width >= 64 and before >= 64:
        return value
    fields = fields_of(value, min(width, before))
    if fields is None or (width > before and origin[0] == "s"):
        return mixed((value,), width)
    return join_fields(shape, (*fields, *zeros(max(0, width - before))), width)


def extract(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``bfe``: a bit field, extended with or without its sign."""
    kind, width = parts[-1], width_of(parts[-1])
    value, position, length = sources
    start, count = amount_of(position), amount_of(length)
    if start is not None and count is not None:
        start, count = start & 0xFF, count & 0xFF
        if count > 0 and start + count <= width:
            if kind[0] == "s":
                return select_bits(shape, value, start, count)
            if _pointed(value):
                fields = fields_of(value, width)
                if fields is None:
                    return mixed(sources, width)
                return join_fields(shape, (*slice_fields(fields, start, count), *zeros(width - count)), width)
            field = shift_right(shape, ("shr", f"u{width}"), (value, constant(start)))
            return (
                field
                if count == width
                else logic(shape, ("and", f"b{width}"), (field, constant((1 << count) - 1)))
            )
    return apply(shape, lambda x, y, z: _extracted(x, y, z, width, kind[0] == "s"), sources, width)


def _extracted(x: Int, position: Int, length: Int, width: int, is_signed: bool) -> Int:
    start, count = position & np.int64(0xFF), length & np.int64(0xFF)
    bits = np.uint64((1 << width) - 1) & x.astype(np.uint64)
    end = np.minimum(start + count, width)
    field = right(bits, start) & low_ones(end - start)
    if is_signed:
        sign = right(bits, np.clip(start + count - 1, 0, width - 1)) & np.uint64(1)
        field = np.where((sign == 1) & (count > 0), field | ~low_ones(np.maximum(end - start, 0)), field)
    return wrap(np.where(count == 0, np.uint64(0), field).astype(np.int64), width)


def right(x: Any, amount: Any) -> Any:
    """Logical shift right where amounts beyond 63 give zero."""
    return np.where(amount > 63, np.uint64(0), x >> np.minimum(amount, 63).astype(np.uint64))


def low_ones(count: Any) -> Any:
    """``count`` low bits set; none for a negative count."""
    count = np.clip(count, 0, 64)
    return np.where(
        count == 0, np.uint64(0), np.uint64((1 << 64) - 1) >> (64 - np.maximum(count, 1)).astype(np.uint64)
    )


def insert(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``bfi``: a bit field put into a word."""
    width = width_of(parts[-1])
    start, count = amount_of(sources[2]), amount_of(sources[3])
    if start is not None and count is not None:
        start = start & 0xFF
        count = min(count & 0xFF, max(0, width - start))
        if not count:
            return sources[1]
        inner, outer = fields_of(sources[0], count), fields_of(sources[1], width)
        if inner is not None and outer is not None:
            end = start + count
            pieces = (*slice_fields(outer, 0, start), *inner, *slice_fields(outer, end, width - end))
            return join_fields(shape, pieces, width)
    return apply(shape, lambda x, y, u, v: _inserted(x, y, u, v, width), sources, width)


def _inserted(x: Int, y: Int, position: Int, length: Int, width: int) -> Int:
    start, count = position & np.int64(0xFF), length & np.int64(0xFF)
    mask = low_ones(np.minimum(start + count, width)) & ~low_ones(np.minimum(start, width))
    moved = np.where(start > 63, np.uint64(0), x.astype(np.uint64) << np.minimum(start, 63).astype(np.uint64))
    return wrap(((y.astype(np.uint64) & ~mask) | (moved & mask)).astype(np.int64), width)


def funnel(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``shf``: 32 bits out of a pair of words."""
    clamps, to_left = "clamp" in parts, "l" in parts
    amount = amount_of(sources[2])
    if amount is not None:
        amount = min(amount & 0xFFFFFFFF, 32) if clamps else amount & 31
        low, high = fields_of(sources[0], 32), fields_of(sources[1], 32)
        if low is not None and high is not None:
            return join_fields(shape, slice_fields((*low, *high), 32 - amount if to_left else amount, 32), 32)

    def shifted(x: Int, y: Int, by: Int) -> Int:
        pair = (x.astype(np.uint64) & np.uint64(0xFFFFFFFF)) | (y.astype(np.uint64) << np.uint64(32))
        steps = np.minimum(by & np.int64(0xFFFFFFFF), 32) if clamps else by & np.int64(31)
        return wrap(right(pair, 32 - steps if to_left else steps).astype(np.int64), 32)

    return apply(shape, shifted, sources, 32)
