"""Rows A14 .. A50 about values and shapes: what must be kept, dropped with a count, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES, params_of
from catalogue import PARAMS, command, refused, refused_file, small, small_file, unharmed, weights
from hostile import change, described, keep, rewrite

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, bits, nonzero_mask
from spformat.formats import FORMATS
from spformat.formats.base import Format
from spformat.preprocess import masks
from spformat.products.problem import Problem

ALL = [(f, p) for f in FORMATS for p in params_of(f.name)]
IDS = [f"{f.name}{list(p.values()) if p else ''}" for f, p in ALL]


def test_A12_A13_sort_repairs_order_and_nothing_else(folder: Path) -> None:
    path = small_file(folder, "csr")
    good: Any = sf.load(path)["w"]

    def shuffled(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        for name in ("w.indices", "w.data"):
            arrays[name] = arrays[name].copy()
            arrays[name][[0, 4, 1]] = arrays[name][[4, 1, 0]]
            arrays[name][13:19] = arrays[name][13:19][::-1]
        arrays["w.data"][2] = 0  # a stored zero stays one

    rewrite(path, shuffled)
    refused_file(path, sf.errors.OrderError, "spformat convert --sort", tensor="w", array="indices")
    out = folder / "sorted.safetensors"
    with unharmed(folder, but=out.name):
        assert command("convert", path, out, "--to", "keep", "--sort").code == 0
    repaired: Any = sf.load(out)["w"]
    wanted = good.data.copy()
    wanted[2] = 0
    assert repaired == good.with_arrays(data=wanted)
    assert command("convert", path, folder / "dense.safetensors", "--to", "dense").code == 65
    answer = command("convert", path, folder / "dense.safetensors", "--to", "dense", "--sort")
    assert answer.code == 0, answer.err
    assert np.array_equal(sf.safe_open(folder / "dense.safetensors").array("w"), repaired.to_dense())
    assert command("convert", path, folder / "m.npz").code == 65
    answer = command("convert", path, folder / "m.npz", "--sort")
    assert answer.code == 0, answer.err
    assert np.array_equal(sf.open(folder / "m.npz")["m"].to_dense(), repaired.to_dense())
    path = small_file(folder, "csr")
    rewrite(path, change("indices", lambda a: np.r_[a[:1], a[:1], a[2:]]))
    answer = command("convert", path, folder / "no.safetensors", "--to", "keep", "--sort")
    assert (answer.code, "more than once" in answer.err, "never summed" in answer.err) == (65, True, True)
    assert not (folder / "no.safetensors").exists()


def test_A14_stored_zeros_are_kept_and_counted(folder: Path) -> None:
    a = sf.CSR.from_dense(small())
    data = a.data.copy()
    data[[0, 3, 19]] = 0
    data[4] = -0.0
    a = a.with_arrays(data=data)
    path = folder / "x.safetensors"
    sf.save(path, {"w": a})
    assert sf.load(path)["w"] == a
    for fmt in (sf.CSR, sf.ELLBuckets):
        kept: Any = sf.convert(a, fmt)
        assert kept.stored_zeros == 4
        assert kept.to_csr() == a
        sf.save(folder / "y.safetensors", {"w": kept}, overwrite=True)
        row = json.loads(command("inspect", folder / "y.safetensors", "--json").out)["tensors"][0]
        assert (row["stored_zeros"], row["nnz"]) == (4, 16)
    for target in ("bitmask", "bsr", "dbsr", "sr-bcrs", "vector-nm:n=2,m=4,vector_length=1", "two-four"):
        out = folder / f"{target.partition(':')[0]}.safetensors"
        with unharmed(folder, but=out.name):
            outcome = json.loads(command("convert", path, out, "--to", target, "--json").out)["tensors"][0]
        assert (outcome["dropped_zeros"], outcome["nnz"]) == (4, 16)
        assert json.loads(command("plan", path, "--to", target, "--json").out)["tensors"] == [outcome]
        assert np.array_equal(bits(sf.load(out)["w"].to_dense()), bits(a.without_zeros().to_dense()))
    sf.save(path, {"w": a, "empty": sf.CSR.from_dense(np.zeros((16, 16), np.float32))}, overwrite=True)
    tables = [command(*args, "--json").out for args in (("convert", path, folder / "auto"), ("plan", path))]
    assert json.loads(tables[0])["tensors"] == json.loads(tables[1])["tensors"]


@pytest.mark.parametrize("order", [1, -1])
def test_A15_a_row_longer_than_K_fails_range_or_order(folder: Path, order: int) -> None:
    a = sf.CSR(shape=(1, 3), indptr=np.int32([0, 4]), indices=np.int32([0, 1, 2, 2]), data=np.float16([1, 2, 3, 4]))
    path = folder / "x.safetensors"
    for indices, error in (([0, 1, 2, 2], sf.errors.OrderError), ([0, 1, 2, 3], sf.errors.IndexBoundsError),
                           ([0, 1, 2, 0], sf.errors.OrderError)):  # fmt: skip
        bad = a.with_arrays(indices=np.int32(indices)[::order].copy())
        with refused(folder, error if order > 0 or error is sf.errors.IndexBoundsError else sf.errors.OrderError):
            bad.validate()
        if error is not sf.errors.IndexBoundsError:
            with refused(folder, sf.errors.OrderError):
                bad.check_canonical()
        with refused(folder, error):
            sf.save(path, {"w": bad})


def test_A16_more_items_than_int32_counts(folder: Path) -> None:
    n = 2**31  # never written to: no page of these arrays exists
    indices, data = np.empty(n, np.int32), np.empty(n, np.int8)
    with refused(folder, sf.errors.ArrayError, "indptr: expected dtype int64, got int32"):
        sf.CSR(shape=(1, n), indptr=np.zeros(2, np.int32), indices=indices, data=data)
    assert sf.CSR(shape=(1, n), indptr=np.int64([0, n]), indices=indices, data=data).nnz == n
    specs = sf.CSR.array_specs((1, n), np.dtype(np.int8), n, {})
    assert [str(specs[k][0]) for k in ("indptr", "indices")] == ["int64", "int32"]
    for fmt in FORMATS:
        given = {"max_width": 8} if fmt.name == "ell-buckets" else {"n": 2, "m": 4} if fmt.name == "vector-nm" else {}
        dtype = "bfloat16"
        p = Problem.product(
            format=fmt.name, params=tuple(fmt.resolve_params(given).items()), M=2**17, K=2**17, n=512,
            nnz=2**33, a_dtype=dtype, b_dtype=dtype, out_dtype=dtype, device="cuda", sm=90,
        )  # fmt: skip
        for answer in sf.explain(p).answers:
            assert answer or answer.reasons  # taken with 64-bit offsets (tests/test_kernels.py), or refused with why


def test_A19_buckets_that_do_not_add_up(folder: Path) -> None:
    def edit(table: str, i: int, by: int) -> Any:
        return keep(lambda t, a: described(t)["tables"][table].__setitem__(i, described(t)["tables"][table][i] + by))

    for table, i, by, array in (("rows_per_bucket", 0, 1, "row_ids"), ("rows_per_bucket", 2, -1, "row_ids"),
                                ("split_per_bucket", 2, 2, "split_per_bucket")):  # fmt: skip
        path = small_file(folder, "ell-buckets")
        rewrite(path, edit(table, i, by))
        refused_file(path, sf.errors.ArrayError, array, tensor="w")
    path = small_file(folder, "ell-buckets")
    rewrite(path, edit("split_per_bucket", 2, -1))  # one split row fewer: lengths agree, contents do not
    refused_file(path, sf.errors.InvariantError, "a row assigned once, as its ELL row is direct", tensor="w")
    path = small_file(folder, "ell-buckets")
    rewrite(path, keep(lambda t, a: described(t)["params"].update(max_width=0)))  # a bucket of width 0
    refused_file(path, sf.errors.DescriptorError, "max_width: expected an int in 1", tensor="w")


def test_A22_a_row_that_is_missing_shows_in_diff(folder: Path) -> None:
    path = small_file(folder, "ell-buckets")
    sf.save_dense(folder / "dense.safetensors", {"w": small()})
    assert command("diff", path, folder / "dense.safetensors").code == 0
    rewrite(path, change("row_ids", lambda a: np.r_[np.int32([1]), a[1:]]))  # row 2 is called row 1: a legal matrix
    with unharmed(folder):
        answer = command("diff", path, folder / "dense.safetensors", "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["differences"][0]["index"] == [1, 11]
    f: Any = sf.load(path)["w"]
    out = np.full((10, 2), np.nan, np.float32)
    for backend in ("reference", "cpu"):
        if sf.backends.get(backend).missing():
            continue
        sf.spmm(f, np.ones((12, 2), np.float16), out=out, backend=backend)
        assert np.array_equal(out[:, 0], f.to_dense().astype(np.float32).sum(axis=1))  # empty rows are written, too


def test_A24_square_blocks_transposed_show_in_checksum_and_diff(folder: Path) -> None:
    path = small_file(folder, "bsr", blocksize=(4, 4))
    sf.save_dense(folder / "dense.safetensors", {"w": small()[:8]})
    sf.save(path, {"w": sf.BSR.from_dense(small()[:8], blocksize=(4, 4))}, overwrite=True)
    turned = change("data", lambda a: np.ascontiguousarray(a.transpose(0, 2, 1)))
    good = path.read_bytes()
    rewrite(path, turned, sums=False)
    refused_file(path, sf.errors.IntegrityError, "crc32", tensor="w", array="data")
    path.write_bytes(good)
    rewrite(path, turned)
    with unharmed(folder):
        assert command("validate", path).code == 0  # another matrix, a legal one
        assert command("diff", path, folder / "dense.safetensors").code == 1


def test_A36_too_full_groups_are_refused_with_count_and_place(folder: Path) -> None:
    w = weights()["w"].copy()
    w[1, 4:8], w[3, :3] = 5, 7
    path = folder / "in.safetensors"
    sf.save_dense(path, {"layer.w": w})
    with refused(folder, sf.errors.StructureError, r"2 group\(s\).*first: row 1, group 1 \(columns 4..7\) holds 4, limit 2",
                 "magnitude_nm", unit="group", count=2, first=(1, 1), found=4, limit=2):  # fmt: skip
        sf.convert(w, "two-four")
    with unharmed(folder):
        answer = command("convert", path, folder / "out", "--to", "two-four", "--json")
    assert answer.code == 3
    assert json.loads(answer.err)["tensor"] == "layer.w"
    assert command("convert", path, folder / "out.safetensors", "--to", "two-four", "--prune", "magnitude").code == 0
    assert np.array_equal(sf.load(folder / "out.safetensors")["layer.w"].to_dense(),
                          masks.apply(w, masks.magnitude_nm(w, 2, 4)))  # fmt: skip


def test_A37_groups_with_fewer_values_have_canonical_fillers(folder: Path) -> None:
    x = np.zeros((1, 16), np.float16)
    x[0, 1], x[0, 7], x[0, 8:10] = 3, 4, (5, 6)
    f = sf.TwoFour.from_dense(x, meta_order="logical")
    with unharmed(folder):
        assert f.validate().data[0, :8].tolist() == [0, 3, 0, 4, 5, 6, 0, 0]
        assert f"{int(f.meta[0]):04x}" == "44c4"  # groups, lowest first: {0,1}, {0,3}, {0,1}, the empty {0,1}
        assert np.array_equal(f.to_dense(), x)


@pytest.mark.parametrize("case", ["no_rows", "no_columns", "nothing", "one", "one_row", "one_column", "prime", "corner",
                                  "all_zero", "all_dense", "one_full_row", "empty_between_full"])  # fmt: skip
@pytest.mark.parametrize(("fmt", "params"), ALL, ids=IDS)
def test_A39_A40_A41_every_shape_round_trips(
    folder: Path, fmt: type[Format], params: dict[str, Any], case: str
) -> None:
    x = CASES[case]("float16")
    try:
        f: Any = fmt.from_dense(x, **params)
    except sf.errors.StructureError as e:
        assert e.count >= 1  # too full for the pattern, never for its shape
        assert not x.size or nonzero_mask(x).mean() > 0.05
        return
    sf.save(folder / "x.safetensors", {"w": f})
    with unharmed(folder):
        back: Any = sf.load(folder / "x.safetensors")["w"]
        assert back == f
        assert back.shape == x.shape
        assert bits(back.to_dense()).tolist() == bits(x * (x != 0)).tolist() or fmt is sf.Dense or np.isnan(x).any()
        for n in (0, 1, 5):
            got = sf.spmm(back, np.ones((x.shape[1], n), np.float16), backend="reference")
            assert got.shape == (x.shape[0], n)


@pytest.mark.parametrize(("fmt", "params"), ALL, ids=IDS)
def test_A42_memory_layouts_are_copied(folder: Path, fmt: type[Format], params: dict[str, Any]) -> None:
    base = np.zeros((24, 32), np.float16)
    base[::3, ::8] = np.arange(32).reshape(8, 4) + 1
    big = np.zeros((48, 64), np.float16)
    big[8:32, 16:48] = base
    read_only = base.copy()
    read_only.flags.writeable = False
    wanted = fmt.from_dense(base, **params)
    for given in (np.asfortranarray(base), base.T.copy().T, base[::-1][::-1], big[8:32, 16:48], read_only):
        with unharmed(folder):
            assert fmt.from_dense(given, **params) == wanted
    spread = np.broadcast_to(base[0], (8, 32))
    assert fmt.from_dense(spread, **params) == fmt.from_dense(spread.copy(), **params)
    with refused(folder, sf.errors.UsageError, r"expected a matrix \[M, K\], got shape \(\)"):
        fmt.from_dense(np.array(3, np.float16), **params)


@pytest.mark.parametrize(("fmt", "params"), ALL, ids=IDS)
def test_A43_big_endian_is_converted_and_the_rest_refused(
    folder: Path, fmt: type[Format], params: dict[str, Any]
) -> None:
    base = np.zeros((24, 32), np.float16)
    base[::3, ::8] = 1
    assert fmt.from_dense(base.astype(">f2"), **params) == fmt.from_dense(base, **params)
    for dtype in ("O", "M8[s]", "f4,i4", "U3", "complex64", "bool", "int32", "uint8"):
        with refused(folder, sf.errors.StructureError, "not representable", unit="dtype"):
            fmt.from_dense(np.zeros((4, 4), dtype), **params)
    for dtype in ("O", "M8[s]", "f4,i4", "U3", "complex128"):
        with refused(folder, sf.errors.ArrayError, "cannot be stored"):
            sf.save(folder / "x", {"w": np.zeros((4, 4), dtype)})


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_A44_every_value_type_or_a_refusal(folder: Path, fmt: type[Format]) -> None:
    params = PARAMS.get(fmt.name, {})
    for dtype in VALUE_TYPES:
        x = small(dtype)
        if dtype in fmt.value_dtypes:
            assert fmt.from_dense(x, **params).dtype == x.dtype  # never a silent cast
        else:
            with refused(folder, sf.errors.StructureError, f"dtype {dtype} are not representable; it takes .*float16"):
                fmt.from_dense(x, **params)
            sf.save_dense(folder / "in.safetensors", {"w": x}, overwrite=True)
            assert command("convert", folder / "in.safetensors", folder / "out", "--to", fmt.name).code == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("fmt", "params"), ALL, ids=IDS)
def test_A45_A46_every_bit_pattern(folder: Path, fmt: type[Format], params: dict[str, Any], dtype: str) -> None:
    if dtype not in fmt.value_dtypes:
        return
    row = VALUE_TYPES[dtype]
    n = 2 ** (8 * row.numpy.itemsize)
    raw = np.zeros((n // 16, 64), row.bits)  # one value in every group of four: fits 2:4 and n:m
    raw[:, ::4] = np.arange(n, dtype=row.bits).reshape(n // 16, 16)
    sf.save(folder / "x.safetensors", {"w": fmt.from_dense(raw.view(row.numpy), **params)})
    back = bits(sf.load(folder / "x.safetensors")["w"].to_dense())
    minus_zero = ~row.bits.type(row.zero_mask)
    wanted = raw if fmt is sf.Dense else np.where(raw == minus_zero, row.bits.type(0), raw)
    assert np.array_equal(back, wanted)


def test_A46_lost_minus_zeros_are_counted(folder: Path) -> None:
    w = small("float32")
    w[1, :5] = -0.0
    w[6, 0], w[6, 4] = np.nan, -np.inf
    path = folder / "in.safetensors"
    sf.save_dense(path, {"w": w})
    out = folder / "out.safetensors"
    with unharmed(folder, but=out.name):
        outcome = json.loads(command("convert", path, out, "--to", "csr", "--json").out)["tensors"][0]
    assert outcome["negative_zeros"] == 5
    with unharmed(folder):
        assert command("diff", path, out).code == 0
    sf.save(path, {"w": sf.Dense.from_dense(w)}, overwrite=True)  # as one tensor of a packed checkpoint may be stored
    for target in ("csr", "bitmask", "auto"):
        with unharmed(folder, but=out.name):
            outcome = json.loads(command("convert", path, out, "--to", target, "--force", "--json").out)["tensors"][0]
        assert outcome["negative_zeros"] == 5
        assert json.loads(command("plan", path, "--to", target, "--json").out)["tensors"] == [outcome]


def test_A46_minus_zeros_that_stay_are_not_counted_as_lost(folder: Path) -> None:
    w = small("float32")
    w[0, :4] = 1  # not 2:4
    w[1, :5] = -0.0
    path = folder / "in.safetensors"
    out = folder / "out.safetensors"
    sf.save_dense(path, {"w": w, "v": w})
    for flags in (["--to", "dense", "--rule", "v=csr"], ["--to", "dense"], ["--to", "two-four", "--misfit", "keep"]):
        tables = [
            command("plan", path, *flags, "--json").out,
            command("convert", path, out, *flags, "--force", "--json").out,
        ]
        for table in tables:
            by_name = {t["name"]: t for t in json.loads(table)["tensors"]}
            assert "negative_zeros" not in by_name["w"]
            assert by_name["v"].get("negative_zeros", 0) == (5 if by_name["v"]["target"] == "csr" else 0)
        back: Any = sf.open(out)["w"]
        assert np.array_equal(bits(back.data if isinstance(back, sf.Dense) else back), bits(w))


def test_A47_nan_and_magnitude(folder: Path) -> None:
    w = weights()["w"].copy()
    w[2, 3], w[4, 4] = np.nan, np.inf
    for prune in (lambda x, **k: masks.magnitude(x, 0.5, **k), lambda x, **k: masks.magnitude_nm(x, 2, 4, **k)):
        with refused(folder, sf.errors.StructureError, "nonfinite", "NaN|finite"):
            prune(w)
        kept = prune(w, nonfinite="keep")
        assert kept[2, 3]
        assert kept[4, 4]
    path = folder / "in.safetensors"
    sf.save_dense(path, {"w": w})
    args = ["convert", path, folder / "out.safetensors", "--to", "csr", "--prune", "magnitude", "--sparsity", "0.5"]
    with unharmed(folder):
        answer = command(*args)
    assert (answer.code, "--nonfinite keep" in answer.err) == (3, True)
    assert command(*args, "--nonfinite", "keep").code == 0
    assert np.isnan(sf.load(folder / "out.safetensors")["w"].to_dense()[2, 3])


def test_A48_A49_magnitudes_by_bits_and_ties_by_place() -> None:
    for dtype in ("float8_e4m3fn", "float8_e5m2", "int8"):
        row = VALUE_TYPES[dtype]
        finite = np.arange(256, dtype=np.uint8).view(row.numpy)
        finite = finite[np.isfinite(finite.astype(np.float32))][None, :]
        size = np.abs(finite.astype(np.float32))
        mask = masks.magnitude(finite, 0.5)
        assert size[mask].min() >= size[~mask].max()  # -128 is the largest int8, a set sign bit no larger number
    tied = np.full((2, 8), -3, np.float16)
    tied[:, 1::2] = 3
    assert masks.magnitude_nm(tied, 2, 4).tolist() == [[True, True, False, False] * 2] * 2  # the lowest index stays
    assert masks.magnitude(tied, 0.5).tolist() == [[True] * 8, [False] * 8]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_A50_a_pruned_zero_times_infinity_is_omitted(fmt: type[Format]) -> None:
    f = fmt.from_dense(small(), **PARAMS.get(fmt.name, {}))
    B = np.ones((12, 3), np.float16)
    B[6] = np.inf  # no item of the matrix meets row 6 of B
    for backend in ("reference", "cpu"):
        if sf.backends.get(backend).missing() or fmt is sf.Dense:
            continue
        got = sf.spmm(f, B, backend=backend).astype(np.float32)[:, 0]
        wanted = small().astype(np.float32).sum(axis=1)
        sure = np.ones(10, bool)
        if fmt in (sf.BSR, sf.DBSR):  # documented: the zeros of a stored block are items, and may give 0 * Inf
            stored = {int(r) for r, c in zip(f.block_rows(), f.indices, strict=True) if c == 6 // 3}
            sure = ~np.isin(np.arange(10) // f.blocksize[0], list(stored))
        assert sure.any()
        assert np.array_equal(got[sure], wanted[sure])
        assert np.all(np.isnan(got[~sure]) | (got[~sure] == wanted[~sure]))
