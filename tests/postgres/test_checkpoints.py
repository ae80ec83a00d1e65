"""How durable a follower's checkpoint is on PostgreSQL: at once when it has caught up."""

from postbus import EventBus
from postbus.store import log_of
from postbus.store.contract import Step
from tests.bus.following import LONG
from tests.postgres.server import query


def test_a_move_that_caught_up_waits_for_the_disk(url: str):
    """The last event of what there was, and every event that comes alone, is done for good once it is saved (S4.2)."""
    steps: list[tuple[Step, int]] = []
    with EventBus(url) as bus:
        move = log_of(bus.store).move

        def note(step: Step) -> None:
            before = query(url, "SELECT pg_current_wal_insert_lsn()::text")[0][0]
            move(step)
            steps.append((step, query(url, "SELECT pg_current_wal_flush_lsn() - %s::pg_lsn", before)[0][0]))

        log_of(bus.store).move = note  # type: ignore[method-assign]
        bus.publish_many([{"type": "a"}] * 5)
        bus.follow("s", batch_size=2)(lambda _: None)
        bus.wait_for("s", 5, timeout=LONG)
        bus.wait_for("s", bus.publish("b").id, timeout=LONG)
    told = {step.position: step.caught_up for step, _ in steps}
    assert [told[position] for position in range(1, 7)] == [False] * 4 + [True] * 2
    assert all(flushed > 0 for step, flushed in steps if step.caught_up)
