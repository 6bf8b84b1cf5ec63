"""Reading a large JSON object entry by entry, so that a profile of half a gigabyte needs no multiple of that.

The text is decoded by the standard library, one value at a time, from a window that slides over the file.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TextIO

from tessera_formats.errors import InputError

_WINDOW = 1 << 20
_SPACE = " \t\r\n"


def entries(path: Path, arrays: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Each (key, value) of the object that a file holds, and of the named ``arrays`` each (key, element).

    A name that ends in ``.gz`` is decompressed. Text that is not UTF-8 is read with replacement characters: names
    of functions may hold anything. Raises :class:`InputError` for a file that is missing, cut short or not JSON.
    """
    window = _Window(path)
    try:
        with path.open("rb") as raw:
            binary = gzip.GzipFile(fileobj=raw) if path.name.lower().endswith(".gz") else raw
            window.file = io.TextIOWrapper(binary, encoding="utf-8", errors="replace")
            yield from _object(window, arrays)
            window.end()
    except (EOFError, zlib.error) as problem:
        raise window.cut_short() from problem
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(f"{path}: cannot be read ({reason}); check the path") from problem


def _object(window: _Window, arrays: Collection[str]) -> Iterator[tuple[str, Any]]:
    window.expect("{")
    if window.peek() == "}":
        window.expect("}")
        return
    while True:
        key = window.value()
        if not isinstance(key, str):
            raise window.malformed()
        window.expect(":")
        if key in arrays and window.peek() == "[":
            window.expect("[")
            while window.peek() != "]":
                yield key, window.value()
                if window.peek() != "]":
                    window.expect(",")
            window.expect("]")
        else:
            yield key, window.value()
        if window.peek() == "}":
            window.expect("}")
            return
        window.expect(",")


class _Window:
    """The part of the text that is being decoded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: TextIO = io.StringIO()
        self.text, self.position, self.before = "", 0, 0
        self.ended = False
        self.decoder = json.JSONDecoder(strict=False)  # function names may hold control characters

    def peek(self) -> str:
        """The next character that is no space."""
        while True:
            while self.position < len(self.text):
                if self.text[self.position] not in _SPACE:
                    return self.text[self.position]
                self.position += 1
            if not self._more():
                raise self.cut_short()

    def expect(self, character: str) -> None:
        """Step over ``character``."""
        if self.peek() != character:
            raise self.malformed()
        self.position += 1

    def end(self) -> None:
        """Nothing but space may follow: two files in one would be read as the first of them."""
        while True:
            if self.text[self.position :].strip(_SPACE):
                raise self.malformed()
            self.position = len(self.text)
            if not self._more():
                return

    def value(self) -> Any:
        """The next value, stepping over it."""
        self.peek()
        while True:
            try:
                found, end = self.decoder.raw_decode(self.text, self.position)
                if end < len(self.text) or self.ended:  # a number might go on
                    self.position = end
                    return found
            except (ValueError, RecursionError) as problem:
                if self.ended:
                    error = self.cut_short() if self._open_end() else self.malformed()
                    raise error from problem
            self._more()

    def _more(self) -> bool:
        """Double what is left of the window; False at the end of the file."""
        left = self.text[self.position :]
        found = "" if self.ended else self.file.read(max(_WINDOW, len(left)))
        self.before += self.position
        self.text, self.position = left + found, 0
        self.ended = self.ended or not found
        return bool(found)

    def _open_end(self) -> bool:
        """Whether what is left has fewer closing brackets than opening ones."""
        left = self.text[self.position :]
        return left.count("{") + left.count("[") > left.count("}") + left.count("]")

    def cut_short(self) -> InputError:
        """The file ends too early."""
        return InputError(
            f"{self.path}: ends in the middle, after {self.before + self.position} characters; record it again,"
            " or copy the whole file"
        )

    def malformed(self) -> InputError:
        """The file holds something else than JSON."""
        return InputError(
            f"{self.path}: is not the JSON of a profiler (character {self.before + self.position + 1}); pass what"
            " export_chrome_trace wrote"
        )
