# SPDX-License-Identifier: Apache-2.0
"""The router against routers of transformers; its precision, its counters, its jitter."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.moe.router import MEASURES, Router, Routing, Share, jitter_key, jittered
from megatron.core.transformer import AttentionConfig, MLPConfig, Recompute
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.inputs import generator
from tests.unit_tests.core.moe.single_layer import make_layer_build

S, B, H, EXPERTS = 17, 3, 20, 12
GROUPED = {"topk": 3, "score_function": "sigmoid", "num_groups": 4, "group_topk": 2}


class LocalRouter:
    """A router with its engine, in a single process."""

    def __init__(
        self, config: RouterConfig, dtype: torch.dtype = torch.float32, **moe: object
    ) -> None:
        groups = ProcessGroupCollection.single()
        self.build = make_layer_build(groups, hidden_size=H, dtype=dtype)
        shape = MoEConfig(num_experts=EXPERTS, ffn_hidden_size=4, router=config, **moe)
        assert shape.problems() == []
        self.router = Router("r", config=shape, build=self.build)
        self.build.store.materialize()
        self.engine = DataParallel(self.build.store, groups)

    @property
    def weight(self) -> torch.Tensor:
        return self.router.weight.get()

    def route(self, rows: torch.Tensor, layout: SequenceLayout | None = None, **options) -> Routing:
        """Route rows [s·b, h]."""
        hidden = rows.view(-1, B, H)
        layout = layout or SequenceLayout.of_rows(len(hidden))
        return self.router(rows, Share(hidden, layout, region=self.build.region), **options)


def hf_router(name: str, config: RouterConfig) -> torch.nn.Module:
    """Return a router of transformers."""
    if name == "mixtral":
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

        return MixtralTopKRouter(
            MixtralConfig(hidden_size=H, num_local_experts=EXPERTS, num_experts_per_tok=config.topk)
        )
    if name == "qwen":
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

        hf_config = Qwen3MoeConfig(
            hidden_size=H,
            num_experts=EXPERTS,
            num_experts_per_tok=config.topk,
            norm_topk_prob=config.normalize,
        )
        return Qwen3MoeTopKRouter(hf_config)
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    hf_config = DeepseekV3Config(
        hidden_size=H,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=config.topk,
        n_group=config.num_groups,
        topk_group=config.group_topk,
        norm_topk_prob=config.normalize,
        routed_scaling_factor=config.scaling_factor,
    )
    return DeepseekV3TopkRouter(hf_config)


@pytest.mark.parametrize(
    ("name", "config", "bias"),
    [
        ("mixtral", RouterConfig(topk=2), None),
        ("qwen", RouterConfig(topk=4), None),
        ("qwen", RouterConfig(topk=4, normalize=False), None),
        ("qwen", RouterConfig(topk=1, normalize=False), None),
        ("deepseek", RouterConfig(**GROUPED), None),
        ("deepseek", RouterConfig(**GROUPED, expert_bias=True, scaling_factor=2.5), 0.0),
        ("deepseek", RouterConfig(**GROUPED, expert_bias=True, normalize=False), 0.0),
        ("deepseek", RouterConfig(**GROUPED, expert_bias=True, scaling_factor=2.5), -3.0),
    ],
)
def test_router_matches_transformers(name: str, config: RouterConfig, bias: float | None):
    pytest.importorskip("transformers")
    mcore, hf = LocalRouter(config), hf_router(name, config)
    with torch.no_grad():
        hf.weight.copy_(mcore.weight)
    expert_bias = torch.zeros(EXPERTS)
    if bias is not None:
        expert_bias = 0.5 * torch.rand(EXPERTS, generator=generator(1)) + bias
        hf.e_score_correction_bias.copy_(expert_bias)
        mcore.router.expert_bias.copy_(expert_bias)
    rows = torch.randn(S * B, H, generator=generator(2))
    factors = torch.randn(S * B, EXPERTS, generator=generator(3))
    x, y = (rows.clone().requires_grad_(True) for _ in range(2))

    mcore.engine.begin_step()
    routing = mcore.route(x)
    mcore.engine.backward((routing.weights * factors.gather(1, routing.experts)).sum(), last=True)
    mcore.engine.finish()
    _, weights, experts = hf(y)
    (weights * factors.gather(1, experts)).sum().backward()

    def scatter_weights(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(S * B, EXPERTS).scatter(1, chosen, values.detach())

    assert routing.keep_mask is None
    assert routing.weights.dtype == torch.float32
    assert len(set(routing.experts.flatten().tolist())) > 6
    actual = {"weights": scatter_weights(routing.weights, routing.experts), "dx": x.grad}
    expected = {"weights": scatter_weights(weights, experts), "dx": y.grad}
    actual["dW"], expected["dW"] = mcore.router.weight.main_grad, hf.weight.grad
    assert_all_close(actual, expected, bound=5e-6)
    if bias is not None:  # the bias changed the choice of experts, not their weights
        free = LocalRouter(dataclasses.replace(config, expert_bias=False)).route(rows)
        changed = scatter_weights(free.weights, free.experts) != actual["weights"]
        assert changed.any(1).float().mean() > 0.2


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_bf16_router_computes_in_fp32(score_function: str):
    config = RouterConfig(
        topk=EXPERTS, score_function=score_function
    )  # all experts, so rounding cannot change the choice
    local = LocalRouter(config, dtype=torch.bfloat16)
    rows = torch.randn(S * B, H, generator=generator(4)).bfloat16()
    factors = torch.randn(S * B, EXPERTS, generator=generator(5))
    x = rows.clone().requires_grad_(True)
    local.engine.begin_step()
    routing = local.route(x)
    local.engine.backward((routing.weights * factors.gather(1, routing.experts)).sum(), last=True)
    local.engine.finish()
    y = rows.double().requires_grad_(True)
    w = local.weight.detach().double().requires_grad_(True)
    logits = y @ w.t()
    scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
    expected = scores / scores.sum(-1, keepdim=True)
    (expected * factors).sum().backward()
    assert local.weight.dtype == x.grad.dtype == torch.bfloat16
    assert local.router.weight.main_grad.dtype == torch.float32
    assert_close_by_metric(
        "weights", routing.weights, expected.gather(1, routing.experts), bound=1e-6
    )
    assert_close_by_metric("dW", local.router.weight.main_grad, w.grad, bound=2e-6)
    assert_close_by_metric("dx", x.grad, y.grad, bound=2.0**-8)  # one rounding, at the end
    rounded = (rows @ local.weight.t()).float()
    assert (rounded - logits).abs().max() > 1e-3 * logits.abs().max(), "bf16 would show"


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_counters_match_fp64_formula(score_function: str):
    config = RouterConfig(
        topk=2,
        score_function=score_function,
        balance="aux_loss",
        aux_loss_coeff=0.3,
        z_loss_coeff=0.2,
    )
    local = LocalRouter(config, capacity_factor=0.9, drop_policy="position")
    rows = torch.randn(S * B, H, generator=generator(6))
    with torch.no_grad():
        local.route(rows, aux_factor=torch.tensor(1.0))
    assert not local.router.counted.any(), "only training counts"
    capacity = math.ceil(0.9 * S * B * 2 / EXPERTS)
    expected = torch.zeros(EXPERTS + len(MEASURES), dtype=torch.float64)
    for batch in (rows, rows.flip(1)):
        routing = local.route(
            batch, aux_factor=torch.tensor(5.0)
        )  # the counters exclude the factor
        logits = batch.double() @ local.weight.detach().double().t()
        scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
        shares = scores / scores.sum(-1, keepdim=True)
        counts = torch.tensor([int((routing.experts == e).sum()) for e in range(EXPERTS)]).double()
        dropped = (counts - capacity).clamp(min=0).sum()
        assert dropped > 0
        assert (~routing.keep_mask).sum() == dropped
        balance = EXPERTS / (2 * len(batch) ** 2) * (counts * shares.sum(0)).sum()
        entropy = -(shares * shares.log()).sum()
        z = logits.exp().sum(-1).log().square().mean()
        num_microbatches = torch.tensor(1.0)
        measures = torch.stack(
            [counts.sum(), dropped, entropy, balance, z, num_microbatches.double()]
        )
        expected += torch.cat([counts, measures])
    assert len(MEASURES) == 6
    actual, expected_counters = local.router.counted, expected
    names = [f"expert {e}" for e in range(EXPERTS)] + list(MEASURES)
    assert_all_close(
        dict(zip(names, actual, strict=True)),
        dict(zip(names, expected_counters, strict=True)),
        bound=1e-6,
    )
    before = actual.clone()
    local.route(rows)  # without a factor, loads are counted and losses are not
    increase = dict(zip(names, local.router.counted - before, strict=True))
    assert increase["assigned"] == 2 * S * B
    assert increase["balance_loss"] == increase["z_loss"] == 0
    assert increase["microbatches"] == 1


@pytest.mark.parametrize("by_sequence", [False, True])
def test_aux_loss_gradient_matches_fp64_formula(by_sequence: bool):
    config = RouterConfig(
        topk=2,
        normalize=False,
        balance="seq_aux_loss" if by_sequence else "aux_loss",
        aux_loss_coeff=0.3,
        z_loss_coeff=0.2,
    )
    local = LocalRouter(config)
    rows = torch.randn(S * B, H, generator=generator(7))
    x = rows.clone().requires_grad_(True)
    local.engine.begin_step()
    routing = local.route(x, aux_factor=torch.tensor(7.0))
    local.engine.backward((routing.weights * 0.0).sum(), last=True)
    local.engine.finish()
    y = rows.double().requires_grad_(True)
    w = local.weight.detach().double().requires_grad_(True)
    logits = y @ w.t()
    shares = logits.softmax(-1)
    loss = logits.logsumexp(-1).square().mean() * 0.2
    sets = [list(range(b, S * B, B)) for b in range(B)] if by_sequence else [list(range(S * B))]
    for set_rows in sets:
        counts = routing.experts[set_rows].flatten().bincount(minlength=EXPERTS)
        term = EXPERTS / (2 * len(set_rows) ** 2) * (counts * shares[set_rows].sum(0)).sum()
        loss = loss + 0.3 * term / len(sets)
    (loss * 7.0).backward()
    main_grad = local.router.weight.main_grad
    assert_all_close({"dx": x.grad, "dW": main_grad}, {"dx": y.grad, "dW": w.grad}, bound=5e-6)


def counted_by_model(recompute: Recompute) -> list[torch.Tensor]:
    """Return the counters of a model's routers after two microbatches."""
    moe = MoEConfig(
        num_experts=4,
        ffn_hidden_size=6,
        router=RouterConfig(topk=2, balance="aux_loss", aux_loss_coeff=0.1),
    )
    config = GPTConfig(
        num_layers=2,
        hidden_size=12,
        vocab_size=31,
        attention=AttentionConfig(num_attention_heads=2, num_query_groups=1, kv_channels=6),
        mlp=MLPConfig(ffn_hidden_size=10),
        moe=moe,
        init_std=0.3,
    )
    model = GPTModel(config, ProcessGroupCollection.single(), seed=5)
    model.set_recompute(recompute)
    engine = DataParallel(model.store, model.store.groups)
    engine.begin_step(2)
    for i in range(2):
        tokens = torch.randint(0, 31, (2, 9), generator=generator(8, i))
        loss, _ = model.loss(tokens, tokens.roll(1), torch.ones(2, 9), aux_factor=torch.tensor(1.0))
        engine.backward(loss, last=i == 1)
    engine.finish()
    return [m.counted for m in model.modules() if isinstance(m, Router)]


def test_recomputed_layers_count_once():
    expected = counted_by_model(Recompute())
    assert len(expected) == 2
    for counted in expected:
        assert counted[: 4 + 1].tolist()[-1] == counted[:4].sum() == 2 * 2 * 2 * 9
    for recompute in (
        Recompute(granularity="selective"),
        Recompute(granularity="full", method="uniform", num_layers=1),
        Recompute(granularity="full", method="block", num_layers=1),
        Recompute(granularity="full", method="uniform", num_layers=2),
    ):
        for actual, reference in zip(counted_by_model(recompute), expected, strict=True):
            assert_close_by_metric(str(recompute), actual, reference, bound=1e-6)


RATE, KEY = 0.25, jitter_key(9, "decoder.blocks.1.moe.router")


def test_jitter_depends_on_sample_position_and_feature():
    samples, positions = torch.arange(60) // 12, torch.arange(60) % 12
    width = 80
    noise = jittered(torch.ones(60, width), samples, positions, rate=RATE, key=KEY)
    assert noise.min() >= 1 - RATE
    assert noise.max() < 1 + RATE
    assert noise.unique().numel() > 0.99 * noise.numel()
    # Mean and standard deviation of 4800 uniform numbers, to four deviations.
    std = RATE / 3**0.5
    assert abs(noise.mean() - 1) < 4 * std / noise.numel() ** 0.5
    assert abs(noise.std() / std - 1) < 0.03
    centred = (noise - 1) / std
    for shifted in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(12, 0)):
        assert abs((centred * shifted).mean()) < 4 / noise.numel() ** 0.5, "rows are alike"
    x = torch.randn(60, width, generator=generator(9))
    subset = torch.randperm(60, generator=generator(10))[:23]
    actual = jittered(x[subset], samples[subset], positions[subset], rate=RATE, key=KEY)
    assert torch.equal(actual, (x * noise)[subset]), "noise depends on the row's order in the batch"
    other_noise = jittered(
        torch.ones(60, width), samples, positions, rate=RATE, key=jitter_key(9, "another")
    )
    different = float((other_noise != noise).float().mean())
    assert different > 0.99
    assert torch.equal(jittered(x, samples, positions, rate=0.0, key=KEY), x)
    assert jittered(x.bfloat16(), samples, positions, rate=RATE, key=KEY).dtype == torch.bfloat16


def test_jitter_applies_to_router_input_in_training_only():
    config = RouterConfig(topk=2, jitter=RATE)
    local = LocalRouter(config)
    rows = torch.randn(S * B, H, generator=generator(11))
    plain = LocalRouter(dataclasses.replace(config, jitter=0.0)).route(rows)
    without_ids = local.route(rows)  # no sample ids
    assert torch.equal(without_ids.weights, plain.weights)
    ids = torch.tensor([40, 7, 23])
    x = rows.clone().requires_grad_(True)
    local.engine.begin_step()
    with_ids = local.route(x, SequenceLayout.of_rows(S, sample_ids=ids))
    assert (with_ids.weights - plain.weights).abs().max() > 1e-2
    numbers = torch.arange(S * B)
    noise = jittered(
        torch.ones(S * B, H), ids[numbers % B], numbers // B, rate=RATE, key=local.router.jitter_key
    )
    w = local.weight.detach().double().requires_grad_(True)
    y = rows.double().requires_grad_(True)
    scores = ((y * noise) @ w.t()).softmax(-1).gather(1, with_ids.experts)
    expected = scores / scores.sum(-1, keepdim=True)
    factors = torch.randn(S * B, 2, generator=generator(12))
    (expected * factors).sum().backward()
    local.engine.backward((with_ids.weights * factors).sum(), last=True)
    local.engine.finish()
    actual = {"weights": with_ids.weights, "dx": x.grad, "dW": local.router.weight.main_grad}
    assert_all_close(actual, {"weights": expected, "dx": y.grad, "dW": w.grad}, bound=5e-6)
