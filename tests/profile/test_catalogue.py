import math
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
