"""The TCA-SpMM schedule: golden vectors, counts on real matrices, a plain loop as oracle, corruptions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spformat as sf
from spformat.errors import ArrayError, InvariantError, UsageError
from spformat.formats.csr import CSR
from spformat.interop.matrices import read_matrix
from spformat.preprocess.schedule import WARPS, TCASchedule, mma_of_full_fragments, mma_of_whole_fragments, tca

FIXTURES = Path(__file__).parent.parent / "fixtures"
GOLDEN = json.loads((FIXTURES / "golden" / "tca-schedule.json").read_text())["cases"]
COUNTS = json.loads((FIXTURES / "matrices" / "counts.json").read_text())
MATRICES = [name for name in COUNTS if (FIXTURES / "matrices" / name).exists()]
ARRAYS = ("num_warps_per_row", "row_id_for_each_warp", "warpid_within_row")


def csr_of(indptr) -> CSR:
    """A CSR with this indptr whose rows hold columns 0, 1, 2, .."""
    indptr = np.asarray(indptr, np.int32)
    lengths = np.diff(indptr)
    indices = np.arange(indptr[-1], dtype=np.int32) - np.repeat(indptr[:-1], lengths)
    return CSR(
        shape=(lengths.size, int(lengths.max(initial=0))),
        indptr=indptr,
        indices=indices.astype(np.int32),
        data=np.ones(indptr[-1], np.float32),
    )


def next_fit(lengths):
    """The placement as the specification describes it, one row at a time."""
    rows, parts, warps = [], [], []
    for row, d in enumerate(lengths):
        v = next((w for w, most in ((0, 0), (1, 8), (2, 16), (4, 32), (8, 64)) if d <= most), WARPS * -(-d // 64))
        p = len(rows) % WARPS
        if p > 0 and p + v > WARPS:
            rows += [-1] * (WARPS - p)
            parts += [-1] * (WARPS - p)
        rows += [row] * v
        parts += range(v)
        warps.append(v)
    idle = -len(rows) % WARPS
    return warps, rows + [-1] * idle, parts + [-1] * idle


@pytest.mark.parametrize("case", GOLDEN, ids=[c["name"] for c in GOLDEN])
def test_golden(case):
    schedule = tca(csr_of(case["input"]["indptr"]))
    for name, expected in case["expect"]["arrays"].items():
        array = getattr(schedule, name)
        assert str(array.dtype) == expected["dtype"]
        assert list(array.shape) == expected["shape"]
        assert array.tolist() == expected["values"]
    assert schedule.blocks == case["expect"]["blocks"]
    for n, count in case["expect"]["mmas"].items():
        assert schedule.mma_count(int(n)) == count


@pytest.mark.parametrize("name", MATRICES)
def test_counts_on_real_matrices(name):
    a, expected = read_matrix(FIXTURES / "matrices" / name), COUNTS[name]
    schedule = tca(a)
    assert int(schedule.num_warps_per_row.sum()) == expected["tca_warps"]
    assert schedule.blocks == expected["tca_blocks_nextfit"]
    assert schedule.mma_count(128) == expected["tca_mma128"]
    schedule.validate(a)


@given(st.lists(st.sampled_from([0, 1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 300]), max_size=60))
def test_equals_the_loop(lengths):
    schedule = tca(csr_of(np.concatenate(([0], np.cumsum(lengths)))))
    found = [getattr(schedule, name).tolist() for name in ARRAYS]
    assert found == [list(x) for x in next_fit(lengths)]


@pytest.mark.parametrize(
    ("array", "at", "to"),
    [
        ("row_id_for_each_warp", 0, 7),
        ("row_id_for_each_warp", 0, -2),
        ("row_id_for_each_warp", 1, -1),
        ("row_id_for_each_warp", 5, 0),
        ("warpid_within_row", 1, 4),
        ("warpid_within_row", 0, -2),
    ],
)
def test_validate_reports_what_would_be_an_address(array, at, to):
    schedule = tca(csr_of([0, 5, 25, 45, 85, 88]))
    changed = getattr(schedule, array).copy()
    changed[at] = to
    broken = dataclasses.replace(schedule, **{array: changed})
    with pytest.raises(InvariantError) as e:
        broken.validate()
    assert e.value.array in ("row_id_for_each_warp", "warpid_within_row")


def test_validate_wants_whole_blocks():
    schedule = tca(csr_of([0, 5]))
    with pytest.raises(InvariantError, match="multiple of 8"):
        TCASchedule(
            schedule.num_warps_per_row, schedule.row_id_for_each_warp[:7], schedule.warpid_within_row[:7]
        ).validate()


def test_validate_against_the_matrix():
    a = csr_of([0, 5, 25, 45])
    schedule = tca(a)
    schedule.validate(a)
    swapped = schedule.warpid_within_row.copy()
    swapped[1:3] = swapped[2:0:-1]
    broken = dataclasses.replace(schedule, warpid_within_row=swapped)
    broken.validate()  # harmless as addresses
    with pytest.raises(InvariantError, match="next-fit"):
        broken.validate(a)


@given(
    st.lists(st.sampled_from([0, 1, 9, 33, 64, 65, 300]), max_size=8),
    st.lists(st.sampled_from([0, 1, 9, 33, 64, 65, 300]), max_size=8),
)
def test_only_its_own_schedule_suits_a_matrix(lengths, others):
    """Whatever another matrix's schedule claims, it is refused and not followed."""
    a, b = (csr_of(np.concatenate(([0], np.cumsum(x)))) for x in (lengths, others))
    same = [getattr(tca(a), name).tolist() for name in ARRAYS] == [getattr(tca(b), name).tolist() for name in ARRAYS]
    if same:
        tca(b).validate(a)
    else:
        with pytest.raises(InvariantError):
            tca(b).validate(a)


@pytest.mark.parametrize("name", ["row_id_for_each_warp", "warpid_within_row"])
def test_every_change_of_a_schedule_is_seen(name):
    a = csr_of([0, 5, 25, 45, 85, 88, 388, 400])
    schedule = tca(a)
    size = schedule.row_id_for_each_warp.size
    for at in range(size):
        for to in range(-1, 8):
            changed = getattr(schedule, name).copy()
            if changed[at] == to:
                continue
            changed[at] = to
            with pytest.raises(InvariantError):
                dataclasses.replace(schedule, **{name: changed}).validate(a)


def test_a_schedule_that_leaves_a_gap_is_not_next_fit():
    a = csr_of([0, 5, 10])
    row_id, part = np.full(16, -1, np.int32), np.full(16, -1, np.int32)
    row_id[[0, 8]], part[[0, 8]] = (0, 1), 0
    tight = tca(a)
    loose = dataclasses.replace(
        tight,
        row_id_for_each_warp=row_id.astype(tight.row_id_for_each_warp.dtype),
        warpid_within_row=part.astype(tight.warpid_within_row.dtype),
    )
    with pytest.raises(InvariantError):
        loose.validate(a)


def test_an_attached_schedule_is_used_and_not_computed_again(monkeypatch):
    a = csr_of([0, 5, 25, 45])
    schedule = tca(a)
    monkeypatch.setattr("spformat.preprocess.schedule._next_fit", lambda warps: pytest.fail("computed again"))
    assert schedule.attach(a) is a
    assert TCASchedule.of(a) is schedule
    monkeypatch.undo()
    with pytest.raises(InvariantError):
        schedule.attach(csr_of([0, 5, 25]))
    with pytest.raises(UsageError, match="expected a CSR, got Bitmask"):
        schedule.attach(sf.convert(a, "bitmask"))


def test_counts_of_the_paper_by_hand():
    """The worked example of the specification: per row, Eq. 1, and its limit."""
    a = csr_of([0, 8, 20, 25, 25, 57, 121, 249])
    schedule = tca(a)
    assert schedule.mma_per_row(128).tolist() == [8, 16, 8, 0, 32, 64, 128]
    assert schedule.mma_count(128) == 256
    assert mma_of_whole_fragments(a, 128) == 448
    assert mma_of_full_fragments(a, 128) == 249
    assert (schedule.mma_per_row(1).tolist(), mma_of_whole_fragments(a, 1)) == ([1, 1, 1, 0, 1, 1, 2], 7)
    empty = csr_of([0])
    assert (tca(empty).mma_count(8), mma_of_whole_fragments(empty, 8), mma_of_full_fragments(empty, 8)) == (0, 0, 0)


@pytest.mark.parametrize("name", MATRICES)
def test_real_matrices_lie_between_the_limit_and_equation_1(name):
    a = read_matrix(FIXTURES / "matrices" / name)
    assert mma_of_full_fragments(a, 128) <= tca(a).mma_count(128) <= mma_of_whole_fragments(a, 128)


def test_a_schedule_is_kept_beside_its_matrix(tmp_path):
    a = csr_of([0, 5, 25, 45, 85, 88])
    path = tmp_path / "w.safetensors"
    sf.save(path, {"w": a} | tca(a).named("w"))
    tensors = sf.load(path)
    loaded = TCASchedule.beside(tensors, "w")
    for name in ARRAYS:
        array = getattr(tca(a), name)
        assert getattr(loaded, name).dtype == array.dtype
        np.testing.assert_array_equal(getattr(loaded, name), array)
    with sf.open(path) as lazy:
        assert TCASchedule.beside(lazy, "w").blocks == loaded.blocks
    # of another matrix, in another format, or not there
    with pytest.raises(InvariantError, match=r"tca: .*: expected "):
        TCASchedule.beside(tensors | {"w": csr_of([0, 5, 25, 45, 85, 99])}, "w")
    with pytest.raises(UsageError, match="expected 'w' to be a CSR, got Dense"):
        TCASchedule.beside(tensors | {"w": sf.convert(a, "dense")}, "w")
    with pytest.raises(UsageError, match="expected 'v' among the tensors"):
        TCASchedule.beside(tensors, "v")
    del tensors["w.tca.warpid_within_row"]
    with pytest.raises(UsageError, match=r"expected 'w\.tca\.warpid_within_row' among the tensors"):
        TCASchedule.beside(tensors, "w")


def test_arrays_of_another_kind_beside_a_matrix():
    a = csr_of([0, 5, 25, 45, 85, 88])
    named = tca(a).named("w")
    for change in (lambda x: x.reshape(1, -1), lambda x: x.astype(np.float64), lambda x: x.astype(np.int16)):
        for entry in named:
            with pytest.raises(ArrayError, match="expected int32 or int64 of one dimension"):
                TCASchedule.beside({"w": a} | named | {entry: change(named[entry])}, "w")
    for other in (np.eye(4, dtype=np.float32), sf.convert(np.eye(4, dtype=np.float32), "bsr"), None):
        with pytest.raises(UsageError, match="expected a CSR"):
            tca(other)
