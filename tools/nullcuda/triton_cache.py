# SPDX-License-Identifier: Apache-2.0
"""Pack Triton's compiled kernels, and unpack them where another machine looks for them.

python -m tools.nullcuda.triton_cache pack FOLDER FILE      what Triton needs of a cache, as .tar.xz
python -m tools.nullcuda.triton_cache unpack FILE FOLDER    then set TRITON_CACHE_DIR=FOLDER

A cache's keys are made of contents: of a kernel, of its arguments' types, of Triton itself. So a
cache is warm on any machine with the same Triton and the same sources. But Triton 3.6 writes the
absolute path of each file into `__grp__*.json`; they are relative in an archive and absolute again
where it is unpacked. The standard library is all that is needed.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

GROUP = "__grp__"
#: Of a kernel: its binary, what describes it; and libraries that launch kernels.
SUFFIXES = (".cubin", ".json", ".so")


def packed_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each member of a cache archive."""
    for path in sorted(folder.glob("*/*")):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        data = path.read_bytes()
        if path.name.startswith(GROUP):
            children = json.loads(data)["child_paths"]
            kernels_kept = {name: name for name in children if Path(name).suffix in SUFFIXES}
            data = json.dumps({"child_paths": kernels_kept}, sort_keys=True).encode()
        yield f"{path.parent.name}/{path.name}", data


def pack(folder: Path, archive: Path) -> int:
    """Write an archive of a cache; return its bytes. The same cache gives the same bytes.

    Raises:
        ValueError: there is no compiled kernel in the folder.
    """
    files = list(packed_files(folder))
    if not any(name.endswith(".cubin") for name, _ in files):
        raise ValueError(f"{folder} holds no compiled kernel: is it a TRITON_CACHE_DIR?")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if name.endswith(".so") else 0o644
            tar.addfile(info, io.BytesIO(data))
    return archive.stat().st_size


def unpack(archive: Path, folder: Path) -> int:
    """Unpack an archive for a folder that is to be TRITON_CACHE_DIR; return the number of kernels.

    Raises:
        ValueError: it is not an archive of a cache.
    """
    folder = folder.resolve()
    kernels = 0
    try:
        with tarfile.open(archive, "r:xz") as tar:
            for member in tar:
                key, _, name = member.name.partition("/")
                data = tar.extractfile(member)
                if data is None or not key or "/" in name or {key, name} & {"", ".", ".."}:
                    raise ValueError(f"{archive}: {member.name!r} is no file of a Triton cache")
                _write_file(folder / key, name, data.read(), executable=bool(member.mode & 0o100))
                kernels += name.endswith(".cubin")
    except (OSError, tarfile.TarError) as error:
        raise ValueError(f"{archive}: {error}: make one by make gpu-cache") from error
    if not kernels:
        raise ValueError(f"{archive} holds no kernel: make one by make gpu-cache")
    return kernels


def _write_file(folder: Path, name: str, data: bytes, *, executable: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if name.startswith(GROUP):
        children = json.loads(data)["child_paths"]
        data = json.dumps({"child_paths": {name: str(folder / name) for name in children}}).encode()
    path = folder / name
    path.write_bytes(data)
    path.chmod(0o755 if executable else 0o644)


def main() -> int:
    """Run the command line: pack or unpack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("pack", ("folder", "archive")), ("unpack", ("archive", "folder"))):
        command = commands.add_parser(name)
        for word in words:
            command.add_argument(word, type=Path)
    options = parser.parse_args()
    try:
        if options.command == "pack":
            print(f"{pack(options.folder, options.archive):,} bytes in {options.archive}")
        else:
            kernels = unpack(options.archive, options.folder)
            print(f"{kernels} kernels: export TRITON_CACHE_DIR={options.folder.resolve()}")
    except ValueError as error:
        print(f"triton_cache: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
