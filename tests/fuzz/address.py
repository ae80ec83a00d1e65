"""A password in a PostgreSQL URL, whatever stands in it: the URL is read as libpq reads it, or refused; never shown."""

import re
from typing import Final
from urllib.parse import quote, urlsplit

from psycopg import Error
from psycopg.conninfo import conninfo_to_dict

from postbus.errors import InvalidRequest
from postbus.store import shown
from postbus.store.postgres.address import NO_URL

__all__ = ["SEEDS", "check"]

SEEDS: Final = (
    b"8812",
    b"88#12",
    b"88?12",
    b"88/12",
    b"88@12",
    b"88:12",
    b"88%2312",
    b"[88",
    b"88,12",
    b"88\n12",
    b"\x07\0",
    b"88%9912",
)
SHAPES: Final = (
    "postgresql://u:{}@h:5432/d",
    "postgres://u:{}@h/d?sslmode=require&schema=s",
    "postgresql://u:{}@h,i:5433/d",
    "postgresql://u:{}@/d?host=/run",
    "postgresql://u@h/d?password={}",
    "postgresql://u@h/d?sslpassword={}&schema=s",
)
REFUSALS: Final = (NO_URL, "schema= in the URL must be a plain lower-case name")
MARK: Final = "0000"
"""Begins every password: no address has that in it."""


def check(data: bytes) -> None:
    """Put one password into URLs of every shape."""
    password = MARK + data.decode("latin-1")
    for shape in SHAPES:
        url = shape.format(password)
        told = _told(url)
        assert MARK not in told
        if told not in REFUSALS:
            _leads_there(url, told)
    if "\0" not in password:  # which libpq has no place for
        assert shown(f"postgresql://u:{quote(password, safe='')}@h:5432/d") == "postgresql://u@h:5432/d"


def _told(url: str) -> str:
    """Return a URL as it is shown, or why it is refused."""
    try:
        return shown(url)
    except InvalidRequest as error:
        return str(error)


def _leads_there(url: str, told: str) -> None:
    """Compare what is shown with where libpq would go."""
    bare = re.sub(r"[?&]schema=[^&]*", "", url)
    try:
        read = conninfo_to_dict(bare)
    except (Error, UnicodeError):
        return  # `schema=` stood between what else is wrong
    parts = urlsplit(told)
    named = {host.partition(":")[0] for host in parts.netloc.rpartition("@")[2].split(",")} - {""}
    assert named <= set(str(read.get("host")).split(",")), f"{told} is not where {read.get('host')} is"
