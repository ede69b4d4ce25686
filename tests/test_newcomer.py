"""What a newcomer met in the first hour with the command: interrupts, verdicts, long lists, messages that lead on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command, shell
from terminals import llama_291

import spformat as sf
from spformat.measure import bench


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_291(tmp_path_factory.mktemp("checkpoints") / "llama")


def test_an_interrupt_at_any_moment_ends_with_its_exit_code(llama: Path) -> None:
    """Also while modules are being imported, when any exception may come of it; Python's own start is Python's."""
    code = "print(flush=True); from spformat_cli.entry import main; main()"
    for delay in (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5):
        p = subprocess.Popen([sys.executable, "-c", code, "explain", str(llama)], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert p.stdout is not None
        p.stdout.readline()
        time.sleep(delay)
        p.send_signal(signal.SIGINT)
        err = p.communicate(timeout=60)[1]
        assert p.returncode in (0, 130, -signal.SIGINT), err
        assert "Traceback" not in err or p.returncode == -signal.SIGINT  # before the first line of ours
        assert "RecursionError" not in err


STUBBORN = """
import sys, time
from spformat_cli import main

def compiles():
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            print("compiling", flush=True)
            time.sleep(30)
        except KeyboardInterrupt:
            pass

main.app = compiles
main.main()
"""


def test_an_interrupt_ends_a_command_that_cannot_be_interrupted() -> None:
    """What compiles for seconds cannot: the exception would be lost, or leave a lock of the compiler locked."""
    with subprocess.Popen([sys.executable, "-c", STUBBORN, "inspect", "x"], stdout=subprocess.PIPE) as p:
        assert p.stdout is not None
        p.stdout.readline()
        p.send_signal(signal.SIGINT)
        assert p.wait(10) == 130


@pytest.mark.parametrize("verb", ["diff", "validate", "plan"])
def test_a_verdict_counts_whoever_reads_the_lines(tmp_path: Path, verb: str) -> None:
    """`spformat diff a b | head -1` under pipefail."""
    x = {f"layers.{i}.{'abcdefgh'[i % 8]}{i // 8}.weight": np.full((8, 8), i + 1, np.float32) for i in range(3000)}
    sf.save_dense(tmp_path / "a.safetensors", x)
    sf.save_dense(tmp_path / "b.safetensors", {name: v * 2 for name, v in x.items()})
    more = {"diff": "b.safetensors --long", "validate": "--expect two-four --long", "plan": "--to two-four --long"}[
        verb
    ]
    done = shell(f"cd {tmp_path}; spformat {verb} a.safetensors {more} 2>/dev/null | head -1 >/dev/null; "
                 "echo ${PIPESTATUS[0]}")  # fmt: skip
    assert done.stdout.strip() == {"diff": "1", "validate": "1", "plan": "3"}[verb]


def test_differences_of_layers_are_one_line(tmp_path: Path) -> None:
    x = {f"layers.{i}.up.weight": np.full((4, 4), i + 1, np.float32) for i in range(40)} | {"head": np.ones(3)}
    sf.save_dense(tmp_path / "a.safetensors", x)
    sf.save_dense(tmp_path / "b.safetensors", {name: -v for name, v in x.items()})
    r = command("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    lines = r.out.splitlines()
    assert lines[1] == "layers.0-39.up.weight x 40: first: 16 of 16 elements differ, first at [0, 0]: 1.0 against -1.0"
    assert len(lines) == 3
    assert len(command("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--long").out.splitlines()) == 42


def test_messages_that_lead_on(llama: Path, tmp_path: Path) -> None:
    def said(*words: Any) -> str:
        r = command(*words)
        assert r.code not in (0, 70)
        return " ".join((r.out + r.err).split())

    assert "'*q_proj*', or 're:q_proj'" in said("plan", llama, "--include", "q_proj")
    assert "did you mean 'auto'?" in said("plan", llama, "--to", "atuo")
    assert "did you mean 'two-four'?" in said("plan", llama, "--to", "2_4")
    (tmp_path / "config.json").write_text('{\n  "architectures": []}')
    assert "this is JSON: of a checkpoint, name the folder" in said("inspect", tmp_path / "config.json")
    assert "H100, H200" in said("explain", llama, "--gpu", "H1000")
    assert command("convert", llama, tmp_path / "out", "--to", "csr").code == 0
    text = said("convert", llama, tmp_path / "out", "--to", "bitmask", "--resume")
    assert "other options (to: csr there, bitmask here)" in text
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    sf.save_dense(tmp_path / "w.safetensors", {"w": x})
    err = command("convert", tmp_path / "w.safetensors", tmp_path / "no", "--to", "two-four").err
    assert err.index("--misfit keep") < err.index("prune")


def test_times_that_cannot_be_are_not_compared() -> None:
    """Hot caches make nothing slower: then other work on the machine was measured."""

    def result(name: str, peer: bool, cold: float, hot: float) -> bench.Result:
        return bench.Result("c", name, peer, cold, hot, 0.0, 0.0, 0.0, 0.0, 0.0)

    ours = result("cpu.spmm_csr", False, 100.0, 80.0)
    assert bench.verdict([ours, result("dense", True, 200.0, 150.0)]) == "cpu.spmm_csr is 2.00x the speed of dense"
    assert (
        bench.verdict([ours, result("dense", True, 50.0, 40.0)]) == "cpu.spmm_csr is 0.50x the speed of dense, slower"
    )
    for cold, hot in ((824.0, 7958.0), (5603.0, 50.0)):
        text = bench.verdict([ours, result("dense", True, cold, hot)])
        assert text.startswith("too noisy to compare: dense took"), text
    assert bench.verdict([result("a", False, 9.0, 20.0), result("dense", True, 20.0, 20.0)]).startswith("too noisy")
    nan = float("nan")
    assert "x the speed of" in bench.verdict([result("a", False, 9.0, nan), result("dense", True, 20.0, nan)])


def small(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    sf.save_dense(path, {"a.weight": np.tri(64, dtype=np.float16), "norm.bias": np.ones(4, np.float32)})
    return path


def test_numbers_of_columns_may_be_given_together_or_one_by_one(tmp_path: Path) -> None:
    path = small(tmp_path)
    for verb, more in (("recommend", ()), ("plan", ("--to", "fastest")), ("explain", ())):
        together, apart = (command(verb, path, *more, *n, "--json") for n in (("-n", "16,32"), ("-n", 16, "-n", 32)))
        assert together.code == apart.code == 0, together
        assert json.loads(together.out) == json.loads(apart.out)
    both = json.loads(command("explain", path, "-n", "16,32", "--json").out)
    assert [row["n"] for row in both] == [16, 32]
    assert both[0]["kernels"] != both[1]["kernels"]
    wrong = command("explain", path, "-n", -5)
    assert wrong.code == 2
    assert "expected numbers of columns like 16,2048, got '-5'" in wrong.err


@pytest.mark.parametrize("verb", ["explain", "recommend", "tune", "bench"])
def test_no_matrix_among_the_tensors_is_an_error(tmp_path: Path, verb: str) -> None:
    r = command(verb, small(tmp_path), "--include", "norm.bias", *(["--device", "cpu"] if verb == "bench" else []))
    assert r.code == 2, r
    assert "expected a matrix, got none among 1 tensor(s)" in r.err


def test_bench_says_how_many_matrices_it_leaves_out(tmp_path: Path) -> None:
    sf.save_dense(tmp_path / "m.safetensors", {f"w{i}": np.tri(8 + i, dtype=np.float32) for i in range(3)})
    r = command("bench", tmp_path / "m.safetensors", "-n", 1, "--device", "cpu", "--limit", 2, "--repeats", 1)
    assert "the 2 largest of 3 matrices" in r.err


@pytest.mark.parametrize("name", ["w.npz", "w.mtx", "w.SMTX", "pytorch_model.bin"])
def test_a_name_of_another_kind_of_file_is_refused(tmp_path: Path, name: str) -> None:
    """It would be read as such a file afterwards, and fail."""
    for save in (sf.save, sf.save_dense):
        with pytest.raises(sf.errors.UsageError, match="would be read as another kind of file"):
            save(tmp_path / name, {"w": np.ones((2, 2), np.float32)})
    assert not (tmp_path / name).exists()


def test_explain_of_this_host_says_what_the_environment_chooses(tmp_path: Path) -> None:
    """It said that a kernel of the CPU runs, where every product runs on the backend of SPFORMAT_BACKEND."""
    path = small(tmp_path)
    for given, runs in ({"SPFORMAT_BACKEND": "reference"}, "reference.spmm"), ({}, "cpu."):
        with pytest.MonkeyPatch.context() as m:
            for key, value in given.items():
                m.setenv(key, value)
            assert f"runs on {runs}" in command("explain", path, "-n", "4").out
            assert "runs on vendor." in command("explain", path, "-n", "4", "--gpu", "H100").out
            assert "runs on cpu." in command("explain", path, "-n", "4", "--backend", "cpu").out


def test_a_misspelt_name_is_answered_with_the_nearest_and_a_package_with_its_import() -> None:
    """``import spformat`` leaves out the packages that take long to import; the error did not say so."""
    code = "import spformat as sf\nsf.{}"
    for name, said in (("covert", "Did you mean: 'convert'?"), ("checkpoint", "import spformat.checkpoint first"),
                       ("hf", "import spformat.hf first")):  # fmt: skip
        r = subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=False)
        assert f"module 'spformat' has no attribute '{name}'" in r.stderr
        assert said in r.stderr
    assert not hasattr(sf, "covert")
