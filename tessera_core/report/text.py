"""Facts as text for a person: values one a line, tables through tabulate, quantities in readable units.

Units come from the names, as everywhere: ``interval_us`` is shown as "interval" in the time unit that suits its
value; in a table a column has one unit, and all its times share one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tessera_core.report.facts import Facts, FactTable

# Suffix of a name -> (unit, factor from the stored number), ascending; the largest that keeps the number >= 1.
_SCALES: Mapping[str, tuple[tuple[str, float], ...]] = {
    "_us": (("µs", 1.0), ("ms", 1e-3), ("s", 1e-6)),
    "_ms": (("ms", 1.0), ("s", 1e-3)),
    "_bytes": (("B", 1.0), ("kB", 1e-3), ("MB", 1e-6), ("GB", 1e-9)),
    "_flops": (("FLOP", 1.0), ("MFLOP", 1e-6), ("GFLOP", 1e-9), ("TFLOP", 1e-12)),
    "_gbit_per_s": (("Gbit/s", 1.0),),
    "_gbyte_per_s": (("GB/s", 1.0),),
    "_per_s": (("/s", 1.0),),
    "_share": (("%", 100.0),),
}
_BARE = {"bytes": "_bytes", "flops": "_flops", "gbit_per_s": "_gbit_per_s", "share": "_share"}
_PERCENT_NAMES = {"gap": "_share"}
ABSENT = "-"

TEXT_WIDTH = 48
"""Characters of a table's cell of text before it goes on in the next line."""

HEADER_WIDTH = 10
"""The same of a column's header, so that its words make no column wider than its numbers."""

# Shares below this are what rounding leaves of zero.
_LEAST_PERCENT = 1e-6


def render(facts: Facts) -> str:
    """The whole report, ending in a line break."""
    lines = [facts.title]
    shown = [(_label(name, ""), _value(name, value)) for name, value in facts.values.items()]
    width = max((len(label) for label, _ in shown), default=0)
    lines += [f"  {label:<{width}}  {value}" for label, value in shown]
    for table in facts.tables:
        lines += ["", table.title, *_table(table)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _table(table: FactTable) -> list[str]:
    from tabulate import tabulate  # late: nothing but printing needs it

    if not table.rows:
        return ["  (none)"]
    columns = [_column(name, [row[i] for row in table.rows], table) for i, name in enumerate(table.columns)]
    headers = [_wrapped(header, HEADER_WIDTH) for header, _ in columns]
    numeric = [all(_is_number(row[i]) or row[i] is None for row in table.rows) for i in range(len(columns))]
    wrapped = [
        cells if right else [_wrapped(cell, TEXT_WIDTH) for cell in cells]
        for (_, cells), right in zip(columns, numeric, strict=True)
    ]
    text = tabulate(
        list(zip(*wrapped, strict=True)),
        headers=headers,
        tablefmt="simple",
        disable_numparse=True,
        colalign=["right" if right else "left" for right in numeric],
    )
    return [f"  {line}" for line in text.splitlines()]


def _wrapped(text: str, width: int) -> str:
    """A long text on several lines; paths and names stay whole."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _column(name: str, values: Sequence[Any], table: FactTable) -> tuple[str, list[str]]:
    """Header and cells. All cells share one unit, and so do all times of a table, to be compared at a glance."""
    scales = _scales(name)
    if scales is None:
        return _label(name, ""), [_plain(value) for value in values]
    peers = [i for i, other in enumerate(table.columns) if _scales(other) is _SCALES["_us"]]
    sample = [row[i] for row in table.rows for i in peers] if scales is _SCALES["_us"] else values
    numbers = sorted(abs(value) for value in sample if _is_number(value) and value)
    unit, factor = _fitting(scales, numbers[len(numbers) // 2] if numbers else 0.0)
    cells = [_quantity(value * factor, unit) if _is_number(value) else _plain(value) for value in values]
    return _label(name, unit), cells


def _value(name: str, value: Any) -> str:
    scales = _scales(name)
    if scales is None or not _is_number(value):
        return _plain(value)
    unit, factor = _fitting(scales, abs(value))
    return f"{_quantity(value * factor, unit)}{'' if unit in ('%', '/s') else ' '}{unit}"


def _scales(name: str) -> tuple[tuple[str, float], ...] | None:
    suffix = _BARE.get(name) or _PERCENT_NAMES.get(name)
    if suffix is None:
        suffix = next((s for s in _SCALES if name.endswith(s) and name != s), None)
    return _SCALES[suffix] if suffix else None


def _fitting(scales: tuple[tuple[str, float], ...], magnitude: float) -> tuple[str, float]:
    best = scales[0]
    for unit, factor in scales:
        if magnitude * factor >= 1:
            best = (unit, factor)
    return best


def _label(name: str, unit: str) -> str:
    """The name in words, without the unit that the number already carries."""
    text = "rate" if name in ("gbit_per_s", "gbyte_per_s") else name
    if text == name and _scales(name) is not None:
        suffix = next((s for s in _SCALES if name.endswith(s)), "")
        if suffix not in ("_per_s", "_share"):
            text = name.removesuffix(suffix) or name
    words = text.replace("_per_s", "/s").replace("_", " ")
    return f"{words} [{unit}]" if unit not in ("", "/s") else words


def _plain(value: Any) -> str:
    if value is None or value == "":
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value) or ABSENT
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or ABSENT
    return str(value)


def _quantity(value: float, unit: str) -> str:
    return _number(0.0 if unit == "%" and abs(value) < _LEAST_PERCENT else value)


def _number(value: float) -> str:
    """Three significant digits below 1000, whole numbers above."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if float(value).is_integer():
        return f"{value:.0f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
