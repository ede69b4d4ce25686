"""Language models of transformers with sparse weights: python benchmarks/llm.py [--seconds 90] [--json FILE]

Llama models with random weights, created on the device, so that no checkpoint is needed. The weights of every linear
layer of the decoder are pruned there (the values do not matter for the time) and converted by spformat.torch. Measured:

decode    one token for each of B sequences, with a static cache of --context tokens: *eager*, as Python calls the
          layers, *graph*, the same step as a CUDA graph, and *compile*, torch.compile(fullgraph=True,
          mode="reduce-overhead"), with the number of its graphs; *compile-any*, the same, but told before the first
          call that the number of sequences may be any, so that it compiles once; --modes says which of them
prefill   one sequence of T tokens, eager
memory    bytes of the decoder's weights, and the peak of the device over all measurements of a model

All models use the same --attention: *grouped* and *products* (llm_attention.py) copy no keys and values when they
decode, *sdpa* is the default of transformers. The static cache has a multiple of 16 places, as attention kernels read
masks in such pieces. With --joined all models are Phi 3, where q, k and v are one product, and gate and up: four
products a layer and not seven.

NAME+fused the same after spformat.torch.fuse_projections; dense+fused is a Phi 3, whose weights are joined already
NAME+frozen, NAME+fused+frozen: after spformat.torch.freeze, too
dense      the model as it is, before pruning
semi       2:4 by torch.sparse.to_sparse_semi_structured
the others as MODELS of llm_models.py says: formats by rules over the names of the layers

The decoder has --layers layers; a model of fewer layers than its shape says is measured with and without them, and
"whole" is what the time of one layer makes of all: (time - without) / layers * all + without. Every model gets an equal
share of --seconds; cases that it leaves no time for are listed as skipped. On a CPU (--device cpu --hidden 128) the
script runs to be tested, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from llm_attention import ATTENTION
from llm_memory import loading, peak_bytes, reset_peak, synchronize
from llm_models import FROZEN, FUSED, MODELS, SHAPES, build, weight_bytes
from transformers import StaticCache

from spformat.errors import SpformatError

ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError, SpformatError)
"""What a library may raise for a model that it cannot run; the other models are measured all the same."""
MODES = ("graph", "eager", "compile", "compile-any")
COMPILED = MODES[2:]
MARGIN = 72
"""Least places in the cache behind the context."""
TARGET_S, RUNS = 0.12, 5
"""Seconds of one timed run, and how many there are; the median counts."""


@dataclass
class Clock:
    """What --seconds leaves."""

    seconds: float
    start: float = field(default_factory=time.perf_counter)
    skipped: list[str] = field(default_factory=list)
    until: float = float("inf")
    """When the share of the model that is measured now is over."""

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self.start)

    def share(self, models: int) -> None:
        """Give the next model an equal share of what is left for so many models."""
        self.until = time.perf_counter() + self.left / models

    def allows(self, what: str) -> bool:
        """Whether there is time for one more measurement; what there is none for is remembered."""
        if self.left > 0 and time.perf_counter() < self.until:
            return True
        self.skipped.append(what)
        return False


@dataclass
class Row:
    """One measurement. ms: median of a step; whole_ms: of a model with all layers of its shape."""

    model: str
    what: str
    mode: str
    size: int
    ms: float | None = None
    whole_ms: float | None = None
    of_dense: float | None = None
    """Time of dense over this time, both of the whole model: above 1 is faster than dense."""
    graphs: int | None = None
    breaks: int | None = None
    error: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """What the row is compared by."""
        return self.what, self.mode, self.size


# ------------------------------------------------------------------ measurements


def median_ms(step: Callable[[], Any], reset: Callable[[], None], most: int, a: argparse.Namespace) -> float:
    """Milliseconds of a step in a row of steps, from the first call to the end of the last on the device."""

    def seconds(steps: int) -> float:
        reset()
        synchronize(a)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(a)
        return time.perf_counter() - start

    seconds(2)
    steps = min(most, max(1, int(TARGET_S / max(seconds(1), 1e-6))))
    return statistics.median(seconds(steps) / steps for _ in range(RUNS)) * 1e3


class Decoding:
    """One decoding step of a batch: the tokens of a batch, and a static cache whose first --context tokens count."""

    def __init__(self, model: Any, batch: int, a: argparse.Namespace) -> None:
        self.call, self.context = model, a.context
        self.ids = torch.randint(0, model.config.vocab_size, (batch, 1), device=a.device)
        self.cache = StaticCache(config=model.config, max_cache_len=a.context + a.margin)
        self()  # creates the tensors of the cache
        self.reset()

    def reset(self) -> None:
        """Let the next step write behind the context again."""
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.cumulative_length.fill_(self.context)

    def for_any_batch(self) -> None:
        """Tell torch.compile that the size of the batch may be any. Only the call that compiles needs to know."""
        for_any_batch(self.ids, *(t for layer in self.cache.layers for t in (layer.keys, layer.values)))

    def __call__(self) -> Any:
        return self.call(input_ids=self.ids, past_key_values=self.cache, use_cache=True).logits


def for_any_batch(*tensors: torch.Tensor) -> None:
    """Tell torch.compile that the first size of these tensors may be any: otherwise it compiles a size of 1 on its own,
    and the first other size, too."""
    for t in tensors:
        torch._dynamo.decorators.mark_unbacked(t, 0)


def as_graph(step: Callable[[], Any], reset: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        reset()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay  # type: ignore[no-any-return]


def attempt(row: Row, clock: Clock, work: Callable[[Row], None]) -> Row:
    """The row after its measurement. What that raises is the error of the row, and the next rows still count."""
    if not clock.allows(f"{row.model} {row.what} {row.mode} {row.size}"):
        row.error = "skipped"
        return row
    try:
        work(row)
    except ERRORS as e:
        row.error = f"{type(e).__name__}: {e}"[:300]
    return row


def measure(name: str, model: Any, a: argparse.Namespace, clock: Clock) -> Iterator[Row]:
    """All rows of a model."""

    def decode(row: Row) -> None:
        d = Decoding(model, row.size, a)
        step = as_graph(d, d.reset) if row.mode == "graph" else d
        row.ms = median_ms(step, d.reset, a.margin - 8, a)

    def prefill(row: Row) -> None:
        ids = torch.randint(0, model.config.vocab_size, (1, row.size), device=a.device)
        step = functools.partial(model, input_ids=ids, use_cache=False, logits_to_keep=1)
        row.ms = median_ms(step, lambda: None, 50, a)

    for batch in a.decode:
        for mode in a.modes:
            if mode in COMPILED or (mode == "graph" and a.device.type != "cuda"):
                continue
            yield attempt(Row(name, "decode", mode, batch), clock, decode)
    for tokens in a.prefill:
        yield attempt(Row(name, "prefill", "eager", tokens), clock, prefill)
    for mode in a.modes:
        if mode in COMPILED:
            yield from compiled(name, mode, model, a, clock)


def compiled(name: str, mode: str, model: Any, a: argparse.Namespace, clock: Clock) -> Iterator[Row]:
    """Decoding with torch.compile, batch after batch in one compiled model; graphs and breaks are counted on the way.

    mode: "compile" leaves it to torch which sizes of the batch it compiles on their own; "compile-any" does not.
    "forward" is the model without a cache, with the size of the batch as the only thing that changes: how often that
    compiles.
    """
    from torch._dynamo.utils import counters

    def decode(row: Row) -> None:
        d = Decoding(model, row.size, a)
        d.call = call
        if mode == "compile-any":
            d.for_any_batch()

        def step() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            d()

        row.ms = median_ms(step, d.reset, a.margin - 8, a)

    def forward(row: Row) -> None:
        ids = torch.zeros(row.size, 1, dtype=torch.int64, device=a.device)
        mask = torch.ones_like(ids)  # without one, transformers asks whether the batch is 1
        if mode == "compile-any":
            for_any_batch(ids, mask)
        torch.compiler.cudagraph_mark_step_begin()
        call(input_ids=ids, attention_mask=mask, use_cache=False)

    for work, batches in ((decode, a.decode), (forward, a.compile_batches)):
        torch._dynamo.reset()
        counters.clear()
        # "forward" in the mode "compile" is told that sizes change; torch still compiles one sequence on its own.
        changes = True if work is forward and mode == "compile" else None
        call = torch.compile(model, fullgraph=True, mode="reduce-overhead", dynamic=changes)
        for batch in batches:
            row = attempt(Row(name, work.__name__, mode, batch), clock, work)
            row.graphs, row.breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
            yield row
    torch._dynamo.reset()


# ------------------------------------------------------------------ the run


def without_layers(model: Any, a: argparse.Namespace, clock: Clock) -> dict[tuple[str, str, int], float]:
    """Milliseconds of the model without its decoder layers: embedding, last norm, head."""
    layers, count = model.model.layers, model.config.num_hidden_layers
    model.model.layers, model.config.num_hidden_layers = layers[:0], 0
    few = argparse.Namespace(**vars(a) | {"modes": [m for m in ("graph", "eager") if m in a.modes or m == "graph"]})
    try:
        return {row.key: row.ms for row in measure("no layers", model, few, clock) if row.ms is not None}
    finally:
        model.model.layers, model.config.num_hidden_layers = layers, count


def run(a: argparse.Namespace) -> dict[str, Any]:
    """Measure every model; returns what --json writes."""
    clock, rows, models = Clock(a.seconds), [], {}
    base: dict[tuple[str, str, int], float] = {}
    dense: dict[tuple[str, str, int], float] = {}
    with torch.inference_mode(False), torch.no_grad():
        for at, name in enumerate(a.models):
            clock.share(len(a.models) - at)
            if not clock.allows(name):
                continue
            reset_peak(a)
            start = time.perf_counter()
            try:
                model, error = build(name, a)
            except ERRORS as e:
                models[name] = {"failed": f"{type(e).__name__}: {e}"[:300]}
                print(f"{name:12} {models[name]['failed']}", flush=True)
                continue
            synchronize(a)
            entry = {"build_s": round(time.perf_counter() - start, 2), "error": error, "bytes": weight_bytes(model)}
            reset_peak(a)
            if a.layers < a.all_layers and not base:
                base = without_layers(model, a, clock)
            for row in measure(name, model, a, clock):
                if row.ms is not None:
                    row.whole_ms = whole(row, base, a)
                    if name == "dense":
                        dense[row.key] = row.whole_ms or row.ms
                    row.of_dense = dense.get(row.key, 0) / (row.whole_ms or row.ms) or None
                rows.append(row)
                show(row)
            entry["peak_bytes"] = peak_bytes(a)
            if a.load and name not in ("dense", "semi") and clock.allows(f"{name} load"):
                entry["load"] = loading(model, a)
            models[name] = entry
            print(f"{name:12} {json.dumps(entry)}", flush=True)
            del model
    return {
        "device": torch.cuda.get_device_name() if a.device.type == "cuda" else "cpu", "shape": a.shape,
        "layers": a.layers, "attention": a.attention, "joined": a.joined, "context": a.context,
        "dtype": str(a.dtype).removeprefix("torch."),
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "transformers", "numpy")},
        "models": models, "rows": [asdict(row) for row in rows], "skipped": clock.skipped,
        "seconds": round(time.perf_counter() - clock.start, 1),
    }  # fmt: skip


def whole(row: Row, base: dict[tuple[str, str, int], float], a: argparse.Namespace) -> float | None:
    """Milliseconds with all layers of the shape; None where the time without layers is not known."""
    if a.layers == a.all_layers:
        return row.ms
    rest = base.get((row.what, "graph" if row.mode in COMPILED else row.mode, row.size))
    return None if rest is None or row.ms is None else rest + (row.ms - rest) / a.layers * a.all_layers


def show(row: Row) -> None:
    """One line of the table."""
    numbers = [f"{row.ms:9.3f} ms" if row.ms is not None else " " * 12]
    numbers += [f"whole {row.whole_ms:8.2f} ms" if row.whole_ms is not None else ""]
    numbers += [f"{row.of_dense:5.2f}x dense" if row.of_dense is not None else ""]
    numbers += [f"graphs {row.graphs} breaks {row.breaks}" if row.graphs is not None else ""]
    print(f"{row.model:22} {row.what:8} {row.mode:8} {row.size:5} ", *filter(None, numbers), row.error, flush=True)


def ints(text: str) -> list[int]:
    """ "1,16" as a list."""
    return [int(x) for x in text.split(",") if x]


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments, with the config of the model."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", choices=SHAPES, default="8b")
    p.add_argument("--layers", type=int, default=4, help="of the decoder; 0: all that the shape has")
    p.add_argument(
        "--models", default=",".join(MODELS), help="the first should be dense: the others are compared to it"
    )
    p.add_argument("--decode", type=ints, default=[1, 16, 64], metavar="B,B", help="sequences")
    p.add_argument("--prefill", type=ints, default=[512, 2048], metavar="T,T", help="tokens")
    p.add_argument("--context", type=int, default=128, help="tokens in the cache")
    p.add_argument("--attention", choices=ATTENTION, default=ATTENTION[0])
    p.add_argument("--joined", action="store_true", help="q, k and v as one product, and gate and up")
    p.add_argument("--seconds", type=float, default=90)
    p.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=["graph", "eager"],
        help=f"of decoding; also {' and '.join(COMPILED)}",
    )
    p.add_argument(
        "--compile-batches", type=ints, default=[], metavar="B,B", help="count the graphs of these without a cache, too"
    )
    p.add_argument("--load", action="store_true", help="also save each model as a packed folder, and load it")
    p.add_argument("--folder", help="where --load saves; default: the temporary folder")
    p.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    p.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    p.add_argument("--hidden", type=int, help="another hidden size, for a short test")
    p.add_argument("--json")
    a = p.parse_args(argv)
    a.config = dict(SHAPES[a.shape])
    if a.hidden:
        heads = max(2, a.hidden // 32)
        a.config |= {"hidden_size": a.hidden, "intermediate_size": 2 * a.hidden, "num_attention_heads": heads,
                     "num_key_value_heads": heads // 2, "head_dim": 32, "vocab_size": 1024}  # fmt: skip
    a.all_layers = a.config["num_hidden_layers"]
    a.layers = a.config["num_hidden_layers"] = min(a.layers or a.all_layers, a.all_layers)
    a.models, a.margin = a.models.split(","), MARGIN + -(a.context + MARGIN) % 16
    kinds = [name.partition("+")[0] for name in a.models]
    steps = [step for name in a.models for step in name.split("+")[1:]]
    given = ("models", kinds, MODELS), ("models", steps, (FUSED, FROZEN)), ("modes", a.modes, MODES)
    for option, names, known in given:
        if unknown := [name for name in names if name not in known]:
            p.error(f"--{option}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    return a


def main() -> None:
    """Run and write the JSON."""
    a = parsed()
    result = run(a)
    if result["skipped"]:
        print("skipped, for --seconds is over:", *result["skipped"], sep="\n  ")
    if a.json:
        Path(a.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
