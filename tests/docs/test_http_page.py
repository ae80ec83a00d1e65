"""The HTTP page's requests, run by real `curl` against a real server, are answered as the page says."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.docs.test_examples import ROOT
from tests.http.serving import process

PAGE = ROOT / "docs" / "http.md"
BLOCK = re.compile(r"^```(sh|json|text|python|output)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def holds(shown: Any, told: Any) -> bool:
    """Return whether an answer has all that is shown; `…` stands for anything that is there."""
    if shown == "…":
        return told is not None
    if isinstance(shown, dict):
        return isinstance(told, dict) and all(name in told and holds(shown[name], told[name]) for name in shown)
    if isinstance(shown, list):
        return isinstance(told, list) and len(shown) == len(told) and all(map(holds, shown, told))
    return shown == told


def test_the_requests_of_the_page_are_answered_as_it_says(tmp_path: Path):
    """In their order, on an empty store (S3.1 to S3.6)."""
    told, count = "", 0
    with process(f"sqlite:///{tmp_path / 'shop.db'}") as server:
        where = server.url.removeprefix("http://")
        for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            if kind == "sh" and "curl" in text:
                script = text.replace("localhost:8080", where)
                ran = subprocess.run(
                    ["/bin/bash", "-ec", script], capture_output=True, text=True, timeout=60, check=True
                )
                told = ran.stdout
            elif kind == "python":
                program = text.replace("localhost:8080", where)
                told = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60)
            elif kind == "output":
                assert told == text
                count += 1
            elif kind == "json":
                answer = json.loads(told[_last(told) :])
                assert holds(json.loads(text), answer), (text, answer)
                count += 1
            elif kind == "text":
                assert [line for line in told.splitlines() if line.startswith("id: ")] == text.split("\n")[:-1]
                count += 1
    assert count == 11


def _last(told: str) -> int:
    """Return where the last of several answers begins: they follow each other without a break."""
    decoder, place = json.JSONDecoder(), 0
    while True:
        _, end = decoder.raw_decode(told, place)
        if end >= len(told):
            return place
        place = end
