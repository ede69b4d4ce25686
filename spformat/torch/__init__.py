"""spformat in torch: a module, operators, and models with sparse weights.

import spformat.torch as st
st.sparsify(model, "re:.*mlp.*=two-four")          # nn.Linear -> st.SparseLinear, exact or refused
st.load_into(model, "./model-sp", device="cuda")   # a packed checkpoint, tensor by tensor

``import spformat`` does not import this package, which needs torch. Page: docs/torch.md.
"""

from . import safe_globals
from .description import Description
from .functional import linear, spmm
from .loading import load_into
from .models import densify, sparsify
from .module import SparseLinear

safe_globals.allow()

__all__ = ["Description", "SparseLinear", "densify", "linear", "load_into", "sparsify", "spmm"]
