"""Rows F26 .. F34: modes, odd names, poor surroundings."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from catalogue import command, python, shell, unharmed, weights

import spformat as sf
from spformat.checkpoint import convert_checkpoint


@pytest.fixture
def source(folder: Path) -> Path:
    """A dense file."""
    path = folder / "in.safetensors"
    sf.save_dense(path, weights())
    return path


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_F26_modes(source: Path, umask: int, mode: int) -> None:
    out = source.parent / "out.safetensors"
    before = os.umask(umask)
    try:
        with unharmed(source.parent, but=out.name):
            assert command("convert", source, out, "--to", "csr").code == 0
            assert out.stat().st_mode & 0o777 == mode
            out.chmod(0o640)
            assert command("convert", source, out, "--to", "bitmask", "--force").code == 0
            assert out.stat().st_mode & 0o777 == 0o640  # an overwritten file keeps its own
    finally:
        os.umask(before)


ODD = ["a b", "näme", "new\nline", "quo'te\"", "x" * 243, "重み", os.fsdecode(b"\xff\xfe"), "-n", "\x1b[31m", "$HOME"]


@pytest.mark.parametrize("name", ODD)
def test_F27_odd_but_legal_names(source: Path, name: str) -> None:
    odd = source.parent / f"{name}.safetensors"
    shutil.copy(source, odd)
    out = source.parent / "out" / f"{name}.safetensors"
    out.parent.mkdir()
    for flags in ([], ["--json"]):
        for args in (["convert", odd, out, "--to", "csr", "--force", *flags], ["validate", out, *flags]):
            with unharmed(source.parent, but="out"):
                answer = command(*args)
            assert answer.code == 0, answer
            assert "\x1b" not in answer.out + answer.err
            (answer.out + answer.err).encode()  # what cannot be encoded was escaped
    assert np.array_equal(sf.load(out)["w"].to_dense(), weights()["w"])
    missing = command("inspect", source.parent / f"{name}-missing")
    assert missing.code == 66
    assert "No such file" in missing.err or "File name too long" in missing.err


def test_F27_bytes_that_are_no_text_and_the_longest_name(source: Path) -> None:
    odd = source.parent / (os.fsdecode(b"\xff\xfe\n") + ".safetensors")
    shutil.copy(source, odd)
    with unharmed(source.parent):
        done = shell('spformat validate "$1" && spformat inspect "$1" --json', odd)
    assert (done.returncode, "sound" in done.stdout) == (0, True), done.stderr
    longest = source.parent / ("y" * 243 + ".safetensors")  # 255 bytes: no suffix of a temporary name would fit
    with unharmed(source.parent, but=longest.name):
        assert command("convert", source, longest, "--to", "csr").code == 0


def test_F28_temporaries_lie_in_the_target_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = os.open

    def watched(path: object, flags: int, *args: int, **options: int) -> int:
        fd = real(path, flags, *args, **options)  # type: ignore[call-overload]
        if flags & os.O_CREAT:
            made.append(os.readlink(f"/proc/self/fd/{fd}"))
        return fd

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    out = source.parent / "out"
    convert_checkpoint(source, out, "csr")
    assert made
    assert {os.path.dirname(p) for p in made} == {str(out)}


@pytest.mark.parametrize(("step", "code"), [("replace", errno.EXDEV), ("replace", errno.EPERM),
                                            ("flock", errno.ENOLCK), ("flock", errno.EOPNOTSUPP)])  # fmt: skip
def test_F29_a_file_system_that_cannot(source: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int) -> None:
    out = source.parent / "out.safetensors"
    out.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl if step == "flock" else os, step, fail)
    with unharmed(source.parent, but="folder"):  # an empty lock file may stay
        answer = command("convert", source, source.parent / "folder", "--to", "csr")
    if step == "flock":  # without locks nobody can know who else writes into a folder
        assert (answer.code, "cannot lock the folder" in answer.err) == (74, True)
        return
    assert (answer.code, "cannot rename" in answer.err) == (74, True)
    with unharmed(source.parent):
        answer = command("convert", source, out, "--to", "csr", "--force")
    assert (answer.code, "nothing was published" in answer.err) == (74, True)


LOW = "ulimit -v 4194304; "


def test_F30_an_address_space_of_4_gib(folder: Path) -> None:
    H = 2**20
    one = sf.CSR(shape=(H, H), indptr=np.r_[0, np.ones(H)].astype(np.int32), indices=np.int32([5]),
                 data=np.float16([1]))  # fmt: skip
    path = folder / "x.safetensors"
    sf.save(path, {"w": one})
    with unharmed(folder):
        for target in ("dense", "bitmask", "two-four"):
            done = shell(LOW + 'spformat convert "$1" "$2" --to ' + target, path, folder / "out.safetensors")
            assert (done.returncode, "bytes requested" in done.stderr) == (78, True), done.stderr
        code = (
            "from spformat_cli import main as cli\nimport spformat.checkpoint.run as run\n"
            "def hungry(*a, **k): bytearray(2**40)\nrun._to_file = hungry\n"  # an error that no code expects
            "sys.argv = ['spformat', 'convert', *sys.argv[1:]]\ncli.main()\n"
        )
        done = python(code, path, folder / "out.safetensors")
        assert (done.returncode, "out of memory; nothing was published" in done.stderr) == (71, True), done.stderr


def test_F31_sixteen_descriptors_and_200_shards(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    for i in range(200):
        sf.save_dense(model / f"{i:03}.safetensors", {f"w{i}": np.eye(4, dtype=np.float16)})
    with unharmed(folder, but="out"):
        done = shell('ulimit -n 16; spformat convert "$1" "$2" --to csr --json', model, folder / "out")
        assert done.returncode == 0, done.stderr
        done = shell('ulimit -n 16; spformat validate "$1" --checksums', folder / "out")
        assert (done.returncode, "400 checked, sound" in done.stdout) == (0, True), done.stderr


def test_F32_identity_is_content_never_time(source: Path) -> None:
    model, out = source.parent / "model", source.parent / "out"
    model.mkdir()
    for i in range(2):
        sf.save_dense(model / f"{i}.safetensors", {f"{i}.{k}": x for k, x in weights(i).items()})
    for stamp in (0, 2**31, 4102444800):  # 1970, 2038, 2100
        with pytest.raises(ZeroDivisionError):
            convert_checkpoint(model, out, "csr", force=True, progress=lambda o: 1 // (o.name != "1.w"))
        for path in (*model.iterdir(), *out.iterdir()):
            os.utime(path, (stamp, stamp))
        assert convert_checkpoint(model, out, "csr", resume=True).resumed == 1  # other times, the same bytes
        shutil.rmtree(out)
    with pytest.raises(ZeroDivisionError):
        convert_checkpoint(model, out, "csr", progress=lambda o: 1 // (o.name != "1.w"))
    status = (model / "0.safetensors").stat()
    data = bytearray((model / "0.safetensors").read_bytes())
    data[-2] ^= 1
    (model / "0.safetensors").write_bytes(data)
    os.utime(model / "0.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))  # the same time, other bytes
    assert convert_checkpoint(model, out, "csr", resume=True).resumed == 0


def test_F33_a_poor_environment(source: Path) -> None:
    out = source.parent / "out.safetensors"
    bare = 'cd / && env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" '
    program = '-c "from spformat_cli.main import main; main()" convert "$1" "$2" --to csr --force'
    read_only = source.parent / "home"
    read_only.mkdir(mode=0o555)
    for setting in (
        "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 HOME=/nowhere TMPDIR=/nowhere",
        f"HOME={read_only} TMPDIR={read_only} XDG_CACHE_HOME={read_only} TERM=dumb",
    ):
        done = shell(f"{bare}{setting} '{sys.executable}' {program}", source, out)
        assert done.returncode == 0, (setting, done.stderr)
        assert np.array_equal(sf.load(out)["w"].to_dense(), weights()["w"])


def test_F34_streams_that_are_closed_or_full(source: Path) -> None:
    out = source.parent / "out.safetensors"
    for script, code in (
        ('spformat inspect "$1" > /dev/full', 74), ('spformat inspect "$1" --json > /dev/full', 74),
        ('spformat inspect "$1" >&-', 74), ('spformat inspect "$1" <&-', 0), ('spformat validate "$1" 2>&-', 0),
    ):  # fmt: skip
        with unharmed(source.parent):
            done = shell(script, source)
        assert done.returncode == code, (script, done.returncode, done.stderr)
        assert "Traceback" not in done.stderr
    done = shell('spformat convert "$1" "$2" --to csr > /dev/full', source, out)  # the file is there, the table is not
    assert done.returncode == 74
    assert sf.load(out)["w"].is_validated
