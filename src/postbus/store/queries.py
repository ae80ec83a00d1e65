"""Named SQL: every statement stands in its dialect's `queries.sql`, under `-- name: …`, with its reason."""

import re
from importlib import resources
from typing import Final

_NAME: Final = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)
_MIGRATION: Final = re.compile(r"(\d{4})_\w+\.sql")


def load_queries(package: str) -> dict[str, str]:
    """Return the statements of a dialect's package by name; a name used twice is an error."""
    text = resources.files(package).joinpath("queries.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(text)
    names = parts[::2]
    if len(set(names)) != len(names):
        raise ValueError(f"{package}: a query name is used twice")
    return {name: _strip(body) for name, body in zip(names, parts[1::2], strict=True)}


def _strip(body: str) -> str:
    lines = (line for line in body.splitlines() if not line.startswith("--"))
    return "\n".join(lines).strip().rstrip(";")


def load_migrations(package: str) -> list[tuple[int, str, str]]:
    """Return a dialect's migrations as (number, file name, SQL), numbered from 1 without a hole."""
    folder = resources.files(package).joinpath("migrations")
    names = sorted(entry.name for entry in folder.iterdir() if _MIGRATION.fullmatch(entry.name))
    numbers = [int(name[:4]) for name in names]
    if numbers != list(range(1, len(names) + 1)):
        raise ValueError(f"{package}: migrations are not numbered 1, 2, 3 …: {numbers}")
    return [
        (number, name, folder.joinpath(name).read_text(encoding="utf-8"))
        for number, name in zip(numbers, names, strict=True)
    ]
