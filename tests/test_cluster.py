"""Conversion on a dask cluster: two worker processes, one of them killed in the middle of a file; the same bytes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_parts import SHARDED, SINGLE, tree, whole

import spformat as sf
from spformat.checkpoint import Workers, convert_checkpoint, executors, open_workers

distributed = pytest.importorskip("distributed", reason="dask.distributed is missing: pip install 'spformat[dask]'")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster() -> Any:
    with open_workers("dask", 2, paths=[SHARDED]) as workers:
        yield workers


def test_a_cluster_gives_the_bytes_of_one_process(tmp_path: Path, cluster: Workers) -> None:
    assert cluster.count == 2
    assert cluster.in_flight > 0
    seen: list[str] = []
    convert_checkpoint(SHARDED, tmp_path / "out", executor=cluster, progress=lambda o: seen.append(o.name))
    assert tree(tmp_path / "out") == whole(tmp_path)
    assert len(seen) == 27


def test_errors_of_tensors_come_back_as_they_are(tmp_path: Path, cluster: Workers) -> None:
    with pytest.raises(sf.errors.StructureError, match=r"tensor '.*': two-four"):
        convert_checkpoint(SHARDED, tmp_path / "out", "two-four", executor=cluster)


@pytest.mark.parametrize("source", [SHARDED, SINGLE], ids=["shards", "pieces"])
def test_a_worker_that_is_killed_in_the_middle_of_a_file_loses_nothing(
    tmp_path: Path, cluster: Workers, source: Path
) -> None:
    expected, marks, out = whole(tmp_path, source), tmp_path / "marks", tmp_path / "out"
    marks.mkdir()
    client = distributed.get_client()

    def pause_before_publishing(folder: str) -> None:
        """In the worker: everything is written, nothing has its name; say so, and wait to be killed."""
        import os
        import time

        from spformat.storage.output import Output

        commit = Output.commit

        def slow(self: Any) -> None:
            open(os.path.join(folder, str(os.getpid())), "w").close()
            time.sleep(0.4)
            commit(self)

        Output.commit = slow  # type: ignore[method-assign]

    client.run(pause_before_publishing, str(marks))
    killed: list[int] = []
    leftovers: list[str] = []

    def kill() -> None:
        while not (pids := [int(p.name) for p in marks.iterdir()]):
            time.sleep(0.01)
        leftovers.extend(p.name for p in out.rglob(".spformat-*.tmp"))
        os.kill(pids[0], signal.SIGKILL)
        killed.append(pids[0])

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    convert_checkpoint(source, out, executor=cluster)
    killer.join()
    assert killed
    assert leftovers
    assert tree(out) == expected


def said(**changes: Any) -> Any:
    return {"release": sf.__version__, "hidden": [], "threads": 1, "memory": 1 << 30} | changes


def test_workers_of_another_release_or_without_the_files_are_refused() -> None:
    executors._check_workers({"tcp://a:1": said()})
    with pytest.raises(sf.errors.UsageError, match=r"expected workers with spformat .*, got 9.9 on tcp://b:1"):
        executors._check_workers({"tcp://a:1": said(), "tcp://b:1": said(release="9.9")})
    with pytest.raises(sf.errors.InputError, match="1 of 2 dask workers do not see it, first tcp://b:1") as e:
        executors._check_workers({"tcp://a:1": said(), "tcp://b:1": said(hidden=["/data"])})
    assert e.value.path == "/data"


def test_a_scheduler_that_is_not_there() -> None:
    with (
        pytest.raises(sf.errors.InputError, match="no dask scheduler answers there"),
        open_workers("dask", scheduler="nowhere://host"),
    ):
        pass
