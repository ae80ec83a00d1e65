"""The requirements page: every number is held by a test, and the page says so truly."""

import sys
from pathlib import Path

import pytest

from tools.requirements_page import GROUPS, KNOWN, PAGE, ROOT, UnknownNumber, claims, held, main, render


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a project without tests."""
    (tmp_path / "tests").mkdir()
    return tmp_path


def write_test(project: Path, source: str, name: str = "test_it.py") -> None:
    """Put one test file into the project."""
    (project / "tests" / name).write_text(source, encoding="utf-8")


def test_every_requirement_of_the_first_three_documents_is_named_by_a_test():
    """No number of the groups zero, one and two is left without a test."""
    named = held(ROOT)
    assert [number for number in sorted(KNOWN) if number.startswith("S") and number not in named] == []


def test_the_committed_page_is_current():
    """The page in the repository is the one the tests give."""
    assert main(["--check"]) == 0


def test_every_test_has_a_docstring():
    """A test without a sentence claims nothing."""
    assert [claim.test for claim in claims(ROOT) if not claim.docstring.strip()] == []


def test_the_tables_hold_every_number_once_and_in_order():
    """The groups count from their first number to their last without a hole."""
    counts = [("S0.", range(1, 11)), ("S1.", range(1, 21)), ("S2.", range(1, 6)), ("I", range(1, 19))]
    assert [list(group) for group in GROUPS.values()] == [[f"{prefix}{n}" for n in span] for prefix, span in counts]


def test_a_number_in_a_docstring_is_found_in_functions_and_classes(project: Path):
    """Plain, asynchronous and grouped tests all count."""
    write_test(
        project,
        'def test_a():\n    """A (S1.9)."""\n'
        'async def test_b():\n    """B (S1.9, I8)."""\n'
        'class TestC:\n    def test_d(self):\n        """D (I8)."""\n',
    )
    assert held(project) == {
        "S1.9": ["tests/test_it.py::test_a", "tests/test_it.py::test_b"],
        "I8": ["tests/test_it.py::test_b", "tests/test_it.py::TestC::test_d"],
    }


def test_a_state_machine_holds_what_its_rules_name(project: Path):
    """A Hypothesis machine is one test, whose rules and invariants speak for it."""
    write_test(
        project,
        'class Machine(RuleBasedStateMachine):\n    """All of it (I7)."""\n'
        '    @rule()\n    def settle(self):\n        """Settle late (I8)."""\n'
        "TestMachine = Machine.TestCase\n",
    )
    assert held(project) == {"I7": ["tests/test_it.py::TestMachine"], "I8": ["tests/test_it.py::TestMachine"]}


def test_helpers_comments_and_code_hold_nothing(project: Path):
    """Only the docstring of a test is a claim."""
    write_test(project, '# S1.1\ndef helper():\n    """For S1.2."""\ndef test_a():\n    """A."""\n    "S1.3"\n')
    assert held(project) == {}


def test_a_longer_number_is_not_taken_for_a_shorter_one(project: Path):
    """Ten is not one."""
    write_test(project, 'def test_a():\n    """A (S0.10, I10)."""\n')
    assert set(held(project)) == {"S0.10", "I10"}


@pytest.mark.parametrize("number", ["S0.11", "S1.0", "S2.6", "I19"])
def test_a_number_that_does_not_exist_is_refused(project: Path, number: str, capsys: pytest.CaptureFixture[str]):
    """A slip in a docstring is an error that names the test."""
    write_test(project, f'def test_a():\n    """A ({number})."""\n')
    with pytest.raises(UnknownNumber):
        held(project)
    assert main([], root=project) == 1
    assert f"test_a names {number}" in capsys.readouterr().err


def test_reading_the_tests_runs_none_of_them(project: Path):
    """The files are parsed, never imported."""
    write_test(project, 'raise SystemExit("imported")\ndef test_a():\n    """A (S2.1)."""\n', name="test_trap.py")
    assert "S2.1" in held(project)
    assert "test_trap" not in sys.modules


def test_the_check_tells_a_stale_page_from_a_current_one(project: Path, capsys: pytest.CaptureFixture[str]):
    """Missing and stale pages are refused with the remedy, and nothing is written; a current one passes."""
    assert main(["--check"], root=project) == 1
    assert not (project / PAGE).exists()
    assert main([], root=project) == 0
    assert main(["--check"], root=project) == 0
    write_test(project, 'def test_a():\n    """A (S2.1)."""\n')
    assert main(["--check"], root=project) == 1
    assert "make docs" in capsys.readouterr().err


def test_the_page_shows_what_is_held_and_what_is_not():
    """A row lists its tests by path and name, or says that there is none."""
    page = render({"S0.1": ["tests/a.py::test_a", "tests/b.py::test_b"]})
    rows = {row.split(" | ")[0]: row for row in page.splitlines() if row.startswith("| ")}
    assert rows["| S0.1"].endswith("| `tests/a.py::test_a`<br>`tests/b.py::test_b` |")
    assert rows["| S0.2"].endswith("| no test yet |")
