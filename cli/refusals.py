"""Refusals of many tensors: the reason beside each, how to prune once."""

from __future__ import annotations

from collections.abc import Iterable

_REMEDY = ". To drop "
"""What begins the second sentence of a refusal: how to prune."""


def reason(errors: Iterable[str]) -> str:
    """What a line of a table says of the refusals of its tensors: the first of several, without the remedy."""
    first, *others = errors
    text = first.partition(_REMEDY)[0]
    return f"first: {text}" if others else text


def remedies(errors: Iterable[str]) -> str:
    """Each remedy once, to be printed below a table, after the end of a sentence; "" if there is none."""
    different = dict.fromkeys(error.partition(_REMEDY)[2] for error in errors)
    return "".join(f"{_REMEDY}{remedy}" for remedy in different if remedy)
