"""The measures of the pipeline on Spark, and their bars, set before measuring."""

from typing import Final

from bench.measure import Bar, Call, Measure, Round

__all__ = ["measures"]

ONE: Final = "one session"


def measures(*, quick: bool) -> list[Measure]:
    """Return all measures; `quick` ones are smaller."""
    return [
        _source(count=100_000 if quick else 1_000_000, rounds=2 if quick else 5),
        _lake(sizes=[20_000, 100_000] if quick else [100_000, 1_000_000, 5_000_000]),
        _sink(count=50_000 if quick else 300_000),
    ]


def _source(count: int, rounds: int) -> Measure:
    def against(name: str) -> Bar:
        def value(each: Round) -> float:
            return each[ONE]["postbus"] / each[ONE].get(name, float("nan"))

        def missing(_: object) -> str | None:
            from bench.spark import jar  # noqa: PLC0415  Spark only where it is used

            return "libpostgresql-jdbc-java is not installed" if name == "JDBC" and jar() is None else None

        limit = 0.8 if name == "JDBC" else 1.3
        return Bar(f"the source against {name}", value, limit, at_least=True, unless=missing)

    return Measure(
        "spark-source",
        f"Reading {count:,} events from PostgreSQL with Spark, to nowhere",
        "/s",
        {ONE: Call("bench.spark:read", {"count": count, "rounds": rounds})},
        [against("JDBC"), against("tuples")],
        most_rounds=1,
        store="postgres",
    )


def _lake(sizes: list[int]) -> Measure:
    first, last = f"{sizes[0]:,}", f"{sizes[-1]:,}"

    def flat(each: Round) -> float:
        return each[ONE][last] / each[ONE][first]

    return Measure(
        "spark-lake",
        f"Bringing a log into the lake, up to {last} events",
        "/s",
        {ONE: Call("bench.spark:grow", {"sizes": sizes})},
        [Bar(f"rows a second up to {last} against {first}", flat, 0.8, at_least=True)],
        most_rounds=1,
        store="postgres",
    )


def _sink(count: int) -> Measure:
    return Measure(
        "spark-sink",
        f"Publishing {count:,} events from a DataFrame",
        "/s",
        {ONE: Call("bench.spark:sink", {"count": count})},
        [
            Bar(
                "the sink against publish_many",
                lambda each: each[ONE]["sink"] / each[ONE]["publish_many"],
                0.5,
                at_least=True,
            )
        ],
        most_rounds=3,
        store="postgres",
    )
