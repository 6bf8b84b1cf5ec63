"""Watching a call line by line while it is captured: what was allocated, and which nodes each line made.

Compiled wrappers and generated functions name every temporary they hold; keeping those alive until the capture
ends stops the allocator from handing the same bytes out twice, so that addresses tell buffers apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from tessera_core.trace.capture.addresses import Mark

_GENERATED = "<eval_with_key>"


def watched(
    function: Callable[..., Any], arguments: Sequence[Any], mark: Callable[[], Mark]
) -> tuple[Any, list[Mark], list[torch.Tensor]]:
    """Call ``function``; what it returns, the marks before, within and after it, and the tensors kept alive.

    Code that PyTorch's compiler or ``torch.fx`` generated is marked at each line. The previous trace function
    is put back afterwards.
    """
    marks = [mark()]
    kept: dict[int, torch.Tensor] = {}

    def keep(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            kept.setdefault(id(value), value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                keep(item)

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        for value in list(frame.f_locals.values()):
            keep(value)
        marks.append(mark())
        return line

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        generated = name.startswith(_GENERATED) or (
            frame.f_code.co_name == "call" and "extern_kernels" in frame.f_globals
        )
        return line if generated else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        result = function(*arguments)
    finally:
        sys.settrace(before)
    marks.append(mark())
    return result, marks, list(kept.values())
