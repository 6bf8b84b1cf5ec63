from hypothesis import given
from hypothesis import strategies as st

from tessera_core.program.boxes import Box
from tessera_core.trace.formation import Node, NodeKind, Touch, form_kernels, predecessors

KINDS: tuple[NodeKind, ...] = ("light", "light", "anchor", "writer", "counter")


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    nodes = []
    streams = draw(st.sampled_from([(0,), (0, 1), (0, 1, 2)]))
    for _ in range(draw(st.integers(1, 14))):
        touches = []
        for _ in range(draw(st.integers(0, 3))):
            box = draw(st.sampled_from([None, Box.interval(0, 8), Box.interval(8, 8)]))
            touches.append(Touch(draw(st.integers(0, 6)), box, draw(st.booleans())))
        nodes.append(Node(draw(st.sampled_from(KINDS)), tuple(touches), draw(st.sampled_from(streams))))
    return nodes


def reachable(before: list[set[int]]) -> list[set[int]]:
    """All ancestors of each op."""
    result: list[set[int]] = []
    for earlier in before:
        result.append(set(earlier).union(*(result[o] for o in earlier)))
    return result


def conflicts(nodes: list[Node]) -> set[tuple[int, int]]:
    """Pairs of ops whose order matters, straight from the definition."""
    found = set()
    for later, node in enumerate(nodes):
        for earlier in range(later):
            for one in nodes[earlier].touches:
                for two in node.touches:
                    meet = one.box is None or two.box is None or one.box == two.box
                    if one.buffer == two.buffer and (one.writes or two.writes) and meet:
                        found.add((earlier, later))
    return found


@given(graphs())
def test_order_that_matters_is_kept(nodes: list[Node]) -> None:
    groups = form_kernels(nodes)
    assert sorted(op for group in groups for op in group) == list(range(len(nodes)))
    position = {op: (number, op) for number, group in enumerate(groups) for op in group}
    assert all(position[a] < position[b] for a, b in conflicts(nodes))
    ancestors = reachable(predecessors(nodes))
    assert all(a in ancestors[b] for a, b in conflicts(nodes))


@given(graphs())
def test_no_path_leaves_a_group_and_comes_back(nodes: list[Node]) -> None:
    ancestors = reachable(predecessors(nodes))
    for group in form_kernels(nodes):
        members = set(group)
        for outside in set(range(len(nodes))) - members:
            after_some = any(op in ancestors[outside] for op in members)
            before_some = any(outside in ancestors[op] for op in members)
            assert not (after_some and before_some)


@given(graphs())
def test_anchors_and_state_writers_stand_alone(nodes: list[Node]) -> None:
    for group in form_kernels(nodes):
        kinds = [nodes[op].kind for op in group]
        heavy = [kind for kind in kinds if kind != "light"]
        if "counter" in heavy:
            assert set(kinds) == {"counter"}
        elif "writer" in heavy:
            assert kinds == ["writer"]
        else:
            assert len(heavy) <= 1


@given(graphs())
def test_a_kernel_holds_ops_of_one_stream(nodes: list[Node]) -> None:
    for group in form_kernels(nodes):
        assert len({nodes[op].stream for op in group}) == 1


def test_light_work_between_two_anchors_is_one_kernel() -> None:
    def touch(reads: list[int], writes: int) -> tuple[Touch, ...]:
        return (*(Touch(r, None, False) for r in reads), Touch(writes, None, True))

    nodes = [
        Node("anchor", touch([0], 1)),
        Node("light", touch([1], 2)),
        Node("light", touch([1, 2], 3)),
        Node("anchor", touch([3], 4)),
        Node("light", touch([1, 4], 5)),  # a residual: joins its own run, not the one before the anchor
    ]
    assert form_kernels(nodes) == [(0,), (1, 2), (3,), (4,)]


def test_an_allocation_goes_with_its_first_user_and_counters_together() -> None:
    nodes = [
        Node("light", (Touch(0, None, True),)),
        Node("anchor", (Touch(1, None, False), Touch(0, None, True))),
        Node("counter", (Touch(2, None, True),)),
        Node("anchor", (Touch(0, None, False), Touch(3, None, True))),
        Node("counter", (Touch(4, None, True),)),
    ]
    assert form_kernels(nodes) == [(0, 1), (2, 4), (3,)]
