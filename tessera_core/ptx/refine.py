"""Narrows an unknown value to what it can be where certain comparisons hold (`guards.py`): an index that is loaded,
checked and used touches the checked range alone.

The value of a register at a step is met with what its definition computes from values that are narrowed in turn, and
with the ranges in which the comparisons hold. A range of numbers of w bits may run across 2**w: as an unsigned
check of a shifted index does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tessera_core.ptx.flow import Step
from tessera_core.ptx.guards import Condition, Facts, Guards
from tessera_core.ptx.semantics import TRANSFERS, evaluate
from tessera_core.ptx.syntax import Address, Immediate, Name, Operand, registers
from tessera_core.ptx.values import NUMBER, Known, Predicate, Shape, Unknown, Value, bases_of, width_of

# Definitions that are followed for one address.
_DEFINITIONS_LIMIT = 48

_NEGATIONS = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}

_Range = tuple[int, int]  # both ends included; numbers modulo 2**w

Read = Callable[[Operand, int, Mapping[str, Value]], Value]


@dataclass(slots=True)
class Refiner:
    """Narrows values at step ``at`` of one group of blocks. ``read``: an operand in so many bits, with registers
    taken from the mapping first."""

    guards: Guards
    shape: Shape
    read: Read
    at: int
    left: int = _DEFINITIONS_LIMIT

    def narrowed(self, register: str) -> Value:
        """What ``register`` can be for threads that execute the step."""
        return _Query(self, self.guards.conditions(self.at)).value(register, self.at)


@dataclass(slots=True)
class _Query:
    """Values of registers under ``conditions``."""

    refiner: Refiner
    conditions: tuple[Condition, ...]
    facts: Facts = field(init=False)
    ranges: dict[str, list[_Range]] = field(init=False, default_factory=dict)
    found: dict[str, Value] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = self.refiner.guards.facts(self.conditions)
        for place, holds in self.facts.comparisons:
            self._compared(place, holds)

    def value(self, register: str, at: int) -> Value:
        """What ``register`` can be as step ``at`` reads it."""
        if register in self.found:
            return self.found[register]
        value = self._read(Name(register), 64)
        place = self.refiner.guards.definition(register, at)
        if not isinstance(value, Unknown) or place is None or self.refiner.left <= 0:
            return value
        self.refiner.left -= 1
        width = self.refiner.guards.flow.width(register)
        value = _met(value, self._recomputed(register, place), width)
        for _ in range(2):  # a range with a hole may help only after another one
            for low, high in self.ranges.get(register, ()):
                value = _within(value, low, high, width)
        self.found[register] = value
        return value

    def _read(self, operand: Operand, width: int) -> Value:
        return self.refiner.read(operand, width, {})

    # --- forwards: from a definition's sources to its result ------------------------------------------------------

    def _recomputed(self, register: str, place: int) -> Value | None:
        """What the definition computes from narrowed sources, None where that can't be told."""
        guards, step = self.refiner.guards, self.refiner.guards.flow.steps[place]
        sources = step.operands[1:]
        if (
            not _is_plain(step, register)
            or not all(isinstance(source, (Name, Immediate, Address)) for source in sources)
            or not all(guards.fixed(name, place) for source in sources for name in registers(source))
        ):
            return None
        if step.parts[0] == "selp":
            return self._selected(sources, place, width_of(step.parts[-1]) or 64)
        values = {name: self.value(name, place) for source in sources for name in registers(source)}
        width = width_of(step.parts[-1]) or 64
        return evaluate(
            self.refiner.shape,
            step.parts,
            tuple(
                self.refiner.read(source, 64 if index == 2 and "wide" in step.parts else width, values)
                for index, source in enumerate(sources)
            ),
        )

    def _selected(self, sources: tuple[Operand, ...], place: int, width: int) -> Value | None:
        """``selp``: either source, narrowed by the predicate that selects it."""
        if len(sources) != 3 or not isinstance(sources[2], Name):
            return None
        name = sources[2].text
        sides: list[Value] = []
        for source, holds in zip(sources[:2], (True, False), strict=True):
            if self.facts.truths.get(name, holds) != holds:
                continue
            if not isinstance(source, Name):
                sides.append(self._read(source, width))
                continue
            query = self
            if name not in self.facts.truths and self.refiner.left > 0:
                query = _Query(self.refiner, (*self.conditions, Condition(name, holds, place)))
            sides.append(query.value(source.text, place))
        if len(sides) == 1:
            return sides[0]
        first, second = sides
        if isinstance(first, Predicate) or isinstance(second, Predicate):
            return None
        if first.low is None or second.low is None or first.high is None or second.high is None:
            return None
        bases = bases_of(first) | bases_of(second)
        return Unknown(bases, min(first.low, second.low), max(first.high, second.high))

    # --- backwards: from comparisons to the registers that they speak of --------------------------------------------

    def _compared(self, place: int, holds: bool) -> None:
        step = self.refiner.guards.flow.steps[place]
        width, first, second = width_of(step.parts[-1]), step.operands[1], step.operands[2]
        is_unsigned = step.parts[-1][0] == "u" or step.parts[1] in _UNSIGNED
        comparison = _UNSIGNED.get(step.parts[1], step.parts[1])
        if comparison not in _NEGATIONS:
            return
        comparison = comparison if holds else _NEGATIONS[comparison]
        for operand, other, relation in (
            (first, second, comparison),
            (second, first, _MIRRORED[comparison]),
        ):
            limits = self._limits(other, place, width, is_unsigned)
            if isinstance(operand, Name) and limits is not None:
                self._hold(operand.text, place, width, _satisfying(relation, limits, width, is_unsigned))

    def _limits(self, operand: Operand, at: int, width: int, is_unsigned: bool) -> _Range | None:
        """The least and the greatest number that ``operand`` can be."""
        if not all(self.refiner.guards.fixed(name, at) for name in registers(operand)):
            return None
        value = self._read(operand, width)
        signed = _signed_bounds(value, width)
        if signed is None or bases_of(value) != NUMBER:
            return None
        low, high = signed
        if is_unsigned and low < 0:
            return (low + (1 << width), high + (1 << width)) if high < 0 else (0, (1 << width) - 1)
        return low, high

    def _hold(self, register: str, at: int, width: int, limits: _Range) -> None:
        """Note that ``register``, as step ``at`` reads it, is in the range, and what follows for its sources."""
        guards = self.refiner.guards
        place = guards.definition(register, at)
        low, high = limits
        if place is None or guards.flow.width(register) != width or low > high or high - low >= 1 << width:
            return
        if len(self.ranges) > _DEFINITIONS_LIMIT:
            return
        self.ranges.setdefault(register, []).append(limits)
        step = guards.flow.steps[place]
        if not _is_plain(step, register):
            return
        parts, sources = step.parts, step.operands[1:]
        if parts[0] in ("add", "sub") and width_of(parts[-1]) == width and len(sources) == 2:
            self._shifted(parts, sources, place, width, limits)
        elif len(sources) != 1 or not isinstance(sources[0], Name):
            return
        elif parts[0] == "mov" and width_of(parts[-1]) == width:
            self._hold(sources[0].text, place, width, limits)
        elif parts[0] == "cvt" and len(parts) > 2 and width_of(parts[-2]) == width:
            self._extended(parts, sources[0].text, place, width, limits)

    def _shifted(
        self, parts: tuple[str, ...], sources: tuple[Operand, ...], place: int, width: int, limits: _Range
    ) -> None:
        """The definition adds a constant, or subtracts one or from one."""
        if "sat" in parts:
            return
        low, high = limits
        for operand, other in (sources, sources[::-1]):
            amount = self._limits(other, place, width, False)
            if not isinstance(operand, Name) or amount is None or amount[0] != amount[1]:
                continue
            by = amount[0]
            if parts[0] == "add":
                self._hold(operand.text, place, width, (low - by, high - by))
            elif operand is sources[0]:
                self._hold(operand.text, place, width, (low + by, high + by))
            else:
                self._hold(operand.text, place, width, (by - high, by - low))

    def _extended(self, parts: tuple[str, ...], source: str, place: int, width: int, limits: _Range) -> None:
        """The definition extends a shorter number, whose value stays the same."""
        shorter = width_of(parts[-1])
        if not shorter or shorter >= width or "sat" in parts:
            return
        least = -(1 << (shorter - 1)) if parts[-1][0] == "s" else 0
        met = _meet((least, least + (1 << shorter) - 1), limits, width)
        if met is not None:
            self._hold(source, place, shorter, met)


def _is_plain(step: Step, register: str) -> bool:
    """Whether the step always runs, touches no memory and does nothing but set ``register``."""
    return (
        step.guard is None
        and not step.effects.touches
        and not step.effects.reaches_all
        and step.parts[0] in TRANSFERS
        and step.parts[0] != "setp"
        and step.writes == (register,)
        and isinstance(step.operands[0], Name)
    )


def _satisfying(relation: str, limits: _Range, width: int, is_unsigned: bool) -> _Range:
    """Numbers that stand in this relation to some number within the limits."""
    least = 0 if is_unsigned else -(1 << (width - 1))
    most = least + (1 << width) - 1
    low, high = limits
    if relation == "eq":
        return low, high
    if relation == "ne":  # everything from just above it, once round, to just below it
        return (low + 1, low - 1 + (1 << width)) if low == high else (least, most)
    return {
        "lt": (least, high - 1),
        "le": (least, high),
        "gt": (low + 1, most),
        "ge": (low, most),
    }[relation]


def _signed_bounds(value: Value, width: int) -> _Range | None:
    """Bounds of a plain number in the signed range of ``width`` bits, None for a pointer or a predicate."""
    if isinstance(value, Predicate) or bases_of(value) != NUMBER:
        return None
    least, most = -(1 << (width - 1)), (1 << (width - 1)) - 1
    if value.low is None or value.high is None or value.low < least or value.high > most:
        return None if isinstance(value, Known) else (least, most)
    return value.low, value.high


def _meet(bounds: _Range, limits: _Range, width: int) -> _Range | None:
    """The numbers of ``bounds`` that are, modulo 2**width, within ``limits``; None where there are none. Both are
    shorter than 2**width."""
    turn = 1 << width
    start = (
        limits[0] + (bounds[0] - limits[1] + turn - 1) // turn * turn
    )  # first turn that reaches the bounds
    length = limits[1] - limits[0]
    pieces = [
        (max(bounds[0], low), min(bounds[1], low + length))
        for low in (start, start + turn)
        if low <= bounds[1]
    ]
    pieces = [piece for piece in pieces if piece[0] <= piece[1]]
    return (min(low for low, _ in pieces), max(high for _, high in pieces)) if pieces else None


def _within(value: Value, low: int, high: int, width: int) -> Value:
    """A register's value, known to be in a range of numbers modulo 2**width."""
    bounds = _signed_bounds(value, width) if width else None
    if not isinstance(value, Unknown) or bounds is None:
        return value
    met = _meet(bounds, (low, high), width)
    return value if met is None else Unknown(NUMBER, *met)  # no thread gets there where nothing is left


def _met(value: Unknown, computed: Value | None, width: int) -> Value:
    """What is both ``value`` and ``computed``; either alone would do."""
    if computed is None or isinstance(computed, Predicate):
        return value
    if isinstance(computed, Known):
        return computed
    if value.bases != computed.bases:
        return computed if value.low is None or computed.bases < value.bases else value
    if value.low is None or value.high is None:
        return computed if computed.low is not None and computed.high is not None else value
    if computed.low is None or computed.high is None:
        return value
    if value.bases == NUMBER:
        first, second = _signed_bounds(value, width or 64), _signed_bounds(computed, width or 64)
        if not width or first is None or second is None:
            return value
        low, high = max(first[0], second[0]), min(first[1], second[1])
    else:
        low, high = max(value.low, computed.low), min(value.high, computed.high)
    return Unknown(value.bases, low, high) if low <= high else value
