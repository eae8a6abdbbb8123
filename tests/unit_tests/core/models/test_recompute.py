# SPDX-License-Identifier: Apache-2.0
"""Recompute is bit-identical in losses and gradients, and frees the memory of its formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, Recompute
from tests.support.inputs import microbatch, one_thread, perturbed
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks

LAYERS, HIDDEN, HEADS, GROUPS, DIM, FFN = 3, 24, 4, 2, 8, 20
BATCH, SEQUENCE = 3, 8
CONFIG = GPTConfig(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    vocab_size=37,
    attention=AttentionConfig(
        num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=DIM, dropout=0.3
    ),
    mlp=MLPConfig(ffn_hidden_size=FFN),
    hidden_dropout=0.2,
)
BIASED = dataclasses.replace(
    CONFIG,
    attention=dataclasses.replace(
        CONFIG.attention, qkv_bias=True, output_bias=True, qk_norm=True, dropout=0.0
    ),
    mlp=MLPConfig(ffn_hidden_size=FFN, gated=False, activation="gelu", bias=True),
    norm=NormConfig(kind="LayerNorm"),
    tied=True,
)
SINGLE = ProcessGroupCollection.single()
NO_RECOMPUTE = Recompute()
SETTINGS = [
    Recompute(granularity="full", method="uniform", num_layers=1),
    Recompute(granularity="full", method="uniform", num_layers=2),
    Recompute(granularity="full", method="block", num_layers=2),
    Recompute(granularity="selective"),
]


def name_of(recompute: Recompute) -> str:
    """Return the test id of a setting."""
    return "-".join(str(v) for v in dataclasses.astuple(recompute) if v is not None)


def model_of(
    config: GPTConfig,
    recompute: Recompute,
    groups: ProcessGroupCollection = SINGLE,
    *,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
) -> GPTModel:
    """Return a model with perturbed weights and this recompute setting."""
    model = GPTModel(config, groups, sequence_parallel=sequence_parallel, seed=5, dtype=dtype)
    perturbed_weights = perturbed(
        {n: h.get() for n, h in model.store.handles.items()}, seed=groups.rank
    )
    for name, handle in model.store.handles.items():
        if groups["tp"].size == 1 or "norm" not in name:
            handle.get().copy_(perturbed_weights[name])
    model.set_recompute(recompute)
    return model


def count_runs(model: GPTModel) -> list[int]:
    """Return a list to which every forward of a block appends the block's index."""
    ran: list[int] = []
    for i, block in enumerate(model.decoder.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
    return ran


def train_step(
    model: GPTModel, *, microbatches: int = 2, deferred: bool = False
) -> dict[str, torch.Tensor]:
    """Return the losses and all gradients of a step."""
    engine = DataParallel(model.store, model.groups)
    values = {}
    engine.begin_step()
    with nan_memory():
        for i in range(microbatches):
            batch = microbatch(
                seed=4, dp_rank=0, index=i, batch=BATCH, sequence=SEQUENCE, vocabulary=37
            )
            loss, nll = model.loss(batch.tokens, batch.labels, batch.loss_mask, layout=batch.layout)
            final = i == microbatches - 1
            values[f"loss {i}"], values[f"nll {i}"] = loss.detach().clone(), nll.detach().clone()
            if deferred:
                with model.store.defer() as queue:
                    engine.backward(loss, last=final)
                assert len(queue)
                queue.drain()
            else:
                engine.backward(loss, last=final)
        engine.finish()
    gradients = {n: h.main_grad for n, h in model.store.handles.items() if h.main_grad is not None}
    return values | {name: gradient.clone() for name, gradient in gradients.items()}


def assert_equal_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fail on the first name whose values differ in a bit, or are all zero."""
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert values.abs().max() > 0, name
        assert torch.equal(actual[name], values), name


@pytest.mark.parametrize("recompute", SETTINGS, ids=name_of)
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(CONFIG, torch.bfloat16), (BIASED, torch.float32)],
    ids=["gated", "biased"],
)
def test_recompute_is_bit_identical(config, recompute, dtype):
    with one_thread():
        expected = train_step(model_of(config, NO_RECOMPUTE, dtype=dtype))
        model = model_of(config, recompute, dtype=dtype)
        ran = count_runs(model)
        assert_equal_bits(train_step(model), expected)
        deferred = train_step(model_of(config, recompute, dtype=dtype), deferred=True)
        assert_equal_bits(deferred, expected)
    num_recomputed = {"uniform": LAYERS, "block": 2, None: 0}[recompute.method]
    assert len(ran) == 2 * (2 * LAYERS + 2 * num_recomputed), "a recomputed block runs twice"


def train_on_rank(rank: int, world: int) -> list[list[dict[str, torch.Tensor]]]:
    """Train without recompute and with every setting; return a list of outputs per model."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    return [
        [
            train_step(model_of(config, recompute, groups, sequence_parallel=sequence_parallel))
            for recompute in (NO_RECOMPUTE, *SETTINGS)
        ]
        for config, sequence_parallel in ((BIASED, False), (CONFIG, True))
    ]


def test_recompute_is_bit_identical_on_two_ranks():
    for outputs in run_ranks(train_on_rank, 2):
        for expected, *recomputed in outputs:
            for actual in recomputed:
                assert_equal_bits(actual, expected)


@pytest.mark.parametrize("recompute", SETTINGS, ids=name_of)
def test_frozen_embedding_keeps_the_layer_gradients(recompute):
    def train_frozen(recompute: Recompute) -> dict[str, torch.Tensor]:
        model = model_of(CONFIG, recompute)
        model.store.freeze("embedding.weight", "decoder.blocks.0.norm.weight")
        return train_step(model)

    with one_thread():
        expected = train_frozen(NO_RECOMPUTE)
        assert "embedding.weight" not in expected
        assert_equal_bits(train_frozen(recompute), expected)


def test_layers_without_trained_weights_are_not_recomputed():
    model = model_of(CONFIG, SETTINGS[0])
    names = [n for n in model.store.handles if n.startswith(("embedding", "decoder.blocks.0"))]
    model.store.freeze(*names, *(n for n in model.store.handles if ".blocks.1." in n))
    ran = count_runs(model)
    train_step(model, microbatches=1)
    assert ran == [0, 1, 2, 3, 4, 5, 4, 5, 2, 3], "the first layer has nothing to train"


def test_evaluation_and_generation_recompute_nothing():
    tokens = torch.arange(12).view(2, 6)
    for recompute in SETTINGS:
        model = model_of(CONFIG, recompute)
        plain = model_of(CONFIG, NO_RECOMPUTE)
        ran = count_runs(model)
        with torch.no_grad():
            assert torch.equal(model.full_logits(tokens), plain.full_logits(tokens))
        assert ran == list(range(2 * LAYERS))


def test_recompute_runs_cover_the_layers():
    uniform, block, selective = SETTINGS[1:]
    assert NO_RECOMPUTE.runs(3) == selective.runs(3) == [(0, 3, False)]
    assert uniform.runs(5) == [(0, 2, True), (2, 4, True), (4, 5, True)]
    assert block.runs(5) == [(0, 1, True), (1, 2, True), (2, 5, False)]
    assert block.runs(2) == [(0, 1, True), (1, 2, True)]
    with pytest.raises(ValueError, match="recompute-num-layers 2 exceeds the number of layers, 1"):
        model_of(dataclasses.replace(CONFIG, num_layers=1, ffn_pattern=""), uniform)
    for invalid in ({"granularity": "full"}, {"granularity": "full", "method": "block"}):
        with pytest.raises(ValueError, match="full recompute needs recompute-method"):
            Recompute(**invalid)
    for invalid in ({"method": "block"}, {"granularity": "selective", "num_layers": 1}):
        with pytest.raises(ValueError, match="no effect without recompute-granularity full"):
            Recompute(**invalid)


# --- memory ---------------------------------------------------------------------------------------


def measure_memory(recompute: Recompute) -> tuple[int, int]:
    """Return the bytes that a forward leaves allocated, and the peak of forward and backward."""
    model = model_of(CONFIG, recompute)
    engine = DataParallel(model.store, SINGLE)
    batch = microbatch(seed=4, dp_rank=0, index=0, batch=BATCH, sequence=SEQUENCE, vocabulary=37)
    engine.begin_step()
    allocated, saved, peak = 0, 0, 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss, _ = model.loss(batch.tokens, batch.labels, batch.loss_mask, layout=batch.layout)
        with torch.profiler.record_function("backward begins"):
            engine.backward(loss, last=True)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    for event in events:
        if event.name() == "backward begins":
            saved = allocated
        elif event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return saved, peak


def test_saved_activations_shrink_by_the_formula():
    """Elements per token and layer, fp32: h, f, n·d … as in the layers' docstrings."""
    tokens, h = BATCH * SEQUENCE, HIDDEN
    norms = 2 * (h + h + 1)  # input, output and 1 / rms of each
    attention = (HEADS + 2 * GROUPS) * DIM + (HEADS + GROUPS) * DIM + HEADS * DIM + HEADS
    layer = norms + attention + 3 * FFN
    freed = {
        # Recomputed layers, less the two inputs of each run; the first run has one input.
        name_of(SETTINGS[0]): 3 * layer - 5 * h,
        name_of(SETTINGS[1]): 3 * layer - 3 * h,
        name_of(SETTINGS[2]): 2 * layer - 3 * h,
        name_of(SETTINGS[3]): LAYERS * (2 * h + FFN),
    }
    with one_thread():
        measure_memory(NO_RECOMPUTE)  # buffers that are created once
        saved, peak = measure_memory(NO_RECOMPUTE)
        for recompute in SETTINGS:
            name = name_of(recompute)
            saved_recomputed, lower_peak = measure_memory(recompute)
            assert saved - saved_recomputed == 4 * tokens * freed[name], (
                name
            )  # norms keep no copy of a weight
            # A block's normalized input exists from the start of its backward.
            assert lower_peak < 0.93 * peak, name
