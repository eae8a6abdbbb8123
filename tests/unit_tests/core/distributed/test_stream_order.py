# SPDX-License-Identifier: Apache-2.0
"""Work on several streams: the same bits in every interleaving, and no wait that is not needed."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.unit_tests.core.distributed.stream_programs import PROGRAMS, run

#: Interleavings of each program before every merge, 30 in all; the others run nightly.
FEW = {
    "no_shard hybrid bf16": 2,
    "optim": 2,
    "optim_grads hybrid": 2,
    "optim_grads_params by weight": 2,
    "optim_grads_params outer": 2,
    "optim gtp mxfp8": 2,
    "optim_grads gtp later": 2,
    "1f1b": 2,
    "zb-h1": 2,
    "pipelined forward": 2,
    "saves": 3,
    "updates on the host": 2,
    "updates on the host bf16": 2,
    "wide sum": 1,
    "generation": 2,
}
MANY = 1000
#: Interleavings in which a wait that is left out must show.
TRIES = 30

#: Waits that order nothing outside of a capture, by function and kind, and what needs them.
NEEDED_ELSEWHERE = {
    "Gatherer.begin: wait_stream": "the gather stream enters a capture by it (`CaptureRules`)",
}


@cache
def in_order(name: str) -> tuple[tuple[torch.Tensor, ...], tuple[str, ...]]:
    """Return the results of a program whose work runs in its own order, and the waits in it."""
    results, device = run(PROGRAMS[name], None)
    assert device.late == 0
    assert all(bool(result.isfinite().all()) for result in results)
    return tuple(results), tuple(device.sites)


def differs(name: str, seed: int, without: str) -> bool:
    """Return whether a program without a wait fails or computes something else."""
    results, sites = in_order(name)
    if without not in sites:
        return False
    try:
        found, _ = run(PROGRAMS[name], seed, without=without)
    except (RuntimeError, IndexError, ValueError):  # poison among indices, or in a count
        return True
    return not all(map(torch.equal, found, results))


def check(name: str, seed: int) -> int:
    """Compare an interleaving with the program's own order; return how often the host was ahead."""
    results, device = run(PROGRAMS[name], seed)
    wrong = [
        i
        for i, pair in enumerate(zip(results, in_order(name)[0], strict=True))
        if not torch.equal(*pair)
    ]
    assert not wrong, f"{name}, interleaving {seed}: results {wrong} differ"
    return device.late


@pytest.mark.parametrize("name", FEW)
def test_uses_of_memory_are_in_order(name: str):
    assert sum(check(name, seed) for seed in range(FEW[name])) > 0, "the host was never ahead"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_interleavings_compute_the_same_bits(name: str):
    seeds = range(100, 100 + -(-MANY // len(PROGRAMS)))
    assert sum(check(name, seed) for seed in seeds) > 0, "the host was never ahead"


@pytest.mark.parametrize(
    "wait",
    [
        "BufferPool.acquire: wait_event",
        "Gatherer._finish_all_gather: wait",
        "Gatherer.invalidate: wait",
    ],
)
def test_bug_planted_in_gatherer_is_detected(wait: str):
    """A buffer written before its last reader, weights read before their gather, weights gathered
    before the optimizer has written them."""
    name = "optim" if "invalidate" in wait else "optim_grads_params by weight"
    (site,) = (site for site in in_order(name)[1] if wait in site)
    assert any(differs(name, seed, site) for seed in range(TRIES))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_omitted_stream_wait_is_detected():
    programs: dict[str, list[str]] = {}
    for name in PROGRAMS:
        for site in in_order(name)[1]:
            programs.setdefault(site, []).append(name)
    missed = []
    for site, names in programs.items():
        if site.endswith(tuple(NEEDED_ELSEWHERE)):
            continue
        trials = ((name, seed) for seed in range(TRIES) for name in names)
        trial = next((t for t in trials if differs(*t, site)), None)
        print(f"{site}: {trial or 'not found'}", flush=True)
        if trial is None:
            missed.append(site)
    assert not missed, missed
    assert len(programs) > 25
