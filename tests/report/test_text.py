import pytest

from tessera_core.report.facts import Facts, FactTable
from tessera_core.report.text import render


def shown(name: str, value: object) -> str:
    """The one value line of a report."""
    return render(Facts("title", {name: value})).splitlines()[1].strip()


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("interval_us", 12.34, "interval  12.3 µs"),
        ("interval_us", 12_340.0, "interval  12.3 ms"),
        ("duration_us", 2_500_000.0, "duration  2.5 s"),
        ("weight_bytes", 16_060_522_496, "weight  16.1 GB"),
        ("bytes", 512, "bytes  512 B"),
        ("modelled_share", 0.25, "modelled share  25%"),
        ("gap", 0.0123, "gap  1.23%"),
        ("gap", 4.4e-16, "gap  0%"),
        ("tokens_per_s", 12_345.6, "tokens/s  12,346/s"),
        ("gbit_per_s", 200.0, "rate  200 Gbit/s"),
        ("fake", False, "fake  no"),
        ("lost", "", "lost  -"),
        ("notes", [], "notes  -"),
        ("notes", ["a", "b"], "notes  a, b"),
        ("kernels", 1234, "kernels  1,234"),
        ("loss", 1.5e-7, "loss  1.5e-07"),
    ],
)
def test_values_carry_readable_units(name: str, value: object, line: str) -> None:
    assert shown(name, value) == line


def test_a_column_has_one_unit_and_missing_cells_a_hyphen() -> None:
    table = FactTable("times", ("kernel", "time_us"), (("a", 1_500.0), ("b", 30_000.0), ("c", None)))
    assert render(Facts("title", {}, (table,))).splitlines() == [
        "title",
        "",
        "times",
        "  kernel      time [ms]",
        "  --------  -----------",
        "  a                 1.5",
        "  b                  30",
        "  c                   -",
    ]


def test_an_empty_table_says_so() -> None:
    assert render(Facts("title", {}, (FactTable("times", ("a",), ()),))).splitlines()[-1] == "  (none)"


def test_json_and_text_hold_the_same() -> None:
    facts = Facts("title", {"a": 1}, (FactTable("rows", ("b", "c"), ((1, 2),)),))
    assert facts.as_json() == {"title": "title", "a": 1, "rows": [{"b": 1, "c": 2}]}


def test_times_of_a_table_share_a_unit() -> None:
    table = FactTable(
        "t", ("predicted_us", "measured_us", "moved_bytes"), ((900.0, 1_100.0, 5e6), (950.0, 2_000.0, 5e6))
    )
    names, units = render(Facts("title", {}, (table,))).splitlines()[3:5]
    assert (names.split(), units.split()) == (["predicted", "measured", "moved", "[MB]"], ["[ms]", "[ms]"])


def test_long_texts_of_a_table_are_wrapped_and_nothing_else_is() -> None:
    reason = "data-parallel would not fit: " + "the state of cpu0 takes more than it has " * 4
    path = "/a/very/long/folder/" * 4
    table = FactTable("t", ("strategy", "file", "reason", "bytes"), (("single", path, reason, 12_345_678),))
    lines = render(Facts("title", {}, (table,))).splitlines()[5:]
    assert len(lines) > 3
    assert path in lines[0] and "12.3" in lines[0]
    starts = lines[0].index("data-parallel")
    assert (
        " ".join(line[starts : starts + 48].strip() for line in lines).replace(" 12.3", "") == reason.strip()
    )
