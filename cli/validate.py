"""spformat validate: checksums, structure and contents of every tensor; and whether it is what you expect."""

from __future__ import annotations

from typing import Any

import typer

from . import completion
from .groups import grouped, one_each, without_numbers
from .options import Include, Json, Long, Src
from .output import print_json, set_verdict, summary
from .pipe import name_input, typed
from .refusals import reason, remedies
from .tables import table

EPILOG = "spformat validate ./model-sp --checksums\n\nspformat validate ./model --expect two-four --include 're:.*proj'"

_LISTED = 8
"""Most files that the summary names."""
_PRIORITY = (70, 74, 73, 77, 65, 78, 3, 69)


def run(
    src: Src,
    expect: str = typer.Option(
        "",
        help="Also check that every matrix fits this format, exactly. Exit 1 if not, or if some could not be checked.",
        autocompletion=completion.formats,
    ),
    include: Include = None,
    checksums: bool = typer.Option(
        False, "--checksums", help="Also compare every file with the sha256 in the manifest."
    ),
    official: bool = typer.Option(
        False, "--official", help="Also open every file with the safetensors package, and say which it opened."
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="List the sound tensors, too."),
    long: Long = False,
    as_json: Json = False,
) -> None:
    """Read everything and check it: 0 sound, 1 not as expected, 65 a file that breaks its format."""
    from spformat.checkpoint.check import Checks, validate_checkpoint

    verdicts = list(validate_checkpoint(src, Checks(expect, tuple(include or ()), checksums, official=official)))
    bad = [v for v in verdicts if v.error]
    for v in bad:
        name_input(v.error)  # type: ignore[arg-type]
    compared = [v for v in verdicts if v.compared]
    ok = not bad and bool(compared or not expect)
    codes = {1 if v.finding else v.error.exit_code for v in bad if v.error}
    code = next((c for c in _PRIORITY if c in codes), 0 if ok else 1)
    set_verdict(code)
    if as_json:
        checked = len(compared if expect else [v for v in verdicts if not v.opened_by])
        print_json({"path": typed(src), "ok": ok, "checked": checked, "tensors": [v.to_json() for v in verdicts]})
    else:
        if bad or verbose:
            _print(verdicts if verbose else bad, long)
        if official:
            summary().print(f"{typed(src)}: {_opened(verdicts)}")
        summary().print(f"{typed(src)}: {_summary([v for v in verdicts if not v.opened_by], expect)}")
    raise typer.Exit(code)


def _opened(verdicts: list[Any]) -> str:
    """Which files another package has opened, and sees as we do."""
    tried = [v for v in verdicts if v.opened_by]
    good = [v.name for v in tried if v.error is None]
    files = f"{len(good)} file{'s'[: len(good) != 1]} opened with {tried[0].opened_by}"
    more = f" and {len(good) - _LISTED} more (--verbose lists all)" if len(good) > _LISTED else ""
    return files + (": " if good else "") + ", ".join(good[:_LISTED]) + more


def _print(verdicts: list[Any], long: bool) -> None:
    """The table of verdicts, and below it how to prune what does not fit."""
    t = table("tensor", "format", "shape", "dtype", "verdict")
    for group in one_each(verdicts, _name) if long else grouped(verdicts, _name, _fate):
        v, errors = group.rows[0], [v.error.message for v in group.rows if v.error]
        shape = "x".join(map(str, v.shape))
        t.add_row(
            group.label, v.format, shape, v.dtype, reason(errors) if errors else "ok", style="red" if errors else None
        )
    summary().print(t)
    if more := remedies(v.error.message for v in verdicts if v.error).removeprefix(". "):
        summary().print(f"{more}.")


def _name(v: Any) -> str:
    return str(v.name)


def _fate(v: Any) -> tuple[Any, ...]:
    """What tensors have in common that share a line."""
    return v.shape, v.dtype, v.format, v.finding, v.error and (type(v.error), without_numbers(v.error.message))


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
