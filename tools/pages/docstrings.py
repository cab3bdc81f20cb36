"""Our docstrings in the pages: roles become links, each error has a line of its own."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(~?)([\w.]+)`")
_NEXT_ERROR = re.compile(r"(?<=[.;]) +(?=[A-Z]\w*(?:Error|Exception)(?:, \w+)*: )")


class Readable(Extension):
    """Changes the text of docstrings before it is read."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)


def readable(text: str) -> str:
    """A docstring with roles as code, and one error in each line of ``Raises``."""
    lines, raising, indent = [], False, ""
    for line in text.splitlines():
        words = line.strip()
        if words.endswith(":") and words[:-1] in ("Raises", "Args", "Returns", "Attributes"):
            raising, indent = words == "Raises:", line[: len(line) - len(line.lstrip())]
        if raising and words and words != "Raises:":
            starts = re.match(r"[A-Z]\w*(?:Error|Exception|Refused)?(?:, [\w.]+)*: ", words)
            words = _NEXT_ERROR.sub(f"\n{indent}    ", words)
            line = f"{indent}    {'' if starts else '    '}{words}"
        lines.append(line)
    return _ROLE.sub(_as_code, "\n".join(lines))


def _as_code(match: re.Match[str]) -> str:
    name = match[2].rpartition(".")[2] if match[1] else match[2]
    return f"``{name}``"
