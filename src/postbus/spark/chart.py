"""Small charts as HTML with inline SVG, and figures in words: no script, no library, nothing fetched.

The SVG holds only what may be stretched; every word stands beside it as HTML, so that it is as legible on a telephone
as on a wall. Each chart names and describes itself to those who cannot see it, and brings its figures as a table.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from itertools import accumulate, groupby
from math import ceil, floor, log10
from typing import Final, NamedTuple

__all__ = [
    "DASH",
    "Series",
    "bars",
    "clean",
    "count",
    "heat",
    "html_table",
    "length",
    "lines",
    "moment",
    "share",
    "sparkline",
]

WIDTH: Final = 1_000
HEIGHT: Final = 100
BLOCKS: Final = "▁▂▃▄▅▆▇█"
CLASSES: Final = {">": "n", "=": "t"}
DASH: Final = "–"  # noqa: RUF001  the sign for nothing
SECONDS: Final = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
ROUND: Final = (
    *(10.0**power for power in range(-6, 2)), *(60.0, 600.0, 3_600.0, 36_000.0), *(86_400.0 * 10**n for n in range(5)),
)  # fmt: skip
"""Lengths of time that are round to people: 1 µs … 10 s, 1 min, 10 min, 1 h, 10 h, 1 d …"""

Say = Callable[[float], str]


class Series(NamedTuple):
    """A line, or one colour of the bars; `tone` names its colour in the page's style."""

    name: str
    tone: str
    values: Sequence[float | None]


# ── figures in words ─────────────────────────────────────────────────────────────────────────────────────────────


def clean(text: object) -> str:
    """Return text that can neither move a cursor nor turn its neighbours round: events come from anywhere."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(text))


def count(value: float) -> str:
    """Return a count as it stands on an axis: short."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= 10 * size:
            return f"{value / size:,.4g}{unit}"
    return f"{value:,.4g}"


def length(seconds: float | None) -> str:
    """Return a length of time, in the one or two units that suit it."""
    if seconds is None:
        return DASH
    for limit, unit in ((1e-3, "µs"), (1, "ms"), (60, "s")):
        if seconds < limit:
            return f"{seconds / SECONDS[unit]:.3g} {unit}"
    left, parts = round(seconds), list[str]()
    for unit in ("d", "h", "min", "s"):
        whole, left = divmod(left, int(SECONDS[unit]))
        parts += [f"{whole} {unit}"] if whole else []
    return " ".join(parts[:2])


def share(part: float, whole: float) -> str:
    """Return a part of a whole in per cent."""
    return f"{100 * part / whole:.1f} %" if whole else DASH


def moment(when: datetime | None) -> str:
    """Return a moment in UTC."""
    return DASH if when is None else f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return a chart one line high: the highest of each share of the values."""
    step = max(1, ceil(len(values) / width))
    highest = [max(values[place : place + step]) for place in range(0, len(values), step)]
    top = max(highest, default=0) or 1
    return "".join(BLOCKS[min(7, floor(value / top * 7.999))] for value in highest)


# ── charts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def lines(title: str, note: str, times: Sequence[datetime], series: Sequence[Series], say: Say = count) -> str:
    """Return a chart of lines over time: lengths of time on a logarithmic scale, the first of counts filled."""
    scale = _Decades(series) if say is length else _Linear(series)
    shapes = [
        f'<path class="{kind} {each.tone}" d="{path}"/>'
        for each in series
        for kind, path in _paths(each.values, scale, filled=say is count and each is series[0])
    ]
    return _figure(title, note, times, series, scale=scale, shapes=shapes, say=say)


def bars(title: str, note: str, times: Sequence[datetime], series: Sequence[Series]) -> str:
    """Return a chart of bars over time, those of one time on top of each other."""
    values = zip(*(each.values for each in series), strict=True)
    piles = [list(accumulate(value or 0 for value in pile)) for pile in values]
    scale, step = _Linear([Series("", "", [pile[-1] for pile in piles])]), WIDTH / len(times)
    shapes = [
        f'<rect class="bar {each.tone}" x="{(place + 0.1) * step:.1f}" y="{scale.y(pile[number]):.2f}" '
        f'width="{0.8 * step:.1f}" height="{HEIGHT * value / scale.ticks[-1]:.2f}"/>'
        for place, pile in enumerate(piles)
        for number, each in enumerate(series)
        if (value := each.values[place])
    ]
    return _figure(title, note, times, series, scale=scale, shapes=shapes, say=count)


def heat(title: str, note: str, counts: Mapping[str, int], days: Sequence[str]) -> str:
    """Return a week of hours (`Mon 09`), the busier the darker: a table, so that it can be heard as well as seen."""
    top = max(counts.values(), default=0) or 1
    head = "".join(f'<th scope="col">{hour:02d}</th>' for hour in range(24))
    rows = "".join(
        f'<tr><th scope="row">{day}</th>'
        + "".join(_hour(hour, counts.get(hour, 0), top) for hour in (f"{day} {hour:02d}" for hour in range(24)))
        + "</tr>"
        for day in days
    )
    return (
        f'<figure class="wide"><figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>'
        f'<div class="scroll" tabindex="0"><table class="heat"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></figure>"
    )


def _hour(name: str, value: int, top: int) -> str:
    return f'<td style="--heat:{value / top:.2f}" title="{name}:00, {value:,} published"><span>{value}</span></td>'


class _Linear:
    """A scale from nothing to a round number."""

    def __init__(self, series: Iterable[Series]) -> None:
        top = max((value for each in series for value in each.values if value), default=1)
        small = 10 ** floor(log10(max(top, 1)) - 0.5)
        step = next(step for step in (small * factor for factor in (1, 2, 5, 10, 20)) if top <= 4 * step and step >= 1)
        self.ticks = [step * number for number in range(ceil(top / step) + 1)]

    def y(self, value: float) -> float:
        """Return how far from the top a value stands."""
        return HEIGHT * (1 - value / self.ticks[-1])


class _Decades:
    """A scale for lengths of time, on which each step is about ten times the one below."""

    def __init__(self, series: Iterable[Series]) -> None:
        values = [value for each in series for value in each.values if value and value > 0] or [1.0]
        low = max((place for place, tick in enumerate(ROUND) if tick <= min(values)), default=0)
        high = next((place for place, tick in enumerate(ROUND) if tick >= max(values)), len(ROUND) - 1)
        self.ticks = ROUND[min(low, len(ROUND) - 2) : max(high, low + 1) + 1]

    def y(self, value: float) -> float:
        """Return how far from the top a value stands."""
        low, high = log10(self.ticks[0]), log10(self.ticks[-1])
        return HEIGHT * (high - log10(max(value, self.ticks[0]))) / (high - low)


def _paths(values: Sequence[float | None], scale: _Linear | _Decades, *, filled: bool) -> Iterator[tuple[str, str]]:
    """Go through the outlines of a line and its area, a piece for each run of values without a hole; one is a dot."""
    step = WIDTH / len(values)
    points = [None if value is None else ((place + 0.5) * step, scale.y(value)) for place, value in enumerate(values)]
    for present, run in groupby(points, key=lambda each: each is not None):
        if not present:
            continue
        part = [each for each in run if each is not None]
        outline = "L".join(f"{x:.1f} {y:.2f}" for x, y in part)
        if len(part) == 1:
            yield "dot", f"M{outline}h.01"
            continue
        if filled:
            yield "area", f"M{part[0][0]:.1f} {HEIGHT}L{outline}V{HEIGHT}Z"
        yield "line", f"M{outline}"


def _figure(
    title: str,
    note: str,
    times: Sequence[datetime],
    series: Sequence[Series],
    *,
    scale: _Linear | _Decades,
    shapes: Iterable[str],
    say: Say,
) -> str:
    key = "".join(f'<li class="{each.tone}">{escape(each.name)}</li>' for each in series)
    grid = "".join(f'<path class="grid" d="M0 {scale.y(tick):.2f}H{WIDTH}"/>' for tick in scale.ticks)
    labels = "".join(f'<span style="top:{scale.y(tick):.2f}%">{say(tick)}</span>' for tick in scale.ticks)
    told = [
        [_time(when, times), *(_say(each.values[place], say) for each in series)] for place, when in enumerate(times)
    ]
    table = html_table(["=time (UTC)", *(f">{each.name}" for each in series)], told)
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>"
        f'<ul class="key">{key}</ul><div class="plot"><div class="y" aria-hidden="true">{labels}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(_described(note, series, say))}</desc>"
        f"{grid}{''.join(shapes)}{_hints(told, series)}</svg></div>"
        f'<div class="x" aria-hidden="true">{_axis(times)}</div>'
        f"<details><summary>The figures</summary>{table}</details></figure>"
    )


def _hints(told: Sequence[Sequence[str]], series: Sequence[Series]) -> str:
    """Return what is shown under the pointer: invisible bars, each with the figures of its time."""
    step = WIDTH / len(told)
    size = f'width="{step:.1f}" height="{HEIGHT}"'
    texts = (
        f"{row[0]}: " + ", ".join(f"{each.name} {text}" for each, text in zip(series, row[1:], strict=True))
        for row in told
    )
    return "".join(
        f'<rect class="hint" x="{place * step:.1f}" {size}><title>{escape(text)}</title></rect>'
        for place, text in enumerate(texts)
    )


def _described(note: str, series: Sequence[Series], say: Say) -> str:
    """Return what a chart shows, for those who hear it."""
    highest = ((each.name, max((value for value in each.values if value is not None), default=None)) for each in series)
    return f"{note}. Highest: " + "; ".join(f"{name} {_say(value, say)}" for name, value in highest)


def _say(value: float | None, say: Say) -> str:
    return DASH if value is None else f"{value:,.0f}" if say is count else say(value)


def _time(when: datetime, times: Sequence[datetime]) -> str:
    if times[-1] - times[0] < timedelta(days=1):
        return f"{when:%H:%M}"
    whole_days = all(not each.hour for each in times[:2])
    return f"{when:%d %b}" if whole_days else f"{when:%d %b %H:%M}"


def _axis(times: Sequence[datetime]) -> str:
    places = sorted({round(part * (len(times) - 1) / 4) for part in range(5)})
    labels = ((100 * (place + 0.5) / len(times), _time(times[place], times)) for place in places)
    return "".join(f'<span style="left:{left:.2f}%">{label}</span>' for left, label in labels)


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a column whose name begins with `>` holds figures, with `=` something not to be broken."""
    kinds = [f' class="{CLASSES[name[0]]}"' if name[:1] in CLASSES else "" for name in columns]
    names = (escape(name.lstrip(">=")) for name in columns)
    head = "".join(f'<th scope="col"{kind}>{name}</th>' for name, kind in zip(names, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(clean(cell))}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
