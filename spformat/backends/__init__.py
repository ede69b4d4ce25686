"""Which backends exist and how they are loaded: built-in ones by module path, others by entry point.

A plug-in that only adds faster conversions has an entry point of the group ``spformat.edges``, which loads to a
sequence of ``Edge``.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from typing import Any

from ..arrays import collector
from ..errors import UsageError
from ..formats import edges
from ..products.kernel import Kernel
from .base import Backend

ENTRY_POINT_GROUP, EDGE_GROUP = "spformat.backends", "spformat.edges"

KNOWN = {
    "cpu": "spformat.backends.cpu",
    "reference": "spformat.backends.reference",
    "cuda": "spformat.backends.cuda",
    "vendor": "spformat.backends.vendor",
}
"""Built-in backends: each module has an object called BACKEND."""

HOST_ORDER = ("cpu", "*", "reference")
DEVICE_ORDER = ("cuda", "vendor", "*")
"""The order of backends for operands on the host and on a device; "*" stands for third-party backends."""


_registered: dict[str, Backend] = {}


def register(backend: Backend) -> Backend:
    """Add a backend in this process; its name must be free. Installed plug-ins use entry points instead."""
    if backend.name in KNOWN or _registered.setdefault(backend.name, backend) is not backend:
        raise UsageError(f"a backend called {backend.name!r} is already there")
    get.cache_clear()
    return backend


def unregister(name: str) -> None:
    """Remove a backend that this process added; UsageError for any other."""
    if _registered.pop(name, None) is None:
        raise UsageError(f"no backend called {name!r:.80} was added in this process", value=name)
    get.cache_clear()


def _entry_points(group: str = ENTRY_POINT_GROUP) -> Any:
    """The entry points of a group that installed packages have."""
    if not _may_be_installed(group):
        return ()
    from importlib.metadata import entry_points  # takes 40 ms; most machines have no plug-ins

    return entry_points(group=group)


def _may_be_installed(group: str) -> bool:
    """False if certainly no installed package has an entry point of the group; takes 2 ms.

    It searches the files ``entry_points.txt`` that installers write for the name of the group. Packages that lie
    elsewhere (in a zip file, or behind an importer of their own) are left to ``importlib.metadata``.
    """
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return True
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except NotADirectoryError:
            return True
        except OSError:  # importlib passes over folders that do not exist or cannot be read
            continue
        for name in names:
            if name.lower().endswith((".dist-info", "egg-info")):
                try:
                    with open(os.path.join(folder, name, "entry_points.txt"), "rb") as f:
                        if group.encode() in f.read():
                            return True
                except OSError:
                    continue
    return False


@functools.cache
def third_party() -> tuple[str, ...]:
    """Names of installed third-party backends, sorted. This imports none of them."""
    names = {e.name for e in _entry_points()}
    return tuple(sorted(names - set(KNOWN)))


def names() -> tuple[str, ...]:
    """All backends, built-in ones first."""
    return (*KNOWN, *_registered, *third_party())


def order(device: str, every: bool = True) -> tuple[str, ...]:
    """Backends in the order in which they are asked for operands on ``device`` ("cpu" or "cuda").

    every: also list the other built-in backends, which refuse such operands, at the end.
    """
    first, rest = (HOST_ORDER, DEVICE_ORDER) if device == "cpu" else (DEVICE_ORDER, HOST_ORDER)
    listed = [name for item in first for name in ((*_registered, *third_party()) if item == "*" else (item,))]
    return tuple(listed + [name for name in rest if every and name in KNOWN and name not in listed])


@functools.cache
def get(name: str) -> Backend:
    """Import and return a backend. UsageError for an unknown name; a plug-in's own error passes through."""
    if name in KNOWN:
        with collector.at_rest():
            backend: Backend = importlib.import_module(KNOWN[name]).BACKEND
        return backend
    if name in _registered:
        return _registered[name]
    for e in _entry_points():
        if e.name == name:
            loaded = e.load()
            plugin: Backend = loaded() if isinstance(loaded, type) else getattr(loaded, "BACKEND", loaded)
            return plugin
    raise UsageError(f"unknown backend {name!r} (known: {', '.join(names())})")


def kernel_named(name: str) -> Kernel:
    """The kernel of a full name, such as "cuda.spmm_csr", which ``explain`` gave."""
    return next(k for k in get(name.partition(".")[0]).kernels() if k.name == name)


# ------------------------------------------------------------------ edges


def _cuda_edges() -> tuple[edges.Edge, ...]:
    from .cuda.edges import EDGES

    return EDGES


def _installed_edges(device: str) -> Iterator[edges.Edge]:
    """The edges of installed plug-ins for a kind of device; a plug-in's own error passes through."""
    for e in _entry_points(EDGE_GROUP):
        yield from (edge for edge in e.load() if edge.device == device)


edges.provide("cuda", functools.partial(_installed_edges, "cuda"))
edges.provide("cuda", _cuda_edges)
edges.provide("cpu", functools.partial(_installed_edges, "cpu"))
