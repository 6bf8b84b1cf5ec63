"""``tessera adapt``: which plan new requests enter while the load changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output


def command(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN", help="Two or more plans of one trace; one may be -.")
    ],
    trace: options.TraceOption,
    workload: Annotated[
        Path, typer.Option(metavar="FILE", help="Workload file: requests, or phases of them.")
    ],
    deps: options.DepsOption,
    output: Annotated[Path, options.folder("adapt")],
    window_ms: Annotated[
        float, typer.Option(min=1.0, callback=options.finite, help="Length of a monitoring window.")
    ] = 300.0,
    threshold: Annotated[
        float,
        typer.Option(
            min=0.01, callback=options.finite, help="Pressure (load over capacity) at which the plan changes."
        ),
    ] = 1.5,
    observed: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A run of one of the plans, whose measured intervals correct it."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Follow a changing load over several plans, simulated.

    New requests enter the plan in force; running ones stay on the plan with which they started.
    """
    options.at_most_one_stream([*plans, workload])
    from tessera_core.adapt.stage import AdaptStage

    stage = AdaptStage(window_ms=window_ms, threshold=threshold, observed=observed)
    Output(json=json).show(stage.run(plans, trace, deps, workload, output))
