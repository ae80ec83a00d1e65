"""The HTTP queue: any language publishes, works and follows; and postbus itself, from elsewhere."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from postbus.http.app import create_app
    from postbus.http.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "create_app"]

_WHERE: Final = {
    "create_app": "postbus.http.app",
    "Client": "postbus.http.client",
    "AsyncClient": "postbus.http.client",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for: a client needs nothing of what a server needs."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
