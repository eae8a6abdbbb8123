# SPDX-License-Identifier: Apache-2.0
"""Faults that a kernel's TTGIR, the text of its module in Triton's GPU dialect, can show.

Each function returns the number of occurrences of a fault. Values are followed through operations,
and through loops and branches, whose results are their yielded values.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

#: A wgmma and a tcgen05.mma take 64 rows; from so many on, mma.sync wastes the tensor cores.
WIDE_ROWS = 64

_OPERATION = re.compile(r'\s*(?:(%[^=]*?) = )?"?([a-z_]+(?:\.[a-z_0-9]+)+)"?(.*)')
_VALUE = re.compile(r"%[\w$.]+(?:#\d+)?")
_ITERATION = re.compile(r"(%[\w$.]+) = (%[\w$.]+(?:#\d+)?)")
_MMA = re.compile(
    r"(#mma\d*) = #ttg\.nvidia_mma<\{versionMajor = (\d).*?"
    r"warpsPerCTA = \[([\d, ]+)\].*?instrShape = \[([\d, ]+)\]"
)
_PRODUCT = re.compile(r"-> tensor<(\d+)x(\d+)x\w+, (#mma\d*)>")
_DOTS = ("ttng.warp_group_dot", "tt.dot")


class _Operation(NamedTuple):
    """One operation; `loop` numbers the innermost loop around it, 0 outside of all."""

    results: list[str]
    name: str
    operands: list[str]
    text: str
    loop: int


class _Region(NamedTuple):
    """A region that is open: its loop, the results of its operation, a loop's arguments."""

    loop: int
    results: list[str]
    arguments: list[str]


class Module:
    """The operations of a module and which values reach which.

    Args:
        ttgir: its text.

    Attributes:
        layouts: (version, warps, instruction) of each layout of accumulators, by name.
        operations: in order.
        arguments: the values that each loop hands on from step to step.
    """

    def __init__(self, ttgir: str) -> None:
        self.layouts = {name: fields for name, *fields in _MMA.findall(ttgir)}
        self.operations: list[_Operation] = []
        self._uses: dict[str, set[str]] = defaultdict(set)
        self._regions: list[_Region] = []
        self.arguments: dict[int, list[str]] = {}
        for line in ttgir.splitlines():
            text = line.partition(" loc(")[0].rstrip()
            if text.lstrip().startswith("}") and self._regions:
                region = self._regions.pop()
                if text.endswith("{"):  # else
                    self._regions.append(region)
            elif match := _OPERATION.match(text):
                self._add(_results(match[1] or ""), match[2], match[3])

    def _add(self, results: list[str], name: str, text: str) -> None:
        """Note one operation and where its operands go."""
        operands, arguments = _VALUE.findall(text), []
        region = self._regions[-1] if self._regions else _Region(0, [], [])
        loop = region.loop
        if name == "scf.yield":
            for index, operand in enumerate(operands):
                targets = region.results[index : index + 1] + region.arguments[index : index + 1]
                self._uses[operand] |= set(targets)
        elif name == "scf.for":
            pairs = _ITERATION.findall(text.partition("iter_args")[2])
            arguments, loop = [argument for argument, _ in pairs], len(self.operations) + 1
            self.arguments[loop] = arguments
            for (argument, initial), result in zip(pairs, results, strict=False):
                self._uses[initial] |= {argument, result}
        else:
            for operand in operands:
                self._uses[operand] |= set(results)
        self.operations.append(_Operation(results, name, operands, text, loop))
        if text.endswith("{"):
            self._regions.append(_Region(loop, results, arguments))

    def reached(self, values: Iterable[str], *, without: Iterable[str] = ()) -> set[str]:
        """Return all values that some values reach, themselves included, by no way `without`."""
        waiting, without = list(values), set(without)
        seen = set(waiting)
        while waiting:
            new = self._uses[waiting.pop()] - seen - without
            seen |= new
            waiting += new
        return seen


def _results(text: str) -> list[str]:
    """Return the names of an operation's results: `%a, %b` or `%a:2`."""
    names = []
    for name in text.split(","):
        base, _, count = name.strip().partition(":")
        if base:
            names += [f"{base}#{n}" for n in range(int(count))] if count else [base]
    return names


def duplicated_tiles(module: Module) -> int:
    """Count products whose tile two warpgroups both compute, for lack of rows or columns."""
    count = 0
    for rows, columns, (major, warps, shape) in _products(module, "ttng.warp_group_dot"):
        per_cta, instruction = (tuple(map(int, x.split(","))) for x in (warps, shape))
        along_rows = 16 * per_cta[0] / rows
        along_columns = per_cta[1] * instruction[1] / columns
        count += major == "3" and max(along_rows, along_columns) > 1
    return count


def narrow_instructions(module: Module) -> int:
    """Count products of at least 64 rows that mma.sync computes, 16 rows at a time."""
    return sum(
        rows >= WIDE_ROWS and major == "2" for rows, _, (major, *_) in _products(module, "tt.dot")
    )


def _products(module: Module, name: str) -> Iterable[tuple[int, int, list[str]]]:
    """Yield (rows, columns, (version, warps, instruction)) of products by tensor cores."""
    for operation in module.operations:
        match = _PRODUCT.search(operation.text)
        if operation.name == name and match and match[3] in module.layouts:
            yield int(match[1]), int(match[2]), module.layouts[match[3]]


def transposed_accumulators(module: Module) -> int:
    """Count products that read the transpose of a value in an accumulator's layout.

    Triton 3.4.0 to 3.7.0 compile `tl.dot(tl.trans(x), y)` wrongly on Hopper where x is a product
    (github.com/fla-org/flash-linear-attention issues 640 and 826).
    """
    transposed = [
        operation.results[0]
        for operation in module.operations
        if operation.name == "tt.trans" and re.search(r": tensor<\w+, #mma\d*> ->", operation.text)
    ]
    reached = module.reached(transposed)
    return sum(
        operation.name in _DOTS and not reached.isdisjoint(operation.operands[:2])
        for operation in module.operations
    )


def register_operands(module: Module) -> int:
    """Count wgmmas whose left operand is in registers.

    ptxas before 13.3 may write such registers while the wgmma still reads them (Triton issue 9433,
    pull request 11781).
    """
    return sum(
        operation.name == "ttng.warp_group_dot" and ": tensor<" in operation.text
        for operation in module.operations
    )


def unawaited_accumulators(module: Module) -> int:
    """Count loads from tensor memory in a loop that no wait orders after the tcgen05.mma before.

    Triton up to 3.7.1 pipelines two products a step into one accumulator so (Triton issue 10821,
    pull request 10988): the sum of the step before is moved while it is still being added to.
    """
    early = 0
    for loop in {operation.loop for operation in module.operations} - {0}:
        inside = [operation for operation in module.operations if operation.loop == loop]
        for position, operation in enumerate(inside):
            if operation.name == "ttng.tmem_load":
                early += _is_early(module, inside, position)
    return early


def _is_early(module: Module, inside: list[_Operation], position: int) -> bool:
    """Tell whether a load is not ordered after the last product into its accumulator.

    Args:
        module: of the loop.
        inside: the operations of the loop in order.
        position: of the load.
    """
    sums = inside[position].operands[0]
    products = [
        index
        for index, operation in enumerate(inside)
        if operation.name == "ttng.tc_gen5_mma"
        and operation.operands[2] == sums
        and "is_async" in operation.text
    ]
    if not products:
        return False
    before = [index for index in products if index < position]
    product = (before or products)[-1]
    barrier = [inside[product].operands[5]]
    barriers = module.reached(barrier, without=module.arguments[inside[0].loop])
    between = set(range(product, position))
    if not before:  # of the step before, which hands its barrier on
        barriers = module.reached(barrier)
        between = set(range(product, len(inside))) | set(range(position))
    return not any(
        inside[index].name == "ttng.wait_barrier" and inside[index].operands[0] in barriers
        for index in between
    )
