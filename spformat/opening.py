"""``open`` and ``load``: whatever holds tensors or matrices, by its path alone.

Checkpoints are imported when one is opened: importing spformat, and loading a file, do not need them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .errors import UsageError
from .interop import MATRIX_SUFFIXES
from .storage import container
from .storage.files import Path, path_text
from .storage.filewriter import Tensor

if TYPE_CHECKING:
    from .checkpoint.opened import Checkpoint


def open(
    path: Path,
    *,
    device: str = "cpu",
    framework: str = "np",
    allow_unchecked: bool = False,
    ignore_unknown: bool = False,
) -> Checkpoint:
    """Open a packed or dense checkpoint, or a matrix file, as a mapping from names to tensors; no data is read yet.

    with spformat.open("./llama-sp") as f:
        w = f["model.layers.0.mlp.up_proj.weight"]

    What a name stands for is read, checked and validated at each access: a matrix in a sparse format as its ``Format``,
    a 2-D tensor of a dense checkpoint as ``Dense``, any other tensor as an array. Host arrays are read-only. Tensors
    that compressed-tensors packed are read as the dense ones they stand for. The matrix of a matrix file has the name
    of the file, without its ending.

    Args:
        path: a safetensors file, a folder of them with or without an index, a folder that spformat wrote, or a
            ``.npz``, ``.mtx`` or ``.smtx`` file, which is read at once.
        device: where tensors are read to: "cpu", "cuda" or "cuda:<id>".
        framework: "np", or "pt": then all tensors but matrices in sparse formats are torch tensors, which may be
            written to. Every dtype that the file and torch have is read, bfloat16 and float8 too.
        allow_unchecked, ignore_unknown: as for ``safe_open``.

    Raises:
        UsageError: another framework, or torch is not installed; at an access, a name that is not there.
        InputError, ContainerError, DescriptorError, VersionError, IntegrityError, LimitError, PathError: as
        ``safe_open``, and for folders whose index or manifest and files disagree.
    """
    from .checkpoint.opened import Checkpoint

    return Checkpoint(path, device, framework, allow_unchecked=allow_unchecked, ignore_unknown=ignore_unknown)


def load(
    path: Path,
    names: Iterable[str] | None = None,
    device: str = "cpu",
    *,
    allow_unchecked: bool = False,
    ignore_unknown: bool = False,
) -> dict[str, Tensor]:
    """The tensors of a file that ``save`` wrote, of a packed folder or of a matrix file: name -> Format or array.

    All are checked and validated; host arrays are read-only.

    Args:
        path: a file or folder. ``open`` takes dense checkpoints, too.
        names: only these tensors.
        device: "cpu", "cuda" or "cuda:<id>".
        allow_unchecked, ignore_unknown: as for ``safe_open``.

    Raises the errors of ``open``, and DescriptorError for a dense checkpoint.
    """
    where = path_text(path)
    if not isinstance(names, Iterable | None):
        raise UsageError(f"names: expected a list of names, or one, got {names!r:.80}")
    options = {"allow_unchecked": allow_unchecked, "ignore_unknown": ignore_unknown}
    if os.path.isdir(where) or where.lower().endswith(MATRIX_SUFFIXES):
        from .checkpoint.opened import load_all

        return load_all(where, names, device, **options)
    return container.load(where, names, device, **options)
