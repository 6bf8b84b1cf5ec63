from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.adapt.arrivals import Arrival
from tessera_core.adapt.controller import Controller, Decision
from tessera_core.adapt.simulate import simulate
from tests.adapt.plans import model, predicted
from tests.cli.artifacts import DECODE

MS = 1000.0


def test_a_schedule_by_hand(tmp_path) -> None:
    """Every iteration takes 10 ms on the only device; one slot of two requests; windows of 20 ms."""
    arrivals = [Arrival(0, 0.0, 3), Arrival(1, 5 * MS, 2), Arrival(2, 6 * MS, 2)]
    outcome = simulate([model(tmp_path)], arrivals, window_us=20 * MS, first=0)
    # Request 0 starts alone: two prefills 0-20 (its own is the first), decode 20-30, 30-40. Then 1 and 2 together.
    assert [(s.start_us, s.first_token_us, s.end_us) for s in outcome.served] == [
        (0.0, 10 * MS, 40 * MS),
        (40 * MS, 50 * MS, 70 * MS),
        (40 * MS, 60 * MS, 70 * MS),
    ]
    seen = [(w.start_us, w.end_us, w.arrivals, w.completions, w.queued, w.running) for w in outcome.windows]
    assert seen == [
        (0.0, 20 * MS, 3, 0, 2, 1),
        (20 * MS, 40 * MS, 0, 1, 2, 0),
        (40 * MS, 60 * MS, 0, 0, 0, 2),
        (60 * MS, 80 * MS, 0, 2, 0, 0),
    ]
    assert [w.mean_latency_us for w in outcome.windows] == [None, 40 * MS, None, 64.5 * MS]
    # Work of a request: 20 ms for three tokens, 15 ms for two. Waiting ones count again in the next window.
    assert [w.pressure(model(tmp_path)) for w in outcome.windows] == [2.5, 1.5, 1.5, 0.0]


def test_an_arrival_at_a_windows_end_belongs_to_the_next(tmp_path) -> None:
    outcome = simulate([model(tmp_path)], [Arrival(0, 20 * MS, 1)], window_us=20 * MS, first=0)
    assert [w.arrivals for w in outcome.windows] == [0, 1]


class SwitchOnce:
    """Stands in for the controller: to plan 1 at the end of the first window."""

    def decide(self, window):
        if window.index == 0:
            return Decision(window=0, at_us=window.end_us, before=0, after=1, pressure=0.0, reason="test")
        return None


def test_running_requests_stay_on_their_plan_and_both_contend(tmp_path) -> None:
    """Plan b's batch, arriving at 10 ms, takes turns with plan a's, which has begun."""
    plans = [model(tmp_path, "a"), model(tmp_path, "b")]
    arrivals = [Arrival(0, 0.0, 4), Arrival(1, 10 * MS, 2)]
    outcome = simulate(plans, arrivals, window_us=10 * MS, first=0, controller=SwitchOnce())
    # Two prefills and three decodes of a, two prefills and one decode of b. At 10 both enter an iteration, and a
    # has the lower batch; then the one that entered first: a 0-20, b 20-30, a 30-40, b 40-50, a 50-60, b 60-70,
    # a 70-80.
    assert [(s.plan, s.start_us, s.end_us) for s in outcome.served] == [
        (0, 0.0, 80 * MS),
        (1, 10 * MS, 70 * MS),
    ]
    assert [w.plan for w in outcome.windows][:2] == [0, 1]


def test_data_parallel_routes_share_by_their_weight(tmp_path) -> None:
    left, right = model(tmp_path, "left"), model(tmp_path, "right", device="cpu1")
    both = replace(left, routes=(*left.routes, *right.routes))
    arrivals = [Arrival(i, 0.0, 1) for i in range(4)]
    outcome = simulate([both], arrivals, window_us=100 * MS, first=0)
    # Two batches of two, one per route, at once: two prefills each.
    assert [s.end_us for s in outcome.served] == [10 * MS, 20 * MS, 10 * MS, 20 * MS]
    assert both.work_us(1) == left.work_us(1) / 2


def test_observed_times_correct_a_program(tmp_path) -> None:
    corrected = model(tmp_path, "c", corrections={(0, DECODE): 1.5})
    assert [p.interval_us for p in corrected.routes[0].programs] == [10 * MS, 15 * MS]
    outcome = simulate([corrected], [Arrival(0, 0.0, 2)], window_us=50 * MS, first=0)
    assert [s.end_us for s in outcome.served] == [35 * MS]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 5)), min_size=1, max_size=30), st.integers(5, 80)
)
def test_every_request_is_served_once_on_the_plan_in_force(tmp_path_factory, drawn, window_ms) -> None:
    folder = tmp_path_factory.mktemp("plans")
    base = model(folder, "base", slots=2)
    plans = (predicted("fast", 10 * MS, 1 * MS, base), predicted("wide", 4 * MS, 2 * MS, base))
    arrivals = [Arrival(i, time * MS, tokens) for i, (time, tokens) in enumerate(sorted(drawn))]
    controller = Controller(plans, (0, 1), 1.5)
    outcome = simulate(plans, arrivals, window_us=window_ms * MS, first=0, controller=controller)
    assert [s.arrival for s in outcome.served] == arrivals
    assert (
        sum(w.arrivals for w in outcome.windows)
        == sum(w.completions for w in outcome.windows)
        == len(arrivals)
    )
    assert (outcome.windows[-1].queued, outcome.windows[-1].running) == (0, 0)
    changes = [(0.0, 0), *((d.at_us, d.after) for d in outcome.decisions)]
    for served in outcome.served:
        assert served.arrival.arrival_us <= served.start_us < served.first_token_us <= served.end_us
        assert served.plan == [plan for at, plan in changes if at <= served.start_us][-1]
    starts = [s.start_us for s in outcome.served]
    assert starts == sorted(starts)
    assert outcome == simulate(plans, arrivals, window_us=window_ms * MS, first=0, controller=controller)
