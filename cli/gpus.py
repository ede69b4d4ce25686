"""Names of GPUs, as people say them, and their architectures."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from .hints import was_given
from .output import notes

ARCHITECTURES = (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
"""Compute capabilities, times ten. Below 80 only libraries of the vendor run, and every kernel of ours says so."""

BOARDS = {
    70: ("V100", "Titan V"),
    75: ("T4", "RTX 2080", "RTX 6000", "RTX 8000"),
    80: ("A100", "A30", "A800"),
    86: ("A10", "A16", "A2", "A40", "RTX A4000", "RTX A5000", "RTX A6000", "RTX 3060", "RTX 3070", "RTX 3080",
         "RTX 3090"),
    87: ("Orin",),
    89: ("L4", "L40", "L40S", "L20", "RTX 6000 Ada", "RTX 4060", "RTX 4070", "RTX 4080", "RTX 4090"),
    90: ("H100", "H200", "H20", "H800", "GH200"),
    100: ("B100", "B200", "GB200"),
    103: ("B300", "GB300"),
    110: ("Thor",),
    120: ("RTX 5070", "RTX 5080", "RTX 5090", "RTX PRO 6000"),
    121: ("GB10", "DGX Spark"),
}  # fmt: skip
"""Boards of each architecture, by the list of NVIDIA (developer.nvidia.com/cuda-gpus)."""


def architecture(gpu: str) -> tuple[int, str]:
    """(90, "H100") of "H100 PCIe", (90, "") of "sm_90", "sm_90a" and "90"; BadParameter for what is no GPU."""
    match = re.fullmatch(r"(?:sm_)?([1-9]\d{1,2})(a?)", gpu)
    if match and (sm := int(match[1])) in ARCHITECTURES and not (match[2] and sm < 90):
        return sm, ""
    said, best = _plain(gpu), (0, "")
    for sm, names in BOARDS.items():
        for name in names:
            # "a100sxm480gb" is an A100, and "a1000" is no A10
            if re.match(rf"{_plain(name)}(?!\d)", said) and len(name) > len(best[1]):
                best = sm, name
    if best[0]:
        return best
    known = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
    boards = ", ".join(name for some in BOARDS.values() for name in some[:2])
    raise typer.BadParameter(
        f"expected cpu, a board ({boards}, ..), or one of {known} (sm_90a and later ones with an a, too), got {gpu!r}"
    )


def names(incomplete: str) -> list[str]:
    """For TAB: boards without a space in their names, and architectures."""
    known = [name for boards in BOARDS.values() for name in boards if " " not in name]
    known += [f"sm_{sm}" for sm in ARCHITECTURES]
    return [name for name in known if name.lower().startswith(incomplete.lower())]


def device(gpu: str) -> Any:
    """The device whose expected times are asked for: a ``Device``, or "cpu". BadParameter for what is no GPU.

    For a board without rates of its own: the first of its architecture, or one with the rates of the H200; a note
    says so.
    """
    from spformat.products.roofline import DEVICES, H200, device_for

    if gpu == "cpu":
        return "cpu"
    sm, board = architecture(gpu)
    known = device_for(board, sm)
    if known.name != board and not was_given("--json"):
        rates = known.name if known.name in DEVICES else H200.name
        notes().print(f"{gpu} is sm_{sm}; the rates are those of {rates}")
    return known


OfFastest = Annotated[
    str,
    typer.Option(
        "--gpu",
        "--device",
        help="With --to fastest: the device that multiplies, H200 (default), another board, sm_89, .., or cpu.",
        autocompletion=names,
    ),
]


def _plain(name: str) -> str:
    """ "h100pcie" of "NVIDIA H100 PCIe"."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for maker in ("nvidia", "tesla", "geforce", "jetson", "agx"):
        plain = plain.removeprefix(maker)
    return plain
