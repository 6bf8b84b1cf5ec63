"""``tessera probe``: what is this machine, as a cluster file?"""

from __future__ import annotations

from typing import Annotated

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output


def command(
    output: Annotated[str, options.file("cluster")],
    cpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="CPU workers to list; else all usable CPUs where there is no GPU, or none.",
        ),
    ] = None,
    slices: Annotated[
        str | None,
        typer.Option(
            metavar="A+B", help="Cut every GPU into slices of so many multiprocessors (96+36), a device each."
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="NAME", help="What the file calls this machine.")] = "host0",
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Time the links, or only list the devices.")
    ] = True,
    seconds: Annotated[
        float,
        typer.Option(min=0.1, callback=options.finite, help="Time to spend on all links together, about."),
    ] = 10.0,
    json: options.Json = False,
) -> None:
    """Write this machine as a cluster file.

    Devices, their free memory, and measured links between them. What can't be measured is left out of the file,
    with a line that says so.
    """
    from pathlib import Path

    from tessera_core.profile.probe import ProbeStage, parse_slices

    stage = ProbeStage(
        cpus=cpus,
        slices=parse_slices(slices) if slices is not None else (),
        host=host,
        seconds=seconds,
        measure=measure,
    )
    shown = Output(json=json, artifact=output)
    shown.show(stage.run(output if output == "-" else Path(output), shown.progress))
