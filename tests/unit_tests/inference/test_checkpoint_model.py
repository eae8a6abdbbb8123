# SPDX-License-Identifier: Apache-2.0
"""The command from a checkpoint to text and JSON: one process, two ranks, and refusals."""

import contextlib
import io
import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.errors import ExitCode
from megatron.cli.tokenizers import ByteTokenizer, train_bpe
from megatron.core import ProcessGroupCollection
from megatron.core.dist_checkpointing import Solo, save_checkpoint, weight_chunks
from megatron.core.inference import Completion, Engine, EngineRequest, OutputDelta, SamplingParams
from megatron.core.models import GPTConfig, GPTModel, InferenceOptimizedModel
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig
from megatron.inference.choose_tokenizer import choose_tokenizer
from megatron.inference.generate import main
from tests.support.arguments import last_wins
from tests.support.launchers import serve_store
from tests.support.one_batch import generate
from tests.support.optimized_steps import note_optimized_steps
from tests.support.ranks import start_ranks

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=32,
    vocab_size=259,  # larger than the tokenizer's, and uneven over two ranks
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=8),
    mlp=MLPConfig(ffn_hidden_size=48),
    init_std=0.3,
)
BYTES = {"type": "byte", "model": None, "vocab_size": 257, "fingerprint": "byte-257", "eod": 256}
PROMPTS = ("Once", "", "two words é")
TENSOR, PIPELINE = ((f"--{name}-model-parallel-size", "2") for name in ("tensor", "pipeline"))
OPTIMIZED = ("--transformer-impl", "inference_optimized")
FLAGS = ["--max-new-tokens", "8", "--temperature", "0.8", "--top-k", "50", "--seed", "5"]


def make_model(dtype: torch.dtype = torch.float32) -> GPTModel:
    return GPTModel(CONFIG, ProcessGroupCollection.single(), seed=1, dtype=dtype)


def save(root: Path, gpt: GPTModel, *, iteration: int = 7, **changes: Any) -> Path:
    """Save a checkpoint as training does, with some of its metadata changed."""
    extra = {
        "model": CONFIG.to_json(),
        "config": {"bf16": False, "max-position-embeddings": 40},
        "tokenizer": BYTES,
    }
    extra.update(changes)
    # JSON turns tuples into lists, as a stored checkpoint does.
    extra = json.loads(json.dumps({k: v for k, v in extra.items() if v is not None}))
    return save_checkpoint(root, iteration, weight_chunks(gpt.store), extra, coordinator=Solo())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder, make_model())
    return folder


def continuations(model: GPTModel) -> list[Completion]:
    """Return the completions of `PROMPTS` by `model` with `FLAGS`."""
    tokenizer = ByteTokenizer()
    prompts = [tuple(tokenizer.tokenize(text)) or (256,) for text in PROMPTS]
    return generate(
        model,
        [EngineRequest(prompt=p, sequence=i) for i, p in enumerate(prompts)],
        max_new_tokens=8,
        sampling=SamplingParams(temperature=0.8, top_k=50, seed=5),
        stop_tokens=(256,),
    )


def arguments(root: Path, *extra_flags: str) -> list[str]:
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    flags = last_wins(["--load", str(root), *FLAGS, "--device", "cpu", *extra_flags])
    return [*prompts, *flags]


def run(*words: str) -> tuple[int, str, str]:
    """Run the command in this process; return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words, {})
    return code, out.getvalue(), err.getvalue()


@pytest.mark.covers("generation")
def test_text_and_json_match_the_saved_model(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code, out, err = run(*arguments(root, "--output-json", str(path)))
    assert code == 0, err
    tokenizer = ByteTokenizer()
    prompts = [tuple(tokenizer.tokenize(text)) or (256,) for text in PROMPTS]
    expected = continuations(make_model())
    outputs = json.loads(path.read_text(encoding="utf-8"))
    for output, text, ids, completion in zip(outputs, PROMPTS, prompts, expected, strict=True):
        assert output["prompt"] == text
        assert tuple(output["prompt_ids"]) == ids
        assert output["ids"] == completion.tokens
        assert output["logprobs"] == completion.logprobs
        assert output["finish_reason"] == completion.finish_reason
        assert output["text"] == tokenizer.detokenize(completion.tokens)
        assert f"{text}{output['text']}\n" in out
    assert "--- prompt 3 of 3" in out
    assert "from 3 prompt(s)" in err
    assert "iter_0000007" in err


def command_on_rank(rank: int, world: int, words: list[str], launcher: dict[str, str]) -> Any:
    """Return the exit code, stdout, stderr, and the number of steps of the optimized forward."""
    steps: list[int] = []
    note_optimized_steps(steps)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words, {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    return code, out.getvalue(), err.getvalue(), len(steps)


def test_optimized_forward_generates_the_same_tokens(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    # note_optimized_steps replaces __call__; monkeypatch restores it after the test.
    monkeypatch.setattr(InferenceOptimizedModel, "__call__", InferenceOptimizedModel.__call__)
    note_optimized_steps(steps)
    reference_path, optimized_path = tmp_path / "one.json", tmp_path / "two.json"
    assert run(*arguments(root, "--output-json", str(reference_path)))[0] == 0
    assert not steps
    words = arguments(root, "--output-json", str(optimized_path), *OPTIMIZED)
    assert run(*words)[0] == 0
    assert len(steps) > 1
    assert_same_outputs(reference_path, optimized_path)


def assert_same_outputs(expected: Path, actual: Path) -> None:
    """Compare two output files: logprobs up to rounding, everything else exactly."""
    for a, b in zip(json.loads(expected.read_text()), json.loads(actual.read_text()), strict=True):
        logprobs = torch.tensor([a.pop("logprobs"), b.pop("logprobs")])
        assert a == b
        torch.testing.assert_close(logprobs[0], logprobs[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        TENSOR,
        (*TENSOR, "--sequence-parallel"),
        (*TENSOR, *OPTIMIZED),
        (*TENSOR, "--sequence-parallel", *OPTIMIZED),
        PIPELINE,
        (*PIPELINE, "--pipeline-model-parallel-layout", "E|ttL", *OPTIMIZED),
    ],
)
@pytest.mark.covers("generation")
def test_two_ranks_write_the_single_process_output(
    root: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    single_path, ranks_path = tmp_path / "one.json", tmp_path / "two.json"
    _, text, _ = run(*arguments(root, "--output-json", str(single_path)))
    _store, launcher = serve_store(2)
    words = arguments(root, "--output-json", str(ranks_path), *layout)
    with start_ranks(command_on_rank, 2, words, launcher, init=False) as ranks:
        (code, out, err, steps), (code_1, out_1, err_1, _) = ranks.values(timeout=60.0)
    assert (code, code_1) == (0, 0), err + err_1
    assert (steps > 1) == ("inference_optimized" in layout)
    assert out == text
    assert out_1 == ""
    assert "from 3 prompt(s)" in err
    assert err_1 == ""
    reason = "sequence parallel collectives: torch.distributed (rank 0: the model is on cpu, "
    assert (reason in err) == ({"--sequence-parallel", *OPTIMIZED} <= set(layout))
    assert_same_outputs(single_path, ranks_path)


@pytest.mark.parametrize(("mode", "code"), [("require", 2), ("off", 0), ("tries", 0)])
def test_nvls_mode_applies_to_both_ranks(root: Path, tmp_path: Path, mode: str, code: int) -> None:
    _store, launcher = serve_store(2)
    words = arguments(root, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    words += [*OPTIMIZED, "--output-json", str(tmp_path / "out.json")]
    words += ["--nvls", mode] if mode != "tries" else ["--nvls-tries", "9"]
    with start_ranks(command_on_rank, 2, words, launcher, init=False) as ranks:
        outcomes = ranks.values(timeout=60.0)
    assert [outcome[0] for outcome in outcomes] == [code, code], outcomes
    log = outcomes[0][2]
    if mode == "tries":
        assert "--nvls-tries has no effect on torch.distributed" in log
        return
    if mode == "off":
        assert "sequence parallel collectives: torch.distributed (--nvls off)" in log
        return
    assert "--nvls require: the collectives would go through torch.distributed (rank 0: the" in log
    assert "use --nvls auto" in log
    assert log.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("heads", "groups", "message"),
    [(3, 1, "num-attention-heads 3"), (6, 3, "num-query-groups 3")],
)
def test_heads_not_divisible_by_ranks_are_refused(
    tmp_path: Path, heads: int, groups: int, message: str
) -> None:
    attention = replace(CONFIG.attention, num_attention_heads=heads, num_query_groups=groups)
    config = replace(CONFIG, attention=attention)
    model = GPTModel(config, ProcessGroupCollection.single(), seed=1)
    save(tmp_path / "root", model, model=config.to_json())
    words = arguments(tmp_path / "root", *TENSOR, "--sequence-parallel", *OPTIMIZED)
    _store, launcher = serve_store(2)
    with start_ranks(command_on_rank, 2, words, launcher, init=False) as ranks:
        outcomes = ranks.values(timeout=60.0)
    assert [outcome[0] for outcome in outcomes] == [2, 2]
    assert message in outcomes[0][2]
    assert outcomes[0][2].count("\n") == 1


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.003), ("int8", 0.01)])
def test_low_bit_weights_give_nearly_the_same_logprobs(
    root: Path, tmp_path: Path, dtype: str, bound: float
) -> None:
    full_path, low_bit_path = tmp_path / "one.json", tmp_path / "two.json"
    assert run(*arguments(root, "--prompt-logprobs", "--output-json", str(full_path)))[0] == 0
    words = arguments(root, "--prompt-logprobs", "--output-json", str(low_bit_path), *OPTIMIZED)
    code, _, err = run(*words, "--weights-dtype", dtype)
    assert code == 0, err
    match = re.search(
        rf"{dtype} weights: copies of 9 matrices, .* relative error .*, at most (.*)%", err
    )
    assert 0 < float(match[1]) / 100 < bound
    logprobs = [
        torch.tensor(json.loads(path.read_text())[2]["prompt_logprobs"])
        for path in (full_path, low_bit_path)
    ]
    difference = (logprobs[0] - logprobs[1]).abs().max()
    assert 1e-5 < difference < 0.5


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norm_without_fused_form_is_reported(tmp_path: Path, kind: Any) -> None:
    config = replace(CONFIG, norm=NormConfig(kind=kind))
    model = GPTModel(config, ProcessGroupCollection.single(), seed=1)
    save(tmp_path / "root", model, model=config.to_json())
    reference_path, optimized_path = tmp_path / "one.json", tmp_path / "two.json"
    assert run(*arguments(tmp_path / "root", "--output-json", str(reference_path)))[0] == 0
    words = arguments(tmp_path / "root", "--output-json", str(optimized_path), *OPTIMIZED)
    code, _, err = run(*words)
    assert code == 0, err
    assert ("LayerNorm runs as in training: only RMSNorm is fused" in err) == (kind == "LayerNorm")
    assert_same_outputs(reference_path, optimized_path)


def test_low_bit_weights_need_the_optimized_forward() -> None:
    code, _, err = run("--load", "nowhere", "--prompt", "a", "--weights-dtype", "int8")
    assert code == 2
    assert "--weights-dtype int8 needs --transformer-impl inference_optimized" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "option", [("--nvls", "require"), ("--nvls", "off"), ("--nvls-tries", "9")]
)
@pytest.mark.parametrize("extra_flags", [(), OPTIMIZED])
def test_nvls_option_without_nvls_collectives_is_refused(
    option: tuple[str, str], extra_flags: tuple[str, ...]
) -> None:
    code, _, err = run("--load", "nowhere", "--prompt", "a", *option, *extra_flags)
    assert code == 2
    assert f"{' '.join(option)} applies to the collectives of --sequence-parallel" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "nvls_flags", [("--nvls-tries", "0"), ("--nvls-tries", "9", "--nvls", "off")]
)
def test_invalid_nvls_tries_are_refused(nvls_flags: tuple[str, ...]) -> None:
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel", *OPTIMIZED)
    code, _, err = run("--load", "nowhere", "--prompt", "a", *layout, *nvls_flags)
    assert code == 2
    assert f"--nvls-tries is {nvls_flags[1]}" in err
    assert err.count("\n") == 1


def test_bf16_iteration_folder_is_loaded(tmp_path: Path) -> None:
    model = make_model(torch.bfloat16)
    folder = save(tmp_path / "root", model, config={"bf16": True, "seq-length": 40})
    path = tmp_path / "out.json"
    code, _, err = run(*arguments(folder, "--output-json", str(path)))
    assert code == 0, err
    actual = [(r["ids"], r["logprobs"]) for r in json.loads(path.read_text(encoding="utf-8"))]
    assert actual == [(c.tokens, c.logprobs) for c in continuations(model)]


def test_recorded_tokenizer_is_used_and_other_file_is_warned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other_path = tmp_path / "tokenizer.json", tmp_path / "other.json"
    tokenizer = train_bpe(["low lower lowest"] * 3, 262, path)
    train_bpe(["wide wider widest"] * 3, 262, other_path)
    recorded = {"type": "hf", "model": str(path), "fingerprint": tokenizer.fingerprint}
    assert choose_tokenizer(recorded, None).tokenize("lower") == tokenizer.tokenize("lower")
    assert choose_tokenizer(recorded, str(path)).tokenize("lower") == tokenizer.tokenize("lower")
    assert capsys.readouterr().err == ""
    assert choose_tokenizer(recorded, str(other_path)).tokenize("low") != tokenizer.tokenize("low")
    assert "is not the file that the model was trained with" in capsys.readouterr().err
    other_path.replace(path)
    with pytest.raises(ValueError, match="has changed since"):
        choose_tokenizer(recorded, None)


def changed(**changes: Any) -> dict[str, Any]:
    return changes


@pytest.mark.parametrize(
    ("changes", "words", "text"),
    [
        (changed(), ["--max-new-tokens", "30"], "prompt 3 of 3"),
        (changed(), ["--top-p", "0"], "top-p"),
        (changed(), list(TENSOR), TENSOR[0]),
        (changed(), list(PIPELINE), PIPELINE[0]),
        (changed(), ["--expert-model-parallel-size", "2"], "--expert-model-parallel-size 2"),
        (changed(), [*PIPELINE[:1], "1", "--pipeline-model-parallel-layout", "EttL"], PIPELINE[0]),
        (changed(), ["--tokenizer-model", "none.json"], "none.json"),
        (changed(tokenizer=None), [], "--tokenizer-model"),
        (changed(tokenizer={**BYTES, "fingerprint": "x"}), [], "--tokenizer-model"),
        (changed(model=None), [], "'model'"),
        (changed(model={**CONFIG.to_json(), "depth": 3}), [], "depth"),
        (changed(model=replace(CONFIG, hidden_size=40).to_json()), [], "[32, 40]"),
    ],
)
def test_invalid_option_or_checkpoint_is_refused_in_one_line(
    changes: dict[str, Any], words: list[str], text: str, tmp_path: Path
) -> None:
    save(tmp_path, make_model(), **changes)
    code, out, err = run(*arguments(tmp_path, *words))
    assert code == 2
    assert text in err
    assert err.count("\n") == 1
    assert out == ""


def test_missing_or_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", tmp_path, tmp_path / "iter_0000001"):
        code, _, err = run(*arguments(missing))
        assert code == 2
        assert f"--load {missing}" in err
        assert "there is no" in err
    folder = save(tmp_path, make_model())
    (shard,) = folder.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    code, _, err = run(*arguments(tmp_path))
    assert code == 2
    assert shard.name in err


def test_damaged_newest_checkpoint_is_skipped_with_a_warning(root: Path, tmp_path: Path) -> None:
    expected = run(*arguments(root))
    older = save(tmp_path, make_model())
    newest = save(tmp_path, make_model(), iteration=9)
    shard = newest / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-9] ^= 64
    shard.write_bytes(content)
    code, out, err = run(*arguments(tmp_path))
    assert (code, out) == (0, expected[1])
    assert f"WARNING: falling back to {older}: {shard} is damaged" in err


@pytest.mark.parametrize("words", [["--prompt", "a b", "--prompt", "null"], ["--top-k", "7"]])
def test_print_config_needs_no_checkpoint_and_reads_back(words: list[str], tmp_path: Path) -> None:
    code, out, _ = run("--load", "nowhere", *words, "--print-config")
    assert code == 0
    file = tmp_path / "g.yaml"
    file.write_text(out, encoding="utf-8")
    assert run("--config", str(file), "--print-config") == (0, out, "")


def command_with_rank_1_killed(
    rank: int, world: int, words: list[str], launcher: dict[str, str]
) -> Any:
    step, step_numbers = Engine.step, itertools.count(1)

    def dying(engine: Engine) -> list[OutputDelta]:
        if rank == 1 and next(step_numbers) == 4:
            os._exit(9)
        return step(engine)

    Engine.step = dying  # type: ignore[method-assign]
    return command_on_rank(rank, world, words, launcher)


def test_death_of_a_rank_ends_its_peers(root: Path) -> None:
    _store, launcher = serve_store(2)
    words = arguments(root, "--tensor-model-parallel-size", "2")
    words += ["--distributed-timeout-minutes", "0.2"]
    with start_ranks(command_with_rank_1_killed, 2, words, launcher, init=False) as ranks:
        survivor, killed = ranks.outcomes(timeout=60.0)
    assert killed.exit_code == 9
    code, _, err, _ = survivor.value
    assert code == ExitCode.PEER_LOST
    assert "rank 0 lost contact with another rank" in err
    assert err.count("\n") == 1
