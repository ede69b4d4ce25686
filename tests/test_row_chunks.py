"""Conversion in row chunks: the same bytes as of whole matrices, the same refusals, far less memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hostile
import ml_dtypes
import numpy as np
import pytest

import spformat as sf
from spformat import limits
from spformat.arrays import threads
from spformat.checkpoint import Recipe, convert_checkpoint, row_chunks, shard, sizing
from spformat.errors import IntegrityError, LimitError, StructureError, UsageError
from spformat.formats import registered
from spformat.storage import crc, output
from spformat.storage.filewriter import create, outline

SHAPES = [(1, 1), (65, 70), (200, 37), (97, 260)]
TARGETS = (
    "two-four", "two-four:meta_order=logical", "two-four:meta_order=fragment", "two-four:meta_order=cutlass-sm80",
    "bitmask", "csr", "bsr:blocksize=8x16", "sr-bcrs:vector_length=3,stride=4", "vector-nm:n=2,m=4,vector_length=1",
    "ell-buckets", "dbsr:blocksize=16x8",
)  # fmt: skip
WHOLE = (
    "two-four:meta_order=cutlass-sm80", "vector-nm:n=2,m=4,vector_length=1", "ell-buckets", "dbsr:blocksize=16x8",
)  # fmt: skip
"""Those without row chunks."""


def two_four(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Random bf16 of at most two in four, with zeros of both signs, empty rows and an empty stretch of blocks."""
    rng = np.random.default_rng(seed)
    groups = -(-shape[1] // 4)
    keep = rng.random((shape[0], groups, 4)).argsort(axis=2) < 2
    held = keep.reshape(shape[0], -1)[:, : shape[1]] & (rng.random(shape) < 0.7)
    held[shape[0] // 3 : shape[0] // 2] = False
    bits = np.where(held, rng.integers(1, 0x7F80, shape), np.where(rng.random(shape) < 0.1, 0x8000, 0))
    return bits.astype(np.uint16).view(ml_dtypes.bfloat16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Matrices of several shapes, one of them without rows, between vectors that are kept."""
    tensors: dict[str, np.ndarray] = {"empty": np.zeros((0, 8), ml_dtypes.bfloat16)}
    for i, shape in enumerate(SHAPES):
        tensors[f"layers.{10 - i}.weight"] = two_four(shape, i)
        tensors[f"layers.{10 - i}.bias"] = np.arange(shape[0], dtype=np.float32)
    sf.save_dense(tmp_path / "dense.safetensors", tensors)
    return tmp_path / "dense.safetensors"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows a chunk, three threads, and output pages that leave the cache."""
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(threads, "cores", lambda: 3)
    monkeypatch.setattr(output, "_KEPT_IN_CACHE", 0)
    monkeypatch.setattr(output, "_IN_FLIGHT", 3000)
    monkeypatch.setattr(output, "_TOGETHER", 1)


@pytest.mark.parametrize("kept", [0, 1 << 20], ids=["nothing held", "held"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_same_bytes_as_of_wholes(
    target: str, kept: int, source: Path, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "_MOST_IN_MEMORY", kept)
    got = convert_checkpoint(source, tmp_path / "chunks.safetensors", target)
    with monkeypatch.context() as m:
        m.setattr(shard, "plan_chunks", lambda job, recipe: None)
        wanted = convert_checkpoint(source, tmp_path / "wholes.safetensors", target)
    assert (tmp_path / "chunks.safetensors").read_bytes() == (tmp_path / "wholes.safetensors").read_bytes()
    assert got.outcomes == wanted.outcomes
    sf.load(tmp_path / "chunks.safetensors")  # every checksum


def test_most_formats_go_in_row_chunks(source: Path, small: None) -> None:
    """Without this the test above could compare two runs without row chunks."""
    from spformat.checkpoint.source import open_source
    from spformat.checkpoint.tensor_plans import plan_tensors

    counts = {}
    for target in TARGETS:
        recipe = Recipe(to=target)
        cuts = [row_chunks.plan_chunks(j, recipe) for j in plan_tensors(open_source(source), recipe)]
        counts[target.replace(":meta_order=", " ").partition(":")[0]] = sum(c.count for c in cuts if c)
    whole = {"two-four cutlass-sm80": 0, "vector-nm": 0, "ell-buckets": 0, "dbsr": 0}
    assert counts == {**dict.fromkeys(counts, pytest.approx(40, abs=30)), **whole}


@pytest.mark.parametrize("fmt", registered(), ids=lambda f: f.name)
def test_arrays_of_row_chunks_laid_end_to_end_are_those_of_the_whole(fmt: type[sf.Format]) -> None:
    x = two_four((97, 260), 5)
    params = fmt.resolve_params({"n": 2, "m": 4, "vector_length": 1} if fmt.name == "vector-nm" else {})
    layout = fmt.row_chunks(params)
    if layout is None:
        return
    whole, step = fmt.from_dense(x, **params), 2 * layout.rows
    parts = [fmt.from_dense(x[i : i + step], **params).arrays() for i in range(0, x.shape[0], step)]
    assert len(parts) > 1
    for name, a in whole.arrays().items():
        if name in layout.pointers:
            lengths = np.concatenate([np.diff(p[name]) for p in parts])
            np.testing.assert_array_equal(np.diff(a), lengths)
        else:
            np.testing.assert_array_equal(a.view(np.uint8), np.concatenate([p[name] for p in parts]).view(np.uint8))


def test_a_refusal_counts_the_whole_matrix(small: None, tmp_path: Path) -> None:
    x = two_four((97, 260), 1)
    x[60, 4:7] = x[90, 40:43] = x[90, 44:48] = 1
    x[60, 7] = 0
    sf.save_dense(tmp_path / "dense.safetensors", {"a": two_four((97, 260), 2), "w": x})
    with pytest.raises(StructureError, match=r"two-four: 3 group\(s\).* first: row 60, group 1 ") as e:
        convert_checkpoint(tmp_path / "dense.safetensors", tmp_path / "out.safetensors", "two-four")
    assert e.value.fields["tensor"] == "w"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense.safetensors"]


@pytest.mark.parametrize("target", [t for t in TARGETS if t not in WHOLE])
def test_a_tensor_larger_than_the_memory_budget_is_converted_in_row_chunks(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There and back, in row chunks that shrink with the budget; the bytes are those of a run without one."""
    x = two_four((3000, 260), 3)
    codes, dense, rooms = x.view(np.uint16), tmp_path / "dense.safetensors", []
    sf.save_dense(dense, {"w": x})
    room = row_chunks.Team.buffers

    def noted(team: row_chunks.Team, arrays: Iterable[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
        rooms.extend(out := room(team, arrays))
        return out

    monkeypatch.setattr(row_chunks.Team, "buffers", noted)
    a, b, back = (tmp_path / f"{name}.safetensors" for name in ("a", "b", "back"))
    for budget in (x.nbytes // 4, x.nbytes // 50):
        rooms.clear()
        with limits.using(memory=budget):
            convert_checkpoint(dense, a, target, force=True)
            convert_checkpoint(a, back, "dense", force=True)
        assert len(rooms) > x.nbytes // budget
        assert budget // 8 < max(r.nbytes for r in rooms) <= budget
        with sf.safe_open(back) as f:
            np.testing.assert_array_equal(f.array("w").view(np.uint16), np.where(codes == 0x8000, 0, codes))
    convert_checkpoint(dense, b, target)
    assert a.read_bytes() == b.read_bytes()
    with limits.using(memory=200), pytest.raises(LimitError, match=r"w: .* row\(s\), the smallest row chunk") as e:
        convert_checkpoint(dense, tmp_path / "c.safetensors", target)
    least = e.value.value
    with limits.using(memory=least):
        convert_checkpoint(dense, tmp_path / "c.safetensors", target)
    assert (tmp_path / "c.safetensors").read_bytes() == b.read_bytes()


@pytest.mark.parametrize("target", WHOLE)
def test_a_format_without_row_chunks_is_refused_over_the_budget(target: str, tmp_path: Path) -> None:
    x = two_four((3000, 260), 3)
    sf.save_dense(tmp_path / "dense.safetensors", {"w": x})
    with limits.using(memory=x.nbytes // 4), pytest.raises(LimitError, match="--max-memory"):
        convert_checkpoint(tmp_path / "dense.safetensors", tmp_path / "a.safetensors", target)


def test_the_threads_of_a_team_share_no_memory_and_run_alone() -> None:
    with limits.using(memory=12345), row_chunks.Team() as team:

        def task(i: int) -> tuple[int, int | None, bool]:
            (room,) = team.buffers([((4, 4), np.dtype(np.uint16))])
            room[:] = i
            seen: list[int] = []
            threads.run(seen.append, 3)
            return int(room.sum()), limits.current().memory, seen == [0, 1, 2]

        found = list(team.results((lambda i=i: task(i)) for i in range(100)))
    assert found == [(16 * i, 12345, True) for i in range(100)]


def test_a_file_cut_while_it_is_read_is_noticed(source: Path, tmp_path: Path) -> None:
    with sf.safe_open(source) as f:
        room = np.empty((10, 37), ml_dtypes.bfloat16)
        f.read_rows("layers.8.weight", 5, room)
        np.testing.assert_array_equal(room.view(np.uint16), f.array("layers.8.weight").view(np.uint16)[5:15])
        with pytest.raises(UsageError, match="bytes"):
            f.read_rows("layers.8.weight", 191, room)
        with pytest.raises(UsageError, match="rows of BF16"):
            f.read_rows("layers.8.weight", 0, room[:, :36])
        source.write_bytes(source.read_bytes()[:-1])
        with pytest.raises(IntegrityError):
            f.read_rows("layers.8.weight", 5, room)


def test_parts_must_cover_an_array_once(tmp_path: Path) -> None:
    x = np.arange(60, dtype=np.int32).reshape(20, 3)

    def write(*rows: tuple[int, int]) -> bytes:
        with create(tmp_path / "x.safetensors", [outline("x", x)], overwrite=True) as out:
            for begin, end in rows:
                out.put_part("x", "", begin, x[begin:end])
        return (tmp_path / "x.safetensors").read_bytes()

    sf.save(tmp_path / "whole.safetensors", {"x": x})
    assert write((7, 20), (0, 5), (5, 7)) == (tmp_path / "whole.safetensors").read_bytes()
    for rows in ([(0, 5), (6, 20)], [(0, 19)], [(0, 12), (10, 20)], [(1, 20)], [(0, 20), (0, 20)]):
        with pytest.raises(UsageError, match="commit"):
            write(*rows)
    with pytest.raises(UsageError, match="put_part: expected bytes"), create(tmp_path / "y", [outline("x", x)]) as out:
        out.put_part("x", "", 18, x[:3])
    with (
        pytest.raises(UsageError, match="put_part: expected entries"),
        create(tmp_path / "y", [outline("x", x)]) as out,
    ):
        out.put_part("x", "", 0, x[:, :2])
    assert not (tmp_path / "y").exists()


def test_advice_that_fails_is_only_advice(
    source: Path, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_checkpoint(source, tmp_path / "a.safetensors", "bitmask")
    calls = []

    def refuse(fd: int, offset: int, length: int, advice: int) -> None:
        calls.append((offset, length))
        raise OSError(95, "not supported")

    monkeypatch.setattr(output.os, "posix_fadvise", refuse)
    convert_checkpoint(source, tmp_path / "b.safetensors", "bitmask")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert len(calls) > len(set(calls))  # each once to start its way, and older ones again to leave the cache


def test_crc_of_uneven_parts() -> None:
    import zlib

    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes()
    for at in (1, 17, 4096, 9999):
        assert crc.combine(zlib.crc32(data[:at]), zlib.crc32(data[at:]), 10_000 - at) == zlib.crc32(data)


@pytest.mark.parametrize("target", TARGETS)
def test_the_way_back_in_row_chunks(
    target: str, source: Path, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file as without row chunks; and either way each flipped byte of each array is reported with its tensor."""
    packed, back = tmp_path / "packed.safetensors", tmp_path / "back.safetensors"
    convert_checkpoint(source, packed, target)
    got = convert_checkpoint(packed, back, "dense")
    raw = back.read_bytes()
    with monkeypatch.context() as m:
        m.setattr(shard, "chunk_decoder", lambda f, job: None)
        wanted = convert_checkpoint(packed, back, "dense", force=True)
    assert (raw, got.outcomes) == (back.read_bytes(), wanted.outcomes)
    back.unlink()
    with sf.safe_open(packed) as f:
        places = [(name, *place) for name in f for place in f.ranges(name)]
    whole = packed.read_bytes()
    for name, begin, end in places:
        if begin == end:
            continue
        for value in (whole[end - 1] ^ 0x80, whole[end - 1] ^ 1):
            packed.write_bytes(whole[: end - 1] + bytes([value]) + whole[end:])
            with pytest.raises(IntegrityError) as e:
                convert_checkpoint(packed, back, "dense")
            assert e.value.fields["tensor"] == name
            assert not back.exists()


@pytest.mark.parametrize("target", ["csr", "bitmask", "bsr:blocksize=8x16", "sr-bcrs"])
def test_a_valid_checksum_of_wrong_contents(target: str, small: None, tmp_path: Path) -> None:
    """Contents are validated in row chunks, too, and a pointer is validated before it is used."""
    a = sf.convert(two_four((97, 260), 4), target)
    for name, change in (("indptr", -1), ("indptr", 1000), ("data", None)):
        wrong = {name: getattr(a, name).copy()}
        if change is None:
            wrong[name].reshape(-1).view(np.uint16)[5:6] = 0x8000 if target != "csr" else 0
        else:
            wrong[name][40 // (1 if target in ("csr", "bitmask") else 8)] += change
        if target == "csr" and change is None:
            continue  # stored zeros are allowed there
        broken = a.with_arrays(**wrong)
        object.__setattr__(broken, "_marked", True)
        sf.save(tmp_path / "x.safetensors", {"w": broken}, overwrite=True)
        with pytest.raises(sf.errors.FormatError) as told:
            sf.load(tmp_path / "x.safetensors")
        with pytest.raises(sf.errors.FormatError) as e:
            convert_checkpoint(tmp_path / "x.safetensors", tmp_path / "y.safetensors", "dense")
        assert str(e.value) == str(told.value)
        assert not (tmp_path / "y.safetensors").exists()


@pytest.mark.parametrize("target", ["csr", "bitmask", "bsr:blocksize=8x16", "sr-bcrs"])
@pytest.mark.parametrize("kind", ["longer", "shorter", "empty", "int64", "float32", "two dimensions"])
def test_a_pointer_of_another_length_or_type_is_refused_as_when_it_is_loaded(
    target: str, kind: str, small: None, tmp_path: Path
) -> None:
    """The conversion to dense read as many entries as there are rows, and accepted whatever else there was."""

    def changed(pointer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if kind == "longer":
            return np.append(pointer, pointer[-1:])
        if kind == "shorter":
            return np.append(pointer[:4], pointer[-1:])
        if kind == "empty":
            return pointer[:0]
        return pointer[:, None] if kind == "two dimensions" else pointer.astype(kind)

    path, dense = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    sf.save(path, {"w": sf.convert(two_four((97, 260), 4), target)})
    hostile.rewrite(path, hostile.change("indptr", changed))
    with pytest.raises(sf.errors.FormatError) as told:
        sf.load(path)
    with pytest.raises(sf.errors.FormatError) as e:
        convert_checkpoint(path, dense, "dense")
    assert str(e.value) == str(told.value)
    assert not dense.exists()
