# SPDX-License-Identifier: Apache-2.0
"""The command on models with experts and latent attention against a full forward of each text."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.dist_checkpointing import (
    Coordinator,
    TensorChunk,
    read_manifest,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.moe.router import Router
from megatron.core.transformer import AttentionConfig, LatentAttentionConfig, MLPConfig
from megatron.inference import rank_context
from megatron.inference.generate import main
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import generator, one_thread
from tests.support.launchers import serve_store
from tests.support.ranks import run_ranks, start_ranks

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
    mtp_num_layers=2,
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
PROMPTS = ("Once", "", "two words é", "ab")
NUM_NEW = 9


def fill_chunk(chunk: TensorChunk) -> None:
    """Fill a chunk with its slice of a random logical tensor, on any rank grid."""
    noise = torch.randn(chunk.shape, generator=generator(7, *chunk.name.encode()))
    values = 1.0 + 0.2 * noise if "norm" in chunk.name else 0.4 * noise
    extents = zip(chunk.offsets, chunk.tensor.shape, strict=True)
    chunk.tensor.copy_(values[tuple(slice(offset, offset + size) for offset, size in extents)])


def save(root: str, name: str, groups: ProcessGroupCollection, coordinator: Coordinator) -> None:
    """Save a model as training on these ranks does, including MTP layers."""
    model = GPTModel(MODELS[name], groups)
    chunks = weight_chunks(model.store)
    for chunk in chunks:
        fill_chunk(chunk)
    tokenizer = {"type": "byte", "model": None, "vocab_size": 257, "fingerprint": "byte-257"}
    extra = {
        "model": json.loads(json.dumps(MODELS[name].to_json())),
        "config": {"bf16": False, "max-position-embeddings": 40},
        "tokenizer": tokenizer,
    }
    save_checkpoint(root, 7, chunks, extra, coordinator=coordinator)


def save_on_rank(rank: int, world: int, root: str, name: str) -> None:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, ep=world), rank=rank)
    save(root, name, groups, Coordinator.from_groups(groups, timeout_seconds=20.0))


def arguments(load: Path, output: Path, *extra: str) -> list[str]:
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    flags = ["--max-new-tokens", str(NUM_NEW), "--temperature", "0", "--device", "cpu", *extra]
    return [*prompts, "--load", str(load), "--output-json", str(output), *flags]


def run(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run the command in this process; return its exit code and stderr."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(words, environment)
    return code, err.getvalue()


def read_outputs(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))


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

    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setattr(rank_context, "GPTModel", RecordedModel)
        code, err = run(arguments(folder, path), {})
    assert code == 0, err
    (model,) = built
    return SingleProcessRun(MODELS[request.param], folder, model, read_outputs(path))


@pytest.mark.covers("generation")
def test_greedy_tokens_are_the_argmax_of_a_full_forward(single_process: SingleProcessRun) -> None:
    config = single_process.config
    # Run each prompt alone, without a cache, in a model without expert capacity.
    model = GPTModel(
        replace(config, moe=replace(config.moe, capacity_factor=None), mtp_num_layers=0),
        ProcessGroupCollection.single(),
    )
    for chunk in weight_chunks(model.store):
        fill_chunk(chunk)
    distinct = set()
    for output in single_process.outputs:
        tokens = output["prompt_ids"] + output["ids"]
        with torch.no_grad(), one_thread():
            logits = model.full_logits(torch.tensor([tokens])).squeeze(1)
        logits = logits[len(output["prompt_ids"]) - 1 : -1]
        assert logits.argmax(-1).tolist() == output["ids"]
        expected = logits.log_softmax(-1).amax(-1)
        assert_close_by_metric(output["prompt"], torch.tensor(output["logprobs"]), expected)
        distinct |= set(output["ids"])
    assert len(distinct) > 8


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


def command_on_rank(
    rank: int, world: int, words: list[str], launcher: dict[str, str]
) -> tuple[int, str]:
    torch.set_num_threads(1)
    return run(words, {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)})


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
    _store, launcher = serve_store(2)
    flags = (*layout, "--inference-max-requests", "3")
    words = arguments(single_process.folder, tmp_path / "two.json", *flags)
    with start_ranks(command_on_rank, 2, words, launcher, init=False) as ranks:
        outcomes = ranks.values(timeout=60.0)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    for a, b in zip(read_outputs(tmp_path / "two.json"), single_process.outputs, strict=True):
        assert a["ids"] == b["ids"]
        actual, expected = (torch.tensor(r["logprobs"]) for r in (a, b))
        assert_close_by_metric(a["prompt"], actual, expected)
