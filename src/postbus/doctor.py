"""What is wrong with a bus, and the command that mends it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Final, Self

from postbus.config import Settings
from postbus.errors import NotFound
from postbus.model import Checkpoint, Event, HandlerRecord, Mode, State, Stats, Status, Subscription
from postbus.store import Log, Queue, log_of, shown
from postbus.store.contract import Finding
from postbus.telling import age, many
from postbus.upkeep import recover

__all__ = ["Patient", "again", "leased", "left_behind", "remains", "wrong"]

STILL: Final = timedelta(seconds=60)
"""How long a follower may stand still although there is something to read: a restart, a slow event, a retry."""
MOST_LEASES: Final = 1_000


def again(url: str | None) -> str:
    """Return what a command needs beside its name to find the same bus."""
    return f" --url '{shown(url)}'" if url else ""


def _naming(finding: Finding, again: str) -> Finding:
    """Have a command that the store itself gives as its remedy name the same bus."""
    command = (finding.remedy or "").rpartition(": ")[2]
    return replace(finding, remedy=f"{finding.remedy}{again}") if command.startswith("postbus ") else finding


def leased(store: Queue, name: str, most: int, within: timedelta | None = None) -> Iterator[Event]:
    """Go through what is leased in a queue, without the payloads: up to so many, and `within` a time for each page."""
    after = None
    while most > 0:
        page = store.list(
            subscription=name, status=Status.PROCESSING, type=None, tags=(), limit=most, offset=0, after=after,
            within=within,
        )  # fmt: skip
        yield from (replace(each, payload=None) for each in page)
        after, most = page.next, most - len(page)
        if after is None or not page.items:
            return


def wrong(check: str, message: str, remedy: str) -> Finding:
    """Return what is wrong."""
    return Finding(check, ok=False, message=message, remedy=remedy)


@dataclass(frozen=True)
class Patient:
    """A store to be looked at; `again` is what commands need to find it."""

    store: Queue
    again: str

    @classmethod
    def of(cls, store: Queue, url: str | None) -> Self:
        """Look at a store that was opened by a URL, or by the settings if that is None."""
        return cls(store, again(url))

    @property
    def _log(self) -> Log:
        return log_of(self.store, "inspecting the store")

    @cached_property
    def stats(self) -> Stats:
        """The bus in figures, counted once."""
        return self.store.stats()

    @cached_property
    def stands(self) -> dict[str, Checkpoint]:
        """How far those that read by position have come, by name."""
        return {each.subscription: each for each in self.stats.checkpoints}

    def mend(self) -> None:
        """Do what the upkeep of a running worker would do, and forget handlers whose process is gone."""
        policy, log = Settings.load().retry, log_of(self.store, "mending")
        recover(log, policy, "")
        log.expire(None, policy)
        for each in self._gone():
            self.store.forget_handlers(each.owner)

    def examined(self, *, deep: bool = False) -> Iterator[Finding]:
        """Find all there is to find; with `deep`, also what takes long in a large store."""
        yield from self._beside(self._log.inspect(deep=deep))

    def watched(self) -> Iterator[Finding]:
        """Find the same but for damage, for which the whole store is read: that is not to be done again and again."""
        yield from self._beside(self._log.condition())

    def _beside(self, told: Sequence[Finding]) -> Iterator[Finding]:
        yield from (_naming(each, self.again) for each in told)
        yield from self.findings()
        yield from self.lost_leases()

    def findings(self) -> Iterator[Finding]:
        """Find what needs somebody, as far as that is cheap enough to be looked at every second."""
        yield from self.unhandled()
        yield from self.lost_handlers()
        yield from self.followers()
        yield from self.paused()
        yield from self.dead()

    def unhandled(self) -> Iterator[Finding]:
        """Find pending events that no handler wants."""
        for subscription, kinds, count in _families(self.stats.unhandled):
            place = "" if subscription == "default" else f' in subscription "{subscription}"'
            option = "" if subscription == "default" else f', subscription="{subscription}"'
            how = f'add @bus.on("{kinds}"{option}) to a module, then: postbus worker MODULE:BUS'
            if subscription in self.stands:
                how = f"they were retried: start the program that reads it; who that is: postbus top --once{self.again}"
            yield wrong("handlers", f"{many(count, 'event')} nobody handles: {kinds}{place}", how)
        if not self.stats.unhandled:
            yield Finding("handlers", ok=True, message="every pending event has a handler")

    def lost_handlers(self) -> Iterator[Finding]:
        """Find handlers whose process is gone, and that no other process has."""
        gone = self._gone()
        alive = {_wants(each) for each in self.store.handlers() if each not in gone}
        missing = {_wants(each): each for each in gone if _wants(each) not in alive}
        how = f"start its worker again; if it is not wanted any more: postbus doctor --mend{self.again}"
        for each in missing.values():
            seen = age(self.store.now() - each.seen_at)
            yield wrong("workers", f"{each.name} ({each.pattern}) in {each.worker_id} is gone, seen {seen} ago", how)
        if not missing:
            yield Finding("workers", ok=True, message=f"{many(len(alive), 'handler')}, none lost")

    def _gone(self) -> tuple[HandlerRecord, ...]:
        gone = [each for each in self.store.handlers() if each.gone]
        return tuple(each for each in gone if each.subscription not in self.stands)  # those have a check of their own

    def lost_leases(self) -> Iterator[Finding]:
        """Find leases that ran out or whose process is dead, and that no worker has taken up."""
        dead = sum(map(self._log.is_dead, self.store.owners()))
        expired = sum(self._expired(each.name) for each in self.store.subscriptions())
        how = f"start a worker, which takes them up again, or: postbus doctor --mend{self.again}"
        if dead:
            yield wrong("leases", f"leases are still held by {many(dead, 'dead worker')}", how)
        if expired:
            yield wrong("leases", f"{many(expired, 'lease')} ran out and nobody took them up", how)
        if not dead and not expired:
            yield Finding("leases", ok=True, message="none has run out")

    def _expired(self, name: str) -> int:
        held = leased(self.store, name, MOST_LEASES)
        return sum(state.lease_expired for event in held for state in event.deliveries if state.subscription == name)

    def followers(self) -> Iterator[Finding]:
        """Find positions that mean nothing in this log, and followers that have stopped or stand still."""
        wrong = False
        for each in self.store.subscriptions():
            stand = self.stands.get(each.name)
            if stand is None:
                continue
            finding = self._misplaced(each, stand) or self._stopped(each, stand) or self._behind(each, stand)
            if finding is not None:
                wrong = wrong or not finding.ok
                yield finding
        if self.stands and not wrong:
            message = f"{many(len(self.stands), 'checkpoint')}, none lost, none left alone"
            yield Finding("followers", ok=True, message=message)

    def _misplaced(self, each: Subscription, stand: Checkpoint) -> Finding | None:
        span = self.store.span(stand.stream)
        where = f"{each.name} stands at {stand.position:,}"
        how = f"look at what it has done, then: postbus subscriptions rewind {each.name} --to ID{self.again}"
        if each.mode is Mode.SPARK:
            how = f"postbus subscriptions delete {each.name}{self.again}, and start its query anew"
        if stand.log_id != span.log_id:
            return wrong("followers", f"{where} of another log: the store was restored or replaced", how)
        if stand.position > span.head and not self._is_there(stand):
            return wrong("followers", f"{where}, beyond the last event at {span.head:,}: an old backup?", how)
        if stand.position < span.pruned:
            return wrong("followers", f"{where}, and everything up to {span.pruned:,} was pruned", how)
        return None

    def _is_there(self, stand: Checkpoint) -> bool:
        """Return whether a position beyond the head is one that an open transaction merely holds back."""
        try:
            self.store.get(stand.position, "default")
        except NotFound:
            return False
        return True

    def _stopped(self, each: Subscription, stand: Checkpoint) -> Finding | None:
        """Tell of a follower that has stopped for good."""
        if stand.stopped is None:
            return None
        again = "" if stand.reader is None else f"; {stand.reader} tries again"
        how = "put the cause right, and start the program again"
        if stand.stopped_before is not None:
            to = f"rewind {each.name} --to {stand.stopped_before}{self.again}"
            how += f"; or pass the event over: postbus subscriptions {to}"
            how += '; or follow with on_error="dead_letter", and look at: postbus dlq list'
        first, *_ = stand.stopped.splitlines()
        return wrong("followers", f"{each.name}: {first}{again}", how)

    def _behind(self, each: Subscription, stand: Checkpoint) -> Finding | None:
        """Tell of a follower that has something to do and may do it: wrong is only one that stands still for long."""
        if each.mode is not Mode.ORDERED or each.paused or stand.waiting is None:
            return None
        told = f"{each.name} is {many(stand.lag, 'position')} behind, for {age(stand.waiting)}"
        told += f", and {stand.reader or 'nobody'} reads it"
        still = min(stand.waiting, self.store.now() - stand.moved_at)
        if still <= STILL:
            return Finding("followers", ok=True, message=told)
        how = "look at its program's log: the handler hangs, or takes long, or one event is tried again and again; "
        how += f"which one: postbus tail --after {stand.position} --subscription {each.name}{self.again} | head -1"
        if stand.reader is None:
            delete = f"postbus subscriptions delete {each.name}{self.again}"
            how = f"start the program that follows it; if it is not wanted any more: {delete}"
        return wrong("followers", f"{told}; it has not moved for {age(still)}", how)

    def paused(self) -> Iterator[Finding]:
        """Find subscriptions that are paused while events wait."""
        waiting = {each.name: many(each.pending, "event") for each in self.stats.subscriptions if each.pending}
        waiting |= {each.subscription: many(each.lag, "position") for each in self.stands.values() if each.lag}
        for each in self.store.subscriptions():
            if each.paused and each.name in waiting:
                how = f"postbus subscriptions resume {each.name}{self.again}"
                yield wrong("paused", f"subscription {each.name} is paused, {waiting[each.name]} waiting", how)

    def dead(self) -> Iterator[Finding]:
        """Find dead letters, and what is parked behind them."""
        how = f"postbus dlq list{self.again}, then postbus dlq retry ID or dlq purge"
        found = {name: counts for name, counts in remains(self.stats).items() if any(counts)}
        for name, (dead, parked) in found.items():
            behind = f", {many(parked, 'event')} parked behind" if parked else ""
            yield wrong("dead letters", f"{dead:,} in subscription {name}{behind}", how)
        if not found:
            yield Finding("dead letters", ok=True, message="none")


def _wants(handler: HandlerRecord) -> tuple[str, str, tuple[str, ...]]:
    return handler.subscription, handler.pattern, handler.tags


def _families(unhandled: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """Yield (subscription, type, count), with several types of one family as `family.*`."""
    families: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for where, count in sorted(unhandled.items()):
        subscription, _, kind = where.partition("/")
        families[subscription, kind.partition(".")[0]][kind] = count
    for (subscription, family), kinds in families.items():
        yield subscription, f"{family}.*" if len(kinds) > 1 else next(iter(kinds)), sum(kinds.values())


def left_behind(standing: Sequence[tuple[int, str | None, State]]) -> Counter[State]:
    """Count what a subscription that reads by position has passed and not done, by state."""
    return Counter(state for *_, state in standing)


def remains(found: Stats) -> dict[str, tuple[int, int]]:
    """Return how many events are dead, and how many parked behind them, in every subscription."""
    names = [each.name for each in found.subscriptions] + [each.subscription for each in found.checkpoints]
    return {name: (found.dead.get(name, 0), found.parked.get(name, 0)) for name in names}
