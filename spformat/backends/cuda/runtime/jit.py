"""Compile a ``.cu`` file of this backend with NVRTC and return a function: the only caller of RawModule.

The source text starts with a hash of every ``spformat/`` header that it includes. CuPy's disk cache does not look at
headers from ``-I`` folders: without the hash, an edited header would still run the old binary.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

from ....arrays.library import compile_in_memory, import_cupy
from ....errors import DeviceError

HERE = Path(__file__).parent.parent
"""The folder of the CUDA backend: sources are named relative to it, as ``csr/spmm_csr.cu``."""
INCLUDE = HERE / "include"
FREE = 48 * 1024
"""Bytes of shared memory that a block may have before the limit of its function has to be raised."""
Instance: TypeAlias = tuple[str, str, str]
"""A kernel to compile: file, C++ name expression, architecture."""
_INCLUDE_LINE = re.compile(r'^\s*#\s*include\s+"(spformat/[^"]+)"', re.MULTILINE)


def reached_headers(text: str) -> list[Path]:
    """Every ``spformat/`` header that ``text`` includes, directly or through another, each once, sorted."""
    headers: set[Path] = set()
    queue = [text]
    while queue:
        for name in _INCLUDE_LINE.findall(queue.pop()):
            path = INCLUDE / name
            if path not in headers:
                headers.add(path)
                queue.append(path.read_text())
    return sorted(headers)


def source_text(source: str) -> str:
    """The text of ``source`` with the hash of its headers as first line."""
    text = (HERE / source).read_text()
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in reached_headers(text))).hexdigest()
    return f"// headers {digest}\n{text}"


def architecture(sm: int, archs: tuple[str, ...]) -> str:
    """The -arch value for a device: ``sm_90a`` when a kernel lists it and the device is one, else the plain target."""
    exact = f"sm_{sm}a"
    return exact if exact in archs else f"sm_{sm}"


def options(arch: str) -> tuple[str, ...]:
    """NVRTC options; the same for the package and for the compile tests that need no GPU."""
    return (f"-arch={arch}", "-std=c++17", f"-I{INCLUDE}")


class NotCompiled(DeviceError):
    """A kernel that ``noting`` writes down instead of compiling it."""


_Noted: TypeAlias = tuple[Collection[Instance], dict[Instance, None]]
_noted: ContextVar[_Noted | None] = ContextVar("spformat_noted", default=None)


@contextmanager
def noting(ready: Collection[Instance]) -> Iterator[dict[Instance, None]]:
    """Inside the block ``load`` compiles nothing that is not ``ready``: it notes it, and raises NotCompiled.

    Yields what was noted so far, in the order of the calls.
    """
    noted: dict[Instance, None] = {}
    token = _noted.set((ready, noted))
    try:
        yield noted
    finally:
        _noted.reset(token)


@functools.cache
def load(source: str, instance: str, arch: str, device_id: int = 0, smem: int = 0) -> Any:
    """The compiled kernel ``instance`` (a C++ name expression) of ``source``, ready to launch.

    ``smem``: dynamic shared memory in bytes; where the block needs more than 48 KB the function attribute is raised.
    Raises DeviceError with the options, the compiler's log and the path of the dumped source.
    """
    if (state := _noted.get()) is not None and (source, instance, arch) not in state[0]:
        state[1][source, instance, arch] = None
        raise NotCompiled(f"{source}: {instance} is not compiled yet")
    cupy = import_cupy()
    text = source_text(source)
    flags = options(arch)
    with cupy.cuda.Device(device_id):
        try:
            function = _compiled(cupy, text, flags, instance)
        except cupy.cuda.compiler.CompileException as e:
            raise DeviceError(_report(source, instance, flags, text, str(e))) from e
        # Static shared memory counts too. Calls with different sizes share one function, so the limit is never lowered.
        if smem + function.shared_size_bytes > FREE:
            function.max_dynamic_shared_size_bytes = max(smem, function.max_dynamic_shared_size_bytes)
    if os.environ.get("SPFORMAT_JIT_DEBUG"):
        print(f"{source} {instance} {arch}: {function.num_regs} registers, {function.local_size_bytes} B local")
    return function


def _compiled(cupy: Any, text: str, flags: tuple[str, ...], instance: str) -> Any:
    try:
        return cupy.RawModule(code=text, options=flags, name_expressions=(instance,)).get_function(instance)
    except OSError:  # compiled, but CuPy's cache folder cannot be written
        compile_in_memory()
        return cupy.RawModule(code=text, options=flags, name_expressions=(instance,)).get_function(instance)


def _report(source: str, instance: str, flags: tuple[str, ...], text: str, log: str) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="spformat-", suffix=".cu", delete=False) as f:
        f.write(text)
    return f"{source}: {instance} does not compile with {' '.join(flags)}; source in {f.name}\n{log}"
