"""The atheris half of ``fuzz.headers``. Imported before anything of spformat, so that the parsers are instrumented."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("fuzz headers: needs atheris (python -m pip install '.[fuzz]'); --blind does without")

PARSERS = ["spformat.storage.stheader", "spformat.storage.descriptor", "spformat.limits", "spformat.formats.declare"]

with atheris.instrument_imports(include=PARSERS, enable_loader_override=False):
    from fuzz import headers


def run(runs: int, seed: int, corpus: Path | None) -> None:
    """``runs`` executions; libFuzzer ends the process: 0, or 77 with the input saved when something leaked."""
    folder = corpus or Path(tempfile.mkdtemp(prefix="fuzz-headers-"))
    folder.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(headers.seeds()):
        (folder / f"seed-{i}").write_bytes(data)
    verdicts, start = Counter[str](), time.time()

    def one(data: bytes) -> None:
        begin = time.process_time()  # libFuzzer's timeout counts time while the machine is suspended
        verdicts[headers.check(data)] += 1
        if time.process_time() - begin > 1:
            raise headers.Wrong(f"more than a second for {len(data)} bytes")
        done = verdicts.total()
        if done % 500_000 == 0 or done == runs:
            print(f"headers: {done} executions in {time.time() - start:.0f} s:", dict(verdicts), flush=True)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        rng = random.Random(number)
        changed = atheris.Mutate(data, most) if rng.random() < 0.3 else headers.mutant(data, rng)
        return changed[:most]

    flags = ["-max_len=4096", "-timeout=1200", "-rss_limit_mb=2048", "-print_final_stats=1", "-verbosity=0"]
    flags += [f"-runs={runs}", f"-seed={seed}", f"-artifact_prefix={folder}/"]
    atheris.Setup(["fuzz", *flags, str(folder)], one, custom_mutator=mutate)
    atheris.Fuzz()
