# SPDX-License-Identifier: Apache-2.0
"""The router against those of transformers; its precision, its counts, its jitter."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.moe.router import MEASURES, Router, Routing, Share, jitter_key, jittered
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer import AttentionConfig, MLPConfig, Recompute
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.inputs import generator
from tests.unit_tests.core.moe.single_layer import surroundings

S, B, H, EXPERTS = 17, 3, 20, 12
GROUPED = {"topk": 3, "score_function": "sigmoid", "num_groups": 4, "group_topk": 2}


class Alone:
    """A router with its engine, in a single process."""

    def __init__(
        self, config: RouterConfig, dtype: torch.dtype = torch.float32, **moe: object
    ) -> None:
        groups = ProcessGroupCollection.single()
        self.build = surroundings(groups, hidden_size=H, dtype=dtype)
        shape = MoEConfig(num_experts=EXPERTS, ffn_hidden_size=4, router=config, **moe)
        assert shape.problems() == []
        self.router = Router("r", config=shape, build=self.build)
        self.build.store.materialize()
        self.engine = DataParallel(self.build.store, groups)

    @property
    def weight(self) -> torch.Tensor:
        return self.router.weight.get()

    def route(self, rows: torch.Tensor, layout: SequenceLayout | None = None, **more) -> Routing:
        """Route rows [s·b, h]."""
        hidden = rows.view(-1, B, H)
        layout = layout or SequenceLayout.of_rows(len(hidden))
        return self.router(rows, Share(hidden, layout, region=self.build.region), **more)


def their_router(name: str, config: RouterConfig) -> torch.nn.Module:
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

        made = Qwen3MoeConfig(
            hidden_size=H,
            num_experts=EXPERTS,
            num_experts_per_tok=config.topk,
            norm_topk_prob=config.normalize,
        )
        return Qwen3MoeTopKRouter(made)
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    made = DeepseekV3Config(
        hidden_size=H,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=config.topk,
        n_group=config.num_groups,
        topk_group=config.group_topk,
        norm_topk_prob=config.normalize,
        routed_scaling_factor=config.scaling_factor,
    )
    return DeepseekV3TopkRouter(made)


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
def test_weights_and_every_gradient(name: str, config: RouterConfig, bias: float | None):
    pytest.importorskip("transformers")
    ours, theirs = Alone(config), their_router(name, config)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
    added = torch.zeros(EXPERTS)
    if bias is not None:
        added = 0.5 * torch.rand(EXPERTS, generator=generator(1)) + bias
        theirs.e_score_correction_bias.copy_(added)
        ours.router.expert_bias.copy_(added)
    rows = torch.randn(S * B, H, generator=generator(2))
    factors = torch.randn(S * B, EXPERTS, generator=generator(3))
    x, y = (rows.clone().requires_grad_(True) for _ in range(2))

    ours.engine.begin_step()
    routing = ours.route(x)
    ours.engine.backward((routing.weights * factors.gather(1, routing.experts)).sum(), last=True)
    ours.engine.finish()
    _, weights, experts = theirs(y)
    (weights * factors.gather(1, experts)).sum().backward()

    def spread(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return torch.zeros(S * B, EXPERTS).scatter(1, where, values.detach())

    assert routing.keep_mask is None
    assert routing.weights.dtype == torch.float32
    assert len(set(routing.experts.flatten().tolist())) > 6
    got = {"weights": spread(routing.weights, routing.experts), "dx": x.grad}
    ref = {"weights": spread(weights, experts), "dx": y.grad}
    got["dW"], ref["dW"] = ours.router.weight.main_grad, theirs.weight.grad
    assert_all_close(got, ref, bound=5e-6)
    if bias is not None:  # it decided, and changed no weight of those it let through
        free = Alone(dataclasses.replace(config, expert_bias=False)).route(rows)
        moved = spread(free.weights, free.experts) != got["weights"]
        assert moved.any(1).float().mean() > 0.2


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_all_is_fp32_whatever_comes_in(score_function: str):
    config = RouterConfig(topk=EXPERTS, score_function=score_function)  # all: no rounding chooses
    ours = Alone(config, dtype=torch.bfloat16)
    rows = torch.randn(S * B, H, generator=generator(4)).bfloat16()
    factors = torch.randn(S * B, EXPERTS, generator=generator(5))
    x = rows.clone().requires_grad_(True)
    ours.engine.begin_step()
    routing = ours.route(x)
    ours.engine.backward((routing.weights * factors.gather(1, routing.experts)).sum(), last=True)
    ours.engine.finish()
    y = rows.double().requires_grad_(True)
    w = ours.weight.detach().double().requires_grad_(True)
    logits = y @ w.t()
    scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
    wanted = scores / scores.sum(-1, keepdim=True)
    (wanted * factors).sum().backward()
    assert ours.weight.dtype == x.grad.dtype == torch.bfloat16
    assert ours.router.weight.main_grad.dtype == torch.float32
    assert_close_by_metric(
        "weights", routing.weights, wanted.gather(1, routing.experts), bound=1e-6
    )
    assert_close_by_metric("dW", ours.router.weight.main_grad, w.grad, bound=2e-6)
    assert_close_by_metric("dx", x.grad, y.grad, bound=2.0**-8)  # one rounding, at the end
    rounded = (rows @ ours.weight.t()).float()
    assert (rounded - logits).abs().max() > 1e-3 * logits.abs().max(), "bf16 would show"


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_what_it_counts(score_function: str):
    config = RouterConfig(
        topk=2,
        score_function=score_function,
        balance="aux_loss",
        aux_loss_coeff=0.3,
        z_loss_coeff=0.2,
    )
    ours = Alone(config, capacity_factor=0.9, drop_policy="position")
    rows = torch.randn(S * B, H, generator=generator(6))
    with torch.no_grad():
        ours.route(rows, aux_factor=torch.tensor(1.0))
    assert not ours.router.counted.any(), "only training counts"
    capacity = math.ceil(0.9 * S * B * 2 / EXPERTS)
    wanted = torch.zeros(EXPERTS + len(MEASURES), dtype=torch.float64)
    for part in (rows, rows.flip(1)):
        routing = ours.route(part, aux_factor=torch.tensor(5.0))  # no factor in what is counted
        logits = part.double() @ ours.weight.detach().double().t()
        scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
        shares = scores / scores.sum(-1, keepdim=True)
        counts = torch.tensor([int((routing.experts == e).sum()) for e in range(EXPERTS)]).double()
        dropped = (counts - capacity).clamp(min=0).sum()
        assert dropped > 0
        assert (~routing.keep_mask).sum() == dropped
        balance = EXPERTS / (2 * len(part) ** 2) * (counts * shares.sum(0)).sum()
        entropy = -(shares * shares.log()).sum()
        z = logits.exp().sum(-1).log().square().mean()
        one = torch.tensor(1.0)
        measures = torch.stack([counts.sum(), dropped, entropy, balance, z, one.double()])
        wanted += torch.cat([counts, measures])
    assert len(MEASURES) == 6
    got, ref = ours.router.counted, wanted
    named = [f"expert {e}" for e in range(EXPERTS)] + list(MEASURES)
    assert_all_close(
        dict(zip(named, got, strict=True)), dict(zip(named, ref, strict=True)), bound=1e-6
    )
    before = got.clone()
    ours.route(rows)  # without a factor no losses, but loads
    more = dict(zip(named, ours.router.counted - before, strict=True))
    assert more["places"] == 2 * S * B
    assert more["balance_loss"] == more["z_loss"] == 0
    assert more["microbatches"] == 1


@pytest.mark.parametrize("by_sequence", [False, True])
def test_losses_in_the_gradient_are_those_of_the_formula(by_sequence: bool):
    config = RouterConfig(
        topk=2,
        normalize=False,
        balance="seq_aux_loss" if by_sequence else "aux_loss",
        aux_loss_coeff=0.3,
        z_loss_coeff=0.2,
    )
    ours = Alone(config)
    rows = torch.randn(S * B, H, generator=generator(7))
    x = rows.clone().requires_grad_(True)
    ours.engine.begin_step()
    routing = ours.route(x, aux_factor=torch.tensor(7.0))
    ours.engine.backward((routing.weights * 0.0).sum(), last=True)
    ours.engine.finish()
    y = rows.double().requires_grad_(True)
    w = ours.weight.detach().double().requires_grad_(True)
    logits = y @ w.t()
    shares = logits.softmax(-1)
    loss = logits.logsumexp(-1).square().mean() * 0.2
    sets = [list(range(b, S * B, B)) for b in range(B)] if by_sequence else [list(range(S * B))]
    for rows_of in sets:
        counts = routing.experts[rows_of].flatten().bincount(minlength=EXPERTS)
        term = EXPERTS / (2 * len(rows_of) ** 2) * (counts * shares[rows_of].sum(0)).sum()
        loss = loss + 0.3 * term / len(sets)
    (loss * 7.0).backward()
    slot = ours.router.weight.main_grad
    assert_all_close({"dx": x.grad, "dW": slot}, {"dx": y.grad, "dW": w.grad}, bound=5e-6)


def counted_by_model(recompute: Recompute) -> list[torch.Tensor]:
    """Return what the routers of a model count in two microbatches."""
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


def test_layers_computed_again_count_once():
    wanted = counted_by_model(Recompute())
    assert len(wanted) == 2
    for counted in wanted:
        assert counted[: 4 + 1].tolist()[-1] == counted[:4].sum() == 2 * 2 * 2 * 9
    for recompute in (
        Recompute(granularity="selective"),
        Recompute(granularity="full", method="uniform", num_layers=1),
        Recompute(granularity="full", method="block", num_layers=1),
        Recompute(granularity="full", method="uniform", num_layers=2),
    ):
        for got, ref in zip(counted_by_model(recompute), wanted, strict=True):
            assert_close_by_metric(str(recompute), got, ref, bound=1e-6)


RATE, KEY = 0.25, jitter_key(9, "decoder.blocks.1.moe.router")


def test_jitter_is_a_function_of_sample_place_and_feature():
    samples, places = torch.arange(60) // 12, torch.arange(60) % 12
    width = 80
    noise = jittered(torch.ones(60, width), samples, places, rate=RATE, key=KEY)
    assert noise.min() >= 1 - RATE
    assert noise.max() < 1 + RATE
    assert noise.unique().numel() > 0.99 * noise.numel()
    # of a uniform number: the mean of 4800, and the spread, to four deviations
    spread = RATE / 3**0.5
    assert abs(noise.mean() - 1) < 4 * spread / noise.numel() ** 0.5
    assert abs(noise.std() / spread - 1) < 0.03
    centred = (noise - 1) / spread
    for shifted in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(12, 0)):
        assert abs((centred * shifted).mean()) < 4 / noise.numel() ** 0.5, "rows are alike"
    x = torch.randn(60, width, generator=generator(9))
    some = torch.randperm(60, generator=generator(10))[:23]
    got = jittered(x[some], samples[some], places[some], rate=RATE, key=KEY)
    assert torch.equal(got, (x * noise)[some]), "the same wherever a row lies"
    other = jittered(
        torch.ones(60, width), samples, places, rate=RATE, key=jitter_key(9, "another")
    )
    different = float((other != noise).float().mean())
    assert different > 0.99
    assert torch.equal(jittered(x, samples, places, rate=0.0, key=KEY), x)
    assert jittered(x.bfloat16(), samples, places, rate=RATE, key=KEY).dtype == torch.bfloat16


def test_jitter_is_of_the_routers_input_alone_and_of_training():
    config = RouterConfig(topk=2, jitter=RATE)
    ours = Alone(config)
    rows = torch.randn(S * B, H, generator=generator(11))
    plain = Alone(dataclasses.replace(config, jitter=0.0)).route(rows)
    outside = ours.route(rows)  # no sample ids
    assert torch.equal(outside.weights, plain.weights)
    ids = torch.tensor([40, 7, 23])
    x = rows.clone().requires_grad_(True)
    ours.engine.begin_step()
    inside = ours.route(x, SequenceLayout.of_rows(S, sample_ids=ids))
    assert (inside.weights - plain.weights).abs().max() > 1e-2
    numbers = torch.arange(S * B)
    noise = jittered(
        torch.ones(S * B, H), ids[numbers % B], numbers // B, rate=RATE, key=ours.router.jitter_key
    )
    w = ours.weight.detach().double().requires_grad_(True)
    y = rows.double().requires_grad_(True)
    scores = ((y * noise) @ w.t()).softmax(-1).gather(1, inside.experts)
    wanted = scores / scores.sum(-1, keepdim=True)
    factors = torch.randn(S * B, 2, generator=generator(12))
    (wanted * factors).sum().backward()
    ours.engine.backward((inside.weights * factors).sum(), last=True)
    ours.engine.finish()
    got = {"weights": inside.weights, "dx": x.grad, "dW": ours.router.weight.main_grad}
    assert_all_close(got, {"weights": wanted, "dx": y.grad, "dW": w.grad}, bound=5e-6)
