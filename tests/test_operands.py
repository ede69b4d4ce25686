"""Operands as users pass them: of other libraries, of odd rank, not numbers. They are taken, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from catalogue import command

import spformat as sf
from spformat import limits
from spformat.products.problem import columns
from spformat.storage.container import create, outline

W = np.diag(np.arange(1, 5)).astype(np.float32)
X = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("value", [None, "2", 2j, np.ones(2), 10**400], ids=lambda v: str(v)[:8])
def test_scalars_of_the_epilogue_are_numbers(backend: str | None, name: str, value: Any) -> None:
    # float32(None) is NaN: the product would be full of NaN without an error
    a, out = sf.convert(W, "csr"), np.ones((4, 3), np.float32)
    text = re.escape(f"{name}: expected a number, got {value!r:.80}")
    with pytest.raises(TypeError, match=text):
        sf.spmm(a, X, out=out, backend=backend, **{name: value})
    with pytest.raises(TypeError, match=text):
        sf.linear(X.T.copy(), a, out=out.T.copy(), backend=backend, **{name: value})
    plan = sf.plan(a, n=3, backend=backend, epilogue=True)
    with pytest.raises(TypeError, match=text):
        plan(X, out=out, **{name: value})
    assert (out == 1).all()
    assert (plan(X, out=out, alpha=np.float16(2), beta=True) == 2 * (W @ X) + 1).all()


def test_operands_of_no_or_another_library() -> None:
    a = sf.convert(W, "csr")
    with pytest.raises(ValueError, match=r"B: expected a matrix \[K, N\], got shape \(\)"):
        sf.spmm(a, np.array(1.0, np.float32))
    with pytest.raises(TypeError, match=r"out: expected numpy\.ndarray like B, got list"):
        sf.spmm(a, X, out=[[0.0] * 3] * 4)
    with pytest.raises(TypeError, match=r"out: expected numpy\.ndarray like x, got list"):
        sf.linear(X.T.copy(), a, out=[[0.0] * 4] * 3)
    for backend in ("cpu", "reference"):
        with pytest.raises(TypeError, match="bias: expected a numpy array, got list"):
            sf.plan(a, n=3, epilogue=True, backend=backend)(X, bias=[1.0] * 4)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, bool, complex], ids=lambda d: d.__name__)
def test_no_product_is_cut_to_integers(dtype: Any) -> None:
    a, out = sf.convert(W * np.float32(1.5), "csr"), np.zeros((4, 3), dtype)
    with pytest.raises(
        sf.errors.NoKernelError, match=rf"reference\.spmm: out\.dtype must be one of .*, got {out.dtype}"
    ):
        sf.spmm(a, X, out=out)
    whole, x = sf.convert(W.astype(np.int8), "csr"), X.astype(np.int8)
    assert sf.spmm(whole, x).dtype == np.int32
    wide = np.full((4, 3), 7, np.int64)
    for left, right in ((a, x), (whole, X / 2)):
        with pytest.raises(sf.errors.NoKernelError, match=r"out\.dtype must be one of .*, got int64"):
            sf.spmm(left, right, out=wide)
    assert (sf.spmm(whole, x, out=wide) == W @ X).all()
    with pytest.raises(TypeError, match="alpha, beta and bias need a C of floating-point values, got int64"):
        sf.spmm(whole, x, out=wide, alpha=0.5)
    if dtype in (np.int8, bool):  # their sums do not fit
        with pytest.raises(sf.errors.NoKernelError, match="int32, int64, got"):
            sf.spmm(whole, x, out=out)


@pytest.mark.parametrize("dtype", [np.int64, bool, complex], ids=lambda d: d.__name__)
def test_operands_of_no_value_type_are_named_with_the_cast(dtype: Any) -> None:
    a, x = sf.convert(W, "csr"), X.astype(dtype)
    for name, call in {"B": lambda: sf.spmm(a, x), "x": lambda: sf.linear(x.T, a)}.items():
        with pytest.raises(
            sf.errors.ArrayError, match=rf"{name}: dtype {x.dtype} is not .*, as by {name}\.astype\('float32'\)"
        ):
            call()


def test_a_mask_is_not_lost() -> None:
    x = np.ma.masked_array(W, W > 2)
    for call in (lambda: sf.convert(x, "csr"), lambda: sf.spmm(x, X), lambda: sf.spmm(W, x), lambda: sf.explain(W, x)):
        with pytest.raises(sf.errors.UsageError, match=r"a masked array: its mask would be lost; use x\.filled\(0\)"):
            call()
    assert sf.convert(x.filled(0), "csr").nnz == 2


def test_from_csr_of_something_else() -> None:
    with pytest.raises(
        sf.errors.UsageError, match=r"bsr: from_csr: expected a CSR, got csr_array; use convert\(x, 'bsr'\)"
    ):
        sf.BSR.from_csr(sp.csr_array(W))  # type: ignore[arg-type]


@pytest.mark.parametrize("b", [X.tolist(), sf.convert(X, "dense")], ids=["list", "dense"])
def test_explain_and_plan_take_what_spmm_takes(b: Any) -> None:
    a = sf.convert(W, "csr")
    assert sf.explain(a, b).chosen in ("cpu.spmm_csr", "reference.spmm")
    assert sf.explain(a, np.asarray(X[:, 0])).problem == sf.explain(a, np.asarray(X[:, :1])).problem
    assert (sf.plan(a, B=b)(np.asarray(X, "f8" if isinstance(b, list) else "f4")) == sf.spmm(a, b)).all()


@pytest.mark.parametrize(
    ("b", "fix"),
    [(sp.csr_array(X), r"got a sparse matrix \(csr_array\); use {}\.toarray\(\)"),
     (sf.convert(X, "csr"), r"got a sparse matrix \(CSR\); use {}\.to_dense\(\)"),
     (sf.convert(X.T.copy(), "bsr", blocksize=1).T, r"got a sparse matrix \(Transposed\); use {}\.to_dense\(\)")],
    ids=["scipy", "format", "transposed"],
)  # fmt: skip
def test_a_sparse_right_hand_side_is_refused(b: Any, fix: str) -> None:
    """It was made dense, silently and however large."""
    a = sf.convert(W, "csr")
    for call in (lambda: sf.spmm(a, b), lambda: a @ b, lambda: sf.plan(a, B=b), lambda: sf.explain(a, b)):
        with pytest.raises(sf.errors.UsageError, match="B: expected a dense operand, " + fix.format("B")):
            call()
    with pytest.raises(sf.errors.UsageError, match="x: expected a dense operand, " + fix.format("x")):
        sf.linear(b, a)


def test_windows_that_overlap_have_no_leading_dimension() -> None:
    a, line = sf.convert(W, "csr"), np.arange(20, dtype=np.float32)
    for strides in ((4, 8), (8, 4), (0, 4), (4, 0)):
        b = np.lib.stride_tricks.as_strided(line, (4, 3), strides)
        assert sf.explain(a, b).problem.b_layout == "strided", strides
        assert (sf.spmm(a, b) == W @ b).all()


def test_torch_operands_beside_others() -> None:
    torch = pytest.importorskip("torch")
    a, x = sf.convert(W, "csr"), torch.tensor(X)
    assert sf.explain(a, x).problem == sf.explain(a, X).problem
    assert sf.plan(a, B=x, out=torch.empty(4, 3)).problem == sf.plan(a, B=X).problem
    with pytest.raises(TypeError, match=r"out: expected numpy\.ndarray like B, got Tensor"):
        sf.spmm(a, X, out=torch.empty(4, 3))
    for given in ({"out": np.empty((4, 3), np.float32)}, {"bias": np.ones(4, np.float32)}):
        with pytest.raises(TypeError, match=rf"{next(iter(given))}: expected a torch tensor, got numpy\.ndarray"):
            sf.spmm(a, x, **given)
    with pytest.raises(sf.errors.UsageError, match=r"torch tensor .*meta.* it has no contents"):
        sf.spmm(a, x.to("meta"))

    class Mine(torch.Tensor):  # type: ignore[name-defined, misc]
        pass

    assert isinstance(sf.spmm(a, x.as_subclass(Mine)), torch.Tensor)
    assert a.to(torch.device("cpu")) is a


@pytest.mark.parametrize("fmt", sf.FORMATS, ids=lambda f: f.name)
def test_operators_and_numpy(fmt: type[sf.Format]) -> None:
    w, x = W.astype(np.float16), X.astype(np.float16)
    a = sf.convert(w, fmt, **({"n": 2, "m": 4, "vector_length": 1} if fmt is sf.VectorNM else {}))
    assert (a @ x == w @ x).all()
    assert (a @ x[:, 0] == w @ x[:, 0]).all()
    assert (x.T @ a == x.T @ w).all()  # numpy would multiply with an array of one object
    assert (w != a) is True  # no array of verdicts
    for call in (np.asarray, np.array):
        with pytest.raises(TypeError, match=rf"{a.name}: this is a matrix of spformat, no array; use to_dense\(\)"):
            call(a)
    for total in (lambda: a + w, lambda: w + a, lambda: a - a, lambda: w - a, lambda: sum([a, a])):
        with pytest.raises(TypeError, match=rf"{a.name}: sums of matrices are not defined"):
            total()
    torch = pytest.importorskip("torch")
    assert torch.equal(a @ torch.tensor(x), torch.tensor(w @ x))


def test_gradients_are_not_cut_off_in_silence() -> None:
    torch = pytest.importorskip("torch")
    a, x, bias = sf.convert(W, "csr"), torch.tensor(X), torch.ones(4, requires_grad=True)
    asks = x.clone().requires_grad_()
    for name, call in {
        "B": lambda: sf.spmm(a, asks),
        "x": lambda: sf.linear(asks.T, a),
        "bias": lambda: sf.spmm(a, x, bias=bias),
        "alpha": lambda: sf.linear(x.T, a, alpha=bias.sum()),
        "beta": lambda: sf.spmm(a, x, out=torch.ones(4, 3), beta=bias.sum()),
        "A": lambda: sf.spmm(torch.tensor(W, requires_grad=True), x),
        "W": lambda: sf.linear(x.T, torch.nn.Parameter(torch.tensor(W))),
    }.items():
        with pytest.raises(
            sf.errors.UsageError, match=rf"{name}: this tensor requires a gradient, .* {name}\.detach\(\)"
        ):
            call()
        with torch.no_grad():
            assert not call().requires_grad
    with pytest.raises(sf.errors.UsageError, match="out: this tensor requires a gradient"):
        sf.spmm(a, x, out=torch.zeros(4, 3, requires_grad=True))
    assert (sf.spmm(a, asks.detach(), bias=bias.detach()) == torch.tensor(W @ X + 1)).all()


@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_out_of_a_vector_is_a_vector(backend: str | None) -> None:
    a, x = sf.convert(W, "csr"), X[:, 0].copy()
    out = np.zeros(4, np.float32)
    assert sf.spmm(a, x, out, backend) is out  # as for a matrix
    assert (out == W @ x).all()
    assert sf.spmm(a, x, out, backend, alpha=2.0, beta=1.0, bias=x) is out
    assert (out == 3 * (W @ x) + x).all()
    assert (sf.spmm(a, x.tolist(), backend=backend) == W @ x).all()  # it was refused, where lists of rows are taken
    assert (sf.linear(x.tolist(), a, backend=backend) == W @ x).all()
    for shape in ((4, 1), (5,), ()):
        text = re.escape(f"out: expected shape (4,) for a B of one dimension, got {shape}")
        with pytest.raises(ValueError, match=text):  # it said: expected (4, 1), got (4, 1, 1)
            sf.spmm(a, x, np.zeros(shape, np.float32), backend)
    with pytest.raises(TypeError, match=r"out: expected numpy\.ndarray like B, got list"):
        sf.spmm(a, x, [0.0] * 4, backend)
    b = sf.convert(np.ones((2, 3), np.float32), "csr")
    assert sf.spmm(b.T, x[:2], np.zeros(3, np.float32), backend).shape == (3,)


def test_a_plan_ignores_nothing_that_it_is_given() -> None:
    """A plan for B=X, out_dtype="float64" wrote float32; out without B was not looked at."""
    a, out = sf.convert(W, "csr"), np.zeros((4, 3), np.float64)
    assert sf.plan(a, B=X, out_dtype="float64")(X).dtype == np.float64
    assert sf.plan(a, B=X, out_layout="col")(X).flags.f_contiguous
    assert sf.plan(a, B=np.asfortranarray(X), out_layout="row")(np.asfortranarray(X)).flags.c_contiguous
    assert sf.plan(a, B=X, out=out)(X).dtype == np.float64
    for array, extra in (("B", {"b_dtype": "float16"}), ("B", {"b_layout": "col"}), ("out", {"out_layout": "col"})):
        with pytest.raises(sf.errors.UsageError, match=f"plan: {array} has .* expected no {next(iter(extra))} beside"):
            sf.plan(a, B=X, out=out, **extra)
    with pytest.raises(sf.errors.UsageError, match="plan: out: expected B beside it"):
        sf.plan(a, n=3, out=out)


def test_the_dtype_of_the_c_of_a_plan() -> None:
    a = sf.convert(W, "csr")
    for given, name in (("bf16", "bfloat16"), ("half", "float16"), (np.float64, "float64"), ("FP32", "float32")):
        assert sf.plan(a, n=3, out_dtype=given).problem.out_dtype == name
    whole = sf.convert(W.astype(np.int8), "csr")
    for given in ("int32", np.int64):
        assert sf.plan(whole, n=3, out_dtype=given)(X.astype(np.int8)).dtype == np.dtype(given)
    for given in ("x", "uint8", object()):
        with pytest.raises(sf.errors.ArrayError, match=r"out_dtype: dtype .* is not a value type; use one of float64"):
            sf.plan(a, n=3, out_dtype=given)


@pytest.mark.parametrize("n", [-1, 1.5, "16"])
def test_columns_of_a_plan(n: Any) -> None:
    a = sf.convert(W, "csr")
    for call in (sf.plan, sf.explain):
        with pytest.raises(sf.errors.UsageError, match=rf"n: expected a number of columns, got {n!r}"):
            call(a, n=n)
    assert sf.plan(a, n=np.int64(16)).problem == sf.plan(a, n=16).problem


def test_a_plan_without_an_epilogue_takes_none() -> None:
    plan, out = sf.plan(sf.convert(W, "csr"), n=3), np.full((4, 3), 7, np.float32)
    for given in ({"alpha": 2}, {"beta": 1}, {"bias": np.ones(4, np.float32)}):
        with pytest.raises(sf.errors.UsageError, match=r"need plan\(\.\., epilogue=True\)"):
            plan(X, out=out, **given)
    assert (out == 7).all()
    assert (plan(X, out=out, alpha=1, beta=0, bias=None) == W @ X).all()


def test_a_number_of_columns_is_taken_as_it_is() -> None:
    """The problem has N itself, not rounded to a class."""
    a = sf.convert(W, "csr")
    for n in (0, 1, 7, 333, 4097, np.int32(5)):
        assert columns(n) == n
        assert sf.plan(a, n=n).problem.n == n


def test_a_layout_nobody_has() -> None:
    for given in ("b_layout", "out_layout"):
        with pytest.raises(sf.errors.UsageError, match=rf"{given}: expected row, col or strided, got 'column'"):
            sf.plan(sf.convert(W, "csr"), n=4, **{given: "column"})


@pytest.mark.parametrize("target", [None, 3, sf.Format, int, "2:3"])
def test_a_target_that_is_no_format(target: Any) -> None:
    with pytest.raises(sf.errors.UsageError, match=r"known: auto, dense, csr"):
        sf.convert(W, target)


@pytest.mark.parametrize(
    ("target", "meant"),
    [("n:m", "vector-nm"), ("CSR", "csr"), ("ELL", "ell-buckets"), ("BSR:", "bsr")],
)
def test_a_format_as_people_call_it(target: str, meant: str) -> None:
    with pytest.raises(sf.errors.UsageError, match=rf"unknown format .*; did you mean '{meant}'\?"):
        sf.convert(W, target)


def test_a_parameter_given_twice() -> None:
    with pytest.raises(sf.errors.UsageError, match="blocksize is given twice, as 4x4 and 2x2"):
        sf.convert(W, "bsr:blocksize=4x4,blocksize=2x2")


def test_bytes_in_the_order_of_another_machine() -> None:
    a = sf.convert(W, "csr")
    with pytest.raises(TypeError, match=r"B: this plan takes float32, got >f4; give B\.astype\('float32'\)"):
        sf.spmm(a, X.astype(">f4"))
    assert (sf.spmm(a, X.astype(">f4").astype("float32")) == W @ X).all()


def test_tensors_of_torch_are_saved_as_arrays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    w = torch.arange(6.0).reshape(2, 3)
    kinds = {
        "bf16": w.bfloat16(), "fp8": w.to(torch.float8_e4m3fn), "turned": w.t(), "every second": w[:, ::2],
        "ids": torch.arange(3), "flags": torch.tensor([True, False]), "scalar": torch.tensor(2.0),
        "bias": torch.nn.Parameter(torch.ones(2)), "none": torch.zeros(0, 3),
    }  # fmt: skip
    sf.save(tmp_path / "a.safetensors", {"w": sf.convert(w, "csr"), **kinds})
    sf.save_dense(tmp_path / "b.safetensors", kinds)
    loaded = sf.load(tmp_path / "a.safetensors")
    for name, t in kinds.items():
        raw = t.detach().contiguous().view(torch.uint8).numpy() if t.dim() else t.numpy()
        assert loaded[name].shape == tuple(t.shape)
        assert loaded[name].dtype.name == str(t.dtype).removeprefix("torch.")
        assert loaded[name].tobytes() == raw.tobytes()
        with sf.safe_open(tmp_path / "b.safetensors") as f:
            assert f.array(name).tobytes() == raw.tobytes()
    with pytest.raises(sf.errors.UsageError, match=r"tensor 'x': torch tensor \(.*meta.*it has no contents"):
        sf.save(tmp_path / "c.safetensors", {"x": w.to("meta")})
    for sparse in (w.to_sparse(), w.bfloat16().to_sparse()):
        with pytest.raises(sf.errors.UsageError, match=r"tensor 'x': expected a Format, .* use convert\(x, 'csr'\)"):
            sf.save(tmp_path / "c.safetensors", {"x": sparse})
        with pytest.raises(sf.errors.UsageError, match=r"B: expected a dense operand, got a sparse matrix \(Tensor\)"):
            sf.spmm(W[:, :2], sparse)


def test_names_that_cannot_be_saved(tmp_path: Path) -> None:
    a, path = sf.convert(W, "csr"), tmp_path / "a.safetensors"
    with pytest.raises(sf.errors.UsageError, match=r"'w\.data'"):
        sf.save(path, {"w": a, "w.data": np.ones(3, np.float32)})
    with pytest.raises(sf.errors.UsageError, match=r"tensor name: '__metadata__' is taken"):
        sf.save(path, {"__metadata__": np.ones(3)})
    with pytest.raises(sf.errors.OutputError, match="null byte"):
        sf.save(str(tmp_path / "a\0b"), {"w": a})
    with pytest.raises(sf.errors.UsageError, match=r"got builtins\.list; .* numpy array"):
        sf.save(path, {"b": [1.0]})
    assert not any(tmp_path.iterdir())


def test_panels_of_another_type_are_not_taken_for_bytes(tmp_path: Path) -> None:
    w = np.arange(8, dtype=np.float32).reshape(4, 2)

    def write(*pieces: Any) -> Any:
        with create(tmp_path / "a.safetensors", [outline("w", sf.Dense.from_dense(w))], overwrite=True) as f:
            f.put_array("w", "data", pieces)
        return sf.load(tmp_path / "a.safetensors")["w"].data.tolist()

    for wrong in (w.astype(np.int32), np.ones((4, 4), np.float16), w.reshape(2, 4)):
        with pytest.raises(sf.errors.UsageError, match=r"put: expected pieces of F32 \(4, 2\), got"):
            write(wrong)
    assert not any(tmp_path.iterdir())
    for right in ((w[:3], w[3:]), (w.tobytes(),), (w.view(np.uint8),), (w[:1].astype(">f4"), w[1:]), (w.ravel(),)):
        assert write(*right) == w.tolist()


def test_rows_of_an_array_are_consecutive(tmp_path: Path) -> None:
    sf.save(tmp_path / "a.safetensors", {"w": W})
    with sf.safe_open(tmp_path / "a.safetensors") as f:
        assert (f.array("w", slice(1, 3)) == W[1:3]).all()
        for rows in (slice(0, 4, 2), slice(3, 0, -1), 3):
            with pytest.raises(sf.errors.UsageError, match=r"rows: expected slice\(begin, end\), got"):
                f.array("w", rows)  # type: ignore[arg-type]


def test_save_dense_takes_a_mapping(tmp_path: Path) -> None:
    with pytest.raises(sf.errors.UsageError, match=r"save_dense: expected \{name: tensor\}, got list"):
        sf.save_dense(tmp_path / "a.safetensors", [W])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["1GiB", -1, 1.5])
def test_a_limit_is_a_number(value: Any) -> None:
    with pytest.raises(sf.errors.UsageError, match=rf"limits: memory: expected a number >= 0 or None, got {value!r}"):
        limits.using(memory=value).__enter__()
    with limits.using(memory=np.int64(2**30), tensors=None):
        assert sf.convert(W, "csr").nnz == 4
    with limits.using(memory=0), pytest.raises(sf.errors.LimitError, match="0 allowed"):
        sf.convert(W, "csr").to_dense()


@pytest.mark.parametrize("wrong", [-1, "64MB", None, float("nan")], ids=repr)
def test_a_workspace_is_a_number_of_bytes(wrong: Any) -> None:
    a = sf.convert(np.eye(8, dtype=np.float32), "csr")
    for call in (
        lambda: sf.plan(a, n=4, workspace=wrong),
        lambda: sf.plan(a, B=np.ones((8, 2), np.float32), workspace=wrong),
        lambda: sf.recommend(a, n=[4], workspace=wrong),
    ):
        with pytest.raises(sf.errors.UsageError, match=r"workspace: expected a number of bytes >= 0, got "):
            call()
    for most in (0, 1e9, float("inf"), np.int64(5)):
        assert sf.plan(a, n=4, workspace=most)


def test_sizes_of_the_command_are_not_negative(tmp_path: Path) -> None:
    sf.save(tmp_path / "w.safetensors", {"w": sf.convert(W, "csr")})
    for verb, option in (("explain", "--max-workspace"), ("recommend", "--max-workspace"), ("inspect", "--max-memory")):
        for wrong in ("-1", "-2GiB"):
            answer = command(verb, tmp_path / "w.safetensors", f"{option}={wrong}")
            assert (answer.code, f"expected a size like 8GiB or 500MB, got '{wrong}'" in answer.err) == (2, True)


@pytest.mark.parametrize("out", [3, "y", [[0.0]], sf.convert(np.eye(4), "csr")], ids=lambda x: type(x).__name__)
def test_a_plan_names_an_out_that_is_no_array(out: Any) -> None:
    """It was an AttributeError of the check whether ``out`` overlaps A."""
    B = np.ones((4, 2))
    for target in ("csr", "dense", "coo"):
        p = sf.plan(sf.convert(np.eye(4), target), B=B)
        with pytest.raises(TypeError, match=rf"out: expected a numpy array, got {type(out).__name__}"):
            p(B, out=out)
