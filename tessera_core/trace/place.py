"""Running the user's code: what it prints and raises, and where in it something happened (the file and line that
an error message names).
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from tessera_formats.errors import ModelError, TesseraError

_TORCH = str(Path(torch.__file__).parent)
_CORE = str(Path(__file__).parent.parent)
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])
_LONGEST = 600
"""Characters of a message that a line keeps."""


@contextlib.contextmanager
def user_code(said: str, advice: str) -> Iterator[None]:
    """Run the user's code inside: what it prints goes to stderr, for stdout is for results.

    Whatever it raises, leaving included, becomes a :class:`ModelError` in one line with its place; errors of ours
    pass through.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except TesseraError:
        raise
    except (Exception, SystemExit) as problem:
        raise ModelError(
            f"{said} raises {one_line(problem)} at {failing_place(problem)}; {advice}"
        ) from problem


def calling_place() -> str:
    """``file:line`` of the innermost frame of the user's code.

    A library's frame (other than PyTorch's and our own) stands in where no frame of the user's is on the
    stack.
    """
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not _ours(file):
            if not any(part in file for part in _LIBRARIES):
                return f"{file}:{frame.f_lineno}"
            library = library or f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return library or "unknown place"


def failing_place(problem: BaseException) -> str:
    """``file:line`` at which an exception of the user's code was raised; of a syntax error, where that is."""
    if isinstance(problem, SyntaxError) and problem.filename and not problem.filename.startswith("<"):
        return f"{problem.filename}:{problem.lineno}"
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if not _ours(f.filename)]
    users = [f for f in frames if not any(part in f.filename for part in _LIBRARIES)]
    chosen = (users or frames)[-1:] or traceback.extract_tb(problem.__traceback__)[-1:]
    return f"{chosen[0].filename}:{chosen[0].lineno}" if chosen else "unknown place"


def one_line(problem: BaseException) -> str:
    """An exception as one line: its class and its message, with the lines joined and a very long one cut."""
    # A syntax error's text repeats its file and line, without the folder.
    message = problem.msg or "" if isinstance(problem, SyntaxError) else str(problem)
    text = " ".join(message.split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST].rstrip()} ..."
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


def _ours(file: str) -> bool:
    if file.startswith((_TORCH, "<")):
        return True
    return file.startswith(_CORE) and "/trace/models/" not in file
