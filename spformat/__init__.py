"""spformat: pruned weights and sparse matrices in the format a GPU runs fastest.

import spformat as sf
a = sf.convert(w, "two-four")            # exact, or StructureError says why not
sf.save("w.safetensors", {"w": a})
y = sf.spmm(sf.load("w.safetensors")["w"], x)
"""

from .dispatch.api import explain, linear, plan, spmm, use_backend
from .dispatch.select import Explanation
from .errors import (
    ArrayError,
    ContainerError,
    DescriptorError,
    DeviceError,
    DeviceFault,
    DeviceMemoryError,
    DeviceUnavailable,
    DurabilityUnknown,
    FormatError,
    IndexBoundsError,
    InputError,
    IntegrityError,
    InternalError,
    InvariantError,
    LimitError,
    LockedError,
    NoKernelError,
    OrderError,
    OutputError,
    PathError,
    PatternError,
    PointerError,
    SpformatError,
    StructureError,
    UsageError,
    VersionError,
    WriteError,
)
from .formats import (
    BSR,
    CSR,
    DBSR,
    FORMATS,
    SRBCRS,
    Bitmask,
    Dense,
    ELLBuckets,
    Format,
    Sum,
    TwoFour,
    VectorNM,
    by_name,
    register,
)
from .formats.convert import convert
from .formats.foreign import from_scipy, from_torch
from .products.problem import Accepted, Plan, Problem, Rejected
from .storage.container import load, safe_open, save, save_dense

__version__ = "0.1.0"

__all__ = [
    "BSR", "CSR", "DBSR", "FORMATS", "SRBCRS", "Accepted", "ArrayError", "Bitmask", "ContainerError", "Dense",
    "DescriptorError", "DeviceError", "DeviceFault", "DeviceMemoryError", "DeviceUnavailable", "DurabilityUnknown",
    "ELLBuckets", "Explanation", "Format", "FormatError", "IndexBoundsError", "InputError", "IntegrityError",
    "InternalError", "InvariantError", "LimitError", "LockedError", "NoKernelError", "OrderError", "OutputError",
    "PathError", "PatternError", "Plan", "PointerError", "Problem", "Rejected", "SpformatError", "StructureError",
    "Sum", "TwoFour", "UsageError", "VectorNM", "VersionError", "WriteError", "by_name", "convert", "explain",
    "from_scipy", "from_torch", "linear", "load", "plan", "register", "safe_open", "save", "save_dense", "spmm",
    "use_backend",
]  # fmt: skip
