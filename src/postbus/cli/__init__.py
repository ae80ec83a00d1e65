"""The command line: one file a command group, and the place where real clocks, chance and processes are made."""

__all__ = ["main"]


def main() -> None:
    """Run the `postbus` command; it exits with 0 ok, 1 failed, 2 usage, 3 findings."""
    from postbus.cli.app import app  # noqa: PLC0415  worker processes pass through this package and need none of it

    app()
