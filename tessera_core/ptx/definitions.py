"""The registers of a kernel as expressions of its parameters and indices, read from their definitions on demand.

A register that is set in one place is the expression of its definition; one that a loop adds to is its start plus
a multiple of ``iN``, which says how often line N has run since; ``load@N`` is what line N loads, and ``value@N``
what it computes in a way that has no form. Of a register that several places set, the parameters that it may point
into are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tessera_core.ptx import symbolic
from tessera_core.ptx.flow import Step
from tessera_core.ptx.kernel import Kernel
from tessera_core.ptx.parser import type_bytes
from tessera_core.ptx.symbolic import Expression
from tessera_core.ptx.syntax import Address, Immediate, Name, Operand, Vector
from tessera_core.ptx.values import width_of

_THREADS_LIMIT = 1024  # of a block, and so of each of its axes
_EVALUATIONS_LIMIT = 50_000  # beyond, registers are values without a form; no kernel seen needs a tenth


class Definitions:
    """``block``: the block that the kernel requires, if it does. ``short``: how expressions call each parameter.
    ``writers``: by register, the steps that set it."""

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
        self._known: dict[str, Expression] = {}
        self._pending: set[str] = set()
        self._met: set[str] = set()  # pending registers that were asked for
        self._left = _EVALUATIONS_LIMIT
        self._either: dict[str, tuple[str, ...]] = {}  # atoms that are one of several parameters

    def value(self, operand: Operand) -> Expression:
        """What an operand holds, or an address is, whenever it is used."""
        if isinstance(operand, Immediate):
            return (
                symbolic.atom("?", loaded=True) if operand.value is None else symbolic.number(operand.value)
            )
        if isinstance(operand, Address):
            return symbolic.add(self.value(operand.base), symbolic.number(operand.offset))
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
        found = self._known.get(name)
        if found is not None:
            return found
        if name in self._pending:
            self._met.add(name)
            return symbolic.atom(f"@{name}")
        self._left -= 1
        if self._left < 0:
            return symbolic.atom(f"{name} (not followed)", loaded=True)
        self._pending.add(name)
        writers = self.writers[name]
        result = self._defined(name, writers[0]) if len(writers) == 1 else self._carried(name, writers)
        self._pending.discard(name)
        self._met.discard(name)
        if not self._met:  # else it lacks what the registers around it may add
            self._known[name] = result
        return result

    def _defined(self, name: str, index: int) -> Expression:
        step = self.steps[index]
        if step.guard is not None:
            return symbolic.atom(f"value@{self.line(step)}", loaded=True)
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
                count = symbolic.atom(f"i{self.line(self.steps[index])}", 0)
                return symbolic.add(starts[0], symbolic.multiply(by, count))
        if not steps and len({start.text() for start in starts}) == 1:
            return starts[0]
        return self._several(writers, starts)

    def _several(self, writers: Sequence[int], starts: Sequence[Expression]) -> Expression:
        """One of several values, of which the parameters that they point into are kept."""
        loads = [index for index in writers if self.steps[index].effects.touches]
        lines = sorted({self.line(self.steps[index]) for index in writers})
        name = f"value@{','.join(map(str, lines[:4]))}"
        if len(loads) == 1 and self.steps[loads[0]].effects.touches[0].space != "param":
            name = f"load@{self.line(self.steps[loads[0]])}"
        opaque = symbolic.atom(name, loaded=True)
        carried = [m[0] for s in starts for m in s.terms if len(m) == 1 and m[0].startswith("@")]
        bases = [self.bases(start) for start in starts if not any(a.startswith("@") for a in start.atoms)]
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
        self._either[name] = bases
        return symbolic.atom(name)

    def _result(self, name: str, step: Step) -> Expression:
        """What ``step`` puts into register ``name``."""
        head, line = step.parts[0], self.line(step)
        target = step.operands[0] if step.operands else None
        if head == "ld" and step.effects.touches and step.effects.touches[0].space == "param":
            return self._parameter(name, step)
        if step.effects.touches:
            return symbolic.atom(f"load@{line}", loaded=True)
        if not isinstance(target, Name) or not (width_of(step.parts[-1]) or head in ("mov", "cvta")):
            return symbolic.atom(f"value@{line}", loaded=True)
        if any(isinstance(operand, Vector) for operand in step.operands):
            return symbolic.atom(f"value@{line}", loaded=True)
        sources = tuple(self.value(operand) for operand in step.operands[1:])
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
        address = self.value(step.operands[1])
        offset = address.terms.get((), 0)
        named = [a.removeprefix("&") for a in address.atoms if a.startswith("&")]
        if (
            len(named) != 1
            or not set(address.terms) <= {(), (f"&{named[0]}",)}
            or named[0] not in self.offsets
        ):
            wide = tuple(self.short[p.name] for p in self.kernel.function.parameters if p.bytes >= 8)
            opaque = symbolic.atom(f"value@{self.line(step)}", loaded=True)
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

    def line(self, step: Step) -> int:
        """Its line in the module."""
        return self.kernel.module.line(step.at)

    def bases(self, address: Expression) -> tuple[str, ...]:
        """The parameters that an address may be computed from: one that it holds once, alone, or alternatives."""
        wide = {self.short[p.name]: p for p in self.kernel.function.parameters if p.bytes >= 8}
        alone = [m[0] for m, factor in address.terms.items() if factor == 1 and len(m) == 1]
        for name in alone:
            if name in self._either:
                return self._either[name]
        found = [name.split("[")[0] for name in alone if name.split("[")[0] in wide]
        pointers = [
            name for name in found if wide[name].type in ("u64", "b64", "s64") or wide[name].bytes > 8
        ]
        return tuple((pointers or found)[:1])


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
