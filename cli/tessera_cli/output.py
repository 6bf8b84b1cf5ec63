"""Where results go: tables or JSON to standard output, progress to standard error on a terminal only.

When the artifact itself goes to standard output (``-o -``), the table moves to standard error, so that a pipe
carries the artifact and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tessera_core.report.facts import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How a command shows what it found. ``artifact``: the ``-o`` that the user gave, if any."""

    json: bool
    artifact: str = ""

    def show(self, facts: Facts) -> None:
        """Print the facts as tables, or as one JSON object."""
        stream = sys.stderr if self.artifact == "-" else sys.stdout
        if self.json:
            import json

            stream.write(json.dumps(facts.as_json(), indent=2, default=str) + "\n")
        else:
            from tessera_core.report.text import render

            stream.write(render(facts))

    def progress(self, line: str) -> None:
        """One line about what is being done, for a person who waits."""
        if sys.stderr.isatty():
            say(line)


@contextlib.contextmanager
def standard_output_of_our_own() -> Iterator[None]:
    """Let only our own output reach standard output while the context is open.

    Libraries in C print to file descriptor 1 as they like (a solver greets), which would spoil an artifact in a
    pipe. So we write through a copy of it, and what else is printed there is dropped.
    """
    try:
        ours = os.dup(1)
    except OSError:  # started with standard output closed: there is nothing to keep clean
        yield
        return
    sys.stdout.flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    before = sys.stdout
    with os.fdopen(ours, "w", encoding="utf-8", errors="replace") as stream:
        sys.stdout = stream
        try:
            yield
        finally:
            sys.stdout = before
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
            os.dup2(ours, 1)


def say(line: str) -> None:
    """One line to standard error, however the text was broken into lines."""
    sys.stderr.write(" ".join(line.split()) + "\n")
    sys.stderr.flush()
