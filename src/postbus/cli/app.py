"""All commands under one roof, with one way to end: what went wrong, in a sentence, and its exit code."""

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from postbus.cli import demo, dlq, doctor, events, migrate, publish, stats, subscriptions, worker
from postbus.cli.console import say
from postbus.errors import PostbusError, exit_code

__all__ = ["app"]


class Commands(TyperGroup):
    """Turns postbus's own errors into a line on stderr and an exit code; any other error is a bug and shows itself."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except PostbusError as error:
            say(f"error: {error}", style="red")
            raise typer.Exit(exit_code(error)) from None


app = typer.Typer(
    name="postbus",
    cls=Commands,
    help="A durable event bus and work queue in the database you already have.",
    epilog="Example: postbus demo\n\nSettings: flags, else POSTBUS_* variables, else postbus.toml or pyproject.toml."
    "\n\nExit codes: 0 ok, 1 failed, 2 wrong usage, 3 findings.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:  # noqa: FBT001  typer hands it over so
    if wanted:
        typer.echo(f"postbus {version('postbus')}")
        raise typer.Exit


@app.callback()
def root(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A durable event bus and work queue in the database you already have."""
    del show_version


for each in (demo, publish, worker, stats, doctor, migrate):
    each.register(app)
for group in (events, dlq, subscriptions):
    app.add_typer(group.group)
