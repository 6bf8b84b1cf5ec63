"""Which serving framework's table answers for a kernel: one that covers it on as many of the GPU types compared as
possible, so that their times come from the same code; then the one preferred for what is asked.

A type on which that framework has no answer takes the next one's. Every row says which table it was read from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from tessera_core.profile.silicon.interpolate import prepared
from tessera_core.profile.silicon.memory import from_memory
from tessera_core.profile.silicon.tables import SiliconPackage, SiliconTable, Source, read_table, sources

PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "products": ("trtllm", "vllm", "sglang"),
    "latent-prefill": ("sglang", "trtllm"),
    "latent-decode": ("sglang", "trtllm"),
    "latent-keys": ("sglang", "trtllm"),
    "latent-values": ("sglang", "trtllm"),
}
"""Frameworks by family, the preferred first.

Products are cuBLAS's in all of them; they differ in how much their measurements scatter, and TensorRT-LLM's do least.
"""

OTHERWISE = ("vllm", "sglang", "trtllm")
"""For other families: vLLM's and SGLang's rows time the kernel alone, TensorRT-LLM's what prepares its operands too."""


def chosen(
    package: SiliconPackage,
    family: str,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str],
    cold: bool = False,
) -> dict[str, SiliconTable]:
    """The table to ask for a kernel of ``sizes`` on each device type; types that none covers are left out.

    ``dtypes``: device type (without options) -> the dtype in which it computes there. ``cold``: as :func:`from_memory`
    has it.
    """
    frameworks = sorted(
        {source.framework for kind in dtypes for source in sources(package, kind, family)},
        key=lambda name: (_rank(family, name), name),
    )
    best: dict[str, SiliconTable] = {}
    found: list[dict[str, SiliconTable]] = []
    for framework in frameworks:
        tables = {
            kind: table
            for kind, dtype in dtypes.items()
            if (table := _covering(package, family, framework, kind, dtype, sizes, tuple(dtypes), cold))
        }
        if len(tables) == len(dtypes):
            return tables
        found.append(tables)
    for tables in sorted(found, key=len, reverse=True):  # stable: equals stay in order of preference
        best = tables | best
    return best


def preferred(family: str) -> tuple[str, ...]:
    """Frameworks for a family, the preferred first."""
    return PREFERENCE.get(family, OTHERWISE)


def newest(
    package: SiliconPackage, family: str, framework: str, device_type: str, dtype: str
) -> SiliconTable | None:
    """The table of a framework's newest version that has ``dtype`` on ``device_type``."""
    own = [source for source in sources(package, device_type, family) if source.framework == framework]
    for source in sorted(own, key=lambda source: _version(source.version), reverse=True):
        table = read_table(source, dtype)
        if table is not None:
            return table
    return None


def _rank(family: str, framework: str) -> int:
    order = preferred(family)
    return order.index(framework) if framework in order else len(order)


def _covering(
    package: SiliconPackage,
    family: str,
    framework: str,
    device_type: str,
    dtype: str,
    sizes: Mapping[str, int],
    compared: tuple[str, ...],
    cold: bool,
) -> SiliconTable | None:
    for source in _by_version(package, family, framework, device_type, compared):
        table = read_table(source, dtype)
        table = from_memory(table) if cold and table is not None else table
        if table is not None and prepared(table).covers(sizes):
            return table
    return None


@cache
def _by_version(
    package: SiliconPackage, family: str, framework: str, device_type: str, compared: tuple[str, ...]
) -> tuple[Source, ...]:
    """A type's tables of one framework, nearest to the version that most of the types compared have first."""
    held: dict[str, int] = {}
    own: dict[str, Source] = {}
    for kind in compared:
        for source in sources(package, kind, family):
            if source.framework == framework:
                held[source.version] = held.get(source.version, 0) + 1
                if kind == device_type:
                    own[source.version] = source
    order = sorted(held, key=_version)
    common = order.index(max(order, key=lambda version: (held[version], _version(version)))) if order else 0
    ranked = sorted(own, key=lambda version: (abs(order.index(version) - common), -order.index(version)))
    return tuple(own[version] for version in ranked)


def _version(text: str) -> tuple[Sequence[int], str]:
    """An order of versions: their numbers in turn, then the text."""
    return [int(number) for number in re.findall(r"\d+", text)], text
