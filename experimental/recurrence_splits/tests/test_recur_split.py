# SPDX-License-Identifier: Apache-2.0
"""Outputs and gradients of split recurrences match recurrences over whole sequences."""

from __future__ import annotations

import pytest
import torch

from experimental.recurrence_splits.splits import recur_split
from megatron.core.ops.recurrence import (
    RecurrenceInputs,
    delta_recurrence,
    recur,
    state_space_recurrence,
)
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import assert_all_close

GROUPS, SHARED, KEYS, VALUES = 2, 2, 3, 5
KINDS = ("delta", "dual")


def recurrence_of(kind: str):
    """Return the recurrence under test, in small chunks."""
    make = {"delta": delta_recurrence, "dual": state_space_recurrence}[kind]
    return make(chunk_size=4)


def random(seed: int, *shape: int) -> torch.Tensor:
    """Return normal fp64 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SPLITS = {"one long": (0, 29), "several": (0, 3, 3, 17, 18, 40)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPLITS)
def test_split_recurrence_matches_whole_sequences(name, kind):
    sequences = Sequences(SPLITS[name])
    tokens, heads = sequences.tokens, GROUPS * SHARED
    keys = torch.nn.functional.normalize(random(6, tokens, GROUPS, KEYS), dim=-1)
    plain = RecurrenceInputs(
        query=random(5, tokens, GROUPS, KEYS),
        key=keys,
        value=random(7, tokens, heads, VALUES),
        decay=-random(11, tokens, heads).abs(),
        beta=random(12, tokens, heads).sigmoid(),
    )
    initial_states = random(8, sequences.count, heads, KEYS, VALUES)
    grads = (random(9, tokens, heads, VALUES), random(10, *initial_states.shape))

    def outputs_and_grads(run, initial: bool, with_final_states: bool) -> dict[str, torch.Tensor]:
        leaves = {key: x.clone().requires_grad_() for key, x in plain._asdict().items()}
        if initial:
            leaves["initial"] = initial_states.clone().requires_grad_()
        inputs = RecurrenceInputs(*(leaves[key] for key in RecurrenceInputs._fields))
        outputs = run(recurrence_of(kind).operations(inputs), inputs, leaves.get("initial"))
        used = slice(0 if with_final_states != "alone" else 1, 2 if with_final_states else 1)
        torch.autograd.backward(outputs[used], grads[used])
        results = dict(zip(("out", "last"), outputs, strict=True))
        grads_of_leaves = {
            key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in leaves.items()
        }
        return {**results, **grads_of_leaves}

    for initial, with_final_states in ((False, False), (True, False), (False, True), (True, True)):
        whole = outputs_and_grads(
            lambda recurrence, inputs, x: recur(recurrence, inputs, sequences, initial=x),
            initial,
            with_final_states,
        )
        for splits in (2, 3, 50):
            split = outputs_and_grads(
                lambda recurrence, inputs, x, n=splits: recur_split(
                    recurrence, inputs, sequences, splits=n, initial=x, chunk=4
                ),
                initial,
                with_final_states,
            )
            assert_all_close(split, whole, bound=1e-12)


def test_invalid_splits_are_refused():
    x = torch.zeros(4, GROUPS, KEYS)
    inputs = RecurrenceInputs(x, x, x, x[..., 0], x[..., 0])
    with pytest.raises(ValueError, match="splits 0: use 1 or more"):
        recur_split(
            state_space_recurrence().operations(inputs), inputs, Sequences((0, 4)), splits=0
        )
    with pytest.raises(ValueError, match=r"query .* has 4 tokens, the sequences 5"):
        recur_split(
            state_space_recurrence().operations(inputs), inputs, Sequences((0, 5)), splits=2
        )
