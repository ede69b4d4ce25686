"""Sums of parts in checkpoints and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import laws
import numpy as np
from catalogue import command
from test_decompose import matrix

import spformat as sf
from spformat.checkpoint import convert_checkpoint
from spformat.preprocess.coverage import RULES, coverage

ROOT = Path(__file__).parent.parent


def test_dense_to_sums_and_back(tmp_path: Path) -> None:
    """Every verb takes the text; plan says the bytes that convert writes; dense again, the bytes are those of before."""
    rng = np.random.default_rng(0)
    w = {f"layers.{i}.weight": laws.without_negative_zeros(matrix(i, (96, 70), 0.4)) for i in range(3)}
    w["layers.0.weight"][32:64, 32:64] = rng.integers(1, 9, (32, 32))
    source, packed, dense = tmp_path / "model.safetensors", tmp_path / "packed", tmp_path / "dense.safetensors"
    sf.save_dense(source, {**w, "bias": np.ones(3, np.float32)})
    flags = ["--to", "bsr:32x32,density>=0.5+csr", "--rule", "re:layers.2=2:4+csr:column_degree>=30 + bitmask"]
    foreseen = json.loads(command("plan", source, *flags, "--json").out)["tensors"]
    answer = command("convert", source, packed, *flags, "--json")
    assert answer.code == 0, answer.err
    made = json.loads(answer.out)["tensors"]
    assert [t["bytes_out"] for t in foreseen] == [t["bytes_out"] for t in made]
    assert {t["target"] for t in made} == {
        "keep", "bsr:blocksize=32x32,density>=0.5+csr", "two-four:meta_order=ldmatrix+csr:column_degree>=30+bitmask",
    }  # fmt: skip
    loaded = sf.open(packed)
    for name, x in w.items():
        text = flags[1] if "2" not in name else flags[3].partition("=")[2]
        assert loaded[name] == sf.convert(x, text)
        assert next(t["bytes_out"] for t in made if t["name"] == name) == loaded[name].nbytes
    assert loaded["layers.0.weight"].parts[0].nnz == 1024
    assert command("validate", packed, "--checksums", "--expect", "csr").code == 0
    assert command("diff", packed, source).code == 0
    again = command("convert", source, packed, *flags, "--resume", "--json")
    assert json.loads(again.out)["resumed"] == 1
    assert command("convert", packed, dense, "--to", "dense").code == 0
    before, after = (dict(sf.open(p)) for p in (source, dense))
    assert before.keys() == after.keys()
    assert all(laws.same(*(np.asarray(getattr(t[n], "data", t[n])) for t in (before, after))) for n in w)
    assert after["bias"].tolist() == [1, 1, 1]
    assert command("convert", packed, tmp_path / "other", "--to", "two-four+bitmask", "--quiet").code == 0
    assert command("diff", tmp_path / "other", source).code == 0


def test_stacks_of_sums(tmp_path: Path) -> None:
    x = np.stack([matrix(i, (40, 64), 0.5) for i in range(3)])
    sf.save_dense(tmp_path / "m.safetensors", {"experts": x})
    answer = command(
        "convert", tmp_path / "m.safetensors", tmp_path / "out", "--to", "bsr:8x8,density>=0.6+two-four+csr"
    )
    assert answer.code == 0, answer.err
    stack = sf.open(tmp_path / "out")["experts"]
    assert stack == sf.stack(x, "bsr:8x8,density>=0.6+two-four+csr")
    assert [len(w.parts) for w in stack] == [3, 3, 3]
    assert command("diff", tmp_path / "out", tmp_path / "m.safetensors").code == 0


def test_one_matrix_into_one_file(tmp_path: Path) -> None:
    cora, text = ROOT / "fixtures/matrices/cora.npz", "csr:row_length>=16+ell-buckets:max_width=8"
    assert command("convert", cora, tmp_path / "c.safetensors", "--to", text).code == 0
    s = sf.load(tmp_path / "c.safetensors")["cora"]
    assert [p.name for p in s.parts] == ["csr", "ell-buckets"]
    for target in (text, "bsr:2x2+csr"):
        refusal = command("convert", cora, tmp_path / "c.npz", "--to", target)
        assert refusal.code == 2
        assert f"holds csr, csc, coo or bsr, not {target}" in refusal.err


def test_parts_of_a_run_merge_and_misfits_go_elsewhere(tmp_path: Path) -> None:
    x = {f"w{i}": matrix(i, (40, 40), 0.9) for i in range(4)}
    sf.save_dense(tmp_path / "m.safetensors", x)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    convert_checkpoint(tmp_path / "m.safetensors", whole, "bsr:8x8,density>=0.9+csr")
    for part in ("1/2", "2/2"):
        answer = command(
            "convert", tmp_path / "m.safetensors", parts, "--to", "bsr:8x8,density>=0.9+csr", "--part", part
        )
        assert answer.code == 0, answer.err
    assert command("merge", parts).code == 0
    names = [p.name for p in whole.iterdir()]
    assert sorted(names) == sorted(p.name for p in parts.iterdir())
    assert all((whole / n).read_bytes() == (parts / n).read_bytes() for n in names)
    flags = ["--to", "csr:row_length>=39+two-four"]
    refusal = command("convert", tmp_path / "m.safetensors", tmp_path / "no", *flags)
    assert (refusal.code, "sum: part 1: two-four" in refusal.err) == (3, True)
    answer = command("convert", tmp_path / "m.safetensors", tmp_path / "two", *flags, "--misfit", "two-four+csr")
    assert answer.code == 0, answer.err
    assert sf.open(tmp_path / "two")["w0"] == sf.convert(x["w0"], "two-four+csr")


def test_what_exceeds_the_memory_is_refused_as_a_whole(tmp_path: Path) -> None:
    sf.save_dense(tmp_path / "w.safetensors", {"w": np.ones((256, 256), np.float32)})
    answer = command("convert", tmp_path / "w.safetensors", tmp_path / "o", "--to", "bsr+csr", "--max-memory", "200000")
    assert answer.code == 78
    assert "w: sum is converted as a whole, not in row chunks: dense array of shape (256, 256): 262,144" in answer.err


def test_inspect_says_what_the_usual_parts_would_take(tmp_path: Path) -> None:
    for seed, shape in enumerate([(70, 100), (33, 31), (1, 1), (64, 0), (300, 64)]):
        x = matrix(seed, shape, 0.15 + 0.2 * seed)
        x[:40, :40] = 1
        x[64:96, 32:64] = 0
        x[64:80, 32:64] = 1  # half of a block
        shares = coverage(x)
        assert list(shares) == (list(RULES) if x.size else [])
        for rule, share in shares.items():
            assert share == sf.decompose(x, rule, "csr").parts[0].nnz / sf.convert(x, "csr").nnz
    assert coverage(np.zeros((4, 4), np.float32)) == {}
    sf.save_dense(tmp_path / "w.safetensors", {"w": x, "bias": np.ones(3, np.float32)})
    assert command("inspect", tmp_path / "w.safetensors").code == 0
    rows = {t["name"]: t for t in json.loads(command("inspect", tmp_path / "w.safetensors", "--json").out)["tensors"]}
    assert rows["w"]["coverage"] == {rule: round(share, 4) for rule, share in shares.items()}
    assert "coverage" not in rows["bias"]
    assert f"{100 * shares['two-four']:.1f} % two-four" in command("inspect", tmp_path / "w.safetensors", "--long").out
