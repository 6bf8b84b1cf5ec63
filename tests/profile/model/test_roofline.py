import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.catalogue import catalogue
from tessera_core.profile.model.roofline import ModelledTime, interval_factor, roofline_time
from tessera_core.profile.work import POINTWISE_KINDS
from tessera_core.program.ir import Kernel


def modelled_time(kernel: Kernel, device: ModelledDevice) -> ModelledTime:
    """A kernel by its kind, flops and bytes."""
    return roofline_time(
        flops=kernel.flops,
        moved_bytes=kernel.read_bytes + kernel.written_bytes,
        dtype=kernel.dtype,
        matrix=kernel.kind in ("matmul", "attention", "convolution"),
        pointwise=kernel.kind in POINTWISE_KINDS,
        ops=max(1, len(kernel.ops)),
        device=device,
    )


def kernel(
    kind: str = "matmul", flops: int = 0, moved: int = 0, dtype: str = "bfloat16", ops: int = 1
) -> Kernel:
    return Kernel(
        id=0,
        signature="s",
        name="k",
        kind=kind,
        flops=flops,
        read_bytes=moved - moved // 4,
        written_bytes=moved // 4,
        state_writer="none",
        dtype=dtype,
        layer=None,
        ops=tuple(range(ops)),
    )


def test_a_large_product_takes_its_flops_at_the_measured_peak() -> None:
    time = modelled_time(kernel(flops=259 * 10**9, moved=1000), ModelledDevice.of("a100-80gb"))
    assert math.isclose(time.median_us, 1000.0)  # 0.259 TFLOP at 259 TFLOP/s
    assert "compute" in time.detail and "measured peak" in time.detail


def test_a_decode_product_takes_its_bytes_at_the_measured_bandwidth() -> None:
    time = modelled_time(kernel(flops=10**6, moved=1779 * 10**6), ModelledDevice.of("a100-80gb"))
    assert math.isclose(time.median_us, 1000.0)  # 1.779 GB at 1,779 GB/s
    assert "memory" in time.detail


def test_a_tiny_kernel_takes_the_launch_floor() -> None:
    device = ModelledDevice.of("l40s")
    assert modelled_time(kernel("pointwise", 1, 64), device).median_us == device.type.pointwise_floor_us
    assert modelled_time(kernel("matmul", 1, 64), device).median_us == device.type.other_floor_us
    assert "launch floor" in modelled_time(kernel("counter", 0, 8), device).detail


def test_a_fused_kernel_pays_one_floor_on_a_gpu_and_one_per_op_on_a_cpu() -> None:
    gpu, cpu = ModelledDevice.of("l4"), ModelledDevice.of("cpu-1thread")
    small, fused = kernel("pointwise", 1, 64, "float32"), kernel("pointwise", 1, 64, "float32", ops=3)
    assert modelled_time(fused, gpu).median_us == modelled_time(small, gpu).median_us
    assert modelled_time(fused, cpu).median_us == 3 * modelled_time(small, cpu).median_us


def test_without_a_measured_peak_a_share_of_the_datasheet_is_reached() -> None:
    time = modelled_time(kernel(flops=121 * 10**9, moved=0), ModelledDevice.of("l4"))
    assert math.isclose(time.median_us, 1000.0 / catalogue().compute.typical)
    assert "of the datasheet" in time.detail


def test_float32_products_run_without_tensor_cores() -> None:
    device = ModelledDevice.of("a100-80gb")
    fast = modelled_time(kernel(flops=10**12, dtype="bfloat16"), device)
    slow = modelled_time(kernel(flops=10**12, dtype="float32"), device)
    assert math.isclose(slow.median_us / fast.median_us, 259 / (19.5 * catalogue().compute.typical))


def test_pointwise_work_runs_on_vector_units_whatever_its_dtype() -> None:
    device = ModelledDevice.of("h100-sxm")
    times = {
        modelled_time(kernel("pointwise", 10**12, dtype=d), device).median_us for d in ("bfloat16", "float32")
    }
    assert len(times) == 1


def test_bfloat16_on_a_t4_says_that_float16_stands_in() -> None:
    time = modelled_time(kernel(flops=10**12), ModelledDevice.of("t4"))
    assert "bfloat16 as float16" in time.detail
    assert math.isclose(time.median_us, 1e6 / (65 * catalogue().compute.typical))


def test_a_dtype_without_a_rate_says_what_it_was_given() -> None:
    assert (
        "float64 at the float32 rate"
        in modelled_time(kernel(flops=10**12, dtype="float64"), ModelledDevice.of("a100-80gb")).detail
    )


def test_the_interval_is_as_wide_as_rooflines_miss() -> None:
    # A median relative error of 35.8 % is 0.454 standard deviations of the logarithm; 1.645 of them make 2.11.
    assert math.isclose(interval_factor(0.358, 0.0), 2.109, rel_tol=1e-3)
    device = ModelledDevice.of("a100-80gb")
    small = modelled_time(kernel(moved=10**6), device)
    large = modelled_time(kernel(moved=10**9), device)
    assert math.isclose(small.high_us / small.median_us, 2.109, rel_tol=1e-3)
    assert math.isclose(small.median_us / small.low_us, 2.109, rel_tol=1e-3)
    assert 1.5 < large.high_us / large.median_us < 1.9


def test_an_unmeasured_rate_widens_the_interval() -> None:
    known, guessed = ModelledDevice.of("l40s"), ModelledDevice.of("l4")
    work = kernel(flops=10**12)
    first, second = modelled_time(work, known), modelled_time(work, guessed)
    assert second.high_us / second.median_us > first.high_us / first.median_us


@given(
    st.sampled_from(sorted(catalogue().types)),
    st.sampled_from(["matmul", "attention", "pointwise", "reduction", "triton", "counter"]),
    st.integers(0, 10**15),
    st.integers(0, 10**12),
    st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", "int64"]),
)
def test_more_work_never_takes_less_time(name: str, kind: str, flops: int, moved: int, dtype: str) -> None:
    device = ModelledDevice.of(name)
    work = kernel(kind, flops, moved, dtype)
    time = modelled_time(work, device)
    assert 0 < time.low_us <= time.median_us <= time.high_us < math.inf
    for more in (replace(work, flops=2 * flops), replace(work, read_bytes=2 * moved)):
        assert modelled_time(more, device).median_us >= time.median_us


@pytest.mark.parametrize("name", sorted(catalogue().types))
def test_every_type_has_a_float32_rate(name: str) -> None:
    assert ModelledDevice.of(name).compute("float32", matrix=True).per_s > 1e9
