"""What the capture benchmark captures: every kernel of every subject is a function that a CUDA device would take."""

import pytest

from benchmarks.capture.subjects import SUBJECTS, Subject
from tessera_core.program.ir import Kernel, Program, Trace
from tessera_core.trace.capture.session import Session
from tessera_core.trace.capture.stage import first_of_each_signature

# One of each structure; in bfloat16 a norm's statistics are float32 on CUDA alone.
QUICK = ("deepseek-tiny", "stable-diffusion-3.5-medium-2-layers")
CHOSEN = [
    pytest.param(found, marks=() if found.name in QUICK else pytest.mark.slow, id=found.name)
    for found in SUBJECTS
]


def signatures(subject: Subject) -> tuple[Trace, list[tuple[Program, Kernel]]]:
    pytest.importorskip("diffusers" if "diffusion" in subject.name else "transformers")
    trace = subject.trace()
    return trace, first_of_each_signature(trace)


@pytest.mark.parametrize("subject", CHOSEN)
def test_every_kernel_is_a_function_for_cuda(subject: Subject) -> None:
    """Shapes, strides and dtypes come out as recorded where a CUDA device makes them; no device is needed."""
    trace, kernels = signatures(subject)
    session = Session(trace=trace, device="cuda")
    for program, kernel in kernels:
        group = session.group(program, kernel.id)
        assert group.inputs
        made = {trace.tensors[tensor].buffer for tensor in group.results}
        given = {trace.tensors[tensor].buffer for tensor in group.inputs}
        assert not made & given


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if s.name == "deepseek-tiny"], ids=["deepseek-tiny"])
def test_arguments_are_filled_also_where_they_are_expanded(subject: Subject) -> None:
    trace, kernels = signatures(subject)
    session = Session(trace=trace, device="cpu", compiled=False)
    expanded = 0
    for program, kernel in kernels:
        group = session.group(program, kernel.id)
        memory, given = session._memory(group)
        for view in group.arguments(memory):
            expanded += any(step == 0 and n > 1 for n, step in zip(view.shape, view.stride()))
            assert not view.is_floating_point() or view.abs().max() > 0
        group.function(*group.arguments(memory))
        assert {owned.buffer for owned in given} == {trace.tensors[t].buffer for t in group.inputs}
    assert expanded
