"""Power cut before every single step that SQLite asks of the disk: what was acknowledged is there."""

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import apsw
import pytest

from postbus import EventBus, NewEvent
from postbus.store.sqlite import connection
from postbus.torture import powerloss
from postbus.torture.checker import Database, read_through, replayed_differs
from postbus.torture.powerloss import DROP, KEEP, TEAR, Recorder, Step, surviving
from tests.crash.plants import ForgetfulConnection

OPEN = apsw.Connection


@dataclass
class Promises:
    """What callers were told, and at which point of the trace."""

    recorder: Recorder
    events: list[tuple[int, int, str]] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)
    claims: list[tuple[int, int]] = field(default_factory=list)
    ends: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def now(self) -> int:
        """How many steps the disk has been asked for."""
        return len(self.recorder.steps)


def scenario(bus: EventBus, promises: Promises) -> None:
    """Publish single events and batches, claim, settle each way, and go on past several checkpoints."""
    for turn in range(5):
        for number in range(4):
            event = bus.publish("trial.event", {"turn": turn, "text": "x" * 300}, uid=f"single-{turn}-{number}")
            promises.events.append((promises.now, event.id, event.uid))
        uids = [f"batch-{turn}-{number}" for number in range(6)]
        promises.batches.append(uids)
        stored = bus.publish_many([NewEvent(type="trial.batch", payload=turn, uid=uid) for uid in uids])
        promises.events += [(promises.now, event.id, event.uid) for event in stored]
        for each in bus.poll_many(7):
            promises.claims.append((promises.now, each.epoch))
            match (each.epoch >> 10) % 4:
                case 0:
                    bus.finalize(each, success=False, errors=["try again"])
                    promises.ends.append((promises.now, each.epoch, "FAILED"))
                case 1:
                    bus.finalize(each, success=False, retry=False)
                    promises.ends.append((promises.now, each.epoch, "FAILED"))
                case 2:
                    bus.finalize(each, success=True)
                    promises.ends.append((promises.now, each.epoch, "COMPLETED"))


def record(folder: Path, monkeypatch: pytest.MonkeyPatch, opening: Callable[..., apsw.Connection] = OPEN) -> Promises:
    """Run the scenario on a recorded disk and return what was promised when."""
    monkeypatch.setattr(connection, "CHECKPOINT_PAGES", 40)
    with powerloss.recording() as recorder:
        monkeypatch.setattr(apsw, "Connection", functools.partial(opening, vfs="recorder"))
        promises = Promises(recorder)
        bus = EventBus(f"sqlite:///{folder / 'bus.db'}")
        scenario(bus, promises)
        bus.shutdown()
        monkeypatch.undo()
    return promises


def broken(promises: Promises, cut: int, path: Path) -> Iterator[str]:
    """Yield what was promised before the cut and does not hold in the file that survived it."""
    if not path.exists():
        if any(at <= cut for at, *_ in promises.events):
            yield "lost: everything"
        return
    found = read(path)
    if found is None:
        if any(at <= cut for at, *_ in promises.events):
            yield "lost: there is no schema"
        return
    database, epoch = found
    yield from (f"damaged: {each}" for each in database.damage)
    yield from (f"lost: {uid}" for at, id_, uid in promises.events if at <= cut and database.events.get(id_) != uid)
    stored = set(database.events.values())
    yield from (f"torn: {uids}" for uids in promises.batches if 0 < len(stored.intersection(uids)) < len(uids))
    yield from (f"epoch {mine} may be drawn again" for at, mine in promises.claims if at <= cut and epoch < mine)
    told = {(row.epoch, row.action) for row in database.audit}
    yield from (
        f"lost: {end} of epoch {mine}" for at, mine, end in promises.ends if at <= cut and (mine, end) not in told
    )
    yield from (f"{verdict}" for verdict in replayed_differs(database))


def read(path: Path) -> tuple[Database, int] | None:
    """Return the file's content and the last epoch it can have given; None where not even the schema had been made."""
    survivor = OPEN(str(path))
    try:
        survivor.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # thousands of files: none needs to be tidy
        if not survivor.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'meta'").get:
            return None
        return read_through(survivor), survivor.execute("SELECT value << 10 | 1023 FROM meta WHERE key = 'number'").get
    finally:
        survivor.close()


def survey(promises: Promises, how: str, folder: Path, seed: str = "") -> tuple[int, int, list[tuple[int, list[str]]]]:
    """Cut the power before every step; return how many cuts there were, of different disks, and what each broke."""
    seen: dict[bytes, tuple[int, list[str]]] = {}
    results: list[tuple[int, list[str]]] = []
    cuts = 0
    for cut, files in surviving(promises.recorder.steps, how, seed):
        cuts += 1
        image = hashlib.sha256(repr(sorted(files.items())).encode()).digest()
        # The same disk again: what it was found good for holds unless more has been promised meanwhile.
        promised = sum(at <= cut for each in (promises.events, promises.claims, promises.ends) for at, *_ in each)
        if seen.get(image, (-1, []))[0] == promised:
            found = seen[image][1]
        else:
            found = list(broken(promises, cut, restored(files, folder)))
            seen[image] = (promised, found)
        if found:
            results.append((cut, found))
    return cuts, len(seen), results


def restored(files: dict[str, bytes], folder: Path) -> Path:
    """Write what survived where SQLite can open it."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder / "bus.db"


@pytest.fixture
def promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Promises:
    """Give the recorded scenario."""
    promises = record(tmp_path, monkeypatch)
    verbs = [(step.verb, step.file) for step in promises.recorder.steps]
    assert verbs.count(("sync", "bus.db")) >= 3, "the scenario must go past several checkpoints"
    assert verbs.count(("write", "bus.db-wal")) > 500
    return promises


@pytest.mark.parametrize("how", [DROP, pytest.param(KEEP, marks=pytest.mark.slow)])
def test_power_loss_at_any_write_loses_nothing_acknowledged(promises: Promises, tmp_path: Path, how: str):
    """Cut before every step, with all unsynced data gone, or all there: nothing acknowledged is lost (I1, I2, I7)."""
    cuts, disks, results = survey(promises, how, tmp_path / "after")
    assert cuts == len(promises.recorder.steps) + 1
    assert results == [], f"{len(results)} of {cuts} cuts ({disks} different disks)"


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(1, 20))])
def test_power_loss_that_tears_writes_loses_nothing_acknowledged(promises: Promises, tmp_path: Path, seed: int):
    """Cut before every step, with an arbitrary part of the unsynced sectors written: nothing is lost (I1, I2, I7)."""
    cuts, disks, results = survey(promises, TEAR, tmp_path / "after", str(seed))
    assert results == [], f"seed {seed}: {len(results)} of {cuts} cuts ({disks} different disks)"


def test_a_bus_opens_and_goes_on_after_power_loss(promises: Promises, tmp_path: Path):
    """Whatever a power cut leaves, the bus opens it, has every acknowledged event and takes new ones (I1, S1.1)."""
    for cut, files in surviving(promises.recorder.steps, TEAR, "go on"):
        if cut % 12:
            continue
        path = restored(files, tmp_path / "after")
        bus = EventBus(f"sqlite:///{path}", lease=0.1)
        for at, event_id, uid in promises.events:
            if at <= cut:
                assert bus.get(event_id).uid == uid, f"cut {cut}"
        head = bus.stats().head
        assert bus.publish("trial.after").id == head + 1
        bus.shutdown()


def test_without_full_sync_acknowledged_events_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same survey goes red with synchronous=NORMAL, so it can see a loss when there is one (I1, I16)."""
    promises = record(tmp_path, monkeypatch, ForgetfulConnection)
    cuts, _, results = survey(promises, DROP, tmp_path / "after")
    losses = [cut for cut, found in results if any(each.startswith("lost") for each in found)]
    assert len(losses) > cuts // 4
    assert not any(each.startswith("damaged") for _, found in results for each in found)


def test_with_the_wal_never_synced_the_survey_goes_red(promises: Promises, tmp_path: Path):
    """Leaving syncs out of the trace itself is noticed, so the survey does look at them (I1)."""
    promises.recorder.steps[:] = [
        step if (step.verb, step.file) != ("sync", "bus.db-wal") else Step("sync", "elsewhere")
        for step in promises.recorder.steps
    ]
    promises.recorder.steps.insert(0, Step("create", "elsewhere"))
    _, _, results = survey(promises, DROP, tmp_path / "after")
    assert results
