"""A vectorised emulator of PTX: all threads of a launch at once, each with its own program counter. Of the threads that
can run, those deepest in calls and furthest behind go first, so diverged paths join again by themselves. It runs what
nvcc and Triton write for ordinary kernels, with real values; what it does not compute (tensor cores, textures,
packed floats) yields unknown values, and a launch whose addresses or branches depend on one is refused.

It notes every byte of the launch's buffers that is read or written. It shares nothing with the product: the module is
read by :mod:`tests.ptx.oracle.reader`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tests.ptx.oracle.arithmetic import (
    Bits,
    NotModelledError,
    as_float,
    compare,
    compute,
    from_float,
    masked,
    signed,
    types,
    width,
)
from tests.ptx.oracle.reader import Program, Routine, Step, Variable, number, read

Index = npt.NDArray[np.int64]
Runs = dict[str, dict[int, list[int]]]

BUFFER = 36  # bits of an address within a buffer; buffer i begins at (i + 1) << BUFFER
SHARED, LOCAL, PARAM, CODE = 1 << 60, 2 << 60, 4 << 60, 5 << 60
FRAME_BYTES = 1 << 14  # of each thread's local memory
STEPS_LIMIT = 3_000_000
THREADS_LIMIT = 1 << 14
NOTHING = {
    "bar.warp", "membar", "fence", "nanosleep", "prefetch", "prefetchu", "griddepcontrol", "createpolicy", "pmevent",
    "cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all", "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group", "mbarrier.init", "mbarrier.inval", "mbarrier.arrive", "setmaxnreg", "barrier.cluster",
}  # fmt: skip
_ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*(?:,.*)?\]")


class Launched(Protocol):
    """What the machine needs to know of a launch."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: bytes
    relocations: tuple[tuple[int, int, int], ...]

    def sizes(self) -> dict[int, int]:
        """Bytes of each buffer."""


def observe(
    text: str, launch: Any, contents: Callable[[Any, int, Mapping[int, int]], Mapping[int, bytes]]
) -> Runs:
    """The runs of bytes (starts and ends, alternating) that a launch reads and writes, by buffer.

    Raises :class:`NotModelledError` where they depend on something that the emulator does not compute.
    """
    addresses = {buffer: (buffer + 1) << BUFFER for buffer in launch.sizes()}
    machine = Machine(read(text), launch, contents(launch, 0, addresses))
    machine.run()
    return machine.seen()


@dataclass
class Frame:
    """Registers at one depth of calls, an item per thread; ``fog``: which items are unknown."""

    registers: dict[str, Bits] = field(default_factory=dict)
    fog: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)


class Machine:
    """One launch in progress."""

    def __init__(self, program: Program, launch: Launched, contents: Mapping[int, bytes]) -> None:
        self.launch = launch
        gx, gy, gz = launch.grid
        bx, by, bz = launch.block
        self.threads_of_block, self.blocks = bx * by * bz, gx * gy * gz
        self.threads = self.threads_of_block * self.blocks
        assert self.threads <= THREADS_LIMIT, "too many threads to emulate"
        linear = np.arange(self.threads, dtype=np.uint64)
        self.block, self.inside = (
            linear // np.uint64(self.threads_of_block),
            linear % np.uint64(self.threads_of_block),
        )
        self._code(program)
        self._memory(program, launch, contents)
        self._specials(launch)
        self.pc = np.full(self.threads, self.entries[launch.entry], dtype=np.int64)
        self.depth = np.zeros(self.threads, dtype=np.int64)
        self.done = np.zeros(self.threads, dtype=np.bool_)
        self.waiting = np.zeros(self.threads, dtype=np.bool_)
        self.frames = [Frame()]
        self.bases = [np.zeros(self.threads, dtype=np.uint64)]
        self.sites = [np.zeros(self.threads, dtype=np.int64)]

    def _code(self, program: Program) -> None:
        self.steps: list[Step | None] = []
        self.owner: list[Routine] = []
        self.entries: dict[str, int] = {}
        self.routines = program.routines
        self.offsets: dict[str, dict[str, int]] = {}
        self.frame_bytes: dict[str, int] = {}
        for routine in program.routines.values():
            self.entries[routine.name] = len(self.steps)
            self.steps.extend((*routine.steps, None))
            self.owner.extend([routine] * (len(routine.steps) + 1))
            places: dict[str, int] = {}
            at = 0
            for variable in (*routine.local, *routine.params):
                at += -at % max(variable.align, 8)
                places[variable.name] = at
                at += variable.size
            for given in (routine.results, {} if routine.kernel else routine.parameters):
                at += -at % 16
                start = at
                for name, (offset, size) in given.items():
                    places[name] = start + offset
                    at = max(at, start + offset + size)
            self.offsets[routine.name] = places
            self.frame_bytes[routine.name] = at + -at % 16

    def _memory(self, program: Program, launch: Launched, contents: Mapping[int, bytes]) -> None:
        """One store of bytes: buffers, module variables, shared memory by block, local by thread, parameters."""
        shared: list[Variable] = [v for v in program.variables if v.space == "shared"]
        for routine in program.routines.values():
            shared.extend(routine.shared)
        self.shared_offsets: dict[str, int] = {}
        at = 0
        for variable in sorted(shared, key=lambda v: v.size == 0):  # the dynamic part comes last
            at += -at % max(variable.align, 16)
            self.shared_offsets[variable.name] = at
            at += variable.size
        self.shared_bytes = at + launch.shared_bytes + 16
        pieces = [contents[buffer] for buffer in range(len(contents))]
        self.variables: dict[str, int] = {}
        for variable in program.variables:
            if variable.space != "shared":
                self.variables[variable.name] = (len(pieces) + 1) << BUFFER
                pieces.append((variable.content or b"").ljust(max(variable.size, 1), b"\0"))
        self.buffers = len(contents)
        self.lengths = np.array([len(p) for p in pieces], dtype=np.uint64)
        self.starts = np.concatenate(([0], np.cumsum(self.lengths)[:-1])).astype(np.uint64)
        self.shared_start = int(self.lengths.sum())
        self.local_start = self.shared_start + self.shared_bytes * self.blocks
        self.param_start = self.local_start + FRAME_BYTES * self.threads
        block = bytearray(launch.parameters)
        for offset, buffer, byte in launch.relocations:
            block[offset : offset + 8] = (((buffer + 1) << BUFFER) + byte).to_bytes(8, "little")
        self.store = np.zeros(self.param_start + len(block) + 16, dtype=np.uint8)
        self.store[: self.shared_start] = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        self.store[self.param_start : self.param_start + len(block)] = np.frombuffer(
            bytes(block), dtype=np.uint8
        )
        self.fog: npt.NDArray[np.bool_] | None = None
        self.marks = {mode: np.zeros(self.shared_start, dtype=np.bool_) for mode in ("read", "write")}

    def _specials(self, launch: Launched) -> None:
        bx, by, _ = launch.block
        gx, gy, _ = launch.grid
        x, y, z = np.uint64(bx), np.uint64(bx * by), self.inside
        lane = self.inside % np.uint64(32)
        one = np.ones(self.threads, dtype=np.uint64)
        self.special: dict[str, Bits] = {
            "%tid.x": z % x, "%tid.y": z // x % np.uint64(by), "%tid.z": z // y,
            "%ctaid.x": self.block % np.uint64(gx), "%ctaid.y": self.block // np.uint64(gx) % np.uint64(gy),
            "%ctaid.z": self.block // np.uint64(gx * gy), "%laneid": lane, "%warpid": self.inside // np.uint64(32),
            "%lanemask_lt": (one << lane) - one, "%lanemask_eq": one << lane, "WARP_SZ": one * np.uint64(32),
            "%lanemask_le": (one << (lane + one)) - one,
            "%cluster_ctarank": one * np.uint64(0), "%cluster_nctarank": one,
        }  # fmt: skip
        for index, axis in enumerate("xyz"):
            self.special[f"%ntid.{axis}"] = one * np.uint64(launch.block[index])
            self.special[f"%nctaid.{axis}"] = one * np.uint64(launch.grid[index])
        self.lane = lane.astype(np.int64)
        self.warp_first = (np.arange(self.threads) - self.lane).astype(np.int64)

    def seen(self) -> Runs:
        """What was noted so far."""
        found: Runs = {"read": {}, "write": {}}
        for mode, marks in self.marks.items():
            for buffer in range(self.buffers):
                low = int(self.starts[buffer])
                here = marks[low : low + int(self.lengths[buffer])]
                if here.any():
                    edges = np.flatnonzero(np.diff(np.concatenate(([0], here.view(np.int8), [0]))))
                    found[mode][buffer] = [int(edge) for edge in edges]
        return found

    def run(self) -> None:
        """To the end of every thread."""
        self.count = 0
        while True:
            free = ~self.done & ~self.waiting
            if not free.any():
                if not self.waiting.any():
                    return
                self.waiting[:] = False
                continue
            depth = int(self.depth[free].max())
            free &= self.depth == depth
            counters = self.pc[free]
            at = int(counters.min())
            others = counters[counters > at]
            self._straight(
                np.flatnonzero(free & (self.pc == at)), at, depth, int(others.min()) if len(others) else -1
            )

    def _straight(self, act: Index, at: int, depth: int, limit: int) -> None:
        """Run a group of threads until it divides, calls, waits or catches up with others at ``limit``."""
        while True:
            self.count += 1
            assert self.count < STEPS_LIMIT, "the launch does not end"
            step = self.steps[at]
            if step is None or step.parts[0] in ("ret", "exit"):
                stay = self._guarded(step, act, depth) if step is not None else act
                self.pc[act] = at + 1
                self._return(stay, depth, ends=step is not None and step.parts[0] == "exit")
                return
            chosen = self._guarded(step, act, depth)
            name = step.parts[0]
            if name == "bra":
                target = self._label(self.owner[at], step, step.operands[0])
                if len(chosen) == len(act):
                    at = target
                elif len(chosen) == 0:
                    at += 1
                else:
                    self.pc[act] = at + 1
                    self.pc[chosen] = target
                    return
            elif name == "brx":
                self._indexed(step, act, at, depth)
                return
            elif name in ("bar", "barrier") and step.parts[1] != "warp" and "cluster" not in step.parts:
                self.pc[act] = at + 1
                self.waiting[chosen] = True
                return
            elif name == "call" and len(chosen):
                self.pc[act] = at + 1
                self._call(step, chosen, at, depth)
                return
            else:
                if len(chosen):
                    self._execute(step, chosen, depth, self.owner[at])
                at += 1
            if limit >= 0 and at >= limit:
                self.pc[act] = at
                return

    def _guarded(self, step: Step, act: Index, depth: int) -> Index:
        if not step.guard:
            return act
        value = self._certain(step.guard, act, depth, step)
        holds = (value & np.uint64(1)) == 1
        return act[~holds if step.negated else holds]

    def _certain(self, text: str, act: Index, depth: int, step: Step, routine: Routine | None = None) -> Bits:
        """A value that addresses or branches depend on, so it must be known."""
        value, fog = self._value(text, act, depth, routine)
        if fog is not None and fog.any():
            raise NotModelledError(f"line {step.line}: {text} is unknown")
        return value

    def _label(self, routine: Routine, step: Step, name: str) -> int:
        scope = step.scope
        while True:
            found = routine.labels.get(f"{scope}:{name}")
            if found is not None:
                return self.entries[routine.name] + found
            scope = scope.rpartition(".")[0]
            assert scope, f"no label {name}"

    def _indexed(self, step: Step, act: Index, at: int, depth: int) -> None:
        routine = self.owner[at]
        chosen = self._guarded(step, act, depth)
        self.pc[act] = at + 1
        table = next(t for key, t in routine.tables.items() if key.endswith(f":{step.operands[1]}"))
        index = self._certain(step.operands[0], chosen, depth, step)
        for value in np.unique(index).tolist():
            self.pc[chosen[index == value]] = self._label(routine, step, table[int(value)])

    def _call(self, step: Step, act: Index, at: int, depth: int) -> None:
        caller = self.owner[at]
        plain = [o for o in step.operands if not o.startswith("(")]
        groups = [o for o in step.operands if o.startswith("(")]
        if plain[0].startswith("%"):
            codes = self._certain(plain[0], act, depth, step)
            names = list(self.entries)
            by_name = [(names[int(c) & 0xFFFF], act[codes == c]) for c in np.unique(codes)]
        else:
            by_name = [(plain[0], act)]
        after_name = step.operands.index(plain[0]) + 1
        given = groups[-1] if after_name < len(step.operands) and groups else "()"
        arguments = [a.strip() for a in given[1:-1].split(",") if a.strip()]
        if len(self.frames) == depth + 1:
            self.frames.append(Frame())
            self.bases.append(np.zeros(self.threads, dtype=np.uint64))
            self.sites.append(np.zeros(self.threads, dtype=np.int64))
        for name, threads in by_name:
            routine = self.routines.get(name)
            if routine is None:
                raise NotModelledError(f"line {step.line}: call of {name}")
            base = self.bases[depth][threads] + np.uint64(self.frame_bytes[caller.name])
            assert int(base.max()) + self.frame_bytes[name] < FRAME_BYTES, "local memory is full"
            self.bases[depth + 1][threads] = base
            for argument, (parameter, (_, size)) in zip(arguments, routine.parameters.items(), strict=True):
                source = self._frame_offset(caller, step.scope, argument)
                self._copy_local(
                    threads, self.bases[depth][threads] + np.uint64(source),
                    base + np.uint64(self.offsets[name][parameter]), size,
                )  # fmt: skip
            self.sites[depth + 1][threads] = at
            self.depth[threads] = depth + 1
            self.pc[threads] = self.entries[name]

    def _return(self, act: Index, depth: int, ends: bool) -> None:
        if depth == 0 or ends:
            self.done[act] = True
            return
        for site in np.unique(self.sites[depth][act]).tolist():
            threads = act[self.sites[depth][act] == site]
            step = self.steps[site]
            assert step is not None
            caller = self.owner[site]
            callee = self.owner[int(self.pc[threads[0]]) - 1]
            if step.operands[0].startswith("(") and callee.results:
                result, (_, size) = next(iter(callee.results.items()))
                target = self._frame_offset(caller, step.scope, step.operands[0][1:-1].strip())
                self._copy_local(
                    threads, self.bases[depth][threads] + np.uint64(self.offsets[callee.name][result]),
                    self.bases[depth - 1][threads] + np.uint64(target), size,
                )  # fmt: skip
            self.depth[threads] = depth - 1
            self.pc[threads] = site + 1

    def _copy_local(self, act: Index, source: Bits, target: Bits, size: int) -> None:
        start = np.uint64(self.local_start) + act.astype(np.uint64) * np.uint64(FRAME_BYTES)
        span = np.arange(size, dtype=np.uint64)
        origin, place = (start + source)[:, None] + span, (start + target)[:, None] + span
        self.store[place] = self.store[origin]
        if self.fog is not None:
            self.fog[place] = self.fog[origin]

    def _frame_offset(self, routine: Routine, scope: str, name: str) -> int:
        places = self.offsets[routine.name]
        while scope:
            if f"{scope}:{name}" in places:
                return places[f"{scope}:{name}"]
            scope = scope.rpartition(".")[0]
        return places[name]

    # --- operands

    def _value(
        self, text: str, act: Index, depth: int, routine: Routine | None = None, scope: str = "0"
    ) -> tuple[Bits, npt.NDArray[np.bool_] | None]:
        """An operand's bits for the threads in ``act``, and which of them are unknown (None: all are known)."""
        frame = self.frames[depth]
        held = frame.registers.get(text)
        if held is not None:
            fog = frame.fog.get(text)
            return held[act], None if fog is None else fog[act]
        if text in self.special:
            return self.special[text][act], None
        if text.startswith("!"):
            value, fog = self._value(text[1:], act, depth, routine)
            return value ^ np.uint64(1), fog
        if text.startswith("%") or text == "_":
            return np.zeros(len(act), dtype=np.uint64), None  # never written, or a clock
        address = self._symbol(text, act, depth, routine, scope)
        if address is not None:
            return address, None
        return np.full(len(act), number(text) & (1 << 64) - 1, dtype=np.uint64), None

    def _symbol(self, text: str, act: Index, depth: int, routine: Routine | None, scope: str) -> Bits | None:
        if re.match(r"[-+\d]", text):
            return None
        if text in self.variables:
            return np.full(len(act), self.variables[text], dtype=np.uint64)
        while scope:
            if f"{scope}:{text}" in self.shared_offsets:
                return np.full(len(act), self.shared_offsets[f"{scope}:{text}"], dtype=np.uint64)
            scope = scope.rpartition(".")[0]
        if text in self.shared_offsets:
            return np.full(len(act), self.shared_offsets[text], dtype=np.uint64)
        if text in self.entries:
            return np.full(len(act), CODE + list(self.entries).index(text), dtype=np.uint64)
        if routine is not None:
            if routine.kernel and text in routine.parameters:
                return np.full(len(act), PARAM + routine.parameters[text][0], dtype=np.uint64)
            try:
                offset = self._frame_offset(routine, self._scope, text)
            except KeyError:
                return None
            return self.bases[depth][act] + np.uint64(offset)
        return None

    _scope = "0"

    def _set(self, name: str, act: Index, depth: int, value: Bits, fog: npt.NDArray[np.bool_] | None) -> None:
        if name == "_":
            return
        frame = self.frames[depth]
        if name not in frame.registers:
            frame.registers[name] = np.zeros(self.threads, dtype=np.uint64)
        frame.registers[name][act] = value
        if fog is not None and fog.any():
            frame.fog.setdefault(name, np.zeros(self.threads, dtype=np.bool_))[act] = fog
        elif name in frame.fog:
            frame.fog[name][act] = False

    def _unknown(self, operand: str, act: Index, depth: int) -> None:
        for name in _elements(operand):
            for half in name.split("|"):
                self._set(
                    half, act, depth, np.zeros(len(act), dtype=np.uint64), np.ones(len(act), dtype=np.bool_)
                )

    # --- memory

    def _positions(
        self, address: Bits, act: Index, space: str, size: int
    ) -> tuple[Index, npt.NDArray[np.bool_]]:
        """Places in the store, and which of them lie in buffers or module variables."""
        top = address >> np.uint64(60)
        low32 = address & np.uint64(0xFFFFFFFF)
        shared = np.uint64(self.shared_start) + self.block[act] * np.uint64(self.shared_bytes) + low32
        offset = address & np.uint64((1 << 60) - 1)
        local = np.uint64(self.local_start) + act.astype(np.uint64) * np.uint64(FRAME_BYTES) + offset
        parameter = np.uint64(self.param_start) + offset
        if space == "shared":
            assert int(low32.max()) + size <= self.shared_bytes, "outside shared memory"
            return shared.astype(np.int64), np.zeros(len(act), dtype=np.bool_)
        if space == "local" or (space == "param" and not (top == 4).any()):
            return local.astype(np.int64), np.zeros(len(act), dtype=np.bool_)
        if space == "param":
            return parameter.astype(np.int64), np.zeros(len(act), dtype=np.bool_)
        buffer = (address >> np.uint64(BUFFER)).astype(np.int64) - 1
        inner = address & np.uint64((1 << BUFFER) - 1)
        real = top == 0
        assert (buffer[real] >= 0).all() and (buffer[real] < len(self.starts)).all(), (
            "an address outside every buffer"
        )
        known = np.where(real, buffer, 0)
        assert (inner[real] + np.uint64(size) <= self.lengths[known[real]]).all(), (
            "the launch leaves its buffer"
        )
        place = np.where(real, self.starts[known] + inner, np.uint64(0))
        place = np.where(top == 1, shared, place)
        place = np.where(top == 2, local, place)
        place = np.where(top == 4, parameter, place)
        return place.astype(np.int64), real

    def _mark(self, mode: str, places: Index, real: npt.NDArray[np.bool_], size: int) -> None:
        if real.any():
            chosen = places[real] if not real.all() else places
            self.marks[mode][(chosen[:, None] + np.arange(size)).ravel()] = True

    def _fetch(self, places: Index, size: int) -> tuple[Bits, npt.NDArray[np.bool_] | None]:
        span = places[:, None] + np.arange(size)
        held = np.zeros((len(places), 8), dtype=np.uint8)
        held[:, :size] = self.store[span]
        fog = None if self.fog is None else self.fog[span].any(axis=1)
        return held.view(np.uint64).ravel(), fog

    def _put(self, places: Index, size: int, value: Bits, fog: npt.NDArray[np.bool_] | None) -> None:
        span = places[:, None] + np.arange(size)
        self.store[span] = np.ascontiguousarray(value).view(np.uint8).reshape(-1, 8)[:, :size]
        if fog is not None and fog.any() and self.fog is None:
            self.fog = np.zeros(len(self.store), dtype=np.bool_)
        if self.fog is not None:
            self.fog[span] = False if fog is None else fog[:, None]

    def _address(self, operand: str, act: Index, depth: int, step: Step, routine: Routine) -> Bits:
        found = _ADDRESS.fullmatch(operand)
        assert found is not None, operand
        self._scope = step.scope
        value, fog = self._value(found[1], act, depth, routine, step.scope)
        if fog is not None and fog.any():
            raise NotModelledError(f"line {step.line}: address {operand} is unknown")
        return value + np.uint64(number(found[2]) & (1 << 64) - 1) if found[2] else value

    # --- instructions

    def _execute(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        self._scope = step.scope
        parts, operands = step.parts, step.operands
        name = parts[0]
        for length in (1, 2, 3, 4):
            if ".".join(parts[:length]) in NOTHING:
                return
        handler = _HANDLERS.get(name)
        if handler is not None:
            handler(self, step, act, depth, routine)
            return
        values, fogs = [], []
        for operand in operands[1:]:
            value, fog = self._value(operand, act, depth, routine, step.scope)
            values.append(value)
            fogs.append(fog)
        fog = _either(fogs, len(act))
        if name in ("setp", "set"):
            self._compare(step, act, depth, values, fog)
            return
        if "cc" in parts or name in ("addc", "subc", "madc"):
            self._carry(step, act, depth, values, fog)
            return
        try:
            result = compute(parts, values)
        except NotModelledError:
            self._unknown(operands[0], act, depth)
            return
        if name == "selp" and fog is not None:  # only the value that is taken matters
            taken = values[2] & np.uint64(1) == 1
            clear = np.zeros(len(act), dtype=np.bool_)
            fog = np.where(
                taken, clear if fogs[0] is None else fogs[0], clear if fogs[1] is None else fogs[1]
            )
            fog = fog | (clear if fogs[2] is None else fogs[2])
        self._set(operands[0], act, depth, result, fog)

    def _compare(
        self, step: Step, act: Index, depth: int, values: list[Bits], fog: npt.NDArray[np.bool_] | None
    ) -> None:
        if not types(step.parts) or any(p in ("bf16", "f16x2", "bf16x2") for p in step.parts):
            self._unknown(step.operands[0], act, depth)
            return
        holds = compare(step.parts, values[0], values[1])
        if len(values) > 2:
            third = (values[2] & np.uint64(1)) == 1
            how = next(p for p in step.parts if p in ("and", "or", "xor"))
            holds = {"and": holds & third, "or": holds | third, "xor": holds ^ third}[how]
        if step.parts[0] == "set":
            kind = types(step.parts)[0]
            true = np.uint64(0x3F800000 if kind == "f32" else (1 << width(kind)) - 1)
            self._set(step.operands[0], act, depth, np.where(holds, true, np.uint64(0)), fog)
            return
        first, _, second = step.operands[0].partition("|")
        self._set(first, act, depth, holds.astype(np.uint64), fog)
        if second:
            self._set(second, act, depth, (~holds).astype(np.uint64), fog)

    def _carry(
        self, step: Step, act: Index, depth: int, values: list[Bits], fog: npt.NDArray[np.bool_] | None
    ) -> None:
        """Additions with carry, exactly, one thread at a time."""
        parts = step.parts
        kind = types(parts)[-1]
        bits = width(kind)
        mask = (1 << bits) - 1
        carried, carried_fog = self._value("%carry", act, depth)
        results, carries = [], []
        sources = [[int(v) & mask for v in value.tolist()] for value in values]
        for index in range(len(act)):
            row = [s[index] for s in sources]
            carry = int(carried[index]) if parts[0].endswith("c") else 0
            if parts[0].startswith("mad"):
                product = row[0] * row[1]
                product = product >> bits if "hi" in parts else product & mask
                total = product + row[2] + carry
            elif parts[0].startswith("sub"):
                total = row[0] - row[1] - carry
            else:
                total = row[0] + row[1] + carry
            results.append(total & mask)
            carries.append(int(total != total & mask))
        fog = _either([fog, carried_fog if parts[0].endswith("c") else None], len(act))
        self._set(step.operands[0], act, depth, np.array(results, dtype=np.uint64), fog)
        if "cc" in parts:
            self._set("%carry", act, depth, np.array(carries, dtype=np.uint64), fog)

    def _mov(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        target, source = step.operands
        bits = width(step.parts[-1])
        if not source.startswith("{") and not target.startswith("{"):
            value, fog = self._value(source, act, depth, routine, step.scope)
            self._set(target, act, depth, masked(value, bits), fog)
            return
        if source.startswith("{"):
            elements = _elements(source)
            piece = bits // len(elements)
            total = np.zeros(len(act), dtype=np.uint64)
            fogs = []
            for index, element in enumerate(elements):
                value, fog = self._value(element, act, depth, routine, step.scope)
                total |= masked(value, piece) << np.uint64(piece * index)
                fogs.append(fog)
            self._set(target, act, depth, total, _either(fogs, len(act)))
            return
        elements = _elements(target)
        piece = bits // len(elements)
        value, fog = self._value(source, act, depth, routine, step.scope)
        for index, element in enumerate(elements):
            self._set(element, act, depth, masked(value >> np.uint64(piece * index), piece), fog)

    def _cvta(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        value, fog = self._value(step.operands[1], act, depth, routine, step.scope)
        window = {"shared": SHARED, "shared::cta": SHARED, "local": LOCAL}.get(step.parts[-2], 0)
        if window and "to" in step.parts:
            value = value & np.uint64((1 << 60) - 1)
        elif window:
            value = value | np.uint64(window)
        self._set(step.operands[0], act, depth, value, fog)

    def _load(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        kind = types(step.parts)[-1]
        size = width(kind) // 8
        space = _space(step.parts)
        address = self._address(step.operands[1], act, depth, step, routine)
        for index, element in enumerate(_elements(step.operands[0])):
            places, real = self._positions(address + np.uint64(index * size), act, space, size)
            self._mark("read", places, real, size)
            value, fog = self._fetch(places, size)
            if kind[0] == "s":
                value = signed(value, size * 8).astype(np.uint64)
            self._set(element, act, depth, value, fog)

    def _store(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        size = width(types(step.parts)[-1]) // 8
        address = self._address(step.operands[0], act, depth, step, routine)
        for index, element in enumerate(_elements(step.operands[1])):
            places, real = self._positions(address + np.uint64(index * size), act, _space(step.parts), size)
            self._mark("write", places, real, size)
            value, fog = self._value(element, act, depth, routine, step.scope)
            self._put(places, size, value, fog)

    def _atomic(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        """One thread after the other, in order."""
        parts = step.parts
        result = parts[0] == "atom"
        operands = step.operands[1:] if result else step.operands
        kind = types(parts)[-1]
        size = width(kind) // 8
        places, real = self._positions(
            self._address(operands[0], act, depth, step, routine), act, _space(parts), size
        )
        self._mark("read", places, real, size)
        self._mark("write", places, real, size)
        given = [self._value(o, act, depth, routine, step.scope) for o in operands[1:]]
        how = next(p for p in parts if p in _ATOMICS)
        before = np.zeros(len(act), dtype=np.uint64)
        clouded = np.zeros(len(act), dtype=np.bool_)
        for index in range(len(act)):
            place = places[index : index + 1]
            old, fog = self._fetch(place, size)
            sources = [value[index : index + 1] for value, _ in given]
            fogs = [fog, *(None if f is None else f[index : index + 1] for _, f in given)]
            before[index] = old[0]
            clouded[index] = fog is not None and bool(fog.any())
            self._put(place, size, _ATOMICS[how](old, sources, kind), _either(fogs, 1))
        if result:
            self._set(step.operands[0], act, depth, before, clouded)

    def _shuffle(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        target, _, predicate = step.operands[0].partition("|")
        source, b, c = step.operands[1:4]
        lane = self.lane[act]
        by = masked(self._certain(b, act, depth, step, routine), 32).astype(np.int64)
        clamp = masked(self._certain(c, act, depth, step, routine), 32).astype(np.int64)
        segment, bound = clamp >> 8 & 31, clamp & 31
        last, first = (lane & segment) | (bound & ~segment), lane & segment
        how = step.parts[2]
        by = by & 31
        wanted = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[how]
        fine = wanted >= last if how == "up" else wanted <= last
        origin = self.warp_first[act] + np.where(fine, wanted, lane)
        origin = np.where(origin < self.threads, origin, act)
        value, fog = self._value(source, origin, depth, routine, step.scope)
        self._set(target, act, depth, masked(value, 32), fog)
        if predicate:
            self._set(predicate, act, depth, fine.astype(np.uint64), None)

    def _vote(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        holds = (self._certain(step.operands[1], act, depth, step, routine) & np.uint64(1)) == 1
        result = np.zeros(len(act), dtype=np.uint64)
        for first in np.unique(self.warp_first[act]).tolist():
            mine = self.warp_first[act] == first
            lanes = self.lane[act][mine & holds].tolist()
            everyone = int(mine.sum())
            found = {
                "ballot": sum(1 << lane for lane in lanes), "any": int(bool(lanes)), "all": int(len(lanes) == everyone),
                "uni": int(len(lanes) in (0, everyone)),
            }[step.parts[2]]  # fmt: skip
            result[mine] = found
        self._set(step.operands[0], act, depth, result, None)

    def _reduce(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        kind, how = types(step.parts)[-1], step.parts[2]
        value, fog = self._value(step.operands[1], act, depth, routine, step.scope)
        if (fog is not None and fog.any()) or kind[0] == "f":
            self._unknown(step.operands[0], act, depth)
            return
        result = np.zeros(len(act), dtype=np.uint64)
        numbers = signed(value, 32) if kind[0] == "s" else masked(value, 32).astype(np.int64)
        functions: dict[str, Any] = {
            "add": np.sum, "min": np.min, "max": np.max, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce,
            "xor": np.bitwise_xor.reduce,
        }  # fmt: skip
        for first in np.unique(self.warp_first[act]).tolist():
            mine = self.warp_first[act] == first
            result[mine] = int(functions[how](numbers[mine])) & 0xFFFFFFFF
        self._set(step.operands[0], act, depth, result, None)

    def _elect(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        target, _, predicate = step.operands[0].partition("|")
        first = np.array([act[self.warp_first[act] == w].min() for w in self.warp_first[act]])
        self._set(target, act, depth, self.lane[first].astype(np.uint64), None)
        self._set(predicate, act, depth, (act == first).astype(np.uint64), None)

    def _active(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        masks = {
            w: sum(1 << int(x) for x in self.lane[act][self.warp_first[act] == w])
            for w in set(self.warp_first[act])
        }
        self._set(
            step.operands[0],
            act,
            depth,
            np.array([masks[w] for w in self.warp_first[act]], dtype=np.uint64),
            None,
        )

    def _barrier_object(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        """Copies are complete when they are issued, so every wait succeeds."""
        if step.parts[1] in ("try_wait", "test_wait"):
            self._set(step.operands[0], act, depth, np.ones(len(act), dtype=np.uint64), None)
            return
        raise NotModelledError(f"line {step.line}: {'.'.join(step.parts)}")

    def _copy(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        """Copies between shared memory and buffers: done at once."""
        parts, operands = step.parts, step.operands
        if "tensor" in parts or parts[1] == "reduce" or "prefetch" in parts:
            raise NotModelledError(f"line {step.line}: {'.'.join(parts)}")
        spaces = [part.partition("::")[0] for part in parts if part.startswith(("shared", "global"))]
        target = self._address(operands[0], act, depth, step, routine)
        source = self._address(operands[1], act, depth, step, routine)
        size = masked(self._certain(operands[2], act, depth, step, routine), 32).astype(np.int64)
        kept = size
        if "bulk" not in parts and len(operands) > 3:
            kept = np.minimum(
                masked(self._certain(operands[3], act, depth, step, routine), 32).astype(np.int64), size
            )
        for index, thread in enumerate(act.tolist()):
            one = np.array([thread])
            count, whole = int(kept[index]), int(size[index])
            to, real_to = self._positions(target[index : index + 1], one, spaces[0], whole)
            if count:
                origin, real = self._positions(source[index : index + 1], one, spaces[1], count)
                self._mark("read", origin, real, count)
                self.store[to[0] : to[0] + count] = self.store[origin[0] : origin[0] + count]
                if self.fog is not None:
                    self.fog[to[0] : to[0] + count] = self.fog[origin[0] : origin[0] + count]
            self.store[to[0] + count : to[0] + whole] = 0
            self._mark("write", to, real_to, whole)

    def _matrix(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        """Loads and stores of a warp's matrix: 16 rows or columns of 16 items, a stride apart."""
        parts = step.parts
        if parts[1] == "mma":
            self._unknown(step.operands[0], act, depth)
            return
        assert "m16n16k16" in parts
        load = parts[1] == "load"
        place = step.operands[1 if load else 0]
        size = width(types(parts)[-1]) // 8
        stride = (
            self._certain(step.operands[2], act, depth, step, routine) if len(step.operands) > 2 else None
        )
        address = self._address(place, act, depth, step, routine)
        step_bytes = np.full(len(act), 16, dtype=np.uint64) if stride is None else masked(stride, 32)
        for row in range(16):
            at = address + step_bytes * np.uint64(row * size)
            places, real = self._positions(at, act, _space(parts), 16 * size)
            self._mark("read" if load else "write", places, real, 16 * size)
            if not load:
                for item in range(16):
                    unknown = np.ones(len(act), dtype=np.bool_)
                    self._put(places + item * size, size, np.zeros(len(act), dtype=np.uint64), unknown)
        if load:
            self._unknown(step.operands[0], act, depth)

    def _opaque(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        """Registers in, registers or shared memory out: no buffer is touched, nothing is known of the result."""
        if step.parts[0] == "stmatrix":
            raise NotModelledError(f"line {step.line}: stmatrix")
        self._unknown(step.operands[0], act, depth)

    def _matrix_store(self, step: Step, act: Index, depth: int, routine: Routine) -> None:
        """Stores rows of 8 items of 16 bits to shared memory, a row per lane; of unknown value here."""
        address = self._address(step.operands[0], act, depth, step, routine)
        places, _ = self._positions(address, act, "shared", 16)
        unknown = np.ones(len(act), dtype=np.bool_)
        for half in (0, 8):
            self._put(places + half, 8, np.zeros(len(act), dtype=np.uint64), unknown)


_HANDLERS: dict[str, Callable[[Machine, Step, Index, int, Routine], None]] = {
    "mov": Machine._mov, "cvta": Machine._cvta, "ld": Machine._load, "ldu": Machine._load, "st": Machine._store,
    "atom": Machine._atomic, "red": Machine._atomic, "shfl": Machine._shuffle, "vote": Machine._vote,
    "redux": Machine._reduce, "elect": Machine._elect, "activemask": Machine._active,
    "mbarrier": Machine._barrier_object, "cp": Machine._copy, "wmma": Machine._matrix, "mma": Machine._opaque,
    "ldmatrix": Machine._opaque, "stmatrix": Machine._matrix_store,
}  # fmt: skip


def _changed(how: Callable[[Any, Any], Any]) -> Callable[[Bits, list[Bits], str], Bits]:
    def apply(old: Bits, given: list[Bits], kind: str) -> Bits:
        if kind[0] == "f":
            return from_float(how(as_float(old, kind), as_float(given[0], kind)), kind)
        bits = width(kind)
        take = (lambda v: signed(v, bits)) if kind[0] == "s" else (lambda v: masked(v, bits))
        with np.errstate(over="ignore"):
            return masked(np.asarray(how(take(old), take(given[0]))).astype(np.uint64), bits)

    return apply


_ATOMICS: dict[str, Callable[[Bits, list[Bits], str], Bits]] = {
    "add": _changed(np.add),
    "min": _changed(np.minimum),
    "max": _changed(np.maximum),
    "and": _changed(np.bitwise_and),
    "or": _changed(np.bitwise_or),
    "xor": _changed(np.bitwise_xor),
    "exch": lambda old, given, kind: given[0],
    "cas": lambda old, given, kind: np.where(old == masked(given[0], width(kind)), given[1], old),
    "inc": lambda old, given, kind: np.where(old >= masked(given[0], 32), np.uint64(0), old + np.uint64(1)),
    "dec": lambda old, given, kind: np.where((old == 0) | (old > given[0]), given[0], old - np.uint64(1)),
}


def _space(parts: tuple[str, ...]) -> str:
    for part in parts:
        name = part.partition("::")[0]
        if name in ("shared", "local", "param"):
            return name
    return ""


def _elements(operand: str) -> list[str]:
    return [e.strip() for e in operand.strip("{} ").split(",")] if operand.startswith("{") else [operand]


def _either(fogs: list[npt.NDArray[np.bool_] | None], count: int) -> npt.NDArray[np.bool_] | None:
    found: npt.NDArray[np.bool_] | None = None
    for fog in fogs:
        if fog is not None and fog.any():
            found = fog if found is None else found | fog
    return found
