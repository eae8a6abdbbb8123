# SPDX-License-Identifier: Apache-2.0
"""Compile launches with the Triton of this process, assemble their PTX and count faults.

    python -m tools.gpu_compile.compiler CACHE '{"12.8": "/path/to/ptxas", ...}'

reads a JSON `[launch, architecture]` from each line of stdin and answers each with one line, an
`Outcome`. The cache holds what Triton and each ptxas made, by the hash of the source, the launch
and the release; faults are counted anew every time. A PTX is assembled once by each ptxas.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget

from tools.gpu_compile import code_checks, ir_checks
from tools.gpu_compile.launch import Launch

#: The newest PTX that a ptxas reads. Triton writes the newest that its own ptxas reads.
PTX_VERSIONS = {"12.8": (8, 7), "13.0": (9, 0), "13.1": (9, 1)}
_VERSION = re.compile(r"\.version (\d+)\.(\d+)")
_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


class Outcome(TypedDict, total=False):
    """The result of compiling a launch for an architecture.

    Args:
        error: compiler or assembler error, if any.
        shared_bytes: shared memory of a block.
        instructions: number of tensor-core instructions by name.
        register_operands: products whose left operand is in registers.
        faults: number of occurrences of each fault.
        needs: registers and stack bytes of a thread, by release of ptxas.
        seconds: compile and assembly time.
    """

    error: str
    shared_bytes: int
    instructions: dict[str, int]
    register_operands: int
    faults: dict[str, int]
    needs: dict[str, tuple[int, int]]
    seconds: float


class Cache:
    """JSON values by key, in a folder that several processes share.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> Any:
        """Return the value of a key, or None."""
        path = self.folder / f"{key}.gz"
        return json.loads(gzip.decompress(path.read_bytes())) if path.is_file() else None

    def put(self, key: str, value: Any) -> None:
        """Store a value."""
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(gzip.compress(json.dumps(value).encode(), 4))
        Path(file.name).replace(self.folder / f"{key}.gz")


def _only_ptx(*arguments: Any) -> tuple[str, str] | None:
    """Replace the assembler among the stages of a compilation; without stages, name the change."""
    if not arguments:
        return "ptx", "ptx"
    _, stages, *_ = arguments
    stages["cubin"] = lambda source, metadata: b""
    return None


def texts_of(
    launch: Launch, architecture: int, *, ptx_version: int | None = None
) -> dict[str, Any]:
    """Compile a launch to PTX; return its ttgir, its ptx and the shared bytes of a block.

    Args:
        launch: what to compile.
        architecture: 90 or 100.
        ptx_version: 87 is PTX 8.7; None is the newest that Triton's own ptxas reads.
    """
    version = {} if ptx_version is None else {"ptx_version": ptx_version}
    with triton.knobs.runtime.scope(), tempfile.TemporaryDirectory() as folder:
        triton.knobs.runtime.add_stages_inspection_hook = _only_ptx
        triton.knobs.cache.dir = folder
        compiled = triton.compile(
            launch.ast_source(),
            target=GPUTarget("cuda", architecture, 32),
            options=dict(launch.options) | version,
        )
        texts = {kind: compiled.asm[kind] for kind in ("ttgir", "ptx")}
    return texts | {"shared": compiled.metadata.shared}


def allocated(ttgir: str, architecture: int) -> str:
    """Return a module with the offset of each buffer in shared memory."""
    target = GPUTarget("cuda", architecture, 32)
    backend = triton.compiler.make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, architecture, 86)
    manager.run(module, "allocated")
    return str(module)


def code_faults(ttgir: str, ptx: str, *, architecture: int, warps: int) -> dict[str, int]:
    """Count the occurrences of each fault in a compiled kernel."""
    module = ir_checks.Module(ttgir)
    counts = {"mma.sync of 64 rows": ir_checks.narrow_instructions(module)}
    if architecture == 90:
        counts["duplicated tile"] = ir_checks.duplicated_tiles(module)
        counts["transposed accumulator"] = ir_checks.transposed_accumulators(module)
        if warps > 4 and "wgmma" in ptx and code_checks.unordered_writes(ptx):
            buffers = code_checks.buffers_of(allocated(ttgir, architecture))
            counts["unordered write"] = len(code_checks.unordered_writes(ptx, buffers=buffers))
    else:
        counts["accumulator read early"] = ir_checks.unawaited_accumulators(module)
    return {name: count for name, count in counts.items() if count}


class Compiler:
    """Compiles launches with this Triton and assembles them.

    Args:
        cache: of results.
        assemblers: ptxas programs by CUDA release.
    """

    def __init__(self, cache: Cache, assemblers: Mapping[str, Path]) -> None:
        self.cache, self.assemblers = cache, assemblers

    def outcome(self, launch: Launch, architecture: int) -> Outcome:
        """Compile one launch for one architecture."""
        start = time.perf_counter()
        try:
            outcome = self._outcome(launch, architecture)
        except Exception as error:  # whatever Triton raises
            lines = [line for line in str(error).splitlines() if line.strip()]
            outcome = Outcome(error=(lines or [repr(error)])[-1][:300])
        return outcome | {"seconds": time.perf_counter() - start}

    def _outcome(self, launch: Launch, architecture: int) -> Outcome:
        key = f"{launch.source_hash()}-{triton.__version__}-{architecture}"
        texts = self.cache.get(key)
        if texts is None:
            texts = texts_of(launch, architecture)
            self.cache.put(key, texts)
        ttgir, ptx = texts["ttgir"], texts["ptx"]
        warps = launch.options.get("num_warps", 4)
        faults = code_faults(ttgir, ptx, architecture=architecture, warps=warps)
        operands = ir_checks.register_operands(ir_checks.Module(ttgir))
        fusion = launch.options.get("enable_fp_fusion", True)
        needs = {}
        for release in self.assemblers:
            used = self._assembled(ptx, architecture, release, fusion=fusion, machine=operands > 0)
            if "error" in used and _version(ptx) > PTX_VERSIONS[release]:
                older = self._older(launch, architecture, key, PTX_VERSIONS[release])
                used = self._assembled(older, architecture, release, fusion=fusion, machine=False)
            if "error" in used:
                return Outcome(error=f"ptxas {release}: {used['error']}")
            needs[release] = (used["registers"], used["stack"])
            if used["overwritten"]:
                faults[f"operand overwritten by ptxas {release}"] = used["overwritten"]
        return Outcome(
            shared_bytes=texts["shared"],
            instructions=code_checks.tensor_core_instructions(ptx),
            register_operands=operands,
            faults=faults,
            needs=needs,
        )

    def _older(self, launch: Launch, architecture: int, key: str, version: tuple[int, int]) -> str:
        """Return a launch's PTX in an older version, which lacks some instructions."""
        key = f"{key}-ptx-{version[0]}.{version[1]}"
        texts = self.cache.get(key)
        if texts is None:
            texts = texts_of(launch, architecture, ptx_version=10 * version[0] + version[1])
            self.cache.put(key, texts)
        return texts["ptx"]

    def _assembled(
        self, ptx: str, architecture: int, release: str, *, fusion: bool, machine: bool
    ) -> dict[str, Any]:
        """Assemble a PTX; `machine` asks whether operands in registers are overwritten."""
        digest = hashlib.sha256(ptx.encode()).hexdigest()
        key = f"{digest}-ptxas-{release}-{fusion:d}"
        used = self.cache.get(key)
        if used is not None:
            return used
        newest = min(_version(ptx), PTX_VERSIONS[release])
        ptx = _VERSION.sub(f".version {newest[0]}.{newest[1]}", ptx, count=1)
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
            source.write_text(ptx, encoding="utf-8")
            command = [str(self.assemblers[release]), "-lineinfo", "-v", "--regAllocOptLevel=2"]
            command += [] if fusion else ["--fmad=false"]
            command += [f"--gpu-name=sm_{architecture}a", str(source), "-o", str(target)]
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            if process.returncode:
                lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
                return {"error": lines[0].replace(folder, "")[:200]}
            overwritten = code_checks.overwritten_operands(_sass(target)) if machine else []
        used = {
            "registers": int(re.search(r"Used (\d+) registers", process.stderr)[1]),
            "stack": int(re.search(r"(\d+) bytes stack frame", process.stderr)[1]),
            "overwritten": len(overwritten),
        }
        self.cache.put(key, used)
        return used


def _version(ptx: str) -> tuple[int, int]:
    major, minor = _VERSION.search(ptx).groups()
    return int(major), int(minor)


def _sass(cubin: Path) -> str:
    """Return the machine instructions of a cubin."""
    process = subprocess.run(
        [_BIN / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True
    )
    return process.stdout


def main() -> None:
    """Answer launches until stdin ends."""
    cache, assemblers = sys.argv[1:]
    paths = {release: Path(path) for release, path in json.loads(assemblers).items()}
    compiler = Compiler(Cache(Path(cache)), paths)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Triton prints what fails
    for line in sys.stdin:
        launch, architecture = json.loads(line)
        answers.write(json.dumps(compiler.outcome(Launch(**launch), architecture)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
