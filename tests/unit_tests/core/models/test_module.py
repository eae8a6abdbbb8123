# SPDX-License-Identifier: Apache-2.0
"""A model as the `nn.Module` that it is: what torch offers works, or says what to call instead."""

from __future__ import annotations

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.tensor_parallel import ColumnParallelLinear, TensorParallelRegion
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.core.weight_gather import StoreModule, WeightStore
from tests.support.closeness import (
    assert_all_close,
    assert_close_by_metric,
    assert_piece_close,
)
from tests.support.inputs import generator, one_thread
from tests.support.ranks import run_ranks

ROUTER = RouterConfig(topk=2, score_function="sigmoid", expert_bias=True)
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=12,
    vocab_size=26,
    attention=AttentionConfig(
        num_attention_heads=4, num_query_groups=2, kv_channels=6, qkv_bias=True
    ),
    mlp=MLPConfig(ffn_hidden_size=20),
    moe=MoEConfig(num_experts=4, ffn_hidden_size=8, router=ROUTER),
    ffn_pattern="-E",
    tied=True,
)
BATCH, LENGTH = 2, 7


def model_of(
    groups: ProcessGroupCollection | None = None,
    *,
    seed: int = 3,
    data: DataParallelConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> GPTModel:
    """Return a model with a tied weight, biases, experts and a state that is no weight."""
    groups = groups or ProcessGroupCollection.single()
    storage = None if data is None else data.storage()
    return GPTModel(CONFIG, groups, seed=seed, dtype=dtype, storage=storage)


def rows(*key: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, labels and token weights [b, s]."""
    text = torch.randint(0, 26, (BATCH, LENGTH + 1), generator=generator(7, *key))
    return text[:, :-1], text[:, 1:], torch.full((BATCH, LENGTH), 1.0 / (BATCH * LENGTH))


class Wrapped(nn.Module):
    """A user's module that holds a model beside a layer of its own."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        self.gpt = model_of(seed=seed)
        self.score = nn.Linear(12, 1)


def test_parameters_are_the_weights_themselves_by_their_names():
    model = model_of()
    named = dict(model.named_parameters())
    assert list(named) == list(model.store.handles)
    assert [name for name, _ in model.named_buffers()] == list(model.store.states) != []
    assert model.state_dict().keys() == named.keys() | model.store.states.keys()
    ends = [(w := b.data).data_ptr() + w.nbytes for b in model.store.buckets]
    starts = [bucket.data.data_ptr() for bucket in model.store.buckets]
    for name, tensor in model.state_dict().items():
        if name in named:
            assert tensor.data_ptr() == named[name].data_ptr()
            assert any(a <= tensor.data_ptr() < b for a, b in zip(starts, ends, strict=True))
    assert sum(p.numel() for p in model.parameters()) == model.num_parameters
    tokens, *_ = rows(0)
    before = model.full_logits(tokens).detach()
    with torch.no_grad():
        model.get_parameter("embedding.weight").mul_(2.0)
    assert not torch.equal(model.full_logits(tokens), before)


def train_with_mcore(model: GPTModel, lr: float) -> list[float]:
    """Train by our own engine and optimizer, two microbatches a step."""
    engine = DataParallel(model.store, model.groups)
    config = OptimizerConfig(kind="sgd", clip_grad=0.0)
    optimizer, losses = Optimizer(engine.owned(), model.groups, config=config), []
    for step in range(3):
        engine.begin_step(2)
        for index in range(2):
            loss, _ = model.loss(*rows(step, index))
            engine.backward(loss, last=index == 1)
            losses.append(loss.item())
        engine.finish()
        optimizer.step(lr)
    return losses


def train_with_torch(model: GPTModel, lr: float, *, set_to_none: bool) -> list[float]:
    """Train by torch, in the same steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        for index in range(2):
            loss, _ = model.loss(*rows(step, index))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("set_to_none", [True, False])
def test_torch_optimizer_trains_like_the_local_one(set_to_none):
    with one_thread():
        mine, plain = model_of(), model_of()
        start = {name: p.detach().clone() for name, p in plain.named_parameters()}
        losses = train_with_mcore(mine, 0.5)
        assert train_with_torch(plain, 0.5, set_to_none=set_to_none) == pytest.approx(
            losses, rel=1e-6
        )
    found, wanted = plain.state_dict(), dict(mine.named_parameters())
    assert all(not torch.equal(found[name], start[name]) for name in start), "all of it trains"
    assert_all_close({name: found[name] for name in wanted}, wanted)


def test_gradients_of_bf16_weights_are_of_their_dtype():
    model = model_of(dtype=torch.bfloat16)
    model.requires_grad_(False)
    model.get_parameter("decoder.final_norm.weight").requires_grad_(True)
    model.loss(*rows(0))[0].backward()
    with_grad = {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None}
    assert with_grad == {"decoder.final_norm.weight": torch.bfloat16}


def test_torch_optimizers_are_refused_with_an_engine():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = DataParallel(model.store, model.groups)
    engine.begin_step()
    engine.backward(model.loss(*rows(0))[0], last=True)
    engine.finish()
    for use in (
        optimizer.step,
        optimizer.zero_grad,
        model.zero_grad,
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    ):
        with pytest.raises(ValueError, match=r"megatron\.core\.optimizer\.Optimizer"):
            use()


@pytest.mark.parametrize(
    ("convert", "wanted"),
    [
        (lambda m: m.to(torch.bfloat16), "dtype=torch.bfloat16"),
        (lambda m: m.half(), "dtype=torch.float16"),
        (lambda m: m.bfloat16(), "dtype=torch.bfloat16"),
        (lambda m: m.double(), "dtype=torch.float64"),
        (lambda m: m.to("meta"), "device='meta'"),
        (lambda m: m.to_empty(device="cpu"), "device="),
    ],
)
def test_converting_or_moving_weights_names_supported_call(convert, wanted):
    for module in (model_of(), Wrapped()):
        before = {name: p.clone() for name, p in module.named_parameters()}
        with pytest.raises(ValueError, match=wanted) as caught:
            convert(module)
        assert "load_state_dict" in str(caught.value)
        for name, parameter in module.named_parameters():
            if not name.startswith("score"):  # torch has converted what came before
                assert torch.equal(parameter, before[name])


def test_what_changes_no_weight_goes_on_working():
    module = Wrapped()
    for convert in (lambda m: m.float(), lambda m: m.to("cpu"), lambda m: m.to(torch.float32)):
        assert convert(module) is module
    module.share_memory()
    assert module.score.weight.is_shared()
    assert module.gpt.store.handles["embedding.weight"].get().is_shared()
    seen: list[nn.Module] = []
    assert module.apply(seen.append) is module
    assert module.gpt.decoder in seen
    assert not module.eval().gpt.training
    assert module.train().gpt.decoder.training
    names = [name for name, _ in module.named_parameters()]
    assert [n for n in names if n.startswith("gpt.")] == [
        f"gpt.{n}" for n in module.gpt.store.handles
    ]
    module.gpt.requires_grad_(False)
    module.gpt.adapter = nn.Linear(2, 2)
    assert {n for n, p in module.named_parameters() if p.requires_grad} == {
        *("score.weight", "score.bias", "gpt.adapter.weight", "gpt.adapter.bias")
    }
    assert module.gpt.loss(*rows(0))[0].grad_fn is None


def test_a_state_dict_goes_through_a_file_into_another_model():
    source, target = Wrapped(seed=3), Wrapped(seed=4)
    source.gpt.store.states[next(iter(source.gpt.store.states))].fill_(0.25)
    data = safetensors.torch.save({n: x.clone() for n, x in source.state_dict().items()})
    found = target.load_state_dict(safetensors.torch.load(data))
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    wanted = source.state_dict()
    assert all(torch.equal(x, wanted[name]) for name, x in target.state_dict().items())
    tokens, *_ = rows(0)
    assert torch.equal(target.gpt.full_logits(tokens), source.gpt.full_logits(tokens))
    narrow = model_of(dtype=torch.bfloat16)
    narrow.load_state_dict(source.gpt.state_dict())
    for name, parameter in narrow.named_parameters():
        assert torch.equal(parameter, wanted[f"gpt.{name}"].to(parameter.dtype)), name


def test_unloadable_state_is_reported():
    model, values = model_of(), model_of().state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding\.weight"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*decoder\.blocks\.9\.norm\.weight"):
        model.load_state_dict({**values, "decoder.blocks.9.norm.weight": torch.ones(12)})
    with pytest.raises(RuntimeError, match=r"size mismatch for embedding\.weight"):
        model.load_state_dict({**values, "embedding.weight": torch.ones(2, 12)})
    with pytest.raises(ValueError, match="assign"):
        model.load_state_dict(values, assign=True)
    DataParallel(model.store, model.groups)
    with pytest.raises(ValueError, match=r"after_load"):
        model.load_state_dict(values)


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy])
def test_a_copy_is_refused_with_the_way_to_one(make):
    with pytest.raises(TypeError, match=r"GPTModel.*load_state_dict"):
        make(model_of())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": torch.full((BATCH, LENGTH), 26)}, "token id 26 .* 26 ids"),
        ({"tokens": torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 3}, "token id 39 "),
        ({"tokens": torch.full((BATCH, LENGTH), -1)}, "token id -1 "),
        ({"tokens": torch.zeros(BATCH, LENGTH)}, r"tokens\.long\(\)"),
        ({"tokens": torch.zeros(LENGTH).long()}, r"tokens \[7\] .*unsqueeze"),
        ({"labels": torch.full((BATCH, LENGTH), -100)}, "label id -100 .* its weight to 0"),
        ({"labels": torch.zeros(LENGTH, BATCH).long()}, r"labels \[7, 2\] for \[2, 7\] tokens"),
        ({"labels": torch.zeros(BATCH * LENGTH).long()}, r"labels \[14\] for \[2, 7\] tokens"),
        ({"token_weights": torch.ones(BATCH, 3)}, r"token_weights \[2, 3\] for \[2, 7\] tokens"),
    ],
)
def test_wrong_tokens_and_labels_are_named(change, named):
    given = dict(zip(("tokens", "labels", "token_weights"), rows(0), strict=True))
    with pytest.raises(ValueError, match=named):
        model_of().loss(**{**given, **change})


class Own(StoreModule):
    """A module over layers of core that is no model."""

    def __init__(self) -> None:
        super().__init__()
        groups = ProcessGroupCollection.single()
        self.store = WeightStore(groups)
        self.layer = ColumnParallelLinear(
            "up",
            [("up", 3, None)],
            input_size=4,
            store=self.store,
            region=TensorParallelRegion(groups["tp"], sequence_parallel=False),
            init=InitSpec.normal(0.5),
        )
        self.materialize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_module_of_ones_own_is_one_as_well():
    module = Own()
    (weight,) = module.parameters()
    x = torch.randn(5, 1, 4, generator=generator(1))
    module(x).square().sum().backward()
    wanted = 2 * (x[:, 0] @ weight.detach().t()).t() @ x[:, 0]
    assert_all_close({"up.weight": weight.grad}, {"up.weight": wanted})
    with pytest.raises(ValueError, match=r"Own\(\.\.\., dtype=torch\.float16\)"):
        module.half()


def error_of(use) -> str:
    """Return what is raised."""
    try:
        use()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def logits_and_gradients(groups: ProcessGroupCollection):
    """Return the logits of all tokens of the vocabulary [s, b, V], and boxes of the gradients of
    the mean of their squares: (logical name, logical shape, box, values)."""
    model = model_of(groups)
    engine = DataParallel(model.store, groups)
    engine.begin_step()
    logits = model.full_logits(rows(0)[0])
    engine.backward(logits.square().mean(), last=True)
    engine.finish()
    gradients = [
        (held.name, held.shape, held.box, held.of(one.gradients).clone())
        for one in engine.owned()
        for held in one.boxes
    ]
    return logits.detach(), gradients


def logits_on_two_ranks(rank: int, world: int):
    groups = ProcessGroupCollection.create(RankGrid(world_size=2, tp=2), rank=rank)
    return logits_and_gradients(groups)


def test_full_logits_have_gradients_on_tp_ranks():
    logits, gradients = logits_and_gradients(ProcessGroupCollection.single())
    whole = {name: torch.zeros(shape) for name, shape, _, _ in gradients}
    for name, _, box, gradient in gradients:
        whole[name][box.slices] = gradient
    for found, shards in run_ranks(logits_on_two_ranks, 2):
        assert_close_by_metric("logits", found, logits)
        assert {name for name, *_ in shards} == set(whole)
        for name, _, box, gradient in shards:
            largest = whole[name].abs().max().item()
            assert_piece_close(name, gradient, whole[name], box.offsets, scale=largest)


def on_two_ranks(rank: int, world: int) -> dict:
    """Use models in parts; return shapes and errors."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=2, tp=2), rank=rank)
    halves = model_of(groups)
    found = {
        "shapes": {name: tuple(p.shape) for name, p in halves.named_parameters()},
        "same": error_of(lambda: model_of(groups, seed=9).load_state_dict(halves.state_dict())),
        "id": error_of(lambda: halves.full_logits(torch.full((1, 4), 26))),
        "backward": error_of(lambda: halves.loss(*rows(0))[0].backward()),
    }
    other = halves.state_dict()
    other._metadata[""]["shard"] = other._metadata[""]["shard"].replace(f"tp {rank}", "tp 7")
    found["other"] = error_of(lambda: halves.load_state_dict(other))
    whole = model_of().state_dict()
    found["whole"] = error_of(lambda: halves.load_state_dict(dict(whole)))
    groups = ProcessGroupCollection.create(RankGrid(world_size=2), rank=rank)
    for strategy in ("optim", "optim_grads_params"):
        config = DataParallelConfig(strategy=strategy, overlap_param_gather=True)
        model = model_of(groups, data=config)
        engine = DataParallel(model.store, groups, config=config)
        optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig(kind="sgd"))
        engine.begin_step()
        engine.backward(model.loss(*rows(0))[0], last=True)
        engine.finish()
        optimizer.step(0.1)
        engine.start_param_sync()
        early = error_of(model.state_dict)
        engine.complete_weights()
        values = {name: x.clone() for name, x in model.state_dict().items()}
        found[strategy] = early, values, {x.dim() for x in model.parameters()}
    return found


def test_on_ranks_a_state_dict_is_of_one_rank_and_says_so():
    one, two = run_ranks(on_two_ranks, 2)
    for found in (one, two):
        assert found["shapes"]["embedding.weight"] == (13, 12)
        assert found["same"] == "nothing"
        assert "token id 26" in found["id"]
        assert "DataParallel" in found["backward"]
        for wrong in ("other", "whole"):
            assert "load_checkpoint" in found[wrong], wrong
            assert "tp" in found[wrong]
        assert found["optim_grads_params"][2] == {1}, "flat shards"
        assert found["optim_grads_params"][0] == "nothing"
        assert "complete_weights" in found["optim"][0]
    for name, values in one["optim"][1].items():
        assert torch.equal(values, two["optim"][1][name]), "whole, and the same on both"
