# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, dense, MoE and hybrid, round-trip through training with equal logits."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.inference.generate import main as generate
from tests.functional_tests.small_run import VOCABULARY as TRAINED_VOCABULARY
from tests.functional_tests.small_run import losses, run_on, write_tokens
from tests.support.closeness import assert_all_equal
from tests.support.hf_converter import (
    checkpoint_model,
    checkpoint_weights,
    convert,
    folder_with_further_layers,
    imported,
    tensors,
)
from tests.support.hf_folders import (
    VOCABULARY,
    change_json,
    load_folder,
    make_model,
    save_folder,
)
from tests.support.inputs import generator, one_thread
from tests.support.quantized_folders import gpt_oss_folders

RUN = (
    "--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --split 100 --eval-interval 0 "
    "--log-interval 1 --progress plain"
)
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
#: Weights that stay in fp32 while the others are in bf16.
FP32_WEIGHTS = ("A_log", "dt_bias", ".D", "e_score_correction_bias")


def configs_are_equal(*folders: Path) -> bool:
    """Return whether two folders have the same config.json."""
    texts = [(folder / "config.json").read_text() for folder in folders]
    return json.loads(texts[0]) == json.loads(texts[1])


@pytest.mark.parametrize(
    ("case", "options", "like", "trained_names"),
    [
        (
            "deepseek-even",
            "--moe-aux-loss-coeff 0.01 --moe-router-bias-update-rate 0.05 "
            "--moe-router-load-balancing-type seq_aux_loss --expert-model-parallel-size 2",
            False,
            ["decoder.blocks.3.moe.router.expert_bias", "mtp.1.projection.weight"],
        ),
        (
            "qwen3next",
            "--hybrid-layer-pattern GE*E --context-parallel-size 2",
            True,
            [
                "decoder.blocks.0.delta_net.A_log",
                "decoder.blocks.0.delta_net.conv.key.weight",
                "decoder.blocks.1.moe.shared_gate.weight",
                "decoder.blocks.2.attention.gate.weight",
            ],
        ),
        (
            "gpt_oss",
            "--expert-model-parallel-size 2",
            True,
            [
                "decoder.blocks.1.moe.experts.down.bias",
                "decoder.blocks.1.moe.router.bias",
                "decoder.blocks.2.attention.sinks",
            ],
        ),
    ],
)
@pytest.mark.slow
@pytest.mark.covers("Hugging Face")
def test_model_round_trips_through_training(case, options, like, trained_names, tmp_path) -> None:
    folder = (
        save_folder(make_model(case, vocab_size=TRAINED_VOCABULARY), tmp_path / "made")
        if case in ("qwen3next", "gpt_oss")
        else folder_with_further_layers(tmp_path / "made", case)
    )
    start, saved = tmp_path / "imported", tmp_path / "saved"
    initial = checkpoint_weights(imported(folder, start))
    prefix = write_tokens(tmp_path / "tokens")
    run_on(
        4,
        f"{RUN} {options} {TENSOR} --use-distributed-optimizer --data-path {prefix} --load {start} "
        f"--use-checkpoint-args --save {saved} --train-iters 20 --lr 1e-2".split(),
    )
    loss_by_step = losses(saved / "metrics.jsonl")
    assert loss_by_step[20] < 0.8 * loss_by_step[1], loss_by_step
    trained = checkpoint_weights(saved / "iter_0000020")
    for name in trained_names:
        assert not torch.equal(initial[name], trained[name]), f"{name} was not trained"

    words = ["--load", saved, "--save", tmp_path / "out", *(["--like", folder] if like else [])]
    assert "verified" in convert("export", *words, "--verify")
    tokens = torch.randint(TRAINED_VOCABULARY, (2, 31), generator=generator(5))
    with one_thread(), torch.no_grad():
        expected = load_folder(tmp_path / "out")(tokens, use_cache=False).logits
        before = load_folder(folder)(tokens, use_cache=False).logits
        actual = checkpoint_model(saved / "iter_0000020").full_logits(tokens).transpose(0, 1)
    assert float((before - expected).abs().max()) > 0.1  # training has changed the logits
    assert float((actual - expected).abs().max()) < 1e-4
    assert configs_are_equal(folder, tmp_path / "out")


#: Changes of five models, and the options that divide them over tp 2, pp 2 and ep 2.
EXPERTS_OF_RANKS = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
TRAINED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "gpt_oss": ({}, f"--decoder-first-pipeline-num-layers 1 {EXPERTS_OF_RANKS}"),
    "qwen3_5_moe": ({}, f"--hybrid-layer-pattern GE|*E {EXPERTS_OF_RANKS}"),
    "gemma3": ({}, "--decoder-first-pipeline-num-layers 1"),
    "glm4_moe": (
        {"n_routed_experts": 12},
        f"--decoder-first-pipeline-num-layers 1 {EXPERTS_OF_RANKS}",
    ),
    "granitemoehybrid": (
        {"mamba_n_groups": 2, "num_local_experts": 6},
        f"--hybrid-layer-pattern ME|*EME {EXPERTS_OF_RANKS}",
    ),
}


def greedy_tokens(path: Path, out: Path) -> list[list[int]]:
    """Generate from a checkpoint or a folder; return the tokens of each prompt."""
    line = f"--load {path} --temperature 0 --max-new-tokens 12 --device cpu --output-json {out}"
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    with contextlib.redirect_stdout(io.StringIO()), one_thread():
        assert generate([*line.split(), *prompts], {}) == 0
    return [output["ids"] for output in json.loads(out.read_text(encoding="utf-8"))]


PROMPTS = ("w7 w50 w3", "w1", "w60 w2 w33 w41 w9 w9 w12")


@pytest.mark.parametrize("case", TRAINED)
@pytest.mark.slow
@pytest.mark.covers("Hugging Face")
def test_trained_model_generates_the_same_text_in_all_formats(case: str, tmp_path: Path) -> None:
    """Import, train on tp 2 x pp 2, serve the checkpoint, export, serve the export."""
    changes, options = TRAINED[case]
    if case == "gpt_oss":
        folder, _ = gpt_oss_folders(tmp_path)  # MXFP4
        change_json(folder / "config.json", eos_token_id=None)
    else:
        model = make_model(case, eos_token_id=None, **changes)
        folder = save_folder(model, tmp_path / "made")
    write_tokenizer(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    prefix, saved = write_tokens(tmp_path / "tokens"), tmp_path / "saved"
    run_on(
        4,
        f"{RUN} {options} {TENSOR} --pipeline-model-parallel-size 2 --data-path {prefix} "
        f"--load-hf {folder} --save {saved} --train-iters 20 --lr 1e-2".split(),
    )
    loss_by_step = losses(saved / "metrics.jsonl")
    assert loss_by_step[20] < 0.8 * loss_by_step[1], loss_by_step
    convert("export", "--load", saved, "--save", tmp_path / "out", "--verify")
    expected = greedy_tokens(saved, tmp_path / "saved.json")
    assert len({tuple(ids) for ids in expected}) > 1, "the text does not depend on the prompt"
    write_tokenizer(tmp_path / "out")
    assert greedy_tokens(tmp_path / "out", tmp_path / "out.json") == expected
    exported = load_folder(tmp_path / "out")
    for text, tokens in zip(PROMPTS, expected, strict=True):
        ids = torch.tensor([[int(word[1:]) for word in text.split()]])
        start = ids.shape[1]
        with one_thread(), torch.no_grad():
            for _ in tokens:
                logits = exported(ids, use_cache=False).logits
                ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert ids[0, start:].tolist() == tokens


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer in which word wN is token N."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    fields = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "model": fields, "pre_tokenizer": {"type": "Whitespace"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("qwen3-8to1", f"{TENSOR} --use-distributed-optimizer"),
        ("qwen2-window", "--pipeline-model-parallel-size 2 --hybrid-layer-pattern *|-*-"),
        ("mixtral-tied-3of8", "--expert-model-parallel-size 2 --use-distributed-optimizer"),
        (
            "qwen2moe",
            f"{TENSOR} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
        ),
        ("qwen3moe-mixed-biases", TENSOR),
        ("gpt_oss", f"{TENSOR} --use-distributed-optimizer"),
        pytest.param("smollm3", "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        (
            "deepseek-even",
            "--pipeline-model-parallel-size 2 --hybrid-layer-pattern +-+E|+E "
            "--moe-router-bias-update-rate 1e-30",
        ),
        ("qwen3next", f"{TENSOR} --hybrid-layer-pattern GE*E"),
        pytest.param(
            "nemotronh",
            "--pipeline-model-parallel-size 2 --hybrid-layer-pattern ME*|M- "
            "--moe-router-bias-update-rate 1e-30",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mamba2",
            "--use-distributed-optimizer --hybrid-layer-pattern MM",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.covers("Hugging Face")
def test_weights_arrive_in_model_and_masters_on_two_ranks(
    case: str, layout: str, tmp_path: Path
) -> None:
    model = make_model(case).to(torch.bfloat16)  # with separate fp32 masters
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(FP32_WEIGHTS):
            weight.data = weight.data.float()
    folder = save_folder(model, tmp_path / "model", max_shard_size="20KB")
    # Steps too small to change a bit: saved weights have passed through the optimizer's masters.
    run_on(
        2,
        f"{RUN} --mock-data --train-iters 2 --lr 1e-30 --weight-decay 0 --bf16 {layout} "
        f"--load-hf {folder} --save {tmp_path / 'a'}".split(),
    )
    convert("export", "--load", tmp_path / "a", "--save", tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert_all_equal(after, before)
    assert configs_are_equal(folder, tmp_path / "out")


@pytest.mark.parametrize("case", ["mixtral", "deepseek-direct-yarn", "qwen3next", "nemotronh"])
@pytest.mark.covers("generation")
def test_generation_from_folder_matches_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(case, eos_token_id=None)
    folder = save_folder(model, tmp_path / "model", max_shard_size="40KB")
    write_tokenizer(folder)
    path = tmp_path / "out.json"
    line = f"--load {folder} --temperature 0 --max-new-tokens 12 --device cpu --output-json {path}"
    with contextlib.redirect_stdout(io.StringIO()), one_thread():
        assert generate([*line.split(), "--prompt", "w7 w250 w3"], {}) == 0
    (generated,) = json.loads(path.read_text(encoding="utf-8"))
    ids = torch.tensor([[7, 250, 3]])
    with one_thread(), torch.no_grad():
        for _ in range(12):  # without transformers' KV cache
            logits = model(ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert generated["ids"] == ids[0, 3:].tolist()
    assert len(set(generated["ids"])) > 2, "the text does not depend on the prompt"
