"""Processes of our own hear no Ctrl-C, say nothing, and end with whoever started them."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tessera_core.execute.process import child, start_interpreter

BUSY = """
import sys, time
from tests.execute.test_process import keep_busy
from tessera_core.execute.process import child
with child(keep_busy) as started:
    if sys.argv[1] == "started":
        started.connection.recv()
    print(started.process.pid, flush=True)
    time.sleep(60)
"""


def keep_busy(connection: Connection) -> None:
    connection.send("started")
    time.sleep(60)


def echo(connection: Connection) -> None:
    connection.send(connection.recv())


def test_a_child_calls_one_function_and_is_gone_after_the_block() -> None:
    with child(echo) as started:
        started.connection.send({"a": 1})
        assert started.connection.recv() == {"a": 1}
    assert started.process.returncode is not None


def test_an_interrupt_does_not_reach_an_interpreter_from_its_first_instruction_on() -> None:
    started = start_interpreter("import os, sys; os.write(int(sys.argv[1]), b'up'); sys.stdin.read()")
    os.kill(started.process.pid, signal.SIGINT)
    started.process.wait(20)
    assert started.process.returncode == 0
    started.connection.close()


@pytest.mark.parametrize("moment", ["starting", "started"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_silently_with_its_parent(moment: str, how: signal.Signals) -> None:
    """``SIGINT`` goes to the whole process group, as Ctrl-C in a terminal does."""
    parent = subprocess.Popen(
        [sys.executable, "-c", BUSY, moment],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.killpg(parent.pid, how) if how == signal.SIGINT else os.kill(parent.pid, how)
    _, said = parent.communicate(timeout=20)  # the child holds standard error as long as it lives
    assert said.count(b"Traceback") == (how == signal.SIGINT)  # the parent's own KeyboardInterrupt
    limit = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < limit
        time.sleep(0.02)
