"""What mkdocs does not do by itself: pages from outside of ``docs/``, and links to them.

Documents are written to be read in the repository: README.md is its first page, and links lead to
wherever a file lies. Here those files become pages too, and the links of all pages lead to them.
mkdocs calls the functions whose names begin with ``on_``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "benchmarks/results.md",
}
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_FOREIGN = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?https?:[^>]*>")


def page_of(path: str) -> str:
    """Where a file of the repository stands among the pages, by its path in either."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def linked(text: str, path: str) -> set[str]:
    """The files that a document at a path of the repository links to."""
    found = (
        posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        for match in _LINK.finditer(text)
    )
    return {target for target in found if (ROOT / target).is_file()}


def with_links(text: str, path: str) -> str:
    """A document whose links lead from page to page."""
    here = posixpath.dirname(page_of(path))

    def lead(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if not (ROOT / target).is_file():
            return match[0]
        return f"]({posixpath.relpath(page_of(target), here)}{match[2] or ''})"

    return _LINK.sub(lead, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie elsewhere, and source files that any page links to."""
    documents = [*PAGES, *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]
    sources = {target for path in documents for target in linked((ROOT / path).read_text(), path)}
    for path in PAGES:
        _add(files, config, path, with_links((ROOT / path).read_text(), path))
    for path in sorted(sources - set(PAGES)):
        if not path.startswith("docs/"):
            kind = path.rpartition(".")[2]
            text = (ROOT / path).read_text()
            _add(files, config, path, f"# {path}\n\n~~~~~{kind}\n{text}\n~~~~~\n")
    return files


def _add(files: Any, config: Any, path: str, text: str) -> None:
    page = File.generated(config, page_of(path), content=text)
    if path not in PAGES:
        page.inclusion = page.inclusion.NOT_IN_NAV
    files.append(page)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    generated = page.file.generated_by is not None
    return markdown if generated else with_links(markdown, f"docs/{page.file.src_uri}")


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The pages are read offline as well: nothing in them comes from elsewhere."""
    foreign = [tag for tag in _FOREIGN.findall(output) if "canonical" not in tag]
    if foreign:
        raise PluginError(f"{page.file.src_uri} takes from elsewhere: {foreign[0]}")
    return output
