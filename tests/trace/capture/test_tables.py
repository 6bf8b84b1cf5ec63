"""From addresses to buffers, from nodes to launches, and from one signature to the rows of all its kernels."""

import dataclasses
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera_core.program.ir import Kernel, Program, Trace
from tessera_core.program.replay import local_buffers
from tessera_core.trace.capture.addresses import (
    AddressBook,
    Interval,
    Lifetime,
    Mark,
    Owned,
    Pointer,
    Scratch,
    intervals,
    lifetimes,
    pointers,
    word_offsets,
)
from tessera_core.trace.capture.graph import RawLaunch, topological, without_empty
from tessera_core.trace.capture.modules import ModuleBook
from tessera_core.trace.capture.reconcile import Ledger, check_launches
from tessera_core.trace.capture.tables import Captured, check_boundary, places, target_tables
from tessera_core.trace.capture.watch import watched
from tessera_formats.errors import UntracedLaunchError

ROOT = Path(__file__).parents[3]
BASE = 0x7F00_0000_0000


def launch(node: int = 0, handle: int = 1, **changes: Any) -> RawLaunch:
    made = RawLaunch(
        node=node,
        kind="kernel",
        function="f",
        handle=handle,
        grid=(1, 1, 1),
        block=(32, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=0,
        cooperative=False,
        parameters=b"",
        layout=(),
    )
    return dataclasses.replace(made, **changes)


def book(**changes: Any) -> AddressBook:
    options: dict[str, Any] = {"given": (), "made": (), "born": (), "standing": (), "foreign": lambda a: None}
    return AddressBook(**{**options, **changes})


def test_empty_nodes_pass_their_order_on() -> None:
    edges = [(0, 1), (1, 2), (2, 3), (1, 4), (0, 5)]
    assert without_empty(edges, {1, 2}) == {(0, 3), (0, 4), (0, 5)}
    assert topological(4, {(3, 0), (0, 1)}) == [2, 3, 0, 1]


def test_lifetimes_follow_the_allocators_log() -> None:
    events = [
        {"action": "alloc", "addr": 100, "size": 10},
        {"action": "segment_alloc", "addr": 0, "size": 999},
        {"action": "free_requested", "addr": 100, "size": 10},
        {"action": "free_completed", "addr": 100, "size": 10},
        {"action": "free_completed", "addr": 5, "size": 10},  # older than the log
        {"action": "alloc", "addr": 100, "size": 20},
    ]
    assert lifetimes(events) == [Lifetime(100, 10, 0, 0), Lifetime(100, 20, 1, None)]


def test_an_address_means_what_lived_while_its_launch_was_made() -> None:
    """The same bytes, first a temporary's and then the result's."""
    born = [Lifetime(BASE, 512, 0, 0), Lifetime(BASE, 1024, 1, None)]
    marks = [
        Mark(0, 0, frozenset()),
        Mark(1, 0, frozenset({7})),
        Mark(1, 1, frozenset({7})),
        Mark(2, 1, frozenset({7, 8})),
    ]
    spans = intervals(marks)
    assert spans == {7: Interval(0, 1), 8: Interval(1, 2)}
    found = book(made=[Owned(BASE, 1024, 3)], born=born)
    assert found.find(BASE + 8, spans[7]) == (None, 0, 8)
    assert found.find(BASE + 8, spans[8]) == (3, None, 8)
    assert found.scratch == [Scratch(BASE, 512, 0, "kernel")]


def test_two_allocations_that_could_be_meant_are_refused_unless_the_last_serves() -> None:
    whole = Interval(0, 2)
    small_first = [Lifetime(BASE, 512, 0, 0), Lifetime(BASE, 1024, 1, None)]
    assert book(born=small_first).find(BASE, whole) == (None, 0, 0)
    large_first = [Lifetime(BASE, 2048, 0, 0), Lifetime(BASE, 1024, 1, None)]
    with pytest.raises(UntracedLaunchError, match="two allocations"):
        book(born=large_first).find(BASE, whole)


def test_scratch_memory_that_a_call_took_in_turns_is_one_piece() -> None:
    """Where nothing of it outlives the call: whatever pointed anywhere in it keeps its distance."""
    born = [Lifetime(BASE, 2048, 0, 0), Lifetime(BASE + 512, 512, 1, 1), Lifetime(BASE + 768, 4096, 2, 2)]
    found = book(born=born)
    whole = Interval(0, 3)
    assert [found.find(BASE + far, whole) for far in (0, 600, 4000)] == [(None, 0, f) for f in (0, 600, 4000)]
    assert [(s.start, s.bytes, s.scope) for s in found.scratch] == [(BASE, 768 + 4096, "kernel")]
    alone = book(born=[*born[:2], Lifetime(BASE + 8192, 512, 2, 2)])
    assert alone.find(BASE + 8192, whole) == (None, 0, 0)


def test_pointers_are_found_inside_structures_and_zeroed() -> None:
    given = [Owned(BASE, 512, 4), Owned(BASE + 4096, 512, 9)]
    outside = BASE + (1 << 30)
    found = book(
        given=given,
        standing=[Lifetime(BASE + 8192, 64, -1, None)],
        foreign=lambda address: (outside, 32) if outside <= address < outside + 32 else None,
    )
    # int, then a structure of two pointers with a count between them, then a pair of pointers.
    block = struct.pack("<i4xQqQQQ", 3, BASE + 16, 1 << 40, BASE + 4096, BASE + 8200, outside)
    offsets = word_offsets(len(block), [(0, 4), (8, 24), (32, 8), (40, 8)])
    assert offsets == [8, 16, 24, 32, 40]
    clean, targets = pointers(block, offsets, found, Interval(0, 0))
    assert clean == struct.pack("<i4xQqQQQ", 3, 0, 1 << 40, 0, 0, 0)
    assert targets == (
        Pointer(8, 4, None, 16),
        Pointer(24, 9, None, 0),
        Pointer(32, None, 0, 8),
        Pointer(40, None, 1, 0),
    )
    assert [s.scope for s in found.scratch] == ["library", "library"]


def test_a_block_without_layout_is_searched_whole() -> None:
    assert word_offsets(20, ()) == [0, 8]
    assert word_offsets(24, [(4, 20)]) == [8, 16]


def test_watching_marks_each_line_and_keeps_what_it_names() -> None:
    """Generated functions are watched, ours are not; the tracing function is put back."""
    import sys

    graph = torch.fx.symbolic_trace(lambda x: (x + 1).mul(2).neg())
    counts = iter(range(1000))
    before = sys.gettrace()
    result, marks, kept = watched(graph, [torch.ones(3)], lambda: Mark(next(counts), 0, frozenset()))
    assert torch.equal(result, torch.full((3,), -4.0))
    assert len(marks) >= 5 and [m.allocated for m in marks] == sorted(m.allocated for m in marks)
    assert {float(t[0]) for t in kept} >= {1.0, 2.0, 4.0, -4.0}
    assert sys.gettrace() is before
    _, marks, kept = watched(lambda x: x + 1, [torch.ones(3)], lambda: Mark(0, 0, frozenset()))
    assert len(marks) == 2 and kept == []


def test_modules_are_known_by_their_normalised_text() -> None:
    text = (ROOT / "fixtures/ptx/rms_norm.sm_90.ptx").read_text()
    modules = ModuleBook()
    modules.add(11, text)
    modules.add(12, text.replace("rms_norm_kernel", "another_name"))
    assert modules.names()[11] == modules.names()[12]
    row = modules.by_handle[11].row("sm_90")
    assert [modules.meet(h, "gemm") for h in (20, 21, 20, 11)] == [
        None,
        modules.names()[21],
        None,
        row["module"],
    ]
    assert modules.by_handle[21].row("sm_90")["language"] == "cubin" and not modules.has_ptx(21)
    assert row["language"] == "ptx" and row["architecture"] == "sm_90" and ".entry" in row["text"]


def repeated(trace: Trace) -> list[Kernel]:
    """Kernels of the most frequent signature of the first program."""
    kernels = trace.programs[0].kernels
    counts = [k.signature for k in kernels]
    best = max(counts, key=counts.count)
    return [k for k in kernels if k.signature == best]


def capture_of(trace: Trace, program: Program, kernel: Kernel) -> Captured:
    """As if one launch pointed to every buffer that the kernel shares with others, and to scratch."""
    local = local_buffers(trace, program)[kernel.id]
    found = [
        Pointer(8 * index, buffer, None, low)
        for index, (buffer, low) in enumerate(places(trace, program, kernel).items())
        if buffer not in local
    ]
    found.append(Pointer(800, None, 0, 64))
    return Captured(
        program=program.id,
        kernel=kernel.id,
        launches=(
            launch(handle=5, parameters=bytes(808), cooperative=True, packed=True),
            launch(kind="memset"),
        ),
        parameters=(bytes(808), bytes(48)),
        pointers=(tuple(found), ()),
        edges=((0, 1),),
        scratch=(Scratch(BASE, 4096, -1, "library"),),
        unread=(),
    )


def test_every_kernel_of_a_signature_gets_the_launches_with_its_own_buffers(
    tracer: Callable[..., Any], toy_step: Callable[..., Any]
) -> None:
    trace = tracer(toy_step).trace
    program = trace.programs[0]
    kernels = repeated(trace)
    assert len(kernels) >= 2
    captured = capture_of(trace, program, kernels[0])
    modules = ModuleBook()
    modules.add(5, (ROOT / "fixtures/ptx/rms_norm.sm_90.ptx").read_text())
    tables = target_tables(trace, [captured], modules.by_handle, "sm_90", {"device": "none"})
    rows = tables["launches"].to_pylist()
    assert [(r["kernel"], r["launch"], r["kind"]) for r in rows] == [
        (k.id, n, kind) for k in kernels for n, kind in enumerate(("kernel", "memset"))
    ]
    for kernel, row in zip(kernels, rows[::2]):
        local = local_buffers(trace, program)[kernel.id]
        mine = {b: low for b, low in places(trace, program, kernel).items() if b not in local}
        assert {r["buffer"]: r["byte_offset"] for r in row["relocations"]} == mine
        assert row["module"] == modules.names()[5]
    assert {r["workspace"] for r in tables["pointers"].to_pylist()} == {0}
    assert tables["workspaces"].to_pylist() == [{"workspace": 0, "bytes": 4096, "scope": "library"}]
    assert tables["launch_edges"].num_rows == len(kernels)
    assert {r["attribute"] for r in tables["launch_attributes"].to_pylist()} == {"cooperative", "packed"}
    assert tables["capture"].to_pylist() == [{"name": "device", "value": "none"}]


def test_the_boundary_is_checked_against_the_schema(
    tracer: Callable[..., Any], toy_step: Callable[..., Any]
) -> None:
    trace = tracer(toy_step).trace
    program = trace.programs[0]
    kernel = repeated(trace)[0]
    full = capture_of(trace, program, kernel).pointers
    assert check_boundary(trace, program, kernel, full) == ()
    op = program.ops[kernel.ops[-1]]
    result = trace.tensors[op.outputs[-1]].buffer
    read = trace.tensors[op.inputs[0]].buffer

    def without(buffer: int) -> Sequence[Sequence[Pointer]]:
        return [[p for p in found if p.buffer != buffer] for found in full]

    with pytest.raises(UntracedLaunchError, match=rf"no launch can write buffer {result}"):
        check_boundary(trace, program, kernel, without(result))
    if len(kernel.ops) == 1:
        assert read in check_boundary(trace, program, kernel, without(read))
    stranger = max(b.id for b in trace.buffers if b.id not in places(trace, program, kernel))
    with pytest.raises(UntracedLaunchError, match=rf"points into buffer {stranger}"):
        check_boundary(trace, program, kernel, [*full, [Pointer(0, stranger, None, 0)]])


def test_a_launch_that_no_recorded_op_explains_is_an_error(
    tracer: Callable[..., Any], toy_step: Callable[..., Any]
) -> None:
    program = tracer(toy_step).trace.programs[0]
    nodes: set[int] = set()
    ledger = Ledger(lambda: frozenset(nodes))
    with ledger.during("aten.mm.default"):
        nodes.add(1)
        with ledger.during("aten.copy_.default"):  # within a call: the call's own
            nodes.add(2)
    with ledger.during("aten.exp2.default"):
        nodes.add(3)
    nodes.add(4)
    assert ledger.owner == {1: "aten.mm.default", 2: "aten.mm.default", 3: "aten.exp2.default"}
    explained = check_launches(program, [launch(1), launch(2)], ledger.owner)
    assert explained.by_op == {"aten.mm.default": 2}
    with pytest.raises(UntracedLaunchError, match=r"exp2.*does not record \(1 .* of 2\).*custom op"):
        check_launches(program, [launch(1), launch(3)], ledger.owner)
    with pytest.raises(UntracedLaunchError, match=r"launch of f: no operator call made it.*custom op"):
        check_launches(program, [launch(4)], ledger.owner)
