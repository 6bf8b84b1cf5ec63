"""``tessera profile``: what each kernel costs on each device type, and each link."""

from __future__ import annotations

from pathlib import Path

import typer

from tessera_cli.commands import options
from tessera_cli.commands import profile_options as own
from tessera_cli.output import Output


def command(
    trace: options.Trace,
    device: own.Devices = None,
    output: own.Output = None,
    beside: own.Beside = None,
    seconds: own.Seconds = 20.0,
    merge: own.Merge = None,
    references: own.References = None,
    explain: own.Explain = None,
    no_silicon: own.NoSilicon = False,
    catalogue: options.Catalogues = None,
    trust_model: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Time kernels here, look up or model the rest.

    Every number says whether it was measured, looked up in published tables, or modelled. Profiles of several machines
    and days merge, here or in partition; the newest measurement counts.
    """
    options.at_most_one_stream([*(merge or ()), *(references or ())])
    if (output is None) == (explain is None):
        raise typer.BadParameter("name the profile to write with -o FILE, or a kernel to --explain")
    if explain is not None and beside is not None:
        raise typer.BadParameter("--explain measures nothing, so --beside does not go with it")
    shown = Output(json=json, artifact=output or "")
    merged, lent = _sources(merge), _sources(references)
    if explain is not None:
        from tessera_core.profile.explain import ExplainStage

        stage = ExplainStage(
            kernel=explain,
            devices=tuple(device or ()),
            merged=merged,
            references=lent,
            catalogues=tuple(catalogue or ()),
            tables=not no_silicon,
        )
        shown.show(stage.run(trace))
    elif output is not None:
        from tessera_core.profile.stage import ProfileStage

        made = ProfileStage(
            devices=tuple(device or ()),
            beside=beside,
            trust=trust_model,
            seconds=seconds,
            merged=merged,
            references=lent,
            catalogues=tuple(catalogue or ()),
            tables=not no_silicon,
        )
        shown.show(made.run(trace, output if output == "-" else Path(output), shown.progress))


def _sources(names: list[str] | None) -> tuple[Path | str, ...]:
    return tuple(name if name == "-" else Path(name) for name in names or ())
