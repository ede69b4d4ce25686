"""Small holes found from outside: names that lead outside, leaked descriptors, epilogues of BLAS, warnings of numpy."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command
from test_parts import SINGLE, tree, whole

import spformat as sf
from spformat.checkpoint import Part, Recipe, Rule, convert_checkpoint, merge_parts, open_source, plan_tensors
from spformat.storage import output


def folder_with_index(tmp_path: Path, **more: Any) -> Path:
    for i, name in enumerate("ab", 1):
        sf.save_dense(tmp_path / f"model-{i:05}-of-00002.safetensors", {name: np.eye(4, dtype=np.float32)})
    weights = {name: f"model-{i:05}-of-00002.safetensors" for i, name in enumerate("ab", 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights, **more}))
    return tmp_path


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("more", [{"x": "\ud800"}, {"\ud800": 1}, {"x": {"y": ["\udfff"]}}, {"x": nested(900)}])
def test_an_index_whose_other_keys_we_could_not_read_again_is_refused(tmp_path: Path, more: Any) -> None:
    (model := tmp_path / "m").mkdir()
    folder_with_index(model, **more)
    for to in ("csr", "dense"):
        answer = command("convert", model, tmp_path / to, "--to", to)
        assert answer.code == 65, answer
    assert "index" in answer.err


def test_an_index_with_deep_keys_goes_there_and_back(tmp_path: Path) -> None:
    (model := tmp_path / "m").mkdir()
    folder_with_index(model, x=nested(100), y={"é": "\U0001f600"})
    convert_checkpoint(model, tmp_path / "packed", "csr")
    convert_checkpoint(tmp_path / "packed", tmp_path / "dense", "dense")
    index = open_source(tmp_path / "dense").index
    assert (index["x"], index["y"]) == (nested(100), {"é": "\U0001f600"})


def test_pieces_that_lead_outside_are_refused(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.mkdir()
    (outside / "kept").write_text("of somebody else")
    (out / "spformat.pieces").symlink_to(outside)
    with pytest.raises(sf.errors.OutputError, match=r"spformat\.pieces: expected a folder of pieces"):
        convert_checkpoint(SINGLE, out, "csr", part="1/3")
    assert tree(outside).keys() == {"kept"}


def test_foreign_files_among_the_pieces_stay(tmp_path: Path) -> None:
    out, expected = tmp_path / "out", whole(tmp_path, SINGLE, "csr")
    (out / "spformat.pieces").mkdir(parents=True)
    (out / "spformat.pieces" / "notes.txt").write_text("of somebody else")
    for i in (1, 2, 3):
        convert_checkpoint(SINGLE, out, "csr", part=Part(i, 3))
    merge_parts(out)
    left = tree(out)
    assert left.pop("spformat.pieces/notes.txt")
    assert left == expected


def test_a_file_that_is_read_without_a_block_is_closed(tmp_path: Path) -> None:
    sf.save_dense(tmp_path / "a", {"w": np.eye(4, dtype=np.float32)})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        sf.safe_open(tmp_path / "a")["w"]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_most_buckets_can_be_saved(tmp_path: Path) -> None:
    x = np.eye(64, dtype=np.float32)
    a = sf.convert(x, "ell-buckets", column_parts=1024, max_width=2**20)
    sf.save(tmp_path / "a", {"w": a})
    np.testing.assert_array_equal(sf.load(tmp_path / "a")["w"].to_dense(), x)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_alpha_zero_does_not_read_the_operands(backend: str) -> None:
    """As in BLAS: infinities and NaN of A and B do not come into C."""
    if sf.backends.get(backend).missing():
        pytest.skip(f"{backend} is not here")
    a = sf.convert(np.array([[np.inf, 0], [0, np.nan]], np.float32), "csr")
    B, C = np.full((2, 3), np.inf, np.float32), np.full((2, 3), 4, np.float32)
    got = sf.spmm(a, B, out=C.copy(), backend=backend, alpha=0.0, beta=0.5, bias=np.array([1, 2], np.float32))
    np.testing.assert_array_equal(got, [[3] * 3, [4] * 3])


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["csr", "two-four", "vector-nm", "bitmask"])
def test_alpha_zero_in_a_pass_of_its_own_on_a_gpu(fmt: str) -> None:
    import cupy

    from spformat.backends.cuda.runtime.epilogue import with_epilogue
    from spformat.dispatch.api import plan

    x = np.zeros((64, 64), np.float16)
    x[:, ::4] = np.inf
    params = {"n": 1, "m": 4, "vector_length": 32} if fmt == "vector-nm" else {}
    a, B = sf.convert(x, fmt, **params).to("cuda"), cupy.ones((64, 32), cupy.float16)
    product = plan(a, 32, backend="cuda")
    C = cupy.full((64, 32), 4, cupy.float16)
    with_epilogue(product, dataclasses.replace(product.problem, epilogue=True)).run(B, C, 0.0, 0.5, None)
    assert cupy.asnumpy(C).tolist() == np.full((64, 32), 2).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3, 100])
@pytest.mark.parametrize("fmt", ["csr", "two-four", "vector-nm", "bitmask"])
def test_alpha_zero_in_every_kernel_on_a_gpu(fmt: str, n: int) -> None:
    import cupy

    x = np.zeros((64, 64), np.float16)
    x[:, ::4] = np.inf
    params = {"n": 1, "m": 4, "vector_length": 32} if fmt == "vector-nm" else {}
    a, B = sf.convert(x, fmt, **params).to("cuda"), cupy.full((64, n), np.inf, cupy.float16)
    problem = dataclasses.replace(sf.plan(a, B=B).problem, epilogue=True)
    names = [r.kernel for r in sf.explain(problem, installed=True).answers if r]
    assert names
    for name in names:
        C = cupy.full((64, n), 4, cupy.float16)
        sf.spmm(a, B, out=C, backend=name, alpha=0.0, beta=0.5)
        assert (cupy.asnumpy(C) == 2).all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("fmt", ["two-four", "bsr", "vector-nm", "bitmask", "sr-bcrs"])
def test_a_product_into_a_part_of_an_array_leaves_the_rest_alone(fmt: str, layout: str) -> None:
    """The lines of C start on 16-byte boundaries but do not end on one, where the copy engine writes too much."""
    import cupy

    M, K, n = 1100, 512, 125
    x = np.zeros((M, K), np.float16)
    x[:, ::4] = np.random.default_rng(1).integers(1, 4, (M, K // 4))
    params = {"vector-nm": {"n": 1, "m": 4, "vector_length": 128}, "bsr": {"blocksize": (64, 64)}}.get(fmt, {})
    a = sf.convert(x, fmt, **params).to("cuda")
    B = cupy.ones((K, n + 3), cupy.float16)[:, :n] if layout == "row" else cupy.ones((n, K), cupy.float16).T
    whole = cupy.full((M, 128) if layout == "row" else (n, 1104), 7, cupy.float16)
    C = whole[:, :n] if layout == "row" else whole[:, :M].T
    wanted = x.astype(np.float32).sum(1)[:, None]
    names = [r.kernel for r in sf.explain(sf.plan(a, B=B, out=C).problem, installed=True).answers if r]
    assert len(names) > 1
    for name in names:
        whole.fill(7)
        sf.spmm(a, B, out=C, backend=name)
        assert (cupy.asnumpy(C) == wanted).all(), name
        rest = whole[:, n:] if layout == "row" else whole[:, M:]
        assert (cupy.asnumpy(rest) == 7).all(), f"{name} wrote behind C"


def test_alpha_makes_an_overflow_finite_again() -> None:
    from spformat.backends.host import with_epilogue
    from spformat.dispatch.api import plan

    a = sf.convert(np.full((1, 4), 1e38, np.float32), "csr")
    B = np.ones((4, 2), np.float32)
    product = plan(a, 2, backend="reference")
    two_pass = with_epilogue(product, product.problem)
    got = two_pass.run(B, np.zeros((1, 2), np.float32), 0.25, 0.0, None)
    np.testing.assert_allclose(got, 1e38, rtol=1e-6)


def test_tiles_of_a_product_are_within_the_budget() -> None:
    """Of 33 columns of float32, tiles of 32 take 25.6 MB at a time."""
    if sf.backends.get("cpu").missing():
        pytest.skip("the cpu backend is not here")
    K = 200_000
    a, B = sf.convert(np.eye(4, K, dtype=np.float32), "csr"), np.ones((K, 33), np.float32)
    sf.spmm(a, B, backend="cpu")
    for columns, budget in ((33, 20_000_000), (17, 10_000_000)):  # of 17 columns, 16 are copied at a time
        few = B[:, :columns]
        with sf.limits.using(memory=budget), pytest.raises(sf.errors.LimitError, match="tiles of a product on the CPU"):
            sf.spmm(a, few, backend="cpu")


def test_the_reference_gives_no_warnings() -> None:
    a = sf.convert(np.array([[np.inf, 1e308], [-np.inf, 1]], np.float64), "csr")
    B = np.array([[np.inf, 1], [np.nan, 1e308]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for alpha in (1.0, 0.5):
            sf.spmm(a, B, backend="reference", alpha=alpha)


def test_a_full_disk_leaves_finished_files_and_the_error_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model := tmp_path / "model").mkdir()
    folder_with_index(model)
    reserve, shards = output._allocate, list[int]()

    def fails_at_the_second_shard(fd: int, size: int) -> None:
        if size in shards:
            raise OSError(errno.ENOSPC, "No space left on device")
        shards.append(size)  # journals have other sizes
        reserve(fd, size)

    monkeypatch.setattr(output, "_allocate", fails_at_the_second_shard)
    stopped = command("convert", model, tmp_path / "out", "--to", "csr")
    assert stopped.code == 74
    assert "out has 1 finished file, and a journal: when that is mended, --resume goes on" in stopped.err
    monkeypatch.undo()
    assert command("convert", model, tmp_path / "out", "--to", "csr", "--resume").code == 0


@pytest.mark.parametrize("name", ["out.pt", "out.BIN", "out.npz", "out.npy"])
def test_a_folder_does_not_get_the_name_of_another_kind_of_file(tmp_path: Path, name: str) -> None:
    model = folder_with_index(tmp_path)
    with pytest.raises(sf.errors.UsageError, match=r"expected a folder, or one file ending in \.safetensors, got \."):
        convert_checkpoint(model, tmp_path / name, "csr")
    assert not (tmp_path / name).exists()


def test_a_folder_without_shards_is_answered_with_one_below_that_has_some(tmp_path: Path) -> None:
    for below in ("unet", "snapshots/c0ffee"):
        (tmp_path / "model" / below).mkdir(parents=True)
        sf.save_dense(tmp_path / "model" / below / "model.safetensors", {"w": np.eye(4, dtype=np.float32)})
        answer = command("inspect", tmp_path / "model")
        assert (answer.code, f"{below} has some: name {tmp_path / 'model' / below} instead" in answer.err) == (66, True)
        assert command("inspect", tmp_path / "model" / below).code == 0
        (tmp_path / "model" / below / "model.safetensors").unlink()


def test_hidden_files_are_no_shards(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (folder_with_index(model) / "model.safetensors.index.json").unlink()
    (model / "._model-00001-of-00002.safetensors").write_bytes(b"Mac OS X        ")
    (model / ".copy.safetensors").write_bytes((model / "model-00001-of-00002.safetensors").read_bytes())
    assert list(open_source(model).records) == ["a", "b"]
    convert_checkpoint(model, tmp_path / "out", "csr")
    assert not list((tmp_path / "out").glob(".*"))
    (model / "a b.safetensors").write_bytes(b"")
    with pytest.raises(sf.errors.PathError, match=r"got 'a b\.safetensors'; rename the file") as e:
        open_source(model)
    assert e.value.path == str(model)


@pytest.mark.parametrize("to", [" dense", "dense ", "dense:", "\tdense\n"])
def test_blanks_around_a_target_do_not_make_a_dense_checkpoint_a_packed_one(tmp_path: Path, to: str) -> None:
    (model := tmp_path / "model").mkdir()
    folder_with_index(model)
    convert_checkpoint(model, tmp_path / "out", to)
    assert command("convert", model, tmp_path / "by-command", "--to", to).code == 0
    for out in ("out", "by-command"):
        assert {p.name for p in (tmp_path / out).iterdir()} == {p.name for p in model.iterdir()}
    assert Recipe(rules=["*= csr "], misfit=" keep").rules == (Rule("*", "csr"),)  # type: ignore[arg-type]


def test_one_pattern_or_rule_may_stand_for_a_list(tmp_path: Path) -> None:
    source = open_source(folder_with_index(tmp_path))
    for recipe in (Recipe("csr", include="a"), Recipe("csr", exclude=["b"]), Recipe("keep", rules="a=csr")):  # type: ignore[arg-type]
        assert [plan.target for plan in plan_tensors(source, recipe)] == ["csr", "keep"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recipe": {"to": "csr"}}, "recipe: expected a Recipe"), ({"recipe": None}, "recipe: expected a Recipe"),
        ({"part": (1, 2)}, "part: expected a text i/n"), ({"executor": "threads"}, "executor: expected one of"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(sf.errors.UsageError, match=text):
        convert_checkpoint(folder_with_index(tmp_path), tmp_path / "out", **options)
    for field, value in (("to", 5), ("misfit", None), ("include", None), ("rules", {"a": "csr"}), ("rules", ["a"])):
        with pytest.raises(sf.errors.UsageError, match=rf"^({'target' if field == 'to' else field[:4]})"):
            Recipe(**{field: value})  # type: ignore[arg-type]
