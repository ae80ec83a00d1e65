"""What is published: the same bytes for everybody."""

import random
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["TYPE", "batches", "document", "events", "order", "text"]

TYPE: Final = "order.placed"
_NODES: Final = 3_000
_LARGE: Final = 100_000


def order(number: int) -> dict[str, Any]:
    """Return a small business payload, about 150 bytes of JSON."""
    return {
        "order_id": number,
        "customer": f"customer-{number % 997:04d}",
        "email": "someone@example.org",
        "items": [{"sku": "A-1001", "quantity": 2}, {"sku": "B-2002", "quantity": 1}],
        "total": 59.9,
    }


def events(count: int) -> list[dict[str, Any]]:
    """Return events as `publish_many` takes them."""
    return [{"type": TYPE, "payload": order(number)} for number in range(count)]


def batches(count: int, size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield `count` events, `size` at a time."""
    for start in range(0, count, size):
        yield events(min(size, count - start))


def text() -> dict[str, Any]:
    """Return a payload of about 100 kB that is one long string."""
    chance = random.Random(1)
    words = ["lorem", "ipsum", "dolor", "sit", "amet", "consectetur"]
    return {"text": " ".join(chance.choices(words, k=_LARGE // 5))[:_LARGE]}


def document() -> dict[str, Any]:
    """Return a payload of about 100 kB that is a nested document of about 3,000 values."""
    chance = random.Random(2)
    return {"lines": [_line(chance, number) for number in range(_NODES // 12)]}


def _line(chance: random.Random, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "sku": f"{chance.randrange(16**10):010x}",
        "name": f"A product whose name is long enough to be real, number {number}",
        "price": {"net": round(chance.uniform(1, 900), 2), "vat": 0.19, "currency": "EUR"},
        "tags": ["in stock", "ships today"],
        "note": "Handle with care: " + "fragile, " * 18,
        "available": True,
        "discount": None,
    }
