"""The processes that crash tests start, kill, stop and start again: `python -m tests.crash.child '{"role": …}'`.

A child tells what happened in files that outlive it, one short line a write: its publishes before and after
(`journal`), each execution of its handlers before anything else (`executions`), and its log entries (`log`).
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from postbus import (
    CheckpointMode,
    Context,
    Discard,
    Event,
    EventBus,
    Follower,
    LeaseLost,
    NewEvent,
    PostbusError,
    RetryPolicy,
    StoreUnavailable,
)
from postbus.observe import set_probe
from postbus.store.contract import Transaction
from postbus.torture import checker
from postbus.torture.history import INVOKE, OK, History, read
from tests.crash import plants

Config = dict[str, Any]
PAUSE = threading.Event()
FIRST_SETTLED = threading.Event()
"""What handlers of events that are to be settled later wait for."""
FIRST_SETTLED.set()


def tell(**fields: Any) -> None:
    """Say something to the test that started this process."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def note(path: str, op: str, kind: str = INVOKE, **told: Any) -> None:
    """Append one line that survives this process, whatever ends it."""
    History(path, "child").note(op, kind, **told)


def die() -> None:
    """End this process the hard way: no handler, no cleanup, nothing flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
    PAUSE.wait()


def die_at(name: str, hit: int) -> None:
    """End this process at the `hit`-th time that it comes by a probe."""
    lock = threading.Lock()
    left = hit

    def hook(probe: str) -> None:
        nonlocal left
        if probe == name:
            with lock:
                left -= 1
                if not left:
                    die()

    set_probe(hook)


class Halt:
    """Kills or suspends this process, once, in the midst of a claim, or of settling several deliveries of a block.

    Then one delivery of that block is settled before the others, whose handlers wait for that.
    """

    def __init__(self, verb: str, name: str, number: int, count: int, *, one_writer: bool) -> None:
        """Send this process a signal at a probe of `claim` or `settle`, of a block of `count`."""
        self._verb, self._name, self._number, self._count = verb, name, number, count
        self._one_writer = one_writer
        self._lock = threading.Lock()
        self._handled = self._batches = 0
        if verb == "settle":
            FIRST_SETTLED.clear()
        set_probe(self._come_by)

    def _come_by(self, name: str) -> None:
        with self._lock:
            self._handled += name == "handled"
        if name == "settling":
            self._batches += 1
            FIRST_SETTLED.set()
            while self._batches == 1 and self._handled < self._count:
                PAUSE.wait(0.001)
        if name == self._name and self._is_meant():
            set_probe(None)
            # To this very thread: it must not go on until another one has taken the signal.
            signal.pthread_kill(threading.get_ident(), self._number)

    def _is_meant(self) -> bool:
        own = threading.current_thread().name == f"postbus-{self._verb}"
        if self._verb == "claim":
            return own
        # A heartbeat that comes at the same moment may commit for both.
        return self._batches == 2 and (own or self._one_writer)


class LogFile(logging.Handler):
    """Keeps the names and fields of the bus's log entries."""

    def __init__(self, path: str) -> None:
        """Append to a file."""
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write one entry down."""
        note(self._path, "log", name=record.msg, event_id=getattr(record, "event_id", None))


# ── handling ─────────────────────────────────────────────────────────────────────────────────────────────────────


def handler(config: Config) -> Callable[[Event, Context], None]:
    """Return a handler that writes down each execution and then does what the event's payload asks for."""
    gate = Path(config["gate"]) if config.get("gate") else None

    def handle(event: Event, ctx: Context) -> None:
        note(config["executions"], "handle", delivery=[event.id, ctx.delivery.subscription, ctx.attempt, ctx.epoch])
        if gate is not None:
            while not gate.exists():
                PAUSE.wait(0.01)
        match event.payload["do"]:
            case "die":
                die()
            case "discard":
                raise Discard("asked for by its payload")
            case "fail once" if ctx.attempt == 1:
                raise ValueError("asked for by its payload")
            case "pause":
                PAUSE.wait(0.01)
            case "wait":
                FIRST_SETTLED.wait()

    return handle


def counting(bus: EventBus, config: Config) -> Callable[[Event, Context, Transaction], None]:
    """Return a transactional handler that counts itself in a table and publishes what follows, then does as asked."""
    handle = handler(config)

    def count(event: Event, ctx: Context, tx: Transaction) -> None:
        tx.execute(f"INSERT INTO effects VALUES ({event.id:d})")  # noqa: S608  a number, in any dialect
        if event.type == "trial.event":
            uid = f"after-{event.id}-{ctx.epoch}"
            note(config["journal"], "publish", uids=[uid])
            bus.publish("trial.after", {"do": "succeed", "of": event.id}, uid=uid, connection=tx)
        handle(event, ctx)

    return count


def opened(config: Config) -> EventBus:
    """Open the bus under test."""
    options: Config = {"retry": RetryPolicy(base_delay=0.02), "poll_interval": 0.2, **config.get("options", {})}
    if options["retry"] == "default":
        del options["retry"]
    bus = EventBus(config["url"], **options)
    if "executions" in config:
        for name in config.get("subscriptions", ["default"]):
            if config.get("transactional"):
                bus.subscribe("trial.*", counting(bus, config), subscription=name, transactional=True)
            else:
                bus.subscribe("trial.*", handler(config), subscription=name)
    return bus


# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────


def wish(number: int) -> str:
    """Return what the event of this number asks of its handler: most succeed, some after a while."""
    if number % 29 == 28:
        return "discard"
    if number % 7 == 3:
        return "fail once"
    return "pause" if number % 3 else "succeed"


def batches(config: Config) -> Iterator[list[NewEvent]]:
    """Yield what to publish: mostly single events, now and then five at once."""
    number = 0
    while number < config["count"]:
        size = 5 if number % 11 == 10 else 1
        yield [
            NewEvent(type="trial.event", payload={"do": wish(each)}, uid=f"{config['name']}-{each}")
            for each in range(number, number + size)
        ]
        number += size


def publish_all(bus: EventBus, config: Config) -> None:
    """Publish what the journal does not show as acknowledged; the one whose answer was never heard, again."""
    done = checker.journal(read([Path(config["journal"])])).acknowledged
    for batch in batches(config):
        uids = [str(event.uid) for event in batch]
        if all(uid in done for uid in uids):
            continue
        note(config["journal"], "publish", uids=uids)
        stored = insist(bus, batch, config) if config.get("stubborn") else publish_one(bus, batch)
        note(config["journal"], "publish", OK, uids=[event.uid for event in stored], ids=[event.id for event in stored])
        if config.get("pace"):
            PAUSE.wait(config["pace"])


def publish_one(bus: EventBus, batch: list[NewEvent]) -> list[Event]:
    """Publish a batch, a single event as such."""
    if len(batch) > 1:
        return bus.publish_many(batch)
    return [bus.publish("trial.event", batch[0].payload, uid=batch[0].uid)]


def insist(bus: EventBus, batch: list[NewEvent], config: Config) -> list[Event]:
    """Publish a batch; while the store is away nobody knows whether it is stored, so ask again by its uids."""
    while True:
        try:
            return publish_one(bus, batch)
        except StoreUnavailable:
            note(config["log"], "log", name="publish_refused")
            PAUSE.wait(0.05)


# ── the roles ────────────────────────────────────────────────────────────────────────────────────────────────────


def live(config: Config) -> None:
    """Publish and handle in one process until all is done."""
    with opened(config) as bus:
        publish_all(bus, config)
        bus.wait_idle(timeout=60)


def publish(config: Config) -> None:
    """Publish all, handle nothing."""
    bus = opened({key: value for key, value in config.items() if key != "executions"})
    tell(ready=True)
    publish_all(bus, config)
    bus.shutdown()


def work(config: Config) -> None:
    """Handle until told to stop."""
    bus = opened(config)
    bus.start()
    # Who hears that this one is ready may ask it to end before `run` has begun to listen for that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(not bus.shutdown()))
    tell(ready=True)
    bus.run()


def drain(config: Config) -> None:
    """Handle until nothing is left."""
    with opened(config) as bus:
        bus.wait_idle(timeout=100)


def seeing(config: Config) -> Callable[..., None]:
    """Return a follower's handler that writes down each event it sees; a transactional one, in a table too."""

    def see(event: Event, tx: Transaction | None = None) -> None:
        if tx is not None:
            tx.execute(f"INSERT INTO effects VALUES ({event.id:d})")  # noqa: S608  a number, in any dialect
        note(config["executions"], "see", subscription="trial", event_id=event.id, epoch=0)
        if event.payload["do"] == "die":
            die()
        PAUSE.wait(config.get("pace", 0))

    def see_each(event: Event) -> None:
        see(event)

    def see_all(events: list[Event]) -> None:
        for event in events:
            see(event)

    def count_all(events: list[Event], tx: Transaction) -> None:
        for event in events:
            see(event, tx)

    if config["follow"].get("batch"):
        return count_all if config.get("transactional") else see_all
    return see if config.get("transactional") else see_each


def follow(config: Config) -> None:
    """Follow until told to stop."""
    bus = EventBus(config["url"], poll_interval=0.2)
    options = dict(config["follow"])
    if "size" in options:
        options["checkpoint"] = CheckpointMode.batched(options.pop("size"), 0.2)
    bus.follow("trial", "trial.*", **options)(seeing(config))
    if config.get("forced"):  # one that deposes whoever leads, again and again
        setattr(Follower, "_single", property(lambda _: True, lambda *_: None))  # noqa: B010  no such word of the class's own
    bus.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(not bus.shutdown()))
    tell(ready=True)
    bus.run()


def hold(config: Config) -> None:
    """Claim with `poll_many`, as soon as there is something; at a word from the test, finalize; tell how each went."""
    bus = opened(config)
    while not (held := bus.poll_many(config["count"])):
        PAUSE.wait(0.01)
    tell(held=[[each.id, each.epoch] for each in held])
    sys.stdin.readline()
    for delivery in held:
        try:
            bus.finalize(delivery, **config.get("outcome", {"success": True}))
        except PostbusError as error:
            tell(result=type(error).__name__)
        else:
            tell(result="settled")
    bus.shutdown()


def contend(config: Config) -> None:
    """Publish and claim by turns in several threads, in competition with other processes; tell every error."""
    bus = opened(config)
    errors: list[str] = []
    tell(ready=True)
    sys.stdin.readline()

    def compete(thread: int) -> None:
        try:
            publish_all(
                bus, {**config, "name": f"{config['name']}-{thread}", "journal": f"{config['journal']}.{thread}"}
            )
            while delivery := bus.poll():
                note(
                    config["log"],
                    "handle",
                    delivery=[delivery.id, delivery.subscription, delivery.attempt, delivery.epoch],
                )
                bus.finalize(delivery, success=True)
        except Exception as error:  # noqa: BLE001  every error at all is what the test asks about
            errors.append(repr(error))

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    bus.shutdown()
    tell(errors=errors)


def fill(config: Config) -> None:
    """Publish under a limit on file sizes until refused, tell, then with the limit lifted go on."""
    import resource  # noqa: PLC0415  POSIX only, and only here

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    bus = opened(config)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (config["limit"], hard))
    refused = [_publish_until_refused(bus, config, 0)]
    # Still full: refused again, as an error of ours, and reading goes on.
    refused.append(_publish_until_refused(bus, config, 10_000))
    readable = bus.list(limit=1).total
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    began = time.monotonic()
    for number in range(20_000, 20_010):
        _publish_big(bus, config, number)
    tell(refused=refused, readable=readable, resumed=time.monotonic() - began)
    bus.shutdown()


def _publish_until_refused(bus: EventBus, config: Config, first: int) -> str:
    for number in range(first, first + 5_000):
        try:
            _publish_big(bus, config, number)
        except Exception as error:  # noqa: BLE001  the test asks which error it is
            return type(error).__name__
    return "never"


def _publish_big(bus: EventBus, config: Config, number: int) -> None:
    uid = f"big-{number}"
    note(config["journal"], "publish", uids=[uid])
    event = bus.publish("trial.big", {"do": "succeed", "text": "x" * 3000}, uid=uid)
    note(config["journal"], "publish", OK, uids=[uid], ids=[event.id])


ROLES = {each.__name__: each for each in (live, publish, work, drain, follow, hold, contend, fill)}


def play(config: Config) -> None:
    """Play a role to its end."""
    if config.get("log"):
        logging.getLogger("postbus").addHandler(LogFile(config["log"]))
    if config.get("plant"):
        plants.PLANTS[config["plant"]]()
    if config.get("probe"):
        die_at(*config["probe"])
    if config.get("halt"):
        Halt(*config["halt"], one_writer=config["url"].startswith("sqlite:"))
    with suppress(LeaseLost):
        ROLES[config["role"]](config)


if __name__ == "__main__":
    play(json.loads(sys.argv[1]))
