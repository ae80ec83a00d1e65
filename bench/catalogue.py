"""The measures, their sizes and their bars. The bars were set before measuring, and are not lowered here."""

from collections.abc import Mapping
from typing import Any, Final

from bench.measure import Bar, Call, Measure, Round, quotient

__all__ = ["measures"]

RATE: Final = "rate"
JUDGED_FSYNC_MS: Final = 0.3
SLOW_FSYNC_MS: Final = 0.5


def measures(*, quick: bool) -> list[Measure]:
    """Return all measures; `quick` ones are smaller, fit to see that everything runs."""
    return [
        _batch(batches=5 if quick else 20),
        _single(count=400 if quick else 1_500),
        _concurrent(count=1_920 if quick else 6_400),
        _drain(count=10_000 if quick else 20_000, peers=500 if quick else 3_000),
        _claim(many=100_000 if quick else 1_000_000, times=50 if quick else 200),
        _fan_out(count=2_000 if quick else 10_000),
        _large(count=40 if quick else 150),
        _dispatch(count=75 if quick else 300, rounds=1 if quick else 3),
        _dead_letters(many=20_000 if quick else 100_000),
        _recovery(rounds=1 if quick else 3),
    ]


def _batch(batches: int) -> Measure:
    count = batches * 1_000
    return Measure(
        "batch",
        "Publishing 1,000 at a time",
        "/s",
        {
            "postbus": Call("bench.ours:publish_many", {"batches": batches, "size": 1_000}),
            "raw apsw": Call("bench.raw:insert_batches", {"batches": batches, "size": 1_000}),
            "litequeue": Call("bench.peers:litequeue_publish", {"count": count, "batch": 1_000}),
            "Huey": Call("bench.peers:huey_publish", {"count": count // 10, "batch": 1_000}),
            "persist-queue": Call("bench.peers:persistqueue_publish", {"count": count // 10, "batch": 1_000}),
        },
        [Bar("publish_many(1000) against raw apsw", quotient("postbus", "raw apsw", figure=RATE), 0.5, at_least=True)],
        peers=("litequeue", "Huey", "persist-queue"),
    )


def _single(count: int) -> Measure:
    return Measure(
        "single",
        "Publishing one at a time",
        "/s",
        {
            "postbus": Call("bench.ours:publish_singly", {"count": count}),
            "raw apsw": Call("bench.raw:insert_singly", {"count": count}),
            "litequeue": Call("bench.peers:litequeue_publish", {"count": count, "batch": 1}),
            "Huey": Call("bench.peers:huey_publish", {"count": count, "batch": 1}),
            "persist-queue": Call("bench.peers:persistqueue_publish", {"count": count, "batch": 1}),
        },
        [Bar("publish against a raw commit", quotient("postbus", "raw apsw", figure=RATE), 0.8, at_least=True)],
        peers=("litequeue", "Huey", "persist-queue"),
    )


def _concurrent(count: int) -> Measure:
    def publishers(threads: int, of: int, **slow: float) -> Call:
        return Call("bench.ours:publish_concurrently", {"count": of, "threads": threads, **slow})

    slow = SLOW_FSYNC_MS / 1000
    return Measure(
        "concurrent",
        "Publishing from 64 threads",
        "/s",
        {
            "1 thread": publishers(1, count // 6),
            "64 threads": publishers(64, count),
            "1 thread, slow disk": publishers(1, count // 6, slow_fsync=slow),
            "64 threads, slow disk": publishers(64, count, slow_fsync=slow),
        },
        [
            Bar(
                "64 publishers against one, on this disk",
                quotient("64 threads", "1 thread", figure=RATE),
                4,
                at_least=True,
                unless=_fsync_is_cheap,
            ),
            Bar(
                f"64 publishers against one, every fsync {SLOW_FSYNC_MS} ms slower",
                quotient("64 threads, slow disk", "1 thread, slow disk", figure=RATE),
                4,
                at_least=True,
            ),
        ],
    )


def _fsync_is_cheap(machine: Mapping[str, Any]) -> str | None:
    took = machine["fsync_ms"]
    return f"an fsync takes {took:.2f} ms here, under {JUDGED_FSYNC_MS} ms" if took < JUDGED_FSYNC_MS else None


def _drain(count: int, peers: int) -> Measure:
    hueys = {f"Huey, {workers} thread{'s'[: workers - 1]}": workers for workers in (1, 2, 4)}
    return Measure(
        "drain",
        "Handling a backlog, handlers that do nothing",
        "/s",
        {
            "postbus": Call("bench.ours:drain", {"count": count}),
            "persist-queue": Call("bench.peers:persistqueue_drain", {"count": peers}),
            "litequeue": Call("bench.peers:litequeue_drain", {"count": min(peers, 2_000)}),
            **{name: Call("bench.peers:huey_drain", {"count": peers, "workers": n}) for name, n in hueys.items()},
        },
        [
            Bar(
                "@bus.on with full audit against Huey at its best",
                quotient("postbus", *hueys, figure=RATE),
                8,
                at_least=True,
            ),
            Bar("… against persist-queue", quotient("postbus", "persist-queue", figure=RATE), 8, at_least=True),
            Bar("… against litequeue", quotient("postbus", "litequeue", figure=RATE), None, at_least=True),
        ],
        peers=("persist-queue", "litequeue", *hueys),
    )


def _claim(many: int, times: int) -> Measure:
    def store(path: str, due: int = 1_000, scheduled: int = 0, tag_sets: int = 0) -> Call:
        rare = 0 if tag_sets else 10
        return Call(
            "bench.ours:fill",
            {"path": path, "due": due, "rare": rare, "scheduled": scheduled, "tag_sets": tag_sets},
        )

    def worker(path: str, tags: list[str] | None = None, most: int = 100) -> Call:
        return Call("bench.ours:claim", {"path": path, "tags": tags, "most": most, "times": times})

    few = "1,000 due"
    subjects = {
        few: worker("few.db"),
        f"{many:,} due": worker("many.db"),
        f"{many:,} scheduled": worker("scheduled.db"),
        f"tag of 10 in {many:,}": worker("many.db", ["rare"], 1),
        "10,000 tag sets": worker("tags.db"),
    }
    bars = [
        Bar(f"poll(), {name}, against {few}", quotient(name, few, figure="poll()"), 3 if "sets" in name else 1.3)
        for name in list(subjects)[1:]
    ]
    bars += [
        Bar(
            f"poll_many(100), {name}, against {few}",
            quotient(name, few, figure="poll_many(100)"),
            3 if "sets" in name else 1.3,
        )
        for name in list(subjects)[1:]
        if not name.startswith("tag of")
    ]
    return Measure(
        "claim",
        "Cost of a claim as the backlog grows",
        "ms",
        subjects,
        bars,
        prepare=[
            store("many.db", due=many),
            store("scheduled.db", scheduled=many),
            store("tags.db", due=many, tag_sets=10_000),
            store("few.db"),
        ],
    )


def _fan_out(count: int) -> Measure:
    def to(subscriptions: int) -> Call:
        return Call("bench.ours:fan_out", {"count": count, "subscriptions": subscriptions})

    return Measure(
        "fan-out",
        f"Publishing {count:,} events to several subscriptions, and handling them",
        "ms",
        {"1 subscription": to(1), "5 subscriptions": to(5)},
        [
            Bar(f"{what}, five against one", quotient("5 subscriptions", "1 subscription", figure=what), 5)
            for what in ("publish", "publish and drain")
        ],
    )


def _large(count: int) -> Measure:
    kinds = {"text": "one string of 100 kB", "document": "document of 3,000 values, 100 kB"}
    subjects: dict[str, Call] = {}
    for kind in kinds:
        subjects[f"postbus, {kind}"] = Call("bench.ours:publish_large", {"count": count, "kind": kind})
        subjects[f"raw apsw, {kind}"] = Call("bench.raw:insert_large", {"count": count, "kind": kind})
    return Measure(
        "large",
        "Publishing payloads of 100 kB",
        "ms",
        subjects,
        [
            Bar(f"{text}, against raw apsw", quotient(f"postbus, {kind}", f"raw apsw, {kind}", figure="seconds"), 2)
            for kind, text in kinds.items()
        ],
    )


def _dispatch(count: int, rounds: int) -> Measure:
    def p99(subject: str) -> Any:
        def value(each: Round) -> float:
            return each[subject]["p99"] * 1000

        return value

    return Measure(
        "dispatch",
        "From the call of publish to the first line of the handler, 50 a second",
        "ms",
        {
            "one process": Call("bench.ours:dispatch", {"count": count, "across": False}),
            "two processes": Call("bench.ours:dispatch", {"count": count, "across": True}),
        },
        [
            Bar("p99 in one process", p99("one process"), 5, unit="ms"),
            Bar("p99 across processes", p99("two processes"), 15, unit="ms"),
        ],
        most_rounds=rounds,
    )


def _dead_letters(many: int) -> Measure:
    large, small = f"{many:,} dead", "1,000 dead"
    return Measure(
        "dead-letters",
        "The first page of 100 dead letters",
        "ms",
        {
            small: Call("bench.ours:read_dead_letters", {"path": "small.db"}),
            large: Call("bench.ours:read_dead_letters", {"path": "large.db"}),
        },
        [Bar(f"a page at {large} against {small}", quotient(large, small, figure="page"), 1.3)],
        prepare=[
            Call("bench.ours:bury", {"path": "large.db", "count": many}),
            Call("bench.ours:bury", {"path": "small.db", "count": 1_000}),
        ],
    )


def _recovery(rounds: int) -> Measure:
    return Measure(
        "recovery",
        "Freeing 10,000 leases of a killed process",
        "ms",
        {"postbus": Call("bench.ours:recover", {"count": 10_000})},
        [Bar("start() after the kill", lambda each: each["postbus"]["start"], 1, unit="s")],
        most_rounds=rounds,
    )
