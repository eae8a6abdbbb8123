# SPDX-License-Identifier: Apache-2.0
"""Every layout trains like a single process, and a single process like the definition.

One covering array crosses the layouts with the settings of a model (`rows`). Each row is compared
with the single-process model in every loss, every gradient and the weights after some SGD steps
(`verdict`), and the single-process model with a plain fp64 one (`plain_gpt`).
"""

import pytest
import torch

from tests.parity.experts import (
    CLAMP,
    QUERY_SCALE,
    YARN,
    plain_multipliers,
    second_attention,
)
from tests.parity.pieces import assembled
from tests.parity.plain_gpt import PlainGPT, step_loss
from tests.parity.recurrent import epsilon_of, plain_mixers
from tests.parity.rows import (
    FACTORS,
    GATES_ALONE,
    LEARNED_POSITIONS,
    MAMBA_ALONE,
    NORM_PLACEMENTS,
    PARALLEL,
    QUERY_KEY_NORMS,
    label,
    params,
    row_with,
    rows_for_make_test,
    rows_for_nightly,
    rows_of_formats,
    single_rank_rows,
    world_of,
)
from tests.parity.traffic import assert_traffic
from tests.parity.training import (
    BATCH,
    HEAD_DIM,
    HEADS,
    LAYERS,
    WEIGHT_DECAY,
    data_of_rank,
    rank_of_row,
    rate_of,
    steps_of,
)
from tests.parity.verdict import assert_agrees, assert_same_numbers, reference_of
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.covering_array import covering_array
from tests.support.ranks import run_ranks


def _check(row, *, timeout=60.0):
    ref = reference_of(row)
    runs = run_ranks(rank_of_row, world_of(row), ref.row, ref.initial, timeout=timeout)
    assert_agrees(row, runs, ref)
    return runs


@pytest.mark.parametrize("row", params(rows_for_make_test()))
@pytest.mark.covers("matches a single process")
def test_layout_trains_like_a_single_process(row):
    _check(row)


@pytest.mark.gpu
@pytest.mark.parametrize("row", params(single_rank_rows()))
def test_single_rank_on_a_device_trains_like_a_cpu(row):
    _check(row)


@pytest.mark.parametrize("row", params(rows_of_formats()))
def test_gather_formats_train_like_encoded_weights(row):
    _check(row)


def test_tp_with_1d_scales_gathers_each_direction_once():
    # Scales depend on a tp rank's shard: numbers differ from one process, the traffic does not.
    row = row_with(tp=2, gtp=2, wire="nvfp4", scale_blocks="1d")
    ref = reference_of(row)
    runs = run_ranks(rank_of_row, world_of(row), ref.row, ref.initial)
    for number in range(steps_of(row)):
        assert_traffic(row, runs, number)


@pytest.mark.parametrize(
    "row",
    [
        row_with(
            tp=1, gtp=2, dp=2, attention="latent", groups=8, placement="optim",
            opt_in=("mla_down_proj",),
        ),
        row_with(tp=2, gtp=2, positions="learned", accumulation=3, opt_in=("position_embeddings",)),
    ],
    ids=label,
)  # fmt: skip
def test_opted_in_modules_are_sharded_over_gtp(row):
    weight_names = {
        "mla_down_proj": "attention.down.weight",
        "position_embeddings": "position_embeddings",
    }
    runs = _check(row)
    (name,) = row["opt_in"]
    assert any(weight_names[name] in sharded for sharded in runs[0].over_gtp), runs[0].over_gtp


@pytest.mark.parametrize("documents", FACTORS["documents"])
def test_documents_start_with_distinct_tokens_for_capacity(documents):
    # Documents with equal first tokens have equal weights; rounding would choose between them.
    for vocabulary in FACTORS["vocabulary"]:
        row = row_with(
            experts="softmax", capacity="probs", documents=documents, vocabulary=vocabulary,
            accumulation=3, predictions=1,
        )  # fmt: skip
        for batch in (
            b for dp_rank in range(4) for step in range(3) for b in data_of_rank(row, dp_rank, step)
        ):
            is_start = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens) == 0
            if documents != "whole":
                is_start = batch.positions == 0
            beginnings = batch.tokens[is_start].tolist()
            assert len(set(beginnings)) == len(beginnings) >= BATCH
            assert set(beginnings) <= set(range(vocabulary))
            assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
            assert torch.equal(batch.mtp_targets.tokens[0][:, :1], batch.tokens[:, 1:2])


OPTIMIZER_ROWS = {
    "adam, cut weights": row_with(
        dp=2, optimizer="adam", placement="optim_grads_params", early_gather=True, accumulation=3,
        tied=True, groups=1, qk_norm=True, mixer="mamba", mamba_groups=1,
    ),
    "adam, hybrid": row_with(
        tp=1, dp=4, optimizer="adam", placement="optim_grads", instances=2, link="late", bias="all",
    ),
    "muon, cut optimizer": row_with(
        dp=2, optimizer="muon", placement="optim", early_gather=True, bucket="small", groups=1,
        bias="qkv", sequence_parallel=True, mixer="delta",
    ),
    "muon, hybrid and cut weights": row_with(
        tp=1, dp=4, optimizer="muon", placement="optim_grads_params", instances=2, outer="optim",
        granularity="weight", link="late", tied=True,
    ),
    "muon, weights over gtp": row_with(
        tp=1, gtp=2, dp=2, optimizer="muon", placement="optim", groups=1, bias="qkv",
        mixer="delta", experts="softmax", egtp=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.gpus(world_of(r))) for n, r in OPTIMIZER_ROWS.items()],
)
@pytest.mark.covers("matches a single process")
def test_other_optimizers_update_like_a_single_process(name):
    row = OPTIMIZER_ROWS[name]
    ref = reference_of(row)
    runs = run_ranks(rank_of_row, world_of(row), ref.row, ref.initial)
    assert_same_numbers(row, runs, ref)
    after = assembled(ref.run.weights)
    assert all((after[n] - w).abs().max() > 1e-3 for n, w in ref.initial.items()), (
        "a weight did not move"
    )


def _seconds_of(row):
    """Return the approximate seconds of a row on two cores: start of the ranks, and training."""
    return 0.75 * world_of(row) + steps_of(row) * row["accumulation"] * row["dp"] / 4


def pytest_generate_tests(metafunc):
    """Parametrize the triples; computing the rows takes 17 seconds, so only for slow tests."""
    if "triples" in metafunc.fixturenames:
        left_out = "not slow" in metafunc.config.option.markexpr
        rows = [] if left_out else rows_for_nightly()
        slow = [pytest.mark.slow(seconds=_seconds_of(row)) for row in rows]
        metafunc.parametrize(
            "triples",
            [
                pytest.param(*case.values, id=case.id, marks=[*case.marks, mark])
                for case, mark in zip(params(rows), slow, strict=True)
            ],
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.covers("matches a single process")
def test_all_triples_train_like_a_single_process(triples):
    _check(triples, timeout=240.0)  # eight ranks


MODELS = {
    name: FACTORS[name]
    for name in (
        "per_token",
        "tied",
        "groups",
        "norm",
        "norm_placement",
        "qk_norm",
        "bias",
        "gated",
        "gate",
        "multipliers",
        "softcaps",
        "accumulation",
        "window",
        "sinks",
        "second_attention",
        "attention_gate",
        "documents",
        "mixer",
        "parallel",
        "mamba_groups",
        "norm_groups",
        "positions",
        "rotary",
    )
}
SINGLE_RANK_ROW = row_with(tp=1, dp=2)


def _updated(weight: torch.Tensor, gradient: torch.Tensor, *, rate: float) -> torch.Tensor:
    """Return a weight after a step of SGD; norms and biases do not decay."""
    decay = WEIGHT_DECAY if weight.dim() > 1 else 0.0
    return weight - rate * (gradient + decay * weight)


def _name_of(model):
    return f"{model['mixer'] or 'attention'}-groups{model['groups']}"


@pytest.mark.parametrize(
    "model",
    covering_array(
        MODELS,
        (
            *MAMBA_ALONE,
            *GATES_ALONE,
            *LEARNED_POSITIONS,
            *NORM_PLACEMENTS,
            *QUERY_KEY_NORMS,
            PARALLEL[0],
        ),
    ),
    ids=_name_of,
)
@pytest.mark.covers("matches a reference model")
def test_single_process_trains_like_the_definition(model):
    row = {**SINGLE_RANK_ROW, **model}
    ref = reference_of(row)
    plain = PlainGPT(
        layers=LAYERS,
        heads=HEADS,
        groups=row["groups"],
        head_dim=HEAD_DIM,
        tied=row["tied"],
        norm=row["norm"],
        norm_placement=row["norm_placement"],
        qk_norm=bool(row["qk_norm"]),
        gated=row["gated"],
        clamp=CLAMP if row["gate"] == "clamped" else None,
        window=row["window"],
        second=second_attention(row),
        yarn=YARN if row["rotary"] == "yarn" else None,
        query_scale=QUERY_SCALE if row["rotary"] == "query_scale" else None,
        parallel=row["parallel"],
        recurrent=plain_mixers(row),
        **plain_multipliers(row),
        epsilon=epsilon_of(row),
    )
    weights = {name: w.double().requires_grad_() for name, w in ref.initial.items()}
    for number in range(steps_of(row)):
        microbatches = [
            batch for dp_rank in range(row["dp"]) for batch in data_of_rank(row, dp_rank, number)
        ]
        loss = step_loss(plain, weights, microbatches, per_token=row["per_token"])
        gradients = dict(
            zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)
        )
        step = ref.run.steps[number]
        assert_close_by_metric("loss", torch.tensor(step.loss), loss)
        assert_all_close(assembled(step.gradients), gradients)
        weights = {
            name: _updated(w.detach(), gradients[name], rate=rate_of(row)).requires_grad_()
            for name, w in weights.items()
        }
    assert_all_close(assembled(ref.run.weights), weights)
