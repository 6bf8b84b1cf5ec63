"""Rewrites PTX so that a kernel notes every byte it touches: before each access to global or generic memory it
stores the number of that access into a map with one byte per byte of an arena, one map for reads and one for writes.
Addresses outside the arena (shared and local memory under generic addressing) are not noted. Works on the text by
regular expressions and shares nothing with the product.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ARENA = "tessera_arena"
"""Module variable that the host fills: first address, bytes, address of the map of reads, of the map of writes."""

_STATEMENT = re.compile(
    r"(?P<guard>@!?[%\w$]+\s+)?(?P<opcode>(?:ld|ldu|st|atom|red|cp\.async|cp\.reduce\.async|wmma\.load|wmma\.store|"
    r"tensormap|multimem|st\.async|sust|suld|discard)\.[\w.:]+)\s+(?P<operands>[^;]*);"
)
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?\]")
_PRIVATE = {
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "param",
    "param::entry",
    "param::func",
    "const",
}


@dataclass(frozen=True, slots=True)
class Instrumented:
    """The new text; ``sites``: (line of the original, mode) of each noted access, numbered from 1; ``unseen``:
    opcodes with accesses that are not noted."""

    text: str
    sites: tuple[tuple[int, str], ...]
    unseen: tuple[str, ...]


def instrument(text: str) -> Instrumented:
    """``text`` with its accesses noted."""
    sites: list[tuple[int, str]] = []
    unseen: set[str] = set()
    comments = [found.span() for found in re.finditer(r"//[^\n]*|/\*.*?\*/", text, re.S)]

    def rewritten(found: re.Match[str]) -> str:
        if any(low <= found.start() < high for low, high in comments):
            return found[0]
        noted = _noted(found, sites, unseen, text.count("\n", 0, found.start()) + 1)
        return noted + found[0]

    done = re.sub(r"(?<![\w.%$])" + _STATEMENT.pattern, rewritten, text)
    head = re.search(r"^\.(?:address_size|target)[^\n]*\n(?!\.address_size)", done, re.M)
    assert head is not None
    variable = f".visible .global .align 8 .b64 {ARENA}[4];\n"
    return Instrumented(
        done[: head.end()] + variable + done[head.end() :], tuple(sites), tuple(sorted(unseen))
    )


def _noted(found: re.Match[str], sites: list[tuple[int, str]], unseen: set[str], line: int) -> str:
    parts = found["opcode"].split(".")
    operands = found["operands"]
    if parts[0] in ("wmma", "tensormap", "multimem", "sust", "suld", "discard") or "tensor" in parts:
        unseen.add(".".join(parts[:5]))
        return ""
    if parts[0] == "cp":
        return _copied(found, parts, operands, sites, unseen, line)
    if _PRIVATE & set(parts):
        return ""
    place = _ADDRESS.search(operands)
    if place is None or not place[1].startswith("%"):
        return ""  # a module variable
    size = _bytes(parts)
    modes = {"ld": ("read",), "ldu": ("read",), "st": ("write",)}.get(parts[0], ("read", "write"))
    return "".join(_note(found["guard"], place, str(size), mode, sites, line, fixed=size) for mode in modes)


def _copied(
    found: re.Match[str],
    parts: list[str],
    operands: str,
    sites: list[tuple[int, str]],
    unseen: set[str],
    line: int,
) -> str:
    """Copies: `[to], [from], bytes` with the direction in the opcode."""
    if (
        not operands.strip()
        or "prefetch" in parts
        or parts[2] in ("commit_group", "wait_group", "wait_all", "mbarrier")
    ):
        return ""
    places = list(_ADDRESS.finditer(operands))
    if len(places) < 2:
        return ""
    rest = [o.strip() for o in operands[places[1].end() :].split(",") if o.strip() and "[" not in o]
    if parts[1] == "async" and parts[2] != "bulk":
        size = rest[1] if len(rest) > 1 else rest[0]
        if len(rest) > 1 and not rest[1].startswith("%") and not rest[1].isdigit():
            unseen.add(".".join(parts))
        return _note(found["guard"], places[1], size, "read", sites, line)
    if parts[0] == "cp" and parts[1] == "reduce":
        unseen.add(".".join(parts))
        return ""
    spaces = [p for p in parts if p.startswith(("shared", "global"))]
    if spaces[0].startswith("global"):
        return _note(found["guard"], places[0], rest[0], "write", sites, line)
    if spaces[1].startswith("global"):
        return _note(found["guard"], places[1], rest[0], "read", sites, line)
    return ""


def _bytes(parts: list[str]) -> int:
    kind = next(p for p in reversed(parts) if re.fullmatch(r"[busf]\d+|bf16|f16x2|bf16x2", p))
    bits = {"bf16": 16, "f16x2": 32, "bf16x2": 32}.get(kind) or int(re.sub(r"\D", "", kind))
    lanes = next((int(p[1:]) for p in parts if re.fullmatch(r"v[248]", p)), 1)
    return bits // 8 * lanes


def _note(
    guard: str | None,
    place: re.Match[str],
    size: str,
    mode: str,
    sites: list[tuple[int, str]],
    line: int,
    fixed: int = 0,
) -> str:
    sites.append((line, mode))
    site = (len(sites) - 1) % 255 + 1
    offset = place[2] or "0"
    where = 16 if mode == "read" else 24
    guarded = ""
    if guard:
        name = guard.strip()[1:]
        negated, name = name.startswith("!"), name.lstrip("!")
        guarded = f"mov.pred %tnq, {name};\n" + ("not.pred %tnq, %tnq;\n" if negated else "")
        guarded += "and.pred %tnp, %tnp, %tnq;\n"
    start = (
        "{\n.reg .pred %tnp, %tnq;\n.reg .b64 %tn<6>;\n.reg .b32 %tnc;\n"
        f"mov.u64 %tn0, {ARENA};\n"
        "ld.global.u64 %tn1, [%tn0];\nld.global.u64 %tn2, [%tn0+8];\n"
        f"ld.global.u64 %tn3, [%tn0+{where}];\n"
        f"add.s64 %tn4, {place[1]}, {offset};\nsub.s64 %tn4, %tn4, %tn1;\nsetp.lt.u64 %tnp, %tn4, %tn2;\n{guarded}"
        "add.s64 %tn4, %tn3, %tn4;\n"
    )
    word = int.from_bytes(bytes([site]) * 8, "little")
    if fixed in (1, 2, 4, 8):
        pattern = word & ((1 << fixed * 8) - 1)
        return start + f"@%tnp st.global.b{fixed * 8} [%tn4], {pattern if fixed < 8 else hex(pattern)};\n}}\n"
    if fixed and fixed % 8 == 0:
        stores = "".join(
            f"mov.b64 %tn5, {hex(word)};\n@%tnp st.global.b64 [%tn4+{at}], %tn5;\n"
            for at in range(0, fixed, 8)
        )
        return start + stores + "}\n"
    label = f"$tessera_{len(sites)}"
    return start + (
        f"mov.u32 %tnc, 0;\n{label}:\nsetp.lt.and.u32 %tnp, %tnc, {size}, %tnp;\n@!%tnp bra {label}_end;\n"
        f"st.global.b8 [%tn4], {site};\nadd.s64 %tn4, %tn4, 1;\nadd.s32 %tnc, %tnc, 1;\n"
        f"bra {label};\n{label}_end:\n}}\n"
    )
