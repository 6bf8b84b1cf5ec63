"""Which buffers the launches of an iteration touch, from the storages that its ExecutionTrace names.

A storage's number is used again once it is freed. So the operator calls are gone through in the order in which they
ended: a result that is no argument's and no callee's is a new storage, whatever its number was before. What is never
born is external: only read, it is taken for a weight; written, for state; in the host's memory, for an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tessera_core.program.ir import ITEM_BYTES
from tessera_core.trace.inputs.execution_trace import Node, StorageView, views_in
from tessera_core.trace.inputs.iteration import Iteration
from tessera_core.trace.inputs.kineto import CpuOp


@dataclass(slots=True, eq=False)
class Life:
    """A storage from its birth (``born_us`` None: before the iteration) until its number is used again.

    ``bytes``: up to the last element that any view of it reaches.
    """

    born_us: float | None
    device: str
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Resolved:
    """An operator call, and the lives that its views lie in, in the order of the node's views."""

    op: CpuOp
    node: Node
    inputs: tuple[Life, ...]
    outputs: tuple[Life, ...]


@dataclass(slots=True)
class Storages:
    """The operator calls of an iteration by record number, resolved against the lives of its storages."""

    calls: dict[int, Resolved] = field(default_factory=dict)

    @classmethod
    def follow(cls, iteration: Iteration, nodes: Mapping[int, Node]) -> Storages:
        """Go through the operator calls in the order in which they ended."""
        self = cls()
        current: dict[int, Life] = {}
        known = [op for op in iteration.ops if op.record in nodes]
        for op in sorted(known, key=lambda op: (op.end_us, -op.start_us)):
            assert op.record is not None
            node = nodes[op.record]
            inputs = tuple(self._life(current, view) for view in views_in(node.inputs))
            outputs = []
            for view in node.outputs:
                life = current.get(view.storage)
                fresh = life is None or (
                    life not in inputs
                    and (life.born_us is None or life.born_us < op.start_us)
                    and bool(node.schema)
                )
                if fresh:
                    life = self._new(current, view, op.end_us)
                assert life is not None
                life.bytes = max(life.bytes, _reach(view))
                outputs.append(life)
            self.calls[op.record] = Resolved(op, node, inputs, tuple(outputs))
        return self

    def _life(self, current: dict[int, Life], view: StorageView) -> Life:
        life = current.get(view.storage) or self._new(current, view, None)
        life.bytes = max(life.bytes, _reach(view))
        return life

    def _new(self, current: dict[int, Life], view: StorageView, born_us: float | None) -> Life:
        life = current[view.storage] = Life(born_us, view.device)
        return life


def _reach(view: StorageView) -> int:
    """Bytes of the storage up to the view's last element."""
    if 0 in view.shape:
        return 0
    last = view.offset + sum((extent - 1) * step for extent, step in zip(view.shape, view.stride))
    return (last + 1) * ITEM_BYTES[view.dtype]
