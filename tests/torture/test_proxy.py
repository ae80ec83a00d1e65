"""The door that is slammed: where a connection is cut, seen from both of its sides."""

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from postbus.torture.proxy import Cut, Proxy
from tests.conftest import Crew


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """Give a server that nobody has connected to."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)
        yield listening


def served(listening: socket.socket) -> bytes:
    """Take one request of eight bytes, answer it, and return what came of it."""
    with closing(listening.accept()[0]) as link:
        link.settimeout(10)
        came = b""
        while len(came) < 8 and (part := link.recv(100)):
            came += part
        if len(came) == 8:
            link.sendall(b"answer")
        return came


@pytest.mark.parametrize(("when", "came"), [(Cut.BEFORE, b""), (Cut.AFTER, b"POSTbody")])
def test_a_request_in_two_pieces_is_cut_where_it_should_be(
    listening: socket.socket, crew: Crew, when: Cut, came: bytes
):
    """Its head is what it is known by; the server gets all of it or nothing, and the client hears nothing."""
    proxy = Proxy(listening.getsockname()[1])
    crew.start(lambda: served(listening))
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        proxy.cut(when, "POST")
        client.sendall(b"POST")
        if when is Cut.AFTER:
            assert not proxy.wait(0.1), "it was cut before the server could answer"
            client.sendall(b"body")
        assert proxy.wait(10)
        assert client.recv(100) == b""
    assert crew.join(10) == [came]
    proxy.close()


def test_a_request_that_is_cut_on_its_way_is_there_whole(listening: socket.socket, crew: Crew):
    """The server gets the body that follows at once, too; its answer may be quicker than the cut."""
    proxy = Proxy(listening.getsockname()[1])
    crew.start(lambda: served(listening))
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        proxy.cut(Cut.DURING, "POST")
        client.sendall(b"POST")
        client.sendall(b"body")
        assert proxy.wait(10)
        client.recv(100)
    assert crew.join(10) == [b"POSTbody"]
    proxy.close()
