# SPDX-License-Identifier: Apache-2.0
"""Peer libraries of the benches: whether this Python can import each, and the reason if not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection, Mapping

#: What is imported of each peer, by the stage that races it.
PEERS: Mapping[str, Mapping[str, str]] = {
    "kernels": {
        "flash-linear-attention": "from fla.ops.gated_delta_rule import chunk_gated_delta_rule",
        "mamba_ssm": "from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined",
    },
    "training": {"transformers": "from transformers import LlamaForCausalLM"},
}
#: Longer than an import takes, even from a cold disk.
SECONDS = 60
LONGEST_REASON = 200


def refusals(
    stages: Collection[str], environment: Mapping[str, str], *, seconds: float = SECONDS
) -> dict[str, str | None]:
    """Import the peers of some stages in parallel, each in a separate process.

    Args:
        stages: names of stages.
        environment: environment of the stages' commands.
        seconds: time limit of all imports together.

    Returns:
        The reason why each peer cannot be imported, in one line; None if it can be imported.
    """
    end = time.monotonic() + seconds
    started = {
        peer: subprocess.Popen(
            [sys.executable, "-c", statement],
            env=dict(environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for stage, peers in PEERS.items()
        if stage in stages
        for peer, statement in peers.items()
    }
    return {peer: _refusal(process, end, seconds) for peer, process in started.items()}


def _refusal(process: subprocess.Popen[str], end: float, seconds: float) -> str | None:
    """Wait for an import and return why it failed, or None."""
    try:
        _, output = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"not imported within {seconds:g} s"
    if process.returncode == 0:
        return None
    lines = output.strip().splitlines() or [f"exit code {process.returncode}"]
    return lines[-1].strip()[:LONGEST_REASON]


def said_of(peer: str, refusal: str | None) -> str:
    """Say in one line whether a peer can be imported, and why not."""
    return f"{peer} can be imported" if refusal is None else f"{peer} cannot be imported: {refusal}"
