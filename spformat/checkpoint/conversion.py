"""A conversion into a folder, as it is known before any tensor is read: file names, parts, identity."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, dataclass

from .. import limits
from ..errors import InputError, UsageError
from ..formats.stack import Stack
from ..storage.locks import Token
from .layouts import CONFIG, NEUTRAL, PACKED_INDEX, TRANSFORMERS
from .manifest import MANIFEST, VERSION, digest
from .parts import FilePlan, FileTask, narrowed, split
from .recipe import Recipe, writes_dense
from .source import INDEX, Source
from .stacks import is_stack
from .tensor_plans import TensorPlan

_NUMBERS = r"(?<![^.])[0-9]+(?![^.])"
"""The numbers of layers in a name."""


@dataclass(frozen=True)
class Conversion:
    """Everything that is known about a conversion into a folder before any tensor is read."""

    source: Source
    plans: tuple[TensorPlan, ...]
    recipe: Recipe
    folder: str
    device: str = "cpu"
    layout: str = NEUTRAL

    def __post_init__(self) -> None:
        stack = next((p for p in self.plans if p.record.format is Stack or is_stack(p)), None)
        if self.layout == TRANSFORMERS and stack is not None:
            pattern = shlex.quote(re.sub(_NUMBERS, "*", stack.name))
            raise UsageError(
                "layout: transformers loads the weights of fused experts only as dense tensors, and this one would be "
                f"a stack of sparse matrices; keep them dense with --exclude {pattern}",
                tensor=stack.name,
            )

    def check_config(self) -> None:
        """InputError or UsageError for a config.json that the layout cannot be written for."""
        if self.layout == TRANSFORMERS and CONFIG not in self.source.side_files:
            message = f"--layout transformers needs the {CONFIG} of the model beside its shards"
            raise InputError(message, path=self.source.path)
        if self.layout == TRANSFORMERS:
            self.source.config(self.layout)  # raises the error for a config that cannot be changed

    @property
    def dense(self) -> bool:
        """Whether the output is an ordinary dense checkpoint."""
        return writes_dense(self.recipe)

    @property
    def names(self) -> dict[str, str]:
        """Shard -> name of its output file."""
        return dict(zip(self.source.shards, shard_names(self.source, self.dense), strict=True))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all files that a reader needs to open the new checkpoint: shards, and the manifest or index."""
        if self.dense:
            return (*self.names.values(), *([INDEX] if len(self.source.shards) > 1 else []))
        return (*self.names.values(), *([PACKED_INDEX] if self.layout == TRANSFORMERS else []), MANIFEST)

    @property
    def identity(self) -> str:
        """A digest that is equal for two runs exactly when their finished files belong to one checkpoint."""
        names = tuple(self.names.values())
        return digest(
            {"recipe": asdict(self.recipe), "container": VERSION, "shards": self.source.shards, "names": names}
        )

    def parts(self, n: int) -> tuple[tuple[FilePlan, ...], ...]:
        """The output files of each of ``n`` parts."""
        return split(self.plans, self.names, n)

    def task(self, file_plan: FilePlan, overwrite: bool, token: Token | None = None) -> FileTask:
        """What a worker needs to write one output file. token: of the run, if the worker may outlive it."""
        return FileTask(
            narrowed(self.source, file_plan.shard),
            file_plan,
            self.recipe,
            self.folder,
            overwrite,
            self.device,
            limits.current(),
            token,
        )


def shard_names(source: Source, dense: bool) -> tuple[str, ...]:
    """Output file names, one per input shard."""
    n = len(source.shards)
    if not dense:
        return tuple(f"spformat-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1))
    if n == 1:
        return ("model.safetensors",)
    return tuple(f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1))
