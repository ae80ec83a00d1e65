"""A damaged file is refused by a clear error; no write into it is acknowledged and then lost.

SQLite keeps no checksum of what it stores. A bit that flips inside the text of one event makes that event read
differently, and nothing in the file can tell; a bit that flips in the structure is noticed. These tests hold the
bus to what can be held: errors are its own, never raw ones; one flipped bit changes one event at most; whatever
is acknowledged after the damage can be read again.
"""

import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from postbus import EventBus, NewEvent, NotFound, PostbusError, StoreUnavailable, UnsafeStore
from postbus.store import open_store
from postbus.torture.checker import read_file, replayed_differs
from tests.crash.processes import Trial

CLEAN: Final = (UnsafeStore, StoreUnavailable)
PAGE: Final = 4096
Told = dict[int, tuple[str, Any]]


@pytest.fixture
def good(tmp_path: Path) -> tuple[bytes, Told]:
    """Give a file with work in every state, and what its publishers were told."""
    path = tmp_path / "good.db"
    bus = EventBus(f"sqlite:///{path}")
    told: Told = {}
    for number in range(120):
        event = bus.publish(f"trial.{number % 5}", {"number": number, "text": "abcdefgh" * 20}, tags=["a", "b"])
        told[event.id] = (event.uid, event.payload)
    for number, delivery in enumerate(bus.poll_many(40)):
        match number % 4:
            case 0:
                bus.finalize(delivery, success=True)
            case 1:
                bus.finalize(delivery, success=False, errors=["no"])
            case 2:
                bus.finalize(delivery, success=False, retry=False)
    bus.shutdown()
    return path.read_bytes(), told


def use(path: Path, told: Told) -> str:
    """Do everything with a file that may be damaged; return `refused`, `intact`, `altered`, or what went wrong."""
    later: Told = {}
    try:
        outcome = outcome_of(lambda bus: exercise(bus, told, later), path)
        if later and outcome != "refused":
            outcome = outcome_of(lambda bus: "lost" if differing(bus, later) else outcome, path)
    except Exception as error:  # noqa: BLE001  which one is what the test is about
        return f"raw {type(error).__name__}: {error}"
    return outcome


def outcome_of(action: Callable[[EventBus], str], path: Path) -> str:
    """Open, act and shut down; errors of ours are an outcome, others are not caught."""
    try:
        bus = EventBus(f"sqlite:///{path}")
    except CLEAN:
        return "refused"
    try:
        return action(bus)
    except CLEAN:
        return "refused"
    except NotFound:
        return "altered"
    except PostbusError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with suppress(*CLEAN):
            bus.shutdown()


def exercise(bus: EventBus, told: Told, later: Told) -> str:
    """Publish, read everything, claim and settle some."""
    for number in range(3):
        event = bus.publish("trial.0", {"later": number}, tags=["a", "b"])
        later[event.id] = (event.uid, event.payload)
    different = differing(bus, told)
    listed = {event.id for event in bus.list(limit=1_000)}
    different |= (told.keys() | later.keys()) ^ listed
    list(bus.dlq.list(limit=1_000))
    bus.stats()
    for delivery in bus.poll_many(5):
        bus.finalize(delivery, success=True)
    if not different:
        return "intact"
    return "altered" if len(different) == 1 else f"altered: events {sorted(different)}"


def differing(bus: EventBus, told: Told) -> set[int]:
    """Return the events that do not read as their publishers were told."""
    different: set[int] = set()
    for event_id, expected in told.items():
        try:
            event = bus.get(event_id, include_logs=True)
        except NotFound:
            different.add(event_id)
        else:
            if (event.uid, event.payload) != expected:
                different.add(event_id)
    return different


@pytest.mark.parametrize("flips", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_one_flipped_bit_is_refused_or_touches_one_event(
    tmp_path: Path, good: tuple[bytes, Told], flips: int, capsys: pytest.CaptureFixture[str]
):
    """One flipped bit: a clear error or good data, one event's own text at worst, no later write lost (I1, I16)."""
    content, told = good
    seed = f"flips {flips}"
    chance = random.Random(seed)
    outcomes: dict[str, list[str]] = {}
    for number in range(flips):
        place, bit = chance.randrange(len(content)), chance.randrange(8)
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        path = tmp_path / f"flip-{number}.db"
        path.write_bytes(damaged)
        outcomes.setdefault(use(path, told), []).append(f"byte {place} bit {bit}")
    counts = {outcome: len(outcomes.pop(outcome, ())) for outcome in ("intact", "refused", "altered")}
    with capsys.disabled():
        print(f"\n{flips} flips: {counts}, others {sum(map(len, outcomes.values()))}")  # noqa: T201  figures
    assert outcomes == {}, seed


def truncated(content: bytes) -> bytes:
    """Return half of the file."""
    return content[: len(content) // 2 // PAGE * PAGE]


def cut_within_a_page(content: bytes) -> bytes:
    """Return a file whose end is torn off within a page."""
    return content[: len(content) // 3 + 100]


def without_header(content: bytes) -> bytes:
    """Return a file whose first bytes are gone."""
    return b"\xff" * 100 + content[100:]


def other_text(content: bytes) -> bytes:
    """Return something that never was a database."""
    return b"Dear diary, today I was no database.\n" * 1000


def zeroed_in_the_middle(content: bytes) -> bytes:
    """Return a file with every page but the first ten zeroed."""
    return content[: 10 * PAGE] + bytes(len(content) - 10 * PAGE)


def noise_in_every_page(content: bytes) -> bytes:
    """Return a file with noise at the head of every page but the first."""
    chance = random.Random("noise")
    pages = [bytearray(content[at : at + PAGE]) for at in range(0, len(content), PAGE)]
    for page in pages[1:]:
        page[:64] = chance.randbytes(64)
    return b"".join(pages)


@pytest.mark.parametrize(
    "damage", [truncated, cut_within_a_page, without_header, other_text, zeroed_in_the_middle, noise_in_every_page]
)
def test_a_broken_file_is_refused(tmp_path: Path, good: tuple[bytes, Told], damage: Callable[[bytes], bytes]):
    """A file cut short or overwritten is refused, when opened or at the first use that meets the damage (I16)."""
    content, told = good
    path = tmp_path / "broken.db"
    path.write_bytes(damage(content))
    assert use(path, told) == "refused"


@pytest.mark.parametrize("damage", [without_header, other_text])
def test_what_is_no_database_is_not_even_opened(
    tmp_path: Path, good: tuple[bytes, Told], damage: Callable[[bytes], bytes]
):
    """A file that is no bus is refused when opened, with advice, and left as it was (I16)."""
    path = tmp_path / "broken.db"
    path.write_bytes(damage(good[0]))
    with pytest.raises(UnsafeStore, match="backup"):
        EventBus(f"sqlite:///{path}").stats()
    assert path.read_bytes() == damage(good[0])


@pytest.mark.parametrize("flips", [25, pytest.param(300, marks=pytest.mark.slow)])
def test_a_damaged_wal_gives_a_clean_prefix_or_is_refused(file_trial: Trial, flips: int):
    """A bit flipped in a crashed bus's WAL costs whole transactions from there on, never half of one (I2, I13)."""
    victim = file_trial.start("live", count=60, probe=["publishing", 30])
    assert victim.wait() == -signal.SIGKILL, victim.errors()
    names = ("bus.db", "bus.db-wal")
    files = {name: (file_trial.folder / name).read_bytes() for name in names}
    uids = [uid for batch in file_trial.journal().tried for uid in batch]
    seed = f"wal {flips}"
    chance = random.Random(seed)
    for number in range(flips):
        folder = file_trial.folder / f"wal-{number}"
        folder.mkdir()
        damaged = bytearray(files["bus.db-wal"])
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        (folder / "bus.db").write_bytes(files["bus.db"])
        (folder / "bus.db-wal").write_bytes(damaged)
        try:
            open_store(f"sqlite:///{folder / 'bus.db'}").close()
        except CLEAN:
            continue
        database = read_file(folder / "bus.db")
        stored = list(database.events.values())
        assert stored == uids[: len(stored)], seed
        assert database.damage == (), seed
        assert list(replayed_differs(database)) == [], seed


def read_all(bus: EventBus) -> None:
    """Read every event by itself."""
    for number in range(1, 301):
        bus.get(number)


def test_a_file_that_goes_bad_while_open_gives_our_error(tmp_path: Path):
    """Damage under an open bus surfaces as UnsafeStore from reading, not as a raw error (I16)."""
    path = tmp_path / "bus.db"
    bus = EventBus(f"sqlite:///{path}")
    bus.publish_many(NewEvent(type="trial.event", payload="x" * 2_000) for _ in range(300))
    bus.shutdown()
    bus = EventBus(f"sqlite:///{path}")
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[:PAGE] + noise_in_every_page(content)[PAGE:])
    with pytest.raises(CLEAN):
        read_all(bus)
    with suppress(*CLEAN):
        bus.shutdown()
