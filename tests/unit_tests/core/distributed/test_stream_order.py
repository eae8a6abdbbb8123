# SPDX-License-Identifier: Apache-2.0
"""Work on several streams: the same bits in every interleaving, and no superfluous wait."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.unit_tests.core.distributed.stream_programs import PROGRAMS, run

#: Interleavings of each program before every merge, 30 in all; the slow tests run more.
NUM_INTERLEAVINGS = {
    "no_shard hybrid bf16": 2, "optim": 2, "optim_grads hybrid": 2,
    "optim_grads_params by weight": 2, "optim_grads_params outer": 2, "optim gtp mxfp8": 2,
    "optim_grads gtp late sync": 2, "1f1b": 2, "zb-h1": 2, "pipelined forward": 2, "async save": 3,
    "host updates": 2, "host updates bf16": 2, "fp32 sum": 1, "generation": 2,
}  # fmt: skip
NUM_SLOW_INTERLEAVINGS = 1000
#: Interleavings within which an omitted wait must show.
MAX_TRIALS = 30

#: Waits that are needed only during a graph capture, by function and kind, with the reason.
CAPTURE_WAITS = {
    "Gatherer.begin: wait_stream": "the gather stream enters a capture by it (`CaptureRules`)",
}


@cache
def run_in_order(name: str) -> tuple[tuple[torch.Tensor, ...], tuple[str, ...]]:
    """Return a program's tensors when work runs in submission order, and the program's waits."""
    tensors, device = run(PROGRAMS[name], None)
    assert device.late == 0
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    return tuple(tensors), tuple(device.sites)


def differs(name: str, seed: int, without: str) -> bool:
    """Return whether a program without a wait fails or computes different bits."""
    expected, sites = run_in_order(name)
    if without not in sites:
        return False
    try:
        actual, _ = run(PROGRAMS[name], seed, without=without)
    except (RuntimeError, IndexError, ValueError):  # poison among indices, or in a count
        return True
    return not all(map(torch.equal, actual, expected))


def compare_interleaving(name: str, seed: int) -> int:
    """Compare an interleaving with submission order; return how often the host was ahead."""
    tensors, device = run(PROGRAMS[name], seed)
    mismatched = [
        i
        for i, pair in enumerate(zip(tensors, run_in_order(name)[0], strict=True))
        if not torch.equal(*pair)
    ]
    assert not mismatched, f"{name}, interleaving {seed}: results {mismatched} differ"
    return device.late


@pytest.mark.parametrize("name", NUM_INTERLEAVINGS)
def test_interleavings_compute_the_same_bits(name: str):
    assert sum(compare_interleaving(name, seed) for seed in range(NUM_INTERLEAVINGS[name])) > 0, (
        "the host was never ahead"
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_interleavings_compute_the_same_bits(name: str):
    seeds = range(100, 100 + -(-NUM_SLOW_INTERLEAVINGS // len(PROGRAMS)))
    assert sum(compare_interleaving(name, seed) for seed in seeds) > 0, "the host was never ahead"


@pytest.mark.parametrize(
    "wait",
    [
        "BufferPool.acquire: wait_event",
        "Gatherer._finish_all_gather: wait",
        "Gatherer.invalidate: wait",
    ],
)
def test_bug_planted_in_gatherer_is_detected(wait: str):
    """The waits order a buffer's write after its last read, a weight's read after its gather, and
    a gather after the optimizer's write."""
    name = "optim" if "invalidate" in wait else "optim_grads_params by weight"
    (site,) = (site for site in run_in_order(name)[1] if wait in site)
    assert any(differs(name, seed, site) for seed in range(MAX_TRIALS))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_omitted_stream_wait_is_detected():
    programs: dict[str, list[str]] = {}
    for name in PROGRAMS:
        for site in run_in_order(name)[1]:
            programs.setdefault(site, []).append(name)
    missed = []
    for site, names in programs.items():
        if site.endswith(tuple(CAPTURE_WAITS)):
            continue
        trials = ((name, seed) for seed in range(MAX_TRIALS) for name in names)
        trial = next((t for t in trials if differs(*t, site)), None)
        print(f"{site}: {trial or 'not found'}", flush=True)
        if trial is None:
            missed.append(site)
    assert not missed, missed
    assert len(programs) > 25
