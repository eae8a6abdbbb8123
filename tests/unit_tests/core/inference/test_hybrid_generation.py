# SPDX-License-Identifier: Apache-2.0
"""Hybrids with states by slot, however they are fed, against running the whole sequence anew."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference.cache import BatchCache, StateCache
from megatron.core.inference.engine import Completion, Request
from megatron.core.inference.sampling import SamplingParams
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.ops.gated_delta_rule import delta_recurrence
from megatron.core.ops.state_space_dual import state_space_recurrence
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba2 import Mamba2
from megatron.core.ssm.mixer import RecurrentMixer
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.closeness import relative_error
from tests.support.inputs import generator, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.one_batch import generate
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_generation import assert_same, without_cache

PROMPTS = [(5,), (7, 3, 60, 1, 2, 9, 4), (0, 11, 12), (44, 43, 42, 41, 40)]
GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, seed=9)
CHUNK, LENGTH, STOP = 8, 20, 19
CONFIG = GPTConfig(
    num_layers=6,
    pattern="G-*-M-",
    hidden_size=22,
    vocab_size=61,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=10),
    mlp=MLPConfig(ffn_hidden_size=40),
    delta_net=GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_channels=6, value_channels=5
    ),
    mamba=Mamba2Config(num_heads=4, head_channels=7, state_channels=3),  # one group for two ranks
    init_std=0.5,
)
#: Numbers that a slot keeps: of the delta net, of Mamba-2.
DELTA = {"conv": 3 * (2 * (6 + 6 + 2 * 5)), "state": 4 * 6 * 5}
MAMBA = {"conv": 3 * (4 * 7 + 2 * 3), "state": 4 * 3 * 7}
#: Of them, those that all ranks have: rows of B and C.
SHARED = 3 * 2 * 3


def make_model(
    dtype: torch.dtype = torch.float64,
    groups: ProcessGroupCollection | None = None,
    config: GPTConfig = CONFIG,
) -> GPTModel:
    """Return the model, sweeping in short chunks, with every weight off its initial value."""
    model = GPTModel(config, groups or ProcessGroupCollection.single(), dtype=dtype)
    for handle in model.store.handles.values():
        for held in model.store.chunks(handle):
            noise = torch.randn(held.shape, generator=generator(5, *held.name.encode()))
            values = 0.4 * noise
            if "norm" in held.name:
                values = 1 + 0.2 * noise
            elif "A_log" in held.name:
                values = 0.3 * noise - 1.5  # states that remember more than a few tokens
            places = zip(held.offsets, held.tensor.shape, strict=True)
            held.tensor.copy_(values[tuple(slice(i, i + n) for i, n in places)])
    for mixer in recurrent(model):
        sizes = {"chunk_size": CHUNK}
        delta = isinstance(mixer, GatedDeltaNet)
        mixer.recurrence = delta_recurrence(**sizes) if delta else state_space_recurrence(**sizes)
    return model


def recurrent(model: GPTModel) -> list[RecurrentMixer]:
    found = [b.mixer for b in model.decoder.blocks if isinstance(b.mixer, RecurrentMixer)]
    assert [type(m) for m in found] == [GatedDeltaNet, Mamba2]
    return found


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return make_model()


def requests(prompts: list[tuple[int, ...]] = PROMPTS) -> list[Request]:
    return [Request(prompt=p, sequence=100 + i) for i, p in enumerate(prompts)]


def addresses(states: StateCache) -> list[int]:
    """Return where buffers of both kinds of mixers lie."""
    found = [b.data_ptr() for b in states._buffers.values()]
    assert len(found) == 4
    return found


def fed(
    model: GPTModel, rows: list[torch.Tensor], steps: list[int]
) -> tuple[torch.Tensor, BatchCache]:
    """Return logits [s, b, V] of rows of tokens, padded on the left, so many columns at a time."""
    length = max(len(row) for row in rows)
    pads = torch.tensor([length - len(row) for row in rows])
    tokens = torch.stack([torch.nn.functional.pad(r, (length - len(r), 0)) for r in rows])
    places = torch.arange(length)[:, None] - pads  # [s, b]
    documents = torch.where(places < 0, -1, 0)
    cache, logits, first = BatchCache(length, rows=len(rows)), [], 0
    decoding: list[int] = []
    for count in steps:
        last = first + count
        cache.begin([int(n) for n in (last - pads.clamp(min=first)).clamp(min=0)])
        layout = SequenceLayout(places[first:last].clamp(min=0), documents[:last])
        with torch.no_grad():
            hidden = model(tokens[:, first:last], layout=layout, cache=cache)
            logits.append(model.head(hidden))
        where = addresses(cache.states)
        assert where == (decoding or where)
        decoding = where
        first = last
    assert first == length
    return torch.cat(logits), cache


def text(length: int, *key: int) -> torch.Tensor:
    return torch.randint(0, 61, (length,), generator=generator(3, *key))


def assert_fed_as_whole(
    model: GPTModel, rows: list[torch.Tensor], ways: Iterable[list[int]]
) -> None:
    """Feed rows in so many columns at a time, in several ways; compare with whole rows."""
    with nan_memory(), torch.no_grad():
        whole = [model.logits(tokens[None])[:, 0] for tokens in rows]
        for steps in ways:
            got, _ = fed(model, rows, steps)
            for row, expected in enumerate(whole):
                error = relative_error(got[-len(expected) :, row], expected)
                assert error < 1e-10, (steps, row, error)


def test_a_prompt_cut_anywhere_and_decoding_are_the_whole_sequence(model: GPTModel) -> None:
    rows = [text(LENGTH), text(LENGTH - 7, 1)]
    ways = [[cut, 17 - cut, 1, 1, 1] for cut in range(1, 2 * CHUNK)]
    ways += [[3, 1, 1, 7, 2, 1, 5], [1] * LENGTH]
    assert_fed_as_whole(model, rows, ways)


@pytest.mark.parametrize("width", [1, 2, 6])
def test_convolutions_of_other_widths_go_on_as_well(width: int) -> None:
    config = replace(
        CONFIG,
        delta_net=replace(CONFIG.delta_net, conv_width=width),
        mamba=replace(CONFIG.mamba, conv_width=width, bias=True, conv_bias=False),
    )
    ways = [[cut, 10 - cut, 1, 1] for cut in (1, 3, 6)]
    assert_fed_as_whole(make_model(config=config), [text(12), text(5, 1)], ways)


@pytest.mark.slow
def test_a_prompt_cut_anywhere_below_two_chunks_of_the_usual_size() -> None:
    model = make_model()
    model.decoder.blocks[0].mixer.recurrence = delta_recurrence()
    model.decoder.blocks[4].mixer.recurrence = state_space_recurrence()
    rows = [text(259), text(170, 1)]
    assert_fed_as_whole(model, rows, ([cut, 257 - cut, 1, 1] for cut in range(1, 256)))


def test_what_is_kept_is_of_the_layers_that_need_it(model: GPTModel) -> None:
    rows = [text(LENGTH), text(LENGTH - 7, 1)]
    _, cache = fed(model, rows, [LENGTH - 1, 1])
    assert cache.num_bytes == LENGTH * 2 * (10 + 10) * 2 * 8  # one layer of attention of three
    assert [cache.length(layer) for layer in (0, 1)] == [LENGTH, 0]
    numbers = sum(DELTA.values()) + sum(MAMBA.values())
    assert cache.states.num_bytes == (2 + 1) * numbers * 8


def test_states_of_bf16_models_are_fp32_and_their_rows_bf16() -> None:
    _, cache = fed(make_model(torch.bfloat16), [text(9)], [5, 3, 1])
    kept = cache.states._buffers
    wide = {name.rsplit(".", 1)[1]: buffer.dtype for name, buffer in kept.items()}
    assert wide == {"conv": torch.bfloat16, "state": torch.float32}
    narrow, states = DELTA["conv"] + MAMBA["conv"], DELTA["state"] + MAMBA["state"]
    assert cache.states.num_bytes == 2 * (2 * narrow + 4 * states)


@pytest.mark.parametrize("length", [1, 5])
def test_a_row_without_a_slot_is_inert_whatever_it_holds(model: GPTModel, length: int) -> None:
    for mixer in recurrent(model):
        x = torch.randn(length, 3, 22, generator=generator(7), dtype=torch.float64)
        layout = SequenceLayout.of_rows(length)
        # All three rows have states; then row 0 has no new token.
        cache = BatchCache(9, rows=3)
        with torch.no_grad():
            cache.begin([length] * 3)
            mixer(-x, layout, cache=cache)
            before = {name: b.clone() for name, b in cache.states._buffers.items()}
            cache.begin([0, length, length])
            (absent,) = set(range(3)) - {int(s) for s in cache.slots}
            expected = mixer(x, layout, cache=cache)
            after = {name: b[:3].clone() for name, b in cache.states._buffers.items()}
            for name, buffer in cache.states._buffers.items():
                assert torch.equal(buffer[absent], before[name][absent])
                assert not torch.equal(buffer[:3], before[name][:3])
                buffer.copy_(before[name])
                buffer[-1] = math.nan  # nobody's
            poisoned = x.clone()
            poisoned[:, 0] = math.nan
            got = mixer(poisoned, layout, cache=cache)
        assert not expected[:, 0].any()
        assert torch.equal(got[:, 1:], expected[:, 1:])
        for name, buffer in cache.states._buffers.items():
            assert torch.equal(buffer[:3], after[name])


def test_padding_that_is_no_number_reaches_no_token(model: GPTModel) -> None:
    for mixer in recurrent(model):
        x = torch.randn(6, 2, 22, generator=generator(7), dtype=torch.float64)
        found = []
        for poison in (1.0, math.nan):
            x[:4, 1] = poison
            cache = BatchCache(9, rows=2)
            cache.begin([6, 2])
            with torch.no_grad():
                out = mixer(x, SequenceLayout.of_rows(6), cache=cache)
            found.append((out[:, 0], out[4:, 1], *cache.states._buffers.values()))
            assert poison != 1.0 or not out[:4, 1].any()
        for clean, other in zip(*found, strict=True):
            assert torch.equal(clean[:2], other[:2])


def test_prompts_in_parts_need_the_activations_of_a_part(model: GPTModel) -> None:
    (request,) = requests([tuple(text(60).tolist())])
    found = {}
    for chunk in (None, 4):
        made: list[int] = []

        def watch(_, __, out: object, made: list[int] = made) -> None:
            made += [one.numel() for one in (out if isinstance(out, tuple) else (out,))]

        options = {"sampling": GREEDY, "max_new_tokens": 1, "prefill_chunk_tokens": chunk}
        hook = register_module_forward_hook(watch)
        try:
            generate(model, [request], **options)
        finally:
            hook.remove()
        found[chunk] = max(made)
    assert found[None] == 60 * 2 * 40  # up and gate of an MLP
    assert found[4] == 4 * 2 * 40


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_padded_batch_equals_each_prompt_alone(
    model: GPTModel, params: SamplingParams, chunk: int | None
) -> None:
    # Slots that other sequences have had, two more than there are rows.
    states = StateCache(len(PROMPTS) + 2)
    first = {"max_new_tokens": 2, "sampling": RANDOM, "states": states}
    with nan_memory():
        generate(model, requests([text(9, i) for i in range(5)]), **first)
        for buffer in states._buffers.values():
            buffer.fill_(math.nan)  # what ended sequences leave counts for nothing
        options = first | {"max_new_tokens": 9, "sampling": params, "prefill_chunk_tokens": chunk}
        got = generate(model, requests(), **options)
        for request, completion in zip(requests(), got, strict=True):
            assert_same(completion, without_cache(model, request, 9, params))
    assert len({t for c in got for t in c.tokens}) > 8  # the model says more than one thing
    assert states.free_slots == len(PROMPTS) + 2


def test_a_sequence_that_ends_early_leaves_the_others_alone(model: GPTModel) -> None:
    endless = generate(model, requests(), max_new_tokens=9, sampling=RANDOM)
    stop = endless[1].tokens[2]
    options = {"max_new_tokens": 9, "sampling": RANDOM, "stop_tokens": (stop,)}
    got = generate(model, requests(), **options)
    ended = 0
    for completion, whole in zip(got, endless, strict=True):
        end = whole.tokens.index(stop) + 1 if stop in whole.tokens else 9
        ended += end < 9
        assert_same(
            completion,
            Completion(
                tokens=whole.tokens[:end],
                logprobs=whole.logprobs[:end],
                finish_reason="stop" if stop in whole.tokens else "length",
            ),
        )
    assert 0 < ended < len(PROMPTS)


def generate_on_a_rank(rank: int, world: int) -> tuple[list[list[Completion]], int]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    model, states = make_model(groups=groups), StateCache(len(PROMPTS))
    options = {"max_new_tokens": 9, "stop_tokens": (STOP,), "states": states}
    found = [
        generate(model, requests(), sampling=params, prefill_chunk_tokens=chunk, **options)
        for params, chunk in ((GREEDY, None), (RANDOM, 3))
    ]
    return found, states.num_bytes


def test_tensor_parallel_ranks_generate_what_one_process_does(model: GPTModel) -> None:
    ranks = run_ranks(generate_on_a_rank, 2)
    numbers = sum(DELTA.values()) + sum(MAMBA.values())
    half = (len(PROMPTS) + 1) * ((numbers - SHARED) // 2 + SHARED) * 8
    for found, num_bytes in ranks:
        assert found == ranks[0][0]
        assert num_bytes == half  # heads are cut, and their states with them
    for got, params in zip(ranks[0][0], (GREEDY, RANDOM), strict=True):
        options = {"max_new_tokens": 9, "sampling": params, "stop_tokens": (STOP,)}
        expected = generate(model, requests(), **options)
        for completion, reference in zip(got, expected, strict=True):
            assert_same(completion, reference)
