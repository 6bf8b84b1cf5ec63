"""Integer expressions over parameters, thread and block indices, as polynomials with known ranges.

For people, not for proofs: 32-bit arithmetic is taken not to wrap. What is no polynomial (a remainder, a loaded
value) becomes an atom with a readable name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

Monomial = tuple[str, ...]
"""Atoms multiplied with each other, sorted; empty: the constant."""

# More terms than this nobody reads.
TERMS_LIMIT = 12

# Atoms with longer names are called by the register that holds them.
ATOM_LENGTH_LIMIT = 48

_ANY = (None, None)
Range = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Expression:
    """``terms``: coefficient by monomial, zeros left out. ``ranges``: of every atom, (lowest, highest) or None where
    open. ``loaded``: whether an atom's value comes from memory or from another path, so that it bounds nothing."""

    terms: Mapping[Monomial, int]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    loaded: frozenset[str] = frozenset()

    @property
    def constant(self) -> int | None:
        """Its value, where it is one number."""
        if not self.terms:
            return 0
        return self.terms[()] if set(self.terms) == {()} else None

    @property
    def atoms(self) -> frozenset[str]:
        """Every atom that occurs."""
        return frozenset(atom for monomial in self.terms for atom in monomial)

    def bounds(self) -> Range:
        """Lowest and highest value by the atoms' ranges."""
        low: int | None = 0
        high: int | None = 0
        for monomial, factor in self.terms.items():
            a, b = self._monomial_bounds(monomial)
            if factor < 0:
                a, b = b, a
            low = None if low is None or a is None else low + a * factor
            high = None if high is None or b is None else high + b * factor
        return low, high

    def possible_bits(self) -> int | None:
        """Bits that may be set, as a mask; None where it may be negative or has no bound."""
        low, high = self.bounds()
        if low is None or high is None or low < 0:
            return None
        step = math.gcd(*self.terms.values()) if self.terms else 0
        lowest_bit = step & -step
        return ((1 << high.bit_length()) - 1) & ~(max(lowest_bit, 1) - 1)

    def text(self, *, first: str = "") -> str:
        """``4*(ctaid.x*1024 + tid.x)``; ``first``: an atom to put in front, outside the parentheses."""
        rest = {monomial: factor for monomial, factor in self.terms.items() if monomial != (first,)}
        lead = first if first and self.terms.get((first,)) == 1 else ""
        if not rest:
            return lead or "0"
        common = math.gcd(*rest.values())
        if common > 1 and len(rest) > 1:
            inner = _sum({monomial: factor // common for monomial, factor in rest.items()})
            body = f"{common}*({inner})"
        else:
            body = _sum(rest)
        if not lead:
            return body
        return f"{lead} - {body[1:].lstrip()}" if body.startswith("-") else f"{lead} + {body}"

    def _monomial_bounds(self, monomial: Monomial) -> Range:
        low: int | None = 1
        high: int | None = 1
        for atom in monomial:
            a, b = self.ranges.get(atom, _ANY)
            if a is None or a < 0 or low is None:
                # signs may differ: only a single atom keeps its own range
                return self.ranges.get(atom, _ANY) if len(monomial) == 1 else _ANY
            low *= a
            high = None if high is None or b is None else high * b
        return low, high


def number(value: int) -> Expression:
    """A constant."""
    return Expression({(): value} if value else {})


def atom(name: str, low: int | None = None, high: int | None = None, *, loaded: bool = False) -> Expression:
    """A single name with its range."""
    return Expression({(name,): 1}, {name: (low, high)}, frozenset({name}) if loaded else frozenset())


def add(x: Expression, y: Expression, sign: int = 1) -> Expression:
    """``x + sign * y``."""
    terms = dict(x.terms)
    for monomial, factor in y.terms.items():
        terms[monomial] = terms.get(monomial, 0) + sign * factor
    return _joined({m: f for m, f in terms.items() if f}, x, y)


def multiply(x: Expression, y: Expression) -> Expression:
    """``x * y``."""
    terms: dict[Monomial, int] = {}
    for mine, a in x.terms.items():
        for theirs, b in y.terms.items():
            monomial = tuple(sorted((*mine, *theirs)))
            terms[monomial] = terms.get(monomial, 0) + a * b
    return _joined({m: f for m, f in terms.items() if f}, x, y)


def shift_right(x: Expression, bits: int) -> Expression:
    """``x >> bits``: terms that are multiples move, and a rest too small to matter goes."""
    whole = {m: f for m, f in x.terms.items() if f % (1 << bits) == 0}
    rest = _joined({m: f for m, f in x.terms.items() if f % (1 << bits)}, x)
    low, high = rest.bounds()
    if low is not None and low >= 0 and high is not None and high < 1 << bits:
        return _joined({m: f >> bits for m, f in whole.items()}, x)
    low, high = x.bounds()
    return operation(
        f"({grouped(x)} / {1 << bits})",
        (x,),
        None if low is None else low >> bits,
        None if high is None else high >> bits,
    )


def mask(x: Expression, bits: int) -> Expression:
    """``x & bits`` for a mask that is not negative."""
    possible = x.possible_bits()
    if possible is not None and possible & ~bits == 0:
        return x
    if bits & (bits + 1) == 0:
        return remainder(x, bits + 1)
    low_bit = bits & -bits
    if (bits + low_bit).bit_count() == 1 and all(factor % low_bit == 0 for factor in x.terms.values()):
        inner = mask(shift_right(x, low_bit.bit_length() - 1), bits // low_bit)
        return multiply(inner, number(low_bit))
    return operation(f"({grouped(x)} & {bits})", (x,), 0, bits)


def remainder(x: Expression, modulus: int) -> Expression:
    """``x % modulus``: multiples of the modulus go where the rest is known not to be negative."""
    low, high = x.bounds()
    if low is not None and low >= 0 and high is not None and high < modulus:
        return x
    rest = _joined({m: f for m, f in x.terms.items() if f % modulus}, x)
    lowest, highest = rest.bounds()
    if lowest is not None and lowest >= 0 and low is not None and low >= 0:
        if highest is not None and highest < modulus:
            return rest
        return operation(f"({grouped(rest)} % {modulus})", (x,), 0, modulus - 1)
    return operation(f"({grouped(x)} % {modulus})", (x,), 1 - modulus, modulus - 1)


def join_bits(x: Expression, y: Expression) -> Expression | None:
    """``x | y`` where no bit can be set in both, which is their sum; else None."""
    first, second = x.possible_bits(), y.possible_bits()
    if first is None and second is not None:
        x, y, first, second = y, x, second, first
    if first is None:
        return None
    if second is not None:
        return add(x, y) if first & second == 0 else None
    # One has no upper bound; its multiples still leave the low bits free.
    low, _ = y.bounds()
    step = math.gcd(*y.terms.values())
    free = (step & -step) - 1
    return add(x, y) if low is not None and low >= 0 and first & ~free == 0 else None


def operation(
    name: str, sources: tuple[Expression, ...], low: int | None = None, high: int | None = None
) -> Expression:
    """An atom computed from ``sources``."""
    return atom(name, low, high, loaded=any(source.loaded for source in sources))


def grouped(x: Expression) -> str:
    """Its text, in parentheses where it is a sum."""
    return f"({x.text()})" if len(x.terms) > 1 else x.text()


def _joined(terms: Mapping[Monomial, int], *sources: Expression) -> Expression:
    kept = {name for monomial in terms for name in monomial}
    ranges = {name: span for source in sources for name, span in source.ranges.items() if name in kept}
    loaded = frozenset().union(*(source.loaded for source in sources)) & kept
    if len(terms) > TERMS_LIMIT:
        return atom(f"f({', '.join(sorted(kept))})", loaded=bool(loaded))
    return Expression(terms, ranges, loaded)


def _sum(terms: Mapping[Monomial, int]) -> str:
    parts: list[str] = []
    for monomial, factor in sorted(terms.items(), key=lambda term: _rank(term[0])):
        names = "*".join(monomial)
        size = abs(factor)
        body = str(size) if not names else names if size == 1 else f"{names}*{size}"
        if not parts:
            parts.append(f"-{body}" if factor < 0 else body)
        else:
            parts.append(f"{'-' if factor < 0 else '+'} {body}")
    return " ".join(parts)


def _rank(monomial: Monomial) -> tuple[int, Monomial]:
    """Blocks first, then what else varies, threads, and the constant last."""
    if not monomial:
        return 3, monomial
    if any(name.startswith("ctaid") for name in monomial):
        return 0, monomial
    return (2 if any(name.startswith("tid") for name in monomial) else 1), monomial
