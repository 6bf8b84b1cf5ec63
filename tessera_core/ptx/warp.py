"""Instructions through which the threads of a warp see each other's registers (PTX ISA 9.0, sections 9.7.9.6 and
9.7.13.9 to 9.7.13.14). They are exact where whole warps stand at the instruction and it is known who looks at whom;
otherwise a value may be that of any lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tessera_core.ptx.arithmetic import refit
from tessera_core.ptx.values import (
    EITHER,
    NO_BASE,
    NUMBER,
    ZERO,
    Bool,
    Field,
    Int,
    Known,
    Predicate,
    Shape,
    Unknown,
    Value,
    clip,
    is_constant,
    known,
    unknown,
    width_of,
)

LANES = 32

EXCHANGES = frozenset({"shfl", "vote", "redux", "match", "activemask", "elect"})

_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


class Warps:
    """Remembers what was moved where, so that the halves of a pointer that are moved alike can be joined again."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.moved: dict[tuple[int, bytes], tuple[Known, Known]] = {}

    def exchange(self, parts: tuple[str, ...], sources: tuple[Value, ...], can: Bool) -> tuple[Value, Value]:
        """Both results of one of :data:`EXCHANGES` for the threads that can be there."""
        if parts[0] == "shfl":
            return self._shuffle(parts, sources, can)
        if parts[0] == "vote":
            return self._vote(parts, sources, can), EITHER
        if parts[0] == "redux":
            return self._reduce(parts, sources, can), EITHER
        if parts[0] == "elect":
            return Unknown(NUMBER, 0, LANES - 1), EITHER
        return unknown(32), EITHER

    def _whole(self, can: Bool) -> bool:
        """Whether every warp is here as a whole or not at all."""
        if can.shape[1] == 1:
            return True
        if self.shape.threads % LANES:
            return bool(can.all())
        lanes = can.reshape(can.shape[0], -1, LANES)
        return bool((lanes == lanes[:, :, :1]).all())

    def _shuffle(self, parts: tuple[str, ...], sources: tuple[Value, ...], can: Bool) -> tuple[Value, Value]:
        value = sources[0]
        found = self._origins(parts, sources[1], sources[2]) if self._whole(can) else None
        if found is not None:
            origins, inside = found
            if isinstance(value, Known):
                return self._permuted(value, origins), Predicate(inside, ~inside)
            if isinstance(value, Unknown) and value.fields:
                fields = tuple(
                    Field(self._permuted(field.source, origins), field.start, field.bits)
                    for field in value.fields
                )
                return Unknown(value.bases, None, None, fields), Predicate(inside, ~inside)
        if isinstance(value, Predicate):
            return unknown(32), EITHER
        bases = frozenset({value.base}) if isinstance(value, Known) else value.bases
        return Unknown(bases, value.low, value.high), EITHER

    def _origins(self, parts: tuple[str, ...], by: Value, limits: Value) -> tuple[Int, Bool] | None:
        """For each thread the thread whose value it gets, and whether that one lies within its segment."""
        if not (isinstance(by, Known) and isinstance(limits, Known) and by.base == limits.base == NO_BASE):
            return None
        if by.block.size > 1 or limits.block.size > 1:
            return None
        threads = np.arange(self.shape.threads, dtype=np.int64)[None, :]
        lane = threads % LANES
        amount, packed = (by.block + by.thread) & 31, limits.block + limits.thread
        clamp, segment = packed & 31, packed >> 8 & 31
        most = (lane & segment) | (clamp & ~segment)
        mode = parts[2] if parts[1] == "sync" else parts[1]
        if mode == "up":
            origin = lane - amount
            inside = origin >= most
        else:
            origin = {
                "down": lane + amount,
                "bfly": lane ^ amount,
                "idx": (lane & segment) | (amount & ~segment),
            }[mode]
            inside = origin <= most
        origins = np.where(inside, threads - lane + origin, threads)
        if int(origins.max()) >= self.shape.threads or int(origins.min()) < 0:
            return None  # a lane that does not exist
        return origins[0], np.broadcast_to(inside, threads.shape)

    def _permuted(self, value: Known, origins: Int) -> Known:
        if value.thread.size == 1 and value.block.shape[1] == 1:
            return value
        key = (id(value), origins.tobytes())
        if key not in self.moved:
            block = value.block if value.block.shape[1] == 1 else value.block[:, origins]
            thread = value.thread if value.thread.size == 1 else value.thread[:, origins]
            self.moved[key] = (value, known(block, thread, value.base))
        return self.moved[key][1]

    def _vote(self, parts: tuple[str, ...], sources: tuple[Value, ...], can: Bool) -> Value:
        ballot = parts[-1] == "b32"
        flag = sources[0]
        nothing: Value = unknown(32) if ballot else EITHER
        everyone = len(sources) < 2 or (
            is_constant(sources[1]) and _low(sources[1]) & 0xFFFFFFFF == 0xFFFFFFFF
        )
        if not isinstance(flag, Predicate) or not everyone or not self._whole(can):
            return nothing
        if (flag.true & flag.false).any() or not self.shape.dense_allowed():
            return nothing
        rows = flag.true.shape[0]
        width = -(-self.shape.threads // LANES) * LANES
        mode = next((part for part in parts if part in ("all", "any", "uni")), "")
        lanes = np.full((rows, width), mode == "all", dtype=np.bool_)
        lanes[:, : self.shape.threads] = flag.true
        warps = lanes.reshape(rows, -1, LANES)
        if ballot:
            weights = np.int64(1) << np.arange(LANES, dtype=np.int64)
            found = self._spread((warps * weights).sum(axis=2))
            return refit(self.shape, _laid(found), 32)
        if mode == "uni":
            return EITHER
        true = self._spread(warps.all(axis=2) if mode == "all" else warps.any(axis=2))
        return Predicate(true, ~true)

    def _spread(self, warps: Any) -> Any:
        return np.repeat(warps, LANES, axis=1)[:, : self.shape.threads]

    def _reduce(self, parts: tuple[str, ...], sources: tuple[Value, ...], can: Bool) -> Value:
        value = sources[0]
        operation = next((part for part in parts if part in _REDUCTIONS), "")
        if isinstance(value, Predicate) or not width_of(parts[-1]) or not operation:
            return unknown(32)
        everyone = is_constant(sources[1]) and _low(sources[1]) & 0xFFFFFFFF == 0xFFFFFFFF
        whole = (
            everyone and self._whole(can) and not self.shape.threads % LANES and self.shape.dense_allowed()
        )
        if isinstance(value, Known) and value.base == NO_BASE and whole:
            laid_out = value.block + value.thread
            laid_out = np.broadcast_to(laid_out, (laid_out.shape[0], self.shape.threads))
            if parts[-1] == "u32" and operation in ("min", "max"):
                laid_out = laid_out & np.int64(0xFFFFFFFF)
            warps = _REDUCTIONS[operation](laid_out.reshape(laid_out.shape[0], -1, LANES), axis=2)
            return refit(self.shape, _laid(self._spread(warps)), 32)
        if operation in ("min", "max") and parts[-1] == "s32" and isinstance(value, (Known, Unknown)):
            bases = frozenset({value.base}) if isinstance(value, Known) else value.bases
            return clip(Unknown(bases, value.low, value.high), 32)
        return unknown(32)


def _laid(values: Int) -> Known:
    return known(ZERO, values) if values.shape[0] == 1 else known(values)


def _low(value: Value) -> int:
    assert isinstance(value, Known)
    return value.low
