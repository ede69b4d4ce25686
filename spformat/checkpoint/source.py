"""The input of a conversion: a safetensors file, a (sharded) Hugging Face folder, or a folder this package wrote."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

from .. import limits
from ..errors import ContainerError, InputError, IntegrityError, LimitError, PathError, printable
from ..storage.container import safe_open
from ..storage.descriptor import Record
from ..storage.files import (
    Identity,
    Path,
    close_read,
    identity_of,
    is_file,
    member,
    names_in,
    not_outside,
    open_regular,
    path_text,
    read_small,
    safe_name,
    size_of,
)
from ..storage.filewriter import Tensor
from ..storage.stheader import TORCH_SUFFIXES, strict_json, torch_lines
from ..storage.tensorfile import TensorFile
from .layouts import CONFIG, NEUTRAL, PACKED_INDEX, config_for, is_packed, parsed_config
from .manifest import JOURNAL_GLOB, MANIFEST, check_index_keys, is_finished, read_manifest
from .matrix_file import MatrixFile, is_matrix
from .packed import Packed, UnpackedFile, config_when_dense, unpacked

INDEX_SUFFIX = ".safetensors.index.json"
INDEX = "model" + INDEX_SUFFIX
"""Name of the index that is written beside a dense checkpoint of several shards."""
OURS = re.compile(r"spformat-\d{5,}-of-\d{5,}\.safetensors")
"""Names that only this package gives to shards."""
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,9})-of-(?P<of>\d{5,9})\.safetensors")
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.safetensors)")
_MAX_INDEX = 256 << 20
SIDE_FILE = 1 << 30
"""The most bytes of a side file; larger files are left behind."""
_OTHER_WEIGHTS = (
    ".safetensors", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".gguf",
    ".tflite",
)  # fmt: skip
"""File name endings of weights that are not converted: of other frameworks, or shards that the index does not list."""

_BESIDE = "a shard lies beside the file that lists it, which has its name alone: move it there, and mend the list"
_LISTS_NOTHING = "it lists no file, so none of those beside it belongs to it: get the right one, or remove it"


@dataclass(frozen=True)
class Source:
    """The shards of a checkpoint in order, and which tensor lies in which shard. Only headers have been read."""

    path: str
    folder: str
    shards: tuple[str, ...]
    """File names, in the order their outputs are numbered."""
    records: dict[str, tuple[str, Record, int]]
    """Tensor name -> (shard, description, bytes), shard after shard, in the order of the data inside."""
    side_files: tuple[str, ...] = ()
    """Files beside the shards that are copied byte for byte (config, tokenizer)."""
    left_behind: tuple[str, ...] = ()
    """Names beside the shards that are not copied: folders, other weights, files over ``SIDE_FILE`` bytes."""
    index: dict[str, Any] = field(default_factory=dict)
    """The index JSON without its weight_map. Its other keys are written into the index of a dense checkpoint."""
    original_names: dict[str, str] = field(default_factory=dict)
    """Shard -> name of the dense shard that it was converted from, if there is a manifest."""
    packed: dict[str, Packed] = field(default_factory=dict)
    """Tensors that compressed-tensors packed, by the name of the dense tensor that ``records`` and ``open`` present."""
    identities: dict[str, Identity] = field(default_factory=dict)
    """Shard -> which file it was when the headers were read."""
    metadata: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Key of ``__metadata__`` -> its different texts in the shards, in order; not those of this package."""
    described: bool = True
    """Whether every file was written by this package, and says which arrays form which tensor."""
    matrix: MatrixFile | None = None
    """The matrix of a .npz, .mtx or .smtx file: it can be looked at, and ``convert_checkpoint`` does not take it."""

    def open(self, shard: str) -> TensorFile:
        """Open one shard."""
        if self.matrix is not None:
            return cast(TensorFile, self.matrix)
        f, groups = self._file(shard), self.packed_in(shard)
        return cast(TensorFile, UnpackedFile(f, groups, self._file)) if groups else f

    def opened(self, names: Iterable[str]) -> Iterator[tuple[str, TensorFile]]:
        """Each name with its open shard. For names of one shard in succession it is opened, and its header parsed,
        once."""
        for shard, group in groupby(names, key=lambda name: self.records[name][0]):
            with self.open(shard) as f:
                for name in group:
                    yield name, f

    def tensors(self, names: Iterable[str], device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
        """Each name with its tensor, read as ``TensorFile.read_all`` does. Names of one shard should be in succession,
        as they are in ``records``."""
        for shard, group in groupby(names, key=lambda name: self.records[name][0]):
            chosen = list(group)
            with self.open(shard) as f:
                yield from zip(chosen, f.read_all(chosen, device), strict=True)

    def packed_in(self, shard: str) -> dict[str, Packed]:
        """Those of ``packed`` that ``open`` presents in a shard."""
        return {name: group for name, group in self.packed.items() if group.shard == shard}

    def _file(self, shard: str) -> TensorFile:
        f = safe_open(os.path.join(self.folder, shard))
        if f.identity != self.identities.get(shard, f.identity):
            f.close()
            raise _replaced(f.path)
        return f

    def check_unchanged(self, shard: str) -> None:
        """IntegrityError if another file has the name of a shard now than when its header was read."""
        path = os.path.join(self.folder, shard)
        try:
            now = identity_of(os.stat(path))
        except OSError as e:
            raise _replaced(path) from e
        if now != self.identities.get(shard, now):
            raise _replaced(path)

    def config(self, layout: str = NEUTRAL) -> bytes:
        """The contents of config.json in a target of that layout. All other side files are copied unchanged."""
        path = os.path.join(self.folder, CONFIG)
        data = read_small(path, SIDE_FILE)
        return config_for(config_when_dense(data) if self.packed else data, layout, path)


def open_source(path: Path, *, follow: Sequence[Path] = ()) -> Source:
    """Read the headers of a checkpoint, or a whole file with one matrix (.npz, .mtx, .smtx).

    follow: folders that symlinked shards may point into (default: the ``link_roots`` of the limits in force).

    Raises InputError (missing, no safetensors inside), ContainerError (index and shards disagree, a tensor in
    two shards, an unfinished conversion), PathError (a shard name that leads outside).
    """
    where = path_text(path)
    follow = follow or limits.current().link_roots
    if not os.path.isdir(where):
        if "://" in where:
            close_read(open_regular(where)[0])  # raises the error for URLs; below, the path is no longer one
        if _ON_THE_HUB.fullmatch(where) and not os.path.lexists(where):
            hint = f"convert_checkpoint takes a model of the Hugging Face hub as hf://{where}"
            raise InputError(f"cannot open the file: No such file or directory; {hint}", path=where)
        folder, name = os.path.split(os.path.abspath(where))
        if is_matrix(where):
            f = MatrixFile.open(where)
            return Source(where, folder, (name,), {f.name: (name, f.info(f.name), f.nbytes(f.name))}, matrix=f)
        return _assemble(where, folder, (name,), {}, {}, (), follow)
    names = names_in(where)
    if not is_finished(where, filter(JOURNAL_GLOB.fullmatch, names)):
        raise ContainerError(
            f"an unfinished conversion (a journal, and no {MANIFEST} of its run): finish it with "
            f"`spformat convert SRC {where} --resume`, or, if save_pretrained was writing it, save the model again",
            path=where,
        )
    if MANIFEST in names:
        _refuse_dense_over_packed(where, names, follow)
        listing = os.path.join(where, MANIFEST)
        manifest = read_manifest(not_outside(listing, follow))
        shards = tuple(safe_name(n, ".safetensors", listing, _BESIDE) for n in manifest["files"])
        if not shards:
            raise ContainerError("manifest: " + _LISTS_NOTHING, path=listing)
        for shard in shards:
            member(where, shard, ".safetensors", follow)
        original_names = {n: f["source"] for n, f in manifest["files"].items()}
        source = _assemble(where, where, shards, {}, manifest.get("index", {}), _others(names, shards), follow)
        missing = sorted(set(manifest["tensors"]) ^ set(source.records))
        if missing:
            raise ContainerError(
                f"{MANIFEST} and the shards disagree on {len(missing)} tensor(s), first '{missing[0]}'", path=where
            )
        return Source(**{**source.__dict__, "original_names": original_names})
    indexes = [n for n in names if n.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise ContainerError(
            f"expected one index, got {', '.join(indexes)}; convert a folder with one of them", path=where
        )
    if indexes:
        listing = os.path.join(where, indexes[0])
        index, weight_map = _read_index(not_outside(listing, follow))
        shards = tuple(sorted({safe_name(f, ".safetensors", listing, _BESIDE) for f in weight_map.values()}))
        for shard in shards:
            member(where, shard, ".safetensors", follow)
        return _assemble(where, where, shards, weight_map, index, _others(names, (*shards, indexes[0])), follow)
    # Hidden ones are no shards: macOS puts "._model.safetensors" beside each file on foreign file systems.
    shards = tuple(n for n in names if n.endswith(".safetensors") and not n.startswith("."))
    if not shards:
        pickle = next((n for n in names if n.endswith(TORCH_SUFFIXES)), None)
        fix = f"; {printable(pickle)} is {torch_lines(os.path.join(where, pickle))}" if pickle else _folder_below(where)
        raise InputError(f"no .safetensors file in the folder{fix}", path=where)
    for shard in shards:
        member(where, shard, ".safetensors", follow)
    _require_siblings(shards, where)
    return _assemble(where, where, shards, {}, {}, _others(names, shards), follow)


def _folder_below(folder: str) -> str:
    """What to name instead of a folder with no shard: the first one with some, as of a pipeline of diffusers (unet) or
    of a repository in a Hugging Face cache (snapshots/COMMIT)."""
    for below in ("*", "*/*"):
        shards = glob.glob(os.path.join(glob.escape(folder), below, "*.safetensors"))
        if shards:
            path = os.path.dirname(min(shards))
            return f"; {printable(os.path.relpath(path, folder))} has some: name {printable(path)} instead"
    return ""


def _refuse_dense_over_packed(folder: str, names: Sequence[str], follow: Sequence[Path]) -> None:
    """ContainerError for a packed folder of transformers over which transformers has saved a dense model.

    It writes its weights and its config.json, and leaves the packed files: those of an older model.
    """
    dense = next((n for n in ("model.safetensors", INDEX) if n in names), None)
    if dense is None or PACKED_INDEX not in names or CONFIG not in names:
        return
    config = parsed_config(read_small(not_outside(os.path.join(folder, CONFIG), follow), SIDE_FILE))
    if config is not None and not is_packed(config):
        raise ContainerError(
            f"two models: {CONFIG} is that of {dense}, a dense one, and {MANIFEST} lists an older one, which is "
            "packed: remove the files spformat* if the dense one is right",
            path=folder,
        )


def _require_siblings(shards: Sequence[str], path: str) -> None:
    """ContainerError if the names of the shards say that there are more of them. It is for a folder without an index
    and without a manifest, which a run that was stopped may have left."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, shards)):
        numbers.setdefault((match["stem"], int(match["of"])), set()).add(int(match["number"]))
    for (stem, of), there in numbers.items():
        if len(there) < of:
            first = next(i for i in range(1, of + 1) if i not in there)
            missing = f"{of - len(there)} of {of} shards {'is' if of - len(there) == 1 else 'are'} missing"
            name = f"{stem}-{first:05}-of-{of:05}.safetensors"
            raise ContainerError(f"{missing}, first {name}: get them, or name a single file instead", path=path)


def _others(names: Sequence[str], listed: Sequence[str]) -> tuple[str, ...]:
    """Names beside the shards, without hidden ones."""
    skip = {*listed, MANIFEST, *filter(JOURNAL_GLOB.fullmatch, names)}
    return tuple(n for n in names if n not in skip and not n.startswith("."))


def may_be_side_file(name: str, nbytes: int) -> bool:
    """Whether a file beside the shards is copied: it has no weights and at most ``SIDE_FILE`` bytes."""
    return not name.lower().endswith(_OTHER_WEIGHTS) and nbytes <= SIDE_FILE


def needed(sizes: Mapping[str, int | None]) -> list[str]:
    """Those names of ``sizes``, the files of a folder and their bytes, that a conversion of the folder reads or copies.

    Without a ``.safetensors`` file these are all, and ``open_source`` says what is missing. Hidden files are none.
    """
    weights = any(name.endswith(".safetensors") for name in sizes)
    return [
        name
        for name, nbytes in sizes.items()
        if not name.startswith(".")
        and (not weights or name.endswith(".safetensors") or may_be_side_file(name, nbytes or 0))
    ]


def _is_side_file(path: str) -> bool:
    return is_file(path) and may_be_side_file(path, size_of(path))


def _assemble(
    path: str, folder: str, shards: tuple[str, ...], weight_map: dict[str, str], index: dict[str, Any],
    others: tuple[str, ...], follow: Sequence[Path],
) -> Source:  # fmt: skip
    records: dict[str, tuple[str, Record, int]] = {}
    identities, texts, described = {}, dict[str, set[str]](), True
    for shard in shards:
        with safe_open(os.path.join(folder, shard)) as f:
            identities[shard] = f.identity
            described &= f.described
            for key, text in f.own_metadata.items():
                texts.setdefault(key, set()).add(text)
            for name in f:
                if name in records:
                    both = f"{records[name][0]} and {shard}"
                    message = f"expected each tensor once, got it in {both}; name one of the files instead"
                    raise ContainerError(message, path=path, tensor=name)
                records[name] = (shard, f.info(name), f.nbytes(name))
    for name, shard in weight_map.items():
        if name not in records or records[name][0] != shard:
            got = f"it is in {records[name][0]}" if name in records else "no shard holds it"
            raise ContainerError(f"the index places the tensor in {shard}, but {got}", path=path, tensor=name)
    extra = next((n for n in records if n not in weight_map), None) if weight_map else None
    if extra is not None:
        raise ContainerError(
            f"{records[extra][0]} holds a tensor that the index does not list", path=path, tensor=extra
        )
    files = tuple(n for n in others if _is_side_file(os.path.join(folder, n)))
    for name in files:
        not_outside(os.path.join(folder, name), follow)
    left = tuple(n for n in others if n not in files)
    records, packed = unpacked(records, folder, path)
    metadata = {key: tuple(sorted(every)) for key, every in texts.items()}
    return Source(
        path, folder, shards, records, files, left, index, packed=packed, identities=identities, metadata=metadata,
        described=described,
    )  # fmt: skip


def _replaced(path: str) -> IntegrityError:
    return IntegrityError("the file was replaced or changed after its header was read; run again", path=path)


def _read_index(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(other keys, weight_map) of a Hugging Face index; LimitError for more tensors than the limits allow."""
    raw = read_small(path, _MAX_INDEX)
    try:
        # Counted before parsing, because a parsed index needs much more memory.
        limits.check("tensors", raw.count(b'.safetensors"'), "entries of the index")
        tree = strict_json(raw, "index")
        weight_map = tree.pop("weight_map", None)
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ContainerError("index: expected weight_map, an object of tensor name -> file name")
        limits.check("tensors", len(weight_map), "entries of the index")
        if not isinstance(tree.get("metadata", {}), dict):
            raise ContainerError("index: expected an object under 'metadata'")
        ours = next((n for n in weight_map.values() if OURS.fullmatch(n)), None)
        if ours is not None:
            raise PathError(
                f"index: the shard name {ours} is one this package gives to its own output; rename the file"
            )
        check_index_keys(tree, path)
        if not weight_map:
            raise ContainerError("index: " + _LISTS_NOTHING)
    except (ContainerError, LimitError, PathError) as e:
        raise e.at(path=path) from e.__cause__
    return tree, weight_map
