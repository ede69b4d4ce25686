"""spformat in Hugging Face transformers: importing this package lets ``from_pretrained`` load packed folders.

import spformat.hf
model = AutoModelForCausalLM.from_pretrained("./model-sp")     # of `spformat convert --layout transformers`
model.save_pretrained("./again")                               # a packed folder, too

Needs torch and transformers >= 5. Page: docs/huggingface.md.
"""

from .adapters import with_sparse_layers
from .config import SpformatConfig
from .quantizer import SpformatQuantizer
from .saving import save_pretrained, sparsify

__all__ = ["SpformatConfig", "SpformatQuantizer", "save_pretrained", "sparsify", "with_sparse_layers"]
