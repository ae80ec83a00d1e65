"""`postbus worker`: run a bus's handlers in worker processes, and keep them running."""

import json
import signal
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from postbus.cli.child import OVERRIDES
from postbus.cli.logs import log_to_stderr
from postbus.cli.options import Url, parse_seconds
from postbus.cli.supervise import Supervisor
from postbus.errors import InvalidRequest
from postbus.observe import logger

__all__ = ["EXAMPLES", "worker"]

EXAMPLES: Final = """\
Example: postbus worker shop:bus --processes 4

There shop.py, in the working directory or installed, has a bus = EventBus() and handlers under @bus.on(…)."""
LOOK_EVERY: Final = 0.1
LAST_PORT: Final = 65_535
Poll = typer.Option(parser=parse_seconds, metavar="TIME", help="How often to look for work, such as 0.5s.")
Drain = typer.Option(parser=parse_seconds, metavar="TIME", help="How long handlers may finish, such as 2m.")
Address = typer.Option(metavar="HOST:PORT", envvar="POSTBUS_METRICS", help="Where to tell Prometheus, at /metrics.")


def worker(
    target: Annotated[str, typer.Argument(metavar="MODULE:BUS", help="An EventBus in a module, or what returns one.")],
    *,
    processes: Annotated[int, typer.Option(min=1, max=1_000, help="How many worker processes to keep running.")] = 1,
    concurrency: Annotated[int | None, typer.Option(min=1, max=10_000, help="Handlers at once, a process.")] = None,
    prefetch: Annotated[int | None, typer.Option(min=1, max=100_000, help="Events held at most, a process.")] = None,
    poll_interval: Annotated[float | None, Poll] = None,
    shutdown_timeout: Annotated[float | None, Drain] = None,
    metrics: Annotated[str | None, Address] = None,
    url: Url = None,
) -> None:
    """Run a bus's handlers until SIGTERM or Ctrl-C, replacing worker processes that die or wear out.

    The signal lets running handlers finish; a second one ends at once. Nothing is lost.
    Flags win over settings in the code, but a URL in the code cannot be changed by --url.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise InvalidRequest(f"name the bus as MODULE:BUS, such as shop:bus, not {target!r}")
    flags = {"url": url, "concurrency": concurrency, "prefetch": prefetch}
    flags |= {"poll_interval": poll_interval, "shutdown_timeout": shutdown_timeout}
    given = {key: value for key, value in flags.items() if value is not None}
    log_to_stderr()
    supervisor = Supervisor(target, processes, _log, environment=_environment(given), figures=metrics is not None)
    if metrics is not None:
        _expose(*parse_address(metrics), supervisor)
    raise typer.Exit(_supervise(supervisor))


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port meant by HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464; raise InvalidRequest."""
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) <= LAST_PORT):
        raise InvalidRequest(f"metrics are told at HOST:PORT, such as 127.0.0.1:9464, not {text!r}")
    return host.strip("[]"), int(port)


def _expose(host: str, port: int, supervisor: Supervisor) -> None:
    """Serve the figures of all children, and of the store that one of them asks."""
    try:
        from postbus.http.metrics import Looked, serve_figures  # noqa: PLC0415  an extra
    except ImportError as error:
        raise InvalidRequest(f"metrics need more packages: pip install 'postbus[server]' ({error})") from None
    store = Looked(supervisor.ask_store)
    where = serve_figures(host, port, lambda: {**supervisor.samples(), **store.samples()})
    logger.info("metrics_served", extra={"address": where})


def _environment(flags: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables a child is started with: the flags as settings, and as what wins over the code's own."""
    return {f"POSTBUS_{name.upper()}": str(value) for name, value in flags.items()} | {OVERRIDES: json.dumps(flags)}


def _log(event: str, fields: Mapping[str, object]) -> None:
    logger.info(event, extra=dict(fields))


def _supervise(supervisor: Supervisor) -> int:
    """Keep the children running until a signal; return the exit code."""
    asked: list[int] = []

    def ask(number: int, _: object) -> None:
        asked.append(number)  # and nothing that takes a lock: the thread that is interrupted may hold it

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    heard = 0
    while supervisor.turn():
        if len(asked) > heard:
            heard = len(asked)
            logger.info("worker_stopping", extra={"signal": signal.Signals(asked[-1]).name, "at_once": heard > 1})
            supervisor.stop(signal.SIGTERM if heard == 1 else signal.SIGKILL)
        time.sleep(LOOK_EVERY)
    return supervisor.exit_code
