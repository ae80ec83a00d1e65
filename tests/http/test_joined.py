"""Answers leave the server in as few packets as they can, and nothing of them stays behind."""

import asyncio
from collections.abc import Callable

import pytest

from postbus.http.serve import _Joined


class Wire:
    """A transport that notes what is sent, and what is asked of it."""

    def __init__(self) -> None:
        """Begin with nothing sent."""
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        """Note it."""
        assert not self.closed
        self.sent.append(data)

    def close(self) -> None:
        """End."""
        self.closed = True

    def is_closing(self) -> bool:
        """Return whether it ended."""
        return self.closed

    def get_extra_info(self, name: str) -> str:
        """Return what was asked for."""
        return name


def together(joined: _Joined) -> None:
    """Write a head, and its body at once."""
    joined.write(b"head ")
    joined.write(b"body")


def parts(joined: _Joined) -> None:
    """Write a stream."""
    for part in (b"head ", b"one", b"two", b"three"):
        joined.write(part)


def hung_up(joined: _Joined) -> None:
    """Write a head, and have the other side gone before it was sent."""
    joined.write(b"head ")
    joined._transport.close()


def ended(joined: _Joined) -> None:
    """Write a head, and close."""
    joined.write(b"head ")
    joined.close()


@pytest.mark.parametrize(
    ("write", "sent"),
    [
        (together, [b"head body"]),
        (parts, [b"head one", b"twothree"]),
        (lambda joined: joined.write(b"head "), [b"head "]),
        (hung_up, []),
        (ended, [b"head "]),
    ],
    ids=["together", "parts", "alone", "hung up", "ended"],
)
def test_a_head_waits_for_its_body_only_until_the_loop_goes_on(write: Callable[[_Joined], None], sent: list[bytes]):
    """All that is written is sent, in order, within a turn of the loop."""

    async def run() -> list[bytes]:
        wire = Wire()
        joined = _Joined(wire, lambda: False)  # type: ignore[arg-type]
        write(joined)
        await asyncio.sleep(0)
        assert joined.get_extra_info("peername") == "peername"
        return wire.sent

    assert asyncio.run(run()) == sent
