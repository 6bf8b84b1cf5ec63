"""Executes single steps for all threads of a group of blocks: registers and operands here, memory in `memory.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tessera_core.ptx.arithmetic import carry
from tessera_core.ptx.fields import fields_of, join_fields, select_bits
from tessera_core.ptx.flatten import HEAP_POINTER
from tessera_core.ptx.flow import BARRIERS, CARRY, Step, visible
from tessera_core.ptx.guards import guards_of
from tessera_core.ptx.kernel import HEAP, Kernel
from tessera_core.ptx.memory import Memory
from tessera_core.ptx.parameters import LaunchShape
from tessera_core.ptx.predicates import choose, invert, same_mask
from tessera_core.ptx.refine import Refiner
from tessera_core.ptx.semantics import evaluate
from tessera_core.ptx.syntax import Address, Immediate, Name, Negated, Operand, Pair, Vector
from tessera_core.ptx.values import (
    ALWAYS,
    EITHER,
    NUMBER,
    ZERO,
    Bool,
    Int,
    Known,
    Predicate,
    Shape,
    Unknown,
    Value,
    add,
    constant,
    hull,
    known,
    mixed,
    unknown,
    width_of,
    wrap,
)
from tessera_core.ptx.warp import EXCHANGES, LANES, Warps


class Threads:
    """The registers of one group of blocks and the footprint they leave. ``blocks``: linear block indices, or None
    for a summary over all blocks, in which block indices are intervals.

    ``version`` counts register changes; with ``widen`` set, bounds that still move are dropped. ``handled`` counts
    the numbers that steps worked on.
    """

    def __init__(self, kernel: Kernel, launch: LaunchShape, blocks: Int | None) -> None:
        self.kernel = kernel
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.shape = Shape(1 if blocks is None else len(blocks), threads, blocks is not None)
        self.special = _special_registers(launch, blocks)
        self.registers: dict[str, Value] = {}
        # registers as the threads that execute the present step see them
        self.narrowed: Mapping[str, Value] = {}
        self.version = 0
        self.handled = 0
        self.widen = False
        self.warps = Warps(self.shape)
        self.memory = Memory(kernel, launch, self.shape, self._value, self._merged)

    def predicate(self, name: str) -> Predicate:
        """The value of a guard."""
        value = self.registers.get(name)
        return value if isinstance(value, Predicate) else EITHER

    def execute(self, step: Step, can: Bool, must: Bool, together: bool) -> None:
        """Run one step that is no branch for the threads that can be, and those that must be, here. ``together``:
        the whole block is at this step, whether its guard lets all threads execute it or not."""
        if step.effects.reaches_all:
            self._set(self.memory.everything(step), can, must)
        elif step.parts == ("call", "printing"):
            self.memory.printed(step)
        elif step.parts[0] in BARRIERS:
            if not together:
                self.memory.shared.lose()
            result = EITHER if step.parts[-1] == "pred" else unknown(32)
            self._set([(name, result) for name in step.writes], can, must)
        elif step.effects.touches:
            self.handled += can.size
            self.narrowed = self._narrowed(step)
            self.memory.access(step, can, must, together)
            loaded = tuple(self.memory.loaded(step, can, together))
            self.narrowed = {}
            self._set(loaded, can, must)
        elif step.writes:
            self._compute(step, can, must)

    def _set(self, values: Iterable[tuple[str, Value]], can: Bool, must: Bool) -> None:
        for name, value in values:
            self._write(name, value, can, must)

    def _compute(self, step: Step, can: Bool, must: Bool) -> None:
        parts, operands = step.parts, step.operands
        width = width_of(parts[-1]) or 64
        target = operands[0]
        if parts[0] == "mov" and len(operands) == 2 and any(isinstance(o, Vector) for o in operands):
            self._repack(step, can, must)
            return
        sources = tuple(
            self._value(operand, 64 if index == 2 and "wide" in parts else width)
            for index, operand in enumerate(operands[1:])
        )
        second: Value = EITHER
        if parts[0] in EXCHANGES:
            result, second = self.warps.exchange(parts, sources, can)
        else:
            result = evaluate(self.shape, parts, sources)
            if parts[0] == "setp" and isinstance(result, Predicate) and len(sources) == 2:
                second = Predicate(result.false, result.true)
        if isinstance(target, Name):
            self._write(target.text, result, can, must)
        elif isinstance(target, Pair):
            for part, value in ((target.first, result), (target.second, second)):
                if isinstance(part, Name):
                    self._write(part.text, value, can, must)
        else:
            for name in step.writes:
                self._write(name, mixed(sources), can, must)
        if CARRY in step.writes:
            self._write(CARRY, carry(self.shape, parts, sources), can, must)

    def _repack(self, step: Step, can: Bool, must: Bool) -> None:
        """``mov`` between one register and the pieces of it (little end first)."""
        target, source = step.operands[0], step.operands[1]
        width = 128 if step.parts[-1] == "b128" else width_of(step.parts[-1]) or 64
        if isinstance(source, Vector):
            piece = width // max(1, len(source.elements))
            values = tuple(self._value(element, piece) for element in source.elements)
            value: Value = mixed(values, width)
            fields = tuple(fields_of(value, piece) for value in values)
            if all(found is not None for found in fields):
                value = join_fields(self.shape, tuple(f for found in fields for f in found or ()), width)
        else:
            value = self._value(source, width)
        if not isinstance(target, Vector):
            for name in step.writes:
                self._write(name, value, can, must)
            return
        piece = width // max(1, len(target.elements))
        for index, element in enumerate(target.elements):
            if isinstance(element, Name):
                self._write(element.text, select_bits(self.shape, value, index * piece, piece), can, must)

    def _write(self, name: str, value: Value, can: Bool, must: Bool) -> None:
        self.registers[name] = self._merged(self.registers.get(name), value, can, must)

    def _merged(self, old: Value | None, value: Value, can: Bool, must: Bool) -> Value:
        """What a place holds after these threads have written to it."""
        if old is None or (can is ALWAYS and must is ALWAYS) or (can.all() and must.all()):
            new = value
        elif same_mask(can, must):
            new = choose(self.shape, Predicate(can, invert(can)), value, old)
        else:
            new = hull(old, value, self.widen)
        if new is not old:
            self.version += 1
        if isinstance(new, Known):
            self.handled += new.block.size + new.thread.size
        elif isinstance(new, Predicate):
            self.handled += new.true.size + new.false.size
        return new

    def _narrowed(self, step: Step) -> dict[str, Value]:
        """Registers with addresses that depend on data, narrowed by the conditions under which the step runs."""
        found: dict[str, Value] = {}
        for touch in step.effects.touches:
            operand = step.operands[touch.operand] if touch.operand < len(step.operands) else None
            if not isinstance(operand, Address) or not isinstance(operand.base, Name):
                continue
            name = operand.base.text
            if visible(touch.space) and isinstance(self.registers.get(name), Unknown):
                guards = guards_of(self.kernel)
                found[name] = Refiner(guards, self.shape, self._seen, guards.index(step)).narrowed(name)
        return found

    def _seen(self, operand: Operand, width: int, narrowed: Mapping[str, Value]) -> Value:
        self.narrowed = narrowed
        value = self._value(operand, width)
        self.narrowed = {}
        return value

    # --- operands -----------------------------------------------------------------------------------------------

    def _value(self, operand: Operand, width: int) -> Value:
        if isinstance(operand, Name):
            return self._named(operand.text)
        if isinstance(operand, Immediate):
            if operand.value is None:
                return unknown(width)
            half = 1 << (width - 1)
            return constant(((operand.value + half) % (1 << width)) - half)
        if isinstance(operand, Address):
            return add(self.shape, self._value(operand.base, 64), constant(operand.offset), 64)
        if isinstance(operand, Negated):
            value = self._value(operand.operand, width)
            if isinstance(value, Predicate):
                return Predicate(value.false, value.true)
            return mixed((value,), width)
        return unknown(width)

    def _named(self, text: str) -> Value:
        value = self.narrowed.get(text) or self.registers.get(text)
        if value is not None:
            return value
        value = self.special.get(text)
        if value is not None:
            return value
        return self.kernel.symbols.get(text, unknown())


def _special_registers(launch: LaunchShape, blocks: Int | None) -> dict[str, Value]:
    """Thread and block indices; ``blocks`` None makes block indices intervals."""
    found: dict[str, Value] = {}
    threads = np.arange(launch.block[0] * launch.block[1] * launch.block[2], dtype=np.int64)
    inner_threads, inner_blocks = 1, 1
    for axis, threads_here, blocks_here in zip("xyz", launch.block, launch.grid, strict=True):
        found[f"%ntid.{axis}"] = constant(threads_here)
        found[f"%nctaid.{axis}"] = constant(blocks_here)
        found[f"%tid.{axis}"] = _index(ZERO, (threads // inner_threads % threads_here)[None, :])
        if blocks is None:
            found[f"%ctaid.{axis}"] = Unknown(NUMBER, 0, blocks_here - 1)
        else:
            found[f"%ctaid.{axis}"] = _index((blocks // inner_blocks % blocks_here)[:, None], ZERO)
        inner_threads *= threads_here
        inner_blocks *= blocks_here
    lanes = (threads % LANES)[None, :]
    found["%laneid"] = _index(ZERO, lanes)
    for name, mask in {
        "eq": np.int64(1) << lanes,
        "lt": (np.int64(1) << lanes) - 1,
        "le": (np.int64(2) << lanes) - 1,
        "gt": -(np.int64(2) << lanes),
        "ge": -(np.int64(1) << lanes),
    }.items():
        found[f"%lanemask_{name}"] = _index(ZERO, wrap(mask, 32))
    found[HEAP_POINTER] = Unknown(frozenset({HEAP}), None, None)
    found["%dynamic_smem_size"] = constant(launch.shared_bytes)
    count = len(threads)
    blocks_in_all = launch.grid[0] * launch.grid[1] * launch.grid[2]
    # which warp, multiprocessor or place in a cluster a thread gets is decided while it runs
    for name, most in {
        "%warpid": max(_WARPS_LIMIT, -(-count // LANES)) - 1,
        "%nwarpid": _WARPS_LIMIT,
        "%smid": _MULTIPROCESSORS_LIMIT - 1,
        "%nsmid": _MULTIPROCESSORS_LIMIT,
        "%cluster_ctarank": _CLUSTER_LIMIT - 1,
        "%cluster_nctarank": _CLUSTER_LIMIT,
        **{f"%cluster_ctaid.{axis}": _CLUSTER_LIMIT - 1 for axis in "xyz"},
        **{f"%cluster_nctaid.{axis}": _CLUSTER_LIMIT for axis in "xyz"},
        **{f"%clusterid.{axis}": blocks_in_all for axis in "xyz"},
        **{f"%nclusterid.{axis}": blocks_in_all for axis in "xyz"},
        "%total_smem_size": (1 << 31) - 1,
        "%aggr_smem_size": (1 << 31) - 1,
    }.items():
        found[name] = Unknown(NUMBER, 0, most)
    return found


# Generous bounds, beyond any GPU there is.
_WARPS_LIMIT, _MULTIPROCESSORS_LIMIT, _CLUSTER_LIMIT = 128, 4096, 64


def _index(block: Int, thread: Int) -> Known:
    value = known(block, thread)
    return constant(value.low) if value.low == value.high else value
