# SPDX-License-Identifier: Apache-2.0
"""The inference engine against transformers' `generate`, and against itself without parts.

python -m tools.bench.inference                          every row
python -m tools.bench.inference --clock cpu --threads 1  on a machine that others use too
python -m tools.bench.inference --only batches

docs/performance.md shows what `--only forward` has printed to bench_results/cpu-decode.md.

Both sides have the same weights and take turns in one process. Requests are random tokens; what
both generate greedily is compared before a figure counts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer as PlainTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaForCausalLM

from megatron.cli.tokenizers import HuggingFaceTokenizer
from megatron.core.backend import LOCAL, Backend, with_batch_invariance
from megatron.core.cpu_graph import CpuGraph
from megatron.core.dist_checkpointing import Solo, weight_chunks
from megatron.core.inference import EngineRequest
from megatron.core.inference.engine import Engine, generate
from megatron.core.inference.model_runner import EngineFeatures
from megatron.core.inference.request_state import DraftContext
from megatron.core.inference.sampling import SamplingParams
from megatron.core.inference.sizes import EngineConfig
from megatron.core.inference.speculation import ComputedStep, DraftStage, NGramLookup, Proposer
from megatron.core.models.gpt import GPTModel
from megatron.core.models.inference_optimized import InferenceOptimizedModel
from megatron.core.ops.matmul.low_bit import CopyDtype
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer import SelfAttention
from megatron.core.weight_gather import Storage
from megatron.hf.read_weights import read_weights
from megatron.inference.bench import Load, make_requests, static_waste
from megatron.inference.server.guided_decoding.grammars import Grammars, json_grammar
from megatron.training.checkpointing.hf_import import open_model
from tests.support.stub_model import StubModel
from tools.bench import shapes
from tools.bench.peers import llama_config
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row, compared, format_table, machine

ROWS = 16
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
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
            dtype=torch.float32,
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
    **config: object,
) -> Engine:
    """Return an engine with room for every request here.

    Args:
        optimized: as `--transformer-impl inference_optimized`.
        eager: as `--enforce-eager`.
        copies: as `--weights-dtype`.
    """
    return Engine(
        InferenceOptimizedModel(model, copies=copies) if optimized else model,
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


def host_rows(quick: bool, clock: Callable[[], float]) -> list[Row]:
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


def prefix_rows(quick: bool, clock: Callable[[], float]) -> list[Row]:
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

    def side(prefix_caching: bool) -> Callable[[], float]:
        engine = engine_of(
            model, num_blocks=4096, max_num_seqs=count, prefix_caching=prefix_caching
        )

        def run() -> float:
            engine.scheduler.reset_prefix_cache()
            begin, first_token_seconds = clock(), []
            for request in requests:
                engine.add(request)
            while engine.unfinished:
                ended = len(engine.step())
                first_token_seconds += [clock() - begin] * ended
            return statistics.mean(first_token_seconds)

        return run

    timings = in_turns((side(True), side(False)), rounds=1 if quick else 3)
    what = f"{count} prompts, {common} tokens in common: mean TTFT, s / no prefix cache"
    return [row(what, *timings, "<= 0.333")]


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


def batch_rows(quick: bool, clock: Callable[[], float]) -> list[Row]:
    """Tokens a second of continuous batching, against static batches in transformers."""
    shape = SHAPES["M"]
    peer = llama(shape)
    engine = engine_of(with_weights_of(peer))
    load = Load(num_requests=64 if quick else 256)
    requests = make_requests(load, shape.vocabulary)
    lengths = [request.max_new_tokens for request in requests]

    texts: dict[str, list[list[int]]] = {}

    def mcore() -> float:
        engine.scheduler.reset_prefix_cache()
        start = clock()
        texts["ours"] = [completion[0].tokens for completion in generate(engine, requests)]
        return sum(lengths) / (clock() - start)

    def static() -> float:
        start, completions = clock(), []
        for begin in range(0, len(requests), ROWS):
            completions += static_batch(peer, requests[begin : begin + ROWS])
        texts["peer"] = [text[:n] for text, n in zip(completions, lengths, strict=True)]
        return sum(lengths) / (clock() - start)

    single_request = EngineRequest(
        prompt=requests[0].prompt, max_new_tokens=64, sampling=SamplingParams(temperature=0)
    )

    def alone() -> float:
        engine.scheduler.reset_prefix_cache()
        start = clock()
        generate(engine, [single_request])
        return single_request.max_new_tokens / (clock() - start)

    def peer_alone() -> float:
        start = clock()
        static_batch(peer, [single_request])
        return single_request.max_new_tokens / (clock() - start)

    rounds = 1 if quick else 3
    one_found = in_turns((alone, peer_alone), rounds=2 * rounds)  # which warms up both, too
    static_found = in_turns((mcore, static), rounds=rounds, warmup=0)
    same = sum(a == b for a, b in zip(texts["ours"], texts["peer"], strict=True))
    if same < 0.9 * len(requests):
        raise ValueError(f"{same} of {len(requests)} texts are the same: the race is void")
    waste = static_waste(lengths, ROWS)
    what = f"{len(requests)} requests, 16 rows, W = {waste:.2f}: tokens/s / static batches"
    return [
        row(what, *static_found, f">= {0.75 * waste:.3f}"),
        row("one request: tokens/s / transformers", *one_found),
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
    inputs = [torch.randn(rows, weight.shape[1]) for weight in weights]
    outputs = [torch.empty(rows, weight.shape[0]) for weight in weights]

    @torch.no_grad()
    def run() -> None:
        for x, weight, out in zip(inputs, weights, outputs, strict=True):
            weight.linear(x, out=out)

    return run


def forward_rows(quick: bool, clock: Callable[[], float]) -> list[Row]:
    """Tokens a second of `--transformer-impl inference_optimized`, by three others."""
    peer = llama(SHAPES["M"])
    model = with_weights_of(peer)
    new = 16 if quick else 64
    table_rows = [
        row for count in (1, ROWS) for row in forward_rows_of(count, peer, model, new, quick, clock)
    ]
    # Last: products outside of autograd use the copies from there on.
    copies = [copied_row(dtype, peer, model, new, quick, clock) for dtype in ("bf16", "int8")]
    return [*table_rows, *copies]


def copied_row(
    dtype: CopyDtype,
    peer: LlamaForCausalLM,
    model: GPTModel,
    new: int,
    quick: bool,
    clock: Callable[[], float],
) -> Row:
    """Tokens a second of one request by `--weights-dtype`, by transformers' in fp32."""
    load = Load(num_requests=1, input_tokens=1, min_output_tokens=new, max_output_tokens=new)
    requests = make_requests(load, model.config.vocab_size)
    engine = engine_of(model, optimized=True, copies=dtype)

    def mcore() -> float:
        engine.scheduler.reset_prefix_cache()
        start = clock()
        generate(engine, requests)
        return new / (clock() - start)

    def static() -> float:
        start = clock()
        static_batch(peer, requests)
        return new / (clock() - start)

    what = f"--weights-dtype {dtype}, 1 row: tokens/s / transformers in fp32"
    target = ">= 2" if dtype == "int8" else ""
    return row(what, *in_turns((mcore, static), rounds=2 if quick else 7), target)


def forward_rows_of(
    count: int,
    peer: LlamaForCausalLM,
    model: GPTModel,
    new: int,
    quick: bool,
    clock: Callable[[], float],
) -> list[Row]:
    """Return the rows of `count` requests of one token, each with `new` tokens generated."""
    load = Load(num_requests=count, input_tokens=1, min_output_tokens=new, max_output_tokens=new)
    requests = make_requests(load, model.config.vocab_size)
    engines = {"optimized": engine_of(model, optimized=True), "local": engine_of(model)}
    multiply = products(model, count)
    texts: dict[str, list[list[int]]] = {}

    def generated(name: str) -> None:
        engines[name].scheduler.reset_prefix_cache()
        texts[name] = [table_rows[0].tokens for table_rows in generate(engines[name], requests)]

    def static() -> None:
        texts["transformers"] = static_batch(peer, requests)

    def alone() -> None:
        for _ in range(new):
            multiply()

    def rate(run: Callable[[], None]) -> Callable[[], float]:
        def timed() -> float:
            start = clock()
            run()
            return count * new / (clock() - start)

        return timed

    mcore = rate(functools.partial(generated, "optimized"))
    sides = (
        ("the model's own forward", functools.partial(generated, "local"), ""),
        ("transformers", static, ">= 1.15" if count == 1 else ""),
        ("the matrix products of its steps", alone, ">= 0.7"),
    )
    table_rows = []
    for against, side, target in sides:
        what = f"inference_optimized, {count} rows: tokens/s / {against}"
        table_rows.append(
            row(what, *in_turns((mcore, rate(side)), rounds=2 if quick else 7), target)
        )
    for name in ("local", "transformers"):
        same = sum(a == b for a, b in zip(texts["optimized"], texts[name], strict=True))
        if same < 0.9 * count:
            raise ValueError(f"{same} of {count} texts are those of {name}: the race is void")
    return table_rows


def invariant_rows(quick: bool, clock: Callable[[], float]) -> list[Row]:
    """Seconds of requests with `--batch-invariant`, by those without."""
    peer = llama(SHAPES["M"])
    table_rows = []
    models = [with_weights_of(peer, backend) for backend in (with_batch_invariance(LOCAL), LOCAL)]
    loads = ((1, 1, 64), (ROWS, 1, 64), (4 * ROWS, 32, 64))
    for count, inputs, outputs in ((c, i, o // 4) for c, i, o in loads) if quick else loads:
        load = Load(
            num_requests=count,
            input_tokens=inputs,
            min_output_tokens=outputs // 8,
            max_output_tokens=outputs,
        )
        requests = make_requests(load, SHAPES["M"].vocabulary)

        def side(
            model: GPTModel, requests: Sequence[EngineRequest] = requests
        ) -> Callable[[], float]:
            engine = engine_of(model)

            def run() -> float:
                engine.scheduler.reset_prefix_cache()
                start = clock()
                generate(engine, requests)
                return clock() - start

            return run

        what = f"--batch-invariant, {count} requests of {inputs} + {outputs}: s / without"
        sides = side(models[0]), side(models[1])
        table_rows.append(row(what, *in_turns(sides, rounds=2 if quick else 5), "<= 1.5"))
    return table_rows


class WrongDrafts:
    """Propose drafts that are always rejected: a token that no text contains."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.stage: DraftStage = "every"

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `megatron.core.inference.speculation.Proposer`."""
        return [[self.token] * context.max_drafts for context in contexts]

    def predict(self, step: ComputedStep) -> list[list[int]]:
        """See `megatron.core.inference.speculation.Proposer`."""
        return []

    def sleep(self, *, weights: bool) -> None:
        """See `megatron.core.inference.speculation.Proposer`."""

    def wake(self) -> None:
        """See `megatron.core.inference.speculation.Proposer`."""


def speculation_rows(quick: bool, clock: Callable[[], float]) -> list[Row]:
    """Return tokens/s with drafts, relative to tokens/s without.

    N-gram drafts rarely match in the text of random weights; other drafts are always rejected.
    """
    model = with_weights_of(llama(SHAPES["M"]))
    drafts, table_rows = 4, []
    for count in (1, ROWS):
        load = Load(
            num_requests=count,
            input_tokens=32,
            min_output_tokens=32 if quick else 128,
            max_output_tokens=32 if quick else 128,
        )
        requests = make_requests(load, SHAPES["M"].vocabulary)
        plain = engine_of(model)
        texts = [outputs[0].tokens for outputs in generate(plain, requests)]
        unused = next(n for n in range(SHAPES["M"].vocabulary) if n not in set().union(*texts))
        for name, proposer in (("n-grams", NGramLookup()), ("wrong drafts", WrongDrafts(unused))):
            engine = engine_of(model, proposer=proposer, num_speculative_tokens=drafts)

            def rate(engine: Engine, requests: Sequence[EngineRequest] = requests) -> float:
                engine.scheduler.reset_prefix_cache()
                start = clock()
                tokens = sum(len(outputs[0].tokens) for outputs in generate(engine, requests))
                return tokens / (clock() - start)

            sides = functools.partial(rate, engine), functools.partial(rate, plain)
            measured = in_turns(sides, rounds=2 if quick else 7)
            again = [outputs[0].tokens for outputs in generate(engine, requests)]
            if again != texts:
                raise ValueError(f"{name} change what {count} requests yield: the race is void")
            what = f"{name}, {count} requests: tokens/s / without drafts; "
            what += f"{engine.stats.tokens_per_forward:.2f} tokens a forward"
            target = "" if name == "n-grams" else ">= 0.9"
            table_rows.append(row(what, *measured, target))
    return table_rows


def planning_rows(quick: bool, clock: Callable[[], float]) -> list[Row]:
    """Return the share of steps planned before the previous step has ended, and the tokens/s of
    the asynchronous loop relative to the synchronous loop."""
    model = with_weights_of(llama(SHAPES["M"]))
    tokens = 32 if quick else 128
    load = Load(
        num_requests=ROWS, input_tokens=1, min_output_tokens=tokens, max_output_tokens=tokens
    )
    requests = make_requests(load, SHAPES["M"].vocabulary)
    ahead, plain = engine_of(model, asynchronous=True), engine_of(model)

    def rate(engine: Engine) -> float:
        start = time.perf_counter()  # the processor's time would count both threads
        generate(engine, requests)
        return ROWS * tokens / (time.perf_counter() - start)

    sides = functools.partial(rate, ahead), functools.partial(rate, plain)
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


def mask_rows(quick: bool, clock: Callable[[], float]) -> list[Row]:
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
    load = Load(num_requests=1, input_tokens=1, min_output_tokens=new, max_output_tokens=new)
    for request in make_requests(load, model.config.vocab_size):
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
}


def rows(quick: bool, *, only: Sequence[str] = tuple(SECTIONS), clock: str = "wall") -> list[Row]:
    """Measure all rows, or the parts that are named."""
    return [table_row for section in only for table_row in SECTIONS[section](quick, CLOCKS[clock])]


def main() -> None:
    """Measure the selected cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer requests and rounds")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=tuple(SECTIONS))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    table = format_table(rows(arguments.quick, only=arguments.only, clock=arguments.clock))
    print(f"{machine()}; {arguments.clock} clock, {torch.get_num_threads()} threads\n\n{table}")


if __name__ == "__main__":
    main()
