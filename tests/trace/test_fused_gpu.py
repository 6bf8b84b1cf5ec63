"""The fused operators' CUDA kernels on a device, against the CPU's implementations, and bit for bit repeatable."""

import pytest
import torch

from tessera_core.program.operators import resolve_operator
from tests.trace.fused_cases import LARGE, SMALL, TOLERANCE, Case

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", (*SMALL, *LARGE), ids=lambda case: case.name)
def test_a_kernel_gives_what_the_cpu_gives(case: Case, dtype: torch.dtype) -> None:
    operator = resolve_operator(f"tessera.{case.operator}.default")
    expected, found, again = case.arguments(dtype), placed(case, dtype), placed(case, dtype)
    results = [(operator(*found), operator(*expected))]
    assert torch.equal(operator(*again), results[0][0])
    # Arguments too: some are state.
    results += [(f, e) for f, e in zip(found, expected) if isinstance(e, torch.Tensor)]
    for one, other in results:
        assert one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
        error = torch.linalg.vector_norm((one.cpu() - other).float())
        assert error <= TOLERANCE[dtype] * torch.linalg.vector_norm(other.float()) + 1e-30


def placed(case: Case, dtype: torch.dtype) -> list[object]:
    """Arguments on the device, in the strides that they have on the CPU."""
    found: list[object] = []
    for value in case.arguments(dtype):
        if isinstance(value, torch.Tensor):
            whole = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
            value = whole.copy_(value)
        found.append(value)
    return found
