"""The matrices of a checkpoint for commands that look at one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .output import progress


def each_matrix(src: str, include: list[str] | None, label: str, silent: bool) -> Iterator[tuple[Any, Any]]:
    """(record, the open file it is read from) of every matrix in SRC, those of stacks one by one, with progress."""
    from spformat.checkpoint.recipe import included
    from spformat.checkpoint.source import open_source
    from spformat.checkpoint.stacks import StackedFile, holds_matrices, records_of

    source = open_source(src)
    names = included(source.records, include)
    with progress(sum(source.records[name][2] for name in names), label, silent) as step:
        for name, f in source.opened(names):
            _, record, nbytes = source.records[name]
            matrices: Any = StackedFile(f, [record]) if len(record.shape) == 3 else f
            for r in records_of(record) if holds_matrices(record) else ():
                yield r, matrices
            step(name, nbytes)
