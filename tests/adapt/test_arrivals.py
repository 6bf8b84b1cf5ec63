import statistics
from itertools import pairwise

import pytest

from tessera_core.adapt.arrivals import Arrival, arrivals, read_arrivals
from tessera_formats.errors import InputError

PHASES = {
    "seed": 7,
    "phase": [
        {"start_ms": 0, "end_ms": 2000, "requests_per_s": 500, "output_tokens": 8},
        {"start_ms": 2000, "end_ms": 4000, "requests_per_s": 50, "output_tokens": 4},
    ],
}


def test_listed_requests_come_in_order_of_arrival() -> None:
    listed = [{"arrival_ms": 5, "output_tokens": 2}, {"arrival_ms": 0.5, "output_tokens": 3}]
    assert arrivals({"request": listed}, "w") == (Arrival(0, 500.0, 3), Arrival(1, 5000.0, 2))


def test_phases_draw_poisson_arrivals_within_their_bounds() -> None:
    drawn = arrivals(PHASES, "w")
    first = [a.arrival_us for a in drawn if a.output_tokens == 8]
    second = [a.arrival_us for a in drawn if a.output_tokens == 4]
    assert all(0 <= time < 2e6 for time in first)
    assert all(2e6 <= time < 4e6 for time in second)
    # A Poisson count of mean 1000 (100) lies within five standard deviations.
    assert abs(len(first) - 1000) < 5 * 1000**0.5
    assert abs(len(second) - 100) < 5 * 100**0.5
    gaps = [after - before for before, after in pairwise(first)]
    # Exponential gaps: the standard deviation equals the mean.
    assert 0.85 < statistics.stdev(gaps) / statistics.fmean(gaps) < 1.15


def test_a_seed_always_gives_the_same_requests() -> None:
    assert arrivals(PHASES, "w") == arrivals(PHASES, "w")
    assert arrivals(PHASES, "w") != arrivals({**PHASES, "seed": 8}, "w")


def test_a_phase_does_not_depend_on_the_others() -> None:
    changed = {**PHASES, "phase": [{**PHASES["phase"][0], "requests_per_s": 1}, PHASES["phase"][1]]}
    second = [a.arrival_us for a in arrivals(PHASES, "w") if a.output_tokens == 4]
    assert [a.arrival_us for a in arrivals(changed, "w") if a.output_tokens == 4] == second


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = 1\n", "holds no request"),
        ("[[phase]]\nstart_ms = 0\nend_ms = 9\nrequests_per_s = 0\noutput_tokens = 1\n", "holds no request"),
        (
            "[[phase]]\nstart_ms = 9\nend_ms = 0\nrequests_per_s = 1\noutput_tokens = 1\n",
            "ends before it begins",
        ),
        (
            "[[phase]]\nstart_ms = 0\nend_ms = 9e6\nrequests_per_s = 1e9\noutput_tokens = 1\n",
            "more than 1,000,000",
        ),
    ],
)
def test_workloads_that_make_no_sense_are_refused(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_arrivals(path)
