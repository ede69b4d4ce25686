"""A checkpoint that is open for reading, as a mapping: what ``spformat.open`` returns."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from .. import limits
from ..arrays.library import parse_device
from ..arrays.torch_tensors import array_to_torch, import_torch
from ..errors import DescriptorError, UsageError, printable
from ..formats.dense import Dense
from ..storage.descriptor import Record
from ..storage.files import Path
from ..storage.filewriter import Tensor
from ..storage.tensorfile import TensorFile, no_tensor
from .source import open_source

FRAMEWORKS = ("np", "pt")
_OPEN = 8
"""Files of a folder that are open at a time, those that were read last; so a folder may have any number of them."""


class Checkpoint(Mapping[str, Any]):
    """The tensors of a file or folder, each read, checked and validated when it is asked for.

    Only headers are read at first. Tensors are in the order of the files, and of the data inside them. Without a
    ``with`` block the files are closed when nothing refers to the checkpoint any more.
    """

    def __init__(self, path: Path, device: str = "cpu", framework: str = "np", **options: bool) -> None:
        if framework not in FRAMEWORKS:
            raise UsageError(f"framework: expected {' or '.join(map(repr, FRAMEWORKS))}, got {framework!r}")
        parse_device(device)
        if framework == "pt":
            import_torch()  # raises the error that says what to install, before anything is read
        self._options = _chosen(options)
        self._device, self._framework = str(device), framework
        self._files: dict[str, TensorFile] | None = {}
        self._lock = threading.Lock()
        with limits.using(**self._options):
            self._source = open_source(path)

    @property
    def path(self) -> str:
        """The file or folder, as it was named."""
        return self._source.path

    def info(self, name: str) -> Record:
        """Format, shape, dtype, params, tables and arrays of a tensor, from the header alone."""
        record = self._source.records.get(name)
        if record is None:
            raise no_tensor(name, self._source.records, self.path)
        return record[1]

    def _file(self, name: str) -> TensorFile:
        """The open file with a tensor."""
        shard = self._source.records[name][0]
        with self._lock:
            if self._files is None:
                raise UsageError("the checkpoint is closed; read inside the `with` block", path=self.path)
            f = self._files.pop(shard, None)
            if f is None:
                with limits.using(**self._options):
                    f = self._source.open(shard)
            self._files[shard] = f
            if len(self._files) > _OPEN:  # not closed here: another thread may be reading it, and it closes itself
                del self._files[next(iter(self._files))]
        return f

    def __getitem__(self, name: str) -> Any:
        record = self.info(name)
        f = self._file(name)
        if self._framework == "np" or record.format not in (None, Dense):
            return f.read(name, self._device)
        # Through the host, because CuPy has no eight-bit floats, and torch alone is enough for dense tensors.
        t = array_to_torch(f.array(name))
        return t if self._device == "cpu" else t.to(self._device)

    def __contains__(self, name: object) -> bool:
        return name in self._source.records

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.records)

    def __len__(self) -> int:
        return len(self._source.records)

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor, or ``default`` if there is none of that name."""
        return self[name] if name in self._source.records else default

    def __repr__(self) -> str:
        files = len(self._source.shards)
        return f"Checkpoint({printable(self.path)!r}, {len(self)} tensors, {files} file{'s'[: files != 1]})"

    __eq__, __hash__ = object.__eq__, object.__hash__  # those of a mapping would read everything

    def close(self) -> None:
        """Release the files. Harmless to repeat."""
        with self._lock:
            files, self._files = self._files, None
        for f in (files or {}).values():
            f.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _chosen(options: Mapping[str, bool]) -> dict[str, Any]:
    """Those that are set, for ``limits.using``: an option that is not given leaves the limits in force as they are."""
    return {name: True for name, chosen in options.items() if chosen}


def load_all(path: Path, names: Iterable[str] | None, device: str, **options: bool) -> dict[str, Tensor]:
    """The tensors of a packed folder or of a matrix file, those of one file side by side."""
    parse_device(device)
    with limits.using(**_chosen(options)):
        source = open_source(path)
        if not source.described:
            raise DescriptorError(
                "this is a dense checkpoint, it has no spformat descriptor: use `spformat convert` to make one, or "
                "spformat.open(path) to read its tensors as they are",
                path=source.path,
            )
        chosen = list(source.records) if names is None else [names] if isinstance(names, str) else list(names)
        for name in chosen:
            if name not in source.records:
                raise no_tensor(name, source.records, source.path)
        order = {shard: i for i, shard in enumerate(source.shards)}
        by_shard = sorted(chosen, key=lambda name: order[source.records[name][0]])
        tensors = dict(source.tensors(by_shard, device))
        return {name: tensors[name] for name in chosen}
