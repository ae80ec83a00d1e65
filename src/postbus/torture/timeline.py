"""A trial as a picture: who did what and when, what was done to them, and which promises were broken."""

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from postbus.torture.checker import RULES
from postbus.torture.history import Entry, answers
from postbus.torture.trial import Result

__all__ = ["page"]

WIDTH: Final = 1_100
LEFT: Final = 130
LANE: Final = 26
TOP: Final = 18
MOST: Final = 20_000
"""How many calls are drawn: of more, every n-th."""
STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #6a737d; --line: #d0d7de; --paper: #fff;
        --ok: #2c8a4b; --fail: #8a8f98; --unknown: #c2410c; --strike: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4ae; --line: #30363d; --paper: #0d1117;
        --ok: #4cc474; --fail: #8b949e; --unknown: #f0883e; --strike: #ff7b72; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 1120px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } p { margin: .3rem 0; } .soft { color: var(--soft); }
svg { width: 100%; height: auto; display: block; margin: 1rem 0; } text { font-size: 12px; fill: var(--ink); }
.lane { stroke: var(--line); } .ok { fill: var(--ok); } .fail { fill: var(--fail); } .unknown { fill: var(--unknown); }
.strike { stroke: var(--strike); stroke-dasharray: 3 3; } table { border-collapse: collapse; margin: .6rem 0; }
td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top; } .n { text-align: right; }
.bad { color: var(--strike); font-weight: 600; }
"""


def page(result: Result, history: Sequence[Entry], what: str, holds: str) -> str:
    """Return a page of its own, which asks nothing of any other host."""
    title = f"{escape(result.fault)} on {escape(result.store)}"
    clean = result.is_clean
    told = "every promise was kept" if clean else f"{len(result.verdicts):,} promises were broken"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}: {told}</title><style>{STYLE}</style></head><body>"
        f"<h1>{title}: <span class='{'' if clean else 'bad'}'>{told}</span></h1>"
        f"<p>{escape(what)}. Must hold: {escape(holds)}.</p>"
        f"<p class='soft'>Seed {escape(result.seed)}; {result.strikes} times; {result.events:,} events, "
        f"{result.executions:,} executions, {result.repeated:,} of them repeated with a cause; {result.unknown:,} "
        f"calls without an answer; at work again after {result.back:.1f} s at most.</p>"
        f"{''.join(_picture(history))}{''.join(_key())}{''.join(_strikes(history))}{''.join(_verdicts(result))}"
        "</body></html>"
    )


def _picture(history: Sequence[Entry]) -> Iterator[str]:
    calls = [entry for entry in answers(history) if entry.op != "strike"]
    if not calls:
        return
    begin, end = history[0].at, max(entry.at for entry in history)
    lanes = {name: place for place, name in enumerate(sorted({entry.who for entry in calls}))}
    height = TOP + LANE * len(lanes) + 24

    def across(moment: float) -> float:
        return LEFT + (WIDTH - LEFT) * (moment - begin) / max(end - begin, 0.001)

    yield f"<svg viewBox='0 0 {WIDTH} {height}' role='img' aria-label='Calls of each process over time'>"
    for name, place in lanes.items():
        y = TOP + LANE * place + LANE // 2
        yield f"<line class='lane' x1='{LEFT}' x2='{WIDTH}' y1='{y}' y2='{y}'/>"
        yield f"<text x='0' y='{y + 4}'>{escape(name)}</text>"
    for entry in calls[:: len(calls) // MOST + 1]:
        y = TOP + LANE * lanes[entry.who] + LANE // 2
        wide, high = (2, 8) if entry.kind == "ok" else (3, 14)
        place = f"x='{across(entry.at):.1f}' y='{y - high // 2}' width='{wide}' height='{high}'"
        what = f"{entry.at - begin:.3f} s {entry.who} {entry.op} {entry.kind}"
        yield f"<rect class='{entry.kind}' {place}><title>{escape(what)}</title></rect>"
    for entry in history:
        if entry.op == "strike":
            x = across(entry.at)
            yield f"<line class='strike' x1='{x:.1f}' x2='{x:.1f}' y1='0' y2='{height - 20}'>"
            yield f"<title>{entry.at - begin:.3f} s {escape(entry.told['what'])}</title></line>"
    for part in range(5):
        moment = begin + (end - begin) * part / 4
        anchor = ("start", "middle", "middle", "middle", "end")[part]
        yield f"<text x='{across(moment):.0f}' y='{height - 4}' text-anchor='{anchor}'>{moment - begin:.1f} s</text>"
    yield "</svg>"


def _key() -> Iterator[str]:
    yield "<p class='soft'>Green: answered. Grey, taller: refused. Orange: no answer, may have happened. "
    yield "Red, dashed: what was done to them. Point at a mark to read it.</p>"


def _strikes(history: Sequence[Entry]) -> Iterator[str]:
    struck = [entry for entry in history if entry.op == "strike"]
    if struck:
        yield "<h2>What was done</h2><table>"
        for entry in struck[:500]:
            yield f"<tr><td class='n'>{entry.at - history[0].at:.3f} s</td><td>{escape(entry.told['what'])}</td></tr>"
        yield "</table>"


def _verdicts(result: Result) -> Iterator[str]:
    if result.is_clean:
        return
    yield "<h2>Broken promises</h2><table>"
    for rule, count in Counter(each.rule for each in result.verdicts).most_common():
        yield f"<tr><td class='bad'>{rule}</td><td class='n'>{count:,}</td><td>{escape(RULES[rule])}</td></tr>"
    yield "</table><table>"
    for each in result.verdicts[:200]:
        yield f"<tr><td class='bad'>{each.rule}</td><td>{escape(each.detail)}</td></tr>"
    yield "</table>"
