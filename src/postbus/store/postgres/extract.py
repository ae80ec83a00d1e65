"""The tables of the PostgreSQL schema as Arrow, by binary COPY."""

# pyright: basic
# Arrow comes without types.
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Final, Literal

import psycopg
import pyarrow as pa
from adbc_driver_postgresql import dbapi
from psycopg.conninfo import make_conninfo

from postbus.errors import PostbusError, StoreUnavailable
from postbus.store.contract import PAGE_BYTES
from postbus.store.extract import to_batch
from postbus.store.postgres import address as limits
from postbus.store.postgres.address import PATH, Address
from postbus.store.postgres.connection import put_schema

BATCH: Final = "adbc.postgresql.batch_size_hint_bytes"
CASTS: Final = {"priority": "priority::integer"}
EVENTS: Final = """SELECT {columns} FROM postbus.events WHERE id > {after} AND id <= {through} ORDER BY id"""
AUDIT: Final = """
SELECT {columns}
  FROM (SELECT e.id, e.event_id, coalesce(s.name, f.name, '') AS subscription, e.action, e.created_at, e.status,
               e.attempt, e.epoch, e.worker_id, e.status_code, e.error_type, e.error_message, e.execution_time_ms,
               e.type, e.tags, e.priority, e.event_created_at, e.ready_at, e.claimed_at, e.retry_count, e.errors
          FROM (SELECT l AS line, l.id, coalesce(l.entries, 1) AS entries FROM postbus.event_log AS l
                 WHERE l.id >= {after} >> 10 << 10 AND l.id <= {through} ORDER BY l.id) AS r
         CROSS JOIN LATERAL generate_series(greatest(0, {after} + 1 - r.id)::integer,
                                            least(r.entries - 1, {through} - r.id)::integer) AS k (n)
         CROSS JOIN LATERAL postbus.entry(r.line, k.n) AS e
          LEFT JOIN postbus.subscriptions AS s ON s.number = e.subscription
          LEFT JOIN postbus.former_subscriptions AS f ON f.number = e.subscription) AS audit
 ORDER BY id"""
DELIVERIES: Final = """
WITH leased AS MATERIALIZED (
    SELECT b.subscription, postbus.event_at(b.first_id, b.last_id, b.ids, p.place) AS event_id, b.due_at, b.claimed_at,
           b.worker_id
      FROM postbus.blocks AS b
     CROSS JOIN LATERAL generate_series(0, postbus.size_of(b.first_id, b.last_id, b.ids) - 1) AS p (place)
     WHERE NOT postbus.is_done(b.done, p.place)),
standing AS (
    SELECT d.subscription, d.event_id,
           CASE d.state WHEN 1 THEN 'PROCESSING' WHEN 2 THEN 'FAILED' ELSE 'PENDING' END AS status,
           coalesce(l.due_at, d.due_at) AS due_at, d.ready_at, d.updated_at, d.claimed_at, d.attempt, d.retry_count,
           d.worker_id, d.errors, d.died_at
      FROM postbus.deliveries AS d
      LEFT JOIN leased AS l ON l.subscription = d.subscription AND l.event_id = d.event_id
     WHERE d.event_id > {after} AND d.event_id <= {through}
     UNION ALL
    SELECT l.subscription, l.event_id, 'PROCESSING', l.due_at, NULL, l.claimed_at, l.claimed_at, 1, 0, l.worker_id,
           NULL, NULL
      FROM leased AS l
     WHERE l.event_id > {after} AND l.event_id <= {through}
       AND NOT EXISTS (SELECT 1 FROM postbus.deliveries AS d
                        WHERE d.subscription = l.subscription AND d.event_id = l.event_id)
     UNION ALL
    SELECT c.subscription, e.id, 'PENDING', coalesce(e.due_at, e.created_at), NULL, e.created_at, NULL, 0, 0, NULL,
           NULL, NULL
      FROM postbus.cursors AS c
      JOIN postbus.subscriptions AS s ON s.number = c.subscription
      JOIN postbus.events AS e ON e.id > {after} AND e.id <= {through} AND e.erased_at IS NULL
           AND postbus.wants(s.patterns, s.tags, e.type, e.tags)
     WHERE CASE WHEN e.id > c.position
                THEN NOT EXISTS (SELECT 1 FROM postbus.skips AS k
                                  WHERE k.subscription = c.subscription AND k.event_id = e.id)
                ELSE c.missing @> e.id
                     OR EXISTS (SELECT 1 FROM postbus.gaps AS g
                                 WHERE g.subscription = c.subscription AND g.ids @> e.id) END)
SELECT {columns}
  FROM (SELECT t.event_id, s.name AS subscription, t.status, e.type, postbus.sorted(e.tags) AS tags, e.priority,
               e.created_at, t.due_at, coalesce(t.ready_at, e.due_at, e.created_at) AS ready_at, t.updated_at,
               t.claimed_at, t.attempt, t.retry_count, t.worker_id, t.errors, t.died_at
          FROM standing AS t JOIN postbus.subscriptions AS s ON s.number = t.subscription
          LEFT JOIN postbus.events AS e ON e.id = t.event_id) AS deliveries
 ORDER BY event_id, subscription COLLATE "C" """
FROM: Final = {"events": EVENTS, "audit": AUDIT, "deliveries": DELIVERIES}


Wanted = Literal["batch", "end"]
Found = pa.RecordBatch | Exception | None
"""The next batch, or what went wrong, or the end."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server that is read from: of those that an address may lead to, the one that was reached."""

    address: Address
    host: str
    port: int
    libpq: str = field(repr=False)

    @classmethod
    def reached(cls, address: Address) -> "Server":
        """Connect as the store does, within its limits; raise StoreUnavailable, UnsafeStore."""
        address = replace(address, pooled=True)  # if it is not, nothing is lost
        with closing(address.connect()) as session:
            host, hostaddr, port = session.info.host, session.info.hostaddr, session.info.port
        libpq = make_conninfo(address.libpq, host=host, hostaddr=hostaddr, port=port)
        return cls(address, hostaddr or host, port, libpq)

    def require_life(self, silent: float) -> None:
        """Raise StoreUnavailable for a server that has been silent and will probably stay so."""
        if not limits.lives(self.host, self.port) or (silent > limits.LONGEST and not self._answers()):
            raise StoreUnavailable(f"{self.address.shown} has not answered for {silent:.0f} s")

    def _answers(self) -> bool:
        """Return whether it answers a query: a pooler lives on when the server behind it does not."""
        try:
            with closing(self.address.connect()) as session:
                session.execute("SELECT 1")
        except (psycopg.Error, PostbusError):
            return False
        return True


def extract(
    address: Address, relation: str, columns: Sequence[str], after: int, through: int
) -> Iterator[pa.RecordBatch]:
    """Go through the rows of a range of ids in order; raise StoreUnavailable, also if the server falls silent.

    ADBC waits without a limit, and cannot be interrupted: its calls are made in a thread. If the server is silent, that
    is left behind, and closes its connection when the call ends.
    """
    asked = ", ".join(CASTS.get(name, name) for name in columns)
    sql = FROM[relation].format(columns=asked, after=f"{after:d}::bigint", through=f"{through:d}::bigint")
    server = Server.reached(address)
    batches = _read(server, put_schema(sql, address.schema), relation, columns)
    wanted, found = SimpleQueue[Wanted](), SimpleQueue[Found]()
    reader = threading.Thread(target=_run, args=(batches, wanted, found), name="postbus-arrow", daemon=True)
    reader.start()
    try:
        wanted.put("batch")
        while (batch := _next(found, server)) is not None:
            yield batch
            wanted.put("batch")
    except GeneratorExit:  # between two batches, so that the reader has nothing else to do
        wanted.put("end")
        reader.join(limits.ANSWER)
        raise
    finally:
        wanted.put("end")


def _next(found: SimpleQueue[Found], server: Server) -> pa.RecordBatch | None:
    """Wait for the next batch as long as the server lives, however long its query takes."""
    began = time.monotonic()
    while True:
        try:
            told = found.get(timeout=limits.SILENCE)
        except Empty:
            server.require_life(time.monotonic() - began)
            continue
        if isinstance(told, Exception):
            raise told
        return told


def _run(batches: Generator[pa.RecordBatch], wanted: SimpleQueue[Wanted], found: SimpleQueue[Found]) -> None:
    """Read a batch whenever one is wanted, and close the connection at the end."""
    with suppress(dbapi.Error), closing(batches):
        while wanted.get() == "batch":
            try:
                found.put(next(batches, None))
            except Exception as error:  # noqa: BLE001  raised where the batch is waited for
                found.put(error)


def _read(server: Server, sql: str, relation: str, columns: Sequence[str]) -> Generator[pa.RecordBatch]:
    try:
        with closing(dbapi.connect(server.libpq)) as connection, connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL {PATH}")
            cursor.adbc_statement.set_options(**{BATCH: str(PAGE_BYTES)})
            cursor.execute(sql)
            for batch in cursor.fetch_record_batch():
                yield to_batch(relation, columns, map(_plain, batch.columns))
    except dbapi.Error as error:
        told = str(error).strip().partition("\n")[0]
        raise StoreUnavailable(f"{server.address.shown} cannot be read now ({told})") from None


def _plain(array: pa.Array) -> pa.Array:
    """Return JSON as the text it is."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array
