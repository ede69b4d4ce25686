"""``PYTHONPATH=tests python -m emulator``: random conversions on the emulated GPU give the bytes of the numpy code.

``--products``: random products by its kernels give those of numpy. The laws and their cases are those of ``conversions.py`` and
``products.py``. The exit status is 1 if a case differs, 69 if nothing can be built.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator

from . import missing

LARGE = ((130, 300), (19, 2011), (2011, 3))
"""The largest shapes, in place of those of ``conversions.py``: a case takes seconds of the emulator, not minutes."""
PRUNING = "pruning"
SHOWN = 5
"""After so many differences of a format the next one follows."""


def main() -> int:
    """Runs the cases; prints a line for each format, and every difference."""
    parser = argparse.ArgumentParser(prog="python -m emulator", description=__doc__)
    parser.add_argument("--formats", nargs="+", metavar="NAME", help=f"default: all of them, and {PRUNING}")
    parser.add_argument("--cases", type=int, default=10, help="of each format")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--dtypes", nargs="+", metavar="DTYPE", help="types of values; default: all that CuPy has")
    parser.add_argument("--ordered", action="store_true", help="threads and blocks run in their order, not shuffled")
    parser.add_argument("--products", action="store_true", help="products by every kernel, in place of conversions")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="products by these kernels only")
    parser.add_argument("--sm", type=int, default=80, help="architecture for products (default: %(default)s)")
    parser.add_argument(
        "--largest", type=int, default=1030, help="most rows and columns of products (default: %(default)s)"
    )
    parser.add_argument("--large", action="store_true", help="the large shapes of conversions.py, too: slow")
    options = parser.parse_args()
    if reason := missing():
        print(f"emulator: {reason}", file=sys.stderr)
        return 69

    from . import stand_in

    if options.products or options.kernels:
        stand_in.install(options.sm)
        return _products(parser, options)
    stand_in.install()
    import conversions

    from spformat.arrays.dtypes import VALUE_TYPES
    from spformat.arrays.library import has_dtype
    from spformat.formats import registered

    if not options.large:
        vars(conversions)["LARGE"] = LARGE
    dtypes = tuple(options.dtypes or (t for t in VALUE_TYPES if has_dtype("cuda", t)))
    formats = {f.name: f for f in registered()}
    names = options.formats or [*formats, PRUNING]
    if unknown := set(names) - {*formats, PRUNING}:
        parser.error(f"--formats: expected {', '.join([*formats, PRUNING])}, got {', '.join(sorted(unknown))}")
    device, failed = conversions.Device(), 0
    for name in names:
        start, before, wrong = time.perf_counter(), stand_in.LAUNCHES.total(), 0
        for seed in range(options.seed, options.seed + options.cases):
            stand_in.OPTIONS.update(seed=seed, shuffle_threads=not options.ordered)
            if name == PRUNING:
                case: object = f"seed {seed}"
                differences = conversions.pruning_differences(seed, dtypes, device)
            else:
                case = conversions.drawn(formats[name], seed, dtypes)
                differences = conversions.differences(case, device)
            wrong += _printed(name, case, differences)
            if wrong >= SHOWN:
                break
        launches, seconds = stand_in.LAUNCHES.total() - before, time.perf_counter() - start
        result = f"{wrong} DIFFERENT" if wrong else "equal"
        print(f"{name}: {options.cases} cases, {launches} launches, {result}, {seconds:.1f} s", flush=True)
        failed += wrong
    return min(failed, 1)


def _products(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from spformat.backends.cuda import KERNELS

    from . import products, stand_in

    own = {k.name: k for k in KERNELS}
    names = [n if n.startswith("cuda.") else f"cuda.{n}" for n in options.kernels or own]
    if unknown := set(names) - set(own):
        parser.error(f"--kernels: expected {', '.join(own)}, got {', '.join(sorted(unknown))}")
    failed = 0
    for name in names:
        start, before, wrong, ran = time.perf_counter(), stand_in.LAUNCHES.total(), 0, 0
        for seed in range(options.seed, options.seed + options.cases):
            stand_in.OPTIONS.update(seed=seed, shuffle_threads=not options.ordered)
            case = products.drawn(
                own[name], seed, options.sm, tuple(options.dtypes or products.DTYPES), options.largest
            )
            if case is None:
                break
            ran += 1
            wrong += _printed(name, case, products.differences(case, own[name], options.sm))
            if wrong >= SHOWN:
                break
        launches, seconds = stand_in.LAUNCHES.total() - before, time.perf_counter() - start
        result = f"{wrong} DIFFERENT" if wrong else "equal" if ran else f"takes nothing on sm_{options.sm}"
        print(f"{name}: {ran} cases, {launches} launches, {result}, {seconds:.1f} s", flush=True)
        failed += wrong
    return min(failed, 1)


def _printed(name: str, case: object, differences: Iterator[str]) -> int:
    """Prints what is wrong with a case; the number of differences."""
    wrong = 0
    try:
        for text in differences:
            wrong += 1
            print(f"DIFFERENT {name}: {text[:1500]}\n    of {case}", flush=True)
    except Exception:  # a fault of a kernel, or of what is around it: the other cases run
        wrong += 1
        print(f"RAISED {name}: {case}\n{traceback.format_exc(limit=-3)[:4000]}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
