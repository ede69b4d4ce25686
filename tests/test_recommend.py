"""recommend(): counts against their definition, times against explain, reasons against the numbers beside them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_structure import matrix, same

import spformat as sf
from spformat.dispatch import cost
from spformat.dispatch.recommend import OBJECTIVES, Recommendation, Recommendations
from spformat.errors import UsageError
from spformat.formats import parse_spec, registered
from spformat.preprocess import coordinates, masks
from spformat.preprocess.coordinates import dense_blocks_of, of_csr, of_row_chunks, structure_of
from spformat.preprocess.structure import analyse
from spformat.products import roofline
from spformat.products.problem import Operand, Problem

BF16 = ml_dtypes.bfloat16


def normal(M: int, K: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((M, K)).astype(BF16)


def half(M: int, K: int) -> np.ndarray:
    """50 % zeros anywhere."""
    return np.where(np.random.default_rng(1).random((M, K)) < 0.5, normal(M, K), BF16(0)).astype(BF16)


def power_law(M: int, nnz: int) -> sf.CSR:
    """A graph whose degrees fall like a power law."""
    rng = np.random.default_rng(2)
    rows = np.minimum(M - 1, (M * rng.power(0.4, nnz)).astype(np.int64))
    keys = np.unique(rows * M + rng.integers(0, M, nnz))
    indptr = np.searchsorted(keys, np.arange(M + 1) * M).astype(np.int32)
    return sf.CSR(shape=(M, M), indptr=indptr, indices=(keys % M).astype(np.int32), data=np.ones(keys.size, np.float32))


def in_blocks(M: int, K: int, b: int, share: float) -> np.ndarray:
    kept = np.random.default_rng(3).random((M // b, K // b)) < share
    return np.where(np.kron(kept, np.ones((b, b), bool)), normal(M, K), BF16(0)).astype(BF16)


# ------------------------------------------------------------------ counts


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 140), st.sampled_from([0.0, 0.01, 0.2, 0.8, 1.0]), st.integers(0, 99))
def test_counts_from_coordinates_and_from_strips_are_those_of_the_whole(M: int, K: int, density: float, seed: int):
    x = matrix("float16", (M, K), density, seed)
    want = analyse(x)
    same(of_row_chunks(x[i : i + 256] for i in range(0, M, 256)), want)
    for items in (1 << 22, 50):  # one strip, and strips of 256 rows
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coordinates, "_ITEMS", items)
            same(replace(of_csr(sf.convert(x, "csr")), negative_zeros=want.negative_zeros), want)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 150), st.integers(1, 150), st.floats(0.005, 1), st.integers(0, 99))
def test_statistics_are_what_their_names_say(M: int, K: int, density: float, seed: int):
    x = matrix("float32", (M, K), density, seed)
    s, some = analyse(x), (x != 0) | np.isnan(x)
    for h in (8, 16):
        vectors = sum(int(some[i : i + h].any(axis=0).sum()) for i in range(0, M, h))
        assert s.gather_reuse(h) == (some.sum() / vectors if vectors else 0)
    for b in (8, 16, 32, 64, 128):
        tiles = [some[i : i + b, j : j + b].any() for i in range(0, M, b) for j in range(0, K, b)]
        assert s.block_fill(b) == (some.sum() / (sum(tiles) * b * b) if any(tiles) else 0)
    lengths = some.sum(axis=1)
    assert (s.longest_row, s.mean_row) == (lengths.max(), some.sum() / M)
    assert s.row_spread == pytest.approx(lengths.std() / lengths.mean() if some.any() else 0)
    fours = [some[:, j : j + 4].sum(axis=1) for j in range(0, K, 4)]
    assert s.two_four_share == pytest.approx((np.concatenate(fours) <= 2).mean())


@pytest.mark.parametrize("name", [f.name for f in registered() if f.name not in ("csc", "coo")])  # by name alone
def test_counts_tell_what_a_conversion_stores(name: str) -> None:
    """Problems from counts are those of the converted matrix, and so are the bytes."""
    asked = 0
    for x in (half(70, 100), masks.apply(normal(64, 96), masks.magnitude_nm(normal(64, 96), 2, 4)),
              in_blocks(256, 384, 32, 0.2), np.zeros((3, 5), BF16)):  # fmt: skip
        for r in sf.recommend(x, 16):
            fmt, params = parse_spec(r.format)
            if fmt.name != name:
                continue
            a = fmt.from_dense(x, **params)
            counts, resolved = analyse(x), a.params()
            assert Operand.of_counts(fmt, counts, resolved, "cuda") == Operand.of(a, "cuda"), r.format
            assert fmt.params_of(counts, fmt.resolve_params(params)) == resolved
            assert (r.nbytes, r.stored) == (a.nbytes, a.stored)
            asked += 1
    assert asked


def test_strips_that_cut_a_tile_are_refused() -> None:
    with pytest.raises(UsageError, match="a multiple of 256 rows, got one of 100"):
        of_row_chunks(np.ones((100, 4), np.float32) for _ in range(2))
    with pytest.raises(UsageError, match="same columns"):
        of_row_chunks(np.ones((256, k), np.float32) for k in (4, 5))
    with pytest.raises(UsageError, match="at least one strip"):
        of_row_chunks([])


# ------------------------------------------------------------------ times


@pytest.mark.parametrize("device", ["H200", "H100", "A100", "cpu"])
def test_the_times_are_those_of_explain(device: str) -> None:
    x = in_blocks(512, 768, 16, 0.3)
    got = sf.recommend(x, [1, 16, 300], device=device, b_layout="col")
    board, dense = roofline.DEVICES.get(device), next(r for r in got if r.format == "dense")
    for r in got:
        a, least = sf.convert(x, r.format), cost.LAUNCH_US if board else 0.0
        for n in got.n:
            p = Problem.product(
                a.name, tuple(a.params().items()), *a.shape, n, a.stored, "bfloat16", "bfloat16", "bfloat16", "col",
                device="cuda" if board else "cpu", sm=board and board.sm,
                parts=Operand.of(a, "cuda" if board else "cpu").parts,
            )  # fmt: skip
            with roofline.on(board or roofline.H200):
                e = sf.explain(p, installed=board is None)
            least = max(least, e.expected_us)  # more columns take no less time
            if a.stored >= x.size:  # there is no zero to skip
                least = max(least, dense.expected_us[n])
            assert (r.kernels[n], r.expected_us[n]) == (e.chosen, least)
    totals = [r.total_us for r in got]
    assert totals == sorted(totals)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_first_is_least_and_dense_is_there(objective: str) -> None:
    got = sf.recommend(half(256, 512), [16, 2048], objective=objective)
    values = {"time": "total_us", "bytes": "nbytes", "resident": "resident_bytes"}
    numbers = [getattr(r, values[objective]) for r in got]
    assert numbers == sorted(numbers)
    assert [r.format for r in got].count("dense") == 1
    if objective == "resident":
        assert any(r.resident_bytes == r.nbytes + max(r.workspace.values()) > r.nbytes for r in got)


def test_what_is_recommended_for_the_usual_kinds_of_matrices() -> None:
    assert sf.recommend(half(4096, 4096), 2048)[0].format == "dense"
    x = normal(2048, 2048)
    pruned = masks.apply(x, masks.magnitude_nm(x, 2, 4))
    assert sf.recommend(pruned, [1, 16])[0].format == "two-four"
    graph = sf.recommend(power_law(20000, 100000), 32)
    assert graph[0].format.partition(":")[0] in ("csr", "ell-buckets")
    assert graph.statistics["rows"]["spread"] > 0.5
    blocks = sf.recommend(in_blocks(2048, 2048, 64, 0.1), [16, 2048])
    assert blocks[0].format == "bsr:blocksize=64x64"
    assert blocks.statistics["block_fill"]["64"] > 0.95
    assert "two-four" in blocks.excluded


def test_a_sparse_matrix_of_any_kind_is_never_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.sparse as sp

    a = sp.random_array((300, 200), density=0.02, rng=np.random.default_rng(0), dtype=np.float32)
    want = sf.recommend(a.toarray(), 16)

    def refuse(self: Any) -> Any:
        raise AssertionError("made dense")

    matrices = [a, a.tocsr(), sf.convert(a, "csr"), sf.convert(a, "bsr:blocksize=16x16"), sf.convert(a, "bitmask")]
    for f in registered():
        monkeypatch.setattr(f, "to_dense", refuse)
    for x in (*matrices, structure_of(matrices[2])):
        assert sf.recommend(x, 16) == want
    wide = sf.CSR(shape=(10**6, 10**7), indptr=np.zeros(10**6 + 1, np.int32), indices=np.zeros(0, np.int32),
                  data=np.zeros(0, np.float32))  # fmt: skip
    assert sf.recommend(wide, 16).statistics["nnz"] == 0


# ------------------------------------------------------------------ what is printed


def numbers_in(text: str) -> set[str]:
    """The numbers of a text, without those in names of kernels."""
    return set(re.findall(r"\d+(?:\.\d+)?", re.sub(r"\b(cuda|cpu|vendor|composed)\.\w+", "", text)))


@pytest.mark.parametrize("device", ["H200", "cpu"])
def test_every_number_of_a_reason_is_shown_or_is_a_ratio_of_shown_ones(device: str) -> None:
    x = normal(256, 512)
    pruned = masks.apply(x, masks.magnitude_vector_nm(x, 2, 8, 8))
    for A in (half(256, 512), in_blocks(256, 512, 16, 0.2), power_law(512, 3000), normal(64, 64), pruned):
        got = sf.recommend(A, [16, 700], device=device)
        lines = str(got).split("\n")
        head = numbers_in("\n".join(lines[: next(i for i, line in enumerate(lines) if line.startswith("  1. "))]))
        s = got.statistics
        assert {f"{100 * (1 - s['density']):.1f}", f"{s['rows']['mean']:.1f}", f"{s['gather_reuse']['8']:.1f}"} <= head
        dense = next(r for r in got if r.format == "dense")
        for i, r in enumerate(got, 1):
            assert f"  {i}. {r}" in lines
            assert r.reasons or device == "cpu"
            ratios = {f"{dense.expected_us[n] / r.expected_us[n]:.2f}" for n in got.n}
            after = numbers_in(str(got[i])) if r is got[0] else set()  # what dense says of the next
            for reason in r.reasons:
                assert f"       {reason}" in lines
                assert numbers_in(reason) <= head | numbers_in(str(r)) | after | ratios, (r.format, reason)


def test_the_reasons_in_words() -> None:
    got = {r.format: " | ".join(r.reasons) for r in sf.recommend(half(4096, 4096), [2048])}
    assert re.search(r"stay dense: \S+, the next, expects", got["dense"])
    assert re.search(r"50\.\d % of its elements are zero|49\.\d % of its elements are zero", got["dense"])
    sparse = np.where(np.random.default_rng(0).random((512, 2048)) < 0.01, normal(512, 2048), BF16(0)).astype(BF16)
    got = {r.format: " | ".join(r.reasons) for r in sf.recommend(sparse, 16)}
    assert re.search(
        r"block fill 1\.\d % at 32: 99\.\d % of the stored values would be padding", got["bsr:blocksize=32x32"]
    )
    assert re.search(r"gather reuse 1\.0 at height 8: 8\d\.\d % of", got["sr-bcrs:vector_length=8,stride=16"])
    assert "the longest" in got["csr"]
    tiny = sf.recommend(np.eye(64), 16)
    assert all(r.expected_us[16] >= 3 for r in tiny), "an empty launch takes as long"
    assert any("raised to what is possible" in reason for r in tiny for reason in r.reasons)


def test_one_column_is_no_columns() -> None:
    text = str(sf.recommend(half(64, 64), n=[1, 2], device="H200"))
    assert " us at 1 column, " in text
    assert " us at 2 columns, " in text
    assert " 1 columns" not in text


def test_a_format_that_no_kernel_takes_expects_no_time_at_all() -> None:
    """ "csr, the next, expects no time in all" said the opposite of what was meant."""
    first, *others = sf.recommend(np.eye(64, dtype=np.float32), 16, backend="vendor.cublas_gemm")
    assert first.format == "dense"
    assert {r.total_us for r in others} == {None}
    assert first.reasons[-1] == "stay dense: no kernel takes all products with another format"


def test_more_columns_take_no_less_time_and_nothing_beats_dense_without_zeros_to_skip() -> None:
    """Constants of kernels for many columns extrapolate to too little for small matrices."""
    full = normal(1024, 256)
    got = {r.format: r for r in sf.recommend(full, (2048, 16))}
    dense = got.pop("dense")
    assert all(r.expected_us[16] <= r.expected_us[2048] for r in got.values())
    assert all(r.expected_us[n] >= dense.expected_us[n] for r in got.values() for n in (16, 2048))
    assert any(reason.startswith("raised") for r in got.values() for reason in r.reasons)
    assert sf.recommend(full, (16, 2048))[0].format == "dense"


def test_json_round_trip() -> None:
    got = sf.recommend(half(128, 256), [16, 2048], objective="resident")
    tree = json.loads(json.dumps(got.to_json()))
    back = Recommendations.from_json(tree)
    assert (back, str(back)) == (got, str(got))
    assert Recommendation.from_json(tree["recommendations"][0]) == got[0]
    assert (got[:2], len(got)) == (got.ranked[:2], len(list(got)))


def test_what_is_refused() -> None:
    x = half(16, 16)
    for wrong, message in (
        ({"device": "H300"}, "device: expected one of H200, H100, A100, cpu, or a Device of your own"),
        ({"objective": "speed"}, "objective: expected one of time, bytes, resident, got 'speed'"),
        ({"n": 0}, "at least 1"), ({"n": []}, "at least 1"), ({"n": ["a"]}, "expected a number of columns"),
        ({"n": "16,2048"}, "n: expected a number of columns, got '16,2048'"),
        ({"n": True}, "n: expected a number of columns, got True"), ({"n": [16, False]}, "got False"),
        ({"workspace": True}, "workspace: expected a number of bytes >= 0, got True"),
        ({"backend": "gpu"}, "unknown backend"), ({"more": ["bsrr"]}, "unknown format"),
        *(({"more": m}, "more: expected several format texts, as more=['bsr:blocksize=64x64'], got " + repr(m))
          for m in ([3], 3, None, [None, "csr"], "csr", b"csr")),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=re.escape(message)):
            sf.recommend(x, **wrong)
    more = sf.recommend(x, 16, more=["bsr:blocksize=3x5", "two-four", "bsr:blocksize=64x64"])
    assert set(more.excluded) >= {"bsr:blocksize=3x5", "two-four"}
    assert sf.recommend(x, np.array(16)).n == sf.recommend(x, 16).n
    assert sf.recommend(x, 16, dtype="float32").dtype == "float32"
    with pytest.raises(UsageError, match=r"recommend\(x, n="):
        sf.convert(x, "fastest")


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (8, 16), (1, 1)])
def test_every_format_is_ranked_or_excluded_for_a_matrix_without_nonzeros(shape: tuple[int, int]) -> None:
    """two-four and vector-nm were in neither list."""
    got = sf.recommend(np.zeros(shape, BF16), 16)
    ranked = {parse_spec(r.format)[0].name for r in got}
    assert ranked | set(got.excluded) == {f.name for f in registered()} - {"csc", "coo"}  # those are chosen by name
    assert "not vector-nm: there are no nonzeros to have a pattern" in str(got)


def test_your_own_device() -> None:
    twice = replace(roofline.H200, name="twice", memory=2 * roofline.H200.memory)
    ours, theirs = (sf.recommend(half(2048, 2048), 16, device=d)[0] for d in ("H200", twice))
    assert theirs.expected_us[16] < ours.expected_us[16]


def test_a_matrix_with_dense_blocks_is_considered_as_a_sum() -> None:
    """What the sum is said to store, and its bytes, are those of the sum itself."""
    rng = np.random.default_rng(4)
    keep = np.kron(rng.random((5, 7)) < 0.3, np.ones((64, 64), bool))[:300, :430]
    keep |= rng.random((300, 430)) < 0.02
    keep &= rng.random((300, 430)) < 0.9
    x = np.where(keep, rng.integers(1, 100, keep.shape), 0).astype(np.float32)
    for a in (x, sf.convert(x, "csr")):
        got = sf.recommend(a, [16, 300])
        sums = {r.format: r for r in got if "+" in r.format}
        assert set(sums) == {f"bsr:blocksize={b}x{b},density>=0.5+csr" for b in (32, 64)}
        for text, r in sums.items():
            s = sf.convert(x, text)
            assert (r.stored, r.nbytes) == (s.stored, s.nbytes)
            assert r.padding == 1 - s.to_csr().nnz / s.stored
            b = int(text.split("x")[1].split(",")[0])
            blocks = s.parts[0].stored // (b * b)
            share = 100 * s.parts[0].to_csr().without_zeros().nnz / s.to_csr().nnz
            assert (
                r.reasons[0] == f"{blocks} blocks of {b}x{b} are at least half full, with {share:.1f} % of the nonzeros"
            )
    assert not [r for r in sf.recommend(structure_of(x), 16) if "+" in r.format]
    assert not [r for r in sf.recommend(half(256, 512), 16) if "+" in r.format]  # all blocks are half full


def test_blocks_at_the_edges_have_fewer_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were counted as whole, so that the rest seemed to have fewer places, and to be more than a tenth full."""
    x = np.zeros((80, 33), np.float32)
    x[64:80] = 1  # 16 of 32 rows of the lower left block are in the matrix, and it is half full
    x[:60, 5:8] = 1
    places = x.size - 16 * 32
    rest = int(x[:64].sum() + x[64:, 32:].sum())
    assert x.size - 32 * 32 < 10 * rest <= places
    a = sf.convert(x, "csr")
    assert dense_blocks_of(x) == dense_blocks_of(a) == [(32, 1, 16 * 32)]
    monkeypatch.setattr(coordinates, "counts_of", None)
    far = sf.CSR(shape=(80, 1 << 30), indptr=a.indptr, indices=a.indices, data=a.data)
    assert dense_blocks_of(far) == [(32, 1, 16 * 32)]  # blocks without values are not counted one by one


def test_the_parts_of_a_sum_go_to_the_device_of_its_problem() -> None:
    """``explain --gpu`` of a file of sums asked the kernels of the host for the parts: 900 us where a GPU takes 20."""
    s = sf.convert(in_blocks(256, 512, 32, 0.3), "bsr:blocksize=64x64,density>=0.5+csr")
    there = Operand.of(s, "cuda")
    p = Problem.product("sum", (), *s.shape, 64, s.stored, "float32", "float32", "float32", parts=Operand.of(s).parts)
    assert [x.device for x in p.operands[0].parts] == ["cpu", "cpu"]
    assert p.changed(device="cuda", sm=90).operands[0].parts == there.parts
