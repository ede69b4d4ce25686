"""What the command looks like on a terminal of 80 columns, and what it says there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from catalogue import command
from safetensors.numpy import save_file
from terminals import llama_291, terminal
from test_cli import DIGITS, SHARDED, spformat

import spformat as sf


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_291(tmp_path_factory.mktemp("checkpoints") / "llama")


# --- tables


@pytest.mark.parametrize("args", [("inspect",), ("plan",), ("plan", "--to", "csr"), ("explain", "-n", "16")], ids=str)
def test_a_model_of_291_tensors_fits_one_screen(llama: Path, args: tuple[str, ...]) -> None:
    verb, *flags = args
    code, lines = terminal(verb, llama, *flags)
    assert code == 0, lines
    assert len(lines) <= 50, "\n".join(lines)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    if verb != "explain":
        # no name is folded, and what is true of 32 layers is said once
        assert text.count("model.layers.0-31.self_attn.q_proj.weight x 32") == 1
        assert "model.embed_tokens.weight" in text
        assert "291 tensors" in text


def test_a_line_of_many_tensors_has_their_bytes(llama: Path) -> None:
    _, lines = terminal("inspect", llama)
    at = lines.index("model.layers.0-31.mlp.down_proj.weight x 32")
    facts = lines[at + 1].split()
    assert facts == ["32x64", "bfloat16", "50.0", "%", "2:4", "128.00", "KiB", "two-four", "72.00", "KiB"]
    wide = next(line for line in terminal("inspect", llama, columns=220)[1] if "down_proj" in line)
    assert wide.split() == [*"model.layers.0-31.mlp.down_proj.weight x 32".split(), *facts]


def test_long_lists_every_tensor(llama: Path) -> None:
    for verb, flags in (("inspect", []), ("plan", []), ("explain", ["-n", "16"])):
        _, lines = terminal(verb, llama, *flags, "--long", columns=300)
        for i in range(32):
            assert sum(f"model.layers.{i}.self_attn.q_proj.weight" in line for line in lines) == 1, verb
        assert not any(" x 32" in line for line in lines)
    assert terminal("plan", llama, "-l", columns=300)[1] == terminal("plan", llama, "--long", columns=300)[1]


def test_layers_of_another_fate_have_a_line_of_their_own(tmp_path: Path) -> None:
    """Shape, zeros and target differ between layers; the numbers of the layers say which is which."""
    x = np.zeros((32, 32), np.float32)
    x[:, ::4] = 1
    tensors = {f"h.{i}.w": x for i in range(8)} | {f"h.{i}.w": np.ones((32, 32), np.float32) for i in (2, 5)}
    tensors["h.7.w"] = np.ones((16, 32), np.float32)
    tensors |= {f"h.{i}.experts.{j}.w": x for i in range(2) for j in range(4)}
    tensors |= {"layer_0.w": x, "layer_1.w": x, "h.007.w": x}
    save_file(tensors, tmp_path / "m.safetensors")
    rows = [line for line in terminal("plan", tmp_path / "m.safetensors", columns=200)[1] if ".w" in line]
    labels = {line.partition("  ")[0] for line in rows}
    assert labels == {
        "h.0-1,3-4,6.w x 5", "h.2,5.w x 2", "h.7.w", "h.0-1.experts.0-3.w x 8", "layer_0.w", "layer_1.w", "h.007.w",
    }  # fmt: skip


def test_numbers_that_differ_within_a_line_are_a_range(tmp_path: Path) -> None:
    tensors = {}
    for i in range(4):
        x = np.random.default_rng(i).uniform(1, 2, (64, 64)).astype(np.float32)
        x.ravel()[np.random.default_rng(9).permutation(4096)[: 2048 + 10 * i]] = 0
        tensors[f"h.{i}.w"] = x
    save_file(tensors, tmp_path / "m.safetensors")
    row = next(
        line for line in terminal("inspect", tmp_path / "m.safetensors", columns=200)[1] if "h.0-3.w x 4" in line
    )
    assert "50.0-50.7 %" in row
    assert "unstructured" in row


def test_a_refusal_of_many_layers_is_one_line_with_the_first_place(llama: Path) -> None:
    code, lines = terminal("plan", llama, "--to", "vector-nm:n=2,m=8,vector_length=8")
    assert code == 3
    assert len(lines) <= 60, "\n".join(lines)
    assert "model.layers.0-31.self_attn.q_proj.weight x 32" in lines
    assert "first:" in "\n".join(lines)


@pytest.mark.parametrize("verb", ["formats", "backends"])
def test_lists_keep_to_the_width_of_the_terminal(verb: str) -> None:
    _, lines = terminal(verb)
    assert max(map(len, lines)) <= 80
    assert ("two-four" if verb == "formats" else "reference") in lines


def test_a_pipe_has_one_line_a_group(llama: Path) -> None:
    lines = spformat("inspect", llama).stdout.splitlines()
    assert len(lines) == 14
    assert any(line.startswith("model.layers.0-31.mlp.down_proj.weight x 32 ") for line in lines)


def test_explain_says_once_what_holds_for_many(llama: Path) -> None:
    lines = terminal("explain", llama, "-n", "16", "--gpu", "sm_90", columns=200)[1]
    text = "\n".join(lines)
    # q, k, v and o of 32 layers have one shape; gate and up another, down a third, embedding and head a fourth
    assert text.count("runs on") == 4, text
    assert "model.layers.0-31.self_attn.q_proj.weight x 32" in text
    rows = json.loads(spformat("explain", llama, "-n", "16", "--gpu", "sm_90", "--json").stdout)
    assert len(rows) == 226


# --- what is said beside the data


def test_hints_are_commands_that_can_be_pasted(tmp_path: Path) -> None:
    source = tmp_path / "my model"
    llama_291(source, layers=1)
    r = spformat("inspect", "my model", cwd=tmp_path)
    hint = next(line for line in r.stderr.splitlines() if line.startswith("hint: "))
    assert hint == "hint: spformat convert 'my model' 'my model-sp' --to auto"
    r = spformat("plan", "my model", cwd=tmp_path)
    assert "hint: spformat convert 'my model' 'my model-sp' --to auto" in r.stderr
    r = spformat("inspect", "my model/model.safetensors", cwd=tmp_path)
    assert "convert 'my model/model.safetensors' 'my model/model-sp.safetensors' --to auto" in r.stderr
    ran = subprocess.run(
        ["bash", "-c", 'spformat() { "$@"; }\n' + hint.removeprefix("hint: ").replace("spformat", "spformat $COMMAND", 1)],
        env={**os.environ, "COMMAND": f"{sys.executable} -m spformat"}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "my model-sp" / "spformat.json").exists()


def test_a_tensor_that_does_not_fit_is_answered_with_the_command_that_goes_on(tmp_path: Path) -> None:
    for verb in (["convert", DIGITS, tmp_path / "out"], ["plan", DIGITS]):
        r = spformat(*verb, "--to", "two-four")
        assert r.returncode == 3
        command = f"hint: spformat {' '.join(map(str, verb))} --to two-four --misfit keep"
        assert command in r.stderr.splitlines(), r.stderr


def test_a_pipe_is_not_named_by_its_temporary_file(tmp_path: Path) -> None:
    with open(DIGITS, "rb") as f:
        r = spformat("inspect", "-", stdin=f)
    assert r.returncode == 0, r.stderr
    assert "/tmp" not in r.stderr
    assert "hint: spformat convert - " in r.stderr


@pytest.mark.parametrize("flag", ["--quiet", "-q"])
def test_quiet(tmp_path: Path, flag: str) -> None:
    for verb in (["convert", SHARDED, tmp_path / flag], ["validate", SHARDED], ["diff", SHARDED, tmp_path / flag]):
        r = spformat(*verb, flag)
        assert (r.returncode, r.stdout, r.stderr) == (0, "", ""), (verb, r)
    for verb in ("inspect", "plan"):  # data that was asked for
        r = spformat(verb, SHARDED, flag)
        assert (r.returncode, r.stderr) == (0, ""), r.stderr
        assert r.stdout == spformat(verb, SHARDED).stdout
    # a screen of errors stays, and so do warnings and exit codes
    r = spformat("convert", DIGITS, tmp_path / "two", "--to", "two-four", flag)
    assert (r.returncode, r.stdout) == (3, "")
    assert r.stderr.startswith("error: ")
    assert "hint" not in r.stderr
    assert "larger than dense" in spformat("plan", SHARDED, "--to", "csr", flag).stderr
    assert spformat("validate", DIGITS, "--expect", "two-four", flag).returncode == 1
    assert json.loads(spformat("convert", SHARDED, tmp_path / "json", flag, "--json").stdout)["tensors"]
    # on a terminal, no bar either
    assert terminal("convert", SHARDED, tmp_path / "bar", flag, stderr=True) == (0, [""])


SLOW = """
import sys, time
from spformat.storage.output import Output
commit = Output.commit
def slow(self):
    if self.path.endswith(("00002-of-00002.safetensors", "out.safetensors")):
        print("written, and not yet under its name", flush=True, file=sys.__stdout__)
        time.sleep(60)
    commit(self)
Output.commit = slow
from spformat_cli.main import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_what_is_on_disk_and_how_to_go_on(tmp_path: Path, number: int, code: int) -> None:
    args = ["convert", str(SHARDED), "out dir", "--to", "bitmask"]
    run = subprocess.Popen(
        [sys.executable, "-c", SLOW, *args], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    run.stdout.readline()
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert run.returncode == code
    assert "Traceback" not in err
    assert "stopped: out dir has 1 finished file, and a journal" in err, err
    assert f"go on with: spformat convert {SHARDED} 'out dir' --to bitmask --resume" in err
    r = spformat(*args, "--resume", cwd=tmp_path)
    assert (r.returncode, "1 file(s) were finished already" in r.stderr) == (0, True), r.stderr
    assert spformat("diff", SHARDED, tmp_path / "out dir").returncode == 0


def test_an_interrupt_is_json_beside_json_and_a_file_url_is_a_path(tmp_path: Path) -> None:
    args = ["convert", f"file://{SHARDED}", f"file://{tmp_path}/out", "--to", "bitmask", "--json"]
    run = subprocess.Popen(
        [sys.executable, "-c", SLOW, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    run.stdout.readline()
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    error = json.loads(err)
    assert (error["code"], error["exit_code"]) == ("Interrupted", 130)
    assert "1 finished file" in error["message"]
    assert error["command"] == f"spformat {' '.join(args)} --resume"


def test_an_interrupt_of_one_file_leaves_nothing(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", SLOW, "convert", str(DIGITS), "out.safetensors"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    run.stdout.readline()
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "stopped: nothing was written to out.safetensors" in err
    assert "--resume" not in err
    assert list(tmp_path.iterdir()) == []


# --- what pruning costs


@pytest.mark.parametrize("to", ["two-four", "bitmask", "dense"])
def test_prune_says_what_it_takes(tmp_path: Path, to: str) -> None:
    rng = np.random.default_rng(1)
    w = {f"h.{i}.w": rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16) for i in range(3)}
    save_file(w, tmp_path / "m.safetensors")
    flags = ["--to", to, "--prune", "magnitude", *([] if to == "two-four" else ["--sparsity", "0.25"])]
    foreseen = spformat("plan", tmp_path / "m.safetensors", *flags)
    done = spformat("convert", tmp_path / "m.safetensors", tmp_path / "out", *flags)
    assert (foreseen.returncode, done.returncode) == (0, 0), foreseen.stderr + done.stderr
    assert spformat("convert", tmp_path / "out", tmp_path / "dense", "--to", "dense").returncode == 0
    before = {k: x.astype(np.float64) for k, x in w.items()}
    with sf.safe_open(tmp_path / "dense" / "model.safetensors") as f:
        after = {k: f.array(k).astype(np.float64) for k in w}
    values = sum(int(((before[k] != 0) & (after[k] == 0)).sum()) for k in w)
    lost = np.sqrt(sum(((before[k] - after[k]) ** 2).sum() for k in w) / sum((x**2).sum() for x in before.values()))
    assert values > 3000
    sentence = f"--prune set {values:,} of 12,288 nonzero values to zero: {100 * lost:.2f} % of the Frobenius norm"
    mean = sum(np.abs(before[k] - after[k]).sum() for k in w) / sum(x.size for x in before.values())
    sentence += f", mean error {mean:.3g}"
    for r in (foreseen, done):
        assert sentence in r.stdout + r.stderr, r.stdout + r.stderr
    tree = json.loads(spformat("plan", tmp_path / "m.safetensors", *flags, "--json").stdout)
    assert tree["pruned"] == values
    assert tree["lost_norm_share"] == pytest.approx(lost, abs=1e-6)
    assert tree["mean_error"] == pytest.approx(mean, rel=1e-9)
    for row in tree["tensors"]:
        a, b = before[row["name"]], after[row["name"]]
        assert row["pruned"] == int(((a != 0) & (b == 0)).sum())
        assert row["lost_norm"] / row["norm"] == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-9)


def test_what_was_pruned_is_known_after_a_resumed_run(tmp_path: Path) -> None:
    flags = ["--to", "two-four", "--prune", "magnitude", "--json"]
    once = json.loads(spformat("convert", SHARDED, tmp_path / "once", *flags).stdout)
    assert once["pruned"] > 0
    for i in (1, 2):
        spformat("convert", SHARDED, tmp_path / "parts", *flags, "--part", f"{i}/2")
    merged = json.loads(spformat("merge", tmp_path / "parts", "--json").stdout)
    for key in ("pruned", "lost_norm_share", "mean_error"):
        assert merged[key] == once[key] > 0


def test_values_without_a_magnitude_do_not_hide_what_was_lost(tmp_path: Path) -> None:
    x = np.full((4, 8), 2, np.float32)
    x[0, 0] = np.inf
    save_file({"w": x}, tmp_path / "m.safetensors")
    flags = ["--to", "two-four", "--prune", "magnitude", "--nonfinite", "keep", "--json"]
    tree = json.loads(spformat("plan", tmp_path / "m.safetensors", *flags).stdout)
    assert tree["pruned"] == 16
    assert tree["lost_norm_share"] == pytest.approx((16 / 31) ** 0.5, abs=1e-6)  # of the finite values


# --- what a newcomer met


def test_a_conversion_to_dense_does_not_guess_what_csr_would_weigh(llama: Path, tmp_path: Path) -> None:
    assert spformat("convert", llama, tmp_path / "small").returncode == 0
    done = spformat("convert", tmp_path / "small", tmp_path / "dense", "--to", "dense")
    total = next(line for line in done.stdout.splitlines() if line.startswith("291 tensors"))
    assert total.endswith("-> 656.06 KiB (1.60x); dense 656.06 KiB"), total
    tree = json.loads(
        spformat("convert", tmp_path / "small", tmp_path / "d2", "--to", "dense", "--json").stdout
    )  # nonzeros are not counted on the way to dense
    assert (tree["bytes_csr"], tree["bytes_dense"]) == (None, tree["bytes_out"])


def test_validate_says_once_what_is_wrong_with_many_layers(llama: Path) -> None:
    code, lines = terminal("validate", llama, "--expect", "vector-nm:n=2,m=8,vector_length=8")
    text = " ".join(lines)
    assert code == 1
    assert len(lines) <= 50
    assert "model.layers.0-31.self_attn.q_proj.weight x 32" in lines
    assert text.count("To drop the smallest vectors") == 1
    _, lines = terminal("validate", llama, "--expect", "vector-nm:n=2,m=8,vector_length=8", "--long", columns=400)
    assert sum("q_proj.weight" in line for line in lines) == 32
    _, lines = terminal("validate", llama, "--verbose", columns=200)
    assert sum("q_proj.weight" in line for line in lines) == 1
    assert "ok" in lines[1].split()


def test_bench_without_kernels_says_what_to_install_before_it_measures() -> None:
    code = (
        "import sys; sys.modules['numba'] = None; sys.argv[0] = 'spformat'; from spformat_cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "bench", str(DIGITS), "-n", "4", "--device", "cpu"]
    r = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (r.returncode, r.stdout) == (69, ""), r.stdout
    assert "numba is not installed: pip install 'spformat[cpu]'" in r.stderr


def test_a_link_is_answered_with_the_command_that_follows_it(tmp_path: Path) -> None:
    """Here of a cache under another name; what the links of others lead to is a file of their repository."""
    snapshot, blobs = (tmp_path / "a-cache" / name for name in ("snapshots/abc", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_bytes(DIGITS.read_bytes())
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    r = spformat("inspect", snapshot, cwd=tmp_path)
    hint = next(line for line in r.stderr.splitlines() if line.startswith("hint: "))
    assert hint == f"hint: spformat inspect {snapshot} --follow-symlinks {tmp_path / 'a-cache'}"
    assert spformat(*hint.split()[2:], cwd=tmp_path).returncode == 0


def test_explain_for_a_gpu_is_about_the_gpu(tmp_path: Path) -> None:
    sf.save(tmp_path / "w.safetensors", {"w": sf.convert(np.tri(64, dtype=np.float16), "csr")})
    r = spformat("explain", tmp_path / "w.safetensors", "--gpu", "H100")
    assert "cuda.spmm_csr" in r.stdout
    assert "cpu." not in r.stdout
    assert "reference." not in r.stdout
    assert (
        "cpu.spmm_csr: operands are on cuda"
        in spformat("explain", tmp_path / "w.safetensors", "--gpu", "90", "-l").stdout
    )


@pytest.mark.parametrize(("load", "warned"), [(0.1, False), (64.5, True)])
def test_bench_on_a_busy_machine_says_so(monkeypatch: pytest.MonkeyPatch, load: float, warned: bool) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    flags = ("-n", "2", "--device", "cpu", "--repeats", "1", "--limit", "1")
    answer = command("bench", DIGITS, *flags)
    assert answer.code == 0
    assert ("load 64.5 on" in answer.err) == warned, answer.err


def test_env_has_units() -> None:
    memory = next(line for line in spformat("env").stdout.splitlines() if line.startswith("memory: "))
    assert memory.endswith(" GiB")
    assert isinstance(json.loads(spformat("env", "--json").stdout)["memory"], int)


def test_a_refused_conversion_leaves_no_empty_folder(tmp_path: Path) -> None:
    assert spformat("convert", DIGITS, tmp_path / "new", "--to", "two-four").returncode == 3
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()  # a folder that was there stays
    assert spformat("convert", DIGITS, tmp_path / "mine", "--to", "two-four").returncode == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_an_excluded_tensor_of_a_packed_checkpoint_is_not_pruned(tmp_path: Path) -> None:
    w = {name: np.random.default_rng(3).standard_normal((8, 8)).astype(np.float32) for name in ("in.w", "out.w")}
    save_file(w, tmp_path / "m.safetensors")
    assert spformat("convert", tmp_path / "m.safetensors", tmp_path / "packed", "--to", "csr").returncode == 0
    flags = ("--to", "dense", "--prune", "magnitude", "--sparsity", "0.5", "--exclude", "in.w")
    done = spformat("convert", tmp_path / "packed", tmp_path / "dense", *flags)
    assert done.returncode == 0, done.stderr
    with sf.safe_open(tmp_path / "dense" / "model.safetensors") as f:
        assert np.array_equal(f.array("in.w"), w["in.w"])
        assert np.count_nonzero(f.array("out.w")) == 32
