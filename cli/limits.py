"""The options that every verb has that opens a file: --quiet, and those that loosen what a file may be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .options import parse_bytes
from .output import set_quiet
from .pipe import from_pipe, name_input
from .url import from_url


def _option(key: str, text: str) -> Any:
    return typer.Option("--" + key.replace("_", "-"), help=text, rich_help_panel="Limits", show_default=False)


_SIZES = {
    "memory": "Largest single allocation, e.g. 64GiB. Default: 4 GiB, or 8 times the input.",
    "file_bytes": "Largest file, holes included. Default: 16TiB.",
    "header_bytes": "Largest safetensors header. Default: 16MiB.",
    "descriptor_bytes": "Largest description of one tensor. Default: 1MiB.",
}
_COUNTS = {
    "tensors": "Most entries in a file. Default: 100000.",
    "name_bytes": "Longest tensor name. Default: 1024.",
    "empty_extent": "Largest dimension of an array without elements. Default: 16777216.",
}
_SWITCHES = {
    "allow_unchecked": "Read files whose checksums were left out.",
    "ignore_unknown": "Read descriptors with keys this release does not know.",
}
_PATHS = ("src", "dst", "a", "b")
_QUIET = typer.Option("--quiet", "-q", help="No progress, hints or summaries: only data, warnings and errors.")
_LINKS = (
    "Folder that symlinks out of a checkpoint may lead into, repeatable. Those of a Hugging Face cache are followed."
)


def bounded(run: Callable[..., None]) -> Callable[..., None]:
    """``run`` with these options added to its own; they hold while it runs."""

    own = inspect.signature(run, eval_str=True)  # Typer reads the hints of a given signature as they are
    required = [
        key for key in _PATHS if key in own.parameters
        # An argument that may be left out is empty then.
        and getattr(own.parameters[key].default, "default", own.parameters[key].default) != ""
    ]  # fmt: skip

    @functools.wraps(run)
    def limited(**given: Any) -> None:
        from spformat.errors import SpformatError, UsageError
        from spformat.limits import using

        if empty := next((key for key in required if given[key] == ""), None):
            text = (
                f"{empty.upper()} is empty: expected a file or folder; was it a variable of the shell that is not set?"
            )
            raise UsageError(text)
        changes: dict[str, Any] = {}
        for key in (*_SIZES, *_COUNTS):
            value = given.pop(f"max_{key}")
            if value is not None:
                changes[key] = parse_bytes(value) if key in _SIZES else value
        changes |= {key: True for key in _SWITCHES if given.pop(key)}
        changes["link_roots"] = tuple(given.pop("follow_symlinks") or ())
        set_quiet(given.pop("quiet"))
        with using(**changes), from_pipe(given) as piped, from_url(piped) as arguments:
            try:
                run(**arguments)
            except SpformatError as e:
                name_input(e)
                raise

    extra: dict[str, Any] = {"quiet": (Annotated[bool, _QUIET], False)}
    extra |= {f"max_{key}": (Annotated[str | None, _option(f"max_{key}", text)], None) for key, text in _SIZES.items()}
    extra |= {f"max_{key}": (Annotated[int | None, _option(f"max_{key}", text)], None) for key, text in _COUNTS.items()}
    extra |= {key: (Annotated[bool, _option(key, text)], False) for key, text in _SWITCHES.items()}
    extra["follow_symlinks"] = (Annotated[list[str] | None, _option("follow_symlinks", _LINKS)], None)
    parameters = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for key, (hint, default) in extra.items()
    ]
    limited.__signature__ = own.replace(parameters=[*own.parameters.values(), *parameters])  # type: ignore[attr-defined]
    limited.__annotations__ = run.__annotations__ | {key: hint for key, (hint, _) in extra.items()}
    return limited
