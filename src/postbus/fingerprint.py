"""What messages of the same error have in common."""

import re
from typing import Final

from postbus.model import AttemptError

__all__ = ["FOLDS", "LONGEST_MESSAGE", "cause", "fingerprint"]

LONGEST_MESSAGE: Final = 1_000
FOLDS: Final = (
    (r"""(?<!\w)'[^'\n]*+'(?!\w)|"[^"\n]*+"|`[^`\n]*+`""", "<text>"),
    (r"(?i)\b[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}\b", "<uuid>"),
    (r"\b[A-Za-z][\w+.-]*+://[^\s<>]++", "<url>"),
    (r"[\w.+-]++@[\w-]++(?:\.[\w-]++)++", "<email>"),
    (r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?", "<time>"),
    (r"(?<![\w/<])(?:~|\.{1,2})?(?:/[\w.@%+=-]++){2,}+/?|\b[A-Za-z]:\\[^\s:]++", "<path>"),
    (r"(?i)\b0x[0-9a-f]++|\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{8,}+\b", "<hex>"),
    (r"(?:(?<![\w>])[-+])?\d++(?:[.,:]\d++)*+", "<n>"),
    (r"\s++", " "),
)
"""What is folded into what, in this order; the same expressions hold in Python and in Spark's Java."""
_FOLDS: Final = tuple((re.compile(pattern, re.ASCII), folded) for pattern, folded in FOLDS)


def fingerprint(message: str, worker: str | None = None) -> str:
    """Return a message with its ids, numbers, quoted text, paths and the like folded."""
    text = message[:LONGEST_MESSAGE]
    if worker:
        text = text.replace(worker, "<worker>")
    for pattern, folded in _FOLDS:
        text = pattern.sub(folded, text)
    return text.strip()


def cause(error: AttemptError | None) -> tuple[str, str]:
    """Return what kind of error it was, and its message folded."""
    return ("", "no error was recorded") if error is None else (error.type, fingerprint(error.message, error.worker_id))
