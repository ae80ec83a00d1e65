"""`postbus doctor` and `postbus migrate`."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import apsw
import pytest

from postbus import EventBus
from postbus.model import HandlerRecord
from postbus.store.sqlite import inspection

from .conftest import PROGRAM, URL

CRASH = """
import os
import threading
from postbus import EventBus
bus = EventBus()

@bus.on("order.*")
def die(event):
    os._exit(1)

bus.publish("order.placed")
bus.start()
threading.Event().wait(30)
"""


def wrong(findings: list[dict]) -> list[str]:
    """Return the messages of what is wrong."""
    return [each["message"] for each in findings if not each["ok"]]


def test_a_healthy_bus_is_exit_0(cli):
    """Where nothing is wrong, every check says so."""
    cli("migrate")
    told = cli("doctor").stdout
    assert "WRONG" not in told
    assert "synchronous=full" in told


def test_events_nobody_handles_are_found_by_family(cli, data):
    """Pending events without a handler are counted, with the line of code that would handle them: exit 3 (S0.9)."""
    cli("publish", "invoice.sent")
    cli("publish", "invoice.paid")
    cli("publish", "ping")
    found = data("doctor", expect=3)
    assert wrong(found) == ["2 events nobody handles: invoice.*", "1 event nobody handles: ping"]
    assert '@bus.on("invoice.*")' in cli("doctor", expect=3).stdout


def test_an_event_of_another_subscription_is_named_with_it(data):
    """What nobody handles is found in every subscription (S0.9)."""
    bus = EventBus(URL)
    bus.subscriptions.create("mail", "user.*")
    bus.subscriptions.pause("default")
    bus.subscribe("*", print)
    bus.start()
    bus.publish("user.new")
    [finding] = [each for each in data("doctor", expect=3) if each["check"] == "handlers"]
    bus.shutdown()
    assert finding["message"] == '1 event nobody handles: user.new in subscription "mail"'
    assert '@bus.on("user.new", subscription="mail")' in finding["remedy"]


def test_dead_letters_are_found(data, three_dead):
    """Dead letters are counted, with the command that shows them: exit 3 (S0.9)."""
    [finding] = [each for each in data("doctor", expect=3) if each["check"] == "dead letters"]
    assert finding["message"] == "3 in subscription default"
    assert finding["remedy"].startswith("postbus dlq list")


def test_a_lost_worker_is_found_and_mended(data):
    """A killed process leaves a lease and a handler; `--mend` takes both back (S1.15, I10)."""
    subprocess.run([sys.executable, "-c", CRASH], check=False, timeout=30)
    found = wrong(data("doctor", expect=3))
    assert len(found) == 2
    assert "(order.*)" in found[0]
    assert found[1] == "leases are still held by 1 dead worker"
    assert data("events", "show", "1")["status"] == "PROCESSING"
    assert wrong(data("doctor", "--mend", expect=3)) == ["1 event nobody handles: order.placed"]
    assert data("events", "show", "1")["status"] == "PENDING"


def test_what_is_told_after_mending_is_how_it_is_then(data):
    """With the handler of a host that fell silent forgotten, its events are nobody's, which is told at once (S0.9)."""
    bus = EventBus(URL)
    bus.publish("order.placed")
    long_ago = bus.store.now() - timedelta(hours=1)
    bus.store.register_handlers([HandlerRecord("1", "ship", "default", "order.*", (), "away:1", "away", long_ago)])
    bus.shutdown()
    assert wrong(data("doctor", "--mend", expect=3)) == ["1 event nobody handles: order.placed"]


def test_mending_from_afar_is_refused_before_anything_is_asked(cli):
    """A server cannot tell whose process is dead, so that half of it would be done (I18)."""
    refused = cli("doctor", "--mend", "--url", "http://127.0.0.1:9", expect=2).stderr
    assert "mending needs the database itself" in refused


def test_a_paused_subscription_with_work_is_found(data):
    """A subscription that is paused while events wait does not go unnoticed."""
    bus = EventBus(URL)
    bus.subscriptions.pause("default")
    bus.subscribe("*", print)
    bus.start()
    bus.publish("a")
    assert wrong(data("doctor", expect=3)) == ["subscription default is paused, 1 event waiting"]
    bus.shutdown()


def test_commands_that_mend_name_the_same_bus(data):
    """A remedy can be copied as it stands: it carries the URL that was given."""
    Path("old.db").touch()
    [finding] = data("doctor", "--url", "sqlite:///old.db", expect=3)
    assert finding["remedy"] == "postbus migrate --url 'sqlite:///old.db'"


def test_a_schema_of_a_newer_postbus_is_not_to_be_migrated(cli, data):
    """What an older program cannot mend by migrating, it does not say so of (S1.5)."""
    cli("migrate")
    connection = apsw.Connection("shop.db")
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    [finding] = data("doctor", expect=3)
    assert finding["remedy"] == "pip install --upgrade postbus"


def test_a_full_disk_is_found_with_what_makes_room(cli, data, monkeypatch):
    """A remedy that the store gives names the same bus too (I16)."""
    cli("migrate")
    monkeypatch.setattr(inspection, "LOW_SPACE", 1 << 62)
    [finding] = [each for each in data("doctor", "--url", URL, expect=3) if not each["ok"]]
    assert finding["check"] == "disk"
    assert finding["remedy"].endswith(f"postbus pipeline archive --lake DIR --older-than 30d --url '{URL}'")


@pytest.mark.parametrize("damage", ["header", "pages", "text"])
def test_a_damaged_file_is_a_finding_and_no_traceback(damage, cli):
    """Damage is exit 3 for `doctor` and exit 1 for the others, in a sentence each (I16)."""
    cli("publish", "a", "-", stdin="\n".join(json.dumps("x" * 500) for _ in range(200)))
    file = Path("shop.db")
    content = bytearray(file.read_bytes())
    match damage:
        case "header":
            content[:64] = b"\xff" * 64
        case "pages":
            for start in range(3 * 4096, len(content), 4096):
                content[start : start + 200] = b"\xff" * 200
        case _:
            content = bytearray(b"this was a database once\n" * 400)
    file.write_bytes(content)
    program = subprocess.run([PROGRAM, "doctor"], check=False, capture_output=True, text=True, timeout=30)
    assert program.returncode == 3
    assert "damaged" in program.stdout
    assert "restore" in program.stdout
    assert "postbus restore-mark" in program.stdout
    assert "Traceback" not in program.stderr
    refused = subprocess.run([PROGRAM, "publish", "a"], check=False, capture_output=True, text=True, timeout=30)
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr


def test_deep_reads_every_index(cli):
    """`--deep` checks every index against its table."""
    cli("migrate")
    assert "every page and index read" in cli("doctor", "--deep").stdout


def test_migrate_makes_the_database_once(cli, data):
    """The first run makes the schema, the second finds nothing to do (S1.5)."""
    assert data("migrate") == {"url": URL, "changed": True, "roles": False}
    assert data("migrate")["changed"] is False
    assert "the schema is up to date" in cli("migrate").stderr


def test_the_sql_of_the_migrations_makes_a_usable_database(cli, folder, data):
    """`--sql` prints all of the schema and needs no database (S1.5)."""
    sql = cli("migrate", "--sql").stdout
    assert not list(folder.iterdir())
    connection = apsw.Connection("shop.db")
    connection.execute(sql)
    connection.close()
    assert data("stats")["events"] == 0
    assert data("migrate")["changed"] is False


# ── files of others ──────────────────────────────────────────────────────────────────────────────────────────────────


def their_file(table: str) -> bytes:
    """Leave another program's file with a table where the bus should be; return what it holds."""
    connection = apsw.Connection("shop.db")
    connection.execute(f"CREATE TABLE {table} (id)")
    connection.close()
    return Path("shop.db").read_bytes()


@pytest.mark.parametrize(("line", "code"), [("stats", 1), ("events list", 1), ("dlq list", 1), ("doctor", 3)])
def test_a_mistaken_look_at_another_program_s_file_leaves_it_as_it_is(line, code, cli, folder):
    """Not even its journal mode changes: that program may count on it (I16)."""
    before = their_file("things")
    assert "postbus migrate" in cli(*line.split(), expect=code).output
    assert [each.read_bytes() for each in folder.iterdir()] == [before]


@pytest.mark.parametrize(("line", "code"), [("migrate", 1), ("publish a", 1), ("stats", 1), ("doctor", 3)])
def test_a_file_whose_tables_are_in_the_way_is_not_called_damaged(line, code, cli, folder):
    """It is another program's: that is said, and it stays as it is (I16)."""
    before = their_file("Events")
    told = cli(*line.split(), expect=code).output
    assert "shop.db has tables of another program (events): choose another file" in told
    assert [each.read_bytes() for each in folder.iterdir()] == [before]
