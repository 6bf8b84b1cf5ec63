"""``tessera demo``: all stages on the embedded model, ending in one table."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output


def command(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder that keeps every artifact.")
    ] = Path("demo-out"),
    json: options.Json = False,
) -> None:
    """Go through all stages on the embedded model.

    Plans are made for a GPU pair that you needn't own and for two CPU workers, and run on the latter.
    """
    from tessera_cli import steps
    from tessera_cli.main import invoke
    from tessera_core.report.demo import closing_facts, demo_workload
    from tessera_formats.errors import ArtifactError

    shown = Output(json=json)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ArtifactError(
            f"{output}: can't be made a folder ({problem.strerror}); name another"
        ) from problem
    with contextlib.chdir(output):
        steps.perform(invoke, demo_workload, shown.progress)
        facts = closing_facts(
            steps.TRACE, steps.DEPS, steps.GPU_PLAN, steps.CPU_PLANS, steps.CPU_RUNS, steps.ADAPT
        )
    shown.show(facts)
    if not json:
        typer.echo(
            f"\noutputs equal: {'yes' if facts.values['outputs_equal'] else 'no'}; all artifacts are in {output}"
        )
