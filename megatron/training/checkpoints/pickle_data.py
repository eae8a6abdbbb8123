# SPDX-License-Identifier: Apache-2.0
"""A pickle read as data: nothing is imported, looked up or called, whatever it asks for.

A pickle is a program for a small stack machine. This one knows the instructions that build plain
values. Where the program would call something, it notes the name, the arguments and the state; a
name that is not on the caller's list ends the reading.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn


class Name(NamedTuple):
    """A thing of a module that a pickle refers to, as `torch.float32`."""

    text: str


class Persistent(NamedTuple):
    """What a pickle keeps outside of itself, by the value that says where."""

    value: Any


@dataclass(eq=False)
class Made:
    """What calling `name` with `args` would have made, and the state that it would have got."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(eq=False)
class Pairs:
    """A dict as its items in order: no key is hashed or compared, as a key may be anything."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


_MARK = object()
_CONSTANTS: Mapping[str, Any] = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False})
#: Instructions whose own argument is the value.
_VALUES = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE")
    + ("BINUNICODE8", "SHORT_BINBYTES", "BINBYTES")
)
_NO_EFFECT = frozenset({"PROTO", "FRAME"})


def read_pickle(data: bytes, allowed: Set[str], where: str) -> Any:
    """Return the value that a pickle describes, with `Made` and `Name` for what is no plain value.

    Args:
        data: the pickle.
        allowed: dotted names that it may refer to.
        where: what to name in an error.

    Raises:
        ValueError: it refers to another name, needs an instruction that plain values do not need,
            or is damaged.
    """
    return _Machine(allowed, where).run(data)


class _Machine:
    """The stack machine."""

    def __init__(self, allowed: Set[str], where: str) -> None:
        self._allowed, self._where = allowed, where
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._steps: Mapping[str, Callable[[Any], None]] = {
            "MARK": lambda _: self._stack.append(_MARK),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_DICT": lambda _: self._stack.append(Pairs()),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "TUPLE": lambda _: self._stack.append(tuple(self._to_mark())),
            "APPEND": lambda _: self._extend([self._stack.pop()]),
            "APPENDS": lambda _: self._extend(self._to_mark()),
            "SETITEM": lambda _: self._update([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._update(self._to_mark()),
            "MEMOIZE": lambda _: self._memoize(len(self._memo)),
            "BINPUT": self._memoize,
            "LONG_BINPUT": self._memoize,
            "BINGET": self._recall,
            "LONG_BINGET": self._recall,
            "GLOBAL": lambda text: self._name(*text.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(self._stack.pop(-2), self._stack.pop()),
            "REDUCE": lambda _: self._make(),
            "NEWOBJ": lambda _: self._make(),
            "BUILD": lambda _: self._build(),
            "BINPERSID": lambda _: self._stack.append(Persistent(self._stack.pop())),
        }

    def run(self, data: bytes) -> Any:
        """Carry out the program and return what it leaves."""
        try:
            # Names with odd escapes are none that is allowed; they need no warning before.
            with warnings.catch_warnings(action="ignore"):
                return self._run(data)
        except (IndexError, KeyError, TypeError) as error:
            self._refuse(f"it is damaged ({type(error).__name__})")
        except _Refusal:
            raise
        except ValueError as error:  # of the decoding of instructions, or no single value
            self._refuse(f"it is damaged ({error})")

    def _run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (found,) = self._stack
                return found
            self._carry_out(opcode.name, argument)
        raise ValueError("it has no end")

    def _carry_out(self, name: str, argument: Any) -> None:
        if name in _NO_EFFECT:
            return
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in self._steps:
            self._steps[name](argument)
        else:
            self._refuse(f"it holds the instruction {name}, which plain values do not need")

    def _tuple(self, size: int) -> None:
        values = tuple(self._stack[-size:])
        if len(values) != size or any(value is _MARK for value in values):
            raise IndexError
        self._stack[-size:] = [values]

    def _to_mark(self) -> list[Any]:
        """Take everything above the last mark, and the mark."""
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise TypeError
        self._stack[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        target = self._stack[-1]
        # Some dicts are made by calling their class.
        if isinstance(target, Made) and target.name == "collections.OrderedDict":
            return
        if not isinstance(target, Pairs):
            raise TypeError
        target.items.extend(zip(values[::2], values[1::2], strict=True))

    def _memoize(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _recall(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError
        text = f"{module}.{name}"
        if text not in self._allowed:
            shown = text if text.isprintable() and len(text) <= 100 else f"{text[:100]!r}..."
            self._refuse(f"it asks for {shown}, which no tensor needs; nothing was run")
        self._stack.append(Name(text))

    def _make(self) -> None:
        args, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise TypeError
        self._stack.append(Made(called.text, args))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, Made):
            raise TypeError
        target.state = state

    def _refuse(self, why: str) -> NoReturn:
        raise _Refusal(f"{self._where} is refused: {why}")


class _Refusal(ValueError):
    """A line for the user, already whole."""
