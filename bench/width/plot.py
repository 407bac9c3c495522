"""Draw the rows of the width simulator as an SVG: one panel a server and batch size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

LABELS, PANEL, GAP, LINE, HEAD = 190, 190, 16, 20, 46  # pixels
MARKS = {  # row key: (legend, colour, shape); later ones are drawn on top
    "fixed_8": ("fixed 8", "#b07aa1", "square"),
    "fixed_16": ("fixed 16", "#4e79a7", "diamond"),
    "oracle": ("best width in hindsight", "#333333", "bar"),
    "policy": ("policy", "#e15759", "dot"),
}


def svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """Speed-up over plain decoding of each contender, one line a workload.

    Args:
        rows: `width_simulator.Row` as dictionaries.
    """
    servers = list(dict.fromkeys(row["server"] for row in rows))
    batches = list(dict.fromkeys(row["batch_size"] for row in rows))
    names = list(dict.fromkeys(row["workload"] for row in rows))
    height = HEAD + LINE * len(names) + 30
    width = LABELS + len(batches) * (PANEL + GAP)
    body = list(_legend())
    for i, server in enumerate(servers):
        top = 30 + i * height
        body.append(_text(6, top + 14, f"{server}: speed-up over plain decoding", bold=True))
        body += [_text(6, top + HEAD + LINE * n + 14, name) for n, name in enumerate(names)]
        of_server = [row for row in rows if row["server"] == server]
        scale = PANEL / (max(row[key] / row["plain"] for row in of_server for key in MARKS) + 0.2)
        for j, batch in enumerate(batches):
            left = LABELS + j * (PANEL + GAP)
            cells = [row for row in of_server if row["batch_size"] == batch]
            body.append(_text(left, top + 36, f"batch {batch}"))
            body += _panel(cells, names, left, top + HEAD, scale)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{30 + height * len(servers)}" font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panel(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], left: float, top: float, scale: float
) -> Iterator[str]:
    """The axis, a line at 1 and the marks of one batch size."""
    bottom = top + LINE * len(names)
    for tick in range(int(PANEL / scale) + 1):
        x = left + tick * scale
        colour = "#888" if tick == 1 else "#e4e4e4"
        yield f'<path d="M{x:.1f} {top}V{bottom}" stroke="{colour}"/>'
        yield _text(x - 4, bottom + 14, str(tick))
    for row in rows:
        y = top + LINE * names.index(row["workload"]) + 10
        for key, (_, colour, shape) in MARKS.items():
            yield _mark(left + scale * row[key] / row["plain"], y, colour, shape)


def _legend() -> Iterator[str]:
    x = LABELS
    for label, colour, shape in MARKS.values():
        yield _mark(x, 14, colour, shape)
        yield _text(x + 10, 18, label)
        x += 40 + 7 * len(label)


def _mark(x: float, y: float, colour: str, shape: str) -> str:
    if shape == "dot":
        return f'<circle cx="{x:.1f}" cy="{y}" r="3.5" fill="{colour}"/>'
    path = {"square": "m-4-4h8v8h-8z", "diamond": "m0-5l5 5l-5 5l-5-5z", "bar": "m0-8v16"}[shape]
    return (
        f'<path d="M{x:.1f} {y}{path}" fill="none" stroke="{colour}" '
        f'stroke-width="{3 if shape == "bar" else 1.5}"/>'
    )


def _text(x: float, y: float, text: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}"{weight}>{escape(text)}</text>'
