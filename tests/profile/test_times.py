import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.profile.times import (
    Condition,
    DeviceRow,
    LinkRow,
    TimeRow,
    fields_of,
    load_profiles,
    merge_profiles,
)
from tessera_formats.artifact import TableArtifact
from tessera_formats.errors import ArtifactError, InputError, OriginError
from tessera_formats.profile import TIMES, write_profile

ROW = TimeRow(
    signature="s",
    part="whole",
    device_type="l4",
    condition="alone",
    cache="sequence",
    median_us=10.0,
    p10_us=10.0,
    p90_us=10.0,
    low_us=5.0,
    high_us=20.0,
    samples=0,
    flops=1,
    bytes=1,
    source="modelled",
    dtype="bfloat16",
    hardware="",
    dated="2026-12-01",
    detail="",
)
LINK = LinkRow(
    source="l4",
    destination="l4",
    latency_us=5.0,
    gbit_per_s=80.0,
    send_us=2.0,
    receive_us=1.0,
    occupies_sender=True,
    samples=10,
    residual=0.1,
    origin="measured",
    transport="shared-memory",
)
DEVICE = DeviceRow(
    device_type="l4", hardware="NVIDIA L4", threads=0, overhead_us=5.0, date="2026-12-01", source="modelled"
)


def header(
    digest: str = "sha256:a", links: list[LinkRow] | None = None, overhead_us: float = 5.0
) -> dict[str, Any]:
    device = replace(DEVICE, overhead_us=overhead_us)
    return {
        "program_digest": digest,
        "links": [fields_of(link) for link in links or []],
        "devices": [fields_of(device)],
    }


def profile(*rows: TimeRow, **head: Any) -> TableArtifact:
    return TableArtifact(header(**head), TIMES.build([fields_of(row) for row in rows]))


MEASURED = replace(ROW, source="measured", samples=7, median_us=3.0)
MORE = replace(ROW, source="measured", samples=8, median_us=4.0)
SILICON = replace(ROW, source="silicon", median_us=2.0)


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        (ROW, MEASURED, MEASURED),
        (SILICON, ROW, SILICON),
        (SILICON, MEASURED, MEASURED),
        (MEASURED, MORE, MORE),
        (replace(ROW, source="silicon", samples=99), MEASURED, MEASURED),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_of_two_times_the_better_source_wins_then_more_samples(
    first: TimeRow, second: TimeRow, winner: TimeRow, swap: bool
) -> None:
    pair = (second, first) if swap else (first, second)
    times = merge_profiles({"a": profile(pair[0]), "b": profile(pair[1])})
    assert times.time("s", "l4", "alone") == winner


def test_of_two_equals_the_one_named_first_wins() -> None:
    other = replace(ROW, median_us=11.0)
    assert merge_profiles({"a": profile(ROW), "b": profile(other)}).time("s", "l4") == ROW
    assert merge_profiles({"b": profile(other), "a": profile(ROW)}).time("s", "l4") == other


def test_the_wanted_condition_is_preferred_and_another_will_do() -> None:
    beside = replace(MEASURED, condition="beside", median_us=9.0)
    both = merge_profiles({"a": profile(MEASURED, beside)})
    assert both.time("s", "l4", "beside") == beside
    assert both.time("s", "l4", "alone") == MEASURED
    assert merge_profiles({"a": profile(MEASURED)}).time("s", "l4", "beside") == MEASURED


@pytest.mark.parametrize(
    ("held", "wanted", "taken"),
    [
        (("alone", "copies"), "beside", "copies"),
        (("alone", "beside"), "copies", "beside"),
        (("beside", "copies"), "alone", "beside"),
    ],
)
def test_where_a_condition_is_missing_the_nearest_load_stands_in(
    held: tuple[Condition, ...], wanted: Condition, taken: Condition
) -> None:
    times = merge_profiles({"a": profile(*(replace(MEASURED, condition=condition) for condition in held))})
    assert times.time("s", "l4", wanted).condition == taken


def test_a_modelled_time_does_not_stand_beside_a_measured_one() -> None:
    beside = replace(MEASURED, condition="beside")
    times = merge_profiles({"a": profile(ROW), "b": profile(beside)})
    assert times.time("s", "l4", "alone") == beside


def test_times_within_iterations_are_preferred_to_cold_ones() -> None:
    cold = replace(MEASURED, cache="cold", median_us=50.0)
    assert merge_profiles({"a": profile(cold, MEASURED)}).time("s", "l4").cache == "sequence"


def test_profiles_of_different_programs_are_refused_with_both_names(tmp_path: Path) -> None:
    paths = [tmp_path / "one.profile.arrow", tmp_path / "two.profile.arrow"]
    for path, digest in zip(paths, ("sha256:a", "sha256:b")):
        write_profile(path, header(digest), TIMES.build([fields_of(ROW)]))
    with pytest.raises(OriginError) as problem:
        load_profiles(paths)
    assert all(str(path) in str(problem.value) for path in paths)


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
def test_a_negative_or_not_finite_time_is_refused_and_nothing_is_written(
    tmp_path: Path, value: float
) -> None:
    path = tmp_path / "bad.profile.arrow"
    with pytest.raises(ArtifactError, match="median_us"):
        write_profile(path, header(), TIMES.build([fields_of(replace(ROW, median_us=value))]))
    assert list(tmp_path.iterdir()) == []


def test_the_measured_link_and_overhead_win() -> None:
    modelled = replace(LINK, origin="modelled", samples=0, latency_us=1.0)
    times = merge_profiles(
        {"a": profile(ROW, links=[modelled]), "b": profile(ROW, links=[LINK], overhead_us=6.0)}
    )
    assert times.link("l4", "l4") == LINK
    assert times.overhead_us("l4") == 5.0  # both modelled: the first


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_of_several_transports_the_one_that_runs_take_wins(order: tuple[int, ...]) -> None:
    """However many samples another has; but a modelled link never wins over a measured one."""
    links = (
        LINK,
        replace(LINK, transport="gloo", samples=999, latency_us=1.0),
        replace(LINK, transport="device-memory", origin="modelled", latency_us=0.1),
    )
    times = merge_profiles({str(n): profile(ROW, links=[links[n]]) for n in order})
    assert times.link("l4", "l4") == LINK
    together = merge_profiles({"a": profile(ROW, links=[links[n] for n in order])})
    assert together.link("l4", "l4") == LINK


def test_a_transfer_costs_its_fixed_parts_and_its_bytes() -> None:
    assert LINK.transfer_us(1_000_000) == 2.0 + 5.0 + 100.0  # 8 Mbit at 80 Gbit/s


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda times: times.time("s", "t4"), "t4"),
        (lambda times: times.time("other", "l4"), "kernel other"),
        (lambda times: times.link("l4", "t4"), "from l4 to t4"),
        (lambda times: times.overhead_us("t4"), "t4"),
    ],
)
def test_what_is_missing_is_named(ask: Any, named: str) -> None:
    with pytest.raises(InputError, match=named) as problem:
        ask(merge_profiles({"a": profile(ROW)}))
    assert "\n" not in str(problem.value)


def test_no_profile_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="tessera profile"):
        load_profiles([])


def test_the_digest_is_the_profiles_own_and_changes_with_a_second_one() -> None:
    one, two = profile(ROW), profile(MEASURED)
    assert merge_profiles({"a": one}).digest == one.digest
    assert merge_profiles({"a": one, "b": two}).digest == merge_profiles({"b": two, "a": one}).digest
    assert merge_profiles({"a": one, "b": two}).digest not in (one.digest, two.digest)


@given(
    st.lists(
        st.tuples(st.sampled_from(["measured", "silicon", "modelled"]), st.integers(0, 5)),
        min_size=1,
        max_size=5,
    )
)
def test_merging_keeps_a_best_row_whatever_the_order(kinds: list[tuple[Any, int]]) -> None:
    rows = [replace(ROW, source=source, samples=samples) for source, samples in kinds]
    best = min((("measured", "silicon", "modelled").index(row.source), -row.samples) for row in rows)
    for order in (rows, rows[::-1]):
        found = merge_profiles({str(n): profile(row) for n, row in enumerate(order)}).time("s", "l4")
        assert (("measured", "silicon", "modelled").index(found.source), -found.samples) == best
