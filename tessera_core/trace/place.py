"""Where in the user's code something happened: the file and line that an error message names."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_CORE = str(Path(__file__).parent.parent)
_LIBRARIES = ("site-packages", "dist-packages")


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
    """``file:line`` at which an exception of the user's code was raised."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if not _ours(f.filename)]
    users = [f for f in frames if not any(part in f.filename for part in _LIBRARIES)]
    chosen = (users or frames)[-1:] or traceback.extract_tb(problem.__traceback__)[-1:]
    return f"{chosen[0].filename}:{chosen[0].lineno}" if chosen else "unknown place"


def one_line(problem: BaseException) -> str:
    """An exception as one line: its class and the first line of its message."""
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0].strip()}" if text else type(problem).__name__


def _ours(file: str) -> bool:
    if file.startswith((_TORCH, "<")):
        return True
    return file.startswith(_CORE) and "/trace/models/" not in file
