"""One compiled kernel, and its launches."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .build import DEVICE, EmulatorError, shared_object
from .memory import Copies, stacks

STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a block may have as arrays of known size."""
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""And in all, by architecture."""
ONE_LAUNCH = threading.Lock()
"""Held while blocks run: all threads of a process share the stacks of fibers and the handlers of signals."""
MOST_BLOCKS = 8
"""Blocks that a cluster may have on every GPU."""
SIGNED, UNSIGNED, FLOATING = 4, 5, 3
POINTERS = (1, 2)
"""Kinds of parameters, as device/launch.h numbers them; 6 is a struct."""


class Options(ctypes.Structure):
    """``emu::Options`` of device/launch.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("smem", ctypes.c_uint64), ("seed", ctypes.c_uint64),
        ("shuffle_blocks", ctypes.c_int), ("shuffle_threads", ctypes.c_int), ("timeout", ctypes.c_double),
        ("cluster", ctypes.c_uint32 * 3),
        ("count", ctypes.c_uint64), ("ranges", ctypes.c_void_p), ("stacks", ctypes.c_void_p),
    )  # fmt: skip


class Kernel:
    """``instance``, a C++ name expression, of a source: ``Kernel(path, "copy<int>")(grid, block, *arguments)``.

    ``path`` may be a name only, with the source as ``text``. ``folders``: where its headers are, by default the folder
    ``include`` above it. ``sm``: the architecture, which decides what is compiled and how much shared memory there is.
    """

    def __init__(
        self,
        path: str | Path,
        instance: str,
        folders: Iterable[Path] | None = None,
        text: str | None = None,
        sm: int = 90,
    ) -> None:
        path = Path(path)
        if folders is None:
            folders = [d for p in path.resolve().parents for d in [p / "include"] if (d / "spformat").is_dir()][:1]
        source = path.read_text() if text is None else text
        self.instance, self._shared = instance, SHARED.get(sm, SHARED[90])
        self._path = shared_object(path.name, source, instance, (*folders, path.parent), sm)
        self._library = ctypes.CDLL(str(self._path))
        described = (ctypes.c_longlong * 128)()
        number = self._library.emu_parameters(described)
        self.parameters = [divmod(described[i], 16) for i in range(number)]
        """(bytes, kind) of each."""
        shape = (ctypes.c_uint32 * 4)()
        self._library.emu_shape(shape)
        self.cluster, self.most_threads = tuple(shape[:3]), shape[3]
        """Blocks of a cluster along x, y and z, and the threads that a block may have (``__launch_bounds__``)."""
        if self.cluster[0] * self.cluster[1] * self.cluster[2] > MOST_BLOCKS:
            raise EmulatorError(f"{instance}: a cluster of {self.cluster} blocks, at most {MOST_BLOCKS} may be in one")
        static = self._static_arrays()
        self.static_shared = sum(static[1::2])
        self._ranges = (ctypes.c_longlong * max(1, len(static)))(*static)
        self._count = len(static) // 2
        if self.static_shared > STATIC_SHARED:
            raise EmulatorError(
                f"{instance}: {self.static_shared} bytes of static shared memory, a block may have {STATIC_SHARED}"
            )

    def _static_arrays(self) -> list[int]:
        """Where static shared memory lies, relative to ``emu_run``: start, size, start, ... They are local statics."""
        sections, symbols = (
            subprocess.run(["readelf", flags, str(self._path)], capture_output=True, text=True, check=True).stdout
            for flags in ("-SW", "-sW")
        )
        bss = set(re.findall(r"\[\s*(\d+)\]\s+\.bss", sections))
        sizes, base = {}, 0
        for line in symbols.splitlines():
            fields = line.split()
            if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
                continue
            value, size, kind, section, name = int(fields[1], 16), fields[2], fields[3], fields[6], fields[7]
            if name == "emu_run":
                base = value
            elif kind == "OBJECT" and section in bss and name.startswith("_ZZ") and not name.startswith("_ZZN3emu"):
                sizes[value] = int(size, 0)
        return [x for at, size in sorted(sizes.items()) for x in (at - base, size)]

    def __call__(
        self, grid: Any, block: Any, *arguments: Any, smem: int = 0, shuffle_blocks: bool = False, shuffle_threads: bool = False,
        seed: int = 0, timeout: float = 60.0, misalign: int | dict[int, int] = 0,
    ) -> None:  # fmt: skip
        """Run all blocks. Arrays are numpy arrays, and results are written back into them; None is a null pointer.

        Numbers are numpy's, of the size of the parameter, or Python's; structs are arrays of one element, or bytes.
        ``misalign``: bytes behind a boundary of 16 at which arrays start, for all or by the place of an argument.
        """
        if len(arguments) != len(self.parameters):
            raise EmulatorError(f"{self.instance} takes {len(self.parameters)} arguments, got {len(arguments)}")
        copies = Copies(arguments, [kind in POINTERS for _, kind in self.parameters], misalign)
        slots = []
        for i, ((size, kind), argument) in enumerate(zip(self.parameters, arguments, strict=True)):
            pointer = kind in POINTERS
            data = copies.addresses[i].to_bytes(8, "little") if pointer else self._bytes(i, argument, size, kind)
            slots.append(ctypes.create_string_buffer(data, max(16, len(data))))
        pointers = (ctypes.c_void_p * max(1, len(slots)))(*map(ctypes.addressof, slots))
        options: dict[str, Any] = {
            "seed": seed,
            "shuffle_blocks": shuffle_blocks,
            "shuffle_threads": shuffle_threads,
            "timeout": timeout,
        }
        self.launch(_extents(grid), _extents(block), smem, ctypes.addressof(pointers), copies.near, **options)
        if damage := copies.damage():
            raise EmulatorError(f"{self.instance}: {damage}")
        copies.copy_back()

    @property
    def products(self) -> int:
        """mma and mma.sp instructions of warps in all launches so far."""
        return ctypes.c_ulonglong.in_dll(self._library, "emu_products").value

    def launch(
        self, grid: tuple[int, ...], block: tuple[int, ...], smem: int, arguments: int, near: Callable[[int], str] = lambda at: "",
        *, seed: int = 0, shuffle_blocks: bool = False, shuffle_threads: bool = False, timeout: float = 60.0,
    ) -> None:  # fmt: skip
        """Run all blocks as the driver would: ``arguments`` is the address of the addresses of the arguments."""
        gx, gy, gz = grid
        if gy > 65535 or gz > 65535 or gx >= 2**31 or min(grid) < 1:
            raise EmulatorError(f"{self.instance}: a grid of {grid}: extents are positive, y and z at most 65535")
        if not 0 < block[0] * block[1] * block[2] <= self.most_threads:
            raise EmulatorError(
                f"{self.instance}: a block of {block} threads, at most {self.most_threads} may be in one"
            )
        if any(g % c for g, c in zip(grid, self.cluster, strict=True)):
            raise EmulatorError(f"{self.instance}: a grid of {grid} is not whole clusters of {self.cluster}")
        if self.static_shared + smem > self._shared:
            raise EmulatorError(
                f"{self.instance}: {self.static_shared} + {smem} bytes of shared memory, a block may have {self._shared}"
            )
        text = ctypes.create_string_buffer(8192)
        three = ctypes.c_uint32 * 3
        options = Options(
            three(*grid), three(*block), smem, seed, shuffle_blocks, shuffle_threads, timeout,
            three(*self.cluster), self._count, ctypes.addressof(self._ranges), stacks(math.prod(block) * math.prod(self.cluster)),
        )  # fmt: skip
        room = ctypes.c_ulonglong(len(text))
        with ONE_LAUNCH:
            failed = self._library.emu_run(ctypes.c_void_p(arguments), ctypes.byref(options), text, room)
        if failed:
            raise EmulatorError(f"{self.instance}: {self._explained(text.value.decode(), near)}")

    def copied_arguments(self, arguments: int) -> list[Any]:
        """Copies of the arguments whose addresses lie at ``arguments``; first the array of the addresses of these."""
        addresses = (ctypes.c_void_p * max(1, len(self.parameters))).from_address(arguments)
        copies = [
            ctypes.create_string_buffer(ctypes.string_at(at or 0, size), max(16, size))
            for at, (size, _) in zip(addresses, self.parameters, strict=False)
        ]
        return [(ctypes.c_void_p * max(1, len(copies)))(*map(ctypes.addressof, copies)), *copies]

    def _bytes(self, i: int, argument: Any, size: int, kind: int) -> bytes:
        """An argument by value."""
        if isinstance(argument, bytes | ctypes.Structure | ctypes.Array):
            data = bytes(argument)
        elif isinstance(argument, int | float) and not isinstance(argument, np.generic):
            if kind == FLOATING:
                data = np.array(argument, f"f{size}").tobytes()
            elif kind in (SIGNED, UNSIGNED) and not isinstance(argument, float):
                data = int(argument).to_bytes(size, "little", signed=argument < 0)
            else:
                raise EmulatorError(f"{self.instance}: argument {i} is {argument!r}, for a parameter of another kind")
        else:
            data = np.asarray(argument).tobytes()
        if len(data) != size:
            raise EmulatorError(
                f"{self.instance}: argument {i} has {len(data)} bytes, the parameter {size}: {argument!r}"
            )
        return data

    def _explained(self, text: str, near: Callable[[int], str]) -> str:
        """A message with places in the source for addresses of code (@0x..) and with arguments for those of data (#0x..)."""
        maps = (line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(self._path)))
        base = next((int(line.split("-")[0], 16) for line in maps), 0)

        def place(m: re.Match[str]) -> str:
            offset = 0 if "nil" in m.group(1) else int(m.group(1), 16) - base
            if not 0 < offset < 1 << 30:
                return m.group(0)
            command = ["addr2line", "-i", "-e", str(self._path), hex(offset - 1)]
            out = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
            lines = [x.split(" ")[0].rpartition("/")[2] for x in out if x]
            own = [x for x in lines if not x.startswith(tuple(p.name for p in DEVICE.iterdir()))]
            return " < ".join(dict.fromkeys(own or lines))

        def data(m: re.Match[str]) -> str:
            return m.group(1) + near(0 if "nil" in m.group(1) else int(m.group(1), 16))

        # The compiler's own checks name the line already.
        text = re.sub(r"\((?:[^()]*/)?([^()/]*:\d+:\d+\)) at @0x[0-9a-f]+", r"(\1", text)
        text = re.sub(r"@(0x[0-9a-f]+|\(nil\))", place, text)
        return re.sub(r"#(0x[0-9a-f]+|\(nil\))", data, text)


def _extents(d: Any) -> tuple[int, ...]:
    return (*(int(x) for x in (d if isinstance(d, tuple | list) else (d,))), 1, 1)[:3]
