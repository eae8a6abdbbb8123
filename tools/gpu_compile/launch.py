# SPDX-License-Identifier: Apache-2.0
"""A launch of a Triton kernel as far as the compiler sees it, and its JSON.

    {"module", "kernel", "signature": [[argument, type]], "constants": [[path, value]],
     "attributes": [[path, attributes]], "options": {...}, "name", "source", "architectures"}

A path is the position of an argument. The compiler of one release of Triton reads what another
release recorded, so that both compile the same launches.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

#: Options of a launch that change its code; all others keep the release's defaults.
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
ARCHITECTURES = (90, 100)
DESCRIBED, CANDIDATE, TEST, BENCH = "described", "candidate", "test", "bench"
SOURCES = (DESCRIBED, CANDIDATE, TEST, BENCH)
HALF = ("*bf16", "*fp16")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One specialization of a kernel.

    Args:
        module, kernel: where the function under `@triton.jit` is defined.
        signature: (name, type) of each argument, in order.
        constants: compile-time constants as (path, JSON value).
        attributes: known properties of arguments as (path, attributes).
        options: compiler options, see `OPTIONS`.
        name: name in reports and records.
        source: DESCRIBED in tests/unit_tests/core/ops/aot, CANDIDATE of a `Launches`, TEST of
            tests/gpu, or BENCH.
        architectures: target architectures.
    """

    module: str
    kernel: str
    signature: Sequence[tuple[str, str]]
    constants: Sequence[tuple[Sequence[int], Any]]
    attributes: Sequence[tuple[Sequence[int], Any]]
    options: Mapping[str, Any]
    name: str = ""
    source: str = TEST
    architectures: Sequence[int] = field(default=ARCHITECTURES)

    @property
    def dtype(self) -> str:
        """Return bf16 where the kernel reads or writes 16-bit elements, else fp32."""
        return "bf16" if any(kind in HALF for _, kind in self.signature) else "fp32"

    @property
    def function(self) -> Any:
        """Import the kernel."""
        return getattr(importlib.import_module(self.module), self.kernel)

    def started_with(self, values: Mapping[str, Any]) -> bool:
        """Tell whether the launch has these constants and options."""
        names = [name for name, _ in self.signature]
        launch_options = {names[path[0]]: value for path, value in self.constants if len(path) == 1}
        launch_options |= self.options
        return all(launch_options.get(name) == value for name, value in values.items())

    def source_hash(self) -> str:
        """Return the hash of the kernel's source, of all that it calls, and of the launch."""
        code = {k: v for k, v in asdict(self).items() if k not in ("name", "source")}
        code.pop("architectures")
        text = json.dumps([self.function.cache_key, code], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def ast_source(self) -> Any:
        """Return what `triton.compile` takes."""
        return triton.compiler.ASTSource(
            fn=self.function,
            signature=dict(self.signature),
            constexprs={tuple(path): decoded(value) for path, value in self.constants},
            attrs={tuple(path): value for path, value in self.attributes},
        )

    @classmethod
    def of_call(
        cls,
        kernel: Any,
        signature: Mapping[str, str],
        constants: Mapping[tuple[int, ...], Any],
        attributes: Mapping[tuple[int, ...], Any],
        options: Mapping[str, Any],
    ) -> Launch:
        """Return a launch that Triton's launcher has specialized."""
        return cls(
            module=kernel.fn.__module__,
            kernel=kernel.fn.__name__,
            signature=list(signature.items()),
            constants=[(list(path), encoded(value)) for path, value in constants.items()],
            attributes=[(list(path), value) for path, value in attributes.items() if value],
            options={k: options[k] for k in OPTIONS if options.get(k) is not None},
        )


def encoded(value: Any) -> Any:
    """Return a compile-time constant as JSON."""
    if isinstance(value, tl.dtype):
        return {"dtype": str(value)}
    if isinstance(value, triton.runtime.JITFunction):
        return {"function": [value.fn.__module__, value.fn.__name__]}
    if isinstance(value, tl.constexpr):
        return encoded(value.value)
    if isinstance(value, tuple | list):
        return {"tuple": [encoded(element) for element in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a compile-time constant of type {type(value).__name__}: {value!r}")


def decoded(value: Any) -> Any:
    """Return the compile-time constant of its JSON."""
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return tl.dtype(value["dtype"])
    if "function" in value:
        module, name = value["function"]
        return getattr(importlib.import_module(module), name)
    return tuple(decoded(element) for element in value["tuple"])


def described() -> list[Launch]:
    """Return the launches that tests/unit_tests/core/ops/aot describes."""
    from tests.unit_tests.core.ops.compile_kernels import descriptions

    launches = []
    for element in descriptions(None):
        names = element.kernel.arg_names
        launches.append(
            Launch(
                module=element.kernel.fn.__module__,
                kernel=element.kernel.fn.__name__,
                signature=list(element.signature().items()),
                constants=[([names.index(k)], encoded(v)) for k, v in element.constants.items()],
                attributes=[(list(path), value) for path, value in element.attributes().items()],
                options=element.options,
                name=element.name,
                source=DESCRIBED,
                architectures=element.architectures,
            )
        )
    return launches


def write(path: Path, launches: Iterable[Launch]) -> None:
    """Write launches, one a line, each once."""
    lines = {json.dumps(asdict(element), sort_keys=True) for element in launches}
    path.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")


def read(path: Path) -> list[Launch]:
    """Read what `write` has written."""
    return [Launch(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def named(launches: Sequence[Launch]) -> list[Launch]:
    """Give launches without a name one: kernel, dtype and a number that tells variants apart."""
    counts: dict[str, int] = {}
    result = []
    for element in launches:
        if not element.name:
            name = f"{element.kernel} {element.dtype}"
            counts[name] = counts.get(name, 0) + 1
            element = replace(element, name=f"{name} #{counts[name]}")
        result.append(element)
    return result
