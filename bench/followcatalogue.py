"""The measures of followers on both stores, and their bars, set before measuring."""

from typing import Final

from bench.measure import Bar, Call, Measure, Round, Store, quotient

__all__ = ["measures"]

RATE: Final = "rate"
OURS: Final = "postbus"
PEER: Final = "eventsourcing"
TX: Final = "postbus, tx"
UNHURRIED: Final = "eventsourcing, not waiting for the disk"
FUNCTIONS: Final = "eventsourcing, functions in the database"
POLLED: Final = "eventsourcing, asked every 4 ms"
OFTEN: Final = "eventsourcing, asked every 1 ms"
PREFIX: Final[dict[Store, str]] = {"sqlite": "", "postgres": "pg-"}
PLACE: Final[dict[Store, str]] = {"sqlite": "SQLite", "postgres": "PostgreSQL"}


def measures(*, quick: bool) -> list[Measure]:
    """Return all measures; `quick` ones are smaller."""
    stores: tuple[Store, ...] = ("sqlite", "postgres")
    return [
        measure
        for store in stores
        for measure in (
            _catch_up(store, count=20_000 if quick else 200_000),
            _tracked(store, count=2_000 if quick else 20_000),
            _memory(store, count=50_000 if quick else 1_000_000),
            _live(store, count=60 if quick else 800, rounds=1 if quick else 3),
        )
    ]


def _catch_up(store: Store, count: int) -> Measure:
    return Measure(
        f"{PREFIX[store]}follow",
        f"Following {count:,} events on {PLACE[store]}, 500 at a time, handlers that do nothing",
        "/s",
        {
            OURS: Call("bench.follow:catch_up", {"count": count}),
            PEER: Call("bench.follow:peer_read", {"count": count}),
        },
        [
            Bar(
                "@bus.follow with checkpoints against a bare read that keeps no position",
                quotient(OURS, PEER, figure=RATE),
                1.0,
                at_least=True,
            )
        ],
        peers=(PEER,),
        store=store,
    )


def _tracked(store: Store, count: int) -> Measure:
    return Measure(
        f"{PREFIX[store]}follow-tracked",
        f"Following {count:,} events on {PLACE[store]}, a checkpoint each",
        "/s",
        {
            OURS: Call("bench.follow:tracked", {"count": count, "tx": False}),
            TX: Call("bench.follow:tracked", {"count": count, "tx": True}),
            PEER: Call("bench.follow:peer_tracked", {"count": count, "durable": True}),
            UNHURRIED: Call("bench.follow:peer_tracked", {"count": count, "durable": False}),
        },
        [
            Bar(
                "a checkpoint an event, which need not wait for the disk, against a tracking that does",
                quotient(OURS, PEER, figure=RATE),
                2.0,
                at_least=True,
            ),
            Bar(
                "… against a tracking that does not wait either",
                quotient(OURS, UNHURRIED, figure=RATE),
                2.0,
                at_least=True,
            ),
            Bar("with tx, both waiting for the disk", quotient(TX, PEER, figure=RATE), None, at_least=True),
        ],
        peers=(PEER, UNHURRIED),
        store=store,
    )


def _memory(store: Store, count: int) -> Measure:
    def growth(each: Round) -> float:
        return each[OURS]["MB at most"] / each[OURS]["MB after a tenth"]

    return Measure(
        f"{PREFIX[store]}follow-memory",
        f"The follower's memory while it catches up on {count:,} events on {PLACE[store]}",
        "each",
        {OURS: Call("bench.follow:grow", {"count": count})},
        [Bar("the most memory from then on against that after a tenth", growth, 1.1)],
        most_rounds=1,
        store=store,
    )


def _live(store: Store, count: int, rounds: int) -> Measure:
    peers = {
        "sqlite": {
            POLLED: Call("bench.follow:peer_live", {"count": count, "every": 0.004}),
            OFTEN: Call("bench.follow:peer_live", {"count": count, "every": 0.001}),
        },
        "postgres": {
            PEER: Call("bench.follow:peer_live", {"count": count}),
            FUNCTIONS: Call("bench.follow:peer_live", {"count": count, "functions": True}),
        },
    }[store]
    bars = {"p50": None, "p99": 1.0}
    return Measure(
        f"{PREFIX[store]}follow-live",
        f"From the call that publishes, in another process, to the follower's handler on {PLACE[store]}, 20 a second",
        "ms",
        {OURS: Call("bench.follow:live", {"count": count}), **peers},
        [
            Bar(f"{name} against the best peer", quotient(OURS, *peers, figure=name, best=min), limit)
            for name, limit in bars.items()
        ],
        most_rounds=rounds,
        store=store,
    )
