"""bench --calibrate: what is drawn and measured, points that are kept and read again, and fits of some kernels."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from known_points import ABOUT, EXPANDING, make_small, truth, vector
from test_rates import P

from spformat import backends
from spformat.errors import DeviceFault, InputError, UsageError
from spformat.formats import by_name
from spformat.measure import calibrate, calibration_cases, calibration_fit, calibration_points
from spformat.measure.calibration_cases import BINS, FINE_BINS, KINDS
from spformat.measure.calibration_points import YARDSTICK, Point, kernels_by_name
from spformat.products import rates
from spformat.products.plan import Plan
from spformat.products.problem import COL, ROW, Problem


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


# ------------------------------------------------------------------ what is drawn


def test_columns_of_a_fit_are_drawn_from_fine_bins_in_both_layouts() -> None:
    drawn = [w for s in itertools.islice(calibration_cases.draw(3, "cuda", 5, (), FINE_BINS), 200) for w in s.widths]
    counts = {b: sum(b[0] <= n <= b[1] for n, *_ in drawn) for b in FINE_BINS}
    assert min(counts.values()) > 60
    assert {(b, c) for _, b, c in drawn} == set(itertools.product((ROW, COL), repeat=2))
    some = calibration_cases.clipped(FINE_BINS, 20, 100)
    assert some == ((20, 32), (33, 64), (65, 100))
    drawn = [w for s in itertools.islice(calibration_cases.draw(3, "cuda", 5, (), some), 200) for w in s.widths]
    assert {n for n, *_ in drawn} <= set(range(20, 101))
    for least, most in ((5000, 6000), (9, 8)):
        with pytest.raises(UsageError, match="columns: expected a part of 1 to 4096"):
            calibration_cases.clipped(BINS, least, most)


def test_only_matrices_that_a_chosen_kernel_may_take_are_drawn() -> None:
    scope = calibrate.Scope(1, "cuda", 1, ("cuda.spmm_vector_nm_tma_sm90a", "cuda.spmm_csr"))
    assert {s.format for s in itertools.islice(scope.specs(), 30)} == {"vector-nm", "csr"}
    scope = calibrate.Scope(1, "cuda", 1, ("cuda.spmm_csr",), ("bsr",))
    with pytest.raises(UsageError, match="take none of the formats"):
        scope.specs()


def test_names_of_kernels() -> None:
    assert calibrate.chosen_kernels(("cpu.spmm_csr", "cpu.spmm_csr"), "cpu") == ("cpu.spmm_csr",)
    whole = calibrate.chosen_kernels(("cpu",), "cpu")
    assert set(whole) == {k.name for k in backends.get("cpu").kernels() if k.terms}
    with pytest.raises(UsageError, match=r"unknown kernel 'cpu\.spmm_cs'"):
        calibrate.chosen_kernels(("cpu.spmm_cs",), "cpu")
    with pytest.raises(UsageError, match=r"cuda\.spmm_csr does not run on cpu"):
        calibrate.chosen_kernels(("cuda.spmm_csr",), "cpu")
    plain = next(k for k in kernels_by_name("cuda").values() if not k.terms)
    with pytest.raises(UsageError, match="has no constants to fit"):
        calibrate.chosen_kernels((plain.name,), "cuda")


def test_tiles_are_the_best_one_others_of_the_better_third_and_the_best_of_every_variant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "BETTER", 3)
    p = vector(128)
    ranked = sorted(
        EXPANDING.options(p), key=lambda t: calibration_fit.priced([Point(EXPANDING, p, t, 1, 0, 1)])[0].expected
    )
    best: dict[tuple[str, ...], Any] = {}
    for tile in ranked:
        best.setdefault(EXPANDING.variant(p, tile), tile)
    better = ranked[: max(3, len(ranked) // 3)]
    assert not set(best.values()) <= set(better)  # else the draws below would show nothing
    drawn = set()
    for seed in range(50):
        some = calibrate._tiles(EXPANDING, p, 6, calibrate.random.Random(seed))
        assert some[0] == EXPANDING.best(p).tile
        assert len(set(some)) == len(some) > 3
        assert set(some[3:]) <= set(better)
        drawn |= set(some)
    assert drawn == {*best.values(), *better}
    assert calibrate._tiles(EXPANDING, p, 1, calibrate.random.Random(1)) == ranked[:1]


# ------------------------------------------------------------------ what is measured


def test_a_kernel_is_measured_beside_its_rivals_and_dense() -> None:
    scope = calibrate.Scope(2, "cpu", 60, ("cpu.spmm_csr",), widths=2, products=4)
    points = list(calibrate.measure(scope))
    assert {x.case for x in points} == {1, 2, 3, 4}
    for case in range(1, 5):
        names = [x.kernel.name for x in points if x.case == case]
        assert {"dense", "cpu.spmm_csr"} < set(names)
        assert len(names) == len(set(names))
    assert all(x.us > 0 and x.problem.format == "csr" for x in points)
    again = list(calibrate.measure(scope))
    assert [(x.kernel, x.problem, x.tile, x.case) for x in again] == [
        (x.kernel, x.problem, x.tile, x.case) for x in points
    ]


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[..., Any]) -> None:
    """Plans of a kernel run this instead."""
    kernel = kernels_by_name("cpu")[name]
    monkeypatch.setattr(type(kernel), "_plan", lambda self, a, p: Plan(self.name, p, run))


def test_a_wrong_result_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nothing(B: Any, out: Any) -> Any:
        return out  # as it was: NaN

    replaced(monkeypatch, "cpu.expand_then_dense", nothing)
    with caplog.at_level(logging.ERROR, "spformat"):
        points = list(calibrate.measure(calibrate.Scope(2, "cpu", 60, ("cpu.spmm_csr",), products=1)))
    assert {x.kernel.name for x in points} == {"dense", "cpu.spmm_csr"}
    assert "cpu.expand_then_dense None on csr" in caplog.text
    assert "WRONG RESULT" in caplog.text


def test_the_time_of_another_tile_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan may choose for another number of columns, where the tile that is measured is no option."""
    kernel = type(kernels_by_name("cpu")["cpu.expand_then_dense"])
    plan, best = kernel._plan, kernel.best
    monkeypatch.setattr(kernel, "options", lambda self, p: ("4 columns", "8 columns"))
    monkeypatch.setattr(kernel, "best", lambda self, p: best(self, p)._replace(tile="4 columns"))
    for chosen, measured in (("8 columns", False), ("4 columns, by rows", True)):
        monkeypatch.setattr(kernel, "_plan", lambda self, a, p, t=chosen: replace(plan(self, a, p), tile=t))
        points = list(calibrate.measure(calibrate.Scope(2, "cpu", 60, ("cpu.spmm_csr",), products=1)))
        assert ("cpu.expand_then_dense" in {x.kernel.name for x in points}) == measured
    assert "its plan would run another tile, 8 columns" in caplog.text


def test_a_failure_leaves_one_kernel_out_and_a_fault_ends_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(B: Any, out: Any) -> Any:
        raise RuntimeError("no such luck")

    def faults(B: Any, out: Any) -> Any:
        raise DeviceFault("illegal address")

    scope = calibrate.Scope(2, "cpu", 60, ("cpu.spmm_csr",), products=1)
    replaced(monkeypatch, "cpu.expand_then_dense", fails)
    assert {x.kernel.name for x in calibrate.measure(scope)} == {"dense", "cpu.spmm_csr"}
    assert "left out: no such luck" in caplog.text
    replaced(monkeypatch, "cpu.expand_then_dense", faults)
    with pytest.raises(DeviceFault):
        list(calibrate.measure(scope))


def test_a_kernel_that_takes_nothing_here_ends_the_measurement(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernels_by_name("cpu")["cpu.spmm_csr"]
    monkeypatch.setattr(type(kernel), "unsupported", lambda self, p: ["not today"])
    assert list(calibrate.measure(calibrate.Scope(2, "cpu", 60, ("cpu.spmm_csr",)))) == []
    assert "none of the last 200 matrices" in caplog.text


# ------------------------------------------------------------------ points on disk


def every_kind() -> list[Point]:
    """A point of some kernel for every kind of matrix, of today's tiles."""
    out = []
    for case, (format, dtype, _, _, params) in enumerate(KINDS, 1):
        p = Problem.product(
            format,
            tuple(by_name(format).resolve_params(params).items()),
            4096,
            4096,
            96,
            1 << 22,
            dtype,
            dtype,
            dtype,
            device="cuda",
            sm=90,
        )
        for k in kernels_by_name("cuda").values():
            if ("spmm", format) in k.takes and not k.unsupported(p):
                out.append(Point(k, p, k.best(p).tile, 10.0 + case, math.nan, case))
        out.append(Point(YARDSTICK, p, None, 99.5, math.nan, case))
    return out


def same(a: Point, b: Point) -> bool:
    return (a.kernel, a.problem, a.tile, a.us, a.case) == (b.kernel, b.problem, b.tile, b.us, b.case)


def test_points_come_back_from_a_file(tmp_path: Path) -> None:
    points = every_kind()
    calibration_points.save(tmp_path / "a.json", ABOUT, points)
    loaded = calibration_points.load([tmp_path / "a.json"])
    assert loaded.about == ABOUT
    assert loaded.left_out == {}
    assert len(loaded.points) == len(points) > 3 * len(KINDS)
    on_board = [x._replace(problem=x.problem.changed(board=ABOUT.device)) for x in points]
    assert all(map(same, loaded.points, on_board))
    calibration_points.save(tmp_path / "b.json", ABOUT._replace(commit="1234567", date="2026-11-25"), points[:3])
    both = calibration_points.load([tmp_path / "a.json", tmp_path / "b.json"])
    assert (both.about.commit, both.about.date) == ("c655aaa, 1234567", "2026-11-25")
    assert {x.case for x in both.points} == set(range(1, len(KINDS) + 3))  # those three are of two products


def test_points_that_no_kernel_of_today_makes_are_left_out_by_name(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    rival = kernels_by_name("cuda")["cuda.spmm_vector_nm_tma_sm90a"]
    refused = Point(rival, vector(24), rival.best(vector(96)).tile, 9.0, math.nan, 3)
    assert rival.unsupported(refused.problem)
    calibration_points.save(path, ABOUT, [*truth(2), refused])
    tree = json.loads(path.read_text())
    tree["products"][0]["times"] += [
        ["cuda.gone", "64x64", 3.0],
        ["cuda.gone", "8x8", 3.0],
        [EXPANDING.name, "128x77", 4.0],
    ]
    tree["products"][1]["times"] += [["cuda.spmm_csr", "None", 3.0]]
    path.write_text(json.dumps(tree))
    loaded = calibration_points.load([path])
    assert len(loaded.points) == len(truth(2))
    assert loaded.left_out == {
        "cuda.gone: no such kernel": 2, f"{EXPANDING.name}: no tile 128x77": 1,
        "cuda.spmm_csr: does not take some products of vector-nm": 1,
        f"{rival.name}: does not take some products of vector-nm": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((), []), ((), {}), (("version",), 2), (("points_of",), "x"), (("seed",), "7"), (("sm",), "90"), (("products",), 3),
        (("products", 0, "M"), -1), (("products", 0, "n"), 2.5), (("products", 0, "format"), "cube"),
        (("products", 0, "params"), {"n": "8"}), (("products", 0, "b_layout"), "diagonal"), (("products", 0, "a_dtype"), "int3"),
        (("products", 0, "times"), [["cuda.spmm_csr", "None"]]), (("products", 0, "times", 0, 2), 0),
        (("products", 0, "times", 0, 2), math.inf), (("products", 0, "times", 0, 2), "4"),
        (("products", 0, "times", 0, 1), ["a"]), (("products", 0, "times", 0, 0), {"a": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_file_of_points_is_refused(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    path = tmp_path / "p.json"
    calibration_points.save(path, ABOUT, truth(1))
    tree = json.loads(path.read_text())
    if place:
        at = tree
        for step in place[:-1]:
            at = at[step]
        at[place[-1]] = value
    path.write_text(json.dumps(tree if place else value))
    with pytest.raises(InputError, match=r"no file of points") as e:
        calibration_points.load([path])
    assert e.value.path == str(path)


def test_points_of_two_devices_are_not_mixed(tmp_path: Path) -> None:
    for name, about in (("a", ABOUT), ("b", ABOUT._replace(device="NVIDIA H100"))):
        calibration_points.save(tmp_path / name, about, truth(1))
    with pytest.raises(UsageError, match="one device, got those of NVIDIA H100, NVIDIA H200"):
        calibration_points.load([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(InputError, match="no"):
        calibration_points.load([tmp_path / "none"])


# ------------------------------------------------------------------ fits


def test_a_fit_of_one_kernel_finds_its_constants_and_lessens_the_regret() -> None:
    """What is expected to be twice as fast as it is loses against its rival before the fit, and not after it."""
    points = truth()
    (fit,) = calibration_fit.fit(points, (EXPANDING.name,))
    assert fit.kernel == EXPANDING.name
    assert fit.near == 1
    assert fit.median < 0.02
    before, after = (calibration_fit.regret(calibration_fit.priced(points, f))[-1] for f in ((), (fit,)))
    assert before["format"] == after["format"] == "all"
    assert before["products"] == after["products"] == 60
    assert before["regret"] > 0.05 > 0.01 > after["regret"]
    assert after["over_dense"] == pytest.approx(1.5, rel=0.05)
    assert calibration_fit.tile_regret(calibration_fit.priced(points, (fit,)), EXPANDING.name) < 0.02  # type: ignore[operator]
    assert calibration_fit.tile_regret(points, "cuda.spmm_csr") is None
    assert {f.kernel for f in calibration_fit.fit(points)} > {fit.kernel}


def test_a_tile_that_is_no_option_is_fitted_but_not_chosen() -> None:
    """Older points have numbers of parts that today's rule of parts leaves out; the kernel still has them."""
    p = vector(128)
    options = {str(t) for t in EXPANDING.options(p)}
    out = next(t for t in EXPANDING.tiles if str(t) not in options)
    assert EXPANDING.tile_named(p, str(out)) == out
    (x,) = calibration_fit.priced([Point(EXPANDING, p, out, 5.0, 0.0, 1)])
    assert math.isnan(x.expected)
    many = [Point(EXPANDING, vector(8 * n), out, 5.0, 0.0, n) for n in range(1, 60)]
    assert calibration_fit.fit(many)[0].points == 59
    with pytest.raises(KeyError):
        EXPANDING.tile_named(p, "1x1")


def test_constants_that_are_tried_win_inside_the_block_alone() -> None:
    k = kernels_by_name("cuda")["cuda.spmm_csr"]
    before = k.expected_us(P)
    tried = rates.Constants(k.terms, (5000.0, *[0.0] * (len(k.terms) - 1)), {}, "here")
    with rates.read_once(), rates.trying({k.name: tried}):
        assert k.expected_us(P) == 5000
        assert kernels_by_name("cuda")["cuda.spmm_csr_tc"].expected_us(P) < 5000
    assert k.expected_us(P) == before


def test_variants_that_lose_their_constants_are_named() -> None:
    points = [x for x in truth() if x.kernel is EXPANDING and str(x.tile).startswith("128x64")]
    (fit,) = calibration_fit.fit(points)
    lost = calibration_fit.lost_variants(fit, points)
    assert lost
    assert "128x64x64" not in lost
    assert set(lost) == set(rates.constants(EXPANDING.name, EXPANDING.terms, points[0].problem).variants) - {
        "128x64x64"
    }  # type: ignore[union-attr]


def test_a_shipped_file_keeps_its_head_and_its_text(tmp_path: Path) -> None:
    """Some kernels in it do not say where they were measured: its head does, and only the changed kernel's lines differ."""
    text = (rates.SHIPPED / "h200.json").read_text()
    path = tmp_path / "h200.json"
    path.write_text(text)
    (fit,) = calibration_fit.fit(truth(), (EXPANDING.name,))
    old = json.loads(text)
    rates.write(path, {"device": "other", "date": "2030-01-01"}, {fit.kernel: fit.entry | {"device": "mine"}})
    new = json.loads(path.read_text())
    assert new["kernels"].pop(fit.kernel)["device"] == "mine"
    del old["kernels"][fit.kernel]
    assert new == old
    rates.write(path, {}, {fit.kernel: json.loads(text)["kernels"][fit.kernel]})
    assert path.read_text() == text


def test_points_keep_what_is_known_of_rows(tmp_path: Path) -> None:
    """The dispatcher gives kernels the length of rows on a device; constants are fitted to times with the same."""
    points = [x._replace(problem=x.problem.changed(row_length=640)) for x in truth()[:4]]
    path = tmp_path / "points.json"
    calibration_points.save(path, ABOUT, points)
    loaded = calibration_points.load([path]).points
    assert loaded
    assert {x.problem.row_length for x in loaded} == {640}

    tree = json.loads(path.read_text())
    for product in tree["products"]:
        del product["row_length"]  # a file of an earlier version
    path.write_text(json.dumps(tree))
    assert {x.problem.row_length for x in calibration_points.load([path]).points} == {0}

    tree["products"][0]["row_length"] = -1
    path.write_text(json.dumps(tree))
    with pytest.raises(InputError, match="row_length of a product: -1"):
        calibration_points.load([path])


def test_drawn_products_know_the_rows_of_their_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    spec = next(x for x in calibration_cases.draw(0, "cpu", 2, ["bsr"]) if x.format == "bsr")
    a = by_name("bsr").from_dense(np.eye(256, dtype=np.float32), blocksize=(32, 32))
    monkeypatch.setattr(type(a), "row_length", lambda self: 1024)
    assert {p.row_length for p in calibrate._problems(spec, a, "cpu", None)} == {1024}
