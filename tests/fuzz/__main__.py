"""Fuzz one reader of what comes from outside: `python -m tests.fuzz wire -max_total_time=60`.

The rest of the line is libFuzzer's. What was found to be of interest is kept in `.fuzz/`, to go on from there; an input
that fails is written there too, and `python -m tests.fuzz wire .fuzz/wire-crash-…` runs it again.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

PLACE: Final = Path(".fuzz")


def main(name: str, *rest: str) -> None:
    """Begin with a module's seeds, and look for an input that its `check` fails on."""
    atheris: Any = import_module("atheris")  # of the extra `fuzz`: not every machine has a wheel of it
    with atheris.instrument_imports(include=["postbus"]):
        target = import_module(f"tests.fuzz.{name}")
    corpus = PLACE / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.SEEDS):
        (corpus / f"seed-{number:02}").write_bytes(seed)
    places = [] if any(not each.startswith("-") for each in rest) else [str(corpus)]
    atheris.Setup(
        [sys.argv[0], f"-artifact_prefix={PLACE}/{name}-", "-rss_limit_mb=4096", *rest, *places], target.check
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
