"""``sf.open(path, framework="pt")``: dense tensors of any checkpoint as torch tensors."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_cli import DIGITS, SHARDED

import spformat as sf
from spformat.checkpoint import Recipe, convert_checkpoint

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")
safetensors_torch = pytest.importorskip("safetensors.torch")

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"))
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64", "bool",
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (2, 3, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_as_the_official_package_reads_it(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], device: str
) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    high = 2 if dtype == "bool" else 255
    raw = np.random.default_rng(0).integers(0, high, (*shape, kind.itemsize), np.uint8, endpoint=dtype != "bool")
    stored = np.ascontiguousarray(raw).view(kind).reshape(shape)
    sf.save_dense(tmp_path / "m.safetensors", {"w": stored})
    expected = safetensors_torch.load_file(tmp_path / "m.safetensors", device=device)["w"]
    with sf.open(tmp_path / "m.safetensors", framework="pt", device=device) as f:
        t = f["w"]
    assert isinstance(t, torch.Tensor)
    assert (t.dtype, t.shape, t.device) == (expected.dtype, expected.shape, expected.device)
    assert t.cpu().reshape(-1).view(torch.uint8).equal(expected.cpu().reshape(-1).view(torch.uint8))


def test_a_whole_checkpoint_and_into_a_model() -> None:
    state = dict(sf.open(SHARDED, framework="pt"))
    expected = {k: t for path in SHARDED.glob("*.safetensors") for k, t in safetensors_torch.load_file(path).items()}
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[k], t) for k, t in expected.items())
    w = next(t for t in state.values() if t.dim() == 2)
    w.add_(1)  # it has memory of its own
    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.load_state_dict({"weight": w})


def test_matrices_stay_matrices_and_multiply_torch_tensors(tmp_path: Path) -> None:
    convert_checkpoint(DIGITS, tmp_path / "packed", Recipe("bitmask"))
    with sf.open(tmp_path / "packed", framework="pt", device=torch.device("cpu")) as f:
        sparse = {name: a for name, a in f.items() if isinstance(a, sf.Bitmask)}
        assert sparse
        assert all(isinstance(x, torch.Tensor) for name, x in f.items() if name not in sparse)
    with sf.open(DIGITS, framework="pt") as dense:
        for name, a in sparse.items():
            w = dense[name]
            x = torch.ones(w.shape[1], 3, dtype=w.dtype)
            assert torch.allclose(sf.spmm(a, x).float(), w.float() @ x.float(), rtol=1e-2, atol=1e-2)


def test_a_matrix_that_was_saved_as_dense_is_a_tensor(tmp_path: Path) -> None:
    w = torch.randn(4, 6, dtype=torch.bfloat16)
    sf.save(tmp_path / "w.safetensors", {"dense": sf.convert(w, "dense"), "plain": w})
    f = sf.open(tmp_path / "w.safetensors", framework="pt")
    assert torch.equal(f["dense"], w)
    assert torch.equal(f["plain"], w)


def test_a_state_dict_is_saved_and_opened(tmp_path: Path) -> None:
    """Tensors of torch go in as they come out."""
    layer = torch.nn.Linear(6, 4).to(torch.bfloat16)
    sf.save_dense(tmp_path / "m.safetensors", layer.state_dict())
    layer.load_state_dict(dict(sf.open(tmp_path / "m.safetensors", framework="pt")))
    assert safetensors_torch.load_file(tmp_path / "m.safetensors").keys() == {"weight", "bias"}
