# SPDX-License-Identifier: Apache-2.0
"""Parse a pickle as data: nothing is imported, looked up or called, whatever the pickle contains.

A pickle is a program for a small stack machine; this parser implements the instructions that build
plain values. Where the program would call something, the parser records the name, the arguments and
the state; a name that is not in the caller's list aborts parsing. Time and memory are bounded by
the size of the pickle.
"""

from __future__ import annotations

import gc
import pickletools
import resource
import struct
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np


class Name(NamedTuple):
    """A global that a pickle refers to, such as `torch.float32`."""

    text: str


class Persistent(NamedTuple):
    """A persistent id: a reference to data stored outside of the pickle."""

    value: Any


@dataclass(eq=False, slots=True)
class PickledObject:
    """A recorded call of `name` with `args`, and the state of the resulting object."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(eq=False, slots=True)
class Pairs:
    """A dict as a flat list of keys and values: keys may be anything, so they are never hashed or
    compared."""

    flat: list[Any] = field(default_factory=list)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Return an iterator over (key, value) pairs."""
        flat = iter(self.flat)
        return zip(flat, flat, strict=True)


#: Converts a complete object into the caller's representation.
Finish = Callable[[PickledObject], Any]

#: Enough for a few hundred thousand tensor chunks; executing them takes under ten seconds.
MAX_INSTRUCTIONS = 3 << 23
_INSTRUCTIONS_PER_LOOK = 1 << 16
# The objects that describe a checkpoint take up to six times the size of its pickle.
_BASE_OBJECT_BYTES, _OBJECT_BYTES_PER_BYTE = 40_000_000, 6


def read_pickle(
    data: bytes,
    allowed: Set[str],
    where: str,
    *,
    finish: Mapping[str, Finish] = MappingProxyType({}),
) -> Any:
    """Return the value that a pickle describes, with `PickledObject` and `Name` for values that are
    not plain.

    Args:
        data: the pickle.
        allowed: dotted names that it may refer to.
        where: location for error messages.
        finish: functions by class name, called with an object of the class when a list or dict
            takes it in; the result is stored instead. This keeps folders of many tensors from
            filling memory with general objects.

    Raises:
        ValueError: the pickle refers to another name, contains an instruction that plain values do
            not need, takes more memory or time than its size accounts for, or is damaged.
    """
    return _Machine(data, allowed, where, finish).run()


class _Machine:
    """The stack machine.

    Instructions: https://github.com/python/cpython/blob/main/Lib/pickletools.py. A step takes the
    position after its instruction's code and returns the position after its argument.
    """

    def __init__(
        self, data: bytes, allowed: Set[str], where: str, finish: Mapping[str, Finish]
    ) -> None:
        self._data, self._allowed, self._where, self._finish = data, allowed, where, finish
        self._stack: list[Any] = []
        self._marks: list[int] = []  # stack sizes
        self._memo: dict[int, Any] = {}
        self._recalled, self._memoized = _recalled(data), 0
        self._memory = _resident_bytes()
        constants = {b")": (), b"N": None, b"\x88": True, b"\x89": False}
        unsized = {
            b"(": lambda: self._marks.append(len(self._stack)),
            b"]": lambda: self._stack.append([]),
            b"}": lambda: self._stack.append(Pairs()),
            b"\x85": lambda: self._tuple(1),
            b"\x86": lambda: self._tuple(2),
            b"\x87": lambda: self._tuple(3),
            b"t": lambda: self._stack.append(tuple(self._to_mark())),
            b"a": lambda: self._extend([self._stack.pop()]),
            b"e": lambda: self._extend(self._to_mark()),
            b"s": lambda: self._update([self._stack.pop(-2), self._stack.pop()]),
            b"u": lambda: self._update(self._to_mark()),
            b"\x93": lambda: self._name(self._stack.pop(-2), self._stack.pop()),
            b"R": self._make,
            b"\x81": self._make,
            b"b": self._build,
            b"Q": lambda: self._stack.append(Persistent(self._stack.pop())),
        }
        sized: dict[bytes, Callable[[int], int]] = {
            b"\x80": lambda at: at + 1,  # PROTO
            b"\x95": lambda at: at + 8,  # FRAME
            b"q": lambda at: self._memoize(at, 1),
            b"r": lambda at: self._memoize(at, 4),
            b"j": self._recall,
            b"c": self._global,
            b"J": lambda at: self._number(at, 4, signed=True),
            b"M": lambda at: self._number(at, 2),
            b"\x8a": self._long,
            b"G": self._float,
            b"\x8c": lambda at: self._text(at, 1),
            b"X": lambda at: self._text(at, 4),
            b"\x8d": lambda at: self._text(at, 8),
            b"C": lambda at: self._bytes(at, 1),
            b"B": lambda at: self._bytes(at, 4),
        }
        steps = {code: partial(self._constant, value) for code, value in constants.items()}
        steps |= {code: partial(_unsized, step) for code, step in unsized.items()} | sized
        self._steps: Mapping[int, Callable[[int], int]] = {ord(c): s for c, s in steps.items()}

    def run(self) -> Any:
        """Execute the program and return its result."""
        collects = gc.isenabled()
        gc.disable()  # it would scan millions of new objects again and again
        try:
            return self._run()
        except (LookupError, TypeError, UnicodeError, struct.error) as error:
            self._refuse(f"it is damaged ({type(error).__name__})")
        except _Refusal:
            raise
        except ValueError as error:  # not a single value
            self._refuse(f"it is damaged ({error})")
        finally:
            if collects:
                gc.enable()

    def _run(self) -> Any:
        data, stack, memo, recalled = self._data, self._stack, self._memo, self._recalled
        steps, position = self._steps, 0
        for _ in range(0, MAX_INSTRUCTIONS, _INSTRUCTIONS_PER_LOOK):
            for _ in range(_INSTRUCTIONS_PER_LOOK):
                code = data[position]
                position += 1
                if code == 0x94:  # MEMOIZE; the frequent ones first
                    if recalled[self._memoized]:
                        memo[self._memoized] = stack[-1]
                    self._memoized += 1
                elif code == 0x68:  # BINGET
                    stack.append(memo[data[position]])
                    position += 1
                elif code == 0x4B:  # BININT1
                    stack.append(data[position])
                    position += 1
                elif code in steps:
                    position = steps[code](position)
                elif code == 0x2E:  # STOP
                    if len(stack) != 1 or self._marks:
                        self._refuse(f"it is damaged (it leaves {len(stack)} values)")
                    return stack[0]
                else:
                    opcode = pickletools.code2op.get(chr(code))
                    name = f"the instruction {opcode.name}" if opcode else f"the byte {code:#04x}"
                    self._refuse(f"it contains {name}, which plain values do not need")
            used = _resident_bytes() - self._memory
            if used > _BASE_OBJECT_BYTES + _OBJECT_BYTES_PER_BYTE * len(data):
                self._refuse(f"it describes more than its {len(data)} bytes account for")
        self._refuse(f"it has more than {MAX_INSTRUCTIONS} instructions")

    def _constant(self, value: Any, position: int) -> int:
        self._stack.append(value)
        return position

    def _number(self, position: int, size: int, *, signed: bool = False) -> int:
        field = self._data[position : position + size]
        self._stack.append(int.from_bytes(field, "little", signed=signed))
        return position + size

    def _long(self, position: int) -> int:
        """Parse LONG1. Sizes of tensors fit into 64 bits; products of longer integers take time."""
        size = self._data[position]
        if size > 9:
            self._refuse(f"it contains a number of {size} bytes, which no tensor needs")
        return self._number(position + 1, size, signed=True)

    def _float(self, position: int) -> int:
        self._stack += struct.unpack_from(">d", self._data, position)
        return position + 8

    def _bytes(self, position: int, size: int) -> int:
        begin = position + size
        end = begin + int.from_bytes(self._data[position:begin], "little")
        if end > len(self._data):
            raise IndexError
        self._stack.append(self._data[begin:end])
        return end

    def _text(self, position: int, size: int) -> int:
        end = self._bytes(position, size)
        self._stack[-1] = self._stack[-1].decode("utf-8", "surrogatepass")
        return end

    def _global(self, position: int) -> int:
        middle = self._data.index(b"\n", position)
        end = self._data.index(b"\n", middle + 1)
        self._name(self._data[position:middle].decode(), self._data[middle + 1 : end].decode())
        return end + 1

    def _tuple(self, size: int) -> None:
        if len(self._stack) < size:
            raise IndexError
        self._stack[-size:] = [tuple(self._stack[-size:])]

    def _to_mark(self) -> list[Any]:
        """Pop and return everything above the last mark."""
        size = self._marks.pop()
        values = self._stack[size:]
        del self._stack[size:]
        return values

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise TypeError
        self._stack[-1].extend(map(self._finished, values))

    def _update(self, values: list[Any]) -> None:
        target = self._stack[-1]
        # OrderedDict is constructed by calling its class.
        if isinstance(target, PickledObject) and target.name == "collections.OrderedDict":
            return
        if not isinstance(target, Pairs) or len(values) % 2:
            raise TypeError
        target.flat.extend(map(self._finished, values))

    def _finished(self, value: Any) -> Any:
        if isinstance(value, PickledObject) and value.name in self._finish:
            return self._finish[value.name](value)
        return value

    def _memoize(self, position: int, size: int) -> int:
        index = int.from_bytes(self._data[position : position + size], "little")
        if index < len(self._recalled) and self._recalled[index]:
            self._memo[index] = self._stack[-1]
        self._memoized += 1
        return position + size

    def _recall(self, position: int) -> int:
        index = int.from_bytes(self._data[position : position + 4], "little")
        self._stack.append(self._memo[index])
        return position + 4

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError
        text = f"{module}.{name}"
        if text not in self._allowed:
            printable = text if len(text) <= 100 and text.isprintable() else f"{text[:100]!r}..."
            self._refuse(f"it requests {printable}, which no tensor needs; no code was run")
        self._stack.append(Name(text))

    def _make(self) -> None:
        args, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise TypeError
        self._stack.append(PickledObject(called.text, args))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, PickledObject):
            raise TypeError
        target.state = state

    def _refuse(self, why: str) -> NoReturn:
        raise _Refusal(f"{self._where} is refused: {why}")


def _unsized(step: Callable[[], None], position: int) -> int:
    """Execute an instruction without an argument."""
    step()
    return position


def _recalled(data: bytes) -> bytes:
    """Return a flag for each memo index that a later instruction may read.

    A pickle memoizes every object. An index is flagged if any bytes look like an instruction that
    reads it; objects at other indices are released as soon as they have been used.
    """
    codes = np.frombuffer(data, np.uint8)
    is_recalled = np.zeros(max(len(data), 255) + 1, bool)
    for begin in range(0, len(data), 1 << 20):
        block = codes[begin : begin + (1 << 20)]
        after = np.flatnonzero(block == ord("h")) + begin + 1  # BINGET
        is_recalled[codes[after[after < len(data)]]] = True
        after = np.flatnonzero(block == ord("j")) + begin + 1  # LONG_BINGET
        after = after[after + 4 <= len(data)]
        indices = sum(codes[after + i].astype(np.int64) << 8 * i for i in range(4))
        is_recalled[indices[indices < len(is_recalled)]] = True
    return is_recalled.tobytes()


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


class _Refusal(ValueError):
    """A complete error message for the user."""
