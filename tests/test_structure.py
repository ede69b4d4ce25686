"""Structure detection: the compiled census and the numpy code, both against the definition of every count."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from conversions import Device
from spformat_cli import inspect

import spformat as sf
from spformat.arrays import threads
from spformat.arrays.dtypes import VALUE_TYPES, bits
from spformat.backends.cuda.dense import census
from spformat.formats.fast import compiled
from spformat.formats.hooks import VECTOR_HEIGHTS
from spformat.preprocess import masks, structure
from spformat.preprocess.coordinates import structure_of
from spformat.preprocess.structure import BLOCKS, NM_WINDOWS, TILE_ROWS, VECTOR_LENGTHS, Structure, analyse

SHAPES = [(1, 1), (3, 4), (64, 64), (70, 100), (257, 68), (300, 131), (520, 36), (5, 0), (0, 5)]


def matrix(dtype: str, shape: tuple[int, int], density: float, seed: int) -> np.ndarray:
    """Nonzeros of random bits (NaN and infinity among them), zeros of both signs, whole empty rows and columns."""
    rng, t = np.random.default_rng(seed), VALUE_TYPES[dtype]
    held = rng.random(shape) < density
    held[shape[0] // 3 : shape[0] // 2] = False
    held[:, shape[1] // 2 : shape[1] // 2 + shape[1] // 4] &= rng.random((1, shape[1] // 4)) < 0.3
    some = rng.integers(0, 256, (*shape, t.numpy.itemsize), np.uint8).view(t.bits)[..., 0]
    some[(some & t.bits.type(t.zero_mask)) == 0] = 1
    sign = t.bits.type((1 << (8 * t.numpy.itemsize)) - 1 - t.zero_mask)
    return np.where(held, some, np.where(rng.random(shape) < 0.2, sign, 0)).astype(t.bits).view(t.numpy)


def counted(x: np.ndarray) -> Structure:
    """By definition, slowly."""
    t, (M, K) = VALUE_TYPES[x.dtype.name], x.shape
    some = (bits(x) & t.bits.type(t.zero_mask)) != 0
    full = np.zeros((-(-max(M, 1) // 256) * 256, -(-max(K, 1) // 128) * 128), bool)
    full[:M, :K] = some

    def joined(rows: int, cols: int) -> np.ndarray:
        parts = full.reshape(full.shape[0] // rows, rows, full.shape[1] // cols, cols)
        return parts.any(axis=(1, 3))

    def most(m: int, rows: int) -> int:
        flags = joined(rows, 1)
        return int(flags.reshape(flags.shape[0], -1, m).sum(axis=2).max())

    per_tile = {h: joined(h, 1).sum(axis=1) for h in VECTOR_HEIGHTS}
    return Structure(
        shape=(M, K), dtype=x.dtype.name, nnz=int(some.sum()),
        negative_zeros=int((~some & (bits(x) != 0)).sum()), row_lengths=some.sum(axis=1, dtype=np.int64),
        bad_groups=int((full.reshape(full.shape[0], -1, 4).sum(axis=2) > 2).sum()), groups=M * -(-K // 4),
        window_max={(m, rows): most(m, rows) for m in NM_WINDOWS for rows in VECTOR_LENGTHS},
        blocks={b: (int(joined(b, b).sum()), int(joined(b, b).any(axis=1).sum())) for b in BLOCKS},
        vector_counts={h: (int(n.sum()), int((-(-n // 16)).sum())) for h, n in per_tile.items()},
        tile_columns={rows: int(joined(rows, 1).sum()) for rows in TILE_ROWS},
    )  # fmt: skip


def same(a: Structure, b: Structure) -> None:
    for f in fields(Structure):
        one, other = getattr(a, f.name), getattr(b, f.name)
        if f.name == "row_lengths":
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
        else:
            assert (f.name, one) == (f.name, other)
        if isinstance(one, dict):
            assert list(one) == list(other)  # ties between candidates go by order


def test_structures_are_compared() -> None:
    """It was a ValueError of numpy about the truth value of an array."""
    one, other = (structure._analyse(np.eye(5, dtype=np.float32)) for _ in range(2))
    assert one == other
    assert one != replace(other, row_lengths=other.row_lengths[::-1] * 2)
    assert one != replace(other, nnz=4)
    assert structure.stacked([one, other]) == structure.stacked([other, one]) != one


@pytest.mark.parametrize("path", ["numpy", "compiled"])
@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_every_count(dtype: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "compiled":
        pytest.importorskip("numba")
        assert compiled._usable()
    monkeypatch.setattr(compiled, "serves", lambda x, elements=None: path == "compiled")
    monkeypatch.setattr(threads, "cores", lambda: 3)
    monkeypatch.setattr(structure, "CHUNK", 4096)
    for seed, shape in enumerate(SHAPES):
        for density in (0.0, 0.02, 0.3, 0.9, 1.0):
            x = matrix(dtype, shape, density, seed)
            same(analyse(x), counted(x))


def test_a_window_as_full_as_it_can_be_is_seen_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    assert compiled._usable()
    monkeypatch.setattr(compiled, "serves", lambda x, elements=None: True)
    for row, col in ((0, 0), (7, 32), (8, 64), (255, 96), (256, 160), (299, 128)):
        x = np.zeros((300, 192), np.float16)
        for held in range(1, 33):
            x[row, col + held - 1] = 1
            same(analyse(x), counted(x))


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", ["C", "shifted", "F"])
def test_a_device_counts_the_same(dtype: str, layout: str) -> None:
    pytest.importorskip("cupy")
    for seed, shape in enumerate([*SHAPES, (600, 528), (1, 3000), (3000, 1)]):
        for density in (0.0, 0.02, 0.9):
            x = matrix(dtype, shape, density, seed)
            same(analyse(Device().array(x, layout)), counted(x))


@pytest.mark.gpu
def test_a_window_as_full_as_it_can_be_is_seen_on_a_device() -> None:
    pytest.importorskip("cupy")
    for row, col in ((0, 0), (7, 32), (255, 96), (256, 160), (299, 128), (299, 256)):
        for nonzeros in (1, 3, 5, 16, 17, 32):
            x = np.zeros((300, 520), np.float16)
            x[row, col : col + nonzeros] = 1
            same(analyse(Device().array(x, "C")), counted(x))


@pytest.mark.gpu
def test_matrices_on_a_device_are_counted_there(tmp_path: Path) -> None:
    """By ``structure_of``, "auto", ``recommend`` and ``inspect --device cuda``."""
    pytest.importorskip("cupy")
    x = matrix("float32", (96, 264), 0.6, 3)
    x = masks.apply(x, masks.magnitude_nm(x, 2, 4, nonfinite="keep"))
    there = Device().array(x, "C")
    for target in ("dense", "csr", "bitmask", "two-four", "bsr:blocksize=8x8"):
        a = sf.convert(x, target) if target != "dense" else sf.Dense.from_dense(x)
        same(structure_of(a.to("cuda")), structure_of(a))
        assert a.to("cuda").smallest() == a.smallest() == "bitmask"
    assert sf.convert(there, "auto").name == "bitmask"
    assert sf.recommend(there, 16, device="H200") == sf.recommend(x, 16, device="H200")
    sf.save(tmp_path / "w.safetensors", {"plain": x, "packed": sf.convert(x, "bitmask")})
    rows = [
        list(inspect._structures(str(tmp_path / "w.safetensors"), None, True, inspect.Wanted(True, True), device))
        for device in ("cpu", "cuda")
    ]
    assert len(rows[0]) == 2
    for (*one, first, zeros, more), (*other, second, same_zeros, same_more) in zip(*rows, strict=True):
        assert (one, zeros) == (other, same_zeros)
        same(first, second)
        np.testing.assert_equal(more, same_more)


def test_block_rows_are_counted_by_words() -> None:
    """As by a sum over the rows of each block, for any number of rows and lengths up to 2^32-1."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows, share = int(rng.integers(1, 700)), rng.choice([0.0, 0.002, 0.05, 0.9])
        lengths = (rng.random(rows) < share) * rng.integers(1, 2**32, rows, np.uint32)
        lengths = lengths.astype(np.uint32)
        wanted = [
            np.count_nonzero(np.add.reduceat(lengths.astype(np.int64), np.arange(0, rows, b))) for b in census.BLOCKS
        ]
        assert census.block_rows(lengths) == wanted
