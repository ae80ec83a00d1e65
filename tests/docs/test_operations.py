"""What `docs/operations.md` says of the files of a bus."""

from pathlib import Path

from postbus import EventBus

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def test_every_file_beside_a_database_is_explained(tmp_path: Path):
    """Whatever lies beside it while a follower and a worker run has its line in the table."""
    bus = EventBus(f"sqlite:///{tmp_path / 'shop.db'}")
    bus.follow("sales")(lambda _: None)
    bus.subscribe("*", lambda _: None)
    with bus:
        bus.wait_for("sales", bus.publish("order.placed").id, timeout=10)
        beside = {each.name.removeprefix("shop.db") for each in tmp_path.iterdir()} - {""}
    assert beside == {"-wal", "-shm", "-alive", "-held"}
    table = [row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| `…-")]
    assert all(f"`…{each}`" in "".join(table) for each in beside)
