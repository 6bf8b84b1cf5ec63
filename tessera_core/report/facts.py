"""What a stage reports: named values and small tables, which the command line prints as text or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FactTable:
    """A titled table; every row has one value per column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """A stage's findings: single values first, tables below."""

    title: str
    values: Mapping[str, Any]
    tables: tuple[FactTable, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The same facts as plain JSON values."""
        return {
            "title": self.title,
            **self.values,
            **{t.title: [dict(zip(t.columns, row, strict=True)) for row in t.rows] for t in self.tables},
        }


def rows_of(records: Iterable[Mapping[str, Any]], names: tuple[str, ...]) -> tuple[tuple[Any, ...], ...]:
    """Some fields of records, as a table's rows."""
    return tuple(tuple(record[name] for name in names) for record in records)
