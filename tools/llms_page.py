"""Write docs/llms.txt: a line a page with what it holds, for readers that are programs.

The order is that of the navigation in mkdocs.yml; a line is a page's first paragraph and the titles of its sections.
With `--check` it writes nothing, and exits 1 if the file in the repository is not the one the pages give.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = Path("docs/llms.txt")
BESIDE: Final = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
"""Pages of the site that lie beside docs/; see tools/site_hooks.py."""

_ASIDE: Final = re.compile(r"^```.*?^```$|<!--.*?-->|^:::.*?(?=^\S)", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^(#+) (.*)$", re.MULTILINE)
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


class Entry(NamedTuple):
    """A page of the navigation: the section it stands in ("" for none), its title there, and its file."""

    section: str
    title: str
    page: str


def entries(nav: Sequence[dict[str, Any]], section: str = "") -> Iterator[Entry]:
    """Go through the pages of a navigation, in its order."""
    for each in nav:
        for title, below in each.items():
            if isinstance(below, str):
                yield Entry(section, title, below)
            else:
                yield from entries(below, title)


def first_paragraph(text: str) -> str:
    """Return the first paragraph of a page on one line, without links: no heading, table, list, picture or code."""
    for block in re.split(r"\n\s*\n", _HEADING.sub("\n", _ASIDE.sub("", text))):
        told = " ".join(_LINK.sub(r"\1", block).split())
        if told and told[0] not in "|-#!<":
            return f"{told[:-1]}." if told.endswith(":") else told
    return ""


def sections(text: str) -> list[str]:
    """Return the titles of a page's sections."""
    return [title for marks, title in _HEADING.findall(_ASIDE.sub("", text)) if marks == "##"]


def render(root: Path) -> str:
    """Return the file."""
    site: dict[str, Any] = yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))
    lines, standing = [f"# {site['site_name']}", "", f"> {site['site_description']}", ""], ""
    for entry in entries(site["nav"]):
        if entry.section != standing:
            lines += ["", f"## {entry.section or 'More'}", ""]
        standing = entry.section
        lines.append(_line(root, entry))
    return "\n".join(lines) + "\n"


def _line(root: Path, entry: Entry) -> str:
    path = root / BESIDE[entry.page] if entry.page in BESIDE else root / "docs" / entry.page
    text = path.read_text(encoding="utf-8")
    held = "; ".join(sections(text))
    return f"- [{entry.title}]({entry.page}): {first_paragraph(text)}" + (f" Sections: {held}." if held else "")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the file, or with `--check` compare it; return the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/llms.txt from the navigation and the pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    options = parser.parse_args(arguments)
    made, path = render(root), root / PAGE
    if not options.check:
        path.write_text(made, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != made:
        print(f"{PAGE} is not what the pages say: run `make docs` and commit it.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
