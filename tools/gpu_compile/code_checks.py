# SPDX-License-Identifier: Apache-2.0
"""Faults that a kernel's PTX and machine code can show, found by walking their control flow."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

State = TypeVar("State")
#: Registers that committed groups of products read, and those of the group that is not committed.
Running = tuple[tuple[frozenset[int], ...], frozenset[int]]

_TENSOR_CORES = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma\b",
    "mma.sync": r"\bmma\.sync",
}
_SHARED_WRITE = re.compile(
    r"\b(?:st\.shared|st\.async|stmatrix|cp\.async\.(?:ca|cg)\.shared|cp\.async\.bulk\.\S*shared)"
    r".*?\[\s*(%r\d+)(?:\+(-?\d+))?\s*\]"
)
_BARRIER = re.compile(r"\b(?:bar\.sync|barrier(?:\.cta)?\.sync)\b")
_WAIT = re.compile(r"\bwgmma\.wait_group\.sync\.aligned\s+(\d+)")
_PTX_LABEL = re.compile(r"(\$L_[\w$]+):")
_PTX_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L_[\w$]+);")
_DEFINITION = re.compile(
    r"(?:@!?%p\d+\s+)?(mov|add|or|xor|mad\.lo)(?:\.[a-z]\w*)+\s+(%r\d+), (.*);"
)

_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_SASS_LABEL = re.compile(r"^(\.L_x_\d+):")
_SASS_BRANCH = re.compile(r"\bBRA\b.*?\((\.L_x_\d+)\)")
_HGMMA = re.compile(r"\bHGMMA\.64x\d+x\d+\.\S+ R\d+, R(\d+), gdesc")
_DEPBAR = re.compile(r"\bWARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_DESTINATION = re.compile(r"(?:@!?U?P\w+ )?([A-Z][\w.]*) R(\d+)\b")
#: A thread holds 4 registers of the 64 rows that a wgmma reads in one step.
_OPERAND_REGISTERS = 4
_NO_DESTINATION = ("ST", "RED", "ATOMS", "BAR", "BRA", "R2UR", "SYNCS", "UTMA")


class Code(NamedTuple):
    """Instructions and, for each, the indices of its possible successors."""

    instructions: list[str]
    successors: list[list[int]]


def tensor_core_instructions(ptx: str) -> dict[str, int]:
    """Count the products by instruction: wgmma, tcgen05 and mma.sync."""
    return {name: len(re.findall(pattern, ptx)) for name, pattern in _TENSOR_CORES.items()}


def unordered_writes(
    ptx: str, *, buffers: Sequence[Sequence[tuple[int, int]]] | None = None
) -> list[tuple[str, int | None]]:
    """Find writes to shared memory that a wgmma of another warpgroup may still read.

    `wgmma.wait_group` orders a warpgroup's own reads. Until a barrier of the whole block, a second
    warpgroup may be at the same wgmma (Triton issue 11047, fixed by pull request 11056). Only a
    kernel of more than four warps can show it.

    Args:
        ptx: the text.
        buffers: of each product in order, the (offset, bytes) of shared memory that it reads; a
            write elsewhere is no fault. None reports every write.

    Returns:
        (instruction, offset in shared memory or None where it cannot be told) of each write.
    """
    code = _code(ptx.splitlines(), _PTX_LABEL, _PTX_BRANCH, "ret")
    groups, group = {}, 0
    for index, line in enumerate(code.instructions):
        if "wgmma.mma_async" in line:
            groups[index] = group
        group += "wgmma.commit_group" in line
    if buffers is not None and len(buffers) != group:
        all_buffers = [buffer for product in buffers for buffer in product]
        buffers = [all_buffers] * group

    def after(index: int, state: tuple[frozenset, frozenset]) -> tuple[frozenset, frozenset]:
        running, finished = state
        line = code.instructions[index]
        if index in groups:
            running |= {groups[index]}
        if (wait := _WAIT.search(line)) and wait[1] == "0":
            running, finished = frozenset(), finished | running
        if _BARRIER.search(line):
            finished = frozenset()
        return running, finished

    states = _flow(code, (frozenset(), frozenset()), after, lambda a, b: (a[0] | b[0], a[1] | b[1]))
    offset_of = _offsets(code.instructions)
    faults = []
    for index, state in enumerate(states):
        match = state and state[1] and _SHARED_WRITE.search(code.instructions[index])
        if not match:
            continue
        base = offset_of(match[1])
        offset = None if base is None else base + int(match[2] or 0)
        read = [b for g in state[1] for b in buffers[g]] if buffers is not None else []
        if (
            buffers is None
            or offset is None
            or any(start <= offset < start + size for start, size in read)
        ):
            faults.append((code.instructions[index].split()[0], offset))
    return faults


def overwritten_operands(sass: str) -> list[str]:
    """Find instructions that write a register which a wgmma that runs may still read.

    ptxas before 13.3 can emit them (Triton issue 9433, pull request 11781).

    Args:
        sass: what `nvdisasm -c` prints of one kernel on sm_90.
    """
    lines = []
    for line in sass.splitlines():
        if label := _SASS_LABEL.match(line):
            lines.append(f"{label[1]}:")
        elif match := _SASS.search(line):
            lines.append(match[1])
    code = _code(lines, _SASS_LABEL, _SASS_BRANCH, "EXIT")

    def after(index: int, state: Running) -> Running:
        groups, current = state
        line = code.instructions[index]
        if match := _HGMMA.search(line):
            start = int(match[1])
            current |= frozenset(range(start, start + _OPERAND_REGISTERS))
        if "HGMMA" in line and "gsb0" in line:
            groups, current = (*groups, current)[-4:], frozenset()
        if match := _DEPBAR.search(line):
            pending = int(match[1], 16)
            groups = groups[len(groups) - pending :] if pending else ()
        return groups, current

    def joined(a: Running, b: Running) -> Running:
        length = max(len(a[0]), len(b[0]))
        first, second = (
            (*[frozenset()] * (length - len(groups)), *groups) for groups in (a[0], b[0])
        )
        return tuple(x | y for x, y in zip(first, second, strict=True)), a[1] | b[1]

    states = _flow(code, ((), frozenset()), after, joined)
    faults = []
    for line, state in zip(code.instructions, states, strict=True):
        if state is None or "HGMMA" in line:
            continue
        if not _written(line).isdisjoint(frozenset().union(*state[0], state[1])):
            faults.append(line)
    return faults


def _written(line: str) -> set[int]:
    """Return the registers that a machine instruction writes."""
    match = _DESTINATION.match(line)
    if match is None or match[1].startswith(_NO_DESTINATION):
        return set()
    operation, first = match[1], int(match[2])
    count = 1
    if ".128" in operation or operation.endswith(".M88.4"):
        count = 4
    elif ".64" in operation or ".WIDE" in operation or operation.endswith(".M88.2"):
        count = 2
    return set(range(first, first + count))


def _code(lines: Sequence[str], label: re.Pattern[str], branch: re.Pattern[str], end: str) -> Code:
    """Split text into instructions and find which may follow which."""
    instructions, labels = [], {}
    for line in map(str.strip, lines):
        if match := label.match(line):
            labels[match[1]] = len(instructions)
        elif line and not line.startswith(("//", ".")) and line not in ("{", "}", "(", ")"):
            instructions.append(line)
    successors = []
    for index, line in enumerate(instructions):
        following = [index + 1] if index + 1 < len(instructions) else []
        if match := branch.search(line):
            target = [labels[match[1]]] if labels.get(match[1], 10**9) < len(instructions) else []
            following = target + (following if line.startswith("@") else [])
        elif line.startswith(end):
            following = []
        successors.append(following)
    return Code(instructions, successors)


def _flow(
    code: Code,
    start: State,
    after: Callable[[int, State], State],
    joined: Callable[[State, State], State],
) -> list[State | None]:
    """Return the state before each instruction; None before unreachable instructions."""
    states: list[State | None] = [None] * len(code.instructions)
    if not states:
        return states
    states[0] = start
    waiting = deque([0])
    while waiting:
        index = waiting.popleft()
        state = after(index, states[index])
        for following in code.successors[index]:
            previous = states[following]
            new = state if previous is None else joined(previous, state)
            if new != previous:
                states[following] = new
                waiting.append(following)
    return states


def _offsets(instructions: Sequence[str]) -> Callable[[str], int | None]:
    """Return a function that gives the constant part of an address in shared memory.

    It follows sums back to `global_smem`; what depends on the thread counts as 0.
    """
    definitions: dict[str, tuple[str, list[str]]] = {}
    times: Counter[str] = Counter()
    for line in instructions:
        if match := _DEFINITION.match(line):
            definitions[match[2]] = (match[1], match[3].split(", "))
            times[match[2]] += 1
    offset_by_register: dict[str, int | None] = {}

    def constant(name: str, depth: int = 0) -> int | None:
        if name == "global_smem":
            return 0
        if name in offset_by_register or depth > 40 or name not in definitions or times[name] > 1:
            return offset_by_register.get(name)
        operation, operands = definitions[name]
        values = [constant(x, depth + 1) for x in operands if x.startswith(("%", "global"))]
        bases = [base for base in values if base is not None]
        numbers = [int(x) for x in operands if re.fullmatch(r"-?\d+", x)]
        value = None
        if len(bases) == 1:
            value = bases[0] + (sum(numbers) if operation in ("add", "or") else 0)
        offset_by_register[name] = value
        return value

    return constant


def buffers_of(ir: str) -> list[list[tuple[int, int]]]:
    """Return what each wgmma reads, in order, from a module whose shared memory is allocated.

    Args:
        ir: text with `allocation.offset` at each `ttg.local_alloc`.
    """
    spans: dict[str, tuple[int, int]] = {}
    products = []
    for line in ir.splitlines():
        if match := re.search(
            r"(%[\w#]+) = ttg\.local_alloc .*?allocation\.offset = (\d+)"
            r".*?!ttg\.memdesc<([\dx]+)x(\w+),",
            line,
        ):
            spans[match[1]] = (int(match[2]), _bytes(match[3], match[4]))
        elif match := re.search(
            r"(%[\w#]+) = ttg\.memdesc_(?:trans|index|subslice|reshape|reinterpret) *(%[\w#]+)",
            line,
        ):
            if match[2] in spans:
                spans[match[1]] = spans[match[2]]
        elif match := re.search(r"ttng\.warp_group_dot (%[\w#]+), (%[\w#]+),", line):
            products.append([spans[x] for x in match.groups() if x in spans])
    return products


_ELEMENT_BYTES: Mapping[str, int] = {"f32": 4, "i32": 4, "i64": 8, "f64": 8, "i8": 1}


def _bytes(shape: str, element: str) -> int:
    size = _ELEMENT_BYTES.get(element, 2)
    for length in shape.split("x"):
        size *= int(length)
    return size
