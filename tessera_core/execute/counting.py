"""Batches counted for people: how far a run is now and then, and which batches came through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

EVERY_SECONDS = 2.0
"""At most one line of progress in this time: a fast run says little, a slow one does not look dead."""

_NAMED_RANGES = 4


class Counted:
    """Tells how many of ``total`` batches have finished, at the first one and then from time to time."""

    def __init__(self, total: int, progress: Callable[[str], None]) -> None:
        self._total, self._progress = total, progress
        self._finished = 0
        self._due = 0.0

    def one_more(self) -> None:
        """A batch has finished."""
        self._finished += 1
        now = time.monotonic()
        if now >= self._due:
            self._due = now + EVERY_SECONDS
            self._progress(f"batches finished: {self._finished} of {self._total}")


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as few ranges, ascending: ``0-63`` or ``0-3, 7``; the rest beyond some is only counted."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    named = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in found[:_NAMED_RANGES])
    more = sum(b - a + 1 for a, b in found[_NAMED_RANGES:])
    return f"{named} and {more} more" if more else named
