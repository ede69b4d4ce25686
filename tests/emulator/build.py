"""Builds of kernels with g++, kept in ``build/emulator`` under the hash of everything that they are made of."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .ptx import translated
from .ptx_sm90 import shape_of

HERE = Path(__file__).parent
DEVICE = HERE / "device"
"""What takes the place of the CUDA compiler's own declarations."""
FLAGS = (
    "-std=c++17", "-O1", "-g1", "-fPIC", "-w", "-fno-strict-aliasing", "-fwrapv", "-fno-ipa-reference", "-fno-ipa-pure-const",
    "-fno-gnu-unique", "-fno-stack-protector", "-ffp-contract=off",
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero", "-fno-sanitize-recover=all",
)  # fmt: skip


class EmulatorError(RuntimeError):
    """A kernel did something that would be wrong on a GPU, or cannot be emulated."""


def missing() -> str:
    """Why kernels cannot be built here; "" if they can."""
    machine = os.uname()
    if (machine.sysname, machine.machine) != ("Linux", "x86_64"):
        return f"the emulator runs on x86-64 Linux, not on {machine.sysname} {machine.machine}"
    absent = [name for name in ("g++", "readelf", "addr2line") if not shutil.which(name)]
    if absent:
        return f"{', '.join(absent)} not found: install g++ and binutils"
    return "" if headers() else "cuda_fp16.h not found: pip install nvidia-cuda-runtime, or set CUDA_HOME"


@functools.cache
def headers() -> Path | None:
    """The folder of the CUDA headers: of CUDA_HOME, of the wheel nvidia-cuda-runtime, or of the nvcc on PATH."""
    places = [Path(os.environ[k], "include") for k in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(k)]
    try:
        import nvidia
    except ImportError:
        roots = [sysconfig.get_path("purelib") + "/nvidia"]
    else:
        roots = list(nvidia.__path__)
    places += [d for root in roots for d in sorted(Path(root).glob("*/include"))]
    nvcc = shutil.which("nvcc")
    if nvcc:
        places.append(Path(nvcc).resolve().parents[1] / "include")
    return next((d for d in places if (d / "cuda_fp16.h").exists() and (d / "vector_types.h").exists()), None)


@functools.cache
def cache() -> Path:
    """``SPFORMAT_EMULATOR_CACHE``, else ``build/emulator`` of the checkout (``rm -r`` it at any time), else a folder that is new."""
    asked = os.environ.get("SPFORMAT_EMULATOR_CACHE")
    for folder in (*([Path(asked)] if asked else []), HERE.parents[1] / "build" / "emulator"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="spformat-emulator-"))


@functools.cache
def _own_text() -> str:
    """What every build depends on: the files of the emulator, the CUDA headers' folder and the compiler."""
    files = [
        *sorted(p for p in DEVICE.rglob("*") if p.suffix in (".h", ".cpp")),
        *sorted(HERE.glob("ptx*.py")),
        HERE / "build.py",
    ]
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    return "".join([*(p.read_text() for p in files), str(headers()), version])


def shared_object(name: str, text: str, instance: str, folders: Iterable[Path], sm: int) -> Path:
    """The library with one kernel: ``instance`` of the source ``text``, whose headers lie in ``folders``, for ``sm``."""
    if reason := missing():
        raise EmulatorError(reason)
    own: dict[str, str] = {}
    _reached(text, list(folders), own)
    folder = cache() / _hash(repr((text, sorted(own.items()), instance, sm, _own_text())))
    if folder.exists():
        return folder / "kernel.so"
    ready = _precompiled()
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache()) as room:
        build = Path(room, "kernel")
        sources = {header: translated(content) for header, content in own.items()} | {name: translated(text)}
        for header, content in sources.items():
            (build / header).parent.mkdir(parents=True, exist_ok=True)
            (build / header).write_text(content)
        shape = shape_of(instance, "".join(sources.values()))
        kernel = f"EMU_KERNEL({instance})\nEMU_SHAPE({shape})"
        arch = f"#undef __CUDA_ARCH__\n#define __CUDA_ARCH__ {10 * sm}\n"
        main = f'#include "emulator.h"\n{arch}namespace emu_user {{\n#include "{name}"\n{kernel}\n}}\n'
        (build / "main.cpp").write_text(main)
        _run("g++", *FLAGS, f"-I{ready}", f"-I{build}", *_cuda(), "-c", build / "main.cpp", "-o", build / "kernel.o")
        _run("g++", "-shared", build / "kernel.o", *sorted(ready.glob("*.o")), "-lrt", "-o", build / "kernel.so")
        (build / "kernel.o").unlink()
        _publish(build, folder)
    return folder / "kernel.so"


@functools.cache
def _precompiled() -> Path:
    """A folder with what is compiled once, the scheduler and ``emulator.h``: a kernel then builds in a third of the time."""
    folder = cache() / f"header-{_hash(_own_text())}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix="build-", dir=cache()) as room:
            build = Path(room, "header")
            shutil.copytree(DEVICE, build)
            _run("g++", *FLAGS, *_cuda(), "-x", "c++-header", build / "emulator.h", "-o", build / "emulator.h.gch")
            for source in sorted(build.glob("*.cpp")):
                _run("g++", *FLAGS, *_cuda(), "-c", source, "-o", source.with_suffix(".o"))
            _publish(build, folder)
    return folder


def _cuda() -> tuple[str, ...]:
    return f"-I{headers()}", "-idirafter", str(DEVICE)


def _publish(build: Path, folder: Path) -> None:
    try:
        build.rename(folder)
    except OSError:  # another process has built the same
        if not folder.exists():
            raise


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"{' '.join(map(str, command))}\n{done.stderr[:8000]}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _reached(text: str, folders: list[Path], headers: dict[str, str]) -> None:
    """Adds the headers that ``text`` includes from ``folders``, directly or through another: name -> text."""
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE):
        path = next((d / name for d in folders if (d / name).is_file()), None)
        if path and name not in headers:
            headers[name] = path.read_text()
            _reached(headers[name], folders, headers)
