"""The pictures of ``inspect --plot``: where nonzeros are, rows by length, fill of blocks, bytes in every format."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Sequence
from typing import Any

from .output import size
from .tables import cell

MOST_IN_PNG = 100
"""Tensors that one PNG shows."""
_LABEL, _BAR, _LINE = 210, 190, 17
"""Pixels of a label, of the longest bar and of a line in an HTML page."""


def check(path: str) -> None:
    """UsageError or OutputError, before anything is read, if the plot could not be written after it."""
    import importlib.util

    from spformat.errors import OutputError, UsageError
    from spformat.storage.output import check_target

    if not path.lower().endswith((".png", ".html")):
        raise UsageError(f"--plot: expected a name in .html or .png, got {path!r}")
    if path.lower().endswith(".png") and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot: a .png needs matplotlib: pip install 'spformat[plot]'; a .html does not")
    if not os.access(os.path.dirname(path) or ".", os.W_OK):
        raise OutputError("--plot: cannot write into the folder", path=path)
    check_target(path, overwrite=True)


def write(path: str, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write the pictures of the tensors that have one, ``row["picture"]``: (map, fill of blocks)."""
    drawn = [row for row in rows if "picture" in row]
    if path.lower().endswith(".html"):
        from spformat.storage.output import publish

        publish(path, page(title, drawn).encode(), overwrite=True)
    else:
        _png(path, drawn)


def charts(row: dict[str, Any]) -> list[tuple[str, list[tuple[str, int, str]]]]:
    """(title, bars) of each chart beside the map of a tensor. A bar: label, length, text at its end."""
    lengths = [(k, v, f"{v:,}") for k, v in row["rows_by_length"].items() if v]
    fill = [(f"{10 * i}-{10 * i + 10} %", n, f"{n:,}") for i, n in enumerate(row["picture"][1])]
    ranked = sorted(row["sizes"].items(), key=lambda item: item[1])
    return [
        ("rows by length", lengths),
        ("nonempty 32x32 blocks by fill", fill),
        ("bytes by format", [(k, v, size(v)) for k, v in ranked]),
    ]


def page(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """One HTML page that needs no other file."""
    from spformat.formats.picture import image

    sections = []
    for row in rows:
        *_, M, K = row["shape"]
        shape, share = " x ".join(map(str, row["shape"])), 100 * row["density"]
        facts = f"{shape} {row['dtype']}, {row['nnz']:,} nonzeros ({share:.2f} %), {size(row['bytes'])}"
        parts = "".join(f"<figure><figcaption>{t}</figcaption>{_bars(b)}</figure>" for t, b in charts(row))
        figure = f"<figure><figcaption>nonzeros</figcaption>{image(row['picture'][0], (M, K), 320)}</figure>"
        sections.append(f"<h2>{html.escape(cell(row['name']))}</h2><p>{facts}</p><div>{figure}{parts}</div>")
    style = (
        "body{font:14px sans-serif;margin:24px;color:#222;background:#fff}h2{font-size:16px;margin:28px 0 0}"
        "p{margin:4px 0}div{display:flex;flex-wrap:wrap;gap:8px 28px}figure{margin:0}"
        "figcaption{color:#666;margin:4px 0}"
    )
    name = html.escape(cell(title))
    head = f'<meta charset="utf-8"><title>{name}</title><style>{style}</style>'
    body = f"<h1>{name}</h1>{''.join(sections)}"
    return f"<!doctype html>\n<html><head>{head}</head><body>{body}</body></html>\n"


def _bars(bars: list[tuple[str, int, str]]) -> str:
    """Horizontal bars as SVG."""
    longest = max((n for _, n, _ in bars), default=0) or 1
    lines = []
    for i, (label, n, text) in enumerate(bars):
        y, width = i * _LINE, round(_BAR * n / longest, 1)
        lines.append(
            f'<text x="{_LABEL - 6}" y="{y + 12}" text-anchor="end">{html.escape(label)}</text>'
            f'<rect x="{_LABEL}" y="{y + 2}" width="{width}" height="{_LINE - 5}" fill="#3a6ea5"/>'
            f'<text x="{_LABEL + width + 5}" y="{y + 12}">{html.escape(text)}</text>'
        )
    box = f'width="{_LABEL + _BAR + 80}" height="{len(bars) * _LINE + 4}" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(lines)}</svg>'


def _png(path: str, rows: Sequence[dict[str, Any]]) -> None:
    from spformat.errors import UsageError

    if len(rows) > MOST_IN_PNG:
        text = f"--plot: a .png shows up to {MOST_IN_PNG} tensors, got {len(rows)}"
        raise UsageError(f"{text}: choose some with --include, or write a .html")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(max(1, len(rows)), 4, figsize=(16, 3.2 * max(1, len(rows))), squeeze=False)
    for row, (first, *others) in zip(rows, axes, strict=False):
        *_, M, K = row["shape"]
        if row["picture"][0].size:
            first.imshow(row["picture"][0], cmap="Blues", aspect="auto", extent=(0, K, M, 0), interpolation="nearest")
        shape, share = "x".join(map(str, row["shape"])), 100 * row["density"]
        title = f"{cell(row['name'])}  {shape} {row['dtype']}, {share:.2f} % nonzeros"
        first.set_title(title, fontsize=8, parse_math=False)  # a $ in a name begins no formula
        for axis, (title, bars) in zip(others, charts(row), strict=True):
            axis.barh([label for label, _, _ in bars], [n for _, n, _ in bars], color="#3a6ea5")
            axis.invert_yaxis()
            axis.set_title(title, fontsize=8)
        for axis in (first, *others):
            axis.tick_params(labelsize=6)
    figure.tight_layout()
    publish_figure(path, figure, dpi=120)
    plt.close(figure)


def publish_figure(path: str, figure: Any, dpi: int) -> None:
    """Write a figure of matplotlib as a PNG, as every output is written: complete, or not there at all."""
    from spformat.storage.output import publish

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    publish(path, picture.getvalue(), overwrite=True)
