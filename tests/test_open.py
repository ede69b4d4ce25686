"""``sf.open``: one door for packed files and folders, dense checkpoints and matrix files. In torch: test_torch_open.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hostile import drop, keep, rewrite
from safetensors.numpy import save_file
from test_cli import DIGITS, SHARDED, spformat

import spformat as sf
from spformat.checkpoint import convert_checkpoint, merge_parts, open_source
from spformat.checkpoint.check import validate_checkpoint
from spformat.errors import DescriptorError, IntegrityError, UsageError
from spformat.interop.matrices import read_matrix
from spformat.interop.matrix_output import write_matrix


def values(x: Any) -> np.ndarray[Any, Any]:
    """A matrix or an array as a float32 array."""
    return np.asarray(x.to_dense() if isinstance(x, sf.Format) else x).astype(np.float32)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A packed folder of two shards."""
    r = spformat("convert", SHARDED, tmp_path / "packed", "--to", "bitmask")
    assert r.returncode == 0, r.stderr
    return tmp_path / "packed"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_packed_folder_is_a_mapping(packed: Path) -> None:
    f = sf.open(packed)  # without `with`
    assert isinstance(f, Mapping)
    assert len(shards(packed)) == 2
    names = list(f)
    assert names == list(f.keys())
    assert len(f) == len(names) == len(set(names))
    each = {name: x for path in shards(packed) for name, x in sf.load(path).items()}
    assert set(each) == set(names)
    for name, x in f.items():
        assert type(x) is type(each[name])
        assert np.array_equal(values(x), values(each[name]))
    assert any(isinstance(x, sf.Bitmask) for x in f.values())
    name = names[0]
    assert name in f
    assert "nothing" not in f
    assert f.get("nothing") is None
    assert f.info(name).shape == each[name].shape
    assert repr(f) == f"Checkpoint('{packed}', {len(f)} tensors, 2 files)"


def test_what_is_misspelt_is_guessed(packed: Path) -> None:
    with sf.open(packed) as f:
        name = next(iter(f))
        with pytest.raises(UsageError, match="did you mean") as e:
            f[name + "x"]
        assert name in str(e.value)


def test_open_reads_headers_alone(packed: Path) -> None:
    last = shards(packed)[-1]
    with sf.open(packed) as f:
        there = [name for name in f if f.info(name) is not None]
        names = list(sf.safe_open(last))
        data = bytearray(last.read_bytes())
        data[-1] ^= 1
        status = last.stat()
        last.write_bytes(data)
        os.utime(last, ns=(status.st_atime_ns, status.st_mtime_ns))
        others = [name for name in there if name not in names]
        assert all(f[name] is not None for name in others)
        with pytest.raises(IntegrityError, match=r"damaged|changed"):
            [f[name] for name in names]


def test_load_takes_folders_and_matrix_files(packed: Path, tmp_path: Path) -> None:
    loaded = sf.load(packed)
    with sf.open(packed) as f:
        assert list(loaded) == list(f)
        assert all(np.array_equal(values(x), values(f[name])) for name, x in loaded.items())
        a, b = next(iter(f)), list(f)[-1]
    assert list(sf.load(packed, [b, a])) == [b, a]  # of two shards
    assert list(sf.load(str(packed), a)) == [a]
    with pytest.raises(UsageError, match=rf"no tensor 'x' .*; it has {len(loaded)} tensors \({a}, .*\.\.\)"):
        sf.load(packed, ["x"])
    w = sf.convert(np.eye(5, dtype=np.float32), "csr")
    import scipy.sparse

    scipy.sparse.save_npz(tmp_path / "eye.npz", w.to_scipy())
    assert sf.load(tmp_path / "eye.npz") == {"eye": w}


def test_load_of_a_dense_checkpoint_says_what_to_type() -> None:
    for path in (SHARDED, DIGITS):
        with pytest.raises(DescriptorError, match=r"spformat\.open\(path\)"):
            sf.load(path)


@pytest.mark.parametrize("path", [SHARDED, DIGITS, DIGITS.parent], ids=["index", "file", "folder"])
def test_a_dense_checkpoint(path: Path) -> None:
    from safetensors.numpy import load_file

    files = [path] if path.is_file() else shards(path)
    expected = {name: x for file in files for name, x in load_file(file).items()}
    with sf.open(path) as f:
        assert set(f) == set(expected)
        for name, x in f.items():
            assert isinstance(x, sf.Dense) == (x.ndim == 2)
            assert values(x).tobytes() == expected[name].astype(np.float32).tobytes()
            assert x.dtype == expected[name].dtype


@pytest.mark.parametrize("ending", ["npz", "mtx", "smtx"])
def test_a_matrix_file(tmp_path: Path, ending: str) -> None:
    w = np.arange(12, dtype=np.float32).reshape(3, 4) % 3
    sf.save(tmp_path / "w.safetensors", {"w": sf.convert(w, "csr")})
    flags = ["--values", "ones"] if ending == "smtx" else []
    r = spformat("convert", tmp_path / "w.safetensors", tmp_path / f"ffn.{ending}", *flags)
    assert r.returncode == 0, r.stderr
    f = sf.open(tmp_path / f"ffn.{ending}")
    assert list(f) == ["ffn"]
    a = f["ffn"]
    assert isinstance(a, sf.CSR)
    assert (values(a) == (w != 0 if ending == "smtx" else w)).all()


def test_after_the_block_nothing_is_read(packed: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with sf.open(packed) as f:
        name = next(iter(f))
        x = f[name]
    with pytest.raises(UsageError, match="closed"):
        f[name]
    f.close()
    assert values(x).size
    g = sf.open(packed)
    g[name]
    del g
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_shards_do_not_hold_many_files(tmp_path: Path) -> None:
    for i in range(40):
        sf.save(tmp_path / f"{i:02}.safetensors", {f"w{i}": sf.convert(np.eye(3, dtype=np.float32), "csr")})
    before = len(os.listdir("/proc/self/fd"))
    with sf.open(tmp_path) as f:
        assert all(isinstance(x, sf.CSR) for x in f.values())
        assert len(os.listdir("/proc/self/fd")) - before <= 16


def test_a_checkpoint_is_saved_as_it_is_opened(packed: Path, tmp_path: Path) -> None:
    with sf.open(packed) as f:
        sf.save(tmp_path / "one.safetensors", f)
        assert set(sf.load(tmp_path / "one.safetensors")) == set(f)


def test_a_shard_that_was_replaced(packed: Path) -> None:
    last = shards(packed)[-1]
    with sf.open(packed) as f:
        shutil.copy(last, packed / "new")
        os.replace(packed / "new", last)
        with pytest.raises(IntegrityError, match="replaced"):
            list(f.values())


def test_options_hold_for_every_shard(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    path = tmp_path / "packed" / "w.safetensors"
    sf.save(path, {"w": sf.convert(np.eye(3, dtype=np.float32), "csr")})
    rewrite(path, keep(drop("crc32")))
    with pytest.raises(DescriptorError):
        sf.open(tmp_path / "packed")
    f = sf.open(tmp_path / "packed", allow_unchecked=True)
    assert (values(f["w"]) == np.eye(3)).all()
    assert list(sf.load(tmp_path / "packed", allow_unchecked=True)) == ["w"]


def test_arguments_that_are_none(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'np' or 'pt', got 'tf'"):
        sf.open(packed, framework="tf")
    with pytest.raises(UsageError, match="device: expected 'cpu', 'cuda'"):
        sf.open(packed, device="tpu")
    with pytest.raises(sf.errors.InputError, match="No such file"):
        sf.open(tmp_path / "nothing")


def test_a_device_that_is_not_there(packed: Path) -> None:
    with sf.open(packed, device="cuda:99") as f, pytest.raises(sf.errors.DeviceUnavailable):
        list(f.values())


def test_without_torch_the_error_says_what_to_install(packed: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import spformat as sf\n"
        "try: sf.open(sys.argv[1], framework='pt')\n"
        "except sf.errors.UsageError as e: print(e)"
    )
    r = subprocess.run([sys.executable, "-c", code, packed], capture_output=True, text=True, timeout=60)
    assert "pip install 'spformat[torch]'" in r.stdout, r.stderr


def test_a_bfloat16_norm_and_an_embedding(tmp_path: Path) -> None:
    tensors = {"norm": np.ones(3, ml_dtypes.bfloat16), "embed": np.ones((2, 3), np.int64)}
    save_file(tensors, tmp_path / "m.safetensors")
    f = sf.open(tmp_path / "m.safetensors")
    assert f["norm"].dtype == ml_dtypes.bfloat16
    assert isinstance(f["embed"], np.ndarray)


@pytest.mark.gpu
def test_tensors_are_read_to_a_device(packed: Path) -> None:
    cupy = pytest.importorskip("cupy")
    on_host = sf.load(packed)
    for name, x in sf.open(packed, device="cuda").items():
        if isinstance(x, sf.Format):
            assert x.device == "cuda:0"
            assert x.to("cpu") == on_host[name]
        else:
            assert isinstance(x, cupy.ndarray)
            assert x.get().tobytes() == on_host[name].tobytes()
    assert all(x.device.id == 0 if isinstance(x, cupy.ndarray) else x.device == "cuda:0"
               for x in sf.load(packed, device="cuda").values())  # fmt: skip


class InBytes:
    """A path that names itself in bytes, as ``os.PathLike`` may."""

    def __init__(self, path: Any) -> None:
        self.path = os.fsencode(path)

    def __fspath__(self) -> bytes:
        return self.path


@pytest.mark.parametrize("kind", [os.fsencode, InBytes])
def test_a_path_may_be_bytes(tmp_path: Path, kind: Any) -> None:
    w = np.eye(8, dtype=np.float32)
    packed, dense, folder, matrix = (kind(tmp_path / n) for n in ("p.safetensors", "d.safetensors", "f", "m.npz"))
    sf.save(packed, {"w": sf.convert(w, "csr")})
    sf.save_dense(dense, {"w": w})
    write_matrix(matrix, w)
    convert_checkpoint(dense, folder, "csr")
    convert_checkpoint(folder, kind(tmp_path / "g.safetensors"), "dense")
    for path in (packed, folder, matrix):
        (x,) = sf.load(path).values()
        np.testing.assert_array_equal(x.to_dense(), w)
    with sf.open(folder) as f, sf.safe_open(packed) as g:
        assert f["w"] == g["w"]
    assert [r.error for r in validate_checkpoint(folder)] == [None]


@pytest.mark.parametrize("path", [None, 3, 1.5, ["a"]])
def test_what_is_no_path_is_named(path: Any) -> None:
    calls = (
        lambda: sf.save(path, {"w": np.ones(3)}), lambda: sf.save_dense(path, {"w": np.ones(3)}),
        lambda: sf.load(path), lambda: sf.open(path), lambda: sf.safe_open(path), lambda: open_source(path),
        lambda: convert_checkpoint(path, "out"), lambda: convert_checkpoint(str(DIGITS), path),
        lambda: merge_parts(path), lambda: read_matrix(path), lambda: write_matrix(path, np.ones((2, 2))),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError, match="expected a path, as text or a") as e:
            call()
        assert str(path) in str(e.value)
    with pytest.raises(UsageError, match="names: expected a list of names, or one, got 5"):
        sf.load(DIGITS, 5)  # type: ignore[arg-type]
