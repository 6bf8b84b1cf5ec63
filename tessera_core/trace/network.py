"""No network while a user's factory builds a model: a trace must not depend on what a server says, nor wait for one.

Libraries retry a connection for minutes before they give up; here the first attempt is the error. Connections of
the machine to itself are let through.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

from tessera_core.trace.place import calling_place, one_line
from tessera_formats.errors import ModelError, TesseraError

_ADVICE = "build the model from a configuration, and take what else it needs from local files"


@contextlib.contextmanager
def no_network(said: str) -> Iterator[None]:
    """Refuse connections and look-ups of host names inside, with a :class:`ModelError` that starts with ``said``.

    A library that makes another exception of it is named with that.
    """
    refused: list[str] = []
    before = {name: vars(socket.socket).get(name) for name in ("connect", "connect_ex")}
    connect, connect_ex, look_up = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def refuse(host: object) -> None:
        refused.append(f"{said} needs the network ({host}) at {calling_place()}")
        raise ModelError(f"{refused[0]}; {_ADVICE}")

    def check(own: socket.socket, address: Any) -> None:
        if own.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(str(address[0])):
            refuse(f"{address[0]}:{address[1]}")

    def connecting(own: socket.socket, address: Any) -> None:
        check(own, address)
        connect(own, address)

    def connecting_ex(own: socket.socket, address: Any) -> int:
        check(own, address)
        return connect_ex(own, address)

    def looking_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name and not _is_local(name) and not _is_address(name):
            refuse(name)
        return look_up(host, *args, **kwargs)

    setattr(socket.socket, "connect", connecting)  # noqa: B010
    setattr(socket.socket, "connect_ex", connecting_ex)  # noqa: B010
    socket.getaddrinfo = looking_up
    try:
        yield
    except (Exception, SystemExit) as problem:
        if not refused or isinstance(problem, TesseraError):
            raise
        raise ModelError(f"{refused[0]}, and then raises {one_line(problem)}; {_ADVICE}") from problem
    finally:
        socket.getaddrinfo = look_up
        for name, own in before.items():
            if own is None:
                delattr(socket.socket, name)  # that of the C class is there again
            else:
                setattr(socket.socket, name, own)


def _is_local(host: str) -> bool:
    if host in ("", "localhost"):
        return True
    return _is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
