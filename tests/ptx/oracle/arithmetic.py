"""What register instructions of PTX compute, on arrays with one item per thread. Values are bit patterns in unsigned
64-bit integers. An instruction that is not here is not modelled: its result is unknown, and the machine refuses to
let an address or a branch depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]

FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_TYPE = re.compile(r"[busf](8|16|32|64)|pred")


class NotModelledError(Exception):
    """The emulator does not know what an instruction computes."""


def width(kind: str) -> int:
    """Bits of a type."""
    return 1 if kind == "pred" else int(re.sub(r"\D", "", kind))


def types(parts: Sequence[str]) -> list[str]:
    """The type suffixes of an opcode, in order."""
    return [part for part in parts if _TYPE.fullmatch(part)]


def masked(value: Bits, bits: int) -> Bits:
    """The low ``bits``."""
    return value if bits >= 64 else value & np.uint64((1 << bits) - 1)


def signed(value: Bits, bits: int) -> npt.NDArray[np.int64]:
    """As two's complement of ``bits``."""
    shift = np.uint64(64 - bits)
    return (value << shift).astype(np.int64) >> np.int64(64 - bits)


def as_float(value: Bits, kind: str) -> Any:
    """The bit patterns as floating-point numbers."""
    size = width(kind)
    return masked(value, size).astype(f"u{size // 8}").view(FLOATS[kind])


def from_float(value: Any, kind: str) -> Bits:
    """Floating-point numbers as bit patterns."""
    held = np.ascontiguousarray(value, dtype=FLOATS[kind])
    return held.view(f"u{width(kind) // 8}").astype(np.uint64)


def compute(parts: Sequence[str], sources: Sequence[Bits]) -> Bits:
    """The result of a register instruction; raises :class:`NotModelledError`."""
    name = parts[0]
    kinds = types(parts)
    if name == "cvt" and "bf16" in parts:
        return _brain(parts, sources[0])
    if not kinds or any(part.endswith(("x2", "x4")) for part in parts[1:]):
        raise NotModelledError(".".join(parts))
    kind = kinds[-1]
    if name == "cvt":
        return _convert(parts, kinds[-2], kind, sources[0])
    if name in ("mov", "selp", "set", "slct") or kind[0] != "f":
        function = _INTEGER.get(name)
        if function is None:
            raise NotModelledError(".".join(parts))
        with np.errstate(over="ignore"):
            bits = width(kind)
            result = function(list(parts), kind, [np.asarray(s, dtype=np.uint64) for s in sources])
            wide = "wide" in parts
            return masked(
                result.astype(np.uint64), bits * 2 if wide else max(bits, 32) if name in _COUNTS else bits
            )
    function = _FLOAT.get(name)
    if function is None or len(kinds) > 1:
        raise NotModelledError(".".join(parts))
    with np.errstate(all="ignore"):
        return from_float(function(*(as_float(s, kind) for s in sources)), kind)


def compare(parts: Sequence[str], first: Bits, second: Bits) -> npt.NDArray[np.bool_]:
    """The comparison of ``setp`` and ``set``."""
    kind, how = types(parts)[-1], parts[1]
    bits = width(kind)
    if kind[0] == "f":
        x, y = as_float(first, kind), as_float(second, kind)
        unordered = np.isnan(x) | np.isnan(y)
        if how in ("num", "nan"):
            return np.asarray(unordered if how == "nan" else ~unordered)
        base = how[:-1] if how.endswith("u") and how != "u" else how
        holds = np.asarray(_COMPARISONS[base](x, y))
        return holds | unordered if base != how else holds & ~unordered
    how = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how)
    if kind[0] == "s":
        return np.asarray(_COMPARISONS[how](signed(first, bits), signed(second, bits)))
    return np.asarray(_COMPARISONS[how](masked(first, bits), masked(second, bits)))


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_COUNTS = ("popc", "clz", "bfind")


def _brain(parts: Sequence[str], value: Bits) -> Bits:
    """Between ``bf16`` and ``f32``; rounded down, as no address hangs on a last bit."""
    if parts[-1] == "bf16" and parts[-2] == "f32":
        return masked(value, 16) << np.uint64(16)
    if parts[-2] == "bf16" and parts[-1] == "f32":
        return masked(value, 32) >> np.uint64(16)
    raise NotModelledError(".".join(parts))


def _convert(parts: Sequence[str], to: str, origin: str, value: Bits) -> Bits:
    if "sat" in parts:
        raise NotModelledError(".".join(parts))
    if origin[0] == "f" and to[0] == "f":
        with np.errstate(all="ignore"):
            return from_float(as_float(value, origin).astype(FLOATS[to]), to)
    if origin[0] == "f":
        number = as_float(value, origin).astype(np.float64)
        rounded = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil}.get(parts[1], np.trunc)(number)
        low, high = (
            (-(2 ** (width(to) - 1)), 2 ** (width(to) - 1) - 1) if to[0] == "s" else (0, 2 ** width(to) - 1)
        )
        rounded = np.where(np.isnan(rounded), 0, np.clip(rounded, low, high))
        return masked(rounded.astype(np.int64).astype(np.uint64), width(to))
    number = (
        signed(value, width(origin)).astype(np.uint64) if origin[0] == "s" else masked(value, width(origin))
    )
    if to[0] == "f":
        return from_float(number.astype(np.int64).astype(FLOATS[to]), to)
    return masked(number, width(to))


def _product(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    bits = width(kind)
    if "hi" in parts:
        if bits <= 32:
            if kind[0] == "s":
                return ((signed(raw[0], bits) * signed(raw[1], bits)) >> np.int64(bits)).astype(np.uint64)
            return (masked(raw[0], bits) * masked(raw[1], bits)) >> np.uint64(bits)
        pairs = zip(raw[0].tolist(), raw[1].tolist(), strict=True)
        sign = (lambda v: v - (1 << 64) if v >> 63 else v) if kind[0] == "s" else (lambda v: v)
        return np.array([(sign(x) * sign(y)) >> 64 & (1 << 64) - 1 for x, y in pairs], dtype=np.uint64)
    if kind[0] == "s":
        return (signed(raw[0], bits) * signed(raw[1], bits)).astype(np.uint64)
    return masked(raw[0], bits) * masked(raw[1], bits)


def _quotient(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    bits = width(kind)
    take = (lambda v: signed(v, bits).tolist()) if kind[0] == "s" else (lambda v: masked(v, bits).tolist())
    found = []
    for x, y in zip(take(raw[0]), take(raw[1]), strict=True):
        quotient = 0 if y == 0 else abs(x) // abs(y) * (-1 if (x < 0) != (y < 0) else 1)
        found.append((quotient if parts[0] == "div" else x - quotient * y) & (1 << 64) - 1)
    return np.array(found, dtype=np.uint64)


def _shift(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    bits = width(kind)
    by = np.minimum(masked(raw[1], 32), np.uint64(bits))
    if parts[0] == "shl":
        return np.where(by >= bits, np.uint64(0), raw[0] << np.minimum(by, np.uint64(63)))
    if kind[0] == "s":
        return (signed(raw[0], bits) >> np.minimum(by, np.uint64(63)).astype(np.int64)).astype(np.uint64)
    return np.where(by >= 64, np.uint64(0), masked(raw[0], bits) >> np.minimum(by, np.uint64(63)))


def _funnel(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    whole = masked(raw[0], 32) | masked(raw[1], 32) << np.uint64(32)
    by = raw[2] & np.uint64(31) if "wrap" in parts else np.minimum(masked(raw[2], 32), np.uint64(32))
    if parts[1] == "l":
        return (whole << by) >> np.uint64(32)
    return whole >> by


def _extreme(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    bits = width(kind)
    values = [signed(v, bits) if kind[0] == "s" else masked(v, bits) for v in raw]
    found: Any = values[0]
    for value in values[1:]:
        found = (np.minimum if parts[0] == "min" else np.maximum)(found, value)
    return np.asarray(found).astype(np.uint64)


def _extract(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    bits = width(kind)
    at, length = raw[1] & np.uint64(255), raw[2] & np.uint64(255)
    value = masked(raw[0], bits)
    kept = np.where(at >= bits, np.uint64(0), value >> np.minimum(at, np.uint64(63)))
    length = np.minimum(length, np.uint64(bits))
    mask = np.where(
        length >= 64, np.uint64(2**64 - 1), (np.uint64(1) << np.minimum(length, np.uint64(63))) - np.uint64(1)
    )
    field = kept & mask
    if kind[0] == "s":
        top = np.minimum(at + length - np.uint64(1), np.uint64(bits - 1))
        negative = (length > 0) & ((value >> np.minimum(top, np.uint64(63))) & np.uint64(1) == 1)
        field = np.where(negative, field | ~mask, field)
    return field


def _insert(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    bits = width(kind)
    at, length = raw[2] & np.uint64(255), raw[3] & np.uint64(255)
    safe = np.minimum(at, np.uint64(63))
    mask = np.where(
        length >= 64, np.uint64(2**64 - 1), (np.uint64(1) << np.minimum(length, np.uint64(63))) - np.uint64(1)
    )
    mask = np.where(at >= bits, np.uint64(0), mask << safe)
    return (raw[1] & ~mask) | ((raw[0] << safe) & mask)


def _permute(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    if len(parts) > 2:
        raise NotModelledError(".".join(parts))
    whole = masked(raw[0], 32) | masked(raw[1], 32) << np.uint64(32)
    found = np.zeros_like(whole)
    for byte in range(4):
        chosen = (raw[2] >> np.uint64(4 * byte)) & np.uint64(15)
        value = (whole >> ((chosen & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        value = np.where(
            chosen & np.uint64(8), np.where(value >> np.uint64(7), np.uint64(255), np.uint64(0)), value
        )
        found |= value << np.uint64(8 * byte)
    return found


def _table(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    a, b, c = raw[:3]
    found = np.zeros_like(a)
    for row in range(8):
        here = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        found |= np.where((raw[3] >> np.uint64(row)) & np.uint64(1) == 1, here, np.uint64(0))
    return found


def _reversed(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    bits = width(kind)
    found = np.zeros_like(raw[0])
    for bit in range(bits):
        found |= ((raw[0] >> np.uint64(bit)) & np.uint64(1)) << np.uint64(bits - 1 - bit)
    return found


def _counted(parts: list[str], kind: str, raw: list[Bits]) -> Bits:
    bits = width(kind)
    items = masked(raw[0], bits).tolist()
    if parts[0] == "popc":
        return np.array([item.bit_count() for item in items], dtype=np.uint64)
    if parts[0] == "clz":
        return np.array([bits - item.bit_length() for item in items], dtype=np.uint64)
    if kind[0] == "s" or "shiftamt" in parts:
        raise NotModelledError(".".join(parts))
    return np.array([(item.bit_length() - 1) & 0xFFFFFFFF for item in items], dtype=np.uint64)


_INTEGER: dict[str, Callable[[list[str], str, list[Bits]], Bits]] = {
    "mov": lambda p, k, r: r[0],
    "cvta": lambda p, k, r: r[0],
    "add": lambda p, k, r: r[0] + r[1],
    "sub": lambda p, k, r: r[0] - r[1],
    "mul": _product,
    "mad": lambda p, k, r: _product(p, k, r) + r[2],
    "mul24": lambda p, k, r: _product(p, k, [masked(r[0], 24), masked(r[1], 24)]),
    "div": _quotient,
    "rem": _quotient,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "and": lambda p, k, r: r[0] & r[1],
    "or": lambda p, k, r: r[0] | r[1],
    "xor": lambda p, k, r: r[0] ^ r[1],
    "not": lambda p, k, r: r[0] ^ np.uint64(1) if k == "pred" else ~r[0],
    "cnot": lambda p, k, r: (masked(r[0], width(k)) == 0).astype(np.uint64),
    "neg": lambda p, k, r: np.uint64(0) - r[0],
    "abs": lambda p, k, r: np.abs(signed(r[0], width(k))).astype(np.uint64),
    "min": _extreme,
    "max": _extreme,
    "bfe": _extract,
    "bfi": _insert,
    "prmt": _permute,
    "lop3": _table,
    "brev": _reversed,
    "popc": _counted,
    "clz": _counted,
    "bfind": _counted,
    "selp": lambda p, k, r: np.where(r[2] & np.uint64(1) == 1, r[0], r[1]),
    "slct": lambda p, k, r: np.where(signed(r[2], 32) >= 0, r[0], r[1]),
}
_FLOAT: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": lambda x, y, z: x * y + z,
    "mad": lambda x, y, z: x * y + z,
    "min": np.fmin,
    "max": np.fmax,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "rcp": lambda x: (1 / x).astype(x.dtype),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}
