"""What integer instructions compute, on the values of `values.py`: one transfer function per opcode family, found in
:data:`TRANSFERS`. An opcode without one gives an unknown result that may point wherever its operands do.

Numbers are kept in the signed range of their register's width; unsigned instructions reinterpret their operands.
Source: PTX ISA 9.0, sections 9.7.1 (integer arithmetic), 9.7.6 (comparison and selection), 9.7.8 (logic and shift).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tessera_core.ptx.predicates import choose, combine, compare
from tessera_core.ptx.values import (
    EITHER,
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

# Allocations start at multiples of this many bytes, so that the low bits of an address are those of its offset.
BASE_ALIGNMENT = 256

Transfer = Callable[[Shape, tuple[str, ...], tuple[Value, ...]], Value]


def evaluate(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """The result of the instruction with opcode ``parts`` on ``sources``."""
    transfer = TRANSFERS.get(parts[0])
    return mixed(sources) if transfer is None else transfer(shape, parts, sources)


def _numbers(*values: Value) -> tuple[Known, ...] | None:
    """The values as known plain numbers, or None."""
    found = tuple(value for value in values if isinstance(value, Known) and value.base == NO_BASE)
    return found if len(found) == len(values) else None


def _operand(shape: Shape, value: Value, type_name: str) -> Value:
    return unsigned(value, width_of(type_name), shape) if type_name[0] == "u" else value


def _move(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    return sources[0]


def _sum(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    width = width_of(parts[-1])
    if not width or "cc" in parts or "sat" in parts or parts[0] in ("addc", "subc"):
        return mixed(sources, width or 64)
    return add(shape, sources[0], sources[1], width, -1 if parts[0] == "sub" else 1)


def _multiply(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    width = width_of(parts[-1])
    if not width or "sat" in parts:
        return mixed(sources)
    if "wide" in parts:
        pair = tuple(_operand(shape, value, parts[-1]) for value in sources[:2])
        return _product(shape, pair[0], pair[1], 2 * width)
    if "lo" in parts:
        return _product(shape, sources[0], sources[1], width)
    numbers = _numbers(*(_operand(shape, value, parts[-1]) for value in sources[:2]))
    if numbers is None or width > 32:
        return mixed(sources, width)
    return _refit(shape, elementwise(shape, lambda x, y: _high(x, y, width), numbers, width), width)


def _high(x: Int, y: Int, width: int) -> Int:
    # 32 x 32 bits may exceed a signed 64-bit product, so the upper half is built from 16-bit pieces
    low, high = y & np.int64(0xFFFF), y >> np.int64(16)
    product: Int = (x * high + ((x * low) >> np.int64(16))) >> np.int64(width - 16)
    return product


def _product(shape: Shape, x: Value, y: Value, width: int) -> Value:
    if isinstance(x, Predicate) or isinstance(y, Predicate):
        return unknown(width)
    if is_constant(x):
        x, y = y, x
    if bases_of(x) != NUMBER or bases_of(y) != NUMBER:
        return mixed((x, y), width)
    assert not isinstance(x, Predicate) and not isinstance(y, Predicate)
    if x.low is None or x.high is None or y.low is None or y.high is None:
        return unknown(width)
    ends = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    low, high = min(ends), max(ends)
    if isinstance(x, Unknown) or isinstance(y, Unknown):
        return clip(Unknown(NUMBER, low, high), width)
    if low < -(1 << 63) or high >= 1 << 63:
        return unknown(width)
    if is_constant(y):
        factor = np.int64(y.low)
        if _part_bound(x) * abs(y.low) >= 1 << 63:
            return unknown(width)
        return fit(Known(NO_BASE, x.block * factor, x.thread * factor, low, high), width, shape)
    return _refit(shape, elementwise(shape, lambda a, b: a * b, (x, y), width), width)


def _part_bound(value: Known) -> int:
    """Largest magnitude in either part of a sum."""
    return max(abs(int(bound)) for part in (value.block, value.thread) for bound in (part.min(), part.max()))


def _refit(shape: Shape, value: Value, width: int) -> Value:
    return fit(value, width, shape) if isinstance(value, Known) else value


def _multiply_add(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    width = width_of(parts[-1])
    if not width or "cc" in parts or "sat" in parts or parts[0] == "madc":
        return mixed(sources)
    product = _multiply(shape, parts, sources[:2])
    return add(shape, product, sources[2], 2 * width if "wide" in parts else width)


def _shift_left(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    width = width_of(parts[-1])
    numbers = _numbers(*sources)
    if is_constant(sources[1]) and isinstance(sources[1], Known):
        amount = sources[1].low & 0xFFFFFFFF
        return constant(0) if amount >= width else _product(shape, sources[0], constant(1 << amount), width)
    if numbers is None or width > 32 or numbers[1].low < 0 or numbers[1].high > 31 or width < 32:
        return mixed(sources, width)
    return _refit(shape, elementwise(shape, lambda x, y: x << y, numbers, 64), width)


def _shift_right(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    width = width_of(parts[-1])
    value = _operand(shape, sources[0], parts[-1].replace("b", "u"))
    amount = sources[1]
    if (
        isinstance(value, Unknown)
        and value.bases == NUMBER
        and isinstance(amount, Known)
        and is_constant(amount)
    ):
        shift = min(amount.low, width - 1)
        if shift < 0 or value.low is None or value.high is None:
            return mixed(sources, width)
        return clip(Unknown(NUMBER, value.low >> shift, value.high >> shift), width)
    numbers = _numbers(value, amount)
    if numbers is None or numbers[1].low < 0:
        return mixed(sources, width)
    value, amount = numbers
    if amount.low == amount.high:
        if amount.low >= width and parts[-1][0] != "s":
            return constant(0)
        if _parts_disjoint(value):
            steps = np.int64(min(amount.low, width - 1))
            return _refit(shape, known(value.block >> steps, value.thread >> steps), width)
    if amount.high >= width:
        return mixed(sources, width)
    return _refit(shape, elementwise(shape, lambda x, y: x >> y, (value, amount), width), width)


def _or_of(values: Int) -> int:
    return int(np.bitwise_or.reduce(values, axis=None))


def _parts_disjoint(value: Known) -> bool:
    """Whether block and thread part share no bit, so that their sum is their union."""
    if value.low < 0 or int(value.block.min()) < 0 or int(value.thread.min()) < 0:
        return False
    return _or_of(value.block) & _or_of(value.thread) == 0


def _possible_bits(value: Known) -> int | None:
    """A mask of the bits that may be set, None for negative numbers."""
    if value.low < 0:
        return None
    if value.block.size == 1 or value.thread.size == 1:
        return _or_of(value.block + value.thread)
    if _parts_disjoint(value):
        return _or_of(value.block) | _or_of(value.thread)
    combined = _or_of(value.block) | _or_of(value.thread)
    lowest = combined & -combined
    return ((1 << value.high.bit_length()) - 1) & ~(lowest - 1) if combined else 0


def _logic(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    operation = parts[0]
    if parts[-1] == "pred":
        return combine(shape, operation, sources)
    width = width_of(parts[-1])
    x, y = sources
    if isinstance(x, Predicate) or isinstance(y, Predicate):
        return unknown(width)
    if operation == "and" and isinstance(x, Known) and x.base != NO_BASE and is_constant(y):
        assert isinstance(y, Known)
        return _align(shape, x, y.low)
    numbers = _numbers(x, y)
    if numbers is None:
        return _bounded_and(x, y, width) if operation == "and" else mixed(sources, width)
    x, y = numbers
    if y.low != y.high:
        x, y = y, x
    if operation in ("or", "xor"):
        left, right = _possible_bits(x), _possible_bits(y)
        if left is not None and right is not None and left & right == 0:
            return add(shape, x, y, width)
    if operation == "and" and y.low == y.high and _parts_disjoint(x):
        mask = np.int64(y.low)
        return known(x.block & mask, x.thread & mask)
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation]
    return elementwise(shape, function, (x, y), width)


def _align(shape: Shape, pointer: Known, mask: int) -> Value:
    """Clear low bits of a pointer: those of its offset, since the base is aligned."""
    if not -BASE_ALIGNMENT <= mask < 0 or (-mask) & (-mask - 1):
        return unknown(64, frozenset({pointer.base}))
    number = Known(NO_BASE, pointer.block, pointer.thread, pointer.low, pointer.high)
    aligned = _logic(shape, ("and", "b64"), (number, constant(mask)))
    return add(shape, constant(0, pointer.base), aligned, 64)


def _bounded_and(x: Value, y: Value, width: int) -> Value:
    """``x & mask`` of something unknown with a known non-negative mask lies in [0, mask]."""
    for mask in (x, y):
        if isinstance(mask, Known) and mask.low >= 0 and bases_of(x) == bases_of(y) == NUMBER:
            return Unknown(NUMBER, 0, mask.high)
    return mixed((x, y), width)


def _not(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    if parts[-1] == "pred":
        value = sources[0]
        return Predicate(value.false, value.true) if isinstance(value, Predicate) else EITHER
    return add(shape, constant(-1), sources[0], width_of(parts[-1]), -1)


def _negate(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    width = width_of(parts[-1])
    return add(shape, constant(0), sources[0], width, -1) if width else mixed(sources)


def _absolute(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    width, numbers = width_of(parts[-1]), _numbers(*sources)
    if numbers is None or not width:
        return mixed(sources)
    return _refit(shape, elementwise(shape, np.abs, numbers, width), width)


def _extreme(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    width = width_of(parts[-1])
    if not width:
        return mixed(sources)
    x, y = (_operand(shape, value, parts[-1]) for value in sources[:2])
    smallest = parts[0] == "min"
    if isinstance(x, Predicate) or isinstance(y, Predicate) or bases_of(x) != NUMBER or bases_of(y) != NUMBER:
        return mixed(sources, width)
    numbers = _numbers(x, y)
    if numbers is not None:
        first, second = numbers
        if first.high <= second.low or second.high <= first.low:
            lesser, greater = (first, second) if first.high <= second.low else (second, first)
            return _refit(shape, lesser if smallest else greater, width)
        return _refit(
            shape, elementwise(shape, np.minimum if smallest else np.maximum, numbers, width), width
        )
    choose = min if smallest else max
    lows, highs = (x.low, y.low), (x.high, y.high)
    low = None if None in lows else choose(value for value in lows if value is not None)
    high = None if None in highs else choose(value for value in highs if value is not None)
    if smallest and high is None:
        high = next((value for value in highs if value is not None), None)
    if not smallest and low is None:
        low = next((value for value in lows if value is not None), None)
    return clip(Unknown(NUMBER, low, high), width)


def _divide(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    width = width_of(parts[-1])
    if not width:
        return mixed(sources)
    x, y = (_operand(shape, value, parts[-1]) for value in sources[:2])
    remainder = parts[0] == "rem"
    numbers = _numbers(x, y)
    if numbers is None or (numbers[1].low <= 0 <= numbers[1].high):
        if remainder and isinstance(x, Unknown) and x.bases == NUMBER and is_constant(y):
            assert isinstance(y, Known)
            limit = abs(y.low) - 1
            return (
                Unknown(NUMBER, 0 if x.low is not None and x.low >= 0 else -limit, limit) if limit >= 0 else x
            )
        return mixed(sources, width)
    x, y = numbers
    if y.low == y.high and y.low > 0 and x.low >= 0 and x.block.size > 1 and x.thread.size > 1:
        divisor = np.int64(y.low)
        if not (x.block % divisor).any() and int(x.thread.min()) >= 0:
            if remainder:
                return _refit(shape, known(ZERO, x.thread % divisor), width)
            return _refit(shape, known(x.block // divisor, x.thread // divisor), width)
    return _refit(
        shape, elementwise(shape, _truncated_remainder if remainder else _truncated, (x, y), width), width
    )


def _truncated(x: Int, y: Int) -> Int:
    quotient: Int = np.abs(x) // np.abs(y)
    return np.where((x < 0) != (y < 0), -quotient, quotient)


def _truncated_remainder(x: Int, y: Int) -> Int:
    return x - y * _truncated(x, y)


def _convert(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    to, origin = width_of(parts[-2]), width_of(parts[-1])
    if not to or not origin or "sat" in parts:
        return mixed(sources, to or 64)
    value = sources[0]
    if to >= 64 and origin >= 64:
        return value
    if bases_of(value) != NUMBER or isinstance(value, Predicate):
        return mixed(sources, to)
    value = _operand(
        shape, fit(value, origin, shape) if isinstance(value, Known) else clip(value, origin), parts[-1]
    )
    if isinstance(value, Unknown):
        return clip(value, to)
    return _refit(shape, value, to)


def _extract(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``bfe``: a bit field at a known place."""
    kind, width = parts[-1], width_of(parts[-1])
    value, position, length = sources
    if not (isinstance(position, Known) and isinstance(length, Known) and is_constant(position)):
        return mixed(sources, width)
    start, count = position.low & 0xFF, length.low & 0xFF
    if not is_constant(length) or start + count > width or count == 0 or count >= width:
        return mixed(sources, width)
    field = _shift_right(shape, ("shr", f"u{width}"), (value, constant(start)))
    field = _logic(shape, ("and", f"b{width}"), (field, constant((1 << count) - 1)))
    if kind[0] == "u":
        return field
    numbers = _numbers(field)
    half = np.int64(1 << (count - 1))
    if numbers is None:
        return unknown(count)
    return elementwise(shape, lambda x: (x ^ half) - half, numbers, width)


def _select(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    predicate = sources[2]
    return choose(shape, predicate if isinstance(predicate, Predicate) else EITHER, sources[0], sources[1])


TRANSFERS: Mapping[str, Transfer] = {
    "mov": _move,
    "cvta": _move,
    "add": _sum,
    "sub": _sum,
    "mul": _multiply,
    "mad": _multiply_add,
    "shl": _shift_left,
    "shr": _shift_right,
    "and": _logic,
    "or": _logic,
    "xor": _logic,
    "not": _not,
    "neg": _negate,
    "abs": _absolute,
    "min": _extreme,
    "max": _extreme,
    "div": _divide,
    "rem": _divide,
    "cvt": _convert,
    "bfe": _extract,
    "selp": _select,
    "setp": compare,
}
