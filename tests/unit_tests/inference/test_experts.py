# SPDX-License-Identifier: Apache-2.0
"""The command on models with experts and latent attention against a full forward of each text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.dist_checkpointing import Coordinator, read_manifest
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.moe.router import Router
from megatron.core.transformer import AttentionConfig, LatentAttentionConfig, MLPConfig
from megatron.inference import rank_context
from megatron.inference.generate import main
from tests.support.commands import run_on_ranks
from tests.support.greedy_command import (
    arguments,
    assert_argmax_of_full_forward,
    assert_same_outputs,
    fill_weights,
    outputs_of,
    read_outputs,
    save_filled,
)
from tests.support.ranks import run_ranks

ROUTER = RouterConfig(
    topk=3,
    score_function="sigmoid",
    scaling_factor=1.5,
    num_groups=3,
    group_topk=2,
    expert_bias=True,
    balance="seq_aux_loss",
    aux_loss_coeff=0.1,
    jitter=0.3,
)
EXPERTS = GPTConfig(
    num_layers=3,
    hidden_size=20,
    vocab_size=259,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=36),
    moe=MoEConfig(
        num_experts=6,
        ffn_hidden_size=14,
        router=ROUTER,
        capacity_factor=0.5,
        shared_ffn_hidden_size=10,
        shared_gate=True,
    ),
    ffn_pattern="-EE",
    hidden_dropout=0.4,
    mtp=MTPConfig(num_layers=2),
    init_std=0.4,
)
MODELS = {
    "experts": EXPERTS,
    "latent": replace(
        EXPERTS,
        num_layers=2,
        ffn_pattern="EE",
        attention=LatentAttentionConfig(
            num_attention_heads=4,
            kv_lora_rank=11,
            q_lora_rank=9,
            nope_channels=5,
            rope_channels=6,
            value_channels=7,
        ),
        moe=MoEConfig(
            num_experts=4, ffn_hidden_size=22, router=RouterConfig(topk=1, normalize=False)
        ),
    ),
}
SCALE = 0.4


def save_on_rank(rank: int, world: int, root: str, name: str) -> None:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, ep=world), rank=rank)
    coordinator = Coordinator.from_groups(groups, timeout_seconds=20.0)
    save_filled(root, GPTModel(MODELS[name], groups), SCALE, coordinator)


@dataclass(frozen=True)
class SingleProcessRun:
    """The outputs of a single process with a checkpoint written by two expert-parallel ranks."""

    config: GPTConfig
    folder: Path
    model: GPTModel
    outputs: list[dict[str, Any]]


@pytest.fixture(scope="module", params=MODELS)
def single_process(request: pytest.FixtureRequest, tmp_path_factory: Any) -> SingleProcessRun:
    folder, path = (tmp_path_factory.mktemp(request.param) / name for name in ("saved", "1.json"))
    run_ranks(save_on_rank, 2, str(folder), request.param)
    built: list[GPTModel] = []

    class RecordedModel(GPTModel):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            built.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_context, "GPTModel", RecordedModel)
        outputs = outputs_of(arguments(folder, path), path)
    (model,) = built
    return SingleProcessRun(MODELS[request.param], folder, model, outputs)


@pytest.mark.covers("generation")
def test_greedy_tokens_are_the_argmax_of_a_full_forward(single_process: SingleProcessRun) -> None:
    config = single_process.config
    # Run each prompt alone, without a cache, in a model without expert capacity.
    model = GPTModel(
        replace(config, moe=replace(config.moe, capacity_factor=None), mtp=None),
        ProcessGroupCollection.single(),
    )
    fill_weights(model, SCALE)
    assert_argmax_of_full_forward(single_process.outputs, model)


def test_mtp_layers_and_capacity_are_not_loaded(single_process: SingleProcessRun) -> None:
    stored = read_manifest(single_process.folder / "iter_0000007").tensors
    assert "mtp.0.projection.weight" in stored
    model = single_process.model
    assert not [name for name in model.store.handles if name.startswith("mtp.")]
    routers = [m for m in model.modules() if isinstance(m, Router)]
    assert len(routers) == 2
    for router in routers:
        assert router.capacity_factor is None
        assert not router.counted.any()


@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("--expert-model-parallel-size", "2"),
        ("--tensor-model-parallel-size", "2"),
        ("--pipeline-model-parallel-size", "2"),
        (
            *("--tensor-model-parallel-size", "2"),
            *("--expert-tensor-parallel-size", "1", "--expert-model-parallel-size", "2"),
        ),
    ],
    ids=("dp", "dp ep", "tp", "pp", "ep"),
)
@pytest.mark.covers("generation")
def test_two_ranks_generate_the_single_process_tokens(
    single_process: SingleProcessRun, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    flags = (*layout, "--inference-max-requests", "3")
    words = arguments(single_process.folder, tmp_path / "two.json", *flags)
    outcomes = run_on_ranks(main, words)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert_same_outputs(read_outputs(tmp_path / "two.json"), single_process.outputs)
