"""``tessera run``: a plan is executed with several batches in flight, or simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output

Bind = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=HARDWARE", help="Bind a device of the plan (a100=cpu:0); may be repeated."),
]


def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file; - is standard input.")],
    trace: options.TraceOption,
    deps: options.DepsOption,
    output: Annotated[Path, options.folder("run")],
    bind: Bind = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Batches to run; else a few per slot.")] = None,
    workload: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve the requests of a workload file instead.")
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that each request generates; else what the plan assumed."),
    ] = None,
    backend: Annotated[
        Literal["auto", "simulate"], typer.Option(help="simulate: on modelled time, without hardware.")
    ] = "auto",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every batch with the unpartitioned model's outputs.")
    ] = False,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights from a safetensors file, not from the seed.")
    ] = None,
    trust_model: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Execute a plan pipelined, and check its outputs.

    Devices that are CPUs bind by themselves to cpu:0, cpu:1, ...; others need --bind or --backend simulate.
    """
    shown = Output(json=json)
    bound = options.pairs("--bind", bind or [])
    from tessera_core.execute.stage import RunStage

    stage = RunStage(
        bind=bound, batches=batches, workload=workload, output_tokens=output_tokens,
        backend=backend, verify=verify, trust=trust_model, weights=weights,
    )  # fmt: skip
    shown.show(stage.run(plan, trace, deps, output, shown.progress))
