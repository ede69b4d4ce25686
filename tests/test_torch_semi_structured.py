"""torch's 2:4 tensors against torch's own converter, on the CPU: same bytes one way, same matrix the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import values

from spformat import TwoFour, convert, from_torch
from spformat.arrays.dtypes import bits
from spformat.arrays.torch_tensors import array_to_torch, torch_to_array
from spformat.errors import ArrayError, PatternError, StructureError, UsageError
from spformat.interop.torch_semi_structured import from_semi_structured, pack, to_semi_structured, unpack
from spformat.preprocess import masks

torch: Any = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")
conversions: Any = pytest.importorskip("torch.sparse._semi_structured_conversions", reason="torch moved its converter")
semi: Any = pytest.importorskip("torch.sparse.semi_structured")

SHAPES = [(32, 64), (64, 128), (96, 320)]
DTYPES = ("float16", "bfloat16")
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor:UserWarning")


def fitting(shape: tuple[int, int], dtype: str, share: float, nan: bool = False) -> np.ndarray[Any, Any]:
    """2:4; of the two values of a group, ``share`` is kept: empty groups and single values in every position.

    Without NaN: torch's converters on the CPU make all of them the same.
    """
    rng = np.random.default_rng(shape[1])
    x = values(rng, shape, dtype)
    x = masks.apply(x, masks.magnitude_nm(x, 2, 4, nonfinite="keep"))
    raw = x.view(np.uint16)
    raw[(rng.random(shape) >= share) | (raw == 0x8000)] = 0
    if not nan:
        x[np.isnan(x.astype(np.float32))] = 3
    return x


def theirs(x: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    return conversions.sparse_semi_structured_from_dense_cutlass(array_to_torch(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways_like_torch(shape: tuple[int, int], dtype: str, share: float) -> None:
    x = fitting(shape, dtype, share)
    packed, meta = theirs(x)
    a = TwoFour.from_dense(x, meta_order="cutlass-sm80")
    for order in ("cutlass-sm80", "fragment"):
        ours = pack(a.with_meta_order(order))
        np.testing.assert_array_equal(bits(ours[0]), bits(torch_to_array(packed)))
        np.testing.assert_array_equal(ours[1], meta.numpy())
    assert unpack(torch_to_array(packed), meta.numpy(), shape) == a
    # What we store is legal for torch as it stands: its decoder reads our own words.
    direct = conversions.sparse_semi_structured_to_dense_cutlass(
        array_to_torch(a.data), torch.from_numpy(a.meta.view(np.int16).reshape(shape[0], -1))
    )
    np.testing.assert_array_equal(bits(torch_to_array(direct)), bits(x))


def test_groups_with_two_values_have_the_same_bytes_here_and_there() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(1, 9, (64, 192)).astype(np.float16)
    x = masks.apply(x, rng.random((64, 48, 4)).argsort(axis=2).reshape(64, 192) < 2)
    packed, meta = theirs(x)
    a = TwoFour.from_dense(x, meta_order="cutlass-sm80")
    np.testing.assert_array_equal(a.data, packed.numpy())
    np.testing.assert_array_equal(a.meta.view(np.int16), meta.numpy().reshape(-1))


def test_nan_keeps_its_payload() -> None:
    x = fitting((64, 128), "float16", 0.7, nan=True)
    assert np.unique(x[np.isnan(x)].view(np.uint16)).size > 2
    a = TwoFour.from_dense(x, meta_order="cutlass-sm80")
    assert unpack(*pack(a), (64, 128)) == a
    assert from_semi_structured(to_semi_structured(a)) == a


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors(dtype: str) -> None:
    x = fitting((64, 128), dtype, 0.7)
    a = TwoFour.from_dense(x)
    t = to_semi_structured(a)
    assert type(t) is semi.SparseSemiStructuredTensorCUTLASS
    assert tuple(t.shape) == (64, 128)
    np.testing.assert_array_equal(bits(torch_to_array(t.to_dense())), bits(x))
    assert from_semi_structured(t) == a.with_meta_order("cutlass-sm80")


def test_foreign_nibbles() -> None:
    """Positions the other way round, and one position twice with a zero: both mean a matrix of ours."""
    x = np.zeros((32, 64), np.float16)
    x[0, 1], x[0, 3], x[5, 2] = 4, 7, 9
    packed, meta = (t.numpy().copy() for t in theirs(x))
    words = meta.reshape(-1).view(np.uint16)
    assert words[0] == 0xEEED
    packed[0, :2], words[0] = (7, 4), 0xEEE7  # column 3 first
    at, packed[5, :2] = 8 * 5, (0, 9)
    words[at] = words[at] & 0xFFF0 | 0xA  # column 2 twice
    assert unpack(packed, meta, (32, 64)) == TwoFour.from_dense(x, meta_order="cutlass-sm80")
    packed[5, 0] = 1
    with pytest.raises(PatternError, match="row 5, group 0") as e:
        unpack(packed, meta, (32, 64))
    assert (e.value.index, e.value.value, e.value.count) == ((5, 0), 0xA, 1)


def test_refusals() -> None:
    x = fitting((32, 64), "float16", 1.0)
    packed, meta = (t.numpy() for t in theirs(x))
    for shape in ((30, 64), (32, 48)):
        with pytest.raises(StructureError, match="multiple"):
            pack(TwoFour.from_dense(np.zeros(shape, np.float16)))
        with pytest.raises(ArrayError, match="multiple"):
            unpack(packed, meta, shape)
    with pytest.raises(ArrayError, match="packed: expected float16 or bfloat16"):
        unpack(packed.astype(np.float32), meta, (32, 64))
    with pytest.raises(ArrayError, match="meta: expected int16"):
        unpack(packed, meta.astype(np.int32), (32, 64))
    with pytest.raises(UsageError, match="to_dense"):
        from_semi_structured(torch.zeros(2, 2))
    with pytest.raises(UsageError, match="torch_semi_structured"):
        from_torch(to_semi_structured(TwoFour.from_dense(x)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(dtype: str) -> None:
    """The same bytes on the device of the matrix, and torch multiplies with the tensor that it gets."""
    a = TwoFour.from_dense(fitting((64, 128), dtype, 0.7), meta_order="cutlass-sm80")
    t = to_semi_structured(a.to("cuda"))
    packed, meta = pack(a)
    np.testing.assert_array_equal(torch_to_array(t.packed.cpu()).view(np.uint16), bits(packed))
    np.testing.assert_array_equal(t.meta.cpu().numpy(), meta)
    back = from_semi_structured(t)
    assert back.device == "cuda:0"
    assert back.to("cpu") == a


def test_only_two_four_is_packed() -> None:
    for target in ("csr", "bsr", "dense"):
        a: Any = convert(np.eye(64, dtype=np.float16), target)
        with pytest.raises(UsageError, match=rf"expected a TwoFour, got {type(a).__name__}; use convert"):
            pack(a)
