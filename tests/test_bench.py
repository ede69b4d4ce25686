"""Right results pass the check in front of every measurement, wrong ones do not; no contender has a fixed place."""

from __future__ import annotations

import importlib.util
import itertools
import json
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat import limits
from spformat.measure import bench, contenders


@pytest.mark.parametrize("dense", [1 << 28, 1000], ids=["all-rows", "sampled"])
def test_a_wrong_result_is_not_measured_as_right(monkeypatch: pytest.MonkeyPatch, dense: int) -> None:
    monkeypatch.setattr(bench, "DENSE", dense)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 300)).astype(np.float32)
    x[rng.random(x.shape) < 0.9] = 0
    x[1] = 1  # the longest row, between the sampled ones: it is always checked
    a: Any = sf.convert(x, "csr")
    B = contenders.operand(a, 16)
    right, slip = x @ B, x @ B
    slip[1] *= 1 + 1e-3
    crowd = (bench.Contender("right", right.copy, False), bench.Contender("slip", slip.copy, False))
    case = bench.Case("t", a, B, (*contenders.ours(a, B), *crowd), "float32", {"nnz": a.nnz})
    errors = {r.name: r.error for r in bench.compare(case, 2)}
    assert errors.pop("slip") > 1
    assert len(errors) > 1
    assert max(errors.values()) < 1


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_who_writes_nothing_does_not_pass_with_what_another_has_written(order: Any, dtype: str) -> None:
    kind = sf.arrays.dtypes.value_type(dtype).numpy
    x = np.eye(6, 4).astype(kind)
    a: Any = sf.convert(x, "csr")
    B = contenders.operand(a, 3)
    out = np.empty((6, 3), kind, order)

    def write(rows: slice) -> Any:
        out[rows] = (x @ B)[rows]
        return out

    parts = {"all": slice(None), "half": slice(3), "none": slice(0)}
    crowd = [bench.Contender(name, lambda rows=rows: write(rows)) for name, rows in parts.items()]  # type: ignore[misc]
    found = {r.name: r.error for r in bench.compare(bench.Case("t", a, B, tuple(crowd), dtype), 1)}
    assert found["all"] < 1
    assert found["half"] == found["none"] == float("inf")


@pytest.mark.parametrize(("only", "kernel"), [((), "cpu.spmm_csr"), (("cuda",), "cuda.spmm_csr")])
def test_a_backend_that_is_not_here_is_listed_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, only: tuple[str, ...], kernel: str
) -> None:
    why = "pip install 'spformat[this]'"
    for name in ("cpu", "cuda"):
        monkeypatch.setattr(type(sf.backends.get(name)), "missing", lambda self: [why])
    a: Any = sf.convert(np.eye(8, dtype=np.float32), "csr")
    B = contenders.operand(a, 4)
    case = bench.Case("t", a, B, (*contenders.ours(a, B, only), *contenders.dense(a, B)), "float32")
    results = bench.compare(case, 1)
    assert bench.verdict(results) == "nothing of ours ran"
    notes = {r.name: r.note for r in results if not r.peer}
    assert why in notes[kernel]
    assert {name.partition(".")[0] for name in notes} == {kernel.partition(".")[0]}


def test_who_accepts_is_measured_alone() -> None:
    a: Any = sf.convert(np.eye(8, dtype=np.float32), "csr")
    B = contenders.operand(a, 4)
    found = contenders.ours(a, B, only=("cpu", "cuda", "reference"))
    assert [(c.run() == B).all() for c in found] == [True] * len(found) != []


def test_a_dense_matrix_over_the_budget_is_listed_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    a: Any = sf.convert(np.eye(64, dtype=np.float16), "two-four")
    B = contenders.operand(a, 2)
    names = ["dense"]
    with limits.using(memory=8000):
        found = contenders.dense(a, B)
        if importlib.util.find_spec("torch"):
            names.append("torch dense")
            monkeypatch.setattr(contenders, "is_cupy", lambda _: True)  # on a device 2:4 has one contender more
            found += contenders.torch_peers(a, B)
    assert [c.name for c in found] == names
    for c in found:
        assert c.peer
        with pytest.raises(sf.errors.LimitError, match="8,192 bytes requested, 8,000 allowed"):
            c.run()


def test_everybody_runs_in_every_round_and_follows_everybody() -> None:
    calls: list[int] = []
    runs = [lambda i=i: calls.append(i) for i in range(4)]  # type: ignore[misc]
    clock = bench._HostClock()
    times = clock.take_turns(runs, 40, 0, cold=False, seconds=60)
    rounds = np.array(calls).reshape(40, 4)
    assert len(times) == 4
    assert (np.sort(rounds) == np.arange(4)).all()
    assert {(a, b) for row in rounds.tolist() for a, b in itertools.pairwise(row)} == {
        (a, b) for a in range(4) for b in range(4) if a != b
    }
    calls.clear()
    clock.take_turns(runs, 40, 0, cold=False, seconds=60)
    assert (np.array(calls).reshape(40, 4) == rounds).all()  # the same in every run


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dense", [1 << 28, 100], ids=["all-rows", "sampled"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nan_and_infinities_of_the_matrix_are_compared(monkeypatch: pytest.MonkeyPatch, dense: int, dtype: str) -> None:
    monkeypatch.setattr(bench, "DENSE", dense)
    x = np.eye(12, 9, dtype=dtype)
    x[1, 2], x[3, 4], x[5, 6], x[7, 7:9] = np.nan, np.inf, -np.inf, (np.inf, -np.inf)
    a: Any = sf.convert(x, "csr")
    B = np.full((9, 3), 2, dtype)
    right = np.zeros((12, 3), np.float32) + 2 * np.eye(12, 9, dtype=dtype).sum(1, dtype=np.float32)[:, None]
    right[1], right[3], right[5], right[7] = np.nan, np.inf, -np.inf, np.nan
    crowd = {"right": right}
    for name, place, value in (
        ("number-for-nan", 1, 2.0), ("number-for-infinity", 3, 3e38), ("other-sign", 3, -np.inf),
        ("nan-for-infinity", 5, np.nan), ("infinity-for-nan", 7, np.inf), ("nan-for-number", 0, np.nan),
        ("infinity-for-number", 0, np.inf),
    ):  # fmt: skip
        crowd[name] = right.copy()
        crowd[name][place, 1] = value
    others = tuple(bench.Contender(name, c.copy, False) for name, c in crowd.items())
    case = bench.Case("t", a, B, (*contenders.ours(a, B), *contenders.dense(a, B), *others), dtype)
    results = bench.compare(case, 1)
    wrong = {r.name for r in results if r.error == float("inf")}
    assert wrong == crowd.keys() - {"right"}
    assert max(r.error for r in results if r.name not in wrong) < 1
    assert len(results) > len(crowd) + 1  # kernels of ours, and dense
    rows = {row["name"]: row for row in bench.to_json(results)}
    assert {name for name, row in rows.items() if row["right"] is False} == wrong
    assert {name for name, row in rows.items() if row["error"] is None} == wrong
    json.dumps(list(rows.values()), allow_nan=False)
    only = [r for r in results if r.name == "other-sign"]
    assert "WRONG RESULT, other NaN or infinities than A @ B has" in bench.verdict(only)
    assert "WRONG" not in bench.verdict([r for r in results if r.name == "right"])


def test_who_did_not_run_is_neither_right_nor_wrong() -> None:
    def fail() -> Any:
        raise sf.errors.NoKernelError("no")

    a: Any = sf.convert(np.eye(4, dtype=np.float32), "csr")
    case = bench.Case("t", a, contenders.operand(a, 2), (bench.Contender("none", fail, False),), "float32")
    (row,) = bench.to_json(bench.compare(case, 1))
    assert (row["right"], row["error"], row["cold_us"], row["note"]) == (None, None, None, "no")
