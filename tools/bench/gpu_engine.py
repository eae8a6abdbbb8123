# SPDX-License-Identifier: Apache-2.0
"""The inference engine on a GPU: eager steps and CUDA graphs, synchronous and asynchronous.

python -m tools.bench.gpu_engine                 Llama of 8 B and 1.3 B; a small GPT, hybrid, MoE
python -m tools.bench.gpu_engine --rehearse      tiny models, on a CPU, in Triton's interpreter

Greedy requests have the same tokens by all ways of stepping, else that is a problem of the bench (a
tie of bf16 logits may be the reason). A step reads all weights but the embedding's, and the keys
and values of its rows, once: that is its roofline. Prompts are computed in the first steps, which
do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch

from megatron.core.device import CudaRecorder, GraphMemory
from megatron.core.inference import Completions, Engine, EngineConfig, EngineRequest
from megatron.core.inference.model_runner import EngineFeatures
from megatron.core.inference.sampling import SamplingParams
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.ssm import GatedDeltaNetConfig
from tools.bench import mcore_step, shapes
from tools.bench.gpu_train import LLAMA_1_3B
from tools.bench.harness import Bench, no_device, options_of
from tools.bench.shapes import Shape
from tools.bench.table import Peer

SMALL = Shape(
    layers=4, hidden=512, ffn=1376, heads=8, kv_heads=4, vocabulary=2048, batch=1, sequence=1024
)
TINY = Shape(layers=2, hidden=32, ffn=48, heads=2, kv_heads=1, vocabulary=64, batch=1, sequence=128)
DELTA = GatedDeltaNetConfig(num_key_heads=4, num_value_heads=8, key_channels=64, value_channels=64)
TINY_DELTA = GatedDeltaNetConfig(
    num_key_heads=1, num_value_heads=2, key_channels=16, value_channels=16
)
#: Llama 3's 8.03 B weights.
LLAMA_8B = Shape(
    layers=32,
    hidden=4096,
    ffn=14336,
    heads=32,
    kv_heads=8,
    vocabulary=128256,
    batch=1,
    sequence=4096,
)
#: Requests at once, and the share of the memory's bandwidth on the data sheet that is promised.
PROMISED_ROWS = ((1, 0.75), (64, 0.60))
#: Bytes a second on the data sheet, by words of the device's name.
DATA_SHEET = (("H200", 4.8e12), ("H100 PCIe", 2.0e12), ("H100 NVL", 3.9e12), ("H100", 3.35e12))
#: Steps in which prompts are computed and graphs recorded.
WARMUP_STEPS = 8
ROUNDS = 3
#: Tokens of the first request's prompt; each has one more than the one before.
SHORTEST_PROMPT = 20

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1)


@dataclass(frozen=True)
class Way:
    """How an engine steps.

    Args:
        asynchronous: plan a step while the one before it runs.
        graphs: record decode steps as CUDA graphs.
    """

    asynchronous: bool
    graphs: bool

    def __str__(self) -> str:
        return f"{'graphs' if self.graphs else 'eager'}{', async' if self.asynchronous else ''}"


def config_of(kind: str, shape: Shape, *, tiny: bool) -> GPTConfig:
    """Return the model of a kind: "gpt", "hybrid" or "moe"."""
    config = mcore_step.config_of(shape)
    if kind == "hybrid":
        pattern = "G-*-" if tiny else "G-G-G-*-"
        delta = TINY_DELTA if tiny else DELTA
        return dataclasses.replace(
            config, num_layers=len(pattern), ffn_pattern="", pattern=pattern, delta_net=delta
        )
    if kind == "moe":
        experts = MoEConfig(
            num_experts=4 if tiny else 16,
            ffn_hidden_size=shape.ffn // 4,
            router=RouterConfig(topk=2 if tiny else 4),
        )
        return dataclasses.replace(config, ffn_pattern="E" * shape.layers, moe=experts)
    return config


def engine_of(model: GPTModel, way: Way, *, rows: int, num_blocks: int) -> Engine:
    """Return an engine that steps in one way, on the device of a model."""
    recorder = partial(CudaRecorder, model.store.device, "gpu_engine", memory=GraphMemory())
    config = EngineConfig(
        max_num_seqs=rows,
        num_blocks=num_blocks,
        asynchronous=way.asynchronous,
        max_model_len=1024,
    )
    features = EngineFeatures(make_recorder=recorder if way.graphs else None)
    return Engine(model, config, features=features)


def generate(
    bench: Bench, model: GPTModel, way: Way, sampling: SamplingParams, *, rows: int, tokens: int
) -> tuple[float, list[list[int]]]:
    """Answer requests of different lengths.

    Args:
        bench: whose device and dtype are taken.
        model: that is run.
        way: how the engine steps.
        sampling: of all requests.
        rows: number of requests.
        tokens: generated tokens per request.

    Returns:
        (median seconds of a decode step, the tokens of each request).
    """
    config = model.config
    engine = engine_of(model, way, rows=rows, num_blocks=64 * rows)
    for row in range(rows):
        length = SHORTEST_PROMPT + row
        prompt = tuple(5 + (7 * row + i) % (config.vocab_size - 5) for i in range(length))
        engine.add(EngineRequest(prompt=prompt, max_new_tokens=tokens, sampling=sampling))
    outputs = Completions()
    seconds: list[float] = []
    while engine.unfinished:
        start = time.perf_counter()
        outputs.add(engine.step())
        seconds.append(time.perf_counter() - start)
    bench.watch.wait()
    return statistics.median(seconds[WARMUP_STEPS:]), [
        outputs[key].tokens for key in sorted(outputs)
    ]


def step_bytes(model: GPTModel, dtype: torch.dtype, rows: int, tokens: int) -> float:
    """Return the bytes that a decode step must read, on average over a generation.

    Args:
        model: the model; a step reads all its weights, and one embedding row per token.
        dtype: dtype of weights, keys and values.
        rows: number of requests.
        tokens: generated tokens per request.
    """
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    weights -= config.vocab_size * config.hidden_size
    context = SHORTEST_PROMPT + (rows - 1) / 2 + (tokens + WARMUP_STEPS) / 2
    heads = model.cache_shapes.attention
    kv_bytes = 2 * sum(math.prod(shape) for shape in heads)  # keys and values of a token
    return dtype.itemsize * (weights + rows * context * kv_bytes)


def bandwidth_on_data_sheet() -> float | None:
    """Return the bytes a second of this GPU's memory, or None of an unknown one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((rate for words, rate in DATA_SHEET if words in name), None)


def engine_steps(
    bench: Bench, kind: str, shape: Shape, *, rows: int, promised: float | None = None
) -> None:
    """Race the ways in which an engine steps.

    Args:
        bench: where to.
        kind: of the model, see `config_of`.
        shape: of the model.
        rows: requests at once.
        promised: share of the data sheet's bandwidth; only graphs and greedy tokens are measured
            where one is.
    """
    model = GPTModel(
        config_of(kind, shape, tiny=bench.rehearse),
        ProcessGroupCollection.single(),
        seed=shapes.SEED,
        dtype=bench.dtype,
        device=bench.device,
    )
    weights = sum(parameter.numel() for parameter in model.parameters())
    recorded = (True, False) if bench.watch.on_gpu else (False,)
    ways = [Way(a, g) for g, a in itertools.product(recorded, (False, True))]
    samplings = {"greedy": GREEDY, "sampled": SAMPLED}
    if promised is not None:
        ways, samplings = [Way(a, recorded[0]) for a in (True, False)], {"greedy": GREEDY}
    tokens = bench.sized(64, 12)
    for name, sampling in samplings.items():
        seconds: dict[Way, list[float]] = {way: [] for way in ways}
        texts: dict[Way, list[list[int]]] = {}
        for turn in range(bench.sized(ROUNDS, 1)):
            for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                step_seconds, texts[way] = generate(
                    bench, model, way, sampling, rows=rows, tokens=tokens
                )
                seconds[way].append(step_seconds)
        difference = first_difference(texts) if sampling is GREEDY else None
        if difference is not None:
            bench.problems[f"{kind}, {rows} rows"] = difference
        best, *slower = ways
        best_seconds = seconds[best]
        moved, step = step_bytes(model, bench.dtype, rows, tokens), statistics.median(best_seconds)
        bound = moved / bench.rates["copy_bytes_per_second"]
        what = f"{kind} of {weights:,} weights, {rows} rows, {name}: a step, {best}"
        bench.add(
            what,
            1e3 * step,
            unit="ms",
            peers={
                str(way): Peer(
                    figure=1e3 * statistics.median(seconds[way]),
                    ratio=statistics.median(
                        b / a for a, b in zip(best_seconds, seconds[way], strict=True)
                    ),
                )
                for way in slower
            },
            bound=1e3 * bound,
            share=bound / step,
        )
        peak = bandwidth_on_data_sheet()
        if promised is not None and peak is not None:
            bench.add(
                f"{what}: of {peak / 1e12:.3g} TB/s on the data sheet",
                moved / step / peak,
                unit="MBU",
                targets=[f"MBU >= {promised}"],
            )


def first_difference(texts: dict[Way, list[list[int]]]) -> str | None:
    """Return where two ways of stepping choose different tokens for a request, or None."""
    (reference_name, expected), *other_texts = texts.items()
    for way, rows in other_texts:
        for row, (a, b) in enumerate(zip(expected, rows, strict=True)):
            index = next(
                (i for i, pair in enumerate(zip(a, b, strict=False)) if len({*pair}) > 1), None
            )
            if a != b:
                index = min(len(a), len(b)) if index is None else index
                names = f"{way} and {reference_name}"
                return f"{names} choose other tokens for request {row} from {index} on"
    return None


def main() -> int:
    """Measure and return the exit code."""
    options = options_of(
        argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
    )
    if no_device(options, "gpu_engine"):
        return 0
    sizes: list[tuple[str, Shape, int, float | None]] = [
        (kind, TINY if options.rehearse else SMALL, 3 if options.rehearse else 8, None)
        for kind in ("gpt", "hybrid", "moe")
    ]
    if options.rehearse:
        sizes += [("gpt", TINY, *PROMISED_ROWS[0])]
    else:
        sizes += [("gpt", LLAMA_8B, *promised) for promised in PROMISED_ROWS]
        sizes += [("gpt", LLAMA_1_3B, rows, None) for rows in (1, 16)]
    if options.quick:
        sizes = sizes[:1]
    cases = [
        (
            f"{kind}, {shape.layers} layers of {shape.hidden}, {rows} rows",
            lambda bench, kind=kind, shape=shape, rows=rows, promised=promised: engine_steps(
                bench, kind, shape, rows=rows, promised=promised
            ),
        )
        for kind, shape, rows, promised in sizes
    ]
    return Bench("engine", options).run(cases)


if __name__ == "__main__":
    sys.exit(main())
