"""The protocol explored: no interleaving breaks a promise, and each planted bug is found.

It runs nothing of the store's code and would not notice a mistake there: so these tests name no requirement.
"""

import re
from typing import Final

import pytest

from tests.model.kernel import Violation
from tests.model.scenarios import SCENARIOS

QUICK: Final = 20_000
"""States a scenario, where the run is to be short; `make prove` explores all of them."""
BOUNDED: Final = 3_000_000
"""States of the scenarios that cannot be explored to the end."""
UNBOUNDED: Final = frozenset({"everything"})
LOST: Final = r"event \d is in 0 places, and its last entry is None"
ENDED_AND_ALIVE: Final = r"event \d is in 1 places, and its last entry is CANCELLED"
NOT_FINISHED: Final = r"event \d is pruned, and not finished"
TWICE: Final = r"event \d is handed out 2 times, for 0 causes"
BUGS: Final = (
    ("position is a head", "follower over crashes", r"follower F passed \[\d\]"),
    ("a head remembered across a crash", "follower over crashes", r"follower F passed \[\d\]"),
    ("pins read before the sequence", "follower", r"follower F passed \[\d\]"),
    ("events read before the pins", "follower", r"follower F passed \[\d\]"),
    ("ids drawn before the pin", "follower", r"follower F passed \[\d\]"),
    ("ids drawn before the pin", "slow pins", LOST),
    ("an id of a savepoint used again", "follower", r"follower F passed \[\d\]"),
    ("gaps not kept", "late commits", LOST),
    ("gaps not kept", "subscribe", LOST),
    ("head after late", "late commits", LOST),
    ("head after late", "gaps spilled", LOST),
    ("head after late", "subscribe", LOST),
    ("closing although late ones were left", "late and unwanted", LOST),
    ("closing counted after patterns", "late and unwanted", LOST),
    ("patterns read with the lock", "patterns", LOST),
    (
        "skips read with the lock",
        "cancel above the cursor",
        r"event 2 has an entry after its end: CANCELLED, PICKED",
    ),
    ("only skips of what was read are deleted", "prune and specials", r"a skip of event 2 stays below the cursor"),
    ("overtaking ignores a skip", "specials cancelled", r"event 3 .*CANCELLED(, PICKED)?$"),
    ("overtaking leaves no skip", "specials", r"event 3 is in 2 places"),
    ("gaps without the cursor's lock", "gaps spilled", r"event \d has a row already"),
    ("a pass ignores erasures", "erase", r"event 2 is handed out, though it was erased"),
    ("cancel of a late one leaves it in missing", "cancel of late ones", ENDED_AND_ALIVE),
    ("kinds in no order", "kinds crosswise", r"deadlock of A, B"),
    ("only claims and settles write kinds", "kinds of expired ones", r"event \d is never finished: .*EXPIRED"),
    ("known kinds are not written", "kinds of expired ones", r"event \d is never finished"),
    ("tidy without the table's lock", "kinds of expired ones", r"event \d is never finished"),
    ("waiting for the cursor with row locks", "busy cursor", r"deadlock of A, X"),
    ("second try without a rollback", "rows that stay locked", r"deadlock of"),
    ("mixed group commit", "rewind", r"deadlock of"),
    ("handed out before the commit", "crashes", TWICE),
    ("heartbeat by owner", "lost answers and crashes", r"event \d is never finished: .*PICKED"),
    ("heartbeat waits", "groups", r"deadlock of .*H"),
    ("settle locks as it comes", "groups", r"deadlock of A, B"),
    ("settle locks as it comes", "a group of expired ones", r"deadlock of A, (B, )?W"),
    ("expiry looks before it locks", "heartbeats", r"block \d is taken apart, though its lease was extended"),
    ("settle in one statement", "late outcomes", r"lost to its worker, though nobody has claimed it again"),
    ("fence per mask", "reset and repeats", r"lost to its worker, though nobody has claimed it again"),
    ("epoch kept by Retry", "retry, then done", r"a stale epoch changes event 1"),
    ("any epoch ends a pending row", "late outcomes", r"a stale epoch changes event \d"),
    ("a repeated Retry is looked for as such", "retry told twice", r"lost to its worker, whose RETRIED was recorded"),
    ("last attempts share a block", "no retries", r"event \d dies beside others"),
    ("release forgets who runs alone", "who runs alone", r"is not run alone, though its last attempt ended by expiry"),
    ("reset counts the attempt", "reset of a last attempt", r"event 1 is tried more often than allowed"),
    (
        "cancel without the cursor's lock",
        "cancel above the cursor",
        r"event 2 has an entry after its end: DONE, CANCELLED",
    ),
    ("cancel does not look again", "busy cursor", r"event 1 has an entry after its end: .*CANCELLED"),
    ("the place found in two statements", "cancel with expiry", r"is told to have ended, and is pending or leased"),
    ("rewind without the exclusive lock", "rewind beside rows", r"event 1 is in 2 places"),
    ("rewind without the exclusive lock", "delete", r"is left behind by a subscription that was deleted"),
    ("rewind locks rows before blocks", "rewind beside retries", r"deadlock of"),
    ("rewind forward", "rewind forward", LOST),
    ("rewind reads pruned without a lock", "prune beside rewind", NOT_FINISHED),
    ("pruned committed last", "prune beside rewind", NOT_FINISHED),
    ("subscribe reads pruned without a lock", "subscribe beside prune", NOT_FINISHED),
    ("prune in two statements", "prune", NOT_FINISHED),
    ("prune blind to missing", "prune and late ones", NOT_FINISHED),
    ("prune blind to gaps", "gaps, cancelled and pruned", NOT_FINISHED),
)
"""A mistake in the protocol, the scenario that must show it, and what it breaks there."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_breaks_a_promise(name: str):
    """As far as a short run comes: each event is in one place, handed out once per cause, and finished."""
    found = SCENARIOS[name].explored(most=QUICK)
    assert found.ends
    assert found.complete or found.states == QUICK


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_all_interleavings_keep_all_promises(name: str):
    """To the end, and where that is out of reach, as far as the bound goes."""
    found = SCENARIOS[name].explored(most=BOUNDED if name in UNBOUNDED else None)
    assert found.ends
    assert found.complete or name in UNBOUNDED


@pytest.mark.parametrize(("bug", "name", "broken"), BUGS)
def test_each_planted_bug_is_found(bug: str, name: str, broken: str):
    """A rule of the protocol left out breaks a promise in some interleaving, and it is that promise."""
    with pytest.raises(Violation) as found:
        SCENARIOS[name].explored(bug)
    assert re.search(broken, str(found.value).partition("\n")[0])
