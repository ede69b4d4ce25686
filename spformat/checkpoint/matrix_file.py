"""A file with one matrix (.npz, .mtx, .smtx), presented as a shard with one tensor that has the name of the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from types import TracebackType
from typing import Self

from ..errors import UsageError
from ..formats.csr import CSR
from ..interop import MATRIX_SUFFIXES
from ..interop.matrices import read_matrix
from ..storage.descriptor import Record
from ..storage.files import Path, path_text
from ..storage.filewriter import outline


def is_matrix(path: Path) -> bool:
    """Whether a path names a file with one matrix, not a checkpoint."""
    return path_text(path).lower().endswith(MATRIX_SUFFIXES)


@dataclass(frozen=True)
class MatrixFile:
    """A matrix in memory with the methods of ``TensorFile`` by which checkpoints are looked at."""

    path: str
    matrix: CSR

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the whole file; the errors of ``read_matrix``."""
        return cls(path_text(path), read_matrix(path))

    @property
    def name(self) -> str:
        """The name of its tensor: that of the file, without the ending."""
        return PurePath(self.path).stem

    @property
    def own_metadata(self) -> dict[str, str]:
        return {}

    def info(self, name: str) -> Record:
        """As the method of ``TensorFile``."""
        if name != self.name:
            raise UsageError(f"no tensor '{name}' in the file; its matrix is called '{self.name}'", path=self.path)
        return outline(name, self.matrix)

    def read(self, name: str, device: str = "cpu") -> CSR:
        """As the method of ``TensorFile``."""
        self.info(name)
        return self.matrix.to(device)

    def read_all(self, names: Iterable[str], device: str = "cpu") -> Iterator[CSR]:
        """As the method of ``TensorFile``."""
        return (self.read(name, device) for name in names)

    def nbytes(self, name: str) -> int:
        """Bytes of the matrix as CSR."""
        self.info(name)
        return self.matrix.nbytes

    def __iter__(self) -> Iterator[str]:
        yield self.name

    def close(self) -> None:
        """Nothing is open: the whole file was read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass
