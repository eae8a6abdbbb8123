# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on packed conversations equals fine-tuning on the conversations one by one."""

from __future__ import annotations

import itertools
from itertools import islice

import numpy as np
import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.context_parallel import SequenceLayout
from megatron.core.datasets import IndexedDatasetWriter
from megatron.core.datasets.chat_dataset import mask_prefix
from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.training.config.resolve import ResolvedRun, resolve
from megatron.training.data.data_sets import build_data_sets, training_batches
from megatron.training.data.vocabulary import Vocabulary
from megatron.training.hooks import StepReport
from megatron.training.layouts import Layouts
from megatron.training.step import Microbatch, TrainStep
from megatron.training.train_steps import take
from tests.support.closeness import assert_close_by_metric
from tests.support.ranks import run_ranks
from tests.unit_tests.training.small_config import small_config

VOCABULARY = Vocabulary(size=61, eod=60, tokenizer={})
ROWS = 8
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=24,
    vocab_size=61,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=8),
    mlp=MLPConfig(ffn_hidden_size=20),
    init_std=0.2,
)


@pytest.fixture
def talks(tmp_path):
    """Write 40 conversations, and return their prefix, ids and masks."""
    random = np.random.default_rng(11)
    conversations = []
    prefix = str(tmp_path / "talks")
    with (
        IndexedDatasetWriter(prefix, np.uint16) as tokens,
        IndexedDatasetWriter(mask_prefix(prefix), np.uint8) as mask,
    ):
        for _ in range(40):
            length = int(random.integers(3, 17))
            ids = random.integers(0, 60, size=length)
            learnt = (random.random(length) < 0.6).astype(np.uint8)
            learnt[-1] = 1
            tokens.add_document(ids)
            mask.add_document(learnt)
            conversations.append((ids.tolist(), learnt.tolist()))
    return prefix, conversations


def _run(prefix: str, world: int = 1, flags: str = "") -> ResolvedRun:
    text = f"--sft --data-path {prefix} --split 1 --eval-interval 0 --micro-batch-size 2 "
    text += f"--global-batch-size {ROWS} --train-iters 1 --num-workers 0 {flags}"
    return resolve(small_config(text), world)


def _step(groups: ProcessGroupCollection, **options) -> TrainStep:
    model = GPTModel(CONFIG, groups, seed=3, **options)
    engine = DataParallel(model.store, groups)
    optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig(kind="sgd", clip_grad=0.0))
    return TrainStep(model, engine, optimizer=optimizer, groups=groups, per_token_loss=True)


def _train_packed(
    step: TrainStep, prefix: str, world: int = 1
) -> tuple[float, StepReport, torch.Tensor]:
    """Return the loss before a step, the step's report, and the packed rows, [rows, s + 1]."""
    run = _run(prefix, world)
    data_sets = build_data_sets(run, VOCABULARY)
    dp_group = step.groups["dense_dp"]
    batches = training_batches(data_sets, run, dp_group=dp_group, consumed_samples=0)
    cpu = torch.device("cpu")
    microbatches = take(
        islice(batches, run.num_microbatches), cpu, layouts=Layouts(step.groups["cp"], cpu)
    )
    before = step.evaluate(microbatches)
    report = step(microbatches, lr=0.5, weight_decay=0.0)
    rows = [torch.cat([m.tokens, m.labels[:, -1:]], dim=1) for m in microbatches]
    return before, report, torch.cat(rows)


def _separate_microbatches(rows: torch.Tensor, talks: list) -> list[Microbatch]:
    """Return the conversations of packed rows, each as a separate microbatch."""
    mask_by_ids = {tuple(ids): learnt for ids, learnt in talks}
    assert len(mask_by_ids) == len(talks)
    microbatches = []
    for row in rows.tolist():
        offset = 0
        while offset < len(row) and row[offset] != 60:
            (ids,) = [k for k in mask_by_ids if tuple(row[offset : offset + len(k)]) == k]
            offset += len(ids)
            tokens = torch.tensor([ids])
            microbatches.append(
                Microbatch(
                    tokens=tokens[:, :-1],
                    labels=tokens[:, 1:],
                    loss_mask=torch.tensor([mask_by_ids[ids][1:]], dtype=torch.float32),
                    layout=SequenceLayout.of_rows(len(ids) - 1, sample_ids=torch.zeros(1).long()),
                )
            )
    return microbatches


def _weights(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: handle.get().clone() for name, handle in step.model.store.handles.items()}


@pytest.mark.covers("fine-tuning on chats")
def test_packed_step_equals_step_on_separate_conversations(talks):
    prefix, conversations = talks
    single = ProcessGroupCollection.single()
    packed, alone = _step(single), _step(single)
    start = _weights(packed)
    before, report, rows = _train_packed(packed, prefix)
    microbatches = _separate_microbatches(rows, conversations)
    assert len(microbatches) > ROWS + 3
    expected_before = alone.evaluate(microbatches)
    expected = alone(microbatches, lr=0.5, weight_decay=0.0)
    assert before == pytest.approx(expected_before, rel=1e-5)
    assert report.loss == pytest.approx(expected.loss, rel=1e-5)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    expected_weights = _weights(alone)
    for name, weight in _weights(packed).items():
        update = expected_weights[name] - start[name]
        assert_close_by_metric(name, weight, expected_weights[name], whole=update)


def _on_ranks(rank: int, world: int, prefix: str) -> tuple[float, float, float]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=2), rank=rank)
    step = _step(groups, sequence_parallel=True)
    before, report, _ = _train_packed(step, prefix, world // 2)
    return before, report.loss, report.grad_norm


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.covers("fine-tuning on chats")
@pytest.mark.covers("matches a single process")
def test_layouts_agree_on_packed_rows(talks, world):
    prefix, _ = talks
    before, report, _ = _train_packed(_step(ProcessGroupCollection.single()), prefix)
    for actual in run_ranks(_on_ranks, world, prefix):
        assert actual == pytest.approx((before, report.loss, report.grad_norm), rel=1e-5)


def test_conversation_packing_is_logged(talks):
    prefix, _ = talks
    notes = build_data_sets(_run(prefix), VOCABULARY).notes
    assert len(notes) == 1
    assert f"{prefix}: 40 conversations packed into " in notes[0]
    assert "leaves out 0" in notes[0]
    two = build_data_sets(_run(prefix, flags=f"--data-path 1 {prefix} 2 {prefix}"), VOCABULARY)
    assert len(two.notes) == 2
    assert two.identity["kind"] == "sft"


def test_sample_order_resumes_at_consumed_samples(talks):
    run = _run(talks[0], flags="--train-iters 9")
    data_sets = build_data_sets(run, VOCABULARY)
    single = ProcessGroupCollection.single()["dense_dp"]
    whole = training_batches(data_sets, run, dp_group=single, consumed_samples=0)
    resumed = training_batches(data_sets, run, dp_group=single, consumed_samples=20)
    tokens = [next(whole).tokens.tolist() for _ in range(20)]
    assert [next(resumed).tokens.tolist() for _ in range(10)] == tokens[10:20]
    assert len({str(rows) for rows in tokens}) == 20
    for a, b in itertools.pairwise(tokens):
        assert a != b
