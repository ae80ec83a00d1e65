"""The measures on PostgreSQL, their sizes and their bars. The bars were set before measuring.

Everybody works on one server, a fresh database for each sample, with fsync and synchronous_commit on.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from bench.measure import Bar, Call, Measure, quotient

__all__ = ["measures"]

RATE: Final = "rate"
SIZE: Final = 1_000
MILLION: Final = 1_000_000
CONCURRENCY: Final = 50
OURS: Final = "postbus"
GRAPHILE: Final = "Graphile Worker"
PGQUEUER: Final = "PgQueuer"
PYTHON: Final = {PGQUEUER: "pgqueuer", "Procrastinate": "procrastinate"}
NODE: Final = {GRAPHILE: "graphile", "pg-boss": "pgboss"}
SLOW: Final = ("Procrastinate",)
"""Peers that get less to do, or they would take most of the run."""
NOTHING: Final[Mapping[str, int]] = MappingProxyType({})


def measures(*, quick: bool, node: bool) -> list[Measure]:
    """Return all measures; `quick` ones are smaller, without `node` those peers that need it are left out."""
    return [
        _batch(batches=10 if quick else 50, node=node),
        _drain(count=20_000 if quick else 60_000, node=node),
        _backlog(count=20_000 if quick else 60_000, large=100_000 if quick else MILLION, rounds=2 if quick else 3),
        _sustain(seconds=2 if quick else 6),
        _concurrent(count=3_200 if quick else 12_800),
        _dispatch(count=75 if quick else 500, node=node, rounds=1 if quick else 3),
        _isolation(count=10_000 if quick else 30_000),
        _cost(count=10_000 if quick else 20_000, node=node, rounds=1 if quick else 3),
    ]


def _peers(measure: str, *, node: bool, fewer: Mapping[str, int] = NOTHING, **arguments: Any) -> dict[str, Call]:
    """Return a measure of every peer, in its own language; the slow ones get `fewer` of something."""
    peers = {
        name: Call(f"bench.pgpeers:{measure}", {"peer": peer, **arguments, **(fewer if name in SLOW else NOTHING)})
        for name, peer in PYTHON.items()
    }
    if node:
        for name, peer in NODE.items():
            peers[name] = Call("bench.pgpeers:node", {"measure": f"{peer}.{measure}", **arguments})
    return peers


def _drains(count: int, *, node: bool) -> dict[str, Call]:
    peers = _peers("drain", node=node, count=count, fewer={"count": count // 20})
    return {OURS: Call("bench.ours:drain", {"count": count}), **peers}


def _batch(batches: int, *, node: bool) -> Measure:
    peers = _peers("publish", node=node, batches=batches, size=SIZE, fewer={"batches": batches // 5})
    return Measure(
        "pg-batch",
        "Publishing 1,000 at a time on PostgreSQL",
        "/s",
        {OURS: Call("bench.ours:publish_many", {"batches": batches, "size": SIZE}), **peers},
        [Bar("publish_many(1000) against the best peer", quotient(OURS, *peers, figure=RATE), 1.5, at_least=True)],
        peers=tuple(peers),
        store="postgres",
    )


def _drain(count: int, *, node: bool) -> Measure:
    subjects = _drains(count, node=node)
    bars = {GRAPHILE: 1.3, PGQUEUER: 2.5, "pg-boss": None, "Procrastinate": None}
    return Measure(
        "pg-drain",
        "Handling a backlog on PostgreSQL, handlers that do nothing",
        "/s",
        subjects,
        [
            Bar(f"@bus.on with full audit against {name}", quotient(OURS, name, figure=RATE), limit, at_least=True)
            for name, limit in bars.items()
            if name in subjects
        ],
        peers=tuple(name for name in subjects if name != OURS),
        store="postgres",
    )


def _backlog(count: int, large: int, rounds: int) -> Measure:
    few, many = f"{count:,} waiting", f"{large:,} waiting"
    short = None if large >= MILLION else f"a short run: {large:,} waiting, and the bar is about {MILLION:,}"
    return Measure(
        "pg-backlog",
        f"Handling {count:,} events, of as many and of {large:,}",
        "/s",
        {
            few: Call("bench.ours:drain_some", {"count": count, "backlog": count}),
            many: Call("bench.ours:drain_some", {"count": count, "backlog": large}),
        },
        [
            Bar(
                f"handling at {large:,} against {count:,}",
                quotient(many, few, figure=RATE),
                0.85,
                at_least=True,
                unless=lambda _: short,
            )
        ],
        most_rounds=rounds,
        store="postgres",
    )


def _sustain(seconds: float) -> Measure:
    # The first is what it documents; the largest batch it allows then is half of that. The second is faster.
    settings = {
        f"PgQueuer, at most {CONCURRENCY}": {"batch_size": CONCURRENCY // 2, "max_concurrent_tasks": CONCURRENCY},
        "PgQueuer, a semaphore": {"batch_size": 100, "max_concurrent_tasks": 1_000},
    }
    peers = {
        name: Call(
            "bench.pgpeers:sustain",
            {"peer": "pgqueuer", "seconds": seconds, "concurrency": CONCURRENCY, "options": options},
        )
        for name, options in settings.items()
    }
    ours = {
        name: Call("bench.ours:sustain", {"seconds": seconds, "concurrency": CONCURRENCY, "threads": threads})
        for name, threads in ((OURS, False), ("postbus, plain def", True))
    }
    return Measure(
        "pg-sustain",
        f"Handlers of 1 ms, {CONCURRENCY} at once, another process publishing as many as are handled",
        "/s",
        ours | peers,
        [
            Bar("async def against PgQueuer at its best", quotient(OURS, *peers, figure=RATE), 1.3, at_least=True),
            Bar("plain def …", quotient("postbus, plain def", *peers, figure=RATE), None, at_least=True),
        ],
        peers=tuple(peers),
        store="postgres",
    )


def _concurrent(count: int) -> Measure:
    def publishers(threads: int, of: int) -> Call:
        return Call("bench.ours:publish_concurrently", {"count": of, "threads": threads})

    return Measure(
        "pg-concurrent",
        "Publishing from 64 threads on PostgreSQL",
        "/s",
        {"1 thread": publishers(1, count // 8), "64 threads": publishers(64, count)},
        [Bar("64 publishers against one", quotient("64 threads", "1 thread", figure=RATE), 5, at_least=True)],
        store="postgres",
    )


def _dispatch(count: int, rounds: int, *, node: bool) -> Measure:
    peers = _peers("dispatch", node=node, count=count)
    return Measure(
        "pg-dispatch",
        "From the call that publishes, in another process, to the first line of the handler, 50 a second",
        "ms",
        {OURS: Call("bench.ours:dispatch", {"count": count, "across": True}), **peers},
        [
            Bar(f"{name} against the best peer", quotient(OURS, *peers, figure=name, best=min), 1)
            for name in ("p50", "p99")
        ],
        most_rounds=rounds,
        store="postgres",
    )


def _isolation(count: int) -> Measure:
    def beside(*, failing: bool) -> Call:
        return Call("bench.ours:drain_beside", {"count": count, "failing": failing})

    return Measure(
        "pg-isolation",
        "Two subscriptions in one process: the rate of the first, whatever becomes of the second",
        "/s",
        {"second succeeds": beside(failing=False), "second always fails": beside(failing=True)},
        [
            Bar(
                "beside one that always fails, against one that succeeds",
                quotient("second always fails", "second succeeds", figure=RATE),
                0.9,
                at_least=True,
            )
        ],
        store="postgres",
    )


def _cost(count: int, rounds: int, *, node: bool) -> Measure:
    subjects = {
        name: Call("bench.postgres:cost", {"target": call.target, "arguments": dict(call.arguments)})
        for name, call in _drains(count, node=node).items()
    }
    peers = [name for name in subjects if name != OURS]
    return Measure(
        "pg-cost",
        "What an event costs PostgreSQL from its publishing, 1,000 at a time, to its end",
        "each",
        subjects,
        [
            Bar(f"{figure} against the leanest peer", quotient(OURS, *peers, figure=figure, best=min), None)
            for figure in ("WAL bytes", "dead rows made")
        ],
        most_rounds=rounds,
        store="postgres",
    )
