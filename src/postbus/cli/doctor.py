"""`postbus doctor`: what is wrong, and the command that mends it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Annotated, Final

import typer
from rich.console import RenderableType
from rich.text import Text

from postbus.cli.console import Output, age, emit, printable, stderr
from postbus.cli.options import Format, Url, existing_store
from postbus.config import Settings
from postbus.errors import SchemaMismatch, UnsafeStore
from postbus.model import HandlerRecord, Stats, Status
from postbus.store import Store
from postbus.store.contract import Finding
from postbus.upkeep import recover

__all__ = ["register"]

FINDINGS: Final = 3
SILENT: Final = timedelta(minutes=3)
"""Workers report their handlers every minute; one not heard of for this long is gone, or never ran."""
MOST_LEASES: Final = 1_000


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: postbus doctor\n\nExample: postbus doctor --deep -o json\n\nExit code 3: findings.")(
        doctor
    )


def doctor(
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Check every index against its table: slow on a big file.")] = (
        False
    ),
    mend: Annotated[
        bool, typer.Option("--mend", help="First end expired leases and forget the handlers of dead processes.")
    ] = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Look for what is wrong: damage, unsafe settings, events nobody handles, lost workers, dead letters."""
    findings = list(_examine(url, deep=deep, mend=mend))
    emit(output, findings, lambda: map(_line, findings))
    if not all(each.ok for each in findings):
        raise typer.Exit(FINDINGS)


def _examine(url: str | None, *, deep: bool, mend: bool) -> Iterator[Finding]:
    """Open the store and look; what makes it unusable is a finding too."""
    again = f" --url {url}" if url else ""
    try:
        with existing_store(url) as store, stderr().status("looking …"):
            patient = _Patient(store, again)
            if mend:
                patient.mend()
            for check in (lambda: store.inspect(deep=deep), *patient.checks):
                yield from check()
    except SchemaMismatch as error:
        yield Finding("schema", ok=False, message=str(error), remedy=f"postbus migrate{again}")
    except UnsafeStore as error:
        yield Finding("store", ok=False, message=str(error), remedy="stop the workers, restore the file from a backup")


def _line(finding: Finding) -> RenderableType:
    mark = Text("ok    ", style="green") if finding.ok else Text("WRONG ", style="bold red")
    line = mark + Text(f"{finding.check:<12} ", style="bold") + Text(printable(finding.message))
    return line if finding.remedy is None else line + Text(printable(f"\n{'':19}mend it: {finding.remedy}"))


@dataclass(frozen=True)
class _Patient:
    """A store to be looked at; `again` is what commands need to find it."""

    store: Store
    again: str

    @cached_property
    def stats(self) -> Stats:
        """The bus in figures, counted once."""
        return self.store.stats()

    @property
    def checks(self) -> tuple[Callable[[], Iterable[Finding]], ...]:
        """What to look at beyond the store itself."""
        return self.handled, self.handlers, self.leases, self.paused, self.dead

    def mend(self) -> None:
        """Do what the upkeep of a running worker would do."""
        policy = Settings.load().retry
        recover(self.store, policy, "")
        self.store.expire(None, policy)
        for each in self._gone():
            self.store.forget_handlers(each.owner)

    def handled(self) -> Iterator[Finding]:
        """Find pending events that no handler wants."""
        unhandled = self.stats.unhandled
        for subscription, kinds, count in _grouped(unhandled):
            where = "" if subscription == "default" else f", subscription={subscription!r}"
            yield Finding(
                "handlers",
                ok=False,
                message=f"{count:,} events nobody handles: {kinds} (subscription {subscription})",
                remedy=f'add @bus.on("{kinds}"{where}) to a module and run: postbus worker MODULE:BUS',
            )
        if not unhandled:
            yield Finding("handlers", ok=True, message="every pending event has a handler")

    def handlers(self) -> Iterator[Finding]:
        """Find handlers whose process is gone, and which no other process has."""
        gone = self._gone()
        alive = {_wants(each) for each in self.store.handlers() if each not in gone}
        missing = {_wants(each): each for each in gone if _wants(each) not in alive}
        for each in missing.values():
            silence = age(self.store.now() - each.seen_at)
            yield Finding(
                "workers",
                ok=False,
                message=f"{each.name} for {each.pattern} ran in {each.worker_id}, gone or silent for {silence}",
                remedy=f"start its worker again, or, if it is not wanted any more: postbus doctor --mend{self.again}",
            )
        if not missing:
            yield Finding("workers", ok=True, message=f"{len(alive)} handlers, none of them lost")

    def _gone(self) -> tuple[HandlerRecord, ...]:
        long_ago = self.store.now() - SILENT
        found = self.store.handlers()
        return tuple(each for each in found if each.seen_at < long_ago or self.store.is_dead(each.owner))

    def leases(self) -> Iterator[Finding]:
        """Find leases that ran out or whose process is dead, and that no worker has taken up."""
        dead = sum(map(self.store.is_dead, self.store.owners()))
        expired = sum(self._expired(each.name) for each in self.store.subscriptions())
        remedy = f"start a worker, which takes them up again, or: postbus doctor --mend{self.again}"
        if dead:
            yield Finding("leases", ok=False, message=f"{dead} dead processes still hold leases", remedy=remedy)
        if expired:
            yield Finding("leases", ok=False, message=f"{expired:,} leases have run out", remedy=remedy)
        if not dead and not expired:
            yield Finding("leases", ok=True, message="none has run out")

    def _expired(self, subscription: str) -> int:
        page = self.store.list(
            subscription=subscription,
            status=Status.PROCESSING,
            type=None,
            tags=(),
            limit=MOST_LEASES,
            offset=0,
            after=None,
        )
        states = (state for event in page for state in event.deliveries if state.subscription == subscription)
        return sum(state.lease_expired for state in states)

    def paused(self) -> Iterator[Finding]:
        """Find subscriptions that are paused while events wait."""
        waiting = {each.name: each.pending for each in self.stats.subscriptions}
        for each in self.store.subscriptions():
            if each.paused and waiting.get(each.name):
                yield Finding(
                    "paused",
                    ok=False,
                    message=f"subscription {each.name} is paused, {waiting[each.name]:,} events wait",
                    remedy=f'in Python: bus.subscriptions.resume("{each.name}")',
                )

    def dead(self) -> Iterator[Finding]:
        """Find dead letters."""
        for each in self.stats.subscriptions:
            if each.dead:
                yield Finding(
                    "dead letters",
                    ok=False,
                    message=f"{each.dead:,} in subscription {each.name}",
                    remedy=f"postbus dlq list{self.again}, then postbus dlq retry ID or dlq purge",
                )
        if not any(each.dead for each in self.stats.subscriptions):
            yield Finding("dead letters", ok=True, message="none")


def _wants(handler: HandlerRecord) -> tuple[str, str, tuple[str, ...]]:
    return handler.subscription, handler.pattern, handler.tags


def _grouped(unhandled: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """Yield (subscription, type, count), with several types of one family as `family.*`."""
    families: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for where, count in sorted(unhandled.items()):
        subscription, _, kind = where.partition("/")
        families[subscription, kind.partition(".")[0]][kind] = count
    for (subscription, family), kinds in families.items():
        yield subscription, f"{family}.*" if len(kinds) > 1 else next(iter(kinds)), sum(kinds.values())
