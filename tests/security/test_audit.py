"""`make audit`: what a service tells is told, and silence is not taken for good news."""

import json
from typing import Any

import pytest

from tools.audit import SERVICES, main

GOOD = {"name": "a", "version": "1", "vulns": []}
WEAK = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "c", "skip_reason": "not found on PyPI and could not be audited"}
OWN = {"name": "postbus", "skip_reason": "distribution marked as editable"}


def told(*packages: dict[str, Any]) -> str:
    """Return what pip-audit writes."""
    return json.dumps({"dependencies": packages, "fixes": []})


@pytest.mark.parametrize(
    ("answers", "code", "said"),
    [
        ([told(GOOD, OWN)], 0, "pypi: 1 packages, 0 known to be weak\n"),
        ([told(GOOD, WEAK, UNKNOWN)], 1, "b 2: PYSEC-1, mended in 2.1\n"),
        ([told(UNKNOWN, OWN), told(GOOD)], 0, "osv: 1 packages"),
        (["", told(WEAK)], 1, "osv: 1 packages, 1 known to be weak"),
    ],
)
def test_what_a_service_knows_is_told(answers: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]):
    """The next one is asked where the first knows nothing."""
    left = iter(answers)
    assert main(lambda _: next(left)) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["", "not JSON", "{}", told(), told(UNKNOWN, OWN)])
def test_no_answer_is_no_clean_bill(answer: str, capsys: pytest.CaptureFixture[str]):
    """Where nobody could be asked, or knows a single package, one line says so and the exit code is 2."""
    asked: list[str] = []
    assert main(lambda service: asked.append(service) or answer) == 2
    assert tuple(asked) == SERVICES
    assert capsys.readouterr().err == (
        "packages not audited: no advisory service can be reached from here (pypi, osv)\n"
    )
