"""One thread: a step's work on other threads would be done and not be recorded, so it is refused.

PyTorch's modes belong to the thread that enters them. What another thread computes would look like a constant, and
what it writes to state would be lost, both without a word.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tessera_core.trace.operators import is_view
from tessera_core.trace.place import calling_place
from tessera_formats.errors import UntracedLaunchError

_recording: list[list[str]] = []  # of the steps that are being recorded: what other threads did meanwhile


@contextlib.contextmanager
def watched_threads() -> Iterator[None]:
    """Let threads that start inside refuse, for as long as they live, to compute while a step is recorded."""
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        run = thread.run

        def watched() -> None:
            # The step's own thread says it; here it would only be printed.
            with contextlib.suppress(UntracedLaunchError), _ElsewhereMode():
                run()

        thread.run = watched  # type: ignore[method-assign]
        start(thread)

    setattr(threading.Thread, "start", starting)  # noqa: B010
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Record a step inside; raises :class:`UntracedLaunchError` where a watched thread has computed meanwhile."""
    noted: list[str] = []
    _recording.append(noted)
    try:
        with watched_threads():
            yield
    except Exception as problem:
        if noted and not isinstance(problem, UntracedLaunchError):
            raise UntracedLaunchError(noted[0]) from problem
        raise
    finally:
        _recording.remove(noted)
    if noted:
        raise UntracedLaunchError(noted[0])


class _ElsewhereMode(TorchDispatchMode):
    """Refuses work on a thread that is not the step's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _recording and func.namespace != "prim" and not is_view(func):
            said = (
                f"{func} at {calling_place()}: runs on a thread of its own, where nothing is recorded; call it on the"
                " thread of the step"
            )
            for noted in _recording:
                noted.append(said)
            raise UntracedLaunchError(said)
        return func(*args, **(kwargs or {}))
