"""The ``tessera`` command: its subcommands, and what becomes of every way in which one can end.

Exit codes: 0 done; 1 something that the user can put right (one line); 2 wrong usage; 3 outputs differ; 4 a
device was lost; 70 a mistake of ours; 130 interrupted; 141 the reader of our output went away.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, NoReturn, TextIO

import typer

from tessera_cli.commands import adapt, demo, inspect, partition, probe, profile, ptx_deps, run, trace
from tessera_cli.output import say, standard_output_of_our_own
from tessera_formats.document import StaleChecksumWarning
from tessera_formats.errors import TesseraError

INTERNAL_ERROR = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

app = typer.Typer(
    name="tessera",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (trace, ptx_deps, probe, profile, partition, run, adapt, inspect, demo):
    app.command(name=command.__name__.rpartition(".")[2].replace("_", "-"))(command.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tessera {version('tessera-toolchain')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """Place the kernels of a model's inference on mixed devices, and say what that gains.

    Each stage reads and writes artifacts: trace, ptx-deps, profile, partition, run, adapt. `tessera inspect`
    shows any of them; `tessera demo` goes through all stages on an embedded model.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process."""
    with warnings.catch_warnings(), standard_output_of_our_own():
        _quiet_warnings()
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run one command; returns the exit code and prints at most one line about what went wrong."""
    try:
        code = invoke(arguments)
        sys.stdout.flush()
    except TesseraError as problem:
        say(f"tessera: {problem}")
        return problem.exit_code
    except BrokenPipeError:
        # The interpreter flushes once more while it ends; that must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            return _report(problem)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(f"tessera: standard output cannot be written ({problem.strerror}); free some space and run again")
        return TesseraError.exit_code
    except KeyboardInterrupt:
        say("tessera: interrupted; what was complete before is unchanged")
        return INTERRUPTED
    except Exception as problem:
        return _report(problem)
    return code


def _report(problem: Exception) -> int:
    """Our own mistake, in one line; the traceback only for whoever asks."""
    if os.environ.get("TESSERA_DEBUG") == "1":
        traceback.print_exc()
    say(
        f"tessera: internal error, please report: {type(problem).__name__}: {problem}"
        " (TESSERA_DEBUG=1 shows where)"
    )
    return INTERNAL_ERROR


def invoke(arguments: list[str]) -> int:
    """Parse and call one command; returns the exit code.

    Usage errors are told in one line that names the help to read; all other errors pass through.
    """
    tree = typer.main.get_command(app)
    try:
        with tree.make_context("tessera", arguments) as context:
            tree.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except Exception as problem:
        # Typer has carried its own copy of click's errors in recent versions, so they are known by what they offer.
        if not hasattr(problem, "format_message"):
            raise
        where = getattr(getattr(problem, "ctx", None), "command_path", "tessera")
        message = problem.format_message().replace("Value error, ", "")
        if message.startswith("Usage:"):  # no subcommand at all: the help is the answer
            sys.stderr.write(message + "\n")
        else:
            say(f"{where}: {message.rstrip('.')}; see {where} --help")
        return int(getattr(problem, "exit_code", 2))
    return 0


def _quiet_warnings() -> None:
    """Ours are one line each, and each once however often a file is read; those of libraries are for developers."""
    said: set[str] = set()
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", StaleChecksumWarning)

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message) not in said:
            said.add(str(message))
            say(f"tessera: warning: {message}")

    warnings.showwarning = show
