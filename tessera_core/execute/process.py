"""Processes of our own: a fresh interpreter per worker, which Ctrl-C does not reach and which outlives nobody.

Ctrl-C goes to every process of a terminal's foreground group, and what it means is for the controller to decide.
So SIGINT is blocked while a worker is started: the mask is inherited, and holds from the worker's first
instruction on, before it could ask for anything itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

PEER_LOST = 3
"""Exit code of a worker that stops because another worker, or the controller, is gone."""

_SERVE = "import sys; from tessera_core.execute.process import serve; serve(int(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class Child:
    """A process that works for this one, and the near end of the socket to it."""

    process: subprocess.Popen[bytes]
    connection: Connection


def start_interpreter(command: str, pass_fds: Sequence[int] = ()) -> Child:
    """Run ``command`` in a fresh interpreter of one thread; its only argument is the socket's descriptor.

    It finds the same modules as this process and inherits ``pass_fds``, standard error and nothing else. (A fork
    would inherit this process's threads and locks.)
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, interrupts_held():
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", command, str(theirs.fileno())],
            pass_fds=(theirs.fileno(), *pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            },
        )
        return Child(process, Connection(ours.detach()))


@contextlib.contextmanager
def child(function: Callable[..., None], *arguments: Any, pass_fds: Sequence[int] = ()) -> Iterator[Child]:
    """A process that calls ``function(connection, *arguments)``; it is gone when the block ends.

    ``function`` is a module's own. Descriptors among ``arguments`` are plain numbers, passed on by ``pass_fds``.
    """
    with contextlib.ExitStack() as stack:
        with interrupts_held():
            started = start_interpreter(_SERVE, pass_fds)
            stack.callback(_end, started)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # whoever asks it next is told
            started.connection.send((function, arguments))
        yield started


def _end(started: Child) -> None:
    started.process.kill()
    started.process.wait()
    started.connection.close()


def serve(descriptor: int) -> None:
    """The life of a :func:`child`: one call, ended at once and without a word where the other end is gone."""
    connection = Connection(descriptor)
    threading.Thread(target=_leave_with, args=(descriptor,), daemon=True).start()
    try:
        function, arguments = connection.recv()
        function(connection, *arguments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(PEER_LOST)


def _leave_with(descriptor: int) -> None:
    """End this process when the other end of a socket is closed; costs nothing until then."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always told
    poll.poll()
    os._exit(PEER_LOST)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """SIGINT waits until the block ends, and does not exist for processes started in it.

    Whoever starts one also puts it where it will be ended before the block ends. The mask alone would not do here:
    a signal goes to any thread that takes it (a library's, too), and Python then interrupts the main one.
    """
    in_main = threading.current_thread() is threading.main_thread()
    came: list[tuple[int, FrameType | None]] = []
    handler = signal.getsignal(signal.SIGINT) or signal.SIG_DFL
    if in_main:
        signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if in_main:
            signal.signal(signal.SIGINT, handler)
        if came and callable(handler):
            handler(*came[0])
