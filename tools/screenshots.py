"""Take the pictures of the dashboard in docs/images from a demo that runs: they show what is there, not what was."""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from playwright.sync_api import Browser

from tests.dashboard.browser import browser

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WARM_UP = 45.0
SIZE = {"width": 1200, "height": 760}


def main() -> None:
    """Run the demo, look at its pages, end it."""
    IMAGES.mkdir(exist_ok=True)
    command = [str(Path(sys.executable).with_name("postbus")), "demo", "--keep", "--no-report", "--port", "0"]
    with tempfile.TemporaryFile("w+") as told:
        demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=told, text=True)  # noqa: S603  our own
        try:
            url = _address(told)
            time.sleep(WARM_UP)
            with browser() as chromium:
                for scheme in ("light", "dark"):
                    _take(chromium, url, scheme)
        finally:
            demo.terminate()
            demo.wait(60)


def _address(told: TextIO) -> str:
    for _ in range(600):
        told.seek(0)
        if found := re.search(r"http://\S+/dashboard", told.read()):
            return found[0]
        time.sleep(0.1)
    raise SystemExit("the demo did not say where its dashboard is")


def _take(chromium: Browser, url: str, scheme: str) -> None:
    page = chromium.new_context(color_scheme=scheme, viewport=SIZE).new_page()  # type: ignore[arg-type]
    page.goto(f"{url}/dead")
    dead = page.locator("td a[href*='/events/']").first.get_attribute("href")
    for name, path in {"overview": "/", "dead": "/dead", "subscriptions": "/subscriptions"}.items():
        page.goto(f"{url}{path}")
        page.wait_for_timeout(1_500)
        page.screenshot(path=IMAGES / f"{name}-{scheme}.png")
    page.goto(f"{url.removesuffix('/dashboard')}{dead}")
    page.screenshot(path=IMAGES / f"event-{scheme}.png")
    page.context.close()


if __name__ == "__main__":
    main()
