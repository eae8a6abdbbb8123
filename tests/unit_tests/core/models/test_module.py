# SPDX-License-Identifier: Apache-2.0
"""A model as an `nn.Module`: torch's features work, or errors name the supported call."""

from __future__ import annotations

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

from megatron.core import InitSpec, ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.optimizer import Optimizer, OptimizerConfig
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
    dp_config: DataParallelConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> GPTModel:
    """Return a model with a tied weight, biases, experts and a buffer."""
    groups = groups or ProcessGroupCollection.single()
    storage = None if dp_config is None else dp_config.storage()
    return GPTModel(CONFIG, groups, seed=seed, dtype=dtype, storage=storage)


def rows(*key: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, labels and token weights [b, s]."""
    text = torch.randint(0, 26, (BATCH, LENGTH + 1), generator=generator(7, *key))
    return text[:, :-1], text[:, 1:], torch.full((BATCH, LENGTH), 1.0 / (BATCH * LENGTH))


class WrapperModule(nn.Module):
    """A user's module that holds a model and a layer."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        self.gpt = model_of(seed=seed)
        self.score = nn.Linear(12, 1)


def test_parameters_are_views_of_the_stored_weights():
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
    """Train with the project's engine and optimizer, two microbatches per step."""
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
    """Train with torch's optimizer, in the same steps."""
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
        mcore, plain = model_of(), model_of()
        start = {name: p.detach().clone() for name, p in plain.named_parameters()}
        losses = train_with_mcore(mcore, 0.5)
        assert train_with_torch(plain, 0.5, set_to_none=set_to_none) == pytest.approx(
            losses, rel=1e-6
        )
    actual, expected = plain.state_dict(), dict(mcore.named_parameters())
    assert all(not torch.equal(actual[name], start[name]) for name in start), "every weight trains"
    assert_all_close({name: actual[name] for name in expected}, expected)


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
    ("convert", "message"),
    [
        (lambda m: m.to(torch.bfloat16), "dtype=torch.bfloat16"),
        (lambda m: m.half(), "dtype=torch.float16"),
        (lambda m: m.bfloat16(), "dtype=torch.bfloat16"),
        (lambda m: m.double(), "dtype=torch.float64"),
        (lambda m: m.to("meta"), "device='meta'"),
        (lambda m: m.to_empty(device="cpu"), "device="),
    ],
)
def test_converting_or_moving_weights_names_supported_call(convert, message):
    for module in (model_of(), WrapperModule()):
        before = {name: p.clone() for name, p in module.named_parameters()}
        with pytest.raises(ValueError, match=message) as caught:
            convert(module)
        assert "load_state_dict" in str(caught.value)
        for name, parameter in module.named_parameters():
            if not name.startswith("score"):  # torch has already converted the layers before
                assert torch.equal(parameter, before[name])


def test_calls_that_change_no_weight_are_supported():
    module = WrapperModule()
    for convert in (lambda m: m.float(), lambda m: m.to("cpu"), lambda m: m.to(torch.float32)):
        assert convert(module) is module
    module.share_memory()
    assert module.score.weight.is_shared()
    assert module.gpt.store.handles["embedding.weight"].get().is_shared()
    visited: list[nn.Module] = []
    assert module.apply(visited.append) is module
    assert module.gpt.decoder in visited
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


def test_state_dict_round_trips_through_a_file():
    source, target = WrapperModule(seed=3), WrapperModule(seed=4)
    source.gpt.store.states[next(iter(source.gpt.store.states))].fill_(0.25)
    serialized = safetensors.torch.save({n: x.clone() for n, x in source.state_dict().items()})
    incompatible = target.load_state_dict(safetensors.torch.load(serialized))
    assert (incompatible.missing_keys, incompatible.unexpected_keys) == ([], [])
    expected = source.state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in target.state_dict().items())
    tokens, *_ = rows(0)
    assert torch.equal(target.gpt.full_logits(tokens), source.gpt.full_logits(tokens))
    bf16_model = model_of(dtype=torch.bfloat16)
    bf16_model.load_state_dict(source.gpt.state_dict())
    for name, parameter in bf16_model.named_parameters():
        assert torch.equal(parameter, expected[f"gpt.{name}"].to(parameter.dtype)), name


def test_unloadable_state_is_reported():
    model, values = model_of(), model_of().state_dict()
    with pytest.raises(RuntimeError, match=r"embedding\.weight"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"decoder\.blocks\.9\.norm\.weight"):
        model.load_state_dict({**values, "decoder.blocks.9.norm.weight": torch.ones(12)})
    with pytest.raises(RuntimeError, match=r"embedding\.weight"):
        model.load_state_dict({**values, "embedding.weight": torch.ones(2, 12)})
    with pytest.raises(ValueError, match="assign"):
        model.load_state_dict(values, assign=True)
    DataParallel(model.store, model.groups)
    with pytest.raises(ValueError, match=r"after_load"):
        model.load_state_dict(values)


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy])
def test_copy_is_refused_with_an_alternative(make):
    with pytest.raises(TypeError, match=r"GPTModel.*load_state_dict"):
        make(model_of())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.full((BATCH, LENGTH), 26)}, "token id 26 .* 26 ids"),
        ({"tokens": torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 3}, "token id 39 "),
        ({"tokens": torch.full((BATCH, LENGTH), -1)}, "token id -1 "),
        ({"tokens": torch.zeros(BATCH, LENGTH)}, r"tokens\.long\(\)"),
        ({"tokens": torch.zeros(LENGTH).long()}, r"tokens \[7\] .*unsqueeze"),
        ({"labels": torch.full((BATCH, LENGTH), -100)}, "label id -100 .* its weight to 0"),
        ({"labels": torch.zeros(LENGTH, BATCH).long()}, r"\[7, 2\].*\[2, 7\]"),
        ({"labels": torch.zeros(BATCH * LENGTH).long()}, r"\[14\].*\[2, 7\]"),
        ({"token_weights": torch.ones(BATCH, 3)}, r"token_weights \[2, 3\].*\[2, 7\]"),
    ],
)
def test_invalid_tokens_and_labels_are_refused(change, message):
    inputs = dict(zip(("tokens", "labels", "token_weights"), rows(0), strict=True))
    with pytest.raises(ValueError, match=message):
        model_of().loss(**{**inputs, **change})


class CustomModule(StoreModule):
    """A custom module of core layers that is not a model."""

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


def test_custom_module_trains_and_refuses_conversion():
    module = CustomModule()
    (weight,) = module.parameters()
    x = torch.randn(5, 1, 4, generator=generator(1))
    module(x).square().sum().backward()
    expected = 2 * (x[:, 0] @ weight.detach().t()).t() @ x[:, 0]
    assert_all_close({"up.weight": weight.grad}, {"up.weight": expected})
    with pytest.raises(ValueError, match=r"CustomModule\(\.\.\., dtype=torch\.float16\)"):
        module.half()


def error_of(use) -> str:
    """Return the message of the error that a call raises."""
    try:
        use()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def logits_and_gradients(groups: ProcessGroupCollection):
    """Return all logits [s, b, V], and gradient boxes of the mean of their squares.

    A gradient box is (logical name, logical shape, box, values).
    """
    model = model_of(groups)
    engine = DataParallel(model.store, groups)
    engine.begin_step()
    logits = model.full_logits(rows(0)[0])
    engine.backward(logits.square().mean(), last=True)
    engine.finish()
    gradients = [
        (
            weight_box.name,
            weight_box.shape,
            weight_box.box,
            weight_box.of(shard_group.gradients).clone(),
        )
        for shard_group in engine.owned()
        for weight_box in shard_group.boxes
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
    for rank_logits, shards in run_ranks(logits_on_two_ranks, 2):
        assert_close_by_metric("logits", rank_logits, logits)
        assert {name for name, *_ in shards} == set(whole)
        for name, _, box, gradient in shards:
            largest = whole[name].abs().max().item()
            assert_piece_close(name, gradient, whole[name], box.offsets, scale=largest)


def on_two_ranks(rank: int, world: int) -> dict:
    """Use sharded models; return shapes and errors."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=2, tp=2), rank=rank)
    halves = model_of(groups)
    outputs = {
        "shapes": {name: tuple(p.shape) for name, p in halves.named_parameters()},
        "same": error_of(lambda: model_of(groups, seed=9).load_state_dict(halves.state_dict())),
        "id": error_of(lambda: halves.full_logits(torch.full((1, 4), 26))),
        "backward": error_of(lambda: halves.loss(*rows(0))[0].backward()),
    }
    state = halves.state_dict()
    state._metadata[""]["shard"] = state._metadata[""]["shard"].replace(f"tp {rank}", "tp 7")
    outputs["other"] = error_of(lambda: halves.load_state_dict(state))
    whole = model_of().state_dict()
    outputs["whole"] = error_of(lambda: halves.load_state_dict(dict(whole)))
    groups = ProcessGroupCollection.create(RankGrid(world_size=2), rank=rank)
    for strategy in ("optim", "optim_grads_params"):
        config = DataParallelConfig(strategy=strategy, overlap_param_gather=True)
        model = model_of(groups, dp_config=config)
        engine = DataParallel(model.store, groups, config=config)
        optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig(kind="sgd"))
        engine.begin_step()
        engine.backward(model.loss(*rows(0))[0], last=True)
        engine.finish()
        optimizer.step(0.1)
        engine.start_param_sync()
        early = error_of(model.state_dict)
        engine.complete_weights()
        weights = {name: x.clone() for name, x in model.state_dict().items()}
        outputs[strategy] = early, weights, {x.dim() for x in model.parameters()}
    return outputs


def test_sharded_state_dict_loads_only_on_its_rank():
    rank_0, rank_1 = run_ranks(on_two_ranks, 2)
    for outputs in (rank_0, rank_1):
        assert outputs["shapes"]["embedding.weight"] == (13, 12)
        assert outputs["same"] == "nothing"
        assert "token id 26" in outputs["id"]
        assert "DataParallel" in outputs["backward"]
        for key in ("other", "whole"):
            assert "load_checkpoint" in outputs[key], key
            assert "tp" in outputs[key]
        assert outputs["optim_grads_params"][2] == {1}, "flat shards"
        assert outputs["optim_grads_params"][0] == "nothing"
        assert "complete_weights" in outputs["optim"][0]
    for name, values in rank_0["optim"][1].items():
        assert torch.equal(values, rank_1["optim"][1][name]), "whole, and equal on both ranks"
