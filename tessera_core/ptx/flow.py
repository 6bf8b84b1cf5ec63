"""A function as a flat list of steps with resolved scopes, branch targets and control flow: the form that the
interpreter runs. Steps that bear neither on an address nor on whether an access happens are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tessera_core.ptx.effects import Effects, effects_of
from tessera_core.ptx.parser import type_bytes
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

_ENDS = frozenset({"ret", "exit", "trap"})
# Opcodes whose first operand is a source although it is not an address.
_NO_DESTINATION = frozenset({"bra", "brx", "bar", "barrier", "nanosleep", "stackrestore"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instruction ready to run. ``targets``: steps that it may branch to (never the next one).

    ``writes``: registers that it sets.
    """

    parts: tuple[str, ...]
    guard: Guard | None
    operands: tuple[Operand, ...]
    at: int
    targets: tuple[int, ...]
    effects: Effects
    writes: tuple[str, ...]

    @property
    def ends(self) -> bool:
        """Whether threads that execute it are done."""
        return self.parts[0] in _ENDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The steps of one function. ``runs``: indices of the steps worth running, ascending. ``joins``: for a step
    with branch targets, the step where its paths surely meet again (``len(steps)``: at the end). ``widths``: bits
    of registers, by name or by name without its number (0 where scopes disagree)."""

    steps: tuple[Step, ...]
    runs: tuple[int, ...]
    joins: Mapping[int, int]
    doomed: frozenset[int]
    follows_shared: bool
    local: tuple[Declaration, ...]
    widths: Mapping[str, int]

    def width(self, register: str) -> int:
        """Bits of a register, 0 where not known."""
        name = register.split("@", 1)[0]
        return self.widths.get(name) or self.widths.get(name.rstrip("0123456789"), 0)


@dataclass(frozen=True, slots=True)
class _Flat:
    instruction: Instruction
    labels: Mapping[str, str]


def build_flow(function: Function) -> Flow:
    """Flatten ``function``, which must have a body."""
    assert function.body is not None
    flat: list[_Flat] = []
    positions: dict[str, int] = {}
    tables: dict[str, tuple[str, ...]] = {}
    local: list[Declaration] = []
    _flatten(function.body, {}, flat, positions, tables, local)
    steps = tuple(_step(item, positions, tables, len(flat)) for item in flat)
    joins, doomed = _joins(steps)
    follows_shared = _follows_shared(steps)
    return Flow(
        steps=steps,
        runs=tuple(sorted(_relevant(steps, follows_shared))),
        joins=joins,
        doomed=doomed,
        follows_shared=follows_shared,
        local=tuple(item for item in local if item.space != "reg"),
        widths=_widths(local),
    )


def _widths(declarations: Iterable[Declaration]) -> dict[str, int]:
    widths: dict[str, int] = {}
    for item in declarations:
        if item.space == "reg":
            bits = 1 if item.type == "pred" else type_bytes(item.type) * 8
            widths[item.name] = bits if widths.get(item.name, bits) == bits else 0
    return widths


def registers(operand: Operand) -> Iterator[str]:
    """Every name inside an operand."""
    if isinstance(operand, Name):
        yield operand.text
    elif isinstance(operand, Address):
        yield from registers(operand.base)
        for extra in operand.extra:
            yield from registers(extra)
    elif isinstance(operand, (Vector, Group)):
        for element in operand.elements:
            yield from registers(element)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)
    elif isinstance(operand, Negated):
        yield from registers(operand.operand)


def _flatten(
    block: Block,
    outer: Mapping[str, str],
    flat: list[_Flat],
    positions: dict[str, int],
    tables: dict[str, tuple[str, ...]],
    local: list[Declaration],
) -> None:
    """Append the instructions of ``block``; names that a nested scope declares get a suffix of their own."""
    names = dict(outer)
    nested = bool(positions or flat)
    prefixes: list[tuple[str, int]] = []
    for item in block.items:
        if isinstance(item, Declaration):
            local.append(item)
            if item.space != "reg":
                continue
            if nested and item.count is None:
                names[item.name] = f"{item.name}@{block.at}"
            elif nested and item.count is not None:
                prefixes.append((item.name, item.count))
        elif isinstance(item, Label):
            names[item.name] = f"{item.name}@{block.at}"
    for prefix, count in prefixes:
        for index in range(min(count, 4096)):
            names[f"{prefix}{index}"] = f"{prefix}{index}@{block.at}"
    pending = ""
    for item in block.items:
        if isinstance(item, Label):
            pending = names[item.name]
            positions[pending] = len(flat)
        elif isinstance(item, Directive):
            if item.name == ".branchtargets" and pending:
                listed = item.text.split(None, 1)[1] if " " in item.text or "\n" in item.text else ""
                tables[pending] = tuple(names.get(part.strip(), part.strip()) for part in listed.split(","))
        elif isinstance(item, Block):
            _flatten(item, names, flat, positions, tables, local)
        elif isinstance(item, Instruction):
            flat.append(_Flat(item, names))


def _renamed(operand: Operand, names: Mapping[str, str]) -> Operand:
    if isinstance(operand, Name):
        return Name(names[operand.text]) if operand.text in names else operand
    if isinstance(operand, Immediate):
        return operand
    if isinstance(operand, Address):
        base = _renamed(operand.base, names)
        assert isinstance(base, (Name, Immediate))
        return Address(base, operand.offset, tuple(_renamed(extra, names) for extra in operand.extra))
    if isinstance(operand, Vector):
        return Vector(tuple(_renamed(element, names) for element in operand.elements))
    if isinstance(operand, Group):
        return Group(tuple(_renamed(element, names) for element in operand.elements))
    if isinstance(operand, Pair):
        return Pair(_renamed(operand.first, names), _renamed(operand.second, names))
    return Negated(_renamed(operand.operand, names), operand.sign)


def _step(item: _Flat, positions: Mapping[str, int], tables: Mapping[str, tuple[str, ...]], end: int) -> Step:
    instruction, names = item.instruction, item.labels
    parts = tuple(instruction.opcode.split("."))
    operands = (
        tuple(_renamed(operand, names) for operand in instruction.operands) if names else instruction.operands
    )
    guard = instruction.guard
    if guard is not None and guard.register in names:
        guard = Guard(names[guard.register], guard.negated)
    targets: tuple[int, ...] = ()
    effects = effects_of(instruction.opcode)
    if parts[0] == "bra" and operands and isinstance(operands[0], Name) and operands[0].text in positions:
        targets = (positions[operands[0].text],)
    elif parts[0] == "brx" and len(operands) == 2 and isinstance(operands[1], Name):
        targets = tuple(positions[name] for name in tables.get(operands[1].text, ()) if name in positions)
    if parts[0] in ("bra", "brx") and not targets:
        # a branch to nowhere that we know of: anything may follow
        effects = Effects(reaches_all="a branch whose target is not known")
    writes: tuple[str, ...] = ()
    if operands and parts[0] not in _NO_DESTINATION and not isinstance(operands[0], Address):
        writes = tuple(dict.fromkeys(registers(operands[0])))
    return Step(
        parts=parts,
        guard=guard,
        operands=operands,
        at=instruction.at,
        targets=targets,
        effects=effects,
        writes=writes,
    )


def visible(space: str) -> bool:
    """Whether an access in this state space can be seen outside the block that makes it."""
    return space in ("global", "generic")


def _follows_shared(steps: tuple[Step, ...]) -> bool:
    """Whether a 64-bit parameter may reach shared memory, and nothing but `st.shared` writes there."""
    for step in steps:
        if step.effects.reaches_all:
            return False
        for touch in step.effects.touches:
            if touch.writes and touch.space != "global" and (touch.space, step.parts[0]) != ("shared", "st"):
                return False
    carriers: set[str] = set()
    while True:
        before = len(carriers)
        for step in steps:
            sources = {name for operand in step.operands[1:] for name in registers(operand)}
            touches = step.effects.touches
            if not touches:
                carries = bool(sources & carriers)
            else:
                carries = touches[0].space == "param" and type_bytes(step.parts[-1]) == 8
                if touches[0].writes and touches[0].space == "shared" and sources & carriers:
                    return True
            if carries:
                carriers.update(step.writes)
        if len(carriers) == before:
            return False


def _relevant(steps: tuple[Step, ...], follows_shared: bool) -> set[int]:
    """Backward slice from addresses, sizes, guards and branches, regardless of order (so loops need no care)."""
    wanted: set[str] = set()
    chosen: set[int] = set()

    def want(names: Iterable[str]) -> None:
        wanted.update(names)

    writers: dict[str, list[int]] = {}
    for index, step in enumerate(steps):
        for name in step.writes:
            writers.setdefault(name, []).append(index)
        touches = [
            touch
            for touch in step.effects.touches
            if visible(touch.space) or (follows_shared and touch.space == "shared")
        ]
        describes = step.effects.describes
        if not (touches or step.effects.reaches_all or step.targets or step.ends or describes is not None):
            continue
        chosen.add(index)
        if step.guard is not None:
            want((step.guard.register,))
        for touch in touches:
            for operand in touch.needs():
                if operand < len(step.operands):
                    want(registers(step.operands[operand]))
            if touch.space == "shared" and touch.writes:
                for stored in step.operands[1:]:
                    want(registers(stored))
        if step.parts[0] == "brx" or describes is not None or step.effects.copies_map:
            for source in step.operands[:2]:
                want(registers(source))
    queue = list(wanted)
    while queue:
        for index in writers.get(queue.pop(), ()):
            if index in chosen:
                continue
            chosen.add(index)
            step = steps[index]
            names = (
                set()
                if step.effects.touches
                else {n for operand in step.operands[1:] for n in registers(operand)}
            )
            if step.guard is not None:
                names.add(step.guard.register)
            new = names - wanted
            wanted |= new
            queue.extend(new)
    return chosen


def _joins(steps: tuple[Step, ...]) -> tuple[dict[int, int], frozenset[int]]:
    """Immediate post-dominator of every branching step, over basic blocks (sets as bit masks), and the steps that
    begin a block from which the end is out of reach."""
    end = len(steps)
    leaders = {0, end}
    for index, step in enumerate(steps):
        if step.targets or step.ends or step.parts[0] in ("bra", "brx"):
            leaders.add(index + 1)
            leaders.update(step.targets)
    starts = sorted(leader for leader in leaders if leader <= end)
    number = {start: i for i, start in enumerate(starts)}
    last = len(starts) - 1
    successors: list[set[int]] = []
    ends: list[int] = []
    for i in range(last):
        tail = starts[i + 1] - 1
        ends.append(tail)
        step = steps[tail]
        after = {number[target] for target in step.targets}
        if step.guard is not None or not (step.targets or step.ends):
            after.add(i + 1)
        if step.ends and step.parts[0] != "trap":  # a launch that traps has no result to be wrong about
            after.add(last)
        successors.append(after)
    everything = (1 << len(starts)) - 1
    reached = [everything] * last + [1 << last]
    changed = True
    while changed:
        changed = False
        for i in range(last - 1, -1, -1):
            common = everything
            for after_block in successors[i]:
                common &= reached[after_block]
            common |= 1 << i
            if common != reached[i]:
                reached[i] = common
                changed = True
    joins: dict[int, int] = {}
    for i, tail in enumerate(ends):
        if len(successors[i]) < 2:
            continue
        others = reached[i] & ~(1 << i)
        # The nearest post-dominator is the one that every other post-dominator post-dominates.
        nearest = max(
            (block for block in range(len(starts)) if others >> block & 1),
            key=lambda block: reached[block].bit_count(),
            default=last,
        )
        joins[tail] = starts[nearest]
    ending = {last}
    while True:
        more = {i for i in range(last) if i not in ending and successors[i] & ending}
        if not more:
            return joins, frozenset(starts[i] for i in range(last) if i not in ending)
        ending |= more
