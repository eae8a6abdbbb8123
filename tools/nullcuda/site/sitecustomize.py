# SPDX-License-Identifier: Apache-2.0
"""Python imports this first in each process over the null device, by its PYTHONPATH.

Process groups of NCCL are torch's fake ones. Triton's kernels are launched without being compiled,
unless NULLCUDA_COMPILES is set: then Triton compiles and loads them as on a GPU, and logs each
compilation to NULLCUDA_COMPILE_LOG.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """Changes a module right after it was imported.

    Args:
        name: of the module.
        change: called with it, once.
    """

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, whose loader calls `change` at the end."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class LaunchedKernel:
    """A Triton kernel that is launched without being compiled.

    Args:
        name: name of the kernel.
        num_warps: warps of a block.
        launch: puts a launch on a stream.
    """

    n_regs = n_spills = function = 0
    packed_metadata = ()

    def __init__(self, name: str, num_warps: int, launch: Callable[..., int]) -> None:
        self.name, self.threads, self.launch = name.encode(), 32 * num_warps, launch
        self.checked = False

    def launch_metadata(self, grid: Any, stream: int, *arguments: Any) -> None:
        """Return nothing: no hook asks."""

    def run(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        """Launch it, as Triton's launcher does: an empty grid is no launch.

        Raises:
            RuntimeError: a grid that CUDA refuses.
            ValueError: an argument lies in memory that a GPU cannot read.
        """
        if not self.checked:
            for position, argument in enumerate(args[5:]):
                if getattr(getattr(argument, "device", None), "type", "cuda") == "cpu" and not (
                    argument.is_pinned()
                ):
                    raise ValueError(
                        f"Pointer argument (at {position}) cannot be accessed from Triton "
                        f"(cpu tensor?): {self.name.decode()}"
                    )
            self.checked = True
        if x * y * z > 0 and self.launch(self.name, x, y, z, self.threads, stream):
            raise RuntimeError(
                f"Triton Error [CUDA]: invalid argument: {self.name.decode()}, grid {(x, y, z)}"
            )


def launch_uncompiled(jit: ModuleType) -> None:
    """Let each variant of a kernel be a `LaunchedKernel`."""
    launch = ctypes.CDLL(os.environ["NULLCUDA_LIBRARY"]).nullcuda_launch
    launch.argtypes = [ctypes.c_char_p, *[ctypes.c_uint] * 4, ctypes.c_void_p]

    def _do_compile(
        self: Any, key: Any, signature: Any, device: int, constexprs: Any, options: Any, *args: Any
    ) -> LaunchedKernel:
        kernel = LaunchedKernel(self.fn.__name__, options.num_warps, launch)
        self.device_caches[device][0][key] = kernel
        return kernel

    jit.JITFunction._do_compile = _do_compile


def log_compilations(compiler: ModuleType) -> None:
    """Append a line for each requested kernel: compiled or from the cache."""
    import triton

    def listener(*, src: Any, cache_hit: bool, **options: Any) -> None:
        with open(os.environ["NULLCUDA_COMPILE_LOG"], "a", encoding="utf-8") as log:
            log.write(f"{'cached' if cache_hit else 'compiled'} {src.name}\n")

    triton.knobs.compilation.listener = listener


def move_nothing(distributed: ModuleType) -> None:
    """Let process groups of NCCL, which looks for the GPU by itself, be torch's fake ones: their
    collectives return at once, and leave outputs as they are."""
    original = distributed.init_process_group

    def init_process_group(backend: str | None = None, *arguments: Any, **options: Any) -> Any:
        if backend == "nccl":
            import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers "fake"

            backend = "fake"
            options.pop("device_id", None)
        return original(backend, *arguments, **options)

    distributed.init_process_group = init_process_group


if "NULLCUDA_LIBRARY" in os.environ:
    sys.meta_path.insert(0, AfterImport("torch.distributed.distributed_c10d", move_nothing))
if "NULLCUDA_LIBRARY" in os.environ and not os.environ.get("TRITON_INTERPRET"):
    if not os.environ.get("NULLCUDA_COMPILES"):
        sys.meta_path.insert(0, AfterImport("triton.runtime.jit", launch_uncompiled))
    elif os.environ.get("NULLCUDA_COMPILE_LOG"):
        sys.meta_path.insert(0, AfterImport("triton.compiler.compiler", log_compilations))
