# SPDX-License-Identifier: Apache-2.0
"""Folders of models with experts: layouts on disk, slices of ranks, multi-token prediction."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.core import RankGrid
from megatron.core.context_parallel import SequenceLayout
from megatron.core.dist_checkpointing import (
    load_checkpoint,
    read_manifest,
)
from megatron.core.transformer import RotaryEmbedding
from megatron.hf import open_folder
from tests.support.closeness import assert_all_equal, assert_close_by_metric
from tests.support.hf_converter import (
    checkpoint_model,
    checkpoint_weights,
    convert,
    folder_with_further_layers,
    imported,
    read_by_a_rank,
    tensors,
)
from tests.support.hf_folders import (
    VOCABULARY,
    load_folder,
    make_model,
    save_folder,
)
from tests.support.inputs import generator, one_thread
from tests.support.ranks import run_ranks

TOKENS = torch.randint(VOCABULARY, (2, 19), generator=generator(6))

#: One case of each architecture.
KINDS = ("mixtral", "qwen2moe", "qwen3moe-mixed-biases", "deepseek")


@pytest.mark.parametrize("case", KINDS)
def test_fused_expert_tensors_are_read(case: str, tmp_path: Path) -> None:
    model = make_model(case)
    single = save_folder(model, tmp_path / "single")
    fused = save_folder(model, tmp_path / "fused", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors(fused))
    assert not any(name.endswith("experts.gate_up_proj") for name in tensors(single))
    before = checkpoint_weights(imported(single, tmp_path / "a"))
    after = checkpoint_weights(imported(fused, tmp_path / "b"))
    assert_all_equal(after, before)


def read_rank(rank: int, world: int, path: Path, checkpoint: Path) -> dict[str, Any]:
    """Read the slices of one of four ranks from a folder and from the imported checkpoint."""
    grid = RankGrid(world_size=world, tp=2, ep=2)  # experts are sharded over the tensor ranks too
    model, chunks, count = read_by_a_rank(rank, path, grid)
    read = [chunk.tensor.clone() for chunk in chunks]
    for chunk in chunks:
        chunk.tensor.fill_(torch.nan)
    load_checkpoint(checkpoint, chunks)
    assert all(torch.equal(a, chunk.tensor) for a, chunk in zip(read, chunks, strict=True))
    with torch.no_grad():
        logits = model.full_logits(TOKENS)
    size = sum(tensor.numel() * tensor.itemsize for tensor in read)
    experts = sum(c.tensor.numel() for c in chunks if ".experts." in c.name)
    return {"bytes": count, "held": size, "experts": experts, "logits": logits}


@pytest.mark.parametrize("case", ["mixtral-tied-3of8", "qwen3moe-yarn", "deepseek-even"])
def test_four_ranks_read_only_their_experts(case: str, tmp_path: Path) -> None:
    hf_model = make_model(case)
    folder = save_folder(hf_model, tmp_path / "model", max_shard_size="40KB")
    checkpoint = imported(folder, tmp_path / "a")
    ranks = run_ranks(read_rank, 4, folder, checkpoint)
    experts = sum(
        t.numel() for name, t in checkpoint_weights(checkpoint).items() if ".experts." in name
    )
    headers = 0
    with open_folder(folder).open_tensors() as opened:
        headers = opened.bytes_read
    with one_thread(), torch.no_grad():
        expected = hf_model(TOKENS, use_cache=False).logits.transpose(0, 1)
    for rank in ranks:
        assert 4 * rank["experts"] == experts
        assert rank["bytes"] == rank["held"] + headers  # no extra tensor, and no tensor twice
        assert_close_by_metric("logits", rank["logits"], expected)


@pytest.mark.parametrize("tied", [False, True])
def test_mtp_layers_survive_export_and_main_model_loads(tied: bool, tmp_path: Path) -> None:
    folder = folder_with_further_layers(tmp_path, tied=tied)
    exported = tensors(folder)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    for layer in ("model.layers.3", "model.layers.4"):
        embedding = exported[f"{layer}.embed_tokens.weight"]
        assert torch.equal(embedding, exported["model.embed_tokens.weight"])
        assert torch.equal(exported[f"{layer}.shared_head.head.weight"], exported[head])
    reimported = imported(folder, tmp_path / "again")
    before, after = (
        checkpoint_weights(tmp_path / "checkpoint/iter_0000000"),
        checkpoint_weights(reimported),
    )
    assert sum(name.startswith("mtp.1.") for name in before) > 10
    assert_all_equal(after, before)
    with one_thread(), torch.no_grad():
        expected = load_folder(folder)(TOKENS, use_cache=False).logits
        logits = checkpoint_model(reimported).full_logits(TOKENS).transpose(0, 1)
    assert_close_by_metric("logits", logits, expected)


def test_mtp_layers_match_transformers(tmp_path: Path) -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if "MtpModel" not in vars(layers):
        pytest.skip("this transformers has no multi-token prediction")
    folder = folder_with_further_layers(tmp_path)
    hf_model = load_folder(folder)
    hf_model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\."]
    with contextlib.redirect_stderr(io.StringIO()):
        hf_mtp = layers.MtpModel.from_pretrained(hf_model).eval()
    hf_mtp.config._attn_implementation = hf_mtp.config._experts_implementation = "eager"
    model = checkpoint_model(tmp_path / "checkpoint/iter_0000000")
    mtp_tokens = torch.randint(VOCABULARY, (2, *TOKENS.shape), generator=generator(9))
    layout = SequenceLayout.of_rows(TOKENS.shape[1])
    rope = RotaryEmbedding(model.config.rope, model.config.attention.rope_features)(
        layout.positions
    )
    with one_thread(), torch.no_grad():
        expected = hf_model.model(TOKENS, use_cache=False).last_hidden_state
        hidden = model(TOKENS)
        cache = pytest.importorskip("transformers.cache_utils").MtpCache(config=hf_mtp.config)
        positions = torch.arange(TOKENS.shape[1])[None]
        for depth, (module, tokens) in enumerate(
            zip(model.multi_token.layers, mtp_tokens, strict=True)
        ):
            expected = hf_mtp.forward_layer(
                depth, expected, positions + depth + 1, cache, input_ids=tokens
            )
            hidden = module(hidden, tokens, layout, rope=rope, aux_factor=None)
            assert_close_by_metric(f"depth {depth}", hidden.transpose(0, 1), expected)


def rewrite_folder(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a folder with a single file."""
    weights = tensors(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_differing_copy_is_refused_and_absent_copy_accepted(tmp_path: Path) -> None:
    folder = folder_with_further_layers(tmp_path)
    name = "model.layers.4.embed_tokens.weight"
    rewrite_folder(folder, lambda weights: weights.pop(name))
    expected = checkpoint_weights(imported(folder, tmp_path / "a"))
    assert torch.equal(expected["embedding.weight"], tensors(folder)["model.embed_tokens.weight"])
    rewrite_folder(
        folder, lambda weights: weights["model.layers.3.shared_head.head.weight"][5, 3].add_(1)
    )
    text = convert("import", "--hf", folder, "--save", tmp_path / "b", code=2)
    assert "model.layers.3.shared_head.head.weight differs from lm_head.weight" in text
    assert text.count("\n") == 1


def test_import_does_not_touch_existing_checkpoints(tmp_path: Path) -> None:
    folder = save_folder(make_model("mixtral"), tmp_path / "model")
    (tmp_path / "run" / "iter_0000003").mkdir(parents=True)
    text = convert("import", "--hf", folder, "--save", tmp_path / "run", code=2)
    assert "already contains iter_0000003: name another folder" in text
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["iter_0000003"]


def test_tensors_that_contradict_config_json_are_named(tmp_path: Path) -> None:
    folder = save_folder(make_model("deepseek"), tmp_path / "model")
    missing = "model.layers.1.mlp.experts.4.up_proj.weight"

    def damage(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.experts.9.up_proj.weight"] = weights.pop(missing)
        weights["model.layers.2.mlp.gate.weight"] = torch.zeros(8, 48)

    rewrite_folder(folder, damage)
    text = convert("import", "--hf", folder, "--save", tmp_path / "a", code=2)
    assert f"{missing} is missing" in text
    assert "model.layers.2.mlp.gate.weight is [8, 48], config.json requires [9, 48]" in text
    assert "model.layers.1.mlp.experts.9.up_proj.weight does not belong to the model" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_expert_biases_stay_in_fp32(dtype: str, tmp_path: Path) -> None:
    model = make_model("deepseek").to(getattr(torch, dtype))
    bias = "mlp.gate.e_score_correction_bias"
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias.float()
        layer.mlp.gate.e_score_correction_bias.add_(1e-5)
    folder = save_folder(model, tmp_path / "model")
    convert("import", "--hf", folder, "--save", tmp_path / "a", "--dtype", dtype)
    checkpoint = tmp_path / "a/iter_0000000"
    stored = {name: t.dtype for name, t in read_manifest(checkpoint).tensors.items()}
    assert {t for name, t in stored.items() if name.endswith("expert_bias")} == {"F32"}
    assert set(stored.values()) == {"F32", "BF16" if dtype == "bfloat16" else "F16"}
    words = ["--load", tmp_path / "a", "--save", tmp_path / "out", "--dtype", dtype]
    assert "verified" in convert("export", *words, "--verify")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert after[f"model.layers.2.{bias}"].dtype == torch.float32
    assert_all_equal(after, before)
