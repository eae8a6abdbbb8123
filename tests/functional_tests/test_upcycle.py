# SPDX-License-Identifier: Apache-2.0
"""Upcycling of a dense checkpoint: equal logits, and training continues."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.dist_checkpointing import (
    CheckpointReader,
    Solo,
    TensorChunk,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
    weight_chunks,
)
from megatron.core.dist_checkpointing.safetensors_file import DTYPES
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.models.gpt import logical_weights
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig
from megatron.core.weight_gather import Storage
from megatron.training.checkpointing.state import FORMAT
from megatron.training.upcycle import main as upcycle
from tests.functional_tests.small_run import flags, losses, run_on, write_tokens
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.unit_tests.core.models.chunk_steps import move

CONFIG = GPTConfig(
    num_layers=3,
    hidden_size=24,
    vocab_size=37,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=20),
    init_std=0.2,
    mtp=MTPConfig(num_layers=1),
)
PLAIN = dataclasses.replace(
    CONFIG,
    attention=dataclasses.replace(CONFIG.attention, qkv_bias=True, output_bias=True),
    mlp=MLPConfig(ffn_hidden_size=20, gated=False, activation="gelu"),
    norm=NormConfig(kind="LayerNorm"),
    tied=True,
    mtp=None,
)
CLAMPED = dataclasses.replace(
    CONFIG,
    mlp=MLPConfig(ffn_hidden_size=20, activation="quick_gelu", clamp=0.3, linear_offset=1.0),
)
SINGLE = ProcessGroupCollection.single()


def saved(folder: Path, config: GPTConfig, **kwargs: object) -> GPTModel:
    """Write a checkpoint of a model with changed weights and return the model."""
    model = move(GPTModel(config, SINGLE, seed=5, **kwargs))
    extra = {"format": FORMAT, "model": config.to_json(), "config": {"seq-length": 9}}
    save_checkpoint(folder, 7, weight_chunks(model.store), extra, coordinator=Solo())
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint."""
    with CheckpointReader(folder) as reader:
        tensors = {
            name: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
            for name, tensor in reader.manifest.tensors.items()
        }
        reader.read(
            [
                TensorChunk(
                    name=name,
                    shape=tuple(tensor.shape),
                    offsets=(0,) * tensor.dim(),
                    tensor=tensor,
                    replica_ranks=(0,),
                )
                for name, tensor in tensors.items()
            ]
        )
    return tensors


def loaded(folder: Path, **kwargs: object) -> GPTModel:
    """Return the model that the checkpoint in `folder` describes."""
    (folder_of_step,) = folder.glob("iter_*")
    with CheckpointReader(folder_of_step) as reader:
        config = GPTConfig.from_json(reader.manifest.extra["model"])
    model = GPTModel(config, SINGLE, storage=Storage(initialize=False), **kwargs)
    load_checkpoint(folder_of_step, weight_chunks(model.store), coordinator=Solo())
    return model


@pytest.mark.parametrize(
    ("config", "options", "pattern"),
    [
        (CONFIG, "", "EEE"),
        (CONFIG, "--moe-layer-freq [0]*1+[1]*2 --moe-router-topk 3", "-EE"),
        (PLAIN, "--moe-layer-freq 2 --moe-router-score-function sigmoid", "E-E"),
        (CLAMPED, "--moe-layer-freq 1,0,0", "E--"),
    ],
)
def test_upcycled_logits_match_the_dense_model(tmp_path, config, options, pattern):
    dense, out = tmp_path / "dense", tmp_path / "experts"
    before = saved(dense, config)
    argv = f"--load {dense} --save {out} --num-experts 5 --seed 11 {options}"
    assert upcycle(argv.split(), {}) == 0
    after = loaded(out)
    assert after.config.ffn_pattern == pattern
    verify_checkpoint(out / "iter_0000000")
    tokens = torch.randint(0, 37, (2, 9), generator=generator(4))
    with torch.no_grad():
        assert_close_by_metric("logits", after.full_logits(tokens), before.full_logits(tokens))
    # The router sends tokens to several experts.
    fresh = GPTModel(after.config, SINGLE, seed=11)
    expert_block = 2 * pattern.index("E") + 1
    router = f"decoder.blocks.{expert_block}.moe.router.weight"
    assert torch.equal(after.store.handles[router].get(), fresh.store.handles[router].get())
    with torch.no_grad():
        picked = torch.randn(64, 24, generator=generator(6)) @ after.store.handles[router].get().T
    assert len(picked.argmax(-1).unique()) > 2
    if config.mtp_num_layers:  # an MTP layer is like the last layer
        kind = "moe.experts.down" if pattern.endswith("E") else "mlp.down"
        assert f"mtp.0.decoder.blocks.1.{kind}.weight" in logical_weights(after.config)


def test_every_expert_is_a_bitwise_copy_of_the_mlp(tmp_path):
    dense, out = tmp_path / "dense", tmp_path / "experts"
    saved(dense, CONFIG, dtype=torch.bfloat16)
    argv = f"--load {dense} --save {out} --num-experts 3 --moe-layer-freq 0,0,1"
    assert upcycle(argv.split(), {}) == 0
    weights, tensors = stored(dense / "iter_0000007"), stored(out / "iter_0000000")
    copied = [name for name in tensors if ".moe.experts." in name]
    assert len(copied) == 6  # of the last layer and the MTP layer
    for name, tensor in tensors.items():
        assert tensor.dtype is torch.bfloat16
        if name in copied:
            mlp = weights[name.replace(".moe.experts.", ".mlp.")]
            assert tensor.shape == (3, *mlp.shape)
            assert all(torch.equal(expert, mlp) for expert in tensor)
        elif "router" not in name:
            assert torch.equal(tensor, weights[name]), name


def test_unsuitable_checkpoints_are_refused_in_one_line(tmp_path, capsys):
    biased = dataclasses.replace(CONFIG, mlp=MLPConfig(ffn_hidden_size=20, bias=True))
    saved(tmp_path / "biased", biased)
    saved(tmp_path / "dense", CONFIG)
    out = f"--save {tmp_path / 'out'} --num-experts 4"
    assert upcycle(f"--load {tmp_path / 'dense'} {out}".split(), {}) == 0
    (tmp_path / "run" / "iter_0000003").mkdir(parents=True)
    run = f"--save {tmp_path / 'run'} --num-experts 4"
    cases = {
        f"--load {tmp_path / 'dense'} {run}": "already contains iter_0000003: name another folder",
        f"--load {tmp_path / 'biased'} {out}2": "its MLPs have biases, which are not copied",
        f"--load {tmp_path / 'dense'} {out}": "already contains iter_0000000: name another folder",
        f"--load {tmp_path / 'out'} {out}2": "has experts already: name a dense model",
        f"--load {tmp_path / 'none'} {out}2": "there is no checkpoint: name another folder",
        f"--load {tmp_path / 'dense'} {out}2 --moe-layer-freq 0,0,0": "no layer gets experts",
        f"--load {tmp_path / 'dense'} {out}2 --moe-layer-freq 0,1": "has 2 layers",
        f"--load {tmp_path / 'dense'} {out}2 --moe-router-topk 1": "use 2 … 4",
        f"--load {tmp_path / 'dense'} {out}2 --moe-router-topk 5": "use 2 … 4",
    }
    capsys.readouterr()
    for argv, message in cases.items():
        argv = argv.replace(f"{out}2", f"--save {tmp_path / 'other'} --num-experts 4")
        assert upcycle(argv.split(), {}) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    assert not (tmp_path / "other").exists()


def peak_growth(rank: int, world: int, dense: str, out: str) -> int:
    """Return by how many bytes upcycling raises the peak memory of this process."""
    saved_before = upcycle(f"--load {dense}/small --save {out}/small --num-experts 2".split(), {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = upcycle(f"--load {dense}/large --save {out}/large --num-experts 8".split(), {})
    assert (saved_before, code) == (0, 0)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_memory_does_not_grow_with_the_model(tmp_path):
    large = dataclasses.replace(
        CONFIG,
        num_layers=1,
        ffn_pattern="",
        vocab_size=50_000,  # the largest tensor belongs to no expert
        tied=True,
        hidden_size=768,
        mlp=MLPConfig(ffn_hidden_size=2048),
        mtp=None,
    )
    for name, config in (("small", CONFIG), ("large", large)):
        saved(tmp_path / name, config)
    (peak_bytes,) = run_ranks(peak_growth, 1, str(tmp_path), str(tmp_path / "out"))
    with CheckpointReader(tmp_path / "out" / "large" / "iter_0000000") as reader:
        size = sum(file.bytes for file in reader.manifest.files.values())
    assert size > 300_000_000
    # Chunks have 16 MiB; the memory that the allocator retains differs between machines.
    largest_tensor = 50_000 * 768 * 4
    assert peak_bytes < largest_tensor, peak_bytes


@pytest.mark.covers("upcycling")
def test_training_continues_from_the_dense_validation_loss(tmp_path, capsys):
    prefix = write_tokens(tmp_path / "tokens")
    dense, out, continued = tmp_path / "dense", tmp_path / "experts", tmp_path / "more"
    common = "--train-iters 4 --eval-interval 4 --hidden-dropout 0 --attention-dropout 0"
    run_on(1, flags(prefix, f"{common} --save {dense}"))
    argv = f"--load {dense} --save {out} --num-experts 4 --moe-layer-freq 0,1"
    assert upcycle(argv.split(), {}) == 0
    experts = "--use-checkpoint-args --moe-aux-loss-coeff 0.01"
    run_on(1, flags(prefix, f"{common} --load {out} --save {continued} {experts}"))
    assert "loaded the weights of" in capsys.readouterr().out
    dense_validation = losses(dense / "metrics.jsonl", "validation")
    actual = losses(continued / "metrics.jsonl", "validation")
    assert actual[0] == pytest.approx(dense_validation[4], rel=1e-5)
    assert actual[4] < actual[0] < dense_validation[0]
