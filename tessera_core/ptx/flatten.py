"""Lays the nested scopes of a function out as one list of instructions with unique names, and every device function
that it calls in place of the call.

A parameter of an inlined function is the caller's argument under another name, so that what is passed by address,
returned or copied piece by piece needs no rule of its own. What can't be inlined (functions of other modules,
indirect calls without a list of targets, calls deeper than :data:`DEPTH_LIMIT`, what would grow beyond the other
limits) stays a call.

Recursion deeper than :data:`RECURSION_LIMIT` becomes a loop: one more copy of the function stands for all deeper
calls of it. A call inside it sets the copy's parameters and jumps to its start; its end goes on to any of the places
that called it. Every path of the program is so a path of the flow, and what such a call touches, returns and leaves
in memory needs no summary of its own: it is what the interpreter finds when the loop comes to rest, parameters
pointing wherever one of the arguments does. All calls share one set of registers and variables, so that none may
overwrite what another one still needs: threads enter through a branch that they may or may not take, and from there
on every write is one that may have happened, every access one that may happen. What this can't stand for (see
`frames.py`) stays a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tessera_core.ptx.frames import may_be_shared
from tessera_core.ptx.syntax import (
    Address,
    Block,
    Declaration,
    Directive,
    Function,
    Group,
    Guard,
    Immediate,
    Instruction,
    Label,
    Name,
    Negated,
    Operand,
    Pair,
    Vector,
)

# Times that one function may stand on the stack of inlined calls before the rest becomes a loop.
RECURSION_LIMIT = 6

# Calls that may be on the way from the kernel to an inlined one.
DEPTH_LIMIT = 64

# Registers of all scopes and inlined copies beyond which calls stay calls.
REGISTERS_LIMIT = 500_000

# Instructions after inlining beyond which calls stay calls.
INSTRUCTIONS_LIMIT = 20_000

# Instructions after inlining beyond which every recursive call becomes a loop at once: a function that calls itself
# twice doubles with each level.
_UNROLLED_LIMIT = 4000

# Registers of one numbered family that are told apart when scopes are laid out.
_FAMILY_LIMIT = 4096

# The device heap, as a special register that points into it.
HEAP_POINTER = "%heap"

# Opcode of a call that reads the strings among its arguments and nothing else.
PRINTING = "call.printing"

_LISTED = re.compile(r"\.(?:branchtargets|calltargets)\s+(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Flat:
    """An instruction and the names that its scope gives to labels, registers and parameters."""

    instruction: Instruction
    names: Mapping[str, Name]


@dataclass(frozen=True, slots=True)
class _Loop:
    """The copy of a function that stands for all its deeper calls. ``names``: its parameters and results; ``back``:
    labels of the places that call it from inside."""

    start: str
    names: Mapping[str, Name]
    back: list[str]


@dataclass(slots=True)
class Flattener:
    """Collects instructions. ``positions`` of labels in ``flat``; ``tables`` of labels and ``callees``, lists of
    functions, by the label of their list; ``declared`` holds registers, variables and parameters of all scopes under
    their unique names. ``loops``: functions whose deeper calls the code being laid out belongs to."""

    functions: Mapping[str, Function]
    flat: list[Flat] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    declared: list[Declaration] = field(default_factory=list)
    callees: dict[str, tuple[str, ...]] = field(default_factory=dict)
    inlined: int = 0
    registers: int = 0
    copied: int = 0
    loops: dict[str, _Loop] = field(default_factory=dict)

    def add(self, block: Block, outer: Mapping[str, Name], site: str, stack: Sequence[str], end: str) -> None:
        """Append ``block``. ``site`` tells inlined copies apart; in them ``end`` is the label that they return to."""
        names = dict(outer)
        self.registers += len(names)
        scope = f"@{block.at}{site}"
        nested = bool(self.positions or self.flat or site)
        for item in block.items:
            if isinstance(item, Label):
                names[item.name] = Name(item.name + scope)
            elif isinstance(item, Declaration):
                self._declare(item, names, scope, nested)
        self._lists(block, names)
        for item in block.items:
            if isinstance(item, Label):
                self.positions[names[item.name].text] = len(self.flat)
            elif isinstance(item, Block):
                self.add(item, names, site, stack, end)
            elif isinstance(item, Instruction):
                opcode = item.opcode.split(".")[0]
                if opcode == "ret" and end:
                    self._emit("bra", (Name(end),), item.at, names, item.guard)
                elif opcode == "call":
                    self._call(item, names, site, stack)
                else:
                    self.flat.append(Flat(item, names))

    def _declare(self, item: Declaration, names: dict[str, Name], scope: str, nested: bool) -> None:
        if not nested:
            self.declared.append(item)
        elif item.space == "reg" and item.count is not None:
            self.declared.append(item)
            self.registers += min(item.count, _FAMILY_LIMIT)
            for index in range(min(item.count, _FAMILY_LIMIT)):
                names[f"{item.name}{index}"] = Name(f"{item.name}{index}{scope}")
        elif item.space == "reg":
            self.declared.append(item)
            names[item.name] = Name(item.name + scope)
        else:
            self.declared.append(replace(item, name=item.name + scope))
            names[item.name] = Name(item.name + scope)

    def _lists(self, block: Block, names: Mapping[str, Name]) -> None:
        """Note the lists of branch and call targets under their labels."""
        label = ""
        for item in block.items:
            if isinstance(item, Label):
                label = item.name
            elif isinstance(item, Directive) and label and (match := _LISTED.match(item.text)):
                listed = tuple(part.strip() for part in match[1].split(","))
                if item.name == ".branchtargets":
                    self.tables[names[label].text] = tuple(
                        names[part].text if part in names else part for part in listed
                    )
                else:
                    self.callees[names[label].text] = listed

    def _emit(
        self,
        opcode: str,
        operands: tuple[Operand, ...],
        at: int,
        names: Mapping[str, Name],
        guard: Guard | None = None,
    ) -> None:
        self.flat.append(Flat(Instruction(guard, opcode, operands, at), names))

    # --- calls --------------------------------------------------------------------------------------------------

    def _call(
        self,
        call: Instruction,
        names: Mapping[str, Name],
        site: str,
        stack: Sequence[str],
    ) -> None:
        operands = list(call.operands)
        results = operands.pop(0) if operands and isinstance(operands[0], Group) else Group(())
        callee = operands.pop(0) if operands else None
        arguments = operands.pop(0) if operands and isinstance(operands[0], Group) else Group(())
        last = operands[-1] if operands else None
        assert isinstance(results, Group) and isinstance(arguments, Group)
        if not isinstance(callee, Name):
            self.flat.append(Flat(call, names))
            return
        known: tuple[str, ...] = (callee.text,)
        if isinstance(last, Name):
            known = self.callees.get(names[last.text].text, ()) if last.text in names else ()
        if self._known_elsewhere(call, callee.text, results, arguments, names):
            return
        bodies = [self.functions.get(name) for name in known]
        if not bodies or not all(self._fits(body, results, arguments, stack) for body in bodies):
            self.flat.append(Flat(call, names))
            return
        self.inlined += 1
        after = f"%after{self.inlined}"
        if call.guard is not None:
            self._emit("bra", (Name(after),), call.at, {}, self._inverse(call.guard, names))
        starts = tuple(f"{after}.{index}" for index in range(len(bodies)))
        if len(bodies) > 1:
            self.tables[after] = starts
            self._emit("brx.idx", (Immediate(None, "?"), Name(after)), call.at, {})
        in_loop = [body is not None and self._in_loop(body, stack) for body in bodies]
        for start, body, repeats in zip(starts, bodies, in_loop, strict=True):
            assert body is not None
            self.positions[start] = len(self.flat)
            passed = (body, results, arguments, names, f"{site}.{self.inlined}", stack, after)
            if repeats:
                self._repeat(*passed)
            else:
                self._inline(*passed)
        self.positions[after] = len(self.flat)

    @staticmethod
    def _inverse(guard: Guard, names: Mapping[str, Name]) -> Guard:
        name = names.get(guard.register)
        return Guard(guard.register if name is None else name.text, not guard.negated)

    def _known_elsewhere(
        self, call: Instruction, callee: str, results: Group, arguments: Group, names: Mapping[str, Name]
    ) -> bool:
        """Functions of the device runtime whose effects are documented (CUDA C++ Programming Guide, "Formatted
        Output", "Dynamic Global Memory Allocation", "Assertion")."""
        if callee in self.functions:
            return False
        result = results.elements[0] if results.elements else None
        if callee == "__assertfail":
            self._emit("trap", (), call.at, names, call.guard)
        elif callee == "vprintf":
            self._emit(PRINTING, (), call.at, names, call.guard)
        elif callee == "malloc" and isinstance(result, Name):
            self._emit("st.param.b64", (Address(result, 0), Name(HEAP_POINTER)), call.at, names, call.guard)
        else:
            return callee == "free"
        return True

    def _fits(self, body: Function | None, results: Group, arguments: Group, stack: Sequence[str]) -> bool:
        return (
            body is not None
            and body.body is not None
            and len(body.results) == len(results.elements)
            and len(body.parameters) == len(arguments.elements)
            and len(stack) < DEPTH_LIMIT
            and self.registers < REGISTERS_LIMIT
            and (may_be_shared(body) or not (self.loops or self._in_loop(body, stack)))
            and len(self.flat) + len(body.body.items) < INSTRUCTIONS_LIMIT
            and all(
                (item.count or 0) <= _FAMILY_LIMIT
                for item in body.body.items
                if isinstance(item, Declaration)
            )
        )

    def _in_loop(self, body: Function, stack: Sequence[str]) -> bool:
        """Whether a call is to a loop, one that is begun already or a new one."""
        limit = RECURSION_LIMIT if len(self.flat) < _UNROLLED_LIMIT else 1
        return body.name in self.loops or stack.count(body.name) >= limit

    def _inline(
        self,
        function: Function,
        results: Group,
        arguments: Group,
        names: Mapping[str, Name],
        site: str,
        stack: Sequence[str],
        after: str,
    ) -> None:
        inner: dict[str, Name] = {}
        returned: list[tuple[Declaration, Name]] = []
        for formal, actual in zip(
            (*function.results, *function.parameters),
            (*results.elements, *arguments.elements),
            strict=True,
        ):
            own = Name(f"{formal.name}@{function.at}{site}")
            given = renamed(actual, names)
            if formal.space == "param" and isinstance(given, Name) and given.text in self._parameters():
                inner[formal.name] = given
                continue
            inner[formal.name] = own
            self.declared.append(replace(formal, name=own.text))
            is_result = any(formal is result for result in function.results)
            if is_result and isinstance(given, Name):
                returned.append((formal, given))
            elif not is_result:
                self._copy(formal, own, given, function.at)
        body = function.body
        assert body is not None
        end = f"{after}{site}" if returned else after
        self.add(body, inner, site, (*stack, function.name), end)
        if returned:
            self.positions[end] = len(self.flat)
            for formal, given in returned:
                self._copy(formal, given, inner[formal.name], function.at)
        self._emit("bra", (Name(after),), function.at, {})

    def _repeat(
        self,
        function: Function,
        results: Group,
        arguments: Group,
        names: Mapping[str, Name],
        site: str,
        stack: Sequence[str],
        after: str,
    ) -> None:
        """A call from outside or inside the loop that stands for the deeper calls of ``function``."""
        back = f"{after}.back{site}"
        loop = self.loops.get(function.name)
        opens = loop is None
        if loop is None:
            formals = (*function.results, *function.parameters)
            inner = {formal.name: Name(f"{formal.name}@{function.at}{site}") for formal in formals}
            self.declared.extend(replace(formal, name=inner[formal.name].text) for formal in formals)
            loop = _Loop(f"{after}.start{site}", inner, [])
        for formal, actual in zip(function.parameters, arguments.elements, strict=True):
            self._copy(formal, loop.names[formal.name], renamed(actual, names), function.at)
        if opens:
            self._perhaps(loop.start, back, function.at)
            self.positions[loop.start] = len(self.flat)
            self.loops[function.name] = loop
            end = f"{after}.end{site}"
            assert function.body is not None
            self.add(function.body, loop.names, site, (*stack, function.name), end)
            del self.loops[function.name]
            self.positions[end] = len(self.flat)
            for place in loop.back:
                # one branch each: the interpreter tells by branch whether a jump back is worth following again
                further = f"{place}.not"
                self._perhaps(place, further, function.at)
                self.positions[further] = len(self.flat)
        else:
            loop.back.append(back)
            self._emit("bra", (Name(loop.start),), function.at, {})
        self.positions[back] = len(self.flat)
        for formal, given in zip(function.results, results.elements, strict=True):
            if isinstance(renamed(given, names), Name):
                self._copy(formal, renamed(given, names), loop.names[formal.name], function.at)
        self._emit("bra", (Name(after),), function.at, {})

    def _perhaps(self, place: str, other: str, at: int) -> None:
        """A branch to either place."""
        table = f"{place}.or"
        self.tables[table] = (place, other)
        self._emit("brx.idx", (Immediate(None, "?"), Name(table)), at, {})

    def _copy(self, formal: Declaration, target: Operand, source: Operand, at: int) -> None:
        """Move one value of the type of ``formal`` between registers and parameters of calls."""
        parameters = self._parameters()
        stores = isinstance(target, Name) and target.text in parameters
        if isinstance(source, Name) and source.text in parameters:
            register = target
            if stores:
                self.copied += 1
                register = Name(f"%copied.{self.copied}")
                self.declared.append(replace(formal, space="reg", name=register.text, count=None))
            self._emit(f"ld.param.{formal.type}", (register, Address(source, 0)), at, {})
            source = register
        elif not stores:
            self._emit(f"mov.{formal.type}", (target, source), at, {})
        if stores:
            assert isinstance(target, Name)
            self._emit(f"st.param.{formal.type}", (Address(target, 0), source), at, {})

    def _parameters(self) -> set[str]:
        return {item.name for item in self.declared if item.space == "param"}


def renamed(operand: Operand, names: Mapping[str, Name]) -> Operand:
    """The operand with every name as ``names`` has it."""
    if isinstance(operand, Name):
        return names.get(operand.text, operand)
    if isinstance(operand, Immediate):
        return operand
    if isinstance(operand, Address):
        base = (
            operand.base
            if isinstance(operand.base, Immediate)
            else names.get(operand.base.text, operand.base)
        )
        return Address(base, operand.offset, tuple(renamed(extra, names) for extra in operand.extra))
    if isinstance(operand, Vector):
        return Vector(tuple(renamed(element, names) for element in operand.elements))
    if isinstance(operand, Group):
        return Group(tuple(renamed(element, names) for element in operand.elements))
    if isinstance(operand, Pair):
        return Pair(renamed(operand.first, names), renamed(operand.second, names))
    return Negated(renamed(operand.operand, names), operand.sign)
