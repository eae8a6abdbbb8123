# SPDX-License-Identifier: Apache-2.0
"""The same conversations in rows of different lengths train a mixture of experts identically.

Rows of 88 tokens are full and have no padding. Longer rows are padded, and must give the same
losses, gradient norms, auxiliary losses, expert loads and expert biases.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL
from megatron.core.context_parallel.sequence_sharding import Costs
from megatron.core.datasets import BatchSizes, GPTBatches
from megatron.core.datasets.token_rows import SampleRows, positions_within
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.moe import Balance, MoEConfig, RouterConfig, routers_of
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.training.layouts import Layouts, PackedCuts
from megatron.training.step import PipelineForwardBackward, TrainStep
from megatron.training.train_steps import take
from tests.support.inputs import generator, one_thread
from tests.support.ranks import run_ranks

FULL, LENGTHS = 88, (96, 128, 160)
VOCABULARY, MICRO, ROUNDS, STEPS = 37, 2, 4, 2
CPU = torch.device("cpu")
#: Lengths in tokens of the conversations of each row, 88 tokens in total.
CONVERSATIONS = ((40, 48), (88,), (3, 70, 15), (61, 27), (30, 30, 28))

GPT = GPTConfig(
    num_layers=2,
    hidden_size=24,
    vocab_size=VOCABULARY,
    attention=AttentionConfig(
        num_attention_heads=4, num_query_groups=2, kv_channels=6, dropout=0.1
    ),
    mlp=MLPConfig(ffn_hidden_size=20),
    hidden_dropout=0.1,
    init_std=0.2,
    ffn_pattern="EE",
    moe=MoEConfig(
        num_experts=6,
        ffn_hidden_size=10,
        router=RouterConfig(
            topk=2, balance="aux_loss", aux_loss_coeff=0.3, z_loss_coeff=0.2, jitter=0.05
        ),
        shared_ffn_hidden_size=8,
    ),
)
SOFTMAX = GPT.moe
SIGMOID = dataclasses.replace(
    SOFTMAX,
    router=RouterConfig(
        topk=2,
        score_function="sigmoid",
        expert_bias=True,
        bias_update_rate=0.05,
        balance="seq_aux_loss",
        aux_loss_coeff=0.3,
    ),
)
RECURRENT = dataclasses.replace(
    GPT,
    num_layers=6,
    ffn_pattern="",
    pattern="GE*EM-",
    mtp=MTPConfig(num_layers=2, pattern="*E"),
    delta_net=GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_channels=6, value_channels=5
    ),
    mamba=Mamba2Config(num_heads=4, head_channels=3, num_groups=2, state_channels=5),
)


def with_experts(experts: MoEConfig, **limits: object) -> GPTConfig:
    """Return GPT with other experts."""
    return dataclasses.replace(GPT, moe=dataclasses.replace(experts, **limits))


MODELS = {
    "softmax": with_experts(SOFTMAX),
    "sigmoid": with_experts(SIGMOID),
    "position": with_experts(SIGMOID, capacity_factor=1.0, drop_policy="position"),
    "probs": with_experts(SOFTMAX, capacity_factor=1.0, drop_policy="probs"),
    "recurrent": RECURRENT,
}


class PackedDataset:
    """A data set of packed conversations that do not depend on the row length.

    Args:
        length: tokens per row, s.
        marks: whether the rows have a padding mask; rows of 88 tokens need none.
    """

    def __init__(self, length: int, *, marks: bool) -> None:
        self.length, self.marks = length, marks

    def __len__(self) -> int:
        return 1000

    def read(self, indices: np.ndarray) -> SampleRows:
        """Return rows whose padding token also occurs in conversations."""
        shape = (len(indices), self.length)
        tokens = np.full((shape[0], shape[1] + 1), 5, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.float32)
        documents = np.zeros(shape, dtype=np.int32)
        padding = np.zeros(shape, dtype=np.bool_)
        for row, index in enumerate(indices.tolist()):
            source = generator(7, index)
            tokens[row, :FULL] = torch.randint(1, VOCABULARY, (FULL,), generator=source)
            learnt = torch.rand(FULL, generator=source) < 0.6
            begin = 0
            for number, count in enumerate(CONVERSATIONS[index % len(CONVERSATIONS)]):
                documents[row, begin:] = number
                mask[row, begin : begin + count - 1] = learnt[begin : begin + count - 1]
                begin += count
            documents[row, FULL:] += 1
            padding[row, FULL:] = True
        return SampleRows(
            tokens=tokens,
            loss_mask=mask,
            positions=positions_within(documents),
            document_ids=documents,
            padding=padding if self.marks else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its grid of ranks."""

    model: str = "softmax"
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    cut: str = "row"
    dispatcher: str = "auto"
    sequence_parallel: bool = False


@dataclasses.dataclass(frozen=True)
class RunNumbers:
    """Losses and router statistics of a run.

    Args:
        losses: losses of the steps, and the loss of one evaluation.
        norms: gradient norms, router entropies and auxiliary losses.
        loads: tokens of each expert and the share of dropped tokens, for all routers.
        biases: biases of this rank's experts after the last step.
    """

    losses: list[float]
    norms: list[float]
    loads: list[tuple[tuple[int, ...], float]]
    biases: list[list[float]]


def build_step(case: Case, groups: ProcessGroupCollection) -> TrainStep:
    """Build a training step of SGD."""
    config, model = DataParallelConfig(), MODELS[case.model]
    split = StageSplit.from_pattern("*E|*E", 2) if case.pp > 1 else None
    model = GPTModel(
        model,
        groups,
        seed=3,
        sequence_parallel=case.sequence_parallel,
        storage=config.storage(),
        split=split,
        backend=dataclasses.replace(LOCAL, dispatcher=case.dispatcher),
    )
    engine = DataParallel(model.store, groups, config=config)
    optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig(kind="sgd", clip_grad=0.0))
    run = None
    if case.pp > 1:
        run = PipelineForwardBackward(model, engine, groups=groups)
    return TrainStep(model, engine, optimizer=optimizer, groups=groups, forward_backward=run)


def train_case(
    case: Case, length: int, groups: ProcessGroupCollection, *, marks: bool = True
) -> RunNumbers:
    """Train on rows of `length` tokens."""
    step, dp_group = build_step(case, groups), groups["samples"]
    config = step.model.config
    balance = Balance(
        routers_of(step.model), config.router_names, config=config.moe, world=groups["world"]
    )
    cuts = None
    if case.cp > 1:
        cuts = PackedCuts(case.cut, case.cp, costs=Costs(token=0.0, pair=1.0, sub_sequence=0.0))
    layouts = Layouts(groups["cp"], CPU, bounds=True, cuts=cuts)
    batches = GPTBatches(
        PackedDataset(length, marks=marks),
        micro_batch_size=MICRO,
        data_parallel_rank=dp_group.rank,
        data_parallel_size=dp_group.size,
        batch_sizes=BatchSizes.constant(MICRO * ROUNDS),
    )
    numbers, rounds, depths = (
        RunNumbers([], [], [], []),
        ROUNDS // dp_group.size,
        config.mtp_num_layers,
    )
    for _ in range(STEPS):
        microbatches = take(islice(batches, rounds), CPU, layouts=layouts, mtp_num_layers=depths)
        report = step(microbatches, lr=0.1, weight_decay=0.0)
        balance.finish(applied=report.applied)
        numbers.losses.append(report.loss)
        numbers.norms.append(report.grad_norm)
        for load in balance.report():
            numbers.norms.extend((load.entropy, load.balance_loss, load.z_loss))
            numbers.loads.append((load.tokens, round(load.dropped, 9)))
    if config.moe.router.expert_bias:
        numbers.biases.extend(router.expert_bias.tolist() for router in routers_of(step.model))
    evaluated = take(islice(batches, rounds), CPU, layouts=layouts)
    numbers.losses.append(step.evaluate(evaluated, at_a_time=rounds))
    return numbers


@cache
def numbers_of_full_rows(model: str) -> RunNumbers:
    """Train a single process on rows without padding."""
    with one_thread():
        # MTP layers skip the ends of documents only if the rows have a padding mask.
        marks = model == "recurrent"
        return train_case(Case(model=model), FULL, ProcessGroupCollection.single(), marks=marks)


def assert_features(model: str, numbers: RunNumbers) -> None:
    """Check that the features of the model were active: drops and expert biases."""
    experts = MODELS[model].moe
    dropped = [load[1] for load in numbers.loads]
    assert (min(dropped) > 0.02) == (experts.capacity_factor is not None)
    if experts.router.expert_bias:
        assert all(max(map(abs, bias)) > 0.05 for bias in numbers.biases)
    assert bool(numbers.biases) == experts.router.expert_bias


def assert_same(model: str, actual: RunNumbers, expected: RunNumbers) -> None:
    """Compare two runs of a rank; recurrences amplify rounding."""
    factor = 5.0 if model == "recurrent" else 1.0
    assert actual.losses == pytest.approx(expected.losses, rel=factor * 1e-7)
    assert actual.norms == pytest.approx(expected.norms, rel=factor * 1e-6)
    assert (actual.loads, actual.biases) == (expected.loads, expected.biases)


#: The fast run covers only "position", which has a capacity, a bias and a sequence-level loss.
SINGLE_PROCESS_MODELS = [
    pytest.param(model, marks=() if model == "position" else pytest.mark.slow(seconds=3))
    for model in MODELS
]


@pytest.mark.parametrize("model", SINGLE_PROCESS_MODELS)
@pytest.mark.covers("fine-tuning on chats")
def test_expert_training_does_not_depend_on_row_length(model):
    expected = numbers_of_full_rows(model)
    assert_features(model, expected)
    with one_thread():
        for length in LENGTHS:
            actual = train_case(Case(model=model), length, ProcessGroupCollection.single())
            assert_same(model, actual, expected)


def train_lengths(rank: int, world: int, case: Case) -> list[RunNumbers]:
    """Train on rows of every length as one rank."""
    grid = RankGrid(world_size=world, tp=case.tp, cp=case.cp, pp=case.pp, ep=case.ep)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    return [train_case(case, length, groups) for length in LENGTHS]


#: A capacity applies per rank, so models whose ranks split a microbatch's tokens have none.
CASES = {
    "tp": Case(tp=2),
    "tp sp": Case(model="sigmoid", tp=2, sequence_parallel=True),
    "cp row": Case(cp=2),
    "cp documents": Case(cp=2, cut="documents", model="sigmoid"),
    "cp recurrent": Case(cp=2, cut="documents", model="recurrent"),
    "pp": Case(pp=2, model="probs"),
    "dp": Case(model="position"),
    "ep alltoall": Case(ep=2, model="position", dispatcher="alltoall"),
    "ep allgather": Case(ep=2, model="probs", dispatcher="allgather"),
    "ep without capacity": Case(ep=2, dispatcher="alltoall"),
}


@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.covers("fine-tuning on chats")
@pytest.mark.covers("matches a single process")
def test_parallel_training_does_not_depend_on_row_length(case):
    expected = numbers_of_full_rows(case.model)
    for shortest, *longer in run_ranks(train_lengths, 2, case):
        for actual in longer:
            assert_same(case.model, actual, shortest)
        assert shortest.loads == expected.loads
        assert case.pp > 1 or shortest.biases == expected.biases
        assert shortest.losses == pytest.approx(expected.losses, rel=1e-6)
        assert shortest.norms == pytest.approx(expected.norms, rel=1e-5)
