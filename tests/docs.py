"""The code blocks of README and docs, so that tests can run them as a reader would."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]


def blocks(page, language="python"):
    """Name and text of each block of a language; the name stands in a comment above it."""
    text = (ROOT / page).read_text()
    found = re.findall(rf"(?:<!-- test: ([^>]*) -->\n)?```{language}\n(.*?)```", text, re.DOTALL)
    return dict(found)


def run(page, name, run_dir, /, **given):
    """Execute a block, with a run directory of the test's own in place of the one written there."""
    names = dict(given)
    exec(compile(blocks(page)[name].replace("/dev/shm/run42", run_dir), page, "exec"), names)
    return names
