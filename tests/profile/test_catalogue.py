import math
import os
from pathlib import Path

import pytest

from tessera_core.profile.catalogue import CATALOGUE, catalogue, device_type, read_catalogue
from tessera_formats.errors import ArtifactError, InputError


def test_every_documented_type_is_there() -> None:
    assert set(catalogue().types) == {
        "a100-80gb", "l40s", "h100-sxm", "h200-sxm", "rtx-pro-6000", "b200-sxm", "l4", "t4", "rtx-4090", "cpu-1thread",
    }  # fmt: skip


def test_figures_keep_their_kind_and_unit() -> None:
    a100 = device_type("a100-80gb")
    assert a100.memory_bytes == 80_000_000_000
    assert a100.datasheet is not None and a100.measured is not None
    assert a100.datasheet.memory_bytes_per_s == 2039e9
    assert a100.measured.memory_bytes_per_s == 1779e9
    assert a100.datasheet.flops_per_s["bfloat16"] == 312e12
    assert a100.measured.flops_per_s["bfloat16"] == 259e12
    assert a100.measured.source != a100.datasheet.source


def test_measured_peaks_never_exceed_the_datasheet() -> None:
    for kind in catalogue().types.values():
        if kind.measured is None or kind.datasheet is None:
            continue
        assert kind.measured.memory_bytes_per_s <= kind.datasheet.memory_bytes_per_s
        for dtype, rate in kind.measured.flops_per_s.items():
            assert rate <= kind.datasheet.flops_per_s[dtype], (kind.name, dtype)


def test_efficiency_is_the_median_of_the_types_that_have_both_figures() -> None:
    ratios = sorted([1779 / 2039, 749 / 864, 2914 / 3350, 4125 / 4800, 1535 / 1597, 6837 / 7700])
    memory = catalogue().memory
    assert math.isclose(memory.typical, (ratios[2] + ratios[3]) / 2)
    assert (memory.low, memory.high) == (ratios[0], ratios[-1])


def test_prices_are_ranges_where_listed() -> None:
    price = device_type("h100-sxm").price_usd_per_hour
    assert price == (2.29, 3.99)
    assert device_type("t4").price_usd_per_hour is None


@pytest.mark.parametrize(
    ("name", "hint"), [("a100", "a100-80gb"), ("H200", "h200-sxm"), ("zzz", "known: a100-80gb")]
)
def test_an_unknown_type_is_refused_with_near_names(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=name) as problem:
        device_type(name)
    assert hint in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('source = "vendor"', 'source = "hearsay"', "hearsay"),
        ("memory_gbyte_per_s = 2039", "memory_gbyte_per_s = -1", r"datasheet\.memory_gbyte_per_s"),
        ("bfloat16 = 312", 'bfloat16 = "fast"', "datasheet.bfloat16"),
        ('name = "l40s"', 'name = "a100-80gb"', "twice"),
        ("multiprocessors = 108", "cores = 108", "cores is not known"),
    ],
)
def test_a_catalogue_that_breaks_its_schema_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = CATALOGUE.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "catalogue.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ArtifactError, match=message) as problem:
        read_catalogue(path)
    assert str(path) in str(problem.value)


def test_a_type_needs_some_rate(tmp_path: Path) -> None:
    text = CATALOGUE.read_text(encoding="utf-8")
    start = text.index("[type.measured]", text.index('name = "cpu-1thread"'))
    path = tmp_path / "catalogue.toml"
    path.write_text(text[:start], encoding="utf-8")
    with pytest.raises(ArtifactError, match="cpu-1thread has neither"):
        read_catalogue(path)


ENTRIES = """
date = "2026-12-24"
[[source]]
id = "bench"
title = "Our bench of last week"
[[type]]
name = "h200-sxm"
[type.measured]
source = "bench"
tflop_per_s = { bfloat16 = 700 }
[[type]]
name = "h20"
kind = "gpu"
source = "vendor"
hardware = "NVIDIA H20"
memory_gb = 96
l2_mb = 60
multiprocessors = 78
[type.datasheet]
source = "vendor"
memory_gbyte_per_s = 4000
tflop_per_s = { bfloat16 = 148, float32 = 44 }
"""


def test_entries_change_single_figures_and_add_types(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(ENTRIES, encoding="utf-8")
    shipped, own = catalogue(), catalogue([path])
    h200, before = own.type("h200-sxm"), shipped.type("h200-sxm")
    assert h200.measured is not None and before.measured is not None
    assert h200.measured.flops_per_s["bfloat16"] == 700e12
    assert h200.measured.memory_bytes_per_s == before.measured.memory_bytes_per_s
    assert h200.datasheet == before.datasheet
    assert h200.figures["measured.tflop_per_s.bfloat16"].source == f"Our bench of last week ({path})"
    assert h200.figures["measured.memory_gbyte_per_s"] == before.figures["measured.memory_gbyte_per_s"]
    assert own.type("h20/sm=39").memory_bytes == 96_000_000_000
    assert own.date == "2026-12-24" and own.entries == (path,)
    assert (own.memory, own.compute) == (shipped.memory, shipped.compute)
    assert "h20" not in catalogue().types


def test_the_environment_names_files_of_entries_and_the_last_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(ENTRIES, encoding="utf-8")
    second.write_text('[[type]]\nname = "h20"\nsource = "assumed"\nmemory_gb = 141\n', encoding="utf-8")
    monkeypatch.setenv("TESSERA_CATALOGUE", f"{first}{os.pathsep}")
    assert device_type("h20").memory_bytes == 96_000_000_000
    assert catalogue([second]).type("h20").memory_bytes == 141_000_000_000
    first.write_text(ENTRIES.replace("memory_gb = 96", "memory_gb = 144"), encoding="utf-8")
    assert device_type("h20").memory_bytes == 144_000_000_000
    monkeypatch.delenv("TESSERA_CATALOGUE")
    with pytest.raises(InputError, match="h20"):
        device_type("h20")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[type]]\nname = "h20"\nsource = "vendor"\nmemory_gb = 96\n', r"type h20: kind is missing"),
        ('[[type]]\nname = "l4"\nmemory_gb = 96\n', r"type\.l4\.memory_gb has no source"),
        ('[[type]]\nname = "l4"\nsource = "hearsay"\nmemory_gb = 96\n', "'hearsay' is not declared"),
        ('[[type]]\nname = "l4"\nsource = "vendor"\nmemory = 96\n', r"type\[0\]\.memory is not known"),
        ('[[type]]\nname = "l4/sm=3"\nsource = "vendor"\nmemory_gb = 9\n', "neither / nor ="),
        ('[[type]]\nname = "l4"\n[[type]]\nname = "l4"\n', "twice"),
        ("[[type]\n", "no valid TOML"),
        ('date = "tomorrow"\n', "date is 'tomorrow'"),
        (
            '[[type]]\nname = "l4"\n[type.datasheet]\nsource = "vendor"\ntflop_per_s = { bfloat17 = 1 }\n',
            "l4, datasheet: 'bfloat17' is no dtype that has a rate; did you mean bfloat16",
        ),
        ('[[type]]\nname = "t4"\nsubstitute = { bfloat16 = "half" }\n', "t4, substitute: 'half' is no dtype"),
        (
            '[[type]]\nname = "h20"\nkind = "gpu"\nsource = "vendor"\nhardware = "x"\nmemory_gb = 96\nl2_mb = 60\n'
            'multiprocessors = 78\n[type.datasheet]\nsource = "vendor"\nmemory_gbyte_per_s = 4000\n'
            "tflop_per_s = { bfloat16 = 148 }\n",
            "h20: datasheet.tflop_per_s has no float32",
        ),
        (
            '[[type]]\nname = "h20"\nkind = "gpu"\nsource = "vendor"\nhardware = "x"\nmemory_gb = 96\nl2_mb = 60\n'
            "multiprocessors = 78\n",
            "h20 has neither datasheet nor measured",
        ),
    ],
)
def test_entries_that_break_the_schema_are_one_line_with_the_file(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=message) as problem:
        catalogue([path])
    assert str(path) in str(problem.value) and "\n" not in str(problem.value)


def test_every_figure_of_the_shipped_types_has_a_source() -> None:
    for kind in catalogue().types.values():
        stated = {"memory_gb", "l2_mb", "multiprocessors"}
        for name, peaks in (("datasheet", kind.datasheet), ("measured", kind.measured)):
            if peaks is not None:
                stated |= {f"{name}.memory_gbyte_per_s"}
                stated |= {f"{name}.tflop_per_s.{dtype}" for dtype in peaks.flops_per_s}
        assert stated <= kind.figures.keys(), kind.name
        assert all(figure.source for figure in kind.figures.values())


def test_a_figure_may_have_a_source_of_its_own() -> None:
    figures = device_type("b200-sxm").figures
    assert "round figure" in figures["l2_mb"].source
    assert "Datasheet" in figures["memory_gb"].source
    assert "aiconfigurator-core 0.12.0" in figures["datasheet.tflop_per_s.float4"].source
    assert "Datasheet" in figures["datasheet.tflop_per_s.bfloat16"].source
