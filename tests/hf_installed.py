"""What tests of Hugging Face transformers need: a file that imports this is skipped where something is not installed."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="transformers >= 5 is not installed: pip install 'spformat[hf]'"
)
hf = pytest.importorskip("spformat.hf")
