"""From ops to kernels: what a kernel wrote itself is not read from outside, and nothing is guessed."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.deps.accesses import (
    BOXES_LIMIT,
    Step,
    Touch,
    fold_kernel,
    fold_ops,
    merged,
    op_step,
    without_internal,
)
from tessera_core.deps.graph import Access
from tessera_core.deps.hazards import find_hazards
from tessera_core.program.boxes import Box
from tests.deps.samples import Builder, read, write

SIZE = 48


def touch(mode: str, must: bool, boxes: tuple[Box, ...] | None, buffer: int = 0) -> Touch:
    return Touch(
        buffer=buffer,
        mode=mode,  # type: ignore[arg-type]
        must=must,
        boxes=boxes,
        evidence="schema",
        precision="exact" if must else "bounded",
    )


def interval(low: int, high: int) -> tuple[Box, ...]:
    return (Box.interval(low, high - low),)


def bytes_of(boxes: tuple[Box, ...] | None) -> set[int]:
    if boxes is None:
        return set(range(SIZE))
    return {byte for box in boxes for low, high in box.intervals() for byte in range(low, high)}


def summary(accesses: list[Access]) -> list[tuple[str, bool, tuple[Box, ...] | None]]:
    return [(a.mode, a.must, a.boxes) for a in accesses]


def test_what_a_kernel_certainly_wrote_is_not_read_from_outside() -> None:
    steps = [Step([touch("write", True, interval(0, 32))]), Step([touch("read", False, interval(16, 48))])]
    assert summary(fold_kernel(0, 0, steps, "ops")) == [
        ("read", False, interval(32, 48)),
        ("write", True, interval(0, 32)),
    ]


def test_what_a_kernel_may_have_written_is_still_read_from_outside() -> None:
    steps = [Step([touch("write", False, interval(0, 32))]), Step([touch("read", False, interval(16, 32))])]
    assert ("read", False, interval(16, 32)) in summary(fold_kernel(0, 0, steps, "ops"))


def test_an_update_in_place_reads_before_it_writes() -> None:
    step = Step([touch("write", True, interval(0, 8)), touch("read", False, interval(0, 8))])
    assert [mode for mode, _, _ in summary(fold_kernel(0, 0, [step], "ops"))] == ["read", "write"]


def test_a_may_write_over_the_kernels_own_must_write_adds_nothing() -> None:
    steps = [Step([touch("write", True, interval(0, 32))]), Step([touch("write", False, interval(8, 16))])]
    for order in (steps, steps[::-1]):
        assert summary(fold_kernel(0, 0, order, "ops")) == [("write", True, interval(0, 32))]


def test_only_what_has_surely_ended_hides_a_read() -> None:
    """Launch 2 waits for launch 0 alone; what launch 1 writes may come too late."""
    steps = [
        Step([touch("write", True, interval(0, 8))], frozenset(), 0),
        Step([touch("write", True, interval(8, 16))], frozenset(), 1),
        Step([touch("read", False, interval(0, 16))], frozenset({0}), 2),
    ]
    found = fold_kernel(0, 0, steps, "ops")
    assert [(a.mode, a.boxes, a.launch) for a in found] == [
        ("write", interval(0, 8), 0),
        ("write", interval(8, 16), 1),
        ("read", interval(8, 16), 2),
    ]


def test_a_whole_buffer_swallows_the_boxes_beside_it() -> None:
    step = Step([touch("read", False, interval(0, 8)), touch("read", False, None)])
    assert summary(fold_kernel(0, 0, [step], "ops")) == [("read", False, None)]


boxes = st.builds(
    lambda start, dims, run: Box.of(start, dims, run),
    st.integers(0, 10),
    st.lists(st.tuples(st.integers(2, 3), st.integers(2, 8)), max_size=2),
    st.integers(1, 8),
)
ops = st.lists(
    st.builds(
        lambda kind, found: touch(kind[0], kind[1], tuple(found)),
        st.sampled_from([("read", False), ("write", True), ("write", False)]),
        st.lists(boxes, min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=2,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(ops, min_size=1, max_size=3), min_size=2, max_size=4))
def test_kernels_of_several_ops_keep_every_dependency_of_their_ops(kernels: list[list[list[Touch]]]) -> None:
    """Byte by byte over single ops, who may have written last; pairs of ops in two kernels need an edge."""
    writers: dict[int, set[int]] = defaultdict(set)
    needed: dict[tuple[int, int], set[int]] = defaultdict(set)
    for kernel, steps in enumerate(kernels):
        in_the_end = {
            byte for step in steps for t in step if t.must for byte in bytes_of(t.boxes)
        }  # whatever was there before, nobody sees it unless he reads it
        for step in steps:
            by_kind: dict[tuple[str, bool], set[int]] = defaultdict(set)
            for t in step:
                by_kind[t.mode, t.must] |= bytes_of(t.boxes)
            musts = by_kind["write", True]
            mays = by_kind["write", False] - in_the_end
            for byte in by_kind["read", False] | mays:
                for writer in writers[byte] - {kernel}:
                    needed[writer, kernel].add(byte)
            for byte in mays:
                writers[byte].add(kernel)
            for byte in musts:
                writers[byte] = {kernel}
    accesses = [
        access
        for kernel, steps in enumerate(kernels)
        for access in fold_kernel(0, kernel, [Step(touches) for touches in steps], "ops")
    ]
    raw = {
        (e.source, e.destination): bytes_of(e.boxes)
        for e in find_hazards(accesses, [SIZE], frozenset()).edges
        if e.hazard == "RAW"
    }
    for pair, demanded in needed.items():
        assert demanded <= raw[pair]
    if not any(t.mode == "write" and not t.must for steps in kernels for step in steps for t in step):
        assert raw == needed


@given(st.lists(boxes, max_size=6))
def test_merging_keeps_the_bytes(found: list[Box]) -> None:
    once = merged(found, widen=False)
    assert bytes_of(once) == bytes_of(tuple(found))
    assert len(once) <= len(found)


def test_ragged_reads_are_widened_and_ragged_must_writes_are_not() -> None:
    ragged = [Box.interval(i * i + 3 * i, 1) for i in range(2 * BOXES_LIMIT + 1)]
    assert merged(ragged, widen=True) == interval(0, ragged[-1].high)
    assert bytes_of(merged(ragged, widen=False)) == bytes_of(tuple(ragged))


def test_buffers_inside_one_kernel_vanish_and_outputs_never_do() -> None:
    b = Builder()
    x, inner, y = b.tensor("input", 8, "x"), b.tensor("activation", 8), b.tensor("output", 8, "y")
    b.kernel()
    b.op("aten.exp.default", read(x), write(inner))
    b.op("aten.neg.default", read(inner), write(y))
    trace = b.trace()
    accesses = without_internal(trace, trace.programs[0], fold_ops(trace, trace.programs[0]))
    assert [(a.buffer, a.mode) for a in accesses] == [(0, "read"), (2, "write")]


def test_an_activation_that_another_kernel_reads_stays() -> None:
    b = Builder()
    x, made = b.tensor("input", 8, "x"), b.tensor("activation", 8)
    b.kernel()
    b.op("aten.exp.default", read(x), write(made))
    b.kernel()
    b.op("aten.neg.out", read(made), write(x))
    trace = b.trace()
    accesses = without_internal(trace, trace.programs[0], fold_ops(trace, trace.programs[0]))
    assert [(a.kernel, a.buffer) for a in accesses] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_allocation_writes_nothing() -> None:
    b = Builder()
    fresh = b.tensor("activation", 8)
    b.kernel()
    b.op("aten.empty.memory_format", write(fresh, must=False))
    assert list(op_step(b.trace(), b.ops[0])) == []


def test_rows_of_the_traced_content_never_stand_alone() -> None:
    """The trace says only which rows were written: hazards must assume the whole tensor."""
    b = Builder()
    cache, rows = b.tensor("state", 64, "cache"), interval(0, 16)
    b.kernel()
    b.op("aten.index_copy_.default", write(cache, False, boxes=rows, valid_for="content"))
    found = fold_ops(b.trace(), b.trace().programs[0])
    assert {(a.valid_for, a.must, a.boxes) for a in found} == {
        ("content", False, rows),
        ("shapes", False, interval(0, 128)),
    }


def test_rows_of_the_traced_content_beside_the_general_access_are_kept_as_they_are() -> None:
    b = Builder()
    cache, rows = b.tensor("state", 64, "cache"), interval(0, 16)
    b.kernel()
    by_content = write(cache, False, boxes=rows, valid_for="content")
    b.op("aten.index_copy_.default", write(cache, False), by_content)
    found = fold_ops(b.trace(), b.trace().programs[0])
    assert [(a.valid_for, a.boxes) for a in found] == [("content", rows), ("shapes", interval(0, 128))]


def test_an_empty_view_touches_nothing() -> None:
    b = Builder()
    none = b.tensor("input", 0, "none")
    b.kernel()
    b.op("aten.exp.default", read(none))
    assert fold_ops(b.trace(), b.trace().programs[0]) == []
