"""spformat env: versions and devices, for a bug report."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from .options import Json
from .output import console, print_json, size

EPILOG = "spformat env --json"

PACKAGES = (
    "spformat", "numpy", "scipy", "ml_dtypes", "safetensors", "typer", "numba", "cupy-cuda13x", "cupy-cuda12x",
    "cuda-bindings", "nvidia-cuda-nvrtc", "torch", "nvmath-python",
)  # fmt: skip


def run(as_json: Json = False) -> None:
    """Versions of what matters, cores and memory, GPUs, backends and settings in force."""
    tree = collect()
    if as_json:
        print_json(tree)
        return
    for key, value in tree.items():
        if isinstance(value, dict):
            console().print(f"{key}:")
            for k, v in value.items():
                console().print(f"  {k}: {v}")
        else:
            console().print(f"{key}: {size(value) if key == 'memory' else value}")


def collect() -> dict[str, Any]:
    """The report as a dict."""
    from importlib import metadata

    from spformat import backends, limits

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    usable = {n: "; ".join(backends.get(n).missing()) or "ready" for n in backends.KNOWN}
    settings = {k: v for k, v in os.environ.items() if k.startswith("SPFORMAT_")}
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory": limits.host_memory(),
        "packages": versions,
        "backends": usable,
        "devices": _devices(),
        "settings": settings,
    }


def _devices() -> dict[str, str]:
    try:
        import cupy

        devices = {}
        for i in range(cupy.cuda.runtime.getDeviceCount()):
            p = cupy.cuda.runtime.getDeviceProperties(i)
            name = p["name"].decode()
            devices[f"cuda:{i}"] = f"{name}, sm_{p['major']}{p['minor']}, {p['totalGlobalMem'] >> 30} GiB"
        return devices
    except ImportError:
        return {}
    except Exception as e:  # any driver trouble is what this report is for
        return {"cuda": f"unusable: {e}"}
