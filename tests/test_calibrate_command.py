"""The command bench --calibrate: fits from files of points, what it writes, what it refuses, and whole runs on the CPU."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from catalogue import command
from known_points import ABOUT, EXPANDING, make_small, truth, vector
from spformat_cli import calibration
from test_cli import spformat

from spformat import backends
from spformat.dispatch.select import of_any_machine
from spformat.errors import DeviceFault
from spformat.measure import calibrate, calibration_fit, calibration_points
from spformat.measure.calibration_points import Point, kernels_by_name
from spformat.products import rates
from spformat.products.problem import ROW


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of points, and no rates of the user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SPFORMAT_RATES", raising=False)
    calibration_points.save(tmp_path / "p.json", ABOUT, truth())
    return tmp_path / "p.json"


def test_a_fit_from_points_writes_only_the_named_kernel(saved: Path) -> None:
    out = saved.parent / "r.json"
    out.write_text((rates.SHIPPED / "h200.json").read_text())
    fit = ("bench", "--calibrate", "--from-points", str(saved), "--kernels", EXPANDING.name, "--out", str(out))
    r = spformat(*fit, "--every-gpu", "--json")
    assert r.returncode == 0, r.stderr
    said = json.loads(r.stdout)
    assert said["path"] == str(out)
    assert said["left_out"] == {}
    (row,) = said["kernels"]
    assert (row["kernel"], row["within_30_percent"]) == (EXPANDING.name, 1)
    assert row["median_error"] < 0.02
    assert row["tile_regret"] < 0.02
    assert said["regret"][-1]["regret"] < 0.01 < 0.05 < said["regret_before"][-1]["regret"]
    new, old = (json.loads(p.read_text())["kernels"] for p in (out, rates.SHIPPED / "h200.json"))
    own = new.pop(EXPANDING.name)
    assert {k: own[k] for k in ("device", "date", "commit", "seed")} == {
        "device": "NVIDIA H200", "date": "2026-11-24", "commit": "c655aaa", "seed": 7,
    }  # fmt: skip
    assert "sm" not in own
    assert old.pop(EXPANDING.name) != own
    assert new == old
    shown = spformat(*fit, "--device", "cuda", "--commit", "0badc0de")
    assert shown.returncode == 0, shown.stderr
    for text in ("regret of tiles", "regret before", "regret after", "over dense", "1.50x", f"{out}: 1 kernel(s)"):
        assert text in shown.stdout
    own = json.loads(out.read_text())["kernels"][EXPANDING.name]
    assert (own["sm"], own["commit"]) == (90, "0badc0de")


@pytest.mark.parametrize("more", [(), ("--validate", "1")])
def test_without_numba_nothing_is_measured(more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels failed with ModuleNotFoundError, which was reported as a bug of spformat (code 70)."""
    why = "numba is not installed: pip install 'spformat[cpu]'"
    monkeypatch.setattr(backends.get("cpu"), "missing", lambda: [why])
    r = command("bench", "--calibrate", "--device", "cpu", "--seconds", "1", *more)
    assert (r.code, r.out) == (69, "")
    assert r.err == f"error: no kernel of ours runs on the CPU here: {why}\n"


def test_points_of_a_kernel_composed_of_others_are_fitted_without_a_gpu(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a copy costs is what is left when the product between the copies is taken off: that needs its kernel's time,
    which does not depend on this machine."""
    for name in ("cuda", "vendor"):
        monkeypatch.setattr(backends.get(name), "missing", lambda: ["no GPU"])
    copied, points = kernels_by_name("cuda")["composed.copied_operands"], []
    with of_any_machine():
        for case, n in enumerate(range(65, 465, 8), 1):
            p = vector(n, nnz=1 << 22).changed(b_layout=ROW, out_layout=ROW)
            points += [Point(copied, p, x, 1.5 * copied.expected_us(p), math.nan, case) for x in copied.options(p)]
    calibration_points.save(saved.parent / "copied.json", ABOUT, points)
    out = saved.parent / "r.json"
    fit = ("bench", "--calibrate", "--from-points", str(saved.parent / "copied.json"), "--out", str(out), "--json")
    r = spformat(*fit)
    assert r.returncode == 0, r.stderr
    said = json.loads(r.stdout)
    assert (said["points"], said["left_out"]) == (len(points), {})
    assert [row["kernel"] for row in said["kernels"]] == [copied.name]


def test_without_names_every_kernel_with_enough_points_goes_to_the_users_file(saved: Path) -> None:
    tree = json.loads(saved.read_text())
    tree["products"][0]["times"].append(["cuda.gone", "64x64", 3.0])
    saved.write_text(json.dumps(tree))
    r = spformat("bench", "--calibrate", "--from-points", str(saved), "--from-points", str(saved), "--json")
    assert r.returncode == 0, r.stderr
    assert "2 point(s) left out: cuda.gone: no such kernel" in r.stderr
    said = json.loads(r.stdout)
    assert said["points"] == 2 * len(truth())
    own = json.loads(rates.user_path().read_text())["kernels"]
    assert set(own) == {row["kernel"] for row in said["kernels"]} > {EXPANDING.name}
    assert all(k["sm"] == 90 for k in own.values())
    assert calibration_fit.regret(calibration_fit.priced(truth()))[-1]["regret"] < 0.01


def test_what_the_command_refuses(saved: Path) -> None:
    taken = saved.parent / "taken"
    taken.write_text("mine")
    for arguments, code, text in (
        (("--points", str(taken), "--device", "cpu", "--seconds", "1"), 73, "the file exists"),
        (("--points", "x", "--from-points", str(saved)), 2, "give one of them"),
        (("--columns", "8"), 2, "expected numbers of columns like 1-512"),
        (("--from-points", str(taken)), 66, "no file of points"),
        (("--from-points", str(saved), "--kernels", "cuda.spmm_cs"), 2, "unknown kernel"),
        (("--from-points", str(saved), "--device", "cpu"), 2, "are of cuda, not of cpu"),
        (("--from-points", str(saved), "--validate", "3"), 2, "--validate measures"),
    ):
        r = spformat("bench", "--calibrate", *arguments)
        assert r.returncode == code, (arguments, r.stderr)
        assert text in r.stderr
    assert taken.read_text() == "mine"


def files(tmp_path: Path) -> calibration.Files:
    return calibration.Files(str(tmp_path / "r.json"), str(tmp_path / "new.json"), (), False, "abc")


def test_what_is_measured_is_kept_and_gives_the_same_constants_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scope = calibration.scope("cpu", 4, 60, "cpu.spmm_csr", "", "1-40", 0, 0)
    assert (scope.widths, scope.tiles, scope.columns) == (5, 6, (1, 40))
    calibration.calibrate(replace(scope, products=40), files(tmp_path), None, True)
    first = json.loads(capsys.readouterr().out)
    assert first["kernels"][0]["kernel"] == "cpu.spmm_csr"
    entry = json.loads((tmp_path / "r.json").read_text())["kernels"]["cpu.spmm_csr"]
    assert entry.items() > {"device": "host", "commit": "abc", "seed": 4}.items()
    again = files(tmp_path)._replace(points="", from_points=(str(tmp_path / "new.json"),))
    loaded = calibration.loaded(again, "", 0)
    assert loaded is not None
    assert calibration.device_of(loaded) == "cpu"
    calibration.calibrate(scope, again, loaded, True)
    assert json.loads(capsys.readouterr().out) == first
    assert json.loads((tmp_path / "r.json").read_text())["kernels"]["cpu.spmm_csr"] == entry


def test_points_survive_a_fault_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(scope: Any) -> Any:
        yield from truth(2)
        raise DeviceFault("illegal address")

    monkeypatch.setattr(calibrate, "measure", stops)
    with pytest.raises(DeviceFault):
        calibration.calibrate(calibration.scope("cpu", 4, 60, "", "", "1-40", 0, 0), files(tmp_path), None, True)
    tree = json.loads((tmp_path / "new.json").read_text())
    assert sum(len(p["times"]) for p in tree["products"]) == len(truth(2))
    assert not (tmp_path / "r.json").exists()


def test_a_check_measures_one_tile_of_each_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    scope = calibration.scope("cpu", 4, 60, "", "csr", "1-40", 0, 6)
    assert (scope.widths, scope.tiles, scope.products) == (2, 1, 6)
    calibration.validate(scope, True)
    said = json.loads(capsys.readouterr().out)
    assert said["products"] == 6
    pairs = [(x["case"], x["kernel"]) for x in said["points"]]
    assert len(pairs) == len(set(pairs))
    assert {x["kernel"] for x in said["points"] if x["expected_us"] is None} == {"dense"}
    assert "dense" not in {x["kernel"] for x in said["kernels"]}
