"""The command line as users type it: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "fixtures" / "checkpoint" / "digits" / "model.safetensors"
SHARDED = ROOT / "fixtures" / "checkpoint" / "sharded"
SMTX = ROOT / "fixtures" / "matrices" / "dlmc_transformer_l0_0.9_enc2_ffn2.smtx"


def spformat(*args: Any, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a shell would."""
    command = [sys.executable, "-c", "from spformat_cli.main import main; main()", *map(str, args)]
    full = {**os.environ, "COLUMNS": "200", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, env=full, timeout=120, **options)


def test_the_module_is_the_command() -> None:
    r = subprocess.run([sys.executable, "-m", "spformat", "--version"], capture_output=True, text=True, timeout=60)
    assert (r.returncode, r.stdout) == (0, f"spformat {sf.__version__}\n"), r.stderr
    assert subprocess.run([sys.executable, "-m", "spformat", "inspect", "nope"], capture_output=True).returncode == 66


def test_help_names_every_verb_and_imports_no_heavy_library() -> None:
    code = (
        "import sys\nsys.argv = ['spformat', '--help']\nfrom spformat_cli.main import app\n"
        "try: app()\nexcept SystemExit: pass\n"
        "print([m for m in ('scipy', 'numba', 'cupy', 'torch', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    for verb in (
        "inspect",
        "plan",
        "convert",
        "merge",
        "validate",
        "diff",
        "explain",
        "bench",
        "formats",
        "backends",
        "env",
    ):
        assert verb in out
    assert out.rstrip().endswith("[]")


def test_inspect(tmp_path: Path) -> None:
    tree = json.loads(spformat("inspect", DIGITS, "--json").stdout)
    rows = {r["name"]: r for r in tree["tensors"]}
    assert rows["hidden1.weight"]["two_four"]["fits"]
    assert rows["hidden1.weight"]["smallest"] == "two-four"
    assert rows["hidden2.weight"]["smallest"] == "vector-nm:n=16,m=32,vector_length=32"
    assert rows["hidden3.weight"]["smallest"] == "bsr:blocksize=32x32"
    assert rows["output.weight"]["smallest"] == "bitmask"
    with sf.safe_open(DIGITS) as f:
        for name, r in rows.items():
            if "sizes" not in r:
                continue
            x = f.array(name)
            assert r["nnz"] == int((x != 0).sum())
            needed = [(x[i : i + 128] != 0).any(axis=0).mean() for i in range(0, x.shape[0], 128)]
            assert r["kept_share"]["128"] == round(float(np.mean(needed)), 4), name
            for text, size in r["sizes"].items():
                assert sf.convert(x, text).nbytes == size, (name, text)
    table = spformat("inspect", DIGITS)
    assert "hidden3.weight" in table.stdout
    assert "32x32 blocks" in table.stdout
    assert table.returncode == 0
    long = spformat("inspect", DIGITS, "--long").stdout
    assert "rows by length" in long
    assert "rows of B that a tile needs: " in long
    assert "sparse" in spformat("inspect", SMTX).stdout


def test_plan_equals_convert_and_writes_nothing(tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    foreseen = json.loads(spformat("plan", SHARDED, "--json").stdout)
    dry = json.loads(spformat("convert", SHARDED, tmp_path / "out", "--dry-run", "--json").stdout)
    assert sorted(tmp_path.iterdir()) == before
    real = json.loads(spformat("convert", SHARDED, tmp_path / "out", "--json").stdout)
    key = lambda tree: [(t["name"], t["target"], t.get("bytes_out")) for t in tree["tensors"]]  # noqa: E731
    assert key(foreseen) == key(dry) == key(real)
    assert foreseen["bytes_out"] == real["bytes_out"]
    foreseen = json.loads(spformat("plan", SHARDED, "--to", "dense", "--json").stdout)
    real = json.loads(spformat("convert", SHARDED, tmp_path / "dense", "--to", "dense", "--json").stdout)
    assert key(foreseen) == key(real)
    assert {t["target"] for t in real["tensors"] if len(t["shape"]) == 1} == {"keep"}
    larger = spformat("plan", SHARDED, "--to", "csr", "--fail-if-larger")
    assert larger.returncode == 1
    assert "larger than dense" in larger.stdout + larger.stderr


def test_convert_validate_diff_round_trip(tmp_path: Path) -> None:
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    done = spformat("convert", SHARDED, packed, "--to", "auto", "--rule", "re:mlp.*=bitmask")
    assert done.returncode == 0, done.stderr
    assert "27 tensors" in done.stdout
    assert spformat("validate", packed, "--checksums").returncode == 0
    assert spformat("convert", packed, dense, "--to", "dense").returncode == 0
    same = spformat("diff", SHARDED, dense)
    assert same.returncode == 0
    assert "27 of 27" in same.stdout
    assert spformat("diff", SHARDED, DIGITS).returncode == 1
    again = spformat("convert", SHARDED, packed)
    assert again.returncode == 73
    assert "--force" in again.stderr


def test_a_misfit_says_what_where_and_what_to_do(tmp_path: Path) -> None:
    r = spformat("convert", DIGITS, tmp_path / "out", "--to", "two-four")
    assert r.returncode == 3
    for part in ("model.safetensors", "hidden2.weight", "group(s)", "row 0", "magnitude_nm", "--misfit keep"):
        assert part in r.stderr, part
    assert "Traceback" not in r.stderr
    error = json.loads(spformat("convert", DIGITS, tmp_path / "out", "--to", "two-four", "--json").stderr)
    assert error["code"] == "StructureError"
    assert error["exit_code"] == 3
    assert error["tensor"] == "hidden2.weight"
    assert error["unit"] == "group"
    expected = spformat("validate", DIGITS, "--expect", "two-four", "--include", "*.weight", "--json")
    assert expected.returncode == 1
    findings = {t["name"]: t for t in json.loads(expected.stdout)["tensors"]}
    assert findings["hidden1.weight"]["ok"]
    assert findings["hidden2.weight"]["error"]["count"] > 0


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["inspect", "nowhere"], 66, "No such file"),
        (["convert", DIGITS, "out", "--to", "bsrr"], 2, "did you mean 'bsr'"),
        (["convert", DIGITS, "out", "--to", "bsr:blocksize=0x1"], 2, "blocksize"),
        (["convert", DIGITS, "out", "--rule", "nonsense"], 2, "PATTERN=FORMAT"),
        (["convert", DIGITS, "out", "--include", "re:zzz"], 2, "matches none"),
        (["convert", DIGITS], 2, "dst"),
        (["validate", ROOT / "pyproject.toml"], 65, "safetensors"),
        (["explain", DIGITS, "--gpu", "h300"], 2, "sm_90"),
        (["convrt"], 2, "No such command"),
    ],
)
def test_wrong_input_ends_with_its_code_and_a_fix(args: list[Any], code: int, text: str, tmp_path: Path) -> None:
    r = spformat(*args, cwd=tmp_path)
    assert r.returncode == code, r.stderr
    assert text in r.stderr.replace("DST", "dst")
    assert "Traceback" not in r.stderr
    assert not list(tmp_path.glob("out/*"))


def test_explain_prints_the_trace_of_the_library() -> None:
    r = json.loads(spformat("explain", DIGITS, "-n", 16, "--gpu", "sm_90", "--json").stdout)
    chosen = {row["tensor"]: row["chosen"] for row in r}
    assert set(chosen.values()) == {"vendor.cublas_gemm"}
    text = spformat("explain", DIGITS, "-n", 16).stdout
    assert "cpu.spmm_dense: accepted" in text


def test_matrix_files(tmp_path: Path) -> None:
    out = tmp_path / "ffn.safetensors"
    r = spformat("convert", SMTX, out, "--to", "sr-bcrs", "--values", "normal", "--seed", 0, "--dtype", "float16")
    assert r.returncode == 0, r.stderr
    a = sf.load(out)[SMTX.stem]
    assert isinstance(a, sf.SRBCRS)
    assert a.shape == (512, 2048)
    assert a.dtype == np.float16


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = (
        f'"{sys.executable}" -c "from spformat_cli.main import main; main()" inspect "{SHARDED}" --long | head -n 1'
    )
    r = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert r.returncode == 0, r.stderr
    assert "Traceback" not in r.stderr


def test_a_conversion_goes_on_when_nobody_reads_its_progress(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    code = [sys.executable, "-c", "from spformat_cli.main import main; main()"]
    done = subprocess.run([*code, "convert", SHARDED, tmp_path / "out", "--to", "auto"], stderr=write, check=False)
    os.close(write)
    assert done.returncode == 0
    assert {n for n in os.listdir(tmp_path / "out") if n.startswith("spformat")} >= {"spformat.json"}
    assert not (tmp_path / "out" / "spformat.partial.json").exists()


def test_environment_and_lists() -> None:
    env = json.loads(spformat("env", "--json").stdout)
    assert env["packages"]["numpy"] == np.__version__
    formats = {f["name"] for f in json.loads(spformat("formats", "--json").stdout)}
    assert formats == {f.name for f in sf.FORMATS} | {"stack", "sum"}
    rows = {b["name"]: b for b in json.loads(spformat("backends", "--json").stdout)}
    assert rows["reference"]["missing"] == []
    assert rows["cuda"]["kernels"]


def test_bench_on_the_host(tmp_path: Path) -> None:
    r = spformat(
        "bench", DIGITS, "-n", "8", "--device", "cpu", "--limit", "1", "--repeats", "3", "--to", "csr", "--json"
    )
    assert r.returncode == 0, r.stderr
    rows = json.loads(r.stdout)["results"]
    ours = [row for row in rows if row["name"].startswith("cpu.spmm_csr")]
    assert ours
    assert 0 <= ours[0]["error"] <= 1
    assert ours[0]["cold_us"] > 0


def test_parts_merge_executors_and_urls(tmp_path: Path) -> None:
    def files(name: str) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}

    assert spformat("convert", SHARDED, tmp_path / "whole").returncode == 0
    done = spformat("convert", SHARDED, tmp_path / "out", "--part", "2/3", "--resume")
    assert (done.returncode, "part 2/3: 2 file(s)" in done.stderr) == (0, True)
    early = spformat("merge", tmp_path / "out")
    assert (early.returncode, early.stdout) == (66, "")
    assert "2 of 3 parts have not finished (1, 3): run each with --part i/3 --resume" in early.stderr
    for part in ("1/3", "3/3"):
        spformat("convert", SHARDED, tmp_path / "out", "--part", part, "--executor", "threads", "--workers", "2")
    merged = spformat("merge", tmp_path / "out", "--json")
    assert json.loads(merged.stdout)["files"] == [f"spformat-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert files("out") == files("whole")

    there = spformat("convert", f"file://{SHARDED}", f"file://{tmp_path}/url")
    assert (there.returncode, files("url")) == (0, files("whole"))
    assert f"file://{tmp_path}/url: 2 file(s)" in there.stderr
    for wrong in (("--part", "4/3"), ("--workers", "2"), ("--executor", "ray"), ("--device", "gpu")):
        assert spformat("convert", SHARDED, tmp_path / "no", *wrong).returncode == 2, wrong
    assert not (tmp_path / "no").exists()
