"""What was confirmed is what is done: no more, no less, and it is told how far it went."""

from collections.abc import Sequence

import pytest

from postbus import StoreUnavailable
from postbus.store import retention
from postbus.store.session import Row, Session
from tests.dashboard.asking import act, confirm, dead, kill, see
from tests.http.serving import Served
from tests.kinds import on_sqlite

FAULT = "Discard: order <n> has no address"


@pytest.mark.parametrize("asked", [{}, {"type": "order"}, {"subscription": "default"}, {"fault": FAULT}], ids=str)
def test_what_died_after_the_count_is_left_alone(served: Served, asked: dict[str, str]):
    """Whoever confirmed that two are discarded has not discarded a third."""
    kill(served.bus, 2)
    confirmed = confirm(served, "dead/confirm", act="discard", **asked)
    later = kill(served.bus)
    assert "did=discarded&count=2" in act(served, "dead/act", **confirmed).headers["location"]
    assert dead(served.bus) == set(later)


def test_all_means_those_that_were_counted(served: Served):
    """A form that does not say up to when they died changes nothing."""
    kill(served.bus, 2)
    for before in ("", "yesterday", "2026-11-16T08:00"):
        assert act(served, "dead/act", act="discard", all="1", before=before).status_code == 422
    assert len(dead(served.bus)) == 2


@on_sqlite
def test_a_group_is_changed_many_at_a_time_and_whole(served: Served, monkeypatch: pytest.MonkeyPatch):
    """However many there are: the page says when it has not counted all of them."""
    calls: list[int] = []
    revive = retention.revive

    def counted(session: Session, keys: Sequence[Row], actor: str) -> int:
        calls.append(len(keys))
        return revive(session, keys, actor)

    monkeypatch.setattr(retention, "revive", counted)
    monkeypatch.setattr("postbus.store.lookups.TOTAL_CAP", 3)
    kill(served.bus, 5)
    other = kill(served.bus, 1, "no such customer")
    assert "Retry 3 or more dead letters?" in see(served, "dead/confirm", act="retry", fault=FAULT)
    act(served, "dead/act", **confirm(served, "dead/confirm", act="retry", fault=FAULT))
    assert dead(served.bus) == set(other)
    assert calls == [5]


@on_sqlite
def test_what_ends_midway_says_how_many_were_changed(served: Served, monkeypatch: pytest.MonkeyPatch):
    """What is committed stays, and is not passed over in silence."""
    revive = retention.revive

    calls: list[int] = []

    def once(session: Session, keys: Sequence[Row], actor: str) -> int:
        calls.append(len(keys))
        if len(calls) > 1:
            raise StoreUnavailable("the disk is full; nothing was stored")
        return revive(session, keys, actor)

    monkeypatch.setattr(retention, "revive", once)
    monkeypatch.setattr("postbus.store.base.CHUNK", 2)
    kill(served.bus, 5)
    answer = act(served, "dead/act", **confirm(served, "dead/confirm", act="retry", fault=FAULT))
    assert answer.status_code == 503
    assert "2 were retried, then it ended: the disk is full; nothing was stored" in answer.text
    assert len(dead(served.bus)) == 3


def test_a_rewind_goes_where_the_preview_said(served: Served):
    """`now` is the moment of the preview: what came since is not passed over, and what is, is told."""
    *_, last = served.bus.publish_many([{"type": "a"}] * 4)
    served.bus.subscriptions.create("s", "*", mode="ordered", start="beginning")
    assert "Passed over 4 events" in see(served, "subscriptions/s/rewind", to="now")
    confirmed = confirm(served, "subscriptions/s/rewind", to="now")
    served.bus.publish("a")
    done = act(served, "subscriptions/s/rewind", **confirmed)
    (stand,) = served.bus.store.checkpoints()
    assert stand.position == last.id
    answer = served.http.get(done.headers["location"])
    assert "4 passed over" in answer.text
