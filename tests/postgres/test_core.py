"""The log is the queue: nothing is lost and nothing handed out twice, whatever publishers, claimers and crashes do."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from importlib import resources
from pathlib import Path
from typing import Any, Final, LiteralString, cast

import psycopg
import pytest

from postbus.model import Done, Mode
from postbus.store import Log, log_of, open_store
from postbus.store.contract import Claim, Settled, Settlement
from tests.postgres.core_actors import NAMES, POLICY
from tests.postgres.server import Server, query

ROOT: Final = Path(__file__).resolve().parents[2]
MIGRATIONS: Final = resources.files("postbus.store.postgres").joinpath("migrations")
SCRIPT: Final = MIGRATIONS.joinpath("0001_initial.sql").read_text(encoding="utf-8")
SPILL: Final = "(SELECT count(*) FROM unnest(rest)) > 500"
PLACES: Final = """
    WITH live AS (
        SELECT c.subscription, e.id, 'above' AS place
          FROM postbus.cursors AS c JOIN postbus.events AS e ON e.id > c.position
         WHERE e.erased_at IS NULL
           AND NOT EXISTS (SELECT 1 FROM postbus.skips AS k WHERE k.subscription = c.subscription AND k.event_id = e.id)
         UNION ALL
        SELECT c.subscription, e.id, 'missing' FROM postbus.cursors AS c JOIN postbus.events AS e ON c.missing @> e.id
         WHERE e.erased_at IS NULL
         UNION ALL
        SELECT g.subscription, e.id, 'gap' FROM postbus.gaps AS g JOIN postbus.events AS e ON g.ids @> e.id
         WHERE e.erased_at IS NULL
         UNION ALL
        SELECT d.subscription, d.event_id, 'row ' || d.state FROM postbus.deliveries AS d WHERE d.state <> 1
         UNION ALL
        SELECT b.subscription, postbus.event_at(b.first_id, b.last_id, b.ids, p.place), 'block' FROM postbus.blocks AS b
         CROSS JOIN LATERAL generate_series(0, postbus.size_of(b.first_id, b.last_id, b.ids) - 1) AS p (place)
         WHERE NOT postbus.is_done(b.done, p.place)),
    wanted AS (
        SELECT s.number AS subscription, e.id, e.erased_at IS NOT NULL AS erased
          FROM postbus.subscriptions AS s JOIN postbus.events AS e
            ON postbus.wants(s.patterns, s.tags, e.type, e.tags)),
    rewinds AS (
        SELECT r.id, r.subscription, r.first_id AS target FROM postbus.event_log AS r
         WHERE r.action = 'REPLAYED' AND r.error_message LIKE 'rewound from %'),
    ends AS (
        SELECT DISTINCT ON (a.subscription, a.event_id) a.subscription, a.event_id, a.action, a.id
          FROM postbus.audit AS a
         WHERE a.subscription > 0 AND NOT EXISTS (SELECT 1 FROM rewinds AS r WHERE r.id = a.id)
         ORDER BY a.subscription, a.event_id, a.id DESC),
    found AS (
        SELECT w.subscription, w.id, w.erased, array_remove(array_agg(l.place), NULL) AS places, max(z.action) AS last,
               max(z.id) AS entry,
               coalesce(max(z.action), '') IN ('COMPLETED', 'COMPLETED_WITH_ERRORS', 'DISCARDED', 'PURGED') AS ended
          FROM wanted AS w
          LEFT JOIN live AS l ON l.subscription = w.subscription AND l.id = w.id
          LEFT JOIN ends AS z ON z.subscription = w.subscription AND z.event_id = w.id
         GROUP BY w.subscription, w.id, w.erased)
    SELECT subscription, id, places, last FROM found
     WHERE cardinality(places) > 1
        OR (cardinality(places) = 0 AND NOT ended AND NOT (erased AND last IS NULL))
        OR (cardinality(places) = 1 AND erased)
        OR (cardinality(places) = 1 AND ended AND NOT EXISTS (
                SELECT 1 FROM rewinds AS r
                 WHERE r.subscription = found.subscription AND r.id > found.entry AND r.target < found.id))
     ORDER BY 1, 2
"""
"""C1: every wanted event is in exactly one place, or has ended; both only if a rewind brought it back.

Erased events are in none: a pass drops them, and an erase records the end of all that it finds unfinished. An event
committed in the midst of its erase has ended by that alone."""
STRAY: Final = """
    SELECT 'held without a block', d.subscription, d.event_id FROM postbus.deliveries AS d
     WHERE d.state = 1 AND NOT EXISTS (
               SELECT 1 FROM postbus.blocks AS b
                CROSS JOIN LATERAL generate_series(0, postbus.size_of(b.first_id, b.last_id, b.ids) - 1) AS p (place)
                WHERE b.subscription = d.subscription AND b.held AND d.event_id BETWEEN b.first_id AND b.last_id
                  AND postbus.event_at(b.first_id, b.last_id, b.ids, p.place) = d.event_id
                  AND NOT postbus.is_done(b.done, p.place))
     UNION ALL
    SELECT 'a skip below the cursor', k.subscription, k.event_id FROM postbus.skips AS k
      JOIN postbus.cursors AS c ON c.subscription = k.subscription AND k.event_id <= c.position
     UNION ALL
    SELECT 'a row without its event', d.subscription, d.event_id FROM postbus.deliveries AS d
     WHERE NOT EXISTS (SELECT 1 FROM postbus.events AS e WHERE e.id = d.event_id)
     UNION ALL
    SELECT 'a kind that no claim finds', d.subscription, d.event_id FROM postbus.deliveries AS d
     WHERE d.state = 0 AND NOT EXISTS (SELECT 1 FROM postbus.kinds AS k WHERE k.id = d.kind)
     UNION ALL
    SELECT 'missing above the cursor', c.subscription, c.position FROM postbus.cursors AS c
     WHERE NOT isempty(c.missing) AND upper(c.missing) > c.position + 1
     UNION ALL
    SELECT 'a gap above the cursor', c.subscription, g.number FROM postbus.gaps AS g
      JOIN postbus.cursors AS c ON c.subscription = g.subscription
     WHERE NOT isempty(g.ids) AND upper(g.ids) > c.position + 1
     UNION ALL
    (SELECT 'told of an epoch that was not given', u.subscription, u.event_id
       FROM (SELECT a.subscription, a.event_id, a.epoch FROM postbus.audit AS a WHERE a.epoch IS NOT NULL
             EXCEPT
             SELECT p.subscription, p.event_id, p.epoch FROM postbus.audit AS p WHERE p.action = 'PICKED') AS u LIMIT 5)
"""
TIMES: Final = """
    SELECT e.id, count(*) FILTER (WHERE a.action = 'PICKED'),
           count(*) FILTER (WHERE a.action IN ('RELEASED', 'EXPIRED')), count(*) FILTER (WHERE a.action = 'COMPLETED')
      FROM postbus.events AS e LEFT JOIN postbus.audit AS a ON a.event_id = e.id AND a.subscription = 1
     GROUP BY e.id
"""
UNFINISHED: Final = """
    SELECT g.id, last.subscription, last.action
      FROM unnest(%s::bigint[]) AS g (id)
      LEFT JOIN (SELECT DISTINCT ON (a.subscription, a.event_id) a.subscription, a.event_id, a.action
                   FROM postbus.audit AS a
                  WHERE a.subscription > 0
                    AND NOT (a.action = 'REPLAYED' AND coalesce(a.error_message, '') LIKE 'rewound from %%')
                  ORDER BY a.subscription, a.event_id, a.id DESC) AS last ON last.event_id = g.id
     WHERE coalesce(last.action, '') NOT IN ('COMPLETED', 'COMPLETED_WITH_ERRORS', 'DISCARDED', 'PURGED')
       AND NOT (last.action IS NULL AND EXISTS (SELECT 1 FROM postbus.event_log AS l
                                                 WHERE l.last_id IS NULL AND l.first_id = g.id AND l.action = 'ERASED'))
"""
LEFT: Final = """
    SELECT (SELECT count(*) FROM postbus.events AS e
             WHERE e.id > (SELECT position FROM postbus.cursors WHERE subscription = 1)),
           (SELECT count(*) FROM postbus.deliveries WHERE state < 2), (SELECT count(*) FROM postbus.blocks),
           (SELECT missing::text FROM postbus.cursors WHERE subscription = 1), (SELECT count(*) FROM postbus.gaps)
"""
UNSETTLED: Final = """
    SELECT 1 FROM postbus.deliveries WHERE state < 2 UNION ALL SELECT 1 FROM postbus.blocks
     UNION ALL SELECT 1 FROM postbus.gaps UNION ALL SELECT 1 FROM postbus.cursors WHERE NOT isempty(missing)
"""
DEADLOCKS: Final = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


def prepare(server: Server, script: str = SCRIPT) -> str:
    """Make a database from the migration, or from what a test has made of it, and return its address."""
    url = server.create(empty=True)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE SCHEMA postbus")
        connection.execute("SET search_path = pg_catalog")
        connection.execute(cast("LiteralString", script))
        connection.execute("UPDATE postbus.meta SET value = '1' WHERE key = 'schema_version'")
    return url


@pytest.fixture
def core(server: Server) -> Iterator[str]:
    """Give the address of a database where little has to be missing to be put into `gaps`."""
    assert SCRIPT.count(SPILL) > 1
    url = prepare(server, SCRIPT.replace(SPILL, SPILL.replace("500", "5")))
    yield url
    server.drop(url)


class Company:
    """Processes of `core_actors`, ended with the block."""

    def __init__(self, url: str) -> None:
        """Begin without any."""
        self._url = url
        self._children: list[subprocess.Popen[str]] = []

    def start(self, role: str, **config: Any) -> None:
        """Start one."""
        told = {"role": role, "url": self._url, "seed": f"{role} {len(self._children)}", **config}
        self._children.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.postgres.core_actors", json.dumps(told)],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip

    def ready(self) -> None:
        """Wait until all are at work."""
        for each in self._children:
            assert each.stdout is not None
            each.stdout.readline()

    def failed(self) -> list[str]:
        """Return what those said that have ended with an error."""
        return [str(each.communicate()[1])[-2000:] for each in self._children if each.poll()]

    def end(self) -> list[dict[str, Any]]:
        """Have them stop, and return what they know; raise AssertionError if one has failed."""
        told, errors = [], []
        for each in self._children:
            out, error = each.communicate("stop\n", timeout=60)
            if each.returncode:
                errors.append(error[-2000:])
            else:
                told.append(json.loads(out))
        self._children.clear()
        assert not errors, "\n".join(errors)
        return told

    def kill(self) -> None:
        """End those that are left."""
        for each in self._children:
            each.kill()
            each.communicate()


class Deadlocks:
    """What the server has said of deadlocks since this was made: the store tries again, and nobody would notice."""

    def __init__(self, server: Server) -> None:
        """Begin to listen."""
        self._server = server
        self._begun = len(server.log)

    def require_none(self, url: str) -> None:
        """Raise AssertionError that names the statements of each; a crash takes the server's own count back to 0."""
        told = self._server.log[self._begun :]
        found = [told[each.start() :][:3_000] for each in re.finditer("deadlock detected", told)]
        ((counted,),) = query(url, DEADLOCKS)
        assert not found, f"{len(found)} deadlocks (since the last crash: {counted}): " + "\n\n".join(found[:3])
        assert counted == 0


def chaos(server: Server, url: str, seconds: float, restarts: int) -> str:
    """Publish, claim, crash; wait until all is done. Return what happened; raise AssertionError for what must not."""
    publishers, claimers, deadlocks = Company(url), Company(url), Deadlocks(server)
    crashes = restarts > 0
    try:
        for _ in range(6):
            publishers.start("publisher", seconds=seconds, longest=2, sizes=[1, 1, 1, 5, 50, 200], crashes=crashes)
        for kind in ("blocks", "type", "single") * 2:
            claimers.start("claimer", kind=kind, crashes=crashes)
        publishers.ready()
        claimers.ready()
        begun = time.monotonic()
        for number in range(restarts):
            time.sleep(max(0, begun + seconds * (number + 1) / (restarts + 1) - time.monotonic()))
            server.stop("immediate")
            server.start()
        time.sleep(max(0, begun + seconds - time.monotonic()))
        published = publishers.end()
        deadline = time.monotonic() + 30
        while (left := query(url, LEFT)[0]) != (0, 0, 0, "{}", 0) and time.monotonic() < deadline:
            assert not (failed := claimers.failed()), failed[0]
            time.sleep(0.2)
        told = claimers.end()
    finally:
        publishers.kill()
        claimers.kill()
    deadlocks.require_none(url)
    events = query(url, TIMES)
    acknowledged = {each for one in published for each in one["ids"]}
    assert acknowledged <= {row[0] for row in events}, "an acknowledged event is not there"
    assert query(url, "SELECT uid FROM postbus.events GROUP BY uid HAVING count(*) > 1") == []
    wrong = [row for row in events if row[1] != 1 + row[2] or row[3] != 1]
    assert not wrong, f"{len(wrong)} of {len(events)} not handed out once per cause: {wrong[:5]}, left: {left}"
    assert left == (0, 0, 0, "{}", 0)
    assert query(url, cast("LiteralString", PLACES)) == []
    assert query(url, STRAY) == []
    total = sum((Counter(each["counts"]) for each in told + published), Counter())
    return f"{len(events)} events, {dict(total)}"


def meddle(server: Server, url: str, seconds: float) -> str:
    """Have eight processes do everything at random; then check every place."""
    deadlocks = Deadlocks(server)
    with closing(open_store(url)) as store:
        store.create_subscription("second", ["b*"], [], mode=Mode.QUEUE, lease=None, retry=None, start="now")
    company = Company(url)
    try:
        for _ in range(8):
            company.start("meddler")
        company.ready()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if failed := company.failed():
                deadlocks.require_none(url)  # first: they say more
                raise AssertionError(failed[0])
            time.sleep(0.2)
        told = company.end()
    finally:
        company.kill()
    ever = {each for one in told for each in one["ids"]}
    require_places(url)
    pruned = sorted(ever - {each for (each,) in query(url, "SELECT id FROM postbus.events")})
    assert query(url, UNFINISHED, pruned) == [], "pruned before its end"
    with closing(log_of(open_store(url))) as store:
        drain(url, store)
    require_places(url)
    deadlocks.require_none(url)
    total = sum((Counter(each["counts"]) for each in told), Counter())
    slowest = {name: max(each["slowest"].get(name, 0) for each in told) for name in told[0]["slowest"]}
    return f"{len(ever)} events, {len(pruned)} pruned, {dict(total)}, longest in s: {slowest}"


def require_places(url: str) -> None:
    """Raise AssertionError unless every event is in one place of each subscription that wants it (C1)."""
    assert (wrong := query(url, cast("LiteralString", PLACES))) == [], f"{len(wrong)}: {wrong[:5]}"
    assert query(url, STRAY) == []


def drain(url: str, store: Log) -> None:
    """Work off all that is left: then every event has ended, or is dead."""
    query(url, "UPDATE postbus.blocks SET due_at = postbus.now()")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = store.expire(None, POLICY)
        for name in NAMES:
            claim = Claim(name, "drain", "drain", limit=1_000, lease=timedelta(hours=1), policy=POLICY, shared=True)
            deliveries = store.claim(claim).deliveries
            answers = store.settle([Settlement(each.lease, Done(), "drain", None, 1.0) for each in deliveries])
            assert set(answers) <= {Settled.APPLIED}
            found += len(deliveries)
        if not found and not query(url, UNSETTLED):
            return
    raise AssertionError(query(url, LEFT))


@pytest.mark.parametrize(("seconds", "restarts"), [(20, 1), pytest.param(300, 10, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_every_event_is_handed_out_once_whatever_publishers_and_crashes_do(
    server: Server, core: str, seconds: float, restarts: int, capsys: pytest.CaptureFixture[str]
):
    """Savepoints, rollbacks, transactions open for 2 s, claims of three kinds, and the server crashes (C2, C3, I7)."""
    report = chaos(server, core, seconds, restarts)
    with capsys.disabled():
        print(f"\n{report}")  # noqa: T201  the figures of the trial


@pytest.mark.parametrize("seconds", [20, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_every_delivery_is_in_one_place_whatever_verbs_meet(
    server: Server, core: str, seconds: float, capsys: pytest.CaptureFixture[str]
):
    """Claim, settle, release, expire, reset, erase, rewind, prune and more: no deadlock, nothing in two places (C1)."""
    report = meddle(server, core, seconds)
    with capsys.disabled():
        print(f"\n{report}")  # noqa: T201  the figures of the trial


PLANTED: Final = {
    "C1: gaps are not remembered": ("chaos", "IF last - pos > cardinality(fresh) THEN", "IF false THEN"),
    "C1: skips are forgotten": ("chaos", "k.event_id <= last) THEN", "k.event_id <= last AND false) THEN"),
    "C2: the position is where the sequence is": (
        "chaos",
        "SET position = coalesce(last, pos), missing",
        "SET position = greatest(last, pos, pg_sequence_last_value('postbus.events_id_seq')), missing",
    ),
    "C2: the cursor is moved without its lock": (
        "chaos",
        "FOR UPDATE SKIP LOCKED;\n                held := FOUND;",
        ";\n                held := FOUND;",
    ),
    "C3: the head is where the sequence is": (
        "chaos",
        "safe := postbus.head('events');\n        END IF;",
        "safe := pg_sequence_last_value('postbus.events_id_seq');\n        END IF;",
    ),
    "closing: the head is asked for after the late ones were read": (
        "chaos",
        "IF safe IS NOT NULL AND cardinality(late) < asked THEN",
        "PERFORM pg_sleep(.1); IF safe IS NOT NULL AND cardinality(late) < asked THEN safe := postbus.head('events');",
    ),
    "C1: what was taken out of its turn is passed again": (
        "meddle",
        "SELECT sub, w FROM unnest(wanted) AS w WHERE w > pos\n",
        "SELECT sub, w FROM unnest(wanted) AS w WHERE w > pos AND false\n",
    ),
    "locks: a rewind takes rows before blocks": (
        "meddle",
        "PERFORM 1 FROM (SELECT 1 FROM postbus.blocks AS b WHERE b.subscription = sub AND b.last_id > after\n",
        (
            "PERFORM 1 FROM postbus.deliveries AS d WHERE d.subscription = sub AND d.event_id > after FOR UPDATE;"
            " PERFORM pg_sleep(.1);"
            " PERFORM 1 FROM (SELECT 1 FROM postbus.blocks AS b WHERE b.subscription = sub AND b.last_id > after\n"
        ),
    ),
    "the fence: bits are not looked at": (
        "meddle",
        "AND NOT postbus.is_done(b.done, (g.epoch & 1023)::integer);\n    IF fits IS NULL THEN\n        RETURN ARRAY",
        ";\n    IF fits IS NULL THEN\n        RETURN ARRAY",
    ),
}
"""What has to be seen: in which trial, and what is put in the place of what."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.timeout(600)
def test_the_trials_see_a_planted_bug(server: Server, bug: str):
    """Each rule, broken once, turns the trial red that is there for it."""
    trial, right, wrong = PLANTED[bug]
    assert right in SCRIPT
    url = prepare(server, SCRIPT.replace(right, wrong))
    try:
        with pytest.raises(AssertionError):
            chaos(server, url, 15, 0) if trial == "chaos" else meddle(server, url, 15)
    finally:
        server.drop(url)
