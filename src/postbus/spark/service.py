"""The pipeline as one long-lived application: ingest, compact, archive, again and again, with health and figures."""

import logging
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from pyspark.sql import SparkSession

from postbus.errors import Conflict, StoreUnavailable
from postbus.loop import Bell
from postbus.model import Stream
from postbus.observe import tell
from postbus.spark.archive import archive, bounds
from postbus.spark.lake import Lake, Progress, ingest
from postbus.spark.source import open_bus

__all__ = ["Health", "Service", "serve_health"]

LONGEST_PAUSE: Final = 300.0
SILENT_CYCLES: Final = 10


@dataclass
class Health:
    """What the application tells of itself. Read by other threads while it works."""

    every: float
    began: float = field(default_factory=time.time)
    cycles: int = 0
    failures: int = 0
    beat: float = field(default_factory=time.time)
    """When it last did something."""
    error: str | None = None
    """Why the last cycle failed."""
    rows: dict[Stream, int] = field(default_factory=lambda: dict.fromkeys(Stream, 0))
    position: dict[Stream, int] = field(default_factory=dict[Stream, int])
    lag: dict[Stream, int] = field(default_factory=dict[Stream, int])
    removed: dict[Stream, int] = field(default_factory=lambda: dict.fromkeys(Stream, 0))

    @property
    def alive(self) -> bool:
        """Whether it does something; not so if it hangs."""
        return time.time() - self.beat < max(60.0, SILENT_CYCLES * self.every)

    @property
    def ready(self) -> bool:
        """Whether its last cycle worked."""
        return self.cycles > 0 and self.error is None

    def metrics(self) -> str:
        """Return its figures as Prometheus reads them."""
        lines = [
            f"postbus_pipeline_cycles_total {self.cycles}",
            f"postbus_pipeline_failures_total {self.failures}",
            f"postbus_pipeline_up {int(self.ready)}",
            f"postbus_pipeline_last_activity_timestamp_seconds {self.beat:.3f}",
        ]
        by_stream = {
            "postbus_lake_rows_total": self.rows,
            "postbus_lake_position": self.position,
            "postbus_lake_lag": self.lag,
            "postbus_archive_removed_rows_total": self.removed,
        }
        lines += [
            f'{name}{{stream="{each}"}} {value}' for name, found in by_stream.items() for each, value in found.items()
        ]
        return "\n".join(lines) + "\n"


class Service:
    """Keeps a lake at the bus's head, its segments large, and the bus's tables small, until it is stopped."""

    def __init__(
        self,
        spark: SparkSession,
        url: str,
        lake: Lake,
        *,
        every: float,
        direct_url: str | None = None,
        older_than: timedelta | None = None,
        housekeeping: float = 3_600.0,
    ) -> None:
        """Work every so many seconds; compact, and archive what is older than that if said, each `housekeeping`."""
        self.health = Health(every)
        self._spark, self._url, self._direct_url, self._lake = spark, url, direct_url, lake
        self._every, self._older_than, self._housekeeping = every, older_than, housekeeping
        self._kept = time.monotonic()
        self._stop = Bell()

    def stop(self) -> None:
        """Let the present cycle be the last."""
        self._stop.ring()

    def run(self) -> None:
        """Work until stopped. A store that is away is waited for; what must not go on unseen raises."""
        pause = self._every
        while not self._stop.rung:
            try:
                self.cycle()
            except (StoreUnavailable, Conflict) as error:  # away, or somebody else is at the lake
                self.health.failures += 1
                self.health.error = str(error)
                pause = min(2 * pause, LONGEST_PAUSE)
                tell(logging.ERROR, "pipeline_waits", reason=str(error), seconds=pause)
            else:
                pause = self._every
            self.health.beat = time.time()
            self._stop.wait(pause)

    def cycle(self) -> None:
        """Bring the lake up to the head once, and look after it when it is time to."""
        written = ingest(self._spark, self._url, self._lake, direct_url=self._direct_url, watch=self._saw)
        for stream, rows in written.items():
            self.health.rows[stream] += rows
        if time.monotonic() - self._kept >= self._housekeeping:
            self._keep()
            self._kept = time.monotonic()
        self.health.cycles += 1
        self.health.error = None

    def _saw(self, told: Progress) -> None:
        health = self.health
        health.beat = time.time()
        health.position[told.stream], health.lag[told.stream] = told.position, told.lag

    def _keep(self) -> None:
        store = open_bus(self._url, self._direct_url)
        try:
            with store.hold(f"lake {self._lake.url}") as check:
                self._lake.compact(self._spark, check=check)
            if self._older_than is not None:
                for bound in bounds(store, self._lake, older_than=self._older_than):
                    for each in bound.past:
                        tell(logging.ERROR, "subscription_cut_off", subscription=each.subscription, at=each.position)
                    gone = archive(self._spark, self._url, store, self._lake, bound)
                    self.health.removed[bound.stream] += gone
        finally:
            store.close()


def serve_health(health: Health, host: str, port: int) -> ThreadingHTTPServer:
    """Answer /livez, /readyz and /metrics in a thread of its own; return what ends it with `shutdown()`."""

    class Answer(BaseHTTPRequestHandler):
        """Tells how the application is."""

        def do_GET(self) -> None:
            """Answer one request."""
            match self.path:
                case "/livez":
                    self._say(health.alive, "alive" if health.alive else "no sign of life")
                case "/readyz":
                    self._say(health.ready, "ready" if health.ready else health.error or "starting")
                case "/metrics":
                    self._say(True, health.metrics())  # noqa: FBT003  it is well
                case _:
                    self.send_error(404)

        def _say(self, well: bool, text: str) -> None:  # noqa: FBT001  the verdict
            body = text.encode()
            self.send_response(200 if well else 503)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
            """Say nothing: a probe every second is no news."""

    server = ThreadingHTTPServer((host, port), Answer)
    threading.Thread(target=server.serve_forever, name="postbus-health", daemon=True).start()
    return server
