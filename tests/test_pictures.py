"""Pictures of matrices: what notebooks show, and the pages of ``inspect --plot``."""

from __future__ import annotations

import base64
import html.parser
import json
import re
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strict_cupy
from catalogue import command
from hypothesis import given
from hypothesis import strategies as st
from spformat_cli import plots

import spformat as sf
from spformat.formats import edges, picture, registered
from spformat.formats.csr import CSR

Array = np.ndarray[Any, Any]


def drawn(seed: int, shape: tuple[int, int], density: float = 0.3) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.random(shape) < density).astype(np.float32)


def pixels(png: bytes) -> Array:
    """The pixels of a PNG file of ours, uint8[h, w, 3]; every checksum is compared."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        chunks[kind], at = data, at + 12 + length
    w, h, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(h, 1 + 3 * w)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(h, w, 3)


@given(st.integers(0, 2**32), st.tuples(st.integers(0, 40), st.integers(0, 40)), st.integers(1, 12))
def test_a_map_has_the_share_of_nonzeros_in_each_cell(seed: int, shape: tuple[int, int], most: int) -> None:
    x = drawn(seed, shape)
    shares = picture.density_map(CSR.from_dense(x), most)
    h, w = (min(n, most) for n in shape)
    assert shares.shape == (h, w)
    for i in range(h):
        for j in range(w):
            rows, cols = (
                [k for k in range(size) if k * n // size == at] for size, n, at in ((shape[0], h, i), (shape[1], w, j))
            )
            assert shares[i, j] == x[np.ix_(rows, cols)].mean(dtype=np.float64)


def test_empty_cells_are_white_and_the_fullest_is_darkest() -> None:
    x = np.zeros((6, 9), np.float32)
    x[0:3, 0:3], x[5, 8] = 1, -2
    seen = pixels(picture.png(picture.density_map(CSR.from_dense(x), 3))).astype(int)
    assert seen.shape == (3, 3, 3)
    assert (seen[2, 0] == 255).all()
    assert seen[0, 0].tolist() == [8, 40, 98]
    assert (seen[0, 0] < seen[2, 2]).all()
    assert (seen[2, 2] < 255).all()
    assert pixels(picture.png(np.zeros((2, 2)))).min() == 255


def test_zeros_that_are_stored_are_not_drawn() -> None:
    a = CSR.from_dense(np.ones((4, 4), np.float32)).with_arrays(data=np.repeat(np.float32([0, 1, 2, 0]), 4))
    np.testing.assert_array_equal(picture.density_map(a.validate(), 2), [[0.5, 0.5]] * 2)
    assert sum(picture.block_fill(a, 2)) == 4


def test_blocks_by_fill() -> None:
    x = np.zeros((64, 70), np.float32)
    x[:32, :32] = 1  # full
    x[:16, 32:64] = 1  # half: up to 50 %
    x[33, 1] = x[63, 69] = 1
    assert picture.block_fill(CSR.from_dense(x)) == [2, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert picture.block_fill(CSR.from_dense(np.zeros((3, 0), np.float32))) == [0] * 10


class Page(html.parser.HTMLParser):
    """Texts, images and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.sources: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("img", "meta", "rect"):
            self.open.append(tag)
        self.sources += [value for key, value in attrs if key in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_what_a_notebook_shows_of_every_format() -> None:
    x = np.zeros((70, 96), np.float16)
    x[::4, ::8] = 3
    for fmt in registered():
        a = fmt.from_dense(x, **fmt.examples()[0])
        page = Page(a._repr_html_())  # type: ignore[attr-defined]
        (source,) = page.sources
        assert source.startswith("data:image/png;base64,"), "nothing is fetched"
        assert {type(a).__name__, "70 x 96", "float16", "216 (3.21 %)", "cpu", *a.arrays()} <= set(page.texts)
    shown = Page(sf.decompose(x, "csr:row_length>=99", "bitmask")._repr_html_())  # type: ignore[attr-defined]
    assert {"Sum", "part 0", "part 1"} <= set(shown.texts)


def test_what_a_notebook_shows_of_a_stack() -> None:
    page = Page(sf.stack(np.ones((2, 3, 4), np.float32), "csr")._repr_html_())  # type: ignore[attr-defined]
    assert {"Stack", "2 x 3 x 4", "24", "part 1"} <= set(page.texts)
    assert not page.sources


def test_a_notebook_shows_a_matrix_without_a_map_rather_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a = sf.convert(drawn(0, (8, 8)), "csr")
    bad = Page(a.with_arrays(indices=a.indices + np.int32(90))._repr_html_())  # type: ignore[attr-defined]
    assert not bad.sources
    assert any("csr: indices[0]: expected an index in [0, 8)" in text for text in bad.texts)
    assert not Page(sf.convert(np.zeros((0, 5), np.float32), "csr")._repr_html_()).sources  # type: ignore[attr-defined]
    monkeypatch.setattr(picture, "MOST_STORED", a.nnz - 1)
    large = Page(a._repr_html_())  # type: ignore[attr-defined]
    assert not large.sources
    assert "8 x 8" in large.texts


def test_a_map_of_a_matrix_on_a_device_is_counted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    a = sf.convert(drawn(1, (300, 200)), "csr")
    wanted, copied = picture.density_map(a), 0
    monkeypatch.setitem(sys.modules, "cupy", strict_cupy.module())
    monkeypatch.setattr(edges, "_registered", lambda *_: ())
    there, get = a.to("cuda"), strict_cupy.Array.get

    def counted(x: Any) -> Any:
        nonlocal copied
        copied += x.nbytes
        return get(x)

    monkeypatch.setattr(strict_cupy.Array, "get", counted)
    np.testing.assert_array_equal(picture.density_map(there), wanted)
    assert copied == 96 * 96 * 8


# ------------------------------------------------------------------ inspect --plot


def test_a_page_of_a_checkpoint(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\x1b[2J"
    x = drawn(2, (130, 64), 0.2)
    sf.save_dense(tmp_path / "m.safetensors", {"a.0.w": x, hostile: x[:40], "bias": np.ones(3, np.float32)})
    out = tmp_path / "page.html"
    answer = command("inspect", tmp_path / "m.safetensors", "--plot", out)
    assert answer.code == 0
    (hint,) = (line for line in answer.err.splitlines() if line.startswith("hint: spformat convert"))
    assert not {"--plot", str(out)} & set(hint.split()), "the hint is a conversion, which draws nothing"
    text = out.read_text()
    page = Page(text)
    assert len(page.sources) == 2
    assert all(s.startswith("data:") for s in page.sources)
    assert {"a.0.w", "<script>alert(1)</script>\\x1b[2J", "rows by length", "bytes by format"} <= set(page.texts)
    assert "bias" not in page.texts
    assert "<script" not in text
    facts = next(t for t in page.texts if t.startswith("130 x 64 float32"))
    assert f"{int(x.sum()):,} nonzeros" in facts
    rects = re.findall(r'width="([\d.]+)" height="12"', text)
    assert rects
    assert max(map(float, rects)) == 190
    rows = json.loads(command("inspect", tmp_path / "m.safetensors", "--plot", out, "--json").out)["tensors"]
    assert all("picture" not in row for row in rows)
    assert out.read_text() == text, "written again, the same"


def test_a_stack_is_drawn_as_the_mean_of_its_matrices(tmp_path: Path) -> None:
    w = np.zeros((2, 64, 64), np.float32)
    w[0, :32, :32] = w[1, :, :32] = 1
    sf.save_dense(tmp_path / "m.safetensors", {"w": w})
    row = json.loads(command("inspect", tmp_path / "m.safetensors", "--plot", tmp_path / "p.html", "--json").out)
    assert row["tensors"][0]["coverage"] == {
        "bsr:blocksize=32x32,density>=0.5": 1, "ell-buckets:max_width=8": 0, "two-four": 0.5,
    }  # fmt: skip
    page = Page((tmp_path / "p.html").read_text())
    seen = pixels(base64.b64decode(page.sources[0].partition(",")[2])).astype(int)[::32, ::32, 0]
    assert (seen[:, 1] == 255).all()
    assert seen[0, 0] < seen[1, 0] < 255
    assert "2 x 64 x 64 float32, 3,072 nonzeros (37.50 %), 32.00 KiB" in page.texts


def test_plots_that_cannot_be_drawn_are_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # not installed
    for path, code, text in (
        ("a.pdf", 2, "--plot: expected a name in .html or .png, got 'a.pdf'"),
        (tmp_path / "a.png", 2, "pip install 'spformat[plot]'; a .html does not"),
        (tmp_path / "nowhere" / "a.html", 73, "--plot: cannot write into the folder"),
    ):
        answer = command("inspect", tmp_path / "missing.safetensors", "--plot", path)
        assert (answer.code, text in answer.err) == (code, True), answer.err
    monkeypatch.setitem(sys.modules, "matplotlib", pytest)  # any module with a spec
    for name in ("a.png", "a.html"):
        (tmp_path / name).mkdir()
        (tmp_path / f"link-{name}").symlink_to("theirs")
        for path, kind in ((name, "folder"), (f"link-{name}", "symlink")):
            answer = command("inspect", tmp_path / "missing.safetensors", "--plot", tmp_path / path)
            expected = f"target: expected a regular file, got a {kind}"
            assert (answer.code, expected in answer.err) == (73, True), answer.err


def test_a_figure_is_complete_under_its_name_or_not_there(tmp_path: Path) -> None:
    class Figure:
        def savefig(self, out: Any, **options: Any) -> None:
            out.write(b"half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plots.publish_figure(str(tmp_path / "p.png"), Figure(), 100)
    assert not list(tmp_path.iterdir())


def test_a_png_is_drawn_where_matplotlib_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sf.save_dense(tmp_path / "m.safetensors", {"w": drawn(3, (40, 64)), "empty": np.zeros((0, 4), np.float32)})
    assert command("inspect", tmp_path / "m.safetensors", "--plot", tmp_path / "p.png").code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_name_with_dollars_is_no_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sf.save_dense(tmp_path / "m.safetensors", {"w$\\frac$": drawn(3, (40, 64))})
    assert command("inspect", tmp_path / "m.safetensors", "--plot", tmp_path / "p.png").code == 0
    flags = ("-n", "2", "--repeats", "1", "--device", "cpu", "--quiet")
    assert command("bench", tmp_path / "m.safetensors", "--plot", tmp_path / "b.png", *flags).code == 0
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
