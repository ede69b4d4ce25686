"""Inline PTX and dynamic shared memory as C++, in the text of a source."""

from __future__ import annotations

import re

from . import ptx_sm80, ptx_sm90

_TYPES = {"8": "unsigned char", "16": "unsigned short", "32": "unsigned", "64": "unsigned long long"}
_ACCESS = re.compile(r"^(ld|ldu|st)\b[\w.:]*?\.(?:v([248])\.)?([busf])(8|16|32|64)$")
_LOADED = re.compile(r"\{?([^}\[]*?)\}?\s*,\s*\[([^\]]*)\]")
_STORED = re.compile(r"\[([^\]]*)\]\s*,\s*\{?([^}]*?)\}?\s*$")
_KNOWN = {
    "cvt.f32.f16 %0, %1;": "{0} = emu_half_to_float({1});",
    "cvt.f64.f32 %0, %1;": "{0} = (double)({1});",
    "cvt.rn.f16x2.f32 %0, %1, %2;": "{0} = emu_pack_half({1}, {2});",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": "{0} = emu_pack_bfloat({1}, {2});",
    "mov.u64 %0, %globaltimer;": "{0} = clock64(); emu::yield();",
    "red.release.gpu.global.add.u32 [%0], %1;": "atomicAdd({0}, {1});",
    "atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;": "{0} = atomicAdd({1}, {2});",
    "mov.u32 %0, %smid;": "{0} = 0;",
    "mov.u32 %0, %cluster_ctarank;": "{0} = emu::block_rank;",
    "mov.u32 %0, %laneid;": "{0} = emu::lane();",
    "mov.u32 %0, %lanemask_lt;": "{0} = (1u << emu::lane()) - 1;",
    "mov.u32 %0, %lanemask_le;": "{0} = (2u << emu::lane()) - 1;",
    "mov.u32 %0, %lanemask_gt;": "{0} = ~((2u << emu::lane()) - 1);",
    "mov.u32 %0, %lanemask_ge;": "{0} = ~((1u << emu::lane()) - 1);",
    "{\n.reg .pred p;\n.reg .b32 x;\nshfl.sync.up.b32 x|p, %0, %1, 0, 0xFFFFFFFF;\n@p add.u32 %0, %0, x;\n}": (
        "{0} = emu_shfl_up_add({0}, {1});"
    ),
}
"""PTX as it stands in sources, and C++ with operands in the places of their numbers."""


def translated(text: str) -> str:
    """The source as C++ for g++. Lines keep their numbers."""
    text = ptx_sm90.launch_shapes(text)
    out, at = [], 0
    for m in re.finditer(r"\basm\s*(?:volatile|__volatile__)?\s*\(", text):
        if m.start() < at or "//" in text[text.rfind("\n", 0, m.start()) + 1 : m.start()]:
            continue
        inside_end = _closing(text, m.end())
        ends = re.compile(r"\s*;").match(text, inside_end + 1)
        end = ends.end() if ends else inside_end + 1  # a macro whose user writes the semicolon
        inside = re.sub(r"//[^\n]*", "", text[m.end() : inside_end])  # in one line they would hide what follows
        piece = text[m.start() : end]
        new_line = "\\\n" if "\\\n" in piece or piece.rstrip().endswith("\\") else "\n"
        out += [
            text[at : m.start()],
            ("{{ {} }}" if ends else "{}").format(" ".join(_statement(inside, bool(ends)).split("\n"))),
            new_line * piece.count("\n"),
        ]
        at = end
    text = ptx_sm90.constraints_of_macros("".join(out) + text[at:])
    text = re.sub(r"__shared__(\s+)alignas\s*\(", r"__shared__\1__align__(", text)  # g++ takes no alignas after static
    return re.sub(r"extern\s+__shared__\s+([^;]*?)\b(\w+)\s*\[\s*\]\s*;", _dynamic, text)


def _dynamic(m: re.Match[str]) -> str:
    aligned = r"(?:__align__|alignas)\s*\(([^)]*)\)"
    kind, asked = re.sub(aligned, "", m.group(1)).strip(), re.search(aligned, m.group(1))
    return f"{kind}* const {m.group(2)} = emu::dynamic_array<{kind}, {asked.group(1) if asked else 1}>();"


def _closing(text: str, at: int) -> int:
    """Where the parenthesis closes that is open at ``at``."""
    depth, quoted = 1, False
    while True:
        c = text[at]
        if quoted and c == "\\":
            at += 1
        elif c == '"':
            quoted = not quoted
        elif not quoted:
            depth += (c == "(") - (c == ")")
        if not depth:
            return at
        at += 1


def _split(text: str, mark: str) -> list[str]:
    """``text`` at every ``mark`` outside of parentheses and strings."""
    parts, depth, quoted, at = [""], 0, False, 0
    while at < len(text):
        c = text[at]
        if quoted and c == "\\":
            parts[-1] += text[at : at + 2]
            at += 2
            continue
        if c == '"':
            quoted = not quoted
        if not quoted:
            depth += (c in "([{") - (c in ")]}")
            if c == mark and depth == 0:
                parts.append("")
                at += 1
                continue
        parts[-1] += c
        at += 1
    return parts


def _operands(part: str) -> list[str]:
    items = (re.match(r'\s*"[^"]*"\s*(\(.*\))\s*$', item, re.DOTALL) for item in _split(part, ","))
    return [m.group(1) for m in items if m]


def _statement(text: str, closed: bool = True) -> str:
    """What stands between the parentheses of ``asm`` as C++, or a call that reports that it is not emulated."""
    literal = re.match(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', text)
    template, *rest = _split(text, ":")
    if not literal or template[literal.end() :].strip():
        return ptx_sm90.interpreted(template, rest[:2]) + ";" * closed
    ptx = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literal.group(1)))
    ptx = ptx.replace("\\n", "\n").replace("\\t", " ").replace("%%", "%").strip()
    sections = _split(text[literal.end() :], ":")[1:]
    outs, ins = (_operands(sections[i]) if len(sections) > i else [] for i in (0, 1))
    if not ptx:
        return ";"
    if ptx in _KNOWN:
        result = _KNOWN[ptx]
        for i, operand in enumerate(outs + ins):
            result = result.replace(f"{{{i}}}", operand)
        return result
    if done := ptx_sm80.block(ptx, outs, ins, _single):
        return done
    shown = re.sub(r'[\n\\"]', " ", ptx)[:80]
    return f'emu::unsupported("inline PTX that is not emulated: {shown}");'


def _single(name: str, rest: str, operands: list[str]) -> str:
    """A load or store, or an instruction that does nothing here; "" if it is another one."""
    if re.match(r"^(membar|fence)\b", name):
        return "emu::yield();"
    if re.match(r"^(prefetch|discard|applypriority|createpolicy|griddepcontrol)", name):
        return f"{operands[0]} = 0;" if name.startswith("createpolicy") else ";"
    access = _ACCESS.match(name)
    return _moved(access, rest, operands) if access and "::cluster" not in name else ""


def _moved(access: re.Match[str], rest: str, operands: list[str]) -> str:
    """A load or store of one or several words, with the alignment that it needs."""
    kind, count, letter, bits = access.groups()
    number = int(count or 1)
    word = {"f32": "float", "f64": "double"}.get(letter + bits, _TYPES[bits])
    room = f"struct alignas({number} * sizeof({word})) EmuW {{ {word} v[{number}]; }};"
    m = (_STORED if kind == "st" else _LOADED).match(rest)
    if not m:
        return ""

    def operand(text: str) -> str:
        return operands[int(text.strip().lstrip("%"))]

    address, values = (m.group(1), m.group(2)) if kind == "st" else (m.group(2), m.group(1))
    base, *offset = address.split("+")
    place = "+".join([f"({operand(base)})", *offset[:1]])
    if ".shared" in access.group(0):
        place = f"emu::shared_pointer({place}, sizeof(EmuW), alignof(EmuW))"
    if kind == "st":
        words = ", ".join(f"({word})({operand(v)})" for v in values.split(",")[:number])
        return f"{{ {room} *(EmuW*)((size_t)({place})) = EmuW{{{{{words}}}}}; }}"
    taken = " ".join(f"{operand(v)} = emu_w.v[{i}];" for i, v in enumerate(values.split(",")))
    return f"{{ {room} const EmuW emu_w = *(const EmuW*)((size_t)({place})); {taken} }}"
