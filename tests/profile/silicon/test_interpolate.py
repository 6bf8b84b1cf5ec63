import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.profile.silicon.interpolate import interpolator, leave_out, time_at
from tessera_core.profile.silicon.tables import SiliconTable, Source, read_table, sources
from tests.profile.silicon.written import K, M, N, package, product_us, write_products

SOURCE = Source(
    package=package(Path("nowhere")), device_type="l40s", family="products", framework="x", version="1"
)


def table_of(times: dict[tuple[int, int, int], float]) -> SiliconTable:
    rows = sorted(times)
    sizes = {name: np.array([row[index] for row in rows]) for index, name in enumerate(("m", "n", "k"))}
    return SiliconTable(
        source=SOURCE, dtype="bfloat16", sizes=sizes, time_us=np.array([times[row] for row in rows])
    )


GRID = table_of({(m, n, k): product_us(m, n, k) for m in M for n in N for k in K})


@given(st.sampled_from(M), st.sampled_from(N), st.sampled_from(K))
def test_a_measured_point_is_met_exactly(m: int, n: int, k: int) -> None:
    found = time_at(GRID, {"m": m, "n": n, "k": k})
    assert found is not None and found.distance == 0 and not found.continued
    assert found.time_us == pytest.approx(product_us(m, n, k), rel=1e-9)
    assert found.low_us == found.time_us == found.high_us


@given(st.integers(1, 1024), st.integers(256, 4096), st.integers(256, 4096))
def test_a_gpu_on_its_roofline_is_followed_between_points(m: int, n: int, k: int) -> None:
    found = time_at(GRID, {"m": m, "n": n, "k": k})
    assert found is not None
    assert found.low_us <= found.time_us <= found.high_us
    assert found.time_us == pytest.approx(product_us(m, n, k), rel=0.1)
    assert found.distance <= math.log(16) / 2 + 1e-9


@given(st.floats(0.3, 3), st.floats(0.3, 3), st.integers(17, 63))
def test_a_point_lies_between_its_neighbours_shares_of_the_roofline(
    first: float, second: float, m: int
) -> None:
    times = {(a, 256, 256): 5.0 for a in (1, 256, 1024)}
    times |= {(16, 256, 256): 5.0 * first, (64, 256, 256): 5.0 * second}
    ready = interpolator(table_of(times))
    bound = ready.roofline.time_us(
        {"m": np.array([16.0, float(m), 64.0]), "n": np.full(3, 256.0), "k": np.full(3, 256.0)}
    )
    found = ready.at({"m": m, "n": 256, "k": 256})
    assert found is not None
    shares = [5.0 * first / bound[0], 5.0 * second / bound[2]]
    assert min(shares) - 1e-9 <= found.time_us / bound[1] <= max(shares) + 1e-9


@given(st.integers(1, 1023))
def test_times_grow_with_rows_where_the_table_does(m: int) -> None:
    less, more = (time_at(GRID, {"m": rows, "n": 1024, "k": 1024}) for rows in (m, m + 1))
    assert less is not None and more is not None and less.time_us <= more.time_us


def test_outside_the_table_there_is_no_time() -> None:
    assert time_at(GRID, {"m": 64, "n": 128, "k": 1024}) is None  # below
    assert time_at(GRID, {"m": 64, "n": 4096 * 5, "k": 1024}) is None  # too far above
    near = time_at(GRID, {"m": 1024, "n": 4096 * 3, "k": 4096})
    assert near is not None and near.continued
    assert near.distance == pytest.approx(math.log(3))
    assert near.time_us == pytest.approx(product_us(1024, 4096 * 3, 4096), rel=0.1)


def test_a_size_past_the_last_is_refused_where_the_times_have_not_settled() -> None:
    rising = {(m, n, k): product_us(m, n, k) * (3 if n == 4096 else 1) for m in M for n in N for k in K}
    assert time_at(table_of(rising), {"m": 64, "n": 8192, "k": 1024}) is None


def test_a_hole_is_bridged_by_the_next_measured_value() -> None:
    times = {(m, n, k): product_us(m, n, k) for m in M for n in N for k in K if (n, k) != (1024, 1024)}
    found = time_at(table_of(times), {"m": 64, "n": 1024, "k": 1024})
    assert found is not None and found.distance == pytest.approx(math.log(4))
    assert found.time_us == pytest.approx(product_us(64, 1024, 1024), rel=0.1)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["point", "curve"]))
def test_left_out_points_lie_inside_their_intervals_nine_times_in_ten(seed: int, what: str) -> None:
    random = np.random.default_rng(seed)
    widths = [256, 512, 1024, 2048, 4096, 8192]
    rows = [1, 4, 16, 64, 128, 256, 512, 1024, 2048]
    times = {
        (m, n, k): product_us(m, n, k) * math.exp(random.normal(0, 0.05))
        for m in rows for n in widths for k in widths
    }  # fmt: skip
    found = leave_out(table_of(times), 0.2, seed, "point" if what == "point" else "curve")
    assert len(found.predicted) + found.outside > 30
    assert 0.7 <= found.covered <= 1
    assert np.median(found.errors) < 0.1
    assert found.width < 0.5


def test_leaving_out_is_the_same_every_time_and_never_sees_the_points(tmp_path: Path) -> None:
    write_products(tmp_path)
    (source,) = sources(package(tmp_path), "l40s", "products")
    table = read_table(source, "bfloat16")
    assert table is not None
    once, again = leave_out(table, 0.2, 3), leave_out(table, 0.2, 3)
    assert once.predicted.tolist() == again.predicted.tolist()
    held = np.random.default_rng(3).random(len(table)) < 0.2
    spoilt = SiliconTable(
        source=table.source,
        dtype=table.dtype,
        sizes=table.sizes,
        time_us=table.time_us * np.where(held, 9, 1),
    )
    other = leave_out(spoilt, 0.2, 3)
    assert other.predicted.tolist() == once.predicted.tolist()
    assert other.actual.tolist() == pytest.approx((once.actual * 9).tolist())
