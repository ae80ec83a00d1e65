"""The HTTP queue: any language publishes, works and follows."""

from postbus.http.app import create_app

__all__ = ["create_app"]
