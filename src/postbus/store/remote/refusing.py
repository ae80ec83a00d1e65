"""What only the database itself can do: asked of a server, each is refused in a sentence that says so."""

from collections.abc import Callable
from typing import Any, NoReturn

from postbus.errors import InvalidRequest


def needs_database(what: str) -> InvalidRequest:
    """Return why something cannot be done here."""
    return InvalidRequest(f"{what} needs the database itself: open the bus by its sqlite:/// or postgresql:// URL")


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise needs_database(what)

    return refuse


class DatabaseOnly:
    """The part of the contract that no server offers."""

    transaction = _refusing("a transaction")
    publish_on = _refusing("publishing on a connection of your own")
    publish_on_async = _refusing("publishing on a connection of your own")
    report = _refusing("having the store decide what follows a failure")
    activity = _refusing("counting what happened")
    faults = _refusing("gathering what went wrong")
    ahead = _refusing("reading by position")
    before = _refusing("reading by position")
    read_on = _refusing("reading by position")
    reader = _refusing("reading by position")
    consumer = _refusing("a Spark stream")
    advance = _refusing("a Spark stream")
    divert = _refusing("a Spark stream")
    begin_part = _refusing("a Spark sink")
    stage = _refusing("a Spark sink")
    publish_parts = _refusing("a Spark sink")
    drop_parts = _refusing("a Spark sink")
    lead = _refusing("a follower")
    keep = _refusing("a follower")
    is_paused = _refusing("a follower")
    resign = _refusing("a follower")
    announce = _refusing("a follower")
    move = _refusing("a follower")
    unpark = _refusing("a follower")
    set_interests = _refusing("a follower")
    prune = _refusing("pruning")
    prunable = _refusing("pruning")
    erase = _refusing("erasing")
    erasable = _refusing("erasing")
    redeliver = _refusing("replaying from the log")
    hold = _refusing("holding a name")
    add_token = _refusing("managing tokens")
    tokens = _refusing("managing tokens")
    revoke_token = _refusing("managing tokens")
    restore_mark = _refusing("marking a restored store")
    inspect = _refusing("inspecting the store")
    condition = _refusing("inspecting the store")
