# SPDX-License-Identifier: Apache-2.0
"""Compiled code of ops/nvls: multimem instructions, and their order relative to barriers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")

ARCHITECTURES = {90: [], 100: [pytest.mark.slow]}
LOAD = "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2"
STORE = "multimem.st.relaxed.sys.global.v4.f32"
RELEASE, ACQUIRE = (f"atom.global.{order}.sys.cas.b32" for order in ("release", "acquire"))


def compiled(architecture: int) -> dict[str, dict[str, str]]:
    """Return the PTX and SASS of every kernel."""
    script = Path(__file__).with_name("compile_nvls.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[4])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), str(architecture)]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


def processes() -> list:
    """Return test parameters, each with a background process that starts with the session."""
    return [
        pytest.param(
            ("nvls", n),
            marks=[pytest.mark.background(("nvls", n), partial(compiled, n)), *marks],
            id=f"sm_{n}",
        )
        for n, marks in ARCHITECTURES.items()
    ]


def offsets_of(text: str, instruction: str) -> list[int]:
    """Return the offsets of an instruction in the text."""
    end = r"\b" if instruction[-1].isalnum() else ""
    return [match.start() for match in re.finditer(re.escape(instruction) + end, text)]


@pytest.mark.parametrize("key", processes())
def test_kernels_use_multimem_and_order_memory_accesses(key, background) -> None:
    code_by_kernel = background.result(key)
    assert len(code_by_kernel) == 13
    for described, code in code_by_kernel.items():
        ptx, sass = code["ptx"], code["sass"]
        name, _, label = described.partition(" ")
        reduces, gathers = "reduce" in name, "gather" in name
        loads = offsets_of(ptx, LOAD if "multimem" in name else "ld.volatile.global.v4.b32")
        acquires, releases = offsets_of(ptx, ACQUIRE), offsets_of(ptx, RELEASE)
        barriers = reduces + name.removesuffix("_v").endswith("gather")
        assert (len(acquires), len(releases)) == (barriers, barriers), name
        if "multimem" in name:
            assert ("LDGMC" in sass) == reduces, name
            assert bool(offsets_of(ptx, STORE)) == gathers, name
        if reduces:
            assert loads, name
            assert releases[0] < acquires[0] < min(loads), name
        else:
            assert not loads, name
        if gathers:  # all data is stored before peers are signalled
            stores = offsets_of(ptx, STORE if "multimem" in name else "st.global.v4.b32")
            assert max(stores) < releases[-1] < acquires[-1], name
        # A wait bounded by --nvls-tries traps only after the host can see which peer is missing.
        traps, fences = offsets_of(ptx, "trap;"), offsets_of(ptx, "fence.acq_rel.sys;")
        expected = (1, True) if label == "traps" else (0, False)
        assert (len(traps), "BPT.TRAP" in sass) == expected, described
        if label == "traps":
            status_store = offsets_of(ptx, "st.global.b32")[-1]
            assert acquires[-1] < status_store < fences[-1] < traps[0], described
