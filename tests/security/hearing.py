"""All that anybody may hear: log records with every field, errors with their causes, processes with their arguments."""

import io
import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["command_lines", "full_text", "hearing"]


class _Everything(logging.Handler):
    """Writes down whatever is logged, by whomever."""

    def __init__(self, but: str) -> None:
        super().__init__()
        self._but = but
        self.stream = io.StringIO()

    def emit(self, record: logging.LogRecord) -> None:
        if self._but and record.name.startswith(self._but):
            return
        told = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        self.stream.write(f"{record.getMessage()} {vars(record)} {told}\n")


@contextmanager
def hearing(but: str = "") -> Iterator[io.StringIO]:
    """Give all that is logged until the end of the block, from DEBUG up, with every field; less one library's."""
    heard, loggers = _Everything(but), (logging.getLogger(), logging.getLogger("postbus"))
    before = [(each, each.level, each.propagate) for each in loggers]
    for each in loggers:
        each.setLevel(logging.DEBUG)
        each.propagate = True
    loggers[0].addHandler(heard)
    try:
        yield heard.stream
    finally:
        loggers[0].removeHandler(heard)
        for each, level, propagate in before:
            each.setLevel(level)
            each.propagate = propagate


def full_text(error: BaseException, own: str) -> str:
    """Return everything a traceback shows of an error and its causes, their values too; less the lines of one file."""
    texts = traceback.format_exception(error)
    chain: BaseException | None = error
    while chain is not None:
        texts += [repr(chain), str(chain), repr(vars(chain))]
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return "\n".join(text for text in texts if own not in text)


def command_lines(root: int | None = None) -> list[str]:
    """Return how the processes below one (this one) were called, as `ps` shows it to whoever is on the machine."""
    parents: dict[int, int] = {}
    for place in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            stat = (place / "stat").read_text(encoding="utf-8", errors="replace")
            parents[int(place.name)] = int(stat.rpartition(")")[2].split()[1])
    below, grown = {root or os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below, grown = below | more, bool(more)
    found: list[str] = []
    for pid in below - {root or os.getpid()}:
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found
