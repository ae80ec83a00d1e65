"""The shop that `postbus demo` runs: handlers that work, fail now and then, always fail, or kill their process."""

import os
import signal
import time

from postbus import Context, Discard, Event, EventBus, RetryPolicy

__all__ = ["open_bus"]

BOX_SECONDS = 0.02


def open_bus() -> EventBus:
    """Open the shop at POSTBUS_URL with its handlers."""
    bus = EventBus(
        retry=RetryPolicy(max_retries=3, base_delay=0.2, max_delay=1), poll_interval=0.2, concurrency=4, prefetch=8
    )
    bus.subscribe("order.*", pack_order)
    bus.subscribe("payment.*", take_payment)
    bus.subscribe("label.*", print_label)
    return bus


def pack_order(event: Event, ctx: Context) -> None:
    """Pack an order; the warehouse does not answer the first `flaky` times."""
    time.sleep(BOX_SECONDS)
    if ctx.attempt <= event.payload["flaky"]:
        raise ConnectionError("the warehouse did not answer")


def take_payment(event: Event) -> None:
    """Take a payment: a card that is too short fails at every attempt, an unknown currency is not worth a second."""
    time.sleep(BOX_SECONDS)
    if event.payload["currency"] not in ("EUR", "USD"):
        raise Discard(f"unknown currency {event.payload['currency']}")
    if len(event.payload["card"]) < len("4111111111111111"):
        raise ValueError("the card number is too short")


def print_label(event: Event, ctx: Context) -> None:
    """Print a label; the driver of the label printer takes the whole process down, the first time."""
    time.sleep(BOX_SECONDS)
    if event.payload["driver"] == "faulty" and ctx.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
