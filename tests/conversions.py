"""Random conversions, and the law that a device converts to the bytes of the numpy code of the formats.

A case is drawn from a seed and a format. ``differences`` runs every conversion of a case twice: with the general numpy
code on the host, and through the public API at another place (``HOST`` with its compiled edges, or ``Device``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cases import codes, nm_places, params_of, values

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, nonzero_mask
from spformat.arrays.library import is_cupy
from spformat.formats import edges
from spformat.formats.base import Format
from spformat.formats.csr import CSR
from spformat.preprocess import masks

SHARING = ("csc", "coo", "ell-buckets")
"""Formats whose indices are those of the CSR: a matrix of theirs cannot have wide ones where the CSR has not."""
FAR = ("csr", "coo", "ell-buckets", "bsr", "dbsr", "sr-bcrs")
"""Formats of which a few rows may have so many columns that indices take 64 bits."""
ROWS_AND_COLUMNS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65, 70, 100, 127, 128, 130, 200, 257)
LARGE = ((1031, 1279), (19, 20011), (20011, 3), (4099, 130), (512, 2048), (3, 70001), (70001, 2))
LAYOUTS = ("C", "C", "F", "strided", "shifted")
SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 100, 128)


@dataclass(frozen=True)
class Case:
    """One matrix, as an array and as a CSR that may store zeros, and the parameters of a format."""

    seed: int
    fmt: type[Format]
    params: dict[str, Any]
    layout: str
    x: np.ndarray[Any, Any] | None = field(repr=False)
    a: CSR
    widened: bool
    """Whether pointers of every matrix are int64, as beyond 2^31 values. Then the types of indices are not compared."""


@contextmanager
def general_code() -> Iterator[None]:
    """Inside, the numpy code of the formats converts arrays on the host, without any edge."""
    registered = edges._registered
    with pytest.MonkeyPatch.context() as m:
        m.setattr(edges, "_registered", lambda s, t, x: registered(s, t, x) if is_cupy(x) else ())
        yield


class Host:
    """Where the compiled edges of the CPU convert."""

    def array(self, x: np.ndarray[Any, Any], layout: str) -> Any:
        """``x`` in memory as ``layout`` says."""
        return _laid_out(np, x, layout)

    def matrix(self, f: Format, widened: bool) -> Format:
        """``f``, marked as validated."""
        out = f.with_arrays()
        return _widened(out) if widened else out.validate()


class Device(Host):
    """The current CUDA device."""

    def array(self, x: np.ndarray[Any, Any], layout: str) -> Any:
        """A copy of ``x`` in memory as ``layout`` says."""
        import cupy

        return _laid_out(cupy, x, layout)

    def matrix(self, f: Format, widened: bool) -> Format:
        """A copy of ``f`` there."""
        there = f.with_arrays().to("cuda")
        return _widened(there) if widened else there.validate()


def _laid_out(xp: Any, x: np.ndarray[Any, Any], layout: str) -> Any:
    raw = x.view(f"u{x.dtype.itemsize}") if x.dtype.name in VALUE_TYPES else x
    there, (M, K) = xp.asarray(raw), x.shape
    if layout == "F":
        there = xp.asfortranarray(there)
        return there if there.dtype == x.dtype else there.T.view(x.dtype).T
    if layout == "strided":
        room = xp.zeros((M, 2 * K), raw.dtype)
        room[:, ::2] = there
        return room.view(x.dtype)[:, ::2]
    if layout == "shifted":  # one element behind a boundary of 16 bytes
        room = xp.zeros(M * K + 1, raw.dtype)
        room[1:] = there.reshape(-1)
        return room.view(x.dtype)[1:].reshape(M, K)
    return there.view(x.dtype)


def _widened(f: Format) -> Format:
    if "indptr" in f.arrays():
        object.__setattr__(f, "indptr", f.arrays()["indptr"].astype(np.int64))
    object.__setattr__(f, "_marked", True)
    return f


# ------------------------------------------------------------------ what is drawn


def drawn(fmt: type[Format], seed: int, dtypes: tuple[str, ...]) -> Case:
    """Case number ``seed`` of a format, with values of one of ``dtypes``."""
    rng = np.random.default_rng([seed, *fmt.name.encode()])
    params, dtype = drawn_params(rng, fmt.name), str(rng.choice(dtypes))
    if fmt.name in FAR and rng.random() < 0.08:
        return Case(seed, fmt, params, "C", None, _far(rng, dtype), False)
    shape = _shape(rng)
    there = drawn_places(rng, fmt.name, params, shape)
    if rng.random() < 0.3:
        x = codes(dtype, there, int(rng.integers(1 << 30)))
    else:
        x = values(rng, shape, dtype)
        x.view(VALUE_TYPES[dtype].bits)[~there] = 0
    a = CSR.from_dense(x)
    if fmt.keeps_stored_zeros and rng.random() < 0.5:
        row, column = np.nonzero(there | (rng.random(shape) < 0.1))
        a = CSR.from_coordinates(shape, row, column, x[row, column])
    if rng.random() < 0.02:  # a type that no format takes
        x = there.astype(str(rng.choice(["bool", "int32", "complex64"])))
    widened = bool(rng.random() < 0.15) and fmt.name not in SHARING
    return Case(seed, fmt, params, str(rng.choice(LAYOUTS)), x, a, widened)


def _shape(rng: np.random.Generator) -> tuple[int, int]:
    kind = rng.random()
    if kind < 0.08:
        sizes = [0, int(rng.choice(ROWS_AND_COLUMNS))]
        return (0, 0) if kind < 0.02 else tuple(int(n) for n in rng.permutation(sizes))  # type: ignore[return-value]
    if kind < 0.16:
        return LARGE[rng.integers(len(LARGE))]
    M, K = (int(n) for n in rng.choice(ROWS_AND_COLUMNS, 2))
    return M, K


def drawn_params(rng: np.random.Generator, name: str) -> dict[str, Any]:
    """Parameters of a format: those of its own examples, or random ones."""
    examples = params_of(name)
    if rng.random() < 0.4 or name not in DRAWN:
        return examples[rng.integers(len(examples))]
    return DRAWN[name](rng)


def _blocksize(rng: np.random.Generator) -> dict[str, Any]:
    return {"blocksize": tuple(int(n) for n in rng.choice(SIZES, 2))}


def _vectors(rng: np.random.Generator) -> dict[str, Any]:
    return {"vector_length": int(rng.choice((*SIZES, 256))), "stride": int(rng.choice((*SIZES, 256)))}


def _buckets(rng: np.random.Generator) -> dict[str, Any]:
    params: dict[str, Any] = {"column_parts": int(rng.choice((1, 1, 2, 3, 5, 8, 40)))}
    if rng.random() < 0.5:
        return params | {"max_width": int(2 ** rng.integers(0, 8))}
    return params | {"widths": tuple(sorted({int(n) for n in rng.choice(SIZES, rng.integers(1, 5))}))}


def _pattern(rng: np.random.Generator) -> dict[str, Any]:
    m, length = int(rng.choice((1, 2, 4, 7, 8, 16, 32, 64, 100, 256))), int(rng.choice((*SIZES, 512)))
    params = {"n": int(rng.integers(1, m + 1)), "m": m, "vector_length": length}
    if rng.random() < 0.4:
        params |= {"tile_rows": length * int(rng.integers(1, 5)), "tile_cols": m * int(rng.integers(1, 256 // m + 1))}
    return params


DRAWN: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "bsr": _blocksize, "dbsr": _blocksize, "sr-bcrs": _vectors, "ell-buckets": _buckets, "vector-nm": _pattern,
}  # fmt: skip


def drawn_places(rng: np.random.Generator, name: str, params: dict[str, Any], shape: tuple[int, int]) -> Any:
    """bool[shape]: where values are. Most matrices for a pattern of n:m fit it."""
    (M, K), density = (
        shape,
        float(rng.choice((0, 0.01, 0.05, 0.2, 0.5, 0.9, 1), p=(0.04, 0.1, 0.2, 0.26, 0.2, 0.1, 0.1))),
    )
    if name in ("two-four", "vector-nm") and rng.random() < 0.8:
        n, m, length = (params.get(k, v) for k, v in (("n", 2), ("m", 4), ("vector_length", 1)))
        return nm_places(shape, n, m, length, int(rng.integers(1 << 30)))
    kind = rng.random()
    if kind < 0.35:
        R, C = params.get("blocksize", (8, 8))
        kept = rng.random((-(-M // R), -(-K // C))) < density
        return np.repeat(np.repeat(kept, R, 0)[:M], C, 1)[:, :K] & (rng.random(shape) < 0.7)
    if kind < 0.55:  # rows of very different lengths, empty ones among them
        return rng.random(shape) < (rng.random((M, 1)) ** 6 * (rng.random((M, 1)) < 0.8))
    return rng.random(shape) < density


def _far(rng: np.random.Generator, dtype: str) -> CSR:
    """A few items in rows so long that their columns take 64 bits."""
    K, counts = 1 << int(rng.integers(32, 45)), rng.integers(0, 6, int(rng.choice((1, 3, 40))))
    rows = [np.unique(np.append(rng.integers(0, K, n), [K - 1] * int(n > 3))) for n in counts]
    column = np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int64)
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    x = values(rng, (column.size,), dtype)
    x.view(VALUE_TYPES[dtype].bits)[~nonzero_mask(x)] = 1
    return CSR(shape=(len(rows), K), indptr=indptr, indices=column, data=x)


# ------------------------------------------------------------------ the law


def differences(case: Case, place: Host) -> Iterator[str]:
    """What the conversions of a case give at ``place`` and not by the general code on the host, in words."""
    fmt, params, host = case.fmt, case.params, Host()
    with general_code():
        matrix = outcome(lambda: fmt.from_csr(host.matrix(case.a, False), **params))

    def at(p: Host, widened: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
        if case.x is not None:
            yield f"dense -> {fmt.name}", lambda: fmt.from_dense(p.array(case.x, case.layout), **params)
        yield f"csr -> {fmt.name}", lambda: fmt.from_csr(p.matrix(case.a, widened), **params)
        yield "csr transposed", lambda: p.matrix(case.a, widened).T.to_csr()  # type: ignore[attr-defined]
        if isinstance(matrix, Format):
            if case.x is not None:
                yield f"{fmt.name} -> dense", lambda: p.matrix(matrix, widened).to_dense()
            yield f"{fmt.name} -> csr", lambda: p.matrix(matrix, widened).to_csr()
            yield f"{fmt.name} transposed", lambda: p.matrix(matrix, widened).T.materialize()  # type: ignore[attr-defined]

    if case.x is None:  # a transposed matrix would have a row for every column
        yield from _compared(
            [(what, here, there) for (what, here), (_, there) in zip(at(host, False), at(place, False), strict=True)
             if "transposed" not in what], False
        )  # fmt: skip
        return
    pairs = zip(at(host, case.widened), at(place, case.widened), strict=True)
    yield from _compared([(what, here, there) for (what, here), (_, there) in pairs], case.widened)


def pruning_differences(seed: int, dtypes: tuple[str, ...], place: Host) -> Iterator[str]:
    """The same for masks and for pruning into a format."""
    rng = np.random.default_rng(seed)
    shape, dtype, layout = _shape(rng), str(rng.choice(dtypes)), str(rng.choice(LAYOUTS))
    finite = rng.integers(-9, 10, shape).astype(VALUE_TYPES[dtype].numpy)
    x = finite if rng.random() < 0.5 else values(rng, shape, dtype)
    sparsity, how = float(rng.choice((0, 0.1, 0.5, 0.9, 1))), {"nonfinite": str(rng.choice(("refuse", "keep")))}
    pattern, block = _pattern(rng), _blocksize(rng)["blocksize"]
    norm = {"norm": str(rng.choice(("l1", "l2")))}
    n, m, length, order = pattern["n"], pattern["m"], pattern["vector_length"], rng.choice(params_of("two-four"))
    mask = rng.random(shape) < 0.5
    targets: dict[str, dict[str, Any]] = {
        "csr": {}, "bitmask": {}, "bsr": {"blocksize": block}, "dbsr": {"blocksize": block}, "two-four": order,
        "sr-bcrs": _vectors(rng), "ell-buckets": _buckets(rng), "vector-nm": pattern, "dense": {}, "csc": {},
    }  # fmt: skip

    def at(p: Host) -> Iterator[tuple[str, Callable[[], Any]]]:
        w = p.array(x, layout)
        yield f"magnitude {sparsity}", lambda: masks.magnitude(w, sparsity, **how)
        yield f"magnitude_nm {n}:{m}", lambda: masks.magnitude_nm(w, n, m, **how)
        yield f"magnitude_vector_nm {pattern}", lambda: masks.magnitude_vector_nm(w, n, m, length, **norm, **how)
        yield f"magnitude_blocks {block}", lambda: masks.magnitude_blocks(w, block, sparsity, **norm, **how)
        yield "apply", lambda: masks.apply(w, p.array(mask, "C"))
        yield "prune_two_four", lambda: masks.prune_two_four(w, **order, **how)
        yield f"prune_vector_nm {pattern}", lambda: masks.prune_vector_nm(w, **pattern, **norm, **how)
        for name, given in targets.items():
            yield f"prune {name} {given} {sparsity}", lambda name=name, given=given: masks.prune(
                w, name, sparsity=sparsity, **given, **norm, **how
            )  # fmt: skip

    pairs = zip(at(Host()), at(place), strict=True)
    for text in _compared([(what, here, there) for (what, here), (_, there) in pairs], False):
        yield f"{text} (pruning, seed {seed}, {dtype}, {shape}, {layout}, {how}, {norm})"


def _compared(work: list[tuple[str, Callable[[], Any], Callable[[], Any]]], widened: bool) -> Iterator[str]:
    for what, here, there in work:
        with general_code():
            wanted = outcome(here)
        text = difference(wanted, outcome(there), widened)
        if text:
            yield f"{what}: {text}"


def outcome(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, or the error of this package that it raises."""
    try:
        return work()
    except sf.errors.SpformatError as e:
        return e


def difference(wanted: Any, got: Any, widened: bool = False) -> str:
    """What differs between two outcomes, "" if nothing does: bytes of arrays, parameters, class and text of errors."""
    errors = [isinstance(r, sf.errors.SpformatError) for r in (wanted, got)]
    if any(errors):
        if widened and any(isinstance(r, sf.errors.ArrayError) for r in (wanted, got)):
            return ""  # a matrix with the pointers of the first: constructors do not take them in a small one
        said = [
            (type(r).__name__, str(r), r.fields) if error else repr(r)
            for r, error in zip((wanted, got), errors, strict=True)
        ]
        return "" if said[0] == said[1] else f"expected {said[0]}, got {said[1]}"
    if isinstance(wanted, Format) and isinstance(got, Format):
        kind = [(type(f), f.shape, f.params(), f.tables()) for f in (wanted, got)]
        if kind[0] != kind[1]:
            return f"expected {kind[0]}, got {kind[1]}"
        if not widened and (problems := got.layout_problems()):
            return f"not built as its declaration says: {problems}"
        one, other = wanted.arrays(), got.arrays()
        if one.keys() != other.keys():
            return f"expected arrays {list(one)}, got {list(other)}"
        indices = {d.name for d in type(wanted).declared_arrays() if d.kind == "INDEX"} if widened else ()
        texts = (_array_difference(k, one[k], other[k], k in indices) for k in one)
        return next(filter(None, texts), "")
    return _array_difference("array", wanted, got, False)


def _array_difference(name: str, wanted: Any, got: Any, any_integer: bool) -> str:
    if is_cupy(got):
        got = got.get() if got.dtype.name not in VALUE_TYPES else _words(got).get().view(got.dtype)
    if any_integer:
        wanted, got = wanted.astype(np.int64), got.astype(np.int64)
    if (wanted.dtype, wanted.shape) != (got.dtype, got.shape):
        return f"{name}: expected {wanted.dtype}{wanted.shape}, got {got.dtype}{got.shape}"
    if np.ascontiguousarray(wanted).tobytes() == np.ascontiguousarray(got).tobytes():
        return ""
    one, other = (_words(np.ascontiguousarray(a)) for a in (wanted, got))
    places = np.argwhere(one != other)
    first = tuple(places[0].tolist())
    return f"{name}[{first}]: expected {one[first]:#x}, got {other[first]:#x}; {len(places)} of {one.size} differ"


def _words(a: Any) -> Any:
    return a.view(np.dtype(f"u{a.dtype.itemsize}"))
