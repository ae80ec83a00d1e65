"""Processes that publish to, claim from and meddle with the core's tables, past the product: `python -m` this module.

Each reads its configuration as JSON from the command line, works until there is something on its standard input
(publishers: for a given time), and writes what it knows at the end as JSON.
"""

import json
import random
import select
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple
from uuid import uuid4

import psycopg

from postbus.store.postgres.connection import PLANNER

__all__ = ["Actor", "Lease", "connect"]

APPEND: Final = "SELECT event_id FROM postbus.append($1, false)"
CLAIM: Final = """
    SELECT state, number, first_id, size, ids, numbers, lone_ids, reached, reached_id
      FROM postbus.claim($1, $2, '[]', $3, 4, $4, $5, 4, $6, $6, $7, true, $8, 0, $9, $10)
"""
FINISH: Final = "SELECT postbus.finish($1::bigint[], $2::bigint[], $3::real[], $4)"
HOLD: Final = "SELECT n, state, attempt, retry_count FROM postbus.hold($1::integer[], $2::bigint[], $3::bigint[])"
WITHDRAW: Final = "SELECT place, state FROM postbus.withdraw($1::integer[], $2::bigint[]) ORDER BY n"
ALL: Final = '[["*", []]]'
ONLY_A: Final = '[["a", []]]'
Row = tuple[Any, ...]


class Lease(NamedTuple):
    """The right to work on a delivery."""

    subscription: int
    event_id: int
    epoch: int


def connect(url: str) -> psycopg.Connection[Any]:
    """Connect as the store does."""
    options = " ".join(f"-c {name}={value}" for name, value in PLANNER.items())
    return psycopg.connect(
        url, autocommit=True, cursor_factory=psycopg.RawCursor, options=options, prepare_threshold=1, connect_timeout=30
    )


class Actor:
    """What all have in common."""

    def __init__(self, url: str, seed: str, **config: Any) -> None:
        """Begin without a connection."""
        self.url = url
        self.name = seed
        self.chance = random.Random(seed)
        self.config = config
        self.counts: dict[str, int] = {}
        self.ids: list[int] = []
        self.slowest: dict[str, float] = {}
        self._connection: psycopg.Connection[Any] | None = None

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The open connection; one that was lost is replaced, as soon as the server is back."""
        deadline = time.monotonic() + 30
        while self._connection is None or self._connection.closed:
            try:
                self._connection = connect(self.url)
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        return self._connection

    def run(self, sql: str, *parameters: Any) -> list[Row]:
        """Run a statement and return its rows."""
        cursor = self.connection.execute(sql, parameters or None)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []

    def count(self, what: str, number: int = 1) -> None:
        """Remember how often something happened."""
        self.counts[what] = self.counts.get(what, 0) + number

    def act(self) -> None:
        """Do one thing."""
        raise NotImplementedError

    def play(self) -> None:
        """Go on until told to stop; a lost connection is all that may go wrong."""
        self.run("SELECT 1")
        print("ready", flush=True)  # noqa: T201  for whoever started it
        end = time.monotonic() + self.config.get("seconds", 3600)
        while time.monotonic() < end and not select.select([sys.stdin], [], [], 0)[0]:
            try:
                self.act()
            except psycopg.OperationalError:
                if self._connection is not None and not self._connection.closed:
                    raise
                self.count("lost")
        known = {"name": self.name, "counts": self.counts, "ids": self.ids, "slowest": self.slowest}
        print(json.dumps(known), flush=True)  # noqa: T201  for whoever started it


class Publisher(Actor):
    """Appends in transactions that are short, long, rolled back, or rolled back in part."""

    def act(self) -> None:
        chance, connection = self.chance, self.connection
        brought: list[int] = []
        with suppress(InterruptedError), connection.transaction():
            for _ in range(chance.choice([1, 1, 1, 3])):
                with suppress(InterruptedError), connection.transaction():
                    ids = [row[0] for row in self.run(APPEND, self._batch())]
                    if chance.random() < 0.15:
                        raise InterruptedError
                    brought += ids
                if chance.random() < 0.1:
                    time.sleep(chance.uniform(0, self.config["longest"]))
            if chance.random() < 0.2:
                brought = []
                raise InterruptedError
        self.ids += brought
        self.count("published", len(brought))
        time.sleep(chance.choice([0, 0.002, 0.01]))

    def _batch(self) -> str:
        return json.dumps([self._event() for _ in range(self.chance.choice(self.config["sizes"]))])

    def _event(self) -> dict[str, Any]:
        event: dict[str, Any] = {"uid": str(uuid4()), "type": self.chance.choice("aab"), "payload": "1"}
        special = self.chance.random()
        if special < 0.05:
            event["priority"] = self.chance.choice([-5, 3, 7])
        elif special < 0.1:
            event["delay"] = self.chance.randrange(1_000_000)
        elif special < 0.15:
            event["max_retries"] = 0
        return event


class Claimer(Actor):
    """Claims and finishes: blocks of both types, blocks of one type, or one by one."""

    def __init__(self, url: str, seed: str, **config: Any) -> None:
        """Hold nothing."""
        super().__init__(url, seed, **config)
        self.wait = False
        self.looked = 0.0
        self.since: dict[tuple[int, str], tuple[int, int]] = {}
        self.token = ""
        self.asking = False
        self.done: tuple[list[Lease], ...] = ()

    def claim(self, subscription: int, wanted: str, most: int, *, whole: bool, lease: int) -> list[Lease]:
        """Lease what there is."""
        self.token = f"{self.name} {uuid4()}"
        self.asking = True
        if time.monotonic() > self.looked + 1:
            self.looked, self.since = time.monotonic(), {}
        since = self.since.get((subscription, wanted), (None, None))
        row = self.run(CLAIM, subscription, wanted, most, whole, lease, self.name, self.token, self.wait, *since)[0]
        self.asking = False
        state, number, first, size, offsets, numbers, lone, *reached = row
        if reached[0] is not None:
            self.since[subscription, wanted] = (reached[0], reached[1])
        self.count(state)
        self.wait = state == "busy"
        leases = [
            Lease(subscription, first + (offsets[place] if offsets else place), number << 10 | place)
            for place in range(size or 0)
        ]
        leases += [
            Lease(subscription, *each) for each in zip(lone or (), (n << 10 for n in numbers or ()), strict=True)
        ]
        if not leases and not self.wait:
            time.sleep(0.005)
        return leases

    def finish(self, leases: Sequence[Lease]) -> list[Lease]:
        """Report that all is done; return what the fence stopped."""
        if not leases:
            return []
        (left,) = self.run(
            FINISH,
            [each.epoch for each in leases],
            [each.event_id for each in leases],
            [self.chance.uniform(0.1, 900) for _ in leases],
            self.name,
        )[0]
        self.count("finished", len(leases) - len(left))
        return [leases[number - 1] for number in left]

    def act(self) -> None:
        if self.asking:  # the answer was lost: what it was given, nobody knows
            self.count("released", len(self.run("SELECT postbus.release(NULL, NULL, $1, $2, $3)", *self._back())[0][0]))
            self.asking = False
        for group in self.done:
            self.count("repeated", len(self.finish(group)))
        self.done = ()
        kind = self.config["kind"]
        most = 1 if kind == "single" else self.chance.choice([2, 10, 100, 1_000])
        leases = self.claim(1, ONLY_A if kind == "type" else ALL, most, whole=kind != "single", lease=3_600_000_000)
        cut = self.chance.randrange(len(leases) + 1)
        self.done = (leases[:cut], leases[cut:])
        for group in self.done:
            lost = self.finish(group)
            if lost:
                raise AssertionError(f"lost {lost[:5]}, {len(lost)} of {len(group)}")
            self.done = self.done[1:]

    def _back(self) -> tuple[str, int, str]:
        return self.token, int(time.time() * 1e6), self.name


class Meddler(Claimer):
    """Does everything that can be done to deliveries, at random, and forgets some of its leases."""

    def __init__(self, url: str, seed: str, **config: Any) -> None:
        """Hold nothing."""
        super().__init__(url, seed, **config)
        self.held: list[Lease] = []

    def act(self) -> None:
        verbs = {
            self._claim: 30, self._finish: 25, self._retry: 6, self._bury: 3, self._release: 5, self._extend: 5,
            self._forget: 2, self._expire: 5, self._reset: 5, self._cancel: 3, self._rewind: 1, self._prune: 2,
            self._publish: 15, self._gaps: 2, self._kinds: 1,
        }  # fmt: skip
        verb = self.chance.choices(list(verbs), list(verbs.values()))[0]
        begun = time.monotonic()
        verb()
        self.count(verb.__name__)
        self.slowest[verb.__name__] = max(self.slowest.get(verb.__name__, 0), round(time.monotonic() - begun, 2))

    def _claim(self) -> None:
        whole = self.chance.random() < 0.7
        most = self.chance.choice([2, 20, 200, 1_000]) if whole else self.chance.choice([1, 1, 5])
        subscription = self.chance.choice([1, 1, 2])
        wanted = self.chance.choice([ALL, ALL, ONLY_A, '[["b", []]]'])
        lease = self.chance.choice([100_000, 1_000_000, 5_000_000])
        self.held += self.claim(subscription, wanted, most, whole=whole, lease=lease)

    def _some(self) -> list[Lease]:
        """Take some of the leases, of several blocks."""
        self.chance.shuffle(self.held)
        number = self.chance.choice([1, 5, 50, 1_000])
        some, self.held = self.held[:number], self.held[number:]
        return some

    def _finish(self) -> None:
        left = self.finish(self._some())
        self._settle(left, "done")

    def _retry(self) -> None:
        self._settle(self._some(), "retry")

    def _bury(self) -> None:
        self._settle(self._some()[:5], "dead")

    def _settle(self, leases: Sequence[Lease], outcome: str) -> None:
        """Settle one by one: block, then row."""
        if not leases:
            return
        with self.connection.transaction():
            given = ([each.subscription for each in leases], [each.event_id for each in leases],
                     [each.epoch for each in leases])  # fmt: skip
            told = self.run(HOLD, *given)
            now = self.run("SELECT postbus.micros(postbus.now())")[0][0]
            rows, entries, gone = list[dict[str, Any]](), list[dict[str, Any]](), list[Lease]()
            for (number, state, attempt, retries), lease in zip(told, leases, strict=True):
                assert leases[number - 1] == lease
                if state is None or (state == "expired" and outcome == "retry"):
                    self.count("fenced")
                    continue
                action = {"done": "COMPLETED", "retry": "FAILED", "dead": "FAILED"}[outcome]
                status = {"done": "COMPLETED", "retry": "PENDING", "dead": "FAILED"}[outcome]
                entries.append({**lease._asdict(), "subscription": lease.subscription, "attempt": attempt,
                                "action": action, "status": status, "worker_id": self.name})  # fmt: skip
                if outcome == "done":
                    gone.append(lease)
                else:
                    due = now + self.chance.randrange(500_000)
                    rows.append({"subscription": lease.subscription, "event_id": lease.event_id,
                                 "state": 0 if outcome == "retry" else 2, "due_at": due if outcome == "retry" else None,
                                 "ready_at": due, "attempt": attempt, "retry_count": retries + (outcome == "retry"),
                                 "worker_id": self.name, "errors": "[]"})  # fmt: skip
            self.run("SELECT postbus.log($1::json, $2)", json.dumps(entries), now)
            self.run(
                "DELETE FROM postbus.deliveries AS d USING unnest($1::integer[], $2::bigint[]) AS g (s, e)"
                " WHERE d.subscription = g.s AND d.event_id = g.e",
                [each.subscription for each in gone],
                [each.event_id for each in gone],
            )
            leased = [leases[number - 1].epoch for number, state, *_ in told if state == "leased"]
            self.run("SELECT postbus.set_bits($1::bigint[])", leased)
            self.run("SELECT postbus.put_rows($1::json, $2)", json.dumps(rows), now)

    def _release(self) -> None:
        some = self._some()
        due = int(time.time() * 1e6) + self.chance.choice([0, 0, 300_000])
        self.run(
            "SELECT postbus.release($1::bigint[], $2::bigint[], NULL, $3, $4)",
            [each.epoch for each in some],
            [each.event_id for each in some],
            due,
            self.name,
        )

    def _extend(self) -> None:
        numbers = list({each.epoch >> 10 for each in self.held})
        self.run("SELECT number, until, done FROM postbus.extend($1::bigint[], $2)", numbers, 1_000_000)

    def _forget(self) -> None:
        self._some()

    def _expire(self) -> None:
        self.run("SELECT postbus.expire(NULL, 4, 100)")

    def _event(self) -> int:
        ends = self.run("SELECT coalesce(min(id), 1), coalesce(max(id), 1) FROM postbus.events")[0]
        return self.chance.randint(*ends) if self.chance.random() < 0.5 or not self.held else self.held[0].event_id

    def _reset(self) -> None:
        subscription, event = self.chance.choice([1, 2]), self._event()
        with self.connection.transaction():
            place, state = self.run(WITHDRAW, [subscription], [event])[0]
            if place in ("skip", "ended", "none") or (place == "row" and state in (2, 3)):
                return
            kinds = self.run(
                "UPDATE postbus.deliveries SET due_at = postbus.now(), ready_at = postbus.now(), epoch = NULL"
                " WHERE subscription = $1 AND event_id = $2 RETURNING kind",
                subscription,
                event,
            )
            self._log(subscription, event, "RESET")
            self.run("SELECT postbus.note_kinds($1, $2::bigint[])", subscription, [kinds[0][0]])
            self.count(f"reset {place}")

    def _cancel(self) -> None:
        """Cancel an event in both subscriptions at once, as an erase does."""
        event = self._event()
        with self.connection.transaction():
            found = self.run(WITHDRAW, [2, 1], [event, event])
            for subscription, (place, state) in zip((2, 1), found, strict=True):
                if place in ("skip", "ended", "none") or (place == "row" and state in (2, 3)):
                    continue
                sql = "DELETE FROM postbus.deliveries WHERE subscription = $1 AND event_id = $2"
                self.run(sql, subscription, event)
                self._log(subscription, event, "CANCELLED")
                self.count(f"cancel {place}")

    def _log(self, subscription: int, event: int, action: str) -> None:
        entry = {"event_id": event, "subscription": subscription, "action": action, "worker_id": self.name}
        self.run("SELECT postbus.log($1::json, postbus.micros(postbus.now()))", json.dumps([entry]))

    def _rewind(self) -> None:
        subscription = self.chance.choice([1, 2])
        (position,) = self.run("SELECT position FROM postbus.cursors WHERE subscription = $1", subscription)[0]
        target = max(0, position - self.chance.choice([1, 100, 2_000]))
        with suppress(psycopg.DatabaseError):
            try:
                self.run("SELECT postbus.rewind($1, $2, $3)", subscription, target, self.name)
                self.count("rewound")
            except psycopg.DatabaseError as error:
                if error.sqlstate != "PB004":
                    raise RuntimeError(str(error)) from error

    def _prune(self) -> None:
        (lowest,) = self.run("SELECT min(position) FROM postbus.cursors")[0]
        through = lowest + self.chance.choice([-5_000, -3_000, 0])
        if through > 0:
            self.run(
                "UPDATE postbus.meta SET value = greatest(value::bigint, $1)::text WHERE key = 'pruned_through'",
                through,
            )
            (gone,) = self.run("SELECT postbus.prune_events(0, $1)", through)[0]
            self.count("pruned", gone)

    def _publish(self) -> None:
        publisher = Publisher.__new__(Publisher)
        publisher.__dict__ |= self.__dict__
        publisher.config = {"longest": 0.2, "sizes": [1, 1, 5, 20]}
        Publisher.act(publisher)

    def _gaps(self) -> None:
        for (number,) in self.run("SELECT number FROM postbus.gaps"):
            self.run("SELECT postbus.close_gap($1)", number)

    def _kinds(self) -> None:
        self.run("SELECT postbus.drop_kinds()")


if __name__ == "__main__":
    config = json.loads(sys.argv[1])
    {"publisher": Publisher, "claimer": Claimer, "meddler": Meddler}[config.pop("role")](**config).play()
