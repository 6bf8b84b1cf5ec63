import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.chips import chip_of
from tessera_core.profile.model.coefficients import fits, memory_kind
from tessera_core.profile.model.demand import DEMANDS, Sizes, product_demand
from tessera_core.profile.model.physical import Chip, Coefficients, largest_bound, physical_time

IDEAL = Coefficients(
    compute=1e3,
    memory=1.0,
    cache=1e6,
    capacity=1e-6,
    sharpness=2.0,
    floor_us=3.0,
    chain_us=1e-9,
    border=1e-9,
    blend=50.0,
    round_us=1e-9,
    split_us=1e3,
)
"""No loss anywhere: tiles at the full rate, nothing kept in L2, the largest bound alone counts."""

CHIP = Chip(flops_per_s=100e12, memory_bytes_per_s=1e12, l2_bytes=1e6, multiprocessors=100)
POWERS = st.integers(0, 18).map(lambda power: float(2**power))
SETS = fits().sets


def product(m: float, n: float, k: float) -> Sizes:
    return {"m": np.array([m]), "n": np.array([n]), "k": np.array([k])}


def time_of(sizes: Sizes, chip: Chip = CHIP, fitted: Coefficients = IDEAL, kind: str = "products") -> float:
    return float(physical_time(DEMANDS[kind](sizes, 2), chip, fitted)[0])


def test_an_empty_product_takes_the_floor() -> None:
    assert time_of(product(1, 64, 1)) == pytest.approx(3.0, rel=0.01)


def test_a_decode_product_takes_its_weight_at_the_memory_rate() -> None:
    # 2 * 8192 * 8192 bytes at 1e12 a second are 134.2 us; one row is 33 kB more.
    assert time_of(product(1, 8192, 8192)) == pytest.approx(3 + 134.25, rel=0.01)


def test_whole_waves_of_blocks_take_the_time_of_their_flops_and_the_next_block_a_wave_more() -> None:
    # 10 x 10 tiles of 128 x 128 fill 100 multiprocessors once; smaller tiles would do as well.
    sizes = product(1280, 1280, 65536)
    flops = 2 * 1280 * 1280 * 65536
    assert time_of(sizes) == pytest.approx(3 + flops / 100e12 * 1e6, rel=0.01)
    only_large = replace(IDEAL, border=1e-9)
    demand = product_demand(product(1281, 1280, 65536), 2)
    blocks = demand.blocks[(demand.tile_rows == 128) & (demand.tile_columns == 128) & (demand.splits == 1)]
    assert blocks.item() == 110
    assert time_of(product(1281, 1280, 65536), fitted=only_large) > time_of(sizes)


def test_what_bounds_a_product_is_said() -> None:
    cases = {"launch floor": (1, 64, 64), "memory": (1, 8192, 8192), "compute": (8192, 8192, 8192)}
    for bound, (m, n, k) in cases.items():
        assert largest_bound(product_demand(product(m, n, k), 2), CHIP, IDEAL) == bound


def test_data_that_fit_l2_come_from_there() -> None:
    fitted = replace(IDEAL, capacity=0.5, sharpness=20.0)
    small = product(1, 4096, 4096)  # 34 MB
    assert time_of(small, replace(CHIP, l2_bytes=100e6), fitted) < time_of(small, fitted=fitted)


def test_routed_tokens_touch_experts_once() -> None:
    sizes = {"hidden": 1024, "intermediate": 1024, "experts": 64, "top_k": 2}
    columns = {name: np.array([float(size)]) for name, size in sizes.items()}
    each = 3 * 1024 * 1024 * 2
    one = DEMANDS["experts"](columns | {"tokens": np.array([1.0])}, 2)
    many = DEMANDS["experts"](columns | {"tokens": np.array([1e6])}, 2)
    assert one.data_bytes.item() == pytest.approx(2 * each, rel=0.02)
    weights = many.data_bytes.item() - 2 * 2 * 2e6 * 2048
    assert weights == pytest.approx(64 * each, rel=0.02)


@given(st.sampled_from([s for s in SETS if s.kind == "products"]), POWERS, POWERS, POWERS, st.booleans())
def test_more_of_a_product_never_takes_less(
    fitted_set: object, m: float, n: float, k: float, l4: bool
) -> None:
    chip = chip_of(ModelledDevice.of("l4" if l4 else "b200-sxm"), "bfloat16")
    fitted = fitted_set.fitted  # type: ignore[attr-defined]
    time = time_of(product(m, n, k), chip, fitted)
    assert fitted.floor_us <= time < math.inf
    for more in (product(2 * m, n, k), product(m, 2 * n, k), product(m, n, 2 * k)):
        assert time_of(more, chip, fitted) >= time * (1 - 1e-12)


@given(
    st.sampled_from([s for s in SETS if s.kind == "attention-decode"]),
    POWERS,
    st.integers(0, 7).map(lambda power: 2.0**power),
    POWERS,
)
def test_longer_caches_and_more_sequences_never_take_less(
    fitted_set: object, batch: float, kv_heads: float, context: float
) -> None:
    fitted = fitted_set.fitted  # type: ignore[attr-defined]

    def at(**changed: float) -> float:
        sizes = {
            "batch": batch,
            "heads": 4 * kv_heads,
            "kv_heads": kv_heads,
            "head_dim": 128,
            "window": 0,
            "context": context,
        } | changed
        columns = {name: np.array([float(size)]) for name, size in sizes.items()}
        return time_of(
            columns, chip_of(ModelledDevice.of("a100-80gb"), "bfloat16"), fitted, "attention-decode"
        )

    assert 0 < at() <= at(batch=2 * batch) < math.inf
    assert at() <= at(context=2 * context) < math.inf


@pytest.mark.parametrize("share", [0.12, 0.27, 0.73])
def test_a_slice_is_slower_than_its_whole(share: float) -> None:
    whole = chip_of(ModelledDevice.of("h200-sxm"), "bfloat16")
    part = replace(
        whole,
        multiprocessors=round(whole.multiprocessors * share),
        flops_per_s=whole.flops_per_s * share,
        memory_bytes_per_s=whole.memory_bytes_per_s * share**0.8,
    )
    for fitted_set in SETS:
        if fitted_set.kind == "products":
            for m in (1, 64, 4096):
                sizes = product(m, 4096, 4096)
                assert time_of(sizes, part, fitted_set.fitted) > time_of(sizes, whole, fitted_set.fitted)


@pytest.mark.parametrize(
    ("name", "memory"),
    [("l40s", "gddr"), ("rtx-pro-6000", "gddr"), ("l4", "gddr"), ("t4", "gddr"), ("rtx-4090", "gddr")]
    + [(name, "hbm") for name in ("a100-80gb", "h100-sxm", "h200-sxm", "b200-sxm")],
)
def test_kinds_of_memory_are_told_apart(name: str, memory: str) -> None:
    assert memory_kind(chip_of(ModelledDevice.of(name), "bfloat16")) == memory
