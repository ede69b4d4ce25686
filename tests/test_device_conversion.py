"""Loading to and converting on a device: decisions that need no device, bytes through pinned buffers, equal files."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_in_cupy
from cases import sparse

import spformat as sf
from spformat.checkpoint import (
    Recipe,
    convert_checkpoint,
    executors,
    parts,
    row_chunks,
    run,
    shard,
    shard_input,
    sizing,
)
from spformat.formats import edges
from spformat.storage import device_copy, tensorfile

TARGETS = ("two-four", "bitmask", "csr", "bsr:blocksize=16x16", "vector-nm:n=2,m=4", "sr-bcrs", "ell-buckets", "auto")
PRUNED: dict[str, dict[str, Any]] = {
    "two-four": {"prune": "magnitude"},
    "vector-nm:n=2,m=4": {"prune": "magnitude"},
    "bsr:blocksize=16x16": {"prune": "magnitude", "sparsity": 0.5},
    "bitmask": {"prune": "magnitude", "sparsity": 0.7},
    "dense": {"prune": "magnitude", "sparsity": 0.7},
}
"""Target -> how matrices are pruned to fit it."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy without a GPU, and pieces so small that every buffer is used many times."""
    cupy = stand_in_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(edges, "_waiting", {"cpu": [], "cuda": []})  # no kernel runs here
    monkeypatch.setattr(edges, "_table", {})
    monkeypatch.setattr(tensorfile, "SCAN_ON_DEVICE", 0)
    monkeypatch.setattr(shard_input, "_WORTH_MOVING", 0)
    monkeypatch.setattr(device_copy, "PIECE", 1000)
    monkeypatch.setattr(device_copy, "SEGMENT", 3500)
    return cupy


def tensors() -> dict[str, Any]:
    """Matrices in 2:4, beside what stays plain; lengths are no multiples of a piece."""
    rng = np.random.default_rng(0)
    w = sparse(rng, (96, 160), "bfloat16", 1.0)
    w.reshape(-1, 4)[:, (1, 3)] = 0
    return {"a": w, "b": np.roll(w, 8, axis=0), "bias": rng.normal(size=4003), "none": np.zeros((0, 7)),
            "eight": sparse(rng, (64, 64), "float8_e4m3fn", 0.4), "flags": np.array([True, False])}  # fmt: skip


def test_without_cupy_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    sf.save_dense(tmp_path / "in.safetensors", tensors())
    with pytest.raises(sf.errors.DeviceUnavailable, match=r"pip install 'spformat\[cuda13\]'"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", "bitmask", device="cuda")
    assert not (tmp_path / "out").exists()
    with pytest.raises(sf.errors.UsageError, match="device: expected 'cpu', 'cuda' or 'cuda:<id>', got 'gpu'"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", "bitmask", device="gpu")


def test_every_piece_crosses_before_it_is_used(tmp_path: Path, stand_in: Any) -> None:
    given = {k: v for k, v in tensors().items() if k != "eight"} | {"w": sf.convert(tensors()["a"], "csr")}
    sf.save(tmp_path / "host.safetensors", given)
    loaded = sf.load(tmp_path / "host.safetensors", device="cuda")
    for name, x in given.items():
        if isinstance(x, sf.Format):
            assert all(isinstance(a, stand_in.ndarray) for a in loaded[name].arrays().values())
            continue
        assert isinstance(loaded[name], stand_in.ndarray)
        assert loaded[name].get().tobytes() == x.tobytes()
    sf.save(tmp_path / "device.safetensors", loaded)
    assert (tmp_path / "device.safetensors").read_bytes() == (tmp_path / "host.safetensors").read_bytes()


def test_a_flipped_byte_is_found_on_the_way_to_the_device(tmp_path: Path, stand_in: Any) -> None:
    sf.save(tmp_path / "x.safetensors", {"w": sf.convert(tensors()["a"], "bitmask")})
    data = bytearray((tmp_path / "x.safetensors").read_bytes())
    data[-3] ^= 16
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(sf.errors.IntegrityError, match="the file is damaged"):
        sf.load(tmp_path / "x.safetensors", device="cuda")


@pytest.mark.parametrize("target", ["two-four", "bitmask", "dense"])
def test_conversion_through_the_device_gives_the_same_file(tmp_path: Path, stand_in: Any, target: str) -> None:
    same_files(tmp_path, target, stand_in)


def test_several_devices_convert_side_by_side(
    tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Each has one file at a time; the folder is that of one device."""
    sf.save_dense(tmp_path / "in.safetensors", tensors())
    together, write, busy, calls = threading.Barrier(2), parts.write_shard, set(), []

    def watched(*arguments: Any, device: str, share: int) -> Any:
        assert share == 1
        assert device not in busy
        busy.add(device)
        calls.append(device)
        if calls.count(device) == 1:
            together.wait(timeout=20)  # passes only when both have begun
        try:
            return write(*arguments, device=device, share=share)
        finally:
            busy.remove(device)

    monkeypatch.setattr(parts, "write_shard", watched)
    recipe = Recipe(to="two-four", misfit="keep")
    convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "several", recipe, device="cuda:0, cuda:1")
    assert set(calls) == {"cuda:0", "cuda:1"}
    assert len(calls) > 2
    monkeypatch.undo()
    convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "host", recipe)
    for path in sorted((tmp_path / "host").iterdir()):
        assert (tmp_path / "several" / path.name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "several").iterdir())) == len(list((tmp_path / "host").iterdir()))


def sharded(folder: Path, shards: int) -> None:
    """A checkpoint of several files, with an index."""
    folder.mkdir()
    places = {}
    for i in range(shards):
        own = {f"{name}.{i}": x for name, x in tensors().items()}
        sf.save_dense(folder / f"model-{i}.safetensors", own)
        places |= dict.fromkeys(own, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_large_shards_share_a_device(tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at a time, each with a quarter of its memory; the folder is that of the host. Small ones come one by one."""
    sharded(tmp_path / "in", 6)
    together, write, rooms, shares = threading.Barrier(4), parts.write_shard, [], []

    def watched(*arguments: Any, device: str, share: int) -> Any:
        assert device == "cuda"
        shares.append(share)
        if len(shares) <= 4:
            together.wait(timeout=20)  # passes only when four have begun
        return write(*arguments, device=device, share=share)

    recipe = Recipe(to="bitmask", misfit="keep")
    with monkeypatch.context() as m:
        m.setattr(run, "_WORTH_A_THREAD", 1)
        m.setattr(run, "cores", lambda: 8)
        m.setattr(parts, "write_shard", watched)
        m.setattr(sizing, "room_on", lambda device: rooms.append(device) or 1 << 30)
        convert_checkpoint(tmp_path / "in", tmp_path / "device", recipe, device="cuda")
        assert shares == [4] * 6
        assert rooms == ["cuda"] * 6
        m.setattr(run, "cores", lambda: 1)
        convert_checkpoint(tmp_path / "in", tmp_path / "few", recipe, device="cuda")
        assert shares[6:] == [1] * 6
    convert_checkpoint(tmp_path / "in", tmp_path / "host", recipe)
    for path in sorted((tmp_path / "host").iterdir()):
        assert (tmp_path / "device" / path.name).read_bytes() == path.read_bytes()
        assert (tmp_path / "few" / path.name).read_bytes() == path.read_bytes()
    with monkeypatch.context() as m:
        m.setattr(parts, "write_shard", watched)
        convert_checkpoint(tmp_path / "in", tmp_path / "small", recipe, device="cuda")
        assert shares[12:] == [1] * 6


def test_large_shards_share_many_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host converts four at a time, too, with a fourth of the cores for each; the folder is the same."""
    sharded(tmp_path / "in", 5)
    teams, team, shares, write = [], row_chunks.Team, [], parts.write_shard

    def watched(*arguments: Any, device: str, share: int) -> Any:
        shares.append((device, share))
        return write(*arguments, device=device, share=share)

    monkeypatch.setattr(parts, "write_shard", watched)
    monkeypatch.setattr(shard, "Team", lambda share: teams.append(share) or team(share))
    recipe = Recipe(to="bitmask", misfit="keep")
    convert_checkpoint(tmp_path / "in", tmp_path / "one", recipe)
    assert (shares, teams) == ([("cpu", 1)] * 5, [1] * 5)
    monkeypatch.setattr(run, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(run, "cores", lambda: 16)
    convert_checkpoint(tmp_path / "in", tmp_path / "four", recipe)
    assert (shares[5:], teams[5:]) == ([("cpu", 4)] * 5, [4] * 5)
    for path in sorted((tmp_path / "one").iterdir()):
        assert (tmp_path / "four" / path.name).read_bytes() == path.read_bytes()


def test_a_shard_ends_at_the_next_tensor_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary file stays, and what is finished is in the journal."""
    sharded(tmp_path / "in", 3)
    source, watched = tmp_path / "in", []
    finished = tmp_path / "out" / "spformat-00001-of-00003.safetensors"

    class Watched(executors.OnDevices):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            watched.append(self)

        def _go_on(self, outcome: Any) -> None:
            if outcome.name.endswith(".1"):  # in the second shard, as a signal handler would
                end = time.monotonic() + 60
                while not finished.exists() and time.monotonic() < end:  # the first one may take longer
                    time.sleep(0.01)
                signal.raise_signal(signal.SIGINT)
                self._stopped.wait(timeout=20)
            super()._go_on(outcome)

    monkeypatch.setattr(run, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(run, "cores", lambda: 4)
    monkeypatch.setattr(run, "_CORES_OF_A_SHARD_ON_HOST", 2)
    monkeypatch.setattr(run, "OnDevices", Watched)
    recipe = Recipe(to="bitmask", misfit="keep")
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "out", recipe)
    assert watched[0]._stopped.is_set()
    left = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert finished.name in left
    assert not [name for name in left if name.endswith(".tmp")]
    assert "spformat-00002-of-00003.safetensors" not in left
    monkeypatch.undo()
    convert_checkpoint(source, tmp_path / "out", recipe, resume=True)
    convert_checkpoint(source, tmp_path / "whole", recipe)
    for path in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("devices", ["cuda:0,cuda:0", "cuda,cuda:0", "cpu,cuda:1", "cuda:0,", "cuda:0,gpu"])
def test_devices_that_are_none_are_refused(tmp_path: Path, stand_in: Any, devices: str) -> None:
    sf.save_dense(tmp_path / "in.safetensors", tensors())
    with pytest.raises(sf.errors.UsageError, match="device: expected"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", "bitmask", device=devices)
    assert not (tmp_path / "out").exists()


def test_several_devices_need_a_folder_and_no_other_workers(tmp_path: Path, stand_in: Any) -> None:
    sf.save_dense(tmp_path / "in.safetensors", tensors())
    both = "cuda:0,cuda:1"
    with pytest.raises(sf.errors.UsageError, match="several devices write into a folder"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "bitmask", device=both)
    with ThreadPoolExecutor(2) as pool, pytest.raises(sf.errors.UsageError, match="leave the executor out"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", "bitmask", device=both, executor=pool)


@pytest.mark.parametrize("target", PRUNED)
def test_pruning_on_the_device_gives_the_same_file(tmp_path: Path, stand_in: Any, target: str) -> None:
    same_files(tmp_path, target, stand_in, **PRUNED[target])


@pytest.mark.gpu
@pytest.mark.parametrize("target", PRUNED)
def test_pruning_on_a_gpu_gives_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    import cupy

    monkeypatch.setattr(shard_input, "_WORTH_MOVING", 0)
    same_files(tmp_path, target, cupy, **PRUNED[target])


@pytest.mark.gpu
@pytest.mark.parametrize("target", TARGETS)
def test_conversion_on_a_gpu_gives_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    import cupy

    monkeypatch.setattr(shard_input, "_WORTH_MOVING", 0)
    same_files(tmp_path, target, cupy)


def same_files(tmp_path: Path, target: str, cupy: Any, **pruning: Any) -> None:
    """Converted on the device (some matrix must have been there) and on the host, and back."""
    given = tensors()
    if pruning:  # matrices that must be pruned to fit
        rng = np.random.default_rng(1)
        given |= {name: rng.normal(size=(96, 160)).astype(given["a"].dtype) for name in ("a", "b")}
    sf.save_dense(tmp_path / "in.safetensors", given)
    recipe = Recipe(to=target, misfit="keep", nonfinite="keep" if pruning else "refuse", **pruning)
    seen = []
    read = shard_input.read

    def watched(*arguments: Any) -> Any:
        seen.append(read(*arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as m:
        m.setattr(shard, "read", watched)
        m.setattr(shard_input, "read", watched)
        there = convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "device", recipe, device="cuda")
        on_device = [x for x in seen if isinstance(x, cupy.ndarray)]
        convert_checkpoint(tmp_path / "device", tmp_path / "back", "dense", device="cuda")
    assert len(on_device) >= 2 or target == "dense"
    here = convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "host", recipe)
    for one, other in zip(there.outcomes, here.outcomes, strict=True):
        assert (one.target, one.nnz, one.pruned) == (other.target, other.nnz, other.pruned)
        assert one.lost_norm == pytest.approx(other.lost_norm, rel=1e-12)
    assert bool(pruning) == any(o.pruned for o in there.outcomes)
    convert_checkpoint(tmp_path / "host", tmp_path / "back-host", "dense")
    for one, other in (("device", "host"), ("back", "back-host")):
        names = sorted(p.name for p in (tmp_path / other).iterdir())
        assert names == sorted(p.name for p in (tmp_path / one).iterdir())
        assert all((tmp_path / one / n).read_bytes() == (tmp_path / other / n).read_bytes() for n in names)


@pytest.mark.gpu
def test_lanes_carry_large_arrays_both_ways(tmp_path: Path) -> None:
    import cupy

    x = np.random.default_rng(0).integers(0, 255, 97_654_321).astype(np.uint8)
    sf.save(tmp_path / "x.safetensors", {"x": x})
    y = sf.load(tmp_path / "x.safetensors", device="cuda")["x"]
    assert isinstance(y, cupy.ndarray)
    np.testing.assert_array_equal(y.get(), x)
    out = np.zeros_like(x)

    def store(piece: memoryview, at: int) -> None:
        out[at : at + piece.nbytes] = piece

    assert device_copy.DeviceCopy(0).drain(y, store) == zlib.crc32(x)
    np.testing.assert_array_equal(out, x)
