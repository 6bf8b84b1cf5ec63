"""What a timed kernel works on, and rounds of blocks, without a device: a made-up lab runs everything on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.profile.measure import cuda_rounds
from tessera_core.profile.measure.cuda import measure, rows_of
from tessera_core.profile.measure.cuda_blocks import Block, CoRunner, last_uses
from tessera_core.profile.measure.cuda_copies import ROTATED_L2_MULTIPLE, Copies, copies_of
from tessera_core.profile.measure.cuda_lab import fixed_cost
from tessera_core.profile.measure.cuda_rounds import BlockTimes, sample
from tessera_core.profile.measure.cuda_slices import check_disjoint, slowdowns
from tessera_core.profile.measure.cuda_source import Source
from tessera_core.profile.measure.cuda_values import iteration_memory, shared_values
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tessera_formats.errors import DeviceLostError, InputError
from tests.profile.measure.fake_lab import FakeLab, FakeReplay

CAPTURES = Path(__file__).parents[3] / "fixtures/captures"


@pytest.fixture(scope="module")
def tiny() -> Trace:
    return load_trace(CAPTURES / "llama-tiny.trace")


@given(size=st.integers(0, 1 << 31), cache=st.integers(1, 1 << 27))
def test_copies_exceed_the_cache_and_no_more_than_needed(size: int, cache: int) -> None:
    count = copies_of(size, cache)
    assert count * max(1, size) >= ROTATED_L2_MULTIPLE * cache
    assert count == 1 or (count - 1) * max(1, size) < ROTATED_L2_MULTIPLE * cache


@given(
    fixed=st.floats(0, 50),
    each=st.floats(0.1, 20),
    counts=st.lists(st.integers(1, 200), min_size=3, max_size=6, unique=True),
)
def test_the_cost_of_a_graph_is_told_from_that_of_its_launches(
    fixed: float, each: float, counts: list[int]
) -> None:
    found = fixed_cost(counts, [fixed + each * count for count in counts])
    assert found == pytest.approx((fixed, each), rel=1e-6, abs=1e-6)


def _copies(trace: Trace, kernel: int, rotation: Any = "all", program: int = 1) -> Copies:
    chosen = trace.programs[program]
    source = Source.of(trace, "cpu", trusted=False, compiled=False)
    for call, found, memory in source.walk(FakeLab(), chosen):
        if found.id == kernel:
            assert call is not None
            return Copies.of(
                trace, chosen, kernel, call[1], memory, 1 << 20, rotation, lambda n: source.draw(chosen, n)
            )
    raise AssertionError(kernel)


def _kernel(trace: Trace, part: str, program: int = 1) -> int:
    return next(k.id for k in trace.programs[program].kernels if part in k.name)


def _addresses(copies: Copies, number: int) -> dict[str, int]:
    trace = copies.memory.trace
    kinds = [trace.buffers[trace.tensors[t].buffer].kind for t in copies.group.inputs]
    return {kind: t.data_ptr() for kind, t in zip(kinds, copies.arguments(number))}


def test_weights_are_taken_in_turn_and_activations_stay(tiny: Trace) -> None:
    copies = _copies(tiny, _kernel(tiny, "mlp.gate_proj"), "weights")
    first, second = _addresses(copies, 0), _addresses(copies, 1)
    assert first["weight"] != second["weight"]
    assert first["activation"] == second["activation"]
    turns = min(limit for limit in copies.limits.values() if limit > 1)
    assert _addresses(copies, turns)["weight"] == first["weight"]
    assert _addresses(copies, -1)["weight"] == _addresses(copies, turns - 1)["weight"]
    assert torch.equal(copies.arguments(0)[0], copies.arguments(1)[0])  # equal values elsewhere


def test_warm_caches_want_one_copy_and_an_iteration_many_of_everything(tiny: Trace) -> None:
    kernel = _kernel(tiny, "mlp.gate_proj")
    warm, cold = _copies(tiny, kernel, "none"), _copies(tiny, kernel)
    assert _addresses(warm, 0) == _addresses(warm, 5)
    assert all(_addresses(cold, 0)[kind] != _addresses(cold, 1)[kind] for kind in ("weight", "activation"))


def test_lookups_go_elsewhere_with_every_copy_of_the_inputs(tiny: Trace) -> None:
    copies = _copies(tiny, _kernel(tiny, "embedding"))
    tokens = [
        tensor
        for number in (0, 1, 2)
        for tensor in copies.arguments(number)
        if tensor.dtype == torch.int64 and tensor.dim() == 2
    ]
    assert len(tokens) == 3
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(tokens, 2))
    vocabulary = max(tiny.tensors[w.tensor].shape[0] for w in tiny.weights)
    assert all(int(t.min()) >= 0 and int(t.max()) < vocabulary for t in tokens)


def test_integers_that_a_kernel_moves_on_are_put_back(tiny: Trace) -> None:
    program = tiny.programs[1]
    position = program.bindings("state")["position"].tensor
    buffer = tiny.tensors[position].buffer
    writer = next(
        op.kernel
        for op in program.ops
        for operand in op.operands
        if operand.mode == "write" and tiny.tensors[operand.tensor].buffer == buffer
    )
    copies = _copies(tiny, writer)
    place = [tiny.tensors[t].buffer for t in copies.group.inputs].index(buffer)
    before = copies.arguments(0)[place].clone()
    copies.arguments(0)[place].add_(1)
    copies.restore()
    assert torch.equal(copies.arguments(0)[place], before)
    assert int(before) == program.context - 1  # a decode step stands at its last position


def test_memory_is_given_back_after_the_last_use_only(tiny: Trace) -> None:
    for program in tiny.programs:
        dying = last_uses(tiny, program)
        bound = {tiny.tensors[b.tensor].buffer for b in program.io}
        for kernel, buffers in enumerate(dying):
            later = {
                tiny.tensors[t].buffer
                for op in program.ops
                if op.kernel > kernel
                for t in (*op.inputs, *op.outputs)
            }
            assert not later & set(buffers)
            assert not bound & set(buffers)


def test_values_are_ordinary_and_the_same_every_time(tiny: Trace) -> None:
    shared = shared_values(tiny, "cpu", trusted=False)
    again = shared_values(tiny, "cpu", trusted=False)
    used = [weight for weight in tiny.weights if weight.buffer in shared]
    assert used
    for weight in used:
        size = tiny.buffers[weight.buffer].bytes
        first, second = (
            torch.tensor([], dtype=torch.uint8).set_(values[weight.buffer], 0, (size,))
            for values in (shared, again)
        )
        assert torch.equal(first, second)
        assert int(first.count_nonzero()) > 0
    memory = iteration_memory(tiny, tiny.programs[1], shared, "cpu")
    cache = memory.view(tiny.programs[1].bindings("state")["layers.0.key"].tensor)
    assert float(cache.std()) == pytest.approx(1.0, abs=0.1)


def _block(name: str, work: Callable[[], object] = lambda: None, launches: int = 10) -> Block:
    lab: Any = SimpleNamespace()
    return Block(
        name=name,
        before=FakeReplay(lambda: None, lab),
        body=FakeReplay(work, lab),
        launches=launches,
        keep=(),
    )


def test_a_steady_block_stops_early_and_a_noisy_one_goes_on() -> None:
    steady, noisy = _block("steady"), _block("noisy")
    noise = np.random.default_rng(7)

    def runs_us(replay: FakeReplay) -> float:
        return 100.0 if replay is not noisy.body else 100.0 * float(noise.uniform(0.7, 1.3))

    found = sample(FakeLab(runs_us=runs_us), [steady, noisy], seconds=5.0)
    assert len(found["steady"].times_us) == cuda_rounds.LEAST_ROUNDS
    assert len(found["noisy"].times_us) > cuda_rounds.LEAST_ROUNDS
    assert found["steady"].median_us == pytest.approx(10.0)  # without what the graph itself takes
    low, high = found["noisy"].interval_us
    assert low <= found["noisy"].median_us <= high


def test_a_budget_ends_sampling_and_leaves_the_least() -> None:
    noise = itertools.cycle([50.0, 150.0])
    found = sample(FakeLab(runs_us=lambda replay: next(noise)), [_block("one")], seconds=0.0)
    assert len(found["one"].times_us) == cuda_rounds.LEAST_ROUNDS


def _runner(lab: FakeLab) -> CoRunner:
    return CoRunner(lab=lab, graph=FakeReplay(lambda: None, lab), round_us=103.0, keep=())


def test_rounds_that_the_co_runner_does_not_fill_do_not_count() -> None:
    lab, other = FakeLab(), FakeLab()
    answers = iter([True, False, True] + [False] * 100)
    other.passed = lambda mark: next(answers)  # type: ignore[method-assign]
    found = sample(lab, [_block("one")], seconds=0.0, beside=_runner(other))
    assert len(found["one"].times_us) == cuda_rounds.LEAST_ROUNDS


def test_a_co_runner_that_never_lasts_is_a_lost_device() -> None:
    other = FakeLab()
    other.passed = lambda mark: True  # type: ignore[method-assign]
    with pytest.raises(DeviceLostError, match="co-runner"):
        sample(FakeLab(), [_block("one")], seconds=1.0, beside=_runner(other))


def test_a_median_is_narrow_by_its_interval() -> None:
    steady = BlockTimes(times_us=np.full(11, 5.0), launches=4)
    wide = BlockTimes(times_us=np.linspace(1, 9, 11), launches=4)
    assert steady.narrow
    assert not wide.narrow


def test_slices_that_slow_each_other_overlap() -> None:
    def labs(together: float) -> list[FakeLab]:
        """Labs on which work takes longer while another has been given work and has not settled."""
        made = [FakeLab(), FakeLab()]
        for lab, other in (made, made[::-1]):
            lab.runs_us = lambda replay, other=other: 100.0 * (together if other.busy else 1.0)
        return made

    assert slowdowns(labs(1.1), size=8) == pytest.approx((1.1, 1.1), rel=0.02)
    with pytest.raises(InputError, match="so they overlap"):
        check_disjoint(labs(2.5), "cuda:0/sm=96+36#1", size=8)


def test_every_signature_gets_a_row_for_each_condition(tiny: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rounds, "LEAST_ROUNDS", 3)
    monkeypatch.setattr(cuda_rounds, "WARM_UP_ROUNDS", 0)
    monkeypatch.setattr("tessera_core.profile.measure.cuda_blocks.MOST_LAUNCHES", 4)
    source = Source.of(tiny, "cpu", trusted=False, compiled=False)
    lab = FakeLab()
    found = measure(source, lab, FakeLab(runs_us=lambda replay: 1e6), seconds=0.0)
    rows = list(rows_of(source, found, "h200-sxm/sm=96", "somewhere", "the same on the other"))
    signatures = {kernel.signature for program in tiny.programs for kernel in program.kernels}
    assert {(row.signature, row.condition) for row in rows} == {
        (signature, condition) for signature in signatures for condition in ("alone", "copies")
    }
    assert {row.load for row in rows if row.condition == "alone"} == {""}
    assert {row.load for row in rows if row.condition == "copies"} == {"the same on the other"}
    assert {row.cache for row in rows} == {"sequence"}
    assert all(row.source == "measured" and row.samples == 3 for row in rows)
    assert lab.flushes > 0
    assert set(found.whole()) == {(p.id, c) for p in tiny.programs for c in ("alone", "copies")}


def test_what_cannot_run_is_reported_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rounds, "LEAST_ROUNDS", 2)
    monkeypatch.setattr("tessera_core.profile.measure.cuda_blocks.MOST_LAUNCHES", 4)
    trace = load_trace(CAPTURES / "demo.trace")
    source = Source.of(trace, "cpu", trusted=False, compiled=False)
    found = measure(source, FakeLab(), None, seconds=0.0)
    triton = {
        kernel.signature
        for program in trace.programs
        for kernel in program.kernels
        if any(program.ops[op].target.startswith("triton.") for op in kernel.ops)
    }
    assert triton
    assert set(source.unmeasured) == triton
    measured = set(found.times["alone"])
    assert measured == {k.signature for p in trace.programs for k in p.kernels} - triton
    assert found.whole() == {}
    assert found.total_us(trace.programs[0], "alone") is None
