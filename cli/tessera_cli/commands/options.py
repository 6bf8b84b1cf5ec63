"""Arguments and options that several commands share, each declared once with its help."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tessera_formats.bundle import check_replaceable
from tessera_formats.files import check_output_file

Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="Trace folder, as `tessera trace` writes it.")]
TraceOption = Annotated[
    Path, typer.Option("--trace", metavar="TRACE", help="Trace folder that the plan was made for.")
]
DepsOption = Annotated[
    Path, typer.Option("--deps", metavar="DEPS", help="Deps folder that the plan was made for.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the facts as one JSON object instead of tables.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-model",
        help="Allow importing the user's own factory and Triton kernels that the trace names.",
    ),
]

Catalogues = Annotated[
    list[Path] | None,
    typer.Option(
        "--catalogue",
        metavar="FILE",
        help="Device types of your own, or your figures of known ones (TOML); may be repeated.",
    ),
]


def folder(kind: str) -> typer.models.OptionInfo:
    """The ``-o`` of a stage that writes a folder."""

    def replaceable(path: Path | None) -> Path | None:
        return _replaceable_folder(path, kind)

    option: typer.models.OptionInfo = typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        callback=replaceable,
        help=f"The {kind} folder to write; replaced in one step if it exists.",
    )
    return option


def file(kind: str) -> typer.models.OptionInfo:
    """The ``-o`` of a stage that writes a single file."""
    option: typer.models.OptionInfo = typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        callback=replaceable_file(kind),
        help=f"The {kind} file to write; - is standard output.",
    )
    return option


def replaceable_file(kind: str) -> Callable[[str | None], str | None]:
    """Refuses, before any work is done for it, a file that could not be written."""

    def replaceable(path: str | None) -> str | None:
        if path not in (None, "-"):
            check_output_file(Path(path), kind)
        return path

    return replaceable


def at_most_one_stream(paths: Sequence[Path | str]) -> None:
    """Standard input can be read once, so at most one artifact of a call is ``-``."""
    if [str(path) for path in paths].count("-") > 1:
        raise typer.BadParameter("only one artifact of a call can be - (standard input)")


def _replaceable_folder(path: Path | None, kind: str) -> Path | None:
    """Refuse what could not be written before any work is done for it."""
    if path is None:
        return None
    if str(path) == "-":
        raise typer.BadParameter("this artifact is a folder and can't go to standard output; name it")
    check_replaceable(path, kind)
    return path


def finite(value: float) -> float:
    """``inf`` and ``nan`` parse as numbers, and pass any minimum or compare with nothing."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def pairs(option: str, texts: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping; anything else, or a name given twice, is wrong usage."""
    result: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise typer.BadParameter(f"{option} takes NAME=HARDWARE, not {text!r}")
        if name in result:
            raise typer.BadParameter(f"{option} names {name} twice")
        result[name] = value
    return result
