# SPDX-License-Identifier: Apache-2.0
"""Models in real files: logits, and import followed by export as the identity."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.cli.errors import ExitCode
from megatron.cli.schema import build
from megatron.core.dist_checkpointing import read_extra
from megatron.hf import compare_logits
from megatron.hf import convert as converter
from megatron.hf.config_json import function_of, read_model, write_config
from megatron.training.checkpointing.hf_import import folder_options
from megatron.training.config import Config
from megatron.training.config.check import check
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from tests.support.closeness import assert_all_equal
from tests.support.hf_converter import checkpoint_model, convert, imported, tensors
from tests.support.hf_folders import (
    ALL_CASES,
    CASES,
    HYBRID_CASES,
    KIMI_YARN,
    LENGTH,
    VOCABULARY,
    change_json,
    load_folder,
    make_model,
    save_folder,
)
from tests.support.inputs import generator, one_thread

TOKENS = torch.randint(VOCABULARY, (2, 50), generator=generator(4))


def checkpoint_logits(checkpoint: Path) -> torch.Tensor:
    """Return the logits [b, s, v] of a checkpoint."""
    with torch.no_grad():
        return checkpoint_model(checkpoint).full_logits(TOKENS).transpose(0, 1)


#: The class exported without the source folder, for models that two architectures describe.
EQUIVALENT_CLASS = {
    "mistral": "LlamaForCausalLM",
    "seedoss": "Qwen2ForCausalLM",
    "solar_open": "Glm4MoeForCausalLM",
    "youtu": "DeepseekV3ForCausalLM",
    "qwen3_5": "Qwen3NextForCausalLM",
    "qwen3_5_moe": "Qwen3NextForCausalLM",
}


@pytest.mark.parametrize("case", ALL_CASES)
def test_logits_match_and_import_then_export_is_identity(case: str, tmp_path: Path) -> None:
    hf_model = make_model(case)
    if case in ("qwen3next", "nemotronh"):
        # Decay rates and other fp32 parameters keep their dtype.
        hf_model = hf_model.to(torch.bfloat16)
        for name, buffer in hf_model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = buffer.data.float()
    source = save_folder(hf_model, tmp_path / "source")
    checkpoint = imported(source, tmp_path / "checkpoints")
    words = ["export", "--load", tmp_path / "checkpoints", "--save"]
    convert(*words, tmp_path / "again", "--max-shard-size", "9KB")
    with one_thread(), torch.no_grad():
        expected = load_folder(source)(TOKENS, use_cache=False).logits
        if case not in HYBRID_CASES:
            assert expected.std() > 1  # otherwise an absolute bound would prove little
            torch.testing.assert_close(checkpoint_logits(checkpoint), expected, rtol=0, atol=1e-4)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    assert_all_equal(tensors(tmp_path / "again"), tensors(source))
    for name in ("config.json", "generation_config.json"):
        texts = [(folder / name).read_text() for folder in (source, tmp_path / "again")]
        assert json.loads(texts[0]) == json.loads(texts[1])
    # Without the original config.json, transformers still computes the same logits.
    (tmp_path / "checkpoints" / "hugging_face" / "config.json").unlink()
    convert(*words, tmp_path / "anew")
    loaded = load_folder(tmp_path / "anew")
    assert type(loaded).__name__ == EQUIVALENT_CLASS.get(case, type(hf_model).__name__)
    with one_thread(), torch.no_grad():
        logits = loaded(TOKENS, use_cache=False).logits
    if case == "falcon_h1":  # products of its factors are written as one factor
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    else:
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("case", sorted(ALL_CASES))
def test_flags_of_a_folder_describe_its_model(case: str) -> None:
    config = make_model(case).config.to_dict()
    model = read_model(config, where="config.json")
    required = {"seq-length": 16, "micro-batch-size": 1, "train-iters": 1, "lr": 1e-3}
    options = {name: value for name, value in folder_options(model).items() if value is not None}
    run = resolve(build(Config, {**options, **required, "mock-data": True}), 1)
    assert not check(run.config, 1)
    assert function_of(gpt_config(run.config, VOCABULARY)) == function_of(model.config)


def test_configs_of_older_transformers_read_the_same(tmp_path: Path) -> None:
    for case in CASES:
        fields = make_model(case).config.to_dict()
        expected = read_model(fields, where="new")
        rope = dict(fields.pop("rope_parameters"))
        fields["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        fields["rope_scaling"] = None if rope["type"] == "default" else rope
        fields["torch_dtype"] = fields.pop("dtype")
        assert read_model(fields, where="old") == expected


def test_kimi_k2_folder_matches_deepseek_v3(tmp_path: Path) -> None:
    hf_model = make_model("deepseek", rope_parameters=KIMI_YARN, n_group=1, topk_group=1)
    source = save_folder(hf_model, tmp_path / "source")
    change_json(source / "config.json", model_type="kimi_k2")
    convert("import", "--hf", source, "--save", tmp_path / "checkpoints", "--verify")
    words = ["export", "--load", tmp_path / "checkpoints", "--verify", "--save"]
    convert(*words, tmp_path / "again")
    with one_thread(), torch.no_grad():
        expected = hf_model(TOKENS, use_cache=False).logits
        logits = checkpoint_logits(tmp_path / "checkpoints" / "iter_0000000")
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    before, after = tensors(source), tensors(tmp_path / "again")
    assert_all_equal(after, before)
    configs = [json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "again")]
    assert configs[0] == configs[1]
    (tmp_path / "checkpoints" / "hugging_face" / "config.json").unlink()
    convert(*words, tmp_path / "anew")
    assert json.loads((tmp_path / "anew/config.json").read_text())["model_type"] == "deepseek_v3"


@pytest.mark.parametrize("case", ["mistral", "seedoss"])
def test_changed_model_keeps_the_architecture_of_its_folder(case: str, tmp_path: Path) -> None:
    source = save_folder(make_model(case), tmp_path / "source")
    convert("import", "--hf", source, "--save", tmp_path / "checkpoints")
    stored_config = tmp_path / "checkpoints" / "hugging_face" / "config.json"
    change_json(stored_config, rms_norm_eps=2e-3)  # the stored file no longer describes the model
    convert("export", "--load", tmp_path / "checkpoints", "--save", tmp_path / "out", "--verify")
    fields = json.loads((tmp_path / "out/config.json").read_text())
    expected = json.loads((source / "config.json").read_text())
    assert fields["rms_norm_eps"] == 1e-3
    for name in ("model_type", "architectures"):
        assert fields[name] == expected[name]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_is_preserved_or_converted(dtype: str, tmp_path: Path) -> None:
    hf_model = make_model("qwen3-8to1").to(getattr(torch, dtype))
    source = save_folder(hf_model, tmp_path / "source")
    convert("import", "--hf", source, "--save", tmp_path / "checkpoints")
    assert read_extra(tmp_path / "checkpoints/iter_0000000")["config"]["bf16"] == (
        dtype == "bfloat16"
    )
    convert("export", "--load", tmp_path / "checkpoints", "--save", tmp_path / "same")
    before, after = tensors(source), tensors(tmp_path / "same")
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert {t.dtype for t in after.values()} == {getattr(torch, dtype)}
    to_fp32 = ["--dtype", "float32", "--verify"]
    printed = convert(
        "export", "--load", tmp_path / "checkpoints", "--save", tmp_path / "w", *to_fp32
    )
    assert "verified" in printed
    assert json.loads((tmp_path / "w/config.json").read_text())["dtype"] == "float32"
    widened = tensors(tmp_path / "w")
    assert all(torch.equal(before[n].float(), widened[n]) for n in before)
    to_bf16 = ["--dtype", "bfloat16", "--verify"]
    assert "verified" in convert(
        "import", "--hf", tmp_path / "w", "--save", tmp_path / "n", *to_bf16
    )


def test_stored_config_is_checked_and_verify_finds_mismatch(tmp_path: Path, monkeypatch) -> None:
    source = save_folder(make_model("llama-3to1"), tmp_path / "source")
    convert("import", "--hf", source, "--save", tmp_path / "checkpoints", "--verify")
    change_json(source / "config.json", rms_norm_eps=2e-3)
    words = ["--load", tmp_path / "checkpoints", "--like", source, "--verify"]
    convert("export", "--save", tmp_path / "out", *words)
    assert json.loads((tmp_path / "out/config.json").read_text())["rms_norm_eps"] == 1e-3
    checkpoint = tmp_path / "checkpoints/iter_0000000"
    with pytest.raises(ValueError, match=r"differ by up to [\d.e-]+, the largest is \d[\d.]*: "):
        compare_logits(checkpoint, source)
    monkeypatch.setattr(converter, "TOLERANCE", -1.0)
    words += ["--save", tmp_path / "refused"]
    printed = convert("export", *words, code=ExitCode.USER_ERROR)
    assert f"{tmp_path / 'refused'} was written, but not verified: the logits of " in printed
    assert (tmp_path / "refused/config.json").exists()


def test_model_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    model = read_model(make_model("llama-3to1").config.to_dict(), where="x").config
    for changed, name in (
        (replace(model, mlp=replace(model.mlp, gated=False)), "mlp.gated"),
        (replace(model, norm=replace(model.norm, kind="LayerNorm")), "norm.kind"),
        (replace(model, rope=replace(model.rope, percent=0.5)), "rope.percent"),
        (
            replace(model, attention=replace(model.attention, output_bias=True, window=8)),
            "attention.output_bias is True",
        ),
        (replace(model, attention=replace(model.attention, sinks=True)), "attention.sinks is True"),
    ):
        with pytest.raises(ValueError, match=rf"cannot be exported.*{name}"):
            write_config(changed, max_length=LENGTH, dtype=torch.float32, end_tokens=())
    dropped = replace(model, hidden_dropout=0.5, init_std=0.7)
    assert function_of(dropped) == function_of(model)
    write_config(dropped, max_length=LENGTH, dtype=torch.float32, end_tokens=())
