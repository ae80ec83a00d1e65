"""All commands under one roof, with one way to end: what went wrong, in a sentence, and its exit code."""

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from postbus.cli import (
    bench,
    check,
    demo,
    dlq,
    doctor,
    erase,
    events,
    grafana,
    import_table,
    migrate,
    pipeline,
    publish,
    restore_mark,
    serve,
    stats,
    subscriptions,
    tail,
    token,
    top,
    torture,
    worker,
)
from postbus.cli.console import flow, say
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
    cls=Commands,
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


@app.callback(help="A durable event bus and work queue in the database you already have.")
def root(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before any command."""
    del show_version


for name, module, command in (
    ("demo", demo, demo.demo),
    ("publish", publish, publish.publish),
    ("worker", worker, worker.worker),
    ("serve", serve, serve.serve),
    ("tail", tail, tail.tail),
    ("stats", stats, stats.stats),
    ("top", top, top.top),
    ("doctor", doctor, doctor.doctor),
    ("check", check, check.check),
    ("bench", bench, bench.bench),
    ("torture", torture, torture.torture),
    ("grafana", grafana, grafana.grafana),
    ("migrate", migrate, migrate.migrate),
    ("import", import_table, import_table.import_table),
    ("erase", erase, erase.erase),
    ("restore-mark", restore_mark, restore_mark.restore_mark),
):
    app.command(name, epilog=module.EXAMPLES)(command)
for group in (events.group, dlq.group, subscriptions.group, token.group, pipeline.group):
    flow(group)
    app.add_typer(group)
flow(app)
