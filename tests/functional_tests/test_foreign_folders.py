# SPDX-License-Identifier: Apache-2.0
"""Conversion of torch.distributed.checkpoint folders to checkpoints and files, bit for bit.

torch writes the folders, in Megatron-LM's layout by rules restated in `upstream_folder`.
"""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from megatron.core.dist_checkpointing import Solo, TensorChunk, save_checkpoint, verify_checkpoint
from megatron.core.models import GPTConfig
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig
from megatron.training import checkpoint
from tests.functional_tests.small_run import losses, run_in_process
from tests.functional_tests.test_checkpoint_command import command
from tests.functional_tests.test_upcycle import loaded, saved, stored
from tests.functional_tests.upstream_folder import (
    CHANNELS,
    GROUPS,
    LAYERS,
    PADDING,
    QUERIES,
    Tensors,
    save_upstream,
    upstream_ends,
    upstream_layer,
)
from tests.support.closeness import assert_all_equal
from tests.support.inputs import generator
from tests.support.ranks import run_ranks

#: Gated, grouped queries, no biases, an untied head.
MODERN = GPTConfig(
    num_layers=LAYERS,
    hidden_size=22,
    vocab_size=37,
    attention=AttentionConfig(
        num_attention_heads=GROUPS * QUERIES,
        num_query_groups=GROUPS,
        kv_channels=CHANNELS,
        qk_norm=True,
    ),
    mlp=MLPConfig(ffn_hidden_size=20),
    norm=NormConfig(epsilon=1e-5),
    rope=RopeConfig(base=10000.0),
    init_std=0.2,
)
#: With all biases and a tied head.
CLASSIC = dataclasses.replace(
    MODERN,
    attention=dataclasses.replace(MODERN.attention, qkv_bias=True, output_bias=True, qk_norm=False),
    mlp=MLPConfig(ffn_hidden_size=20, gated=False, activation="gelu", bias=True),
    norm=NormConfig(kind="LayerNorm", epsilon=1e-5),
    tied=True,
    rope=None,
    max_position_embeddings=32,
)
SIZES = (
    "--num-layers 3 --hidden-size 22 --ffn-hidden-size 20 --num-attention-heads 4 --vocab-size 37 "
    "--group-query-attention --num-query-groups 2 --kv-channels 6 --max-position-embeddings 32 "
    "--position-embedding-type rope"
)
CLASSIC_FLAGS = SIZES.replace("--position-embedding-type rope", "")  # learned absolute positions
MODERN_FLAGS = (
    f"{SIZES} --swiglu --normalization RMSNorm --disable-bias-linear --qk-layernorm "
    "--untie-embeddings-and-output-weights"
)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
UPSTREAM = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


@pytest.fixture(scope="module")
def modern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a native checkpoint, `native`, and the same from upstream, `run`."""
    root = tmp_path_factory.mktemp("modern")
    saved(root / "native", MODERN, dtype=torch.bfloat16)
    folder = root / "run" / "iter_0000007"
    folder.mkdir(parents=True)
    run_ranks(save_upstream, 2, stored(root / "native" / "iter_0000007"), folder)
    (folder / "metadata.json").write_text(json.dumps(UPSTREAM))
    (folder / "common.pt").write_bytes(b"never read")
    (root / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def logits(root: Path, **kwargs: Any) -> torch.Tensor:
    """Return the logits of the model in a folder."""
    tokens = torch.randint(0, 37, (2, 9), generator=generator(4))
    with torch.no_grad():
        return loaded(root, **kwargs).full_logits(tokens)


def test_torch_dist_folder_converts_to_the_same_model(modern, tmp_path, capsys):
    metadata = (modern / "run" / "iter_0000007" / "__1_0.distcp").stat().st_size
    assert metadata > 0, "one rank has saved everything"
    words = f"convert {modern / 'run'} {tmp_path / 'out'} --from torch_dist --to native"
    code, out, err = command(capsys, f"{words} {MODERN_FLAGS}")
    assert (code, err) == (0, "")
    assert "left out 1 tensors, of an optimizer or derived: optimizer.state.exp_avg." in out
    assert "left out 2 items that are not tensors" in out
    assert f"treated the last {PADDING} rows of embedding.word_embeddings.weight as padding" in out
    verify_checkpoint(tmp_path / "out" / "iter_0000000")
    native, converted = (
        stored(modern / "native" / "iter_0000007"),
        stored(tmp_path / "out" / "iter_0000000"),
    )
    assert converted.keys() == native.keys()
    for name, value in native.items():
        assert converted[name].dtype is torch.bfloat16
        assert torch.equal(converted[name], value), name
    before = logits(modern / "native", dtype=torch.bfloat16)
    assert torch.equal(logits(tmp_path / "out", dtype=torch.bfloat16), before)


@pytest.mark.slow
def test_training_starts_from_a_converted_folder(modern, tmp_path, capsys):
    words = f"convert {modern / 'run'} {tmp_path / 'out'} --from torch_dist --to native"
    assert command(capsys, f"{words} {MODERN_FLAGS}")[0] == 0
    run = "--mock-data --seq-length 16 --micro-batch-size 2 --train-iters 2 --lr 1e-3 --bf16"
    run += " --log-interval 1"
    run += f" --eval-interval 0 --metrics-file {tmp_path / 'm.jsonl'} --progress plain"
    run += f" --load {tmp_path / 'out'} --use-checkpoint-args"
    assert run_in_process(run.split()) == 0
    assert f"loaded the weights of {tmp_path / 'out' / 'iter_0000000'}" in capsys.readouterr().out
    assert set(losses(tmp_path / "m.jsonl")) == {1, 2}


def test_torch_dist_conversion_handles_pre_norm_bias_positions(tmp_path, capsys):
    saved(tmp_path / "native", CLASSIC)
    native = stored(tmp_path / "native" / "iter_0000007")
    state = upstream_ends(native)
    for layer in range(CLASSIC.num_layers):
        for name, value in upstream_layer(native, layer, gated=False, fused=False).items():
            state[f"decoder.layers.{layer}.{name}"] = value
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    words = f"convert {tmp_path / 'theirs'} {tmp_path / 'out'} --from torch_dist --to native"
    assert command(capsys, f"{words} {CLASSIC_FLAGS}")[0] == 0
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "native"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--num-layers 2", "num-layers is 3 there, 2 by the flags"),
        ("--hidden-size 24", "hidden-size is 22 there, 24 by the flags"),
        ("--no-swiglu", "swiglu is True there, False by the flags"),
        ("--no-qk-layernorm", "qk-layernorm is True there, False by the flags"),
        ("--no-untie-embeddings-and-output-weights", "untie-embeddings-and-output-weights is True"),
        ("--no-disable-bias-linear", "bias of the MLP is False there, True by the flags"),
        ("--normalization LayerNorm", "normalization is RMSNorm there, LayerNorm by the flags"),
        ("--num-query-groups 4", "linear_qkv.weight is [3, 48, 22], the flags require [3, 72, 22]"),
        ("--vocab-size 50", "word_embeddings.weight is [44, 22], the flags require [50, 22]"),
        ("--num-experts 2", "mixtures of experts and multi-token prediction layers are not read"),
        ("--vocab-size none", "missing --vocab-size: give it without padding"),
    ],
)
def test_flags_of_another_model_are_refused_by_field(modern, tmp_path, capsys, options, text):
    name = options.split()[0].replace("--no-", "--")
    model_flags = MODERN_FLAGS.split()
    if name in model_flags:
        index = model_flags.index(name)
        has_value = index + 1 < len(model_flags) and not model_flags[index + 1].startswith("--")
        del model_flags[index : index + 1 + has_value]
    words = f"convert {modern / 'run'} {tmp_path / 'out'} --from torch_dist --to native"
    code, out, err = command(capsys, f"{words} {' '.join(model_flags)} {options}")
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def transformers_names(mcore_weights: Tensors) -> Tensors:
    """Return the tensors of MODERN by the names of transformers' Qwen3."""
    tensors = {
        "model.embed_tokens.weight": mcore_weights["embedding.weight"],
        "model.norm.weight": mcore_weights["decoder.final_norm.weight"],
        "lm_head.weight": mcore_weights["head.weight"],
    }
    for layer in range(MODERN.num_layers):
        mixer, ffn = f"decoder.blocks.{2 * layer}", f"decoder.blocks.{2 * layer + 1}"
        names = {
            "input_layernorm": f"{mixer}.norm",
            "post_attention_layernorm": f"{ffn}.norm",
            "self_attn.q_norm": f"{mixer}.attention.query_norm",
            "self_attn.k_norm": f"{mixer}.attention.key_norm",
            "self_attn.q_proj": f"{mixer}.attention.query",
            "self_attn.k_proj": f"{mixer}.attention.key",
            "self_attn.v_proj": f"{mixer}.attention.value",
            "self_attn.o_proj": f"{mixer}.attention.output",
            "mlp.gate_proj": f"{ffn}.mlp.gate",
            "mlp.up_proj": f"{ffn}.mlp.up",
            "mlp.down_proj": f"{ffn}.mlp.down",
        }
        for name, native_name in names.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = mcore_weights[f"{native_name}.weight"]
    return tensors


@pytest.mark.parametrize("names", ["ours", "transformers"])
def test_folder_with_recognized_weight_names_is_converted(names, modern, tmp_path, capsys):
    native = stored(modern / "native" / "iter_0000007")
    weights = native if names == "ours" else transformers_names(native)
    state = {"model": weights, "optim": {"exp_avg": torch.zeros(3)}, "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    words = f"convert {tmp_path / 'plain'} {tmp_path / 'out'} --from dcp --to native"
    code, out, _ = command(capsys, f"{words} {MODERN_FLAGS}")
    assert code == 0
    assert "left out 1 tensors, of an optimizer or derived: optim.exp_avg" in out
    converted = stored(tmp_path / "out" / "iter_0000000")
    assert_all_equal(converted, native)
    # A tensor without a place is an optimizer's only if its name says so.
    state["model"] = {**weights, "more.weight": torch.zeros(3)}
    dcp.save(state, checkpoint_id=tmp_path / "more", no_dist=True)
    words = f"convert {tmp_path / 'more'} {tmp_path / 'other'} --from dcp --to native"
    code, _, err = command(capsys, f"{words} {MODERN_FLAGS}")
    assert code == 2
    assert "model.more.weight" in err


def test_experts_and_biases_convert_from_native_names(tmp_path, capsys):
    router = RouterConfig(topk=2, score_function="sigmoid", expert_bias=True)
    moe = MoEConfig(num_experts=4, ffn_hidden_size=14, router=router)
    config = dataclasses.replace(MODERN, moe=moe, ffn_pattern="EEE")
    saved(tmp_path / "native", config)
    native = stored(tmp_path / "native" / "iter_0000007")
    assert "decoder.blocks.1.moe.router.expert_bias" in native
    dcp.save(dict(native), checkpoint_id=tmp_path / "plain", no_dist=True)
    words = f"convert {tmp_path / 'plain'} {tmp_path / 'out'} --from dcp --to native {MODERN_FLAGS}"
    words += " --num-experts 4 --moe-ffn-hidden-size 14 --moe-router-topk 2"
    words += " --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    code, _, err = command(capsys, words)
    assert (code, err) == (0, "")
    converted = stored(tmp_path / "out" / "iter_0000000")
    assert_all_equal(converted, native)


def test_single_file_holds_whole_tensors_by_source_name(modern, tmp_path, capsys):
    native = stored(modern / "native" / "iter_0000007")
    for source, kind in (("native", "native"), ("run", "torch_dist")):
        target = tmp_path / f"{kind}.safetensors"
        words = f"convert {modern / source} {target} --from {kind} --to single-file"
        code, out, err = command(capsys, words)
        assert (code, err) == (0, "")
        assert f"{target}: " in out
        code, _, err = command(capsys, words)
        assert code == 2
        assert "exists: name another file" in err
    with safe_open(tmp_path / "native.safetensors", "pt") as file:
        assert set(file.keys()) == set(native)
        assert all(torch.equal(file.get_tensor(name), value) for name, value in native.items())
    with safe_open(tmp_path / "torch_dist.safetensors", "pt") as file:
        names = set(file.keys())
        assert "optimizer.state.exp_avg.decoder.final_layernorm.weight" not in names
        qkv = file.get_tensor("decoder.layers.self_attention.linear_qkv.weight")
        fc1 = file.get_tensor("decoder.layers.mlp.linear_fc1.weight")
    for layer in range(MODERN.num_layers):
        upstream = upstream_layer(native, layer, gated=True, fused=True)
        assert torch.equal(qkv[layer], upstream["self_attention.linear_qkv.weight"])
        assert torch.equal(fc1[layer], upstream["mlp.linear_fc1.weight"])


def test_all_dtypes_and_strides_of_torch_convert(tmp_path, capsys):
    random = generator(5)
    values = torch.randn(6, 8, generator=random)
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    eight_bit = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
    integers = (torch.int64, torch.int32, torch.int16, torch.bool)
    state = {str(dtype): values.to(dtype) for dtype in (*floats, *eight_bit, *integers)}
    state |= {"turned": values.t(), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    state |= {"part": values[1:4, 2:5], "one": torch.randn(1, 5, 1, generator=random)}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    words = f"convert {tmp_path / 'plain'} {tmp_path / 'a.safetensors'} --from dcp --to single-file"
    assert command(capsys, words)[0] == 0
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert set(file.keys()) == set(state)
        for name, value in state.items():
            converted = file.get_tensor(name)
            assert converted.dtype == value.dtype
            assert torch.equal(converted.double(), value.double()), name
    # Native optimizer state is left out unless --with-optimizer is given.
    state = {"optimizer.exp_avg/a": values, "a": values}
    dcp.save(state, checkpoint_id=tmp_path / "state", no_dist=True)
    for option, count in (("", 1), ("--with-optimizer", 2)):
        target = tmp_path / f"{count}.safetensors"
        words = f"convert {tmp_path / 'state'} {target} --from dcp --to single-file {option}"
        assert f"{count} tensors" in command(capsys, words)[1]


def peak_of(rank: int, world: int, root: Path) -> dict[str, int]:
    """Return the peak memory of each command, in bytes above the peak with small folders."""
    commands = {
        "foreign": "convert {root}/{size} {root}/{size}-a --from dcp --to single-file",
        "native": "convert {root}/n-{size} {root}/{size}-b --from native --to single-file",
        "compare": "compare {root}/n-{size} {root}/n-{size}",
    }
    peaks = {}
    for size in ("small", "large"):
        for name, words in commands.items():
            assert checkpoint.main(words.format(root=root, size=size).split(), {}) == 0
            peaks[size, name] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {name: peaks["large", name] - peaks["small", "compare"] for name in commands}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_folder(tmp_path):
    random = generator(3)
    for name, shape in (("small", (3, 5)), ("large", (60_000, 1024))):
        whole = torch.randn(shape, generator=random)
        dcp.save({"embedding.weight": whole}, checkpoint_id=tmp_path / name, no_dist=True)
        placement = {"shape": shape, "offsets": (0, 0), "replica_ranks": (0,)}
        chunk = TensorChunk(name="embedding.weight", tensor=whole, **placement)
        save_checkpoint(tmp_path / f"n-{name}", 1, [chunk], {}, coordinator=Solo())
    (peaks,) = run_ranks(peak_of, 1, tmp_path)
    for name in ("large-a", "large-b"):
        assert (tmp_path / name).stat().st_size > 240_000_000
    # Peaks only rise: native reads two blocks of 16 MB and a third, compare reads twice as much.
    assert peaks["foreign"] < 48_000_000, peaks
    assert peaks["native"] < 96_000_000, peaks
    assert peaks["compare"] < 160_000_000, peaks
