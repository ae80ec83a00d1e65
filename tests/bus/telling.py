"""What the bus told its log."""

from typing import Any

import pytest


def failures(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the fields of the entries on failed attempts."""
    return [vars(record) for record in caplog.records if record.msg == "attempt_failed"]
