"""spformat diff: do two checkpoints hold the same values, whatever their formats?"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import typer

from .groups import grouped, one_each
from .options import Json, Long, Src
from .output import print_json, set_verdict, summary
from .pipe import named, typed
from .tables import cell

_NUMBER = re.compile(r"-?[0-9][0-9.]*(e[+-]?[0-9]+)?|-?inf|-?nan")

EPILOG = "spformat diff ./model ./dense\n\nspformat diff ./model ./model-sp --provenance"


def run(
    a: Src,
    b: str = typer.Argument(help="The other one."),
    provenance: bool = typer.Option(
        False,
        "--provenance",
        help="Also: is one of them the very input, byte for byte, that the manifest of the other names?",
    ),
    long: Long = False,
    as_json: Json = False,
) -> None:
    """Exit 0 for the same values, bit by bit, 1 where they differ; only -0.0 and +0.0 count as equal.

    `__metadata__` is compared, too.
    """
    from spformat.checkpoint.diff import diff_checkpoints, diff_metadata, diff_provenance
    from spformat.checkpoint.source import open_source

    one, other = open_source(a), open_source(b)
    results = list(diff_checkpoints(one, other))
    if provenance:
        results += diff_provenance(a, b)
    differing = [replace(d, what=named(d.what)) for _, d in results if d is not None]
    same = len(results) - len(differing)
    differing += diff_metadata(one, other)
    set_verdict(1 if differing else 0)
    if as_json:
        differences = [
            {"tensor": d.tensor, "what": d.what, "count": d.count, "index": list(d.index)} for d in differing
        ]
        print_json(
            {"a": typed(a), "b": typed(b), "equal": not differing, "compared": len(results), "differences": differences}
        )
    else:
        for group in one_each(differing, _name) if long else grouped(differing, _name, _fate):
            first = "first: " if len(group.rows) > 1 else ""
            summary().print(f"{cell(group.label)}: {first}{group.rows[0].what}", soft_wrap=True)
        what = "tensors and files are the same" if provenance else "tensors hold the same values"
        summary().print(f"{same} of {len(results)} {what}")
    raise typer.Exit(1 if differing else 0)


def _name(d: Any) -> str:
    return str(d.tensor)


def _fate(d: Any) -> str:
    """What tensors have in common that share a line: all that is said of them but numbers."""
    return _NUMBER.sub("#", d.what)
