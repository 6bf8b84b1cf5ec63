"""The program IR: what a trace holds, as plain values that every later stage reads.

Nothing here knows PyTorch; dtypes are their PyTorch names and tensors are views of numbered storages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tessera_core.program.boxes import Box, tensor_box

BufferKind = Literal["weight", "input", "constant", "state", "activation", "output", "workspace"]
Mode = Literal["read", "write"]
ValidFor = Literal["shapes", "content"]
Evidence = Literal["ptx", "schema", "declared", "observed", "conservative"]
StateWriter = Literal["none", "copy", "compute"]

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}
"""Bytes per element of every dtype that a trace may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One storage. ``program`` is None for what all programs share (weights, constants)."""

    id: int
    program: int | None
    kind: BufferKind
    bytes: int
    name: str
    real: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """A strided view of a buffer; ``shape``, ``stride`` and ``offset`` in elements of ``dtype``."""

    id: int
    buffer: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        """Number of elements."""
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    def box(self) -> Box | None:
        """The bytes of the buffer that the view touches; None for an empty view."""
        return tensor_box(self.item_bytes, self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An access of an op to a tensor. ``boxes`` None: exactly the tensor's own box."""

    tensor: int
    mode: Mode
    must: bool
    valid_for: ValidFor
    evidence: Evidence
    boxes: tuple[Box, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One recorded operator call. ``arguments`` is decoded JSON: ``{"args": [...], "kwargs": {...}}``.

    Tensors in it are ``{"tensor": id}``; dtypes ``{"dtype": name}``; devices ``{"device": "any"}``.
    ``stream``: the stream that the model issued it on, 0 for its main one.
    """

    id: int
    kernel: int
    target: str
    schema: str
    arguments: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operands: tuple[Operand, ...]
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The placed unit: a group of consecutive-or-independent ops, or one Triton launch.

    Kernels of one ``group`` are tied by a collective and placed together; None: free.
    """

    id: int
    signature: str
    name: str
    kind: str
    flops: int
    read_bytes: int
    written_bytes: int
    state_writer: StateWriter
    dtype: str
    layer: int | None
    ops: tuple[int, ...]
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWait:
    """An order between ops of two streams that the model states with an event.

    ``source``: last op before the event was recorded; ``destination``: first op that waits for it.
    """

    source: int
    destination: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IoBinding:
    """An input, output or state of a program. ``feeds``: the next iteration's input that an output becomes."""

    role: Literal["input", "output", "state"]
    name: str
    tensor: int
    feeds: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A condition under which the trace is valid, computable before a request starts."""

    subject: str
    index: int | None
    comparison: Literal["eq", "ne", "lt", "le", "gt", "ge"]
    value: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A named parameter. ``init``: its recipe, e.g. ``{"kind": "normal", "std": 0.02}``."""

    name: str
    aliases: tuple[str, ...]
    buffer: int
    tensor: int
    init: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state family: axis of requests, axis of tokens, and how a fresh one looks."""

    name: str
    batch_axis: int | None
    sequence_axis: int | None
    init: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The replayable record of one iteration for one (phase, batch, context)."""

    id: int
    name: str
    phase: str
    batch: int
    context: int
    ops: tuple[Op, ...]
    kernels: tuple[Kernel, ...]
    io: tuple[IoBinding, ...]
    guards: tuple[Guard, ...]
    stream_waits: tuple[StreamWait, ...] = ()

    def bindings(self, role: str) -> dict[str, IoBinding]:
        """Inputs, outputs or state by name."""
        return {binding.name: binding for binding in self.io if binding.role == role}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Everything that a trace artifact says, captured targets aside.

    ``info`` is the manifest's; ``constants`` is the raw safetensors content (keys ``buffer.ID``).
    """

    info: Mapping[str, Any]
    programs: tuple[Program, ...]
    buffers: tuple[Buffer, ...]
    tensors: tuple[TensorRef, ...]
    weights: tuple[Weight, ...]
    states: tuple[State, ...]
    constants: bytes

    @property
    def digest(self) -> str:
        """The program digest."""
        return str(self.info["program_digest"])

    def program(self, name: str) -> Program:
        """The program called ``name``; ``KeyError`` if there is none."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Program]:
        return {program.name: program for program in self.programs}
