# SPDX-License-Identifier: Apache-2.0
"""`LLM`: generate text from a checkpoint or a Hugging Face folder, from Python.

    >>> from megatron.inference import LLM, TextParams
    >>> with LLM.open("runs/quickstart/checkpoints") as llm:
    ...     params = TextParams(max_new_tokens=20)
    ...     texts = [output.text for output in llm.generate(["The list type", "A"], params)]
    ...     text = "".join(delta.text for delta in llm.stream(["Once upon a time"], params))

It joins a tokenizer and the engine of `megatron.core.inference`: texts become requests, new tokens
become deltas of text, and a stop string ends an output in the step that completes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.cli.launch import Launch
from megatron.core.inference import EngineConfig
from megatron.core.inference.requests import (
    Completion,
    EngineRequest,
    OutputDelta,
    check_request,
)
from megatron.core.inference.router import Replicas
from megatron.core.inference.sampling import SamplingParams
from megatron.core.inference.text_stream import TextStream
from megatron.inference.build_engine import graph_recorder, speculating_engine, weights_of_level
from megatron.inference.config import Inference, ModelSource, Speculation

if TYPE_CHECKING:
    from megatron.inference.checkpoint_model import CheckpointModel


#: Length in tokens for which the cache is sized, unless the model is shorter.
DEFAULT_MAX_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class TextParams:
    """Parameters of text generation.

    Args:
        max_new_tokens: most tokens to generate for an output.
        sampling: parameters of sampling.
        stop: strings that end an output; they are not part of it.
        stop_tokens: ids of the tokens that end an output; None for the stop tokens of the model.
        num_outputs: number of outputs per prompt.
        prompt_logprobs: report the log-probabilities of the prompt's tokens.
    """

    max_new_tokens: int = 64
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] | None = None
    num_outputs: int = 1
    prompt_logprobs: bool = False


@dataclass(frozen=True, kw_only=True)
class TextOutput:
    """A prompt and one of its outputs.

    Args:
        prompt: text of the prompt.
        prompt_ids: token ids of the prompt.
        index: index of this output among the outputs of the prompt, from 0.
        text: generated text, without an end-of-document token or a stop string.
        ids: generated token ids, including the tokens that ended the output.
        logprobs: log-probability of each of `ids` (natural logarithm, before temperature and
            filters).
        finish_reason: "stop" at the end of the document or at a stop string, "length" at the token
            limit, "abort", "error" where logits are not finite.
        top_logprobs: the most probable tokens (id, log-probability) at each of `ids`; None if not
            requested.
        prompt_logprobs: log-probabilities of `prompt_ids[1:]`; None if not requested.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    index: int = 0
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict; fields that were not requested are left out."""
        optional = ("top_logprobs", "prompt_logprobs")
        fields = dataclasses.asdict(self)
        return {k: v for k, v in fields.items() if v is not None or k not in optional}


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """The text that one step adds to one output.

    Args:
        prompt: index of the prompt.
        index: index of this output among the outputs of the prompt.
        text: new text; it never ends within a character or within the start of a stop string.
        output: the complete output, in the last delta; else None.
    """

    prompt: int
    index: int
    text: str
    output: TextOutput | None


@dataclass
class _PendingOutput:
    """An unfinished output, its tokens so far, and the state of its detokenization."""

    prompt: str
    prompt_index: int
    request: EngineRequest
    stream: TextStream
    with_top_logprobs: bool
    completion: Completion
    text: str = ""


class LLM:
    """A loaded model with an inference engine.

    Under torchrun all ranks create it and call its methods in the same order.

    Args:
        loaded: model and tokenizer.
        options: sizes and options of the engine.
        num_blocks: number of cache blocks, instead of `options.inference_memory_gb`.

    Attributes:
        engine: the engine of this rank.
        replicas: the engines of all data-parallel ranks.

    Raises:
        ValueError: the model or its ranks do not support an option.
    """

    def __init__(
        self,
        loaded: CheckpointModel,
        options: Inference | None = None,
        *,
        num_blocks: int | None = None,
    ) -> None:
        options = options or Inference()
        max_requests, block_size, memory_gb = (
            options.inference_max_requests,
            options.inference_block_size,
            options.inference_memory_gb,
        )
        if memory_gb is None and num_blocks is None:
            num_blocks = max_requests * -(
                -min(loaded.max_length or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH) // block_size
            )
        config = EngineConfig(
            max_num_seqs=max_requests,
            max_num_batched_tokens=options.inference_max_tokens,
            block_size=block_size,
            num_blocks=None if memory_gb is not None else num_blocks,
            memory_bytes=None if memory_gb is None else int(memory_gb * 1e9),
            prefix_caching=not options.no_prefix_caching,
            token_multiple=loaded.token_multiple,
            asynchronous=options.async_scheduling,
        )
        self.loaded = loaded
        plan_group = loaded.model.groups["tp"] if options.check_plans else None
        make_recorder = graph_recorder(loaded, options)
        self.engine = speculating_engine(
            loaded, config, check_plans=plan_group, make_recorder=make_recorder
        )
        self.replicas = Replicas(self.engine, loaded.host_group("dp"))

    @staticmethod
    @contextlib.contextmanager
    def open(
        load: str,
        *,
        inference: Inference | None = None,
        speculation: Speculation | None = None,
        **source: Any,
    ) -> Iterator[LLM]:
        """Load a model for the time of a `with` block; under torchrun, on all of its processes.

        Args:
            load: a folder of checkpoints, one `iter_` folder, or a Hugging Face folder.
            inference: sizes and options of the engine.
            speculation: options of speculative decoding; None for no drafts.
            source: other fields of `ModelSource`, such as tensor_model_parallel_size.
        """
        from megatron.inference.load_model import load_checkpoint_model

        launch = Launch.from_environment(os.environ)
        model_source = ModelSource(load=load, **source)
        with load_checkpoint_model(model_source, launch, speculation=speculation) as loaded:
            yield LLM(loaded, inference)

    def stream(
        self, texts: Sequence[str], params: TextParams | None = None, *, first_sequence: int = 0
    ) -> Iterator[TextDelta]:
        """Continue texts; yield the new text of every output as soon as it is generated.

        Closing the iterator aborts unfinished outputs.

        Args:
            texts: prompts.
            params: parameters of the generation; None for the defaults.
            first_sequence: number of the first output in the random draws; output i has this + i.

        Raises:
            ValueError: a prompt is invalid for the model; nothing is generated then.
        """
        params = params or TextParams()
        num_outputs = params.num_outputs
        requests = text_requests(self.loaded, texts, params, first_sequence=first_sequence)
        stops = params.stop
        unfinished: dict[tuple[int, int], _PendingOutput] = {}
        with_top_logprobs = bool(params.sampling.logprobs)
        try:
            for prompt_index, (text, request) in enumerate(zip(texts, requests, strict=True)):
                request_id = self.replicas.add(request)
                for index in range(num_outputs):
                    stream = TextStream(
                        self.loaded.tokenizer.detokenize, context=request.prompt, stop=stops
                    )
                    completion = Completion(request_id=request_id, index=index)
                    unfinished[request_id, index] = _PendingOutput(
                        text, prompt_index, request, stream, with_top_logprobs, completion
                    )
            while unfinished:
                for delta in self.replicas.step():
                    key = delta.request_id, delta.index
                    if key in unfinished:
                        text_delta = self._text_delta(unfinished[key], delta)
                        if text_delta.output is not None:
                            del unfinished[key]
                        yield text_delta
        finally:
            for request_id in {request_id for request_id, _ in unfinished}:
                self.replicas.abort(request_id)

    def generate(
        self, texts: Sequence[str], params: TextParams | None = None, *, first_sequence: int = 0
    ) -> list[TextOutput]:
        """Continue texts; return all outputs in the order of the prompts. Arguments as `stream`."""
        deltas = self.stream(texts, params, first_sequence=first_sequence)
        outputs = [
            (delta.prompt, delta.index, delta.output)
            for delta in deltas
            if delta.output is not None
        ]
        return [output for _, _, output in sorted(outputs, key=lambda entry: entry[:2])]

    def sleep(self, level: int = 1) -> None:
        """Release device memory until `wake`, also of a draft model; requests in progress continue
        after `wake`.

        Args:
            level: 1 releases the cache; 2 also moves the weights to host memory.

        Raises:
            ValueError: the level is invalid, the weights are on the host already, or the engine
                sleeps.
        """
        self.replicas.sleep(weights_of_level(self.loaded, level))

    def wake(self) -> None:
        """Continue after `sleep`. Raises ValueError if the engine does not sleep."""
        self.engine.wake()

    def _text_delta(self, output: _PendingOutput, delta: OutputDelta) -> TextDelta:
        """Return the text of an output's new tokens, with the output if the output has ended."""
        completion, finish_reason = output.completion, delta.finish_reason
        num_before = len(completion.tokens)
        completion.add(delta)
        # The token that ends a document has no text.
        text_tokens = delta.tokens[: len(delta.tokens) - (finish_reason == "stop")]
        new_text = ""
        for count, token in enumerate(text_tokens, 1):
            new_text += output.stream.push([token])
            if output.stream.stopped is not None:
                completion.cut(num_before + count)  # the step may have chosen more
                break
        new_text += output.stream.push([], finished=bool(finish_reason))
        output.text += new_text
        if output.stream.stopped is not None:
            completion.finish_reason = "stop"
            if not finish_reason:
                self.replicas.finish(delta.request_id, delta.index)
        return TextDelta(
            prompt=output.prompt_index,
            index=delta.index,
            text=new_text,
            output=self._text_output(output) if completion.finish_reason else None,
        )

    def _text_output(self, output: _PendingOutput) -> TextOutput:
        completion = output.completion
        top_logprobs = tuple(tuple(logprobs) for logprobs in completion.top_logprobs)
        prompt_logprobs = completion.prompt_logprobs
        return TextOutput(
            prompt=output.prompt,
            prompt_ids=output.request.prompt,
            index=completion.index,
            text=output.text,
            ids=tuple(completion.tokens),
            logprobs=tuple(completion.logprobs),
            finish_reason=completion.finish_reason,
            top_logprobs=top_logprobs if output.with_top_logprobs else None,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        )


def text_request(
    loaded: CheckpointModel, text: str, params: TextParams, *, sequence: int = 0
) -> EngineRequest:
    """Return the engine request for a text.

    An empty text becomes the end-of-document token, which precedes every document in training.

    Args:
        loaded: the model, whose tokenizer encodes the text.
        text: prompt.
        params: parameters of the generation.
        sequence: number of the first output in the random draws.
    """
    prompt = loaded.tokenizer.tokenize(text)
    if not prompt and loaded.tokenizer.eod is not None:
        prompt = [loaded.tokenizer.eod]
    stop_tokens = loaded.stop_tokens if params.stop_tokens is None else params.stop_tokens
    return EngineRequest(
        prompt=tuple(prompt),
        max_new_tokens=params.max_new_tokens,
        sampling=params.sampling,
        stop_tokens=stop_tokens,
        sequence=sequence,
        n=params.num_outputs,
        prompt_logprobs=params.prompt_logprobs,
    )


def text_requests(
    loaded: CheckpointModel, texts: Iterable[str], params: TextParams, *, first_sequence: int = 0
) -> list[EngineRequest]:
    """Return the engine requests for texts, all checked before anything is generated.

    Raises:
        ValueError: a prompt is invalid for the model.
    """
    texts = list(texts)
    requests = []
    for index, text in enumerate(texts):
        sequence = first_sequence + index * params.num_outputs
        request = text_request(loaded, text, params, sequence=sequence)
        limits = {"max_length": loaded.max_length, "vocab_size": loaded.vocab_size}
        try:
            check_request(request, **limits)
        except ValueError as error:
            raise ValueError(f"prompt {index + 1} of {len(texts)}: {error}") from None
        requests.append(request)
    return requests
