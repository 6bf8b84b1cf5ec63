"""Hypothesis strategies that draw valid tables and documents straight from the declared schemas."""

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from tessera_formats.document import Field, Record
from tessera_formats.table import BOX, Column, TableSchema

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)


def values(column: Column) -> st.SearchStrategy[Any]:
    """Values that a column accepts."""
    drawn = _values(column.type, column)
    return st.none() | drawn if column.nullable else drawn


def _values(kind: pa.DataType, column: Column) -> st.SearchStrategy[Any]:
    low = None if column.minimum is None else int(column.minimum)
    if kind == BOX:
        dims = st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 2**40)), max_size=3)
        return st.builds(
            lambda start, dims, run: {
                "start": start,
                "counts": [count for count, _ in dims],
                "strides": [stride for _, stride in dims],
                "run": run,
            },
            st.integers(0, 2**40),
            dims,
            st.integers(1, 99),
        )
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries(
            {kind.field(i).name: st.integers(0, 2**31 - 1) for i in range(kind.num_fields)}
        )
    if pa.types.is_list(kind):
        return st.lists(_values(kind.value_type, column), max_size=4)
    if column.choices is not None:
        return st.sampled_from(column.choices)
    if pa.types.is_integer(kind):
        return st.integers(-(2**31) if low is None else low, 2**31 - 1)
    if pa.types.is_floating(kind):
        return st.floats(column.minimum, 1e12, allow_nan=False, allow_infinity=False)
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_binary(kind):
        return st.binary(max_size=16)
    return TEXT


def tables(schema: TableSchema) -> st.SearchStrategy[pa.Table]:
    """Tables of a schema, with its key unique."""
    row = st.fixed_dictionaries({column.name: values(column) for column in schema.columns})
    key = (lambda r: tuple(r[name] for name in schema.key)) if schema.key else None
    return st.lists(row, max_size=5, unique_by=key).map(schema.build)


def records(record: Record) -> st.SearchStrategy[dict[str, Any]]:
    """Documents of a record."""
    if record.open:
        return st.dictionaries(st.sampled_from(["torch", "numpy"]), TEXT)
    required = {f.name: _field(f) for f in record.fields if f.required}
    return st.fixed_dictionaries(
        required, optional={f.name: _field(f) for f in record.fields if not f.required}
    )


def _field(field: Field) -> st.SearchStrategy[Any]:
    low = None if field.minimum is None else field.minimum
    if field.type == "record":
        assert field.inner is not None
        return records(field.inner)
    if field.type == "records":
        assert field.inner is not None
        return st.lists(records(field.inner), max_size=3)
    if field.choices is not None:
        return st.sampled_from(field.choices)
    if field.type == "string":
        return TEXT
    if field.type == "boolean":
        return st.booleans()
    integers = st.integers(-1000 if low is None else int(max(low, 1 if 0 < low < 1 else low)), 2**40)
    if field.type == "integer":
        return integers
    if field.type == "number":
        return st.floats(low, 1e9, allow_nan=False, allow_infinity=False)
    return st.lists(TEXT if field.type == "strings" else integers, max_size=3)
