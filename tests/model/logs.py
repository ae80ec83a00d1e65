"""The log: publishing, the safe head, the pass, gaps, subscribing, following, rewind and prune.

A function that yields is a verb; each `yield` is one step of it. `Rules.bug` plants a mistake, and the explorer must
find each.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tests.model.kernel import EXCLUSIVE, SEQUENCE, SHARED, Choice, Step, Then, View, Violation
from tests.model.tables import (
    CURSOR,
    NONE,
    PATTERNS,
    PRUNED,
    SUBSCRIPTION,
    Block,
    Cursor,
    Event,
    Row,
    Rules,
    Steps,
    add_row,
    committed,
    parts,
    set_bits,
)

# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def publisher(rules: Rules, events: tuple[str, ...], ending: tuple[Step, ...] = (View.commit, View.rollback)) -> Steps:
    """Publish events in one transaction; '(' and ')' enclose a savepoint that is rolled back, '*' marks a special."""
    mine: list[int] = []
    pinned = False
    within = 0, False
    used_again: list[int] = []
    for event in events:
        if event == "(":
            within = len(mine), pinned
        elif event == ")":
            undone, mine = tuple(mine[within[0] :]), mine[: within[0]]
            unpin, pinned = pinned and not within[1], within[1]
            yield lambda view, undone=undone, unpin=unpin: _undo(view, undone, unpin=unpin)
            used_again = list(undone) if rules.bug == "an id of a savepoint used again" else []
        else:
            drawn = used_again.pop() if used_again else None
            if not pinned and rules.bug == "ids drawn before the pin":
                drawn = yield lambda view: view.draw(SEQUENCE)
            if not pinned and rules.slow_pins:
                floor = yield _sequence
                yield lambda view, floor=floor: view.lock(("pin", floor), SHARED)
                pinned = True
            pin, pinned = not pinned, True
            mine.append((yield lambda view, event=event, pin=pin, drawn=drawn: _insert(view, event, drawn, pin=pin)))
    yield Choice(ending)


def _insert(view: View, event: str, drawn: int | None, *, pin: bool) -> int:
    if pin:
        view.lock(("pin", _sequence(view)), SHARED)
    event_id = drawn or view.draw(SEQUENCE)
    row = Event(event[0], event.endswith("*"))
    view.put(("event", event_id), row)
    view.put(("published", event_id), row)
    return event_id


def _undo(view: View, ids: Iterable[int], *, unpin: bool) -> None:
    for event_id in ids:
        del view.own["event", event_id], view.own["published", event_id]
    if unpin:
        view.locks = {lock for lock in view.locks if lock[0][0] != "pin"}


def _sequence(view: View) -> int:
    return view.rows.get(SEQUENCE, 0)


def head(view: View, upper: int) -> int:
    """Return the safe head, from the sequence's value as an earlier statement has read it."""
    return min((upper, *(key[1] for key in view.shared_locks("pin"))))


# ── the pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Read(NamedTuple):
    """An event as a statement of a pass has read it, with what the patterns of that statement say."""

    id: int
    special: bool
    wanted: bool


class Passed(NamedTuple):
    """What a pass has read under the cursor's lock."""

    cursor: Cursor
    late: tuple[Read, ...]
    coming: tuple[Read, ...]
    skipped: frozenset[int]
    safe: int | None
    full: bool
    """As many events as were asked for: the log may go on."""


def log_pass(rules: Rules, *, wait: bool) -> Steps:
    """Take the cursor and read what comes next; None where the cursor is busy, False where there is none."""
    stale = None
    if rules.bug == "skips read with the lock":
        stale = yield _skips
    taken = yield lambda view: (take_cursor(view, wait=wait), _patterns(view, rules))
    (cursor, upper), memory = taken
    if cursor is None:
        return None if upper is None else False
    patterns = memory if rules.bug == "patterns read with the lock" else None
    safe, late = None, ()
    closes = bool(cursor.missing)
    if cursor.missing and rules.seldom:
        closes = not (yield Choice((_nothing, _nothing)))
    if closes and rules.bug == "head after late":
        late = yield lambda view: _late(view, rules, cursor, patterns)
        upper = yield _sequence
        safe = yield lambda view: head(view, upper)
    else:
        if closes:
            safe = yield lambda view: head(view, upper)
        if cursor.missing:
            late = yield lambda view: _late(view, rules, cursor, patterns)
    asked = rules.passed - len(late)
    coming, skipped = yield lambda view: (_beyond(view, rules, cursor.position, asked, patterns), _skips(view))
    skipped = skipped if stale is None else stale
    return Passed(cursor, late, coming, skipped, safe, len(coming) == asked)


def _nothing(_: View) -> None:
    """Take one of two ways."""


def take_cursor(view: View, *, wait: bool) -> tuple[Cursor | None, int | None]:
    """Lock the cursor and read it, and the sequence: (None, None) where it is busy, (None, 0) where there is none."""
    if not view.lock(CURSOR, skip=not wait):
        return None, None
    cursor: Cursor | None = view.get(CURSOR)
    return cursor, _sequence(view) if cursor else 0


def _skips(view: View) -> frozenset[int]:
    return frozenset(each for each, _ in view.all("skip"))


def _patterns(view: View, rules: Rules) -> str:
    return view.get(PATTERNS, rules.wanted)


def _reads(view: View, rules: Rules, ids: Iterable[int], patterns: str | None) -> tuple[Read, ...]:
    patterns = patterns or _patterns(view, rules)
    events: list[tuple[int, Event]] = [(each, view.get(("event", each))) for each in ids]
    return tuple(Read(each, event.special, _is_wanted(event, patterns, rules)) for each, event in events)


def _is_wanted(event: Event, patterns: str, rules: Rules) -> bool:
    return event.kind in patterns and (not event.erased or rules.bug == "a pass ignores erasures")


def _visible(view: View, ids: Iterable[int]) -> list[int]:
    return [each for each in sorted(ids) if view.get(("event", each))]


def _late(view: View, rules: Rules, cursor: Cursor, patterns: str | None) -> tuple[Read, ...]:
    return _reads(view, rules, _visible(view, cursor.missing)[: rules.passed], patterns)


def _beyond(view: View, rules: Rules, position: int, limit: int, patterns: str | None) -> tuple[Read, ...]:
    ids = [event_id for event_id, _ in view.all("event") if event_id > position][:limit]
    return _reads(view, rules, ids, patterns)


def move(view: View, rules: Rules, read: Passed) -> tuple[int, ...]:
    """Move the cursor over what was read; return the events that the subscription wants, but for specials."""
    cursor = read.cursor
    late, coming = frozenset(each.id for each in read.late), frozenset(each.id for each in read.coming)
    position = max(coming, default=cursor.position)
    missing = _missing(rules, read, position, late, coming)
    if len([each for each in missing if each - 1 not in missing]) > rules.ranges:
        view.put(("gaps", min(missing)), missing)
        missing = NONE
    narrow = rules.bug == "only skips of what was read are deleted"
    for each in read.skipped & coming if narrow else read.skipped:
        if each <= position:
            view.put(("skip", each), None)
    looked = _overtake(view, rules, position, cursor.looked) if read.full else cursor.looked
    view.put(CURSOR, Cursor(position, missing, looked))
    taken = [each for each in (*read.late, *read.coming) if each.wanted and each.id not in read.skipped]
    for each in taken:
        if each.special:
            add_row(view, each.id, Row())
    return tuple(each.id for each in taken if not each.special)


def _missing(rules: Rules, read: Passed, position: int, late: frozenset[int], coming: frozenset[int]) -> frozenset[int]:
    """Return what was not seen yet, without what can never appear."""
    gaps = frozenset(range(read.cursor.position + 1, position)) - coming
    missing = (read.cursor.missing - late) | (NONE if rules.bug == "gaps not kept" else gaps)
    counted = len(late)
    if rules.bug == "closing counted after patterns":
        counted = sum(each.wanted for each in read.late)
    if rules.bug == "closing although late ones were left":
        counted = 0
    if read.safe is not None and counted < rules.passed:
        missing = frozenset(each for each in missing if each > read.safe)
    return missing


def _overtake(view: View, rules: Rules, position: int, looked: int) -> int:
    """Make rows and skips of special events beyond a backlog; return how far was looked."""
    skips = NONE if rules.bug == "overtaking ignores a skip" else _skips(view)
    specials = [each for each, event in view.all("event") if each > max(position, looked) and event.special]
    for each in _reads(view, rules, [each for each in specials if each not in skips], None):
        if rules.bug != "overtaking leaves no skip":
            view.put(("skip", each.id), 1)
        if each.wanted:
            add_row(view, each.id, Row())
    return max((looked, *specials))


LateInGaps = tuple[tuple[int, frozenset[int], tuple[Read, ...]], ...]


def tend_gaps(rules: Rules) -> Steps:
    """Maintenance: look for late events in `gaps`, and close what can never appear."""
    yield lambda view: view.lock(SUBSCRIPTION, SHARED)
    blind = rules.bug == "gaps without the cursor's lock"
    cursor, upper = yield lambda view: (view.get(CURSOR), _sequence(view)) if blind else take_cursor(view, wait=True)
    if cursor is None:
        yield View.rollback
        return
    safe = yield lambda view: head(view, upper)
    found = yield lambda view: _late_in_gaps(view, rules)
    if rules.bug == "head after late":
        upper = yield _sequence
        safe = yield lambda view: head(view, upper)
    yield from committed(rules, lambda view: _take_late(view, safe, found))


def _late_in_gaps(view: View, rules: Rules) -> LateInGaps:
    return tuple((first, ids, _reads(view, rules, _visible(view, ids), None)) for first, ids in view.all("gaps"))


def _take_late(view: View, safe: int, found: LateInGaps) -> None:
    for first, ids, late in found:
        for each in late:
            if each.wanted:
                add_row(view, each.id, Row())
        left = frozenset(each for each in ids if each > safe) - {each.id for each in late}
        if left != ids:
            view.put(("gaps", first), left or None)


# ── rewind, delete and prune ─────────────────────────────────────────────────────────────────────────────────────────


def rewind(rules: Rules, target: int) -> Steps:
    """Set a subscription back; locks from the largest to the smallest, each before what it guards is read."""
    blocks = yield from _take_everything(rules, target)
    if rules.bug == "rewind reads pruned without a lock":
        pruned = yield lambda view: view.get(PRUNED, 0)
    else:
        pruned = yield lambda view: parts(view.get(PRUNED, 0), view.lock(PRUNED, SHARED))
    refused = (
        yield lambda view: target < pruned or (target > view.get(CURSOR).position and rules.bug != "rewind forward")
    )
    if refused:
        yield View.rollback
        return
    yield lambda view: parts(_set_back(view, target, blocks), view.put(CURSOR, _cut(view, target)), view.commit())


def _cut(view: View, target: int) -> Cursor:
    cursor: Cursor = view.get(CURSOR)
    return Cursor(target, frozenset(each for each in cursor.missing if each <= target), target)


def delete(rules: Rules) -> Steps:
    """Delete a subscription and all that it has."""
    blocks = yield from _take_everything(rules, 0)
    yield lambda view: parts(_set_back(view, 0, blocks), view.put(CURSOR, None), view.commit())


def _take_everything(rules: Rules, target: int) -> Steps:
    """Lock the subscription, its cursor, all blocks, and the rows above a position; return the blocks."""
    mode = SHARED if rules.bug == "rewind without the exclusive lock" else EXCLUSIVE
    yield lambda view: view.lock(SUBSCRIPTION, mode)
    yield lambda view: view.lock(CURSOR)
    if rules.bug == "rewind locks rows before blocks":
        yield from _lock_all("row", target)
        blocks = yield from _lock_all("block", 0)
    else:
        blocks = yield from _lock_all("block", 0)
        yield from _lock_all("row", target)
    return blocks


def _lock_all(table: str, above: int) -> Steps:
    """Lock what one statement has found, ascending; return it."""
    found = yield lambda view: tuple(each for each, _ in view.all(table) if each > above)
    for each in found:
        yield lambda view, each=each: view.lock((table, each))
    return found


def _set_back(view: View, target: int, numbers: Iterable[int]) -> None:
    for number in numbers:
        block: Block | None = view.get(("block", number))
        if block and (undone := [each for each in block.left if each > target]):
            set_bits(view, number, undone)
    for table in ("row", "skip"):
        for each, _ in view.all(table):
            if each > target:
                view.put((table, each), None)
    for first, ids in view.all("gaps"):
        view.put(("gaps", first), frozenset(each for each in ids if each <= target) or None)
    for each, event in view.all("event"):
        if each > target and not event.erased and view.log(("audit", each)):
            view.append(("audit", each), ("REPLAYED", 0))


def prune(rules: Rules, bound: int) -> Steps:
    """Remove events that no place still has: `pruned` is committed first, then one snapshot looks at all places."""
    if rules.bug != "pruned committed last":
        yield lambda view: parts(view.lock(PRUNED), _put_pruned(view, bound), view.commit())
    kept = None
    if rules.bug == "prune in two statements":
        kept = yield _in_rows
    doomed = yield lambda view: _doomed(view, rules, bound, _in_rows(view) if kept is None else kept)
    if rules.bug == "pruned committed last":
        yield lambda view: parts(view.lock(PRUNED), _put_pruned(view, bound))
    yield lambda view: parts(_remove(view, doomed), view.commit())


def _put_pruned(view: View, bound: int) -> None:
    view.put(PRUNED, max(bound, view.get(PRUNED, 0)))


def _in_rows(view: View) -> frozenset[int]:
    leased = {each for _, block in view.all("block") for each in block.left}
    return frozenset(leased | {each for each, _ in view.all("row")})


def _doomed(view: View, rules: Rules, bound: int, kept: frozenset[int]) -> tuple[int, ...]:
    cursor: Cursor | None = view.get(CURSOR)
    if cursor is not None:
        if rules.bug != "prune blind to missing":
            kept |= cursor.missing
        if rules.bug != "prune blind to gaps":
            kept |= {each for _, ids in view.all("gaps") for each in ids}
        above = [each for each, _ in view.all("event") if each > cursor.position and not view.get(("skip", each))]
        kept |= {each.id for each in _reads(view, rules, above, None) if each.wanted}
    return tuple(each for each, _ in view.all("event") if each <= bound and each not in kept)


def _remove(view: View, ids: Iterable[int]) -> None:
    for each in ids:
        view.put(("event", each), None)


# ── subscribing and following ────────────────────────────────────────────────────────────────────────────────────────


def subscribe_now(rules: Rules) -> Steps:
    """Make a subscription that starts now, beside publishers: the last id seen, and what may still appear below it."""
    upper = yield _sequence
    safe = yield lambda view: head(view, upper)
    if rules.bug == "head after late":
        seen = yield lambda view: tuple(each for each, _ in view.all("event"))
        upper = yield _sequence
        safe = yield lambda view: head(view, upper)
        yield lambda view: _begin_now(view, rules, safe, seen)
    else:
        yield lambda view: _begin_now(view, rules, safe, tuple(each for each, _ in view.all("event")))


def _begin_now(view: View, rules: Rules, safe: int, seen: tuple[int, ...]) -> None:
    last = max(seen, default=0)
    missing = frozenset(range(safe + 1, last)) - set(seen)
    view.put(CURSOR, Cursor(last, NONE if rules.bug == "gaps not kept" else missing, last))
    for each in seen:
        view.put(("published", each), None)  # it came before: the checks want nothing of it
    view.commit()


def subscribe_from_beginning(rules: Rules) -> Steps:
    """Make a subscription that starts with what was not pruned."""
    locked = rules.bug != "subscribe reads pruned without a lock"
    pruned = yield lambda view: parts(view.get(PRUNED, 0), locked and view.lock(PRUNED, SHARED))
    yield lambda view: _begin_at(view, pruned)


def _begin_at(view: View, position: int) -> None:
    view.put(CURSOR, Cursor(position, NONE, position))
    for each, _ in view.all("published"):
        if each <= position:
            view.put(("published", each), None)
    view.commit()


def widen(rules: Rules, patterns: str, events: tuple[str, ...]) -> Steps:
    """Add a pattern to the subscription, then publish what it now wants."""
    yield lambda view: parts(view.put(PATTERNS, patterns), view.commit())
    return Then(publisher, (rules, events, (View.commit,)))


class Seen(NamedTuple):
    """A follower's checkpoint, and what it saw on the way."""

    position: int = 0
    ids: tuple[int, ...] = ()


class Head(NamedTuple):
    """A safe head that a session remembers, with the sequence's value at that time."""

    safe: int = 0
    upper: int = 0


def follower(rules: Rules, name: str, turns: int, known: Head = Head()) -> Steps:  # noqa: B008  it is frozen
    """Read the log in order up to the safe head, some times; the head goes on from what this session knows of it."""
    if rules.bug == "pins read before the sequence":
        safe = yield lambda view: min((99, *(key[1] for key in view.shared_locks("pin"))))
        upper = yield _sequence
        safe = min(safe, upper)
    elif rules.bug == "events read before the pins":
        early = yield lambda view: _next_ids(view, name)
        upper = yield _sequence
        safe = yield lambda view: head(view, upper)
        yield lambda view: _follow(view, rules, name, [each for each in early if each <= safe])
        return Then(follower, (rules, name, turns - 1, known)) if turns > 1 else None
    else:
        upper = yield _sequence
        safe = yield lambda view: _head_from(view, known, upper)
    yield lambda view: _follow(
        view,
        rules,
        name,
        [each for each in _next_ids(view, name) if each <= safe],
        safe if rules.bug == "position is a head" else 0,
    )
    return Then(follower, (rules, name, turns - 1, Head(safe, upper))) if turns > 1 else None


def _head_from(view: View, known: Head, upper: int) -> int:
    if upper == known.upper:
        return known.safe
    if known.safe < upper and all(view.get(("event", each)) for each in range(known.safe + 1, upper + 1)):
        return upper
    return head(view, upper)


def _next_ids(view: View, name: str) -> tuple[int, ...]:
    seen: Seen = view.get(("position", name), Seen())
    return tuple(each for each, _ in view.all("event") if each > seen.position)


def _follow(view: View, rules: Rules, name: str, new: Iterable[int], position: int = 0) -> None:
    seen: Seen = view.get(("position", name), Seen())
    ids = (*seen.ids, *new)
    if sorted(set(ids)) != list(ids):
        raise Violation(f"follower {name} gets {ids}: not each once, in order")
    position = max((position, seen.position, *ids))
    if rules.outside:
        view.note(("position", name), Seen(position, ids))
    elif (position, ids) != seen:
        view.put(("position", name), Seen(position, ids))
    view.commit()
