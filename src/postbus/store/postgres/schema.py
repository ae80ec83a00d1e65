"""The schema of a bus: its migrations, and roles of which each may do one thing: publish, work, or look."""

import math
import re
from contextlib import closing
from importlib import resources
from typing import Final

from postbus.errors import SchemaMismatch
from postbus.store.postgres.address import Address, translated
from postbus.store.postgres.connection import Database, put_schema
from postbus.store.queries import load_migrations

FORMER: Final = (
    "the schema {schema} was made by an earlier postbus, whose tables this one does not read; nothing was changed. "
    "To bring its events into a new schema: postbus import {schema}.events --type type --payload payload --key key "
    "--tags tags --from OLD_URL --url NEW_URL?schema=another"
)
HAS_ROLES: Final = """
    SELECT 1 FROM pg_roles AS r JOIN pg_namespace AS n ON n.nspname = $1
     WHERE r.rolname = $2 AND has_schema_privilege(r.oid, n.oid, 'USAGE')
"""


class Schema:
    """The schema as something to migrate; processes that start at once take turns."""

    def __init__(self, db: Database, name: str) -> None:
        """Have the migrations of this postbus at hand."""
        self.migrations = load_migrations("postbus.store.postgres")
        self._db = db
        self._name = name

    def version(self) -> int:
        """Return the number of the last migration applied, 0 where there is none; raise SchemaMismatch."""
        # A look at the table of tables: to_regclass() may answer from a memory older than another's migration.
        there = "SELECT 1 FROM pg_tables WHERE schemaname = $1 AND tablename = 'meta'"
        if not self._db.execute(there, (self._name,)):
            return 0
        sql = "SELECT key, value FROM postbus.meta WHERE key IN ('schema_version', 'generation')"
        found = dict(self._db.execute(put_schema(sql, self._name)))
        if "generation" not in found:
            raise SchemaMismatch(FORMER.format(schema=self._name))
        return int(found["schema_version"])

    def apply(self, number: int, sql: str) -> None:
        """Apply one migration and record its number, unless another process was faster."""
        db = self._db
        with db.transaction():
            db.execute("SET LOCAL lock_timeout = '10min'; SET LOCAL statement_timeout = 0")
            db.connection.longest = math.inf
            _take_turn(db, self._name)
            if self.version() == number - 1:
                db.execute(f"CREATE SCHEMA IF NOT EXISTS {self._name}")
                db.execute(put_schema(sql, self._name))
                done = put_schema("UPDATE postbus.meta SET value = $1 WHERE key = 'schema_version'", self._name)
                db.execute(done, (str(number),))
                if number == len(self.migrations) and self._has_roles():
                    db.execute(roles_statements(self._name))  # new functions are everybody's until they are granted

    def _has_roles(self) -> bool:
        """Return whether `grant_roles` has been here: the reader may look into the schema."""
        return bool(self._db.execute(HAS_ROLES, (self._name, f"{self._name}_reader")))


def _take_turn(db: Database, schema: str) -> None:
    """Wait for whoever migrates the schema, or grants roles in it, until the end of its transaction."""
    db.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 7))", (f"postbus migrates {schema}",))


def migration_script(url: str) -> str:
    """Return the SQL that makes the schema from nothing, without a connection."""
    schema = Address.of(url).schema
    steps = "".join(
        f"-- {name}\n{sql.rstrip()}\nUPDATE postbus.meta SET value = '{number}' WHERE key = 'schema_version';\n\n"
        for number, name, sql in load_migrations("postbus.store.postgres")
    )
    return f"BEGIN;\nCREATE SCHEMA IF NOT EXISTS {schema};\n\n{put_schema(steps, schema)}COMMIT;\n"


def roles_script(url: str) -> str:
    """Return the SQL that makes the roles and grants them what they need, without a connection.

    In another schema than `postbus` they are named after that: `shop_publisher`, `shop_worker`, `shop_reader`.
    """
    return f"BEGIN;\n{roles_statements(Address.of(url).schema)}COMMIT;\n"


def grant_roles(url: str) -> None:
    """Make the roles that are missing, and grant all of them what they need and nothing else.

    Who publishes cannot settle, who works cannot rewrite the log, who looks changes nothing. Whoever connects must own
    the schema, and be allowed to make roles unless they are there. Raises UnsafeStore if not, with nothing changed;
    doing it again changes nothing.
    """
    address = Address.of(url, pooled=True)  # one transaction, which a pooler may carry
    with translated(address.shown), closing(Database(address)) as db, db.transaction():
        _take_turn(db, address.schema)
        db.execute(roles_statements(address.schema))


def roles_statements(schema: str) -> str:
    """Return the SQL for a schema, to be run inside a transaction."""
    text = resources.files("postbus.store.postgres").joinpath("roles.sql").read_text(encoding="utf-8")
    named = re.sub(r"\bpostbus(?=_(?:reader|publisher|worker)\b)", schema, put_schema(text, schema))
    return re.sub(r"(?<=SCHEMA )postbus\b", schema, named)
