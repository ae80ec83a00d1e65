"""One Spark session for all tests of the pipeline: starting one takes longer than most of them."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession

from postbus import EventBus
from postbus.spark import session
from postbus.store import Log
from tests.postgres.server import server
from tests.spark.reading import Following

SMALL: Final = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.pollingDelay": "5ms",
    # What tests of exactness would only wait for.
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}


@pytest.fixture(scope="session")
def spark() -> Generator[SparkSession]:
    """Give the session that users get, small."""
    made = session("local[2]", app="tests", config=SMALL)
    yield made
    made.stop()


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    """Give the address of a bus that is empty."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'bus.db'}"
    else:
        with server().database() as url:
            yield url


@pytest.fixture
def make_bus(url: str) -> Iterator[Callable[..., EventBus]]:
    """Give a function that opens a bus on one and the same store, as often as processes would."""
    made: list[EventBus] = []

    def make(**options: Any) -> EventBus:
        made.append(EventBus(url, **options))
        return made[-1]

    yield make
    for bus in made:
        bus.shutdown(timeout=5)


@pytest.fixture
def bus(make_bus: Callable[..., EventBus]) -> EventBus:
    """Give a bus."""
    return make_bus()


@pytest.fixture
def follow(url: str, store: Log) -> Iterator[Callable[..., Following]]:
    """Give a function that begins a stream, or goes on with one after a crash."""
    begun: list[Following] = []

    def follow(since: dict[str, Any] | None = None, **options: Any) -> Following:
        begun.append(Following(url, since, **options))
        return begun[-1]

    yield follow
    for each in begun:
        each.close()
