# SPDX-License-Identifier: Apache-2.0
"""Packed rows cut as one or by documents: losses and all gradients of one process, either way."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from megatron.core.backend import LOCAL
from megatron.core.comm import trace
from megatron.core.context_parallel.sequence_sharding import Costs
from megatron.core.datasets.batch_sizes import BatchSizes
from megatron.core.datasets.samplers import GPTBatches
from megatron.core.datasets.token_rows import SampleRows, positions_within
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTConfig, GPTModel, logical_weights
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.moe import MoEConfig, RouterConfig, routers_of
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.ssm.mixer_config import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig
from megatron.training.layouts import Layouts, PackedCuts, agreement
from megatron.training.session import take
from megatron.training.step import PipelineForwardBackward, TrainStep
from tests.support.closeness import assert_close_by_metric, assert_piece_close
from tests.support.inputs import generator, one_thread
from tests.support.ranks import run_ranks

SEQUENCE, VOCABULARY, MICRO = 24, 37, 2
CPU = torch.device("cpu")
#: Where the documents of samples begin: none of a length that divides, and one of a single token.
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
#: Every recurrence, a further prediction, and experts that are balanced by sequence.
HYBRID = dataclasses.replace(
    DENSE,
    num_layers=6,
    ffn_pattern="",
    pattern="GE*-M-",
    mtp_num_layers=1,
    mtp_pattern="G-",
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


class Rows:
    """A data set of packed samples, a function of their number."""

    def __len__(self) -> int:
        return 100

    def read(self, indices: np.ndarray) -> SampleRows:
        """Return tokens, a mask that is uneven, and documents."""
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


class Seen(Optimizer):
    """An optimizer that keeps the gradients it was given."""

    def step(self, *arguments, **more):
        """Note them and move on."""
        self.seen = [owned.gradients.clone() for owned in self.owned]
        return super().step(*arguments, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one grid, its rows cut in one way."""

    cut: str = "documents"
    model: GPTConfig = DENSE
    tp: int = 1
    cp: int = 2
    pp: int = 1
    ep: int = 1
    engine: str = "auto"
    mode: str = "auto"


def step_of(case: Case, groups: ProcessGroupCollection) -> TrainStep:
    """Return a step of plain SGD that keeps its gradients."""
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
    optimizer = Seen(engine.owned(), groups, config=OptimizerConfig(kind="sgd", clip_grad=0.0))
    optimizer.owned = engine.owned()
    run = None
    if case.pp > 1:
        run = PipelineForwardBackward(model, engine, groups=groups)
    return TrainStep(model, engine, optimizer=optimizer, groups=groups, forward_backward=run)


def trained(case: Case, groups: ProcessGroupCollection) -> dict:
    """Take a step of two microbatches and evaluate two more, of all lanes together."""
    step, cuts, lanes = step_of(case, groups), None, groups["samples"]
    if groups["cp"].size > 1:
        costs = Costs(token=0.0, pair=1.0, sub_sequence=0.0)
        agree = agreement(groups, case.model, "allgather", CPU)
        assert (agree is None) == (case.ep == 1)
        cuts = PackedCuts(case.cut, case.cp, costs=costs, multiple=case.tp, agree=agree)
    layouts = Layouts(groups["cp"], CPU, bounds=True, cuts=cuts)
    batches = GPTBatches(
        Rows(),
        micro_batch_size=MICRO,
        data_parallel_rank=lanes.rank,
        data_parallel_size=lanes.size,
        batch_sizes=BatchSizes.constant(2 * MICRO),
    )
    depths, count = case.model.mtp_num_layers, 2 // lanes.size
    made = take(batches, count, CPU, layouts=layouts, mtp_num_layers=depths)
    apart = [batch.layout.sharding.is_padded for batch in made]
    with trace(groups) as records:
        loss = step(made, lr=0.3, weight_decay=0.0).loss
    pieces = {
        (placed.name, placed.box.offsets): placed.of(seen).clone()
        for seen, owned in zip(step.optimizer.seen, step.optimizer.owned, strict=True)
        for placed in owned.boxes
    }
    evaluated = step.evaluate(take(batches, count, CPU, layouts=layouts), at_a_time=count)
    kinds = Counter(record.kind for record in records if record.group == "cp")
    counted = [router.counted for router in routers_of(step.model)]
    return {
        "losses": [loss, evaluated],
        "pieces": pieces,
        "apart": apart,
        "kinds": kinds,
        "counted": counted,
        "tokens": [batch.tokens.shape for batch in made],
    }


def on_rank(rank: int, world: int, cases: list[Case]) -> list[dict]:
    """Train every case on the ranks of its grid."""
    found = []
    for case in cases:
        grid = RankGrid(world_size=world, tp=case.tp, cp=case.cp, pp=case.pp, ep=case.ep)
        found.append(trained(case, ProcessGroupCollection.create(grid, rank=rank)))
    return found


TWO = {
    "p2p": Case(engine="p2p"),
    "all_gather": Case(engine="all_gather"),
    "a2a": Case(engine="a2a"),
    "headwise": Case(model=HYBRID, mode="headwise", engine="p2p"),
    "segments": Case(model=HYBRID, mode="segments", engine="p2p"),
    "auto": Case(cut="auto"),
}
FOUR = {
    "tp 2": Case(model=HYBRID, tp=2, mode="headwise", engine="p2p"),
    "pp 2": Case(model=HYBRID, pp=2, mode="segments"),
    "cp 4": Case(model=HYBRID, cp=4, mode="segments", engine="p2p"),
    "experts of two lanes": Case(model=HYBRID, ep=4),
}
ROWS = {
    f"{name}, row": dataclasses.replace(case, cut="row")
    for name, case in TWO.items()
    if name != "auto"
}
MORE = {
    "tp 2, segments": Case(model=HYBRID, tp=2, mode="segments"),
    "pp 2, headwise": Case(model=HYBRID, pp=2, mode="headwise", engine="p2p"),
    "cp 4, headwise": Case(model=HYBRID, cp=4, mode="headwise", engine="a2a"),
    "cp 4, row": Case(model=HYBRID, cp=4, cut="row"),
    "experts of two lanes, auto": Case(model=HYBRID, ep=4, cut="auto"),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    """Return what one process finds, of both models."""
    with one_thread():
        single = ProcessGroupCollection.single()
        return {
            name: trained(Case(model=model, cp=1), single)
            for name, model in (("dense", DENSE), ("hybrid", HYBRID))
        }


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(2, TWO, id="two"),
        pytest.param(4, FOUR, id="four"),
        pytest.param(2, ROWS, id="two by row", marks=pytest.mark.slow),
        pytest.param(4, MORE, id="four more", marks=pytest.mark.slow),
    ],
)
@pytest.mark.covers("numbers of one process", runs="ranks")
def test_losses_and_gradients_are_those_of_one_process(alone, world, cases):
    ranks = run_ranks(on_rank, world, list(cases.values()))
    for number, (name, case) in enumerate(cases.items()):
        found = [rank[number] for rank in ranks]
        wanted = alone["hybrid" if case.model is HYBRID else "dense"]
        _check_numbers(name, case, found, wanted)
        for rank in found:
            _check_ways(name, case, rank)


def assembled(model: GPTConfig, pieces: dict) -> dict[str, torch.Tensor]:
    """Return the gradients of whole weights."""
    found = {name: torch.full(shape, torch.nan) for name, shape in logical_weights(model).items()}
    for (name, offsets), values in pieces.items():
        where = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        found[name][where] = values
    return found


def _check_numbers(name: str, case: Case, found: list[dict], wanted: dict) -> None:
    """Compare losses, every gradient, and what routers have counted, with one process."""
    whole, seen = assembled(case.model, wanted["pieces"]), set()
    for rank in found:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-6), name
        for (weight, offsets), values in rank["pieces"].items():
            assert_piece_close(f"{name}: {weight}", values, whole[weight], offsets)
            seen.add(weight)
    assert seen == whole.keys(), name
    counted = [
        sum(parts) for parts in zip(*(r["counted"] for r in found if r["counted"]), strict=True)
    ]
    for got, reference in zip(counted, wanted["counted"], strict=True):
        assert_close_by_metric(f"{name}: counted", got, reference, bound=1e-6)


def _check_ways(name: str, case: Case, rank: dict) -> None:
    """Expect the cut that was asked for, and one exchange for all documents of a microbatch."""
    if case.cut == "auto" and case.ep == 1:
        assert rank["apart"] == [False, True], "the documents of one are even enough by row"
        return
    if case.ep > 1:  # one microbatch of each lane, of as many tokens as the other's
        assert rank["tokens"] == [(1, 30)], name
        return
    apart = case.cut == "documents"
    assert rank["apart"] == [apart] * 2, name
    for shape in rank["tokens"]:
        assert (shape[0] == 1) == apart
        assert (shape[1] * case.cp > SEQUENCE * MICRO) == apart, "padded"
    mixers = case.model.pattern + case.model.mtp_pattern
    if case.pp > 1 or case.engine != "p2p" or not mixers:
        return  # or attention has such exchanges, too
    kinds = dict.fromkeys(("all_to_all", "all_gather"), 0)
    recurrent = sum(symbol in "GM" for symbol in mixers) * 2  # of both microbatches
    if case.mode == "headwise":
        kinds["all_to_all"] += 4 * recurrent  # there and back, in forward and backward
    else:  # a halo and a summary, and their gradients
        kinds["all_to_all"] += 2 * recurrent
        kinds["all_gather"] += 2 * recurrent
    assert {kind: rank["kinds"][kind] for kind in kinds} == kinds, name
