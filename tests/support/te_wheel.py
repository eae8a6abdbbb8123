# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's Python, without its CUDA libraries, in build/transformer-engine/<release>.

`python -m tests.support.te_wheel` fetches the pinned wheels that are not there yet (1.2 MB each)
and unpacks them; `make test` does so first. Where the registry cannot be reached it says so, and
the tests that need them are skipped.
`python -m tests.support.te_wheel --newest` fetches the newest release of the registry as well,
pinned or not, and exits with 1 where that fails; tests of every release then run it too.
"""

from __future__ import annotations

import argparse
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


def releases() -> list[str]:
    """Return the pinned releases, the newest first, then others that have been fetched."""
    fetched = (path.name for path in FOLDER.glob("*") if (path / "transformer_engine").is_dir())
    return [*RELEASES, *sorted(set(fetched) - set(RELEASES))]


def fetch(release: str | None) -> str:
    """Fetch a release and unpack it, unless it is there.

    Args:
        release: of `RELEASES`, whose digest is checked; None takes the registry's newest.

    Returns:
        The release.

    Raises:
        ValueError: the registry cannot be reached, or has another file.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        requirement = "transformer-engine" + (f"=={release}" if release else "")
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q"]
        command = [sys.executable, "-m", "pip", "download", *options, "-d", scratch, requirement]
        download = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(scratch).glob("*.whl"))
        if download.returncode or not wheels:
            raise ValueError(
                f"{requirement}: pip download failed: {download.stderr.strip()[-200:]}"
            )
        (wheel,) = wheels
        release = wheel.name.split("-")[1]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != RELEASES.get(release, digest):
            raise ValueError(f"{wheel.name} has SHA-256 {digest}, not {RELEASES[release]}")
        if not is_there(release):
            unpacked = Path(scratch, "unpacked")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            unpacked.rename(tree(release))
    return release


def main() -> int:
    """Fetch what the command line names and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--newest", action="store_true", help="fetch the newest release instead")
    if parser.parse_args().newest:
        try:
            release = fetch(None)
        except ValueError as error:
            print(f"te_wheel: error: {error}", file=sys.stderr)
            return 1
        pinned = "pinned" if release in RELEASES else f"not pinned: newer than {NEWEST}"
        print(f"TransformerEngine {release} is the newest release, {pinned}")
        return 0
    for release in RELEASES:
        if is_there(release):
            continue
        try:
            fetch(release)
        except ValueError as error:
            print(f"tests of TransformerEngine {release} will be skipped: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
