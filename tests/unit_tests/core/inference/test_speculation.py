# SPDX-License-Identifier: Apache-2.0
"""Drafts: what is proposed, that they change no token, and that nothing of a rejected one stays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.inference.cache import CacheShapes
from megatron.core.inference.engine import (
    Completion,
    Engine,
    EngineConfig,
    EngineFeatures,
    Request,
    generate,
)
from megatron.core.inference.sampling import (
    SamplingParams,
    accepted_drafts,
    uniform,
)
from megatron.core.inference.scheduler import MAX_BACKOFF_STEPS, DraftLength
from megatron.core.inference.speculation import (
    ComputedStep,
    DraftContext,
    DraftStage,
    MultiTokenHeads,
    NGramLookup,
)
from megatron.core.models.inference_optimized import InferenceOptimizedModel
from megatron.core.ops.sampling.reference import draw_weights, invert
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.inputs import generator, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import (
    DRAWN,
    GREEDY,
    NEW,
    VOCABULARY,
    engine_of,
    model_of,
    requests,
)


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():
        yield


# --- the distribution -----------------------------------------------------------------------------

DRAWS, WORDS = 100_000, 6


def two_models() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of the first token and, for each first one, of the second, [1 + V, V], of a
    model and of another that is somewhat like it."""
    source = generator(1)
    model, other = torch.randn(2, 1 + WORDS, WORDS, generator=source)
    return 1.5 * model, 1.5 * model + 0.4 * other


@functools.cache
def draws_at(position: int) -> torch.Tensor:
    """Return the random number of every sequence at a position, fp64 [DRAWS]."""
    found = [uniform(3, sequence, position) for sequence in range(DRAWS)]
    return torch.tensor(found, dtype=torch.float64)


def drawn(logits: torch.Tensor, rows: torch.Tensor, position: int) -> torch.Tensor:
    """Return what `sample` chooses of row `rows[n]` of the logits for sequence n, for all n."""
    weights = draw_weights(logits, [SamplingParams()] * len(logits))
    return invert(weights[rows], draws_at(position))


def p_value(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return how likely chi-square is as large as that of counts against probabilities."""
    expected = wanted * seen.sum()
    square = ((seen - expected) ** 2 / expected).sum()
    freedom = torch.tensor((seen.numel() - 1) / 2.0, dtype=torch.float64)
    return torch.special.gammaincc(freedom, square / 2).item()


@pytest.mark.parametrize("kind", ["fixed", "drawn"])
def test_pairs_of_tokens_have_the_distribution_of_the_model(kind: str) -> None:
    """An n-gram or a greedy draft is a fixed token; another model's is drawn from what it says."""
    model, other = two_models()
    same, drafts = torch.zeros(DRAWS, dtype=torch.int64), torch.full((DRAWS,), 3)
    if kind == "drawn":
        drafts = drawn(other, same, 7)
    # One step: a choice at the place of the draft, and one after it.
    first, after_draft = drawn(model, same, 7), drawn(model, 1 + drafts, 8)
    accepted = torch.tensor(
        [accepted_drafts([d], [c]) for d, c in zip(drafts.tolist(), first.tolist(), strict=True)]
    ).bool()
    # Where the draft is rejected, the next step chooses after the token that replaced it.
    second = torch.where(accepted, after_draft, drawn(model, 1 + first, 8))
    seen = torch.bincount(first * WORDS + second, minlength=WORDS**2).double()
    probabilities = model.double().softmax(-1)
    assert p_value(seen, (probabilities[:1].t() * probabilities[1:]).flatten()) > 1e-3
    share = accepted.double().mean().item()
    most = 1 - (probabilities[0] - other[0].double().softmax(-1)).abs().sum().item() / 2
    if kind == "fixed":
        assert share == pytest.approx(probabilities[0, 3].item(), abs=0.01)
    else:  # a coupling accepts no more than the two distributions have in common
        assert 0.5 < share <= most + 0.01
    # What would be chosen if the drafts were taken as they are is seen.
    wrong = torch.bincount(drafts, minlength=WORDS).double()
    assert p_value(wrong + 1e-9, probabilities[0]) < 1e-3


# --- what is proposed -----------------------------------------------------------------------------


class Fixed(torch.nn.Module):
    """A model that says which token follows each, with certainty; its hidden states are logits."""

    def __init__(self, following: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.head, self.following = self, following

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    gathered = project = whole

    def forward(self, x: torch.Tensor, **context: object) -> torch.Tensor:
        return torch.nn.functional.one_hot(self.following(x.t()), VOCABULARY).float()


class Scripted:
    """Propose for every row what a function of its tokens says."""

    def __init__(self, script: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self.script = script
        self.stage: DraftStage = "every"

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        return [list(self.script(c.seq.tokens, c.max_drafts)) for c in contexts]

    def predict(self, step: ComputedStep) -> list[list[int]]:
        return []

    def sleep(self, *, weights: bool) -> None:
        pass

    def wake(self) -> None:
        pass


def counting(proposer: object, drafts: int = 4, **config) -> Engine:
    """Return an engine around a model that counts up to 6 and begins again."""
    sizes = {"num_blocks": 9, "num_speculative_tokens": drafts} | config
    return Engine(
        Fixed(lambda x: (x + 1) % 7),
        EngineConfig(**sizes),
        shapes=CacheShapes(),
        vocab_size=VOCABULARY,
        features=EngineFeatures(proposer=proposer),
    )


def counted(tokens: Sequence[int], count: int) -> list[int]:
    return [(tokens[-1] + 1 + n) % 7 for n in range(count)]


def test_ngrams_follow_a_text_that_repeats_itself() -> None:
    engine = counting(NGramLookup())
    (found,) = generate(engine, [Request(prompt=(0, 1, 2), max_new_tokens=90, sampling=GREEDY)])
    assert found[0].tokens == [(3 + n) % 7 for n in range(90)]
    assert engine.stats.tokens_per_forward > 3.5
    assert engine.stats.steps < 25


def test_the_longest_and_latest_match_counts() -> None:
    lookup = NGramLookup(longest=3, shortest=2)
    seen: list[list[int]] = []

    def propose_nothing(tokens: Sequence[int], count: int) -> list[int]:
        return []

    engine = counting(Scripted(propose_nothing), max_num_seqs=3)
    for prompt in (
        (1, 2, 3, 9, 8, 2, 3, 4, 1, 2, 3),  # 1, 2, 3 before 2, 3
        (5, 6, 1, 5, 6, 2, 5, 6),  # the later of two
        (5, 6, 1, 6),  # one token is too short
    ):
        engine.add(Request(prompt=prompt, max_new_tokens=9, sampling=GREEDY))
    for row in engine.scheduler.waiting:
        seen += lookup.propose([engine._outputs[row].context(3)])
    assert seen == [[9, 8, 2], [2, 5, 6], []]


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("family", ["gqa", "window and sinks", "latent", "hybrid"])
def test_heads_predict_what_they_learn_to(family: str, optimized: bool) -> None:
    """The drafts of one depth are those of its forward pass over the whole text, as in training."""
    model = model_of(family, depths=1)
    proposed: dict[tuple[int, ...], int] = {}

    class Seen(MultiTokenHeads):
        def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
            found = super().propose(contexts)
            for context, drafts in zip(contexts, found, strict=True):
                proposed.update({tuple(context.seq.tokens): draft for draft in drafts})
            return found

    generator = InferenceOptimizedModel(model) if optimized else model
    engine = engine_of(
        model, Seen(generator, 1), num_speculative_tokens=1, max_num_batched_tokens=30
    )
    engine.model = generator
    with nan_memory():
        generate(engine, requests())
    checked = 0
    for tokens, draft in list(proposed.items())[::3]:
        depth, layout = model.multi_token.layers[0], model._layout_of(torch.tensor([tokens]), None)
        ahead = torch.tensor([[*tokens[1:], 0]])
        with torch.no_grad():
            hidden = model(torch.tensor([tokens]))
            rope = model.rotary(layout.positions)
            hidden = depth(hidden, ahead, layout, rope=rope, aux_factor=None)
            logits = model.head.whole(model.head.project(hidden))[-2, 0]
        assert draft == logits.argmax().item()
        checked += 1
    assert checked > 5


def drafts_of_heads(
    family: str, groups: ProcessGroupCollection | None = None, **layout: bool
) -> tuple[list[Completion], dict[tuple[int, ...], list[int]]]:
    """Return what is generated, and the drafts of two depths after each beginning of it."""
    found: dict[tuple[int, ...], list[int]] = {}

    class Seen(MultiTokenHeads):
        def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
            proposed = super().propose(contexts)
            found.update({tuple(c.seq.tokens): d for c, d in zip(contexts, proposed, strict=True)})
            return proposed

    model = model_of(family, groups, depths=2, **layout)
    generator = InferenceOptimizedModel(model) if family == "gqa" else model
    sizes = {"num_speculative_tokens": 2, "max_num_batched_tokens": 30, "token_multiple": 2}
    engine = engine_of(model, Seen(generator, num_layers=2), **sizes)
    engine.model = generator
    with one_thread():
        return [outputs[0] for outputs in generate(engine, requests())], found


def heads_on_a_rank(rank: int, world: int, families: Sequence[str]) -> list[Any]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    return [drafts_of_heads(family, groups, sequence_parallel=True) for family in families]


def test_heads_under_sequence_parallel_match_single_process() -> None:
    families = ("gqa", "hybrid", "latent")
    ranks = run_ranks(heads_on_a_rank, 2, families)
    for n, family in enumerate(families):
        wanted, proposed = drafts_of_heads(family)
        assert max(map(len, proposed.values())) == 2
        for found in ranks:
            said, drafts = found[n]
            assert drafts == proposed, family
            assert [c.tokens for c in said] == [c.tokens for c in wanted], family
            for got, expected in zip(said, wanted, strict=True):
                assert got.logprobs == pytest.approx(expected.logprobs, rel=1e-4, abs=1e-5)


# --- nothing of a rejected draft stays ------------------------------------------------------------


def half_right(right: dict[tuple[int, ...], list[int]]) -> Scripted:
    """Return drafts of which the third is wrong at every place but some."""

    def script(tokens: Sequence[int], count: int) -> list[int]:
        for prompt, said in right.items():
            if tuple(tokens[: len(prompt)]) == prompt and len(tokens) > len(prompt):
                following = said[len(tokens) - len(prompt) :][:count]
                if len(tokens) % 3 and len(following) > 2:
                    following[2] = (following[2] + 1) % VOCABULARY
                return following
        return []

    return Scripted(script)


@pytest.mark.parametrize("family", ["window and sinks", "hybrid"])
def test_blocks_digests_and_states_are_those_of_accepted_tokens(family: str) -> None:
    plain = engine_of(model_of(family), num_blocks=16)
    asked = [replace(r, max_new_tokens=40) for r in requests(DRAWN)[1:4]]
    said = [c.tokens for (c,) in generate(plain, asked)]
    right = {r.prompt: tokens for r, tokens in zip(asked, said, strict=True)}
    engine = engine_of(model_of(family), half_right(right), num_blocks=16)
    with nan_memory():
        assert [c.tokens for (c,) in generate(engine, asked)] == said
        stats = engine.stats
        assert 0 < stats.accepted < stats.drafted
        assert stats.steps < plain.stats.steps
        # Whole texts again, now as prompts: what is found of them gives the same next tokens.
        longer = [
            replace(r, prompt=(*r.prompt, *tokens), max_new_tokens=5)
            for r, tokens in zip(asked, said, strict=True)
        ]
        again = [c.tokens for (c,) in generate(engine, longer)]
    assert engine.stats.hit > 0
    fresh = engine_of(model_of(family), prefix_caching=False)
    assert again == [c.tokens for (c,) in generate(fresh, longer)]
    assert engine.scheduler.pool.references == 0
    assert engine.cache.states.free_slots + len(engine.scheduler._snapshots) == (
        engine.cache.states.num_slots
    )


def test_drafts_follow_a_token_that_is_still_being_chosen() -> None:
    pending: list[int] = []

    def script(tokens: Sequence[int], count: int) -> list[int]:
        return counted(tokens, count) if len(tokens) % 3 else []

    class Watched(Scripted):
        def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
            pending.extend(context.seq.num_pending_tokens for context in contexts)
            return super().propose(contexts)

    engine = counting(Watched(script), asynchronous=True, num_blocks=20)
    asked = [Request(prompt=(n, 3), max_new_tokens=40, sampling=GREEDY) for n in range(3)]
    for (found,) in generate(engine, asked):
        assert found.tokens == [(4 + n) % 7 for n in range(40)]
    assert set(pending) == {0, 1}
    assert engine.stats.accepted == engine.stats.drafted > 60
    assert engine.stats.wasted == 0
    assert engine.stats.overlapped > 0


def test_drafts_delay_and_preempt_nobody() -> None:
    wrong = Scripted(lambda tokens, count: [60] * count)
    asked = [
        Request(prompt=(n,) * 14, max_new_tokens=17, sampling=GREEDY, sequence=n) for n in range(6)
    ]
    steps = []
    for proposer in (None, wrong):
        engine = counting(
            proposer, 4 if proposer else 0, num_blocks=12, max_num_seqs=6, max_num_batched_tokens=8
        )
        generate(engine, asked)
        steps.append(engine.stats.steps)
        assert engine.stats.preempted == 0  # two blocks a row are all there is
    assert engine.stats.drafted > 0
    assert steps[0] == steps[1]


def test_a_stop_token_and_a_grammar_end_a_row_within_drafts() -> None:
    """The mask is asked for each place once, and never after a token that it excludes or that ends
    the text."""
    places: list[tuple[int, ...]] = []

    def mask(tokens: Sequence[int]) -> torch.Tensor:
        assert 5 not in tokens
        assert 3 not in tokens
        places.append(tuple(tokens))
        return torch.arange(VOCABULARY) != 3

    def script(tokens: Sequence[int], count: int) -> list[int]:
        return counted(tokens, count)

    engine = counting(Scripted(script))
    asked = [
        Request(prompt=(6,), max_new_tokens=20, sampling=GREEDY, stop_tokens={5}),
        Request(prompt=(3,), max_new_tokens=20, sampling=GREEDY, stop_tokens={5}, mask=mask),
    ]
    (first,), (second,) = generate(engine, asked)
    assert (first.tokens, first.finish_reason) == ([0, 1, 2, 3, 4, 5], "stop")
    assert (second.tokens, second.finish_reason) == ([4, 5], "stop")
    assert len(places) == len(set(places))
    assert engine.stats.accepted > 3

    engine = counting(Scripted(script))
    (third,) = generate(
        engine, [Request(prompt=(0,), max_new_tokens=6, sampling=GREEDY, mask=mask)]
    )[0]
    assert third.tokens == [1, 2, 0, 1, 2, 0]  # 3 is excluded: the lowest id instead
    assert third.finish_reason == "length"
    assert engine.stats.accepted > 0


@pytest.mark.parametrize("drafts", [0, 4])
def test_forced_tokens_take_no_step_of_their_own(drafts: int) -> None:
    """Of four tokens three are forced, and what is not forced is drafted where drafts are."""

    def allowed(tokens: Sequence[int]) -> torch.Tensor:
        only = torch.arange(VOCABULARY) == 5
        return only if len(tokens) % 4 else torch.ones(VOCABULARY, dtype=torch.bool)

    def forced(tokens: Sequence[int]) -> list[int]:
        return [5] * (-len(tokens) % 4)

    steps, texts = [], []
    for foreseen in (None, forced):
        engine = counting(NGramLookup() if drafts else None, drafts)
        (found,) = generate(
            engine,
            [
                Request(
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
        texts.append([one.tokens for one in found])
        steps.append(engine.stats.steps)
    assert texts[0] == texts[1] == [[1, 5, 5, 5, *[6, 5, 5, 5] * 9, 6]] * 2
    # 41 tokens: one by one, and four at a time.
    assert steps[1] == 11
    assert drafts or steps[0] == 41


def test_what_is_reported_of_accepted_drafts_is_what_is_without() -> None:
    params = replace(DRAWN, logprobs=3)
    asked = requests(params, prompt_logprobs=True)
    plain = generate(engine_of(model_of("gqa")), asked)
    right = {r.prompt: c.tokens for r, (c,) in zip(asked, plain, strict=True)}
    engine = engine_of(model_of("gqa"), half_right(right))
    for (wanted,), (got,) in zip(plain, generate(engine, asked), strict=True):
        assert got.tokens == wanted.tokens
        assert got.logprobs == pytest.approx(wanted.logprobs, rel=1e-9)
        assert got.prompt_logprobs == pytest.approx(wanted.prompt_logprobs, rel=1e-9)
        assert [[i for i, _ in top] for top in got.top_logprobs] == [
            [i for i, _ in top] for top in wanted.top_logprobs
        ]
        assert len(got.top_logprobs) == len(got.epochs) == NEW
    assert engine.stats.accepted > 0


def test_non_finite_logits_end_row_after_accepted_tokens() -> None:
    engine = counting(Scripted(counted))

    def following(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) % 7

    class Diverging(Fixed):
        def forward(self, x: torch.Tensor, **context: object) -> torch.Tensor:
            logits = super().forward(x, **context)
            logits[x[0] == 4] = math.nan
            return logits

    engine.model = Diverging(following)
    (found,) = generate(engine, [Request(prompt=(1,), max_new_tokens=9, sampling=GREEDY)])[0]
    assert (found.tokens, found.finish_reason) == ([2, 3, 4], "error")


# --- how many drafts ------------------------------------------------------------------------------


def test_drafts_are_as_many_as_are_accepted() -> None:
    length, tried, steps = DraftLength(max_drafts=8), 0, 200
    for _ in range(steps):
        count = length.next_length
        tried += count > 0
        length.update(count, 0)
    assert 6 < tried < 6 + steps / MAX_BACKOFF_STEPS  # it looks again, more and more rarely
    while not length.next_length:
        length.update(0, 0)
    for _ in range(10):
        length.update(length.next_length, length.next_length)
    assert length.next_length == 8
    source = torch.Generator().manual_seed(1)
    wanted = {}
    for chance in (0.5, 0.9):
        found = []
        for _ in range(400):
            count = length.next_length
            accepted = 0
            while accepted < count and torch.rand((), generator=source) < chance:
                accepted += 1
            length.update(count, accepted)
            found.append(count)
        wanted[chance] = sum(found[50:]) / len(found[50:])
    assert 1 <= wanted[0.5] < 4 < wanted[0.9] <= 8


@pytest.mark.parametrize(
    ("drafts", "proposer", "config", "words"),
    [
        (3, None, {}, "num-speculative-tokens is 3 without a proposer"),
        (0, NGramLookup(), {}, "num-speculative-tokens is 0 with a proposer"),
        (9, NGramLookup(), {"max_num_batched_tokens": 9}, "use at most 8"),
        (40, NGramLookup(), {"num_blocks": 2}, "40.* 2 blocks of 16: use at most 31"),
        (2, MultiTokenHeads(None, 2), {"asynchronous": True}, "asynchronous .*: use n-grams"),
    ],
)
def test_drafts_that_nothing_can_verify_are_named(drafts, proposer, config, words) -> None:
    with pytest.raises(ValueError, match=words):
        counting(proposer, drafts, **config)
