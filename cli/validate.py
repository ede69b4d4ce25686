"""spformat validate: checksums, structure and contents of every tensor; and whether it is what you expect."""

from __future__ import annotations

from typing import Any

import typer

from .options import Include, Json, Src
from .output import console, print_json, table

EPILOG = (
    "spformat validate ./model-sp --checksums   |   spformat validate ./model --expect two-four --include 're:.*proj'"
)

_PRIORITY = (70, 74, 73, 77, 65, 78, 3, 69)


def run(
    src: Src,
    expect: str = typer.Option(
        "",
        help="Also check that every matrix fits this format, exactly. Exit 1 if not, or if some could not be checked.",
    ),
    include: Include = None,
    checksums: bool = typer.Option(False, help="Also compare every file with the sha256 in the manifest."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="List the sound tensors, too."),
    as_json: Json = False,
) -> None:
    """Read everything and check it: 0 sound, 1 not as expected, 65 a file that breaks its format."""
    from spformat.checkpoint.check import Checks, validate_checkpoint

    verdicts = list(validate_checkpoint(src, Checks(expect, tuple(include or ()), checksums)))
    bad = [v for v in verdicts if v.error]
    compared = [v for v in verdicts if v.compared]
    ok = not bad and bool(compared or not expect)
    if as_json:
        checked = len(compared if expect else verdicts)
        print_json({"path": src, "ok": ok, "checked": checked, "tensors": [v.to_json() for v in verdicts]})
    else:
        if bad or verbose:
            t = table("tensor", "format", "shape", "dtype", "verdict")
            for v in verdicts if verbose else bad:
                verdict = "ok" if v.error is None else v.error.message
                t.add_row(
                    v.name, v.format, "x".join(map(str, v.shape)), v.dtype, verdict, style="red" if v.error else None
                )
            console().print(t)
        console().print(f"{src}: {_summary(verdicts, expect)}")
    codes = {1 if v.finding else v.error.exit_code for v in bad if v.error}
    code = next((c for c in _PRIORITY if c in codes), 0 if ok else 1)
    raise typer.Exit(code)


def _summary(verdicts: list[Any], expect: str) -> str:
    """How many tensors were read, how many were compared with the expected format, and what came of it."""
    if not expect:
        unsound = sum(v.error is not None for v in verdicts)
        return f"{len(verdicts)} checked, " + (f"{unsound} of them not sound" if unsound else "sound")
    compared = [v for v in verdicts if v.compared]
    unlike = sum(v.error is not None for v in compared)
    missed = sum(v.finding and not v.compared for v in verdicts)
    unsound = sum(v.error is not None and not v.finding for v in verdicts)
    parts = [f"{len(compared)} checked against {expect}"]
    parts += [f"{unlike} of them not as expected"] if unlike else []
    parts += [f"{missed} not checked against {expect}"] if missed else []
    parts += [f"{unsound} not sound"] if unsound else []
    return ", ".join(parts if len(parts) > 1 or not compared else [*parts, "sound"])
