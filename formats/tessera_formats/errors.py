"""Every error that a user can cause or mend, under one root.

A message is one line that says what is wrong, where, and what to run or change next. The command line prints
it to stderr and ends with the class's exit code; a traceback is always a mistake of ours.
"""

from __future__ import annotations

from typing import ClassVar


class TesseraError(Exception):
    """Root of all errors that the user can mend. ``exit_code`` is what the command line ends with."""

    exit_code: ClassVar[int] = 1


class ArtifactError(TesseraError):
    """An artifact is missing, truncated, damaged, of another kind, or breaks its schema."""


class NewerVersionError(ArtifactError):
    """An artifact was written by a newer version of the toolchain."""


class OriginError(TesseraError):
    """Two artifacts come from different programs (their program digests differ)."""


class InputError(TesseraError):
    """A name, option or input file that the user gave does not exist or does not make sense."""


class UsageError(TesseraError):
    """Options of a command that do not go together, or lack one another."""

    exit_code: ClassVar[int] = 2


class ModelError(TesseraError):
    """A model or its factory failed, or did something that cannot be traced."""


class UntracedLaunchError(ModelError):
    """A launch, host synchronisation or memory access cannot be tied to a recorded op."""


class TrustError(TesseraError):
    """User code named in a trace would be imported without ``--trust-model``, or its source changed."""


class PtxSyntaxError(TesseraError):
    """Text that is not PTX, with file, line, column and what was expected."""


class InfeasibleError(TesseraError):
    """No plan meets the constraints; names which one, by how much and where."""


class GuardError(TesseraError):
    """A request falls outside what the trace is valid for."""


class VerificationError(TesseraError):
    """Outputs differ from the unpartitioned program's."""

    exit_code: ClassVar[int] = 3


class DeviceLostError(TesseraError):
    """A worker or device was lost while running."""

    exit_code: ClassVar[int] = 4


def with_article(noun: str) -> str:
    """``a plan``, ``an adapt``: a noun that only a running message knows."""
    return f"{'an' if noun[:1] in 'aeiou' else 'a'} {noun}"
