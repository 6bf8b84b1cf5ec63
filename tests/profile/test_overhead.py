import time

import pytest

from tessera_core.devices.cpu import cpu_device
from tessera_core.profile.measure.overhead import SEGMENTS, bookkeeping, segment_overhead_us


def empty(segments: int) -> float:
    return segments * 7_000.0


@pytest.mark.serial
def test_another_loop_can_be_put_in_place_of_the_executors() -> None:
    assert segment_overhead_us(cpu_device("cpu:0"), empty) == 7.0


@pytest.mark.serial
def test_the_executors_loop_lands_tokens_as_a_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends an iteration is part of it: without, a token-bound model was planned a fifth too fast."""
    from tessera_core.execute.lane import LaneMemory

    done = {"collect": 0, "_land": 0}
    for name in done:
        original = getattr(LaneMemory, name)

        def counted(self, *given, name=name, original=original):
            done[name] += 1
            return original(self, *given)

        monkeypatch.setattr(LaneMemory, name, counted)
    begun = time.perf_counter_ns()
    passed = bookkeeping(SEGMENTS // 10)
    assert 0 < passed < time.perf_counter_ns() - begun
    assert done["collect"] == SEGMENTS // 10
    assert done["_land"] == SEGMENTS // 10 - 4  # the last iteration of each slot feeds nothing
