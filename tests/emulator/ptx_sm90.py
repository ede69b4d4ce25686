"""Inline PTX of sm_90 as C++: mbarriers, the copy engine, clusters, products of warpgroups; and what kernels say about launches."""

from __future__ import annotations

import re
from collections.abc import Callable

Written = Callable[[re.Match[str], list[str]], str]


def _box(text: str) -> tuple[str, str]:
    """ "map, {x, y}" as the map and the coordinates."""
    place, _, coordinates = text.partition(",")
    inside = coordinates.strip().strip("{}")
    return place, f"emu::Coordinates{{{{{inside}}}, {_count(inside)}}}"


def _count(text: str) -> int:
    """Items between commas outside of parentheses."""
    depth, items = 0, 1
    for c in text:
        depth += (c == "(") - (c == ")")
        items += c == "," and not depth
    return items


def _load_box(m: re.Match[str], x: list[str]) -> str:
    if int(m.group(1)) != _count(x[1].partition(",")[2].strip().strip("{}")):
        return ""
    place, coordinates = _box(x[1])
    blocks = x[3] if m.group(2) else "0"
    return f"emu::load_box({x[0]}, (size_t)({place}), {x[2]}, {coordinates}, {blocks});"


def _store_box(m: re.Match[str], x: list[str]) -> str:
    place, coordinates = _box(x[0])
    return f"emu::store_box((size_t)({place}), {x[1]}, {coordinates});"


def _store_async(m: re.Match[str], x: list[str]) -> str:
    values = x[1].strip("{}")
    if _count(values) != int(m.group(1)):
        return ""
    return f"{{ const {'float' if m.group(2) == 'f32' else 'unsigned'} emu_values[] = {{{values}}}; emu::store_async({x[0]}, emu_values, sizeof emu_values, {x[2]}); }}"


def _load_cluster(m: re.Match[str], x: list[str]) -> str:
    kind = {"f32": "float", "u32": "unsigned", "b32": "unsigned"}[m.group(1)]
    return f"{x[0]} = *({kind}*)emu::cluster_pointer({x[1]}, 4, 4, emu::here());"


def _load_cluster_4(m: re.Match[str], x: list[str]) -> str:
    to = [t.strip() for t in x[0].strip("{}").split(",")]
    if len(to) != 4:
        return ""
    takes = " ".join(f"{t} = emu_from[{i}];" for i, t in enumerate(to))
    return (
        f"{{ const float* const emu_from = (const float*)emu::cluster_pointer({x[1]}, 16, 16, emu::here()); {takes} }}"
    )


INSTRUCTIONS: dict[str, Written] = {
    r"mbarrier\.init(?:\.shared::cta)?\.b64": lambda m, x: f"emu::mbarrier_init({x[0]}, {x[1]});",
    r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64": lambda m, x: f"emu::mbarrier_expect({x[1]}, {x[2]}, true);",
    r"mbarrier\.expect_tx\.relaxed\.cta\.shared::cta\.b64": lambda m, x: (
        f"emu::mbarrier_expect({x[0]}, {x[1]}, false);"
    ),
    r"mbarrier\.arrive\.shared::cta\.b64": lambda m, x: f"emu::mbarrier_arrive({x[1]}, {x[2] if len(x) > 2 else 1});",
    r"mbarrier\.arrive(?:\.release\.cluster)?\.shared::cluster\.b64": lambda m, x: (
        f"emu::mbarrier_arrive_cluster({x[1]});"
    ),
    r"mbarrier\.try_wait\.parity(?:\.acquire\.c(?:ta|luster))?\.shared::cta\.b64": (
        lambda m, x: f"{x[0]} = emu::mbarrier_try_wait({x[1]}, {x[2]});"
    ),
    r"cp\.async\.mbarrier\.arrive\.noinc\.shared::cta\.b64": lambda m, x: f"emu::mbarrier_arrive_after_copies({x[0]});",
    r"fence\.mbarrier_init\.release\.cluster": lambda m, x: "emu::mbarrier_fence_init();",
    r"fence\.proxy\.async(?:\.shared::cta)?": lambda m, x: "emu::fence_proxy();",
    r"cp\.async\.bulk\.prefetch\.L2\.global": lambda m, x: f"emu::bring_bytes((size_t)({x[0]}), {x[1]});",
    r"prefetch\.tensormap": lambda m, x: f"emu::prefetch_map((size_t)({x[0]}));",
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::cluster\.global\.mbarrier::complete_tx::bytes(\.multicast::cluster)?(?:\.L2::cache_hint)?": _load_box,
    r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?": (
        lambda m, x: f"emu::load_bytes({x[0]}, (size_t)({x[1]}), {x[2]}, {x[3]});"
    ),
    r"cp\.async\.bulk\.tensor\.([1-5])d\.global\.shared::cta\.bulk_group": _store_box,
    r"cp\.async\.bulk\.commit_group": lambda m, x: "emu::commit_stores();",
    r"cp\.async\.bulk\.wait_group(\.read)?": (
        lambda m, x: f"emu::wait_stores({x[0]}, {'true' if m.group(1) else 'false'});"
    ),
    r"mapa\.shared::cluster\.u32": lambda m, x: f"{x[0]} = emu::cluster_map({x[1]}, {x[2]});",
    r"ld\.shared::cluster\.([fub]32)": _load_cluster,
    r"ld\.shared::cluster\.v4\.f32": _load_cluster_4,
    r"st\.async\.weak\.shared::cluster\.mbarrier::complete_tx::bytes\.v([24])\.([fub]32)": _store_async,
    r"barrier\.cluster\.arrive(?:\.release|\.relaxed)?\.aligned": lambda m, x: "emu::cluster_arrive();",
    r"barrier\.cluster\.wait(?:\.acquire)?\.aligned": lambda m, x: "emu::cluster_wait();",
    r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32": (
        lambda m, x: f"emu::set_registers({x[0]}, {'true' if m.group(1) == 'inc' else 'false'});"
    ),
    r"wgmma\.fence\.sync\.aligned": lambda m, x: "emu::wgmma_fence();",
    r"wgmma\.commit_group\.sync\.aligned": lambda m, x: "emu::wgmma_commit();",
    r"wgmma\.wait_group\.sync\.aligned": lambda m, x: f"emu::wgmma_wait({x[0]});",
    r"selp\.[bsu]32": lambda m, x: f"{x[0]} = {x[3]} ? {x[1]} : {x[2]};",
}
"""Name of an instruction -> what writes it in C++."""


# ---- text that macros put together: it is read when it runs

_CONSTRAINED = r'"(\+?)[fhlnrd]"\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)'


def _wrapped(m: re.Match[str]) -> str:
    return f"emu::{'inout' if m.group(1) else 'in'}({m.group(2)})"


def interpreted(template: str, operands: list[str]) -> str:
    """An ``asm`` whose text has names of macros: a call that gets the text and the operands."""
    parts = [re.sub(_CONSTRAINED, _wrapped, part).replace("\\\n", " ").strip(" \\\n") for part in (template, *operands)]
    return f"emu::interpreted({', '.join(filter(None, parts))})"


def constraints_of_macros(text: str) -> str:
    """Operands that macros define, as ``interpreted`` takes them."""
    return re.sub(r'"(\+)f"\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)', _wrapped, text)


# ---- clusters and bounds, which stand before the name of a kernel

_KERNEL = re.compile(r"__global__\s+void\b")


def launch_shapes(text: str) -> str:
    """What stands between ``__global__ void`` and the name of a kernel goes into a struct ``<name>_launch_shape`` before it,
    with the kernel's template parameters. Lines keep their numbers."""
    out, at = [], 0
    for m in _KERNEL.finditer(text):
        declared = re.compile(
            r"((?:\s|//[^\n]*\n)*(?:\w+\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)(?:\s|//[^\n]*\n)*)*)(\w+)\s*\("
        )
        name = declared.match(text, m.end())
        if not name or not name.group(1).strip() or "//" in text[text.rfind("\n", 0, m.start()) + 1 : m.start()]:
            continue
        start, template = _template_before(text, m.start())
        said, template = _one_line(name.group(1)), _one_line(template)
        shape = (
            f"{template} struct {name.group(2)}_launch_shape {{ static constexpr "
            f"emu::LaunchShape of() {{ return emu::LaunchShape() {said}; }} }}; "
        )
        out += [text[at:start], shape, text[start : m.end()], " " + "\n" * name.group(1).count("\n")]
        at = name.end(1)
    return "".join(out) + text[at:]


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"//[^\n]*", "", text).split())


def _template_before(text: str, at: int) -> tuple[int, str]:
    """Where the declaration of a kernel begins, and its ``template <...>``."""
    begin = at
    if m := re.search(r'extern\s+"C"\s*$', text[:at]):
        begin = m.start()
    head = text[:begin].rstrip()
    if not head.endswith(">"):
        return begin, ""
    depth = 0
    for i in range(len(head) - 1, -1, -1):
        depth += (head[i] == ">") - (head[i] == "<")
        if not depth:
            m = re.search(r"\btemplate\s*$", head[:i])
            return (m.start(), head[m.start() :]) if m else (begin, "")
    return begin, ""


def shape_of(instance: str, text: str) -> str:
    """The launch shape of an instance as C++, among the sources ``text``."""
    name, angle, arguments = instance.partition("<")
    plain = name.rpartition("::")[2].strip()
    if f"struct {plain}_launch_shape " not in text:
        return "emu::LaunchShape()"
    return f"{name.strip()}_launch_shape{angle}{arguments}::of()"
