import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.catalogue import catalogue
from tessera_core.profile.model.coefficients import Fits, fits
from tessera_core.profile.model.predict import Reference, modelled_time, nearest
from tessera_core.profile.silicon.tables import find_package
from tessera_core.profile.work import Attention, Experts, Product, Scan, Streaming, Work

WIDE = st.integers(0, 40).map(lambda power: 2**power)
DTYPES = st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", "float8", "int4_wo", "int64"])


def product(m: int = 64, dtype: str = "bfloat16", n: int = 4096, k: int = 4096) -> Product:
    return Product(dtype=dtype, count=1, m=m, n=n, k=k, weight=True)


def reference(name: str, time_us: float, spread: float = 1.05) -> Reference:
    return Reference(
        device=ModelledDevice.of(name),
        time_us=time_us,
        low_us=time_us / spread,
        high_us=time_us * spread,
        source="measured",
    )


@st.composite
def works(draw: st.DrawFn) -> Work:
    dtype, size = draw(DTYPES), lambda: draw(WIDE)
    kind = draw(st.sampled_from(["product", "attention", "experts", "scan", "streaming"]))
    if kind == "product":
        return Product(dtype=dtype, count=size(), m=size(), n=size(), k=size(), weight=draw(st.booleans()))
    if kind == "attention":
        heads = size()
        return Attention(
            dtype=dtype,
            phase=draw(st.sampled_from(["prefill", "decode", "encoder"])),
            batch=size(),
            queries=size(),
            context=size(),
            heads=heads,
            kv_heads=draw(st.sampled_from([1, heads])),
            head_dim=size(),
            window=draw(st.none() | WIDE),
        )
    if kind == "experts":
        count = size()
        return Experts(
            dtype=dtype,
            tokens=size(),
            hidden=size(),
            intermediate=size(),
            experts=count,
            top_k=draw(st.integers(1, count)),
        )
    if kind == "scan":
        return Scan(
            dtype=dtype,
            part=draw(st.sampled_from(["convolution", "recurrence"])),
            phase="prefill",
            batch=size(),
            length=size(),
            channels=size(),
            heads=size(),
            head_dim=size(),
            state=size(),
            groups=size(),
        )
    return Streaming(
        dtype=dtype,
        read_bytes=draw(st.integers(0, 2**50)),
        written_bytes=draw(st.integers(0, 2**50)),
        flops=draw(st.integers(0, 2**60)),
        pointwise=draw(st.booleans()),
        ops=draw(st.integers(1, 50)),
    )


@settings(deadline=None)
@given(works(), st.sampled_from(sorted(catalogue().types)), st.booleans())
def test_every_work_has_a_time_inside_its_interval_everywhere(work: Work, name: str, carried: bool) -> None:
    known = [reference("h100-sxm", 12.0)] if carried else []
    time = modelled_time(work, ModelledDevice.of(name), known, tables=False)
    assert 0 < time.low_us <= time.median_us <= time.high_us < math.inf
    assert time.detail


@given(st.sampled_from(sorted(catalogue().types)), st.integers(0, 2**40), st.integers(0, 2**50))
def test_more_bytes_or_flops_never_take_less(name: str, moved: int, flops: int) -> None:
    def at(moved: int, flops: int) -> float:
        work = Streaming(
            dtype="bfloat16", read_bytes=moved, written_bytes=moved, flops=flops, pointwise=True, ops=1
        )
        return modelled_time(work, ModelledDevice.of(name)).median_us

    device = ModelledDevice.of(name)
    assert at(moved, flops) >= device.floor_us(True, 1)
    assert at(2 * moved, flops) >= at(moved, flops) * (1 - 1e-12)
    assert at(moved, 2 * flops) >= at(moved, flops)


def test_a_slower_reference_makes_the_prediction_slower_and_is_named() -> None:
    device = ModelledDevice.of("l4")
    fast, slow = (
        modelled_time(product(), device, [reference("l40s", time)], tables=False) for time in (20.0, 80.0)
    )
    assert slow.median_us > fast.median_us
    assert "carried from l40s (measured, 80.0 us)" in slow.detail


def test_a_vague_reference_widens_the_interval() -> None:
    device = ModelledDevice.of("l4")
    sure, vague = (
        modelled_time(product(), device, [reference("l40s", 50.0, spread)], tables=False)
        for spread in (1.01, 10.0)
    )
    assert vague.high_us / vague.low_us > sure.high_us / sure.low_us


def test_the_reference_on_the_most_similar_gpu_is_taken() -> None:
    known = [reference("b200-sxm", 1.0), reference("l40s", 1.0)]
    assert nearest(known, ModelledDevice.of("l4"), "bfloat16").device.type.name == "l40s"


def test_intervals_grow_beyond_all_tables() -> None:
    device = ModelledDevice.of("rtx-4090")
    inside, beyond = (modelled_time(product(m=m), device, tables=False) for m in (4096, 2**25))
    assert beyond.high_us / beyond.low_us > inside.high_us / inside.low_us


def test_gpus_without_a_table_take_the_coefficients_of_their_memory() -> None:
    assert "coefficients of l40s, rtx-pro-6000" in modelled_time(product(), ModelledDevice.of("l4")).detail
    own = modelled_time(product(), ModelledDevice.of("l40s"), tables=False)
    assert "of its own sglang 0.5.14 table" in own.detail


def test_narrow_weights_take_less_time_where_few_rows_meet_them() -> None:
    device = ModelledDevice.of("l4")
    wide, narrow = (
        modelled_time(product(m=1, dtype=dtype, n=16384, k=16384), device, tables=False).median_us
        for dtype in ("bfloat16", "int4_wo")
    )
    assert narrow < wide / 2


@pytest.mark.skipif(find_package() is None, reason="the extra silicon is not installed")
def test_points_of_the_gpus_own_table_correct_its_time() -> None:
    device = ModelledDevice.of("l40s")
    corrected, plain = (modelled_time(product(), device, tables=tables) for tables in (True, False))
    assert "corrected by" in corrected.detail and "corrected by" not in plain.detail
    assert corrected.high_us / corrected.low_us < plain.high_us / plain.low_us
    # Where no point is near, nothing is left of the correction.
    far = product(m=2**40, n=2**30, k=2**30)
    without = modelled_time(far, device, tables=False).median_us
    assert modelled_time(far, device).median_us == pytest.approx(without)


def test_every_class_has_a_set_for_both_kinds_of_memory() -> None:
    found: Fits = fits()
    for kind in ("products", "attention-decode", "attention-prefill", "experts"):
        names = {each.name for each in found.sets if each.kind == kind}
        assert {"hbm", "gddr"} <= names
    assert found.package.startswith("aiconfigurator-core ")


@pytest.mark.slow
@pytest.mark.skipif(find_package() is None, reason="the extra silicon is not installed")
@pytest.mark.parametrize(("kind", "gpu"), [("products", "l40s"), ("experts", "h100-sxm")])
def test_the_stored_coefficients_are_those_of_the_tables(kind: str, gpu: str) -> None:
    from benchmarks.predictor.fitting import fit
    from benchmarks.predictor.points import points
    from tessera_core.profile.model.physical import NAMES

    package = find_package()
    assert package is not None
    known = points(package, gpu, kind)
    assert known is not None
    stored = next(each for each in fits().sets if (each.kind, each.name) == (kind, gpu))
    fitted = fit([known])
    for name in NAMES:
        assert getattr(fitted, name) == pytest.approx(getattr(stored.fitted, name), rel=0.02), name


def test_a_search_takes_as_long_as_one_block_needs_for_a_row() -> None:
    h200 = ModelledDevice.of("h200-sxm")
    search = Streaming(
        dtype="int64",
        read_bytes=64 * 262144,
        written_bytes=512,
        flops=0,
        pointwise=False,
        ops=1,
        row_bytes=262144,
    )
    time = modelled_time(search, h200)
    assert time.bound == "chain" and time.median_us == pytest.approx(32, rel=0.1)
    assert time.median_us > 4 * modelled_time(replace(search, row_bytes=0), h200).median_us
    assert modelled_time(replace(search, row_bytes=0, sorts=True), h200).low_us > 5


@pytest.mark.parametrize("name", ["h200-sxm", "l4"])
def test_products_of_an_unusual_kind_are_longer_and_less_sure(name: str) -> None:
    device = ModelledDevice.of(name)
    usual = modelled_time(product(m=1024, n=3424), device)
    for odd in (product(m=1024, n=3420), replace(product(m=1024, n=3424), convolution=True)):
        time = modelled_time(odd, device)
        assert time.median_us > 1.5 * usual.median_us and "times" in time.detail
        assert time.high_us / time.low_us > usual.high_us / usual.low_us
        assert time.low_us < usual.median_us * 1.2  # it may as well take no longer


def test_a_slice_is_less_sure_the_smaller_it_is() -> None:
    kinds = ("h200-sxm", "h200-sxm/sm=96", "h200-sxm/sm=36")
    for work in (
        product(m=1024),
        Streaming(dtype="bfloat16", read_bytes=2**26, written_bytes=2**26, flops=0, pointwise=True, ops=1),
    ):
        times = [modelled_time(work, ModelledDevice.of(kind), tables=False) for kind in kinds]
        spreads = [time.high_us / time.low_us for time in times]
        assert spreads == sorted(spreads) and spreads[0] < spreads[1] < spreads[2]
        assert times[0].median_us < times[1].median_us < times[2].median_us
