"""docs/observability.md tells of the metrics that there are; tests/docs runs its examples."""

import re
from pathlib import Path

from postbus.figures import METRICS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
MARKS = {"both": "", "server": " ¹", "worker": " ²"}


def test_the_table_of_the_page_is_the_table_of_the_code():
    """Row by row: name, who tells it, kind, labels and meaning."""
    rows = re.findall(r"^\| `postbus_.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert told == [
        [f"`{each.name}`{MARKS[each.where]}", each.kind, ", ".join(f"`{name}`" for name in each.labels), each.help]
        for each in METRICS
    ]
