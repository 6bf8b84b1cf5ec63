import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tessera_core.profile.measure.links import (
    FINE_SIZES_BYTES,
    SIZES_BYTES,
    Line,
    fit_line,
    fit_sizes,
    size_text,
)

RATES = st.floats(10, 1e6)
"""Bytes a microsecond: from 80 Mbit/s to 8 Tbit/s."""


@given(st.floats(0.1, 1000), RATES)
def test_a_fit_recovers_the_line_it_was_drawn_from(intercept_us: float, bytes_per_us: float) -> None:
    line = fit_line(SIZES_BYTES, [intercept_us + size / bytes_per_us for size in SIZES_BYTES])
    for size in SIZES_BYTES:
        assert math.isclose(line.time_us(size), intercept_us + size / bytes_per_us, rel_tol=1e-6)


def test_a_fit_recovers_a_noisy_line_within_the_noise() -> None:
    noise = np.random.default_rng(1).normal(1.0, 0.02, 6000)
    sizes = np.tile(SIZES_BYTES, 1000)
    line = fit_line(list(sizes), list((12.0 + sizes / 30_000) * noise))
    assert math.isclose(line.intercept_us, 12.0, rel_tol=0.02)
    assert math.isclose(line.bytes_per_us, 30_000, rel_tol=0.02)


def test_a_fit_never_gives_a_negative_latency() -> None:
    line = fit_line([1000, 2000, 4000], [0.5, 2.0, 8.0])  # grows faster than a line
    assert line.intercept_us == 0.0
    assert line.bytes_per_us > 0


def drawn(line: Line, sizes: tuple[int, ...], per_size: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Transfers that take exactly what the line says."""
    repeated = np.repeat(sizes, per_size).astype(np.int64)
    return repeated, np.array([line.time_us(int(size)) for size in repeated])


@given(st.floats(0.1, 1000), RATES)
def test_one_regime_is_told_as_one(intercept_us: float, bytes_per_us: float) -> None:
    fit = fit_sizes(*drawn(Line(intercept_us, bytes_per_us), FINE_SIZES_BYTES))
    assert fit.regimes is None
    assert fit.residual < 1e-6
    assert fit.samples == 5 * len(FINE_SIZES_BYTES)


@given(st.floats(1, 100), st.floats(100, 1e5), st.integers(3, len(FINE_SIZES_BYTES) - 3))
def test_two_regimes_are_found_where_they_meet(intercept_us: float, bytes_per_us: float, cut: int) -> None:
    below, above = Line(intercept_us, bytes_per_us), Line(20 * intercept_us + 50, bytes_per_us / 5)
    sizes, times = drawn(below, FINE_SIZES_BYTES)
    _, slower = drawn(above, FINE_SIZES_BYTES)
    times = np.where(sizes >= FINE_SIZES_BYTES[cut], slower, times)
    fit = fit_sizes(sizes, times)
    assume(max(map(abs, fit.residuals)) > 0.1)
    assert fit.regimes is not None and fit.bend_bytes == FINE_SIZES_BYTES[cut]
    assert math.isclose(fit.regimes[0].time_us(4096), below.time_us(4096), rel_tol=1e-6)
    assert math.isclose(fit.regimes[1].time_us(1 << 24), above.time_us(1 << 24), rel_tol=1e-6)
    assert f"above {size_text(fit.bend_bytes)}" not in fit.describe()
    assert f"below {size_text(fit.bend_bytes)}" in fit.describe()


def test_a_few_interrupted_transfers_do_not_move_the_line() -> None:
    sizes, times = drawn(Line(20.0, 5000.0), SIZES_BYTES, 9)
    times[::5] *= 50  # one or two of the nine of each size
    assert fit_sizes(sizes, times).residual < 1e-9


def test_every_size_keeps_its_error() -> None:
    sizes, times = drawn(Line(10.0, 1000.0), SIZES_BYTES)
    times = np.where(sizes == 4096, times * 1.5, times)
    fit = fit_sizes(sizes, times)
    assert fit.sizes_bytes == SIZES_BYTES
    assert fit.residuals[0] < -0.1 < fit.residuals[-1]
    assert "4 KiB" in fit.describe() and "4 MiB" in fit.describe()


@pytest.mark.parametrize(
    ("size", "text"), [(100, "100 B"), (4096, "4 KiB"), (1 << 20, "1 MiB"), (1500, "1500 B")]
)
def test_sizes_read_as_people_write_them(size: int, text: str) -> None:
    assert size_text(size) == text
