"""Models on the Hugging Face hub: their files are downloaded by huggingface_hub, with its token and its cache.

huggingface_hub falls back to the files on disk when the hub does not answer, even if they are of an earlier commit. So
one commit is chosen and listed first; files on disk with other contents are removed before the download, and each file
has the size of the list after it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

from ..arrays import threads
from ..errors import InputError, UsageError
from ..storage.files import is_file, remove, sha256_of, size_of
from .source import needed

Moved = Callable[[str, int], None]
"""Called with the name and the size in bytes of every file that was copied."""

_URL = re.compile(
    r"hf://(?:(?P<type>model|dataset|space)s/)?(?P<id>(?!(?:models|datasets|spaces|kernels|buckets)/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?",
    re.IGNORECASE,
)
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.safetensors)(@[\w./-]+)?")
"""A repository as the hub writes it, "org/name", with a revision if one is asked for."""
_STREAMS = 4
"""Files that are hashed at a time."""


@dataclass(frozen=True)
class Downloaded:
    """Where the files of a source lie now."""

    path: str
    left_behind: tuple[str, ...] = ()
    """Names in the source that were not downloaded, because a conversion would not copy them."""
    link_roots: tuple[str, ...] = ()
    """Folders that symlinks in ``path`` lead into."""


@dataclass(frozen=True)
class Place:
    """A file or folder in a repository of the hub."""

    url: str
    repo_id: str
    repo_type: str
    revision: str | None
    """A branch, tag or commit; None: the default branch."""
    path: str
    """Path in the repository; empty: its top folder."""

    @property
    def repository(self) -> dict[str, Any]:
        return {"repo_id": self.repo_id, "repo_type": self.repo_type}


def place_of(url: str) -> Place | None:
    """The parts of ``hf://[datasets/|spaces/]ORG/NAME[@REVISION][/PATH]``; None for any other URL."""
    match = _URL.fullmatch(url.rstrip("/"))
    if match is None:
        return None
    revision = match["revision"] and unquote(match["revision"])
    return Place(url, match["id"], match["type"] or "model", revision, (match["path"] or "").strip("/"))


def url_of(path: str) -> str:
    """``hf://org/name[@revision]`` for a path "org/name[@revision]" that does not exist here; else ``path`` itself."""
    return f"hf://{path}" if _ID.fullmatch(path) and not os.path.lexists(path) else path


def download(place: Place, folder: str | None, moved: Moved | None = None) -> Downloaded:
    """Download a file, or those files of a folder that a conversion needs, to ``folder``; None: to the cache of
    huggingface_hub. Files that are there with the same contents stay. With ``moved``, huggingface_hub shows progress
    bars on a terminal.

    In the offline mode of huggingface_hub nothing is downloaded: the result is the copy in its cache.

    Raises UsageError (huggingface_hub is not installed, the name is none of a repository), InputError (nothing is
    there, a file has another size than the hub says) and the errors of huggingface_hub.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
        from huggingface_hub.hf_api import RepoFile
    except ImportError as e:
        raise UsageError("models on the hub need huggingface_hub: pip install 'spformat[hub]'", path=place.url) from e
    api = HfApi()
    try:
        commit = api.repo_info(**place.repository, revision=place.revision).sha
    except HFValidationError as e:
        raise UsageError(f"not a repository of the hub: {e}", path=place.url) from e
    except OfflineModeIsEnabled:
        return _in_cache(place)
    single = False
    if place.path:
        entries = api.get_paths_info(**place.repository, paths=[place.path], revision=commit)
        if not entries:
            raise InputError("nothing is there", path=place.url)
        single = isinstance(entries[0], RepoFile)
    if not single:
        entries = list(api.list_repo_tree(**place.repository, path_in_repo=place.path or None, revision=commit))
    by_name = {entry.path.rpartition("/")[2]: entry for entry in entries}
    sizes = {name: entry.size for name, entry in by_name.items() if isinstance(entry, RepoFile)}
    names = list(sizes) if single else needed(sizes)
    path = os.path.join(folder or "", place.path) if place.path else folder or ""
    here = os.path.dirname(path) if single else path
    if folder is not None:
        if not single:
            refuse_others(here, names, place.url)
        with ThreadPoolExecutor(_STREAMS) as pool:
            checks = (partial(_remove_if_changed, os.path.join(here, name), by_name[name]) for name in names)
            deque(threads.in_order(pool, checks, _STREAMS), maxlen=0)
    with _progress_bars(moved is not None):
        patterns = [glob.escape(by_name[name].path) for name in names]
        if folder is not None:
            snapshot_download(**place.repository, revision=commit, local_dir=folder, allow_patterns=patterns)
        else:
            # By its name, so that the cache knows the commit of the branch or tag without the hub, too.
            snapshot = snapshot_download(**place.repository, revision=place.revision, allow_patterns=patterns)
            if os.path.basename(snapshot) != commit:  # the branch has moved meanwhile
                snapshot = snapshot_download(**place.repository, revision=commit, allow_patterns=patterns)
    roots: tuple[str, ...] = ()
    if folder is None:
        path = os.path.join(snapshot, place.path) if place.path else snapshot
        here, roots = os.path.dirname(path) if single else path, (_repository_folder(snapshot),)
    for name in names:
        file = os.path.join(here, name)
        if not is_file(file):
            raise InputError(f"{name}: the download has not arrived; try again", path=place.url)
        if size_of(file) != sizes[name]:
            message = f"{name}: expected {sizes[name]:,} bytes, got {size_of(file):,}; try again"
            raise InputError(message, path=place.url)
        if moved:
            moved(name, sizes[name])
    left = () if single else tuple(sorted(n for n in by_name if n not in names and not n.startswith(".")))
    return Downloaded(path, left, roots)


def refuse_others(folder: str, names: list[str], url: str) -> None:
    """InputError if ``folder`` contains a file that is none of ``names``: of another model, or of an earlier commit.
    A conversion would take it for a file of the source."""
    if os.path.isdir(folder):
        for name in sorted(os.listdir(folder)):
            if name not in names and not name.startswith(".") and is_file(os.path.join(folder, name)):
                raise InputError(
                    f"the staging folder contains {name}, which is no file of {url}: remove it, or give another folder",
                    path=folder,
                )


def _remove_if_changed(path: str, entry: Any) -> None:
    """Remove a file that exists with other contents than ``entry`` (a RepoFile) tells."""
    if not is_file(path):
        return
    if size_of(path) == entry.size:
        if entry.lfs is not None and sha256_of(path) == entry.lfs.sha256:
            return
        if entry.lfs is None and _git_hash(path) == entry.blob_id:
            return
    remove(path)


def _git_hash(path: str) -> str:
    """The SHA-1 by which git names the contents of a file."""
    digest = hashlib.sha1(b"blob %d\0" % size_of(path), usedforsecurity=False)
    with open(path, "rb") as f:
        while data := f.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _in_cache(place: Place) -> Downloaded:
    """The copy in the cache of huggingface_hub: a folder of symlinks. Recent releases of huggingface_hub know whether
    one of its weights is missing."""
    from huggingface_hub import snapshot_download

    prefix = glob.escape(place.path) + "/" if place.path else ""
    weights = (
        [glob.escape(place.path)] if place.path.endswith(".safetensors")
        else [f"{prefix}*.safetensors", f"{prefix}*.safetensors.index.json"]
    )  # fmt: skip
    snapshot = snapshot_download(
        **place.repository, revision=place.revision, allow_patterns=weights, ignore_patterns=[f"{prefix}*/*"]
    )
    path = os.path.join(snapshot, place.path) if place.path else snapshot
    return Downloaded(path, link_roots=(_repository_folder(snapshot),))


def _repository_folder(snapshot: str) -> str:
    """The folder of a repository in the cache, into which the symlinks of its snapshots lead."""
    return os.path.dirname(os.path.dirname(snapshot))


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """With ``shown``, huggingface_hub shows its progress bars on a terminal, unless the user has disabled them."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if (shown and sys.stderr.isatty()) or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
