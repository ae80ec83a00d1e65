"""Reading what is large: each read is bounded in bytes, and nothing is skipped where a page comes shorter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from postbus.model import Dead, Mode, Status, Stream
from postbus.pattern import Interest
from postbus.store import as_arrow, log_of, open_store
from postbus.store.contract import PAGE_BYTES, Claim, DeadFilter, Log
from tests.contract.stores import DONE, OOPS, Operator, ids
from tests.http.serving import place

LARGE: Final = "x" * 1_000_000
COUNT: Final = 200
MOST: Final = 64_000_000
FITTING: Final = PAGE_BYTES // len(LARGE) + 1


def fill(op: Operator, count: int) -> list[int]:
    """Publish large events: half of them pending, the others leased, completed and dead; return their ids."""
    published = [op.publish("large", payload=LARGE, tags=["t"]).id for _ in range(count)]
    for number in range(count // 2):
        delivery = op.take()
        if number % 3:
            op.settle(delivery, DONE if number % 3 == 1 else Dead(OOPS))
    return published


# ── what a read takes ────────────────────────────────────────────────────────────────────────────────────────────────


def reads(store: Log, url: str) -> dict[str, Callable[[], object]]:
    """Return every read of a store that has events or errors in its answer."""

    def listed(status: Status | None, **how: Any) -> Callable[[], object]:
        terms = {"subscription": "default", "type": None, "tags": (), "limit": 500, "offset": 0, "after": None}
        return lambda: store.list(**{**terms, "status": status, **how})

    def claimed(count: int, limit: int) -> object:
        return store.claim_all([Claim("default", f"w{each}", f"w{each}", limit=limit) for each in range(count)])

    return {
        **{f"list {status}": listed(status) for status in (None, *Status)},
        "list by type and tag": listed(None, type="l*", tags=["t"]),
        "list within a time": listed(None, type="*e", within=timedelta(seconds=5)),
        "get": lambda: store.get(1, "default"),
        "logs": lambda: store.logs(1),
        "dead letters": lambda: store.dead_letters(DeadFilter(), limit=500, offset=0, after=None),
        "faults": lambda: store.faults(1_000),
        "read on": lambda: store.read_on(0, 5_000, (Interest(),)),
        "read on for nobody": lambda: store.read_on(0, 5_000, (Interest("other"),)),
        "reader": lambda: read(store),
        "stats": store.stats,
        "standing": lambda: store.standing("s"),
        "activity": lambda: store.activity(Stream.EVENTS, 0, COUNT, timedelta(seconds=10)),
        "Arrow": lambda: sum(each.num_rows for each in as_arrow(url, "events", ("id", "payload"), 0, COUNT)),
        "Arrow, audit": lambda: sum(each.num_rows for each in as_arrow(url, "audit", ("id", "errors"), 0, COUNT)),
        "claim": lambda: claimed(1, 100),
        "claims together": lambda: claimed(2, 50),
    }


def read(store: Log) -> object:
    """Read as a follower does, to the end."""
    position, seen = 0, 0
    with closing(store.reader()) as reader:
        while (ahead := reader.read_on(position, 100, (Interest(),))).looked:
            position, seen = ahead.reached, seen + len(ahead.events)
    return seen


def peak() -> int:
    """Return the most memory that this process had since the last call, and begin anew."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(next(each.split()[1] for each in status.splitlines() if each.startswith("VmHWM")))


def resident() -> int:
    """Return the memory that this process has."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(each.split()[1] for each in status.splitlines() if each.startswith("VmRSS")))


def measure(url: str) -> None:
    """Print what each read takes beyond what there was before it."""
    taken: dict[str, int] = {}
    assert [*as_arrow(url, "events", ("id", "payload"), 0, 1)]  # Arrow itself takes some, and loads pandas
    with closing(log_of(open_store(url))) as store:
        for name, ask in reads(store, url).items():
            before = resident()
            peak()
            ask()
            taken[name] = peak() - before
    sys.stdout.write(json.dumps(taken))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is Linux's to tell")
def test_every_read_of_large_events_takes_little_memory(kind: str, tmp_path: Path):
    """Of 200 events of 1 MB no read holds more than a page: 64 MB at most, whatever the limit asked for."""
    with place(kind, tmp_path) as url:
        with closing(log_of(open_store(url))) as store:
            store.create_subscription("s", ["*"], [], mode=Mode.ORDERED, lease=None, retry=None, start="beginning")
            fill(Operator(store, None), COUNT)  # pyright: ignore[reportArgumentType]  nothing here looks at the clock
        ended = subprocess.run(
            [sys.executable, "-c", f"from tests.contract.test_bounds import measure; measure({url!r})"],
            capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        taken = json.loads(ended.stdout)
        assert {name: size for name, size in taken.items() if size > MOST} == {}


# ── nothing is skipped ───────────────────────────────────────────────────────────────────────────────────────────────


def pages(ask: Callable[[Any], Any]) -> Iterator[Any]:
    """Go from page to page by `next`."""
    after = None
    while True:
        page = ask(after)
        yield page
        after = page.next
        if after is None:
            return


@pytest.mark.parametrize("status", [None, Status.PENDING])
@pytest.mark.parametrize("within", [None, 5.0])
def test_a_list_of_large_events_comes_in_short_pages(op: Operator, status: Status | None, within: float | None):
    """Each page holds what fits, one event at least, and `next` leads to the rest: every event once."""
    wanted = [op.publish("a", payload=LARGE).id for _ in range(11)]
    how = {} if within is None else {"within": timedelta(seconds=within)}
    found = list(pages(lambda after: op.list(status, limit=500, after=after, **how)))
    assert [len(page) for page in found] == [FITTING, FITTING, 1]
    assert [each.id for page in found for each in page] == wanted[::-1]


def test_large_dead_letters_come_in_short_pages(op: Operator):
    """Each letter once, whether its event or its errors are large."""
    wanted = [op.publish("a", payload=LARGE).id for _ in range(9)]
    for delivery in op.take_all():
        op.settle(delivery, Dead(OOPS))
    found = list(pages(lambda after: op.store.dead_letters(DeadFilter(), limit=500, offset=0, after=after)))
    assert [len(page) for page in found] == [FITTING, 9 - FITTING]
    assert [each.event.id for page in found for each in page] == wanted[::-1]
    assert all(page.total == 9 for page in found)


def test_large_events_are_followed_page_by_page(op: Operator):
    """A reader sees each once, in order, and is told each time that there is more."""
    wanted = [op.publish("a", payload=LARGE).id for _ in range(11)]
    position, seen, sizes = 0, list[int](), list[int]()
    more = True
    while more:
        ahead = op.store.read_on(position, 500, (Interest(),))
        position, more = ahead.reached, ahead.more
        seen += ids(ahead.events)
        sizes.append(ahead.looked)
    assert seen == wanted
    assert sizes == [FITTING, FITTING, 1]


def test_what_does_not_fit_into_a_claim_is_handed_back(op: Operator):
    """A claim of more than fits leases what fits, says that there is more, and burns no attempt of the others."""
    wanted = [op.publish("a", payload=LARGE).id for _ in range(12)]
    first = op.ask(100)
    assert (ids([each.event for each in first.deliveries]), first.more) == (wanted[:FITTING], True)
    rest = op.take_all()
    assert sorted(each.event.id for each in rest) == wanted[FITTING:]
    assert {each.attempt for each in rest} == {1}


def test_large_claims_of_several_workers_get_what_fits(op: Operator):
    """What is claimed together for several is bounded for each, and every event is somebody's or still due."""
    wanted = [op.publish("a", payload=LARGE).id for _ in range(12)]
    answers = op.store.claim_all([Claim("default", worker, worker, limit=7) for worker in ("a", "b")])
    leased = [each.event.id for answer in answers for each in answer.deliveries]
    assert all(1 <= len(each.deliveries) <= FITTING for each in answers)
    assert sorted([*leased, *(each.event.id for each in op.take_all())]) == wanted
