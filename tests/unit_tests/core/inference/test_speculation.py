# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: proposals, unchanged token distribution, and rejected drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.inference import (
    Completion,
    Engine,
    EngineConfig,
    EngineRequest,
    SamplingParams,
    generate,
)
from megatron.core.inference.model_runner import EngineFeatures
from megatron.core.inference.request_state import MAX_BACKOFF_STEPS, DraftContext, DraftLength
from megatron.core.inference.sampling import accepted_drafts, uniform
from megatron.core.inference.speculation import (
    MultiTokenHeads,
    NGramLookup,
    Proposer,
)
from megatron.core.models import InferenceOptimizedModel
from megatron.core.ops.sampling.cpu import draw_weights, invert
from tests.support.inputs import generator, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.support.stub_model import StubModel
from tests.unit_tests.core.inference.test_engine import (
    DRAWN,
    GREEDY,
    VOCABULARY,
    engine_of,
    model_of,
    requests,
)

# --- the distribution -----------------------------------------------------------------------------

DRAWS, WORDS = 100_000, 6


def two_models() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [1 + V, V] of a model and of a similar draft model.

    Row 0 is for the first token, row 1 + t for the token after t.
    """
    source = generator(1)
    model, noise = torch.randn(2, 1 + WORDS, WORDS, generator=source)
    return 1.5 * model, 1.5 * model + 0.4 * noise


@functools.cache
def uniforms_at(position: int) -> torch.Tensor:
    """Return the random numbers of all sequences at a position, fp64 [DRAWS]."""
    numbers = [uniform(3, sequence, position) for sequence in range(DRAWS)]
    return torch.tensor(numbers, dtype=torch.float64)


def draw_tokens(logits: torch.Tensor, rows: torch.Tensor, position: int) -> torch.Tensor:
    """Return the token that `sample` chooses for each sequence n from logits row `rows[n]`."""
    weights = draw_weights(logits, [SamplingParams()] * len(logits))
    return invert(weights[rows], uniforms_at(position))


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the p-value of a chi-square test of counts against probabilities."""
    expected = probabilities * counts.sum()
    square = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((counts.numel() - 1) / 2.0, dtype=torch.float64)
    return torch.special.gammaincc(freedom, square / 2).item()


@pytest.mark.parametrize("kind", ["fixed", "drawn"])
def test_token_pairs_follow_the_model_distribution(kind: str) -> None:
    """N-gram and greedy drafts are fixed tokens; a draft model samples from its distribution."""
    model, draft_logits = two_models()
    root_rows, drafts = torch.zeros(DRAWS, dtype=torch.int64), torch.full((DRAWS,), 3)
    if kind == "drawn":
        drafts = draw_tokens(draft_logits, root_rows, 7)
    # One step: a choice at the draft's position, and one after it.
    chosen, after_draft = draw_tokens(model, root_rows, 7), draw_tokens(model, 1 + drafts, 8)
    accepted = torch.tensor(
        [accepted_drafts([d], [c]) for d, c in zip(drafts.tolist(), chosen.tolist(), strict=True)]
    ).bool()
    # If the draft is rejected, the next step continues from the token that replaces it.
    following = torch.where(accepted, after_draft, draw_tokens(model, 1 + chosen, 8))
    pair_counts = torch.bincount(chosen * WORDS + following, minlength=WORDS**2).double()
    probabilities = model.double().softmax(-1)
    assert p_value(pair_counts, (probabilities[:1].t() * probabilities[1:]).flatten()) > 1e-3
    share = accepted.double().mean().item()
    max_share = 1 - (probabilities[0] - draft_logits[0].double().softmax(-1)).abs().sum().item() / 2
    if kind == "fixed":
        assert share == pytest.approx(probabilities[0, 3].item(), abs=0.01)
    else:  # no coupling accepts more than the overlap of the two distributions
        assert 0.5 < share <= max_share + 0.01
    # The test detects drafts that are accepted without verification.
    draft_counts = torch.bincount(drafts, minlength=WORDS).double()
    assert p_value(draft_counts + 1e-9, probabilities[0]) < 1e-3


# --- proposals ------------------------------------------------------------------------------------


class ScriptedProposer(Proposer):
    """A proposer whose drafts are a function of the row's tokens."""

    def __init__(self, script: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self.script = script

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        return [list(self.script(c.seq.tokens, c.max_drafts)) for c in contexts]


def counting_engine(proposer: object, drafts: int = 4, **config) -> Engine:
    """Return an engine with a model that counts from 0 to 6 and starts again."""
    sizes = {"num_blocks": 9, "num_speculative_tokens": drafts} | config
    return Engine(
        StubModel(VOCABULARY, lambda tokens: (tokens + 1) % 7),
        EngineConfig(**sizes),
        features=EngineFeatures(proposer=proposer),
    )


def counting_drafts(tokens: Sequence[int], count: int) -> list[int]:
    return [(tokens[-1] + 1 + n) % 7 for n in range(count)]


def test_ngram_drafts_follow_repeating_text() -> None:
    engine = counting_engine(NGramLookup())
    (completions,) = generate(
        engine, [EngineRequest(prompt=(0, 1, 2), max_new_tokens=90, sampling=GREEDY)]
    )
    assert completions[0].tokens == [(3 + n) % 7 for n in range(90)]
    assert engine.stats.tokens_per_forward > 3.5
    assert engine.stats.steps < 25


def test_ngram_lookup_uses_longest_then_latest_match() -> None:
    lookup = NGramLookup(longest=3, shortest=2)
    drafts: list[list[int]] = []

    def propose_nothing(tokens: Sequence[int], count: int) -> list[int]:
        return []

    engine = counting_engine(ScriptedProposer(propose_nothing), max_num_seqs=3)
    for prompt in (
        (1, 2, 3, 9, 8, 2, 3, 4, 1, 2, 3),  # 1, 2, 3 before 2, 3
        (5, 6, 1, 5, 6, 2, 5, 6),  # the later of two
        (5, 6, 1, 6),  # one token is too short
    ):
        engine.add(EngineRequest(prompt=prompt, max_new_tokens=9, sampling=GREEDY))
    for row in engine.scheduler.waiting:
        drafts += lookup.propose([engine._outputs[row].context(3)])
    assert drafts == [[9, 8, 2], [2, 5, 6], []]


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("family", ["gqa", "window and sinks", "latent", "hybrid"])
def test_mtp_drafts_match_the_training_forward(family: str, optimized: bool) -> None:
    """Drafts of one MTP layer equal its forward pass over the whole text, as in training."""
    model = model_of(family, depths=1)
    proposed: dict[tuple[int, ...], int] = {}

    class RecordingHeads(MultiTokenHeads):
        def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
            drafts_of_rows = super().propose(contexts)
            for context, drafts in zip(contexts, drafts_of_rows, strict=True):
                proposed.update({tuple(context.seq.tokens): draft for draft in drafts})
            return drafts_of_rows

    generator = InferenceOptimizedModel(model) if optimized else model
    engine = engine_of(
        model, RecordingHeads(generator, 1), num_speculative_tokens=1, max_num_batched_tokens=30
    )
    engine.runner.model = generator
    with nan_memory():
        generate(engine, requests())
    checked = 0
    for tokens, draft in list(proposed.items())[::3]:
        mtp_layer, layout = (
            model.multi_token.layers[0],
            model._layout_of(torch.tensor([tokens]), None),
        )
        next_tokens = torch.tensor([[*tokens[1:], 0]])
        with torch.no_grad():
            hidden = model(torch.tensor([tokens]))
            rope = model.rotary(layout.positions)
            hidden = mtp_layer(hidden, next_tokens, layout, rope=rope, aux_factor=None)
            logits = model.head.whole(model.head.project(hidden))[-2, 0]
        assert draft == logits.argmax().item()
        checked += 1
    assert checked > 5


def drafts_of_heads(
    family: str, groups: ProcessGroupCollection | None = None, **layout: bool
) -> tuple[list[Completion], dict[tuple[int, ...], list[int]]]:
    """Return completions, and the drafts of two MTP layers after each prefix."""
    drafts_by_prefix: dict[tuple[int, ...], list[int]] = {}

    class RecordingHeads(MultiTokenHeads):
        def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
            proposed = super().propose(contexts)
            drafts_by_prefix.update(
                {tuple(c.seq.tokens): d for c, d in zip(contexts, proposed, strict=True)}
            )
            return proposed

    model = model_of(family, groups, depths=2, **layout)
    generator = InferenceOptimizedModel(model) if family == "gqa" else model
    sizes = {"num_speculative_tokens": 2, "max_num_batched_tokens": 30, "token_multiple": 2}
    engine = engine_of(model, RecordingHeads(generator, num_layers=2), **sizes)
    engine.runner.model = generator
    with one_thread():
        return [outputs[0] for outputs in generate(engine, requests())], drafts_by_prefix


def heads_on_rank(rank: int, world: int, families: Sequence[str]) -> list[Any]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    return [drafts_of_heads(family, groups, sequence_parallel=True) for family in families]


def test_heads_under_sequence_parallel_match_single_process() -> None:
    families = ("gqa", "hybrid", "latent")
    ranks = run_ranks(heads_on_rank, 2, families)
    for n, family in enumerate(families):
        expected_completions, proposed = drafts_of_heads(family)
        assert max(map(len, proposed.values())) == 2
        for rank_outputs in ranks:
            completions, drafts = rank_outputs[n]
            assert drafts == proposed, family
            assert [c.tokens for c in completions] == [c.tokens for c in expected_completions], (
                family
            )
            for got, expected in zip(completions, expected_completions, strict=True):
                assert got.logprobs == pytest.approx(expected.logprobs, rel=1e-4, abs=1e-5)


# --- rejected drafts ------------------------------------------------------------------------------


def flawed_proposer(texts: dict[tuple[int, ...], list[int]]) -> ScriptedProposer:
    """Return a proposer whose third draft is wrong at two of three positions."""

    def script(tokens: Sequence[int], count: int) -> list[int]:
        for prompt, output in texts.items():
            if tuple(tokens[: len(prompt)]) == prompt and len(tokens) > len(prompt):
                following = output[len(tokens) - len(prompt) :][:count]
                if len(tokens) % 3 and len(following) > 2:
                    following[2] = (following[2] + 1) % VOCABULARY
                return following
        return []

    return ScriptedProposer(script)


@pytest.mark.parametrize("family", ["window and sinks", "hybrid"])
def test_rejected_drafts_leave_no_cached_blocks_or_states(family: str) -> None:
    plain = engine_of(model_of(family), num_blocks=16)
    batch = [replace(r, max_new_tokens=40) for r in requests(DRAWN)[1:4]]
    outputs = [c.tokens for (c,) in generate(plain, batch)]
    texts = {r.prompt: tokens for r, tokens in zip(batch, outputs, strict=True)}
    engine = engine_of(model_of(family), flawed_proposer(texts), num_blocks=16)
    with nan_memory():
        assert [c.tokens for (c,) in generate(engine, batch)] == outputs
        stats = engine.stats
        assert 0 < stats.accepted < stats.drafted
        assert stats.steps < plain.stats.steps
        # The outputs become parts of prompts: cached blocks and states must give the same tokens.
        continued = [
            replace(r, prompt=(*r.prompt, *tokens), max_new_tokens=5)
            for r, tokens in zip(batch, outputs, strict=True)
        ]
        continuations = [c.tokens for (c,) in generate(engine, continued)]
    assert engine.stats.hit > 0
    fresh = engine_of(model_of(family), prefix_caching=False)
    assert continuations == [c.tokens for (c,) in generate(fresh, continued)]
    assert engine.scheduler.kv_cache.pool.references == 0
    assert engine.cache.states.free_slots + len(engine.scheduler.kv_cache._snapshots) == (
        engine.cache.states.num_slots
    )


def test_drafts_continue_from_a_pending_token() -> None:
    pending: list[int] = []

    def script(tokens: Sequence[int], count: int) -> list[int]:
        return counting_drafts(tokens, count) if len(tokens) % 3 else []

    class RecordingProposer(ScriptedProposer):
        def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
            pending.extend(context.seq.num_pending_tokens for context in contexts)
            return super().propose(contexts)

    engine = counting_engine(RecordingProposer(script), asynchronous=True, num_blocks=20)
    batch = [EngineRequest(prompt=(n, 3), max_new_tokens=40, sampling=GREEDY) for n in range(3)]
    for (completion,) in generate(engine, batch):
        assert completion.tokens == [(4 + n) % 7 for n in range(40)]
    assert set(pending) == {0, 1}  # 1: planned while the step before is in flight
    assert engine.stats.accepted == engine.stats.drafted > 60
    assert engine.stats.wasted == 0


def test_drafts_delay_and_preempt_no_request() -> None:
    wrong_proposer = ScriptedProposer(lambda tokens, count: [60] * count)
    batch = [
        EngineRequest(prompt=(n,) * 14, max_new_tokens=17, sampling=GREEDY, sequence=n)
        for n in range(6)
    ]
    steps = []
    for proposer in (None, wrong_proposer):
        engine = counting_engine(
            proposer, 4 if proposer else 0, num_blocks=12, max_num_seqs=6, max_num_batched_tokens=8
        )
        generate(engine, batch)
        steps.append(engine.stats.steps)
        assert engine.stats.preempted == 0  # the pool has two blocks per row
    assert engine.stats.drafted > 0
    assert steps[0] == steps[1]


def test_stop_token_and_grammar_end_a_row_within_drafts() -> None:
    """The mask is called once per prefix, and never after an excluded token or a stop token."""
    prefixes: list[tuple[int, ...]] = []

    def mask(tokens: Sequence[int]) -> torch.Tensor:
        assert 5 not in tokens
        assert 3 not in tokens
        prefixes.append(tuple(tokens))
        return torch.arange(VOCABULARY) != 3

    def script(tokens: Sequence[int], count: int) -> list[int]:
        return counting_drafts(tokens, count)

    engine = counting_engine(ScriptedProposer(script))
    batch = [
        EngineRequest(prompt=(6,), max_new_tokens=20, sampling=GREEDY, stop_tokens={5}),
        EngineRequest(prompt=(3,), max_new_tokens=20, sampling=GREEDY, stop_tokens={5}, mask=mask),
    ]
    (stopped,), (masked,) = generate(engine, batch)
    assert (stopped.tokens, stopped.finish_reason) == ([0, 1, 2, 3, 4, 5], "stop")
    assert (masked.tokens, masked.finish_reason) == ([4, 5], "stop")
    assert len(prefixes) == len(set(prefixes))
    assert engine.stats.accepted > 3

    engine = counting_engine(ScriptedProposer(script))
    (resumed,) = generate(
        engine, [EngineRequest(prompt=(0,), max_new_tokens=6, sampling=GREEDY, mask=mask)]
    )[0]
    assert resumed.tokens == [1, 2, 0, 1, 2, 0]  # 3 is excluded: the lowest id instead
    assert resumed.finish_reason == "length"
    assert engine.stats.accepted > 0


@pytest.mark.parametrize("drafts", [0, 4])
def test_forced_tokens_need_no_additional_step(drafts: int) -> None:
    """Three of four tokens are forced; with drafts the fourth token is drafted."""

    def allowed(tokens: Sequence[int]) -> torch.Tensor:
        single = torch.arange(VOCABULARY) == 5
        return single if len(tokens) % 4 else torch.ones(VOCABULARY, dtype=torch.bool)

    def forced(tokens: Sequence[int]) -> list[int]:
        return [5] * (-len(tokens) % 4)

    steps, texts = [], []
    for foreseen in (None, forced):
        engine = counting_engine(NGramLookup() if drafts else None, drafts)
        (completions,) = generate(
            engine,
            [
                EngineRequest(
                    prompt=(0,),
                    max_new_tokens=41,
                    sampling=GREEDY,
                    n=2,
                    mask=allowed,
                    forced=foreseen,
                )
            ],
        )
        assert engine.stats.forced == (2 * 30 if foreseen else 0)
        texts.append([completion.tokens for completion in completions])
        steps.append(engine.stats.steps)
    assert texts[0] == texts[1] == [[1, 5, 5, 5, *[6, 5, 5, 5] * 9, 6]] * 2
    # 41 tokens: one by one, and four at a time.
    assert steps[1] == 11
    assert drafts or steps[0] == 41


def test_non_finite_logits_end_row_after_accepted_tokens() -> None:
    engine = counting_engine(ScriptedProposer(counting_drafts))
    engine.runner.model = StubModel(VOCABULARY, lambda tokens: (tokens + 1) % 7, nan_after=4)
    (completion,) = generate(
        engine, [EngineRequest(prompt=(1,), max_new_tokens=9, sampling=GREEDY)]
    )[0]
    assert (completion.tokens, completion.finish_reason) == ([2, 3, 4], "error")


# --- draft length ---------------------------------------------------------------------------------


def test_draft_length_follows_acceptance() -> None:
    length, tried, steps = DraftLength(max_drafts=8), 0, 200
    for _ in range(steps):
        count = length.next_length
        tried += count > 0
        length.update(count, 0)
    assert 6 < tried < 6 + steps / MAX_BACKOFF_STEPS  # it retries at increasing intervals
    while not length.next_length:
        length.update(0, 0)
    for _ in range(10):
        length.update(length.next_length, length.next_length)
    assert length.next_length == 8
    source = torch.Generator().manual_seed(1)
    mean_length = {}
    for chance in (0.5, 0.9):
        lengths = []
        for _ in range(400):
            count = length.next_length
            accepted = 0
            while accepted < count and torch.rand((), generator=source) < chance:
                accepted += 1
            length.update(count, accepted)
            lengths.append(count)
        mean_length[chance] = sum(lengths[50:]) / len(lengths[50:])
    assert 1 <= mean_length[0.5] < 4 < mean_length[0.9] <= 8


@pytest.mark.parametrize(
    ("drafts", "proposer", "config", "pattern"),
    [
        (3, None, {}, "num-speculative-tokens is 3 without a proposer"),
        (0, NGramLookup(), {}, "num-speculative-tokens is 0 with a proposer"),
        (9, NGramLookup(), {"max_num_batched_tokens": 9}, "use at most 8"),
        (40, NGramLookup(), {"num_blocks": 2}, "40.* 2 blocks of 16: use at most 31"),
        (2, MultiTokenHeads(None, 2), {"asynchronous": True}, "asynchronous .*: use n-grams"),
    ],
)
def test_impossible_draft_settings_are_refused(drafts, proposer, config, pattern) -> None:
    with pytest.raises(ValueError, match=pattern):
        counting_engine(proposer, drafts, **config)
