"""Options that several verbs share, each with one name and one help text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from . import completion, gpus

if TYPE_CHECKING:
    from spformat.checkpoint import Recipe

Src = Annotated[
    str, typer.Argument(help="A .safetensors file, a folder of them, a .smtx, .mtx or .npz matrix, or - for a pipe.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; errors as JSON on stderr.")]
Long = Annotated[
    bool, typer.Option("--long", "-l", help="A line for each tensor, also where layers of one shape become the same.")
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        help="Target: auto, fastest, dense, keep, or a format with params: bsr:blocksize=16x16.",
        autocompletion=completion.targets,
    ),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        "--rule",
        help="PATTERN=FORMAT:params, repeatable; the last match wins. re:REGEX or a shell pattern.",
        autocompletion=completion.rules,
    ),
]
Include = Annotated[list[str] | None, typer.Option(help="Only tensors whose name matches (repeatable).")]
Exclude = Annotated[list[str] | None, typer.Option(help="Not the tensors whose name matches (repeatable).")]
Prune = Annotated[
    str,
    typer.Option(
        help="'magnitude': zero the smallest values so that the target fits. Loses values, and says how many!",
        autocompletion=completion.one_of("magnitude"),
    ),
]
Sparsity = Annotated[float | None, typer.Option(help="With --prune: share of values (or blocks) to zero.")]
NonFinite = Annotated[
    str,
    typer.Option(
        "--nonfinite",
        help="With --prune, NaN and infinities: 'refuse', or 'keep' them as the largest.",
        autocompletion=completion.one_of("refuse", "keep"),
    ),
]
Misfit = Annotated[
    str,
    typer.Option(
        metavar="error|keep|FORMAT",
        help="A tensor its target cannot hold: end with an 'error', 'keep' it as it is, or give it this FORMAT.",
        autocompletion=completion.misfits,
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        help="'transformers': a folder that from_pretrained loads after `import spformat.hf`.",
        autocompletion=completion.one_of("neutral", "transformers"),
    ),
]


ColumnsOfFastest = Annotated[
    list[str],
    typer.Option("-n", "--columns", metavar="N,..", help="With --to fastest: columns of B (tokens). Default: 16,2048."),
]


_UNITS = {
    "": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """The number of bytes in text like "8GiB", "500MB" or "1e9"."""
    number = text.strip().rstrip("KMGTIBkmgtib")
    unit = text.strip()[len(number) :].upper()
    try:
        size = float(number) * _UNITS[unit]
        if size < 0:
            raise ValueError(text)
        return int(size)
    except (ValueError, KeyError, OverflowError):  # OverflowError: infinity
        raise typer.BadParameter(f"expected a size like 8GiB or 500MB, got {text!r}") from None


def recipe(
    to: str, rules: list[str] | None, include: list[str] | None, exclude: list[str] | None, prune: str,
    sparsity: float | None, nonfinite: str, misfit: str, several: Sequence[str] = (), gpu: str = "",
) -> Recipe:  # fmt: skip
    """The Recipe for these options. several: numbers of columns; with gpu, of the targets "fastest" that do not state
    theirs."""
    from spformat.checkpoint import Recipe, Rule
    from spformat.checkpoint.fastest import FASTEST, is_fastest, with_options

    parsed, columns = [Rule.parse(r) for r in rules or ()], ",".join(several)
    if (columns or gpu) and not any(map(is_fastest, (to, misfit, *(r.target for r in parsed)))):
        given = " and ".join(name for name, value in (("-n", columns), ("--gpu", gpu)) if value)
        raise typer.BadParameter(f"{given} is for the target {FASTEST} (--to {FASTEST}), and no tensor has it")

    device = gpus.device(gpu) if gpu else ""

    def complete(target: str) -> str:
        return with_options(target, columns, getattr(device, "name", device))

    return Recipe(
        to=complete(to), rules=tuple(Rule(r.pattern, complete(r.target)) for r in parsed), include=tuple(include or ()),
        exclude=tuple(exclude or ()), prune=prune, sparsity=sparsity, nonfinite=nonfinite, misfit=complete(misfit),
    )  # fmt: skip


def value_dtype(text: str) -> str | None:
    """The name of the value type in the text of --dtype; None without one. UsageError for what is none."""
    if not text:
        return None
    from spformat.arrays.dtypes import VALUE_TYPES, value_type
    from spformat.errors import ArrayError, UsageError, printable

    try:
        return value_type(text).name
    except ArrayError:
        known = ", ".join(VALUE_TYPES)
        raise UsageError(f"--dtype: expected a value type ({known}), got '{printable(text, 40)}'") from None
