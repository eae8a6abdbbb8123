# SPDX-License-Identifier: Apache-2.0
"""The inference engine against transformers' `generate`, and against itself without parts.

python -m tools.bench.inference                          every row
python -m tools.bench.inference --clock cpu --threads 1  on a machine that others use too
python -m tools.bench.inference --only batches decode

docs/performance.md shows what `--only forward` has printed to bench_results/cpu-decode.md.

Both sides have the same weights and take turns in one process. Requests are random tokens; what
both generate greedily is compared before a figure counts.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer as PlainTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaForCausalLM

from megatron.cli.tokenizers import HuggingFaceTokenizer
from megatron.core.backend import LOCAL, Backend, with_batch_invariance
from megatron.core.cpu_graph import CpuGraph
from megatron.core.device import peak_memory_bytes
from megatron.core.dist_checkpointing import Solo, weight_chunks
from megatron.core.inference import EngineConfig, EngineRequest
from megatron.core.inference.engine import Engine, generate
from megatron.core.inference.model_runner import EngineFeatures
from megatron.core.inference.request_state import DraftContext
from megatron.core.inference.sampling import SamplingParams
from megatron.core.inference.speculation import NGramLookup, Proposer
from megatron.core.models.gpt import GPTModel
from megatron.core.models.inference_optimized import InferenceOptimizedModel, matrices
from megatron.core.ops.matmul.low_bit import CopyDtype
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer import SelfAttention
from megatron.core.weight_gather import Storage, copy_weights
from megatron.hf.read_weights import read_weights
from megatron.inference.bench import Load, make_requests, static_waste
from megatron.inference.server.guided_decoding.grammars import Grammars, json_grammar
from megatron.training.checkpointing.hf_import import open_model
from tests.support.stub_model import StubModel
from tools.bench import shapes
from tools.bench.harness import run_rows
from tools.bench.peers import llama_config
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row, compared

ROWS = 16
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
#: A model of 134 M weights, whose decode steps are compared with `generate`.
DECODED = Shape(
    layers=12,
    hidden=768,
    ffn=2048,
    heads=12,
    kv_heads=12,
    vocabulary=32000,
    batch=1,
    sequence=512,
)
#: The model whose step the engine's own work is held against.
TINY = Shape(
    layers=8, hidden=64, ffn=192, heads=4, kv_heads=2, vocabulary=512, batch=1, sequence=512
)


def llama(shape: Shape) -> LlamaForCausalLM:
    """Return transformers' model of a shape, ready to generate."""
    torch.manual_seed(shapes.SEED)
    config = llama_config(
        shape,
        max_position_embeddings=2048,
        # Wide enough for the logits to differ by far more than rounding does.
        initializer_range=5 * shapes.INIT_STD,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def with_weights_of(model: LlamaForCausalLM, backend: Backend = LOCAL) -> GPTModel:
    """Return our model with the weights of transformers', of a backend's parts."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        opened, described = open_model(folder, flag="--load")
        mcore = GPTModel(
            described.config,
            ProcessGroupCollection.single(),
            dtype=model.dtype,
            backend=backend,
            storage=Storage(initialize=False),
        )
        read_weights(opened, described, weight_chunks(mcore.store), coordinator=Solo())
    return mcore


def engine_of(
    model: GPTModel,
    *,
    num_blocks: int = 2048,
    proposer: Proposer | None = None,
    optimized: bool = False,
    eager: bool = False,
    copies: CopyDtype | None = None,
    **config: Any,
) -> Engine:
    """Return an engine with room for every request here.

    Args:
        optimized: as `--transformer-impl inference_optimized`.
        eager: as `--enforce-eager`.
        copies: as `--weights-dtype`.
    """
    if copies is not None:
        copy_weights(matrices(model), copies)
    return Engine(
        InferenceOptimizedModel(model) if optimized else model,
        EngineConfig(**{"max_num_seqs": ROWS, "num_blocks": num_blocks} | config),
        features=EngineFeatures(
            proposer=proposer, make_recorder=CpuGraph if optimized and not eager else None
        ),
    )


class Nothing(StubModel):
    """A model without layers: its logits are zeros."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._logits = torch.zeros(4096, 1, vocab_size)

    def __call__(self, tokens: torch.Tensor, **context: object) -> torch.Tensor:
        """Return the hidden states [t, 1, V] of tokens [1, t], which are the logits too."""
        return self._logits[: tokens.shape[1]]


def in_turns(
    sides: Sequence[Callable[[], float]], *, rounds: int, warmup: int = 1
) -> tuple[list[float], list[float]]:
    """Return what two sides measured, round by round, after some that are not counted."""
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(-warmup, rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            value = sides[side]()
            if number >= 0:
                samples[side].append(value)
    return samples


class Generation:
    """One side of a race: greedy requests, answered by an engine or by transformers.

    Args:
        answer: generates all texts.
        clock: reads seconds.

    Attributes:
        texts: of the last run, the tokens of each request.
    """

    def __init__(self, answer: Callable[[], list[list[int]]], clock: Clock) -> None:
        self._answer, self._clock = answer, clock
        self.texts: list[list[int]] = []

    @staticmethod
    def by_engine(engine: Engine, requests: Sequence[EngineRequest], clock: Clock) -> Generation:
        """Return the side of an engine, which answers from an empty prefix cache."""

        def answer() -> list[list[int]]:
            engine.scheduler.reset_prefix_cache()
            return [outputs[0].tokens for outputs in generate(engine, requests)]

        return Generation(answer, clock)

    @staticmethod
    def by_transformers(
        model: LlamaForCausalLM, requests: Sequence[EngineRequest], clock: Clock
    ) -> Generation:
        """Return the side of transformers: static batches of `ROWS` requests."""

        def answer() -> list[list[int]]:
            texts = []
            for start in range(0, len(requests), ROWS):
                texts += static_batch(model, requests[start : start + ROWS])
            return [text[: r.max_new_tokens] for text, r in zip(texts, requests, strict=True)]

        return Generation(answer, clock)

    def seconds(self) -> float:
        """Generate; return the seconds."""
        start = self._clock()
        self.texts = self._answer()
        return self._clock() - start

    def rate(self) -> float:
        """Generate; return tokens per second."""
        seconds = self.seconds()
        return sum(map(len, self.texts)) / seconds

    def require_same(
        self, peer: Generation, name: str, *, share: float = 1.0, tokens: int | None = None
    ) -> None:
        """Raise ValueError unless a peer has generated the same texts, or at least this share.

        Args:
            peer: the other side.
            name: of the peer.
            share: of equal texts.
            tokens: compare the first tokens of each text; None compares all.
        """
        same = sum(a[:tokens] == b[:tokens] for a, b in zip(self.texts, peer.texts, strict=True))
        if same < share * len(self.texts):
            raise ValueError(f"{same} of {len(self.texts)} texts equal those of {name}: void")


def requests_of(count: int, prompt: int, new: int, vocabulary: int) -> list[EngineRequest]:
    """Return random prompts of one length, each with `new` tokens to generate."""
    load = Load(
        num_requests=count, input_tokens=prompt, min_output_tokens=new, max_output_tokens=new
    )
    return make_requests(load, vocabulary)


def row(what: str, mcore: Sequence[float], peer: Sequence[float], target: str = "") -> Row:
    """Return the medians and the median of the ratios."""
    return compared(
        bench="inference",
        what=what,
        mcore=statistics.median(mcore),
        peer=statistics.median(peer),
        ratio=statistics.median(a / b for a, b in zip(mcore, peer, strict=True)),
        target=target,
    )


def host_rows(quick: bool, clock: Clock) -> list[Row]:
    """A step around a model that does nothing, against a one-row step of a small transformers."""
    steps, table_rows = 20 if quick else 100, []
    model = llama(TINY)
    cache, token = DynamicCache(config=model.config), torch.zeros(1, 1, dtype=torch.int64)

    @torch.no_grad()
    def peer() -> float:
        nonlocal cache
        cache = DynamicCache(config=model.config)
        model(token.expand(1, 32), past_key_values=cache)
        start = clock()
        for _ in range(steps):
            model(token, past_key_values=cache)
        return (clock() - start) / steps

    for rows, target in ((1, "<= 0.2"), (64, "<= 0.5")):
        engine = Engine(
            Nothing(TINY.vocabulary), EngineConfig(max_num_seqs=rows, num_blocks=rows * 16)
        )

        def mcore(engine: Engine = engine, rows: int = rows) -> float:
            for number in range(rows):
                engine.add(
                    EngineRequest(
                        prompt=(number,) * 32,
                        max_new_tokens=steps + 2,
                        sampling=SamplingParams(temperature=0),
                    )
                )
            engine.step()
            start = clock()
            for _ in range(steps):
                engine.step()
            seconds = (clock() - start) / steps
            while engine.unfinished:
                engine.step()
            return seconds

        what = f"step around no model, {rows} row{'s' * (rows > 1)}, s / transformers, 1 row"
        table_rows.append(row(what, *in_turns((mcore, peer), rounds=3 if quick else 7), target))
    return table_rows


def prefix_rows(quick: bool, clock: Clock) -> list[Row]:
    """Mean time to first token of requests that begin alike, with the prefix cache and without."""
    common, own_tokens, count = (500, 16, 8) if quick else (1000, 32, 32)
    model = with_weights_of(llama(SHAPES["S"]))
    load = Load(
        num_requests=count,
        input_tokens=common + own_tokens,
        shared_prefix_tokens=common,
        min_output_tokens=1,
        max_output_tokens=1,
    )
    requests = make_requests(load, SHAPES["S"].vocabulary)

    def mean_seconds(engine: Engine) -> float:
        engine.scheduler.reset_prefix_cache()
        begin, first_token_seconds = clock(), []
        for request in requests:
            engine.add(request)
        while engine.unfinished:
            ended = len(engine.step())
            first_token_seconds += [clock() - begin] * ended
        return statistics.mean(first_token_seconds)

    engines = [
        engine_of(model, num_blocks=4096, max_num_seqs=count, prefix_caching=caching)
        for caching in (True, False)
    ]
    sides = [functools.partial(mean_seconds, engine) for engine in engines]
    what = f"{count} prompts, {common} tokens in common: mean TTFT, s / no prefix cache"
    return [row(what, *in_turns(sides, rounds=1 if quick else 3), "<= 0.333")]


def static_batch(peer: LlamaForCausalLM, batch: Sequence[EngineRequest]) -> list[list[int]]:
    """Return what transformers generates for prompts of one length, each as long as the longest."""
    prompts = torch.tensor([request.prompt for request in batch])
    out = peer.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=max(request.max_new_tokens for request in batch),
        do_sample=False,
    )
    return out[:, prompts.shape[1] :].tolist()


def batch_rows(quick: bool, clock: Clock) -> list[Row]:
    """Tokens a second of continuous batching, against static batches in transformers."""
    shape = SHAPES["M"]
    peer = llama(shape)
    engine = engine_of(with_weights_of(peer))
    requests = make_requests(Load(num_requests=64 if quick else 256), shape.vocabulary)
    lengths = [request.max_new_tokens for request in requests]
    single = EngineRequest(
        prompt=requests[0].prompt, max_new_tokens=64, sampling=SamplingParams(temperature=0)
    )
    rounds, rates = 1 if quick else 3, []
    # The single request warms both sides up, too.
    for answered, options in (([single], {"rounds": 2 * rounds}), (requests, {"rounds": rounds})):
        mcore = Generation.by_engine(engine, answered, clock)
        static = Generation.by_transformers(peer, answered, clock)
        warmup = 1 if answered == [single] else 0
        rates.append(in_turns((mcore.rate, static.rate), warmup=warmup, **options))
    mcore.require_same(static, "transformers", share=0.9)
    waste = static_waste(lengths, ROWS)
    what = f"{len(requests)} requests, 16 rows, W = {waste:.2f}: tokens/s / static batches"
    return [
        row(what, *rates[1], f">= {0.75 * waste:.3f}"),
        row("one request: tokens/s / transformers", *rates[0]),
    ]


def products(model: GPTModel, rows: int) -> Callable[[], None]:
    """Return a function that only multiplies rows by every matrix of the model."""
    weights = []
    for block in model.decoder.blocks:
        mixer = block.mixer
        if isinstance(mixer, SelfAttention):
            weights += [mixer.qkv.weight, mixer.output.weight]
        else:
            weights += [mixer.input.weight, mixer.down.weight]
    weights.append(model.head.weight)
    inputs = [torch.randn(rows, weight.shape[1]).to(weight.dtype) for weight in weights]
    outputs = [torch.empty(rows, weight.shape[0], dtype=weight.dtype) for weight in weights]

    @torch.no_grad()
    def run() -> None:
        for x, weight, out in zip(inputs, weights, outputs, strict=True):
            weight.linear(x, out=out)

    return run


def forward_rows(quick: bool, clock: Clock) -> list[Row]:
    """Tokens a second with default options in fp32 and in bf16, by three others; then tokens a
    second of one request by `--weights-dtype` of an fp32 model."""
    new, rounds = (8, 2) if quick else (32, 7)
    table_rows = []
    for dtype in (torch.bfloat16, torch.float32):
        peer = llama(DECODED).to(dtype)
        model = with_weights_of(peer)
        name = str(dtype).removeprefix("torch.")
        packs = all(handle.packs_bf16() for handle in matrices(model))
        local = engine_of(with_weights_of(peer))  # copies would replace its weights, too
        for count in (1, 8, ROWS):
            requests = requests_of(count, 1, new, model.config.vocab_size)
            sides = {
                "transformers": Generation.by_transformers(peer, requests, clock),
                "--transformer-impl local": Generation.by_engine(local, requests, clock),
            }
            engine = engine_of(model, optimized=True, copies="bf16" if packs else None)
            mcore = Generation.by_engine(engine, requests, clock)
            for against, side in sides.items():
                measured = in_turns((mcore.rate, side.rate), rounds=rounds)
                target = (">= 1.15" if count == 1 else ">= 1") * (against == "transformers")
                what = f"{name}, {count} rows: tokens/s / {against}"
                table_rows.append(row(what, *measured, target))
                exact = dtype is torch.float32
                mcore.require_same(side, against, share=0.9, tokens=None if exact else 1)
            multiply = products(model, count)

            def product_rate(multiply: Callable[[], None] = multiply, count: int = count) -> float:
                start = clock()
                for _ in range(new):
                    multiply()
                return count * new / (clock() - start)

            measured = in_turns((mcore.rate, product_rate), rounds=rounds)
            what = f"{name}, {count} rows: tokens/s / the matrix products of its steps"
            table_rows.append(row(what, *measured))
    # Last: from here on, products outside of autograd use the low-bit copies of weights.
    requests = requests_of(1, 1, new, model.config.vocab_size)
    static = Generation.by_transformers(peer, requests, clock)
    for dtype, target in (("bf16", ""), ("int8", ">= 2")):
        engine = engine_of(model, optimized=True, copies=dtype)
        sides = Generation.by_engine(engine, requests, clock).rate, static.rate
        what = f"--weights-dtype {dtype}, 1 row: tokens/s / transformers in fp32"
        table_rows.append(row(what, *in_turns(sides, rounds=rounds), target))
    return table_rows


def decode_rows(quick: bool, clock: Clock) -> list[Row]:
    """Seconds of a step of the optimized forward, by itself without graphs, by the local forward
    and by transformers' `generate`: one request, a small model and the M shape."""
    rounds, new = (2, 16) if quick else (9, 64)
    table_rows = []
    for shape, target in ((TINY, "<= 0.4"), (SHAPES["M"], "<= 0.87")):
        peer = llama(shape)
        model = with_weights_of(peer)
        requests = requests_of(1, 1, new, shape.vocabulary)
        mcore = Generation.by_engine(engine_of(model, optimized=True), requests, clock)
        eager = engine_of(model, optimized=True, eager=True)
        for name, side in {
            "itself eager": Generation.by_engine(eager, requests, clock),
            "local": Generation.by_engine(engine_of(model), requests, clock),
            "generate": Generation.by_transformers(peer, requests, clock),
        }.items():
            seconds = in_turns((mcore.seconds, side.seconds), rounds=rounds)
            mcore.require_same(side, name)
            ratios = [a / b for a, b in zip(*seconds, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            peak = peak_memory_bytes(torch.device("cpu")) / 1e6
            rate = new / statistics.median(seconds[0])
            what = f"{shape.layers} layers of {shape.hidden}, optimized, 1 request, {new} steps, "
            what += f"{rate:,.0f} tokens/s, {peak:,.0f} MB: s / {name} "
            what += f"(quartiles {low:.3f} to {high:.3f})"
            table_rows.append(row(what, *seconds, target if name == "generate" else ""))
    return table_rows


def invariant_rows(quick: bool, clock: Clock) -> list[Row]:
    """Seconds of requests with `--batch-invariant`, by those without."""
    peer = llama(SHAPES["M"])
    models = [with_weights_of(peer, backend) for backend in (with_batch_invariance(LOCAL), LOCAL)]
    table_rows = []
    for count, inputs, outputs in ((1, 1, 64), (ROWS, 1, 64), (4 * ROWS, 32, 64)):
        new = outputs // 4 if quick else outputs
        load = Load(
            num_requests=count,
            input_tokens=inputs,
            min_output_tokens=new // 8,
            max_output_tokens=new,
        )
        requests = make_requests(load, SHAPES["M"].vocabulary)
        engines = [engine_of(model) for model in models]
        sides = [Generation.by_engine(engine, requests, clock).seconds for engine in engines]
        what = f"--batch-invariant, {count} requests of {inputs} + {new}: s / without"
        table_rows.append(row(what, *in_turns(sides, rounds=2 if quick else 5), "<= 1.5"))
    return table_rows


class WrongDrafts(Proposer):
    """Propose drafts that are always rejected: a token that no text contains."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `megatron.core.inference.speculation.Proposer`."""
        return [[self.token] * context.max_drafts for context in contexts]


def speculation_rows(quick: bool, clock: Clock) -> list[Row]:
    """Return tokens/s with drafts, relative to tokens/s without.

    N-gram drafts rarely match in the text of random weights; other drafts are always rejected.
    """
    model = with_weights_of(llama(SHAPES["M"]))
    table_rows = []
    for count in (1, ROWS):
        requests = requests_of(count, 32, 32 if quick else 128, SHAPES["M"].vocabulary)
        plain = Generation.by_engine(engine_of(model), requests, clock)
        plain.seconds()
        unused = min(set(range(SHAPES["M"].vocabulary)) - set().union(*plain.texts))
        for name, proposer in (("n-grams", NGramLookup()), ("wrong drafts", WrongDrafts(unused))):
            engine = engine_of(model, proposer=proposer, num_speculative_tokens=4)
            drafted = Generation.by_engine(engine, requests, clock)
            measured = in_turns((drafted.rate, plain.rate), rounds=2 if quick else 7)
            drafted.require_same(plain, name)
            what = f"{name}, {count} requests: tokens/s / without drafts; "
            what += f"{engine.stats.tokens_per_forward:.2f} tokens a forward"
            target = "" if name == "n-grams" else ">= 0.9"
            table_rows.append(row(what, *measured, target))
    return table_rows


def planning_rows(quick: bool, clock: Clock) -> list[Row]:
    """Return the share of steps planned before the previous step has ended, and the tokens/s of
    the asynchronous loop relative to the synchronous loop."""
    model = with_weights_of(llama(SHAPES["M"]))
    requests = requests_of(ROWS, 1, 32 if quick else 128, SHAPES["M"].vocabulary)
    ahead, plain = engine_of(model, asynchronous=True), engine_of(model)
    # Processor time would count both threads.
    sides = [Generation.by_engine(e, requests, time.perf_counter).rate for e in (ahead, plain)]
    measured = in_turns(sides, rounds=2 if quick else 7)
    share = ahead.stats.overlapped / ahead.stats.steps
    return [
        row("asynchronous loop, 16 requests: tokens/s / synchronous", *measured),
        row(
            "asynchronous loop, 16 requests: plans that are hidden / steps", [share], [1], ">= 0.9"
        ),
    ]


#: Tokens of a large vocabulary.
LARGE_VOCABULARY = 128 * 1024
#: What answers follow: strings, numbers, lists and objects in objects.
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "count": {"type": "integer", "minimum": 0, "maximum": 5000},
        "kind": {"enum": ["one", "another", "a third"]},
        "parts": {
            "type": "array",
            "minItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "share": {"type": "number"},
                    "words": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
                },
                "required": ["name", "share", "words"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "count", "kind", "parts"],
    "additionalProperties": False,
}


def large_tokenizer(folder: Path, size: int = LARGE_VOCABULARY) -> HuggingFaceTokenizer:
    """Return a tokenizer of `size` byte-level tokens: all bytes, the marks of JSON in
    twos and threes, and pieces of this repository's words, with and without a blank before."""
    marks = [*itertools.product('{}[]":, ', repeat=2), *itertools.product('{}[]":, ', repeat=3)]
    tokens = dict.fromkeys([*pre_tokenizers.ByteLevel.alphabet(), *map("".join, marks)])
    tokens = {token.replace(" ", "Ġ"): None for token in tokens}
    for path in sorted(Path(__file__).parents[2].glob("*/**/*.py")):
        for word in re.findall(r"[A-Za-z0-9]+", path.read_text(encoding="utf-8")):
            for start, end in itertools.combinations(range(min(len(word), 14) + 1), 2):
                tokens[word[start:end]] = tokens[f"Ġ{word[start:end]}"] = None
        if len(tokens) >= size:
            break
    token_list = list(tokens)[: size - 1]
    tokenizer = PlainTokenizer(models.BPE({p: n for n, p in enumerate(token_list)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder / "tokenizer.json")


def mask_rows(quick: bool, clock: Clock) -> list[Row]:
    """Return the seconds of a JSON Schema mask over 128 k tokens, relative to a decode step."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = large_tokenizer(Path(folder))
    assert tokenizer.vocab_size == LARGE_VOCABULARY
    end = LARGE_VOCABULARY - 1
    grammars = Grammars(tokenizer, [end], LARGE_VOCABULARY)
    grammar, source = json_grammar(ANSWER_SCHEMA), random.Random(shapes.SEED)
    grammars.compile(grammar)
    masks: list[float] = []
    while len(masks) < (200 if quick else 4000):
        mask = grammars.mask(grammar)
        tokens: list[int] = []
        while end not in tokens[-1:] and len(tokens) < 200:
            start = clock()
            allowed = mask(tokens)
            masks.append(clock() - start)
            tokens.append(source.choice(allowed.nonzero().flatten().tolist()))
    model = with_weights_of(llama(SHAPES["M"]))
    engine = engine_of(model, optimized=True)
    new = 32 if quick else 256
    for request in requests_of(1, 1, new, model.config.vocab_size):
        engine.add(request)
    steps = []
    while engine.unfinished:
        start = clock()
        engine.step()
        steps.append(clock() - start)
    step = statistics.median(steps)
    what = "mask of a JSON Schema, V = 128 k: {} s / decode step"
    return [
        row(what.format("median"), [statistics.median(masks)], [step], "<= 0.05"),
        row(what.format("p99"), [statistics.quantiles(masks, n=100)[-1]], [step], "<= 1"),
    ]


SECTIONS = {
    "masks": mask_rows,
    "host": host_rows,
    "prefix": prefix_rows,
    "batches": batch_rows,
    "speculation": speculation_rows,
    "planning": planning_rows,
    "invariant": invariant_rows,
    "forward": forward_rows,
    "decode": decode_rows,
}


def rows(
    quick: bool = False,
    *,
    only: Sequence[str] = tuple(SECTIONS),
    clock: Literal["wall", "cpu"] = "wall",
) -> list[Row]:
    """Measure the named sections."""
    return [table_row for section in only for table_row in SECTIONS[section](quick, CLOCKS[clock])]


if __name__ == "__main__":
    run_rows(rows, __doc__)
