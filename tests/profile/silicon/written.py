"""Small tables in the layout of the published package, with times of a formula that tests know."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from tessera_core.profile.silicon.tables import SiliconPackage

M, N, K = (1, 16, 64, 256, 1024), (256, 1024, 4096), (256, 1024, 4096)
"""Sizes of the products that :func:`write_products` writes."""


def package(root: Path) -> SiliconPackage:
    """An installed set of tables at ``root``."""
    return SiliconPackage(root, "9.9.9")


def product_us(m: int, n: int, k: int) -> float:
    """A GPU that reaches its roofline exactly: 2 us, 100 TFLOP/s and 1 TB/s."""
    return 2 + 2 * m * n * k / 100e6 + 2 * (m * n + n * k + m * k) / 1e6


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One Parquet file of ``rows``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)


def product_row(
    m: int, n: int, k: int, time_us: float, version: str, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """A row of a product's table."""
    return {
        "framework": "X",
        "version": version,
        "gemm_dtype": dtype,
        "m": m,
        "n": n,
        "k": k,
        "latency": time_us / 1e3,
    }


def write_products(
    root: Path,
    gpu: str = "l40s",
    framework: str = "vllm",
    version: str = "1.0.0",
    time_us: Callable[[int, int, int], float] = product_us,
    m: Iterable[int] = M,
    dtype: str = "bfloat16",
    also: Iterable[Mapping[str, Any]] = (),
) -> Path:
    """A table of products over ``m``, :data:`N` and :data:`K`, and the rows of ``also``."""
    path = root / gpu / "gemm" / framework / version / "gemm_perf.parquet"
    rows = [product_row(a, b, c, time_us(a, b, c), version, dtype) for a in m for b in N for c in K]
    write(path, [*rows, *also])
    return path
