"""`postbus doctor`: what is wrong, and the command that mends it."""

from collections.abc import Iterator
from typing import Annotated, Final

import typer
from rich.text import Text

from postbus.cli.console import Output, emit, line, stderr
from postbus.cli.options import Format, Url, existing_store
from postbus.doctor import Patient, again, wrong
from postbus.errors import SchemaMismatch, UnsafeStore
from postbus.store.contract import Finding

__all__ = ["EXAMPLES", "doctor"]

EXAMPLES: Final = "Example: postbus doctor\n\nExample: postbus doctor --deep -o json\n\nExit code 3: findings."
FINDINGS: Final = 3


def doctor(
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Check every index against its table: slow if large.")] = False,
    mend: Annotated[bool, typer.Option("--mend", help="First end lost leases and forget lost handlers.")] = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Look for what is wrong: damage, unsafe settings, events nobody handles or reads, lost workers, dead letters."""
    findings = list(_examine(url, deep=deep, mend=mend))
    emit(output, findings, lambda: map(_view, findings))
    if not all(each.ok for each in findings):
        raise typer.Exit(FINDINGS)


def _examine(url: str | None, *, deep: bool, mend: bool) -> Iterator[Finding]:
    """Open the store and look; what makes it unusable is a finding too."""
    here = again(url)
    try:
        with existing_store(url) as store, stderr().status("looking …"):
            if mend:
                Patient.of(store, url).mend()
            yield from Patient.of(store, url).examined(deep=deep)  # anew: a patient counts its figures only once
    except SchemaMismatch as error:
        remedy = f"postbus migrate{here}"
        if "upgrade postbus" in str(error):
            remedy = "pip install --upgrade postbus"
        elif "postbus import" in str(error):
            remedy = "name a new file, and run the command above"
        yield wrong("schema", str(error), remedy)
    except UnsafeStore as error:
        how = "mend what it says; if it is damage, stop the workers, restore a backup, then: postbus restore-mark"
        yield wrong("store", str(error), how + here)


def _view(finding: Finding) -> Text:
    mark = Text("ok    ", style="green") if finding.ok else Text("WRONG ", style="bold red")
    told = mark + Text(f"{finding.check:<12} ", style="bold") + line(finding.message)
    return told if finding.remedy is None else told + line(f"\n{'':19}mend it: {finding.remedy}")
