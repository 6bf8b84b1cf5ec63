"""The options of ``tessera profile``, each declared once with its help."""

from __future__ import annotations

from typing import Annotated

import typer

from tessera_cli.commands import options

Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="TYPE[=HARDWARE]",
        help="A device type: measured if bound to hardware here (cpu-1thread=cpu:0), else looked up in published"
        " tables or modelled (a100-80gb; h200-sxm/sm=96: a slice; l40s/dtype=float8); may be repeated.",
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        callback=options.replaceable_file("profile"),
        help="The profile file to write; - is standard output. Not with --explain.",
    ),
]
Beside = Annotated[
    str | None,
    typer.Option(metavar="HARDWARE", help="Measure while this other worker (cpu:1) is busy as well."),
]
Seconds = Annotated[
    float,
    typer.Option(
        min=0.1,
        callback=options.finite,
        help="Time to spend on measuring, about; more gives tighter intervals.",
    ),
]
Merge = Annotated[
    list[str] | None,
    typer.Option(
        "--merge",
        metavar="PROFILE",
        help="Take in the times of a profile of the same trace, of another machine or day; may be repeated.",
    ),
]
References = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="PROFILE",
        help="Model from the times that this profile of the same trace has of other types; may be repeated.",
    ),
]
Explain = Annotated[
    str | None,
    typer.Option(
        metavar="KERNEL",
        help="Show where the times of one kernel come from, and write nothing: decode/12, a name, or the beginning"
        " of a signature.",
    ),
]
NoSilicon = Annotated[bool, typer.Option("--no-silicon", help="Look nothing up in published tables.")]
