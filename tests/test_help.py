"""Help, completion in shells, and the names of GPUs that are taken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from terminals import terminal
from test_cli import DIGITS, spformat

import spformat as sf

# --- names of GPUs


@pytest.mark.parametrize(
    ("name", "sm"),
    [("H100", 90), ("h200", 90), ("A100", 80), ("NVIDIA A100-SXM4-80GB", 80), ("RTX 4090", 89), ("L40S", 89),
     ("B200", 100), ("T4", 75), ("H100 PCIe", 90), ("geforce rtx 3090 ti", 86), ("GB200", 100)],
)  # fmt: skip
def test_explain_takes_the_name_of_a_gpu(tmp_path: Path, name: str, sm: int) -> None:
    sf.save(tmp_path / "w.safetensors", {"w": sf.convert(np.tri(64, dtype=np.float16), "csr")})
    r = spformat("explain", tmp_path / "w.safetensors", "--gpu", name)
    assert r.returncode == 0, r.stderr
    by_number = spformat("explain", tmp_path / "w.safetensors", "--gpu", f"sm_{sm}").stdout
    board = "H100" if "H100" in name else "H200"  # of two boards of an architecture, the one that was named
    estimate = "  on H"
    if board == "H200":
        assert r.stdout.partition(estimate)[0] == by_number.partition(estimate)[0]
    else:  # the same kernels, with the times of this board
        assert "scaled to H100" in r.stdout
        assert "scaled" not in by_number
        kernels = [re.findall(r"^  (\S+): accepted, expects", text, re.MULTILINE) for text in (r.stdout, by_number)]
        assert sorted(kernels[0]) == sorted(kernels[1])
    assert (f"on {board} at least" in r.stdout) == (sm == 90), r.stdout
    assert f"{name} is sm_{sm}" in r.stderr
    assert spformat("explain", tmp_path / "w.safetensors", "--gpu", name, "--json").stderr == ""  # errors alone


@pytest.mark.parametrize("name", ["H300", "A1000", "A", "RTX", ""])
def test_a_gpu_that_is_not_known_is_answered_with_those_that_are(name: str) -> None:
    r = spformat("explain", DIGITS, "--gpu", name or " ")
    assert r.returncode == 2
    said = " ".join(r.stderr.replace("│", " ").split())
    assert "H100" in said
    assert "sm_90" in said


# --- help and completion


@pytest.mark.parametrize(
    "verb", ["inspect", "recommend", "plan", "convert", "validate", "diff", "explain", "bench", "tune", "merge"]
)
def test_help_has_examples_one_a_line_and_limits_in_one_panel(verb: str) -> None:
    code, lines = terminal(verb, "--help")
    assert code == 0
    heads = [line for line in lines if line.startswith("╭─")]
    assert [h for h in heads if "Limits" in h] == [heads[-1]], heads
    panel = lines[lines.index(heads[-1]) :]
    panel = panel[: next(i for i, line in enumerate(panel) if line.startswith("╰"))]
    assert sum(line.startswith("│ --") for line in panel) == 10, "\n".join(panel)
    examples = [line.strip() for line in lines[lines.index(heads[-1]) + len(panel) + 1 :] if line.strip()]
    assert examples, lines
    assert all(line.count("spformat ") == 1 and len(line) < 80 for line in examples), examples


def completions(words: str) -> set[str]:
    """What a Bash user gets for TAB after these words."""
    env = {"_SPFORMAT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    code = "import sys; sys.argv = ['spformat']; from spformat_cli.main import main; main()"
    r = subprocess.run([sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=60)
    return set(r.stdout.split())


def test_completion() -> None:
    formats = {f.name for f in sf.FORMATS}
    assert completions("spformat convert a b --to ") == formats | {"auto", "fastest", "keep"}
    assert completions("spformat plan a --to b") == {"bsr", "bitmask"}
    assert completions("spformat validate a --expect two") == {"two-four"}
    assert completions("spformat convert a b --misfit ") == formats | {"auto", "fastest", "keep", "error"}
    assert completions("spformat plan a --rule re:proj=sr") == {"re:proj=sr-bcrs"}
    assert {"cpu", "cuda", "cpu.spmm_csr", "cuda.spmm_two_four"} <= completions("spformat explain a --backend ")
    assert completions("spformat explain a --backend cpu.spmm_csr") >= {"cpu.spmm_csr"}
    assert {"H100", "A100"} <= completions("spformat explain a --gpu ")
    assert completions("spformat convert a b --layout ") == {"neutral", "transformers"}
    assert completions("spformat convert a b --executor p") == {"processes"}


def test_help_has_no_switches_that_switch_nothing_off() -> None:
    for verb in ("convert", "plan", "validate", "diff", "bench", "merge"):
        assert "--no-" not in "\n".join(terminal(verb, "--help")[1]), verb
