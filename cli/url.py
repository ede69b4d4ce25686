"""Inputs with a URL: the verbs that only read get a local copy. ``convert``, which also writes to URLs, has its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from .output import notes, size
from .pipe import stands_for
from .tables import cell

_INPUTS = ("src", "a", "b")


@contextmanager
def from_url(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of a command, with the path of a local copy in place of each input that is a URL.

    "org/name", which no file or folder here has, is a model of the Hugging Face hub.
    """
    arguments = dict(given)
    for key in _INPUTS:
        path = given.get(key)
        if isinstance(path, str) and "/" in path and "://" not in path and not os.path.lexists(path):
            from spformat.checkpoint.hub import url_of

            arguments[key] = url_of(path)
            if arguments[key] != path and not given.get("as_json"):
                notes().print(f"no {cell(path)} here: taking the model {cell(arguments[key])} of the Hugging Face hub",
                              soft_wrap=True)  # fmt: skip
    with ExitStack() as copies:
        if "dst" not in given:
            for key in _INPUTS:
                if "://" in str(arguments.get(key)):
                    from spformat.checkpoint.remote import downloaded

                    here = copies.enter_context(downloaded(arguments[key], copied(given.get("as_json", False))))
                    stands_for(here, given[key])
                    arguments[key] = here
        yield arguments


def copied(silent: bool) -> Callable[[str, int], None] | None:
    """A function that prints a line for each file that was downloaded or uploaded; None if ``silent``."""
    out = notes()
    return None if silent else lambda name, nbytes: out.print(f"copied {cell(name)}  {size(nbytes)}", soft_wrap=True)
