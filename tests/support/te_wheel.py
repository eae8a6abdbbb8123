# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's Python, without its CUDA libraries, in build/transformer-engine/<release>.

`python -m tests.support.te_wheel` fetches the wheels that are not there yet (1.2 MB each) and
unpacks them; `make test` does so first. Where the registry cannot be reached it says so, and the
tests that need them are skipped.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

FOLDER = Path(__file__).parents[2] / "build" / "transformer-engine"

#: SHA-256 of the wheel of each release that tests run, the newest first.
RELEASES: Mapping[str, str] = MappingProxyType(
    {
        "2.20.2": "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094",
        "2.19.0": "965d78429d287f7db6978bf299cfcecf68c730247f05cc830ecc6983a123bbc7",
    }
)
NEWEST, *_ = RELEASES


def tree(release: str = NEWEST) -> Path:
    """Return the folder that `transformer_engine` of a release is imported from."""
    return FOLDER / release


def is_there(release: str = NEWEST) -> bool:
    """Whether the release has been fetched."""
    return tree(release).is_dir()


def fetch(release: str) -> None:
    """Fetch a release and unpack it.

    Raises:
        ValueError: the registry cannot be reached, or has another file.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        wanted = f"transformer-engine=={release}"
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q"]
        command = [sys.executable, "-m", "pip", "download", *options, "-d", scratch, wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise ValueError(f"{wanted}: pip download failed: {done.stderr.strip()[-200:]}")
        (wheel,) = wheels
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != RELEASES[release]:
            raise ValueError(f"{wheel.name} has SHA-256 {found}, not {RELEASES[release]}")
        unpacked = Path(scratch, "unpacked")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        unpacked.rename(tree(release))


def main() -> None:
    for release in RELEASES:
        if is_there(release):
            continue
        try:
            fetch(release)
        except ValueError as error:
            print(f"tests of TransformerEngine {release} will be skipped: {error}")


if __name__ == "__main__":
    main()
