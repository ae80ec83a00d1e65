"""Arrays of whole numbers as bytes: ids, places and times of a block, in 0.01 to 8 bytes a number.

Columns come back as bytes, as their digits in JSON, or, where the database has arrays of its own, as lists.

The first byte names the form: a run (`base`, `step` and `count`), or a base followed by the distance of each number
from the one before, in the smallest width that holds all of them. Run times are kept as 32-bit floats.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final, Literal

from postbus.errors import UnsafeStore

RUN: Final = b"r"
HEAD: Final = struct.Struct("<q")
RUN_BODY: Final = struct.Struct("<qqi")
WIDTHS: Final[dict[Literal["b", "h", "i", "q"], int]] = {"b": 7, "h": 15, "i": 31, "q": 63}
"""The forms of an array of distances, and how many bits they hold beside the sign."""


def pack(numbers: Sequence[int]) -> bytes:
    """Return numbers as bytes."""
    distances = [after - before for before, after in pairwise(numbers)]
    low, high = min(distances, default=0), max(distances, default=0)
    first = numbers[0] if numbers else 0
    if low == high:
        return RUN + RUN_BODY.pack(first, low, len(numbers))
    bits = max(high, -low - 1).bit_length()
    form = next(form for form, held in WIDTHS.items() if bits <= held)
    values = array(form, distances)
    if sys.byteorder == "big":
        values.byteswap()
    return form.encode() + HEAD.pack(first) + values.tobytes()


def unpack(data: bytes | str | Sequence[int]) -> Sequence[int]:
    """Return the numbers that `pack` was given, or that the column holds."""
    if isinstance(data, str):
        data = bytes.fromhex(data)
    if not isinstance(data, bytes):
        return data
    form = data[:1]
    if form == RUN:
        first, step, count = RUN_BODY.unpack_from(data, 1)
        return range(first, first + step * count, step) if step else [first] * count
    if (letter := form.decode("latin-1")) not in WIDTHS:
        raise UnsafeStore("the store holds an array of an unknown form: restore it from a backup")
    distances = array(letter)
    distances.frombytes(data[1 + HEAD.size :])
    if sys.byteorder == "big":
        distances.byteswap()
    return list(accumulate(distances, initial=HEAD.unpack_from(data, 1)[0]))


def pack_floats(values: Iterable[float]) -> bytes:
    """Return values as 32-bit floats."""
    floats = array("f", values)
    if sys.byteorder == "big":
        floats.byteswap()
    return floats.tobytes()


def unpack_floats(data: bytes | Sequence[float]) -> list[float]:
    """Return values as they were packed, rounded to the microsecond that a time in milliseconds is kept to."""
    floats: Sequence[float] = data
    if isinstance(data, bytes):
        floats = array("f")
        floats.frombytes(data)
        if sys.byteorder == "big":
            floats.byteswap()
    return [round(value, 3) for value in floats]


def pack_bits(bits: int, count: int) -> bytes:
    """Return a set of places below `count`, held as an integer, as bytes."""
    return bits.to_bytes((count + 7) // 8, "little")


def unpack_bits(data: bytes | str | None) -> int:
    """Return the set of places as an integer."""
    return int.from_bytes(bytes.fromhex(data) if isinstance(data, str) else data or b"", "little")
