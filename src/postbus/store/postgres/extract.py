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
FROM: Final = {
    "events": ("postbus.events", "id"),
    "audit": ("postbus.event_log", "id"),
    "deliveries": (
        (
            "(SELECT d.*, CASE d.state WHEN 1 THEN 'PROCESSING' WHEN 2 THEN 'FAILED' ELSE 'PENDING' END AS status, "
            "r.type, r.tags, r.priority FROM postbus.deliveries AS d LEFT JOIN LATERAL "
            "(SELECT v.type, v.tags, v.priority FROM postbus.routes AS v WHERE v.id = d.route LIMIT 1) AS r "
            "ON true) AS standing"
        ),
        "event_id",
    ),
}


def extract(
    address: Address, relation: str, columns: Sequence[str], after: int, through: int
) -> Iterator[pa.RecordBatch]:
    """Go through the rows of a range of ids in order."""
    table, key = FROM[relation]
    asked = ", ".join(CASTS.get(name, name) for name in columns)
    sql = f"SELECT {asked} FROM {table} WHERE {key} > {after:d} AND {key} <= {through:d} ORDER BY {key}"  # noqa: S608  names of ours
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
