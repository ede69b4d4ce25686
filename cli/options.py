"""Options that several verbs share, each with one name and one help text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import completion

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
        help="Target: auto, dense, keep, or a format with params: bsr:blocksize=16x16.",
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


_UNITS = {
    "": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """The number of bytes in text like "8GiB", "500MB" or "1e9"."""
    number = text.strip().rstrip("KMGTIBkmgtib")
    unit = text.strip()[len(number) :].upper()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):  # OverflowError: infinity
        raise typer.BadParameter(f"expected a size like 8GiB or 500MB, got {text!r}") from None


def recipe(
    to: str, rules: list[str] | None, include: list[str] | None, exclude: list[str] | None, prune: str,
    sparsity: float | None, nonfinite: str, misfit: str,
) -> Recipe:  # fmt: skip
    """The Recipe for these options."""
    from spformat.checkpoint import Recipe, Rule

    return Recipe(
        to=to, rules=tuple(Rule.parse(r) for r in rules or ()), include=tuple(include or ()),
        exclude=tuple(exclude or ()), prune=prune, sparsity=sparsity, nonfinite=nonfinite, misfit=misfit,
    )  # fmt: skip
