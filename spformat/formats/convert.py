"""convert(x, target): any matrix into any format, exactly or not at all."""

from __future__ import annotations

from typing import Any

from ..arrays.library import current_device
from . import parse_spec
from .base import Format
from .dense import Dense
from .foreign import as_format


def convert(x: Any, target: str | type[Format], **params: Any) -> Format:
    """``x`` in the format ``target``, on the device where ``x`` is.

    x: any spformat object, numpy or CuPy array [M, K], scipy.sparse, torch tensor.
    target: a format id, with params if you like ("bsr", "bsr:blocksize=64x64", "vector-nm:n=2,m=4"), or a class.
    params: the parameters of the format; they override those in the text.

    The result has every value of ``x`` with its bits; only -0.0 may become +0.0. Returns ``x`` itself if it has that
    format already. Raises StructureError, which says why, if the format cannot represent ``x``; UsageError for an
    unknown format or a parameter out of range.
    """
    if isinstance(target, type) and issubclass(target, Format) and target is not Format:
        fmt, given = target, params
    else:
        fmt, in_text = parse_spec(str(target))
        given = in_text | params
    a = as_format(x)
    if type(a) is fmt:
        a.ensure_valid()
        resolved = fmt.resolve_params(a.params() | given)
        if resolved == a.params():
            return a
    fmt.accepts(a.dtype)
    with current_device(a.values):
        if isinstance(a, Dense):
            return fmt.from_dense(a.data, **given)
        if fmt is Dense:
            fmt.resolve_params(given)
            return Dense.from_dense(a.to_dense())
        return fmt.from_csr(a.to_csr(), **given)
