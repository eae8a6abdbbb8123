# SPDX-License-Identifier: Apache-2.0
"""Hybrid models through real files: logits and every gradient, identity of import and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.dist_checkpointing import read_extra
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTModel
from megatron.hf.architectures import ARCHITECTURES
from megatron.hf.tensor_map import tensor_map
from tests.support.closeness import assert_all_close
from tests.support.hf_converter import (
    checkpoint_model,
    checkpoint_weights,
    convert,
    imported,
    tensors,
)
from tests.support.hf_folders import (
    HYBRID_CASES,
    VOCABULARY,
    change_json,
    load_folder,
    make_model,
    save_folder,
)
from tests.support.inputs import generator, one_thread

#: More than a chunk of the delta rule, and no multiple of one.
LENGTH = 77
TOKENS = torch.randint(VOCABULARY, (2, LENGTH), generator=generator(14))
LABELS = torch.randint(VOCABULARY, (2, LENGTH), generator=generator(15))
WEIGHTS = 0.5 + torch.rand(2, LENGTH, generator=generator(16))

#: What the blocks of each case are: nothing of them may be missing from what is compared.
BLOCKS = {
    "qwen3next": "GE*E",
    "qwen3next-mixed-biases": "*EG-GE",
    "mamba2": "MM",
    "mamba2-tied-biases": "MM",
    "nemotronh": "ME*M-",
    "nemotronh-groups": "EM*",
    "nemotronh-dense": "M-*-",
}


def their_numbers(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return transformers' logits, and the gradients of a weighted loss, by its own names."""
    logits = model(TOKENS, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), LABELS.flatten(), reduction="none"
    )
    (losses * WEIGHTS.flatten()).sum().backward()
    named = dict(model.named_parameters())
    named |= {"lm_head.weight": model.lm_head.weight}
    return logits.detach(), {n: p.grad for n, p in named.items() if p.grad is not None}


def our_numbers(model: GPTModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the same of our model, by our names."""
    engine = DataParallel(model.store, model.groups)
    engine.begin_step()
    loss, _ = model.loss(TOKENS, LABELS, WEIGHTS)
    engine.backward(loss, last=True)
    engine.finish()
    found: dict[str, torch.Tensor] = {}
    for handle in model.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in model.store.boxes(handle):
            piece = flat[box.start : box.start + box.numel].view(box.sizes)
            whole = found.setdefault(box.name, torch.full(box.shape, torch.nan))
            whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = (
                piece
            )
    with torch.no_grad():
        return model.full_logits(TOKENS).transpose(0, 1), found


@pytest.mark.parametrize("case", HYBRID_CASES)
def test_logits_and_every_gradient_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = make_model(case)
    source = save_folder(theirs, tmp_path / "source")
    ours = checkpoint_model(imported(source, tmp_path / "checkpoints"))
    assert ours.config.blocks == BLOCKS[case]
    with one_thread():
        logits, gradients = their_numbers(theirs)
        got, found = our_numbers(ours)
    assert logits.std() > 1  # else an absolute bound would say little
    mapped = tensor_map(ARCHITECTURES[theirs.config.model_type], ours.config, names=gradients)
    expected = {}
    for name, tensor in mapped.mcore_tensors.items():
        if name in ours.store.states:
            continue
        expected[name] = torch.full(tensor.shape, torch.nan)
        for part in tensor.slices:
            box = part.mcore_box(part.whole)
            piece = gradients[part.hf_name][part.hf_box(part.whole).slices]
            expected[name][box.slices] = piece.view(box.sizes)
    assert all(float(gradient.abs().max()) > 0 for gradient in expected.values())
    got, expected = {"logits": got, **found}, {"logits": logits, **expected}
    biases = {name for name in expected if name.endswith("bias")}
    assert_all_close(*({n: d[n] for n in d if n not in biases} for d in (got, expected)))
    # Sums over all tokens that nearly vanish; those of transformers are as far from fp64.
    assert_all_close(*({n: d[n] for n in d if n in biases} for d in (got, expected)), bound=3e-5)


@pytest.mark.parametrize("case", HYBRID_CASES)
def test_import_then_export_is_the_identity(case: str, tmp_path: Path) -> None:
    theirs = make_model(case)
    if case.endswith("next") or case == "nemotronh":
        theirs = theirs.to(torch.bfloat16)  # decay rates and their like keep the dtype they have
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    source = save_folder(theirs, tmp_path / "source")
    imported(source, tmp_path / "checkpoints")
    words = ["export", "--load", tmp_path / "checkpoints", "--save"]
    convert(*words, tmp_path / "again", "--max-shard-size", "9KB")
    before, after = tensors(source), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    for name in ("config.json", "generation_config.json"):
        texts = [(folder / name).read_text() for folder in (source, tmp_path / "again")]
        assert json.loads(texts[0]) == json.loads(texts[1])
    # And without the config.json that it came with, transformers computes the same.
    (tmp_path / "checkpoints" / "hugging_face" / "config.json").unlink()
    convert(*words, tmp_path / "anew")
    loaded = load_folder(tmp_path / "anew")
    assert type(loaded) is type(theirs)
    with one_thread(), torch.no_grad():
        expected = load_folder(source)(TOKENS, use_cache=False).logits
        assert torch.equal(loaded(TOKENS, use_cache=False).logits, expected)


@pytest.mark.parametrize("case", ["qwen3next", "nemotronh"])
def test_names_of_models_in_memory_and_parts_that_have_no_place(case: str, tmp_path: Path) -> None:
    model = make_model(case)
    hub = save_folder(model, tmp_path / "hub")
    memory = save_folder(model, tmp_path / "memory", save_original_format=False)
    names = tensors(memory).keys()
    assert names != tensors(hub).keys()
    assert any(name.endswith(".experts.down_proj") for name in names)
    assert case != "nemotronh" or "model.embeddings.weight" in names
    further = {"mtp.layers.0.norm.weight": torch.ones(48), "mtp.fc.weight": torch.ones(4, 4)}
    save_file({**tensors(hub), **further}, hub / "model.safetensors")
    said = convert("import", "--hf", hub, "--save", tmp_path / "a")
    assert "skipped 2 tensors under mtp." in said
    before, after = (
        checkpoint_weights(tmp_path / "a/iter_0000000"),
        checkpoint_weights(imported(memory, tmp_path / "b")),
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.slow
def test_decay_rates_and_their_like_do_not_follow_a_dtype(tmp_path: Path) -> None:
    source = save_folder(make_model("nemotronh"), tmp_path / "source")
    convert("import", "--hf", source, "--save", tmp_path / "a", "--dtype", "bfloat16", "--verify")
    assert read_extra(tmp_path / "a/iter_0000000")["config"]["bf16"]
    convert("export", "--load", tmp_path / "a", "--save", tmp_path / "out", "--dtype", "float16")
    before, after = tensors(source), tensors(tmp_path / "out")
    wide = {name for name, tensor in after.items() if tensor.dtype == torch.float32}
    endings = ("A_log", "dt_bias", ".D", "e_score_correction_bias")
    assert wide == {name for name in before if name.endswith(endings)}
    assert wide
    assert all(torch.equal(before[name], after[name]) for name in wide)


def test_time_step_limit_is_used_not_transformers_time_step_min(
    tmp_path: Path,
) -> None:
    """Transformers up to 5.23 bounds the steps of Nemotron-H by time_step_min, and has no upper
    bound; the weights were trained with those of time_step_limit."""
    theirs = make_model("nemotronh-dense", time_step_min=0.9)
    source = save_folder(theirs, tmp_path / "source")
    model = checkpoint_model(imported(source, tmp_path / "a"))
    assert model.config.mamba.dt_limit[0] == 0.0
    change_json(source / "config.json", time_step_limit=[0.9, {"__float__": "Infinity"}])
    bounded = checkpoint_model(imported(source, tmp_path / "b"))
    with one_thread(), torch.no_grad():
        expected = theirs(TOKENS, use_cache=False).logits
        free, same = (m.full_logits(TOKENS).transpose(0, 1) for m in (model, bounded))
    assert float((same - expected).abs().max()) < 1e-4
    assert float((free - expected).abs().max()) > 1e-2
    # What `--verify` compares with is transformers with the published limit.
    convert("export", "--load", tmp_path / "a", "--save", tmp_path / "out", "--verify")
