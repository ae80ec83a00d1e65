"""Nobody listens in a test but who says so: what one test turns on is off in the next."""

import pytest

from postbus import figures, observe, tracing


@pytest.fixture(autouse=True)
def _nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "listener", None)
    monkeypatch.setattr(observe, "binding", False)
    monkeypatch.setattr(tracing, "_spans", None)
