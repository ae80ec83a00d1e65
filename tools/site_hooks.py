"""What mkdocs adds to docs/ when it makes the site: pages from beside it, the drawing of the states, the sources.

On GitHub the changelog and the like lie at the root, links lead there, and Mermaid is drawn by GitHub.
None of that holds on a site that loads nothing from another host, so each is turned into what does.
"""

import posixpath
import re
import shutil
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

BESIDE: Final = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
DRAWINGS: Final = {"state_machine.md": "images/states.svg"}

_LINK: Final = re.compile(r"(\]\()([^)#\s]+)")
_MERMAID: Final = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that lie beside docs/."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=(_root(config) / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links that hold on the site, and with its drawing."""
    del files
    uri = page.file.src_uri
    if uri in DRAWINGS:
        svg = (Path(config.docs_dir) / DRAWINGS[uri]).read_text(encoding="utf-8")
        markdown = _MERMAID.sub(lambda _: f"<div>\n{svg}</div>", markdown)
    return _LINK.sub(lambda link: link[1] + site_link(link[2], uri), markdown)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Put the Markdown beside each page: `llms.txt` names it, for readers that are programs."""
    docs, site = Path(config.docs_dir), Path(config.site_dir)
    for source in docs.rglob("*.md"):
        shutil.copyfile(source, site / source.relative_to(docs))
    for name, page in BESIDE.items():
        shutil.copyfile(_root(config) / name, site / page)


def site_link(target: str, uri: str) -> str:
    """Return where a link of the page `uri` leads on the site; as it is, if it leads to no page that moved."""
    if ":" in target:
        return target
    moved = {page: name for name, page in BESIDE.items()}
    here = moved.get(uri) or f"docs/{uri}"
    there = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    if uri not in moved and there not in BESIDE:
        return target
    return posixpath.relpath(BESIDE.get(there) or there.removeprefix("docs/"), posixpath.dirname(uri) or ".")


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent
