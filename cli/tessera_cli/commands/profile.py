"""``tessera profile``: what each kernel costs on each device type, and each link."""

from __future__ import annotations

from typing import Annotated

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output


def command(
    trace: options.Trace,
    device: Annotated[
        list[str],
        typer.Option(
            metavar="TYPE[=HARDWARE]",
            help="A device type: measured if bound to hardware here (cpu-1thread=cpu:0), else modelled"
            " (a100-80gb); may be repeated.",
        ),
    ],
    output: Annotated[str, options.file("profile")],
    beside: Annotated[
        str | None,
        typer.Option(metavar="HARDWARE", help="Measure while this other worker (cpu:1) is busy as well."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            callback=options.finite,
            help="Time to spend on measuring, about; more gives tighter intervals.",
        ),
    ] = 20.0,
    trust_model: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Time kernels and links here, and model devices elsewhere.

    Every number says whether it was measured or modelled. Several profiles of one trace merge in partition.
    """
    from pathlib import Path

    from tessera_core.profile.stage import ProfileStage

    shown = Output(json=json, artifact=output)
    stage = ProfileStage(devices=tuple(device), beside=beside, trust=trust_model, seconds=seconds)
    shown.show(stage.run(trace, output if output == "-" else Path(output), shown.progress))
