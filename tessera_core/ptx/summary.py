"""What a kernel touches, in terms of its parameters and indices: for readers, without a launch.

Every register that is set in one place is the expression of its definition; one that a loop adds to is its start
plus a multiple of ``iN``, which says how often line N has run since; ``load@N`` is what line N loads, and
``value@N`` what it computes in a way that has no form. Conditions
are those of the instruction's own guard and of the branches that decide whether it is reached: removing one side
of the branch from the control flow makes it unreachable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tessera_core.ptx import symbolic
from tessera_core.ptx.flow import Step, visible
from tessera_core.ptx.kernel import Kernel, kernel_of
from tessera_core.ptx.parser import type_bytes
from tessera_core.ptx.symbolic import Expression
from tessera_core.ptx.syntax import Address, Immediate, Module, Name, Negated, Operand, Vector
from tessera_core.ptx.values import width_of

_THREADS_LIMIT = 1024  # of a block, and so of each of its axes
_EVALUATIONS_LIMIT = 50_000  # beyond, registers are values without a form; no kernel seen needs a tenth

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
        self.block = _required_block(kernel.function.directives)
        self.offsets = kernel.function.parameter_offsets()
        self.short = {
            parameter.name: f"arg{index}"
            if parameter.name == f"{kernel.function.name}_param_{index}"
            else parameter.name
            for index, parameter in enumerate(kernel.function.parameters)
        }
        self.writers: dict[str, list[int]] = {}
        for index, step in enumerate(self.steps):
            for name in step.writes:
                self.writers.setdefault(name, []).append(index)
        self.known: dict[str, Expression] = {}
        self.pending: set[str] = set()
        self.met: set[str] = set()  # pending registers that were asked for
        self.left = _EVALUATIONS_LIMIT
        self.reach: dict[tuple[int, bool], set[int]] = {}
        self.either: dict[str, tuple[str, ...]] = {}  # atoms that are one of several parameters

    # --- what the kernel does ------------------------------------------------------------------------------------

    def summary(self) -> EntrySummary:
        sites = tuple(dict.fromkeys(self._sites()))
        fallbacks = [
            (self._line(step), step.effects.reaches_all) for step in self.steps if step.effects.reaches_all
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
            block=self.block,
            parameters=tuple(
                ParameterSummary(
                    index=index,
                    name=parameter.name,
                    short=self.short[parameter.name],
                    type=parameter.type,
                    bytes=parameter.bytes,
                    pointer=any(site.parameter == self.short[parameter.name] for site in sites),
                    read=any(s.parameter == self.short[parameter.name] and s.mode == "read" for s in sites),
                    written=any(
                        s.parameter == self.short[parameter.name] and s.mode == "write" for s in sites
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
            if name in self.offsets
        }

    def _sites(self) -> Iterator[SiteSummary]:
        for index, step in enumerate(self.steps):
            for touch in step.effects.touches:
                if not visible(touch.space) or touch.operand >= len(step.operands):
                    continue
                address = self._value(step.operands[touch.operand])
                if "shared" in address.atoms or "local" in address.atoms:
                    continue
                size = touch.bytes
                if step.extent is not None and step.extent < len(step.operands):
                    extent = step.operands[step.extent]
                    size = extent.value if isinstance(extent, Immediate) else None
                bases = self._bases(address)
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
                            line=self._line(step),
                        )

    def _bases(self, address: Expression) -> tuple[str, ...]:
        """The parameters that an address may be computed from: one that it holds once, alone, or alternatives."""
        wide = {self.short[p.name]: p for p in self.kernel.function.parameters if p.bytes >= 8}
        alone = [m[0] for m, factor in address.terms.items() if factor == 1 and len(m) == 1]
        for name in alone:
            if name in self.either:
                return self.either[name]
        found = [name.split("[")[0] for name in alone if name.split("[")[0] in wide]
        pointers = [
            name for name in found if wide[name].type in ("u64", "b64", "s64") or wide[name].bytes > 8
        ]
        return tuple((pointers or found)[:1])

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
        for branch, taken in self._deciding(index):
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
        for branch in self._branches():
            if branch == index:
                continue
            if index not in self._reachable(branch, fall_through=False):
                yield branch, False
            elif index not in self._reachable(branch, fall_through=True):
                yield branch, True

    def _branches(self) -> list[int]:
        return [
            index
            for index, step in enumerate(self.steps)
            if step.guard is not None and len(step.targets) == 1 and step.targets[0] > index + 1
        ]

    def _reachable(self, branch: int, *, fall_through: bool) -> set[int]:
        """Steps reachable from the start if ``branch`` could only fall through, or only be taken."""
        key = (branch, fall_through)
        if key not in self.reach:
            self.reach[key] = _reach(self.steps, branch, fall_through)
        return self.reach[key]

    def _predicate(self, register: str, depth: int = 0) -> _Condition:
        writers = self.writers.get(register, [])
        if len(writers) != 1 or depth > 8:
            return _OPAQUE
        step = self.steps[writers[0]]
        if step.guard is not None:
            return _OPAQUE
        if step.parts[0] == "setp" and len(step.operands) >= 3:
            signs = _COMPARISONS.get(step.parts[1])
            if signs is None or not width_of(step.parts[-1]) or not isinstance(step.operands[0], Name):
                return _OPAQUE
            left, right = (self._value(operand) for operand in step.operands[1:3])
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

    # --- values --------------------------------------------------------------------------------------------------

    def _value(self, operand: Operand) -> Expression:
        if isinstance(operand, Immediate):
            return (
                symbolic.atom("?", loaded=True) if operand.value is None else symbolic.number(operand.value)
            )
        if isinstance(operand, Address):
            return symbolic.add(self._value(operand.base), symbolic.number(operand.offset))
        if isinstance(operand, Name):
            return self._named(operand.text)
        return symbolic.atom("?", loaded=True)

    def _named(self, name: str) -> Expression:
        if name.startswith("%"):
            special = self._special(name)
            if special is not None:
                return special
        if name in self.writers:
            return self._register(name)
        if name in self.offsets:
            return symbolic.atom(f"&{name}")
        value = self.kernel.symbols.get(name)
        if value is not None:
            space = next(
                (d.space for d in (*self.kernel.module.variables, *self.kernel.flow.local) if d.name == name),
                "",
            )
            return symbolic.atom(space if space in ("shared", "local") else f"&{name}")
        return symbolic.atom("?", loaded=True)

    def _special(self, name: str) -> Expression | None:
        kind, _, axis = name[1:].partition(".")
        if kind not in ("tid", "ntid", "ctaid", "nctaid", "laneid") or (
            kind != "laneid" and axis not in "xyz"
        ):
            return None
        extent = self.block["xyz".index(axis)] if self.block and axis else None
        if kind == "laneid":
            return symbolic.atom("laneid", 0, 31)
        if kind == "ntid":
            return symbolic.number(extent) if extent else symbolic.atom(name[1:], 1, _THREADS_LIMIT)
        if kind == "tid":
            if extent == 1:
                return symbolic.number(0)
            return symbolic.atom(name[1:], 0, (extent or _THREADS_LIMIT) - 1)
        return symbolic.atom(name[1:], 1 if kind == "nctaid" else 0)

    def _register(self, name: str) -> Expression:
        found = self.known.get(name)
        if found is not None:
            return found
        if name in self.pending:
            self.met.add(name)
            return symbolic.atom(f"@{name}")
        self.left -= 1
        if self.left < 0:
            return symbolic.atom(f"{name} (not followed)", loaded=True)
        self.pending.add(name)
        writers = self.writers[name]
        result = self._defined(name, writers[0]) if len(writers) == 1 else self._carried(name, writers)
        self.pending.discard(name)
        self.met.discard(name)
        if not self.met:  # else it lacks what the registers around it may add
            self.known[name] = result
        return result

    def _defined(self, name: str, index: int) -> Expression:
        step = self.steps[index]
        if step.guard is not None:
            return symbolic.atom(f"value@{self._line(step)}", loaded=True)
        return self._result(name, step)

    def _carried(self, name: str, writers: Sequence[int]) -> Expression:
        """A register that is set in several places: a start, and a loop that adds the same each time round."""
        own = f"@{name}"
        starts: list[Expression] = []
        steps: list[tuple[int, Expression]] = []
        for index in writers:
            value = self._result(name, self.steps[index])
            once = value.terms.get((own,)) == 1 and sum(own in monomial for monomial in value.terms) == 1
            if once:
                steps.append((index, symbolic.add(value, symbolic.atom(own), -1)))
            elif own in value.atoms:
                starts.append(symbolic.atom("?", loaded=True))
            else:
                starts.append(value)
        guarded = any(self.steps[index].guard is not None for index in writers)
        if not guarded and len(starts) == 1 and len(steps) == 1:
            index, by = steps[0]
            if not any(atom.startswith("@") for atom in by.atoms):
                count = symbolic.atom(f"i{self._line(self.steps[index])}", 0)
                return symbolic.add(starts[0], symbolic.multiply(by, count))
        if not steps and len({start.text() for start in starts}) == 1:
            return starts[0]
        return self._several(writers, starts)

    def _several(self, writers: Sequence[int], starts: Sequence[Expression]) -> Expression:
        """One of several values, of which the parameters that they point into are kept."""
        loads = [index for index in writers if self.steps[index].effects.touches]
        lines = sorted({self._line(self.steps[index]) for index in writers})
        name = f"value@{','.join(map(str, lines[:4]))}"
        if len(loads) == 1 and self.steps[loads[0]].effects.touches[0].space != "param":
            name = f"load@{self._line(self.steps[loads[0]])}"
        opaque = symbolic.atom(name, loaded=True)
        carried = [m[0] for s in starts for m in s.terms if len(m) == 1 and m[0].startswith("@")]
        bases = [self._bases(start) for start in starts if not any(a.startswith("@") for a in start.atoms)]
        if not bases and len(set(carried)) == 1:
            return symbolic.add(symbolic.atom(carried[0]), opaque)
        if not bases or not all(bases):
            return opaque
        return symbolic.add(self._one_of(tuple(dict.fromkeys(b for found in bases for b in found))), opaque)

    def _one_of(self, bases: tuple[str, ...]) -> Expression:
        """A parameter, or an atom for one of several."""
        if len(bases) == 1:
            return symbolic.atom(bases[0])
        name = f"({' or '.join(bases)})"
        self.either[name] = bases
        return symbolic.atom(name)

    def _result(self, name: str, step: Step) -> Expression:
        """What ``step`` puts into register ``name``."""
        head, line = step.parts[0], self._line(step)
        target = step.operands[0] if step.operands else None
        if head == "ld" and step.effects.touches and step.effects.touches[0].space == "param":
            return self._parameter(name, step)
        if step.effects.touches:
            return symbolic.atom(f"load@{line}", loaded=True)
        if not isinstance(target, Name) or not (width_of(step.parts[-1]) or head in ("mov", "cvta")):
            return symbolic.atom(f"value@{line}", loaded=True)
        if any(isinstance(operand, Vector) for operand in step.operands):
            return symbolic.atom(f"value@{line}", loaded=True)
        sources = tuple(self._value(operand) for operand in step.operands[1:])
        result = _computed(head, step.parts, sources)
        if any(atom.startswith("@") for source in sources for atom in source.atoms):
            return result or symbolic.atom(f"value@{line}", loaded=True)
        register = name.split("@")[0]
        if result is None:
            return symbolic.operation(register, sources)
        if any(len(atom) > symbolic.ATOM_LENGTH_LIMIT for atom in result.atoms):
            return symbolic.operation(register, (result,), *result.bounds())
        return result

    def _parameter(self, name: str, step: Step) -> Expression:
        address = self._value(step.operands[1])
        offset = address.terms.get((), 0)
        named = [a.removeprefix("&") for a in address.atoms if a.startswith("&")]
        if (
            len(named) != 1
            or not set(address.terms) <= {(), (f"&{named[0]}",)}
            or named[0] not in self.offsets
        ):
            wide = tuple(self.short[p.name] for p in self.kernel.function.parameters if p.bytes >= 8)
            opaque = symbolic.atom(f"value@{self._line(step)}", loaded=True)
            return symbolic.add(self._one_of(wide), opaque) if wide else opaque
        target = step.operands[0]
        size = type_bytes(step.parts[-1])
        if isinstance(target, Vector):
            lanes = [element.text if isinstance(element, Name) else "" for element in target.elements]
            offset += lanes.index(name) * size
        parameter = next(p for p in self.kernel.function.parameters if p.name == named[0])
        whole = offset == 0 and size == parameter.bytes
        text = self.short[named[0]]
        return symbolic.atom(text if whole else f"{text}[{offset}:{offset + size}]")

    def _line(self, step: Step) -> int:
        return self.kernel.module.line(step.at)


def _computed(head: str, parts: Sequence[str], sources: Sequence[Expression]) -> Expression | None:
    """The arithmetic that has a form; None for the rest."""
    match head, sources:
        case ("mov" | "cvta" | "cvt", (x,)):
            return x
        case ("add", (x, y)):
            return symbolic.add(x, y)
        case ("sub", (x, y)):
            return symbolic.add(x, y, -1)
        case ("mul", (x, y)) if "hi" not in parts:
            return symbolic.multiply(x, y)
        case ("mad", (x, y, z)) if "hi" not in parts:
            return symbolic.add(symbolic.multiply(x, y), z)
        case ("neg", (x,)):
            return symbolic.multiply(x, symbolic.number(-1))
        case ("not", (x,)):
            return symbolic.add(symbolic.number(-1), x, -1)
        case ("shl", (x, y)) if y.constant is not None and 0 <= y.constant < 64:
            return symbolic.multiply(x, symbolic.number(1 << y.constant))
        case ("shr", (x, y)) if y.constant is not None and 0 <= y.constant < 64:
            return symbolic.shift_right(x, y.constant)
        case ("and", (x, y)):
            x, y = (y, x) if x.constant is not None else (x, y)
            bits = y.constant
            return symbolic.mask(x, bits) if bits is not None and bits >= 0 else None
        case ("or", (x, y)):
            return symbolic.join_bits(x, y)
        case ("rem", (x, y)) if y.constant is not None and y.constant > 0:
            return symbolic.remainder(x, y.constant)
        case ("bfe", (x, y, z)) if y.constant is not None and z.constant is not None and parts[-1][0] == "u":
            return symbolic.mask(symbolic.shift_right(x, y.constant), (1 << z.constant) - 1)
        case ("rem", (x, y)):
            return symbolic.operation(f"({symbolic.grouped(x)} % {symbolic.grouped(y)})", (x, y))
        case ("div", (x, y)) if y.constant is not None and y.constant > 0 and y.constant.bit_count() == 1:
            return symbolic.shift_right(x, y.constant.bit_length() - 1)
        case ("div", (x, y)):
            return symbolic.operation(f"({symbolic.grouped(x)} / {symbolic.grouped(y)})", (x, y))
        case ("min" | "max", (x, y)):
            return symbolic.operation(f"{head}({x.text()}, {y.text()})", (x, y))
    return None


def _required_block(directives: Sequence[str]) -> tuple[int, int, int] | None:
    for text in directives:
        if "reqntid" in text:
            extents = [int(found) for found in re.findall(r"\d+", text)]
            x, y, z = (*extents, 1, 1, 1)[:3]
            return x, y, z
    return None


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
