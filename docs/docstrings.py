"""Docstrings of this project as reStructuredText: what Sphinx needs to lay them out on the pages of docs/api.

They are plain text: "name: meaning" lines for arguments, indented blocks for examples. The declared parameters and
arrays of a format follow its docstring, as on its page (docs/tables.py).
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from tables import rows_of

from spformat.formats.base import Format

_ARGUMENT = re.compile(r"(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): (?P<text>.*)")


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """For the event "autodoc-process-docstring": ``lines`` is changed in place."""
    if what == "module":
        lines.clear()  # it is written for readers of the source; the pages have texts of their own
        return
    names = _parameters(obj)
    lines[:] = literal_blocks(fields(lines, names) if names else lines)
    lines[:] = [line if line.startswith("  ") else plain(line) for line in lines]
    if what == "class" and isinstance(obj, type) and issubclass(obj, Format) and obj is not Format:
        lines += ["", *declared(obj)]


def fields(lines: list[str], names: set[str]) -> list[str]:
    """The lines with a field ":param name: text" for each line "name: text" of an argument."""
    out: list[str] = []
    inside = False
    for line in lines:
        text = line.strip()
        match = _ARGUMENT.fullmatch(text)
        if match and {n.strip("*") for n in match["names"].split(", ")} <= names:
            if not inside:
                out.append("")
            out.append(f":param {match['names'].replace('*', '')}: {match['text']}")
            inside = True
        elif inside and text and (line.startswith(" ") or not out[-1].endswith((".", ")"))):
            out.append(f"    {text}")
        elif text in ("Args:", "Returns:") and names:
            continue
        else:
            if inside and text:
                out.append("")
            inside = False
            out.append(line)
    return out


def plain(line: str) -> str:
    """The line with the stars and bars of formulas escaped, which would begin emphasis; not between backticks."""
    parts = re.split(r"(``.*?``|`.*?`)", line)
    return "".join(part if i % 2 else re.sub(r"([*|])", r"\\\1", part) for i, part in enumerate(parts))


def literal_blocks(lines: list[str]) -> list[str]:
    """The lines with a "::" before each indented block that follows an empty line: an example, or a list in columns."""
    out: list[str] = []
    literal = False
    for i, line in enumerate(lines):
        starts = line.startswith("  ") and (i == 0 or not lines[i - 1].strip())
        if starts and not literal:
            out += ["::", ""]
            literal = True
        elif line.strip() and not line.startswith(" "):
            literal = False
        out.append(line)
    return out


def declared(fmt: type[Format]) -> list[str]:
    """The declared parameters, tables, parts and arrays of a format, as tables."""
    out = []
    for heads, rows in rows_of(fmt):
        out += [".. list-table::", "   :header-rows: 1", ""]
        for row in (heads, *rows):
            for i, text in enumerate(row):
                out.append(f"   {'*' if i == 0 else ' '} - {text.replace('`', '``')}")
        out.append("")
    return out


def _parameters(obj: Any) -> set[str]:
    try:
        return set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return set()
