"""Processes that publish to, claim from and meddle with a store on PostgreSQL: `python -m` this module.

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
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import psycopg

from postbus.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from postbus.model import AttemptError, Dead, Done, DoneWithErrors, Lease, Outcome, Retry, Stream
from postbus.pattern import Interest
from postbus.payload import Draft, draft
from postbus.retry import RetryPolicy
from postbus.store import Log, log_of, open_store, registry
from postbus.store.contract import Claim, DeadFilter, Settled, Settlement
from postbus.store.postgres.address import PLANNER

__all__ = ["ALL", "NAMES", "POLICY", "Actor", "connect"]

NAMES: Final = ("default", "second")
ALL: Final = (Interest(),)
ONLY_A: Final = (Interest("a"),)
ONLY_B: Final = (Interest("b"),)
POLICY: Final = RetryPolicy(max_retries=3)
OOPS: Final = AttemptError("ValueError", "oops")
LATE: Final = """
    SELECT e.id
      FROM (SELECT unnest(missing) FROM postbus.cursors UNION ALL SELECT unnest(ids) FROM postbus.gaps) AS r (ids)
     CROSS JOIN LATERAL (SELECT v.id FROM postbus.events AS v WHERE v.id >= lower(r.ids) AND v.id < upper(r.ids)) AS e
     LIMIT 1
"""
HOUR: Final = timedelta(hours=1)
RETURN: Final = 30.0
"""Seconds that a server has to come back."""


def connect(url: str) -> psycopg.Connection[Any]:
    """Connect past the store, with its settings."""
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
        self._store: Log | None = None

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The open connection; one that was lost is replaced, as soon as the server is back."""
        deadline = time.monotonic() + RETURN
        while self._connection is None or self._connection.closed:
            try:
                self._connection = connect(self.url)
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        return self._connection

    @property
    def store(self) -> Log:
        """The store, which stays open whatever becomes of the server."""
        if self._store is None:
            self._store = log_of(open_store(self.url))
        return self._store

    def run(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement past the store and return its rows."""
        cursor = self.connection.execute(sql, parameters or None)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []

    def count(self, what: str, number: int = 1) -> None:
        """Remember how often something happened."""
        self.counts[what] = self.counts.get(what, 0) + number

    def act(self) -> None:
        """Do one thing."""
        raise NotImplementedError

    def play(self) -> None:
        """Go on until told to stop; a server that is lost is all that may go wrong, if it is to be lost at all."""
        lost = (StoreUnavailable, psycopg.OperationalError) if self.config.get("crashes") else ()
        self.store.now()
        print("ready", flush=True)  # noqa: T201  for the process that started it
        end = time.monotonic() + self.config.get("seconds", 3600)
        while time.monotonic() < end and not select.select([sys.stdin], [], [], 0)[0]:
            try:
                self.act()
            except lost:
                self.count("lost")
                time.sleep(0.05)
        self.store.close()
        known = {"name": self.name, "counts": self.counts, "ids": self.ids, "slowest": self.slowest}
        print(json.dumps(known), flush=True)  # noqa: T201  for the process that started it


class Publisher(Actor):
    """Publishes alone, and in transactions that are short, long, rolled back, or rolled back in part."""

    def act(self) -> None:
        if self.chance.random() < 0.2:
            self._note([each.id for each in self.store.publish(self._batch())])
        else:
            self._transact()
        time.sleep(self.chance.choice([0, 0.002, 0.01]))

    def _transact(self) -> None:
        chance, connection = self.chance, self.connection
        brought: list[int] = []
        with suppress(InterruptedError), connection.transaction():
            for _ in range(chance.choice([1, 1, 1, 3])):
                with suppress(InterruptedError), connection.transaction():
                    ids = [each.id for each in self.store.publish_on(connection, self._batch())]
                    if chance.random() < 0.15:
                        raise InterruptedError
                    brought += ids
                if chance.random() < 0.1:
                    time.sleep(chance.uniform(0, self.config["longest"]))
            if chance.random() < 0.2:
                brought = []
                raise InterruptedError
        self._note(brought)

    def _note(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.count("published", len(ids))

    def _batch(self) -> list[Draft]:
        return [draft(self._event()) for _ in range(self.chance.choice(self.config["sizes"]))]

    def _event(self) -> dict[str, Any]:
        event: dict[str, Any] = {"type": self.chance.choice("aab"), "payload": 1}
        special = self.chance.random()
        if special < 0.05:
            event["priority"] = self.chance.choice([-5, 3, 7])
        elif special < 0.1:
            event["delay"] = self.chance.random()
        elif special < 0.15:
            event["max_retries"] = 0
        return event


class Claimer(Actor):
    """Claims and finishes: blocks of both types, blocks of one type, or one by one."""

    def __init__(self, url: str, seed: str, **config: Any) -> None:
        """Hold nothing."""
        super().__init__(url, seed, **config)
        self.owner = uuid4().hex
        self.told: list[list[Lease]] = []
        """What has worked, and is still to be acknowledged by the store."""

    def claim(
        self, subscription: str, interests: tuple[Interest, ...], limit: int, *, shared: bool, lease: timedelta
    ) -> list[Lease]:
        """Lease what there is."""
        claimed = self.store.claim(
            Claim(
                subscription, self.name, self.owner, interests, limit=limit, lease=lease, policy=POLICY,
                shared=shared,
            )
        )  # fmt: skip
        covered = {each.pattern for each in interests}
        assert "*" in covered or all(each.event.type in covered for each in claimed.deliveries), "of another type"
        self.count("claimed" if claimed.deliveries else "empty")
        if not claimed.deliveries:
            time.sleep(0.005)
        return [each.lease for each in claimed.deliveries]

    def settle(self, leases: Sequence[Lease], outcomes: Sequence[Outcome]) -> list[Settled]:
        """Tell how deliveries ended; count what became of it."""
        answers = self.store.settle(
            [
                Settlement(lease, outcome, self.name, None, self.chance.uniform(0.1, 900))
                for lease, outcome in zip(leases, outcomes, strict=True)
            ]
        )
        for each in answers:
            self.count(each)
        return answers

    def act(self) -> None:
        self._acknowledge()
        if self.chance.random() < 0.02:
            self.count("expired", self.store.expire(None, POLICY))
        kind = self.config["kind"]
        limit = 1 if kind == "single" else self.chance.choice([2, 10, 100, 1_000])
        shared = kind != "single" and self.chance.random() < 0.9
        leases = self.claim("default", ONLY_A if kind == "type" else ALL, limit, shared=shared, lease=HOUR)
        cut = self.chance.randrange(len(leases) + 1)
        self.told = [leases[:cut], leases[cut:]]
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Report that all is done, again where the answer was lost: nobody else can have had it meanwhile."""
        while self.told:
            group = self.told[0]
            answers = self.settle(group, [Done()] * len(group))
            lost = [lease for lease, answer in zip(group, answers, strict=True) if answer is Settled.LOST]
            assert not lost, f"lost {lost[:5]}, {len(lost)} of {len(group)}"
            self.told.pop(0)


class Meddler(Claimer):
    """Does everything that can be done to deliveries, at random, and forgets some of its leases."""

    def __init__(self, url: str, seed: str, **config: Any) -> None:
        """Hold nothing."""
        super().__init__(url, seed, **config)
        self.held: list[Lease] = []
        self.publisher = Publisher(url, seed, longest=0.2, sizes=[1, 1, 5, 20])
        self.publisher.ids, self.publisher.counts, self.publisher.chance = self.ids, self.counts, self.chance
        registry.SPARE_KINDS = 0  # so that tidying drops kinds

    def act(self) -> None:
        verbs = {
            self._claim: 30, self._finish: 20, self._settle: 14, self._release: 5, self._extend: 5, self._forget: 2,
            self._expire: 5, self._reset: 5, self._erase: 3, self._rewind: 2, self._prune: 2, self._revive: 1,
            self._purge: 1, self._redeliver: 1, self._publish: 15, self._tidy: 1,
        }  # fmt: skip
        verb = self.chance.choices(list(verbs), list(verbs.values()))[0]
        begun = time.monotonic()
        try:
            verb()
            self.count(verb.__name__)
        except (Conflict, NotFound, InvalidRequest) as error:
            if verb not in (self._reset, self._rewind, self._prune, self._redeliver):
                raise
            self.count(f"{verb.__name__} {type(error).__name__}")
        self.slowest[verb.__name__] = max(self.slowest.get(verb.__name__, 0), round(time.monotonic() - begun, 2))

    def _claim(self) -> None:
        shared = self.chance.random() < 0.7
        limit = self.chance.choice([2, 20, 200, 1_000]) if shared else self.chance.choice([1, 1, 5])
        subscription = self.chance.choice(["default", *NAMES])
        interests = self.chance.choice([ALL, ALL, ONLY_A, ONLY_B])
        lease = timedelta(seconds=self.chance.choice([0.1, 1, 5]))
        self.held += self.claim(subscription, interests, limit, shared=shared, lease=lease)

    def _some(self) -> list[Lease]:
        """Take some of the leases, of several blocks."""
        self.chance.shuffle(self.held)
        number = self.chance.choice([1, 5, 50, 1_000])
        some, self.held = self.held[:number], self.held[number:]
        return some

    def _finish(self) -> None:
        """Finish some; told once more, it is a repeat: an epoch has one end (I8)."""
        some = self._some()
        answers = self.settle(some, [Done()] * len(some))
        if self.chance.random() < 0.2:
            done = [lease for lease, answer in zip(some, answers, strict=True) if answer is Settled.APPLIED]
            assert set(self.settle(done, [Done()] * len(done))) <= {Settled.REPEATED}, "an epoch has ended twice"

    def _settle(self) -> None:
        """End some in every way; most are to be tried again."""
        some = self._some()
        ends: list[Outcome] = [Done(), DoneWithErrors((OOPS,)), Dead(OOPS)]
        ends += [Retry(timedelta(seconds=self.chance.uniform(0, 0.5)), OOPS) for _ in range(8)]
        self.settle(some, self.chance.choices(ends, k=len(some)))

    def _release(self) -> None:
        delay = timedelta(seconds=self.chance.choice([0, 0, 0.3]))
        self.count("released", self.store.release(self._some(), self.name, delay))

    def _extend(self) -> None:
        self.store.extend(self.held, timedelta(seconds=1))

    def _forget(self) -> None:
        self._some()

    def _expire(self) -> None:
        self.count("expired", self.store.expire(None, POLICY, self.chance.choice([5, 100, 10_000])))

    def _event(self) -> int:
        """Choose an event that is leased, any, or one that a cursor has passed before it was there."""
        late = self.run(LATE) if self.chance.random() < 0.3 else []
        if late:
            return late[0][0]
        (ends,) = self.run("SELECT coalesce(min(id), 1), coalesce(max(id), 1) FROM postbus.events")
        return self.chance.randint(*ends) if self.chance.random() < 0.5 or not self.held else self.held[0].event_id

    def _reset(self) -> None:
        self.store.reset(self._event(), self.chance.choice(NAMES), "a trial", self.name)

    def _erase(self) -> None:
        ids = {self._event() for _ in range(self.chance.choice([1, 1, 4]))}
        self.count("erased", self.store.erase(ids=ids, actor=self.name).changed)

    def _rewind(self) -> None:
        place = self.chance.randrange(len(NAMES))
        ((position,),) = self.run("SELECT position FROM postbus.cursors WHERE subscription = $1", place + 1)
        target = max(0, position - self.chance.choice([1, 100, 2_000]))
        self.count("discarded", self.store.rewind(NAMES[place], target, self.name).discarded)

    def _prune(self) -> None:
        ((lowest,),) = self.run("SELECT min(position) FROM postbus.cursors")
        through, after, done = lowest + self.chance.choice([-5_000, -3_000, -3_000, 0]), 0, False
        while through > 0 and not done:
            step = self.store.prune(Stream.EVENTS, after=after, through=through, limit=2_000)
            after, done = step.reached, step.done
            self.count("pruned", step.removed)

    def _revive(self) -> None:
        self.count("revived", self.store.retry_dead(DeadFilter(subscription=self.chance.choice(NAMES)), self.name))

    def _purge(self) -> None:
        self.count("purged", self.store.purge_dead(DeadFilter(event_id=self._event()), self.name))

    def _redeliver(self) -> None:
        ids = sorted({self._event() for _ in range(3)})
        self.count("redelivered", self.store.redeliver("default", ids, self.name))

    def _publish(self) -> None:
        self.publisher.act()

    def _tidy(self) -> None:
        self.store.tidy()


if __name__ == "__main__":
    config = json.loads(sys.argv[1])
    {"publisher": Publisher, "claimer": Claimer, "meddler": Meddler}[config.pop("role")](**config).play()
