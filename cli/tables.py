"""Tables for people: aligned columns, or where these are wider than the terminal, each name on a line of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

MANY = 1000
"""Rows beyond which a table, or a list in JSON, is written in a simpler way."""
_NARROWEST = 9
"""Characters below which no column of text is made narrower."""
_INDENT, _GAP = 2, 2


def cell(text: str) -> str:
    """``text`` on one line, with line breaks and control characters of terminals escaped."""
    from spformat.errors import printable

    return text if text.isprintable() else printable(text.replace("\n", "\\n"), 1 << 30)


class Rows(Table):
    """A table whose cells are escaped, line breaks included. Its first column holds names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._texts: list[list[Any]] = []
        self._styles: list[Any] = []

    def add_row(self, *cells: Any, style: Any = None, **options: Any) -> None:
        self._texts.append([cell(c) if isinstance(c, str) else c for c in cells])
        self._styles.append(style)
        if len(self._texts) <= MANY + 1:
            super().add_row(*self._texts[-1], style=style, **options)

    def write_to(self, file: Any) -> None:
        """Write the table without colours and without folding; Rich needs a second for 3,000 rows."""
        rows = [[str(column.header) for column in self.columns], *(list(map(str, texts)) for texts in self._texts)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.columns))]
        right = [column.justify == "right" for column in self.columns]
        for row in rows:
            padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(row, widths, right, strict=True))
            file.write("  ".join(padded).rstrip() + "\n")

    def fits(self, width: int) -> bool:
        """Whether nothing has to be folded in a terminal of this width."""
        widths = self._widths(range(len(self.columns)), 1 << 30, header=str)
        return sum(widths.values()) + _GAP * (len(widths) - 1) <= width

    def stacked(self, width: int) -> Iterator[RenderableType]:
        """The lines of the table for a narrow terminal: a name on a line of its own, the other columns below it.

        A name stands once above rows that follow each other. Columns without contents are left out, and a last column
        of text, like a note, is on lines of its own where it does not fit. So the names are the last to be folded.
        """
        shown = [i for i in range(1, len(self.columns)) if any(_width(row[i]) for row in self._texts)]
        widths = self._widths(shown, 1 << 30, header=_longest_word)
        below = 0
        if len(shown) > 1 and self._is_text(shown[-1]) and sum(widths.values()) + _GAP * len(shown) > width:
            below = shown.pop()
        widths = self._widths(shown, width - _INDENT, header=_longest_word)
        name = ""
        for row, style in [([c.header for c in self.columns], "bold"), *zip(self._texts, self._styles, strict=True)]:
            if row[0] != name or not name:
                name = str(row[0])
                yield Text(name, style=style or "", overflow="fold")
            if any(_width(row[i]) for i in shown):
                line = Table(box=None, pad_edge=False, show_header=False)
                for i in shown:
                    line.add_column(justify=self.columns[i].justify, width=widths[i], overflow="fold")
                line.add_row(*(row[i] for i in shown), style=style)
                yield Padding(line, (0, 0, 0, _INDENT))
            if below and row[below]:
                yield Padding(Text(str(row[below]), style=style or "", overflow="fold"), (0, 0, 0, 2 * _INDENT))

    def _widths(self, shown: Sequence[int], room: int, header: Callable[[str], str]) -> dict[int, int]:
        """The width of each of these columns. Columns of text are made narrower, the widest first, until all fit.

        header: the part of a heading that stays on one line.
        """
        heads = [header(str(column.header)) for column in self.columns]
        widths = {i: max(len(heads[i]), *(_width(row[i]) for row in self._texts), 0) for i in shown}
        texts = [i for i in shown if self._is_text(i)]
        while sum(widths.values()) + _GAP * (len(shown) - 1) > room:
            widest = max(texts, key=widths.__getitem__, default=None)
            if widest is None or widths[widest] <= _NARROWEST:
                break
            widths[widest] -= 1
        return widths

    def _is_text(self, column: int) -> bool:
        return self.columns[column].justify != "right"


def _longest_word(text: str) -> str:
    return max(text.split(), key=len)


def _width(content: Any) -> int:
    """Columns of the widest line of a cell."""
    return max(map(cell_len, str(content).split("\n")))


def table(*columns: str, right: tuple[str, ...] = ()) -> Rows:
    """A plain table whose first column holds names; the columns in ``right`` are aligned to the right, for numbers."""
    t = Rows(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        t.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return t
