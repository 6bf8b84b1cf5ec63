import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.profile.merge import conflict_table, load_profiles, merge_profiles, profile_content
from tessera_core.profile.times import (
    Condition,
    DeviceRow,
    LinkRow,
    TimeRow,
    Times,
    fields_of,
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
NEWER = replace(MEASURED, dated="2026-12-24", median_us=5.0)
LATER_THAT_DAY = replace(MEASURED, dated="2026-12-24T12:00:00+02:00", median_us=6.0)
SILICON = replace(ROW, source="silicon", median_us=2.0)


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        (ROW, MEASURED, MEASURED),
        (SILICON, ROW, SILICON),
        (SILICON, MEASURED, MEASURED),
        (MEASURED, MORE, MORE),
        (replace(ROW, source="silicon", samples=99), MEASURED, MEASURED),
        (NEWER, MORE, NEWER),
        (LATER_THAT_DAY, NEWER, LATER_THAT_DAY),
        (replace(MORE, dated=""), MEASURED, MEASURED),
        (NEWER, replace(MORE, dated="next Tuesday"), NEWER),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_of_two_times_the_better_source_wins_then_the_newest_then_more_samples(
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


def test_measurements_that_disagree_are_conflicts_and_the_newest_counts() -> None:
    old = replace(MEASURED, median_us=10.0, low_us=9.0, high_us=11.0, hardware="L4, one")
    new = replace(NEWER, median_us=20.0, low_us=19.0, high_us=21.0, hardware="L4, two")
    times = merge_profiles({"old": profile(old), "new": profile(new)})
    (conflict,) = times.conflicts
    assert (conflict.kept, conflict.other) == (
        ("new", "L4, two", "2026-12-24"), ("old", "L4, one", "2026-12-01"),
    )  # fmt: skip
    assert (conflict.kept_us, conflict.other_us, conflict.ratio) == (20.0, 10.0, 2.0)
    (table,) = conflict_table(times.conflicts)
    assert table.rows[0][:3] == ("l4", "alone", 1)


@pytest.mark.parametrize(
    "change",
    [
        {"median_us": 10.5},  # within what machines of one type differ by
        {"low_us": 10.5},  # the intervals meet
        {"source": "modelled"},
        {"load": "the other half, on cpu:1"},  # another condition, whatever its name
        {"condition": "beside"},
    ],
)
def test_what_intervals_sources_or_loads_explain_is_no_conflict(change: dict[str, Any]) -> None:
    old = replace(MEASURED, median_us=10.0, low_us=9.0, high_us=11.0)
    new = replace(
        old, **({"dated": "2026-12-24", "median_us": 20.0, "low_us": 19.0, "high_us": 21.0} | change)
    )
    if change == {"median_us": 10.5}:
        new = replace(new, low_us=11.5)
    times = merge_profiles({"old": profile(old), "new": profile(new)})
    assert times.conflicts == ()
    assert conflict_table(times.conflicts) == ()


def test_links_of_one_transport_that_disagree_are_conflicts() -> None:
    old = replace(LINK, dated="2026-12-01T00:00:00+00:00")
    new = replace(LINK, dated="2026-12-02T00:00:00+00:00", gbit_per_s=40.0)
    times = merge_profiles({"new": profile(ROW, links=[new]), "old": profile(ROW, links=[old])})
    assert times.link("l4", "l4") == new
    (conflict,) = times.conflicts
    assert (conflict.device_type, conflict.kept[0]) == ("l4 to l4", "new")
    other = replace(old, transport="gloo")
    assert not merge_profiles({"a": profile(ROW, links=[new]), "b": profile(ROW, links=[other])}).conflicts


ROWS = st.builds(
    lambda source, day, median, samples, condition: replace(
        ROW, source=source, dated=f"2026-12-{day:02}", median_us=median, samples=samples, condition=condition,
        low_us=median * 0.9, high_us=median * 1.1,
    ),
    st.sampled_from(["measured", "silicon", "modelled"]),
    st.integers(1, 9),
    st.floats(0.5, 100.0),
    st.integers(0, 10**6),
    st.sampled_from(["alone", "beside"]),
)  # fmt: skip


@given(st.lists(ROWS, min_size=1, max_size=5, unique_by=lambda row: (row.dated, row.samples)), st.randoms())
def test_merging_does_not_depend_on_order_and_merges_again(rows: list[TimeRow], random: Any) -> None:
    named = {f"{number}": profile(row) for number, row in enumerate(rows)}
    shuffled = list(named.items())
    random.shuffle(shuffled)
    one, other = merge_profiles(named), merge_profiles(dict(shuffled))
    assert one.rows == other.rows
    assert one.digest == other.digest

    def written(times: Times) -> TableArtifact:
        rows = [row for found in times.rows.values() for row in found]
        return TableArtifact(*profile_content("sha256:a", rows, (), times.devices.values()))

    assert merge_profiles({"all": written(one)}).rows == one.rows
    split = len(shuffled) // 2
    if split:
        halves = [merge_profiles(dict(half)) for half in (shuffled[:split], shuffled[split:])]
        assert merge_profiles({str(n): written(half) for n, half in enumerate(halves)}).rows == one.rows
