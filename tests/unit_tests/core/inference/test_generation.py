# SPDX-License-Identifier: Apache-2.0
"""Generation with a key/value cache against running the whole sequence anew for every token."""

import pytest
import torch

from megatron.core.inference.engine import Completion, Request, generate
from megatron.core.inference.kv_cache import KVCache
from megatron.core.inference.sampling import SamplingParams, sample
from megatron.core.ops.attention import attention
from megatron.core.ops.rope import apply_rope, rotary_table

VOCABULARY, HIDDEN, HEADS, GROUPS, FEATURES, LAYERS = 61, 24, 6, 2, 8, 3
PROMPTS = [(5,), (7, 3, 60, 1, 2, 9, 4), (0, 11, 12), (44, 43, 42, 41, 40)]
GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, seed=9)


class SmallTransformer:
    """Attention layers with grouped heads and rotary positions, without any cleverness."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        self.embedding = 2 * weight(VOCABULARY, HIDDEN)
        self.query = [2 * weight(HEADS * FEATURES, HIDDEN) for _ in range(LAYERS)]
        self.key = [2 * weight(GROUPS * FEATURES, HIDDEN) for _ in range(LAYERS)]
        self.value = [2 * weight(GROUPS * FEATURES, HIDDEN) for _ in range(LAYERS)]
        self.output = [2 * weight(HIDDEN, HEADS * FEATURES) for _ in range(LAYERS)]
        self.head = 4 * weight(VOCABULARY, HIDDEN)

    def full_logits(
        self,
        tokens: torch.Tensor,
        *,
        cache: KVCache | None = None,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        b, s = tokens.shape
        if positions is None:
            positions = torch.arange(s)
        cos, sin = rotary_table(positions, dim=FEATURES)
        x = self.embedding[tokens.t()]  # [s, b, h]
        for layer in range(LAYERS):
            y = torch.nn.functional.layer_norm(x, (HIDDEN,))
            query = apply_rope((y @ self.query[layer].t()).view(s, b, HEADS, -1), cos, sin)
            key = apply_rope((y @ self.key[layer].t()).view(s, b, GROUPS, -1), cos, sin)
            value = (y @ self.value[layer].t()).view(s, b, GROUPS, -1)
            if cache is not None:
                key, value = cache.extend(layer, key, value)
            out, _ = attention(query, key, value, document_ids=document_ids)
            x = x + out.reshape(s, b, -1) @ self.output[layer].t()
        return torch.nn.functional.layer_norm(x, (HIDDEN,)) @ self.head.t()


@pytest.fixture(scope="module")
def model() -> SmallTransformer:
    return SmallTransformer()


def requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    return [Request(prompt=p, sequence=100 + i) for i, p in enumerate(prompts)]


def without_cache(model: SmallTransformer, request: Request, new: int, params: SamplingParams):
    """Generate for one prompt alone, running the whole sequence anew for every token."""
    tokens = list(request.prompt)
    done = Completion(finish_reason="length")
    for _ in range(new):
        logits = model.full_logits(torch.tensor([tokens]))[-1]
        token, logprob = sample(
            logits, params, sequences=[request.sequence], positions=[len(tokens)]
        )
        tokens.append(token.item())
        done.tokens.append(token.item())
        done.logprobs.append(logprob.item())
    return done


def assert_same(got: Completion, expected: Completion) -> None:
    assert got.tokens == expected.tokens
    assert got.finish_reason == expected.finish_reason
    torch.testing.assert_close(
        torch.tensor(got.logprobs), torch.tensor(expected.logprobs), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_padded_batch_with_a_cache_equals_each_prompt_alone_without(
    model: SmallTransformer, params: SamplingParams
) -> None:
    batch = requests(PROMPTS)
    got = generate(model, batch, max_new_tokens=12, sampling=params)
    for request, completion in zip(batch, got, strict=True):
        assert_same(completion, without_cache(model, request, 12, params))
    assert len({t for c in got for t in c.tokens}) > 8  # the model says more than one thing


def test_neighbours_and_order_in_the_batch_do_not_matter(model: SmallTransformer) -> None:
    batch = requests(PROMPTS)
    whole = generate(model, batch, max_new_tokens=8, sampling=RANDOM)
    mixed = generate(model, [batch[2], batch[0]], max_new_tokens=8, sampling=RANDOM)
    assert_same(mixed[0], whole[2])
    assert_same(mixed[1], whole[0])


def test_a_sequence_that_ends_early_leaves_the_others_alone(model: SmallTransformer) -> None:
    batch = requests(PROMPTS)
    endless = generate(model, batch, max_new_tokens=10, sampling=RANDOM)
    stop = endless[1].tokens[2]
    got = generate(model, batch, max_new_tokens=10, sampling=RANDOM, stop_token=stop)
    ended = 0
    for completion, whole in zip(got, endless, strict=True):
        if stop in whole.tokens:
            ended += 1
            end = whole.tokens.index(stop) + 1
            cut = Completion(
                tokens=whole.tokens[:end], logprobs=whole.logprobs[:end], finish_reason="stop"
            )
            assert_same(completion, cut)
        else:
            assert_same(completion, whole)
    assert 0 < ended < len(batch)
