"""``tessera ptx-deps``: which kernel needs which bytes of which other, and how we know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.commands import options
from tessera_cli.output import Output


def command(
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="TRACE", help="Trace folder, as `tessera trace` writes it."),
    ] = None,
    output: Annotated[Path | None, options.folder("deps")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCH", help="Analyse this captured target only (sm_90); may be repeated. Default: all."
        ),
    ] = None,
    resolve: Annotated[
        bool,
        typer.Option(
            "--resolve",
            help="Also look data-dependent addresses up in the stored constants; for estimates only.",
        ),
    ] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Test the result on the GPU that a target was captured on.")
    ] = False,
    module: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Instead of a trace, show what the kernels of this PTX touch; - is standard input.",
        ),
    ] = None,
    entry: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --module: this kernel only.")
    ] = None,
    grid: Annotated[
        str | None, typer.Option(metavar="X,Y,Z", help="With --module: the blocks of a launch to analyse.")
    ] = None,
    block: Annotated[
        str | None,
        typer.Option(metavar="X,Y,Z", help="Its threads of a block. Default: what the kernel requires."),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PARAMETER=KIND:VALUE",
            help="Its argument, by index or name: 0=ptr:4096 (bytes of the allocation), 1=i32:128, 2=f32:1.5,"
            " 3=hex:0a00.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Prove which kernel needs which bytes of which other.

    From PTX where there is PTX, else from the operators' schemas; every dependency states its evidence.
    With --module, show what the kernels of one PTX file touch.
    """
    shown = Output(json=json)
    if module is not None:
        if trace is not None or output is not None or target or resolve or validate:
            raise typer.BadParameter("--module takes no trace and writes nothing")
        from tessera_core.deps.module import ModuleStage, parse_extent

        asked = ModuleStage(
            entry=entry,
            grid=parse_extent("--grid", grid) if grid else None,
            block=parse_extent("--block", block) if block else None,
            arguments=tuple(arg or ()),
        )
        shown.show(asked.run(module))
        return
    if trace is None or output is None:
        raise typer.BadParameter("name a TRACE and the folder to write (-o), or ask about a --module")
    if entry or grid or block or arg:
        raise typer.BadParameter("--entry, --grid, --block and --arg go with --module")
    from tessera_core.deps.stage import DepsStage, Validator

    validator: Validator | None = None
    if validate:
        from tessera_core.validate.target import validate_target

        validator = validate_target
    stage = DepsStage(targets=tuple(target) if target else None, resolve=resolve, validator=validator)
    shown.show(stage.run(trace, output, shown.progress))
