"""The deps artifact (a bundle): accesses of kernels to buffers, dependencies between kernels, coverage, and
what the single blocks of a launch touch.

``target`` is ``ops`` for what holds in every build (schema and declared evidence) and a captured target's
name (``sm_90``) for what was proven about that build's modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from tessera_formats.bundle import Bundle, BundleSchema, read_bundle, write_bundle
from tessera_formats.document import Field, Record
from tessera_formats.table import BOX, Column, TableSchema
from tessera_formats.trace import EVIDENCE

I32, I64, TEXT, FLAG = pa.int32(), pa.int64(), pa.string(), pa.bool_()
INTS, LONGS = pa.list_(pa.int32()), pa.list_(pa.int64())
OPS_TARGET = "ops"
WHOLE = "whole"
HAZARDS = ("RAW", "WAR", "WAW")

ACCESSES = TableSchema(
    name="accesses",
    meaning="one row per (kernel, launch, buffer, direction, evidence)",
    columns=(
        Column(name="target", type=TEXT, meaning="ops or a captured target"),
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="kernel", type=I32, meaning="kernel", minimum=0),
        Column(name="part", type=TEXT, meaning="whole, or a share of a split kernel"),
        Column(name="buffer", type=I32, meaning="buffer", minimum=0),
        Column(name="mode", type=TEXT, meaning="direction", choices=("read", "write")),
        Column(name="must", type=FLAG, meaning="every byte of the boxes is certainly written"),
        Column(name="boxes", type=pa.list_(BOX), meaning="bytes; null: the whole buffer", nullable=True),
        Column(name="evidence", type=TEXT, meaning="what proves it", choices=EVIDENCE),
        Column(name="precision", type=TEXT, meaning="how tight", choices=("exact", "bounded", "fallback")),
        Column(
            name="valid_for", type=TEXT, meaning="content: cost estimates only", choices=("shapes", "content")
        ),
        Column(name="detail", type=TEXT, meaning="reason of a fallback, module and line; else empty"),
        Column(
            name="launch",
            type=I32,
            meaning="launch of the kernel that makes it; null: known of the op or kernel only",
            nullable=True,
            minimum=0,
        ),
    ),
)
EDGES = TableSchema(
    name="edges",
    meaning="one row per (source, destination, buffer, hazard); RAW edges are never reduced",
    columns=(
        Column(name="target", type=TEXT, meaning="ops or a captured target"),
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="source", type=I32, meaning="earlier kernel", minimum=0),
        Column(name="destination", type=I32, meaning="later kernel", minimum=0),
        Column(name="buffer", type=I32, meaning="buffer", minimum=0),
        Column(name="hazard", type=TEXT, meaning="kind", choices=HAZARDS),
        Column(
            name="boxes",
            type=pa.list_(BOX),
            meaning="bytes of the source's access; null: whole buffer",
            nullable=True,
        ),
        Column(
            name="must", type=FLAG, meaning="RAW: the boxes are proven written, so they may be shipped alone"
        ),
        Column(name="evidence", type=TEXT, meaning="weaker evidence of the two accesses", choices=EVIDENCE),
    ),
    key=("target", "program", "source", "destination", "buffer", "hazard"),
)
CHAINS = TableSchema(
    name="chains",
    meaning="one row per kernel of a group that must share a device: they fill a buffer inexactly, or are tied",
    columns=(
        Column(name="target", type=TEXT, meaning="ops or a captured target"),
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="chain", type=I32, meaning="id of the group within its program", minimum=0),
        Column(name="kernel", type=I32, meaning="member", minimum=0),
    ),
    key=("target", "program", "kernel"),
)
COVERAGE = TableSchema(
    name="coverage",
    meaning="one row per (target, evidence, precision): how much rests on what",
    columns=(
        Column(name="target", type=TEXT, meaning="ops or a captured target"),
        Column(name="evidence", type=TEXT, meaning="evidence", choices=EVIDENCE),
        Column(name="precision", type=TEXT, meaning="how tight", choices=("exact", "bounded", "fallback")),
        Column(name="accesses", type=I64, meaning="number of accesses", minimum=0),
        Column(name="kernels", type=I64, meaning="kernels with such an access", minimum=0),
        Column(name="edges", type=I64, meaning="dependencies with this evidence", minimum=0),
    ),
    key=("target", "evidence", "precision"),
)
BLOCK_FOOTPRINTS = TableSchema(
    name="block_footprints",
    meaning="one row per form of access of a launch's single blocks; rows of one buffer and direction add up",
    columns=(
        Column(name="target", type=TEXT, meaning="a captured target"),
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="kernel", type=I32, meaning="kernel", minimum=0),
        Column(name="launch", type=I32, meaning="launch of the kernel", minimum=0),
        Column(name="buffer", type=I32, meaning="buffer", minimum=0),
        Column(name="mode", type=TEXT, meaning="direction", choices=("read", "write")),
        Column(name="must", type=FLAG, meaning="every byte of the boxes is certainly written"),
        Column(name="first", type=INTS, meaning="first block that it holds for, in x, y, z", minimum=0),
        Column(name="last", type=INTS, meaning="last block that it holds for, in x, y, z", minimum=0),
        Column(
            name="boxes",
            type=pa.list_(BOX),
            meaning="bytes of the first block; null: not of this form, see the launch's accesses",
            nullable=True,
        ),
        Column(name="step", type=LONGS, meaning="bytes that the boxes move by a block in x, y, z"),
    ),
)
SPLITS = TableSchema(
    name="splits",
    meaning="one row per launch with PTX: whether its blocks could run apart from each other",
    columns=(
        Column(name="target", type=TEXT, meaning="a captured target"),
        Column(name="program", type=I32, meaning="program", minimum=0),
        Column(name="kernel", type=I32, meaning="kernel", minimum=0),
        Column(name="launch", type=I32, meaning="launch of the kernel", minimum=0),
        Column(name="blocks", type=I64, meaning="number of blocks", minimum=0),
        Column(name="independent", type=FLAG, meaning="proven that the blocks could run apart"),
        Column(name="disjoint_writes", type=FLAG, meaning="proven that no byte is written by two blocks"),
        Column(name="reads_apart", type=FLAG, meaning="proven that no block reads what another writes"),
        Column(name="atomics", type=FLAG, meaning="the kernel has atomics on global memory"),
        Column(
            name="reason", type=TEXT, meaning="what stands against independence; empty where it is proven"
        ),
    ),
    key=("target", "program", "kernel", "launch"),
)
INFO = Record(
    (
        Field(name="program_digest", type="string", meaning="digest of the trace's programs"),
        Field(name="targets", type="strings", meaning="targets analysed, ops included"),
        Field(name="modules", type="strings", meaning="normalised hashes of the modules analysed"),
        Field(name="unknown_opcodes", type="strings", meaning="opcodes treated conservatively"),
    )
)
DEPS_VERSIONS = {
    1: BundleSchema(
        kind="deps",
        version=1,
        info=INFO,
        tables=(ACCESSES, EDGES, CHAINS, COVERAGE, BLOCK_FOOTPRINTS, SPLITS),
    )
}
DEPS = DEPS_VERSIONS[1]


def read_deps(path: Path | str) -> Bundle:
    """Open a deps bundle."""
    return read_bundle(path, DEPS_VERSIONS)


def write_deps(path: Path | str, info: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> None:
    """Write a deps bundle."""
    write_bundle(path, DEPS, info=info, tables=tables)
