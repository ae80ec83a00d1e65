"""One sample in one fresh process, so that no thread, cache or garbage of one subject disturbs another.

`python -m bench.child module:function '{"argument": 1}'` prints what the function returns as one line of JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from bench.measure import Call

__all__ = ["LONGEST", "run", "start"]

ROOT: Final = Path(__file__).resolve().parent.parent
LONGEST: Final = 1_800.0


def run(call: Call, folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, float]:
    """Run a call in a process of its own, with `folder` as its working directory; raise if it fails or hangs."""
    process = start(call, folder, environment)
    try:
        out, _ = process.communicate(timeout=LONGEST)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode:
        raise RuntimeError(f"{call.target} {dict(call.arguments)} ended with code {process.returncode}")
    return json.loads(out.splitlines()[-1])


def start(
    call: Call, folder: Path, environment: Mapping[str, str] = MappingProxyType({}), stdin: int | None = None
) -> subprocess.Popen[str]:
    """Start a call and return its process; what it says on standard error is seen, standard output can be read."""
    return subprocess.Popen(  # noqa: S603  this very program
        [sys.executable, "-m", "bench.child", call.target, json.dumps(dict(call.arguments))],
        cwd=folder,
        env=_environment(os.environ) | dict(environment),
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
    )


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without settings that would make this run differ from another's."""
    kept = {name: value for name, value in given.items() if not name.startswith(("POSTBUS_", "PYTHON"))}
    return kept | {"PYTHONPATH": str(ROOT)}


def main(target: str, arguments: str) -> None:
    """Call the function named and print its figures."""
    module, _, name = target.partition(":")
    figures: Any = getattr(import_module(module), name)(**json.loads(arguments))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
