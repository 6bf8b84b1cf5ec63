"""Rows that a collector read from L2, as an iteration meets them: no faster than memory, nor unsure beyond it."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.profile.silicon.interpolate import SCATTER, interpolator
from tessera_core.profile.silicon.memory import fetched_us, from_memory, least_us
from tessera_core.profile.silicon.tables import SiliconTable, Source
from tests.profile.silicon.written import package

N = (10240, 12288, 16384, 51200)
SOURCE = Source(
    package=package(Path("nowhere")), device_type="l40s", family="products", framework="x", version="1"
)


def table(times: tuple[float, ...]) -> SiliconTable:
    """64 rows by (4096, N) weights: of 84, 101, 134 and 419 MB, where an L40S caches 96."""
    sizes = {"m": np.full(4, 64), "n": np.array(N), "k": np.full(4, 4096)}
    return SiliconTable(source=SOURCE, dtype="bfloat16", sizes=sizes, time_us=np.array(times))


CACHED = table((130.0, 54.0, 218.0, 662.0))


def test_a_row_that_outran_memory_takes_the_time_of_its_weights() -> None:
    raised = from_memory(CACHED)
    weights = 2 * 12288 * 4096
    assert raised.time_us.tolist() == pytest.approx([130.0, weights / 749e9 * 1e6, 218.0, 662.0])
    asked = {"m": 64, "n": 12288, "k": 4096}
    assert fetched_us(CACHED, asked) == pytest.approx(raised.time_us[1])
    assert least_us(CACHED, asked, "bfloat16", cold=True) == pytest.approx(weights / 864e9 * 1e6)
    computed = 2 * 64 * 12288 * 4096 / 362e12 * 1e6
    assert least_us(CACHED, asked, "bfloat16", cold=False) == pytest.approx(computed)
    assert CACHED.time_us[1] == 54.0  # the published table stays what it is


def test_a_layer_between_a_cached_and_an_uncached_one_is_bounded_by_both() -> None:
    asked = {"m": 64, "n": 14336, "k": 4096}
    found = interpolator(from_memory(CACHED)).at(asked)
    assert found is not None
    assert found.low_us >= 134 * math.exp(-SCATTER) and found.high_us <= 218 * math.exp(SCATTER)
    assert found.high_us / found.low_us < 2


@given(st.lists(st.floats(0.2, 5), min_size=4, max_size=4), st.integers(10241, 51199))
def test_intervals_end_where_the_points_around_do(factors: list[float], n: int) -> None:
    times = tuple(time * factor for time, factor in zip((110.0, 134.0, 218.0, 662.0), factors))
    found = interpolator(table(times)).at({"m": 64, "n": n, "k": 4096})
    assert found is not None and found.low_us <= found.time_us <= found.high_us
    if found.distance > 0:
        around = [times[place] for place in (max(i for i, at in enumerate(N) if at <= n),)]
        around.append(times[min(i for i, at in enumerate(N) if at >= n)])
        assert found.low_us >= min(min(around) * math.exp(-SCATTER), found.time_us) * (1 - 1e-9)
        assert found.high_us <= max(max(around) * math.exp(SCATTER), found.time_us) * (1 + 1e-9)
