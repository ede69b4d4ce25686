"""Shell patterns of rules, --include and --exclude are for the whole name of a tensor: what nobody named stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from catalogue import command

import spformat as sf
from spformat.checkpoint import Recipe, Rule, open_source, plan_tensors
from spformat.checkpoint.recipe import included, matcher

NAMES = ("lm_head.weight", "draft.lm_head.weight")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    sf.save_dense(tmp_path / "two.safetensors", {n: rng.normal(size=(64, 64)).astype(np.float16) for n in NAMES})
    return tmp_path / "two.safetensors"


@pytest.mark.parametrize(
    "flags",
    [
        ["--to", "two-four", "--include", NAMES[0]],
        ["--to", "two-four", "--exclude", "draft.*"],
        ["--to", "keep", "--rule", f"{NAMES[0]}=two-four"],
        ["--to", "keep", "--rule", r"re:^lm_head\.=two-four"],
    ],
    ids=" ".join,
)
def test_only_the_tensor_that_is_named_is_pruned(two: Path, tmp_path: Path, flags: list[str]) -> None:
    out = tmp_path / "out.safetensors"
    done = command("convert", two, out, "--prune", "magnitude", *flags)
    assert done.code == 0, done.err
    after = sf.load(out)
    assert np.count_nonzero(after[NAMES[0]].to_dense()) == 64 * 64 // 2
    with sf.safe_open(two) as f:
        np.testing.assert_array_equal(after[NAMES[1]], f.array(NAMES[1]))


@pytest.mark.parametrize("pattern", ["weight", "eight", "lm_head", "lm_head.*t.", "[a-z]", ""])
def test_a_part_of_a_name_matches_nothing(two: Path, tmp_path: Path, pattern: str) -> None:
    for flags in (["--rule", f"{pattern}=csr"], ["--include", pattern], ["--exclude", pattern]):
        r = command("convert", two, tmp_path / "out", "--to", "csr", *flags)
        assert r.code == 2, (flags, r.out)
        assert f"{flags[0]} {pattern!r} matches none of 2 tensors" in r.err
    assert not (tmp_path / "out").exists()
    with pytest.raises(sf.errors.UsageError, match="matches none of 2 tensors"):
        included(NAMES, [pattern])
    with pytest.raises(sf.errors.UsageError, match="matches none of 2 tensors"):
        plan_tensors(open_source(two), Recipe(rules=(Rule(pattern, "csr"),)))


def test_the_pattern_that_a_refusal_names_matches(two: Path, tmp_path: Path) -> None:
    r = command("plan", two, "--to", "keep", "--rule", "head.w*=csr")
    assert r.err.rstrip().endswith("a pattern is of the whole name: '*head.w**'")
    assert command("plan", two, "--to", "keep", "--rule", "*head.w**=csr").code == 0
    empty = command("plan", two, "--exclude", "")
    assert "an empty pattern is that of an empty name, and '*' matches all names" in empty.err


def test_the_expression_that_a_refusal_names_matches(tmp_path: Path) -> None:
    sf.save_dense(tmp_path / "w.safetensors", {"blocks[0](a).weight": np.eye(4, dtype=np.float32)})
    r = command("plan", tmp_path / "w.safetensors", "--to", "csr", "--include", "0](a")
    expression = r.err.rstrip().rpartition("or '")[2].removesuffix("'")
    assert expression.startswith("re:")
    assert command("plan", tmp_path / "w.safetensors", "--to", "csr", "--include", expression).code == 0


def test_names_that_a_shell_pattern_matches() -> None:
    for pattern, name in (("*", ""), ("*", "a\nb"), ("", ""), ("*.w", "a.w"), ("a?c", "abc"), ("[ab].w", "b.w")):
        assert matcher(pattern).search(name), (pattern, name)
    for pattern, name in (("a", "ba"), ("a", "ab"), ("a", "b\na"), ("?", "ab"), ("[ab].w", "c.b.w"), ("", "a")):
        assert not matcher(pattern).search(name), (pattern, name)
    assert matcher("re:b").search("abc")
