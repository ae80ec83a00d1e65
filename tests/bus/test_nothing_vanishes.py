"""Whatever goes wrong around a handler, its run is reported or its lease ends: nothing stays PROCESSING forever."""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from postbus import Event, EventBus, RetryPolicy, Status
from tests.kinds import on_sqlite

ONCE = RetryPolicy(max_retries=0)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Give something to hang on, let go at the end of the test."""
    gate = threading.Event()
    yield gate
    gate.set()


def plain(function: Callable[[], Any]) -> Callable[[Event], Any]:
    """Return a handler that is a plain function."""
    return lambda _: function()


def awaited(function: Callable[[], Any]) -> Callable[[Event], Any]:
    """Return a handler that is a coroutine function."""

    async def handle(_: Event) -> None:
        function()

    return handle


def fail() -> None:
    """Do what handlers do."""
    raise ValueError("no")


# ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("override", "delays"),
    [
        ({"base_delay": 5}, (5, 5)),
        ({"max_delay": 0.5}, (0.5, 0.5)),
        ({"base_delay": 3, "max_delay": 4}, (3, 4)),
        ({"base_delay": 1.5}, (1.5, 2)),
        (RetryPolicy(base_delay=7), (7, 30)),
        (None, (1, 2)),
    ],
)
def test_an_inherited_delay_gives_way_to_a_given_one(override: Any, delays: tuple[float, float]):
    """What was valid when it was registered is valid over every policy (S1.9)."""
    policy = RetryPolicy(base_delay=1, max_delay=2).giving_way_to(override)
    assert (policy.base_delay, policy.max_delay) == delays


@on_sqlite
@pytest.mark.parametrize("kind_of", [plain, awaited])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RetryPolicy(max_retries=1, base_delay=0, max_delay=0), {"base_delay": 0.01}),
        (RetryPolicy(max_retries=0, base_delay=40, max_delay=60), {"max_delay": 30}),
    ],
)
def test_a_handlers_policy_may_contradict_the_buss(
    make_bus: Callable[..., EventBus], kind_of: Any, ours: RetryPolicy, theirs: dict[str, float]
):
    """The attempt has failed, and the next one comes (S1.9, I10)."""
    bus = make_bus(retry=ours)
    bus.subscribe("*", kind_of(fail), retry=theirs)
    with bus:
        event = bus.publish("a", wait=True, timeout=10)
    assert (event.status, event.retry_count) == (Status.FAILED, ours.max_retries)


# ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def broken_log() -> Iterator[None]:
    """Have a filter of the application's raise wherever a failed attempt is told."""

    def refuse(record: logging.LogRecord) -> bool:
        if record.msg == "attempt_failed":
            raise RuntimeError("a broken filter")
        return True

    logger = logging.getLogger("postbus")
    logger.addFilter(refuse)
    yield
    logger.removeFilter(refuse)


@on_sqlite
@pytest.mark.usefixtures("broken_log")
@pytest.mark.parametrize("case", ["plain", "awaited", "overdue"])
def test_what_breaks_around_a_handler_is_a_failed_attempt(
    make_bus: Callable[..., EventBus], gate: threading.Event, caplog: pytest.LogCaptureFixture, case: str
):
    """In each lane, and in the watch over what is overdue: reported, and told with its trace (I10)."""
    handlers = {"plain": plain(fail), "awaited": awaited(fail), "overdue": plain(lambda: gate.wait(30))}
    bus = make_bus(retry=ONCE)
    bus.subscribe("*", handlers[case], timeout=0.1 if case == "overdue" else None)
    with bus:
        event = bus.publish("a", wait=True, timeout=10)
    assert (event.status, event.errors[0].message) == (Status.FAILED, "a broken filter")
    assert [record.msg for record in caplog.records if record.exc_info] == ["run_broke"]


class Odd:
    """Something that does not let itself be asked what it is."""

    @property
    def __class__(self) -> Any:
        """Refuse."""
        raise LookupError("do not ask")


@on_sqlite
@pytest.mark.parametrize("mixed", [False, True])
def test_whatever_a_plain_handler_returns_it_ends(make_bus: Callable[..., EventBus], *, mixed: bool):
    """Also beside an async one, in a thread that nobody watches (I10)."""
    bus = make_bus(retry=ONCE)
    bus.subscribe("*", lambda _: Odd(), timeout=None)
    if mixed:
        bus.subscribe("*", awaited(lambda: None))
    with bus:
        event = bus.publish("a", wait=True, timeout=10)
    assert (event.status, event.errors[0].type) == (Status.FAILED, "LookupError")


# ── the event loop ───────────────────────────────────────────────────────────────────────────────────────────────────


@on_sqlite
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exit_in_a_subtask_is_a_failed_attempt_and_disturbs_nobody(
    make_bus: Callable[..., EventBus], error: type[BaseException]
):
    """A neighbour in the same event loop goes on, and so does what comes later (S1.8, I10)."""
    bus = make_bus(retry=ONCE)
    going = threading.Event()
    done: list[asyncio.Event] = []

    @bus.on("neighbour")
    async def neighbour(_: Event) -> None:
        done.append(asyncio.Event())
        going.set()
        await done[0].wait()

    @bus.on("leave")
    async def leave(_: Event) -> None:
        async def subtask() -> None:
            raise error

        await asyncio.gather(subtask())

    @bus.on("later")
    async def later(_: Event) -> None:
        done[0].set()

    with bus:
        beside = bus.publish("neighbour")
        assert going.wait(10)
        left = bus.publish("leave", wait=True, timeout=10)
        assert (left.status, left.errors[0].type) == (Status.FAILED, error.__name__)
        assert bus.publish("later", wait=True, timeout=10).status is Status.COMPLETED
        bus.wait_idle(timeout=10)
        assert bus.get(beside.id).retry_count == 0


@on_sqlite
def test_a_handler_that_stops_the_event_loop_stops_nothing(bus: EventBus):
    """The loop is the lane's: it goes on until the worker stops (I10)."""

    @bus.on("*")
    async def stop(_: Event) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)

    with bus:
        for _ in range(2):
            assert bus.publish("a", wait=True, timeout=10).status is Status.COMPLETED


@on_sqlite
def test_what_one_lane_took_is_not_given_back_because_another_could_not(bus: EventBus, eventually: Any):
    """Claimed together, the plain one runs once; the other is due again, not lost (I7, I11)."""
    ran: list[int] = []
    bus.subscribe("plain", lambda event: ran.append(event.id))
    bus.subscribe("async", awaited(lambda: None))
    one, two = bus.publish_many([{"type": "plain"}, {"type": "async"}])
    loop = asyncio.new_event_loop()
    loop.close()
    bus.start(loop=loop)
    eventually(lambda: "RELEASED" in [row.action for row in bus.get(two.id, include_logs=True).logs])
    eventually(lambda: bus.get(one.id).status is Status.COMPLETED)
    assert ran == [one.id]
    assert [row.action for row in bus.get(one.id, include_logs=True).logs] == ["PICKED", "COMPLETED"]


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Give a table of how often threads of a name cannot be started, counted down."""
    left: dict[str, int] = {}
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if left.get(thread.name, 0):
            left[thread.name] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return left


@on_sqlite
@pytest.mark.parametrize(
    ("kind_of", "name", "times"),
    [(plain, "postbus-handler", 2), (awaited, "postbus-async", 1)],
)
def test_work_goes_on_once_threads_can_be_started(
    make_bus: Callable[..., EventBus], refused: dict[str, int], kind_of: Any, name: str, times: int
):
    """Nobody counts on a thread that never began (I10)."""
    bus = make_bus(concurrency=2)
    bus.subscribe("*", kind_of(lambda: None))
    bus.publish_many([{"type": "a"}] * 3)
    refused[name] = times
    with bus:
        bus.wait_idle(timeout=10)
        assert bus.list(status="COMPLETED").total == 3
    assert refused[name] == 0


@on_sqlite
def test_fewer_threads_than_wanted_will_do(make_bus: Callable[..., EventBus], refused: dict[str, int]):
    """The first is there; what it cannot do at once, it does later (I10)."""
    bus = make_bus(concurrency=4)
    bus.subscribe("*", lambda _: None)
    with bus:
        bus.publish("a", wait=True, timeout=10)
        refused["postbus-handler"] = sys.maxsize
        bus.publish_many([{"type": "a"}] * 8)
        bus.wait_idle(timeout=10)
        assert bus.list(status="COMPLETED").total == 9


@on_sqlite
def test_an_overdue_run_is_reported_although_no_thread_takes_its_place(
    make_bus: Callable[..., EventBus], refused: dict[str, int], gate: threading.Event
):
    """It has failed, and what waited behind it runs as soon as there is a thread (S1.8, I10)."""
    bus = make_bus(concurrency=1, prefetch=2)
    started = threading.Event()

    @bus.on("*", timeout=0.2)
    def handle(event: Event) -> None:
        started.set()
        if event.payload == "hang":
            refused["postbus-handler"] = 2
            gate.wait(30)

    hanging, behind = bus.publish_many(
        [{"type": "a", "payload": "hang", "max_retries": 0}, {"type": "a", "payload": "go"}]
    )
    with bus:
        assert started.wait(10)
        bus.wait_idle(timeout=10)
        assert bus.get(hanging.id).errors[0].type == "TimeoutError"
        assert bus.get(behind.id).status is Status.COMPLETED


@on_sqlite
def test_one_event_needs_one_thread(make_bus: Callable[..., EventBus]):
    """However many there may be."""
    bus = make_bus(concurrency=50)
    bus.subscribe("*", lambda _: None)
    before = set(threading.enumerate())
    with bus:
        bus.publish("a", wait=True, timeout=10)
        assert [thread.name for thread in set(threading.enumerate()) - before].count("postbus-handler") == 1


# ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_sqlite
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_known_to_be_lost_does_not_begin(
    make_bus: Callable[..., EventBus],
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
    eventually: Any,
    *,
    is_async: bool,
):
    """Another has it by now: to run it here too would only do it twice (I7, I11)."""
    bus, other = make_bus(concurrency=1, prefetch=3, lease=0.5), make_bus()
    ran: list[int] = []
    plainly = threading.Event()

    def handle(event: Event) -> None:
        ran.append(event.id)
        plainly.set()

    async def hold(event: Event) -> None:
        handle(event)
        await asyncio.to_thread(gate.wait, 30)

    bus.subscribe("*", hold if is_async else lambda event: (handle(event), gate.wait(30)))
    first, *others = bus.publish_many([{"type": "a"}] * 3)
    bus.start()
    assert plainly.wait(10)
    for each in others:
        other.reset(each.id, "taken over")
    assert len(other.poll_many(2)) == 2
    eventually(lambda: [record.msg for record in caplog.records].count("lease_lost") == 2)
    gate.set()
    eventually(lambda: other.get(first.id).status is Status.COMPLETED)
    eventually(lambda: not bus._worker.held)  # pyright: ignore[reportOptionalMemberAccess]
    assert ran == [first.id]


def test_a_worker_drains_only_while_a_suspect_waits(
    make_bus: Callable[..., EventBus], gate: threading.Event, eventually: Any
):
    """It claims nothing beside its long handler, until another worker has taken the suspect (I10)."""
    bus, dying, other = make_bus(), make_bus(lease=0.1), make_bus()
    started = threading.Event()
    ran: list[int] = []
    bus.subscribe("long", lambda _: (started.set(), gate.wait(30)), timeout=None)
    bus.publish("long")
    bus.start()
    worker: Any = bus._worker
    assert started.wait(10)
    suspect = bus.publish("quick")
    assert dying.poll(types=["quick"]) is not None
    bus.subscribe("quick", lambda event: ran.append(event.id))
    eventually(lambda: worker._draining)
    waiting = bus.publish("quick")
    looked = worker._look_again_at
    eventually(lambda: worker._look_again_at > looked + 0.2)
    assert ran == []
    taken = other.poll(types=["quick"])
    assert taken is not None
    assert (taken.id, taken.suspect) == (suspect.id, True)
    eventually(lambda: ran == [waiting.id])
    other.finalize(taken)


@on_sqlite
def test_shutdown_keeps_the_lease_of_a_plain_handler_that_runs_beside_async_ones(
    make_bus: Callable[..., EventBus], gate: threading.Event
):
    """It cannot be cancelled, so nobody else may begin: its lease ends with the process (S1.14, I7)."""
    bus, other = make_bus(), make_bus()
    started = threading.Event()
    bus.subscribe("*", lambda _: (started.set(), gate.wait(30)))
    bus.subscribe("*", awaited(lambda: None))
    event = bus.publish("a")
    bus.start()
    assert started.wait(10)
    assert bus.shutdown(timeout=0.1) is False
    told = other.get(event.id, include_logs=True)
    assert (told.status, [row.action for row in told.logs]) == (Status.PROCESSING, ["PICKED"])
