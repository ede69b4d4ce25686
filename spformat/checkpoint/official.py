"""A second opinion: every file of a checkpoint, opened with the safetensors package as other tools open it.

What is read is still decided by our own reader (``storage.stfile``), which checks more and opens no file that it would
have to trust. The package answers another question: whether everybody else can open the file, and sees the same in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..errors import ContainerError, SpformatError, UsageError, printable
from ..storage.stfile import Reader
from .source import Source


def opened_officially(source: Source) -> Iterator[tuple[str, str, SpformatError | None]]:
    """(file, "safetensors <version>", None or the error) for every shard.

    The error says that the package does not open the file, or which entry it sees with another dtype or shape. Raises
    UsageError for a matrix, which is no safetensors file.
    """
    import safetensors

    if source.matrix is not None:
        raise UsageError("--official: no safetensors file to open", path=source.path)
    package = f"safetensors {safetensors.__version__}"
    for shard in source.shards:
        path = os.path.join(source.folder, shard)
        error = None
        try:
            with safetensors.safe_open(path, framework="np") as f:
                slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 - it is no mapping
                theirs = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
                metadata = f.metadata() or {}
        except (safetensors.SafetensorError, OSError) as e:
            error = ContainerError(f"{package} does not open the file: {printable(str(e))}", path=path)
        else:
            with Reader(path) as ours:
                error = _difference(ours, theirs, metadata, package)
        yield shard, package, error


def _difference(
    ours: Reader, theirs: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str], package: str
) -> ContainerError | None:
    """The first thing that the package sees otherwise; None if there is none."""
    here = {name: (e.dtype, e.shape) for name, e in ours.entries.items()}
    for name in here | theirs:
        if here.get(name) != theirs.get(name):
            both = f"expected {here.get(name, 'no such entry')}, {package} reads {theirs.get(name, 'no such entry')}"
            return ContainerError(both, path=ours.path, tensor=name)
    if metadata != ours.header.metadata:
        return ContainerError(f"__metadata__: {package} reads other keys or texts than spformat", path=ours.path)
    return None
