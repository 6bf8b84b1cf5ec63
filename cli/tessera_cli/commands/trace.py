"""``tessera trace``: a model becomes a record of its kernels that can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A catalogue name such as llama-tiny, or FILE.py:FACTORY.")
    ],
    output: Annotated[Path, options.folder("trace")],
    program: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PHASE:batch=B,context=C",
            help="An iteration to record; may be repeated. prefill: C prompt tokens; decode: C cached tokens.",
        ),
    ] = None,
    phase: Annotated[str | None, typer.Option(help="Short form for one program: its phase.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Short form: requests in a batch.")] = 1,
    context: Annotated[int | None, typer.Option(min=1, help="Short form: tokens.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the weights; else the model's own.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
    fake: Annotated[
        bool, typer.Option("--fake", help="Trace real sizes without the memory for them.")
    ] = False,
    ptx_target: Annotated[
        list[str] | None,
        typer.Option(metavar="ARCH", help="Compile Triton kernels to PTX for it (sm_90); may be repeated."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Record a model's iterations, kernel by kernel.

    One program per phase, batch and context; all programs share the weights.
    """
    shown = Output(json=json)
    requests = options.requests(program or [], phase, batch, context)
    from tessera_core.trace.stage import TraceStage

    stage = TraceStage(
        model=model, programs=requests, dtype=dtype, seed=seed, fake=fake, ptx_targets=tuple(ptx_target or ())
    )
    shown.show(stage.run(output, shown.progress))
