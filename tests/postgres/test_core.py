"""The log is the queue: nothing is lost and nothing handed out twice, whatever publishers, claimers and crashes do."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final, LiteralString, cast

import psycopg
import pytest

from tests.postgres.core_actors import ALL, CLAIM, FINISH, connect
from tests.postgres.server import Server, query

ROOT: Final = Path(__file__).resolve().parents[2]
SCRIPT: Final = resources.files("postbus.store.postgres").joinpath("core/0001_initial.sql").read_text(encoding="utf-8")
SPILL: Final = "(SELECT count(*) FROM unnest(rest)) > 500"
PLACES: Final = """
    WITH live AS (
        SELECT c.subscription, e.id, 'above' AS place
          FROM postbus.cursors AS c JOIN postbus.events AS e ON e.id > c.position
         WHERE NOT EXISTS (SELECT 1 FROM postbus.skips AS k WHERE k.subscription = c.subscription AND k.event_id = e.id)
         UNION ALL
        SELECT c.subscription, e.id, 'missing' FROM postbus.cursors AS c JOIN postbus.events AS e ON c.missing @> e.id
         UNION ALL
        SELECT g.subscription, e.id, 'gap' FROM postbus.gaps AS g JOIN postbus.events AS e ON g.ids @> e.id
         UNION ALL
        SELECT d.subscription, d.event_id, 'row ' || d.state FROM postbus.deliveries AS d WHERE d.state <> 1
         UNION ALL
        SELECT b.subscription, postbus.event_at(b.first_id, b.last_id, b.ids, p.place), 'block' FROM postbus.blocks AS b
         CROSS JOIN LATERAL generate_series(0, postbus.size_of(b.first_id, b.last_id, b.ids) - 1) AS p (place)
         WHERE NOT postbus.is_done(b.done, p.place)),
    wanted AS (
        SELECT s.number AS subscription, e.id FROM postbus.subscriptions AS s JOIN postbus.events AS e
            ON postbus.wants(s.patterns, s.tags, e.type, e.tags)),
    ends AS (
        SELECT DISTINCT ON (a.subscription, a.event_id) a.subscription, a.event_id, a.action, a.id
          FROM postbus.audit AS a
         WHERE a.event_id > 0 ORDER BY a.subscription, a.event_id, a.id DESC),
    found AS (
        SELECT w.subscription, w.id, array_remove(array_agg(l.place), NULL) AS places, max(z.action) AS last,
               max(z.id) AS entry
          FROM wanted AS w
          LEFT JOIN live AS l ON l.subscription = w.subscription AND l.id = w.id
          LEFT JOIN ends AS z ON z.subscription = w.subscription AND z.event_id = w.id
         GROUP BY w.subscription, w.id)
    SELECT subscription, id, places, last FROM found
     WHERE cardinality(places) > 1
        OR (cardinality(places) = 0 AND coalesce(last, '') NOT IN ('COMPLETED', 'CANCELLED'))
        OR (cardinality(places) = 1 AND last IN ('COMPLETED', 'CANCELLED') AND NOT EXISTS (
                SELECT 1 FROM postbus.event_log AS r
                 WHERE r.action = 'REPLAYED' AND r.subscription = found.subscription AND r.id > found.entry
                   AND (r.error_message::json ->> 'to')::bigint < found.id))
     ORDER BY 1, 2
"""
"""C1: whatever is wanted is in exactly one place, or has ended; both only if it came again by a rewind."""
STRAY: Final = """
    SELECT 'held without a block', d.subscription, d.event_id FROM postbus.deliveries AS d
     WHERE d.state = 1 AND (SELECT f.place FROM postbus.find(d.subscription, d.event_id) AS f) <> 'block'
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
"""
TIMES: Final = """
    SELECT e.id, count(*) FILTER (WHERE a.action = 'PICKED'), count(*) FILTER (WHERE a.action = 'RELEASED'),
           count(*) FILTER (WHERE a.action = 'COMPLETED')
      FROM postbus.events AS e LEFT JOIN postbus.audit AS a ON a.event_id = e.id AND a.subscription = 1
     GROUP BY e.id
"""
UNFINISHED: Final = """
    SELECT * FROM (SELECT DISTINCT ON (a.event_id) a.event_id, a.action FROM postbus.audit AS a
                    WHERE a.subscription = 1 AND a.event_id = ANY (%s) ORDER BY a.event_id, a.id DESC) AS last
     WHERE action NOT IN ('COMPLETED', 'CANCELLED')
"""
LEFT: Final = """
    SELECT (SELECT count(*) FROM postbus.events AS e
             WHERE e.id > (SELECT position FROM postbus.cursors WHERE subscription = 1)),
           (SELECT count(*) FROM postbus.deliveries WHERE state < 2), (SELECT count(*) FROM postbus.blocks),
           (SELECT missing::text FROM postbus.cursors WHERE subscription = 1), (SELECT count(*) FROM postbus.gaps)
"""


def prepare(server: Server, script: str = SCRIPT) -> str:
    """Make a database with the core's tables and return its address."""
    url = server.create(empty=True)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE SCHEMA postbus")
        connection.execute("SET search_path = pg_catalog")
        connection.execute(cast("LiteralString", script))
    return url


@pytest.fixture
def core(server: Server) -> Iterator[str]:
    """Give the address of a database with the core's tables, where little has to be missing to be put into `gaps`."""
    assert SCRIPT.count(SPILL) > 1
    url = prepare(server, SCRIPT.replace(SPILL, SPILL.replace("500", "5")))
    yield url
    server.drop(url)


class Company:
    """Processes of `core_actors`, ended with the block."""

    def __init__(self, url: str) -> None:
        """Begin with nobody."""
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


def gaps(url: str) -> None:
    """Do what maintenance does every second."""
    for (number,) in query(url, "SELECT number FROM postbus.gaps"):
        query(url, "SELECT postbus.close_gap(%s)", number)


def chaos(server: Server, url: str, seconds: float, restarts: int) -> str:
    """Publish, claim, crash; wait until all is done. Return what happened; raise AssertionError for what must not."""
    publishers, claimers = Company(url), Company(url)
    try:
        for _ in range(6):
            publishers.start("publisher", seconds=seconds, longest=2, sizes=[1, 1, 1, 5, 50, 200])
        for kind in ("blocks", "type", "single") * 2:
            claimers.start("claimer", kind=kind)
        publishers.ready()
        claimers.ready()
        begun = time.monotonic()
        for number in range(restarts):
            while time.monotonic() < begun + seconds * (number + 1) / (restarts + 1):
                gaps(url)
                time.sleep(0.2)
            server.stop("immediate")
            server.start()
        while time.monotonic() < begun + seconds:
            time.sleep(0.1)
        published = publishers.end()
        deadline = time.monotonic() + 30
        while (left := query(url, LEFT)[0]) != (0, 0, 0, "{}", 0) and time.monotonic() < deadline:
            gaps(url)
            assert not claimers.failed()
            time.sleep(0.2)
        told = claimers.end()
    finally:
        publishers.kill()
        claimers.kill()
    events = query(url, TIMES)
    acknowledged = {each for one in published for each in one["ids"]}
    assert acknowledged <= {row[0] for row in events}, "an acknowledged event is not there"
    wrong = [row for row in events if row[1] != 1 + row[2] or row[3] != 1]
    assert not wrong, f"{len(wrong)} of {len(events)} not handed out once per cause: {wrong[:5]}"
    assert left == (0, 0, 0, "{}", 0)
    assert query(url, cast("LiteralString", PLACES)) == []
    assert query(url, STRAY) == []
    total = sum((Counter(each["counts"]) for each in told + published), Counter())
    return f"{len(events)} events, {dict(total)}"


def meddle(url: str, seconds: float) -> str:
    """Have eight processes do everything at random; then check every place."""
    query(
        url,
        "INSERT INTO postbus.subscriptions (name, mode, patterns, tags, created_at)"
        " VALUES ('second', 'queue', '[\"b*\"]', '[]', now())",
    )
    query(url, "SELECT postbus.begin_cursor(2, 'now')")
    company = Company(url)
    try:
        for _ in range(8):
            company.start("meddler")
        company.ready()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert not (failed := company.failed()), failed[0]
            time.sleep(0.2)
        told = company.end()
    finally:
        company.kill()
    ever = {each for one in told for each in one["ids"]}
    assert (wrong := query(url, cast("LiteralString", PLACES))) == [], f"{len(wrong)}: {wrong[:5]}"
    assert query(url, STRAY) == []
    pruned = sorted(ever - {each for (each,) in query(url, "SELECT id FROM postbus.events")})
    unfinished = query(url, UNFINISHED, pruned)
    assert unfinished == [], "pruned before its end"
    drain(url)
    total = sum((Counter(each["counts"]) for each in told), Counter())
    slowest = {name: max(each["slowest"].get(name, 0) for each in told) for name in told[0]["slowest"]}
    return f"{len(ever)} events, {len(pruned)} pruned, {dict(total)}, longest in s: {slowest}"


def drain(url: str) -> None:
    """Work off all that is left: then every event has ended, or is dead."""
    deadline = time.monotonic() + 120
    with connect(url) as connection:
        connection.execute("UPDATE postbus.blocks SET due_at = postbus.now()")
        while time.monotonic() < deadline:
            gaps(url)
            connection.execute("SELECT postbus.expire(NULL, 1000, 10000)")
            states: set[str] = set()
            for subscription in (1, 2):
                row = connection.execute(
                    CLAIM, (subscription, ALL, 1000, True, 10**9, "d", "", False, None, None)
                ).fetchone()
                assert row is not None
                state, number, first, size, offsets, numbers, lone, *_ = row
                states.add(state)
                pairs = [
                    (number << 10 | place, first + (offsets[place] if offsets else place)) for place in range(size or 0)
                ]
                pairs += [(each << 10, event) for each, event in zip(numbers or (), lone or (), strict=True)]
                if pairs:
                    done = connection.execute(
                        FINISH, ([p[0] for p in pairs], [p[1] for p in pairs], [1.0] * len(pairs), "d")
                    ).fetchone()
                    assert done == ([],)
            if states == {"empty"} and not query(
                url,
                "SELECT 1 FROM postbus.deliveries WHERE state < 2 UNION ALL SELECT 1 FROM postbus.blocks UNION ALL"
                " SELECT 1 FROM postbus.gaps UNION ALL SELECT 1 FROM postbus.cursors WHERE NOT isempty(missing)",
            ):
                return
    raise AssertionError(query(url, LEFT))


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "restarts"), [(20, 1), (300, 10)])
@pytest.mark.timeout(600)
def test_every_event_is_handed_out_once_whatever_publishers_and_crashes_do(
    server: Server, core: str, seconds: float, restarts: int, capsys: pytest.CaptureFixture[str]
):
    """Savepoints, rollbacks, transactions open for 2 s, claims of three kinds, and the server crashes (C2, C3, I7)."""
    report = chaos(server, core, seconds, restarts)
    with capsys.disabled():
        print(f"\n{report}")  # noqa: T201  the figures of the trial


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [20, 300])
@pytest.mark.timeout(600)
def test_every_delivery_is_in_one_place_whatever_verbs_meet(
    core: str, seconds: float, capsys: pytest.CaptureFixture[str]
):
    """Claim, settle, extend, release, expire, reset, cancel, rewind, prune: no deadlock, nothing in two places (C1)."""
    report = meddle(core, seconds)
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
            chaos(server, url, 15, 0) if trial == "chaos" else meddle(url, 15)
    finally:
        server.drop(url)
