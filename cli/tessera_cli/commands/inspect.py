"""``tessera inspect``: what is in this artifact?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Any artifact; a single file may be -.")],
    check: Annotated[
        bool, typer.Option("--check", help="Read everything, and check every checksum and reference.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="With --check, for a plan: its trace.")
    ] = None,
    deps: Annotated[
        Path | None, typer.Option(metavar="DEPS", help="With --check, for a plan: its deps.")
    ] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="With --check, for a plan: its profiles.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --check, for a plan: its cluster file.")
    ] = None,
    catalogue: options.Catalogues = None,
    json: options.Json = False,
) -> None:
    """Show what an artifact is, and its important tables.

    With --check, everything is read and verified; a plan is re-evaluated where its inputs are given.
    """
    from tessera_core.report.inspect import InspectStage

    stage = InspectStage(
        check=check,
        trace=trace,
        deps=deps,
        profiles=tuple(profile or ()),
        cluster=cluster,
        catalogues=tuple(catalogue or ()),
    )
    Output(json=json).show(stage.run(path))
