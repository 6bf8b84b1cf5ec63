"""A function as a flat list of steps with resolved scopes, branch targets and control flow: the form that the
interpreter runs. Steps that bear neither on an address nor on whether an access happens are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessera_core.ptx.effects import Effects, effects_of
from tessera_core.ptx.flatten import PRINTING, Flat, Flattener, renamed
from tessera_core.ptx.parser import type_bytes
from tessera_core.ptx.syntax import (
    Address,
    Declaration,
    Function,
    Guard,
    Name,
    Operand,
    registers,
)

# The carry between instructions, as a register of its own.
CARRY = "%CC"

_ARITHMETIC = """
abs add copysign cos cvt div ex2 fma lg2 mad max min mul neg rcp rsqrt set setp sin sqrt sub tanh testp
"""
_FLOAT_ARITHMETIC = frozenset(_ARITHMETIC.split())
_FLOAT_TYPE = re.compile(r"(?:b?f|tf)\d+(?:x\d)?|e\dm\d(?:x\d)?")

# A call that reads the strings among its arguments, told by being this very object.
_PRINTING = Effects()

BARRIERS = frozenset({"bar", "barrier"})

# Modifiers of stores whose second operand is not what the first address then holds, or not at once.
_OTHER_STORES = frozenset({"async", "bulk"})

# Modifiers and opcodes by which threads of a block may order themselves without a barrier of the whole block.
_OWN_ORDER = frozenset({"volatile", "acquire", "release", "acq_rel", "relaxed", "mmio", "arrive", "mbarrier"})

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
    of registers, by name or by name without its number (0 where scopes disagree). ``follows_shared``: whether what is
    loaded from shared memory matters for addresses and nothing but plain stores writes there; ``ordered``: whether
    only barriers of the whole block order its threads. ``local``: variables and parameters of its own."""

    steps: tuple[Step, ...]
    runs: tuple[int, ...]
    joins: Mapping[int, int]
    doomed: frozenset[int]
    follows_shared: bool
    ordered: bool
    local: tuple[Declaration, ...]
    widths: Mapping[str, int]

    def width(self, register: str) -> int:
        """Bits of a register, 0 where not known."""
        name = register.split("@", 1)[0]
        return self.widths.get(name) or self.widths.get(name.rstrip("0123456789"), 0)


def build_flow(function: Function, functions: Mapping[str, Function]) -> Flow:
    """Flatten ``function``, which must have a body, with the device functions of its module that it calls."""
    assert function.body is not None
    flattener = Flattener(functions)
    flattener.add(function.body, {}, "", (function.name,), "")
    steps = tuple(_step(item, flattener.positions, flattener.tables) for item in flattener.flat)
    local = tuple(item for item in flattener.declared if item.space != "reg")
    joins, doomed = _joins(steps)
    has_private = any(item.space in ("local", "param") for item in local) or any(
        "local" in step.parts for step in steps
    )
    runs, follows_shared = _relevant(steps, _only_plain_stores(steps), has_private)
    return Flow(
        steps=steps,
        runs=tuple(sorted(runs)),
        joins=joins,
        doomed=doomed,
        follows_shared=follows_shared,
        ordered=_ordered(steps),
        local=local,
        widths=_widths(flattener.declared),
    )


def _widths(declarations: Iterable[Declaration]) -> dict[str, int]:
    widths: dict[str, int] = {}
    for item in declarations:
        if item.space == "reg":
            bits = 1 if item.type == "pred" else type_bytes(item.type) * 8
            widths[item.name] = bits if widths.get(item.name, bits) == bits else 0
    return widths


def _step(item: Flat, positions: Mapping[str, int], tables: Mapping[str, tuple[str, ...]]) -> Step:
    instruction, names = item.instruction, item.names
    parts = tuple(instruction.opcode.split("."))
    operands = instruction.operands
    guard = instruction.guard
    if names:
        operands = tuple(renamed(operand, names) for operand in operands)
        if guard is not None and guard.register in names:
            guard = Guard(names[guard.register].text, guard.negated)
    targets: tuple[int, ...] = ()
    effects = _PRINTING if instruction.opcode == PRINTING else effects_of(instruction.opcode)
    if parts[0] == "bra" and operands and isinstance(operands[0], Name) and operands[0].text in positions:
        targets = (positions[operands[0].text],)
    elif parts[0] == "brx" and len(operands) == 2 and isinstance(operands[1], Name):
        listed = tables.get(operands[1].text, ())
        targets = tuple(dict.fromkeys(positions[name] for name in listed if name in positions))
        if not all(name in positions for name in listed):
            targets = ()
    if parts[0] in ("bra", "brx") and not targets:
        # a branch to nowhere that we know of: anything may follow
        effects = Effects(reaches_all="a branch whose target is not known")
    writes: tuple[str, ...] = ()
    has_destination = parts[0] not in _NO_DESTINATION or (parts[0] in BARRIERS and "red" in parts)
    if operands and has_destination and not isinstance(operands[0], Address):
        writes = tuple(dict.fromkeys(registers(operands[0])))
        if parts[0] in ("addc", "subc", "madc"):
            operands = (*operands, Name(CARRY))
        if "cc" in parts[1:]:
            writes = (*writes, CARRY)
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


def _only_plain_stores(steps: tuple[Step, ...]) -> bool:
    """Whether nothing but plain `st.shared` writes to shared memory."""
    return not any(
        step.effects.reaches_all
        or any(
            touch.writes
            and touch.space not in ("global", "local", "param")
            and not (
                touch.space == "shared" and step.parts[0] == "st" and not _OTHER_STORES & set(step.parts)
            )
            for touch in step.effects.touches
        )
        for step in steps
    )


def _ordered(steps: tuple[Step, ...]) -> bool:
    """Whether barriers of the whole block are all that orders accesses of different threads to shared memory."""
    return not any(_OWN_ORDER & set(step.parts) for step in steps)


def private(space: str) -> bool:
    """Whether an access in this state space may be to the private memory of its thread."""
    return space in ("local", "param", "generic")


def _sources_from(step: Step) -> int:
    """Index of the first operand that the result can be told from: addresses do not pass through floating-point
    arithmetic, so that its operands are of no interest; of a comparison only the predicate that it is joined with."""
    is_float = any(_FLOAT_TYPE.fullmatch(part) for part in step.parts[1:])
    if step.parts[0] not in _FLOAT_ARITHMETIC or not is_float:
        return 1
    return 3 if step.parts[0] == "setp" else len(step.operands)


def _relevant(steps: tuple[Step, ...], may_follow_shared: bool, has_private: bool) -> tuple[set[int], bool]:
    """Backward slice from addresses, sizes, guards and branches, regardless of order (so loops need no care), and
    whether it goes through shared memory.

    A wanted load from private or shared memory wants every store there: what it brings back, and where it goes.
    """
    wanted: set[str] = set()
    chosen: set[int] = set()
    queue: list[str] = []
    followed: set[str] = set()
    writers: dict[str, list[int]] = {}
    stores: dict[str, list[int]] = {"private": [], "shared": []}

    def want(operands: Iterable[Operand]) -> None:
        for operand in operands:
            for name in registers(operand):
                if name not in wanted:
                    wanted.add(name)
                    queue.append(name)

    def choose(index: int) -> None:
        chosen.add(index)
        guard = steps[index].guard
        if guard is not None:
            want((Name(guard.register),))

    def follow(kind: str) -> None:
        if kind not in followed:
            followed.add(kind)
            for place in stores[kind]:
                choose(place)
                want(steps[place].operands)

    for index, step in enumerate(steps):
        for name in step.writes:
            writers.setdefault(name, []).append(index)
        spaces = {touch.space for touch in step.effects.touches}
        if step.parts[0] == "st" and any(private(space) for space in spaces):
            stores["private"].append(index)
        if (step.parts[0] == "st" and "shared" in spaces) or step.parts[0] in BARRIERS:
            stores["shared"].append(index)
        touches = [touch for touch in step.effects.touches if visible(touch.space)]
        builds_map = step.effects.describes is not None or step.effects.copies_map
        shown = bool(touches) or builds_map or step.effects is _PRINTING
        if shown or step.effects.reaches_all or step.targets or step.ends:
            choose(index)
            for touch in touches:
                for operand in touch.needs():
                    if operand < len(step.operands):
                        want((step.operands[operand],))
            if step.parts[0] == "brx" or builds_map:
                want(step.operands[:2])
    while queue:
        for index in writers.get(queue.pop(), ()):
            step = steps[index]
            choose(index)
            spaces = {touch.space for touch in step.effects.touches}
            if not spaces or any(private(space) for space in spaces) or "shared" in spaces:
                want(step.operands[_sources_from(step) :])
            if has_private and any(private(space) for space in spaces):
                follow("private")
            if may_follow_shared and "shared" in spaces and step.parts[0] == "ld":
                follow("shared")
    return chosen, "shared" in followed


def leaves_block(step: Step) -> bool:
    """Whether a step is a branch or an end, so that it is the last of its basic block."""
    return bool(step.targets) or step.ends or step.parts[0] in ("bra", "brx")


def block_starts(steps: Sequence[Step]) -> list[int]:
    """Where the basic blocks of a function begin, ascending; the first at 0, whether it has steps or not."""
    leaders = {0}
    for index, step in enumerate(steps):
        if leaves_block(step):
            leaders.add(index + 1)
            leaders.update(step.targets)
    return sorted(leader for leader in leaders if leader < len(steps) or leader == 0)


def _joins(steps: tuple[Step, ...]) -> tuple[dict[int, int], frozenset[int]]:
    """Immediate post-dominator of every branching step, over basic blocks (sets as bit masks), and the steps that
    begin a block from which the end is out of reach."""
    end = len(steps)
    starts = sorted({*block_starts(steps), end})
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
    dominators = np.array([found.bit_count() for found in reached], dtype=np.int64)
    for i, tail in enumerate(ends):
        if len(successors[i]) < 2:
            continue
        others = reached[i] & ~(1 << i)
        # The nearest post-dominator is the one that every other post-dominator post-dominates.
        present = np.frombuffer(others.to_bytes(len(starts) // 8 + 1, "little"), dtype=np.uint8)
        flags = np.unpackbits(present, count=len(starts), bitorder="little")
        nearest = int(np.argmax(flags * dominators)) if others else last
        joins[tail] = starts[nearest]
    ending = {last}
    while True:
        more = {i for i in range(last) if i not in ending and successors[i] & ending}
        if not more:
            return joins, frozenset(starts[i] for i in range(last) if i not in ending)
        ending |= more
