"""Who may do what: bearer tokens with scopes, kept as SHA-256, compared in constant time, denied by default."""

import hashlib
import hmac
import secrets
import time
from datetime import datetime, timedelta
from typing import Final, Literal
from uuid import uuid4

from postbus.errors import InvalidRequest
from postbus.model import Token
from postbus.store.contract import Log

__all__ = ["SCOPES", "Scope", "Tokens", "make_token"]

Scope = Literal["open", "publish", "work", "read", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("publish", "work", "read", "admin")
PREFIX: Final = "postbus"
REMEMBER: Final = 2.0
"""For how long, in seconds, a token that was revoked may still be let in."""
MAX_NAME: Final = 255


def make_token(
    store: Log, name: str, scopes: list[str] | tuple[str, ...], expires_in: timedelta | None = None
) -> tuple[Token, str]:
    """Make a token and keep its digest; return it, and the secret that its owner sends, which is shown only now."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise InvalidRequest(f"a token's name is printable text of up to {MAX_NAME} characters")
    if unknown := sorted(set(scopes) - set(SCOPES)):
        raise InvalidRequest(f"there is no scope {', '.join(unknown)}; there are {', '.join(SCOPES)}")
    if not scopes:
        raise InvalidRequest(f"a token needs a scope: {', '.join(SCOPES)}")
    if expires_in is not None and expires_in <= timedelta(0):
        raise InvalidRequest("a token expires in the future, not in the past")
    identity, secret, now = uuid4().hex[:12], secrets.token_urlsafe(32), store.now()
    ends = None if expires_in is None else now + expires_in
    wanted = tuple(each for each in SCOPES if each in scopes)
    token = Token(identity, name, _digest(secret), wanted, now, ends)
    store.add_token(token)
    return token, f"{PREFIX}_{identity}_{secret}"


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Tokens:
    """The tokens of a store, looked up again every few seconds."""

    def __init__(self, store: Log) -> None:
        """Look at nothing yet."""
        self._store = store
        self._known: dict[str, Token] = {}
        self._now: datetime | None = None
        self._looked = -REMEMBER

    @property
    def stale(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked > REMEMBER

    def refresh(self) -> None:
        """Look at the store."""
        self._known = {each.id: each for each in self._store.tokens()}
        self._now = self._store.now()
        self._looked = time.monotonic()

    def any_good(self) -> bool:
        """Return whether anybody could be let in."""
        return self._now is not None and any(each.is_good(self._now) for each in self._known.values())

    def scopes(self, secret: str) -> tuple[str, ...] | None:
        """Return what a token allows; None: it is not known, or not good any more."""
        token = self.find(secret)
        return None if token is None else token.scopes

    def find(self, secret: str) -> Token | None:
        """Return the token that a secret belongs to; None: it is not known, or not good any more."""
        prefix, _, rest = secret.partition("_")
        identity, _, key = rest.partition("_")
        token = self._known.get(identity)
        digest = token.digest if token is not None else "0" * 64
        same = hmac.compare_digest(_digest(key), digest)
        return self.good(identity) if same and prefix == PREFIX else None

    def good(self, identity: str) -> Token | None:
        """Return a token by its id; None: it is not known, or not good any more."""
        token = self._known.get(identity)
        if token is None or self._now is None:
            return None
        return token if token.is_good(self._now + timedelta(seconds=time.monotonic() - self._looked)) else None

    @staticmethod
    def allows(scopes: tuple[str, ...], wanted: Scope) -> bool:
        """Return whether the scope that is wanted is among them: no scope stands for another."""
        return wanted == "open" or wanted in scopes
