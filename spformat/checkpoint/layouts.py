"""What a folder holds beside its shards and its manifest, so that model loaders find them.

"neutral": nothing; only spformat reads the folder. "transformers": an index, and a config.json that names spformat as
the quantization method, which ``import spformat.hf`` registers. Page: docs/huggingface.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from .. import limits
from ..errors import InputError, UsageError
from ..storage.stheader import PARSED

NEUTRAL = "neutral"
TRANSFORMERS = "transformers"
LAYOUTS = (NEUTRAL, TRANSFORMERS)

CONFIG = "config.json"
METHOD = "spformat"
"""``quant_method`` in the ``quantization_config`` of a config.json."""
PACKED_INDEX = "spformat.safetensors.index.json"
"""The index of the transformers layout. A loader that does not know spformat does not look for this name."""
GUARD = "import-spformat.hf-before-loading.safetensors"
"""What ``transformers_weights`` of the config.json names: a file that does not exist.

transformers alone only warns about a quantization method that it does not know, and would then fill the missing weights
with random numbers. This name stops it, and its error message says what to do. spformat.hf puts ``PACKED_INDEX`` in its
place.
"""


def check_layout(layout: str, dense: bool) -> None:
    """UsageError for a layout that does not exist, or one that a dense checkpoint cannot have."""
    if layout not in LAYOUTS:
        raise UsageError(f"layout: expected {' or '.join(map(repr, LAYOUTS))}, got {layout!r}")
    if dense and layout != NEUTRAL:
        raise UsageError(
            "layout: a dense checkpoint is what transformers loads as it is; give --layout without --to dense"
        )


def config_for(data: bytes, layout: str, path: str = "") -> bytes:
    """A config.json for a folder of that layout; unchanged if it needs no change.

    InputError for one that is no JSON object, UsageError for one that names another quantization method.
    """
    tree = parsed_config(data)
    if tree is None:
        if layout == NEUTRAL:
            return data
        raise InputError(f"{CONFIG}: expected a JSON object, for the layout of transformers", path=path)
    before = json.dumps(tree)
    settings = tree.get("quantization_config")
    if is_packed(tree):
        del tree["quantization_config"]
    elif settings is not None and layout == TRANSFORMERS:
        got = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise UsageError(
            f"{CONFIG}: the model is quantized by {got!r}, and transformers takes one method; convert without --layout",
            path=path,
        )
    if tree.get("transformers_weights") == GUARD:
        del tree["transformers_weights"]
    if layout == TRANSFORMERS:
        tree |= {"quantization_config": {"quant_method": METHOD}, "transformers_weights": GUARD}
    return data if json.dumps(tree) == before else (json.dumps(tree, indent=2) + "\n").encode()


def is_packed(config: dict[str, Any]) -> bool:
    """Whether a config.json says that the weights beside it are those of the transformers layout."""
    settings = config.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == METHOD


def parsed_config(data: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else. Parsed as leniently as model loaders do, because some contain Infinity.

    LimitError if parsing it may need more memory than the budget allows.
    """
    limits.check_bytes(PARSED * len(data), f"{CONFIG}, parsed")
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None


def dense_index(others: dict[str, Any], tensors: Iterable[tuple[str, str, int]]) -> dict[str, Any]:
    """The index of a dense checkpoint of (tensor name, file, bytes). others: the other keys of the source's index."""
    tree = packed_index(tensors)
    return {**others, **tree, "metadata": {**others.get("metadata", {}), **tree["metadata"]}}


def packed_index(tensors: Iterable[tuple[str, str, int]]) -> dict[str, Any]:
    """The index of (tensor name, file, bytes)."""
    listed = list(tensors)
    return {
        "metadata": {"total_size": sum(nbytes for _, _, nbytes in listed)},
        "weight_map": {name: file for name, file, _ in listed},
    }
