"""Published tables where pip put them: which there are for a GPU, and one of them as NumPy columns.

The package (extra ``silicon``) is data to us. It is found by its place and never imported: importing it would load a
data-frame library and an estimator that nothing here needs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from tessera_core.profile.silicon.families import FAMILIES, TABLE_DTYPES, Columns, Family
from tessera_formats.errors import InputError

DISTRIBUTION = "aiconfigurator-core"
INSTALL = "pip install 'tessera-toolchain[silicon]'"
"""What makes the tables available."""

GPU_FOLDERS: Mapping[str, str] = {
    "a100-80gb": "a100_sxm",
    "l40s": "l40s",
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "rtx-pro-6000": "rtx_pro_6000_server",
    "b200-sxm": "b200_sxm",
    "l4": "l4",
}
"""Catalogued device types -> the package's names of them. Its l4 folder holds no tables yet."""

US_PER_MS = 1e3


@dataclass(frozen=True, slots=True)
class SiliconPackage:
    """An installed set of tables: the folder of GPUs, and the distribution's version."""

    root: Path
    version: str

    @property
    def name(self) -> str:
        """Name and version, as rows quote it."""
        return f"{DISTRIBUTION} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One table file: the times of a family on a GPU under one version of a serving framework."""

    package: SiliconPackage
    device_type: str
    family: str
    framework: str
    version: str

    @property
    def path(self) -> Path:
        """The Parquet file."""
        family = FAMILIES[self.family]
        folder = self.package.root / GPU_FOLDERS[self.device_type] / family.folder
        return folder / self.framework / self.version / family.file

    @property
    def name(self) -> str:
        """Package, framework and their versions: what rows give as their table."""
        return f"{self.package.name}, {self.framework} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiliconTable:
    """A family's times at one precision. ``sizes``: the key columns, one row each, all of one length.

    ``dtype``: the table's own name of the precision. Rows are in lexicographic order of ``sizes``, keys unique,
    times in microseconds and above zero.
    """

    source: Source
    dtype: str
    sizes: Columns
    time_us: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.time_us)


def find_package() -> SiliconPackage | None:
    """The installed tables; None where the extra ``silicon`` is not installed (:data:`INSTALL` says how)."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        return None
    root = Path(found.origin).parent / "systems" / "data"
    if not root.is_dir():
        return None
    try:
        return SiliconPackage(root, metadata.version(DISTRIBUTION))
    except metadata.PackageNotFoundError:
        return None


@cache
def sources(package: SiliconPackage, device_type: str, family: str) -> tuple[Source, ...]:
    """All table files of a family for a device type, by framework and version; none for a type without a folder."""
    if device_type not in GPU_FOLDERS:
        return ()
    kind = FAMILIES[family]
    folder = package.root / GPU_FOLDERS[device_type] / kind.folder
    return tuple(
        Source(
            package=package,
            device_type=device_type,
            family=family,
            framework=path.parent.parent.name,
            version=path.parent.name,
        )
        for path in sorted(folder.glob(f"*/*/{kind.file}"))
    )


@cache
def read_table(source: Source, dtype: str) -> SiliconTable | None:
    """The rows of ``source`` that were measured at ``dtype`` (ours), under the source's own version.

    Rows carried over from another version, and times that are missing, zero or not a number, are left out; rows of
    one key become their median. None where none is left. Raises :class:`InputError` for a file that is damaged or
    lacks a column.
    """
    family = FAMILIES[source.family]
    raw = _read(source.path, family)
    for name in TABLE_DTYPES.get(dtype, ()):
        kept = _rows(raw, source, family, name)
        if kept.num_rows:
            sizes, time_us = _unique(*_columns(kept, family))
            return SiliconTable(source=source, dtype=name, sizes=sizes, time_us=time_us)
    return None


def _read(path: Path, family: Family) -> pa.Table:
    texts = ["version", *family.fixed]
    texts += [family.precision] if family.precision else []
    texts += ["kernel_source"] if family.without else []
    absent = family.absent or {}
    wanted = [*texts, *family.sizes.values(), "latency"]
    try:
        file = parquet.ParquetFile(path, read_dictionary=texts)
        held = set(file.schema_arrow.names)
        optional = {family.sizes[name] for name in absent}
        missing = [name for name in wanted if name not in held and name not in optional]
        if missing:
            raise InputError(
                f"{path}: has no column {missing[0]}; reinstall it: pip install --force-reinstall {DISTRIBUTION}"
            )
        return file.read(columns=[name for name in wanted if name in held])
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{path}: is not a readable table ({reason});"
            f" reinstall it: pip install --force-reinstall {DISTRIBUTION}"
        ) from None


def _rows(raw: pa.Table, source: Source, family: Family, dtype: str) -> pa.Table:
    wanted = {"version": source.version, **family.fixed}
    if family.precision:
        wanted[family.precision] = dtype
    elif dtype != "bfloat16":
        return raw.slice(0, 0)
    kept = compute.greater(raw["latency"], 0)  # false for what is not a number, null for what is missing
    for name, value in wanted.items():
        kept = compute.and_(kept, compute.equal(raw[name], value))
    if family.without:
        other = compute.match_substring(raw["kernel_source"].cast(pa.string()), family.without)
        kept = compute.and_(kept, compute.invert(other))
    if "parts" in family.sizes:  # shared out by whole experts, a device sees other tokens than the model's
        kept = compute.and_(kept, compute.equal(raw[family.sizes["parts"]], 1))
    return raw.filter(kept)


def _columns(rows: pa.Table, family: Family) -> tuple[Columns, NDArray[np.float64]]:
    absent = family.absent or {}
    sizes = {}
    for name, column in family.sizes.items():
        if name == "parts":
            continue
        if column in rows.column_names:
            sizes[name] = rows[column].to_numpy().astype(np.int64)
        else:
            sizes[name] = np.full(rows.num_rows, absent[name], dtype=np.int64)
    return family.own(sizes), rows["latency"].to_numpy().astype(np.float64) * US_PER_MS


def _unique(sizes: Columns, time_us: NDArray[np.float64]) -> tuple[Columns, NDArray[np.float64]]:
    """Rows in order of their sizes; several of one key become their median."""
    names = list(sizes)
    order = np.lexsort([time_us, *(sizes[name] for name in reversed(names))])
    ordered = np.stack([sizes[name][order] for name in names])
    times = time_us[order]
    starts = np.flatnonzero(np.r_[True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)])
    counts = np.diff(np.r_[starts, len(times)])
    middle = (times[starts + (counts - 1) // 2] + times[starts + counts // 2]) / 2
    return {name: ordered[index, starts] for index, name in enumerate(names)}, middle
