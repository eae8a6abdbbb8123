# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: shifted targets, and all gradients on one process."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.models.gpt import logical_weights, shift_targets, take_mean_mtp_losses
from megatron.core.moe import MoEConfig, RouterConfig, routers_of
from tests.support.closeness import assert_all_close, assert_close_by_metric, relative_error
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.models.chunk_steps import move
from tests.unit_tests.core.models.depth_cases import (
    CONFIG,
    DOCUMENT_BOUNDS,
    LENGTH,
    ROWS,
    TIED,
    rows_of,
)
from tests.unit_tests.core.models.plain_depths import PlainMTP

# --- shifted targets -----------------------------------------------------------------------------


def test_shifted_targets_match_hand_computed_values():
    text = torch.arange(10, 17).repeat(2, 1)  # 10 ... 16
    mask = torch.tensor([[1.0, 1, 1, 1, 0, 1], [0.5, 1, 1, 1, 1, 1]])
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    targets = shift_targets(text[:, :-1], text[:, 1:], mask, num_layers=2, document_ids=ids)
    assert targets.tokens[:, 0].tolist() == [[11, 12, 13, 14, 15, 0], [12, 13, 14, 15, 0, 0]]
    assert targets.labels[:, 0].tolist() == [[12, 13, 14, 15, 16, 0], [13, 14, 15, 16, 0, 0]]
    # Token 13 begins the second document; the prediction of 15 has weight 0.
    assert targets.weights[:, 0].tolist() == [[1, 1, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0]]
    assert targets.weights[:, 1].tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    without_documents = shift_targets(text[:, :-1], text[:, 1:], mask, num_layers=2)
    assert without_documents.weights[:, 0].tolist() == [[1, 1, 1, 0, 1, 0], [1, 1, 0, 1, 0, 0]]
    assert without_documents.scaled(torch.tensor(0.5)).weights[0, 0].tolist() == [
        0.5,
        0.5,
        0.5,
        0,
        0.5,
        0,
    ]
    # A target counts if the token it is read with is in the document; 12 … 16 has a padding token.
    mark = torch.tensor([[False] * 5 + [True], [False] * 6])
    ids = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    padded = shift_targets(
        text[:, :-1], text[:, 1:], mask, num_layers=2, document_ids=ids, padding=mark
    )
    assert padded.padding[:, 0].int().tolist() == [[0, 0, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1]]
    assert padded.padding[:, 1].int().tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1]]
    assert targets.padding is None
    # More MTP layers than tokens: no targets.
    short = shift_targets(text[:, :2], text[:, 1:3], mask[:, :2], num_layers=3)
    assert short.weights.sum((1, 2)).tolist() == [2.0, 0.0, 0.0]


# --- one process against a plain model -----------------------------------------------------------


def gradients_of(model: GPTModel) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    """Return all gradients by name and offsets."""
    gradients = {}
    for handle in model.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in model.store.boxes(handle):
            gradient = flat[box.start : box.start + box.numel].view(box.sizes)
            gradients[box.name, box.offsets] = gradient.clone()
    return gradients


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_losses_and_gradients_match_a_plain_model(config: GPTConfig, packed: bool):
    depths = config.mtp_num_layers
    model = move(GPTModel(config, ProcessGroupCollection.single(), seed=5))
    engine = DataParallel(model.store, model.groups)
    batch = rows_of(0, 0, depths=depths, packed=packed)
    factor = torch.tensor(0.125)
    weights, mtp_targets = batch.loss_mask * factor, batch.mtp_targets.scaled(factor)
    layout = batch.without_dropout
    engine.begin_step()
    with nan_memory():
        loss, nll = model.loss(
            batch.tokens, batch.labels, weights, mtp_targets=mtp_targets, layout=layout
        )
        engine.backward(loss, last=True)
    assert engine.launched_in_backward == len(
        engine.buckets
    )  # every gradient was accumulated as often as declared
    engine.finish()

    logical = {
        chunk.name: chunk.tensor.detach().double().requires_grad_()
        for handle in model.store.handles.values()
        for chunk in model.store.chunks(handle)
    }
    assert logical.keys() == logical_weights(config).keys()
    plain = PlainMTP(
        layers=2,
        heads=4,
        groups=2,
        head_dim=10,
        tied=config.tied,
        norm=config.norm.kind,
        gated=config.mlp.gated,
    )
    text = torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1)
    bounds = DOCUMENT_BOUNDS if packed else ((0, LENGTH),) * ROWS
    main, *mtp_losses = plain.losses(
        logical, text, weights, num_mtp_layers=depths, document_bounds=bounds
    )
    training = main + config.mtp.loss_factor / depths * sum(mtp_losses)
    training.backward()
    assert_close_by_metric("loss", loss, main)  # the returned loss excludes the MTP losses
    assert (nll * weights).sum().item() == pytest.approx(loss.item(), rel=1e-6)
    actual = {name: grad for (name, _), grad in gradients_of(model).items()}
    assert_all_close(actual, {name: x.grad for name, x in logical.items()})
    counted = mtp_targets.weights.sum((1, 2))
    means = [
        mtp_loss.item() / count.item() for mtp_loss, count in zip(mtp_losses, counted, strict=True)
    ]
    assert take_mean_mtp_losses(model) == pytest.approx(means, rel=1e-5)
    assert all(math.isnan(x) for x in take_mean_mtp_losses(model))


def test_mtp_expert_auxiliary_losses_reach_the_gradient():
    router = RouterConfig(topk=2, balance="aux_loss", aux_loss_coeff=0.5)
    moe = MoEConfig(num_experts=5, ffn_hidden_size=12, router=router)
    config = dataclasses.replace(CONFIG, moe=moe, ffn_pattern="-E")
    assert "mtp.1.decoder.blocks.1.moe.router.weight" in logical_weights(config)
    batch, runs = rows_of(0, 0, depths=2, packed=False), []
    fields = (batch.tokens, batch.labels, batch.loss_mask)
    for factor in (None, torch.tensor(1.0), torch.tensor(3.0)):
        model = move(GPTModel(config, ProcessGroupCollection.single(), seed=5))
        engine = DataParallel(model.store, model.groups)
        engine.begin_step()
        loss, _ = model.loss(*fields, mtp_targets=batch.mtp_targets, aux_factor=factor)
        engine.backward(loss, last=True)
        engine.finish()
        runs.append(
            {name: grad for (name, _), grad in gradients_of(model).items() if "router" in name}
        )
    without, once, thrice = runs
    assert len(without) == 3
    for name, grad in without.items():
        increase = once[name] - grad
        assert increase.abs().max() > 1e-2 * grad.abs().max(), name
        assert relative_error(thrice[name] - grad, 3 * increase) < 1e-3, name


def test_mtp_experts_skip_tokens_without_targets():
    moe = MoEConfig(num_experts=5, ffn_hidden_size=12, router=RouterConfig(topk=2))
    config = dataclasses.replace(CONFIG, moe=moe, ffn_pattern="EE")
    batch = rows_of(0, 0, depths=2, packed=False)
    tokens, length = batch.tokens, batch.tokens.shape[1]
    padding = torch.zeros(tokens.shape, dtype=torch.bool)
    padding[0, length - 3 :] = True  # the first row ends with three tokens of padding
    mtp_targets = shift_targets(
        tokens, batch.labels, batch.loss_mask, num_layers=2, padding=padding
    )
    layout = SequenceLayout.of_rows(length).with_padding(padding.t())
    model = GPTModel(config, ProcessGroupCollection.single(), seed=5)
    model.loss(tokens, batch.labels, batch.loss_mask, layout=layout, mtp_targets=mtp_targets)
    counted = {router.name: router.counted[:5].sum().item() for router in routers_of(model)}
    num_real_tokens = len(tokens) * length - 3
    assert counted == {
        "decoder.blocks.1.moe.router": 2 * num_real_tokens,
        "decoder.blocks.3.moe.router": 2 * num_real_tokens,
        "mtp.0.decoder.blocks.1.moe.router": 2 * (num_real_tokens - len(tokens)),
        "mtp.1.decoder.blocks.1.moe.router": 2 * (num_real_tokens - 2 * len(tokens)),
    }


def test_forward_without_targets_is_the_main_model():
    batch = rows_of(0, 0, depths=2, packed=False)
    rows = (batch.tokens, batch.labels, batch.loss_mask)
    single = ProcessGroupCollection.single()
    model = GPTModel(CONFIG, single, seed=5)
    plain = GPTModel(dataclasses.replace(CONFIG, mtp=None), single, seed=5)
    with torch.no_grad():
        assert torch.equal(model.loss(*rows)[1], plain.loss(*rows)[1])
        with pytest.raises(ValueError, match="without multi-token prediction: leave it out"):
            plain.loss(*rows, mtp_targets=batch.mtp_targets)
        with pytest.raises(ValueError, match=r"2 MTP.*12.*\(1, 2, 12\)"):
            model.loss(*rows, mtp_targets=rows_of(0, 0, depths=1, packed=False).mtp_targets)
    num_extra = model.num_parameters - plain.num_parameters
    mtp_shapes = {n: s for n, s in logical_weights(CONFIG).items() if n.startswith("mtp.")}
    assert num_extra == sum(math.prod(shape) for shape in mtp_shapes.values())
    assert mtp_shapes["mtp.1.projection.weight"] == (24, 48)
    assert mtp_shapes["mtp.1.decoder.blocks.1.mlp.down.weight"] == (24, 20)
