"""Ask an advisory service about every package that is installed here, and say in a line what it knows.

Exits 1 if a package has a known vulnerability, and 2 if no service could be asked: then nothing was found out, and a
mirror that knows none of the packages is as good as no service.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

SERVICES: Final = ("pypi", "osv")
OWN: Final = "postbus"
PATIENCE: Final = 15
"""For how many seconds a service may be silent."""


class Verdict(NamedTuple):
    """What a service knows: of how many packages, what of them, and of which nothing."""

    asked: int
    found: list[str]
    unknown: list[str]


def verdict(told: str) -> Verdict | None:
    """Read what pip-audit tells as JSON; None if it could ask about nothing."""
    try:
        packages: list[dict[str, Any]] = json.loads(told)["dependencies"]
    except (ValueError, LookupError, TypeError):
        return None
    known = [each for each in packages if "skip_reason" not in each]
    found = [
        f"{each['name']} {each['version']}: {weak['id']}, mended in {', '.join(weak['fix_versions']) or 'no version'}"
        for each in known
        for weak in each["vulns"]
    ]
    unknown = [each["name"] for each in packages if "skip_reason" in each and each["name"] != OWN]
    return Verdict(len(known), found, unknown) if known else None


def ask(service: str) -> str:
    """Have pip-audit ask a service about this environment; return what it tells."""
    options = (
        "--local",
        "--skip-editable",
        "--format",
        "json",
        "--progress-spinner",
        "off",
        "--timeout",
        str(PATIENCE),
    )
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603  our own arguments


def main(asking: Callable[[str], str] = ask) -> int:
    """Ask one service after the other until one knows something; return the exit code."""
    for service in SERVICES:
        known = verdict(asking(service))
        if known is not None:
            rest = f"; nothing is known of {', '.join(known.unknown)}" if known.unknown else ""
            print(
                "\n".join(
                    [*known.found, f"{service}: {known.asked} packages, {len(known.found)} known to be weak{rest}"]
                )
            )
            return 1 if known.found else 0
    print(
        f"packages not audited: no advisory service can be reached from here ({', '.join(SERVICES)})", file=sys.stderr
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
