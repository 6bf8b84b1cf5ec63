import os
import signal
from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.devices.cpu import cpu_device, usable_cpus
from tessera_core.profile.measure.cpu import (
    CpuMeasurement,
    Place,
    Samples,
    halves_of,
    median_interval,
    start_worker,
    summarise,
)
from tessera_core.profile.merge import load_profiles
from tessera_core.profile.stage import ProfileStage
from tessera_core.profile.times import Condition
from tessera_core.program.store import save_trace
from tessera_formats.errors import ArtifactError, DeviceLostError
from tests.profile.traces import CAPACITY, tiny_trace

PLACE = Place(
    device_type="cpu-1thread", condition="alone", hardware="some CPU", dated="2026-12-01T00:00:00+00:00"
)


@given(st.integers(1, 200))
def test_an_interval_of_the_median_covers_it_as_often_as_it_says(count: int) -> None:
    low, high = median_interval(np.arange(float(count)))
    below = int(low)  # values are their own ranks
    assert high == count - 1 - below
    covered = 1 - 2 * sum(comb(count, k) for k in range(below + 1)) / 2**count
    assert covered >= 0.9 or below == 0
    narrower = 1 - 2 * sum(comb(count, k) for k in range(below + 2)) / 2**count
    assert narrower < 0.9 or below + 1 > (count - 1) // 2


def test_samples_of_equal_kernels_are_pooled() -> None:
    trace = tiny_trace()
    nanoseconds = np.array([[10, 1, 3, 5, 2], [10, 1, 3, 5, 2], [30, 1, 3, 5, 2]], dtype=np.int64) * 1000
    rows = {row.signature: row for row in summarise(trace, {0: Samples(nanoseconds, 0.0)}, PLACE)}
    assert set(rows) == {"sig-mm", "sig-add", "sig-append", "sig-count"}
    assert (rows["sig-mm"].median_us, rows["sig-mm"].samples) == (10.0, 3)
    assert (rows["sig-add"].median_us, rows["sig-add"].samples) == (2.0, 6)  # two kernels, 1 and 3 us
    assert (rows["sig-mm"].low_us, rows["sig-mm"].high_us) == (10.0, 30.0)  # three blocks: their whole range
    assert rows["sig-mm"].bytes == sum(
        (trace.programs[0].kernels[0].read_bytes, trace.programs[0].kernels[0].written_bytes)
    )


def test_disturbed_iterations_are_left_out_where_enough_remain() -> None:
    times = np.array([[1], [1], [1], [1], [1], [900], [900]], dtype=np.int64)
    some = Samples.of(times, np.array([False] * 5 + [True] * 2))
    assert (len(some.times), some.whole.median_us, round(some.disturbed, 2)) == (5, 0.001, 0.29)
    most = Samples.of(times, np.array([False] * 2 + [True] * 5))
    assert (len(most.times), round(most.disturbed, 2)) == (7, 0.71)
    (row,) = {
        r
        for r in summarise(tiny_trace(), {0: Samples(np.ones((5, 5)), 0.3)}, PLACE)
        if r.signature == "sig-mm"
    }
    assert "30% disturbed" in row.detail


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=40))
def test_halves_take_most_nearly_the_same_time(times: list[int]) -> None:
    first, second = halves_of(Samples(np.array([times, times], dtype=np.int64), 0.0))
    assert (first.start, first.stop, second.stop) == (0, second.start, len(times)) and first and second
    apart = abs(sum(times[: first.stop]) - sum(times[first.stop :]))
    assert apart == min(abs(sum(times[:cut]) - sum(times[cut:])) for cut in range(1, len(times)))


def test_a_single_kernel_has_no_halves() -> None:
    assert halves_of(Samples(np.array([[3], [4]]), 0.0)) == (range(1),)


def test_parts_are_joined_iteration_by_iteration() -> None:
    first = Samples(np.array([[1, 2], [3, 4], [5, 6]]), 0.25)
    second = Samples(np.array([[7], [8]]), 0.0)
    joined = Samples.joined([first, second])
    assert joined.times.tolist() == [[1, 2, 7], [5, 6, 8]]
    assert joined.disturbed == 0.25


@pytest.mark.parametrize("kernels", [range(3), range(3, 5)])
def test_half_of_the_kernels_finds_what_the_others_left(kernels: range) -> None:
    """The second half appends to the cache and counts: both as if the first half had just run."""
    from tessera_core.profile.measure.replay_loop import ReplayLoop

    loop = ReplayLoop(tiny_trace(), trusted=False, seed=3)
    times, disturbed = loop.samples(0, 0.05, kernels)
    assert times.shape == (len(disturbed), len(kernels))
    slot = loop._slots[0][0]
    assert int(slot.memory.view(2)) == (1 if 4 in kernels else 0)
    result = slot.memory.view(0) @ slot.memory.view(1) + 2 * slot.memory.view(0)
    assert slot.memory.view(6).allclose(result)
    assert slot.memory.view(3)[0].allclose(result) == (3 in kernels)


def test_what_a_half_overwrites_is_put_back() -> None:
    """A kernel that doubles in place what another made would reach infinity in a second."""
    import torch

    from tessera_core.profile.measure.replay_loop import ReplayLoop

    trace = tiny_trace()
    program = trace.programs[0]
    doubling = replace(
        program.ops[2],
        target="aten.add_.Tensor",
        arguments={"args": [{"tensor": 5}, {"tensor": 5}], "kwargs": {}},
        inputs=(5,),
        outputs=(5,),
    )
    ops = (*program.ops[:2], doubling)
    short = replace(program, ops=ops, kernels=program.kernels[:3], io=program.io[:1])
    loop = ReplayLoop(replace(trace, programs=(short,)), trusted=False, seed=3)
    loop.samples(0, 0.05, range(2, 3))
    memory = loop._slots[0][0].memory
    expected = 2 * (memory.view(4) + memory.view(0))
    assert torch.equal(memory.view(5), expected)


def test_positions_start_anew_in_each_iteration_and_state_is_not_zero(tmp_path: Path) -> None:
    from tessera_core.profile.measure.replay_loop import ReplayLoop

    loop = ReplayLoop(tiny_trace(), trusted=False, seed=3)
    times, disturbed = loop.samples(0, 0.1)
    assert times.shape == (len(disturbed), 5)
    assert (
        len(times) > 4 * CAPACITY
    )  # each slot has gone past the capacity, had its position not been put back
    for slot in loop._slots[0]:
        assert int(slot.memory.view(2)) == 1
        assert float(slot.memory.view(3).abs().min()) > 0
    first, second = (slot.memory.view(0) for slot in loop._slots[0][:2])
    assert not first.equal(second)


@pytest.mark.serial
def test_a_worker_measures_every_signature_alone_and_beside_another(tmp_path: Path) -> None:
    save_trace(tmp_path / "x.trace", tiny_trace())
    both = len(usable_cpus()) > 1
    said: list[str] = []
    stage = ProfileStage(devices=("cpu-1thread=cpu:0", "l4"), beside="cpu:1" if both else None, seconds=1.0)
    facts = stage.run(tmp_path / "x.trace", tmp_path / "x.profile.arrow", said.append)
    times = load_profiles([tmp_path / "x.profile.arrow"])
    loads: dict[Condition, str] = {"alone": ""}
    if both:
        loads |= {"beside": "the other half of the kernels on cpu:1", "copies": "the whole program on cpu:1"}
    for signature in ("sig-mm", "sig-add", "sig-append", "sig-count"):
        for condition, load in loads.items():
            row = times.time(signature, "cpu-1thread", condition)
            assert row.load == load
            assert (row.condition, row.source, row.cache) == (condition, "measured", "sequence")
            assert row.samples >= 5
            assert 0 < row.p10_us <= row.median_us <= row.p90_us < 10_000
            assert row.low_us <= row.median_us <= row.high_us
    assert times.devices["cpu-1thread"].threads == 1
    assert 0 < times.overhead_us("cpu-1thread") < 1000
    if both:
        assert times.link("cpu-1thread", "cpu-1thread").origin == "measured"
    assert any("cpu:0" in line for line in said)
    for row in facts.as_json()["iterations"]:
        if row["device_type"] == "l4":
            assert row["whole_us"] is None
        else:  # the whole holds the gaps between kernels as well; other work on the machine only adds to it
            assert row["whole_us"] > 0.5 * row["total_us"]
    shares = {row["device_type"]: row["measured_share"] for row in facts.as_json()["iterations"]}
    assert shares == {"cpu-1thread": 1.0, "l4": 0.0}


@pytest.mark.serial
def test_an_error_in_a_worker_is_the_stages_own(tmp_path: Path) -> None:
    trace = tiny_trace()
    program = trace.programs[0]
    ops = (replace(program.ops[0], target="aten.no_such_op.default"), *program.ops[1:])
    save_trace(tmp_path / "x.trace", replace(trace, programs=(replace(program, ops=ops),)))
    with pytest.raises(ArtifactError, match="no_such_op"):
        CpuMeasurement(
            trace=trace,
            path=tmp_path / "x.trace",
            device_type="cpu-1thread",
            cpu=cpu_device("cpu:0"),
            beside=None,
            trust=False,
            seconds=0.1,
        ).run(lambda _: None)


@pytest.mark.serial
def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    save_trace(tmp_path / "x.trace", tiny_trace())
    with (
        pytest.raises(DeviceLostError, match=r"cpu:0 was lost.*exit code -9"),
        start_worker(tmp_path / "x.trace", cpu_device("cpu:0"), trust=False) as worker,
    ):
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.ask("time", 0, 0.1)
