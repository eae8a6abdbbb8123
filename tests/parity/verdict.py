# SPDX-License-Identifier: Apache-2.0
"""Comparison of a parallel run with the single process, in all numbers and in its traffic."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tests.parity.experts import MARGIN, same_loads
from tests.parity.pieces import assembled
from tests.parity.sequences import in_rows
from tests.parity.traffic import assert_traffic
from tests.parity.training import SEED, Run, Step, single_run, sizes_of, steps_of
from tests.support.closeness import DEVICE_BOUND, assert_all_close
from tests.support.covering_array import Row
from tests.support.inputs import perturbed
from tests.support.ranks import DEVICES

#: Gradients whose terms nearly cancel. A key bias shifts all scores of a query equally except for
#: their rotation, and softmax ignores the shift: the gradient is a thousandth of its terms. A query
#: bias sums differences of keys: the terms are 10 to 50 times their sum. A decay's gradient is a
#: difference of writes and reads; a single process has an error of 4e-6. So is the gradient of
#: Mamba-2's step: an error of 1e-9 was 4e-7 of it in a first step, 2e-5 in the second. A bias of B
#: or C shifts writes or reads of all tokens equally: the terms were 50 and 200 times their sum in
#: later steps of eight ranks, with errors of 5e-8 of the terms.
CANCELLING = (
    "query_norm.bias", "key_norm.bias", "key.bias", "A_log", "mamba.dt_bias", "mamba.dt.bias",
    "mamba.B.bias", "mamba.C.bias",
)  # fmt: skip

#: Gradients that are products with small factors, and so may be 1e-6 without cancellation:
#: exp(-decay), or B with C and the last MTP depth's loss factor. The bias of dt's projection has
#: the gradient of dt_bias.
SMALL_FACTORS = (
    "A_log",
    "dt_bias",
    "mamba.dt.bias",
    "mamba.B.bias",
    "mamba.C.bias",
    "conv.B.weight",
    "conv.C.weight",
)

#: Number of seeds to try until every route has a margin. Rows with many routes seldom have one.
SEEDS = 30


@dataclass(frozen=True)
class Reference:
    """The single-process run of a row, in logical form, and its initial weights.

    The row has a data seed whose routes have a margin."""

    row: Row
    model_initial: Mapping[str, torch.Tensor]
    initial: Mapping[str, torch.Tensor]
    run: Run


def reference_of(row: Row) -> Reference:
    """Run a row in this process, from perturbed initial values."""
    model_initial = assembled(single_run(row, None).initial)
    _assert_active(row, model_initial)
    moved = perturbed(model_initial, seed=SEED)
    for name in moved:
        if name.endswith("router.weight"):  # clear routes
            moved[name] = moved[name] * 3.0
        if name == "embedding.weight" and row["norm_placement"] != "pre":
            moved[name] = moved[name] * 6.0  # the first mixer reads it without a norm
        # States that remember a whole row: with the initial decay they would forget most of it,
        # and faults at the boundary of ranks would hardly show.
        if name.endswith("delta_net.A_log"):
            moved[name] = moved[name] - 4.0
        if name.endswith(("conv.query.weight", "conv.key.weight")):  # far from length 0
            moved[name] = moved[name] * 3.0
        if name.endswith("mamba.dt_bias"):
            moved[name] = moved[name] + 2.0
    for seed in range(SEED, SEED + SEEDS):
        seeded = {**row, "seed": seed}
        run = single_run(seeded, moved)
        if run.margin > MARGIN:
            break
    else:
        raise AssertionError(
            f"with {SEEDS} seeds, a route of these rows has a margin below {MARGIN}"
        )
    if (run.dropped > 0) != (row["capacity"] is not None):
        raise AssertionError(f"{run.dropped} routes dropped, capacity is {row['capacity']}")
    return Reference(seeded, model_initial, moved, run)


def _assert_active(row: Row, initial: Mapping[str, torch.Tensor]) -> None:
    """Assert that the model has the weights of the row's options, which the plain model reads."""
    blocks = {m[0] for name in initial if (m := re.match(r".*\.blocks\.\d+", name))}
    expected = {".norm.weight": ("pre", "both"), ".post_norm.weight": ("post", "both")}
    for suffix, placements in expected.items():
        count = sum(name.removesuffix(suffix) in blocks for name in initial)
        norms = len(blocks) // 2 if row["parallel"] else len(blocks)
        if count != norms * (row["norm_placement"] in placements):
            raise AssertionError(f"{count} weights {suffix}, expected for {norms} blocks")
    sizes = [len(w) for name, w in initial.items() if name.endswith("attention.query_norm.weight")]
    of_projection, channels = row["qk_norm"] == "projection", sizes_of(row)["channels"]
    if row["qk_norm"] and {size > channels for size in sizes} != {of_projection}:
        raise AssertionError(f"query norms have sizes {sizes}, qk_norm is {row['qk_norm']}")


def assert_agrees(row: Row, runs: Sequence[Run], ref: Reference) -> float:
    """Compare a row with the reference's numbers and its own traffic; return the worst error."""
    worst = assert_same_numbers(row, runs, ref)
    for number in range(steps_of(row)):
        assert_traffic(row, runs, number)
    return worst


def assert_same_numbers(row: Row, runs: Sequence[Run], ref: Reference) -> float:
    """Compare all numbers of the ranks of a row; return the worst error of a gradient.

    Compared: initial values and replicas, bit for bit; per step the loss, the loss of every token,
    every gradient, the gradient's norm and its zeros; the weights after all steps; and the
    collectives.
    """
    whole = assembled(chunk for run in runs for chunk in run.initial)
    if whole.keys() != ref.model_initial.keys():
        raise AssertionError(f"not everywhere: {sorted(whole.keys() ^ ref.model_initial.keys())}")
    for name, values in ref.model_initial.items():
        if not torch.equal(whole[name], values):
            raise AssertionError(f"initial values of {name} depend on the layout")
    worst = 0.0
    for number in range(steps_of(row)):
        worst = max(worst, _assert_step_agrees(row, runs, ref, number))
    after = assembled(chunk for run in runs for chunk in run.weights)
    assert_all_close(after, assembled(ref.run.weights), bound=_bound(row))
    same_loads(runs, ref.run)
    return worst


def _bound(row: Row, number: int = 0) -> float:
    """Return the largest error allowed in step `number`: the parity bound, ten times the bound for
    nonlinear updates, twice for attention merged from blocks, five times in the third step of
    latent attention, three times for norms of outputs.

    Merging rounds the output again, and the gradients of queries and keys are small differences
    of large terms: 2e-6 in a first step, where single-rank rows have 4e-7, and more in the
    second step, after an update at a rate of 0.3. Adam's error is at most 1/epsilon times the
    gradient's, below 10 at these rates. Muon's polynomial multiplies small singular values by a
    few hundred, relative to updates of a hundredth of a weight. Latent attention has two more
    products and a norm between a query and its token: its errors, 8e-7 in a first step, grow
    tenfold with each update. A norm of an output divides by its size, so that the rounding of a
    small output becomes as large as the stream's: 1.3e-5 in some gradients of query projections.
    """
    linear = row.get("optimizer", "sgd") == "sgd"
    later = 5 if row["attention"] == "latent" and number == 2 else 1
    normed = 1 if row["norm_placement"] == "pre" else 3
    return (
        DEVICE_BOUND[DEVICES[-1]]
        * (1 if linear else 10)
        * (2 if row["cp"] > 1 else 1)
        * later
        * normed
    )


def _assert_step_agrees(row: Row, runs: Sequence[Run], ref: Reference, number: int) -> float:
    steps, ref_step = [run.steps[number] for run in runs], ref.run.steps[number]
    tp, gtp, cp, accumulation = row["tp"], row["gtp"], row["cp"], row["accumulation"]
    final_stage = (row["pp"] - 1) * row["dp"] * cp * gtp * tp
    stage_steps = [
        [steps[final_stage + ((replica * cp + cp_rank) * gtp + i) * tp] for cp_rank in range(cp)]
        for replica in range(row["dp"])
        for i in range(gtp)
    ]
    gradients = assembled(chunk for step in steps for chunk in step.gradients)
    bound = _bound(row, number)
    worst = _assert_gradients(gradients, assembled(ref_step.gradients), bound=bound)
    _assert_replica_ranks(steps)
    scalars, expected = {}, {}
    for rank, step in enumerate(steps):
        scalars[f"loss on {rank}"], expected[f"loss on {rank}"] = step.loss, ref_step.loss
        scalars[f"norm on {rank}"], expected[f"norm on {rank}"] = step.grad_norm, ref_step.grad_norm
        # The gradient of an expert of few tokens has few addends, which may cancel in one order
        # and leave a rounding error in another; the gradient of a decay is a difference.
        allowed = 2 if row["experts"] is not None else int(row["mixer"] is not None)
        if abs(step.zeros - ref_step.zeros) > allowed:
            raise AssertionError(f"{step.zeros} zeros in the gradient, expected {ref_step.zeros}")
    for index, nll in enumerate(ref_step.nll):
        name = f"losses of microbatch {index}"
        cp_steps = stage_steps[index // accumulation]
        scalars[name] = sum(
            in_rows(row, step.nll[index % accumulation], rank) for rank, step in enumerate(cp_steps)
        )
        expected[name] = nll
    assert_all_close(_tensors(scalars), _tensors(expected), bound=bound)
    return worst


def _assert_gradients(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, bound: float
) -> float:
    """Compare gradients; gradients whose terms nearly cancel have a larger bound."""
    assert actual.keys() == expected.keys()
    groups: dict[tuple[bool, bool], list[str]] = {}
    for name in actual:
        groups.setdefault((name.endswith(CANCELLING), name.endswith(SMALL_FACTORS)), []).append(
            name
        )
    worst = 0.0
    for (cancelling, is_small), names in groups.items():
        allowance = 10 if cancelling else 1
        error = assert_all_close(
            {name: actual[name] for name in names},
            {name: expected[name] for name in names},
            bound=bound * allowance,
            scale=0.0 if is_small else 1.0,
        )
        worst = max(worst, error / allowance)
    return worst


def _assert_replica_ranks(steps: Sequence[Step]) -> None:
    """Assert that each rank knows the ranks that own the same chunk of optimizer state."""
    holders: dict[tuple[object, ...], list[int]] = {}
    for rank, step in enumerate(steps):
        for chunk in step.gradients:
            holders.setdefault((chunk.name, chunk.offsets, chunk.values.shape), []).append(rank)
    for step in steps:
        for chunk in step.gradients:
            actual = tuple(holders[chunk.name, chunk.offsets, chunk.values.shape])
            if chunk.holders != actual:
                raise AssertionError(f"{chunk.name} is on {actual}, expected on {chunk.holders}")


def _tensors(values: Mapping[str, float | torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(v, dtype=torch.float64) for name, v in values.items()}
