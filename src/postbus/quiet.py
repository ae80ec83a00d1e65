"""Putting off the search for garbage, where thousands of values are made and none of them is any."""

import gc
import os
import threading
from typing import Final

__all__ = ["UNDISTURBED"]


class _Undisturbed:
    """A block in which no garbage is searched for. Several threads may be in one, and none leaves it off for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._wanted = True

    def after_fork(self) -> None:
        """Have what another thread of the parent was in the midst of come to an end."""
        was, self._lock = self._inside, threading.Lock()
        self._inside = 0
        if was and self._wanted:
            gc.enable()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._wanted = gc.isenabled()
            self._inside += 1
            gc.disable()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside = max(0, self._inside - 1)
            if self._wanted:  # though others be inside: where somebody always is, it must be searched for all the same
                gc.enable()


UNDISTURBED: Final = _Undisturbed()
os.register_at_fork(after_in_child=UNDISTURBED.after_fork)
