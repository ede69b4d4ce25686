"""Every .cu compiles through NVRTC for the architectures it is made for, with the package's options. No GPU needed.

A kernel class lists representative C++ names in ``instances()``; its source is the ``.cu`` file named like its module.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from early_starts import waiting_kernels

from spformat.backends.cuda.runtime import jit

ARCHS = ("sm_80", "sm_90a", "sm_100a")
SOURCES = sorted(p.relative_to(jit.HERE).with_suffix("").as_posix() for p in jit.HERE.glob("*/*.cu"))


@functools.cache
def nvrtc() -> Any:
    return pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")


@functools.cache
def headers() -> tuple[str, ...]:
    """-I flags for the CUDA headers that the wheels nvidia-cuda-runtime and nvidia-cuda-cccl bring."""
    nvidia = pytest.importorskip("nvidia", reason="nvidia-cuda-runtime is not installed")
    found = [d for root in nvidia.__path__ for d in Path(root).glob("*/include") if (d / "cuda_fp16.h").exists()]
    if not found:
        pytest.skip("nvidia-cuda-runtime is not installed")
    return tuple(f"-I{path}" for d in found for path in (d, d / "cccl") if path.exists())


def instances(source: str) -> tuple[str, ...]:
    """What the module beside ``source`` lists: through kernel classes, or a function of its own."""
    module = importlib.import_module(f"spformat.backends.cuda.{source.replace('/', '.')}")
    mine = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    listed = [name for cls in mine if hasattr(cls, "instances") for name in cls().instances()]
    return tuple(dict.fromkeys(listed or getattr(module, "instances", tuple)()))


TABLES = {
    "bsr/spmm_bsr_stream_sm90a", "bsr/spmm_bsr_strips_sm90a", "csr/spmm_csr", "csr/spmm_csr_records",
    "ell_buckets/spmm_ell_buckets",
}  # fmt: skip
"""Kernels that read a table of A before they wait for the launch before. Plans wait for such tables when they make them;
row numbers of ELL rows are A's own, and complete because the first launch of a product is never early."""


def compile_log(source: str, names: tuple[str, ...], arch: str) -> tuple[str, list[str], str]:
    """(compiler log, names without code, PTX): the first two are empty when all is well.

    Of a source that compiles, the log is what ptxas reports as a loss of performance: products of the tensor cores that
    wait for each other because a thread has too few registers, or a setmaxnreg that it ignores.
    """
    rtc = nvrtc()
    ok = rtc.nvrtcResult.NVRTC_SUCCESS
    text = jit.source_text(f"{source}.cu").encode()
    status, program = rtc.nvrtcCreateProgram(text, f"{source}.cu".encode(), 0, [], [])
    assert status == ok
    for name in names:
        assert rtc.nvrtcAddNameExpression(program, name.encode())[0] == ok
    flags = [flag.encode() for flag in (*jit.options(arch), *headers(), "-Xptxas=-v")]
    (status,) = rtc.nvrtcCompileProgram(program, len(flags), flags)
    _, size = rtc.nvrtcGetProgramLogSize(program)
    log = bytes(size + 1)  # at least two: NVRTC writes into it, and Python shares its one-byte objects
    rtc.nvrtcGetProgramLog(program, log)
    if status != ok:
        return log.decode(errors="replace"), [], ""
    _, size = rtc.nvrtcGetCUBINSize(program)
    cubin = bytes(size)
    rtc.nvrtcGetCUBIN(program, cubin)
    missing = []
    for name in names:
        status, lowered = rtc.nvrtcGetLoweredName(program, name.encode())
        if status != ok or lowered not in cubin:
            missing.append(name)
    _, size = rtc.nvrtcGetPTXSize(program)
    ptx = bytes(size + 1)
    rtc.nvrtcGetPTX(program, ptx)
    rtc.nvrtcDestroyProgram(program)
    complaints = [line for line in log.decode(errors="replace").splitlines() if "Potential Performance Loss" in line]
    return "\n".join(complaints), missing, ptx.decode(errors="replace")


def before_the_wait(ptx: str) -> set[str]:
    """The instructions on global memory that stand before the first griddepcontrol.wait of a kernel that has one."""
    found: set[str] = set()
    for kernel in re.split(r"\.entry ", ptx)[1:]:
        before, waits, _ = kernel.partition("griddepcontrol.wait")
        if waits:
            found.update(re.findall(r"\b(?:ld\.global|st\.global|atom|red|cp\.async)\b[\w.:]*", before))
    return {name for name in found if ".prefetch." not in name}


def cases() -> list[tuple[str, str]]:
    """(source, arch); a file named *_sm90a holds Hopper-only instructions, *_sm90 those of Hopper and later."""
    archs = {"sm90a": ("sm_90a",), "sm90": ARCHS[1:]}
    return [(s, arch) for s in SOURCES for arch in archs.get(s.rpartition("_")[2], ARCHS)]


def test_every_source_that_is_named_exists() -> None:
    """A launcher names its source in a string, relative to the folder of the backend."""
    named = {
        (path.name, node.value)
        for path in sorted(jit.HERE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w/]+\.cu", node.value)
    }
    assert len(named) >= len(SOURCES)
    assert [pair for pair in sorted(named) if not (jit.HERE / pair[1]).exists()] == []


def test_every_source_has_a_launcher() -> None:
    assert SOURCES, f"no .cu files in {jit.HERE}"
    assert [s for s in SOURCES if not (jit.HERE / f"{s}.py").exists()] == []


@pytest.mark.parametrize(("source", "arch"), cases(), ids=lambda v: v)
def test_compiles(source: str, arch: str) -> None:
    nvrtc()
    names = instances(source)
    assert names, f"{source}.py: neither a kernel class nor the module has instances()"
    log, missing, ptx = compile_log(source, names, arch)
    assert log == "", log
    assert missing == []
    assert ("griddepcontrol.wait" in ptx) == (arch != "sm_80" and waiting_kernels(jit.HERE / f"{source}.cu") > 0)
    early = before_the_wait(ptx)
    assert {name for name in early if source not in TABLES or not name.startswith("ld.global.nc")} == set(), (
        "a launch that begins early would use what the launch before may still write"
    )


def test_a_broken_instance_is_seen() -> None:
    """The check itself can fail: a name that the source does not define is reported."""
    log, missing, _ = compile_log(SOURCES[0], ("spformat_defines_no_such_kernel<int>",), "sm_90a")
    assert "no_such_kernel" in log or missing


def test_products_that_wait_for_each_other_are_seen() -> None:
    """A tile whose four blocks leave each thread too few registers to decode a step ahead."""
    name = "spmm_bitmask_expanding_sm90a<__half, __half, 1, 64, 3, 1, 4, true, true, true>"
    log, missing, _ = compile_log("bitmask/spmm_bitmask_expanding_sm90a", (name,), "sm_90a")
    assert missing == []
    assert "insufficient register resources" in log


@pytest.mark.parametrize("source", SOURCES)
def test_includes_only_device_headers(source: str) -> None:
    """Kernels include the package's own headers and those NVRTC finds without an SDK: raw pointers and sizes only."""
    texts = [(jit.HERE / f"{source}.cu").read_text()]
    texts += [p.read_text() for p in jit.reached_headers(texts[0])]
    found = {name for text in texts for name in re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', text, re.MULTILINE)}
    allowed = {"cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cuda/barrier"}
    assert {name for name in found if not name.startswith("spformat/")} <= allowed
