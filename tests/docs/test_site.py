"""The site is built without a warning, loads nothing from elsewhere, and says what the repository says."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tools import llms_page
from tools.requirements_page import claims
from tools.site_hooks import site_link

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"
LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src", "use": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `mkdocs build --strict` does, once for all tests of this file."""
    made = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", made],
        check=False,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert "WARNING" not in ran.stderr
    return made


class Loads(HTMLParser):
    """Gathers what a page has a browser load."""

    def __init__(self, page: Path) -> None:
        """Read the page."""
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element loads; a link only if it is not one to follow."""
        given = dict(attrs)
        if tag in LOADS and given.get("rel") not in {"canonical", "next", "prev"}:
            self.found += [given.get(LOADS[tag]) or ""]
        self.found += re.findall(r"url\(([^)]+)\)", given.get("style") or "")

    def handle_data(self, data: str) -> None:
        """Note what a style or script on the page itself loads."""
        if self.cdata_elem is not None:
            self.found += re.findall(r"(?:url|import)\(?[\"' (]*((?:https?:)?//[^\"')\s]+)", data)


def is_elsewhere(address: str) -> bool:
    """Return whether an address leads to another host."""
    return re.match(r"[\"' ]*(https?:)?//", address) is not None


def test_every_page_is_built_and_reached_from_the_navigation(site: Path):
    """Each Markdown file is a page, beside which it lies as it is, and `llms.txt` names it."""
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(llms_page.BESIDE)
    assert pages == {path.relative_to(site).as_posix() for path in site.rglob("*.md")}
    assert all((site / page).with_suffix(".html").is_file() for page in pages)
    named = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", (site / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(pages)


def test_no_page_loads_anything_from_another_host(site: Path):
    """Scripts, styles, fonts and pictures all lie in the site itself."""
    for page in site.rglob("*.html"):
        assert [each for each in Loads(page).found if is_elsewhere(each)] == [], page
    for style in site.rglob("*.css"):
        loads = re.findall(r"url\(([^)]+)\)", style.read_text(encoding="utf-8"))
        assert [each for each in loads if is_elsewhere(each)] == [], style


def test_lists_and_tables_are_not_swallowed_by_paragraphs(site: Path):
    """GitHub begins a list without an empty line before it, the site does not."""
    for page in site.rglob("*.html"):
        paragraphs = re.findall(r"<p>(.*?)</p>", page.read_text(encoding="utf-8"), re.DOTALL)
        assert [text for text in paragraphs if re.search(r"^(- |\||```)", text, re.MULTILINE)] == [], page


def test_the_theme_finds_no_mermaid_to_draw(site: Path):
    """It would fetch the program for that from another host; the drawing stands on the page instead."""
    for page in site.rglob("*.html"):
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8"), page
    assert "<svg" in (site / "state_machine.html").read_text(encoding="utf-8").partition('class="moves"')[0]


def test_the_drawing_of_the_states_is_that_of_the_page():
    """Every arrow of the diagram GitHub draws is on the site's, and none more."""
    diagram = (DOCS / "state_machine.md").read_text(encoding="utf-8").partition("```mermaid\n")[2].partition("```")[0]
    told = sorted(re.findall(r"-->.*?: (.+)$", diagram, re.MULTILINE))
    tree = ET.parse(DOCS / "images" / "states.svg")  # noqa: S314  a file of our own
    moves = tree.find(f".//{SVG}g[@class='moves']")
    assert moves is not None
    assert sorted(" ".join("".join(text.itertext()).split()) for text in moves) == told


def test_llms_txt_is_current(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The file in the repository is the one the pages give; one that is not is refused, with the remedy."""
    assert llms_page.main(["--check"]) == 0
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: s\nsite_description: d\nnav: [{Home: a.md}]\n", encoding="utf-8")
    page = "# A\n\n```sh\nx\n```\n\nIt [holds](b.md)\nthis.\n\n## B\n"
    (tmp_path / "docs" / "a.md").write_text(page, encoding="utf-8")
    assert llms_page.main(["--check"], root=tmp_path) == 1
    assert "make docs" in capsys.readouterr().err
    assert llms_page.main([], root=tmp_path) == 0
    assert llms_page.main(["--check"], root=tmp_path) == 0
    assert "- [Home](a.md): It holds this. Sections: B." in (tmp_path / llms_page.PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("target", "page", "there"),
    [
        ("../CHANGELOG.md", "upgrading.md", "changelog.md"),
        ("../SECURITY.md", "threat-model.md", "security.md"),
        ("docs/threat-model.md", "security.md", "threat-model.md"),
        ("../../CONTRIBUTING.md", "howto/django.md", "../contributing.md"),
        ("docs/requirements.md", "contributing.md", "requirements.md"),
        ("CHANGELOG.md", "contributing.md", "changelog.md"),
        ("handlers.md", "index.md", "handlers.md"),
        ("https://example.org/CHANGELOG.md", "index.md", "https://example.org/CHANGELOG.md"),
    ],
)
def test_links_that_hold_on_github_hold_on_the_site(target: str, page: str, there: str):
    """The two pages that lie beside docs/ are found from everywhere, and find the others."""
    assert site_link(target, page) == there


def test_the_comparison_tells_the_figures_of_the_benchmark():
    """No figure stands there that the program which measures has not written."""
    figure = re.compile(r"[\d,.]*\d(?:/s| ms| x)")
    told = figure.findall((DOCS / "comparison.md").read_text(encoding="utf-8"))
    assert told
    assert set(told) <= set(figure.findall((DOCS / "benchmarks.md").read_text(encoding="utf-8")))


def test_every_test_the_guarantees_name_exists():
    """A promise leads to its proof."""
    named = re.findall(r"`(tests/[^`:]+::\w+)`", (DOCS / "guarantees.md").read_text(encoding="utf-8"))
    assert named
    assert set(named) <= {claim.test for claim in claims(ROOT)}


def test_every_test_the_threat_model_names_exists():
    """What stops a threat is shown by a test, or by a file of them."""
    named = re.findall(r"`(tests/[^`:]+\.py)(?:::(\w+))?`", (DOCS / "threat-model.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [each for each in named if f"def {each[1]}" not in (ROOT / each[0]).read_text(encoding="utf-8")] == []


def test_the_layers_of_the_architecture_page_are_those_that_are_enforced():
    """The picture is the contract of import-linter."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    picture = page.partition("## Layers")[2].partition("```text\n")[2].partition("```")[0]
    drawn = [set(re.split(r" {2,}", line)[0].split(" · ")) for line in picture.splitlines()]
    enforced = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    assert drawn == [set(re.findall(r"\w+", layer)) for layer in enforced[0]["layers"]]


def test_every_public_name_is_on_the_reference_page(site: Path):
    """What `from postbus import …` offers is explained."""
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    places = set(re.findall(r'id="([\w.]+)"', page))
    assert [name for name in _public() if not any(place.endswith(f".{name}") for place in places)] == []


def _public() -> Iterator[str]:
    text = (ROOT / "src" / "postbus" / "__init__.py").read_text(encoding="utf-8")
    yield from re.findall(r'^    "(\w+)",$', text.partition("__all__")[2], re.MULTILINE)
