# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding by the command line and `LLM`: texts, statistics and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megatron.cli.tokenizers import train_bpe
from megatron.core.inference import EngineConfig
from megatron.core.inference.speculation import DraftModel
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.transformer import CacheShapes
from megatron.inference import LLM, Inference, Speculation, TextParams, bench, generate
from megatron.inference.build_engine import split_cache_memory
from megatron.inference.server.engine.control import EngineControl
from tests.support.commands import refusal, run, run_on_ranks
from tests.support.gpt_checkpoint import make_model, save
from tests.unit_tests.inference.test_generate import GREEDY, Loaded
from tests.unit_tests.inference.test_hybrids import CONFIG as HYBRID


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("drafts")
    path = root / "tokenizer.json"
    tokenizer = train_bpe(["low lower lowest"] * 3, 259, path)
    merged = {"type": "hf", "model": str(path), "fingerprint": tokenizer.fingerprint}
    return {
        "merged": str(save(root / "merged", make_model(), length=120, tokenizer=merged)),
        "model": str(save(root / "model", make_model(mtp=MTPConfig(num_layers=2)), length=120)),
        "plain": str(save(root / "plain", make_model(), length=120)),
        "larger": str(save(root / "larger", make_model(vocab_size=300), length=120)),
    }


def arguments(*words: str) -> list[str]:
    """Return words that generate on a CPU."""
    return ["--device", "cpu", *words]


PROMPTS = ("--prompt", "to be or not to be or not to be", "--prompt", "A")
TEXT = (*PROMPTS, "--max-new-tokens", "20", "--temperature", "0.7", "--seed", "3")


def test_every_kind_of_draft_yields_the_same_text(folders: dict[str, str]) -> None:
    plain = run(generate.main, arguments("--load", folders["model"], *TEXT))
    assert " draft tokens, " not in plain.err
    methods = {
        "ngram": ("--num-speculative-tokens", "3", "--async-scheduling"),
        "draft": ("--speculative-draft-model", folders["plain"]),
        "mtp": ("--transformer-impl", "local"),
    }
    for method, words in methods.items():
        words = ("--load", folders["model"], "--speculative-method", method, *words, *TEXT)
        code, out, err, _ = run(generate.main, arguments(*words))
        assert (code, out) == (0, plain.out), err
        assert " draft tokens, " in err
        if method == "draft":  # its weights are the model's
            assert float(err.split(" tokens per forward")[0].split()[-1]) > 3


@pytest.mark.parametrize(
    "method",
    [("mtp",), ("mtp", "--transformer-impl", "local"), ("draft",)],
    ids=" ".join,
)
def test_speculation_on_two_stages_prints_single_process_text(
    folders: dict[str, str], method: tuple[str, ...]
) -> None:
    words = arguments("--load", folders["model"], *TEXT)
    plain = run(generate.main, words)
    words += ["--speculative-method", *method, "--pipeline-model-parallel-size", "2"]
    if "draft" in method:
        words += ["--speculative-draft-model", folders["plain"]]
    (code, out, err, steps), rank_1 = run_on_ranks(generate.main, words)
    assert (code, rank_1.code) == (0, 0), err + rank_1.err
    assert (out, rank_1.out) == (plain.out, "")
    assert (steps > 1) == ("local" not in method)
    assert " draft tokens, " in err
    if "draft" in method:  # its weights are the model's
        assert float(err.split(" tokens per forward")[0].split()[-1]) > 3


def test_bench_counts_drafts(folders: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    words = ["--num-requests", "3", "--max-output-tokens", "20", "--repeats", "1", "--warmup", "0"]
    words += ["--load", folders["model"], "--output-json", str(path), "--inference-memory-gb"]
    words += ["0.002", "--speculative-method", "draft"]
    words += ["--speculative-draft-model", folders["plain"]]
    code, _, err, _ = run(bench.main, arguments(*words))
    assert code == 0, err
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["drafts_accepted"] == report["drafts_proposed"] > 0
    assert report["tokens_per_forward"] > 3
    assert 0.4e6 < report["cache_bytes"] <= 1e6  # half of the memory is the draft model's


SHAPES = {
    "attention": CacheShapes(attention=((2, 8), (2, 8))),
    "larger": CacheShapes(attention=((2, 8),) * 8),
    "recurrent": CacheShapes(states={"a": ((3, 50), torch.float32)}),
    "hybrid": CacheShapes(attention=((2, 8),), states={"a": ((3, 50), torch.float32)}),
    "none": CacheShapes(),  # a pipeline stage of MLPs
}


def minimum_bytes(shapes: CacheShapes, config: EngineConfig) -> int:
    """Return the bytes of all rows' recurrent states and of one block of tokens."""
    slots = 2 * config.max_num_seqs if config.num_speculative_tokens else config.max_num_seqs
    slots += 2 if config.prefix_caching else 1  # a snapshot's slot and the unused slot
    states = slots * 4 * 150 if shapes.states else 0
    return states + config.block_size * len(shapes.attention) * 2 * 2 * 8 * 4


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("draft", ["attention", "recurrent", "hybrid"])
@pytest.mark.parametrize("model", list(SHAPES))
def test_cache_memory_holds_states_and_blocks_of_both_models(model, draft, caching):
    target, drafter = SHAPES[model], SHAPES[draft]
    config = EngineConfig(max_num_seqs=3, prefix_caching=caching, num_speculative_tokens=4)
    minimum = minimum_bytes(target, config)
    minimum += minimum_bytes(drafter, dataclasses.replace(config, num_speculative_tokens=0))
    with pytest.raises(ValueError, match=f"give at least {minimum:,}$"):
        split_cache_memory(dataclasses.replace(config, memory_bytes=minimum - 1), target, drafter)
    for memory in (minimum, minimum + 1, minimum + 5000, 10 * minimum, 1_000_000):
        with_memory = dataclasses.replace(config, memory_bytes=memory)
        used = 0
        for engine, shapes in zip(
            split_cache_memory(with_memory, target, drafter), (target, drafter), strict=True
        ):
            blocks, slots = engine.sizes(shapes)
            assert blocks >= 1
            states = 4 * 150 * (slots + 1) if shapes.states else 0
            used += states + blocks * engine.block_size * shapes.token_bytes
        assert used <= memory
    if caching and model == "recurrent":
        engine, _ = split_cache_memory(with_memory, target, drafter)
        assert engine.sizes(target)[1] > 2 * config.max_num_seqs + 1, "snapshots of states"


def test_cache_memory_is_split_by_bytes_per_token():
    config = EngineConfig(memory_bytes=5_000_000)
    model_config, draft_config = split_cache_memory(config, SHAPES["larger"], SHAPES["attention"])
    assert (model_config.memory_bytes, draft_config.memory_bytes) == (4_000_000, 1_000_000)
    assert model_config.sizes(SHAPES["larger"]) == draft_config.sizes(SHAPES["attention"])


@pytest.mark.parametrize(("pattern", "stages"), [("M-G-", 1), ("M-*-", 2)])
def test_attention_free_first_stage_accepts_drafts(
    folders: dict[str, str], tmp_path: Path, pattern: str, stages: int
) -> None:
    mixers = {"mamba": HYBRID.mamba, "delta_net": HYBRID.delta_net, "ffn_pattern": ""}
    model = make_model(pattern=pattern, num_layers=len(pattern), **mixers)
    words = arguments("--load", str(save(tmp_path / "hybrid", model, length=120)), *TEXT)
    plain = run(generate.main, words)
    words += ["--inference-memory-gb", "0.002"]
    words += ["--speculative-method", "draft", "--speculative-draft-model", folders["plain"]]
    words += ["--pipeline-model-parallel-size", str(stages)]
    outcomes = run_on_ranks(generate.main, words, stages)
    code, out, err, _ = outcomes[0]
    assert (code, out) == (0, plain.out), err
    assert " draft tokens, " in err


def test_stop_string_ends_text_within_the_tokens_of_a_step() -> None:
    loaded = Loaded(max_length=100, speculation=Speculation(speculative_method="ngram"))
    llm = LLM(loaded, Inference())
    text = "abcdefghijklmnop"
    params = TextParams(max_new_tokens=20, sampling=GREEDY, stop=("hij",))
    (output,) = llm.generate([text + text[:3]], params)
    assert (output.text, output.finish_reason) == ("defg", "stop")
    assert output.ids == tuple(b"defghij")
    assert len(output.logprobs) == 7
    assert llm.engine.stats.steps < 4
    assert llm.engine.unfinished == 0


def test_steps_of_a_draft_model_are_recorded_on_cpu(folders: dict[str, str]) -> None:
    speculation = Speculation(speculative_method="draft", speculative_draft_model=folders["plain"])
    params, outputs = TextParams(max_new_tokens=12, sampling=GREEDY), []
    for eager in (False, True):
        with LLM.open(
            folders["model"],
            speculation=speculation,
            inference=Inference(enforce_eager=eager),
            device="cpu",
            transformer_impl="inference_optimized",
        ) as llm:
            outputs.append(llm.generate(["AB"], params)[0].ids)
            assert isinstance(llm.engine.proposer, DraftModel)
            graphs = llm.engine.graphs, llm.engine.proposer.engine.graphs
        assert all(recorder is None if eager else recorder.replayed > 0 for recorder in graphs)
    assert outputs[0] == outputs[1]


def test_draft_model_sleeps_with_the_model(folders: dict[str, str]) -> None:
    speculation = Speculation(speculative_method="draft", speculative_draft_model=folders["plain"])
    params = TextParams(max_new_tokens=12, sampling=GREEDY)
    with LLM.open(folders["model"], speculation=speculation, device="cpu") as llm:
        assert isinstance(llm.engine.proposer, DraftModel)
        caches = llm.engine.cache, llm.engine.proposer.engine.cache
        before, (expected,) = [cache.num_bytes for cache in caches], llm.generate(["A"], params)
        llm.sleep()
        assert [cache.num_bytes for cache in caches] == [0, 0]
        llm.wake()
        assert [cache.num_bytes for cache in caches] == before
        accepted = llm.engine.stats.accepted
        (output,) = llm.generate(["A"], params)
        assert output.ids == expected.ids
        assert llm.engine.stats.accepted > accepted
        # The same through a server's administration.
        control = EngineControl(llm.replicas, llm.loaded)
        with pytest.raises(ValueError, match="sleep level 2"):
            control.apply({"action": "sleep", "level": 2})
        control.apply({"action": "sleep", "level": 1})
        assert [cache.num_bytes for cache in caches] == [0, 0]
        control.apply({"action": "wake"})
        assert [cache.num_bytes for cache in caches] == before


DRAFT = ["--speculative-method", "draft", "--speculative-draft-model"]


@pytest.mark.parametrize(
    ("load", "words", "named"),
    [
        ("plain", ["--speculative-method", "mtp"], "no multi-token prediction layers"),
        ("model", ["--speculative-method", "mtp", "--num-speculative-tokens", "3"], "at most 2"),
        ("model", ["--speculative-method", "draft"], "--speculative-draft-model"),
        ("model", ["--num-speculative-tokens", "3"], "--speculative-method"),
        ("model", ["--speculative-method", "ngram", "--num-speculative-tokens", "0"], "is 0"),
        ("model", ["--speculative-method", "ngram", "--num-speculative-tokens", "80"], "is 80"),
        ("model", [*DRAFT, "larger"], "300"),
        ("model", [*DRAFT, "merged"], "another tokenizer"),
        ("model", ["--speculative-method", "mtp", "--async-scheduling"], "--async-scheduling"),
    ],
)
def test_invalid_speculation_options_are_named(
    folders: dict[str, str], load: str, words: list[str], named: str
) -> None:
    words = [folders.get(word, word) for word in words]
    words = ["--load", folders[load], *words, "--prompt", "A", "--max-new-tokens", "40"]
    assert named in refusal(run(generate.main, arguments(*words)))
