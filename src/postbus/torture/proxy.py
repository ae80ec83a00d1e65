"""A door before the server that can be slammed: a small TCP proxy that cuts connections at a chosen moment."""

import contextlib
import re
import select
import socket
import threading
from collections.abc import Callable, Generator
from enum import Enum
from pathlib import Path
from typing import Final

__all__ = ["Cut", "Proxy"]

CHUNK: Final = 65_536
A_MOMENT: Final = 0.2


class Cut(Enum):
    """When a connection is cut, as seen from the request that ends a transaction."""

    BEFORE = "the server never gets it"
    DURING = "the server gets it, and both sides are cut at once"
    AFTER = "the server has answered, and the client never hears it"


class Proxy:
    """Passes bytes between clients and one server, until it is armed."""

    def __init__(self, server: Path | int) -> None:
        """Stand before the server that listens on this socket, or on this port."""
        self._server = server
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self._armed: tuple[Cut, re.Pattern[bytes], Callable[[], None]] | None = None
        self._fired = threading.Event()
        self._links: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, behind: str) -> str:
        """Return the address that leads through here to a database, given its own."""
        database = behind.partition("?")[0].rpartition("/")[2]
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    @property
    def port(self) -> int:
        """Where it listens itself."""
        return self._listener.getsockname()[1]

    @contextlib.contextmanager
    def shut(self) -> Generator[None]:
        """Let nothing through for the length of a block, in either direction, and tell neither side."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def cut(self, when: Cut, request: str, first: Callable[[], None] = lambda: None) -> None:
        """Cut the next connection whose client sends something like `request`; do something else `first`."""
        with self._lock:
            self._fired.clear()
            self._armed = (when, re.compile(request.encode()), first)

    def wait(self, seconds: float) -> bool:
        """Return whether the cut has happened, within so long."""
        return self._fired.wait(seconds)

    def cut_all(self) -> None:
        """Cut every connection there is."""
        with self._lock:
            links = tuple(self._links)
        for link in links:
            _shut(link)

    def close(self) -> None:
        """Take no more connections, and cut those there are."""
        _shut(self._listener)
        self._listener.close()
        self.cut_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        by_port = isinstance(self._server, int)
        upstream = socket.socket(socket.AF_INET if by_port else socket.AF_UNIX)
        link = _Link(client, upstream, self._open)
        try:
            self._open.wait()
            upstream.connect(("127.0.0.1", self._server) if by_port else str(self._server))
            with self._lock:
                self._links |= {client, upstream}
            back = threading.Thread(target=link.pump, args=(upstream, client, link.answer), daemon=True)
            back.start()
            link.pump(client, upstream, lambda data: self._request(link, data))
            back.join()
        except OSError:
            pass  # no server behind the door: the client is hung up on
        finally:
            with self._lock:
                self._links -= {client, upstream}
            client.close()
            upstream.close()
            if link.cut is not None:  # the server may have ended without an answer
                link.cut()

    def _request(self, link: "_Link", data: bytes) -> bytes | None:
        with self._lock:
            if self._armed is None or not self._armed[1].search(data):
                return data
            (when, _, first), self._armed = self._armed, None
            self.cuts += 1
        first()
        match when:
            case Cut.BEFORE:
                link.close()
            case Cut.DURING:
                whole = data + link.rest()
                link.cut = self._fired.set  # before the server has it, which may be quicker than we are
                link.upstream.sendall(whole)
                link.close()
            case Cut.AFTER:
                link.cut = self._fired.set  # by the server's answer; more of the request may be to come before it
                return data
        self._fired.set()
        return None


class _Link:
    """A client, the server, and what goes between them."""

    def __init__(self, client: socket.socket, upstream: socket.socket, is_open: threading.Event) -> None:
        self._open = is_open
        self.client = client
        self.upstream = upstream
        self.cut: Callable[[], None] | None = None
        """Called when the server has answered what the client is to hear no answer to."""

    def answer(self, data: bytes) -> bytes | None:
        """Let the client hear the server, unless it is to hear nothing any more: then both sides are cut."""
        if self.cut is None:
            return data
        self.close()
        self.cut()
        return None

    def rest(self) -> bytes:
        """Return what the client sends right after what was read of it: a body may follow its head."""
        coming, _, _ = select.select([self.client], [], [], A_MOMENT)
        return self.client.recv(CHUNK) if coming else b""

    def pump(self, source: socket.socket, target: socket.socket, through: Callable[[bytes], bytes | None]) -> None:
        """Pass on what comes, until one side is gone."""
        with contextlib.suppress(OSError):
            while (data := source.recv(CHUNK)) and (passed := through(data)) is not None:
                self._open.wait()
                target.sendall(passed)
        self.close()

    def close(self) -> None:
        """Cut both sides."""
        _shut(self.client)
        _shut(self.upstream)


def _shut(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
