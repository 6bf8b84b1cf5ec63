"""Unions over targets."""

from tessera_core.deps.graph import Edge, union_of_chains, union_of_edges
from tessera_core.program.boxes import Box


def edge(boxes: tuple[Box, ...] | None, must: bool, evidence: str, destination: int = 1) -> Edge:
    return Edge(
        program=0,
        source=0,
        destination=destination,
        buffer=0,
        hazard="RAW",
        boxes=boxes,
        must=must,
        evidence=evidence,  # type: ignore[arg-type]
    )


A, B = Box.interval(0, 8), Box.interval(16, 8)


def test_an_edge_of_several_targets_takes_in_all_bytes_and_the_weakest_claim() -> None:
    united = union_of_edges(
        [edge((A,), True, "ptx"), edge((A, B), False, "declared"), edge((B,), True, "schema")]
    )
    assert united == (edge((A, B), False, "declared"),)


def test_a_whole_buffer_of_one_target_is_a_whole_buffer_of_all() -> None:
    assert union_of_edges([edge((A,), True, "ptx"), edge(None, False, "ptx")]) == (edge(None, False, "ptx"),)
    assert union_of_edges([edge(None, False, "ptx"), edge((A,), True, "ptx")]) == (edge(None, False, "ptx"),)


def test_edges_come_out_sorted() -> None:
    assert [e.destination for e in union_of_edges([edge((A,), True, "ptx", d) for d in (3, 1, 2)])] == [
        1,
        2,
        3,
    ]


def test_chains_that_share_a_kernel_are_one() -> None:
    assert union_of_chains([(5, 9), (1, 2), (9, 3), (4,), (2, 7)]) == ((1, 2, 7), (3, 5, 9))
    assert union_of_chains([]) == ()
