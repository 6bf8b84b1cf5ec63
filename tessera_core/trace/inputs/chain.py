"""A recorded iteration without an ExecutionTrace: kernels in the order of their launches.

Nothing is known of dependencies but that order, on one stream or several. So every kernel needs what the one before
it left: one buffer, as large as the largest tensor among that operator's arguments.
"""

from __future__ import annotations

from tessera_core.program.ir import IoBinding
from tessera_core.trace.inputs.builder import (
    Builder,
    RecordedProgram,
    conservative,
    dense_bytes,
    group_bytes,
    shown_arguments,
    shown_tensors,
)
from tessera_core.trace.inputs.iteration import Iteration


def chained(iteration: Iteration) -> RecordedProgram:
    """The kernels in the order of their launches, each needing the one before it."""
    builder = Builder(iteration)
    before = request = builder.whole(builder.buffer("input", 1, "request"))
    for number, group in enumerate(iteration.groups):
        last = number == len(iteration.groups) - 1
        largest = [dense_bytes(dtype or builder.dtype, shape) for dtype, shape in shown_tensors(group)]
        size = max([*largest, group_bytes(group), 1])
        entry = builder.buffer("output" if last else "activation", size, "result" if last else "")
        after = builder.whole(entry)
        operands = (conservative(before, "read"), conservative(after, "write"))
        builder.add(group, "", [a.described() for a in shown_arguments(group)], (before,), (after,), operands)
        before = after
    io = (
        IoBinding(role="input", name="request", tensor=request, feeds=None),
        IoBinding(role="output", name="result", tensor=before, feeds=None),
    )
    return builder.finish(
        io,
        (
            "without an ExecutionTrace nothing says which kernel needs what of which other: each needs the one before"
            " it, and hands on as many bytes as the largest tensor among its arguments",
            "nothing says which tensors are weights or state, so that memory per device is not planned for",
        ),
    )
