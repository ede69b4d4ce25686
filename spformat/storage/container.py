"""Tensors in a file: ``save``, ``load``, ``safe_open``.  Spec: docs/container.md.

A file is an ordinary safetensors file with a descriptor (``descriptor.py``), which says which entries form which
tensor. ``tensorfile.py`` reads tensors, ``filewriter.py`` writes them. No format is mentioned here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import DescriptorError, UsageError
from ..formats.dense import Dense
from . import stheader, stwriter
from .files import Path, path_text
from .filewriter import Tensor, create, outline, plain_array
from .stheader import TORCH_SUFFIXES
from .tensorfile import TensorFile


def save(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    verify: bool = False,
) -> None:
    """Write tensors to one file, atomically and durably. The same tensors always give the same bytes.

    Args:
        path: the file; an existing one is replaced only with ``overwrite``, and only at the end.
        tensors: name -> Format or array. An array, also a 2-D one, is stored as a plain tensor and loaded as an array;
            wrap it in ``Dense`` to load it as a Format. Device arrays are copied to the host one tensor at a time.
        metadata: more strings for ``__metadata__``.
        verify: read everything back from the device before publishing.

    Raises:
        UsageError: a value that is neither, or two names that would give the same entry.
        FormatError: a Format whose contents are invalid.
        OutputError, WriteError: the file cannot be created or written; nothing was published.
    """
    if not isinstance(tensors, Mapping):
        raise UsageError(f"save: expected {{name: tensor}}, got {type(tensors).__name__}; use save(path, {{'w': x}})")
    _check_ending(path)
    with create(
        path, map(outline, tensors, tensors.values()), overwrite=overwrite, metadata=metadata, verify=verify
    ) as f:
        for name, x in tensors.items():
            f.put(name, x)


def load(path: Path, names: Iterable[str] | None = None, device: str = "cpu", **options: bool) -> dict[str, Tensor]:
    """The tensors of a file that ``save`` wrote, checked and validated: name -> Format or array.

    Host arrays are read-only. names: only these tensors. device: "cpu", "cuda" or "cuda:<id>". options: those of
    ``safe_open``. Raises the errors of ``safe_open``, and DescriptorError for a file without descriptor.
    """
    with safe_open(path, **options) as f:
        if not f.described:
            raise DescriptorError(
                "this is a dense safetensors file, it has no spformat descriptor: use `spformat convert` to make "
                "one, or spformat.open(path) to read its tensors as they are",
                path=f.path,
            )
        chosen = f.keys() if names is None else [names] if isinstance(names, str) else list(names)
        return dict(zip(chosen, f.read_all(chosen, device), strict=True))


def safe_open(path: Path, *, allow_unchecked: bool = False, ignore_unknown: bool = False) -> TensorFile:
    """Open a file that ``save`` wrote, or any safetensors file, without reading its data.

    A file without descriptor is dense input: a 2-D tensor of a value type is read as ``Dense``, any other as an array.

    Args:
        path: a regular file.
        allow_unchecked: accept a file without checksums. Wrong checksums are never accepted.
        ignore_unknown: accept descriptor keys that this release does not know. Both options can also be set for a block
            of code, like the limits: ``with spformat.limits.using(allow_unchecked=True): ...``

    Raises:
        InputError, ContainerError, DescriptorError, VersionError, IntegrityError, LimitError.
    """
    return TensorFile(path, allow_unchecked=allow_unchecked, ignore_unknown=ignore_unknown)


def _check_ending(path: Path) -> None:
    """UsageError for a name that would be read as a file of another kind."""
    name = path_text(path)
    if name.lower().endswith(_OTHER_ENDINGS):
        raise UsageError(
            f"save: {name!r} would be read as another kind of file; use a name that ends in .safetensors "
            "(`spformat convert` writes .npz, .mtx and .smtx)", value=name,
        )  # fmt: skip


_OTHER_ENDINGS = (".npz", ".mtx", ".smtx", *TORCH_SUFFIXES)


def save_dense(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    verify: bool = False,
) -> None:
    """Write an ordinary dense safetensors file, as other tools read it: no descriptor, ``"format": "pt"``.

    Args:
        path, overwrite, metadata, verify: as for ``save``.
        tensors: name -> ``Dense`` or array; each becomes the entry of its name.
    """
    if not isinstance(tensors, Mapping):
        raise UsageError(f"save_dense: expected {{name: tensor}}, got {type(tensors).__name__}")
    _check_ending(path)
    arrays = {name: x.data if isinstance(x, Dense) else x for name, x in tensors.items()}
    records = [outline(name, x) for name, x in arrays.items()]
    sparse = next((r for r in records if r.format is not None), None)
    if sparse is not None and sparse.format is not None:
        raise UsageError(f"expected Dense or an array, got {sparse.format.name}; call to_dense()", tensor=sparse.name)
    specs = [(r.name, *r.arrays[""]) for r in records]
    strings = stwriter.dense_metadata(stheader.own_metadata(metadata))
    with stwriter.Writer(path, specs, strings, overwrite=overwrite, verify=verify) as out:
        for name, x in arrays.items():
            out.put(name, plain_array(name, x))
