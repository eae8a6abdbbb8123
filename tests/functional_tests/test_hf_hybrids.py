# SPDX-License-Identifier: Apache-2.0
"""Hybrid models of transformers round-trip through training with equal logits and generations."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.inference.generate import main as generate
from tests.functional_tests.small_run import VOCABULARY as TRAINED_VOCABULARY
from tests.functional_tests.small_run import losses, run_on, write_tokens
from tests.support.hf_converter import (
    checkpoint_model,
    checkpoint_weights,
    convert,
    imported,
    tensors,
)
from tests.support.hf_folders import VOCABULARY, load_folder, make_model, save_folder
from tests.support.inputs import generator, one_thread

RUN = (
    "--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --split 100 --eval-interval 0 "
    "--log-interval 1 --progress plain "
)
#: Weights that stay in fp32 while the others are in bf16.
FP32_WEIGHTS = ("A_log", "dt_bias", ".D", "e_score_correction_bias")


def configs(*folders: Path) -> list[Any]:
    """Return config.json of each folder."""
    return [json.loads((folder / "config.json").read_text()) for folder in folders]


@pytest.mark.slow
def test_qwen3_next_round_trips_through_training(tmp_path: Path) -> None:
    model = make_model("qwen3next", vocab_size=TRAINED_VOCABULARY)
    folder = save_folder(model, tmp_path / "made")
    start, saved = tmp_path / "imported", tmp_path / "saved"
    initial = checkpoint_weights(imported(folder, start))
    prefix = write_tokens(tmp_path / "tokens")
    run_on(
        4,
        f"{RUN} --hybrid-layer-pattern GE*E --data-path {prefix} --load {start} "
        f"--use-checkpoint-args --save {saved} --train-iters 20 --lr 1e-2 "
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
        "--use-distributed-optimizer".split(),
    )
    loss_by_step = losses(saved / "metrics.jsonl")
    assert loss_by_step[20] < 0.8 * loss_by_step[1], loss_by_step
    trained = checkpoint_weights(saved / "iter_0000020")
    for name in (
        "decoder.blocks.0.delta_net.A_log",
        "decoder.blocks.0.delta_net.conv.key.weight",
        "decoder.blocks.1.moe.shared_gate.weight",
        "decoder.blocks.2.attention.gate.weight",
    ):
        assert not torch.equal(initial[name], trained[name]), f"{name} was not trained"

    words = ["--load", saved, "--save", tmp_path / "out", "--like", folder]
    output = convert("export", *words, "--verify")
    assert "verified" in output
    tokens = torch.randint(TRAINED_VOCABULARY, (2, 31), generator=generator(5))
    with one_thread(), torch.no_grad():
        expected = load_folder(tmp_path / "out")(tokens, use_cache=False).logits
        before = load_folder(folder)(tokens, use_cache=False).logits
        actual = checkpoint_model(saved / "iter_0000020").full_logits(tokens).transpose(0, 1)
    assert float((before - expected).abs().max()) > 0.1  # training has changed the logits
    assert float((actual - expected).abs().max()) < 1e-4
    before, after = configs(folder, tmp_path / "out")
    assert before == after


@pytest.mark.parametrize(
    ("case", "pattern", "layout"),
    [
        ("qwen3next", "GE*E", "--tensor-model-parallel-size 2 --sequence-parallel"),
        pytest.param(
            "nemotronh",
            "ME*|M-",
            "--pipeline-model-parallel-size 2 --moe-router-bias-update-rate 1e-30",
            marks=pytest.mark.slow,
        ),
        pytest.param("mamba2", "MM", "--use-distributed-optimizer", marks=pytest.mark.slow),
    ],
)
def test_weights_arrive_in_model_and_masters_on_two_ranks(
    case: str, pattern: str, layout: str, tmp_path: Path
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
        f"--hybrid-layer-pattern {pattern} --load-hf {folder} --save {tmp_path / 'a'}".split(),
    )
    convert("export", "--load", tmp_path / "a", "--save", tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert any(name.endswith(FP32_WEIGHTS) for name in before)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    config_before, config_after = configs(folder, tmp_path / "out")
    assert config_before == config_after


@pytest.mark.parametrize("case", ["qwen3next", "nemotronh"])
def test_generation_from_folder_matches_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(case, eos_token_id=None)
    folder = save_folder(model, tmp_path / "model", max_shard_size="40KB")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    fields = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "model": fields, "pre_tokenizer": {"type": "Whitespace"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
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
    assert len(set(generated["ids"])) > 2, "the text does not depend on the recurrence"
