"""Signing in: a token once, a cookie from then on. The cookie tells which token, until when, and is sealed."""

import hashlib
import hmac
import secrets
import time
from typing import Final, NamedTuple

from postbus.model import Token
from postbus.tokens import Tokens

__all__ = ["COOKIE", "LASTS", "Sessions", "Visitor"]

COOKIE: Final = "postbus_session"
LASTS: Final = 12 * 3600


class Visitor(NamedTuple):
    """Who looks, and whether they may act."""

    name: str
    may_act: bool


LOCAL: Final = Visitor("dashboard", may_act=True)


class Sessions:
    """Lets those in who hold a good token; without tokens, whoever comes.

    The seal's key is this process's own: sessions end with it, and nothing that is stored anywhere would make one.
    """

    def __init__(self, tokens: Tokens | None) -> None:
        """Begin with a new key."""
        self._tokens = tokens
        self._key = secrets.token_bytes(32)

    @property
    def open(self) -> bool:
        """Whether nobody needs to sign in."""
        return self._tokens is None

    def begin(self, secret: str) -> str | None:
        """Return the cookie for a token that may look; None: it is not known, or may not."""
        token = self._refreshed().find(secret) if self._tokens is not None else None
        return None if token is None or _visitor(token) is None else self._sealed(token.id, int(time.time()) + LASTS)

    def visitor(self, cookie: str | None) -> Visitor | None:
        """Return who has a cookie; None: it is not ours, it is too old, or its token is good no more."""
        if self._tokens is None:
            return LOCAL
        identity, _, rest = (cookie or "").partition(".")
        ends, _, _ = rest.partition(".")
        if not ends.isdecimal() or len(ends) > 12 or int(ends) < time.time():  # noqa: PLR2004  a moment in seconds
            return None
        if not hmac.compare_digest(self._sealed(identity, int(ends)).encode(), (cookie or "").encode()):
            return None
        token = self._refreshed().good(identity)
        return None if token is None else _visitor(token)

    def _refreshed(self) -> Tokens:
        assert self._tokens is not None  # noqa: S101  asked only where there are tokens
        if self._tokens.stale:
            self._tokens.refresh()
        return self._tokens

    def _sealed(self, identity: str, ends: int) -> str:
        told = f"{identity}.{ends}"
        return f"{told}.{hmac.new(self._key, told.encode(), hashlib.sha256).hexdigest()}"


def _visitor(token: Token) -> Visitor | None:
    may_act = "admin" in token.scopes
    return Visitor(f"dashboard:{token.name}", may_act) if may_act or "read" in token.scopes else None
