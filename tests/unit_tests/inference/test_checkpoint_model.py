# SPDX-License-Identifier: Apache-2.0
"""The command from a checkpoint to text and JSON: one process, two ranks, and refusals."""

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
from megatron.cli.tokenizers import ByteTokenizer, choose_tokenizer, train_bpe
from megatron.core.inference import Completion, Engine, EngineRequest, OutputDelta, SamplingParams
from megatron.core.models import GPTModel, InferenceOptimizedModel
from megatron.core.ops.matmul import low_bit
from megatron.core.ops.matmul.onednn import agrees
from megatron.core.transformer import NormConfig
from megatron.core.weight_gather import handle
from megatron.inference import checkpoint_model, generate
from tests.support.arguments import last_wins
from tests.support.commands import refusal, run, run_on_ranks, run_rank
from tests.support.gpt_checkpoint import BYTES, CONFIG, damage, make_model, save
from tests.support.launchers import serve_store
from tests.support.one_batch import generate as generate_batch
from tests.support.optimized_steps import note_optimized_steps
from tests.support.ranks import start_ranks

PROMPTS = ("Once", "", "two words é")
TENSOR, PIPELINE = ((f"--{name}-model-parallel-size", "2") for name in ("tensor", "pipeline"))
LOCAL = ("--transformer-impl", "local")
SHARDED = (*TENSOR, "--sequence-parallel")
FLAGS = ["--max-new-tokens", "8", "--temperature", "0.8", "--top-k", "50", "--seed", "5"]


def continuations(model: GPTModel) -> list[Completion]:
    """Return the completions of `PROMPTS` by `model` with `FLAGS`."""
    tokenizer = ByteTokenizer()
    prompts = [tuple(tokenizer.tokenize(text)) or (256,) for text in PROMPTS]
    return generate_batch(
        model,
        [EngineRequest(prompt=p, sequence=i) for i, p in enumerate(prompts)],
        max_new_tokens=8,
        sampling=SamplingParams(temperature=0.8, top_k=50, seed=5),
        stop_tokens=(256,),
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint of texts of 40 tokens."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder, make_model())
    return folder


def arguments(root: Path, *extra_flags: str) -> list[str]:
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    flags = last_wins(["--load", str(root), *FLAGS, "--device", "cpu", *extra_flags])
    return [*prompts, *flags]


@pytest.mark.covers("generation")
def test_text_and_json_match_the_saved_model(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code, out, err, _ = run(generate.main, arguments(root, "--output-json", str(path)))
    assert code == 0, err
    tokenizer = ByteTokenizer()
    prompts = [tuple(tokenizer.tokenize(text)) or (256,) for text in PROMPTS]
    expected = continuations(make_model())
    outputs = json.loads(path.read_text(encoding="utf-8"))
    for output, text, ids, completion in zip(outputs, PROMPTS, prompts, expected, strict=True):
        assert output["prompt"] == text
        assert tuple(output["prompt_ids"]) == ids
        assert output["ids"] == completion.tokens
        assert output["logprobs"] == pytest.approx(completion.logprobs, abs=1e-5)
        assert output["finish_reason"] == completion.finish_reason
        assert output["text"] == tokenizer.detokenize(completion.tokens)
        assert f"{text}{output['text']}\n" in out
    assert "--- prompt 3 of 3" in out
    assert "from 3 prompt(s)" in err
    assert "iter_0000007" in err


def test_default_is_the_optimized_forward_with_the_same_tokens(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    # note_optimized_steps replaces __call__; monkeypatch restores it after the test.
    monkeypatch.setattr(InferenceOptimizedModel, "__call__", InferenceOptimizedModel.__call__)
    note_optimized_steps(steps)
    reference_path, optimized_path = tmp_path / "one.json", tmp_path / "two.json"
    words = arguments(root, "--output-json")
    assert run(generate.main, [*words, str(reference_path), *LOCAL]).code == 0
    assert not steps
    assert run(generate.main, [*words, str(optimized_path)]).code == 0
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
        (*TENSOR, *LOCAL),
        (*SHARDED, *LOCAL),
        TENSOR,
        SHARDED,
        (*PIPELINE, *LOCAL),
        (*PIPELINE, "--pipeline-model-parallel-layout", "E|ttL"),
    ],
)
@pytest.mark.covers("generation")
def test_two_ranks_write_the_single_process_output(
    root: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    single_path, ranks_path = tmp_path / "one.json", tmp_path / "two.json"
    text = run(generate.main, arguments(root, "--output-json", str(single_path))).out
    words = arguments(root, "--output-json", str(ranks_path), *layout)
    (code, out, err, steps), rank_1 = run_on_ranks(generate.main, words)
    assert (code, rank_1[:3]) == (0, (0, "", "")), err + rank_1.err
    assert (steps > 1) == ("local" not in layout)
    assert out == text
    assert "from 3 prompt(s)" in err
    reason = "sequence parallel collectives: torch.distributed (rank 0: the model is on cpu, "
    assert (reason in err) == (layout == SHARDED)
    assert_same_outputs(single_path, ranks_path)


@pytest.mark.parametrize(("mode", "code"), [("require", 2), ("off", 0), ("tries", 0)])
def test_nvls_mode_applies_to_both_ranks(root: Path, tmp_path: Path, mode: str, code: int) -> None:
    words = arguments(root, *SHARDED)
    words += ["--output-json", str(tmp_path / "out.json")]
    words += ["--nvls", mode] if mode != "tries" else ["--nvls-tries", "9"]
    outcomes = run_on_ranks(generate.main, words)
    assert [outcome.code for outcome in outcomes] == [code, code], outcomes
    log = outcomes[0].err
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


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.003), ("int8", 0.01)])
def test_low_bit_weights_give_nearly_the_same_logprobs(
    root: Path, tmp_path: Path, dtype: str, bound: float
) -> None:
    full_path, low_bit_path = tmp_path / "one.json", tmp_path / "two.json"
    words = arguments(root, "--prompt-logprobs", "--output-json")
    assert run(generate.main, [*words, full_path]).code == 0
    words += [str(low_bit_path), "--weights-dtype", dtype]
    code, _, err, _ = run(generate.main, words)
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


def test_int8_copies_are_batch_invariant(root: Path, tmp_path: Path) -> None:
    words = ["--load", str(root), *FLAGS, "--device", "cpu", "--seed", "5", "--batch-invariant"]
    words = last_wins([*words, "--weights-dtype", "int8"])
    outputs = []
    for number, prompts in enumerate((PROMPTS, PROMPTS[:1])):
        path = tmp_path / f"{number}.json"
        flags = [word for text in prompts for word in ("--prompt", text)]
        code, _, err, _ = run(generate.main, [*words, *flags, "--output-json", str(path)])
        assert code == 0, err
        assert "int8 weights: copies of 9 matrices" in err
        assert "batch-invariant: 0 matrices packed" in err
        outputs.append(json.loads(path.read_text())[0])
    assert outputs[0] == outputs[1]


def test_layer_norms_run_in_the_optimized_forward(tmp_path: Path) -> None:
    save(tmp_path / "root", make_model(norm=NormConfig(kind="LayerNorm")))
    reference_path, optimized_path = tmp_path / "one.json", tmp_path / "two.json"
    words = arguments(tmp_path / "root", "--output-json")
    assert run(generate.main, [*words, str(reference_path), *LOCAL]).code == 0
    assert run(generate.main, [*words, str(optimized_path)]).code == 0
    assert_same_outputs(reference_path, optimized_path)


@pytest.mark.parametrize(
    ("available", "flags", "line"),
    [
        (
            10**12,
            (),
            "bf16 weights: copies of 9 matrices, 9 packed by oneDNN, .* the copies are exact",
        ),
        (1000, (), "--weights-dtype auto: packed copies of the weights need .* MB a rank, over"),
        (10**12, ("--weights-dtype", "stored"), None),
        (10**12, LOCAL, None),
    ],
)
def test_bf16_checkpoint_is_multiplied_by_packed_copies(
    available: int,
    flags: tuple[str, ...],
    line: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint_model, "available_memory_bytes", lambda: available)
    for module in (handle, low_bit):
        monkeypatch.setattr(module, "matmul_dtype", lambda *_: torch.bfloat16)
    model = make_model(dtype=torch.bfloat16)
    folder = save(tmp_path / "root", model, config={"bf16": True, "seq-length": 40})
    path = tmp_path / "out.json"
    code, _, err, _ = run(generate.main, arguments(folder, "--output-json", str(path), *flags))
    assert code == 0, err
    if line is None or not agrees(32, 32, torch.bfloat16, packed=True):
        assert "packed" not in err
    else:
        assert re.search(line, err), err
    for output, completion in zip(json.loads(path.read_text()), continuations(model), strict=True):
        if flags == LOCAL:
            assert (output["ids"], output["logprobs"]) == (completion.tokens, completion.logprobs)
        else:  # another order of sums, rounded to bf16
            same = [a == b for a, b in zip(output["ids"], completion.tokens, strict=False)]
            length = (same + [False]).index(False)
            assert length > 0
            assert output["logprobs"][:length] == pytest.approx(
                completion.logprobs[:length], abs=0.2
            )


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


@pytest.mark.parametrize(
    ("changes", "words", "text"),
    [
        ({}, ["--max-new-tokens", "30"], "prompt 3 of 3"),
        ({}, ["--top-p", "0"], "top-p"),
        ({}, list(TENSOR), TENSOR[0]),
        ({}, list(PIPELINE), PIPELINE[0]),
        ({}, ["--expert-model-parallel-size", "2"], "--expert-model-parallel-size 2"),
        ({}, [*PIPELINE[:1], "1", "--pipeline-model-parallel-layout", "EttL"], PIPELINE[0]),
        ({}, ["--tokenizer-model", "none.json"], "none.json"),
        ({"tokenizer": None}, [], "--tokenizer-model"),
        ({"tokenizer": {**BYTES, "fingerprint": "x"}}, [], "--tokenizer-model"),
        ({}, ["--weights-dtype", "bf16", "--batch-invariant"], "--batch-invariant"),
        *(
            ({}, [*option, *flags], f"{' '.join(option)} applies to the collectives of")
            for option in (("--nvls", "require"), ("--nvls", "off"), ("--nvls-tries", "9"))
            for flags in ((), (*SHARDED, *LOCAL))
        ),
        ({}, [*SHARDED, "--nvls-tries", "0"], "--nvls-tries is 0"),
        ({}, [*SHARDED, "--nvls-tries", "9", "--nvls", "off"], "--nvls-tries is 9"),
        ({"model": None}, [], "'model'"),
        ({"model": {**CONFIG.to_json(), "depth": 3}}, [], "depth"),
        ({"model": replace(CONFIG, hidden_size=40).to_json()}, [], "[32, 40]"),
    ],
)
def test_invalid_option_or_checkpoint_is_refused_in_one_line(
    changes: dict[str, Any], words: list[str], text: str, tmp_path: Path
) -> None:
    save(tmp_path, make_model(), **changes)
    assert text in refusal(run(generate.main, arguments(tmp_path, *words)))


@pytest.mark.parametrize(
    ("heads", "groups", "text"),
    [(3, 1, "num-attention-heads 3"), (6, 3, "num-query-groups 3")],
)
def test_heads_not_divisible_by_ranks_are_refused(
    tmp_path: Path, heads: int, groups: int, text: str
) -> None:
    attention = replace(CONFIG.attention, num_attention_heads=heads, num_query_groups=groups)
    save(tmp_path / "root", make_model(attention=attention))
    outcomes = run_on_ranks(generate.main, arguments(tmp_path / "root", *SHARDED))
    assert text in refusal(outcomes[0])
    assert outcomes[1].code == 2


def test_missing_or_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", tmp_path, tmp_path / "iter_0000001"):
        line = refusal(run(generate.main, arguments(missing)))
        assert f"--load {missing}: there is no" in line
    shard = damage(save(tmp_path, make_model()))
    assert shard.name in run(generate.main, arguments(tmp_path)).err


def test_damaged_newest_checkpoint_is_skipped_with_a_warning(root: Path, tmp_path: Path) -> None:
    older = save(tmp_path, make_model())
    shard = damage(save(tmp_path, make_model(), iteration=9))
    code, out, err, _ = run(generate.main, arguments(tmp_path))
    assert (code, out) == (0, run(generate.main, arguments(root)).out)
    assert f"WARNING: falling back to {older}: {shard} is damaged" in err


@pytest.mark.parametrize("words", [["--prompt", "a b", "--prompt", "null"], ["--top-k", "7"]])
def test_print_config_needs_no_checkpoint_and_reads_back(words: list[str], tmp_path: Path) -> None:
    code, out, *_ = run(generate.main, ["--load", "nowhere", *words, "--print-config"])
    assert code == 0
    file = tmp_path / "g.yaml"
    file.write_text(out, encoding="utf-8")
    assert run(generate.main, ["--config", file, "--print-config"]) == (0, out, "", 0)


def command_with_rank_1_killed(
    rank: int, world: int, words: list[str], launcher: dict[str, str]
) -> Any:
    step, step_numbers = Engine.step, itertools.count(1)

    def dying(engine: Engine) -> list[OutputDelta]:
        if rank == 1 and next(step_numbers) == 4:
            os._exit(9)
        return step(engine)

    Engine.step = dying  # type: ignore[method-assign]
    return run_rank(rank, world, generate.main, words, launcher)


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
