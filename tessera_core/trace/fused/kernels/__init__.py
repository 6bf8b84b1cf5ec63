"""The fused operators on a CUDA device: Triton kernels, and the functions that launch them.

One tile configuration per kernel and shape, never tuned at run time, and no atomics: the same call makes the
same launches and the same bits. A function allocates what it needs before its first launch and holds it until
it returns, so that a capture can tell its scratch memory apart. Nothing is read on the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def on_cuda(operator: Any, module: str, name: str) -> None:
    """Let a custom operator call ``name`` of ``module`` here on CUDA; Triton is loaded at its first call."""

    def launch(*arguments: Any) -> Any:
        function: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return function(*arguments)

    operator.register_kernel("cuda")(launch)
