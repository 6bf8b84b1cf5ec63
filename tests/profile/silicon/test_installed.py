"""What the installed tables must allow for; skipped where the extra ``silicon`` is not installed."""

from pathlib import Path

import numpy as np
import pytest

from tessera_core.profile.silicon.choice import newest, preferred
from tessera_core.profile.silicon.interpolate import leave_out
from tessera_core.profile.silicon.lookup import SiliconFound, silicon_rows
from tessera_core.profile.silicon.stacks import BETWEEN_STACKS, apart
from tessera_core.profile.silicon.tables import INSTALL, SiliconPackage, find_package
from tessera_core.profile.stage import unique_kernels
from tessera_core.program.store import trace_from_bundle
from tessera_formats.trace import read_trace

INSTALLED = find_package()
pytestmark = pytest.mark.skipif(INSTALLED is None, reason=f"no silicon tables here; run: {INSTALL}")
GPUS = ("a100-80gb", "l40s", "h100-sxm", "h200-sxm", "rtx-pro-6000", "b200-sxm")
CAPTURES = Path(__file__).parents[3] / "fixtures" / "captures"


@pytest.fixture
def package() -> SiliconPackage:
    assert INSTALLED is not None
    return INSTALLED


def looked_up(name: str, types: tuple[str, ...]) -> SiliconFound:
    trace = trace_from_bundle(read_trace(CAPTURES / f"{name}.trace"))
    return silicon_rows(trace, unique_kernels(trace), types)


@pytest.mark.parametrize("gpu", GPUS)
def test_products_are_interpolated_within_four_percent(package: SiliconPackage, gpu: str) -> None:
    table = newest(package, "products", preferred("products")[0], gpu, "bfloat16")
    assert table is not None
    found = leave_out(table, 0.05, 7)
    assert np.median(found.errors) <= 0.04
    assert 0.85 <= found.covered <= 0.97
    assert found.width <= 0.25
    assert found.outside < 0.02 * len(found.actual)


@pytest.mark.parametrize("family", ["attention-prefill", "attention-decode"])
@pytest.mark.parametrize("gpu", GPUS)
def test_attention_is_interpolated_within_four_percent(
    package: SiliconPackage, gpu: str, family: str
) -> None:
    table = newest(package, family, preferred(family)[0], gpu, "bfloat16")
    assert table is not None
    found = leave_out(table, 0.02, 7)
    assert np.median(found.errors) <= 0.04
    assert found.width <= 0.25


@pytest.mark.parametrize(
    "family", sorted(set(BETWEEN_STACKS) - {"convolution-prefill", "convolution-decode"})
)
def test_frameworks_lie_as_far_apart_as_is_reckoned_with(package: SiliconPackage, family: str) -> None:
    measured = []
    for gpu in GPUS:
        first, second = (newest(package, family, name, gpu, "bfloat16") for name in preferred(family)[:2])
        if first is not None and second is not None and (found := apart(first, second)) is not None:
            measured.append(found)
    assert np.median(measured) == pytest.approx(BETWEEN_STACKS[family], rel=0.05)


def test_decoding_is_backed_on_all_six_gpus_but_for_what_streams() -> None:
    found = looked_up("llama-3-8b-4-layers", GPUS)
    assert found.missing == ()
    assert len(found.rows) == 12 * len(GPUS)
    for row in found.rows.values():
        assert 0 < row.low_us <= row.median_us <= row.high_us
        assert row.table.startswith("aiconfigurator-core ")
    by_signature = {signature for _, signature in found.rows}
    for signature in by_signature:  # one framework a kernel, whatever its version
        assert len({found.rows[gpu, signature].table.split(", ")[1].split()[0] for gpu in GPUS}) == 1


def test_times_order_gpus_as_their_bandwidths_do() -> None:
    """Decoding reads 117 MB of weights in the gate projection, more than any of these GPUs caches."""
    found = looked_up("llama-3-8b-4-layers", GPUS)
    trace = trace_from_bundle(read_trace(CAPTURES / "llama-3-8b-4-layers.trace"))
    (gate,) = (k for s, k in unique_kernels(trace).items() if "64x4096x14336" in k.name)
    times = [
        found.rows[gpu, gate.signature].median_us
        for gpu in ("l40s", "a100-80gb", "h100-sxm", "h200-sxm", "b200-sxm")
    ]
    assert times == sorted(times, reverse=True)


def test_a_dtype_that_a_gpu_lacks_is_one_line() -> None:
    found = looked_up("llama-3-8b-4-layers", ("l40s", "l40s/dtype=float8", "a100-80gb/dtype=float8"))
    (line,) = found.missing
    assert line.startswith("a100-80gb/dtype=float8: no table of products in float8")
    halves = [
        found.rows["l40s/dtype=float8", signature].median_us / row.median_us
        for (kind, signature), row in found.rows.items()
        if kind == "l40s" and row.detail.startswith("products") and row.median_us > 100
    ]
    assert halves and 0.4 < np.median(halves) < 0.7
    assert {row.dtype for (kind, _), row in found.rows.items() if kind == "l40s/dtype=float8"} == {
        "float8", "bfloat16",
    }  # fmt: skip
