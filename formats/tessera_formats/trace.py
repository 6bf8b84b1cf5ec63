"""The trace artifact (a bundle): programs, ops, kernels, buffers, weights, state, guards and captured targets.

The program digest covers what a program *is* (not versions, devices, paths, captures or times), so that
artifacts of later stages can be tied to the program that they speak of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tessera_formats.bundle import Bundle, BundleSchema, read_bundle, write_bundle
from tessera_formats.document import Field, Record
from tessera_formats.errors import OriginError
from tessera_formats.table import BOX, Column, ForeignKey, TableSchema, content_checksum

I32, I64, F64, TEXT, FLAG = pa.int32(), pa.int64(), pa.float64(), pa.string(), pa.bool_()
INTS, LONGS, TEXTS = pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.string())

BUFFER_KINDS = ("weight", "input", "constant", "state", "activation", "output", "workspace")
KERNEL_KINDS = (
    "matmul",
    "attention",
    "convolution",
    "embedding",
    "reduction",
    "pointwise",
    "copy",
    "sort",
    "counter",
    "triton",
    "custom",
    "collective",
    "other",
)
STATE_WRITERS = ("none", "copy", "compute")
EVIDENCE = ("ptx", "schema", "declared", "observed", "conservative")

PROGRAMS = TableSchema(
    name="programs",
    meaning="one row per replayable iteration of one (phase, batch, context)",
    columns=(
        Column(name="program", type=I32, meaning="id, dense", minimum=0),
        Column(name="name", type=TEXT, meaning="phase:batch=B,context=C"),
        Column(name="phase", type=TEXT, meaning="prefill, decode, step, ..."),
        Column(name="batch", type=I64, meaning="requests in a batch", minimum=1),
        Column(
            name="context",
            type=I64,
            meaning="prefill: prompt tokens; decode: cache capacity in tokens",
            minimum=0,
        ),
    ),
    key=("program",),
)
BUFFERS = TableSchema(
    name="buffers",
    meaning="one row per storage",
    columns=(
        Column(name="buffer", type=I32, meaning="id, dense over all programs", minimum=0),
        Column(name="program", type=I32, meaning="owner; null: shared by all programs", nullable=True),
        Column(name="kind", type=TEXT, meaning="what the storage is for", choices=BUFFER_KINDS),
        Column(name="bytes", type=I64, meaning="size", minimum=0),
        Column(name="name", type=TEXT, meaning="weight, state or input name; empty for activations"),
        Column(name="real", type=FLAG, meaning="values were real while tracing (not fake)"),
    ),
    key=("buffer",),
    foreign=(ForeignKey(("program",), "programs", ("program",)),),
)
TENSORS = TableSchema(
    name="tensors",
    meaning="one row per distinct strided view of a buffer that ops refer to",
    columns=(
        Column(name="tensor", type=I32, meaning="id, dense", minimum=0),
        Column(name="buffer", type=I32, meaning="storage", minimum=0),
        Column(name="dtype", type=TEXT, meaning="PyTorch name without 'torch.', e.g. bfloat16"),
        Column(name="shape", type=LONGS, meaning="extents in elements", minimum=0),
        Column(name="stride", type=LONGS, meaning="strides in elements", minimum=0),
        Column(name="offset", type=I64, meaning="storage offset in elements", minimum=0),
    ),
    key=("tensor",),
    foreign=(ForeignKey(("buffer",), "buffers", ("buffer",)),),
)
KERNELS = TableSchema(
    name="kernels",
    meaning="one row per kernel: the unit that is placed",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="kernel", type=I32, meaning="id, dense and in program order", minimum=0),
        Column(name="signature", type=TEXT, meaning="hash of the structure; equal kernels are measured once"),
        Column(name="name", type=TEXT, meaning="short readable name"),
        Column(name="kind", type=TEXT, meaning="class of work", choices=KERNEL_KINDS),
        Column(name="flops", type=I64, meaning="floating-point operations", minimum=0),
        Column(
            name="read_bytes",
            type=I64,
            meaning="bytes read from other kernels' and external buffers",
            minimum=0,
        ),
        Column(name="written_bytes", type=I64, meaning="bytes written that outlive the kernel", minimum=0),
        Column(name="state_writer", type=TEXT, meaning="copy: may run on every home", choices=STATE_WRITERS),
        Column(name="dtype", type=TEXT, meaning="dtype of the arithmetic, e.g. bfloat16"),
        Column(name="layer", type=I32, meaning="index of the repeated layer", nullable=True, minimum=0),
        Column(
            name="group",
            type=I32,
            meaning="kernels of one number are tied by a collective and placed together; null: free",
            nullable=True,
            minimum=0,
        ),
    ),
    key=("program", "kernel"),
    foreign=(ForeignKey(("program",), "programs", ("program",)),),
)
OPS = TableSchema(
    name="ops",
    meaning="one row per recorded operator call, views excepted",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="op", type=I32, meaning="id, dense and in call order", minimum=0),
        Column(name="kernel", type=I32, meaning="kernel that it belongs to", minimum=0),
        Column(
            name="target", type=TEXT, meaning="aten.mm.default, or triton.MODULE.NAME for a Triton launch"
        ),
        Column(name="schema", type=TEXT, meaning="operator schema, or the Triton signature"),
        Column(name="arguments", type=TEXT, meaning='canonical JSON; tensors as {"tensor": id}'),
        Column(name="inputs", type=INTS, meaning="tensor ids read or written", minimum=0),
        Column(name="outputs", type=INTS, meaning="tensor ids returned, fresh storage or aliases", minimum=0),
        Column(name="stream", type=I32, meaning="stream that the model issued it on; 0: its main", minimum=0),
    ),
    key=("program", "op"),
    foreign=(ForeignKey(("program", "kernel"), "kernels", ("program", "kernel")),),
)
STREAM_WAITS = TableSchema(
    name="stream_waits",
    meaning="one row per order between two streams that the model states with an event",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="source", type=I32, meaning="last op before the event was recorded", minimum=0),
        Column(name="destination", type=I32, meaning="first op that waits for it", minimum=0),
    ),
    key=("program", "source", "destination"),
    foreign=(
        ForeignKey(("program", "source"), "ops", ("program", "op")),
        ForeignKey(("program", "destination"), "ops", ("program", "op")),
    ),
)
OPERANDS = TableSchema(
    name="operands",
    meaning="one row per access of an op to a tensor, as its schema or declaration states it",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="op", type=I32, meaning="op", minimum=0),
        Column(name="tensor", type=I32, meaning="tensor", minimum=0),
        Column(name="mode", type=TEXT, meaning="direction", choices=("read", "write")),
        Column(name="must", type=FLAG, meaning="every element is certainly written (reads: false)"),
        Column(
            name="valid_for",
            type=TEXT,
            meaning="shapes: always; content: only for the traced values",
            choices=("shapes", "content"),
        ),
        Column(name="evidence", type=TEXT, meaning="where it comes from", choices=EVIDENCE),
        Column(
            name="boxes",
            type=pa.list_(BOX),
            meaning="bytes of the buffer; null: the whole tensor",
            nullable=True,
        ),
    ),
    foreign=(
        ForeignKey(("program", "op"), "ops", ("program", "op")),
        ForeignKey(("tensor",), "tensors", ("tensor",)),
    ),
)
IO = TableSchema(
    name="io",
    meaning="one row per input, output and bound state of a program",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="role", type=TEXT, meaning="role", choices=("input", "output", "state")),
        Column(name="name", type=TEXT, meaning="name; for state the family's name"),
        Column(name="tensor", type=I32, meaning="the whole tensor", minimum=0),
        Column(
            name="feeds",
            type=TEXT,
            meaning="input of the next iteration that an output becomes",
            nullable=True,
        ),
    ),
    key=("program", "role", "name"),
    foreign=(
        ForeignKey(("program",), "programs", ("program",)),
        ForeignKey(("tensor",), "tensors", ("tensor",)),
    ),
)
WEIGHTS = TableSchema(
    name="weights",
    meaning="one row per named parameter or persistent buffer of the model",
    columns=(
        Column(name="name", type=TEXT, meaning="qualified name in the model"),
        Column(name="aliases", type=TEXTS, meaning="other names of the same tensor"),
        Column(name="buffer", type=I32, meaning="storage", minimum=0),
        Column(name="tensor", type=I32, meaning="the whole parameter as a view of the storage", minimum=0),
        Column(
            name="init", type=TEXT, meaning="JSON recipe: normal, ones, zeros, uniform, constant, factory"
        ),
    ),
    key=("name",),
    foreign=(
        ForeignKey(("buffer",), "buffers", ("buffer",)),
        ForeignKey(("tensor",), "tensors", ("tensor",)),
    ),
)
STATES = TableSchema(
    name="states",
    meaning="one row per state family; each program binds a buffer to it through io",
    columns=(
        Column(name="name", type=TEXT, meaning="family"),
        Column(
            name="batch_axis", type=I32, meaning="axis of requests; null: shared by the batch", nullable=True
        ),
        Column(name="sequence_axis", type=I32, meaning="axis of tokens; null: none", nullable=True),
        Column(name="init", type=TEXT, meaning="JSON recipe of a fresh request's state"),
    ),
    key=("name",),
)
GUARDS = TableSchema(
    name="guards",
    meaning="one row per condition under which the trace is valid; checked before a request starts",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="subject", type=TEXT, meaning="input:NAME, prompt_tokens, or total_tokens"),
        Column(
            name="index",
            type=I32,
            meaning="flat element of an input; null: the subject itself",
            nullable=True,
        ),
        Column(
            name="comparison", type=TEXT, meaning="relation", choices=("eq", "ne", "lt", "le", "gt", "ge")
        ),
        Column(name="value", type=I64, meaning="right-hand side"),
        Column(name="reason", type=TEXT, meaning="why the trace depends on it"),
    ),
    foreign=(ForeignKey(("program",), "programs", ("program",)),),
)
RELOCATION = pa.struct(
    [
        pa.field("offset", pa.int32(), nullable=False),
        pa.field("buffer", pa.int32(), nullable=False),
        pa.field("byte_offset", pa.int64(), nullable=False),
    ]
)
LAUNCHES = TableSchema(
    name="launches",
    meaning="one row per physical launch of a kernel on this target",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="kernel", type=I32, meaning="kernel", minimum=0),
        Column(name="launch", type=I32, meaning="order within the kernel", minimum=0),
        Column(name="op", type=I32, meaning="op that makes it", nullable=True, minimum=0),
        Column(name="kind", type=TEXT, meaning="what is launched", choices=("kernel", "memcpy", "memset")),
        Column(
            name="module",
            type=TEXT,
            meaning="normalised module hash; null: a library's binary, known by its function's name",
            nullable=True,
        ),
        Column(name="function", type=TEXT, meaning="entry name"),
        Column(name="grid", type=INTS, meaning="blocks in x, y, z", minimum=1),
        Column(name="block", type=INTS, meaning="threads in x, y, z", minimum=1),
        Column(name="cluster", type=INTS, meaning="blocks of a cluster in x, y, z", minimum=1),
        Column(name="shared_bytes", type=I64, meaning="dynamic shared memory", minimum=0),
        Column(
            name="parameters",
            type=pa.binary(),
            meaning="parameter block, pointers zeroed; copies and fills: 8-byte words, see docs/trace.md",
        ),
        Column(name="relocations", type=pa.list_(RELOCATION), meaning="pointers into buffers to fill in"),
    ),
    key=("program", "kernel", "launch"),
    foreign=(ForeignKey(("program", "kernel"), "kernels", ("program", "kernel")),),
)
MODULES = TableSchema(
    name="modules",
    meaning="one row per distinct module of this target",
    columns=(
        Column(
            name="module",
            type=TEXT,
            meaning="sha256 of the normalised text; cubin: of the function's name and its number",
        ),
        Column(name="raw_hash", type=TEXT, meaning="sha256 of the text as found"),
        Column(name="architecture", type=TEXT, meaning="e.g. sm_90"),
        Column(name="language", type=TEXT, meaning="form", choices=("ptx", "cubin")),
        Column(name="source_hash", type=TEXT, meaning="hash of the Triton source; empty: unknown"),
        Column(name="text", type=pa.large_string(), meaning="PTX; empty for a cubin"),
    ),
    key=("module",),
)
WORKSPACES = TableSchema(
    name="workspaces",
    meaning="one row per scratch allocation of the compiler or a library; each slot and stream needs its own",
    columns=(
        Column(name="workspace", type=I32, meaning="id, dense within the target", minimum=0),
        Column(name="bytes", type=I64, meaning="size; zeroed before its first use", minimum=1),
        Column(
            name="scope",
            type=TEXT,
            meaning="kernel: nothing in it outlives a kernel; library: it existed before and is used again",
            choices=("kernel", "library"),
        ),
    ),
    key=("workspace",),
)
POINTERS = TableSchema(
    name="pointers",
    meaning="one row per pointer in a launch's parameters that leads into a workspace",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="kernel", type=I32, meaning="kernel", minimum=0),
        Column(name="launch", type=I32, meaning="launch", minimum=0),
        Column(name="offset", type=I32, meaning="byte of the parameter block", minimum=0),
        Column(name="workspace", type=I32, meaning="workspace", minimum=0),
        Column(name="byte_offset", type=I64, meaning="byte of the workspace", minimum=0),
    ),
    key=("program", "kernel", "launch", "offset"),
)
LAUNCH_EDGES = TableSchema(
    name="launch_edges",
    meaning="one row per order between two launches of a kernel; launches without one may overlap",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="kernel", type=I32, meaning="kernel", minimum=0),
        Column(name="source", type=I32, meaning="launch that comes first", minimum=0),
        Column(name="destination", type=I32, meaning="launch that waits for it", minimum=0),
    ),
    key=("program", "kernel", "source", "destination"),
)
LAUNCH_ATTRIBUTES = TableSchema(
    name="launch_attributes",
    meaning="one row per attribute of a launch that differs from the default",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="kernel", type=I32, meaning="kernel", minimum=0),
        Column(name="launch", type=I32, meaning="launch", minimum=0),
        Column(
            name="attribute",
            type=TEXT,
            meaning="cooperative: all blocks resident together; packed: parameters are passed as one block",
            choices=("cooperative", "packed"),
        ),
    ),
    key=("program", "kernel", "launch", "attribute"),
)
RECORDED = TableSchema(
    name="recorded",
    meaning="one row per launch that a profiler timed in somebody else's run",
    columns=(
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="kernel", type=I32, meaning="kernel", minimum=0),
        Column(name="launch", type=I32, meaning="launch", minimum=0),
        Column(name="stream", type=I64, meaning="CUDA stream, as the profiler numbers it"),
        Column(name="start_us", type=F64, meaning="from the program's first launch", minimum=0),
        Column(name="duration_us", type=F64, meaning="time on the GPU", minimum=0),
    ),
    key=("program", "kernel", "launch"),
)
CAPTURE = TableSchema(
    name="capture",
    meaning="one row per fact about the machine and build that a target was captured with",
    columns=(
        Column(name="name", type=TEXT, meaning="device, driver, cuda, torch, triton, compiled, programs"),
        Column(name="value", type=TEXT, meaning="as reported"),
    ),
    key=("name",),
)

INFO = Record(
    (
        Field(name="program_digest", type="string", meaning="digest of what the programs are"),
        Field(name="model", type="string", meaning="catalogue name, FILE:FACTORY or path"),
        Field(
            name="source",
            type="string",
            meaning="where the model comes from",
            choices=("catalogue", "embedded", "factory", "export", "kineto"),
        ),
        Field(name="factory", type="string", meaning="MODULE_PATH:NAME of a user factory", required=False),
        Field(
            name="factory_hash", type="string", meaning="sha256 of the factory's source file", required=False
        ),
        Field(name="seed", type="integer", meaning="seed of the weights"),
        Field(name="dtype", type="string", meaning="dtype of the weights"),
        Field(name="fake", type="boolean", meaning="traced without memory (--fake)"),
        Field(
            name="tensor_parallel",
            type="integers",
            meaning="shares of the ranks, e.g. [2, 1]; absent: not sharded",
            required=False,
            minimum=1,
        ),
        Field(
            name="rank",
            type="integer",
            meaning="rank whose shard this is; only with tensor_parallel",
            required=False,
            minimum=0,
        ),
        Field(name="replayable", type="boolean", meaning="whether run can execute it"),
        Field(name="notes", type="strings", meaning="what a reader must know, e.g. fused operators"),
        Field(name="versions", type="record", meaning="package versions", inner=Record((), open=True)),
    )
)
TRACE_VERSIONS = {
    1: BundleSchema(
        kind="trace",
        version=1,
        info=INFO,
        tables=(
            PROGRAMS,
            BUFFERS,
            TENSORS,
            KERNELS,
            OPS,
            STREAM_WAITS,
            OPERANDS,
            IO,
            WEIGHTS,
            STATES,
            GUARDS,
        ),
        target_tables=(
            LAUNCHES,
            MODULES,
            WORKSPACES,
            POINTERS,
            LAUNCH_EDGES,
            LAUNCH_ATTRIBUTES,
            RECORDED,
            CAPTURE,
        ),
        files=("data.safetensors",),
    )
}
TRACE = TRACE_VERSIONS[1]
_ESTIMATES = {"kernels": ("name", "flops", "read_bytes", "written_bytes"), "buffers": ("real",)}
"""Columns that say how a program was traced or what it might cost, not what it is: a fake trace and a real one,
or traces by two versions with other cost formulas, are of the same programs."""


def program_digest(tables: Mapping[str, pa.Table], constants: bytes) -> str:
    """Digest of programs, ops, kernels, buffers, io, weights' init, state, guards and constants.

    Left out are estimates (:data:`_ESTIMATES`) and operands that hold for the traced content only.
    """
    digest = hashlib.sha256(hashlib.sha256(constants).digest())
    for schema in TRACE.tables:
        table = tables[schema.name].drop_columns(list(_ESTIMATES.get(schema.name, ())))
        if schema.name == OPERANDS.name:
            table = table.filter(pc.equal(table["valid_for"], "shapes"))
        digest.update(f"{schema.name}={content_checksum(table)}".encode())
    return f"sha256:{digest.hexdigest()}"


def read_trace(path: Path | str) -> Bundle:
    """Open a trace; see :func:`tessera_formats.bundle.read_bundle` for errors."""
    return read_bundle(path, TRACE_VERSIONS)


def write_trace(
    path: Path | str, info: Mapping[str, Any], tables: Mapping[str, pa.Table], constants: bytes
) -> None:
    """Write a trace; ``info`` may lack ``program_digest``, which is computed here."""
    full = {**info, "program_digest": program_digest(tables, constants)}
    write_bundle(path, TRACE, info=full, tables=tables, files={"data.safetensors": constants})


def check_same_program(artifacts: Mapping[str, str]) -> str:
    """The one program digest of several artifacts (name -> digest); raises :class:`OriginError` otherwise."""
    digests = list(artifacts.items())
    first_name, first = digests[0]
    for name, digest in digests[1:]:
        if digest != first:
            raise OriginError(
                f"{first_name} and {name} come from different programs ({first[:19]} and {digest[:19]});"
                " run the stages again from one trace"
            )
    return first
