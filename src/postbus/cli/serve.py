"""`postbus serve`: the HTTP queue."""

from typing import Annotated, Final

import typer

from postbus.bus import EventBus
from postbus.cli.console import say
from postbus.cli.logs import log_to_stderr
from postbus.cli.options import Url, parse_seconds
from postbus.errors import InvalidRequest
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
    url: Url = None,
) -> None:
    """Serve the bus over HTTP until SIGTERM or Ctrl-C: any language publishes, works and follows.

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
            ready=lambda where: say(f"serving {bus.store.url} at {where} (docs: {where}/docs)"),
        )
    finally:
        bus.shutdown()
