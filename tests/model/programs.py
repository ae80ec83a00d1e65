"""Programs that use the verbs: workers and maintenance."""

from dataclasses import dataclass
from typing import Final

from tests.model.kernel import Choice, Then
from tests.model.leases import claim, expire, heartbeat, release_token, settle
from tests.model.logs import tend_gaps
from tests.model.tables import Epochs, Rules, Steps

GIVEN_UP: Final = 1
"""The token of a claim whose client is gone."""


@dataclass(frozen=True)
class Worker:
    """What a worker does: of which kinds it claims, and how its claims and handlers may end."""

    name: str
    handles: str = "ab"
    limit: int = 2
    outcomes: tuple[str, ...] = ("DONE",)
    """Each block ends by one of these.

    'dies' is a SIGKILL in the handler, 'hangs' a lease that runs out before it is done, 'beats' one that runs out and
    is extended, 'changes its mind' a retry and then done, 'tells twice' an outcome whose answer was lost.
    """
    lost: bool = False
    """A claim's answer may be lost."""
    in_parts: bool = False
    """The first event of a block is settled alone, its answer is lost, and it is told again with the others."""


def worker(rules: Rules, who: Worker, claims: int) -> Steps:
    """Claim, handle, settle, some times."""
    if not claims:
        return None
    token = claims * 100 + ord(who.name[0])
    leases = yield from claim(rules, who.handles, who.limit, token)
    again = Then(worker, (rules, who, claims - 1))
    if not leases:
        return again
    ways = [Then(settling, (rules, who, claims, leases, outcome)) for outcome in who.outcomes]
    if who.lost:
        ways.append(Then(losing, (rules, who, claims, leases[0][0] >> 10)))
    return Choice(ways)


def losing(rules: Rules, who: Worker, claims: int, number: int) -> Steps:
    """Go on after a claim whose answer was lost: nobody extends its block, and it is released by the claim's token."""
    if rules.bug != "heartbeat by owner":
        yield lambda view: view.note(("overdue", number), 1)
        yield from release_token(rules, claims * 100 + ord(who.name[0]))
    return Then(worker, (rules, who, claims - 1))


def given_up(rules: Rules, who: Worker) -> Steps:
    """Claim in a session of the server whose client is gone: nobody gets the answer, and nobody extends the block."""
    leases = yield from claim(rules, who.handles, who.limit, GIVEN_UP)
    if leases:
        yield lambda view: view.note(("overdue", leases[0][0] >> 10), 1)


def settling(rules: Rules, who: Worker, claims: int, leases: Epochs, outcome: str) -> Steps:
    """Settle what was claimed, and handled by now."""
    number = leases[0][0] >> 10
    again = Then(worker, (rules, who, claims - 1))
    if outcome in ("dies", "hangs", "beats", "hangs and retries"):
        yield lambda view: view.note(("overdue", number), 1)
        if outcome == "dies":
            return None
        if outcome == "beats":
            yield from heartbeat(rules, (number,))
        outcome = "RETRIED" if outcome == "hangs and retries" else "DONE"
    if outcome == "changes its mind":
        yield from settle(rules, leases, "RETRIED")
        outcome = "DONE"
    if outcome == "tells twice":
        yield from settle(rules, leases, "RETRIED")
        outcome = "RETRIED"
    if who.in_parts and len(leases) > 1:
        yield from settle(rules, leases[:1], outcome)
    if rules.bug == "mixed group commit" and claims > 1:
        yield from settle(rules, leases, outcome, commit=False)
        leases = yield from claim(rules, who.handles, who.limit, claims)
        return Then(settling, (rules, who, claims - 1, leases, outcome)) if leases else None
    yield from settle(rules, leases, outcome)
    return again


def expirer(rules: Rules, turns: int) -> Steps:
    """Maintenance of leases, some times."""
    yield from expire(rules)
    return Then(expirer, (rules, turns - 1)) if turns > 1 else None


def gap_keeper(rules: Rules, turns: int) -> Steps:
    """Maintenance of `gaps`, some times."""
    yield from tend_gaps(rules)
    return Then(gap_keeper, (rules, turns - 1)) if turns > 1 else None
