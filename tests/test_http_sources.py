"""Web servers as sources: hanging, slow, lying, redirecting; and a user who has waited long enough."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from catalogue import command
from local_server import LocalServer
from test_parts import SHARDED, SINGLE

import spformat as sf
from spformat.checkpoint import convert_checkpoint, transfers

pytest.importorskip("aiohttp", reason="aiohttp is missing: pip install aiohttp")

MODEL = SINGLE.read_bytes()
LISTED = ("model.safetensors", "config.json")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        kind, _, rest = self.path.lstrip("/").partition("/")
        self.server.seen.append((self.command, self.path))  # type: ignore[attr-defined]
        try:
            getattr(self, kind)(rest, body)
        except OSError:
            self.close_connection = True

    def send(self, data: bytes, body: bool, *, code: int = 200, sized: bool = True, **headers: str) -> None:
        self.send_response(code)
        if sized:
            self.send_header("Content-Length", str(len(data)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def file(self, name: str, body: bool) -> None:
        self.send(MODEL, body)

    def broken(self, name: str, body: bool) -> None:
        self.send(b"error", body, code=500)

    def loop(self, name: str, body: bool) -> None:
        self.send(b"", body, code=302, Location=f"/loop/{name}")

    def away(self, name: str, body: bool) -> None:
        scheme, _, _ = name.partition("/")
        self.send(b"", body, code=302, Location=f"{scheme}:///etc/passwd")

    def silent(self, name: str, body: bool) -> None:
        time.sleep(20)

    def stalls(self, name: str, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(MODEL)))
        self.end_headers()
        if body:
            self.wfile.write(MODEL[:1000])
            self.wfile.flush()
            time.sleep(20)

    def slow(self, name: str, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(MODEL)))
        self.end_headers()
        for i in range(0, len(MODEL) if body else 0, 1 + len(MODEL) // 8):
            self.wfile.write(MODEL[i : i + 1 + len(MODEL) // 8])
            self.wfile.flush()
            time.sleep(0.3)

    def folder(self, name: str, body: bool) -> None:
        """A page with links; config.json is cut, and only a HEAD request says its size, and only at some paths."""
        how, _, name = name.partition("/")
        if not name:
            base = f"http://{self.headers['Host']}{self.path}"
            self.send("".join(f'<a href="{base}{n}">{n}</a>' for n in LISTED).encode(), body)
        elif name == "config.json":
            data = (SHARDED / "config.json").read_bytes()
            if how == "cut":
                self.send(data[:-5], body, sized=False)
            elif how == "head" and not body:
                self.send(data, body)
            else:
                self.send(data if how == "whole" else data + b" ", body, sized=how == "whole")
        elif how == "stalls":
            self.stalls(name, body)
        else:
            self.send(MODEL, body)


@pytest.fixture
def server() -> Iterator[Any]:
    with LocalServer(Handler) as s:
        s.seen = []  # type: ignore[attr-defined]
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield s
        s.shutdown()


@pytest.fixture(autouse=True)
def no_cached_file_system() -> Iterator[None]:
    import fsspec

    yield
    fsspec.get_filesystem_class("http").clear_instance_cache()


def test_a_client_that_closes_its_connection_is_no_error_of_the_server(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its traceback would be taken for one of the command that runs in the same process."""
    ended = threading.Event()
    wait = server.shutdown_request
    server.shutdown_request = lambda request: (wait(request), ended.set())  # called after handle_error
    with socket.create_connection(server.server_address) as client:
        client.sendall(b"GET /broken/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.recv(1)  # the rest of the answer is never read, so that closing resets the connection
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert ended.wait(10)
    assert capsys.readouterr().err == ""


def test_a_file_is_read_once_and_never_listed(server: Any, tmp_path: Path) -> None:
    """To ask whether it is a folder would read all of it as the text of a page."""
    convert_checkpoint(f"{server.url}/file/m.safetensors", tmp_path / "out.safetensors", "csr")
    assert [method for method, _ in server.seen].count("GET") <= 2  # at most one more for the size
    assert (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    "path", ["broken/m.safetensors", "loop/m.safetensors", "broken/folder", "loop/folder",
             *(f"away/{scheme}/m{end}" for scheme in ("file", "zip", "tar", "ftp") for end in (".safetensors", ""))],
)  # fmt: skip
def test_errors_of_servers_have_an_exit_code(server: Any, tmp_path: Path, path: str) -> None:
    answer = command("convert", f"{server.url}/{path}", tmp_path / "out", "--to", "csr")
    assert answer.code == 66, answer
    assert server.url in answer.err.replace("\n", "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["silent/m.safetensors", "stalls/m.safetensors", "silent/folder"])
def test_a_server_that_hangs_is_left_and_the_message_says_why(
    server: Any, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_SILENCE", 1)
    with pytest.raises(sf.errors.UnreachableError, match=r"Timeout.*: .*\w+"):
        convert_checkpoint(f"{server.url}/{path}", tmp_path / "out", "csr")


def test_a_slow_file_may_take_longer_than_any_pause(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_SILENCE", 1)  # the whole file takes more than two seconds
    convert_checkpoint(f"{server.url}/slow/m.safetensors", tmp_path / "out.safetensors", "csr")


def test_the_whole_time_of_a_file_is_not_limited() -> None:
    timeout = transfers._options("https://host/x")["client_kwargs"]["timeout"]
    assert (timeout.total, timeout.sock_connect, timeout.sock_read) == (None, 30, 60)


@pytest.mark.parametrize(("how", "message"), [("cut", "expected JSON"), ("head", r"expected [\d,]+ bytes, got")])
def test_a_config_that_was_cut_is_refused(server: Any, tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(sf.errors.InputError, match=rf"config\.json: {message}"):
        convert_checkpoint(f"{server.url}/folder/{how}/", tmp_path / "out", "csr")
    assert not (tmp_path / "out").exists()
    convert_checkpoint(f"{server.url}/folder/whole/", tmp_path / "out", "csr")
    assert (tmp_path / "out" / "config.json").read_bytes() == (SHARDED / "config.json").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_download_that_stalls(server: Any, tmp_path: Path, number: int) -> None:
    code = "from spformat_cli.main import main; main()"
    url = f"{server.url}/folder/stalls/"
    run = subprocess.Popen(
        [sys.executable, "-c", code, "convert", url, tmp_path / "out", "--to", "csr"],
        stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    while not any(path.endswith("stalls/model.safetensors") and verb == "GET" for verb, path in server.seen):
        assert run.poll() is None
        time.sleep(0.05)
    time.sleep(0.3)
    run.send_signal(number)
    assert run.wait(10) == (130 if number == signal.SIGINT else 143)  # the server would stall for 20 seconds
    assert list(tmp_path.iterdir()) == []


def test_ftp_and_other_sources_that_cannot_be_read(tmp_path: Path) -> None:
    """A refused connection is an error of the network, not 'cannot write'."""
    answer = command("convert", "ftp://127.0.0.1:1/model", tmp_path / "out", "--to", "csr")
    assert answer.code == 69, answer
    assert "ftp://127.0.0.1:1/model" in answer.err
