# SPDX-License-Identifier: Apache-2.0
"""From texts to outputs: tokens, rows, empty prompts, end of document, stop strings, refusals."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from megatron.cli.tokenizers import ByteTokenizer, Tokenizer
from megatron.core import Group
from megatron.core.inference import SamplingParams
from megatron.core.transformer import CacheShapes
from megatron.inference import LLM, Inference, Speculation, TextParams
from megatron.inference.build_engine import graph_recorder
from megatron.inference.llm import text_requests
from tests.support.stub_model import StubModel

GREEDY = SamplingParams(temperature=0)


def next_byte(tokens: torch.Tensor) -> torch.Tensor:
    """Return the successors of bytes; the end of the document follows `z`."""
    return torch.where(tokens == ord("z"), 256, (tokens + 1) % 256)


@dataclass
class Loaded:
    """A stand-in for a loaded checkpoint."""

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

    def generator(self, max_num_batched_tokens: int) -> StubModel:
        assert max_num_batched_tokens == Inference().inference_max_tokens
        return StubModel(257, next_byte, cache_shapes=self.cache_shapes)


def params(max_new_tokens: int, **options) -> TextParams:
    return TextParams(max_new_tokens=max_new_tokens, sampling=GREEDY, **options)


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_outputs_are_in_prompt_order_with_any_number_of_rows(rows: int) -> None:
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


def test_deltas_add_up_to_the_outputs() -> None:
    llm = LLM(Loaded())
    texts: dict[int, str] = {}
    for delta in llm.stream(["ab", "m"], params(4)):
        texts[delta.prompt] = texts.get(delta.prompt, "") + delta.text
        if delta.output is not None:
            assert delta.output.text == texts[delta.prompt]
    assert texts == {0: "cdef", 1: "nopq"}


def test_stream_closed_early_frees_its_blocks() -> None:
    llm = LLM(Loaded())
    deltas = llm.stream(["ab", "m"], params(9))
    next(deltas)
    assert llm.engine.unfinished == 2
    deltas.close()
    assert llm.engine.unfinished == llm.engine.scheduler.kv_cache.pool.references == 0


def test_stream_continues_after_sleep() -> None:
    llm = LLM(Loaded(cache_shapes=CacheShapes(attention=((1, 4),))))
    full = llm.engine.cache.num_bytes
    deltas = llm.stream(["ab"], params(5))
    text = next(deltas).text
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
    assert text + "".join(delta.text for delta in deltas) == "cdefg"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stop_string_ends_an_output_and_is_not_in_its_text(asynchronous: bool) -> None:
    llm = LLM(Loaded(), Inference(async_scheduling=asynchronous))
    first_output, second_output = llm.generate(["ab", "d"], params(9, stop=("fg",)))
    assert (first_output.text, first_output.finish_reason) == ("cde", "stop")
    assert bytes(first_output.ids) == b"cdefg"
    assert (second_output.text, second_output.finish_reason) == ("e", "stop")
    assert (llm.engine.stats.wasted > 0) == asynchronous
    (cut,) = llm.generate(["ab"], params(4, stop=("fg",)))
    assert (cut.text, cut.finish_reason) == ("cdef", "length")  # withheld text is emitted


def test_logprobs_and_several_outputs_are_reported() -> None:
    sampling = SamplingParams(temperature=0, logprobs=2)
    text_params = TextParams(
        max_new_tokens=2, sampling=sampling, num_outputs=2, prompt_logprobs=True
    )
    output_0, output_1 = LLM(Loaded()).generate(["abc"], text_params)
    assert (output_0.index, output_1.index) == (0, 1)
    assert [t[0][0] for t in output_0.top_logprobs] == [100, 101]
    assert output_0.top_logprobs[0][0][1] == output_0.logprobs[0]
    assert len(output_0.top_logprobs[0]) == 2
    logits = torch.nn.functional.one_hot(torch.tensor(0), 257) * 5.0
    likely = logits.log_softmax(0)[0].item()
    assert output_0.prompt_logprobs == output_1.prompt_logprobs == pytest.approx((likely, likely))


def test_empty_prompt_is_the_end_of_document_token() -> None:
    (request,) = text_requests(Loaded(), [""], params(1))
    assert request.prompt == (256,)


def test_each_output_has_its_own_sequence_number() -> None:
    requests = text_requests(Loaded(), ["a", "a"], params(1, num_outputs=3))
    assert [r.sequence for r in requests] == [0, 3]


def test_invalid_prompts_are_refused_before_any_step() -> None:
    llm = LLM(Loaded())
    with pytest.raises(ValueError, match=r"prompt 2 of 2: .*14 tokens"):
        next(llm.stream(["a", "b" * 14], params(3)))
    assert llm.engine.unfinished == llm.engine.stats.steps == 0
    with pytest.raises(ValueError, match=r"195.*128"):
        text_requests(Loaded(vocab_size=128), ["é"], params(1))


def test_too_small_cache_is_refused_with_the_needed_size() -> None:
    loaded = Loaded(max_length=100, cache_shapes=CacheShapes(attention=((1, 4),)))
    llm = LLM(loaded, num_blocks=2)
    with pytest.raises(ValueError, match=r"40 .* 3 .* 16 .* 2"):
        llm.generate(["a" * 20], params(20))
    with pytest.raises(ValueError, match="bytes of memory"):
        LLM(loaded, Inference(inference_memory_gb=1e-9))


def test_enforce_eager_is_refused_on_gpu() -> None:
    with pytest.raises(ValueError, match="--enforce-eager"):
        graph_recorder(Loaded(device="cuda", optimized=True), Inference(enforce_eager=True))
