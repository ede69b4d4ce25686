"""A slice of every campaign, and for each a control: with a check taken out of the product it must find something."""

from __future__ import annotations

import ast
import json
import shutil
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from fuzz import (
    bombs,
    headers,
    interrupts,
    kills,
    mutants,
    oracle,
    readers,
    refusals,
    scenarios,
    score,
    substitutions,
    syscalls,
)
from spformat.arrays import scans
from spformat.checkpoint import folder, manifest
from spformat.errors import ContainerError
from spformat.formats import FORMATS
from spformat.formats.base import Format
from spformat.formats.csr import CSR
from spformat.storage import descriptor, stheader

TRACED = pytest.mark.skipif(bool(syscalls.usable()), reason=syscalls.usable() or "-")

# --- headers


def test_t5_t7_header_and_descriptor_parser() -> None:
    verdicts = headers.blind(15_000, seed=5)
    assert {"accepted", "ContainerError", "DescriptorError", "VersionError", "IntegrityError"} <= verdicts.keys()
    assert verdicts["accepted"] > 500
    assert verdicts["DescriptorError"] > 500


def test_seeds_are_accepted() -> None:
    assert {headers.check(data) for data in headers.seeds()[:-1]} == {"accepted"}


def entry(extra: bytes = b"", shape: bytes = b"[2]", offsets: bytes = b"[0,8]") -> bytes:
    return b'{"a":{"dtype":"F32","shape":%b,"data_offsets":%b%b}}' % (shape, offsets, extra)


# Found by comparing with the official package, which refuses all of them. Two more were a leak: numpy refuses an
# array of no elements if its other extents multiply beyond an address.
REFUSED_BY_BOTH = {
    "minus zero": (entry(shape=b"[2,-0]", offsets=b"[0,0]"), "sign on zero"),
    "minus zero offset": (entry(offsets=b"[-0,8]"), "sign on zero"),
    "nested too deeply": (entry(b',"x":' + b"[" * 126 + b"]" * 126), "at most 127 levels"),
    "objects nested too deeply": (entry(b',"x":' + b'{"a":' * 126 + b"1" + b"}" * 126), "at most 127 levels"),
    "infinite": (entry(b',"x":1e999'), "out of range"),
    "infinite integer": (entry(b',"x":-1' + b"0" * 309), "out of range"),
    "lone surrogate": (entry(b',"x":"\\ud800"'), "lone surrogate"),
    "lone surrogate inside": (entry(b',"x":[{"y":["\\ud800"]}]'), "lone surrogate"),
    "lone surrogate as a key": (entry(b',"\\ud800":1'), "lone surrogate"),
    "lone surrogate as an inner key": (entry(b',"x":{"\\ud800":1}'), "lone surrogate"),
    "no elements, extents overflow": (entry(shape=b"[16777216,16777216,16777216,0]", offsets=b"[0,0]"), "an address"),
}
READ_BY_BOTH = {
    "nesting": entry(b',"x":' + b"[" * 125 + b"]" * 125),
    "large integer": entry(b',"x":1' + b"0" * 308),
    "large float": entry(b',"x":1e308'),
    "pair of surrogates": entry(b',"x":"\\ud83d\\ude00"'),
    "no elements": entry(shape=b"[16777216,16777216,4095,0]", offsets=b"[0,0]"),
}


@pytest.mark.parametrize("case", REFUSED_BY_BOTH)
def test_t7_what_safetensors_refuses(case: str) -> None:
    raw, message = REFUSED_BY_BOTH[case]
    room = 0 if b"[0,0]" in raw else 8
    with pytest.raises(ContainerError, match=message):
        stheader.parse(raw, room)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(len(raw).to_bytes(8, "little") + raw + bytes(room))


@pytest.mark.parametrize("case", READ_BY_BOTH)
def test_t7_what_safetensors_reads(case: str) -> None:
    raw = READ_BY_BOTH[case]
    room = 0 if b"[0,0]" in raw else 8
    assert list(stheader.parse(raw, room).entries) == ["a"]
    safetensors.deserialize(len(raw).to_bytes(8, "little") + raw + bytes(room))


def test_t7_a_dtype_nobody_knows_is_the_one_exception() -> None:
    raw = entry().replace(b"F32", b"X9")
    assert headers.check(bytes([0, 8, 0]) + raw) == "accepted"
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(len(raw).to_bytes(8, "little") + raw + bytes(8))


def test_the_campaign_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes([0, 0, 0]) + REFUSED_BY_BOTH["minus zero"][0]
    assert headers.check(data) == "ContainerError"
    with monkeypatch.context() as patch:
        patch.setattr(stheader, "_integer", int)
        with pytest.raises(headers.Wrong, match="accepted what safetensors refuses"):
            headers.check(data)
    with monkeypatch.context() as patch:
        patch.setattr(stheader, "printable", lambda text, limit=0: str(text))
        with pytest.raises(headers.Wrong, match=r"x1b"):
            headers.check(bytes([0, 0, 0]) + b'{"\\u001b":1,"\\u001b":1}')
    with monkeypatch.context() as patch:
        patch.setattr(descriptor, "_check_claims", lambda header, records: None)
        tree = json.loads(headers.seeds()[0][3:])
        tree["entries"]["smuggled"] = ["U8", [3], 3]
        with pytest.raises(headers.Wrong, match="claimed"):
            headers.check(bytes([headers.ASSEMBLED, 0, 0]) + json.dumps(tree).encode())


# --- substitutions and mutants


STORED = json.loads(refusals.STORED.read_text())


def test_what_the_parsers_say_word_for_word() -> None:
    assert len(STORED["header"]) > 100
    for _, seed, refusal in STORED["header"]:
        assert json.loads(json.dumps(refusals.of_header(seed))) == refusal, seed


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_what_validation_says_word_for_word(tmp_path: Path, fmt: type[Format]) -> None:
    files = refusals.Files(fmt.name, tmp_path)
    assert STORED[fmt.name]
    for number, seed, refusal in STORED[fmt.name]:
        assert json.loads(json.dumps(files.refusal(number, seed))) == refusal, (number, seed)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_t3_damaged_files(tmp_path: Path, fmt: type[Format]) -> None:
    verdicts, accepted = substitutions.sweep(fmt, tmp_path / "x", share=0.002)
    assert accepted == []
    assert verdicts.total() > 500
    assert {"ContainerError", "DescriptorError", "IntegrityError"} <= verdicts.keys()


def test_t3_without_checksums_damage_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zlib, "crc32", lambda data, value=0: 0)
    _, accepted = substitutions.sweep(FORMATS[0], tmp_path / "x", share=0.001)
    assert accepted


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_t4_t6_hostile_content_is_refused_or_means_what_it_says(tmp_path: Path, fmt: type[Format]) -> None:
    verdicts = mutants.hunt(fmt, tmp_path / "x", range(900))
    assert verdicts["accepted"] > 50  # changed values are legal
    assert verdicts["ArrayError"] > 50


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.name != "dense"], ids=lambda f: f.name)
def test_t6_the_oracle_sees_what_validation_would_let_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: type[Format]
) -> None:
    monkeypatch.setattr(fmt, "check_memory", lambda self: None)
    monkeypatch.setattr(fmt, "check_canonical", lambda self: None)
    monkeypatch.setattr(mutants, "check", oracle.touched)  # the oracle alone
    with pytest.raises(AssertionError, match=rf"{fmt.name}: base \d+, seed \d+: (OutOfRange|IndexError)"):
        mutants.hunt(fmt, tmp_path / "x", range(2000))


# --- faults and kills


@TRACED
@pytest.mark.parametrize(
    ("name", "every"), [("save", 9), ("new save", 9), ("file", 23), ("folder", 97), ("folder, forced", 97)]
)
def test_t11_faults_at_system_calls(tmp_path: Path, name: str, every: int) -> None:
    outcomes, broken = syscalls.campaign(name, tmp_path, every)
    assert broken == []
    assert outcomes.total() >= 10
    assert any(outcome.startswith("signal=KILL: -9") for outcome in outcomes)
    assert any(outcome.startswith("error=") and not outcome.endswith(": 0") for outcome in outcomes)


@TRACED
@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
@pytest.mark.parametrize("name", ["save", "file"])
def test_t11_f17_short_writes(tmp_path: Path, name: str) -> None:
    runs, broken = syscalls.shortened(name, tmp_path)
    assert broken == []
    assert runs > 5


@TRACED
def test_t11_a_writer_in_place_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(path: Any, data: bytes, *, overwrite: bool = False) -> None:
        Path(path).write_bytes(b"")
        Path(path).write_bytes(data)

    monkeypatch.setattr(folder, "publish", in_place)
    monkeypatch.setattr("spformat.checkpoint.manifest.publish", in_place)
    points = syscalls.points  # faults at writes are enough, and some of them are certain to hit a publication
    monkeypatch.setattr(syscalls, "points", lambda stage: [(call, k) for call, k in points(stage) if call == "write"])
    outcomes, broken = syscalls.campaign("folder, forced", tmp_path)
    assert outcomes.total() >= 10
    assert any("neither old nor new" in line for line in broken)


def test_t12_random_kills(tmp_path: Path) -> None:
    assert kills.campaign(5, tmp_path, seed=1)["kills"] == 5


# --- the files around the shards


def damaged(tree: Any, rng: Any) -> bytes:
    """A JSON tree with an edit; a journal is mostly sealed again, as an attacker would."""
    journal = tree.pop("sha256", None) if "replaces" in tree else None
    headers.edit(tree, rng)
    if journal is not None:
        tree["sha256"] = manifest.digest(tree) if rng.random() < 0.8 else journal
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def test_f23_f04_hostile_manifests_indexes_and_journals(tmp_path: Path) -> None:
    import random

    from spformat.checkpoint import convert_checkpoint, open_source
    from spformat.checkpoint.check import Checks, validate_checkpoint
    from spformat.checkpoint.diff import diff_provenance
    from spformat.errors import SpformatError

    source, packed, cut = tmp_path / "in", tmp_path / "packed", tmp_path / "cut"
    scenarios.checkpoint(source, 10)
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": {
            name: f"model-0000{i + 1}-of-00002.safetensors" for i in range(2) for name in scenarios.tensors(10 + i)}})
    )  # fmt: skip
    convert_checkpoint(source, packed, "csr")

    def stop(outcome: Any) -> None:
        if outcome.name.startswith("1."):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        convert_checkpoint(source, cut, "csr", progress=stop)
    rng = random.Random(4)
    victims = [source / "model.safetensors.index.json", packed / "spformat.json", cut / "spformat.partial.json"]
    refused = 0
    for path in victims:
        good = path.read_bytes()
        shards = {p: p.read_bytes() for p in path.parent.glob("*.safetensors")}
        for _ in range(250):
            path.write_bytes(damaged(json.loads(good), rng) if rng.random() < 0.9 else good[: rng.randrange(len(good))])
            try:
                if path.parent == cut:
                    convert_checkpoint(source, cut, "csr", resume=True)
                else:
                    open_source(path.parent)
                    list(validate_checkpoint(path.parent, Checks(checksums=path.parent == packed)))
                    if path.parent == packed:
                        list(diff_provenance(packed, source))
            except SpformatError as e:
                assert str(e).isprintable()
                refused += 1
            else:
                for extra in set(path.parent.glob("spformat*")) - {path} - set(shards):
                    extra.unlink()
            for shard, data in shards.items():
                if path.parent != cut:
                    assert shard.read_bytes() == data
        path.write_bytes(good)
    assert refused > 200


# --- mutation score


class OneSection(score.Suite):
    """What validation says of CSR files: enough to see that a mutant runs."""

    def stages(self, module: str) -> Any:
        yield "words", lambda: self.said("csr")


def changed(module: str, name: str, wanted: str) -> Any:
    """Puts one mutant of a function in place, by what it changes."""
    function = next(f for n, f in score.functions(module) if n == name)
    change = next(c for what, c in score.edits(function) if wanted in what)
    return lambda: (change(), score.install(module, name, function))


def test_t24_a_mutant_really_runs_and_only_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, before = OneSection(tmp_path), (scans.pointer, CSR.check_memory)
    same = next(f for n, f in score.functions("spformat.arrays.scans") if n == "pointer")
    assert score.outcome(suite, "", lambda: score.install("spformat.arrays.scans", "pointer", same)) == "survived"
    for name, wanted in (("pointer", "start != 0: other comparison"), ("fail", "']: expected ': other text")):
        assert score.outcome(suite, "", changed("spformat.arrays.scans", name, wanted)) == "words"
    csr = changed("spformat.formats.csr", "CSR.check_memory", "scans.within")
    assert score.outcome(suite, "", csr) == "words"
    # Pieces of two elements at least instead of one: what they find is the same.
    assert score.outcome(suite, "", changed("spformat.arrays.scans", "chunks", "1: one more")) == "survived"
    monkeypatch.setattr(score, "SECONDS", 1)
    endless = ast.parse("def pointer(f, name, end):\n    while True: pass").body[0]
    assert isinstance(endless, ast.FunctionDef)
    assert (
        score.outcome(suite, "", lambda: score.install("spformat.arrays.scans", "pointer", endless)) == "hung or died"
    )
    with pytest.raises(RuntimeError, match="could not be put in place"):
        score.outcome(suite, "", lambda: score.install("spformat.arrays.scans", "no such function", same))
    assert (scans.pointer, CSR.check_memory) == before
    suite.said("csr")


def test_t24_a_test_that_imported_the_function_gets_the_mutant(tmp_path: Path) -> None:
    module = types.ModuleType("imports_it_by_name")
    module.first_true = scans.first_true  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module

    class Asks(score.Suite):
        def stages(self, name: str) -> Any:
            yield (
                "words",
                lambda: (_ for _ in ()).throw(AssertionError) if module.first_true(np.ones(1, bool)) else None,
            )

    try:
        assert score.outcome(Asks(tmp_path), "", lambda: None) == "words"
        assert (
            score.outcome(Asks(tmp_path), "", changed("spformat.arrays.scans", "first_true", "not count: dropped"))
            == "survived"
        )
    finally:
        del sys.modules[module.__name__]


# --- bombs


SMALL = (
    "npz, bzip2", "npz, csr", "mtx, symmetric", "smtx, line breaks", "manifest, a hole", "journal, nested", "holes",
    "packed, a bit for each element", "bench of a wide matrix",
)  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_bombs_stay_within_the_budget(tmp_path: Path, name: str) -> None:
    bombs.campaign([name], tmp_path)


def test_the_bombs_are_counted() -> None:
    assert len(bombs.BOMBS) >= 30


# --- readers


@pytest.mark.parametrize("name", readers.READERS)
def test_no_mutant_of_any_reader_ends_as_a_bug(tmp_path: Path, name: str) -> None:
    seen = readers.campaign(name, 300, tmp_path, seed=1)
    assert seen["read"] > 0
    assert len(seen) > 1


def test_the_readers_campaign_sees_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spformat.interop.compressed_tensors._object", lambda value: value or {})
    with pytest.raises(AssertionError, match=r"config, seed 1, mutant \d+: AttributeError"):
        readers.campaign("config", 3000, tmp_path, seed=1)


# --- interrupts


@pytest.mark.parametrize("executor", ["", "threads"])
def test_interrupted_runs_leave_nothing_that_is_taken_for_whole(tmp_path: Path, executor: str) -> None:
    seen = interrupts.campaign(6, tmp_path, seed=1, executors=(executor,))
    assert seen["interrupted"] > 0
