# SPDX-License-Identifier: Apache-2.0
"""Texts to results: tokens, rows, empty prompts, the end of a document, stop strings, refusals."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from megatron.cli.tokenizers import ByteTokenizer, Tokenizer
from megatron.core.inference.cache import CacheShapes
from megatron.core.inference.sampling import SamplingParams
from megatron.core.process_groups import Group
from megatron.inference.config import Inference, Speculation
from megatron.inference.llm import LLM, TextParams, graph_recorder, text_requests

GREEDY = SamplingParams(temperature=0)


class NextByte:
    """Find the byte after the last one most probable, and the end of the document after `z`."""

    def __init__(self) -> None:
        self.head = self

    def __call__(self, x: torch.Tensor, **context: object) -> torch.Tensor:
        following = torch.where(x.t() == ord("z"), 256, (x.t() + 1) % 256)
        return 5 * torch.nn.functional.one_hot(following, 257).float()

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@dataclass
class Loaded:
    """A loaded checkpoint without a checkpoint."""

    max_length: int = 16
    vocab_size: int = 257
    device: str = "cpu"
    optimized: bool = False
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    stop_tokens: frozenset[int] = frozenset({256})
    cache_shapes: CacheShapes = field(default_factory=CacheShapes)
    token_multiple: int = 1
    speculation: Speculation = field(default_factory=Speculation)
    pipeline: None = None
    shares_experts: bool = False
    draft: None = None

    def host_group(self, name: str) -> Group:
        return Group.single(name)

    def generator(self, max_num_batched_tokens: int) -> NextByte:
        assert max_num_batched_tokens == Inference().inference_max_tokens
        return NextByte()


def params(new: int, **more) -> TextParams:
    return TextParams(max_new_tokens=new, sampling=GREEDY, **more)


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_results_come_in_order_however_many_rows_run(rows: int) -> None:
    llm = LLM(Loaded(), Inference(inference_max_requests=rows))
    results = llm.generate(["ab", "xy", "m"], params(3))
    assert [(r.prompt, r.text, r.finish_reason) for r in results] == [
        ("ab", "cde", "length"),
        ("xy", "z", "stop"),
        ("m", "nop", "length"),
    ]
    assert results[0].prompt_ids == (97, 98)
    assert results[1].ids == (122, 256)
    assert [len(r.logprobs) for r in results] == [3, 2, 3]
    assert llm.engine.unfinished == 0


def test_pieces_add_up_to_the_results() -> None:
    llm = LLM(Loaded())
    shown: dict[int, str] = {}
    for piece in llm.stream(["ab", "m"], params(4)):
        shown[piece.prompt] = shown.get(piece.prompt, "") + piece.text
        if piece.output is not None:
            assert piece.output.text == shown[piece.prompt]
    assert shown == {0: "cdef", 1: "nopq"}


def test_a_stream_that_is_left_early_frees_what_it_has() -> None:
    llm = LLM(Loaded())
    pieces = llm.stream(["ab", "m"], params(9))
    next(pieces)
    assert llm.engine.unfinished == 2
    pieces.close()
    assert llm.engine.unfinished == llm.engine.scheduler.pool.references == 0


def test_a_stream_goes_on_after_sleep() -> None:
    llm = LLM(Loaded(cache_shapes=CacheShapes(attention=((1, 4),))))
    full = llm.engine.cache.num_bytes
    pieces = llm.stream(["ab"], params(5))
    text = next(pieces).text
    with pytest.raises(ValueError, match="level 3"):
        llm.sleep(3)
    with pytest.raises(ValueError, match="use level 1"):  # a CPU is the host
        llm.sleep(2)
    llm.sleep()
    assert llm.engine.cache.num_bytes == 0
    with pytest.raises(ValueError, match="asleep"):
        llm.generate(["x"], params(1))
    llm.wake()
    assert llm.engine.cache.num_bytes == full > 0
    assert text + "".join(piece.text for piece in pieces) == "cdefg"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_string_ends_an_output_and_is_not_in_its_text(asynchronous: bool) -> None:
    llm = LLM(Loaded(), Inference(async_scheduling=asynchronous))
    first, second = llm.generate(["ab", "d"], params(9, stop=("fg",)))
    assert (first.text, first.finish_reason) == ("cde", "stop")
    assert bytes(first.ids) == b"cdefg"
    assert (second.text, second.finish_reason) == ("e", "stop")
    assert (llm.engine.stats.wasted > 0) == asynchronous
    (cut,) = llm.generate(["ab"], params(4, stop=("fg",)))
    assert (cut.text, cut.finish_reason) == ("cdef", "length")  # what was held back is shown


def test_requested_options_are_reported() -> None:
    chosen = SamplingParams(temperature=0, logprobs=2)
    asked = TextParams(max_new_tokens=2, sampling=chosen, num_outputs=2, prompt_logprobs=True)
    first, second = LLM(Loaded()).generate(["abc"], asked)
    assert (first.index, second.index) == (0, 1)
    assert [t[0][0] for t in first.top_logprobs] == [100, 101]
    assert first.top_logprobs[0][0][1] == first.logprobs[0]
    assert len(first.top_logprobs[0]) == 2
    one = torch.nn.functional.one_hot(torch.tensor(0), 257) * 5.0
    likely = one.log_softmax(0)[0].item()
    assert first.prompt_logprobs == second.prompt_logprobs == pytest.approx((likely, likely))


def test_an_empty_prompt_starts_a_new_document() -> None:
    (request,) = text_requests(Loaded(), [""], params(1))
    assert request.prompt == (256,)


def test_every_output_is_its_own_sequence() -> None:
    requests = text_requests(Loaded(), ["a", "a"], params(1, num_outputs=3))
    assert [r.sequence for r in requests] == [0, 3]


def test_prompts_are_refused_before_anything_is_generated() -> None:
    llm = LLM(Loaded())
    with pytest.raises(ValueError, match="prompt 2 of 2: the prompt is too long: 14 tokens"):
        next(llm.stream(["a", "b" * 14], params(3)))
    assert llm.engine.unfinished == llm.engine.stats.steps == 0
    with pytest.raises(ValueError, match="token id 195, outside the vocabulary of 128"):
        text_requests(Loaded(vocab_size=128), ["é"], params(1))


def test_a_cache_too_small_for_a_prompt_says_what_would_do() -> None:
    loaded = Loaded(max_length=100, cache_shapes=CacheShapes(attention=((1, 4),)))
    llm = LLM(loaded, num_blocks=2)
    with pytest.raises(ValueError, match="40 tokens take 3 blocks of 16 tokens, the cache has 2"):
        llm.generate(["a" * 20], params(20))
    with pytest.raises(ValueError, match="do not hold one block"):
        LLM(loaded, Inference(inference_memory_gb=1e-9))


def test_gpu_steps_are_not_forced_to_be_eager() -> None:
    with pytest.raises(ValueError, match="--enforce-eager does nothing on a GPU"):
        graph_recorder(Loaded(device="cuda", optimized=True), Inference(enforce_eager=True))
