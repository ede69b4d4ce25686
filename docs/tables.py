"""Writes the declared parameters, arrays and tables of every format into docs/formats/<name>.md, between two markers.

The declaration in the format's class is the only source: `make docs` writes it, tests/test_docs.py compares.
"""

from __future__ import annotations

from pathlib import Path

from spformat.formats import COMPOSED, FORMATS
from spformat.formats.base import AUTO, INDEX, Format
from spformat.formats.declare import OMITTED, REQUIRED

PAGES = Path(__file__).parent / "formats"
BEGIN, END = "<!-- declared: make docs -->", "<!-- end of declared -->"


def grid(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows))


def rows_of(fmt: type[Format]) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """(headings, rows) of each table of one format; those without rows are left out."""
    params = []
    for p in fmt.declared_params():
        default = {REQUIRED: "required", AUTO: "from the matrix", OMITTED: "left out"}.get(p.default) or _text(
            p.default
        )
        params.append((f"`{p.name}`", p.range_text(), default, p.doc))
    matrices = [(f"`{d.name}`", "several" if d.many else "one", d.doc) for d in fmt.declared_parts()]
    arrays = []
    for a in fmt.declared_arrays():
        kind = f"{a.kind} ({a.bound})" if a.kind == INDEX else a.kind
        arrays.append((f"`{a.name}`", kind, f"[{', '.join(a.dims)}]", a.doc))
    tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [
        (("parameter", "range", "default", "meaning"), params),
        (("table", "length"), [(f"`{name}`", length) for name, length in fmt.declared_tables()]),
        (("part", "matrices", "meaning"), matrices),
        (("array", "kind (bound)", "shape", "meaning, order"), arrays),
    ]
    return [(heads, rows) for heads, rows in tables if rows]


def declared(fmt: type[Format]) -> str:
    """The tables of one format, in Markdown."""
    return "\n\n".join(grid(heads, rows) for heads, rows in rows_of(fmt))


def _text(default: object) -> str:
    return "x".join(map(str, default)) if isinstance(default, tuple) else str(default)


def with_tables(page: str, fmt: type[Format]) -> str:
    """The page with its tables as declared."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{fmt.name}.md: expected the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{declared(fmt)}\n\n{END}{after}"


def main() -> None:
    for fmt in (*FORMATS, *COMPOSED):
        path = PAGES / f"{fmt.name}.md"
        path.write_text(with_tables(path.read_text(), fmt))


if __name__ == "__main__":
    main()
