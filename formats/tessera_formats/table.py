"""The one door to Arrow tables: declared schemas, checks on write and read, checksums of canonical content.

``pyarrow`` does not enforce a schema by itself (it drops unknown keys and fills missing ones with null), so
every table passes through :func:`checked` on its way out and in. The checksum is taken over values, not over
file bytes, so it does not change with the Arrow version that wrote the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tessera_formats.errors import ArtifactError

BOX = pa.struct(
    [
        pa.field("start", pa.int64(), nullable=False),
        pa.field("counts", pa.list_(pa.int64()), nullable=False),
        pa.field("strides", pa.list_(pa.int64()), nullable=False),
        pa.field("run", pa.int64(), nullable=False),
    ]
)
"""A strided box of bytes: ``{start + sum(i_k * stride_k) + j | 0 <= i_k < count_k, 0 <= j < run}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: its Arrow type, what it means, and what its values may be.

    ``minimum``: smallest allowed number (floats must also be finite). ``choices``: allowed strings.
    Units are part of the name (``_us``, ``_bytes``, ...).
    """

    name: str
    type: pa.DataType
    meaning: str
    nullable: bool = False
    minimum: float | None = None
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """``columns`` of this table must occur as ``key`` columns in ``table``; rows with a null are exempt."""

    columns: tuple[str, ...]
    table: str
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSchema:
    """A table: its name, what a row is, its columns, its unique key and what it refers to."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    foreign: tuple[ForeignKey, ...] = ()

    def arrow(self) -> pa.Schema:
        """The schema as pyarrow states it."""
        return pa.schema([pa.field(c.name, c.type, nullable=c.nullable) for c in self.columns])

    def empty(self) -> pa.Table:
        """A table of this schema without rows."""
        return self.arrow().empty_table()

    def build(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """A table from rows; unknown and missing keys are our own mistake and raise ``KeyError``."""
        names = [column.name for column in self.columns]
        allowed = set(names)
        for row in rows:
            if row.keys() != allowed:
                raise KeyError(f"table {self.name}: row has {sorted(row)}, schema has {sorted(names)}")
        arrays = [pa.array([row[c.name] for row in rows], type=c.type) for c in self.columns]
        return pa.Table.from_arrays(arrays, schema=self.arrow())


def checked(table: pa.Table, schema: TableSchema, where: str) -> pa.Table:
    """Check names, types, nulls, ranges and the unique key.

    Returns the table in the schema's column order. Raises :class:`ArtifactError` that names ``where``, the
    column and the first offending row.
    """
    expected = [column.name for column in schema.columns]
    if sorted(table.column_names) != sorted(expected):
        missing = sorted(set(expected) - set(table.column_names))
        unknown = sorted(set(table.column_names) - set(expected))
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has unknown {', '.join(unknown)}"] if unknown else []
        raise ArtifactError(f"{where}: table {schema.name} {' and '.join(parts) or 'repeats a column'}")
    table = table.select(expected)
    for column in schema.columns:
        values = table.column(column.name)
        if values.type != column.type:
            raise ArtifactError(
                f"{where}: table {schema.name}, column {column.name}: type {values.type}, expected {column.type}"
            )
        _check_values(values, column, f"{where}: table {schema.name}, column {column.name}")
    if schema.key:
        _check_unique(table, schema, where)
    return table.cast(schema.arrow())


def _check_values(values: pa.ChunkedArray, column: Column, where: str) -> None:
    if values.null_count and not column.nullable:
        row = pc.index(pc.is_null(values), True).as_py()
        raise ArtifactError(f"{where}: row {row} has no value")
    bad: pa.ChunkedArray | None = None
    rule = ""
    if pa.types.is_floating(values.type):
        bad, rule = pc.invert(pc.is_finite(values)), "must be a finite number"
        _raise_first(values, bad, rule, where)
    if column.minimum is not None:
        leaves = pc.list_flatten(values) if pa.types.is_list(values.type) else values
        bad, rule = pc.less(leaves, column.minimum), f"must be at least {column.minimum:g}"
        _raise_first(leaves, bad, rule, where)
    if column.choices is not None:
        inside = pc.is_in(values, value_set=pa.array(column.choices))
        bad = pc.and_(pc.invert(inside), pc.is_valid(values))
        _raise_first(values, bad, f"must be one of {', '.join(column.choices)}", where)
    if pa.types.is_list(values.type) and pc.list_flatten(values).null_count:
        raise ArtifactError(f"{where}: a list holds an empty element")
    if values.type == pa.list_(BOX):
        _check_boxes(pc.list_flatten(values), where)


def _check_boxes(boxes: pa.ChunkedArray, where: str) -> None:
    """Every box has a non-negative start, a positive run, and a positive stride for each positive count."""
    counts, strides = pc.struct_field(boxes, "counts"), pc.struct_field(boxes, "strides")
    for name, leaves, lowest in (
        ("start", pc.struct_field(boxes, "start"), 0),
        ("run", pc.struct_field(boxes, "run"), 1),
        ("counts", pc.list_flatten(counts), 1),
        ("strides", pc.list_flatten(strides), 1),
    ):
        if leaves.null_count or pc.any(pc.less(leaves, lowest)).as_py():
            raise ArtifactError(f"{where}: a box's {name} must be at least {lowest}")
    if not pc.all(pc.equal(pc.list_value_length(counts), pc.list_value_length(strides)), min_count=0).as_py():
        raise ArtifactError(f"{where}: a box has more counts than strides, or fewer")


def _raise_first(values: pa.ChunkedArray, bad: pa.ChunkedArray, rule: str, where: str) -> None:
    row = pc.index(pc.fill_null(bad, False), True).as_py()
    if row >= 0:
        raise ArtifactError(f"{where}: row {row} is {values[row].as_py()!r}, {rule}")


def _check_unique(table: pa.Table, schema: TableSchema, where: str) -> None:
    if table.num_rows < 2:
        return
    counts = table.select(list(schema.key)).group_by(list(schema.key)).aggregate([([], "count_all")])
    repeated = counts.filter(pc.greater(counts["count_all"], 1))
    if repeated.num_rows:
        row = {name: repeated[name][0].as_py() for name in schema.key}
        named = ", ".join(f"{name}={value}" for name, value in row.items())
        raise ArtifactError(f"{where}: table {schema.name} has {named} more than once")


def check_foreign_keys(tables: Mapping[str, pa.Table], schema: TableSchema, where: str) -> None:
    """Check that every reference of ``tables[schema.name]`` exists in the table that it points to."""
    for foreign in schema.foreign:
        rows = tables[schema.name].select(list(foreign.columns)).drop_null()
        if not rows.num_rows:
            continue
        rows = rows.rename_columns(list(foreign.key))
        lost = rows.join(
            tables[foreign.table].select(list(foreign.key)), list(foreign.key), join_type="left anti"
        )
        if lost.num_rows:
            named = ", ".join(f"{name}={lost[name][0].as_py()}" for name in foreign.key)
            raise ArtifactError(
                f"{where}: table {schema.name} refers to {named}, which table {foreign.table} lacks"
            )


def content_checksum(table: pa.Table) -> str:
    """``sha256:`` and the hex digest of a table's values, names and types, whatever its chunking."""
    digest = hashlib.sha256()
    digest.update(str(table.num_rows).encode())
    for name in table.column_names:
        column = table.column(name)
        digest.update(f"|{name}:{column.type}|".encode())
        _hash_array(digest, column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))
    return f"sha256:{digest.hexdigest()}"


def _hash_array(digest: Any, array: pa.Array | pa.ChunkedArray) -> None:
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks else pa.array([], type=array.type)
    kind = array.type
    digest.update(f"<{len(array)}>".encode())
    if array.null_count:
        digest.update(np.packbits(np.asarray(pc.is_valid(array).to_numpy(zero_copy_only=False))).tobytes())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0)
        digest.update(np.ascontiguousarray(lengths.to_numpy(zero_copy_only=False), dtype="<i8").tobytes())
        _hash_array(digest, array.flatten())
    elif pa.types.is_struct(kind):
        for index, leaf in enumerate(array.flatten()):
            digest.update(kind.field(index).name.encode())
            _hash_array(digest, leaf)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        raw = pc.fill_null(array.cast(pa.large_binary()), b"")
        _, offsets, data = raw.buffers()
        bounds = np.frombuffer(offsets, dtype="<i8")[raw.offset : raw.offset + len(raw) + 1]
        digest.update(np.ascontiguousarray(np.diff(bounds)).tobytes())
        if len(raw) and data is not None:
            digest.update(data.slice(int(bounds[0]), int(bounds[-1] - bounds[0])))
    elif pa.types.is_boolean(kind):
        filled = pc.fill_null(array, False)
        digest.update(np.packbits(filled.to_numpy(zero_copy_only=False)).tobytes())
    else:
        filled = pc.fill_null(array, 0)
        values = filled.to_numpy(zero_copy_only=False)
        digest.update(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes())
