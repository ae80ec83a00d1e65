"""Leases: claim, settle, extend, expiry, release, and what is done to one event.

A function that yields is a verb; each `yield` is one step of it. `Rules.bug` plants a mistake, and the explorer must
find each.
"""

from collections.abc import Callable, Iterable
from functools import partial

from tests.model.kernel import EXCLUSIVE, NUMBERS, SHARED, Then, View, Violation
from tests.model.logs import Passed, log_pass, move
from tests.model.tables import (
    CAUSES,
    CURSOR,
    KINDS,
    NONE,
    SUBSCRIPTION,
    Block,
    Cursor,
    Epochs,
    Row,
    Rules,
    Steps,
    add_row,
    committed,
    epochs_of,
    parts,
    set_bits,
)

Leased = tuple[int, tuple[int, ...]]
"""A block's number and events; 0 for none."""

# ── claim ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def claim(rules: Rules, handles: str, limit: int, token: int) -> Steps:
    """Claim once: rows first, and the log if its cursor is free; else the cursor first. Return the leases."""
    limit = min(limit, 1) if rules.attempts == 1 and rules.bug != "last attempts share a block" else limit
    due = yield lambda view: parts(_due(view, rules, handles), view.lock(SUBSCRIPTION, SHARED))
    rows, alone = (), False
    if due:
        rows, alone = yield lambda view: _lock_rows(view, rules, due, limit)
    read = None
    if not alone and len(rows) < limit:
        read = yield from log_pass(rules, wait=rules.bug == "waiting for the cursor with row locks")
    if read or rows:
        first = rows, alone
        return (yield from _lease(rules, lambda view: _write(view, rules, (handles, limit, token), first, read)))
    if rules.bug != "second try without a rollback":
        yield View.rollback
        yield lambda view: view.lock(SUBSCRIPTION, SHARED)
    read = yield from log_pass(rules, wait=True)
    if not read:
        yield View.rollback
        return ()

    def rows_last(view: View) -> Leased:
        second = _lock_rows(view, rules, _due(view, rules, handles), limit)
        return _write(view, rules, (handles, limit, token), second, read)

    return (yield from _lease(rules, rows_last))


def _due(view: View, rules: Rules, handles: str) -> tuple[int, ...]:
    """Return the pending rows of these kinds, as a snapshot shows them."""
    known = [kind for kind in handles if not rules.kinds or view.get(("kind", kind))]
    return tuple(
        event_id
        for event_id, row in view.all("row")
        if row.state == "pending" and view.get(("event", event_id)).kind in known
    )


def _lock_rows(view: View, rules: Rules, due: Iterable[int], limit: int) -> tuple[tuple[int, ...], bool]:
    """Lock rows that a snapshot showed, and leave out what others have locked.

    One that is not pending any more is left out too, but stays locked, as `SKIP LOCKED` does it. What is to be run
    alone comes alone.
    """
    taken: list[int] = []
    for event_id in due:
        if len(taken) == limit:
            break
        row: Row | None = view.get(("row", event_id))
        alone = row is not None and _comes_alone(row, rules)
        if row is None or (alone and taken) or not view.lock(("row", event_id), skip=True) or row.state != "pending":
            continue
        taken.append(event_id)
        if alone:
            return (event_id,), True
    return tuple(taken), False


def _comes_alone(row: Row, rules: Rules) -> bool:
    """Return whether it ended its worker, or may not be tried again after this attempt."""
    if rules.bug == "last attempts share a block":
        return row.alone
    return row.alone or row.attempt + 1 >= rules.attempts


def _lease(rules: Rules, write: Callable[[View], Leased]) -> Steps:
    """Commit a claim, then hand it out."""
    if rules.bug == "handed out before the commit":
        leased = yield lambda view: parts(found := write(view), _hand_out(view, rules, found))
        yield View.commit
    else:
        leased = yield from committed(rules, write, lambda view, leased: _hand_out(view, rules, leased))
    return epochs_of(*leased)


def _write(
    view: View, rules: Rules, terms: tuple[str, int, int], locked: tuple[tuple[int, ...], bool], read: Passed | None
) -> Leased:
    """Put what the worker gets into a block, and what others handle, or what does not fit, into rows."""
    (handles, limit, token), (rows, alone) = terms, locked
    passed = move(view, rules, read) if read else ()
    first = (*rows, *passed, 0)[0]
    mine = [each for each in rows if abs(each - first) < rules.span]
    for each in passed:
        fits = len(mine) < limit and not alone and abs(each - first) < rules.span
        if fits and view.get(("event", each)).kind in handles:
            mine.append(each)
        else:
            add_row(view, each, Row())
    for each in set(mine) & set(rows):
        _hold(view, rules, each, len(mine))
    if not mine:
        return 0, ()
    number = view.draw(NUMBERS)
    view.put(("block", number), Block(tuple(mine), NONE, token))
    for place, each in enumerate(mine):
        view.append(("audit", each), ("PICKED", number << 10 | place))
    return number, tuple(mine)


def _hold(view: View, rules: Rules, event_id: int, together: int) -> None:
    """Take a row into a block: one without a history goes."""
    row: Row = view.get(("row", event_id))
    if row.attempt >= rules.attempts:
        raise Violation(f"event {event_id} is tried more often than allowed")
    ended = [action for action, _ in view.log(("audit", event_id)) if action in ("RETRIED", "EXPIRED", "REPLAYED")]
    if ended[-1:] == ["EXPIRED"] and together > 1:
        raise Violation(f"event {event_id} is not run alone, though its last attempt ended by expiry")
    view.put(("row", event_id), Row("held", row.attempt + 1, row.alone) if row.attempt else None)


def _hand_out(view: View, rules: Rules, leased: Leased) -> None:
    """Count what is handed out: a second time only for a recorded cause (I11), and as often as allowed (I12)."""
    for each in leased[1]:
        if view.get(("event", each)).erased:
            raise Violation(f"event {each} is handed out, though it was erased")
        ran = view.rows.get(("ran", each), 0) + 1
        view.note(("ran", each), ran)
        actions = [action for action, _ in view.log(("audit", each))]
        causes = sum(action in CAUSES for action in actions)
        if ran > 1 + causes:
            raise Violation(f"event {each} is handed out {ran} times, for {causes} causes")
        begun = max((at for at, action in enumerate(actions) if action in ("REPLAYED", "REDELIVERED")), default=0)
        counts = [actions[begun:].count(action) for action in ("PICKED", "RELEASED", "RESET")]
        if counts[0] - counts[1] - counts[2] > rules.attempts:
            raise Violation(f"event {each} is tried more often than allowed")


# ── settle ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def settle(rules: Rules, settled: Epochs, outcome: str, *, commit: bool = True) -> Steps:
    """Settle leases with one outcome: DONE, RETRIED, DEAD or RELEASED; all blocks are locked, then all rows."""
    numbers = list(dict.fromkeys(epoch >> 10 for epoch, _ in settled))
    crosswise = rules.bug == "settle locks as it comes"
    *others, last = numbers if crosswise else sorted(numbers)
    for number in others:
        yield lambda view, number=number: _lock_block(view, number)
    early = rules.bug == "settle in one statement"
    fenced, rows = yield lambda view: (_lock_block(view, last), _unset(view, rules, settled))[1]
    if rows is None and not early:
        rows = yield lambda view: _rows_of(view, rules, settled, fenced, outcome)
    for event_id in (rows or ()) if crosswise else sorted(rows or ()):
        yield lambda view, event_id=event_id: view.get(("row", event_id)) and view.lock(("row", event_id))
    write = partial(_apply_all, rules=rules, settled=settled, fenced=fenced, outcome=outcome, rows_seen=not early)
    if commit:
        yield from committed(rules, write)
    else:
        yield write


def _lock_block(view: View, number: int) -> bool:
    return view.get(("block", number)) is not None and view.lock(("block", number))


def _unset(view: View, rules: Rules, settled: Epochs) -> tuple[frozenset[int], tuple[int, ...] | None]:
    """Return the epochs whose bit is there, unset, and the event's; where that is all, the rows that they hold, too.

    Their blocks are locked, and rows that they hold change with them only.
    """
    found: set[int] = set()
    for epoch, event_id in settled:
        block: Block | None = view.get(("block", epoch >> 10))
        place = epoch & 1023
        if block and place not in block.done and block.ids[place : place + 1] == (event_id,):
            found.add(epoch)
    if len(found) == len(settled):
        return frozenset(found), tuple(each for _, each in settled if view.get(("row", each)))
    return NONE if rules.bug == "fence per mask" else frozenset(found), None


def _rows_of(view: View, rules: Rules, settled: Epochs, fenced: frozenset[int], outcome: str) -> tuple[int, ...]:
    """Return the rows that a settlement changes: held by its blocks, or left by their expiry."""
    found: list[int] = []
    for epoch, event_id in settled:
        row: Row | None = view.get(("row", event_id))
        if row and (epoch in fenced or (_is_left(row, epoch, rules) and outcome in ("DONE", "DEAD"))):
            found.append(event_id)
    return tuple(found)


def _is_left(row: Row, epoch: int, rules: Rules) -> bool:
    """Return whether this epoch's expiry has left the row, and nobody has claimed it since."""
    return row.state == "pending" and (row.epoch == epoch or rules.bug == "any epoch ends a pending row")


def _apply_all(
    view: View, rules: Rules, settled: Epochs, fenced: frozenset[int], outcome: str, *, rows_seen: bool
) -> None:
    for epoch, event_id in settled:
        row: Row | None = view.get(("row", event_id))
        if epoch in fenced:
            _apply(view, rules, epoch, event_id, outcome)
        elif rows_seen and row and _is_left(row, epoch, rules) and outcome in ("DONE", "DEAD"):
            _finish_left(view, epoch, event_id, row, outcome)
        else:
            _answer(view, rules, epoch, event_id, outcome)


def _apply(view: View, rules: Rules, epoch: int, event_id: int, outcome: str) -> None:
    """Set the bit, and write or remove the row."""
    row: Row = view.get(("row", event_id)) or Row("held", 1)
    view.put(("told", epoch, event_id), outcome)
    action, after = outcome, None
    if outcome == "RELEASED":
        after = Row("pending", row.attempt - 1, row.alone and rules.bug != "release forgets who runs alone")
    elif outcome == "DEAD" or (outcome == "RETRIED" and row.attempt >= rules.attempts):
        action, after = "DEAD", Row("dead", row.attempt)
    elif outcome == "RETRIED":
        after = Row("pending", row.attempt, epoch=epoch if rules.bug == "epoch kept by Retry" else None)
    if view.get(("row", event_id)) or after:
        view.put(("row", event_id), after)
    view.append(("audit", event_id), (action, epoch))
    set_bits(view, epoch >> 10, [event_id])


def _finish_left(view: View, epoch: int, event_id: int, row: Row, outcome: str) -> None:
    """End a delivery whose lease expired, and that nobody has claimed since."""
    entries = view.log(("audit", event_id))
    if ("EXPIRED", epoch) not in entries or [of for action, of in entries if action == "PICKED"][-1] != epoch:
        raise Violation(f"a stale epoch changes event {event_id}")
    view.put(("told", epoch, event_id), outcome)
    view.put(("row", event_id), None if outcome == "DONE" else Row("dead", row.attempt))
    view.append(("audit", event_id), (outcome, epoch))


def _answer(view: View, rules: Rules, epoch: int, event_id: int, outcome: str) -> None:
    """Answer REPEATED where the audit log has this very outcome, else LOST: neither may be wrong (I8)."""
    actions = [action for action, of in view.log(("audit", event_id)) if of == epoch]
    repeated = outcome in actions
    if outcome == "RETRIED" and rules.bug != "a repeated Retry is looked for as such":
        repeated = repeated or ("DEAD" in actions and "EXPIRED" not in actions)
    told = view.get(("told", epoch, event_id))
    if told == outcome and not repeated:
        raise Violation(f"event {event_id} is lost to its worker, whose {outcome} was recorded")
    if repeated and told != outcome and not ("EXPIRED" in actions and "DEAD" in actions):
        raise Violation(f"a {outcome} of event {event_id} is taken for a repeat, and was never recorded")
    if repeated:
        return
    block: Block | None = view.get(("block", epoch >> 10))
    row: Row | None = view.get(("row", event_id))
    held = block is not None and epoch & 1023 not in block.done
    if held or (outcome in ("DONE", "DEAD") and row is not None and _is_left(row, epoch, rules)):
        raise Violation(f"event {event_id} is lost to its worker, though nobody has claimed it again")


# ── a lease's end ────────────────────────────────────────────────────────────────────────────────────────────────────


def heartbeat(rules: Rules, numbers: tuple[int, ...]) -> Steps:
    """Extend blocks by their numbers, in whatever order the table has them; one being settled waits for the next."""
    skip = rules.bug != "heartbeat waits"
    mine = NONE
    for number in numbers:
        locked = (
            yield lambda view, number=number: (
                view.get(("block", number)) is not None and view.lock(("block", number), skip=skip)
            )
        )
        mine |= {number} if locked else NONE
    yield lambda view: parts(_extend(view, mine), view.commit())


def _extend(view: View, numbers: Iterable[int]) -> None:
    for number in numbers:
        if view.get(("block", number)):
            view.put(("overdue", number), None)


def expire(rules: Rules) -> Steps:
    """Maintenance: take the first block apart whose time is over."""
    seen = None
    if rules.bug == "expiry looks before it locks":
        seen = yield _first_overdue
    number, rows = yield lambda view: _take_overdue(view, seen)
    if number is None:
        return
    for event_id in rows:
        yield lambda view, event_id=event_id: view.lock(("row", event_id))
    names_kinds = rules.bug != "only claims and settles write kinds"
    yield from committed(rules, lambda view: _explode(view, rules, number), names_kinds=names_kinds)


def _first_overdue(view: View) -> int | None:
    overdue = (number for number, _ in view.all("block") if view.get(("overdue", number)))
    return next((number for number in overdue if not view.holders(("block", number), EXCLUSIVE)), None)


def _take_overdue(view: View, seen: int | None) -> tuple[int | None, tuple[int, ...]]:
    """Lock one that nobody has locked; return it with the rows that it holds."""
    number = seen or _first_overdue(view)
    if number is None or not view.get(("block", number)) or not view.lock(("block", number), skip=True):
        return None, ()
    return number, tuple(sorted(each for each in view.get(("block", number)).left if view.get(("row", each))))


def _explode(view: View, rules: Rules, number: int) -> None:
    block: Block = view.get(("block", number))
    if not view.get(("overdue", number)):
        raise Violation(f"block {number} is taken apart, though its lease was extended")
    for place, each in enumerate(block.ids):
        if each not in block.left:
            continue
        row: Row = view.get(("row", each)) or Row("held", 1)
        epoch = number << 10 | place
        dead = row.attempt >= rules.attempts
        if dead and len(block.ids) > 1:
            raise Violation(f"event {each} dies beside others, one of which may have ended the worker")
        after = Row("dead", row.attempt, epoch=epoch) if dead else Row("pending", row.attempt, alone=True, epoch=epoch)
        view.put(("row", each), after)
        view.append(("audit", each), ("EXPIRED", epoch))
        if dead:
            view.append(("audit", each), ("DEAD", epoch))
    view.put(("block", number), None)


def release_token(rules: Rules, token: int) -> Steps:
    """Hand back the block of a claim whose answer was lost, if it was made."""
    found = yield lambda view: tuple(
        epoch
        for number, block in view.all("block")
        if block.token == token
        for epoch in epochs_of(number, block.ids)
        if epoch[1] in block.left
    )
    if found:
        yield from settle(rules, found, "RELEASED")


def tidy(rules: Rules) -> Steps:
    """Maintenance: remove kinds without rows, while no transaction may have a row whose kind it has found there."""
    if rules.bug != "tidy without the table's lock":
        yield lambda view: view.lock(KINDS)
    yield lambda view: parts(_remove_kinds(view), view.commit())


def _remove_kinds(view: View) -> None:
    with_rows = {view.get(("event", each)).kind for each, _ in view.all("row")}
    for kind, _ in view.all("kind"):
        if kind not in with_rows:
            view.put(("kind", kind), None)


# ── one event ────────────────────────────────────────────────────────────────────────────────────────────────────────

Place = tuple[str, int]


def _place(view: View, event_id: int, *, blocks: bool = True, rows: bool = True) -> Place:
    """Return where an event is, in one statement."""
    for number, block in view.all("block") if blocks else ():
        if event_id in block.left:
            return "block", number
    if rows and view.get(("row", event_id)):
        return "row", event_id
    if view.get(("event", event_id)) is None:
        return "unknown", 0
    return _place_in_log(view, event_id, view.get(CURSOR, Cursor(event_id)))


def _place_in_log(view: View, event_id: int, cursor: Cursor) -> Place:
    if event_id in cursor.missing:
        return "missing", 0
    for first, ids in view.all("gaps"):
        if event_id in ids:
            return "gaps", first
    above = event_id > cursor.position and not view.get(("skip", event_id))
    return ("above" if above else "ended"), 0


def change_one(rules: Rules, event_id: int, action: str) -> Steps:
    """Cancel, reset, erase, discard or redeliver an event (CANCELLED, RESET, ERASED, DISCARDED, REDELIVERED).

    Its place is found under the cursor's lock, locked, and looked at again. If the event has moved meanwhile, all is
    rolled back and begun anew: a row that was locked first, and is in a block by now, would be a lock out of order.
    """
    if rules.bug != "cancel without the cursor's lock":
        yield lambda view: view.lock(CURSOR)
    if rules.bug == "the place found in two statements":
        place = yield lambda view: _place(view, event_id, blocks=False)
        if place[0] == "ended":
            place = yield lambda view: _place(view, event_id, rows=False)
    else:
        place = yield lambda view: _place(view, event_id)
    if not (yield lambda view: _lock_place(view, rules, event_id, place)):
        yield View.rollback
        return Then(change_one, (rules, event_id, action))
    if place[0] == "block":
        yield lambda view: view.get(("row", event_id)) and view.lock(("row", event_id))
    names_kinds = rules.bug != "only claims and settles write kinds"
    yield from committed(rules, lambda view: _change(view, rules, event_id, action, place), names_kinds=names_kinds)
    return None


def _lock_place(view: View, rules: Rules, event_id: int, place: Place) -> bool:
    """Lock it, and look again."""
    if place[0] in ("block", "row"):
        return (view.get(place) is not None and view.lock(place) and _place(view, event_id) == place) or (
            rules.bug == "cancel does not look again"
        )
    if place[0] == "ended" and _place(view, event_id)[0] not in ("ended", "unknown"):
        raise Violation(f"event {event_id} is told to have ended, and is pending or leased")
    return True


def _change(view: View, rules: Rules, event_id: int, action: str, place: Place) -> None:
    if action == "ERASED" and (event := view.get(("event", event_id))):
        view.put(("event", event_id), event._replace(erased=True))
    row: Row | None = view.get(("row", event_id))
    is_dead = row is not None and row.state == "dead"
    allowed = (
        action in ("DISCARDED", "REDELIVERED", "ERASED") if is_dead else action in ("CANCELLED", "RESET", "ERASED")
    )
    if place[0] in ("ended", "unknown") or not allowed:
        return
    _leave_place(view, rules, event_id, place)
    after = Row() if action == "REDELIVERED" else None
    if action == "RESET":
        attempt = row.attempt if row else int(place[0] == "block")
        given_back = place[0] == "block" and rules.bug != "reset counts the attempt"
        after = Row("pending", attempt - given_back, row is not None and row.alone)
    if after or row:
        view.put(("row", event_id), after)
    view.append(("audit", event_id), (action, 0))


def _leave_place(view: View, rules: Rules, event_id: int, place: Place) -> None:
    match place:
        case "above", _:
            view.put(("skip", event_id), 1)
        case "missing", _:
            cursor: Cursor = view.get(CURSOR)
            if rules.bug != "cancel of a late one leaves it in missing":
                view.put(CURSOR, cursor._replace(missing=cursor.missing - {event_id}))
        case "gaps", first:
            view.put(("gaps", first), (view.get(("gaps", first)) - {event_id}) or None)
        case "block", number if view.get(("block", number)):
            set_bits(view, number, [event_id])
        case _:
            pass
