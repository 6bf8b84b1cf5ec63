"""Reading and replacing files safely: temporary name, fsync, rename; ``-`` is standard input or output.

A reader sees the old content or the new one, never half of one, whether the writer was killed or the disk
filled up in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from pathlib import Path

from tessera_formats.errors import ArtifactError

STANDARD_STREAM = "-"


def replace_file(path: Path | str, content: bytes) -> None:
    """Write ``content`` to ``path`` in one step; on failure what stood there is untouched.

    Raises :class:`ArtifactError` for a full disk, a missing folder or missing rights.
    """
    if str(path) == STANDARD_STREAM:
        try:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as problem:
            raise write_error(Path("standard output"), problem, len(content)) from problem
        return
    target = Path(path)
    temporary: str | None = None
    try:
        if target.exists() and not target.is_file():  # a pipe or device: nothing to protect there
            with target.open("wb") as stream:
                stream.write(content)
            return
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(target)
        temporary = None
        sync_folder(target.parent)
    except OSError as problem:
        raise write_error(target, problem, len(content)) from problem
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def check_output_file(target: Path, kind: str) -> None:
    """Raise :class:`ArtifactError` unless an artifact of ``kind`` may be written to ``target``.

    It may be absent, empty, a pipe, or an artifact of that kind; anything else is somebody's and stays. Asked
    before long work starts, and again before the write.
    """
    if target.is_dir():
        raise ArtifactError(f"{target}: is a folder, expected a file; name another output")
    check_parent(target)
    if target.is_file() and not _holds(read_file(target), kind):
        raise ArtifactError(
            f"{target}: exists and can't be told as a {kind}; it is left alone, delete it or name another output"
        )


def _holds(content: bytes, kind: str) -> bool:
    """Whether a file is empty or begins as artifacts of ``kind`` do, be it damaged further on."""
    document = content.startswith(f'kind = "{kind}"'.encode())
    table = content.startswith(b"ARROW1") and f'"kind":"{kind}"'.encode() in content
    return not content or document or table


def check_parent(target: Path) -> None:
    """Raise :class:`ArtifactError` where the folder that is to hold ``target`` is missing or closed to us."""
    if not target.parent.is_dir():
        raise ArtifactError(f"{target}: folder {target.parent} does not exist; create it and run again")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ArtifactError(f"{target}: folder {target.parent} can't be written to; name another output")


def write_error(target: Path, problem: OSError, size: int) -> ArtifactError:
    """The one-line error for a failed write of ``size`` bytes."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ArtifactError(
            f"{target}: no space left for {size} bytes; nothing was changed, free some space and run again"
        )
    return ArtifactError(f"{target}: cannot be written ({problem.strerror or problem}); nothing was changed")


def read_file(path: Path | str) -> bytes:
    """The whole content of ``path``; raises :class:`ArtifactError` if it is missing or unreadable."""
    if str(path) == STANDARD_STREAM:
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise read_error(Path(path), problem) from problem


def read_error(path: Path, problem: OSError) -> ArtifactError:
    """The one-line error for a failed read."""
    if problem.errno == errno.ENOENT:
        return ArtifactError(f"{path}: does not exist; check the name, or run the stage that writes it")
    if problem.errno == errno.EISDIR:
        return ArtifactError(f"{path}: is a folder, expected a file")
    return ArtifactError(f"{path}: cannot be read ({problem.strerror or problem})")


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
