# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with experts are trained here and go back, with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.functional_tests.small_run import losses, run_on, write_tokens
from tests.support.hf_converter import (
    checkpoint_model,
    convert,
    folder_with_further_layers,
    held,
    imported,
    tensors,
)
from tests.support.hf_folders import load_folder, make_model, save_folder
from tests.support.inputs import generator, one_thread

RUN = (
    "--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --split 100 --eval-interval 0 "
    "--log-interval 1 --progress plain"
)


@pytest.mark.slow
def test_deepseek_v3_through_training_on_four_ranks_and_back(tmp_path: Path) -> None:
    folder = folder_with_further_layers(tmp_path / "made", "deepseek-even")
    start, saved = tmp_path / "imported", tmp_path / "saved"
    first = held(imported(folder, start))
    data = write_tokens(tmp_path / "tokens")
    run_on(
        4,
        f"{RUN} --data-path {data} --load {start} --use-checkpoint-args --save {saved} "
        "--train-iters 20 --lr 1e-2 --moe-aux-loss-coeff 0.01 --moe-router-bias-update-rate 0.05 "
        "--moe-router-load-balancing-type seq_aux_loss --tensor-model-parallel-size 2 "
        "--sequence-parallel --expert-model-parallel-size 2 --use-distributed-optimizer".split(),
    )
    found = losses(saved / "metrics.jsonl")
    assert found[20] < 0.8 * found[1], found
    trained = held(saved / "iter_0000020")
    for name in ("decoder.blocks.3.moe.router.expert_bias", "mtp.1.projection.weight"):
        assert not torch.equal(first[name], trained[name]), f"{name} was not trained"

    said = convert("export", "--load", saved, "--save", tmp_path / "out", "--verify")
    assert "verified" in said
    tokens = torch.randint(61, (2, 31), generator=generator(5))
    with one_thread(), torch.no_grad():
        expected = load_folder(tmp_path / "out")(tokens, use_cache=False).logits
        before = load_folder(folder)(tokens, use_cache=False).logits
        ours = checkpoint_model(saved / "iter_0000020").full_logits(tokens).transpose(0, 1)
    assert float((before - expected).abs().max()) > 0.1  # the training shows
    assert float((ours - expected).abs().max()) < 1e-4
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "out")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("mixtral-tied-3of8", "--expert-model-parallel-size 2 --use-distributed-optimizer"),
        ("qwen3moe-mixed-biases", "--tensor-model-parallel-size 2 --sequence-parallel"),
        (
            "deepseek-even",
            "--pipeline-model-parallel-size 2 --hybrid-layer-pattern *-*E|*E "
            "--moe-router-bias-update-rate 1e-30",
        ),
    ],
)
def test_weights_arrive_in_model_and_masters_on_two_ranks(
    case: str, layout: str, tmp_path: Path
) -> None:
    model = make_model(case).to(torch.bfloat16)  # whose masters are memory of their own
    for layer in model.model.layers[1:] if case.startswith("deepseek") else ():
        layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias.float()
    folder = save_folder(model, tmp_path / "model", max_shard_size="20KB")
    # Steps too small to change a bit: what is saved has gone through the optimizer's masters.
    run_on(
        2,
        f"{RUN} --mock-data --train-iters 2 --lr 1e-30 --weight-decay 0 --bf16 {layout} "
        f"--load-hf {folder} --save {tmp_path / 'a'}".split(),
    )
    convert("export", "--load", tmp_path / "a", "--save", tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "out")]
    assert configs[0] == configs[1]
