"""``tessera ptx-deps``: which kernel needs which bytes of which other, and how we know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output


def command(
    trace: options.Trace,
    output: Annotated[Path, options.folder("deps")],
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCH", help="Analyse this captured target only (sm_90); may be repeated. Default: all."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Prove which kernel needs which bytes of which other.

    From PTX where there is PTX, else from the operators' schemas; every dependency states its evidence.
    """
    from tessera_core.deps.stage import DepsStage

    stage = DepsStage(targets=tuple(target) if target else None)
    Output(json=json).show(stage.run(trace, output))
