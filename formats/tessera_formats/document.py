"""The one door to TOML documents: declared records, checks with the path of the offending field, checksums.

A document may be written by hand. A checksum that no longer matches is therefore a warning
(:class:`StaleChecksumWarning`), while a field that breaks its declaration is an error.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli
import tomli_w

from tessera_formats.errors import ArtifactError, NewerVersionError, with_article
from tessera_formats.files import STANDARD_STREAM, check_output_file, read_file, replace_file

WRITE_AGAIN = "run the stage that wrote it again"
"""What mends most damaged artifacts; ends their error messages."""

FieldType = Literal["string", "integer", "number", "boolean", "strings", "integers", "record", "records"]


class StaleChecksumWarning(UserWarning):
    """A document was edited by hand since the toolchain wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of a record: its type, what it means, and what it may be.

    ``record``/``records`` take their declaration from ``inner``. Units are part of the name.
    """

    name: str
    type: FieldType
    meaning: str
    required: bool = True
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] | None = None
    inner: Record | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A table of a document: its fields. ``open`` records may hold further keys."""

    fields: tuple[Field, ...]
    open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSchema:
    """A TOML artifact: its kind, version and fields. ``kind_optional``: written by hand, may omit the kind."""

    kind: str
    version: int
    record: Record
    kind_optional: bool = False


_CHECKS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_LEAVES = {"strings": "string", "integers": "integer"}


def check_record(value: Any, record: Record, where: str, path: str = "") -> None:
    """Check ``value`` against ``record``; raises :class:`ArtifactError` with the path of what is wrong."""
    if not isinstance(value, Mapping):
        raise ArtifactError(f"{where}: {path or 'the document'} is not a table")
    known = {field.name for field in record.fields}
    for name in value:
        if name not in known and not record.open:
            raise ArtifactError(
                f"{where}: {_join(path, name)} is not known here; known: {', '.join(sorted(known))}"
            )
    for field in record.fields:
        place = _join(path, field.name)
        if field.name not in value:
            if field.required:
                raise ArtifactError(f"{where}: {place} is missing ({field.meaning})")
            continue
        _check_field(value[field.name], field, where, place)


def _check_field(value: Any, field: Field, where: str, place: str) -> None:
    if field.type == "record":
        assert field.inner is not None
        check_record(value, field.inner, where, place)
    elif field.type == "records":
        assert field.inner is not None
        if not isinstance(value, list):
            raise ArtifactError(f"{where}: {place} is not a list of tables")
        for index, item in enumerate(value):
            check_record(item, field.inner, where, f"{place}[{index}]")
    elif field.type in _LEAVES:
        if not isinstance(value, list | tuple):
            raise ArtifactError(f"{where}: {place} is not a list of {field.type}")
        for index, item in enumerate(value):
            _check_leaf(item, _LEAVES[field.type], field, where, f"{place}[{index}]")
    else:
        _check_leaf(value, field.type, field, where, place)


def _check_leaf(value: Any, kind: str, field: Field, where: str, place: str) -> None:
    if not isinstance(value, _CHECKS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        raise ArtifactError(f"{where}: {place} is {value!r}, expected {with_article(kind)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ArtifactError(f"{where}: {place} is {value}, must be a finite number")
    if field.maximum is not None and isinstance(value, int | float) and value > field.maximum:
        raise ArtifactError(f"{where}: {place} is {value}, must be at most {field.maximum:g}")
    if field.minimum is not None and isinstance(value, int | float) and value < field.minimum:
        raise ArtifactError(f"{where}: {place} is {value}, must be at least {field.minimum:g}")
    if field.choices is not None and value not in field.choices:
        raise ArtifactError(f"{where}: {place} is {value!r}, must be one of {', '.join(field.choices)}")


def encode_document(schema: DocumentSchema, content: Mapping[str, Any], where: str) -> bytes:
    """The document's bytes with kind, version and checksum, after all checks."""
    check_record(content, schema.record, where)
    head = {"kind": schema.kind, "version": schema.version, "checksum": document_checksum(content)}
    return tomli_w.dumps({**head, **content}).encode()


def write_document(path: Path | str, schema: DocumentSchema, content: Mapping[str, Any]) -> None:
    """Check and write in one step (see :mod:`tessera_formats.files`)."""
    if str(path) != STANDARD_STREAM:
        check_output_file(Path(path), schema.kind)
    replace_file(path, encode_document(schema, content, str(path)))


def read_document(path: Path | str, versions: Mapping[int, DocumentSchema]) -> dict[str, Any]:
    """Read and check a document (``-``: standard input); the result has no kind, version or checksum.

    Warns with :class:`StaleChecksumWarning` where it was edited since it was written.
    """
    newest = versions[max(versions)]
    content = parse_toml(read_file(path), path, newest.kind)
    kind, version = content.pop("kind", None), content.pop("version", None)
    stated = content.pop("checksum", None)
    if kind is None and newest.kind_optional:
        kind, version = newest.kind, newest.version if version is None else version
    if kind != newest.kind:
        found = f"is of kind {kind}" if isinstance(kind, str) else "does not say its kind"
        raise ArtifactError(f"{path}: {found}, expected {with_article(newest.kind)}")
    check_record(content, versions[known_version(path, kind, version, versions)].record, str(path))
    if stated is not None and stated != document_checksum(content):
        warnings.warn(f"{path}: was edited since it was written", StaleChecksumWarning, stacklevel=2)
    return content


def known_version(path: Path | str, kind: str, version: Any, versions: Mapping[int, Any]) -> int:
    """``version`` if this toolchain reads it; raises :class:`NewerVersionError` or :class:`ArtifactError`."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ArtifactError(
            f"{path}: version is {version!r}, expected a positive integer; correct it, or {WRITE_AGAIN}"
        )
    if version > max(versions):
        raise NewerVersionError(
            f"{path}: {kind} version {version} is newer than this toolchain reads (up to {max(versions)});"
            " upgrade tessera-toolchain"
        )
    return version


def parse_toml(raw: bytes, path: Path | str, kind: str) -> dict[str, Any]:
    """Parse TOML; raises :class:`ArtifactError` with line and column of what is wrong."""
    try:
        return tomli.loads(raw.decode())
    except UnicodeDecodeError as problem:
        raise ArtifactError(
            f"{path}: is no text, expected {with_article(kind)} in TOML; {WRITE_AGAIN}"
        ) from problem
    except tomli.TOMLDecodeError as problem:
        raise ArtifactError(f"{path}: is no valid TOML: {problem}") from problem


def document_checksum(content: Mapping[str, Any]) -> str:
    """``sha256:`` and the digest of the canonical JSON of a document's content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
