import pytest

from tessera_core.adapt.arrivals import Arrival
from tessera_core.adapt.controller import Controller, ladder
from tessera_core.adapt.monitor import Window
from tests.adapt.plans import model, predicted

WINDOW_US = 40_000.0


def window(offered: int, plan: int, index: int = 0) -> Window:
    """A window in which requests of three tokens each were offered."""
    return Window(
        index=index, start_us=0.0, end_us=WINDOW_US, plan=plan,
        offered=tuple(Arrival(i, 0.0, 3) for i in range(offered)),
        arrivals=offered, completions=0, queued=0, running=0, mean_latency_us=None,
    )  # fmt: skip


@pytest.fixture
def plans(tmp_path):
    """A request of three tokens takes two prefill and two decode intervals for a batch of two: 20, 10 and 5 ms."""
    base = model(tmp_path)
    return (
        predicted("fast", 10_000.0, 1_000.0, base),
        predicted("middle", 5_000.0, 2_000.0, base),
        predicted("wide", 2_500.0, 3_000.0, base),
    )


def test_work_and_pressure_by_hand(plans) -> None:
    assert [plan.work_us(3) for plan in plans] == [20_000.0, 10_000.0, 5_000.0]
    assert [window(4, 0).pressure(plan) for plan in plans] == [2.0, 1.0, 0.5]
    assert window(0, 0).pressure(plans[0]) == 0.0


def test_the_ladder_goes_from_least_latency_to_most_capacity(plans) -> None:
    assert ladder(plans[::-1], 3) == (2, 1, 0)


def test_a_plan_that_is_beaten_in_both_is_on_no_rung(plans) -> None:
    worse = predicted("worse", 11_000.0, 5_000.0, plans[0])
    assert ladder((worse, *plans), 3) == (1, 2, 3)
    assert ladder((plans[0], plans[0]), 3) == (0,)


@pytest.mark.parametrize(
    ("offered", "before", "after"),
    [
        (3, 0, None),  # pressure 1.5: at the threshold, not above
        (4, 0, 1),  # 2.0 on fast, 1.0 on middle
        (6, 0, 1),  # 3.0 on fast; middle's 1.5 is still allowed
        (7, 0, 2),  # 3.5 on fast, 1.75 on middle: one rung is not enough
        (40, 0, 2),  # too much for any: the top
        (40, 2, None),  # nowhere higher to go
        (2, 1, None),  # 1.0 on fast: the band keeps the plan
        (1, 1, 0),  # 0.5 on fast: it can keep up again
        (3, 2, 1),  # 1.5 on fast, 0.75 on middle
        (0, 2, 0),  # idle
        (0, 0, None),
    ],
)
def test_decisions_by_hand(plans, offered: int, before: int, after: int | None) -> None:
    decision = Controller(plans, (0, 1, 2), 1.5).decide(window(offered, before, index=5))
    assert (None if decision is None else decision.after) == after
    if decision is not None:
        assert (decision.before, decision.window, decision.at_us) == (before, 5, WINDOW_US)
        assert decision.pressure == window(offered, before).pressure(plans[before])
