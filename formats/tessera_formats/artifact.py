"""Single-table artifacts: one Arrow IPC file whose metadata carries a checked JSON header.

The header holds what is said once per artifact (kind, version, digests, small lists); the checksum covers
the header and the canonical content of the table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tessera_formats.document import WRITE_AGAIN, Record, check_record, known_version
from tessera_formats.errors import ArtifactError
from tessera_formats.files import STANDARD_STREAM, read_error, read_file, replace_file
from tessera_formats.table import TableSchema, checked, content_checksum

# Keys of the Arrow metadata.
_HEADER = b"tessera"
_CHECKSUM = b"tessera.checksum"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableArtifactSchema:
    """A single-file artifact: its kind, version, header fields and table."""

    kind: str
    version: int
    header: Record
    table: TableSchema


@dataclass(frozen=True, slots=True)
class TableArtifact:
    """A header and the table below it."""

    header: dict[str, Any]
    table: pa.Table

    @property
    def digest(self) -> str:
        """Digest of the header and the table's values."""
        return _checksum(json.dumps(self.header, sort_keys=True), self.table)


def encode_table_artifact(
    schema: TableArtifactSchema, header: Mapping[str, Any], table: pa.Table, where: str
) -> bytes:
    """The file's bytes, after all checks; equal inputs give equal bytes."""
    check_record(header, schema.header, where)
    table = checked(table, schema.table, where).combine_chunks()
    text = json.dumps(
        {"kind": schema.kind, "version": schema.version, **header}, sort_keys=True, separators=(",", ":")
    )
    metadata = {_HEADER: text.encode(), _CHECKSUM: _checksum(text, table).encode()}
    table = table.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def write_table_artifact(
    path: Path | str, schema: TableArtifactSchema, header: Mapping[str, Any], table: pa.Table
) -> None:
    """Check and write in one step (see :mod:`tessera_formats.files`)."""
    replace_file(path, encode_table_artifact(schema, header, table, str(path)))


def read_table_artifact(path: Path | str, versions: Mapping[int, TableArtifactSchema]) -> TableArtifact:
    """Read memory-mapped (``-``: standard input) and check everything.

    Raises :class:`ArtifactError` naming the file for damage, another kind, or a broken schema, and
    :class:`NewerVersionError` for a newer version.
    """
    kind = next(iter(versions.values())).kind
    table = _open(path, kind)
    metadata = table.schema.metadata or {}
    if _HEADER not in metadata or _CHECKSUM not in metadata:
        raise ArtifactError(f"{path}: is an Arrow file but no artifact of this toolchain; expected a {kind}")
    try:
        text = metadata[_HEADER].decode()
        header = json.loads(text)
    except ValueError as problem:
        raise ArtifactError(f"{path}: its header is damaged; {WRITE_AGAIN}") from problem
    check_kind(path, header, kind, versions)
    if metadata[_CHECKSUM].decode(errors="replace") != _checksum(text, table.replace_schema_metadata(None)):
        raise ArtifactError(f"{path}: is damaged (its checksum does not match); {WRITE_AGAIN}")
    schema = versions[header.pop("version")]
    del header["kind"]
    check_record(header, schema.header, str(path))
    return TableArtifact(header, checked(table.replace_schema_metadata(None), schema.table, str(path)))


def check_kind(path: Path | str, header: Any, kind: str, versions: Mapping[int, Any]) -> None:
    """Refuse another kind of artifact and a newer or unknown version."""
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ArtifactError(f"{path}: does not say what kind of artifact it is; expected a {kind}")
    if header["kind"] != kind:
        raise ArtifactError(f"{path}: is a {header['kind']}, expected a {kind}")
    known_version(path, kind, header.get("version"), versions)


def _open(path: Path | str, kind: str) -> pa.Table:
    source: pa.NativeFile
    if str(path) == STANDARD_STREAM:
        source = pa.BufferReader(read_file(path))
    else:
        if Path(path).is_dir():
            raise ArtifactError(f"{path}: is a folder, expected a {kind} file")
        try:
            if Path(path).exists() and not Path(path).is_file():
                source = pa.BufferReader(Path(path).read_bytes())
            else:
                source = pa.memory_map(str(path))
        except OSError as problem:
            raise read_error(Path(path), problem) from problem
    try:
        table = pa.ipc.open_file(source).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise ArtifactError(
            f"{path}: is no readable {kind} (truncated, damaged or another file); {WRITE_AGAIN}"
        ) from problem
    return table


def _checksum(header: str, table: pa.Table) -> str:
    return "sha256:" + hashlib.sha256(f"{header}|{content_checksum(table)}".encode()).hexdigest()
