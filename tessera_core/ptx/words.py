"""Transfer functions that look at every bit of a word: permutations, truth tables, counts and searches (PTX ISA 9.0,
sections 9.7.1.12 to 9.7.1.22, 9.7.8.6 and 9.7.9.7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tessera_core.ptx.arithmetic import apply, refit
from tessera_core.ptx.bits import amount_of, complement, logic, low_ones, right
from tessera_core.ptx.fields import fields_of, join_fields, slice_fields
from tessera_core.ptx.values import NUMBER, Int, Shape, Unknown, Value, constant, mixed, width_of, wrap

# Bytes that each mode of prmt picks, least significant first, for each value of its selector.
_PERMUTATIONS: Mapping[str, tuple[tuple[int, int, int, int], ...]] = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def permute(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``prmt``: four bytes chosen out of eight, in its default and named modes."""
    table = _PERMUTATIONS.get(parts[-1])
    selector = amount_of(sources[2])
    if selector is not None:
        chosen = table[selector & 3] if table else tuple(selector >> 4 * i & 15 for i in range(4))
        low, high = fields_of(sources[0], 32), fields_of(sources[1], 32)
        if low is not None and high is not None and max(chosen) < 8:
            pieces = tuple(field for byte in chosen for field in slice_fields((*low, *high), 8 * byte, 8))
            return join_fields(shape, pieces, 32)

    def permuted(x: Int, y: Int, select: Int) -> Int:
        pair = (x.astype(np.uint64) & np.uint64(0xFFFFFFFF)) | (y.astype(np.uint64) << np.uint64(32))
        result: Any = np.uint64(0)
        for i in range(4):
            if table:
                nibble: Any = np.array([row[i] for row in table], dtype=np.int64)[select & 3]
            else:
                nibble = select >> np.int64(4 * i) & np.int64(15)
            byte = right(pair, 8 * (nibble & 7)) & np.uint64(0xFF)
            sign = np.where(byte >> np.uint64(7) == 1, np.uint64(0xFF), np.uint64(0))
            result = result | np.where(nibble > 7, sign, byte) << np.uint64(8 * i)
        return wrap(result.astype(np.int64), 32)

    return apply(shape, permuted, sources, 32)


def table_logic(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``lop3``: any Boolean function of three words, by its truth table."""
    table = amount_of(sources[3])
    if table is None:
        return mixed(sources, 32)
    words = sources[:3]
    for index, word in enumerate(words):
        mask = amount_of(word)
        if mask is not None:
            return _two_words(
                shape, table & 0xFF, index, mask, tuple(w for i, w in enumerate(words) if i != index)
            )

    def looked_up(x: Int, y: Int, z: Int) -> Int:
        result: Any = np.int64(0)
        for row in range(8):
            if table >> row & 1:
                result = result | (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
        found: Int = result + (x & np.int64(0))
        return found

    simple = {0x80: "and", 0xFE: "or", 0x96: "xor"}.get(table & 0xFF)
    if simple is not None:
        first = logic(shape, (simple, "b32"), words[:2])
        return logic(shape, (simple, "b32"), (first, words[2]))
    return apply(shape, looked_up, words, 32)


def _two_words(shape: Shape, table: int, fixed: int, mask: int, words: tuple[Value, ...]) -> Value:
    """The truth table where word ``fixed`` is the constant ``mask``: one function of two words where it has ones,
    another one where it has zeros."""
    result: Value = constant(0)
    for bit, where in ((1, mask), (0, ~mask)):
        rows = 0
        for first in (0, 1):
            for second in (0, 1):
                place = [first, second]
                place.insert(fixed, bit)
                rows |= (table >> (place[0] << 2 | place[1] << 1 | place[2]) & 1) << (first << 1 | second)
        part = logic(
            shape,
            ("and", "b32"),
            (_of_two(shape, rows, words[0], words[1]), refit(shape, constant(where), 32)),
        )
        result = logic(shape, ("or", "b32"), (result, part))
    return result


def _of_two(shape: Shape, rows: int, x: Value, y: Value) -> Value:
    """One of the sixteen functions of two words; bit ``2 * x + y`` of ``rows`` is its value."""
    if rows & 1:
        return complement(shape, ("not", "b32"), (_of_two(shape, rows ^ 15, x, y),))
    if rows == 0:
        return constant(0)
    if rows == 10:
        return y
    if rows == 12:
        return x
    simple = {8: "and", 14: "or", 6: "xor"}.get(rows)
    if simple is not None:
        return logic(shape, (simple, "b32"), (x, y))
    kept, cleared = (y, x) if rows == 2 else (x, y)
    return logic(shape, ("and", "b32"), (kept, complement(shape, ("not", "b32"), (cleared,))))


def _counted(function: Callable[[Any, int], Any], least: int, most: int) -> Callable[..., Value]:
    """A transfer function for an instruction that looks at the bits of one word and gives a small number."""

    def transfer(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
        width = width_of(parts[-1])
        mask = np.uint64((1 << width) - 1)
        within = Unknown(NUMBER, least, width if most < 0 else most)
        return apply(
            shape,
            lambda x: function(x.astype(np.uint64) & mask, width).astype(np.int64),
            sources[:1],
            32,
            within,
        )

    return transfer


def _length(x: Any, width: int) -> Any:
    """One more than the place of the highest bit that is set, 0 for none."""
    found = np.zeros(x.shape, dtype=np.uint64)
    for step in (32, 16, 8, 4, 2, 1):
        above = x >> np.uint64(step) != 0
        found = found + np.where(above, np.uint64(step), np.uint64(0))
        x = np.where(above, x >> np.uint64(step), x)
    return found + x


population = _counted(lambda x, width: np.bitwise_count(x), 0, -1)
leading_zeros = _counted(lambda x, width: width - _length(x, width).astype(np.int64), 0, -1)
is_zero = _counted(lambda x, width: x == 0, 0, 1)


def find_highest(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``bfind``: the place of the highest bit that differs from the sign, as a shift amount where asked for."""
    kind, width = parts[-1], width_of(parts[-1])
    mask = np.uint64((1 << width) - 1)

    def highest(x: Int) -> Int:
        bits = np.where((kind[0] == "s") & (x < 0), ~x, x).astype(np.uint64) & mask
        found = _length(bits, width).astype(np.int64) - 1
        place: Int = np.where(found < 0, found, width - 1 - found) if "shiftamt" in parts else found
        return place

    return apply(shape, highest, sources, 32, Unknown(NUMBER, -1, width - 1))


def reverse(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``brev``: the bits in the opposite order."""
    width = width_of(parts[-1])

    def reversed_bits(x: Int) -> Int:
        bits = x.astype(np.uint64)
        for step, mask in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
            low, by = np.uint64(mask), np.uint64(step)
            bits = (bits >> by & low) | ((bits & low) << by)
        return wrap((bits.byteswap() >> np.uint64(64 - width)).astype(np.int64), width)

    return apply(shape, reversed_bits, sources, width)


def nth_set(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``fns``: the place of the n-th bit set, counted up or down from a place."""

    def found(mask: Int, base: Int, offset: Int) -> Int:
        mask, base, offset = np.broadcast_arrays(mask, base & np.int64(0xFFFFFFFF), offset)
        upwards = offset >= 0
        left = np.where(offset == 0, 1, np.abs(offset))
        result = np.full(mask.shape, -1, dtype=np.int64)
        for step in range(32):
            place = np.where(upwards, base + step, base - step)
            is_set = (place >= 0) & (place < 32) & (mask >> np.clip(place, 0, 63) & 1 == 1)
            if step:
                is_set &= offset != 0
            left = left - is_set
            result = np.where((left == 0) & is_set & (result < 0), place, result)
        return result

    return apply(shape, found, sources, 32, Unknown(NUMBER, -1, 31))


def bit_mask(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``bmsk``: a run of ones at a place."""
    limit = _limited("clamp" in parts)
    return apply(shape, lambda x, y: wrap((low_ones(limit(y)).astype(np.int64)) << limit(x), 32), sources, 32)


def extend(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``szext``: the low bits of a word, extended with or without their sign."""
    limit, is_signed = _limited("clamp" in parts), parts[-1][0] == "s"

    def extended(x: Int, bits: Int) -> Int:
        count = limit(bits)
        low = x & low_ones(count).astype(np.int64)
        half = np.where(count > 0, np.int64(1) << np.maximum(count - 1, 0), 0)
        return wrap((low ^ half) - half if is_signed else low, 32)

    return apply(shape, extended, sources, 32)


def _limited(clamps: bool) -> Callable[[Any], Any]:
    """How an instruction reads an amount: as 32 where it is more, or modulo 32."""
    if clamps:
        return lambda amount: np.minimum(amount & np.int64(0xFFFFFFFF), 32)
    return lambda amount: amount & np.int64(31)
