"""The one door to bundles: a folder with ``manifest.toml`` and Arrow files named by their content.

Tables are written first, under names that carry their content hash; the manifest is replaced last. A reader
therefore sees the old bundle or the new one. Files that no manifest names are left over from an interrupted
write and are removed by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tessera_formats.artifact import ARROW_PROBLEMS, check_kind
from tessera_formats.document import (
    WRITE_AGAIN,
    DocumentSchema,
    Field,
    Record,
    check_record,
    document_checksum,
    encode_document,
    parse_toml,
)
from tessera_formats.errors import ArtifactError, with_article
from tessera_formats.files import check_parent, read_error, read_file, replace_file, write_error
from tessera_formats.table import TableSchema, check_foreign_keys, checked, content_checksum

MANIFEST = "manifest.toml"
_BUNDLE_KINDS = ("trace", "deps", "run", "adapt")
_OURS = re.compile(r".+-[0-9a-f]{16}\.(arrow|bin)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSchema:
    """A folder artifact: its kind, version, manifest fields and tables.

    ``target_tables`` exist once per captured target, as ``targets/NAME/TABLE``. ``files``: names of binary
    files that may be present.
    """

    kind: str
    version: int
    info: Record
    tables: tuple[TableSchema, ...]
    target_tables: tuple[TableSchema, ...] = ()
    files: tuple[str, ...] = ()

    def table(self, name: str) -> TableSchema:
        """The schema of a table by the name that the manifest uses."""
        target, _, last = name.rpartition("/")
        for schema in self.target_tables if target.startswith("targets/") else self.tables:
            if schema.name == (last if target else name):
                return schema
        raise ArtifactError(f"a {self.kind} has no table {name}")


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle; tables are memory-mapped, checked on first use and kept."""

    path: Path
    schema: BundleSchema
    info: dict[str, Any]
    entries: dict[str, dict[str, Any]]
    file_entries: dict[str, dict[str, Any]]
    _tables: dict[str, pa.Table] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Digest of everything that the manifest says: info and every table's checksum."""
        entries = {**self.entries, **self.file_entries}
        return document_checksum(
            {"info": self.info, **{name: entry["checksum"] for name, entry in entries.items()}}
        )

    def table(self, name: str) -> pa.Table:
        """The checked table ``name``; raises :class:`ArtifactError` naming the file if it is damaged."""
        if name not in self._tables:
            if name not in self.entries:
                raise ArtifactError(f"{self.path}: has no table {name}; {WRITE_AGAIN}")
            self._tables[name] = self._load(name)
        return self._tables[name]

    def targets(self) -> tuple[str, ...]:
        """Names of the captured targets, sorted."""
        folders = {name.rpartition("/")[0] for name in self.entries if name.startswith("targets/")}
        return tuple(sorted(folder.removeprefix("targets/") for folder in folders))

    def file(self, name: str) -> bytes:
        """The checked content of a binary file of the bundle."""
        if name not in self.file_entries:
            raise ArtifactError(f"{self.path}: has no file {name}; {WRITE_AGAIN}")
        entry = self.file_entries[name]
        content = read_file(self.path / entry["file"])
        if _digest(content) != entry["checksum"]:
            raise ArtifactError(f"{self.path / entry['file']}: is damaged (checksum mismatch); {WRITE_AGAIN}")
        return content

    def check(self) -> None:
        """Read and check every table, file and reference between tables."""
        for name in self.file_entries:
            self.file(name)
        for name in self.entries:
            self.table(name)
        for name in self.entries:
            if not name.startswith("targets/"):
                check_foreign_keys(
                    {n: self.table(n) for n in self.entries}, self.schema.table(name), str(self.path)
                )

    def _load(self, name: str) -> pa.Table:
        entry = self.entries[name]
        path = self.path / entry["file"]
        try:
            content = pa.memory_map(str(path)).read_buffer()
            if _digest(content) != entry["bytes_checksum"]:
                raise ArtifactError(f"{path}: is truncated or damaged (checksum mismatch); {WRITE_AGAIN}")
            table = pa.ipc.open_file(content).read_all().replace_schema_metadata(None)
        except OSError as problem:
            raise read_error(path, problem) from problem
        except ARROW_PROBLEMS as problem:
            raise ArtifactError(f"{path}: is no readable table; {WRITE_AGAIN}") from problem
        return checked(table, self.schema.table(name), str(path))


_FILE_ENTRY = Record(
    (
        Field(name="file", type="string", meaning="file name within the bundle"),
        Field(name="checksum", type="string", meaning="sha256 of the content"),
    )
)
_TABLE_ENTRY = Record(
    (
        Field(name="file", type="string", meaning="file name within the bundle"),
        Field(name="checksum", type="string", meaning="sha256 of the values, whatever wrote the file"),
        Field(name="bytes_checksum", type="string", meaning="sha256 of the file"),
        Field(name="rows", type="integer", meaning="number of rows", minimum=0),
    )
)


def read_bundle(path: Path | str, versions: Mapping[int, BundleSchema]) -> Bundle:
    """Open a bundle and check its manifest; tables are checked when first read."""
    folder = Path(path)
    kind = next(iter(versions.values())).kind
    if folder.is_file():
        raise ArtifactError(f"{folder}: is a file, expected {with_article(kind)} folder")
    if not folder.exists():
        raise ArtifactError(f"{folder}: does not exist; check the name, or run the stage that writes it")
    if not (folder / MANIFEST).exists():
        raise ArtifactError(
            f"{folder}: has no {MANIFEST} (no {kind}, or its writing was interrupted); {WRITE_AGAIN}"
        )
    manifest = parse_toml(read_file(folder / MANIFEST), folder / MANIFEST, kind)
    check_kind(folder, manifest, kind, versions)
    schema = versions[manifest["version"]]
    stated = manifest.pop("checksum", None)
    content = {key: value for key, value in manifest.items() if key not in ("kind", "version")}
    check_record(content, _manifest_record(schema), str(folder / MANIFEST))
    if stated != document_checksum(content):
        raise ArtifactError(f"{folder / MANIFEST}: is damaged (its checksum does not match); {WRITE_AGAIN}")
    for section, record in (("tables", _TABLE_ENTRY), ("files", _FILE_ENTRY)):
        for name, entry in content.get(section, {}).items():
            check_record(entry, record, f"{folder / MANIFEST}: {name}")
            if Path(entry["file"]).is_absolute() or ".." in Path(entry["file"]).parts:
                raise ArtifactError(f"{folder / MANIFEST}: {name} points outside the bundle")
    bundle = Bundle(folder, schema, content["info"], content.get("tables", {}), content.get("files", {}))
    for required in schema.tables:
        if required.name not in bundle.entries:
            raise ArtifactError(f"{folder}: has no table {required.name}; {WRITE_AGAIN}")
    return bundle


def write_bundle(
    path: Path | str,
    schema: BundleSchema,
    *,
    info: Mapping[str, Any],
    tables: Mapping[str, pa.Table],
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Check everything, then write; an existing bundle of the same kind is replaced in one step.

    Raises :class:`ArtifactError` where ``path`` exists and is something else, or cannot be written; what
    stood there is then unchanged.
    """
    folder = Path(path)
    check_replaceable(folder, schema.kind)
    missing = [s.name for s in schema.tables if s.name not in tables]
    assert not missing, f"{schema.kind} written without {missing}"
    ready = {
        name: checked(table, schema.table(name), str(folder)).combine_chunks()
        for name, table in tables.items()
    }
    for name in ready:
        if not name.startswith("targets/"):
            check_foreign_keys(ready, schema.table(name), str(folder))
    entries: dict[str, dict[str, Any]] = {}
    file_entries: dict[str, dict[str, Any]] = {}
    content: dict[str, Any] = {"info": dict(info), "tables": entries, "files": file_entries}
    check_record(content, _manifest_record(schema), str(folder))
    created: list[Path] = []
    fresh = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        for name, table in ready.items():
            checksum, raw = content_checksum(table), _encode(table)
            entries[name] = {
                "file": f"{name}-{checksum[7:23]}.arrow",
                "checksum": checksum,
                "bytes_checksum": _digest(raw),
                "rows": table.num_rows,
            }
            _put(folder / entries[name]["file"], raw, created)
        for name, raw in (files or {}).items():
            assert name in schema.files, name
            checksum = _digest(raw)
            file_entries[name] = {"file": f"{name}-{checksum[7:23]}.bin", "checksum": checksum}
            _put(folder / file_entries[name]["file"], raw, created)
        document = DocumentSchema(kind=schema.kind, version=schema.version, record=_manifest_record(schema))
        replace_file(folder / MANIFEST, encode_document(document, content, str(folder)))
    except OSError as problem:
        _undo(folder, created, fresh)
        raise write_error(folder, problem, sum(t.nbytes for t in ready.values())) from problem
    except BaseException:
        _undo(folder, created, fresh)
        raise
    _remove_left_over(folder, {e["file"] for e in (*entries.values(), *file_entries.values())})


def _manifest_record(schema: BundleSchema) -> Record:
    return Record(
        (
            Field(name="info", type="record", meaning="what is said once", inner=schema.info),
            Field(name="tables", type="record", meaning="tables by name", inner=Record((), open=True)),
            Field(
                name="files",
                type="record",
                meaning="files by name",
                required=False,
                inner=Record((), open=True),
            ),
        )
    )


def check_replaceable(folder: Path, kind: str) -> None:
    """Raise :class:`ArtifactError` unless ``folder`` is free to hold a bundle of ``kind``.

    It may be absent, empty, a bundle of that kind (a damaged one too: writing it again is the cure), or what an
    interrupted write left; anything else is somebody's and stays.
    """
    if folder.is_file():
        raise ArtifactError(
            f"{folder}: is a file and would be replaced by a {kind} folder; name another output"
        )
    check_parent(folder)
    if not folder.exists():
        return
    found = _stated_kind(folder / MANIFEST)
    if found in _BUNDLE_KINDS and found != kind:
        raise ArtifactError(
            f"{folder}: is of kind {found}, not {kind}; it is left alone, name another output"
        )
    for path in folder.rglob("*"):
        ours = _OURS.match(path.name) or path.suffix == ".tmp" or path == folder / MANIFEST
        if found != kind and path.is_file() and not ours:
            raise ArtifactError(f"{folder}: exists and is no {kind}; it is left alone, name another output")


def _stated_kind(manifest: Path) -> str | None:
    """The kind that a manifest states; None where there is none, or it is damaged beyond reading."""
    try:
        return str(parse_toml(read_file(manifest), manifest, "manifest").get("kind"))
    except ArtifactError:
        return None


def _put(path: Path, content: bytes, created: list[Path]) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        created.append(path)
    replace_file(path, content)


def _undo(folder: Path, created: list[Path], fresh: bool) -> None:
    for path in created:
        with contextlib.suppress(OSError):
            path.unlink()
    if fresh:
        with contextlib.suppress(OSError):
            for inner in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
                inner.rmdir()
            folder.rmdir()


def _remove_left_over(folder: Path, named: set[str]) -> None:
    for path in folder.rglob("*"):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and relative not in named and (_OURS.match(path.name) or path.suffix == ".tmp"):
            with contextlib.suppress(OSError):
                path.unlink()


def _encode(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _digest(content: bytes | pa.Buffer) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
