"""What tests ask of the dashboard by plain HTTP, as a browser would."""

import re
from html import unescape
from typing import Any

import httpx2

from postbus import Discard, EventBus
from postbus.store.contract import DeadFilter
from tests.http.serving import Served

__all__ = ["act", "confirm", "dead", "kill", "see"]


def see(served: Served, path: str, expected: int = 200, /, **query: Any) -> str:
    """Return the text of a page, as people read it."""
    answer = served.http.get(f"/dashboard/{path}", params=query)
    assert answer.status_code == expected, answer.text
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.text)))


def act(served: Served, path: str, **form: Any) -> httpx2.Response:
    """Send a form as a browser would from our own page."""
    return served.http.post(f"/dashboard/{path}", data=form, headers={"origin": served.url})


def confirm(served: Served, path: str, /, **query: Any) -> dict[str, Any]:
    """Return what the form of a page that asks whether one is sure would send: its hidden fields, and its button."""
    text = served.http.get(f"/dashboard/{path}", params=query).text
    form = text[text.index('<form method="post" action="/dashboard/', text.index("<main")) :]
    sent = re.findall(r'<(?:input type="hidden"|button[^>]*?) name="([^"]+)" value="([^"]*)"', form)
    found: dict[str, Any] = {}
    for name, value in sent:
        found.setdefault(unescape(name), []).append(unescape(value))
    return found


def kill(bus: EventBus, count: int = 1, message: str = "order 17 has no address") -> list[int]:
    """Publish events that die of the same error."""
    made = bus.publish_many([{"type": "order", "payload": {"n": number}} for number in range(count)])
    for each in bus.poll_many(count, types=["order"]):
        bus.finalize(each, success=False, errors=[Discard(message)], retry=False)
    return [each.id for each in made]


def dead(bus: EventBus) -> set[int]:
    """Return which events are dead letters."""
    return {each.event.id for each in bus.store.dead_letters(DeadFilter(), limit=100, offset=0, after=None)}
