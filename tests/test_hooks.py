"""What formats say of themselves to the layers above: the pattern to prune to, what fits, how many bytes it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import CASES, params_of

import spformat as sf
from spformat.checkpoint.recipe import Recipe
from spformat.checkpoint.tensor_plans import prune
from spformat.formats import Format, registered, spec_text
from spformat.preprocess import masks
from spformat.preprocess.structure import analyse

EVERY = [(f, p) for f in registered() for p in params_of(f.name)]
IDS = [spec_text(f, p) for f, p in EVERY]


@pytest.mark.parametrize(("fmt", "params"), EVERY, ids=IDS)
def test_a_matrix_pruned_to_the_pattern_fits(fmt: type[Format], params: dict[str, Any]) -> None:
    x = np.random.default_rng(0).integers(1, 9, (37, 70)).astype(np.float16)
    pattern = fmt.pattern(fmt.resolve_params(params))
    kept = masks.apply(x, masks.of_pattern(x, pattern, 0.5))
    a = fmt.from_dense(kept, **params)
    np.testing.assert_array_equal(a.to_dense(), kept)
    recipe = Recipe(to=spec_text(fmt, params), prune="magnitude", sparsity=0.5)
    np.testing.assert_array_equal(prune(x, recipe.to, recipe), kept)


@pytest.mark.parametrize(("fmt", "params"), EVERY, ids=IDS)
def test_what_counts_prove_to_fit_converts_and_takes_the_bytes_they_say(
    fmt: type[Format], params: dict[str, Any]
) -> None:
    proved = 0
    for make in CASES.values():
        x = make("float16")
        counts, resolved = analyse(x), fmt.resolve_params(params)
        if fmt.fits(counts, resolved):
            a = fmt.from_dense(x, **params)  # no StructureError
            size = fmt.bytes_of(counts, resolved)
            assert size is None or size == a.nbytes
            proved += 1
    asked = fmt.pattern(fmt.resolve_params(params))
    assert proved or (isinstance(asked, masks.Vectors) and (asked.m, asked.length) not in analyse(x).window_max)


def test_every_candidate_converts_and_takes_the_bytes_it_says() -> None:
    seen = set()
    for make in CASES.values():
        x = make("bfloat16")
        s = analyse(x)
        for text in s.candidates():
            a = sf.convert(x, text)
            assert s.nbytes(text) in (None, a.nbytes), text
            seen.add(a.name)
        assert sf.convert(x, s.smallest()).nbytes == min(s.sizes().values())
    assert seen == {f.name for f in registered()} - {"csc", "coo"}  # which are chosen by name alone


def test_of_equal_sizes_the_simpler_format_is_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.eye(8, dtype=np.float32)
    s = analyse(x)
    ranks = {f.name: f.tie_rank for f in registered()}
    order = [ranks[text.partition(":")[0]] for text in s.candidates()]
    assert order == sorted(order)
    for f in registered():
        monkeypatch.setattr(f, "bytes_of", classmethod(lambda cls, counts, params: 7))
    assert s.smallest() == "dense"
