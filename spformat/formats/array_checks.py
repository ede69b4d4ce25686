"""The O(1) check of arrays against their declarations; nothing here reads the contents."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.dtypes import dtype_name
from ..arrays.library import device_of, index_dtype, is_cupy
from .declare import INDEX, POS, VALUE, ArrayDeclaration


def array_problems(
    declared: tuple[ArrayDeclaration, ...], arrays: dict[str, Any], sizes: dict[str, int], value_dtypes: tuple[str, ...]
) -> list[tuple[str, str]]:
    """(array, text) for every difference between arrays and their declarations: dtypes, ranks, lengths and devices.

    sizes: label of a dimension -> its size. For a label that is missing, the first array that has it decides the size.
    """
    problems: list[tuple[str, str]] = []
    devices: dict[str, str] = {}
    well_shaped = []
    for d in declared:
        a = arrays[d.name]
        if not isinstance(a, np.ndarray) and not is_cupy(a):
            problems.append((d.name, f"{d.name}: expected a numpy or CuPy array, got {type(a).__name__}"))
            continue
        if type(a) is not np.ndarray and isinstance(
            a, (np.ma.MaskedArray, np.matrix)
        ):  # scans would skip what is masked
            text = f"{d.name}: expected a plain array, got {type(a).__name__}; use .filled(0) or np.asarray(..)"
            problems.append((d.name, text))
            continue
        devices[d.name] = device_of(a)
        shape = a.shape
        if len(shape) != len(d.dims):
            wanted = ", ".join(d.dims)
            text = f"{d.name}: expected {len(d.dims)} dimensions [{wanted}], got shape {shape}"
            problems.append((d.name, text))
            continue
        for label, size in zip(d.dims, shape, strict=True):
            if size != sizes.setdefault(label, size):
                text = f"{d.name}: dimension {label} = {sizes[label]}, got {size} (shape {shape})"
                problems.append((d.name, text))
        if not a.flags.c_contiguous:
            problems.append((d.name, f"{d.name}: expected C order; use ascontiguousarray"))
        well_shaped.append((d, a.dtype))
    for d, dtype in well_shaped:
        accepted = _dtypes_of(d, sizes, value_dtypes)
        if dtype_name(dtype) not in accepted or not dtype.isnative:
            problems.append((d.name, f"{d.name}: expected dtype {' or '.join(accepted)}, got {dtype}"))
    if len(set(devices.values())) > 1:
        problems.append(("", "arrays on several devices: " + ", ".join(f"{k} {v}" for k, v in devices.items())))
    return problems


def _dtypes_of(d: ArrayDeclaration, sizes: dict[str, int], value_dtypes: tuple[str, ...]) -> tuple[str, ...]:
    if d.kind == VALUE:
        return value_dtypes
    if d.kind == POS:
        return ("uint8",)
    if d.kind != INDEX:
        return (d.kind,)
    bound = sizes.get(d.bound or "")
    # If no array length decides the bound (items among padding), both index types are accepted.
    return ("int32", "int64") if bound is None else (dtype_name(index_dtype(bound)),)
