"""Which states ``load_state_dict`` may put into a sparse layer.

The arrays of a matrix belong together: a layer takes them if they can be a matrix of its kind, and else none of them.
Arrays alone do not always tell: those of csr and csc have the same names. So a state dict also says which matrix they
are, where torch keeps the version of each module (``state_dict._metadata``), and its names stay those of the arrays.
Plain dicts and files of safetensors have no such place.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from ..errors import ArrayError, SpformatError, UsageError
from .conversion import cast, some_become_zero
from .description import Description, parse

PLAIN_SAVING = (
    "save_pretrained of transformers would write a folder that loads with random numbers in the place of sparse "
    "weights: import spformat.hf, and call spformat.hf.save_pretrained(model, folder)"
)
KEY = "matrix"
"""Where the metadata of a module have ``Description.text``."""


def describe(state_dict: Any, prefix: str, description: Description) -> None:
    """Let a state dict say of which matrix the arrays with this prefix are, if it has a place for that."""
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        metadata.setdefault(prefix[:-1], {})[KEY] = description.text


def refuse_in_plain_saving() -> None:
    """UsageError inside of the ``save_pretrained`` of transformers, which was not replaced for the model that it saves.

    A model does not learn that a layer, or a part of it, became sparse by itself. What transformers writes then loads
    without an error, with random numbers in the place of sparse weights. Adapters alone are saved by it as well.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    plain = getattr(modeling, "PreTrainedModel", None)
    code = getattr(inspect.unwrap(plain.save_pretrained), "__code__", None) if plain is not None else None
    frame: FrameType | None = sys._getframe(1) if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is not None and not getattr(frame.f_locals.get("self"), "_hf_peft_config_loaded", False):
        raise UsageError(PLAIN_SAVING)


def require_fit(
    description: Description, here: Mapping[str, torch.Tensor], given: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    """Raise UsageError for a state that cannot be that of a layer, with all reasons. Contents are not read.

    here: the tensors of the layer, by name; given: those of the state, some or all of them, in the same order;
    metadata: what the state says of the layer beside them.
    """
    reasons = []
    try:
        _require_lengths(description, here, given)
    except SpformatError as e:
        reasons.append(str(e))
    text = metadata.get(KEY)
    if given and text is not None and not _is_text_of(description, text):
        reasons.append(f"expected a matrix {description.text}, got {text}")
    if reasons:
        raise UsageError("; ".join(reasons))


def _is_text_of(description: Description, text: Any) -> bool:
    try:
        return text == description.text or parse(str(text)) == description
    except SpformatError:  # of a format or a version that is not here
        return False


def _require_lengths(description: Description, here: Mapping[str, torch.Tensor], given: Mapping[str, Any]) -> None:
    """Raise ArrayError for arrays that no matrix of this description has."""
    path = {c.attribute: c.path for c in description.components}
    other = []
    for name, t in given.items():
        if not torch.overrides.is_tensor_like(t):
            raise ArrayError(f"{description.format}: {path[name]}: expected a tensor, got {type(t).__name__}")
        if t.shape != here[name].shape:
            other.append(name)
    lacking = [path[name] for name in here if name not in given]
    if other and lacking:
        shapes = ((path[n], list(here[n].shape), list(given[n].shape)) for n in other)
        misfits = "; ".join(f"{p}: expected shape {old}, that of the layer, got {new}" for p, old, new in shapes)
        raise ArrayError(f"{description.format}: {misfits}: give {', '.join(lacking)}, too")
    if other and all(is_plain(t) for t in given.values()):
        description.matrix([t.contiguous() for t in given.values()])


def rounded(
    description: Description, here: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All tensors of the matrix of a state, if some of its values are zero in the dtype of the layer; else none.

    Such values are no longer stored then, as after ``.to(dtype)``. Arrays that the state lacks are those of the layer.
    Raises the errors of the format for contents that are not valid.
    """
    tensors = [given.get(name, t) for name, t in here.items()]
    new, old = description.values_of(tensors), description.values_of(list(here.values()))
    dtype = old[0].dtype
    if all(t.dtype is dtype for t in new) or not all(map(is_plain, [*tensors, *old])):
        return {}
    with torch.inference_mode(False), torch.no_grad():
        if not some_become_zero(new, (t.to(dtype) for t in new)):
            return {}
        tensors = [t.detach().to(new[0].device).contiguous() for t in tensors]
        matrix = cast(description.matrix(tensors).validate(), dtype)
        return dict(zip(here, description.tensors(matrix), strict=True))


def is_plain(t: Any) -> bool:
    """Whether a tensor has memory that can be read, and is of no subclass."""
    return type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta
