"""Commands that help, made of the one that was typed, so that they can be pasted."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

from .output import notes
from .pipe import typed

_NOT_OF_CONVERT = {"--fail-if-larger", "--json", "--dry-run"}
_OF_CHECKPOINTS = ("--include", "--exclude", "--device", "--rule", "--misfit", "--nonfinite")
"""Options of inspect and plan that convert refuses beside a file with one matrix."""
_CHOOSING = ("--rule", "--misfit")
"""Those of them by which plan chooses a target."""


def hint(command: str) -> None:
    """Print a command on a line of its own."""
    notes().print(f"hint: {command}", style="dim", soft_wrap=True)


def was_given(flag: str) -> bool:
    """Whether an option was typed, with its value beside it or after a "="."""
    return any(word == flag or word.startswith(f"{flag}=") for word in sys.argv)


def words_of(include: Sequence[str] | None) -> list[str]:
    """The options that choose the same tensors again."""
    return [word for pattern in include or () for word in ("--include", pattern)]


def again(flag: str, *values: str) -> str:
    """The command as it was typed, with one more option if it did not have it."""
    return shlex.join(["spformat", *sys.argv[1:], *(() if was_given(flag) else (flag, *values))])


def instead(flag: str, value: str) -> str:
    """The command as it was typed, with another value of an option that it has."""
    words = [f"{flag}={value}" if w.startswith(f"{flag}=") else w for w in sys.argv[1:]]
    if flag in words:
        words[words.index(flag) + 1] = value
    return shlex.join(["spformat", *words])


def takes_misfit() -> bool:
    """Whether --misfit is an option of the command that was typed: of plan, and of convert unless a file holds one
    matrix."""
    from spformat.checkpoint.matrix_file import is_matrix

    verb = sys.argv[1]
    return verb == "plan" or (verb == "convert" and not any(map(is_matrix, sys.argv[2:])))


def conversion_of(src: str, target: str = "") -> str:
    """The command that converts ``src`` with the options that were typed, into a name beside it; --to auto without.

    target: what plan has chosen for a matrix in a file of its own, where --rule is refused.
    """
    from spformat.checkpoint.matrix_file import is_matrix

    words = [w for w in sys.argv[2:] if w not in _NOT_OF_CONVERT]
    if sys.argv[1] == "plan":  # where products will run; --device of convert is where matrices are converted
        words = [re.sub(r"^--device(?==|$)", "--gpu", w) for w in words]
    for flag in ("--plot", *(_OF_CHECKPOINTS if is_matrix(src) else ())):
        words = _without(flag, words)
    if is_matrix(src) and any(map(was_given, _CHOOSING)):
        for flag in ("--to", "-n", "--columns", "--gpu"):
            words = _without(flag, words)
        words += ["--to", target]
    source = typed(src)
    if source in words:
        words.remove(source)
    if "--to" not in words and not was_given("--to"):
        words += ["--to", "auto"]
    return shlex.join(["spformat", "convert", source, _beside(src), *words])


def _without(flag: str, words: Sequence[str]) -> list[str]:
    """``words`` without an option that has a value."""
    kept = [w for w in words if not w.startswith(f"{flag}=")]
    while flag in kept:
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept


def _beside(src: str) -> str:
    """A name for what a conversion of ``src`` writes: "model-sp" for the folder "model"."""
    if typed(src) == "-":
        return "packed.safetensors"
    if typed(src) != src:  # a URL: a name in this folder, without the revision
        name = typed(src).rstrip("/").rpartition("/")[2].partition("@")[0]
        return f"{name.removesuffix('.safetensors')}-sp{'.safetensors' * name.endswith('.safetensors')}"
    if os.path.isdir(src):
        path = src.rstrip(os.sep)
        return f"{os.path.abspath(src) if os.path.basename(path) in ('', '.', '..') else path}-sp"
    return f"{os.path.splitext(src)[0]}-sp.safetensors"
