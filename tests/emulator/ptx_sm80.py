"""Inline PTX of several instructions, and the instructions of sm_80, as C++: each instruction on its own."""

from __future__ import annotations

import re
from collections.abc import Callable

from . import ptx_sm90

Single = Callable[[str, str, list[str]], str]
"""Name, the rest of the instruction and operands -> C++ for loads, stores and what does nothing here; "" if it is another."""
REGISTERS = {"pred": "bool", "b16": "unsigned short", "f32": "float", "f64": "double", "b64": "unsigned long long"}
WIDTHS = {"16": "unsigned short", "32": "unsigned", "64": "unsigned long long"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
OPERATORS = {"add": "+", "sub": "-", "mul.lo": "*", "and": "&", "or": "|", "xor": "^"}
KINDS = {"f16": "F16", "bf16": "BF16", "tf32": "TF32"}


def block(ptx: str, outs: list[str], ins: list[str], single: Single) -> str:
    """The instructions of an ``asm`` as C++; "" if one of them is not emulated."""
    text = ptx.strip().removeprefix("{").removesuffix("}") if ptx.lstrip().startswith("{") else ptx
    statements = [s.strip() for s in text.replace("\n", " ").split(";") if s.strip()]
    operands = outs + ins
    out, names = [], list(operands)
    if len(statements) > 1:  # inputs are taken before anything is written
        names[len(outs) :] = [f"emu_in{i}" for i in range(len(ins))]
        out = [f"const auto emu_in{i} = {text};" for i, text in enumerate(ins)]
    for statement in statements:
        if m := re.match(r"\.reg\s*\.(\w+)\s+(.+)", statement):
            kind = REGISTERS.get(m.group(1)) or WIDTHS[m.group(1)[1:]]
            for name in m.group(2).split(","):
                names.append(f"emu_{name.strip()}")
                out.append(f"{kind} {names[-1]} = 0;")
            continue
        for i, name in enumerate(names[len(operands) :], len(operands)):
            statement = re.sub(rf"(?<![%\w.]){name.removeprefix('emu_')}(?![\w.:])", f"%{i}", statement)
        guard = re.match(r"@(!?)%(\d+)\s+", statement)
        done = _instruction(statement[guard.end() :] if guard else statement, names, single)
        if not done:
            return ""
        out.append(f"if ({guard.group(1)}{names[int(guard.group(2))]}) {{ {done} }}" if guard else done)
    return f"{{ {' '.join(out)} }}"


def _instruction(text: str, names: list[str], single: Single) -> str:
    name, _, rest = text.partition(" ")
    for pattern, write in ptx_sm90.INSTRUCTIONS.items():
        if m := re.fullmatch(pattern, name):
            return write(m, [_operand(x, names) for x in _split(rest)])
    if done := single(name, rest, names):
        return done
    for pattern, write in INSTRUCTIONS.items():
        if m := re.fullmatch(pattern, name):
            try:
                return write(m, [_operand(x, names) for x in _split(rest)])
            except (IndexError, ValueError):  # other operands than those of this form of the instruction
                return ""
    return ""


def _split(text: str) -> list[str]:
    """At commas outside of braces and brackets."""
    return [x.strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[]+)", text) if x.strip()]


def _operand(text: str, names: list[str]) -> str:
    """A register, a number, an address (without its brackets) or, in braces, several as C++."""
    text = text.strip("[]")
    return re.sub(r"%(\d+)", lambda m: f"({names[int(m.group(1))]})", text)


def _list(text: str) -> list[str]:
    parts, depth = [""], 0
    for c in text.strip("{}"):
        depth += (c == "(") - (c == ")")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def _array(kind: str, name: str, text: str) -> str:
    items = _list(text)
    return f"const {kind} {name}[{len(items)}] = {{{', '.join(items)}}};"


def _moved(m: re.Match[str], x: list[str]) -> str:
    return f"{x[0]} = {x[1]};"


def _compared(m: re.Match[str], x: list[str]) -> str:
    kind = {"s32": "int", "s64": "long long", "f32": "float"}.get(m.group(2)) or WIDTHS[m.group(2)[1:]]
    return f"{x[0]} = ({kind})({x[1]}) {COMPARISONS[m.group(1)]} ({kind})({x[2]});"


def _calculated(m: re.Match[str], x: list[str]) -> str:
    kind = WIDTHS[m.group(2)]
    return f"{x[0]} = ({kind})(({kind})({x[1]}) {OPERATORS[m.group(1)]} ({kind})({x[2]}));"


def _cp_async(m: re.Match[str], x: list[str]) -> str:
    """Destination, source, size, then the bytes that are read, and the cache policy."""
    left = x[3:-1] if "cache_hint" in m.group(0) else x[3:]
    if len(left) > 1 or (m.group(1) == "cg" and x[2] != "16"):
        return ""
    return f"emu::cp_async({x[0]}, (size_t)({_base(x[1])}), {x[2]}, {left[0] if left else x[2]});"


def _base(address: str) -> str:
    """An address, whose offset counts bytes also behind a pointer."""
    base, plus, offset = address.rpartition("+")
    return (
        f"(size_t)({base.strip()}) + ({offset.strip()})"
        if plus and re.fullmatch(r"\s*\d+|\s*\(.*\)", offset)
        else address
    )


def _ldmatrix(m: re.Match[str], x: list[str]) -> str:
    count, trans = m.group(1), "true" if m.group(2) else "false"
    taken = " ".join(f"{v} = emu_words[{i}];" for i, v in enumerate(_list(x[0])))
    return f"{{ unsigned emu_words[{count}]; emu::ldmatrix<{count}, {trans}>(emu_words, {x[1]}); {taken} }}"


def _stmatrix(m: re.Match[str], x: list[str]) -> str:
    count, trans = m.group(1), "true" if m.group(2) else "false"
    return f"{{ {_array('unsigned', 'emu_words', x[1])} emu::stmatrix<{count}, {trans}>({x[0]}, emu_words); }}"


def _mma(m: re.Match[str], x: list[str]) -> str:
    d, a, b, c = x
    given = f"{_array('unsigned', 'emu_a', a)} {_array('unsigned', 'emu_b', b)} {_array('float', 'emu_c', c)}"
    call = f"emu::mma(emu::{KINDS[m.group(2)]}, {m.group(1)}, emu_d, emu_a, emu_b, emu_c);"
    return f"{{ {given} float emu_d[4]; {call} {_results(d)} }}"


def _mma_sp(m: re.Match[str], x: list[str]) -> str:
    d, a, b, c, e, selector = x
    given = f"{_array('unsigned', 'emu_a', a)} {_array('unsigned', 'emu_b', b)} {_array('float', 'emu_c', c)}"
    call = f"emu::mma_sp(emu::{KINDS[m.group(1)]}, emu_d, emu_a, emu_b, emu_c, {e}, {selector});"
    return f"{{ {given} float emu_d[4]; {call} {_results(d)} }}"


def _results(d: str) -> str:
    return " ".join(f"{v} = emu_d[{i}];" for i, v in enumerate(_list(d)))


def _barrier(m: re.Match[str], x: list[str]) -> str:
    wait = "true" if m.group(1) == "sync" else "false"
    if len(x) == 1:
        return "__syncthreads();" if wait == "true" and x[0] == "0" else ""
    return f"emu::named_barrier({x[0]}, {x[1]}, {wait});"


INSTRUCTIONS: dict[str, Callable[[re.Match[str], list[str]], str]] = {
    r"mov\.[bsuf](?:16|32|64)": _moved,
    r"setp\.(eq|ne|lt|le|gt|ge)\.(\w+)": _compared,
    r"(add|sub|mul\.lo|and|or|xor)\.[bsu](16|32|64)": _calculated,
    r"prmt\.b32": lambda m, x: f"{x[0]} = __byte_perm({x[1]}, {x[2]}, {x[3]});",
    r"fma\.rn\.f32": lambda m, x: f"{x[0]} = fmaf({x[1]}, {x[2]}, {x[3]});",
    r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global[\w.:]*": _cp_async,
    r"cp\.async\.commit_group": lambda m, x: "emu::commit_copies();",
    r"cp\.async\.wait_group": lambda m, x: f"emu::land_copies({x[0]});",
    r"cp\.async\.wait_all": lambda m, x: "emu::land_all_copies();",
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16": _ldmatrix,
    r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16": _stmatrix,
    r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16": lambda m, x: f"{x[0]} = emu::movmatrix({x[1]});",
    r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(f16|bf16)\.\2\.f32": _mma,
    r"mma\.sync\.aligned\.m16n8k(8)\.row\.col\.f32\.(tf32)\.tf32\.f32": _mma,
    r"mma\.sp::ordered_metadata\.sync\.aligned\.m16n8k32\.row\.col\.f32\.(f16|bf16)\.\1\.f32": _mma_sp,
    r"bar(?:rier)?\.(sync|arrive)(?:\.aligned)?": _barrier,
}
"""Name of an instruction -> what writes it in C++."""
