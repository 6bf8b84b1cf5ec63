"""Small traces built by hand: buffers, ops and kernels, and a captured target made from the stored PTX."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tessera_core.program.boxes import Box
from tessera_core.program.ir import Buffer, IoBinding, Kernel, Op, Operand, Program, TensorRef, Trace
from tessera_core.program.store import trace_tables
from tessera_core.ptx.normalise import module_hash
from tessera_formats.bundle import write_bundle
from tessera_formats.trace import LAUNCHES, MODULES, TRACE, program_digest

PTX = Path(__file__).parents[2] / "fixtures" / "ptx"


@dataclass
class Builder:
    """Collects one program; ``tensor`` makes a one-dimensional bfloat16 view of a new or given buffer."""

    name: str = "decode:batch=1,context=8"
    buffers: list[Buffer] = field(default_factory=list)
    tensors: list[TensorRef] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    io: list[IoBinding] = field(default_factory=list)

    def tensor(
        self, kind: str, length: int, name: str = "", buffer: int | None = None, offset: int = 0
    ) -> int:
        if buffer is None:
            buffer = len(self.buffers)
            program = None if kind in ("weight", "constant") else 0
            self.buffers.append(
                Buffer(id=buffer, program=program, kind=kind, bytes=2 * length, name=name, real=True)  # type: ignore[arg-type]
            )
        number = len(self.tensors)
        self.tensors.append(
            TensorRef(id=number, buffer=buffer, dtype="bfloat16", shape=(length,), stride=(1,), offset=offset)
        )
        if kind in ("input", "output", "state"):
            self.io.append(IoBinding(role=kind, name=name, tensor=number, feeds=None))  # type: ignore[arg-type]
        return number

    def op(self, target: str, *operands: Operand) -> int:
        """An op of the newest kernel."""
        reads = tuple(o.tensor for o in operands if o.mode == "read")
        writes = tuple(o.tensor for o in operands if o.mode == "write")
        number = len(self.ops)
        kernel = self.kernels.pop()
        self.ops.append(
            Op(
                id=number,
                kernel=kernel.id,
                target=target,
                schema="",
                arguments={"args": [], "kwargs": {}},
                inputs=reads,
                outputs=writes,
                operands=operands,
            )
        )
        self.kernels.append(_kernel(kernel.id, kernel.name, (*kernel.ops, number)))
        return number

    def kernel(self, name: str = "work") -> int:
        self.kernels.append(_kernel(len(self.kernels), name, ()))
        return len(self.kernels) - 1

    def trace(self) -> Trace:
        program = Program(
            id=0,
            name=self.name,
            phase="decode",
            batch=1,
            context=8,
            ops=tuple(self.ops),
            kernels=tuple(self.kernels),
            io=tuple(self.io),
            guards=(),
        )
        info = {
            "program_digest": "",
            "model": "sample",
            "source": "embedded",
            "seed": 0,
            "dtype": "bfloat16",
            "fake": False,
            "replayable": True,
            "notes": [],
            "versions": {},
        }
        return Trace(
            info=info,
            programs=(program,),
            buffers=tuple(self.buffers),
            tensors=tuple(self.tensors),
            weights=(),
            states=(),
            constants=b"",
        )


def _kernel(number: int, name: str, ops: tuple[int, ...]) -> Kernel:
    return Kernel(
        id=number,
        signature=f"{name}-{number}",
        name=name,
        kind="other",
        flops=0,
        read_bytes=0,
        written_bytes=0,
        state_writer="none",
        dtype="bfloat16",
        layer=None,
        ops=ops,
    )


def read(tensor: int, evidence: str = "schema") -> Operand:
    return Operand(tensor=tensor, mode="read", must=False, valid_for="shapes", evidence=evidence, boxes=None)  # type: ignore[arg-type]


def write(
    tensor: int,
    must: bool = True,
    evidence: str = "schema",
    boxes: tuple[Box, ...] | None = None,
    valid_for: str = "shapes",
) -> Operand:
    return Operand(
        tensor=tensor,
        mode="write",
        must=must,
        valid_for=valid_for,  # type: ignore[arg-type]
        evidence=evidence,  # type: ignore[arg-type]
        boxes=boxes,
    )


def launch(
    kernel: int,
    op: int | None,
    module: str,
    pointers: Sequence[tuple[int, int]],
    count: int,
    function: str = "silu_multiply",
    blocks: int = 0,
) -> dict[str, Any]:
    """A launch of a stored kernel that takes three pointers (buffer, byte offset) and a count."""
    return {
        "program": 0,
        "kernel": kernel,
        "launch": 0,
        "op": op,
        "kind": "kernel",
        "module": module,
        "function": function,
        "grid": [blocks or -(-count // 1024), 1, 1],
        "block": [128, 1, 1],
        "cluster": [1, 1, 1],
        "shared_bytes": 0,
        "parameters": bytes(24) + struct.pack("<i", count) + bytes(4) + bytes(16),
        "relocations": [
            {"offset": 8 * index, "buffer": buffer, "byte_offset": offset}
            for index, (buffer, offset) in enumerate(pointers)
        ],
    }


def module_row(function: str = "silu_multiply", architecture: str = "sm_90") -> dict[str, str]:
    """The stored PTX of a kernel as a row of a target's modules."""
    text = (PTX / f"{function}.{architecture}.ptx").read_text()
    return {
        "module": module_hash(text),
        "raw_hash": "",
        "architecture": architecture,
        "language": "ptx",
        "source_hash": "",
        "text": text,
    }


def save(
    path: Path,
    trace: Trace,
    launches: Sequence[dict[str, Any]] = (),
    modules: Sequence[dict[str, str]] = (),
    **more: Sequence[dict[str, Any]],
) -> Path:
    """Write a trace, with a target sm_90 where there are launches; ``more``: further tables of it by name."""
    tables: dict[str, pa.Table] = trace_tables(trace)
    info = {**trace.info, "program_digest": program_digest(tables, trace.constants)}
    if launches:
        tables["targets/sm_90/launches"] = LAUNCHES.build(launches)
        tables["targets/sm_90/modules"] = MODULES.build(modules)
        for name, rows in more.items():
            tables[f"targets/sm_90/{name}"] = TRACE.table(f"targets/sm_90/{name}").build(rows)
    write_bundle(path, TRACE, info=info, tables=tables, files={"data.safetensors": trace.constants})
    return path
