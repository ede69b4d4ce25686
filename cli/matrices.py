"""The matrices of a checkpoint for commands that look at one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .output import progress


def no_matrix(tensors: int) -> Exception:
    """The error of a command that was asked about tensors none of which is a matrix."""
    from spformat.errors import UsageError

    return UsageError(f"expected a matrix, got none among {tensors} tensor(s): `spformat inspect` lists what is there")


def each_matrix(src: str, include: list[str] | None, label: str, silent: bool) -> Iterator[tuple[Any, Any]]:
    """(record, the open file it is read from) of every matrix in SRC, those of stacks one by one, with progress."""
    from spformat.checkpoint.recipe import included
    from spformat.checkpoint.source import open_source
    from spformat.checkpoint.stacks import holds_matrices, matrices_in, records_of

    source = open_source(src)
    names = included(source.records, include)
    if not any(holds_matrices(source.records[name][1]) for name in names):
        raise no_matrix(len(names))
    with progress(sum(source.records[name][2] for name in names), label, silent) as step:
        for name, f in source.opened(names):
            _, record, nbytes = source.records[name]
            matrices = matrices_in(f, record)
            for r in records_of(record) if holds_matrices(record) else ():
                yield r, matrices
            step(name, nbytes)
