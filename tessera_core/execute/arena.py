"""Shared memory and message pipes between the workers of one run.

The arena is one anonymous shared memory object with a region per (lane, transfer), allocated before the run
and mapped by every worker; it has no name, so nothing can be left behind in /dev/shm, however a run ends.

Who may touch a region when is told by messages: each worker has one inbox, a pipe into which all others write
messages of fixed size (a write below PIPE_BUF bytes is atomic). A sender copies into the region and writes
*filled* into the receiver's inbox; the receiver binds the region as the buffer's storage, and writes *drained*
into the sender's inbox once nothing needs it. A worker with nothing to do blocks on its inbox, so waiting takes
no processor, whatever the number of slots, and the kernel's pipe orders the memory accesses for us.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tessera_core.execute.segments import RouteModel
from tessera_core.program.ir import Trace
from tessera_formats.errors import InputError

ALIGNMENT_BYTES = 256
"""Regions start at multiples of this, like every arena (wide vector loads, and whole cache lines)."""

SPIN_US = 60.0
"""How long an idle worker with a core of its own polls before it sleeps: about what waking up costs."""

# The most that Linux lets an unprivileged process ask for unless told otherwise (fs.pipe-max-size, pipe(7)).
_PIPE_BYTES = 1 << 20
_MESSAGE = struct.Struct("<HHIIIII")


class Kind(IntEnum):
    """What a message says."""

    STOP = 0
    START = 1
    FILLED = 2
    DRAINED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. FILLED and DRAINED use ``lane`` and ``number`` (the transfer), START all fields.

    START: ``number`` is the batch, ``first`` its first request, ``count`` how many, ``iterations`` of the
    route's (at most two) programs.
    """

    kind: Kind
    lane: int = 0
    number: int = 0
    first: int = 0
    count: int = 0
    iterations: tuple[int, int] = (0, 0)

    def encode(self) -> bytes:
        """The message's bytes."""
        return _MESSAGE.pack(self.kind, self.lane, self.number, self.first, self.count, *self.iterations)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where each region lies: (lane, transfer) -> (offset, bytes); and the arena's size in bytes."""

    regions: dict[tuple[int, int], tuple[int, int]]
    bytes: int


def arena_layout(trace: Trace, models: Sequence[RouteModel]) -> ArenaLayout:
    """One region per slot and transfer, as large as the buffer."""
    regions: dict[tuple[int, int], tuple[int, int]] = {}
    offset = lane = 0
    for model in models:
        for _ in range(model.slots):
            for move in model.transfers:
                size = trace.buffers[move.transfer.buffer].bytes
                regions[lane, move.index] = (offset, size)
                offset += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            lane += 1
    return ArenaLayout(regions, max(offset, ALIGNMENT_BYTES))


def create_arena(size: int) -> int:
    """File descriptor of a new anonymous shared memory object; raises :class:`InputError` if it can't be."""
    descriptor = os.memfd_create("tessera-arena", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as problem:
        os.close(descriptor)
        raise InputError(
            f"run: {size} bytes of shared memory for transfers can't be had ({problem.strerror}); "
            "use fewer slots (tessera partition --in-flight)"
        ) from problem
    return descriptor


def map_arena(descriptor: int, size: int) -> mmap.mmap:
    """The arena in this process's memory, its pages present."""
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def create_inbox(models: Sequence[RouteModel], device: str) -> tuple[int, int]:
    """Read and write ends of a device's inbox, large enough that no writer ever has to wait.

    At most one *filled* or *drained* message of each region, and one *start* per lane, lie in it at a time.
    Raises :class:`InputError` where the system's pipes are too small for that.
    """
    lanes = sum(model.slots for model in models)
    regions = sum(
        model.slots
        for model in models
        for move in model.transfers
        if device in (move.transfer.source, move.transfer.destination)
    )
    needed = 2 * (regions + lanes + 1) * _MESSAGE.size  # twice: pages fill unevenly
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if needed > fcntl.fcntl(read, fcntl.F_GETPIPE_SZ):
            fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, max(needed, _PIPE_BYTES))
    except OSError as problem:
        os.close(read)
        os.close(write)
        raise InputError(
            f"run: {device} needs an inbox of {needed} bytes, the system's pipes hold less; use fewer slots "
            "(tessera partition --in-flight)"
        ) from problem
    return read, write


class Inbox:
    """The reading end of a worker's pipe. ``control``: a descriptor whose hang-up means that the run is over."""

    def __init__(self, descriptor: int, control: int, spin_us: float) -> None:
        self._descriptor = descriptor
        self._spin_ns = int(spin_us * 1000)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._poll.register(control, select.POLLIN | select.POLLHUP)
        self._control = control

    def read(self) -> list[Message]:
        """The messages that are there now."""
        try:
            raw = os.read(self._descriptor, 4096 // _MESSAGE.size * _MESSAGE.size)
        except BlockingIOError:
            return []
        return [
            Message(kind=Kind(kind), lane=lane, number=number, first=first, count=count, iterations=(a, b))
            for kind, lane, number, first, count, a, b in _MESSAGE.iter_unpack(raw)
        ]

    def wait(self) -> list[Message]:
        """Block until there are messages; STOP where the controller is gone."""
        limit = time.monotonic_ns() + self._spin_ns
        while True:
            messages = self.read()
            if messages:
                return messages
            if time.monotonic_ns() >= limit:
                break
        while True:
            ready = dict(self._poll.poll())
            if self._descriptor in ready:
                messages = self.read()
                if messages:
                    return messages
            elif self._control in ready:
                return [Message(kind=Kind.STOP)]
