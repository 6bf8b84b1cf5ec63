"""The public door: what one launch of a module's kernel reads and writes.

Assumptions (the theorem holds under these): an access stays inside the allocation that its address was computed
from; an index read from memory is not a pointer in disguise where it is added to one; allocations start at
multiples of 256 bytes; ``buffer_bytes`` names every buffer that the launch could reach; the launch ends without a
trap; no peer or host memory is mapped into the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from tessera_core.ptx.blocks import (
    KEPT_BYTES_LIMIT,
    BlockFootprint,
    BlockRecorder,
    Split,
    block_footprints,
    split_of,
)
from tessera_core.ptx.footprint import Footprint, PtxAccess
from tessera_core.ptx.interpreter import Interpreter
from tessera_core.ptx.kernel import Kernel, kernel_of
from tessera_core.ptx.parameters import LaunchShape, Relocation
from tessera_core.ptx.syntax import Module
from tessera_core.ptx.values import BlocksDiffer, Int

__all__ = [
    "BlockFootprint",
    "LaunchAnalysis",
    "LaunchShape",
    "PtxAccess",
    "Relocation",
    "Split",
    "analyse_launch",
]

# Blocks beyond this are not told apart: block indices become intervals.
BLOCKS_LIMIT = 1 << 20

# Groups of blocks that behave differently before the same happens.
GROUPS_LIMIT = 64

# Steps for all groups of a launch together before the same happens to the blocks that are left: some seconds.
LAUNCH_STEPS_LIMIT = 300_000

_MODES: tuple[Literal["read", "write"], ...] = ("read", "write")


@dataclass(frozen=True, slots=True)
class LaunchAnalysis:
    """All accesses of one launch to buffers. ``unknown_opcodes``: opcodes that the effects table lacks.
    ``fallbacks``: one line per reason for which not even the base of an access is known, with the line in the
    module. ``written_variables``: module variables in device memory that may be written, with the line; they are
    nobody's buffer, so whoever relies on ``accesses`` must refuse such a launch. ``block_footprints`` and ``split``
    tell the blocks apart (see `blocks.py`)."""

    accesses: tuple[PtxAccess, ...]
    unknown_opcodes: tuple[str, ...]
    fallbacks: tuple[str, ...]
    block_footprints: tuple[BlockFootprint, ...]
    split: Split
    written_variables: tuple[tuple[str, int], ...] = ()


def analyse_launch(
    module: Module,
    launch: LaunchShape,
    buffer_bytes: Mapping[int, int],
    content: Mapping[int, bytes] | None = None,
) -> LaunchAnalysis:
    """The reads and writes of ``launch``, in bytes from the start of each buffer.

    ``buffer_bytes``: size of every buffer that the launch could reach; where the base of an address is unknown, all
    of them count as read and written. Results are remembered per module and launch, whatever the buffers are called.
    ``content``: bytes of buffers that the launch only reads, from which addresses may be computed; the result then
    holds for this content alone.

    Raises InputError where the module has no such kernel.
    """
    names = tuple(dict.fromkeys(relocation.buffer for relocation in launch.relocations))
    number = {buffer: index for index, buffer in enumerate(names)}
    block = bytearray(launch.parameters)
    for relocation in launch.relocations:
        block[relocation.offset : relocation.offset + 8] = bytes(8)
    canonical = replace(
        launch,
        parameters=bytes(block[: len(launch.parameters)]),
        relocations=tuple(Relocation(r.offset, number[r.buffer], r.byte_offset) for r in launch.relocations),
    )
    sizes = tuple(buffer_bytes.get(buffer, 0) for buffer in names)
    if content:
        stored = {number[buffer]: found for buffer, found in content.items() if buffer in number}
        result = _result(module, canonical, sizes, stored)
    else:
        result = _remembered(module, canonical, sizes)
    accesses = [
        replace(access, buffer=names[access.buffer])
        for access in result.accesses
        if access.must or not result.everything  # the fallback below takes in every access that is not sure
    ]
    if result.everything:
        reason, line = result.everything[0]
        accesses.extend(
            PtxAccess(
                buffer=buffer,
                mode=mode,
                must=False,
                boxes=None,
                precision="fallback",
                reason=reason,
                line=line,
            )
            for buffer in sorted({*buffer_bytes, *names})
            for mode in _MODES
        )
    return LaunchAnalysis(
        accesses=tuple(sorted(accesses, key=lambda access: (access.buffer, access.mode, not access.must))),
        unknown_opcodes=result.unknown_opcodes,
        fallbacks=tuple(
            f"{reason} (line {line})"
            for reason, line in (
                *result.everything,
                *(
                    (f"module variable {name} is read", at)
                    for (name, mode), at in result.variables
                    if mode == "read"
                ),
            )
        ),
        block_footprints=tuple(
            replace(footprint, buffer=names[footprint.buffer]) for footprint in result.block_footprints
        ),
        split=result.split,
        written_variables=tuple((name, at) for (name, mode), at in result.variables if mode == "write"),
    )


@dataclass(frozen=True, slots=True)
class _Result:
    accesses: tuple[PtxAccess, ...]
    unknown_opcodes: tuple[str, ...]
    everything: tuple[tuple[str, int], ...]
    variables: tuple[tuple[tuple[str, Literal["read", "write"]], int], ...]
    block_footprints: tuple[BlockFootprint, ...]
    split: Split


@lru_cache(maxsize=4096)
def _remembered(module: Module, launch: LaunchShape, sizes: tuple[int, ...]) -> _Result:
    return _result(module, launch, sizes, {})


def _result(
    module: Module, launch: LaunchShape, sizes: tuple[int, ...], content: Mapping[int, bytes]
) -> _Result:
    kernel = kernel_of(module, launch.entry)
    footprint, groups = _interpret(kernel, launch, content)
    steps = kernel.flow.steps
    everything = bool(footprint.everything)
    return _Result(
        accesses=footprint.accesses(dict(enumerate(sizes))),
        unknown_opcodes=tuple(sorted({".".join(step.parts) for step in steps if not step.effects.known})),
        everything=tuple(footprint.everything.items()),
        variables=tuple(footprint.variables.items()),
        block_footprints=() if groups is None or everything else block_footprints(groups, launch.grid),
        split=split_of(groups, footprint, kernel.flow, launch.grid),
    )


def _interpret(
    kernel: Kernel, launch: LaunchShape, content: Mapping[int, bytes]
) -> tuple[Footprint, list[BlockRecorder] | None]:
    """Interpret all blocks together, dividing them where they behave differently.

    Returns what they do in all, and group by group; None where blocks were not told apart.
    """
    blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
    total = Footprint()
    if not 0 < blocks <= BLOCKS_LIMIT:
        return (Interpreter(kernel, launch, None).run() if blocks else total), None
    recorders: list[BlockRecorder] = []
    waiting: list[Int] = [np.arange(blocks, dtype=np.int64)]
    groups = 1
    steps_left, bytes_left = LAUNCH_STEPS_LIMIT, KEPT_BYTES_LIMIT
    while waiting:
        if steps_left <= 0 or groups > GROUPS_LIMIT:
            # What is known of the blocks so far stays, all others count among any blocks.
            total.merge(Interpreter(kernel, launch, None).run())
            return total, None
        group = waiting.pop()
        interpreter = Interpreter(kernel, launch, group, steps_left)
        recorder = BlockRecorder(group, bytes_left)
        interpreter.threads.memory.content = content
        interpreter.threads.memory.record_in(recorder)
        try:
            total.merge(interpreter.run())
            recorders.append(recorder)
            bytes_left = max(0, bytes_left - recorder.kept_bytes)
        except BlocksDiffer as different:
            parts = [group[different.classes == value] for value in np.unique(different.classes)]
            groups += len(parts) - 1
            waiting.extend(parts)
        steps_left -= interpreter.spent
    return total, None if any(recorder.full for recorder in recorders) else recorders
