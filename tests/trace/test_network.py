"""The guard around a factory: only the machine itself can be reached, and all is as before afterwards."""

import socket

import pytest

from tessera_core.trace.network import no_network
from tessera_formats.errors import ModelError


def test_the_machine_itself_can_be_reached() -> None:
    with no_network("the factory"), socket.create_server(("127.0.0.1", 0)) as server:
        for host in ("localhost", "127.0.0.1"):
            socket.create_connection((host, server.getsockname()[1]), timeout=5).close()
        one, other = socket.socketpair()
        one.close(), other.close()


@pytest.mark.parametrize("attempt", ["connect", "connect_ex"])
@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")]
)
def test_addresses_elsewhere_are_refused(attempt: str, family: socket.AddressFamily, host: str) -> None:
    with (
        no_network("the factory"),
        socket.socket(family) as own,
        pytest.raises(
            ModelError, match=r"^the factory needs the network \(.*:80\) at .*test_network.py:\d+; "
        ),
    ):
        getattr(own, attempt)((host, 80))


@pytest.mark.parametrize("host", ["example.invalid", b"example.invalid"])
def test_names_are_not_looked_up(host: str | bytes) -> None:
    with no_network("the factory"), pytest.raises(ModelError, match=r"needs the network \(example.invalid\)"):
        socket.getaddrinfo(host, 80)


def test_what_a_library_makes_of_the_refusal_is_named_too() -> None:
    with (
        pytest.raises(
            ModelError, match=r"needs the network \(x.invalid\) at .*, and then raises KeyError: 'y'; "
        ),
        no_network("the factory"),
    ):
        try:
            socket.getaddrinfo("x.invalid", 80)
        except ModelError:
            raise KeyError("y") from None


def test_an_error_of_its_own_passes_and_everything_is_put_back() -> None:
    before = (socket.getaddrinfo, socket.socket.connect, socket.socket.connect_ex)
    with pytest.raises(KeyError), no_network("the factory"):
        raise KeyError("y")
    assert (socket.getaddrinfo, socket.socket.connect, socket.socket.connect_ex) == before
    assert "connect" not in vars(socket.socket)
