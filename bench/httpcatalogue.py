"""The measures of the HTTP queue on both stores, and their bars, set before measuring."""

from typing import Final

from bench.measure import Bar, Call, Measure, Store, quotient

__all__ = ["measures"]

RATE: Final = "rate"
PREFIX: Final[dict[Store, str]] = {"sqlite": "", "postgres": "pg-"}
PLACE: Final[dict[Store, str]] = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
CLIENTS: Final = (1, 16, 64)


def measures(*, quick: bool) -> list[Measure]:
    """Return all measures; `quick` ones are smaller."""
    stores: tuple[Store, ...] = ("sqlite", "postgres")
    return [
        measure
        for store in stores
        for measure in (
            _measure(store, "publish", "Publishing over HTTP", 1_000 if quick else 5_000),
            _measure(
                store, "work", "Claiming and completing over HTTP, two requests an event,", 500 if quick else 2_500
            ),
        )
    ]


def _measure(store: Store, verb: str, title: str, count: int) -> Measure:
    turns = {clients: count // 5 if clients == 1 else count for clients in CLIENTS}
    bare = 2 if verb == "work" else 1
    subjects = {
        f"{name}, {clients}": Call(f"bench.http:{function}", {"count": turns[clients] * factor, "clients": clients})
        for clients in CLIENTS
        for name, function, factor in (("postbus", verb, 1), ("bare insert", "bare", bare))
    }
    return Measure(
        f"{PREFIX[store]}http-{verb}",
        f"{title} on {PLACE[store]}, by 1, 16 and 64 clients",
        "/s",
        subjects,
        [
            _bar(64, 1.5),
            _bar(16, None),
            _bar(1, 0.7),
        ],
        store=store,
    )


def _bar(clients: int, limit: float | None) -> Bar:
    who = f"{clients} client{'s' if clients > 1 else ''}"
    value = quotient(f"postbus, {clients}", f"bare insert, {clients}", figure=RATE)
    return Bar(f"requests/s of {who} against one bare insert a request", value, limit, at_least=True)
