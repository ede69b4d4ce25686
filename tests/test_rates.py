"""Expected times: one number for every kernel and problem, files of constants, and how they decide the choice."""

from __future__ import annotations

import itertools
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spformat as sf
from spformat import backends
from spformat.errors import UsageError
from spformat.measure import calibration_cases, calibration_fit
from spformat.measure.calibration_points import Point
from spformat.products import rates, roofline, tiles
from spformat.products.kernel import LEAST_CALL_US, Kernel, tile_us
from spformat.products.problem import COL, ROW, Problem

P = Problem.product(
    "csr", (), 4096, 4096, 256, 1 << 20, "float32", "float32", "float32", device="cuda", sm=90
)  # fmt: skip
PARAMS: dict[str, list[dict[str, Any]]] = {
    "bsr": [{"blocksize": (16, 16)}, {"blocksize": (64, 64)}, {"blocksize": (5, 7)}, {"blocksize": (200, 8)}],
    "dbsr": [{"blocksize": (32, 32)}, {"blocksize": (1, 3)}],
    "vector-nm": [{"n": 8, "m": 32, "vector_length": 128}, {"n": 2, "m": 4, "vector_length": 32},
                  {"n": 1, "m": 200, "vector_length": 3}],
    "sr-bcrs": [{"vector_length": 8, "stride": 16}, {"vector_length": 3, "stride": 5}],
    "ell-buckets": [{"max_width": 8}],
}  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any product of any format, also of other architectures, on a device or the host."""
    fmt = draw(st.sampled_from(sf.FORMATS))
    params = fmt.resolve_params(draw(st.sampled_from(PARAMS.get(fmt.name, [{}]))))
    sizes = st.one_of(st.integers(0, 70), st.sampled_from((512, 4096, 14336, 131071)))
    M, K = draw(sizes), draw(sizes)
    n = draw(st.one_of(st.integers(0, 9), st.integers(10, 5000)))
    full = M * K // (2 if fmt.name == "two-four" else 1)
    nnz = full if fmt.name in ("dense", "two-four") else round(full * draw(st.floats(0, 1)))
    dtype = draw(st.sampled_from(("float16", "bfloat16", "float32", "float64", "int8")))
    sm = draw(st.sampled_from((None, 80, 86, 90, 100)))
    out = draw(st.sampled_from((dtype, "float32")))
    layouts = draw(st.sampled_from((ROW, COL))), draw(st.sampled_from((ROW, COL)))
    return Problem.product(
        fmt.name, tuple(params.items()), M, K, n, nnz, dtype, dtype, out, *layouts, "cuda" if sm else "cpu", sm,
        operation=draw(st.sampled_from(("spmm", "spmm_transposed"))),
    )  # fmt: skip


def accepting(p: Problem) -> list[Kernel]:
    every = [k for name in ("cuda", "vendor", "cpu", "reference") for k in backends.get(name).kernels()]
    return [k for k in every if (p.operation, p.format) in k.takes and not k.unsupported(p)]


@settings(max_examples=400, deadline=None)
@given(problems())
def test_every_kernel_expects_a_time_for_what_it_takes(p: Problem) -> None:
    """Finite, above 0, that of the tile it would use; and the reference is the last resort."""
    times = {}
    for k in accepting(p):
        us = times[k.name] = k.expected_us(p)
        assert 0 < us < math.inf, k.name
        assert k.expected_us(p) == us
    if len(times) > 1:
        assert not min(times, key=times.__getitem__).startswith("reference")


@settings(max_examples=150, deadline=None)
@given(problems())
def test_twice_the_columns_never_take_much_less(p: Problem) -> None:
    """An odd N is left out: its double may be aligned where it is not."""
    p = p.changed(n=16 * max(1, p.n // 16))
    for k in accepting(p):
        if not k.unsupported(p.changed(n=2 * p.n)):
            assert k.expected_us(p.changed(n=2 * p.n)) > 0.9 * k.expected_us(p), k.name


def test_no_product_on_a_host_takes_less_than_a_call() -> None:
    """A bitmask of one element was expected to take 0.5 us, as 2:4 in some types: 8 and more are measured."""
    tried = 0
    for name, params in ((f.name, params) for f in sf.FORMATS for params in PARAMS.get(f.name, [{}])):
        for n, dtype in itertools.product((0, 1, 4, 16), ("float32", "bfloat16")):
            p = Problem.product(name, tuple(params.items()), 1, 1, n, 1, *[dtype] * 3)
            for k in accepting(p):
                assert k.expected_us(p) >= LEAST_CALL_US, (k.name, n, dtype)
                tried += 1
    assert tried > 100


def test_no_tile_promises_more_than_the_peak() -> None:
    """128x256x64 has 12 blocks here: it was expected to take 25 us on an H100, and took 60."""
    p = Problem.product("two-four", (), 1536, 8960, 240, 1536 * 4480, *["bfloat16"] * 3, device="cuda", sm=90)
    tried = 0
    for n, params in itertools.product(
        (1, 24, 240, 4096), (p, p.changed(format="bsr", params=(("blocksize", (32, 32)),)))
    ):
        q = params.changed(n=n)
        device = roofline.device_of(q)
        for k in accepting(q):
            known = rates.constants(k.name, k.terms, q)
            if known is not None and "products" in k.terms:
                for tile in k.options(q):
                    least = k.quantities(q, tile, device)[k.terms.index("products")]
                    assert tile_us(k, q, tile, device, known) >= least, (k.name, str(tile))
                    tried += 1
    assert tried > 100


def test_explain_sorts_by_the_expected_times_and_names_their_source() -> None:
    for p in (P, P.changed(n=1), P.changed(format="two-four", nnz=8 << 20), P.changed(sm=80)):
        e = sf.explain(p)
        times = [a.expected_us for a in e.answers if a]  # type: ignore[union-attr]
        assert times == sorted(times)
        assert times[0] == e.expected_us
    assert str(sf.explain(P)).splitlines()[-1] == "  rates of H200, measured 2026-11-22 at d78288b"
    assert sf.explain(P.changed(sm=80)).rates.endswith("scaled to A100")
    assert "taken for sm_100 as they are" in sf.explain(P.changed(sm=100)).rates
    recommended = str(sf.recommend(np.eye(64, dtype=np.float16), 8, device="sm_89"))
    assert "taken for sm_89 as they are" in recommended.splitlines()[0]
    with roofline.on(roofline.H100):
        assert sf.explain(P).rates.endswith("scaled to H100")


def test_nothing_else_chooses() -> None:
    for name in ("cuda", "vendor", "cpu", "reference", "composed"):
        for k in (backends.get(name), *backends.get(name).kernels()):
            assert not hasattr(k, "rank"), k.name
            assert not hasattr(k, "preferred"), k.name


def test_the_tile_is_the_one_that_is_expected_to_be_fastest() -> None:
    p = P.changed(format="two-four", nnz=8 << 20, n=512)
    for k in accepting(p):
        us, tile = k.best(p)
        for other in k.options(p):
            with tiles.forced(k.name, str(other)):
                assert str(k.best(p).tile) == str(other)
                assert k.best(p).us >= us
        assert k.best(p) == (us, tile)


def test_rates_follow_the_device() -> None:
    slow = roofline.Device("slow", 90, 132, 4.2e11, 7.4e11, {k: v / 10 for k, v in roofline.H200.peak.items()})
    before = sf.explain(P).expected_us
    with roofline.on(slow):
        assert sf.explain(P).expected_us > 5 * before
    assert sf.explain(P).expected_us == before


def test_a_gpu_that_is_at_hand_has_its_own_rates() -> None:
    here = P.changed(board="NVIDIA H100 80GB HBM3")
    for p, q in ((here, P), (here.changed(format="two-four", nnz=8 << 20), P.changed(format="two-four", nnz=8 << 20))):
        with roofline.on(roofline.H100):
            assert [a.expected_us for a in sf.explain(q).answers if a] == [
                a.expected_us for a in sf.explain(p).answers if a
            ]
        assert sf.explain(p).expected_us != sf.explain(q).expected_us
    assert sf.explain(P.changed(board="NVIDIA H200")).expected_us == sf.explain(P).expected_us
    assert sf.explain(P.changed(board="a GPU that nobody knows")).expected_us == sf.explain(P).expected_us
    assert here.changed(n=3).board == here.board


def test_shipped_files_agree_with_the_kernels() -> None:
    kernels = {k.name: k for name in ("cuda", "vendor", "cpu", "composed") for k in backends.get(name).kernels()}
    found = [table for name in ("h200", "host") for table in rates.read(rates.SHIPPED / f"{name}.json").values()]
    for name, c in ((name, c) for table in found for name, c in table.items()):
        assert c.terms == kernels[name].terms, name
    with_constants = {name for table in found for name in table}
    fitted = {k: v for k, v in kernels.items() if v.terms and not v.by_name_only}  # those wait for a measurement
    assert {k for k, v in fitted.items() if (v.constants_of or k) not in with_constants} == set()


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPFORMAT_RATES", raising=False)
    return tmp_path / "spformat" / "rates.json"


def entry(kernel: str, us: float, sm: int | None = 90) -> dict[str, Any]:
    k = next(k for k in backends.get(kernel.partition(".")[0]).kernels() if k.name == kernel)
    return {"terms": list(k.terms), "all": [us] + [0.0] * (len(k.terms) - 1), "tiles": {}, "sm": sm, "device": "mine"}


def test_the_users_file_wins_for_the_kernels_that_it_has(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates.user_path() == user
    before = {a.kernel: a for a in sf.explain(P).answers}
    rates.write(user, {"date": "today"}, {"cuda.spmm_csr": entry("cuda.spmm_csr", 5000.0)})
    after = {a.kernel: a for a in sf.explain(P).answers}
    assert after.pop("cuda.spmm_csr").expected_us == 5000.0  # type: ignore[union-attr]
    assert after.items() <= before.items()
    assert "mine, measured today" in sf.explain(P).rates
    assert sf.explain(P.changed(sm=80)).rates.endswith("scaled to A100")  # it holds for sm_90 alone
    rates.write(user, {}, {"cuda.spmm_csr_tc": entry("cuda.spmm_csr_tc", 6000.0)})
    assert set(json.loads(user.read_text())["kernels"]) == {"cuda.spmm_csr", "cuda.spmm_csr_tc"}
    assert [p.name for p in user.parent.iterdir()] == ["rates.json"]
    monkeypatch.setenv("SPFORMAT_RATES", "shipped")
    assert {a.kernel: a for a in sf.explain(P).answers} == before
    monkeypatch.setenv("SPFORMAT_RATES", "off")
    assert sf.explain(P, backend="cuda.spmm_csr").expected_us == roofline.plain_us(P)
    assert "no rates" in sf.explain(P).rates
    monkeypatch.setenv("SPFORMAT_RATES", "none")
    with pytest.raises(UsageError, match="SPFORMAT_RATES"):
        sf.explain(P)


def test_a_damaged_file_is_left_out_with_one_warning(user: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = sf.explain(P)
    user.parent.mkdir()
    user.write_text("{")
    with caplog.at_level(logging.WARNING, "spformat"):
        assert sf.explain(P) == before
        assert sf.explain(P) == before
    assert caplog.text.count(str(user)) == 1


def test_constants_are_those_that_made_the_times() -> None:
    rng = np.random.default_rng(0)
    quantities = rng.random((60, 3)) * (1, 10, 100)
    us = quantities @ (5.0, 0.0, 1.5)
    assert calibration_fit.constants(quantities, us) == pytest.approx([5.0, 0.0, 1.5], abs=1e-3)


def test_a_constant_has_its_least_value_where_points_do_not_tell_it_from_another() -> None:
    rng = np.random.default_rng(0)
    quantities = np.column_stack((np.ones(60), np.ones(60), rng.random(60) * 100))
    us = quantities @ (3.0, 4.0, 0.5)
    free, bound = (calibration_fit.constants(quantities, us, least) for least in (0.0, (4.5, 0.0, 0.0)))
    assert sum(free[:2]) == pytest.approx(7, abs=1e-2) == sum(bound[:2])
    assert min(free[:2]) < 1
    assert bound == pytest.approx([4.5, 2.5, 0.5], abs=1e-2)


def test_the_launch_of_a_kernel_is_never_fitted_as_nothing() -> None:
    """All products that were measured ran in clusters: what a launch takes must not become the time of a cluster."""
    kernel = backends.kernel_named("cuda.spmm_csr_expanding_sm90a")
    p = Problem.product("csr", (), 4096, 4096, 16, 1 << 20, *["bfloat16"] * 3, device="cuda", sm=90)
    tiles = [t for t in kernel.tiles if t.extent == "64x16, 4 blocks" and t.parts > 1]
    points = [
        Point(kernel, q, t, 6 + 2e-7 * q.nnz * (1 + 0.01 * t.parts), math.nan, i)
        for i, q in enumerate(p.changed(M=m, nnz=m << 9) for m in range(1024, 9216, 1024))
        for t in tiles
    ]
    (fit,) = calibration_fit.fit(points)
    least = calibration_fit.OF_LEAST * min(x.us for x in points)
    assert fit.entry["all"][0] == pytest.approx(least, rel=1e-3) or fit.entry["all"][0] > least > 3


def test_the_start_of_a_kernel_of_the_host_is_never_fitted_as_nothing() -> None:
    """Small products that were not measured seemed to cost nothing."""
    kernel = backends.kernel_named("cpu.spmm_bitmask")
    points = []
    for i, m in enumerate(range(256, 4352, 64)):
        p = Problem.product("bitmask", (), m, 4096, 16, m << 11, *["float32"] * 3)
        points.append(Point(kernel, p, None, 1e-4 * p.nnz, math.nan, i))
    (fit,) = calibration_fit.fit(points)
    assert all(constants[0] >= LEAST_CALL_US for constants in (fit.entry["all"], *fit.entry["tiles"].values()))


def test_a_fit_and_the_regret_of_a_choice() -> None:
    one, two = (k for k in backends.get("cuda").kernels() if k.name in ("cuda.spmm_csr", "cuda.spmm_csr_tc"))
    points = []
    for i in range(60):
        p = P.changed(n=16 + 8 * i, nnz=(1 << 20) + 7000 * i)
        for k, factor in ((one, 1.0), (two, 1.5)):
            points.append(Point(k, p, k.best(p).tile, factor * k.best(p).us, k.best(p).us, i))
    fits = {f.kernel: f for f in calibration_fit.fit(points)}
    assert set(fits) == {one.name, two.name}
    assert all(f.near == 1 and f.median < 0.1 and f.points == 60 for f in fits.values())
    assert fits[one.name].entry["terms"] == list(one.terms)
    wrong = [x._replace(expected=1.0 if x.kernel is two else 2.0, us=10.0 if x.kernel is one else 12.0) for x in points]
    for row in calibration_fit.regret(wrong):
        assert row["regret"] == pytest.approx(0.2)
        assert row["products"] == 60
    assert {r["kernel"]: r["within_30_percent"] for r in calibration_fit.agreement(points)} == {
        one.name: 1,
        two.name: 0,
    }


def test_a_calibration_may_be_of_some_formats_only() -> None:
    drawn = itertools.islice(calibration_cases.draw(1, "cuda", 1, ("bsr", "dbsr")), 20)
    assert {spec.format for spec in drawn} == {"bsr", "dbsr"}
    with pytest.raises(sf.errors.UsageError, match=r"expected some of dense, two-four, .* got brs"):
        next(calibration_cases.draw(1, "cuda", 1, ("brs",)))
