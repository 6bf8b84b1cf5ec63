from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.profile.silicon.tables import read_table, sources
from tessera_formats.errors import InputError
from tests.profile.silicon.written import (
    K,
    M,
    N,
    package,
    product_row,
    product_us,
    write,
    write_products,
)


def test_sources_are_listed_by_framework_and_version(tmp_path: Path) -> None:
    for framework, version in [("vllm", "1.0.0"), ("sglang", "0.5.10"), ("sglang", "0.5.9")]:
        write_products(tmp_path, framework=framework, version=version)
    found = sources(package(tmp_path), "l40s", "products")
    assert [(source.framework, source.version) for source in found] == [
        ("sglang", "0.5.10"), ("sglang", "0.5.9"), ("vllm", "1.0.0"),
    ]  # fmt: skip
    assert found[2].name == "aiconfigurator-core 9.9.9, vllm 1.0.0"
    assert sources(package(tmp_path), "h100-sxm", "products") == ()
    assert sources(package(tmp_path), "rtx-4090", "products") == ()


def test_a_table_is_read_in_microseconds_in_order_of_its_sizes(tmp_path: Path) -> None:
    write_products(tmp_path)
    (source,) = sources(package(tmp_path), "l40s", "products")
    table = read_table(source, "bfloat16")
    assert table is not None
    sizes = list(zip(*(table.sizes[name].tolist() for name in ("m", "n", "k"))))
    assert sizes == sorted((m, n, k) for m in M for n in N for k in K)
    assert table.time_us.tolist() == pytest.approx([product_us(*size) for size in sizes])
    assert read_table(source, "float16") is not None  # tensor cores run it at the rate of bfloat16
    assert read_table(source, "float8") is None
    assert read_table(source, "float32") is None


def test_carried_over_rows_and_times_that_are_none_are_left_out(tmp_path: Path) -> None:
    also = [
        product_row(2, 256, 256, 1.0, "0.9.0"),
        product_row(3, 256, 256, 0.0, "1.0.0"),
        product_row(4, 256, 256, float("nan"), "1.0.0"),
        product_row(5, 256, 256, 7.0, "1.0.0"),
    ]
    write_products(tmp_path, also=also)
    (source,) = sources(package(tmp_path), "l40s", "products")
    table = read_table(source, "bfloat16")
    assert table is not None
    assert sorted(set(table.sizes["m"].tolist())) == sorted([*M, 5])


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=9))
def test_rows_of_one_key_become_their_median(times: list[float]) -> None:
    from tessera_core.profile.silicon.tables import _unique

    sizes = {"m": np.array([4] * len(times) + [1]), "n": np.array([2] * len(times) + [9])}
    found, time_us = _unique(sizes, np.array([*times, 5.0]))
    assert found["m"].tolist() == [1, 4] and found["n"].tolist() == [9, 2]
    assert time_us.tolist() == pytest.approx([5.0, float(np.median(times))])


def test_dtypes_fall_back_to_blockwise_scales(tmp_path: Path) -> None:
    write_products(tmp_path, dtype="fp8_block")
    (source,) = sources(package(tmp_path), "l40s", "products")
    table = read_table(source, "float8")
    assert table is not None and table.dtype == "fp8_block"


def test_a_decoding_step_counts_the_new_position(tmp_path: Path) -> None:
    path = tmp_path / "l40s" / "attention" / "vllm" / "1.0.0" / "generation_attention_perf.parquet"
    row = {
        "version": "1.0.0", "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "batch_size": 8,
        "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "isl": 1, "step": 1023, "latency": 0.01,
    }  # fmt: skip
    write(path, [row, row | {"kv_cache_dtype": "fp8", "step": 5}])
    (source,) = sources(package(tmp_path), "l40s", "attention-decode")
    table = read_table(source, "bfloat16")
    assert table is not None
    assert table.sizes["context"].tolist() == [1024]
    assert table.sizes["window"].tolist() == [0]  # the file has no such column


def test_experts_are_keyed_by_the_width_on_one_device(tmp_path: Path) -> None:
    path = tmp_path / "l40s" / "moe" / "vllm" / "1.0.0" / "moe_perf.parquet"
    row = {
        "version": "1.0.0", "kernel_source": "fused", "moe_dtype": "bfloat16", "num_tokens": 8,
        "hidden_size": 64, "inter_size": 128, "topk": 2, "num_experts": 8, "moe_tp_size": 4, "moe_ep_size": 1,
        "distribution": "power_law_1.01", "latency": 0.01,
    }  # fmt: skip
    others = [{"distribution": "balanced"}, {"moe_ep_size": 2}, {"kernel_source": "fused_nongated"}]
    write(path, [row, *(row | other | {"num_tokens": 9} for other in others)])
    (source,) = sources(package(tmp_path), "l40s", "experts")
    table = read_table(source, "bfloat16")
    assert table is not None
    assert {name: values.tolist() for name, values in table.sizes.items()} == {
        "tokens": [8], "hidden": [64], "intermediate": [32], "experts": [8], "top_k": [2],
    }  # fmt: skip


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_a_bad_table_is_one_line_that_names_it(tmp_path: Path, damage: str) -> None:
    path = write_products(tmp_path)
    if damage == "missing":
        write(path, [{"version": "1.0.0", "gemm_dtype": "bfloat16", "n": 1, "k": 1, "latency": 1.0}])
    else:
        path.write_bytes(path.read_bytes()[:200])
    (source,) = sources(package(tmp_path), "l40s", "products")
    with pytest.raises(InputError) as error:
        read_table(source, "bfloat16")
    message = str(error.value)
    assert str(path) in message and "\n" not in message and "reinstall" in message
    assert damage == "corrupt" or "no column m" in message
