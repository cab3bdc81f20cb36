"""Draws docs/images/choosing.svg, for docs/choosing.md: ``python -m tools.pages.flow_chart``.

Diagrams that are drawn in the browser need a script from elsewhere, and the pages are read offline.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

TARGET = Path(__file__).parent.parent.parent / "docs/images/choosing.svg"

QUESTIONS = [
    (
        ("Trainer and engine", "on one NVIDIA GPU?"),
        ("CUDAIPCScheme", "the engine reads the trainer's tensors"),
    ),
    (
        ("On one host, or", "with one mount?"),
        ("DoubleBufferScheme", "slots in shared memory"),
    ),
    (
        ("Do engines reach a port", "of the trainer?"),
        ("NCCLScheme", "broadcast to all; gloo without GPUs"),
    ),
    (("A directory or an object", "store that all see?"), ("DiskScheme", "checkpoints that stay")),
]
OTHERWISE = ("Nothing leads there", "write a scheme of your own")

WIDTH, STEP, BOX, LEFT, RIGHT = 640, 104, 64, 216, 316
STYLE = """
svg { font-family: system-ui, "DejaVu Sans", sans-serif; background: #ffffff; }
.question { fill: #e0f2f1; stroke: #00796b; stroke-width: 1.5; }
.answer { fill: #fff8e1; stroke: #b28704; stroke-width: 1.5; }
.way { fill: none; stroke: #546e7a; stroke-width: 1.5; }
text { fill: #1f2933; text-anchor: middle; font-size: 15px; }
.name { font-weight: 600; font-size: 16px; }
.small { font-size: 12.5px; fill: #455a64; }
"""


def chart() -> str:
    """The picture, as SVG: questions below each other, an answer to the right of each."""
    height = STEP * len(QUESTIONS) + BOX + 24
    drawn: list[str] = []
    for row, (question, answer) in enumerate(QUESTIONS):
        top, right = 12 + row * STEP, WIDTH - RIGHT - 12
        middle, below = top + BOX / 2, 12 + LEFT / 2
        drawn += _box(12, top, LEFT, question, "question")
        drawn += _box(right, top, RIGHT, answer, "answer")
        drawn += _way(12 + LEFT, middle, right, middle)
        drawn += _way(below, top + BOX, below, top + STEP)
        drawn += _said("yes", (12 + LEFT + right) / 2, middle - 7)
        drawn += _said("no", below + 16, top + BOX + 24)
    drawn += _box(12, 12 + STEP * len(QUESTIONS), LEFT, OTHERWISE, "answer")
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"',
            '  markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#546e7a"/></marker>',
            "</defs>",
            *drawn,
            "</svg>\n",
        ]
    )


def _box(left: float, top: float, width: float, words: tuple[str, str], kind: str) -> list[str]:
    first, second = ("", "") if kind == "question" else (' class="name"', ' class="small"')
    middle = left + width / 2
    return [
        f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{BOX}" rx="8"/>',
        f'<text{first} x="{middle}" y="{top + 28}">{escape(words[0])}</text>',
        f'<text{second} x="{middle}" y="{top + 48}">{escape(words[1])}</text>',
    ]


def _way(left: float, top: float, right: float, bottom: float) -> list[str]:
    ends = f'x1="{left}" y1="{top}" x2="{right}" y2="{bottom}"'
    return [f'<line class="way" marker-end="url(#end)" {ends}/>']


def _said(word: str, middle: float, bottom: float) -> list[str]:
    return [f'<text class="small" x="{middle}" y="{bottom}">{word}</text>']


if __name__ == "__main__":
    TARGET.write_text(chart())
