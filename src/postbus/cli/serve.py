"""`postbus serve`: the HTTP queue."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from postbus.bus import EventBus
from postbus.cli.console import say
from postbus.cli.logs import log_to_stderr
from postbus.cli.options import Url, parse_seconds
from postbus.errors import InvalidRequest
from postbus.model import Stream
from postbus.retry import RetryPolicy

__all__ = ["EXAMPLES", "serve"]

EXAMPLES: Final = """\
Example: postbus serve --port 8080

Then: curl localhost:8080/events -H 'content-type: application/json' -d '{"tags": "email", "payload": {"to": "a"}}'

And: curl 'localhost:8080/events/subscribe?tags=email&worker_id=me:1&wait=30'"""
Lease = typer.Option(parser=parse_seconds, metavar="TIME", envvar="POSTBUS_HTTP_LEASE", help="How long a claim lasts.")
Delay = typer.Option(
    parser=parse_seconds, metavar="TIME", envvar="POSTBUS_RETRY_DELAY", help="How long after a failure to try again."
)

Drain = typer.Option(
    parser=parse_seconds,
    metavar="TIME",
    envvar="POSTBUS_DRAIN",
    help="How long after SIGTERM to go on serving while /readyz answers 503, so that nothing new is sent here; on "
    "Kubernetes 5s.",
)


def serve(
    *,
    host: Annotated[str, typer.Option(envvar="POSTBUS_HOST", help="Where to listen; 0.0.0.0 is everywhere.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65_535, envvar="POSTBUS_PORT", help="On which port.")] = 8080,
    require_token: Annotated[
        bool, typer.Option("--require-token", envvar="POSTBUS_REQUIRE_TOKEN", help="Ask for tokens on loopback too.")
    ] = False,
    lease: Annotated[float, Lease] = "5m",  # type: ignore[assignment]  # typer parses it
    retry_delay: Annotated[float, Delay] = "5m",  # type: ignore[assignment]  # typer parses it
    max_retries: Annotated[
        int, typer.Option(min=0, max=1_000_000, envvar="POSTBUS_MAX_RETRIES", help="How often to try again.")
    ] = 3,
    drain: Annotated[float, Drain] = "0s",  # type: ignore[assignment]  # typer parses it
    lake: Annotated[
        str | None, typer.Option(metavar="DIR", envvar="POSTBUS_LAKE", help="The lake that the dashboard tells of.")
    ] = None,
    mask_payloads: Annotated[
        bool, typer.Option("--mask-payloads", envvar="POSTBUS_MASK_PAYLOADS", help="The dashboard shows no payloads.")
    ] = False,
    url: Url = None,
) -> None:
    """Serve the bus over HTTP until SIGTERM or Ctrl-C: any language publishes, works and follows. With a dashboard.

    On loopback whoever can reach it may use it. Anywhere else every request needs a token: see `postbus token`.
    Lease and retries hold where a subscription has none of its own.
    """
    try:
        from postbus.http.serve import serve as run  # noqa: PLC0415  an extra
    except ImportError as error:
        raise InvalidRequest(f"serving needs more packages: pip install 'postbus[server]' ({error})") from None
    log_to_stderr()
    bus = EventBus(url)
    policy = RetryPolicy(max_retries=max_retries, base_delay=retry_delay, max_delay=retry_delay, multiplier=1)
    try:
        run(
            bus,
            host,
            port,
            require_token=require_token,
            policy=policy,
            lease=lease,
            drain=drain,
            ready=lambda where: say(f"serving {bus.store.url} at {where} ({where}/dashboard, {where}/docs)"),
            mask=mask_payloads,
            **({} if lake is None else _of_lake(lake)),
        )
    finally:
        bus.shutdown()


def _of_lake(lake: str) -> dict[str, Any]:
    """Return what tells the dashboard of a lake."""
    try:
        from postbus.dashboard import Coverage  # noqa: PLC0415  an extra
        from postbus.spark.manifest import Manifest  # noqa: PLC0415  an extra
    except ImportError as error:
        raise InvalidRequest(f"a lake needs more packages: pip install 'postbus[spark]' ({error})") from None

    def coverage() -> list[Coverage]:
        told = [(stream, Manifest(lake, stream).entries()) for stream in Stream]
        return [
            Coverage(
                stream,
                each[0].after,
                each[-1].through,
                sum(part.rows for part in each),
                len(each),
                sum(part.bytes for part in each),
                max(part.written_at for part in each),
            )
            for stream, each in told
            if each
        ]

    return {"lake": coverage, "report": Path(lake) / "report.html"}
