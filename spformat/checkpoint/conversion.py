"""A conversion into a folder, as far as it is known before a tensor is read: names, parts, identity."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .. import limits
from .jobs import Job
from .manifest import MANIFEST, VERSION, digest
from .parts import Task, Unit, narrowed, split
from .recipe import Recipe, writes_dense
from .source import INDEX, Source


@dataclass(frozen=True)
class Conversion:
    """All that is known of a conversion into a folder before a tensor is read."""

    source: Source
    jobs: tuple[Job, ...]
    recipe: Recipe
    folder: str
    device: str = "cpu"

    @property
    def dense(self) -> bool:
        """Whether an ordinary checkpoint is written."""
        return writes_dense(self.recipe)

    @property
    def names(self) -> dict[str, str]:
        """Shard -> name of its output file."""
        return dict(zip(self.source.shards, shard_names(self.source, self.dense), strict=True))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all files that make the new checkpoint one: shards, and the manifest or index."""
        last = MANIFEST if not self.dense else INDEX if len(self.source.shards) > 1 else None
        return (*self.names.values(), *filter(None, [last]))

    @property
    def identity(self) -> str:
        """Equal for runs whose finished files can stand side by side."""
        names = tuple(self.names.values())
        return digest(
            {"recipe": asdict(self.recipe), "container": VERSION, "shards": self.source.shards, "names": names}
        )

    def parts(self, n: int) -> tuple[tuple[Unit, ...], ...]:
        """The units of each of ``n`` parts."""
        return split(self.jobs, self.names, n)

    def task(self, unit: Unit, overwrite: bool) -> Task:
        """What a worker needs for a unit."""
        return Task(
            narrowed(self.source, unit.shard), unit, self.recipe, self.folder, overwrite, self.device, limits.current()
        )


def shard_names(source: Source, dense: bool) -> tuple[str, ...]:
    """Output file names, one per input shard."""
    n = len(source.shards)
    if not dense:
        return tuple(f"spformat-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1))
    if n == 1:
        return ("model.safetensors",)
    return tuple(f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1))
