"""One shard of a conversion: what is to be done with it, and its tensors as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..arrays import threads
from ..arrays.library import has_dtype
from ..errors import StructureError
from ..formats.dense import Dense
from ..storage.tensorfile import TensorFile
from .recipe import Recipe
from .tensor_plans import TensorOutcome, TensorPlan, dense_of, loss, prune

Progress = Callable[[TensorOutcome], None]
_WORTH_MOVING = 4 << 20
"""Bytes from which a tensor is converted on the device; a smaller one is converted faster by the host."""
_AHEAD, _AHEAD_ON_DEVICE = 96 << 20, 512 << 20
"""Tensors of up to this many bytes are read while the one before them is converted and written: in host memory, and in
that of a device, where only pinned buffers are on the host."""


@dataclass(frozen=True)
class ShardTask:
    """The tensors of an open shard, and the file that they become."""

    f: TensorFile
    plans: tuple[TensorPlan, ...]
    recipe: Recipe
    path: str
    """The file that is written."""
    force: bool
    """Whether an existing file is replaced."""
    progress: Progress | None
    device: str
    """Where tensors are pruned and converted."""
    share: int = 1
    """How many shards are converted there at once."""

    @property
    def teams(self) -> int:
        """How many teams of threads have the cores of the host together."""
        return self.share if self.device == "cpu" else 1

    def pruned(self, x: Any, plan: TensorPlan, *, known: bool = False) -> tuple[Any, dict[str, Any]]:
        """``x`` pruned if the recipe asks for it, and what that took (``loss``; nothing if it is ``known``).

        A Format is decoded for that.
        """
        if not self.recipe.prune:
            return x, {}
        dense = dense_of(x)
        try:
            left = prune(dense, plan.pruned_for, self.recipe)
        except StructureError as e:
            raise e.at(path=self.f.path, tensor=plan.name) from None
        return left, {} if known else loss(dense, left)


def read(f: TensorFile, plan: TensorPlan, device: str = "cpu") -> Any:
    """The tensor: a Format if it is stored in a sparse format, else an array. Small ones stay on the host."""
    place = _place(plan, device)
    if plan.record.format is None:
        return f.array(plan.name, device=place)
    x = f.read(plan.name, place)
    return x.data if isinstance(x, Dense) else x  # of an array, zeros are counted: those that are -0.0 get lost


def _place(plan: TensorPlan, device: str) -> str:
    """Where the tensor is converted if ``device`` is asked for."""
    return device if plan.bytes_in >= _WORTH_MOVING and has_dtype(device, plan.record.dtype) else "cpu"


def one_ahead(f: TensorFile, wanted: list[tuple[TensorPlan, str] | None]) -> Iterator[Any]:
    """The values of each (plan, device), or None for None. A small tensor is read while the caller uses the one before
    it; a large one is read when it is asked for, so that two are not in memory."""

    def small(pair: tuple[TensorPlan, str] | None) -> Any:
        most = _AHEAD if pair is None or _place(*pair) == "cpu" else _AHEAD_ON_DEVICE
        return read(f, *pair) if pair and pair[0].bytes_in <= most else None

    with ThreadPoolExecutor(1) as reader:
        tasks = (partial(small, pair) for pair in wanted)
        for pair, values in zip(wanted, threads.in_order(reader, tasks, 1), strict=True):
            if pair and values is None:
                values = read(f, *pair)
            yield values
            del values
