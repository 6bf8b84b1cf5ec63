"""What the times of single transfers say of a link: latency and rate, how well the two describe it, and where not.

A plan has one line per link, ``latency + bytes / bandwidth``. The line is fitted to the median of every size in
*relative* error, so that small messages count as much as large ones; the error at each size is kept, and a link that
two lines describe much better (a protocol that changes with the size) says so and where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SIZES_BYTES = tuple(4096 << (2 * step) for step in range(6))
"""4 KiB to 4 MiB, from a small activation to a large one."""

FINE_SIZES_BYTES = tuple(4096 << step for step in range(13))
"""4 KiB to 16 MiB in factors of two, where a protocol may change with the size."""

LEAST_IN_REGIME = 3
"""Sizes that a regime must span: two points lie on a line whatever they are."""

BENT = 0.1
"""One line is off by more than this at some size before a second one is looked for."""

BETTER = 0.5
"""Two regimes are believed where they leave less than this share of the largest error."""


@dataclass(frozen=True, slots=True)
class Line:
    """``intercept_us + bytes / bytes_per_us``."""

    intercept_us: float
    bytes_per_us: float

    def time_us(self, size_bytes: float) -> float:
        """The line's value."""
        return self.intercept_us + size_bytes / self.bytes_per_us

    @property
    def gbit_per_s(self) -> float:
        """The rate of large transfers."""
        return self.bytes_per_us * 8e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFit:
    """The line through the median times of several sizes (ascending), and what it leaves.

    ``regimes``: the lines below and from ``bend_bytes`` on, where they describe the link much better than one.
    """

    line: Line
    sizes_bytes: tuple[int, ...]
    times_us: tuple[float, ...]
    samples: int
    regimes: tuple[Line, Line] | None = None
    bend_bytes: int = 0

    @property
    def residuals(self) -> tuple[float, ...]:
        """Per size: by which share the line is above (or below) the median time."""
        return _residuals(self.line, self.sizes_bytes, self.times_us)

    @property
    def residual(self) -> float:
        """Median size of the relative error."""
        return float(np.median(np.abs(self.residuals)))

    def describe(self) -> str:
        """Median time and error of every size, and the regimes, in words."""
        points = ", ".join(
            f"{size_text(size)} {_time_text(time)} us ({residual:+.0%})"
            for size, time, residual in zip(self.sizes_bytes, self.times_us, self.residuals, strict=True)
        )
        if self.regimes is None:
            return f"median times and the line's error: {points}"
        below, above = (
            f"{_time_text(line.intercept_us)} us and {line.gbit_per_s:,.1f} Gbit/s" for line in self.regimes
        )
        return (
            f"two regimes, {below} below {size_text(self.bend_bytes)}, {above} from there on;"
            f" median times and the single line's error: {points}"
        )


def fit_line(sizes_bytes: Sequence[float], times_us: Sequence[float]) -> Line:
    """The line of least squared *relative* error with an intercept of at least zero.

    Relative, so that small messages count as much as large ones. ``times_us`` are positive; at least two sizes
    differ.
    """
    sizes, times = np.asarray(sizes_bytes, dtype=float), np.asarray(times_us, dtype=float)
    design = np.stack([1 / times, sizes / times], axis=1)
    intercept, slope = np.linalg.lstsq(design, np.ones_like(times), rcond=None)[0]
    if intercept < 0 or slope <= 0:
        column = sizes / times
        intercept, slope = 0.0, float(column.sum() / (column @ column))
    return Line(float(intercept), 1 / float(slope))


def fit_sizes(size_bytes: npt.NDArray[np.int64], time_us: npt.NDArray[np.float64]) -> SizeFit:
    """The fit of single transfers, shapes (transfers,): a line through each size's median, which a few
    interrupted transfers do not move."""
    sizes = [int(size) for size in np.unique(size_bytes)]
    medians = [float(np.median(time_us[size_bytes == size])) for size in sizes]
    line = fit_line(sizes, medians)
    whole = SizeFit(line=line, sizes_bytes=tuple(sizes), times_us=tuple(medians), samples=len(size_bytes))
    return _bent(whole) or whole


def _bent(fit: SizeFit) -> SizeFit | None:
    """The fit with two regimes, cut where they leave least; None where one line does nearly as well."""
    sizes, times = fit.sizes_bytes, fit.times_us
    worst = max(map(abs, fit.residuals))
    cuts = range(LEAST_IN_REGIME, len(sizes) - LEAST_IN_REGIME + 1)
    if worst <= BENT or not cuts:
        return None
    found: list[tuple[float, int, tuple[Line, Line]]] = []
    for cut in cuts:
        lines = fit_line(sizes[:cut], times[:cut]), fit_line(sizes[cut:], times[cut:])
        left = (
            *_residuals(lines[0], sizes[:cut], times[:cut]),
            *_residuals(lines[1], sizes[cut:], times[cut:]),
        )
        found.append((max(map(abs, left)), cut, lines))
    least, cut, lines = min(found, key=lambda item: item[0])
    if least > BETTER * worst:
        return None
    return SizeFit(
        line=fit.line,
        sizes_bytes=sizes,
        times_us=times,
        samples=fit.samples,
        regimes=lines,
        bend_bytes=sizes[cut],
    )


def _residuals(line: Line, sizes: Sequence[int], times: Sequence[float]) -> tuple[float, ...]:
    return tuple(line.time_us(size) / time - 1 for size, time in zip(sizes, times, strict=True))


def _time_text(time_us: float) -> str:
    return f"{time_us:,.1f}" if time_us < 100 else f"{time_us:,.0f}"


def size_text(size_bytes: int) -> str:
    """A size as people write it: 64 KiB, 4 MiB."""
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << power and size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power} {unit}"
    return f"{size_bytes} B"
