"""How people are told of counts and lengths of time."""

from datetime import timedelta

__all__ = ["age", "many"]


def many(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is one."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def age(value: timedelta) -> str:
    """Return a length of time for people: its two largest units. After a clock was set back, not less than 0s."""
    left, parts = int(max(0.0, value.total_seconds())), list[str]()
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"
