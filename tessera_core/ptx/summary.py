"""What a kernel touches, in terms of its parameters and indices: for readers, without a launch.

Addresses are expressions (see `definitions.py`). Conditions are those of the instruction's own guard and of the
branches that decide whether it is reached: removing one side of the branch from the control flow makes it
unreachable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tessera_core.ptx.definitions import Definitions
from tessera_core.ptx.flow import Step, visible
from tessera_core.ptx.kernel import Kernel, kernel_of
from tessera_core.ptx.symbolic import Expression
from tessera_core.ptx.syntax import Address, Immediate, Module, Name, Negated, Operand, Vector
from tessera_core.ptx.values import width_of

_COMPARISONS = {
    "eq": ("==", "!="),
    "ne": ("!=", "=="),
    "lt": ("<", ">="),
    "lo": ("<", ">="),
    "ltu": ("<", ">="),
    "le": ("<=", ">"),
    "ls": ("<=", ">"),
    "gt": (">", "<="),
    "hi": (">", "<="),
    "ge": (">=", "<"),
    "hs": (">=", "<"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSummary:
    """One memory operand of one instruction. ``parameter``: the one whose value is the base, or None: then ``at``
    says what the base is. ``bytes`` None: the instruction's extent is not in its text. ``at``: the address;
    ``bounded``: it is a form of parameters and indices, not of data. ``condition``: empty where it always holds.
    """

    parameter: str | None
    mode: str
    bytes: int | None
    at: str
    bounded: bool
    condition: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSummary:
    """One parameter; ``pointer``: its value reaches an address. ``short``: how expressions call it."""

    index: int
    name: str
    short: str
    type: str
    bytes: int
    pointer: bool
    read: bool
    written: bool
    used: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySummary:
    """One kernel. ``block``: the block that it must be launched with, if it says so. ``fallbacks``: (line, why) of
    what may touch more than is listed."""

    entry: str
    block: tuple[int, int, int] | None
    parameters: tuple[ParameterSummary, ...]
    sites: tuple[SiteSummary, ...]
    fallbacks: tuple[tuple[int, str], ...]


def summarise(module: Module, entry: str) -> EntrySummary:
    """The accesses of ``entry``. Raises InputError where the module has no such kernel."""
    return _Reader(kernel_of(module, entry)).summary()


# Branches times steps up to which it is told which branches decide what is reached.
_REACH_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class _Condition:
    """A predicate's text and its opposite's; empty: not known."""

    holds: str
    fails: str


_OPAQUE = _Condition("", "")


class _Reader:
    """Reads one kernel's definitions on demand."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.steps = kernel.flow.steps
        self.definitions = Definitions(kernel)
        self.reach: dict[tuple[int, bool], set[int]] = {}
        self.branches = [
            index
            for index, step in enumerate(self.steps)
            if step.guard is not None and len(step.targets) == 1 and step.targets[0] > index + 1
        ]
        self.follows_branches = len(self.branches) * len(self.steps) <= _REACH_LIMIT

    # --- what the kernel does ------------------------------------------------------------------------------------

    def summary(self) -> EntrySummary:
        sites = tuple(dict.fromkeys(self._sites()))
        fallbacks = [
            (self.definitions.line(step), step.effects.reaches_all)
            for step in self.steps
            if step.effects.reaches_all
        ]
        fallbacks += [(site.line, site.at) for site in sites if site.parameter is None]
        fallbacks += [
            (site.line, "the address depends on data: anywhere in the allocation")
            for site in sites
            if site.parameter is not None and not site.bounded
        ]
        used = self._used_names()
        return EntrySummary(
            entry=self.kernel.function.name,
            block=self.definitions.block,
            parameters=tuple(
                ParameterSummary(
                    index=index,
                    name=parameter.name,
                    short=self.definitions.short[parameter.name],
                    type=parameter.type,
                    bytes=parameter.bytes,
                    pointer=any(site.parameter == self.definitions.short[parameter.name] for site in sites),
                    read=any(
                        s.parameter == self.definitions.short[parameter.name] and s.mode == "read"
                        for s in sites
                    ),
                    written=any(
                        s.parameter == self.definitions.short[parameter.name] and s.mode == "write"
                        for s in sites
                    ),
                    used=parameter.name in used,
                )
                for index, parameter in enumerate(self.kernel.function.parameters)
            ),
            sites=sites,
            fallbacks=tuple(dict.fromkeys(sorted(fallbacks))),
        )

    def _used_names(self) -> set[str]:
        return {
            name
            for step in self.steps
            for operand in step.operands
            for name in _names(operand)
            if name in self.definitions.offsets
        }

    def _sites(self) -> Iterator[SiteSummary]:
        for index, step in enumerate(self.steps):
            for touch in step.effects.touches:
                if not (touch.tensor or visible(touch.space)) or touch.operand >= len(step.operands):
                    continue
                address = self.definitions.value(step.operands[touch.operand])
                if "shared" in address.atoms or "local" in address.atoms:
                    continue
                size = touch.bytes
                if touch.count_operand is not None and touch.count_operand < len(step.operands):
                    count = step.operands[touch.count_operand]
                    size = count.value if isinstance(count, Immediate) else None
                bases = self.definitions.bases(address)
                bounded = bool(bases) and not address.loaded and size is not None
                condition = self._condition(index, step)
                at = address.text(first=bases[0]) if bases else self._unknown_base(address)
                for mode, does in (("read", touch.reads), ("write", touch.writes)):
                    for base in bases or (None,) if does else ():
                        yield SiteSummary(
                            parameter=base,
                            mode=mode,
                            bytes=size,
                            at=at,
                            bounded=bounded,
                            condition=condition,
                            line=self.definitions.line(step),
                        )

    @staticmethod
    def _unknown_base(address: Expression) -> str:
        named = [name.removeprefix("&") for name in address.atoms if name.startswith("&")]
        if named:
            return f"module variable {named[0]}"
        if address.loaded:
            return f"the base is {sorted(address.loaded)[0]}: any buffer"
        return "the base of the address is not a parameter: any buffer"

    # --- conditions ----------------------------------------------------------------------------------------------

    def _condition(self, index: int, step: Step) -> str:
        found: list[str] = []
        hidden = 0
        if step.guard is not None:
            condition = self._predicate(step.guard.register)
            text = condition.fails if step.guard.negated else condition.holds
            if text:
                found.append(text)
            else:
                hidden += 1
        if not self.follows_branches:
            hidden += 1
        for branch, taken in self._deciding(index) if self.follows_branches else ():
            guard = self.steps[branch].guard
            if guard is None:
                continue
            condition = self._predicate(guard.register)
            text = condition.holds if taken != guard.negated else condition.fails
            if text:
                found.append(text)
            else:
                hidden += 1
        if hidden:
            found.append("what depends on data or control")
        return " and ".join(dict.fromkeys(found))

    def _deciding(self, index: int) -> Iterator[tuple[int, bool]]:
        """Forward branches that decide whether a step is reached, and whether by being taken."""
        for branch in self.branches:
            if branch == index:
                continue
            if index not in self._reachable(branch, fall_through=False):
                yield branch, False
            elif index not in self._reachable(branch, fall_through=True):
                yield branch, True

    def _reachable(self, branch: int, *, fall_through: bool) -> set[int]:
        """Steps reachable from the start if ``branch`` could only fall through, or only be taken."""
        key = (branch, fall_through)
        if key not in self.reach:
            self.reach[key] = _reach(self.steps, branch, fall_through)
        return self.reach[key]

    def _predicate(self, register: str, depth: int = 0) -> _Condition:
        writers = self.definitions.writers.get(register, [])
        if len(writers) != 1 or depth > 8:
            return _OPAQUE
        step = self.steps[writers[0]]
        if step.guard is not None:
            return _OPAQUE
        if step.parts[0] == "setp" and len(step.operands) >= 3:
            signs = _COMPARISONS.get(step.parts[1])
            if signs is None or not width_of(step.parts[-1]) or not isinstance(step.operands[0], Name):
                return _OPAQUE
            left, right = (self.definitions.value(operand) for operand in step.operands[1:3])
            if left.loaded or right.loaded:
                return _OPAQUE
            texts = [f"{left.text()} {sign} {right.text()}" for sign in signs]
            result = _Condition(*texts)
            if len(step.operands) > 3:
                how = next((part for part in step.parts[2:] if part in ("and", "or")), "")
                return self._combined(how, result, self._operand_predicate(step.operands[3], depth))
            return result
        if step.parts[0] in ("and", "or") and step.parts[-1] == "pred":
            first, second = (self._operand_predicate(operand, depth) for operand in step.operands[1:3])
            return self._combined(step.parts[0], first, second)
        if step.parts[0] == "not" and step.parts[-1] == "pred":
            inner = self._operand_predicate(step.operands[1], depth)
            return _Condition(inner.fails, inner.holds)
        if step.parts[0] == "mov" and step.parts[-1] == "pred":
            return self._operand_predicate(step.operands[1], depth)
        return _OPAQUE

    def _operand_predicate(self, operand: Operand, depth: int) -> _Condition:
        if isinstance(operand, Negated) and isinstance(operand.operand, Name):
            inner = self._predicate(operand.operand.text, depth + 1)
            return _Condition(inner.fails, inner.holds)
        if isinstance(operand, Immediate):
            return _Condition("true", "false") if operand.value else _Condition("false", "true")
        return self._predicate(operand.text, depth + 1) if isinstance(operand, Name) else _OPAQUE

    @staticmethod
    def _combined(how: str, first: _Condition, second: _Condition) -> _Condition:
        if not how or not first.holds or not second.holds:
            return _OPAQUE
        both = f"{first.holds} and {second.holds}"
        neither = f"{first.fails} and {second.fails}"
        if how == "and":
            return _Condition(both, f"({first.fails} or {second.fails})")
        return _Condition(f"({first.holds} or {second.holds})", neither)


def _names(operand: Operand) -> Iterator[str]:
    if isinstance(operand, Name):
        yield operand.text
    elif isinstance(operand, Address):
        yield from _names(operand.base)
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _names(element)


def _reach(steps: Sequence[Step], branch: int, fall_through: bool) -> set[int]:
    seen: set[int] = set()
    waiting = [0]
    while waiting:
        index = waiting.pop()
        if index in seen or index >= len(steps):
            continue
        seen.add(index)
        step = steps[index]
        if index == branch:
            waiting.append(index + 1 if fall_through else step.targets[0])
            continue
        waiting.extend(step.targets)
        if step.guard is not None or not (step.targets or step.ends):
            waiting.append(index + 1)
    return seen
