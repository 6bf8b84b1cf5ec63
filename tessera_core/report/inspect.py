"""What is in this artifact? Finds out its kind, opens it through the formats' door, and reports what it says.

Every reader checks what it opens; ``check`` also reads every table and file of a bundle, follows the references
between tables, recomputes a trace's program digest, and re-evaluates a plan where its inputs are given.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera_core.report import bundles, documents
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.adapt import read_adapt
from tessera_formats.bundle import MANIFEST, Bundle
from tessera_formats.cluster import cluster_digest, read_cluster
from tessera_formats.deps import read_deps
from tessera_formats.document import document_checksum, parse_toml
from tessera_formats.errors import ArtifactError, InputError, TesseraError, with_article
from tessera_formats.files import STANDARD_STREAM, read_file
from tessera_formats.plan import read_plan
from tessera_formats.profile import read_profile
from tessera_formats.run import read_run
from tessera_formats.trace import program_digest, read_trace
from tessera_formats.workload import read_workload

# First bytes of every Arrow IPC file (Arrow Columnar Format, "IPC File Format").
_ARROW_MAGIC = b"ARROW1"

_BUNDLES: Mapping[str, tuple[Callable[[Path], Bundle], Callable[[Bundle], Facts]]] = {
    "trace": (read_trace, bundles.describe_trace),
    "deps": (read_deps, bundles.describe_deps),
    "run": (read_run, bundles.describe_run),
    "adapt": (read_adapt, bundles.describe_adapt),
}
_DOCUMENTS: Mapping[str, tuple[Callable[[Path], dict[str, Any]], Callable[[Mapping[str, Any]], Facts]]] = {
    "plan": (read_plan, documents.describe_plan),
    "cluster": (read_cluster, documents.describe_cluster),
    "workload": (read_workload, documents.describe_workload),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectStage:
    """Describe an artifact. ``trace``, ``deps``, ``profiles`` and ``cluster`` let ``check`` re-evaluate a plan,
    with users' device types of the files ``catalogues``."""

    check: bool = False
    trace: Path | None = None
    deps: Path | None = None
    profiles: tuple[Path, ...] = ()
    cluster: Path | None = None
    catalogues: tuple[Path, ...] = ()

    def run(self, path: Path) -> Facts:
        """The artifact's facts; raises :class:`ArtifactError` for what is no artifact, or a damaged one."""
        if str(path) != STANDARD_STREAM:
            return self._describe(path)
        with tempfile.TemporaryDirectory() as folder:
            spooled = Path(folder) / "standard-input"
            spooled.write_bytes(read_file(path))
            try:
                facts = self._describe(spooled)
            except TesseraError as problem:
                raise type(problem)(str(problem).replace(str(spooled), STANDARD_STREAM)) from problem
            return replace(facts, title=facts.title.replace(str(spooled), STANDARD_STREAM))

    def _describe(self, path: Path) -> Facts:
        kind = detect_kind(path)
        if kind in _BUNDLES:
            opened, describe = _BUNDLES[kind]
            bundle = opened(path)
            facts = _with_tables(describe(bundle), bundle)
            if self.check:
                facts = _checked(facts, _check_bundle(bundle))
        elif kind == "profile":
            facts = documents.describe_profile(read_profile(path))
            if self.check:
                facts = _checked(facts, "checksum, schema and values")
        else:
            read, portray = _DOCUMENTS[kind]
            content = read(path)
            facts = portray(content)
            digest = cluster_digest(content) if kind == "cluster" else document_checksum(content)
            facts = replace(facts, values={"kind": kind, "digest": digest, **facts.values})
            if self.check:
                checked = self._check_plan(path) if kind == "plan" else "schema and values"
                facts = _checked(facts, checked)
        return replace(facts, title=f"{path}: {facts.title}")

    def _check_plan(self, path: Path) -> str:
        """Evaluate a plan again from its inputs; raises where it breaks a rule or a stated number."""
        if self.trace is None and self.deps is None:
            return "schema and values (give --trace and --deps to evaluate it again)"
        if self.trace is None or self.deps is None:
            raise InputError("a plan is evaluated from its trace and deps: give both --trace and --deps")
        from tessera_core.report.check_plan import check_plan

        return check_plan(path, self.trace, self.deps, self.profiles, self.cluster, self.catalogues)


def detect_kind(path: Path) -> str:
    """Kind of an artifact by its manifest, its Arrow magic, or its keys; raises :class:`ArtifactError`."""
    known = (*_BUNDLES, "profile", *_DOCUMENTS)
    if path.is_dir():
        if not (path / MANIFEST).exists():
            raise ArtifactError(f"{path}: is a folder without {MANIFEST}, so no artifact; name another path")
        kind = parse_toml(read_file(path / MANIFEST), path / MANIFEST, "manifest").get("kind")
    else:
        raw = read_file(path)
        if raw.startswith(_ARROW_MAGIC) or path.suffix == ".arrow":
            return "profile"
        content = parse_toml(raw, path, "plan, cluster or workload")
        kind = content.get("kind")
        if kind is None and "device" in content:
            kind = "cluster"
        elif kind is None and ("phase" in content or "request" in content):
            kind = "workload"
    if kind not in known:
        raise ArtifactError(
            f"{path}: is no artifact of this toolchain (kind {kind!r}); known: {', '.join(known)}"
        )
    if path.is_dir() != (kind in _BUNDLES):
        raise ArtifactError(
            f"{path}: says that it is {with_article(kind)}, which is not kept like this; write it again"
        )
    return str(kind)


def _with_tables(facts: Facts, bundle: Bundle) -> Facts:
    rows = tuple(
        (name, entry.get("rows", 0), entry["checksum"][7:23]) for name, entry in bundle.entries.items()
    )
    values = {
        "kind": bundle.schema.kind,
        "version": bundle.schema.version,
        "digest": bundle.digest,
        "program_digest": bundle.info["program_digest"],
        **facts.values,
    }
    return Facts(
        facts.title, values, (*facts.tables, FactTable("tables", ("table", "rows", "checksum"), rows))
    )


def _check_bundle(bundle: Bundle) -> str:
    bundle.check()
    if bundle.schema.kind == "trace":
        tables = {schema.name: bundle.table(schema.name) for schema in bundle.schema.tables}
        if program_digest(tables, bundle.file("data.safetensors")) != bundle.info["program_digest"]:
            raise ArtifactError(f"{bundle.path}: its program digest is not that of its tables; trace again")
    return f"{len(bundle.entries)} tables and {len(bundle.file_entries)} files, with their references"


def _checked(facts: Facts, what: str) -> Facts:
    return replace(facts, values={**facts.values, "checked": what})
