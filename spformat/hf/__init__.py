"""spformat in Hugging Face transformers: importing this package lets ``from_pretrained`` load packed folders.

import spformat.hf
model = AutoModelForCausalLM.from_pretrained("./model-sp")     # of `spformat convert --layout transformers`
model.save_pretrained("./again")                               # a packed folder, too

Needs torch and transformers >= 5. Page: docs/huggingface.md.
"""

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as e:
    if e.name not in ("torch", "transformers"):
        raise
    raise ModuleNotFoundError(f"spformat.hf needs {e.name}: pip install 'spformat[hf]'", name=e.name) from e

from .adapters import with_sparse_layers
from .config import SpformatConfig
from .quantizer import SpformatQuantizer
from .saving import save_pretrained, sparsify

__all__ = ["SpformatConfig", "SpformatQuantizer", "save_pretrained", "sparsify", "with_sparse_layers"]
