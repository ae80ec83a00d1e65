"""What becomes of open files when a process forks: the child may open them where the parent had closed them for that.

SQLite keeps in memory which locks the process holds. The child has a copy of that, and none of the locks: others would
take it for absent, and remove the WAL while it writes. To close a connection of its parent's would undo what that is in
the midst of. So every store that nobody is using closes its connections while its process forks. What is in use stays
open: the child leaves it alone, and is refused the file.
"""

import ctypes
import os
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakSet, WeakValueDictionary

from postbus.errors import PostbusError
from postbus.store.sqlite import wal_index

if TYPE_CHECKING:
    from postbus.store.sqlite.connection import Database
    from postbus.store.sqlite.store import SqliteStore

STORES: Final["WeakValueDictionary[int, SqliteStore]"] = WeakValueDictionary()
OPEN: Final["WeakSet[Database]"] = WeakSet()
"""The connections that this process has opened."""
INHERITED: Final[set[wal_index.File]] = set()
"""The files that the parent had open when this process was forked."""
_closed: Final[dict[int, ExitStack]] = {}
"""What is closed while a thread forks."""


def _before() -> None:
    held = _closed[threading.get_ident()] = ExitStack()
    for reference in STORES.valuerefs():
        if (store := reference()) is not None:
            with suppress(PostbusError):  # it is in use
                held.enter_context(store.forking())


def _after() -> None:
    _closed.pop(threading.get_ident()).close()


def _after_in_child() -> None:
    for each in list(OPEN):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # never collected, which would close it
        if each.file is not None:
            INHERITED.add(each.file)
    OPEN.clear()
    wal_index.leave_to_parent()
    _after()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
