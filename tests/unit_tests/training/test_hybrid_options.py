# SPDX-License-Identifier: Apache-2.0
"""Options of hybrid models: the configs they build, refused combinations, logs and layouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron.cli.launch import Launch
from megatron.cli.schema import flatten, options
from megatron.cli.yaml_file import write_options
from megatron.core import Group, ProcessGroupCollection
from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout
from megatron.core.datasets import GPTBatch
from megatron.core.models import GPTModel
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig
from megatron.core.ssm.mixer import RecurrentMixer
from megatron.core.ssm.mixer_config import linear_shape
from megatron.training.checkpointing import stored_model
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.config.stages import stage_split
from megatron.training.core_configs import backend, split
from megatron.training.layouts import Layouts
from megatron.training.pretrain_gpt import PRETRAIN_GPT, read_run
from megatron.training.pretrain_hybrid import PRETRAIN_HYBRID
from megatron.training.startup_report import parameters
from megatron.training.startup_report.parallelism import context_line, linear_lines
from tests.support.arguments import last_wins

PATTERN = "--hybrid-layer-pattern"
PP, CP, TP = (f"--{kind}-parallel-size" for kind in ("pipeline-model", "context", "tensor-model"))
DELTA = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
    "--linear-value-head-dim 6 --linear-conv-kernel-dim 3"
)
MAMBA = "--mamba-head-dim 12 --mamba-state-dim 10 --mamba-num-groups 2"
NONE = "--position-embedding-type none"
DATA_FLAGS = "--mock-data --tokenizer-type null --vocab-size 61 --hidden-size 48 --seq-length 20"
RUN_FLAGS = f"{DATA_FLAGS} --micro-batch-size 1 --train-iters 2 --lr 1e-3 {NONE}"


def hybrid_run(flags: str, world: int = 1):
    """Return the run that pretrain_hybrid builds from flags."""
    words = last_wins([*RUN_FLAGS.split(), *flags.split()])
    return read_run(words, Launch(world_size=world), program=PRETRAIN_HYBRID)


# --- configs of the core --------------------------------------------------------------------------


def test_hybrid_options_reach_the_model():
    flags = (
        f"{PATTERN} G-|M*C-/*-/*- --num-attention-heads 6 {DELTA} {MAMBA} {PP} 2 "
        "--short-conv-kernel-dim 5 --add-short-conv-bias --mamba-dt-limit"
    )
    run = hybrid_run(f"{flags} 0.001 0.1 --squared-relu --apply-layernorm-1p", 2)
    model = gpt_config(run.config, 61)
    assert (model.pattern, model.mtp) == ("G-M*C-", MTPConfig(num_layers=2, pattern="*-"))
    assert (model.num_layers, model.ffn_pattern, run.config.model.num_layers) == (6, "", 6)
    assert model.delta_net == GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_channels=8, value_channels=6, conv_width=3
    )
    assert model.mamba == Mamba2Config(
        num_heads=8,
        head_channels=12,
        state_channels=10,
        num_groups=2,
        norm_groups=2,
        dt_limit=(0.001, 0.1),
    )
    assert model.short_conv == ShortConvConfig(conv_width=5, bias=True)
    assert (model.mlp.activation, model.mlp.gated) == ("squared_relu", False)
    assert model.norm.zero_centered
    assert (model.rope, model.max_position_embeddings) == (None, None)
    assert stage_split(run.config).ranges == ((0, 2), (2, 6))
    assert model.problems() == []


@pytest.mark.parametrize("blocks", [f"MM {MAMBA}", f"G- {DELTA}", "*-*- --num-attention-heads 6"])
def test_default_positions_match_megatron(blocks):
    words = f"{RUN_FLAGS.removesuffix(NONE)} {PATTERN} {blocks}".split()
    model = gpt_config(read_run(words, Launch(), program=PRETRAIN_HYBRID).config, 61)
    assert (model.rope, model.max_position_embeddings) == (None, 20)
    assert model.problems() == []


def test_configs_of_absent_block_types_are_none():
    model = gpt_config(hybrid_run(f"{PATTERN} MMM {MAMBA}").config, 61)
    assert (model.attention, model.mlp, model.delta_net, model.rope) == (None, None, None, None)
    assert parameters(model)[0] == GPTModel(model, ProcessGroupCollection.single()).num_parameters


@pytest.mark.parametrize("layer_flag", ["", "--num-layers 3", "--num-layers 6"])
def test_gpt_layers_can_be_written_as_a_pattern(layer_flag):
    plain = gpt_config(
        hybrid_run(f"--num-layers 3 {PATTERN} *-*-*- --num-attention-heads 6").config, 61
    )
    run = hybrid_run(f"{layer_flag} {PATTERN} *-*-*- --num-attention-heads 6")
    assert gpt_config(run.config, 61) == plain
    assert (plain.pattern, plain.ffn_pattern, run.config.model.num_layers) == ("", "---", 3)


def test_gpt_pattern_can_have_its_own_mtp_layers():
    flags = f"--num-attention-heads 6 --num-experts 4 --disable-bias-linear {PATTERN} *-*-"
    model = gpt_config(hybrid_run(f"{flags}/*E").config, 61)
    assert (model.ffn_pattern, model.mtp) == ("--", MTPConfig(num_layers=1, pattern="*E"))
    assert model.router_names == ("mtp.0.decoder.blocks.1.moe.router",)
    uniform = gpt_config(hybrid_run(f"--num-attention-heads 6 {PATTERN} *-*-/*-/*-").config, 61)
    assert uniform.mtp == MTPConfig(num_layers=2)


@pytest.mark.parametrize(
    "flags",
    [
        f"{PATTERN} G-*-/*- --num-attention-heads 6 {DELTA}",
        f"{PATTERN} MEM- {MAMBA} --num-experts 4 --disable-bias-linear",
        f"{PATTERN} *-*- --num-layers 4 --num-attention-heads 6",
    ],
)
def test_resolved_hybrid_run_is_read_back_unchanged(flags, tmp_path):
    run = hybrid_run(flags)
    assert resolve(run.config, 1) == run
    (tmp_path / "run.yaml").write_text(
        write_options(flatten(run.config), options(type(run.config)))
    )
    words = ["--config", str(tmp_path / "run.yaml")]
    assert read_run(words, Launch(), program=PRETRAIN_HYBRID) == run


def test_checkpoint_pattern_drops_pipeline_stage_marks(monkeypatch):
    saved = flatten(hybrid_run(f"{PATTERN} G-|M-/M- {DELTA} {MAMBA} {PP} 2", 2).config)
    monkeypatch.setattr(
        stored_model, "saved_options", lambda roots: (Path("iter_0000001"), saved, None)
    )
    monkeypatch.setattr(stored_model, "check_counts", lambda *args: None)
    words = "--load saved --use-checkpoint-args --seq-length 20 --micro-batch-size 1"
    run = read_run(words.split(), Launch(), program=PRETRAIN_HYBRID)
    assert run.config.hybrid.hybrid_layer_pattern == "G-M-/M-"
    assert gpt_config(run.config, 61).mamba.state_channels == 10


def test_linear_cp_mode_reaches_the_layers():
    flags = f"{PATTERN} G- {DELTA} {CP} 2 --linear-cp-mode segments"
    flags = last_wins(f"{RUN_FLAGS} {flags} --seq-length 260".split())
    backend_config = backend(read_run(flags, Launch(world_size=2), program=PRETRAIN_HYBRID).config)
    assert backend_config.linear_mode == "segments"
    shape = gpt_config(hybrid_run(f"{PATTERN} G- {DELTA}").config, 61)
    model = GPTModel(
        shape,
        ProcessGroupCollection.single(),
        backend=dataclasses.replace(LOCAL, linear_mode="segments"),
    )
    context = model.decoders[0].blocks[0].mixer.context
    assert context.linear_mode == "segments"


# --- refused combinations -------------------------------------------------------------------------

HEADS = "--num-attention-heads"


def test_pretrain_gpt_sends_other_patterns_to_pretrain_hybrid():
    for pattern in ("G-*-", "MM", "*-*"):
        words = f"{RUN_FLAGS} {PATTERN} {pattern} {HEADS} 6 {DELTA if 'G' in pattern else ''}"
        with pytest.raises(
            ValueError, match=r"start python -m megatron\.training\.pretrain_hybrid"
        ):
            read_run(words.split(), Launch(), program=PRETRAIN_GPT)
    with pytest.raises(ValueError, match=r"start python -m \S+$") as caught:
        read_run(f"{RUN_FLAGS} {PATTERN} G- {DELTA}".split(), Launch(), program=PRETRAIN_GPT)
    assert "; " not in str(caught.value), "default positions are reported as a second problem"


# --- context parallelism and documents ------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_recurrence_traffic_follows_from_weight_shapes(tp):
    model = gpt_config(hybrid_run(f"{PATTERN} GM {DELTA} {MAMBA}").config, 61)
    gpt = GPTModel(model, ProcessGroupCollection.single())
    mixers = [m for m in gpt.modules() if isinstance(m, RecurrentMixer)]
    assert len(mixers) == 2
    for mixer, config in zip(mixers, (model.delta_net, model.mamba), strict=True):
        shape = linear_shape(config, tp)
        rows = mixer.input.weight.shape[0]  # as many as input and output: the gate stays local
        assert (shape.features_in + shape.features_out) * tp == rows
        assert shape.features_out * tp == mixer.output.weight.shape[1]
        assert shape.conv_channels * tp == mixer.conv.shape[0]
        assert shape.heads * tp == mixer.a_log.shape[0]
        assert shape.units * tp == mixer.units


def test_log_names_the_mode_of_context_parallel_recurrences():
    flags = f"{PATTERN} GM* {DELTA} {MAMBA} {HEADS} 6 {CP} 2"
    run = hybrid_run(flags, 2)
    delta, mamba = linear_lines(run)
    assert delta.startswith("gated delta net: recurrences over context parallel 2 by ")
    assert "fewest bytes sent per rank and layer: " in delta
    assert mamba.startswith("Mamba-2: recurrences over context parallel 2 by ")
    assert context_line(run) is not None
    requested_lines = linear_lines(hybrid_run(f"{flags} --linear-cp-mode segments", 2))
    assert all("by segments: segments was requested" in line for line in requested_lines)
    (short_conv,) = linear_lines(hybrid_run(f"{PATTERN} C- {CP} 2", 2))
    assert "the 2 tokens before its sequences" in short_conv
    recurrent_only = hybrid_run(f"{PATTERN} GM {DELTA} {MAMBA} {CP} 2", 2)
    assert context_line(recurrent_only) is None
    assert len(linear_lines(recurrent_only)) == 2
    assert linear_lines(hybrid_run(f"{PATTERN} GM {DELTA} {MAMBA}")) == []
    assert split(hybrid_run(f"{PATTERN} GM {DELTA} {MAMBA}").config) is None


def packed_batch() -> GPTBatch:
    """Return a batch of two rows with documents."""
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2, 2]])
    tokens = torch.arange(18).view(2, 9)
    return GPTBatch(
        tokens=tokens,
        loss_mask=torch.ones(2, 8),
        sample_ids=torch.tensor([4, 5]),
        document_ids=ids,
    )


def test_recurrent_layers_get_document_bounds():
    device, cp_group = torch.device("cpu"), Group.single("cp")
    batch = packed_batch()
    masked = Layouts(cp_group, device).of(batch)
    assert masked.documents is None, "attention masks by document ids"
    layout = Layouts(cp_group, device, bounds=True).of(batch)
    assert isinstance(layout, SequenceLayout)
    assert layout.documents is not None
    assert layout.document_ids is not None, "attention still masks by ids"
    torch.testing.assert_close(layout.document_ids, batch.document_ids.t())
    bounds = layout.whole_rows(2).sequences.bounds
    assert list(bounds) == [0, 3, 8, 9, 13, 16]
    single_document = dataclasses.replace(batch, document_ids=None)
    layouts = Layouts(cp_group, device, bounds=True)
    assert layouts.of(single_document) is layouts.of(single_document), (
        "one layout object, so layers reuse their plans"
    )
    assert layouts.of(single_document).whole_rows(2).sequences.bounds == (0, 8, 16)
