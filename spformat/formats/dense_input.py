"""The check of a dense array that is to be converted."""

from __future__ import annotations

import numpy as np

from ..arrays.dtypes import VALUE_TYPES, is_native_value, is_real, value_type
from ..arrays.library import Array, current_device, is_cupy, namespace, unmasked
from ..errors import ArrayError, SpformatError, StructureError, UsageError
from ..limits import check_bytes


def checked_values(x: Array, where: str) -> Array:
    """``x`` in C order and native byte order, copied only if necessary.

    Raises ArrayError for anything but an array, UsageError unless it is 2-D, and for a masked array, StructureError
    unless its dtype is a value type.
    """
    if not isinstance(x, np.ndarray) and not is_cupy(x):
        fix = "x.to_dense(), x.toarray() or np.asarray(x), or convert(x, ..), which takes other matrices"
        raise ArrayError(f"{where}: expected a numpy or CuPy array [M, K], got {type(x).__name__}; use {fix}")
    xp = namespace(unmasked(x))
    if x.ndim == 2 and x.size and type(x) is xp.ndarray and x.flags.c_contiguous and is_native_value(x.dtype):
        return x
    if x.ndim != 2:
        stacked = "; spformat.stack takes [E, M, K]" if x.ndim == 3 else ""
        raise UsageError(f"{where}: expected a matrix [M, K], got shape {x.shape}{stacked}")
    if not x.size:  # an empty array of any extents needs no memory, but the pointers that follow from its extents do
        check_bytes(8 * sum(x.shape), f"{where}: indices of shape {x.shape}")
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    try:
        value_type(x.dtype)
    except SpformatError as e:
        message = f"{where}: values of dtype {x.dtype} are not representable; use one of {', '.join(VALUE_TYPES)}"
        if is_real(x.dtype):
            message += ", as by np.asarray(x, 'float32') or convert(x, .., dtype='float32')"
        raise StructureError(message, unit="dtype", found=str(x.dtype)) from e
    with current_device(x):
        return xp.ascontiguousarray(x)
