# SPDX-License-Identifier: Apache-2.0
"""Build the fake CUDA library for the symbols that a torch build requires.

torch names the library of each symbol (`cudaMalloc@libcudart.so.13`). The stand-in is loaded before
all others and has the same versions, so torch's calls reach it; NVIDIA's own libraries stay loaded
and are not called. Calls of cuBLAS that stand_in/ does not define are products like any other; of
the runtime, they say so and fail.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tools.nullcuda.environment import SetupError

SOURCES = Path(__file__).with_name("stand_in")
#: Of torch; each that is there is searched for calls of CUDA.
CALLERS = (
    "libc10_cuda.so",
    "libtorch_cuda.so",
    "libtorch_python.so",
    "libtorch_cuda_linalg.so",
    "libtorch_nvshmem.so",
    "libcaffe2_nvrtc.so",
)
LIBRARY, NVRTC = "libnullcuda.so", "libnvrtc."
#: Of CUDA 13, of cuDNN, and what those include, which Triton brings.
HEADERS = (
    "nvidia/cu13/include",
    "nvidia/cudnn/include",
    "triton/backends/nvidia/include",
)
CALL = re.compile(r" ((?:__)?(?:cuda|cublas|cudnn|nvrtc)\w+)@+(lib\w+\.so\.\d+)$", re.MULTILINE)
DEFINED = re.compile(r" [TDBR] (\w+)$", re.MULTILINE)


def calls_of(listing: str) -> dict[str, str]:
    """Return the library of each CUDA function, from the undefined symbols of `nm`."""
    return dict(CALL.findall(listing))


def undefined_calls(calls: Mapping[str, str], defined: Collection[str]) -> str:
    """Return C for the calls that nothing defines."""
    lines = ["int product_of(const char *, void *);", "int not_supported(const char *);"]
    for name in sorted(calls.keys() - set(defined)):
        answer = "product_of" if name.startswith("cublas") else "not_supported"
        arguments = f'"{name}", handle' if name.startswith("cublas") else f'"{name}"'
        lines.append(
            f'__attribute__((visibility("default"))) int {name}(void *handle) '
            f"{{ return {answer}({arguments}); }}"
        )
    return "\n".join(lines) + "\n"


def version_script(calls: Mapping[str, str]) -> str:
    """Return the linker's script that gives each call the version that torch asks for."""
    by_library: dict[str, list[str]] = {}
    for name, library in sorted(calls.items()):
        by_library.setdefault(library, []).append(name)
    return "".join(
        f"{library} {{ global: {'; '.join(names)}; }};\n" for library, names in by_library.items()
    )


def build_library(site_packages: Path, folder: Path) -> Path:
    """Compile the stand-in; return its path, which other sources do not share.

    Args:
        site_packages: that hold torch and NVIDIA's headers.
        folder: for a folder of libraries; `libcuda.so.1` there is another name of the stand-in.

    Raises:
        SetupError: the compiler fails.
    """
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in (*sources, Path(__file__))))
    libraries = folder / f"lib-{digest.hexdigest()[:12]}"
    if not libraries.exists():
        with tempfile.TemporaryDirectory(dir=folder) as objects:
            _compile(site_packages, Path(objects))
            # Other processes see all of it or nothing.
            (Path(objects) / "lib").rename(libraries)
    return libraries / LIBRARY


def _compile(site_packages: Path, folder: Path) -> None:
    """Leave the libraries in `folder / "lib"`."""
    torch_folder = site_packages / "torch/lib"
    callers = [torch_folder / name for name in CALLERS if (torch_folder / name).exists()]
    calls = calls_of(_run("nm", "-D", "--undefined-only", *map(str, callers)))
    headers = [site_packages / path for path in HEADERS]
    flags = ["-O2", "-fPIC", "-fvisibility=hidden", *(f"-I{path}" for path in headers)]
    compiled: dict[str, str] = {}
    for source in SOURCES.glob("*.c"):
        compiled[source.stem] = str(folder / source.with_suffix(".o").name)
        _run("gcc", *flags, "-c", str(source), "-o", compiled[source.stem])
    defined = DEFINED.findall(_run("nm", "-g", "--defined-only", *compiled.values()))
    undefined = folder / "undefined.c"
    undefined.write_text(undefined_calls(calls, defined))
    libraries = folder / "lib"
    libraries.mkdir()
    # torch looks NVRTC's symbols up in NVRTC's own library: one of its name is there before it.
    nvrtc = {name: library for name, library in calls.items() if library.startswith(NVRTC)}
    (name,) = set(nvrtc.values())
    _link(libraries / name, [compiled.pop("nvrtc")], nvrtc, folder)
    other_calls = dict(calls.items() - nvrtc.items())
    _link(libraries / LIBRARY, [*compiled.values(), str(undefined)], other_calls, folder)
    (libraries / "libcuda.so.1").symlink_to(LIBRARY)


def _link(library: Path, objects: Sequence[str], calls: Mapping[str, str], folder: Path) -> None:
    script = folder / "versions.map"
    script.write_text(version_script(calls))
    flags = ["-O2", "-fPIC", "-shared", f"-Wl,-soname={library.name}"]
    _run("gcc", *flags, "-o", str(library), *objects, f"-Wl,--version-script={script}", "-lpthread")


def _run(*command: str) -> str:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if "error" in line]
        raise SetupError(
            f"{command[0]} failed: {(lines or process.stderr.splitlines() or ['no message'])[0]}: "
            "is it a C compiler for this machine, of the headers in build/nullcuda/venv?"
        )
    return process.stdout
