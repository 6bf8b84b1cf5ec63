"""What each integer instruction computes on one thread, written down from the PTX ISA on Python's own numbers: the
oracle of `test_instructions.py`. Sources come as unsigned bit patterns of the widths that :data:`INSTRUCTIONS`
states; results are bit patterns of any length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Instruction:
    """``sources``: the widths of the source operands; ``width`` of the result (0: a predicate)."""

    sources: tuple[int, ...]
    width: int
    compute: Callable[..., int]


def signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (-1 if (x < 0) != (y < 0) else 1)


def clamped(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def field(x: int, start: int, count: int, width: int, sign: bool) -> int:
    start, count = start & 255, count & 255
    bits = [
        x >> i & 1 if i < width else (x >> (width - 1) & 1 if sign else 0)
        for i in range(start, start + count)
    ]
    if sign:
        last = min(start + count - 1, width - 1)
        bits = [x >> min(i, width - 1) & 1 for i in range(start, start + count)]
        bits += [x >> last & 1 if count else 0] * width
    return sum(bit << i for i, bit in enumerate(bits[:width]))


def inserted(x: int, y: int, start: int, count: int, width: int) -> int:
    start, count = start & 255, count & 255
    for i in range(count):
        if start + i < width:
            y = y & ~(1 << (start + i)) | (x >> i & 1) << (start + i)
    return y


def funnel(x: int, y: int, by: int, left: bool, wraps: bool) -> int:
    by = by & 31 if wraps else min(by, 32)
    pair = y << 32 | x
    return pair << by >> 32 if left else pair >> by


MODES = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


def permuted(x: int, y: int, select: int, mode: str = "") -> int:
    chosen = (
        [int(c) for c in MODES[mode][select & 3][::-1]] if mode else [select >> 4 * i & 15 for i in range(4)]
    )
    result = 0
    for i, nibble in enumerate(chosen):
        byte = (y << 32 | x) >> 8 * (nibble & 7) & 255
        result |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
    return result


def looked_up(x: int, y: int, z: int, table: int) -> int:
    return sum((table >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1)) & 1) << i for i in range(32))


def highest(x: int, width: int, sign: bool, amount: bool) -> int:
    if sign and x >> (width - 1):
        x = ~x & (1 << width) - 1
    place = x.bit_length() - 1
    return place if place < 0 or not amount else width - 1 - place


def nth_set(mask: int, base: int, offset: int) -> int:
    offset = signed(offset, 32)
    if offset == 0:
        return base if base < 32 and mask >> base & 1 else -1
    left, place = abs(offset) - 1, base
    while 0 <= place < 32:
        if mask >> place & 1:
            if left == 0:
                return place
            left -= 1
        place += 1 if offset > 0 else -1
    return -1


def bit_mask(x: int, y: int, wraps: bool) -> int:
    x, y = (x & 31, y & 31) if wraps else (min(x, 32), min(y, 32))
    return ((1 << y) - 1) << x


def extended(x: int, y: int, sign: bool, wraps: bool) -> int:
    y = y & 31 if wraps else min(y, 32)
    return 0 if y == 0 else signed(x, y) if sign else x & (1 << y) - 1


def dot(x: int, y: int, z: int, first: bool, second: bool, halves: int | None = None) -> int:
    lanes = 4 if halves is None else 2
    for i in range(lanes):
        bits = 8 if halves is None else 16
        a = x >> bits * i & (1 << bits) - 1
        b = y >> 8 * (i + (halves or 0)) & 255
        z += (signed(a, bits) if first else a) * (signed(b, 8) if second else b)
    return z


def _table() -> dict[str, Instruction]:
    table: dict[str, Instruction] = {}

    def row(opcode: str, sources: tuple[int, ...], width: int, compute: Callable[..., int]) -> None:
        table[opcode] = Instruction(sources, width, compute)

    for w in (16, 32, 64):
        s = partial(signed, width=w)
        for kind in ("s", "u"):
            t = f"{kind}{w}"
            r: Callable[[int], int] = s if kind == "s" else lambda x: x
            row(f"add.{t}", (w, w), w, lambda x, y: x + y)
            row(f"sub.{t}", (w, w), w, lambda x, y: x - y)
            row(f"mul.lo.{t}", (w, w), w, lambda x, y: x * y)
            row(f"mul.hi.{t}", (w, w), w, lambda x, y, r=r, w=w: r(x) * r(y) >> w)
            row(f"mad.lo.{t}", (w, w, w), w, lambda x, y, z: x * y + z)
            row(f"mad.hi.{t}", (w, w, w), w, lambda x, y, z, r=r, w=w: (r(x) * r(y) >> w) + z)
            row(f"min.{t}", (w, w), w, lambda x, y, r=r: min(r(x), r(y)))
            row(f"max.{t}", (w, w), w, lambda x, y, r=r: max(r(x), r(y)))
            row(f"div.{t}", (w, w), w, lambda x, y, r=r: truncated(r(x), r(y)))
            row(f"rem.{t}", (w, w), w, lambda x, y, r=r: r(x) - r(y) * truncated(r(x), r(y)))
            row(f"sad.{t}", (w, w, w), w, lambda x, y, z, r=r: abs(r(x) - r(y)) + z)
            row(f"shr.{t}", (w, 32), w, lambda x, y, r=r: r(x) >> min(y, 64))
            row(f"selp.{t}", (w, w, 0), w, lambda x, y, p: x if p else y)
            row(f"slct.{t}.s32", (w, w, 32), w, lambda x, y, z: x if signed(z, 32) >= 0 else y)
            for name, test in COMPARISONS.items():
                row(f"setp.{name}.{t}", (w, w), 0, lambda x, y, r=r, c=test: c(r(x), r(y)))
            row(f"set.lt.u32.{t}", (w, w), 32, lambda x, y, r=r: -(r(x) < r(y)))
            if w < 64:
                row(f"mul.wide.{t}", (w, w), 2 * w, lambda x, y, r=r: r(x) * r(y))
                row(f"mad.wide.{t}", (w, w, 2 * w), 2 * w, lambda x, y, z, r=r: r(x) * r(y) + z)
            for v in (8, 16, 32, 64):
                row(f"cvt.{t}.s{v}", (max(v, 16),), w, lambda x, v=v: signed(x, v))
                row(f"cvt.{t}.u{v}", (max(v, 16),), w, lambda x, v=v: x & (1 << v) - 1)
                low, high = (-(1 << (w - 1)), (1 << (w - 1)) - 1) if kind == "s" else (0, (1 << w) - 1)
                row(
                    f"cvt.sat.{t}.s{v}",
                    (max(v, 16),),
                    w,
                    lambda x, v=v, a=low, b=high: clamped(signed(x, v), a, b),
                )
                row(
                    f"cvt.sat.{t}.u{v}",
                    (max(v, 16),),
                    w,
                    lambda x, v=v, a=low, b=high: clamped(x & (1 << v) - 1, a, b),
                )
        row(f"neg.s{w}", (w,), w, lambda x: -x)
        row(f"abs.s{w}", (w,), w, lambda x, s=s: abs(s(x)))
        row(f"mov.b{w}", (w,), w, lambda x: x)
        for name, operation in LOGIC.items():
            row(f"{name}.b{w}", (w, w), w, operation)
        row(f"not.b{w}", (w,), w, lambda x: ~x)
        row(f"cnot.b{w}", (w,), w, lambda x: x == 0)
        row(f"shl.b{w}", (w, 32), w, lambda x, y: x << min(y, 64))
    for w in (32, 64):
        row(f"popc.b{w}", (w,), 32, lambda x: x.bit_count())
        row(f"clz.b{w}", (w,), 32, lambda x, w=w: w - x.bit_length())
        row(f"brev.b{w}", (w,), w, lambda x, w=w: int(f"{x:0{w}b}"[::-1], 2))
        row(f"bfi.b{w}", (w, w, 32, 32), w, lambda x, y, a, b, w=w: inserted(x, y, a, b, w))
        for kind in ("s", "u"):
            sign = kind == "s"
            row(f"bfe.{kind}{w}", (w, 32, 32), w, lambda x, a, b, w=w, g=sign: field(x, a, b, w, g))
            row(f"bfind.{kind}{w}", (w,), 32, lambda x, w=w, g=sign: highest(x, w, g, False))
            row(f"bfind.shiftamt.{kind}{w}", (w,), 32, lambda x, w=w, g=sign: highest(x, w, g, True))
    row(
        "add.sat.s32",
        (32, 32),
        32,
        lambda x, y: clamped(signed(x, 32) + signed(y, 32), -(1 << 31), (1 << 31) - 1),
    )
    row(
        "sub.sat.s32",
        (32, 32),
        32,
        lambda x, y: clamped(signed(x, 32) - signed(y, 32), -(1 << 31), (1 << 31) - 1),
    )
    row("mul24.lo.u32", (32, 32), 32, lambda x, y: (x & 0xFFFFFF) * (y & 0xFFFFFF))
    row("mul24.hi.s32", (32, 32), 32, lambda x, y: signed(x, 24) * signed(y, 24) >> 16)
    row("mad24.lo.s32", (32, 32, 32), 32, lambda x, y, z: signed(x, 24) * signed(y, 24) + z)
    row("mad24.hi.u32", (32, 32, 32), 32, lambda x, y, z: ((x & 0xFFFFFF) * (y & 0xFFFFFF) >> 16) + z)
    for first in ("s", "u"):
        for second in ("s", "u"):
            types, flags = f"{first}32.{second}32", (first == "s", second == "s")
            row(f"dp4a.{types}", (32, 32, 32), 32, lambda x, y, z, f=flags: dot(x, y, z, *f))
            row(f"dp2a.lo.{types}", (32, 32, 32), 32, lambda x, y, z, f=flags: dot(x, y, z, *f, halves=0))
            row(f"dp2a.hi.{types}", (32, 32, 32), 32, lambda x, y, z, f=flags: dot(x, y, z, *f, halves=2))
    for mode in ("wrap", "clamp"):
        wraps = mode == "wrap"
        row(f"shf.l.{mode}.b32", (32, 32, 32), 32, lambda x, y, z, m=wraps: funnel(x, y, z, True, m))
        row(f"shf.r.{mode}.b32", (32, 32, 32), 32, lambda x, y, z, m=wraps: funnel(x, y, z, False, m))
        row(f"bmsk.{mode}.b32", (32, 32), 32, lambda x, y, m=wraps: bit_mask(x, y, m))
        row(f"szext.{mode}.s32", (32, 32), 32, lambda x, y, m=wraps: extended(x, y, True, m))
        row(f"szext.{mode}.u32", (32, 32), 32, lambda x, y, m=wraps: extended(x, y, False, m))
    row("prmt.b32", (32, 32, 32), 32, permuted)
    for mode in MODES:
        row(f"prmt.b32.{mode}", (32, 32, 32), 32, lambda x, y, z, m=mode: permuted(x, y, z, m))
    row("lop3.b32", (32, 32, 32, 8), 32, looked_up)
    row("fns.b32", (32, 32, 32), 32, nth_set)
    return table


COMPARISONS: Mapping[str, Callable[[int, int], int]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
LOGIC: Mapping[str, Callable[[int, int], int]] = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
}

INSTRUCTIONS = _table()
