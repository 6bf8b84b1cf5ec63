import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tessera_core.profile.silicon import lookup
from tessera_core.profile.silicon.lookup import SiliconFound, asked_of, silicon_rows
from tessera_core.profile.silicon.stacks import BETWEEN_STACKS, COLD_START_US
from tessera_core.profile.times import fields_of
from tessera_core.profile.work import Attention, Product
from tessera_formats.profile import TIMES
from tests.profile.silicon.written import package, product_row, write
from tests.profile.traces import ROWS, WIDTH, tiny_trace, unique_kernels


def table(
    root: Path, gpu: str, framework: str, version: str, times: dict[int, float], dtype: str = "bfloat16"
) -> None:
    """Times by rows of the hand-made trace's product; its width alone is measured."""
    path = root / gpu / "gemm" / framework / version / "gemm_perf.parquet"
    write(path, [product_row(m, WIDTH, WIDTH, time, version, dtype) for m, time in times.items()])


def rows_of(root: Path, types: Iterable[str], dtype: str = "bfloat16") -> SiliconFound:
    trace = tiny_trace()
    kernels = unique_kernels(trace)
    kernels["sig-mm"] = replace(kernels["sig-mm"], dtype=dtype)
    program = replace(trace.programs[0], kernels=(kernels["sig-mm"], *trace.programs[0].kernels[1:]))
    return silicon_rows(replace(trace, programs=(program,)), kernels, tuple(types), package(root))


def test_a_measured_size_gives_the_tables_time_and_says_which(tmp_path: Path) -> None:
    table(tmp_path, "l40s", "vllm", "1.0.0", {1: 3.0, ROWS: 7.0})
    found = rows_of(tmp_path, ["l40s"])
    assert found.missing == ()
    (row,) = found.rows.values()
    assert (row.device_type, row.signature, row.source) == ("l40s", "sig-mm", "silicon")
    assert row.median_us == pytest.approx(7.0) and row.distance == 0
    assert row.table == "aiconfigurator-core 9.9.9, vllm 1.0.0"
    assert row.dtype == "bfloat16" and row.samples == 0
    # Nothing was interpolated: the interval is what another framework's kernel, and cold caches, may differ by.
    assert row.median_us / row.low_us == pytest.approx(math.exp(BETWEEN_STACKS["products"]))
    assert row.high_us == pytest.approx(7.0 * math.exp(BETWEEN_STACKS["products"]) + COLD_START_US)
    TIMES.build([fields_of(row)])


def test_types_are_compared_by_one_framework_where_it_covers_them(tmp_path: Path) -> None:
    table(tmp_path, "l40s", "trtllm", "1.0.0", {ROWS: 1.0})
    for gpu in ("l40s", "h100_sxm"):
        table(tmp_path, gpu, "sglang", "0.5.14", {ROWS: 2.0})
    assert {row.table.split(", ")[1] for row in rows_of(tmp_path, ["l40s", "h100-sxm"]).rows.values()} == {
        "sglang 0.5.14"
    }
    assert {row.table.split(", ")[1] for row in rows_of(tmp_path, ["l40s"]).rows.values()} == {"trtllm 1.0.0"}


def test_the_nearest_version_answers_where_the_common_one_is_missing(tmp_path: Path) -> None:
    for gpu in ("l40s", "h100_sxm", "h200_sxm"):
        table(tmp_path, gpu, "sglang", "0.5.14", {ROWS: 2.0})
    table(tmp_path, "l40s", "sglang", "0.5.20", {ROWS: 9.0})
    for version in ("0.5.9", "0.5.10"):
        table(tmp_path, "a100_sxm", "sglang", version, {ROWS: 3.0})
    found = rows_of(tmp_path, ["l40s", "h100-sxm", "h200-sxm", "a100-80gb"])
    assert {row.device_type: row.table.split()[-1] for row in found.rows.values()} == {
        "l40s": "0.5.14", "h100-sxm": "0.5.14", "h200-sxm": "0.5.14", "a100-80gb": "0.5.10",
    }  # fmt: skip


def test_a_type_that_the_common_framework_lacks_takes_another(tmp_path: Path) -> None:
    for gpu in ("l40s", "h100_sxm"):
        table(tmp_path, gpu, "trtllm", "1.0.0", {ROWS: 2.0})
    table(tmp_path, "a100_sxm", "vllm", "0.14.0", {ROWS: 3.0})
    found = rows_of(tmp_path, ["l40s", "h100-sxm", "a100-80gb"])
    assert found.rows["a100-80gb", "sig-mm"].table.endswith("vllm 0.14.0")
    assert found.rows["l40s", "sig-mm"].table.endswith("trtllm 1.0.0")


def test_a_dtype_per_device_is_looked_up_in_its_own_rows(tmp_path: Path) -> None:
    table(tmp_path, "l40s", "vllm", "1.0.0", {ROWS: 7.0})
    table(tmp_path, "h100_sxm", "vllm", "1.0.0", {ROWS: 3.0}, dtype="fp8")
    found = rows_of(tmp_path, ["l40s", "h100-sxm/dtype=float8", "l40s/dtype=float8"])
    row = found.rows["h100-sxm/dtype=float8", "sig-mm"]
    assert row.median_us == pytest.approx(3.0) and row.dtype == "float8" and "fp8" in row.detail
    assert found.rows["l40s", "sig-mm"].median_us == pytest.approx(7.0)
    (line,) = found.missing
    assert line.startswith("l40s/dtype=float8: no table of products in float8")


@pytest.mark.parametrize(
    ("device_type", "words"),
    [
        ("rtx-4090", "has no tables of it"),
        ("h100-sxm/sm=96", "whole GPUs, not slices"),
        ("l40s/dtype=int3", "know no dtype int3"),
        ("b200-sxm", "no table of products"),
        ("l4", "no table of products"),
    ],
)
def test_what_is_missing_is_one_line_per_type(tmp_path: Path, device_type: str, words: str) -> None:
    table(tmp_path, "l40s", "vllm", "1.0.0", {ROWS: 7.0})
    found = rows_of(tmp_path, [device_type])
    (line,) = found.missing
    assert line.startswith(f"{device_type}: ") and words in line and "\n" not in line
    assert found.rows == {}


def test_a_dtype_without_rows_and_a_size_out_of_reach_say_so(tmp_path: Path) -> None:
    table(tmp_path, "l40s", "vllm", "1.0.0", {ROWS * 8: 7.0, ROWS * 16: 9.0})
    assert rows_of(tmp_path, ["l40s"]).missing == (
        "l40s: no table of products in bfloat16 reaches m 4, n 32, k 32",
    )
    assert rows_of(tmp_path, ["l40s"], dtype="float32").missing == ("l40s: no table of products in float32",)


def test_without_the_package_the_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "find_package", lambda: None)
    trace = tiny_trace()
    found = silicon_rows(trace, unique_kernels(trace), ["l40s"])
    assert found.rows == {}
    assert found.missing == ("l40s: no silicon tables here; run: pip install 'tessera-toolchain[silicon]'",)


def test_attention_is_asked_for_in_the_tables_terms() -> None:
    work = Attention(
        dtype="bfloat16", phase="decode", batch=8, queries=1, context=1024, heads=32, kv_heads=8, head_dim=128,
        window=None,
    )  # fmt: skip
    asked = asked_of(work)
    assert asked is not None and asked.family == "attention-decode"
    assert asked.sizes == {
        "batch": 8, "heads": 32, "kv_heads": 8, "head_dim": 128, "window": 0, "context": 1024,
    }  # fmt: skip
    windowed, wide = (asked_of(replace(work, window=window)) for window in (128, 4096))
    assert windowed is not None and windowed.sizes["window"] == 128
    assert wide is not None and wide.sizes["window"] == 0  # it hides nothing
    latent = asked_of(replace(work, kv_heads=1, head_dim=576, heads=128))
    assert latent is not None and latent.family == "latent-decode"
    part = asked_of(replace(work, phase="prefill", queries=16))
    assert part is not None and part.family is None and "earlier keys" in part.reason
    keys = asked_of(Product(dtype="bfloat16", count=128, m=64, n=512, k=128, weight=True))
    assert keys is not None and (keys.family, keys.sizes) == ("latent-keys", {"heads": 128, "tokens": 64})
    odd = asked_of(Product(dtype="bfloat16", count=1, m=64, n=3420, k=1280, weight=True))
    assert odd is not None and odd.family is None and "16 bytes" in odd.reason
    window = asked_of(Product(dtype="bfloat16", count=1, m=64, n=64, k=64, weight=True, convolution=True))
    assert window is not None and window.family is None and "convolutions" in window.reason
    batched = asked_of(Product(dtype="bfloat16", count=4, m=1, n=8, k=8, weight=True))
    assert batched is not None and batched.family is None
