"""tune(): successive halving with a clock that the test winds, and what is remembered for whom."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command

import spformat as sf
from spformat import backends
from spformat.errors import ContainerError, DeviceUnavailable, InputError, NoKernelError, OutputError, UsageError
from spformat.measure import bench, tune
from spformat.measure.tune import Tuned


def matrix(seed: int = 0) -> np.ndarray:
    kept = np.random.default_rng(0).random((96, 128)) < 0.1
    return np.where(kept, np.random.default_rng(seed).standard_normal((96, 128)) + 3, 0).astype(np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SPFORMAT_TUNED", raising=False)
    monkeypatch.setattr(bench, "FLUSH", 1 << 10)
    return tmp_path / "cache" / "spformat"


class Clock:
    """Says for each format how long its products take, and keeps which formats took part in each round."""

    def __init__(self, us: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.us, self.rounds = us, list[tuple[tuple[str, ...], int]]()
        monkeypatch.setattr(tune, "clock", lambda B: self)
        monkeypatch.setattr(tune, "_run", lambda m, B: sf.by_name(m.name).__name__ + str(B.shape[1]))

    def take_turns(self, runs: Any, repeats: int, warmups: int, *, cold: bool, seconds: float) -> list[float]:
        assert cold
        assert seconds >= 0
        self.rounds.append((tuple(runs), repeats))
        return [self.us[run.rstrip("0123456789")] * int("".join(filter(str.isdigit, run))) for run in runs]


def test_the_slower_half_is_left_out_until_two_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {
        "CSR": 5.0,
        "ELLBuckets": 4.0,
        "Bitmask": 1.0,
        "Dense": 9.0,
        "BSR": 7.0,
        "SRBCRS": 8.0,
        "VectorNM": 6.0,
        "DBSR": 7.5,
    }
    clock = Clock(us, monkeypatch)
    tuned = sf.tune(matrix(), [1, 16], seconds=60, most=30, fresh=True)
    assert tuned.format == "bitmask"
    assert tuned.trials[0].us == {1: 1.0, 16: 16.0}
    sizes = [len(runs) for runs, _ in clock.rounds]
    assert sizes[0] == sizes[1] == len(tuned.trials)
    assert sizes[::2] == sizes[1::2]  # a turn for each number of columns
    for more, fewer in zip(sizes[::2], sizes[2::2], strict=False):
        assert fewer == (more + 1) // 2
    assert sizes[-1] == 2
    repeats = [r for _, r in clock.rounds[::2]]
    assert repeats == [3 * 2**i for i in range(len(repeats))]
    rounds = [t.rounds for t in tuned.trials]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[0] == len(repeats)
    last = next(t for t in tuned.trials if t.format == "dense")
    assert last.rounds == 1
    assert last.us == {1: 9.0, 16: 144.0}


def test_a_spent_budget_still_compares_the_best_with_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"Dense": 1.0, "CSR": 2.0, "ELLBuckets": 2.0, "Bitmask": 2.0, "VectorNM": 2.0}, monkeypatch)
    ranked = sf.recommend(matrix(), 16, device="cpu")
    tuned = sf.tune(matrix(), 16, seconds=1e-9)
    assert [t.format for t in tuned.trials if t.us] == ["dense", next(r.format for r in ranked if r.format != "dense")]
    assert {t.note for t in tuned.trials if not t.us} == {"the time was over"}
    assert len(clock.rounds) == 1
    again = sf.tune(matrix(), 16, seconds=1e-9)
    assert again == replace(tuned, remembered=True)
    assert not sf.tune(matrix(), 16, seconds=60).remembered  # now there is time for the others
    assert sf.tune(matrix(), 16, seconds=600).remembered


def test_what_is_measured_is_remembered_for_matrices_with_the_same_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = sf.tune(matrix(), 16, seconds=0.05)
    assert tuned.trials[0].us[16] > 0
    assert tuned.version
    assert "cores" in tuned.device
    assert (folder / "tuned.json").exists()
    monkeypatch.setattr(tune, "_halved", lambda *_: pytest.fail("measured"))
    assert sf.tune(matrix(1), 16, seconds=0.05) == replace(tuned, remembered=True)  # other values in the same places
    assert "remembered" in str(sf.tune(sf.convert(matrix(), "csr"), 16, seconds=0.05))
    for other in ({"n": 17}, {"fresh": True}, {"b_layout": "col"}, {"A": np.pad(matrix(), ((0, 0), (0, 128)))}):
        with pytest.raises(pytest.fail.Exception):
            sf.tune(**{"A": matrix(), "n": 16, "seconds": 0.05} | other)
    monkeypatch.setenv("SPFORMAT_TUNED", "off")
    with pytest.raises(pytest.fail.Exception):
        sf.tune(matrix(), 16, seconds=0.05)
    monkeypatch.setenv("SPFORMAT_TUNED", "no")
    with pytest.raises(UsageError, match="SPFORMAT_TUNED: expected one of on, off, got 'no'"):
        sf.tune(matrix(), 16, seconds=0.05)


def test_off_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPFORMAT_TUNED", "off")
    assert not sf.tune(matrix(), 16, seconds=0.01).remembered
    assert not folder.exists()


def test_files_of_results(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned = sf.tune(matrix(), 16, seconds=0.01)
    assert Tuned.from_json(json.loads(json.dumps(tuned.to_json()))) == tuned
    assert tune.export_results(tmp_path / "out.json") == 1
    (folder / "tuned.json").write_text('{"results": [{"shape": [1, 2]}]}')
    assert tune.remembered() == {}
    assert "is left out" in caplog.text
    assert tune.import_results(tmp_path / "out.json") == 1
    assert tune.remembered() == {tuned.key: tuned}
    for text in ("[]", "{", '{"results": [1]}', '{"results": [{}]}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ContainerError, match="expected results of spformat tune"):
            tune.import_results(tmp_path / "bad.json")
    with pytest.raises(InputError):
        tune.import_results(tmp_path / "missing.json")
    for number in ("Infinity", "NaN", '"inf"', "1e999"):  # JSON has none of these, and --json would print them
        text = (tmp_path / "out.json").read_text().replace('"budget": 0.01', f'"budget": {number}')
        assert number in text
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ContainerError, match="finite"):
            tune.import_results(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0}, {"seconds": float("inf")}, {"seconds": float("nan")}, {"seconds": "10"}, {"seconds": None},
        {"seconds": True}, {"most": 0}, {"most": 2.0}, {"most": "6"}, {"most": True}, {"n": 0}, {"device": "gpu"},
    ],
)  # fmt: skip
def test_what_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        sf.tune(matrix(), **{"n": 16} | wrong)


def test_why_no_format_could_be_run() -> None:
    """The message ended with "on cpu"; the reasons were in a field."""
    with pytest.raises(NoKernelError, match=r"no format could be run on cpu: .*dense: .*bytes requested, .* allowed"):
        sf.tune(matrix(), 2**40, seconds=0.01)


def test_without_numba_the_slow_reference_is_not_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times were remembered, and given to calls after numba was installed, as those of the CPU."""
    why = "numba is not installed: pip install 'spformat[cpu]'"
    monkeypatch.setattr(backends.get("cpu"), "missing", lambda: [why])
    with pytest.raises(DeviceUnavailable, match=re.escape(f"no kernel of ours runs on the CPU here: {why}")):
        sf.tune(matrix(), 16, seconds=0.01)
    assert tune.remembered() == {}
    with sf.use_backend("reference"):
        assert sf.tune(matrix(), 16, seconds=0.01).backend == "reference"


def test_the_command_as_typed(tmp_path: Path) -> None:
    sf.save_dense(tmp_path / "w.safetensors", {"w": matrix()})
    tree = json.loads(command("tune", tmp_path / "w.safetensors", "-n", "1", "--seconds", "0.1", "--json").out)
    (row,) = tree["tensors"]
    tuned = Tuned.from_json(row)
    assert (row["name"], row["format"]) == ("w", tuned.format)
    text = command("tune", tmp_path / "w.safetensors", "-n", "1", "--seconds", "0.1").out
    assert f"{tuned.trials[0].total_us:.1f}" in text
    assert "1 results" in command("tune", "--export", tmp_path / "t.json").out
    assert json.loads(command("tune", "--import", tmp_path / "t.json", "--json").out) == {"results": 1}
    assert command("tune", "--export", tmp_path / "t.json", "--import", tmp_path / "t.json").code == 2
    assert "expected SRC" in command("tune", "--seconds", "1").err


def test_a_result_is_not_lost_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    a = sf.convert(np.eye(8, dtype=np.float32), "csr")
    assert tune.tune(a, n=1, seconds=0.1, most=1).trials
    assert "not remembered" in caplog.text
    for target in (tmp_path, tmp_path / "missing" / "tuned.json"):
        with pytest.raises(OutputError):
            tune.export_results(target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as user ids that no table of users has."""
    monkeypatch.setenv("HOME", "~")
    monkeypatch.delenv("XDG_CACHE_HOME")
    a = sf.convert(np.eye(8, dtype=np.float32), "csr")
    assert sf.spmm(a, np.ones((8, 2), np.float32)).sum() == 16
    assert tune.tune(a, n=1, seconds=0.1, most=1).trials
    assert not Path("~").exists()


def test_results_of_a_named_backend_are_for_calls_with_that_backend(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a slower backend measured was given to calls that name none, and the other way round."""
    with sf.use_backend("reference"):
        slow = sf.tune(matrix(), 16, seconds=0.01)
    usual = sf.tune(matrix(), 16, seconds=0.01)
    assert not usual.remembered
    assert (slow.backend, usual.backend) == ("reference", "")
    assert slow.key == f"{usual.key}, backend=reference"
    assert usual.key.endswith(f"row, {usual.device}, {usual.version}")  # as before: what files have stays valid
    assert tune.remembered() == {slow.key: slow, usual.key: usual}
    assert f"on {slow.device} by reference:" in str(slow)
    monkeypatch.setenv("SPFORMAT_BACKEND", "reference")
    assert sf.tune(matrix(), 16, seconds=0.01) == replace(slow, remembered=True)
    monkeypatch.delenv("SPFORMAT_BACKEND")
    assert sf.tune(matrix(), 16, seconds=0.01) == replace(usual, remembered=True)
    tree = usual.to_json()
    del tree["backend"]  # a file of an earlier version
    (folder / "tuned.json").write_text(json.dumps({"results": [tree]}))
    assert sf.tune(matrix(), 16, seconds=0.01) == replace(usual, remembered=True)


@pytest.mark.parametrize("there", [False, True])
def test_results_that_come_at_the_same_time_are_all_kept(
    there: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of several processes that tune the layers of a model: each reads the file, and writes it with its own."""
    if there:
        folder.mkdir(parents=True)
    tuned = sf.tune(matrix(), 16, seconds=0.01)
    tune.path().unlink()
    if not there:
        folder.rmdir()
    read = tune.remembered

    def slowly() -> dict[str, Tuned]:
        results = read()
        time.sleep(0.05)
        return results

    monkeypatch.setattr(tune, "remembered", slowly)
    results = [replace(tuned, fingerprint=str(i)) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda t: tune._remember({t.key: t}), results))
    assert read() == {t.key: t for t in results}
    assert [p.name for p in folder.iterdir()] == ["tuned.json"]
