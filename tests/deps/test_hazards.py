"""Hazards against an oracle that keeps, for every byte, who may have written it last and who has read it since."""

import time
from collections import defaultdict
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.deps import hazards as hazards_module
from tessera_core.deps.graph import Access, Deps, Edge, transitive_reduction
from tessera_core.deps.hazards import Hazards, find_hazards
from tessera_core.program import boxes as boxes_module
from tessera_core.program.boxes import Box

SIZE = 96


def bytes_of(boxes: tuple[Box, ...] | None) -> set[int]:
    if boxes is None:
        return set(range(SIZE))
    return {byte for box in boxes for low, high in box.intervals() for byte in range(low, high)}


def access(
    kernel: int, mode: str, boxes: tuple[Box, ...] | None, must: bool = False, buffer: int = 0
) -> Access:
    return Access(
        program=0,
        kernel=kernel,
        buffer=buffer,
        mode=mode,  # type: ignore[arg-type]
        must=must,
        boxes=boxes,
        evidence="schema",
        precision="exact" if must else "bounded",
    )


def interval(low: int, high: int) -> tuple[Box, ...]:
    return (Box.interval(low, high - low),)


@st.composite
def some_boxes(draw: st.DrawFn) -> tuple[Box, ...]:
    found = []
    for _ in range(draw(st.integers(1, 2))):
        dims = draw(st.lists(st.tuples(st.integers(2, 4), st.integers(2, 12)), max_size=2))
        run = draw(st.integers(1, 40 if not dims else 6))
        box = Box.of(draw(st.integers(0, 20)), dims, run)
        found.append(Box(box.start, (), box.run) if box.high > SIZE else box)
    return tuple(found)


@st.composite
def programs(draw: st.DrawFn, whole: bool = True) -> list[Access]:
    """Up to seven kernels, each with some reads, must-writes and may-writes of one buffer."""
    found = []
    for kernel in range(draw(st.integers(2, 7))):
        for mode, must in (("read", False), ("write", True), ("write", False)):
            if draw(st.booleans()):
                boxes = draw(some_boxes() | (st.none() if whole and not must else some_boxes()))
                found.append(access(kernel, mode, boxes, must))
    return found


def oracle(accesses: list[Access]) -> dict[tuple[int, int, str], set[int]]:
    """(source, destination, hazard) -> the bytes that demand it."""
    demanded: dict[tuple[int, int, str], set[int]] = defaultdict(set)
    writers: dict[int, set[int]] = defaultdict(set)
    readers: dict[int, set[int]] = defaultdict(set)
    for kernel in sorted({a.kernel for a in accesses}):
        mine = [a for a in accesses if a.kernel == kernel]
        reads = {b for a in mine if a.mode == "read" for b in bytes_of(a.boxes)}
        musts = {b for a in mine if a.must for b in bytes_of(a.boxes)}
        mays = {b for a in mine if a.mode == "write" and not a.must for b in bytes_of(a.boxes)}
        for byte in reads | mays:
            for writer in writers[byte]:
                demanded[writer, kernel, "RAW"].add(byte)
        for byte in musts | mays:
            for writer in writers[byte]:
                demanded[writer, kernel, "WAW"].add(byte)
            for reader in readers[byte]:
                demanded[reader, kernel, "WAR"].add(byte)
        for byte in reads:
            readers[byte].add(kernel)
        for byte in mays:
            writers[byte].add(kernel)
        for byte in musts:
            writers[byte], readers[byte] = {kernel}, set()
    return demanded


def shipped(edges: tuple[Edge, ...]) -> dict[tuple[int, int, str], Edge]:
    return {(e.source, e.destination, e.hazard): e for e in edges}


@settings(max_examples=400, deadline=None)
@given(programs())
def test_every_demanded_byte_has_its_edge_and_no_edge_is_idle(accesses: list[Access]) -> None:
    found = shipped(find_hazards(accesses, [SIZE], frozenset()).edges)
    demanded = oracle(accesses)
    assert found.keys() == demanded.keys()
    for key, edge in found.items():
        assert demanded[key] <= bytes_of(edge.boxes)
        if not any(a.boxes is None for a in accesses if a.kernel in key[:2]):
            assert bytes_of(edge.boxes) == demanded[key]


@settings(max_examples=200, deadline=None)
@given(programs(), st.integers(1, 12), st.integers(1, 4))
def test_past_the_limits_edges_are_spared_never_missed(accesses: list[Access], rows: int, boxes: int) -> None:
    patched = mock.patch.multiple
    with patched(boxes_module, EXACT_ROWS_LIMIT=rows), patched(hazards_module, BOXES_LIMIT=boxes):
        hazards = find_hazards(accesses, [SIZE], frozenset())
    found = shipped(hazards.edges)
    for key, bytes_demanded in oracle(accesses).items():
        assert bytes_demanded <= bytes_of(found[key].boxes)
    check_devices(accesses, hazards, whole=True)
    check_devices(accesses, hazards, whole=False)


@settings(max_examples=400, deadline=None)
@given(programs(), st.booleans())
def test_shipping_by_the_edges_gives_every_read_its_value(accesses: list[Access], whole: bool) -> None:
    check_devices(accesses, find_hazards(accesses, [SIZE], frozenset()), whole)


def check_devices(accesses: list[Access], hazards: Hazards, whole: bool) -> None:
    """Run on as many devices as the chains allow and compare every byte read with a run on one device.

    A device has its own copy of the buffer. Before a kernel runs, each RAW edge brings bytes from the source's
    device: where it is a must, its boxes as they were right after the source; else its boxes (or the whole
    buffer) as they are now. May-writes write every second byte.
    """
    edges, chains = hazards.edges, hazards.chains
    device = {kernel: kernel for kernel in {a.kernel for a in accesses}}
    for chain in chains:
        for kernel in chain:
            device[kernel] = chain[0]
    one: dict[int, tuple[int, int] | None] = dict.fromkeys(range(SIZE))
    many = {name: dict(one) for name in device.values()}
    after: dict[int, dict[int, tuple[int, int] | None]] = {}
    for kernel in sorted(device):
        here = many[device[kernel]]
        for edge in edges:
            if edge.hazard == "RAW" and edge.destination == kernel and device[edge.source] != device[kernel]:
                source = after[edge.source] if edge.must else many[device[edge.source]]
                for byte in bytes_of(None if whole and not edge.must else edge.boxes):
                    here[byte] = source[byte]
        mine = [a for a in accesses if a.kernel == kernel]
        for a in mine:
            if a.needs_content:
                for byte in bytes_of(a.boxes):
                    assert here[byte] == one[byte], (kernel, byte)
        for a in sorted(mine, key=lambda a: a.must):
            if a.mode == "write":
                for byte in bytes_of(a.boxes):
                    if a.must or byte % 2:
                        here[byte] = one[byte] = (kernel, byte)
        after[kernel] = dict(here)


def test_only_a_must_write_kills() -> None:
    first, reader = access(0, "write", interval(0, 64), must=True), access(2, "read", interval(0, 64))
    killed = find_hazards([first, access(1, "write", interval(0, 64), must=True), reader], [64], frozenset())
    assert [(e.source, e.must) for e in killed.edges if e.hazard == "RAW"] == [(1, True)]
    assert killed.chains == ()
    shared = find_hazards([first, access(1, "write", interval(0, 64)), reader], [64], frozenset())
    raw = [(e.source, e.destination, e.must) for e in shared.edges if e.hazard == "RAW"]
    assert raw == [(0, 1, True), (0, 2, False), (1, 2, False)]
    assert shared.chains == ((0, 1),)


def test_a_may_write_to_an_undefined_buffer_reads_nothing() -> None:
    hazards = find_hazards([access(0, "write", None), access(1, "read", interval(0, 8))], [64], frozenset())
    (edge,) = hazards.edges
    assert (edge.hazard, edge.boxes, edge.must) == ("RAW", None, False)
    assert hazards.chains == ()


def test_halves_filled_by_two_kernels_are_shipped_apart() -> None:
    halves = [access(0, "write", interval(0, 32), must=True), access(1, "write", interval(32, 64), must=True)]
    hazards = find_hazards([*halves, access(2, "read", interval(16, 48))], [64], frozenset())
    assert [(e.source, e.boxes, e.must) for e in hazards.edges] == [
        (0, interval(16, 32), True),
        (1, interval(32, 48), True),
    ]
    assert hazards.chains == ()


def test_chains_end_where_the_whole_buffer_is_replaced_and_skip_state() -> None:
    accesses = [
        access(0, "write", interval(0, 64), must=True),
        access(1, "write", interval(0, 8)),
        access(2, "write", interval(0, 64), must=True),
        access(3, "write", interval(8, 64), must=True),
        access(4, "write", interval(0, 64), must=True),
        access(5, "write", None),
    ]
    assert find_hazards(accesses, [64], frozenset()).chains == ((0, 1), (4, 5))
    assert find_hazards(accesses, [64], frozenset({0})).chains == ()


def test_content_accesses_make_no_hazard() -> None:
    rows = Access(
        program=0,
        kernel=0,
        buffer=0,
        mode="write",
        must=True,
        boxes=interval(0, 8),
        evidence="schema",
        precision="exact",
        valid_for="content",
    )
    assert find_hazards([rows, access(1, "read", interval(0, 8))], [64], frozenset()).edges == ()


def test_boxes_of_an_edge_stay_few() -> None:
    """A source whose left-over bytes are ragged gives its own boxes, and may then not be shipped alone."""
    starts = [i * i + 4 * i for i in range(hazards_module.BOXES_LIMIT + 20)]
    size = starts[-1] + 8
    ragged = tuple(Box.interval(start, 2) for start in starts)
    accesses = [
        access(0, "write", (Box.interval(0, size),), must=True),
        access(1, "write", ragged, must=True),
        access(2, "read", (Box.interval(0, size),)),
    ]
    hazards = find_hazards(accesses, [size], frozenset())
    edge = next(e for e in hazards.edges if (e.source, e.destination, e.hazard) == (0, 2, "RAW"))
    assert edge.boxes == (Box.interval(0, size),)
    assert not edge.must
    assert hazards.chains == ((0, 1),)


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda p: p[0] < p[1])))
def test_transitive_reduction_keeps_the_order_and_nothing_more(pairs: set[tuple[int, int]]) -> None:
    def closure(edges: set[tuple[int, int]]) -> set[tuple[int, int]]:
        reach = set(edges)
        for middle in range(10):
            reach |= {(a, c) for a, b in reach if b == middle for b2, c in reach if b2 == middle}
        return reach

    kept = set(transitive_reduction(pairs))
    assert kept <= pairs
    assert closure(kept) == closure(pairs)
    assert all(closure(kept - {pair}) != closure(pairs) for pair in kept)


def test_raw_edges_survive_in_the_graph_when_the_order_is_reduced() -> None:
    accesses = [
        access(0, "write", interval(0, 8), must=True),
        access(1, "read", interval(0, 8)),
        access(1, "write", interval(8, 16), must=True),
        access(2, "read", interval(0, 16)),
    ]
    edges = find_hazards(accesses, [16], frozenset()).edges
    deps = Deps(
        digest="", program_digest="", targets=("ops",), accesses_of={}, edges_of={0: edges}, chains_of={}
    )
    assert [(e.source, e.destination) for e in deps.edges(0)] == [(0, 1), (0, 2), (1, 2)]
    assert deps.ordering(0) == ((0, 1), (1, 2))


def test_kernels_that_share_a_buffer_piece_by_piece_are_not_all_compared() -> None:
    """Time grows with the edges: 4,000 kernels take a second or two, and pair by pair they took minutes."""
    count = 2000
    accesses = [
        Access(
            program=0,
            kernel=phase * count + index,
            buffer=0,
            mode="read" if phase == 1 else "write",
            must=phase != 1,
            boxes=(Box.interval(64 * index, 64),),
            evidence="ptx",
            precision="exact",
        )
        for phase in range(2)
        for index in range(count)
    ]
    start = time.process_time()
    found = find_hazards(accesses, [64 * count], frozenset())
    assert time.process_time() - start < 10
    assert [(e.source, e.destination, e.hazard) for e in found.edges] == [
        (index, count + index, "RAW") for index in range(count)
    ]
