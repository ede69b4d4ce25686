"""Rows D01 .. D25: descriptors that break the schema, with every checksum right unless the row says otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from catalogue import command, refused, refused_file, tree, unharmed, weights
from hostile import Edit, change, described, drop, keep, make, put, rewrite

import spformat as sf
from spformat import limits
from spformat.errors import DescriptorError, VersionError
from spformat.formats import FORMATS
from spformat.formats.base import Format
from spformat.formats.declare import OMITTED
from spformat.storage import stwriter


@pytest.fixture
def file(folder: Path) -> Path:
    """Tensor "w": CSR of shape (7, 7) with 14 or so items, and a plain "bias"."""
    path = folder / "w.safetensors"
    sf.save(path, {"w": make(sf.CSR), "bias": np.arange(7, dtype=np.float32)})
    return path


REQUIRED = ("format", "shape", "dtype", "params", "crc32")


ZEROS = {"indptr": "0" * 8, "indices": "0" * 8, "data": "0" * 8}


DESCRIPTOR: dict[str, tuple[Edit, type[sf.errors.SpformatError], str]] = {
    "D02-newer-container": (lambda t, a: t.update(container=2), VersionError, "expected 1, got '2'; a newer"),
    "D02-older-container": (lambda t, a: t.update(container=0), VersionError, "expected 1, got '0'"),
    "D02-text-container": (lambda t, a: t.update(container="1"), VersionError, "expected 1, got '1'"),
    "D02-true-container": (lambda t, a: t.update(container=True), VersionError, "got 'True'"),
    "D02-no-container": (lambda t, a: t.pop("container"), VersionError, "got none"),
    "D02-newer-format": (put(version=2), VersionError, "csr version: expected 1, got '2'"),
    "D02-text-version": (put(version="1.0"), VersionError, "got '1.0'"),
    "D02-no-version": (drop("version"), VersionError, "got none"),
    "D03-unknown-format": (put(format="csrr"), DescriptorError, "unknown format 'csrr'; did you mean 'csr'"),
    "D03-wrong-case": (put(format="CSR"), DescriptorError, "unknown format 'CSR'"),
    "D03-format-number": (put(format=3), DescriptorError, "format id"),
    "D04-not-json": (lambda t, a: "{", DescriptorError, "not valid JSON"),
    "D04-array": (lambda t, a: "[]", DescriptorError, "expected a JSON object"),
    "D04-nan": (lambda t, a: '{"container":NaN}', DescriptorError, "NaN"),
    "D04-duplicate-key": (lambda t, a: '{"container":1,"container":1}', DescriptorError, "duplicate key 'container'"),
    "D04-empty": (lambda t, a: "", DescriptorError, "not valid JSON"),
    "D04-tensors-list": (lambda t, a: t.update(tensors=[]), DescriptorError, "tensors: expected an object"),
    "D04-tensor-null": (lambda t, a: t["tensors"].update(w=None), DescriptorError, "expected an object"),
    "D04-plain-list": (lambda t, a: t.update(plain=["bias"]), DescriptorError, "plain: expected an object"),
    **{f"D05-no-{key}": (drop(key), DescriptorError, f"'{key}'") for key in REQUIRED},
    "D05-no-tensors": (lambda t, a: t.pop("tensors"), DescriptorError, "'tensors'"),
    "D06-extra-key": (put(colour="red"), DescriptorError, "unknown key 'colour'.*--ignore-unknown"),
    "D06-extra-top-key": (lambda t, a: t.update(extra=1), DescriptorError, "unknown key 'extra'"),
    "D06-extra-param": (put(params={"n": 2}), DescriptorError, "params: unknown key 'n'"),
    "D06-tables-of-none": (put(tables={}), DescriptorError, "unknown key 'tables'"),
    "D07-absent-array": (
        keep(lambda t, a: a.pop("w.indices")), DescriptorError, "expected the entry 'w.indices'"),
    "D07-absent-plain": (keep(lambda t, a: a.pop("bias")), DescriptorError, "expected the entry 'bias'"),
    "D08-smuggled-array": (keep(lambda t, a: a.update(x=np.zeros(3))), DescriptorError, "'x' of the file is claimed"),
    "D09-claimed-twice": (lambda t, a: t["plain"].update({"w.data": "00000000"}), DescriptorError, "by tensor 'w' too"),
    "D09-name-twice": (
        keep(lambda t, a: (a.update(w=np.zeros(1)), t["plain"].update(w="00000000"))), DescriptorError, "two tensors"),
    "D10-3d": (put(shape=[7, 7, 1]), DescriptorError, r"expected \[M, K\], got 3"),
    "D10-1d": (put(shape=[7]), DescriptorError, "got 1 dim"),
    "D10-0d": (put(shape=[]), DescriptorError, "got 0 dim"),
    "D11-text": (put(shape=["7", "7"]), DescriptorError, "list of ints"),
    "D11-float": (put(shape=[7.0, 7]), DescriptorError, "list of ints"),
    "D11-bool": (put(shape=[True, 7]), DescriptorError, "list of ints"),
    "D11-negative": (put(shape=[-7, 7]), DescriptorError, "list of ints"),
    "D11-huge": (put(shape=[2**48, 7]), DescriptorError, "list of ints"),
    "D11-not-a-list": (put(shape=7), DescriptorError, "list of ints"),
    "D13-rows-without-pointers": (put(shape=[2**31 - 1, 7]), sf.errors.ArrayError, "indptr"),
    "D18-upper-case": (put(crc32=ZEROS | {"indptr": "ABCDEF01"}), DescriptorError, "lower-case hex"),
    "D18-short": (put(crc32=ZEROS | {"indptr": "abc"}), DescriptorError, "8 lower-case"),
    "D18-number": (put(crc32=ZEROS | {"indptr": 1}), DescriptorError, "8 lower-case"),
    "D18-one-missing": (put(crc32={"indptr": "0" * 8, "data": "0" * 8}), DescriptorError, "'indices'.*--allow-unch"),
    "D18-other-algorithm": (
        keep(lambda t, a: put(sha1=described(t).pop("crc32"))(t, a)), DescriptorError, "'crc32', got none.*--allow"),
    "D23-huge-descriptor": (put(params={"x" * 2_000_000: 1}), sf.errors.LimitError, "--max-descriptor-bytes"),
    "D24-other-value-dtype": (put(dtype="bfloat16"), sf.errors.ArrayError, "expected BF16 for dtype bfloat16, got F16"),
    "D24-unknown-dtype": (put(dtype="f16"), DescriptorError, "dtype: expected one of"),
    "D13-tables-of-nothing": (put(shape=[0, 7]), sf.errors.ArrayError, "indptr: dimension M\\+1 = 1, got 8"),
    "D25-pad-in-descriptor": (put(pad=0), DescriptorError, "unknown key 'pad'"),
}  # fmt: skip


@pytest.mark.parametrize("case", DESCRIPTOR)
def test_descriptor(file: Path, case: str) -> None:
    edit, error, message = DESCRIPTOR[case]
    text = case in ("D04-not-json", "D04-array", "D04-nan", "D04-duplicate-key", "D04-empty")
    rewrite(file, edit if text else keep(edit), sums=not case.startswith("D18"))
    refused_file(file, error, str(file), message)


def test_D01_a_dense_file_is_input_but_not_loadable(folder: Path) -> None:
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"z.weight": w, "a.bias": w[0].copy(), "ids": np.arange(4).reshape(2, 2)}
    path = folder / "x.safetensors"
    safetensors.numpy.save_file(arrays, path, {"format": "pt"})
    with refused(folder, DescriptorError, r"dense safetensors file.*spformat convert.*spformat\.open", path=str(path)):
        sf.load(path)
    with unharmed(folder), sf.safe_open(path) as f:
        assert not f.described
        assert f.metadata == {"format": "pt"}
        assert isinstance(f["z.weight"], sf.Dense)
        assert f["z.weight"].is_validated
        assert np.array_equal(f["z.weight"].to_dense(), w)
        assert isinstance(f["a.bias"], np.ndarray)
        assert isinstance(f["ids"], np.ndarray)  # int64 is not a value type
    with unharmed(folder, but="out"):
        for verb in ("inspect", "plan"):
            assert command(verb, path).code == 0
        assert command("convert", path, folder / "out").code == 0


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.declared_params()], ids=lambda f: f.name)
def test_D05_every_param_is_required(folder: Path, fmt: type[Format]) -> None:
    path = folder / "x.safetensors"
    for d in fmt.declared_params():
        if d.default is OMITTED:  # test_descriptors has what goes for these
            continue
        sf.save(path, {"w": make(fmt)}, overwrite=True)
        rewrite(path, keep(lambda t, a, key=d.name: described(t)["params"].pop(key)))
        refused_file(path, DescriptorError, f"params: expected a key '{d.name}'", tensor="w", expected=d.name)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.declared_tables()], ids=lambda f: f.name)
def test_D05_D14_tables(folder: Path, fmt: type[Format]) -> None:
    path = folder / "x.safetensors"

    def refuse(edit: Callable[[dict[str, Any]], Any], error: type[sf.errors.SpformatError], message: str) -> None:
        sf.save(path, {"w": make(fmt)}, overwrite=True)
        rewrite(path, keep(lambda t, a: edit(described(t)["tables"])))
        refused_file(path, error, message, tensor="w")

    for name, _ in fmt.declared_tables():
        refuse(lambda t, name=name: t.pop(name), DescriptorError, f"tables: expected a key '{name}'")
        refuse(lambda t, name=name: t[name].append(0), sf.errors.ArrayError, f"{name}: expected .* entries")
        refuse(lambda t, name=name: t[name].pop(), sf.errors.ArrayError, f"{name}: expected .* entries")
        for bad in (-1, 1.0, "1", True, None):
            refuse(lambda t, name=name, bad=bad: t[name].__setitem__(0, bad), DescriptorError, "list of ints")
    # One more ELL row than there are: kernels size launches by it.
    refuse(lambda t: t["rows_per_bucket"].__setitem__(0, t["rows_per_bucket"][0] + 1), sf.errors.ArrayError, "row_ids")
    refuse(lambda t: t["rows_per_bucket"].__setitem__(0, 2**40), sf.errors.ArrayError, "row_ids")
    refuse(lambda t: t["split_per_bucket"].__setitem__(0, 2**20), sf.errors.ArrayError, "split_per_bucket")
    refuse(lambda t: t["rows_per_bucket"].reverse(), sf.errors.ArrayError, "split_per_bucket|row_ids|indices")


def test_D06_unknown_keys_can_be_ignored(file: Path) -> None:
    def edit(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        tree["extra"] = described(tree)["colour"] = 1

    rewrite(file, edit)
    refused_file(file, DescriptorError, "--ignore-unknown")
    with unharmed(file.parent):
        assert sf.load(file, ignore_unknown=True)["w"] == make(sf.CSR)
        assert command("validate", file, "--ignore-unknown").code == 0


HUGE = 2**20


def test_D12_a_hostile_shape_loads_but_nothing_of_that_size_is_made(folder: Path) -> None:
    one = sf.CSR(
        shape=(HUGE, HUGE), indptr=np.concatenate([[0], np.ones(HUGE)]).astype(np.int32), indices=np.int32([5]),
        data=np.float16([1]),
    )  # fmt: skip
    path = folder / "x.safetensors"
    sf.save(path, {"w": one})
    loaded: Any = sf.load(path)["w"]
    for target in ("dense", "bitmask", "two-four", "vector-nm:n=1,m=4", "vector-nm:n=1,m=4,tile_rows=32,tile_cols=8"):
        with refused(folder, sf.errors.LimitError, r"bytes requested.*--max-memory", hint="--max-memory"):
            sf.convert(loaded, target)
        assert command("convert", path, folder / "out", "--to", target).code == 78
    with refused(folder, sf.errors.LimitError, "2,199,023,255,552 bytes requested"):
        loaded.to_dense()
    wide = np.broadcast_to(np.float16(1), (HUGE, 2**15))
    for fmt in ("csr", "ell-buckets", "bsr", "dbsr", "sr-bcrs"):  # small, so they convert; the product is not small
        with refused(folder, sf.errors.LimitError, "68,719,476,736 bytes requested"):
            sf.spmm(sf.convert(loaded, fmt), wide)
    scattered = sf.CSR.from_coordinates(
        (HUGE, HUGE), np.arange(0, HUGE, 64), np.arange(0, HUGE, 64), np.ones(HUGE // 64, np.float16)
    )
    for target in ("bsr:blocksize=1024x1024", "dbsr:blocksize=1024x1024", "sr-bcrs:vector_length=256,stride=256"):
        with limits.using(memory=2**20), refused(folder, sf.errors.LimitError, "bytes requested"):
            sf.convert(scattered, target)


PARAM_CASES = [
    ("bsr", "blocksize", [0, 3]), ("bsr", "blocksize", [-1, 3]), ("bsr", "blocksize", [2**16, 3]),
    ("bsr", "blocksize", [2]),
    ("bsr", "blocksize", "2x3"), ("bsr", "blocksize", [2.0, 3]), ("bsr", "blocksize", None), ("vector-nm", "n", 5),
    ("vector-nm", "n", 0), ("vector-nm", "m", 0), ("vector-nm", "m", 257), ("vector-nm", "vector_length", 0),
    ("vector-nm", "n", "2"), ("vector-nm", "n", True), ("two-four", "meta_order", "linear"),
    ("two-four", "meta_order", 0),
    ("sr-bcrs", "stride", 0), ("ell-buckets", "max_width", 3), ("ell-buckets", "column_parts", 0),
    ("ell-buckets", "max_width", None),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "param", "value"), PARAM_CASES)
def test_D15_D16_params_out_of_range(folder: Path, fmt: str, param: str, value: Any) -> None:
    path = folder / "x.safetensors"
    sf.save(path, {"w": make(sf.by_name(fmt))})
    rewrite(path, keep(lambda t, a: described(t)["params"].__setitem__(param, value)))
    refused_file(path, DescriptorError, f"{fmt}: .*{param}: expected|params: {param}: expected", tensor="w")


def test_D15_odd_but_legal_sizes_load(folder: Path) -> None:
    path = folder / "x.safetensors"
    f = sf.BSR.from_dense(weights()["w"], blocksize=(3, 5))
    sf.save(path, {"w": f})
    assert sf.load(path)["w"] == f
    assert command("validate", path).code == 0


@pytest.mark.parametrize("order", ["logical", "ldmatrix", "fragment", "cutlass-sm80"])
def test_D17_every_metadata_order_multiplies_as_what_it_is(folder: Path, order: str) -> None:
    w = weights(shape=(64, 128))["w"]
    B = np.random.default_rng(1).integers(-3, 4, (128, 9)).astype(np.float16)
    sf.save(folder / "x.safetensors", {"w": sf.TwoFour.from_dense(w, meta_order=order)})
    with unharmed(folder):
        f: Any = sf.load(folder / "x.safetensors")["w"]
        assert np.array_equal(sf.spmm(f, B), w.astype(np.float32) @ B.astype(np.float32))
    # The same words under another order's name are another matrix: refused, or decoded as such, never as this one.
    for other in {"logical", "ldmatrix", "fragment", "cutlass-sm80"} - {order}:
        g = sf.TwoFour(shape=f.shape, meta_order=other, data=f.data, meta=f.meta)
        try:
            assert not np.array_equal(g.to_dense(), w)
        except sf.errors.PatternError as e:
            assert e.array == "meta"


def test_D18_files_without_checksums_need_permission(file: Path) -> None:
    def unchecked(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        del tree["sha256"], described(tree)["crc32"]

    rewrite(file, unchecked, seal=False)
    refused_file(file, DescriptorError, "--allow-unchecked")
    with unharmed(file.parent):
        assert sf.load(file, allow_unchecked=True)["w"] == make(sf.CSR)
        assert command("validate", file, "--allow-unchecked").code == 0


@pytest.mark.parametrize("sha", ["A" * 64, "0" * 63, 7, "", "sha1:" + "0" * 40])
def test_D18_malformed_sha256(file: Path, sha: Any) -> None:
    rewrite(file, lambda tree, arrays: tree.update(sha256=sha), seal=False)
    refused_file(file, DescriptorError, "sha256: expected 64 lower-case hex")
    refused_file(file, DescriptorError, "64 lower-case hex", flags=["--allow-unchecked"],
                 read=lambda p: sf.load(p, allow_unchecked=True))  # fmt: skip


def test_D19_right_checksums_do_not_replace_validation(file: Path) -> None:
    rewrite(file, change("indices", lambda a: a + np.int32(100)))
    refused_file(file, sf.errors.IndexBoundsError, r"indices\[0\]: expected an index in \[0, 7\), got 10",
                 tensor="w", array="indices", index=0)  # fmt: skip


@pytest.mark.parametrize("entry", ["w.data", "w.indices", "w.indptr", "bias"])
def test_D20_wrong_checksum_names_the_array(file: Path, entry: str) -> None:
    key = entry.removeprefix("w.")

    def edit(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        holder = tree["plain"] if entry == "bias" else described(tree)["crc32"]
        holder[key] = f"{int(holder[key], 16) ^ 1:08x}"

    rewrite(file, edit, sums=False)
    fields = {"tensor": "bias"} if entry == "bias" else {"tensor": "w", "array": key}
    refused_file(file, sf.errors.IntegrityError, "crc32 .* is stored, .* computed", **fields)
    refused_file(file, sf.errors.IntegrityError, "crc32", read=lambda p: sf.load(p, allow_unchecked=True),
                 flags=["--allow-unchecked"], **fields)  # fmt: skip


def test_D20_bytes_passed_on_are_checked_too(file: Path) -> None:
    rewrite(file, lambda tree, arrays: tree["plain"].update(bias="01234567"))
    for target in ("keep", "dense"):
        with unharmed(file.parent):
            answer = command("convert", file, file.parent / "out", "--to", target)
        assert (answer.code, "01234567 is stored" in answer.err) == (65, True)
    wanted = refused(file.parent, sf.errors.IntegrityError, "01234567 is stored", tensor="bias")
    with sf.safe_open(file) as f, wanted, stwriter.Writer(file.parent / "y", [("bias", "F32", (7,))]) as out:
        out.put("bias", f.raw("bias"))


def test_D21_header_of_another_sha_or_not_canonical(file: Path) -> None:
    good = file.read_bytes()
    n = int.from_bytes(good[:8], "little")
    header, data = good[8 : 8 + n], good[8 + n :]
    rewrite(file, lambda tree, arrays: tree.update(sha256="0" * 64), seal=False)
    refused_file(file, sf.errors.IntegrityError, "header: its bytes do not match its sha256")
    parsed = json.loads(header)
    reordered = json.dumps(dict(reversed(parsed.items())), separators=(",", ":")).encode()
    for raw in (reordered, json.dumps(parsed).encode(), header + b" " * 64):
        file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        refused_file(file, sf.errors.IntegrityError, "not canonical")


def test_D22_provenance(folder: Path) -> None:
    source = folder / "in.safetensors"
    sf.save_dense(source, weights())
    assert command("convert", source, folder / "packed", "--to", "csr").code == 0
    before = tree(folder)
    for pair in ((source, folder / "packed"), (folder / "packed", source)):
        assert command("diff", *pair, "--provenance").code == 0
    assert command("diff", source, source, "--provenance").code == 2
    assert tree(folder) == before
    data = source.read_bytes()
    n = int.from_bytes(data[:8], "little")
    source.write_bytes((n + 1).to_bytes(8, "little") + data[8 : 8 + n] + b" " + data[8 + n :])  # the same values
    with unharmed(folder):
        assert command("diff", source, folder / "packed").code == 0
        answer = command("diff", source, folder / "packed", "--provenance")
        assert (answer.code, "in.safetensors: sha256: the manifest says" in answer.out) == (1, True)
        told = json.loads(command("diff", source, folder / "packed", "--provenance", "--json").out)
        assert [d["tensor"] for d in told["differences"]] == ["in.safetensors"]


@pytest.mark.parametrize("name", ["my model (1).safetensors", "0a1b2c3d4e5f", "modèle.safetensors"])
def test_D22_an_input_file_of_any_name(folder: Path, name: str) -> None:
    """As browsers and the cache of Hugging Face name files: a file by itself is converted, whatever its name."""
    sf.save_dense(folder / "in.safetensors", weights())
    source = (folder / "in.safetensors").rename(folder / name)
    assert command("convert", source, folder / "packed", "--to", "csr").code == 0
    for pair in ((source, folder / "packed"), (folder / "packed", source)):
        assert command("diff", *pair, "--provenance").code == 0
    with unharmed(folder):  # in a folder, a name is not followed
        assert command("diff", folder / "packed", folder / "packed", "--provenance").code == 77


def test_D22_two_packed_folders_in_either_order(folder: Path) -> None:
    """Each has a manifest: the one that names the other's files is the output."""
    source, once, twice = (folder / name for name in ("in", "once", "twice"))
    source.mkdir()
    for i in (1, 2):
        sf.save_dense(source / f"model-0000{i}-of-00002.safetensors", {f"w{i}": weights(i)["w"]})
    third = folder / "third"
    for src, dst, to in ((source, once, "csr"), (once, twice, "bitmask"), (twice, third, "coo")):
        assert command("convert", src, dst, "--to", to).code == 0
    for pair in ((source, once), (once, twice), (twice, third)):
        for a, b in (pair, pair[::-1]):
            answer = command("diff", a, b, "--provenance")
            assert (answer.code, "4 of 4 tensors and files are the same" in answer.out) == (0, True), answer
    for a, b, name in ((source, twice, "spformat-00001-of-00002"), (twice, source, "spformat-00001-of-00002"),
                       (third, source, "spformat-00001-of-00002")):  # fmt: skip
        answer = command("diff", a, b, "--provenance", "--long")
        assert (answer.code, f"{name}.safetensors: " in answer.out) == (1, True), answer
        assert f"spformat.json names this file of its input, and {source} does not hold it" in answer.out
    sf.save(once / "spformat-00001-of-00002.safetensors", {"w1": sf.convert(weights(1)["w"], "coo")}, overwrite=True)
    for a, b in ((once, twice), (twice, once)):  # the same values in other bytes
        answer = command("diff", a, b, "--provenance")
        assert (answer.code, "spformat-00001-of-00002.safetensors: sha256: the manifest says" in answer.out) == (
            1,
            True,
        )


def test_D22_a_file_by_itself(folder: Path) -> None:
    source = folder / "in.safetensors"
    sf.save_dense(source, weights())
    assert command("convert", source, folder / "packed", "--to", "csr").code == 0
    renamed, other = folder / "renamed.safetensors", folder / "other.safetensors"
    renamed.write_bytes(source.read_bytes())
    data = source.read_bytes()
    n = int.from_bytes(data[:8], "little")
    other.write_bytes((n + 1).to_bytes(8, "little") + data[8 : 8 + n] + b" " + data[8 + n :])  # the same values
    for file, code in ((renamed, 0), (other, 1)):  # the one beside it, which has the name in the manifest, is not meant
        assert command("diff", file, folder / "packed", "--provenance").code == code
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    renamed.rename(elsewhere / "renamed.safetensors")
    answer = command("diff", elsewhere, folder / "packed", "--provenance")
    assert (answer.code, "in.safetensors: " in answer.out) == (1, True)
    assert f"names this file of its input, and {elsewhere} does not hold it" in answer.out


def test_D23_the_writer_keeps_to_the_limit(folder: Path) -> None:
    with limits.using(descriptor_bytes=100), refused(folder, sf.errors.LimitError, "--max-descriptor-bytes"):
        sf.save(folder / "x", {"w": make(sf.CSR)})


def test_D25_pads_other_than_minus_one(folder: Path) -> None:
    path = folder / "x.safetensors"
    for fmt, array in ((sf.ELLBuckets, "indices"), (sf.ELLBuckets, "source"), (sf.SRBCRS, "indices")):
        for pad in (-2, 2**31 - 1):
            sf.save(path, {"w": make(fmt, (33, 70))}, overwrite=True)
            rewrite(path, change(array, lambda a, pad=pad: np.where(a == -1, np.int32(pad), a)))
            refused_file(path, sf.errors.IndexBoundsError, f"{array}.*expected PAD", tensor="w", array=array)
