"""spformat: pruned weights and sparse matrices in the format a GPU runs fastest.

import spformat as sf
a = sf.convert(w, "two-four")            # exact, or StructureError says why not
sf.save("w.safetensors", {"w": a})
y = sf.spmm(sf.load("w.safetensors")["w"], x)
"""

from typing import TYPE_CHECKING, Any

from . import errors, limits
from .dispatch.api import explain, linear, plan, spmm, use_backend
from .dispatch.select import Explanation
from .formats import (
    BSR,
    COO,
    CSC,
    CSR,
    DBSR,
    FORMATS,
    SRBCRS,
    Bitmask,
    Dense,
    ELLBuckets,
    Format,
    Stack,
    Sum,
    TwoFour,
    VectorNM,
    by_name,
    register,
)
from .formats import picture as _picture  # noqa: F401 - what notebooks show of a matrix
from .formats.convert import convert, stack
from .formats.decompose import decompose
from .formats.foreign import from_scipy, from_torch
from .opening import load, open
from .preprocess import coordinates as _coordinates  # noqa: F401 - convert(x, "auto") asks it for the smallest
from .products.kernel import Accepted, Rejected
from .products.plan import Plan
from .products.problem import Problem
from .storage.container import safe_open, save, save_dense

if TYPE_CHECKING:
    from .dispatch.recommend import Recommendation, Recommendations, recommend
    from .measure.tune import Trial, Tuned, tune


def __getattr__(name: str) -> Any:
    """``recommend`` and ``tune`` with their classes: imported when they are used, because the import takes 30 ms."""
    if name in ("Recommendation", "Recommendations", "recommend"):
        from .dispatch import recommend as recommending

        return getattr(recommending, name)
    if name in ("Trial", "Tuned", "tune"):
        from .measure import tune as tuning

        return getattr(tuning, name)
    first = f": import spformat.{name} first" if name in ("checkpoint", "hf", "measure", "torch") else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{first}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__version__ = "0.2.0"

__all__ = [
    "BSR",
    "COO",
    "CSC",
    "CSR",
    "DBSR",
    "FORMATS",
    "SRBCRS",
    "Accepted",
    "Bitmask",
    "Dense",
    "ELLBuckets",
    "Explanation",
    "Format",
    "Plan",
    "Problem",
    "Recommendation",
    "Recommendations",
    "Rejected",
    "Stack",
    "Sum",
    "Trial",
    "Tuned",
    "TwoFour",
    "VectorNM",
    "by_name",
    "convert",
    "decompose",
    "errors",
    "explain",
    "from_scipy",
    "from_torch",
    "limits",
    "linear",
    "load",
    "open",
    "plan",
    "recommend",
    "register",
    "safe_open",
    "save",
    "save_dense",
    "spmm",
    "stack",
    "tune",
    "use_backend",
]  # fmt: skip
