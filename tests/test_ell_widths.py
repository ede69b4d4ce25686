"""ELL buckets of other widths than 1, 2, 4, .., and of a single one; ``test_golden`` has their arrays by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import laws
import numpy as np
import pytest
from cases import CASES

import spformat as sf
from spformat.formats import by_name, parse_spec, spec_text
from spformat.formats.ell_buckets import ELLBuckets
from spformat.preprocess.structure import analyse
from spformat.products.problem import Problem
from spformat.storage import descriptor
from spformat.storage.stfile import Reader

WIDTHS = ((3, 5, 17), (6,), (1,), (4, 16), (2, 3, 300))


def described(path: Path) -> dict[str, Any]:
    """What the file says of its one matrix."""
    with Reader(path) as f:
        tree: dict[str, Any] = json.loads(f.header.metadata[descriptor.KEY])["tensors"]["w"]
    return tree


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("case", ["prime", "tall", "wide", "one_full_row", "blocks"])
def test_every_row_is_in_the_narrowest_bucket_that_holds_it(case: str, widths: tuple[int, ...]) -> None:
    x = laws.integers(CASES[case]("float32"))
    a = ELLBuckets.from_dense(x, widths=widths)
    lengths = (x != 0).sum(axis=1)
    rows, slots = dict.fromkeys(widths, 0), 0
    for d in lengths[lengths > 0].tolist():
        width = next((w for w in widths if w >= d), widths[-1])
        chunks = -(-d // widths[-1])
        rows[width] += chunks
        slots += chunks * width
    assert (a.rows_per_bucket, a.stored) == (tuple(rows.values()), slots)
    assert (a.widths, a.max_width, a.column_parts) == (widths, widths[-1], 1)
    assert ELLBuckets.bytes_of(analyse(x), a.params()) == a.nbytes
    laws.check_spmm(a, x, "reference", 3, np.random.default_rng(0))
    fmt, given = parse_spec(spec_text(ELLBuckets, a.params()))
    assert fmt.from_dense(x, **given) == a


def test_widths_that_are_powers_of_two_are_those_of_max_width(tmp_path: Path) -> None:
    """One matrix has one form: the file of version 1 that earlier releases read."""
    x = laws.integers(CASES["prime"]("float16"))
    a = sf.convert(x, "ell-buckets", widths=[1, 2, 4])
    assert a == sf.convert(x, "ell-buckets", max_width=4)
    assert (a.params(), a.widths) == ({"column_parts": 1, "max_width": 4}, (1, 2, 4))
    sf.save(tmp_path / "a.safetensors", {"w": a})
    assert {k: described(tmp_path / "a.safetensors")[k] for k in ("version", "params")} == {
        "version": 1, "params": {"column_parts": 1, "max_width": 4},
    }  # fmt: skip
    b = sf.convert(x, "ell-buckets:widths=3x5x17")
    sf.save(tmp_path / "b.safetensors", {"w": b})
    assert {k: described(tmp_path / "b.safetensors")[k] for k in ("version", "params")} == {
        "version": 2, "params": {"column_parts": 1, "max_width": 17, "widths": [3, 5, 17]},
    }  # fmt: skip
    assert sf.load(tmp_path / "b.safetensors")["w"] == b


def test_one_of_the_two_parameters_replaces_the_other() -> None:
    x = laws.integers(CASES["prime"]("float16"))
    a = sf.convert(x, "ell-buckets", widths=(3, 5), column_parts=2)
    assert sf.convert(a, "ell-buckets", widths=(3, 5)) is a
    assert sf.convert(a, "ell-buckets") is a
    assert sf.convert(a, "ell-buckets", max_width=8) == sf.convert(x, "ell-buckets", max_width=8)
    assert sf.convert(sf.convert(x, "ell-buckets", max_width=8), "ell-buckets", widths=7) == sf.convert(
        x, "ell-buckets", widths=(7,)
    )
    for given, text in (
        ({"widths": (5, 3)}, r"widths: expected 1 to 64 ints, ascending, in 1 \.\. 1048576, got \(5, 3\)"),
        ({"widths": ()}, "widths: expected 1 to 64 ints"),
        ({"widths": range(1, 67)}, "widths: expected 1 to 64 ints"),
        ({"widths": (0, 3)}, "widths: expected 1 to 64 ints"),
        ({"widths": (3, 5), "max_width": 8}, "max_width: expected 5, the last of widths, got 8"),
        ({"max_width": 6}, "max_width: expected a power of two, got 6; widths=6 has this width alone"),
    ):
        with pytest.raises(sf.errors.UsageError, match=text):
            sf.convert(x, "ell-buckets", **given)  # type: ignore[arg-type]


def test_the_kernel_of_a_gpu_takes_powers_of_two() -> None:
    """Others run there as a dense copy, and ``explain`` says why."""

    def answers(widths: tuple[int, ...]) -> dict[str, str]:
        params = tuple(ELLBuckets.resolve_params({"widths": widths}).items())
        p = Problem.product("ell-buckets", params, 4096, 4096, 64, 200_000, "float16", "float16", "float16",
                            device="cuda", sm=90)  # fmt: skip
        return {a.kernel: str(a) for a in sf.dispatch.select.ask(p, installed=False).answers}

    assert ": accepted" in answers((4, 16))["cuda.spmm_ell_buckets"]
    refused = answers((3, 4, 17))
    assert refused["cuda.spmm_ell_buckets"].endswith("widths must be powers of two, got 3, 17")
    assert ": accepted" in refused["cuda.expand_then_dense"]


@pytest.mark.parametrize(("target", "name"), [("ell-buckets", "widths"), ("bsr", "blocksize")])
def test_a_generator_is_no_parameter(target: str, name: str) -> None:
    """The first check used it up, and the next one refused it without saying why."""
    x = laws.integers(CASES["prime"]("float16"))
    for call in (lambda given: sf.convert(x, target, **given), lambda given: by_name(target).from_dense(x, **given)):
        with pytest.raises(sf.errors.UsageError, match=rf"{name}: .*, got a generator, .* only once; use a tuple"):
            call({name: (n for n in (1, 4))})
