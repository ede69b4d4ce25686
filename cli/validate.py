"""spformat validate: checksums, structure and contents of every tensor; and whether it is what you expect."""

from __future__ import annotations

import typer

from .options import Include, Json, Src
from .output import console, print_json, table

EPILOG = (
    "spformat validate ./model-sp --checksums   |   spformat validate ./model --expect two-four --include 're:.*proj'"
)

_PRIORITY = (70, 74, 73, 77, 65, 78, 3, 69)


def run(
    src: Src,
    expect: str = typer.Option("", help="Also check that every 2-D tensor fits this format, exactly (exit 1 if not)."),
    include: Include = None,
    checksums: bool = typer.Option(False, help="Also compare every file with the sha256 in the manifest."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="List the sound tensors, too."),
    as_json: Json = False,
) -> None:
    """Read everything and check it: 0 sound, 1 not as expected, 65 a file that breaks its format."""
    from spformat.checkpoint.check import Checks, validate_checkpoint

    verdicts = list(validate_checkpoint(src, Checks(expect, tuple(include or ()), checksums)))
    bad = [v for v in verdicts if v.error]
    if as_json:
        print_json({"path": src, "ok": not bad, "checked": len(verdicts), "tensors": [v.to_json() for v in verdicts]})
    else:
        if bad or verbose:
            t = table("tensor", "format", "shape", "dtype", "verdict")
            for v in verdicts if verbose else bad:
                verdict = "ok" if v.error is None else v.error.message
                t.add_row(
                    v.name, v.format, "x".join(map(str, v.shape)), v.dtype, verdict, style="red" if v.error else None
                )
            console().print(t)
        what = (
            "sound"
            if not bad
            else f"{len(bad)} of them not {'as expected' if all(v.finding for v in bad) else 'sound'}"
        )
        console().print(f"{src}: {len(verdicts)} checked, {what}")
    codes = {1 if v.finding else v.error.exit_code for v in bad if v.error}
    code = next((c for c in _PRIORITY if c in codes), 1 if codes else 0)
    raise typer.Exit(code)
