"""`postbus restore-mark`, and the roles of `postbus migrate`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from postbus import EventBus
from tests.postgres.server import server


@pytest.fixture
def url(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the address of a bus with a leased event, which the environment names too."""
    if kind == "sqlite":
        lease_one("sqlite:///shop.db")
        yield "sqlite:///shop.db"
        return
    with server().database() as url:
        monkeypatch.setenv("POSTBUS_URL", url)
        lease_one(url)
        yield url


def lease_one(url: str) -> None:
    """Publish an event and claim it, for longer than the test lasts."""
    bus = EventBus(url, lease=3600)
    bus.publish("a")
    assert bus.poll() is not None
    bus.shutdown()


def test_a_restored_bus_is_marked(url: str, data: Callable[..., Any], cli: Callable[..., Any]):
    """The lease is put back in the command's name, the log is named anew, ids go on far above (I4, I8)."""
    told = data("restore-mark", "--yes")
    assert told["leases"] == 1
    assert len(told["log_id"]) == 32
    last = data("events", "show", "1")["logs"][-1]
    assert (last["action"], last["worker_id"]) == ("RESET", "restore-mark")
    assert data("publish", "b")["id"] == 1_000_000_001
    assert "1 lease" not in cli("restore-mark", "--yes").stderr


def test_marking_must_be_agreed_to(url: str, cli: Callable[..., Any], data: Callable[..., Any]):
    """Without a terminal `--yes` is needed; `--dry-run` only counts; nothing changes (I4)."""
    assert "add --yes" in cli("restore-mark", expect=2).stderr
    assert data("restore-mark", "--dry-run") | {"url": ""} == {
        "url": "", "log_id": None, "leases": 1, "tokens": 0, "dry_run": True,
    }  # fmt: skip
    assert data("publish", "b")["id"] == 2


def test_what_a_restore_makes_good_again_is_told(url: str, cli: Callable[..., Any], data: Callable[..., Any]):
    """Tokens are as the backup has them, and what was erased since is back: somebody must know."""
    used, revoked = (data("token", "create", name, "--scope", "read")["id"] for name in ("web", "old"))
    cli("token", "revoke", revoked, "--yes")
    for how in ("--dry-run", "--yes"):
        told = cli("restore-mark", how).stderr
        assert "1 token good as of the backup" in told
        assert "revoked or erased since then must be revoked and erased again" in told
    assert data("restore-mark", "--dry-run")["tokens"] == 1
    assert [each["id"] for each in data("token", "list") if each["state"] == "good"] == [used]


def test_roles_are_printed_and_granted(kind: str, url: str, cli: Callable[..., Any], data: Callable[..., Any]):
    """`--sql --roles` prints, `--roles` runs, twice without harm; a file has none (S4.11)."""
    if kind == "sqlite":
        assert "has no roles" in cli("migrate", "--roles", expect=2).stderr
        assert "has no roles" in cli("migrate", "--sql", "--roles", expect=2).stderr
        return
    assert "CREATE ROLE" in cli("migrate", "--sql", "--roles").stdout
    assert "CREATE TABLE" not in cli("migrate", "--sql", "--roles").stdout
    assert [data("migrate", "--roles")["changed"] for _ in range(2)] == [False, False]
