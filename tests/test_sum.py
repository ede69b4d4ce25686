"""Sums of matrices: which parts are allowed, what holds for the sum, and every way into and out of a file."""

from __future__ import annotations

import json
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import laws
import numpy as np
import pytest
import stand_in_cupy
from cases import CASES, params_of
from catalogue import command
from hostile import drop, keep, put, rewrite
from hypothesis import given
from hypothesis import strategies as st

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, bits, nonzero_mask
from spformat.checkpoint import convert_checkpoint
from spformat.checkpoint.check import validate_checkpoint
from spformat.checkpoint.diff import diff_checkpoints
from spformat.errors import SpformatError
from spformat.formats import Format, composed, registered
from spformat.formats.composed import MAX_DEPTH
from spformat.formats.csr import CSR
from spformat.storage import tensorfile

PARTS = [(f, p) for f in registered() for p in params_of(f.name)]


def cut(x: np.ndarray[Any, Any], n: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """n matrices among which the elements of x are divided; zeros elsewhere."""
    owner = np.random.default_rng(seed).integers(0, n, x.shape)
    return [np.where(owner == i, bits(x), 0).astype(bits(x).dtype).view(x.dtype) for i in range(n)]


def summed(x: np.ndarray[Any, Any], *texts: str, seed: int = 0) -> sf.Sum:
    return sf.Sum.from_parts(sf.convert(p, t) for p, t in zip(cut(x, len(texts), seed), texts, strict=True))


def small(dtype: str = "float16") -> np.ndarray[Any, Any]:
    x = np.zeros((10, 12), dtype)
    x[::2, ::3] = np.arange(1, 21).reshape(5, 4)
    x[3, 1] = 7
    return x


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_laws(case: str, dtype: str, tmp_path: Path) -> None:
    """Decoded it is the matrix, bit for bit; the hub, files, pickles and copies agree."""
    x = CASES[case](dtype)
    a = summed(x, "bsr:blocksize=4x8", "csr", "bitmask")
    assert laws.same(a.to_dense(), laws.without_negative_zeros(x))
    assert a.to_csr() == CSR.from_dense(x)
    assert a.nbytes == sum(p.nbytes for p in a.parts) == sum(v.nbytes for v in a.all_arrays().values())
    assert a.stored == sum(p.stored for p in a.parts)
    assert a.nnz == a.count_nonzeros() == int(nonzero_mask(x).sum())
    assert (a.shape, a.dtype, a.device, a.is_validated) == (x.shape, x.dtype, "cpu", True)
    laws.check_container(a, tmp_path)
    assert pickle.loads(pickle.dumps(a)) == a
    assert a.to("cpu") is a
    assert a.in_order() == a


@pytest.mark.parametrize(("fmt", "params"), PARTS, ids=lambda v: v.name if isinstance(v, type) else str(v))
def test_a_part_may_have_any_format(fmt: type[Format], params: dict[str, Any], tmp_path: Path) -> None:
    held = np.zeros((37, 70), np.float16)
    held[::8, ::8] = 2
    other = np.zeros_like(held)
    other[1::8, 4::8] = 3
    a = sf.Sum(parts=(fmt.from_dense(held, **params), sf.convert(other, "csr")))
    assert not a.is_validated
    a.validate()
    np.testing.assert_array_equal(a.to_dense(), held + other)
    laws.check_container(a, tmp_path)
    for target, given_params in PARTS:
        try:
            direct = target.from_dense(held + other, **given_params)
        except sf.errors.StructureError:
            continue
        assert sf.convert(a, target, **given_params) == direct


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 9), cols=st.integers(1, 9), overlaps=st.integers(0, 4))
def test_an_element_in_two_parts_is_found(seed: int, rows: int, cols: int, overlaps: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 3, (rows, cols)).astype(np.float32)
    parts = cut(x, 3, seed)
    places = np.argwhere(x)
    chosen = places[rng.permutation(len(places))[:overlaps]]
    for r, c in chosen:
        owner = next(i for i, p in enumerate(parts) if p[r, c])
        parts[(owner + 1) % 3][r, c] = 9
    texts = [str(t) for t in rng.choice(["csr", "bsr:blocksize=2x2", "bitmask", "ell-buckets", "dense"], 3)]
    a = sf.Sum(parts=tuple(sf.convert(p, t) for p, t in zip(parts, texts, strict=True)))
    if not len(chosen):
        np.testing.assert_array_equal(a.validate().to_dense(), x)
        return
    with pytest.raises(sf.errors.OrderError, match="expected each nonzero in one part") as e:
        a.to_csr()
    row, col = min(map(tuple, chosen.tolist()))
    assert (e.value.index, e.value.count) == ((row, col), len(chosen))
    assert e.value.value == tuple(i for i, p in enumerate(parts) if p[row, col])
    assert all(f"{i} ({texts[i].partition(':')[0]})" in str(e.value) for i in e.value.value)
    assert not a.is_validated


def test_zeros_that_a_part_stores_are_no_elements() -> None:
    """Padding of a block and a stored zero may lie over a value of another part, and are not in the result."""
    x = np.array([[1, 0], [0, 2]], np.float32)
    zeros = CSR(shape=(2, 2), indptr=np.array([0, 1, 2], np.int32), indices=np.array([1, 1], np.int32),
                data=np.array([5, 0], np.float32))  # fmt: skip
    a = sf.Sum.from_parts([sf.convert(x, "bsr:blocksize=2x2"), zeros])
    np.testing.assert_array_equal(a.to_dense(), [[1, 5], [0, 2]])
    assert (a.stored_zeros, a.nnz, a.count_nonzeros()) == (1, 4, 3)
    assert a.to_csr().nnz == 3


def test_shapes_beyond_63_bits_are_checked() -> None:
    def one(row: int, col: int, shape: tuple[int, int] = (2**20, 2**44)) -> CSR:
        return CSR.from_coordinates(shape, np.array([row]), np.array([col]), np.array([1], np.float32))

    assert sf.Sum.from_parts([one(5, 2**40), one(5, 2**40 + 1)]).to_csr().nnz == 2
    with pytest.raises(sf.errors.OrderError, match=rf"row 5, column {2**40} in parts 0 \(csr\) and 1 \(csr\)"):
        sf.Sum.from_parts([one(5, 2**40), one(5, 2**40)])


def csr(x: Any = None) -> Format:
    return sf.convert(small() if x is None else x, "csr")


REFUSED: dict[str, tuple[Callable[[], Any], type[SpformatError], str]] = {
    "one part": (lambda: sf.Sum(parts=(csr(),)), sf.errors.UsageError, "expected two matrices or more, got 1"),
    "no part": (lambda: sf.Sum(parts=()), sf.errors.UsageError, "expected two matrices or more, got none"),
    "an array for all parts": (lambda: sf.Sum(parts=np.zeros((2, 3, 3))), sf.errors.UsageError, "matrices or more, got ndarray"),
    "a matrix": (lambda: sf.Sum(parts=csr()), sf.errors.UsageError, "expected two matrices or more, got CSR"),
    "an array": (lambda: sf.Sum(parts=(csr(), small())), sf.errors.UsageError, r"got ndarray; use convert\(x, ..\) first"),
    "shapes": (lambda: sf.Sum(parts=(csr(), csr(small().T.copy()))), sf.errors.ArrayError,
               r"part 1: expected shape \(10, 12\), got \(12, 10\)"),
    "own shape": (lambda: sf.Sum(shape=(3, 4), parts=(csr(), csr())), sf.errors.ArrayError,
                  r"part 0: expected shape \(3, 4\)"),
    "dtypes": (lambda: sf.Sum(parts=(csr(), csr(small("float32")))), sf.errors.ArrayError,
               "part 1: expected dtype float16 as part 0, got float32"),
    "conversion": (lambda: sf.convert(small(), "sum"), sf.errors.UsageError, r"Sum\(parts=\(a, b\)\)"),
    "from a csr": (lambda: sf.convert(csr(), "sum"), sf.errors.UsageError, r"Sum\(parts=\(a, b\)\)"),
    "from_csr": (lambda: sf.Sum.from_csr(csr()), sf.errors.UsageError, r"Sum\(parts=\(a, b\)\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    make, error, text = REFUSED[what]
    with pytest.raises(error, match=text):
        make()


def test_a_sum_may_be_a_part_down_to_a_depth(tmp_path: Path) -> None:
    x = small()
    a: Any = summed(x, "csr", "bsr:blocksize=2x2")
    empty = csr(np.zeros_like(x))
    for depth in range(2, MAX_DEPTH + 1):
        a = sf.Sum.from_parts([a, empty])
        assert a.depth == depth
    np.testing.assert_array_equal(a.to_dense(), x)
    laws.check_container(a, tmp_path)
    assert sf.safe_open(tmp_path / "one.safetensors").info("w").stored == a.stored
    with pytest.raises(sf.errors.UsageError, match=f"expected at most {MAX_DEPTH} levels"):
        sf.Sum(parts=(a, empty))


def test_a_damaged_part_is_named() -> None:
    good = csr()
    bad = good.with_arrays(indices=good.indices + np.int32(100))
    with pytest.raises(sf.errors.IndexBoundsError, match=r"sum: part 1: csr: indices\[0\]") as e:
        sf.Sum(parts=(csr(np.zeros_like(small())), bad)).validate()
    assert e.value.array == "1.indices"


def test_equality_repr_and_order_of_parts() -> None:
    a = summed(small(), "csr", "bitmask")
    b = sf.Sum(parts=a.parts)
    assert a == b
    assert a != sf.Sum(parts=a.parts[::-1])
    assert a != a.parts[0]
    assert repr(a).startswith("Sum(shape=(10, 12), parts=(CSR(shape=(10, 12), indptr=")
    with pytest.raises(TypeError):
        hash(a)
    assert sf.Sum in composed()
    assert sf.Sum not in registered()


def test_numbers_times_a_sum_and_other_types_keep_its_parts() -> None:
    x = small("float32")
    a = summed(x, "csr", "bsr:blocksize=2x2", "two-four:meta_order=logical")
    for got, wanted in ((2 * a, 2 * x), (-a / 4, -x / 4), (a.astype("float16"), small("float16"))):
        assert [type(p) for p in got.parts] == [type(p) for p in a.parts]
        assert got.parts[2].meta_order == "logical"
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got.to_dense(), wanted)
        assert got.is_validated


def test_in_order_sorts_the_parts() -> None:
    a = csr()
    turned = np.concatenate([np.arange(*r)[::-1] for r in zip(a.indptr[:-1], a.indptr[1:], strict=True)])
    loose = CSR(shape=a.shape, indptr=a.indptr, indices=a.indices[turned], data=a.data[turned])
    s = sf.Sum(parts=(loose, csr(np.zeros_like(small()))))
    with pytest.raises(sf.errors.OrderError, match="part 0"):
        s.validate()
    assert s.in_order().parts[0] == a


def test_moves_to_a_device_and_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a = summed(small(), "csr", "bsr:blocksize=2x2")
    sf.save(tmp_path / "w.safetensors", {"w": a})
    cupy = stand_in_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(tensorfile, "SCAN_ON_DEVICE", 2**40)
    there = a.to("cuda")
    assert all(isinstance(v, cupy.ndarray) for v in there.all_arrays().values())
    assert there.is_validated
    assert (there.device, there.to("cuda:0") is there) == ("cuda:0", True)
    assert there.to("cpu") == a
    with pytest.raises(sf.errors.ArrayError, match="part 1: expected device cuda:0 as part 0, got cpu"):
        sf.Sum(parts=(there.parts[0], a.parts[1]))
    loaded = sf.load(tmp_path / "w.safetensors", device="cuda")["w"]
    assert all(isinstance(v, cupy.ndarray) for v in loaded.all_arrays().values())
    assert loaded == a


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    a = summed(small("float32"), "csr", "bsr:blocksize=2x2", "bitmask")
    there = a.to("cuda")
    np.testing.assert_array_equal(there.to_dense().get(), small("float32"))
    assert sf.Sum(parts=there.parts).validate().to_csr().to("cpu") == a.to_csr()
    with pytest.raises(sf.errors.OrderError, match="row 0, column 3 in parts 0"):
        sf.Sum(parts=(there.parts[0], csr(small("float32")).to("cuda"), there.parts[1])).validate()
    sf.save(tmp_path / "w.safetensors", {"w": there})
    assert sf.load(tmp_path / "w.safetensors", device="cuda")["w"] == a


# ------------------------------------------------------------------ files


def part(tree: dict[str, Any], name: str = "1") -> dict[str, Any]:
    found: dict[str, Any] = tree["tensors"]["w"]["parts"][name]
    return found


def nested(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
    """More levels than a file may have; each would need entries, but it is not read that far."""
    below = tree["tensors"]["w"]
    for _ in range(MAX_DEPTH):
        below["parts"] = {"0": json.loads(json.dumps(tree["tensors"]["w"])), "1": below["parts"]["1"]}
        below = below["parts"]["0"]


def shrink(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
    part(tree)["shape"] = [9, 12]


def renamed(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
    """The entry of a part claimed by a tensor, too."""
    tree["plain"]["w.1.data"] = part(tree)["crc32"]["data"]


def cast(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays["w.1.data"] = arrays["w.1.data"].astype(np.float32)
    part(tree)["dtype"] = "float32"
    part(tree)["crc32"]["data"] = f"{zlib.crc32(arrays['w.1.data'].tobytes()):08x}"


def twice(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
    for name in ("indptr", "indices", "data"):
        arrays[f"w.1.{name}"] = arrays[f"w.0.{name}"]
        part(tree)["crc32"][name] = part(tree, "0")["crc32"][name]


HOSTILE: dict[str, tuple[Any, type[SpformatError], str]] = {
    "no parts": (drop("parts"), sf.errors.DescriptorError, "descriptor: expected a key 'parts', got none"),
    "parts of a csr": (keep(lambda t, a: part(t).update(parts={})), sf.errors.DescriptorError,
                       "part 1: descriptor: unknown key"),
    "a list": (put(parts=[]), sf.errors.DescriptorError, "parts: expected an object"),
    "empty": (put(parts={}), sf.errors.DescriptorError, "is claimed by no tensor"),
    "a gap": (keep(lambda t, a: t["tensors"]["w"]["parts"].update({"3": part(t)})), sf.errors.DescriptorError,
              "parts: expected a key '2', got none"),
    "another name": (keep(lambda t, a: t["tensors"]["w"]["parts"].update(a=t["tensors"]["w"]["parts"].pop("1"))),
                     sf.errors.DescriptorError, "parts: expected a key '1', got none"),
    "an extra part": (keep(lambda t, a: t["tensors"]["w"]["parts"].update({"2": part(t)})), sf.errors.DescriptorError,
                      "part 2: expected the entry 'w.2.indptr' in the file, got none"),
    "a missing part": (keep(lambda t, a: t["tensors"]["w"]["parts"].pop("1")), sf.errors.DescriptorError,
                       "is claimed by no tensor"),
    "no crc32": (keep(lambda t, a: part(t)["crc32"].pop("data")), sf.errors.DescriptorError,
                 "part 1: crc32: expected a key 'data', got none"),
    "another crc32": (keep(lambda t, a: part(t)["crc32"].update(data="0" * 8)), sf.errors.IntegrityError, "1.data"),
    "unknown format": (keep(lambda t, a: part(t).update(format="nope")), sf.errors.DescriptorError, "part 1: format: unknown"),
    "newer part": (keep(lambda t, a: part(t).update(version=9)), sf.errors.VersionError, "part 1: csr version"),
    "other shape": (keep(shrink), SpformatError, "part 1"),
    "other rank": (keep(lambda t, a: part(t).update(shape=[10, 12, 1])), sf.errors.DescriptorError, "part 1: shape"),
    "other dtype": (keep(cast), sf.errors.ArrayError, "part 1: expected dtype float16 as part 0, got float32"),
    "wrong dtype": (keep(lambda t, a: part(t).update(dtype="float64")), sf.errors.ArrayError, "part 1: data: expected F64"),
    "not an object": (keep(lambda t, a: t["tensors"]["w"]["parts"].update({"1": 3})), sf.errors.DescriptorError,
                      "part 1: descriptor: expected an object"),
    "too deep": (keep(nested), sf.errors.DescriptorError, "expected at most 4 levels of parts"),
    "two claims": (keep(renamed), sf.errors.DescriptorError, "entry 'w.1.data' is claimed by tensor"),
    "own arrays": (keep(lambda t, a: t["tensors"]["w"]["crc32"].update(data="0" * 8)), sf.errors.DescriptorError,
                   "crc32: unknown key 'data'"),
    "twice": (keep(twice), sf.errors.OrderError, r"in parts 0 \(csr\) and 1 \(csr\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files(what: str, tmp_path: Path) -> None:
    edit, error, text = HOSTILE[what]
    path = tmp_path / "w.safetensors"
    sf.save(path, {"w": summed(small(), "csr", "csr"), "b": np.zeros(3, np.float32)})
    rewrite(path, edit, sums=False)
    with pytest.raises(error, match=text) as e:
        sf.load(path)
    assert isinstance(e.value, sf.errors.FormatError)
    assert command("validate", path).code not in (0, 70)


def test_a_tensor_that_would_take_the_entries_of_a_part_is_refused(tmp_path: Path) -> None:
    a = summed(small(), "csr", "bitmask")
    with pytest.raises(sf.errors.UsageError, match=r"got 'w\.0\.data' twice"):
        sf.save(tmp_path / "w.safetensors", {"w": a, "w.0": csr()})
    sf.save(tmp_path / "w.safetensors", {"w": a, "w.2": csr()})
    assert sf.load(tmp_path / "w.safetensors")["w.2"] == csr()


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    sf.save(path, {"w": summed(small(), "csr", "bsr:blocksize=2x2")})
    raw = path.read_bytes()
    for at in range(8, len(raw), 7):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(sf.errors.FormatError):
            sf.load(path)


def test_the_verbs_take_a_checkpoint_with_a_sum(tmp_path: Path) -> None:
    x, source = small("float32"), tmp_path / "sum.safetensors"
    sf.save(source, {"w": summed(x, "csr", "bsr:blocksize=2x2"), "b": np.ones(3, np.float32)})
    sf.save_dense(tmp_path / "dense.safetensors", {"w": x, "b": np.ones(3, np.float32)})
    assert [v.error for v in validate_checkpoint(source)] == [None, None]
    assert [d for _, d in diff_checkpoints(source, tmp_path / "dense.safetensors")] == [None, None]
    row = next(r for r in json.loads(command("inspect", source, "--json").out)["tensors"] if r["name"] == "w")
    assert (row["format"], row["nnz"]) == ("sum", 21)
    for target in ("dense", "csr", "bitmask", "auto", "keep"):
        convert_checkpoint(source, tmp_path / target, target)
        assert [d for _, d in diff_checkpoints(source, tmp_path / target)] == [None, None]
    kept = sf.load(tmp_path / "keep" / "spformat-00001-of-00001.safetensors")["w"]
    assert kept == summed(x, "csr", "bsr:blocksize=2x2")
    refusal = command("convert", tmp_path / "dense.safetensors", tmp_path / "no", "--to", "sum")
    assert refusal.code == 2
    assert "Sum(parts=(a, b))" in refusal.err
    assert not (tmp_path / "no").exists()
    assert command("plan", source, "--to", "csr").code == 0


def test_multiplies() -> None:
    x = small("float32")
    B = np.arange(36, dtype=np.float32).reshape(12, 3)
    np.testing.assert_array_equal(sf.spmm(summed(x, "csr", "bitmask"), B), x @ B)
