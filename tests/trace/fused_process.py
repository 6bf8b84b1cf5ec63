"""``python -m tests.trace.fused_process JOB [DTYPE...]``: the fused operators' kernels without a GPU.

JOB is ``interpret``, or an architecture (``90``) to compile for, for the launches of large cases in the dtypes named.

Interpretation patches Triton for a whole process, so that neither job can run in the tests' own. Answers with one
line of JSON on stdout.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.trace.fused_cases import LARGE, SMALL, Case

_GUARD = 64
"""Elements before and after each tensor."""


def main() -> None:
    """Run the job that the command line names."""
    job, *dtypes = sys.argv[1:]
    if job == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
        found: Any = [interpret(case, dtype) for case in SMALL for dtype in (torch.float32, torch.float16)]
    else:
        found = compile_all(int(job), [getattr(torch, dtype) for dtype in dtypes])
    print(json.dumps(found))


def on_cuda(operator: str) -> Callable[..., torch.Tensor]:
    """The function that an operator calls on CUDA."""
    from tessera_core.trace.fused.kernels import attention, convolution, experts, recurrence

    module = next(
        module for module in (attention, convolution, experts, recurrence) if hasattr(module, operator)
    )
    found: Callable[..., torch.Tensor] = getattr(module, operator)
    return found


class Guarded:
    """Tensors with poison before, after and (where they are fresh) inside them."""

    def __init__(self) -> None:
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def empty(self, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor full of NaN, or of a number too large for an index."""
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride))
        poison = float("nan") if dtype.is_floating_point else 1 << 30
        flat = torch.full((extent + 2 * _GUARD,), poison, dtype=dtype)
        found = flat.as_strided(tuple(shape), tuple(stride), _GUARD)
        self.made.append((flat, found))
        return found

    def broken(self) -> bool:
        """Whether anything was written outside the tensors."""
        for flat, inside in self.made:
            kept = torch.ones(flat.shape, dtype=torch.bool)
            kept.as_strided(inside.shape, inside.stride(), _GUARD).fill_(False)
            outside = flat[kept]
            whole = outside.isnan() if flat.dtype.is_floating_point else outside == 1 << 30
            if not whole.all():
                return True
        return False


def interpret(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Errors of a case in Triton's interpreter: relative to the CPU's implementation, and in memory."""
    from tessera_core.trace.fused import operators

    guarded = Guarded()
    expected = case.arguments(dtype)
    given = []
    for value in case.arguments(dtype):
        if isinstance(value, torch.Tensor):
            value = guarded.empty(value.shape, value.stride(), value.dtype).copy_(value)
        given.append(value)

    def new_empty(
        like: torch.Tensor, size: Any, dtype: torch.dtype | None = None, **options: Any
    ) -> torch.Tensor:
        if options:
            # The interpreter's own copies.
            return before(like, size, dtype=dtype, **options)
        shape = (size,) if isinstance(size, int) else size
        return guarded.empty(shape, torch.empty(shape, device="meta").stride(), dtype or like.dtype)

    before = torch.Tensor.new_empty
    torch.Tensor.new_empty = new_empty  # type: ignore[assignment,method-assign]
    try:
        result = on_cuda(case.operator)(*given)
    finally:
        torch.Tensor.new_empty = before  # type: ignore[method-assign]
    wanted = getattr(operators, case.operator)(*expected)
    pairs = [(result, wanted), *((g, e) for g, e in zip(given, expected) if isinstance(e, torch.Tensor))]
    error = 0.0
    for one, other in pairs:
        size = max(float(torch.linalg.vector_norm(other.float())), 1e-30)
        difference = float(torch.linalg.vector_norm(one.float() - other.float())) / size
        error = max(error, difference if difference == difference else float("inf"))
    return {
        "case": case.name,
        "dtype": str(dtype).removeprefix("torch."),
        "error": error,
        "same_layout": result.stride() == wanted.stride() and result.dtype == wanted.dtype,
        "wrote_outside": guarded.broken(),
    }


def compile_all(architecture: int, dtypes: list[torch.dtype]) -> list[dict[str, Any]]:
    """Every distinct launch compiled: kernel and bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(
            (kernel, tuple(_Pointer(a) if isinstance(a, torch.Tensor) else a for a in args), kwargs)
        )

    JITFunction.run = noted
    for case in LARGE:
        for dtype in dtypes:
            on_cuda(case.operator)(*case.arguments(dtype))
    found: dict[str, dict[str, Any]] = {}
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    for kernel, args, kwargs in launches:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialisation, given = bind(*args, **kwargs)
        _, signature, fixed, attributes = kernel._pack_args(backend, given, bound, specialisation, given)
        key = str((kernel.__name__, signature, fixed, attributes, sorted(kwargs.items())))
        if key not in found:
            source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
            made = triton.compile(source, target=target, options=given)
            found[key] = {"kernel": kernel.__name__, "shared_bytes": made.metadata.shared}
    return list(found.values())


class _Pointer:
    """What Triton's specialisation looks at in a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        # As an arena would give it.
        self.address = 4096 + int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        """Its address."""
        return self.address


if __name__ == "__main__":
    main()
