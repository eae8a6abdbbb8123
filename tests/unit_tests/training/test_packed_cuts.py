# SPDX-License-Identifier: Apache-2.0
"""Packed rows sharded by row or by document: losses and gradients match a single process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL
from megatron.core.comm import trace
from megatron.core.context_parallel.sequence_sharding import Costs
from megatron.core.datasets import BatchSizes, GPTBatches
from megatron.core.datasets.token_rows import SampleRows, positions_within
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.models.gpt import logical_weights
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.moe import MoEConfig, RouterConfig, routers_of
from megatron.core.optimizer import OptimizerConfig
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig
from megatron.training.layouts import Layouts, PackedCuts, agreement
from megatron.training.step import PipelineForwardBackward, TrainStep
from megatron.training.train_steps import take
from tests.support.closeness import assert_close_by_metric, assert_piece_close
from tests.support.inputs import generator, one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.training.test_uneven_steps import GradientRecorder

SEQUENCE, VOCABULARY, MICRO = 24, 37, 2
CPU = torch.device("cpu")
#: Starts of the documents of each sample: no length divides evenly, one document has one token.
STARTS = ((0, 5, 6, 17), (0, 13), (0,), (0, 1, 2, 17))

ATTENTION = AttentionConfig(
    num_attention_heads=4, num_query_groups=2, kv_channels=6, dropout=0.2, window=7, sinks=True
)
DENSE = GPTConfig(
    num_layers=2,
    hidden_size=24,
    vocab_size=VOCABULARY,
    attention=ATTENTION,
    mlp=MLPConfig(ffn_hidden_size=20),
    norm=NormConfig(),
    init_std=0.2,
    hidden_dropout=0.1,
)
#: Both recurrent block types, an MTP layer, and experts with a sequence-level balancing loss.
HYBRID = dataclasses.replace(
    DENSE,
    num_layers=6,
    ffn_pattern="",
    pattern="GE*-M-",
    mtp=MTPConfig(num_layers=1, pattern="G-"),
    attention=dataclasses.replace(ATTENTION, window=None),
    norm=NormConfig(epsilon=1e-2),
    delta_net=GatedDeltaNetConfig(
        num_key_heads=4, num_value_heads=8, key_channels=6, value_channels=5, conv_width=4
    ),
    mamba=Mamba2Config(num_heads=8, head_channels=3, state_channels=5, num_groups=4, conv_width=3),
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=20,
        router=RouterConfig(
            topk=2, jitter=0.1, balance="seq_aux_loss", aux_loss_coeff=0.4, z_loss_coeff=0.3
        ),
    ),
)


class PackedDataset:
    """A data set of packed samples that are a function of the sample index."""

    def __len__(self) -> int:
        return 100

    def read(self, indices: np.ndarray) -> SampleRows:
        """Return tokens, a loss mask whose density depends on the sample, and documents."""
        shape = (len(indices), SEQUENCE)
        tokens, masks = [], []
        documents = np.zeros(shape, dtype=np.int32)
        for row, index in enumerate(indices.tolist()):
            source = generator(4, index)
            tokens.append(torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=source))
            masks.append(torch.rand(SEQUENCE, generator=source) < 0.4 + 0.1 * (index % 4))
            for start in STARTS[index % len(STARTS)][1:]:
                documents[row, start:] += 1
        return SampleRows(
            tokens=torch.stack(tokens).numpy(),
            loss_mask=torch.stack(masks).float().numpy(),
            positions=positions_within(documents),
            document_ids=documents,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its grid of ranks, and how its rows are sharded."""

    cut: str = "documents"
    model: GPTConfig = DENSE
    tp: int = 1
    cp: int = 2
    pp: int = 1
    ep: int = 1
    engine: str = "auto"
    mode: str = "auto"


def build_step(case: Case, groups: ProcessGroupCollection) -> TrainStep:
    """Build a training step of plain SGD that records its gradients."""
    config = DataParallelConfig()
    blocks = case.model.pattern or "*-" * case.model.num_layers
    split = None
    if case.pp > 1:
        split = StageSplit.from_pattern(f"{blocks[:2]}|{blocks[2:]}", 2)
    model = GPTModel(
        case.model,
        groups,
        seed=3,
        sequence_parallel=case.tp > 1,
        storage=config.storage(),
        split=split,
        backend=dataclasses.replace(
            LOCAL, context_engine=case.engine, linear_mode=case.mode, dispatcher="allgather"
        ),
    )
    engine = DataParallel(model.store, groups, config=config)
    optimizer = GradientRecorder(
        engine.owned(), groups, config=OptimizerConfig(kind="sgd", clip_grad=0.0)
    )
    optimizer.owned = engine.owned()
    run = None
    if case.pp > 1:
        run = PipelineForwardBackward(model, engine, groups=groups)
    return TrainStep(model, engine, optimizer=optimizer, groups=groups, forward_backward=run)


def train_case(case: Case, groups: ProcessGroupCollection) -> dict:
    """Train on two microbatches and evaluate two more, counted over all data-parallel ranks."""
    step, cuts, dp_group = build_step(case, groups), None, groups["samples"]
    if groups["cp"].size > 1:
        costs = Costs(token=0.0, pair=1.0, sub_sequence=0.0)
        agree = agreement(groups, case.model, "allgather", CPU)
        assert (agree is None) == (case.ep == 1)
        cuts = PackedCuts(case.cut, case.cp, costs=costs, multiple=case.tp, agree=agree)
    layouts = Layouts(groups["cp"], CPU, bounds=True, cuts=cuts)
    batches = GPTBatches(
        PackedDataset(),
        micro_batch_size=MICRO,
        data_parallel_rank=dp_group.rank,
        data_parallel_size=dp_group.size,
        batch_sizes=BatchSizes.constant(2 * MICRO),
    )
    depths, count = case.model.mtp_num_layers, 2 // dp_group.size
    microbatches = take(islice(batches, count), CPU, layouts=layouts, mtp_num_layers=depths)
    by_documents = [batch.layout.sharding.is_padded for batch in microbatches]
    with trace(groups) as records:
        loss = step(microbatches, lr=0.3, weight_decay=0.0).loss
    shards = {
        (placed.name, placed.box.offsets): placed.of(recorded).clone()
        for recorded, owned in zip(step.optimizer.recorded, step.optimizer.owned, strict=True)
        for placed in owned.boxes
    }
    evaluated = step.evaluate(take(islice(batches, count), CPU, layouts=layouts), at_a_time=count)
    kinds = Counter(record.kind for record in records if record.group == "cp")
    counted = [router.counted for router in routers_of(step.model)]
    return {
        "losses": [loss, evaluated],
        "shards": shards,
        "by_documents": by_documents,
        "kinds": kinds,
        "counted": counted,
        "tokens": [batch.tokens.shape for batch in microbatches],
    }


def train_cases(rank: int, world: int, cases: list[Case]) -> list[dict]:
    """Train every case on the ranks of its grid."""
    outcomes = []
    for case in cases:
        grid = RankGrid(world_size=world, tp=case.tp, cp=case.cp, pp=case.pp, ep=case.ep)
        outcomes.append(train_case(case, ProcessGroupCollection.create(grid, rank=rank)))
    return outcomes


CASES_OF_2_RANKS = {
    "p2p": Case(engine="p2p"),
    "all_gather": Case(engine="all_gather"),
    "a2a": Case(engine="a2a"),
    "headwise": Case(model=HYBRID, mode="headwise", engine="p2p"),
    "segments": Case(model=HYBRID, mode="segments", engine="p2p"),
    "auto": Case(cut="auto"),
}
CASES_OF_4_RANKS = {
    "tp 2": Case(model=HYBRID, tp=2, mode="headwise", engine="p2p"),
    "pp 2": Case(model=HYBRID, pp=2, mode="segments"),
    "cp 4": Case(model=HYBRID, cp=4, mode="segments", engine="p2p"),
    "experts of two dp ranks": Case(model=HYBRID, ep=4),
}
ROW_CASES = {
    f"{name}, row": dataclasses.replace(case, cut="row")
    for name, case in CASES_OF_2_RANKS.items()
    if name != "auto"
}
SLOW_CASES = {
    "tp 2, segments": Case(model=HYBRID, tp=2, mode="segments"),
    "pp 2, headwise": Case(model=HYBRID, pp=2, mode="headwise", engine="p2p"),
    "cp 4, headwise": Case(model=HYBRID, cp=4, mode="headwise", engine="a2a"),
    "cp 4, row": Case(model=HYBRID, cp=4, cut="row"),
    "experts of two dp ranks, auto": Case(model=HYBRID, ep=4, cut="auto"),
}


@pytest.fixture(scope="module")
def single_process() -> dict[str, dict]:
    """Train both models in a single process; return the outcomes by model."""
    with one_thread():
        single = ProcessGroupCollection.single()
        return {
            name: train_case(Case(model=model, cp=1), single)
            for name, model in (("dense", DENSE), ("hybrid", HYBRID))
        }


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(2, CASES_OF_2_RANKS, id="two"),
        pytest.param(4, CASES_OF_4_RANKS, id="four"),
        pytest.param(2, ROW_CASES, id="two by row", marks=pytest.mark.slow),
        pytest.param(4, SLOW_CASES, id="four more", marks=pytest.mark.slow),
    ],
)
@pytest.mark.covers("matches a single process")
def test_packed_losses_and_gradients_match_a_single_process(single_process, world, cases):
    ranks = run_ranks(train_cases, world, list(cases.values()))
    for number, (name, case) in enumerate(cases.items()):
        outcomes = [outcome[number] for outcome in ranks]
        expected = single_process["hybrid" if case.model is HYBRID else "dense"]
        _check_numbers(name, case, outcomes, expected)
        for outcome in outcomes:
            _check_sharding(name, case, outcome)


def assemble_gradients(model: GPTConfig, shards: dict) -> dict[str, torch.Tensor]:
    """Return the gradients of whole weights."""
    gradients = {
        name: torch.full(shape, torch.nan) for name, shape in logical_weights(model).items()
    }
    for (name, offsets), values in shards.items():
        slices = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        gradients[name][slices] = values
    return gradients


def _check_numbers(name: str, case: Case, outcomes: list[dict], expected: dict) -> None:
    """Compare losses, gradients and router token counts with a single process."""
    gradients, compared = assemble_gradients(case.model, expected["shards"]), set()
    for outcome in outcomes:
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=1e-6), name
        for (weight, offsets), values in outcome["shards"].items():
            assert_piece_close(f"{name}: {weight}", values, gradients[weight], offsets)
            compared.add(weight)
    assert compared == gradients.keys(), name
    counted = [
        sum(counts)
        for counts in zip(
            *(outcome["counted"] for outcome in outcomes if outcome["counted"]), strict=True
        )
    ]
    for count, reference in zip(counted, expected["counted"], strict=True):
        assert_close_by_metric(f"{name}: counted", count, reference, bound=1e-6)


def _check_sharding(name: str, case: Case, outcome: dict) -> None:
    """Check the requested sharding, and one exchange for all documents of a microbatch."""
    if case.cut == "auto" and case.ep == 1:
        assert outcome["by_documents"] == [False, True], (
            "the first microbatch is balanced enough by row"
        )
        return
    if case.ep > 1:  # one microbatch of each data-parallel rank, padded to the same length
        assert outcome["tokens"] == [(1, 30)], name
        return
    by_documents = case.cut == "documents"
    assert outcome["by_documents"] == [by_documents] * 2, name
    for shape in outcome["tokens"]:
        assert (shape[0] == 1) == by_documents
        assert (shape[1] * case.cp > SEQUENCE * MICRO) == by_documents, "padded"
    mixers = case.model.pattern + case.model.mtp_blocks
    if case.pp > 1 or case.engine != "p2p" or not case.model.pattern:
        return  # otherwise attention or the stages exchange tensors as well
    kinds = dict.fromkeys(("all_to_all", "all_gather"), 0)
    recurrent = sum(symbol in "GM" for symbol in mixers) * 2  # two microbatches
    if case.mode == "headwise":
        kinds["all_to_all"] += 4 * recurrent  # heads and back to tokens, in forward and backward
    else:  # a halo and a summary, and their gradients
        kinds["all_to_all"] += 2 * recurrent
        kinds["all_gather"] += 2 * recurrent
    assert {kind: outcome["kinds"][kind] for kind in kinds} == kinds, name
