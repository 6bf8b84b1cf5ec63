"""``tessera partition``: what runs where, and what that gains over simpler ways to share the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output


def _known_strategy(name: str) -> str:
    """Names that no version knows are wrong usage; of those that come later the stage says what to use."""
    from tessera_formats.plan import STRATEGIES

    if name not in STRATEGIES:
        raise typer.BadParameter(f"strategy {name!r} is not known; use one of {', '.join(STRATEGIES)}")
    return name


def command(
    trace: options.Trace,
    deps: Annotated[Path, typer.Argument(metavar="DEPS", help="Deps folder of the same trace.")],
    profiles: Annotated[
        list[str], typer.Argument(metavar="PROFILE", help="Profiles of the same trace; one may be -.")
    ],
    cluster: Annotated[Path, typer.Option(metavar="FILE", help="Cluster file: devices and links.")],
    policy: Annotated[
        Literal["throughput", "latency"],
        typer.Option(help="What to minimise: the interval, or one iteration."),
    ],
    output: Annotated[str, options.file("plan")],
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            callback=_known_strategy,
            help="auto, placement, data-parallel or single; auto picks the best and tells by how much.",
        ),
    ] = "auto",
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Batches in flight; else each strategy takes its best.")
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that a request generates, to weigh decode against prefill; else 32, or as many"
            " as the traced cache holds beside the prompt.",
        ),
    ] = None,
    catalogue: options.Catalogues = None,
    json: options.Json = False,
) -> None:
    """Place kernels on a cluster, beside every baseline.

    Each strategy chooses its own batch and batches in flight within the memory of the devices.
    """
    options.at_most_one_stream([trace, deps, *profiles, cluster])
    from tessera_core.plan.stage import PartitionStage

    stage = PartitionStage(
        policy=policy,
        strategy=strategy,
        in_flight=in_flight,
        output_tokens=output_tokens,
        catalogues=tuple(catalogue or ()),
    )
    sources = [name if name == "-" else Path(name) for name in profiles]
    target = output if output == "-" else Path(output)
    shown = Output(json=json, artifact=output)
    shown.show(stage.run(trace, deps, sources, cluster, target, shown.progress))
