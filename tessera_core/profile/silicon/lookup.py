"""Rows of a profile from published tables: for each kernel and GPU type the time that a table holds or implies, and for
what no table answers one reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera_core.profile.model.sizes import aligned
from tessera_core.profile.operators import work_of
from tessera_core.profile.silicon.choice import chosen
from tessera_core.profile.silicon.families import TABLE_DTYPES
from tessera_core.profile.silicon.interpolate import Interpolated, time_at
from tessera_core.profile.silicon.memory import fetched_us, least_us
from tessera_core.profile.silicon.rates import LATENT_KEY, LATENT_RANK, LATENT_VALUE, LATENT_WIDTH
from tessera_core.profile.silicon.stacks import BETWEEN_STACKS, COLD_START_US
from tessera_core.profile.silicon.tables import (
    DISTRIBUTION,
    GPU_FOLDERS,
    INSTALL,
    SiliconPackage,
    SiliconTable,
    find_package,
    sources,
)
from tessera_core.profile.times import TimeRow
from tessera_core.profile.work import Attention, Experts, Product, Scan, Work
from tessera_core.program.ir import Kernel, Program, Trace
from tessera_formats.deps import WHOLE

SAME = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SiliconFound:
    """``rows``: by (device type, signature). ``missing``: one line per device type and kind of kernel without a row."""

    rows: Mapping[tuple[str, str], TimeRow]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A kernel in a table's terms. ``family`` None: ``sizes`` are empty and ``reason`` says why none holds it.

    ``cold``: the iteration left its weights or its cache of keys in memory.
    """

    family: str | None
    sizes: Mapping[str, int]
    dtype: str
    converts: bool
    reason: str = ""
    cold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Type:
    """A device type's name taken apart: ``BASE[/sm=N][/dtype=D]``."""

    name: str
    base: str
    slice: str
    dtype: str | None

    @classmethod
    def of(cls, name: str) -> _Type:
        base, *options = name.split("/")
        given = dict(option.partition("=")[::2] for option in options)
        return cls(name=name, base=base, slice=given.get("sm", ""), dtype=given.get("dtype"))


def silicon_rows(
    trace: Trace,
    kernels: Mapping[str, Kernel],
    device_types: Sequence[str],
    package: SiliconPackage | None = None,
) -> SiliconFound:
    """Rows for ``kernels`` (by signature) on ``device_types`` where published tables hold or surround their sizes.

    Types may carry a slice or a dtype (``l40s/dtype=float8``: products and experts in float8). Kernels that only
    stream, and collectives, belong to no table and are not reported as missing. ``package``: the installed one where
    None. Raises :class:`InputError` for a damaged table.
    """
    package = package or find_package()
    types = [_Type.of(name) for name in device_types]
    if package is None:
        lines = tuple(f"{kind.name}: no silicon tables here; run: {INSTALL}" for kind in types)
        return SiliconFound(rows={}, missing=lines)
    missing: dict[tuple[str, str], str] = {}
    usable = []
    for kind in types:
        reason = _unusable(kind)
        if reason:
            missing[kind.name, ""] = reason
        else:
            usable.append(kind)
    rows: dict[tuple[str, str], TimeRow] = {}
    for signature, program in _programs(trace, kernels).items():
        kernel = kernels[signature]
        work = work_of(trace, program, kernel)
        asked = asked_of(work)
        if asked is None:
            continue
        _answer(package, kernel, asked, usable, rows, missing)
    return SiliconFound(rows=rows, missing=tuple(missing.values()))


def asked_of(work: Work) -> Asked | None:
    """What to ask of which family for ``work``; None for what only streams."""
    match work:
        case Product():
            return _asked_product(work)
        case Attention():
            return _asked_attention(work)
        case Experts():
            return Asked(
                family="experts",
                sizes={
                    "tokens": work.tokens,
                    "hidden": work.hidden,
                    "intermediate": work.intermediate,
                    "experts": work.experts,
                    "top_k": work.top_k,
                },
                dtype=work.dtype,
                converts=True,
            )
        case Scan():
            if work.part == "recurrence":
                return _none(work.dtype, "Mamba-2 recurrences")
            return Asked(
                family=f"convolution-{work.phase}",
                sizes={"batch": work.batch, "length": work.length, "channels": work.channels},
                dtype=work.dtype,
                converts=False,
            )
        case _:
            return None


def _none(dtype: str, kind: str) -> Asked:
    return Asked(family=None, sizes={}, dtype=dtype, converts=False, reason=f"no table of {kind}")


def _asked_product(work: Product) -> Asked:
    if work.convolution:
        return _none(work.dtype, "convolutions")
    if not aligned(work):
        return _none(work.dtype, "products whose rows don't fill multiples of 16 bytes")
    family, sizes = "products", {"m": work.m, "n": work.n, "k": work.k}
    if work.count > 1:
        sizes = {"heads": work.count, "tokens": work.m}
        if work.weight and (work.k, work.n) == (LATENT_VALUE, LATENT_RANK):
            family = "latent-keys"
        elif work.weight and (work.k, work.n) == (LATENT_RANK, LATENT_VALUE):
            family = "latent-values"
        else:
            return _none(work.dtype, "batched products")
    return Asked(family=family, sizes=sizes, dtype=work.dtype, converts=True, cold=work.weight)


def _asked_attention(work: Attention) -> Asked:
    shared = {"batch": work.batch, "heads": work.heads}
    single = {
        "kv_heads": work.kv_heads,
        "head_dim": work.head_dim,
        "window": work.window if work.window is not None and work.window < work.context else 0,
    }
    if work.phase == "decode":
        latent = work.kv_heads == 1 and work.head_dim == LATENT_WIDTH
        family = "latent-decode" if latent else "attention-decode"
        sizes = shared | ({} if latent else single) | {"context": work.context}
    elif work.queries != work.context:
        return _none(work.dtype, "attention of a prompt's part to earlier keys")
    elif work.phase == "encoder":
        if work.heads != work.kv_heads:
            return _none(work.dtype, "encoder attention with shared keys")
        family = "attention-encoder"
        sizes = shared | {"head_dim": work.head_dim, "queries": work.queries}
    else:
        latent = work.heads == work.kv_heads and work.head_dim == LATENT_KEY
        family = "latent-prefill" if latent else "attention-prefill"
        sizes = shared | ({} if latent else single) | {"queries": work.queries}
    return Asked(family=family, sizes=sizes, dtype=work.dtype, converts=False, cold=work.phase == "decode")


def _unusable(kind: _Type) -> str:
    """Why no table can answer for a device type at all; empty where one might."""
    if kind.base not in GPU_FOLDERS:
        return f"{kind.name}: {DISTRIBUTION} has no tables of it"
    if kind.slice:
        return f"{kind.name}: silicon tables hold whole GPUs, not slices"
    if kind.dtype is not None and kind.dtype not in TABLE_DTYPES:
        return f"{kind.name}: silicon tables know no dtype {kind.dtype}; they know {', '.join(TABLE_DTYPES)}"
    return ""


def _answer(
    package: SiliconPackage,
    kernel: Kernel,
    asked: Asked,
    types: Sequence[_Type],
    rows: dict[tuple[str, str], TimeRow],
    missing: dict[tuple[str, str], str],
) -> None:
    """Add the rows of one kernel, or reasons, for all types: one dtype at a time, so that like is compared."""
    wanted: dict[str | None, list[_Type]] = {}
    for kind in types:
        wanted.setdefault(kind.dtype if asked.converts else None, []).append(kind)
    for converted, group in wanted.items():
        dtype = converted or asked.dtype
        tables: Mapping[str, SiliconTable] = {}
        if asked.family is not None:
            bases = {kind.base: dtype for kind in group}
            tables = chosen(package, asked.family, asked.sizes, bases, asked.cold)
        for kind in group:
            table = tables.get(kind.base)
            found = None if table is None else time_at(table, asked.sizes)
            if table is None or found is None:
                reason = _reason(package, kind, asked, dtype)
                missing.setdefault((kind.name, asked.family or asked.reason), reason)
            else:
                rows[kind.name, kernel.signature] = _row(kernel, kind.name, asked, dtype, table, found)


def _reason(package: SiliconPackage, kind: _Type, asked: Asked, dtype: str) -> str:
    if asked.family is None:
        return f"{kind.name}: {asked.reason}"
    if not sources(package, kind.base, asked.family):
        return f"{kind.name}: no table of {asked.family}"
    if dtype not in TABLE_DTYPES:
        return f"{kind.name}: no table of {asked.family} in {dtype}"
    sizes = ", ".join(f"{name} {size}" for name, size in asked.sizes.items())
    return f"{kind.name}: no table of {asked.family} in {dtype} reaches {sizes}"


def _row(
    kernel: Kernel, device_type: str, asked: Asked, dtype: str, table: SiliconTable, found: Interpolated
) -> TimeRow:
    family = table.source.family
    low_us, high_us = (
        found.time_us * math.exp(side * math.hypot(math.log(end_us / found.time_us), BETWEEN_STACKS[family]))
        for side, end_us in ((-1, found.low_us), (1, found.high_us))
    )
    low_us = min(max(low_us, least_us(table, asked.sizes, dtype, asked.cold)), found.time_us)
    if family == "products":
        high_us += COLD_START_US
    place = "met" if found.distance == 0 else "continued past the last size" if found.continued else "between"
    words = f"{family} table in {table.dtype}: {place}"
    if asked.cold and found.time_us <= (1 + SAME) * fetched_us(table, asked.sizes):
        words += "; as fast as memory brings what the table's collector found in L2"
    if len(kernel.ops) > 1:
        words += f"; {len(kernel.ops) - 1} fused operators at no extra time"
    return TimeRow(
        signature=kernel.signature,
        part=WHOLE,
        device_type=device_type,
        condition="alone",
        cache="sequence",
        median_us=found.time_us,
        p10_us=found.time_us,
        p90_us=found.time_us,
        low_us=low_us,
        high_us=high_us,
        samples=0,
        flops=kernel.flops,
        bytes=kernel.read_bytes + kernel.written_bytes,
        dtype=dtype,
        source="silicon",
        hardware="",
        dated="",
        table=table.source.name,
        distance=found.distance,
        detail=words,
    )


def _programs(trace: Trace, kernels: Mapping[str, Kernel]) -> dict[str, Program]:
    """The program in which each kernel was found, by signature."""
    wanted = {(signature, kernel.id) for signature, kernel in kernels.items()}
    found: dict[str, Program] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            if (kernel.signature, kernel.id) in wanted and kernels[kernel.signature] == kernel:
                found.setdefault(kernel.signature, program)
    return found
