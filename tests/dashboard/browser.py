"""A real browser for the tests: Debian's chromium if it is there, else the one that Playwright brings."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Playwright, sync_playwright

__all__ = ["Witness", "browser"]


@contextmanager
def browser() -> Iterator[Browser]:
    """Start it. If there is none, that is the test's failure: `make test` installs one, where it may."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=_found(playwright), args=["--no-sandbox"])
        yield started
        started.close()


def _found(playwright: Playwright) -> str:
    own = playwright.chromium.executable_path
    found = shutil.which("chromium") or shutil.which("google-chrome") or (own if Path(own).exists() else None)
    assert found is not None, "there is no browser: apt install chromium, or playwright install chromium"
    return found


class Witness:
    """Notes what a page does that it should not: errors, requests to other hosts."""

    def __init__(self, page: Page, url: str) -> None:
        """Watch a page that should speak to one server only."""
        self.wrong: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda each: self.wrong.append(f"error: {each}"))
        page.on("dialog", lambda each: self.wrong.append(f"dialog: {each.message}"))
        page.on("request", lambda each: None if each.url.startswith(url) else self.wrong.append(f"asked {each.url}"))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"{message.type}: {message.text}")
