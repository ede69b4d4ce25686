"""Models of the hub: what is downloaded, what is fetched again, and which error a user sees."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_in_hub
from catalogue import python, shell
from test_parts import SHARDED, tree, whole

import spformat as sf
from spformat.checkpoint import convert_checkpoint, hub, remote

huggingface_hub = pytest.importorskip(
    "huggingface_hub", reason="huggingface_hub is missing: pip install 'spformat[hub]'"
)

MODEL = {p.name: p.read_bytes() for p in SHARDED.iterdir()}
FIRST, SECOND = sorted(name for name in MODEL if name.endswith(".safetensors"))


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of transformers in the same process turn the hub off."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def model() -> Iterator[stand_in_hub.Hub]:
    """A hub with one commit of ``org/model``."""
    with stand_in_hub.serving() as served:
        served.repositories["org/model"] = [dict(MODEL)]
        yield served


@pytest.fixture
def convert(tmp_path: Path, model: stand_in_hub.Hub) -> Any:
    """``spformat convert URL OPTIONS`` in a process of its own, with the hub of the test."""
    (tmp_path / "tmp").mkdir()
    names = {"HF_ENDPOINT": model.endpoint, "HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}

    def run(url: str, *options: Any, **env: str) -> subprocess.CompletedProcess[str]:
        done = shell('spformat convert "$@"', url, *options, **names, **env)
        assert "Traceback" not in done.stderr
        assert os.listdir(tmp_path / "tmp") == []
        return done

    return run


def changed(data: bytes) -> bytes:
    """The file with another value in its last tensor, of the same size."""
    return data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]


def copy_of(commit: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, data in commit.items():
        (folder / name).write_bytes(data)
    return folder


def test_what_a_conversion_needs_is_downloaded(tmp_path: Path, model: stand_in_hub.Hub, convert: Any) -> None:
    extra = {".gitattributes": b"*", "pytorch_model.bin": b"weights", "onnx/model.safetensors": b"", "a [1].txt": b"1"}
    model.repositories["org/model"] = [MODEL | extra, {"README.md": b"gone"}]
    model.token = "hf_secret"
    commit, newest = model.commits("org/model")
    done = convert(f"hf://org/model@{commit}", tmp_path / "out", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert sorted(model.fetched) == sorted({*MODEL, "a [1].txt"})
    copied = {line.split()[1] for line in done.stderr.splitlines() if line.startswith("copied ")}
    assert copied == {*MODEL, "a"}
    assert "Fetching" not in done.stderr  # progress bars are for terminals
    copy_of(MODEL | {"a [1].txt": b"1"}, tmp_path / "model")
    assert tree(tmp_path / "out") == whole(tmp_path, tmp_path / "model")
    model.fetched.clear()
    assert convert(f"hf://org/model@{newest}", tmp_path / "never", HF_TOKEN="hf_secret").returncode == 66
    assert model.fetched == ["README.md"]


def test_a_changed_file_of_the_same_size_is_fetched_again(
    tmp_path: Path, model: stand_in_hub.Hub, convert: Any
) -> None:
    staging = ("--staging", tmp_path / "staging")
    assert convert("hf://org/model", tmp_path / "earlier", *staging).returncode == 0
    newer = {**MODEL, SECOND: changed(MODEL[SECOND]), "config.json": MODEL["config.json"].replace(b"{", b"{ ", 1)}
    newer["config.json"] = newer["config.json"][:-1]
    assert {n: len(d) for n, d in newer.items()} == {n: len(d) for n, d in MODEL.items()}
    model.repositories["org/model"].append(newer)
    model.fetched.clear()
    # huggingface_hub would use the earlier file if the hub did not send the newer one.
    model.refused = {SECOND}
    done = convert("hf://org/model", tmp_path / "out", *staging)
    assert (done.returncode, (tmp_path / "out").exists()) == (66, False), done.stderr
    model.refused = set()
    assert convert("hf://org/model", tmp_path / "out", *staging).returncode == 0
    assert sorted(model.fetched) == ["config.json", SECOND]
    assert tree(tmp_path / "out") == whole(tmp_path, copy_of(newer, tmp_path / "newer"))


def test_an_interrupted_download_goes_on(tmp_path: Path, model: stand_in_hub.Hub, convert: Any) -> None:
    staging = ("--staging", tmp_path / "staging")
    model.refused = {SECOND}
    done = convert("hf://org/model", tmp_path / "out", *staging, "--json")
    assert done.returncode == 66
    assert json.loads(done.stderr)["code"] == "InputError"  # and no progress bars beside it
    assert FIRST in model.fetched
    model.refused = set()
    model.fetched.clear()
    (tmp_path / "staging" / "source" / FIRST).touch()  # huggingface_hub knows a file by the time of its last change
    assert convert("hf://org/model", tmp_path / "out", *staging).returncode == 0
    assert SECOND in model.fetched
    assert FIRST not in model.fetched
    assert tree(tmp_path / "out") == whole(tmp_path)


def test_files_and_subfolders_of_a_repository(tmp_path: Path, model: stand_in_hub.Hub, convert: Any) -> None:
    model.repositories["org/model"] = [{"a/b/" + name: data for name, data in MODEL.items()} | {"a/c.txt": b""}]
    assert convert("hf://org/model@main/a/b/", tmp_path / "out").returncode == 0
    assert tree(tmp_path / "out") == whole(tmp_path)
    model.fetched.clear()
    assert convert(f"hf://org/model/a/b/{FIRST}", tmp_path / "one.safetensors").returncode == 0
    assert model.fetched == [f"a/b/{FIRST}"]
    convert_checkpoint(SHARDED / FIRST, tmp_path / "expected.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()


def test_offline_the_cache_is_read(tmp_path: Path, model: stand_in_hub.Hub, convert: Any) -> None:
    done = convert("hf://org/model", tmp_path / "out", HF_HUB_OFFLINE="1")
    assert done.returncode == 66
    assert "HF_HUB_OFFLINE" in done.stderr
    # What no conversion needs may be missing in the cache.
    model.repositories["org/model"] = [MODEL | {"onnx/model.safetensors": b"", "LICENSE": b"text"}]
    code = "import huggingface_hub as h; h.snapshot_download('org/model', ignore_patterns=['onnx/*', 'LICENSE'])"
    filled = python(code, HF_ENDPOINT=model.endpoint, HF_HOME=str(tmp_path / "home"))
    assert filled.returncode == 0, filled.stderr
    model.repositories.clear()
    done = convert("hf://org/model", tmp_path / "out", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "out") == whole(tmp_path)
    (cached,) = (tmp_path / "home").rglob(SECOND)
    cached.unlink()
    done = convert("hf://org/model", tmp_path / "never", HF_HUB_OFFLINE="1")
    assert (done.returncode, (tmp_path / "never").exists()) == (66, False), done.stderr
    assert SECOND in done.stderr


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("hf://org/nothing", 66, "RepositoryNotFoundError"),
        ("hf://org/model@v9", 66, "RevisionNotFoundError"),
        ("hf://org/model/below", 66, "nothing is there"),
        ("hf://org/a--b", 2, "not a repository of the hub"),
        ("hf://org/gated", 66, "GatedRepoError"),
    ],
)
def test_what_the_hub_refuses(
    tmp_path: Path, model: stand_in_hub.Hub, convert: Any, url: str, code: int, message: str
) -> None:
    if url.endswith("gated"):
        model.repositories["org/gated"] = [{}]
        model.token = "hf_secret"
    done = convert(url, tmp_path / "out")
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert url in done.stderr
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ with a stand-in for huggingface_hub


class NotAnOSError(Exception):
    """As httpx.ReadTimeout."""


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files of any repository; they are downloaded without a network."""
    from huggingface_hub.hf_api import RepoFile

    files = dict(MODEL)
    api = SimpleNamespace(
        repo_info=lambda **_: SimpleNamespace(sha="0" * 40),
        list_repo_tree=lambda **_: [RepoFile(**stand_in_hub._entry(n, d)) for n, d in files.items()],
    )

    def download(local_dir: str, allow_patterns: list[str], **_: Any) -> None:
        for name in allow_patterns:
            if not (Path(local_dir) / name).exists():  # as huggingface_hub does when the hub does not answer
                (Path(local_dir) / name).write_bytes(files[name])

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return files


def test_a_hub_that_cannot_be_reached_is_an_error_of_the_network(tmp_path: Path) -> None:
    """As it is typed: 69, so that a script can try again, and not 66, for what is not there."""
    env = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    code = "from spformat_cli.main import main; main()"
    for verb in (("inspect", "hf://org/model"), ("convert", "hf://org/model", str(tmp_path / "out"), "--to", "csr")):
        done = python(code, *verb, **env)
        assert done.returncode == 69, done.stderr
        assert "hf://org/model: cannot download: " in done.stderr
        assert "a bug in spformat" not in done.stderr


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), sf.errors.WriteError, "No space left"),
        (NotAnOSError("timed\nout \x1b[31m"), sf.errors.InputError, r"NotAnOSError: timed out \\x1b\[31m"),
        (ConnectionError("no route"), sf.errors.UnreachableError, "ConnectionError: no route"),
    ],
)
def test_errors_of_a_download(
    tmp_path: Path, listed: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], message: str
) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=message) as caught:
        convert_checkpoint("hf://org/model", tmp_path / "out")
    assert type(caught.value) is kind
    assert str(caught.value).startswith("hf://org/model: ")


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "missing"])
def test_what_has_not_arrived_is_refused(
    tmp_path: Path, listed: Any, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    whole_download = huggingface_hub.snapshot_download

    def download(local_dir: str, **options: Any) -> None:
        whole_download(local_dir=local_dir, **options)
        path = Path(local_dir) / SECOND
        path.write_bytes(path.read_bytes()[:-1]) if cut else path.unlink()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    expected = r"expected [\d,]+ bytes, got" if cut else "has not arrived"
    with pytest.raises(sf.errors.InputError, match=f"{SECOND}: .*{expected}.* try again"):
        convert_checkpoint("hf://org/model", tmp_path / "out")


def test_a_file_of_an_earlier_commit_is_never_converted(tmp_path: Path, listed: dict[str, bytes]) -> None:
    convert_checkpoint("hf://org/model", tmp_path / "earlier", staging=tmp_path / "staging")
    config = listed["config.json"]
    listed |= {SECOND: changed(listed[SECOND]), "config.json": config.swapcase()}
    convert_checkpoint("hf://org/model", tmp_path / "out", staging=tmp_path / "staging")
    assert (tmp_path / "out" / "config.json").read_bytes() == config.swapcase() != config
    assert tree(tmp_path / "out") == whole(tmp_path, copy_of(listed, tmp_path / "newer"))


def test_files_of_another_model_in_the_staging_folder_are_refused(tmp_path: Path, listed: dict[str, bytes]) -> None:
    listed |= {"pytorch_model.bin": b"weights", ".gitattributes": b"*"}
    report = convert_checkpoint("hf://org/model", tmp_path / "out", staging=tmp_path / "staging")
    assert report.left_behind == ("pytorch_model.bin",)
    del listed["config.json"]
    with pytest.raises(sf.errors.InputError, match=r"source: the staging folder contains config\.json, .* remove it"):
        convert_checkpoint("hf://org/model", tmp_path / "other", staging=tmp_path / "staging")
    (tmp_path / "staging" / "source" / "config.json").unlink()
    convert_checkpoint("hf://org/model", tmp_path / "other", staging=tmp_path / "staging")
    assert not (tmp_path / "other" / "config.json").exists()


def test_a_staging_folder_that_cannot_be_created(tmp_path: Path, listed: Any) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(sf.errors.OutputError, match="cannot create the staging folder: NotADirectoryError"):
        convert_checkpoint("hf://org/model", tmp_path / "out", staging=tmp_path / "file")


def test_progress_bars_are_shown_where_copies_are_reported(
    tmp_path: Path, listed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    whole_download, disabled = huggingface_hub.snapshot_download, []

    def download(**options: Any) -> None:
        disabled.append(are_progress_bars_disabled())
        whole_download(**options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    moved: list[str] = []
    for terminal in (True, False):
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda t=terminal: t))
        for report in (None, lambda name, _: moved.append(name)):
            with remote.staged("hf://org/model", "", moved=report):
                assert not are_progress_bars_disabled()
    assert disabled == [True, False, True, True]
    assert sorted(moved) == sorted([*MODEL, *MODEL])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://org/m", ("org/m", "model", None, "")),
        ("hf://models/org/m/", ("org/m", "model", None, "")),
        ("hf://datasets/org/m@v1/a/b.safetensors", ("org/m", "dataset", "v1", "a/b.safetensors")),
        ("hf://org/m@refs/pr/3/a", ("org/m", "model", "refs/pr/3", "a")),
        ("hf://org/m@refs%2Fpr%2F3", ("org/m", "model", "refs/pr/3", "")),
        ("hf://buckets/org/m", None), ("hf://gpt2", None), ("s3://org/m", None), ("file:///org/m", None),
    ],
)  # fmt: skip
def test_urls_of_the_hub(url: str, expected: tuple[Any, ...] | None) -> None:
    place = hub.place_of(url)
    parts = place and (place.repo_id, place.repo_type, place.revision, place.path)
    assert parts == expected


def test_a_missing_huggingface_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(sf.errors.UsageError, match=r"pip install 'spformat\[hub\]'"):
        convert_checkpoint("hf://org/model", tmp_path / "out")


# ------------------------------------------------------------------ verbs that only read


def test_reading_verbs_take_models_of_the_hub(tmp_path: Path, model: stand_in_hub.Hub) -> None:
    """They are downloaded to the cache of huggingface_hub once. "org/model" is one where no such folder exists."""
    names = {"HF_ENDPOINT": model.endpoint, "HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    model.repositories["org/model"] = [MODEL | {"pytorch_model.bin": b"weights", "LICENSE": b"text"}]

    def run(*words: Any, **env: str) -> subprocess.CompletedProcess[str]:
        done = shell('cd "$1" && shift && spformat "$@"', tmp_path, *words, **names, **env)
        assert "Traceback" not in done.stderr
        return done

    done = run("inspect", "org/model")
    assert done.returncode == 0, done.stderr
    assert "no org/model here: taking the model hf://org/model of the Hugging Face hub" in done.stderr
    assert "hint: spformat convert org/model model-sp --to auto" in done.stderr
    assert sorted(model.fetched) == sorted([*MODEL, "LICENSE"])
    model.fetched.clear()
    rows = json.loads(run("inspect", "hf://org/model@main", "--json").stdout)
    assert rows["path"] == "hf://org/model@main"
    assert all("sparsity" in row for row in rows["tensors"] if len(row["shape"]) == 2)
    for words in (["plan", "org/model"], ["validate", "hf://org/model"], ["explain", "org/model@main"],
                  ["diff", "org/model", SHARDED]):  # fmt: skip
        done = run(*words)
        assert done.returncode == 0, done.stderr
    assert model.fetched == []
    assert run("convert", "org/model", "out", "--to", "csr").returncode == 0
    assert run("diff", "org/model", "out").returncode == 0
    model.repositories.clear()
    assert run("inspect", "org/model", HF_HUB_OFFLINE="1").returncode == 0
    done = run("inspect", "org/model")
    assert (done.returncode, "RepositoryNotFoundError" in done.stderr) == (66, True)
    assert json.loads(run("inspect", "org/model", "--json").stderr)["code"] == "InputError"
    # what does exist here is never looked up
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert "no .safetensors file in the folder" in run("inspect", "org/model").stderr
