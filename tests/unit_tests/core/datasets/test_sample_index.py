# SPDX-License-Identifier: Apache-2.0
"""Index arrays against a slow reference that enumerates every token."""

import numpy as np
import pytest

from megatron.core.datasets.gpt_dataset import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)

GOLDEN_DOCUMENTS = [3, 1, 0, 2, 4, 2, 0, 2, 1, 4, 3, 4, 0, 1, 3]
GOLDEN_SAMPLES = [
    [0, 0], [0, 4], [1, 2], [2, 1], [4, 0], [5, 0], [6, 2], [8, 1], [9, 0], [10, 0], [10, 4],
    [11, 2], [12, 2], [13, 3], [14, 2],
]  # fmt: skip
GOLDEN_SHUFFLE = [11, 12, 4, 3, 7, 2, 1, 9, 5, 0, 8, 13, 6, 10]


def reference_indices(lengths, documents, *, seq, seed, num_samples):
    """Build the three arrays with one step per token and per draw."""
    per_epoch = sum(int(lengths[d]) for d in documents)
    epochs = 1
    while num_samples is not None and epochs * per_epoch < num_samples * seq + 1:
        epochs += 1
    separate = False
    total = (epochs * per_epoch - 1) // seq
    before_last = ((epochs - 1) * per_epoch - 1) // seq
    if epochs > 1:
        separate = num_samples - before_last < int(0.80 * ((per_epoch - 1) // seq))
    rng = np.random.RandomState(seed)
    document_order = [d for _ in range(epochs) for d in documents]
    if separate:
        early, late = np.array(document_order[: -len(documents)]), np.array(documents)
        rng.shuffle(early)
        rng.shuffle(late)
        document_order = [*early.tolist(), *late.tolist()]
    else:
        order = np.array(document_order)
        rng.shuffle(order)
        document_order = order.tolist()
    tokens = [
        (position, t) for position, d in enumerate(document_order) for t in range(int(lengths[d]))
    ]
    starts = [(0, 0)] + [tokens[k * seq] for k in range(1, total + 1)]
    order = np.arange(total)
    if separate:
        early, late = order[:before_last].copy(), order[before_last:].copy()
        rng.shuffle(early)
        rng.shuffle(late)
        order = np.concatenate([early, late])
    else:
        rng.shuffle(order)
    return document_order, starts, order.tolist(), epochs, separate


CASES = [
    # name, lengths, sequences of the split, seq, seed, samples
    ("one epoch", [5, 3, 8, 1, 9], range(5), 4, 1, None),
    ("exact fit", [4, 4, 5], range(3), 4, 2, 3),
    ("one token short of the label", [4, 4, 4], range(3), 4, 3, 3),
    ("part of a file", [5, 3, 8, 1, 9, 7], range(2, 5), 3, 4, 20),
    ("empty sequences", [0, 3, 0, 0, 9, 0], range(6), 2, 5, 13),
    ("first sequence empty", [0, 0, 0, 0, 0, 0, 0, 9], range(8), 2, 6, None),
    ("shorter than a sample", [1] * 17, range(17), 7, 6, 11),
    ("one long sequence", [1000], range(1), 7, 7, 500),
    ("final epoch apart", [50, 41, 33, 60], range(4), 5, 8, 40),
    ("final epoch mixed in", [50, 41, 33, 60], range(4), 5, 8, 70),
    ("several epochs, last apart", [13, 2, 9, 5, 31], range(5), 4, 2**32 - 1, 49),
    ("sample longer than an epoch", [2, 3], range(2), 11, 9, 6),
]


@pytest.mark.parametrize(("_name", "lengths", "documents", "seq", "seed", "samples"), CASES)
@pytest.mark.parametrize("block", [1, 3, 1 << 15])
def test_index_arrays_match_the_reference(
    monkeypatch, _name, lengths, documents, seq, seed, samples, block
):
    monkeypatch.setattr("megatron.core.datasets.gpt_dataset._POSITIONS_AT_ONCE", block)
    lengths = np.array(lengths, dtype=np.int32)
    line, starts, order, epochs, separate = reference_indices(
        lengths, list(documents), seq=seq, seed=seed, num_samples=samples
    )
    plan = plan_epochs(int(lengths[list(documents)].sum()), seq, samples)
    rng = np.random.RandomState(seed)
    document_index = build_document_index(np.array(documents), plan, rng)
    sample_index = build_sample_index(lengths, document_index, plan, sequence_length=seq)
    shuffle_index = build_shuffle_index(plan, rng)
    assert (plan.num_epochs, plan.separate_final_epoch) == (epochs, separate)
    assert document_index.tolist() == line
    assert sample_index.tolist() == [list(start) for start in starts]
    assert shuffle_index.tolist() == order
    assert document_index.dtype == np.int32
    assert sample_index.dtype == np.int32
    assert shuffle_index.dtype == np.uint32
    assert len(shuffle_index) >= (samples or 1)


def test_cases_cover_both_kinds_of_final_epoch():
    plans = [
        plan_epochs(sum(lengths[d] for d in documents), seq, samples)
        for _, lengths, documents, seq, _, samples in CASES
    ]
    assert {plan.separate_final_epoch for plan in plans if plan.num_epochs > 1} == {True, False}


def test_a_case_begins_with_an_empty_sequence():
    # The first sample then starts before the first token; no other case tests this rule.
    _, lengths, documents, seq, seed, samples = next(c for c in CASES if c[0].startswith("first"))
    line, starts, *_ = reference_indices(
        lengths, list(documents), seq=seq, seed=seed, num_samples=samples
    )
    assert lengths[line[0]] == 0
    assert starts[0] == (0, 0)


def test_last_label_needs_one_extra_token():
    assert plan_epochs(12, 4, 3).num_epochs == 2
    assert plan_epochs(13, 4, 3).num_epochs == 1


def test_index_arrays_match_the_golden_values():
    # Golden values, so that a change of the random stream cannot go unnoticed.
    lengths = np.array([3, 5, 2, 6, 4], dtype=np.int32)
    plan = plan_epochs(20, 4, 12)
    rng = np.random.RandomState(1234)
    document_index = build_document_index(np.arange(5), plan, rng)
    sample_index = build_sample_index(lengths, document_index, plan, sequence_length=4)
    shuffle_index = build_shuffle_index(plan, rng)
    assert document_index.tolist() == GOLDEN_DOCUMENTS
    assert sample_index.tolist() == GOLDEN_SAMPLES
    assert shuffle_index.tolist() == GOLDEN_SHUFFLE


@pytest.mark.parametrize(("tokens", "samples"), [(0, 5), (4, None)])
def test_too_few_tokens_are_refused(tokens, samples):
    with pytest.raises(ValueError, match="too few for one sample of 4 tokens"):
        plan_epochs(tokens, 4, samples)


def test_sample_index_uses_int64_where_int32_would_overflow():
    # One sequence as long as int32 allows: its offsets fit, but offset + 1 (the label) overflows.
    lengths = np.array([2**31 - 1], dtype=np.int32)
    plan = plan_epochs(2**31 - 1, 2**28, None)
    index = build_sample_index(lengths, np.array([0], dtype=np.int32), plan, sequence_length=2**28)
    assert index.dtype == np.int64
    assert index[:, 1].tolist() == [k * 2**28 for k in range(8)]
