"""Which backends the tests run on.

``pytest --backends reference,cpu,cuda``: exactly these, and one that cannot run here is an error, so that a broken
driver does not go unnoticed. Without the option every backend that can run here is tested, and the others are
skipped with the reason that they give themselves.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spformat import backends
from spformat.errors import UsageError

MEMORY_DISK = Path("/dev/shm")
"""Every save is fsynced, which a shared disk may answer in seconds: files of the tests go to memory, if it has room."""

if not importlib.util.find_spec("spformat_cli"):
    # A checkout that is not installed: the command line lies beside the package, as `cli`. Programs that tests start
    # find it in the same way, through PYTHONPATH.
    ROOT, LINKS = Path(__file__).parents[1], tempfile.mkdtemp(prefix="spformat-")
    atexit.register(shutil.rmtree, LINKS, ignore_errors=True)
    Path(LINKS, "spformat_cli").symlink_to(ROOT / "cli")
    sys.path[:0] = [str(ROOT), LINKS]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), LINKS, *filter(None, [os.environ.get("PYTHONPATH")])])

if importlib.util.find_spec("hypothesis"):  # a machine with a GPU may lack it
    from hypothesis import settings

    # Examples of every property. `.ci/run` asks for ci (--hypothesis-profile), `make nightly` draws new ones each time.
    settings.register_profile("quick", max_examples=100, deadline=None, derandomize=True)
    settings.register_profile("ci", max_examples=1000, deadline=None, derandomize=True)
    settings.register_profile("nightly", max_examples=20_000, deadline=None, print_blob=True)
    settings.load_profile("quick")

FAULTS = range(700, 721)
"""cudaErrorIllegalAddress, .., cudaErrorLaunchFailure, ..: the errors that CUDA repeats until the process ends."""

MARKED = {"gpu": "cuda"}
"""Marker -> the backend its tests need, beside ``@pytest.mark.backend(name)``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", default="", metavar="NAMES", help="comma-separated; a missing one is an error")


def pytest_configure(config: pytest.Config) -> None:
    if MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))
    config.addinivalue_line("markers", "backend(name): needs this backend of spformat")
    for name in named(config):
        try:
            missing = backends.get(name).missing()
        except UsageError as e:
            raise pytest.UsageError(f"--backends: {e}") from e
        if missing:
            raise pytest.UsageError(f"--backends: {name} cannot run here: {'; '.join(missing)}")


def named(config: pytest.Config) -> tuple[str, ...]:
    """The backends of the command line."""
    return tuple(filter(None, config.getoption("--backends").split(",")))


def why_not(config: pytest.Config, name: str) -> str:
    """Why the tests of a backend are skipped; "" when they run."""
    asked = named(config)
    if asked:
        return "" if name in asked else f"{name} is not among --backends {','.join(asked)}"
    return "; ".join(backends.get(name).missing())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    """End a worker of xdist after a fault of the device, such as an illegal address.

    After one, every call of CUDA fails in this process. xdist reports this test alone and starts another worker for the
    tests that are left.
    """
    if call.excinfo is None or "PYTEST_XDIST_WORKER" not in os.environ or not device_is_lost():
        return
    shown = call.excinfo.getrepr(style="short")
    print(f"{item.nodeid}: the device is lost to this process\n{shown}", file=sys.stderr, flush=True)
    os._exit(70)


def device_is_lost() -> bool:
    """Whether a fault made the CUDA context of this process useless. Without CuPy there is none."""
    runtime = getattr(getattr(sys.modules.get("cupy"), "cuda", None), "runtime", None)
    try:
        if runtime is not None:
            runtime.deviceSynchronize()
    except Exception as e:
        return getattr(e, "status", 0) in FAULTS
    return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        needed = [MARKED[m] for m in MARKED if item.get_closest_marker(m)]
        needed += [m.args[0] for m in item.iter_markers("backend")]
        reasons = [f"{name}: {text}" for name in dict.fromkeys(needed) if (text := why_not(config, name))]
        if reasons:
            item.add_marker(pytest.mark.skip(reason="; ".join(reasons)))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for CuPy that plans run on without a GPU."""
    from stand_in_world import World

    return World(monkeypatch)


@pytest.fixture
def driver(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A driver that writes down what it is asked to launch, in the stand-in world."""
    from stand_in_driver import CACHES, Driver

    for clear in CACHES:
        clear()
    yield Driver(world, monkeypatch)
    for clear in CACHES:
        clear()


@pytest.fixture
def memory() -> Iterator[Any]:
    """An empty object store."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is missing: pip install 'spformat[remote]'")
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


@pytest.fixture(params=[1, 5, 1 << 20])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The passes of validators, cut into pieces of this many elements."""
    from spformat.arrays import scans
    from spformat.formats import bitmask, two_four

    monkeypatch.setattr(scans, "CHUNK", request.param)
    monkeypatch.setattr(scans.chunks, "__defaults__", (request.param,))
    monkeypatch.setattr(bitmask, "ROW_CHUNK", request.param)
    monkeypatch.setattr(two_four, "ROW_CHUNK", request.param)
    return int(request.param)
