"""What a soak checks beside every promise."""

from pathlib import Path

from postbus import EventBus
from postbus.torture.checker import Verdict
from postbus.torture.crew import TABLES
from postbus.torture.stage import Store
from postbus.torture.trial import Sample, grown

FLAT = [Sample(500, 90), Sample(520, 100), Sample(480, 80), Sample(530, 110), Sample(510, 95), Sample(520, 100)]


def test_what_only_goes_up_and_down_has_not_grown():
    """A pruning more or less is no growth, nor is one sample that lies high."""
    assert list(grown(FLAT)) == []
    assert list(grown([*FLAT, Sample(900, 100)])) == []


def test_what_keeps_growing_is_a_verdict():
    """Memory and tables each on their own."""
    tables = [each._replace(tables=100 + 20 * place) for place, each in enumerate(FLAT)]
    assert list(grown(tables)) == [Verdict("grown", "tables: 120 bytes at first, 180 at the end")]
    memory = [each._replace(memory=500 + 100 * place) for place, each in enumerate(FLAT)]
    assert list(grown(memory)) == [Verdict("grown", "memory: 600 bytes at first, 900 at the end")]


def test_too_few_samples_say_nothing():
    """Everything grows in its first minutes."""
    assert list(grown([Sample(1, 1), Sample(2, 2), Sample(3, 3), Sample(9, 9)])) == []


def test_what_is_to_last_is_not_taken_for_growth(tmp_path: Path):
    """Uids are remembered for days, and what transactional handlers did is the trial's own; events do count."""
    url, page = f"sqlite:///{tmp_path / 'bus.db'}", 4_096
    with EventBus(url) as bus:
        store = Store(url)
        before = store.size()
        with bus.transaction() as tx:
            for table in TABLES:
                tx.execute(table.format(serial="INTEGER PRIMARY KEY"))
            for number in range(5_000):
                tx.execute("INSERT INTO effects (subscription, event_id) VALUES (?, ?)", ("projection", number))
                tx.execute("INSERT INTO own VALUES (?)", (f"{number:>80}",))
        assert 0 <= store.size() - before <= 2 * page
        bus.publish_many({"type": "a", "payload": "x" * 1_000} for _ in range(500))
        assert store.size() - before > 500_000
