"""spformat bench --calibrate: measure kernels, fit the constants of their expected times, check the choice by them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from .output import console, print_json, warnings
from .tables import table

if TYPE_CHECKING:
    from spformat.measure.calibrate import Scope
    from spformat.measure.calibration_fit import Fit
    from spformat.measure.calibration_points import About, Loaded, Point

COMMAND = "spformat bench --calibrate"


class Files(NamedTuple):
    """What a calibration reads and writes."""

    out: str
    points: str
    from_points: tuple[str, ...]
    every_gpu: bool
    commit: str


def scope(
    device: str, seed: int, seconds: float, kernels: str, formats: str, columns: str, tiles: int, products: int
) -> Scope:
    """What to measure, from the options of the command. With ``products`` (--validate) one tile of each kernel."""
    from spformat.measure import calibrate

    calibrate.check_device(device)
    range_of_n = re.fullmatch(r"(\d{1,9})-(\d{1,9})", columns)
    if range_of_n is None:
        raise typer.BadParameter(f"--columns: expected numbers of columns like 1-512, got {columns!r:.80}")
    only = calibrate.chosen_kernels(_names(kernels), device) if kernels else ()
    most = tiles or (6 if only else 3)
    own = calibrate.Scope(
        seed, device, seconds, only, _names(formats), (int(range_of_n[1]), int(range_of_n[2])), 5 if only else 4, most
    )
    return replace(own, widths=2, tiles=1, products=products) if products else own


def loaded(files: Files, device: str, products: int) -> Loaded | None:
    """The points of the files that are to be read; None if something is to be measured. UsageError where options
    contradict each other, OutputError for a file of points that exists."""
    from spformat.dispatch.select import of_any_machine
    from spformat.errors import OutputError, UsageError
    from spformat.measure.calibration_points import load

    if not files.from_points:
        if files.points and Path(files.points).exists():
            raise OutputError("--points: the file exists; give the name of a new one", path=files.points)
        return None
    if files.points:
        raise UsageError("--points writes what is measured, and --from-points measures nothing: give one of them")
    if products:
        raise UsageError("--validate measures products, and --from-points measures nothing: give one of them")
    with of_any_machine():
        points = load([Path(name) for name in files.from_points])
    if device not in ("", device_of(points)):
        raise UsageError(f"--from-points: the points are of {device_of(points)}, not of {device}", value=device)
    return points


def device_of(points: Loaded) -> str:
    """cpu or cuda."""
    return "cpu" if points.about.sm is None else "cuda"


def calibrate(scope: Scope, files: Files, loaded: Loaded | None, as_json: bool) -> None:
    """Constants of the kernels here, into the user's file of rates or another one.

    loaded: points that were measured before; None to measure.
    """
    from spformat.dispatch.select import of_any_machine
    from spformat.measure.calibration_points import Loaded

    if loaded is None:
        about = _about(scope, files.commit)
        _fit(scope, files, Loaded(about, _measured(scope, files.points, about), {}), as_json)
    else:
        with of_any_machine():
            _fit(scope, files, loaded, as_json)


def _fit(scope: Scope, files: Files, loaded: Loaded, as_json: bool) -> None:
    """Fit, write the constants and print what they cost."""
    from spformat.measure import calibration_fit
    from spformat.products import rates

    about, points = loaded.about, loaded.points
    for why, count in loaded.left_out.items():
        warnings().print(f"{count} point(s) left out: {why}", style="yellow", soft_wrap=True)
    fits = calibration_fit.fit(points, scope.kernels)
    before, lost = calibration_fit.priced(points), {f.kernel: calibration_fit.lost_variants(f, points) for f in fits}
    for name, variants in lost.items():
        if variants:
            text = f"{name}: too few points for constants of their own, which these had: {'; '.join(variants)}"
            warnings().print(text, style="yellow", soft_wrap=True)
    path = Path(files.out) if files.out else rates.user_path()
    if fits:
        own: dict[str, Any] = {"device": about.device, "date": about.date, "commit": files.commit or about.commit}
        own |= {"seed": about.seed} | ({} if about.sm is None or files.every_gpu else {"sm": about.sm})
        rates.write(path, about.to_json() | own, {f.kernel: f.entry | own for f in fits})
    _report(loaded, fits, lost, before, str(path) if fits else None, as_json)


def _measured(scope: Scope, path: str, about: About) -> list[Point]:
    """The points, which are also written to ``path``, even if the measurement fails or is interrupted."""
    from spformat.measure.calibration_points import save

    points: list[Point] = []
    try:
        _measure_into(points, scope)
    finally:
        if path and points:
            save(Path(path), about, points)
    return points


def _measure_into(points: list[Point], scope: Scope) -> None:
    from spformat.measure import calibrate

    if scope.device == "cpu":
        points.extend(calibrate.measure(scope))
        return
    from spformat.backends.cuda.runtime.compile_ahead import CompileAhead

    with CompileAhead() as ahead:
        points.extend(calibrate.measure(scope, ahead))


def _report(
    loaded: Loaded, fits: list[Fit], lost: dict[str, list[str]], before: list[Point], path: str | None, as_json: bool
) -> None:
    """The fit of each kernel, and what choosing by the constants before and after costs on the same products.

    lost: by kernel, the variants that had constants of their own and now have too few points for them.
    """
    from spformat.measure import calibration_fit

    after = calibration_fit.priced(loaded.points, fits)
    rows = [{"kernel": f.kernel, "points": f.points, "median_error": f.median, "within_30_percent": f.near,
             "tile_regret": calibration_fit.tile_regret(after, f.kernel), "variants_lost": lost[f.kernel]}
            for f in fits]  # fmt: skip
    regrets = {"regret_before": calibration_fit.regret(before), "regret": calibration_fit.regret(after)}
    if as_json:
        head = {"path": path, "points": len(loaded.points), "left_out": loaded.left_out}
        print_json(head | {"kernels": rows} | regrets)
        return
    _agreement(rows)
    if fits:
        _regrets(regrets["regret_before"], "before")
        _regrets(regrets["regret"], "after")
    written = "no kernel had enough points"
    if fits:
        written = f"{path}: {len(fits)} kernel(s); SPFORMAT_RATES=shipped leaves it out"
    console().print(written, soft_wrap=True)


def validate(scope: Scope, as_json: bool) -> None:
    """Expected against measured times of random products, and what choosing by them costs."""
    from spformat.measure import bench, calibration_fit

    measured: list[Point] = []
    _measure_into(measured, scope)
    points = calibration_fit.priced(measured)
    kernels, regrets = calibration_fit.agreement(points), calibration_fit.regret(points)
    if as_json:
        rows = [{"case": x.case, "kernel": x.kernel.name, "tile": str(x.tile), "format": x.problem.format,
                 "dtype": x.problem.a_dtype, "M": x.problem.M, "K": x.problem.K, "N": x.problem.n,
                 "nnz": x.problem.nnz, "b_layout": x.problem.b_layout, "out_layout": x.problem.out_layout,
                 "us": x.us, "expected_us": None if x.expected != x.expected else x.expected}
                for x in points]  # fmt: skip
        products = len({x.case for x in points})
        print_json({"environment": bench.environment(_like(scope.device)), "seed": scope.seed, "products": products,
                    "kernels": kernels, "regret": regrets, "points": rows})  # fmt: skip
        return
    _agreement(kernels)
    _regrets(regrets, "")


def _agreement(rows: list[dict[str, Any]]) -> None:
    numbers = ("points", "median error", "within 30 %", "regret of tiles")
    t = table("kernel", *numbers, right=numbers)
    for r in rows:
        tile_regret = r.get("tile_regret")
        t.add_row(r["kernel"], str(r["points"]), f"{r['median_error']:.1%}", f"{r['within_30_percent']:.0%}",
                  "-" if tile_regret is None else f"{tile_regret:.1%}")  # fmt: skip
    console().print(t)


def _regrets(rows: list[dict[str, Any]], when: str) -> None:
    numbers = ("products", f"regret {when}".strip(), "90 % within", "worst", "over dense")
    t = table("format", *numbers, right=numbers)
    for r in rows:
        shares = (f"{r[k]:.1%}" for k in ("regret", "ninety_percent", "worst"))
        over = "-" if r["over_dense"] is None else f"{r['over_dense']:.2f}x"
        t.add_row(r["format"], str(r["products"]), *shares, over)
    console().print(t)


def _about(scope: Scope, commit: str) -> About:
    from spformat.measure import bench
    from spformat.measure.calibration_points import About

    environment = bench.environment(_like(scope.device))
    sm = None
    if scope.device != "cpu":
        from spformat.arrays.library import import_cupy

        sm = int(import_cupy().cuda.Device().compute_capability)
    version = environment["versions"].get("spformat", "from a checkout")
    words = [COMMAND, f"--device {scope.device} --seconds {scope.seconds:g} --seed {scope.seed}"]
    words += [f"--kernels {','.join(scope.kernels)}"] if scope.kernels else []
    words += [f"--to {','.join(scope.formats)}"] if scope.formats else []
    words += [f"--columns {scope.columns[0]}-{scope.columns[1]} --tiles {scope.tiles}"]
    return About(
        environment.get("device", "host"), sm, environment["date"], commit or f"spformat {version}", scope.seed,
        " ".join(words),
    )  # fmt: skip


def _like(device: str) -> Any:
    """An array there."""
    if device == "cpu":
        return None
    from spformat.arrays.library import import_cupy

    return import_cupy().zeros(1)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))
