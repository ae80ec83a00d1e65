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
from postbus.store.postgres.connection import localized

BATCH: Final = "adbc.postgresql.batch_size_hint_bytes"
QUERIES: Final = {"events": "extract_events", "audit": "extract_audit", "deliveries": "extract_deliveries"}

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
    sql = localized(address.schema)[QUERIES[relation]]
    for name, position in (("$1", after), ("$2", through)):  # COPY takes no parameters
        sql = sql.replace(name, f"{position:d}::bigint")
    sql = f"SELECT {', '.join(columns)} FROM ({sql}) AS relation"  # noqa: S608  columns of RELATIONS
    server = Server.reached(address)
    batches = _read(server, sql, relation, columns)
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
