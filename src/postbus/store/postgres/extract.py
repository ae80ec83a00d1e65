"""The tables of the PostgreSQL schema as Arrow, by binary COPY."""

# pyright: basic
# Arrow comes without types.
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from postbus.errors import StoreUnavailable
from postbus.store.contract import PAGE_BYTES
from postbus.store.extract import to_batch
from postbus.store.postgres.connection import PATH, Address, put_schema

__all__ = ["extract"]

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


def extract(
    address: Address, relation: str, columns: Sequence[str], after: int, through: int
) -> Iterator[pa.RecordBatch]:
    """Go through the rows of a range of ids in order."""
    asked = ", ".join(CASTS.get(name, name) for name in columns)
    sql = FROM[relation].format(columns=asked, after=f"{after:d}::bigint", through=f"{through:d}::bigint")
    try:
        with closing(dbapi.connect(address.libpq)) as connection, connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL {PATH}")
            cursor.adbc_statement.set_options(**{BATCH: str(PAGE_BYTES)})
            cursor.execute(put_schema(sql, address.schema))
            for batch in cursor.fetch_record_batch():
                yield to_batch(relation, columns, map(_plain, batch.columns))
    except dbapi.Error as error:
        told = str(error).strip().partition("\n")[0]
        raise StoreUnavailable(f"{address.shown} cannot be read now ({told})") from None


def _plain(array: pa.Array) -> pa.Array:
    """Return JSON as the text it is."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array
