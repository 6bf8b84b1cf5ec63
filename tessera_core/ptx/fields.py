"""Bit strings put together from pieces of pointers and numbers: what keeps a pointer whole through halves, bytes and
tags. An :class:`Unknown` carries its pieces, least significant first, as long as all of them are known.
"""

from __future__ import annotations

from tessera_core.ptx.arithmetic import parts_disjoint, product, refit
from tessera_core.ptx.values import (
    NO_BASE,
    NUMBER,
    Field,
    Known,
    Shape,
    Unknown,
    Value,
    add,
    constant,
    elementwise,
    known,
    mixed,
    unknown,
    wrap,
)

# Allocations start at multiples of this many bytes, so that the low bits of an address are those of its offset.
BASE_ALIGNMENT = 256

_FIELDS_LIMIT = 16

Fields = tuple[Field, ...]


def fields_of(value: Value, width: int) -> Fields | None:
    """The low ``width`` bits of a value as pieces, None where they are not known."""
    if isinstance(value, Known):
        return (Field(value, 0, width),)
    if isinstance(value, Unknown) and sum(field.bits for field in value.fields) >= width:
        return slice_fields(value.fields, 0, width)
    return None


def slice_fields(fields: Fields, start: int, bits: int) -> Fields:
    """``bits`` bits from ``start`` on; both lie within the pieces."""
    found: list[Field] = []
    at = 0
    for field in fields:
        low, high = max(start, at), min(start + bits, at + field.bits)
        if low < high:
            found.append(Field(field.source, field.start + low - at, high - low))
        at += field.bits
    return tuple(found)


def zeros(bits: int) -> Fields:
    """``bits`` zero bits."""
    return (Field(constant(0), 0, bits),) if bits else ()


def join_fields(shape: Shape, fields: Fields, width: int) -> Value:
    """The value that the pieces make up together; they cover ``width`` bits."""
    pieces = _merged(fields)
    bases = frozenset(field.source.base for field in pieces) - NUMBER
    if not bases and width <= 64:
        return _number(shape, pieces, width)
    if len(pieces) > _FIELDS_LIMIT:
        return Unknown(bases or NUMBER, None, None)
    if width > 64:
        return Unknown(bases or NUMBER, None, None, pieces)
    last = pieces[-1]
    if last.source.base != NO_BASE and last.start + last.bits == 64 and width == 64:
        if last.start == 0:
            return last.source
        if last.source.base >= 0 and BASE_ALIGNMENT >> last.start and len(bases) == 1:
            low = _number(shape, (*pieces[:-1], *zeros(1)), last.start + 1)
            if isinstance(low, Known):
                return add(shape, aligned(shape, last.source, last.start), low, 64)
    return Unknown(bases, None, None, pieces)


def aligned(shape: Shape, pointer: Known, bits: int) -> Value:
    """A pointer with its low ``bits`` bits cleared: those of its offset, since the base is aligned."""
    mask = -(1 << bits)
    number = Known(NO_BASE, pointer.block, pointer.thread, pointer.low, pointer.high)
    found: Value
    if pointer.block.size == 1 or pointer.thread.size == 1 or not bits:
        found = elementwise(shape, lambda x: x & mask, (number,), 64)
    elif not (pointer.block & ~mask).any():
        found = known(pointer.block, pointer.thread & mask)
    elif not (pointer.thread & ~mask).any():
        found = known(pointer.block & mask, pointer.thread)
    else:
        found = elementwise(shape, lambda x: x & mask, (number,), 64)
    if not isinstance(found, Known):
        return Unknown(frozenset({pointer.base}), None, None)
    return Known(pointer.base, found.block, found.thread, found.low, found.high)


def select_bits(shape: Shape, value: Value, start: int, bits: int) -> Value:
    """Bits [start, start + bits) of a 64-bit value as a signed number of that width, or a piece of a pointer."""
    if isinstance(value, Known) and value.base == NO_BASE:
        if start == 0:
            return refit(shape, value, bits)
        return elementwise(shape, lambda x: wrap(x >> start, bits), (value,), bits)
    fields = fields_of(value, start + bits)
    if fields is None:
        return mixed((value,), bits)
    return join_fields(shape, slice_fields(fields, start, bits), bits)


def either_fields(x: Fields, y: Fields, inverting: bool) -> Fields | None:
    """``x | y`` (``x ^ y``) where in every bit at most one of them is not a known zero, or both are constant."""
    found: list[Field] = []
    at, end = 0, sum(field.bits for field in x)
    while at < end:
        first, second = slice_fields(x, at, end - at)[0], slice_fields(y, at, end - at)[0]
        bits = min(first.bits, second.bits)
        if _is_zero(second, bits):
            found.append(Field(first.source, first.start, bits))
        elif _is_zero(first, bits):
            found.append(Field(second.source, second.start, bits))
        else:
            one, other = _constant(first, bits), _constant(second, bits)
            if one is None or other is None:
                return None
            found.append(Field(constant(one ^ other if inverting else one | other), 0, bits))
        at += bits
        if len(found) > _FIELDS_LIMIT:
            return None
    return tuple(found)


def masked_fields(x: Fields, mask: int) -> Fields | None:
    """``x & mask`` for a constant mask."""
    found: list[Field] = []
    at, end = 0, sum(field.bits for field in x)
    while at < end:
        bit = mask >> at & 1
        to = at
        while to < end and mask >> to & 1 == bit:
            to += 1
        found.extend(slice_fields(x, at, to - at) if bit else zeros(to - at))
        at = to
        if len(found) > _FIELDS_LIMIT:
            return None
    return tuple(found)


def _is_zero(field: Field, bits: int) -> bool:
    return _constant(field, bits) == 0


def _constant(field: Field, bits: int) -> int | None:
    """The number that the first ``bits`` bits of a piece hold for every thread, if it is one."""
    source = field.source
    if source.base != NO_BASE or source.low != source.high:
        return None
    return source.low >> field.start & ((1 << bits) - 1)


def _merged(fields: Fields) -> Fields:
    found: list[Field] = []
    for field in fields:
        before = found[-1] if found else None
        if (
            before is not None
            and before.start + before.bits == field.start
            and _same(before.source, field.source)
        ):
            found[-1] = Field(field.source, before.start, before.bits + field.bits)
        elif field.bits:
            found.append(field)
    return tuple(found)


def _same(x: Known, y: Known) -> bool:
    if x is y:
        return True
    return x.low == x.high == y.low == y.high and x.base == y.base != NO_BASE


def _number(shape: Shape, fields: Fields, width: int) -> Value:
    """Pieces of numbers only, added up; the last one gives the sign."""
    total: Value = constant(0)
    at = 0
    for field in fields:
        if field.source.base != NO_BASE:
            return unknown(width)
        last = at + field.bits == width
        part = _part(shape, field.source, field.start, field.bits, signed=last)
        total = add(shape, total, product(shape, part, constant(1 << at), 64) if at else part, 64)
        at += field.bits
    if not isinstance(total, Known):
        return unknown(width)
    return refit(shape, total, width)


def _part(shape: Shape, value: Known, start: int, bits: int, signed: bool) -> Value:
    if signed:
        half = 1 << (bits - 1)
        if start == 0 and -half <= value.low and value.high < half:
            return value
        return elementwise(shape, lambda x: wrap(x >> start, bits), (value,), 64)
    mask = (1 << bits) - 1
    if start == 0 and value.low >= 0 and value.high <= mask:
        return value
    if parts_disjoint(value):
        return known(value.block >> start & mask, value.thread >> start & mask)
    return elementwise(shape, lambda x: x >> start & mask, (value,), 64)
