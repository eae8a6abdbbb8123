# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a checkpoint or a Hugging Face folder that continues texts, from Python.

    >>> from megatron.inference.llm import LLM, TextParams
    >>> with LLM.open("runs/quickstart/checkpoints") as llm:
    ...     params = TextParams(max_new_tokens=20)
    ...     texts = [output.text for output in llm.generate(["The list type", "A"], params)]
    ...     text = "".join(delta.text for delta in llm.stream(["Once upon a time"], params))

It joins a tokenizer and the engine of `megatron.core.inference`: texts become requests, new tokens
become pieces of text, and a stop string ends its output in the step that completes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron.cli.launch import Launch
from megatron.core.cpu_graph import CpuGraph
from megatron.core.device import CudaRecorder, GraphMemory, Recorder
from megatron.core.inference.cache import CacheShapes
from megatron.core.inference.engine import (
    Completion,
    Engine,
    EngineFeatures,
    LanguageModel,
    Proposer,
    Request,
    check_request,
)
from megatron.core.inference.router import Replicas
from megatron.core.inference.sampling import SamplingParams
from megatron.core.inference.sizes import EngineConfig
from megatron.core.inference.speculation import (
    DraftModel,
    MultiTokenHeads,
    MultiTokenModel,
    NGramLookup,
)
from megatron.core.inference.text_stream import TextStream
from megatron.core.process_groups import Group
from megatron.inference.config import Inference, ModelSource, Speculation

if TYPE_CHECKING:
    from megatron.inference.checkpoint_model import CheckpointModel

#: Drafts of a text in a step, where neither an option nor the model says how many.
USUAL_DRAFTS = 4

#: Tokens of a text that memory is planned for where neither the model nor the texts say more.
USUAL_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class TextParams:
    """What to make of a text.

    Args:
        max_new_tokens: tokens to generate at most.
        sampling: how tokens are chosen.
        stop: texts that end an output, which does not hold them.
        stop_tokens: ids that end it; None is what the model's tokenizer says.
        num_outputs: outputs of each text.
        prompt_logprobs: report the log-probabilities of the prompt's tokens.
    """

    max_new_tokens: int = 64
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] | None = None
    num_outputs: int = 1
    prompt_logprobs: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """One text and one of its continuations.

    Args:
        prompt: the text that was given.
        prompt_ids: the tokens it became.
        index: of the outputs of this prompt, from 0.
        text: the continuation, without an end-of-document token or a stop string.
        ids: the generated tokens, those of what ended it included.
        logprobs: the model's own log-probability of each of `ids` (natural logarithm, before
            temperature and filters).
        finish_reason: "stop" at the end of the document or at a stop string, "length" at the token
            limit, "abort", "error" where logits are not finite.
        top_logprobs: of each of `ids` the most probable tokens, (id, log-probability); None if they
            were not asked for.
        prompt_logprobs: of each of `prompt_ids` but the first; None if they were not asked for.
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
        """Return the fields, without those that were not asked for."""
        optional = ("top_logprobs", "prompt_logprobs")
        fields = dataclasses.asdict(self)
        return {k: v for k, v in fields.items() if v is not None or k not in optional}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a step adds to one output.

    Args:
        prompt: number of the text among those that were given.
        index: of the outputs of this text.
        text: new text; a piece never ends within a character, nor within what may be a stop string.
        result: the whole, once the output has ended.
    """

    prompt: int
    index: int
    text: str
    result: Result | None


@dataclass
class _Text:
    """An output on its way to text."""

    prompt: str
    number: int
    request: Request
    stream: TextStream
    asks_tops: bool
    text: str = ""
    pushed: int = 0


class LLM:
    """A loaded model that continues texts.

    Under torchrun all processes make it, and call its methods alike.

    Args:
        loaded: model and tokenizer.
        options: how the engine is sized.
        num_blocks: of the cache, instead of `options.inference_memory_gb`.

    Attributes:
        engine: of this rank.
        replicas: the engines of all data-parallel ranks, by which texts are continued.

    Raises:
        ValueError: options that the model or its ranks do not allow.
    """

    def __init__(
        self,
        loaded: CheckpointModel,
        options: Inference | None = None,
        *,
        num_blocks: int | None = None,
    ) -> None:
        options = options or Inference()
        rows, size, memory = (
            options.inference_max_requests,
            options.inference_block_size,
            options.inference_memory_gb,
        )
        if memory is None and num_blocks is None:
            num_blocks = rows * -(-min(loaded.max_length or USUAL_LENGTH, USUAL_LENGTH) // size)
        config = EngineConfig(
            max_rows=rows,
            max_step_tokens=options.inference_max_tokens,
            block_size=size,
            num_blocks=None if memory is not None else num_blocks,
            memory_bytes=None if memory is None else int(memory * 1e9),
            prefix_caching=not options.no_prefix_caching,
            token_multiple=loaded.token_multiple,
            asynchronous=options.async_scheduling,
        )
        self.loaded = loaded
        checked = loaded.model.groups["tp"] if options.check_plans else None
        recorder = graph_recorder(loaded, options)
        self.engine = speculating_engine(
            loaded, config, check_plans=checked, make_recorder=recorder
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
            inference: how the engine is sized.
            speculation: how drafts are made; None makes none.
            source: fields of `ModelSource`, such as tensor_model_parallel_size.
        """
        from megatron.inference.checkpoint_model import load_checkpoint_model

        launch = Launch.from_environment(os.environ)
        origin = ModelSource(load=load, **source)
        with load_checkpoint_model(origin, launch, speculation=speculation) as loaded:
            yield LLM(loaded, inference)

    def stream(
        self, texts: Sequence[str], params: TextParams | None = None, *, first_sequence: int = 0
    ) -> Iterator[Piece]:
        """Continue texts; yield every output's new text as it comes.

        Closing the iterator ends what is unfinished.

        Args:
            texts: to continue.
            params: how; None is the defaults.
            first_sequence: identity of the first output in random draws.

        Raises:
            ValueError: a text that the model cannot take; nothing is generated then.
        """
        params = params or TextParams()
        n = params.num_outputs
        requests = text_requests(self.loaded, texts, params, first_sequence=first_sequence)
        stops = params.stop
        waiting: dict[tuple[int, int], _Text] = {}
        asks = bool(params.sampling.logprobs)
        try:
            for number, (text, request) in enumerate(zip(texts, requests, strict=True)):
                identity = self.replicas.add(request)
                for index in range(n):
                    stream = TextStream(
                        self.loaded.tokenizer.detokenize, context=request.prompt, stop=stops
                    )
                    waiting[identity, index] = _Text(text, number, request, stream, asks)
            while waiting:
                for completion in self.replicas.step():
                    key = completion.request_id, completion.index
                    if key in waiting:
                        piece = self._piece(waiting[key], completion)
                        if piece.result is not None:
                            del waiting[key]
                        yield piece
        finally:
            for identity in {identity for identity, _ in waiting}:
                self.replicas.abort(identity)

    def generate(
        self, texts: Sequence[str], params: TextParams | None = None, *, first_sequence: int = 0
    ) -> list[Result]:
        """Continue texts; return the outputs of each, in their order. Arguments as for `stream`."""
        pieces = self.stream(texts, params, first_sequence=first_sequence)
        ended = [(p.prompt, p.index, p.result) for p in pieces if p.result is not None]
        return [result for _, _, result in sorted(ended, key=lambda one: one[:2])]

    def sleep(self, level: int = 1) -> None:
        """Give memory of the device back until `wake`, that of a draft model too; texts in progress
        go on then.

        Args:
            level: 1 gives back the cache; 2 the weights too, which the host's memory keeps.

        Raises:
            ValueError: another level, weights that are in the host's memory already, or it sleeps.
        """
        self.replicas.sleep(weights_of_level(self.loaded, level))

    def wake(self) -> None:
        """Go on after `sleep`. Raises ValueError if it does not sleep."""
        self.engine.wake()

    def _piece(self, known: _Text, completion: Completion) -> Piece:
        """Return the text that new tokens of an output add, and the result if it has ended."""
        ends = completion.finish_reason
        # The token that ends a document is no text.
        count = len(completion.tokens) - (ends == "stop")
        added = ""
        for token in completion.tokens[known.pushed : count]:
            added += known.stream.push([token])
            known.pushed += 1
            if known.stream.stopped is not None:
                completion.cut(known.pushed)  # the step may have chosen more
                break
        added += known.stream.push([], finished=bool(ends))
        known.text += added
        if known.stream.stopped is not None and not ends:
            self.replicas.finish(completion.request_id, completion.index)
        return Piece(
            prompt=known.number,
            index=completion.index,
            text=added,
            result=self._result(known, completion) if completion.finish_reason else None,
        )

    def _result(self, known: _Text, completion: Completion) -> Result:
        tops = tuple(tuple(found) for found in completion.top_logprobs)
        prompt = completion.prompt_logprobs
        stopped = known.stream.stopped is not None
        return Result(
            prompt=known.prompt,
            prompt_ids=known.request.prompt,
            index=completion.index,
            text=known.text,
            ids=tuple(completion.tokens),
            logprobs=tuple(completion.logprobs),
            finish_reason="stop" if stopped else completion.finish_reason,
            top_logprobs=tops if known.asks_tops else None,
            prompt_logprobs=None if prompt is None else tuple(prompt),
        )


def weights_of_level(loaded: CheckpointModel, level: int) -> list[torch.Tensor]:
    """Return the weights whose memory a model's engine gives back at a level of sleep.

    Raises:
        ValueError: another level than 1 and 2, or 2 with weights in the host's memory.
    """
    if level not in (1, 2):
        raise ValueError(f"sleep level {level}: use 1 (the cache) or 2 (weights too)")
    if level == 2 and torch.device(loaded.device).type == "cpu":
        raise ValueError("sleep level 2 moves weights to the host, where they are: use level 1")
    return loaded.model.store.tensors() if level == 2 else []


def speculating_engine(
    loaded: CheckpointModel,
    config: EngineConfig,
    *,
    check_plans: Group | None = None,
    make_recorder: Callable[[], Recorder] | None = None,
) -> Engine:
    """Return an engine for a model, with drafts as its `speculation` says.

    Args:
        loaded: the model.
        config: of the engine; memory in bytes is for both models' caches.
        check_plans, make_recorder: as of `Engine`.

    Raises:
        ValueError: more drafts than the model predicts, a step or the cache holds.
    """
    speculation = loaded.speculation
    method, count = speculation.speculative_method, speculation.num_speculative_tokens
    generator = loaded.generator(config.max_step_tokens)
    options = {"check_plans": check_plans, "make_recorder": make_recorder}
    if method is None:
        return _engine(loaded, generator, config, **options)
    if method != "ngram" and loaded.shares_experts:
        raise ValueError(
            f"--speculative-method {method} does not go with experts over several data-parallel "
            "replicas, which enter the experts of the model's steps alone together: use ngram"
        )
    if method == "mtp":
        assert isinstance(generator, MultiTokenModel)
        depths = loaded.model.config.mtp_num_layers
        count = count or depths
        if count > depths:
            raise ValueError(
                f"--num-speculative-tokens is {count}: the model predicts {depths} more tokens "
                f"(--mtp-num-layers of training): use at most {depths}"
            )
        proposer: Proposer = MultiTokenHeads(generator, depths=count)
    elif method == "ngram":
        proposer = NGramLookup()
    else:
        proposer = DraftModel(None, tuple)
        config = dataclasses.replace(config, num_speculative_tokens=count or USUAL_DRAFTS)
        if (draft := loaded.draft) is not None:  # on the first pipeline stage
            config, smaller = shared_memory(config, loaded.cache_shapes, draft.cache_shapes)
            recorder = make_recorder if make_recorder is CpuGraph and draft.optimized else None
            engine = _engine(
                draft,
                draft.generator(smaller.max_step_tokens),
                smaller,
                make_recorder=recorder,
            )
            proposer = DraftModel(engine, draft.model.store.tensors)
    config = dataclasses.replace(config, num_speculative_tokens=count or USUAL_DRAFTS)
    return _engine(loaded, generator, config, proposer=proposer, **options)


def shared_memory(
    config: EngineConfig, shapes: CacheShapes, draft_shapes: CacheShapes
) -> tuple[EngineConfig, EngineConfig]:
    """Return the sizes of a model's engine and of the engine of its draft model.

    Blocks are as many in both. Memory in bytes holds the states of the rows of both models first;
    the rest is shared in proportion to the bytes that a token takes. A model whose tokens take none
    gets a quarter of the rest for snapshots of states, if it has states.

    Args:
        config: of the model's engine; its memory is for both.
        shapes, draft_shapes: what the model and its draft model keep on this rank.

    Raises:
        ValueError: the memory does not hold the states of the rows and one block of each.
    """
    draft = dataclasses.replace(config, num_speculative_tokens=0)
    memory = config.memory_bytes
    if memory is None:
        return config, draft
    states = config.row_state_bytes(shapes), draft.row_state_bytes(draft_shapes)
    token_bytes = shapes.token_bytes, draft_shapes.token_bytes
    blocks = config.least_blocks * config.block_size * sum(token_bytes)
    rest = memory - sum(states)
    if rest < blocks:
        raise ValueError(
            f"{memory:,} bytes of memory do not hold the states of {config.max_rows} rows and "
            f"{config.least_pages} of the model and of its draft model: give at least "
            f"{sum(states) + blocks:,}"
        )
    snapshots = [0, 0]
    for place, (of_rows, of_token) in enumerate(zip(states, token_bytes, strict=True)):
        if of_rows and not of_token:
            snapshots[place] = min(rest // 4, rest - blocks) // (1 if blocks else 2)
    rest -= sum(snapshots)
    part = rest * token_bytes[1] // max(1, sum(token_bytes))
    of_draft = states[1] + snapshots[1] + part
    return (
        dataclasses.replace(config, memory_bytes=memory - of_draft),
        dataclasses.replace(draft, memory_bytes=of_draft),
    )


def _engine(
    loaded: CheckpointModel,
    generator: LanguageModel,
    config: EngineConfig,
    *,
    proposer: Proposer | None = None,
    check_plans: Group | None = None,
    make_recorder: Callable[[], Recorder] | None = None,
) -> Engine:
    return Engine(
        generator,
        config,
        shapes=loaded.cache_shapes,
        vocab_size=loaded.vocab_size,
        max_length=loaded.max_length,
        device=loaded.device,
        features=EngineFeatures(
            proposer=proposer,
            pipeline=loaded.pipeline,
            make_recorder=make_recorder,
            check_plans=check_plans,
            expert_peers=loaded.host_group("etp_ep") if loaded.shares_experts else None,
        ),
    )


def graph_recorder(loaded: CheckpointModel, options: Inference) -> Callable[[], Recorder] | None:
    """Return what makes recorders of decode steps; None if they run eagerly.

    On a CPU steps of an optimized forward pass are recorded unless that is turned off: of a model
    on one rank, as collectives cannot be.

    Raises:
        ValueError: CUDA graphs without a GPU, or eager steps asked for where they are so anyhow.
    """
    if not options.inference_cuda_graphs:
        on_cpu = torch.device(loaded.device).type == "cpu"
        if options.enforce_eager and not on_cpu:
            raise ValueError(
                "--enforce-eager does nothing on a GPU, whose steps are eager without "
                "--inference-cuda-graphs: drop it"
            )
        if options.enforce_eager or not (loaded.optimized and on_cpu):
            return None
        ranks = loaded.pipeline.stages.size * loaded.model.region.group.size
        return CpuGraph if ranks == 1 and not loaded.shares_experts else None
    make = functools.partial(
        CudaRecorder, loaded.device, "--inference-cuda-graphs", memory=GraphMemory()
    )
    make()  # raises without a GPU
    return make


def text_request(
    loaded: CheckpointModel, text: str, params: TextParams, *, sequence: int = 0
) -> Request:
    """Turn a text into a request.

    An empty text becomes the end-of-document token, which stands before every document in training.

    Args:
        loaded: whose tokenizer.
        text: to continue.
        params: how.
        sequence: identity of its first output in every random draw.
    """
    ids = loaded.tokenizer.tokenize(text)
    if not ids and loaded.tokenizer.eod is not None:
        ids = [loaded.tokenizer.eod]
    ends = loaded.stop_tokens if params.stop_tokens is None else params.stop_tokens
    return Request(
        prompt=tuple(ids),
        max_new_tokens=params.max_new_tokens,
        sampling=params.sampling,
        stop_tokens=ends,
        sequence=sequence,
        n=params.num_outputs,
        prompt_logprobs=params.prompt_logprobs,
    )


def text_requests(
    loaded: CheckpointModel, texts: Iterable[str], params: TextParams, *, first_sequence: int = 0
) -> list[Request]:
    """Turn texts into requests and check all of them before anything is generated.

    Raises:
        ValueError: a text that the model cannot take.
    """
    texts = list(texts)
    found = []
    for number, text in enumerate(texts):
        sequence = first_sequence + number * params.num_outputs
        request = text_request(loaded, text, params, sequence=sequence)
        limits = {"max_length": loaded.max_length, "vocab_size": loaded.vocab_size}
        try:
            check_request(request, **limits)
        except ValueError as error:
            raise ValueError(f"prompt {number + 1} of {len(texts)}: {error}") from None
        found.append(request)
    return found
