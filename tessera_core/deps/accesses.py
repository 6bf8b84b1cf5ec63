"""From what each op (or launch) touches to what each kernel touches, as the rest of the program sees it.

Inside a kernel its steps run in order, so that what it certainly wrote itself is not read from outside, and
buffers that no other kernel sees vanish. What is not known is the whole buffer, never a guess.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera_core.deps.graph import Access, Precision
from tessera_core.program.boxes import Box, ByteSet, covers, may_overlap
from tessera_core.program.ir import Evidence, Mode, Op, Program, Trace, ValidFor
from tessera_formats.deps import OPS_TARGET

BOXES_LIMIT = 64
"""Boxes that one access or edge may carry. Beyond it, what may be touched is widened to its bounds, so that an
artifact stays small; no launch of the catalogue's models needs more than four."""

PRIVATE_KINDS = ("activation", "workspace")
"""Buffers that nobody outside the program sees, so that they may vanish inside one kernel."""

ALLOCATION_PREFIXES = ("aten.empty", "aten.new_empty")
"""Targets that only allocate. Allocation is birth: nothing is written, whatever their schema may say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """One access of one step (an op or a launch) of a kernel; fields as in :class:`Access`."""

    buffer: int
    mode: Mode
    must: bool
    boxes: tuple[Box, ...] | None
    evidence: Evidence
    precision: Precision
    valid_for: ValidFor = "shapes"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What one op or launch touches; its reads come before its writes.

    ``after``: places in the kernel's list of the steps that have surely ended before this one starts; None: all
    earlier ones. ``launch``: number of the launch within the kernel, None for an op.
    """

    touches: Sequence[Touch]
    after: frozenset[int] | None = None
    launch: int | None = None


def fold_ops(trace: Trace, program: Program) -> list[Access]:
    """Accesses of a program's kernels by schema and declaration: target ``ops``, good for every build.

    Buffers that are internal to one kernel are still there: see :func:`without_internal`.
    """
    return [
        access
        for kernel in program.kernels
        for access in fold_kernel(
            program.id, kernel.id, [Step(op_step(trace, program.ops[op])) for op in kernel.ops], OPS_TARGET
        )
    ]


def op_step(trace: Trace, op: Op) -> Sequence[Touch]:
    """What an op touches by its recorded operands.

    An operand whose boxes hold for the traced content only is joined by one for its whole tensor, where the
    trace has none: hazards never rest on content.
    """
    if op.target.startswith(ALLOCATION_PREFIXES):
        return ()
    touches: list[Touch] = []
    general = {(o.tensor, o.mode) for o in op.operands if o.valid_for == "shapes"}
    for operand in op.operands:
        tensor = trace.tensors[operand.tensor]
        box = tensor.box()
        whole_tensor = () if box is None else (box,)
        by_content = operand.valid_for == "content"
        if operand.evidence == "conservative":
            # An op that nobody has described may reach the whole storage of a tensor that it is given.
            touches.append(
                Touch(
                    buffer=tensor.buffer,
                    mode=operand.mode,
                    must=False,
                    boxes=None,
                    evidence="conservative",
                    precision="fallback",
                    detail=f"{op.target}: no schema or declaration says what it touches",
                )
            )
            continue
        must = operand.must and operand.mode == "write"
        if by_content and (operand.tensor, operand.mode) not in general:
            touches.append(
                Touch(
                    buffer=tensor.buffer,
                    mode=operand.mode,
                    must=False,
                    boxes=whole_tensor,
                    evidence=operand.evidence,
                    precision="bounded",
                )
            )
        touches.append(
            Touch(
                buffer=tensor.buffer,
                mode=operand.mode,
                must=must,
                boxes=whole_tensor if operand.boxes is None else operand.boxes,
                evidence=operand.evidence,
                precision="exact" if must else "bounded",
                valid_for=operand.valid_for,
            )
        )
    return touches


def fold_kernel(program: int, kernel: int, steps: Sequence[Step], target: str) -> list[Access]:
    """Accesses of a kernel that makes ``steps``: what it certainly wrote before is not read from outside, and what
    it certainly writes at all needs no mention as a perhaps."""
    filled: list[dict[int, list[Box]]] = []
    in_the_end: dict[int, list[Box]] = defaultdict(list)
    for step in steps:
        mine: dict[int, list[Box]] = defaultdict(list)
        for touch in step.touches:
            if touch.must and touch.valid_for == "shapes" and touch.boxes is not None:
                mine[touch.buffer].extend(touch.boxes)
                in_the_end[touch.buffer].extend(touch.boxes)
        filled.append(mine)
    kept: dict[tuple[Touch, int | None], list[Box] | None] = {}  # by everything except the boxes
    for index, step in enumerate(steps):
        before = range(index) if step.after is None else sorted(step.after)
        for touch in step.touches:
            boxes = touch.boxes
            if touch.valid_for == "shapes" and boxes is not None and not touch.must:
                if touch.mode == "read":
                    known = [box for earlier in before for box in filled[earlier].get(touch.buffer, ())]
                else:
                    known = in_the_end[touch.buffer]
                boxes = _outside(boxes, known)
            if boxes == ():
                continue
            key = replace(touch, boxes=None), step.launch
            earlier_boxes = kept.setdefault(key, [])
            if boxes is None or earlier_boxes is None:
                kept[key] = None
            else:
                earlier_boxes.extend(boxes)
    accesses = [
        Access(
            program=program,
            kernel=kernel,
            buffer=key.buffer,
            mode=key.mode,
            must=key.must,
            boxes=None if boxes is None else merged(boxes, widen=not key.must),
            evidence=key.evidence,
            precision=key.precision,
            valid_for=key.valid_for,
            detail=key.detail,
            target=target,
            launch=launch,
        )
        for (key, launch), boxes in kept.items()
    ]
    return sorted(accesses, key=_order)


def without_internal(trace: Trace, program: Program, accesses: Sequence[Access]) -> list[Access]:
    """Drop the accesses to private buffers that a single kernel fills and uses."""
    bound = {trace.tensors[binding.tensor].buffer for binding in program.io}
    users: dict[int, set[int]] = defaultdict(set)
    for access in accesses:
        users[access.buffer].add(access.kernel)
    internal = {
        access.buffer
        for access in accesses
        if access.mode == "write"
        and len(users[access.buffer]) == 1
        and access.buffer not in bound
        and trace.buffers[access.buffer].kind in PRIVATE_KINDS
    }
    return [access for access in accesses if access.buffer not in internal]


def merged(boxes: Sequence[Box], *, widen: bool) -> tuple[Box, ...]:
    """The union of boxes as fewer ones, ascending: repeated and covered ones go, neighbouring intervals join.

    ``widen``: past ``BOXES_LIMIT`` the result may grow to the bounds of all.
    """
    unique = list(dict.fromkeys(boxes))
    if len(unique) > 1:
        union = ByteSet.of(unique)
        folded = None if union is None else union.to_boxes(min(BOXES_LIMIT, len(unique) - 1))
        if folded is not None:
            unique = list(folded)
        elif len(unique) <= BOXES_LIMIT:
            unique = [
                box for i, box in enumerate(unique) if not covers([*unique[:i]], box)
            ]  # by earlier ones only, so that of two equal sets one stays
    if widen and len(unique) > BOXES_LIMIT:
        low = min(box.low for box in unique)
        return (Box.interval(low, max(box.high for box in unique) - low),)
    return tuple(sorted(unique, key=lambda box: (box.start, box.dims, box.run)))


def _outside(boxes: Sequence[Box], written: Sequence[Box]) -> tuple[Box, ...]:
    """What of ``boxes`` is not certainly written: exact where that is a few boxes, else whole boxes."""
    if not written:
        return tuple(boxes)
    left: list[Box] = []
    for box in boxes:
        touching = [other for other in written if may_overlap(other, box)]
        if not touching:
            left.append(box)
            continue
        if covers(touching, box):
            continue
        mine, theirs = ByteSet.of([box]), ByteSet.of(touching)
        rest = None if mine is None or theirs is None else (mine - theirs).to_boxes(BOXES_LIMIT)
        left.extend((box,) if rest is None else rest)
    return tuple(left)


def _order(access: Access) -> tuple[int, int, str, bool, str, str, str, str]:
    return (
        access.buffer,
        -1 if access.launch is None else access.launch,
        access.mode,
        access.must,
        access.evidence,
        access.precision,
        access.valid_for,
        access.detail,
    )
