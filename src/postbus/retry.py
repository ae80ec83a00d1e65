"""How long to wait before the next attempt, and when to give up."""

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Any, Final, Self

from postbus.errors import InvalidRequest

__all__ = ["RetryPolicy"]

MOST_RETRIES: Final = 1_000_000
LONGEST_DELAY: Final = 100 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`max_retries` retries after the first attempt, each waiting longer than the one before.

    Attempt 1 is immediate; attempt N waits `min(base_delay * multiplier ** (N - 2), max_delay)` seconds.
    With `jitter` of 0.2 that wait is stretched or shrunk by up to a fifth (never past `max_delay`), so that events
    which failed together do not come back together. Delays are seconds.
    """

    max_retries: int = 3
    base_delay: float = 1.0
    max_delay: float = 30.0
    multiplier: float = 2.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a policy that could never be carried out."""
        if type(self.max_retries) is not int or not 0 <= self.max_retries <= MOST_RETRIES:
            raise InvalidRequest(f"max_retries must be a whole number from 0 to {MOST_RETRIES:,}")
        if not 0 <= self.base_delay <= self.max_delay <= LONGEST_DELAY:
            raise InvalidRequest("delays must satisfy 0 <= base_delay <= max_delay, in seconds, below a century")
        if not 1 <= self.multiplier < math.inf:
            raise InvalidRequest("multiplier must be 1 or more")
        if not 0 <= self.jitter <= 1:
            raise InvalidRequest("jitter must lie between 0 and 1")

    @property
    def attempts(self) -> int:
        """The attempts an event gets in all."""
        return self.max_retries + 1

    def delay(self, attempt: int, chance: random.Random | None = None) -> timedelta:
        """Return the wait before attempt number `attempt` (the first is 1); without `chance`, no jitter."""
        if attempt <= 1:
            return timedelta(0)
        seconds = self._backoff(attempt - 2)
        if chance is not None and self.jitter:
            seconds = min(seconds * (1 + chance.uniform(-self.jitter, self.jitter)), self.max_delay)
        return timedelta(seconds=seconds)

    def _backoff(self, exponent: int) -> float:
        try:
            return min(self.base_delay * self.multiplier**exponent, self.max_delay)
        except OverflowError:
            return self.max_delay if self.base_delay else 0.0

    def merged(self, override: "RetryPolicy | Mapping[str, float] | None") -> "RetryPolicy":
        """Return this policy with the named fields of `override` laid over it; a whole policy replaces it."""
        match override:
            case None:
                return self
            case RetryPolicy():
                return override
            case _:
                return replace(self, **_known(override))

    def giving_way_to(self, override: "RetryPolicy | Mapping[str, float] | None") -> "RetryPolicy":
        """Return the same, with an inherited delay moved where a given one contradicts it.

        So an override that was valid over one policy is so over every other: when an attempt has failed, it is too
        late to refuse it.
        """
        if override is None or isinstance(override, RetryPolicy):
            return self.merged(override)
        shortest = min(self.base_delay, override.get("max_delay", self.base_delay))
        longest = max(self.max_delay, override.get("base_delay", self.max_delay))
        return replace(self, base_delay=shortest, max_delay=longest).merged(override)

    @classmethod
    def from_dict(cls, stored: Mapping[str, float]) -> Self:
        """Rebuild a policy from `to_dict`."""
        return cls(**_known(stored))

    def to_dict(self) -> dict[str, float]:
        """Return the fields as plain JSON."""
        return asdict(self)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(values) - {field.name for field in fields(RetryPolicy)}
    if unknown:
        raise InvalidRequest(f"a retry policy has no {', '.join(sorted(unknown))}")
    if wrong := [name for name, value in values.items() if type(value) not in (int, float)]:
        raise InvalidRequest(f"a retry policy's {', '.join(wrong)} must be numbers")
    return dict(values)
