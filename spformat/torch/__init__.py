"""spformat in torch: a module, operators, and models with sparse weights.

import spformat.torch as st
st.sparsify(model, "re:.*mlp.*=two-four")          # nn.Linear -> st.SparseLinear, exact or refused
st.load_into(model, "./model-sp", device="cuda")   # a packed checkpoint, tensor by tensor
st.fuse_projections(model)                         # q, k and v as one product, and gate and up
st.freeze(model)                                   # on a GPU: weights once, in the order of the kernels

``import spformat`` does not import this package, which needs torch. Page: docs/torch.md.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as e:
    if e.name != "torch":
        raise
    raise ModuleNotFoundError("spformat.torch needs torch: pip install 'spformat[torch]'", name=e.name) from e

from . import safe_globals
from .description import Description
from .freezing import freeze
from .functional import linear, spmm
from .fused import FusedLinear, Projection
from .fusing import fuse_projections
from .loading import load_into
from .models import densify, sparsify
from .module import SparseLinear

safe_globals.allow()

__all__ = [
    "Description", "FusedLinear", "Projection", "SparseLinear", "densify", "freeze", "fuse_projections", "linear",
    "load_into", "sparsify", "spmm",
]  # fmt: skip
