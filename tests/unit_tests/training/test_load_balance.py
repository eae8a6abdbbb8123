# SPDX-License-Identifier: Apache-2.0
"""Expert loads in log lines, metrics and plots, and the factor of router losses in a step."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.context_parallel import SequenceLayout
from megatron.core.moe import MoEConfig, RouterConfig, RouterLoad
from megatron.training.monitoring.log_line import layer_name, load_balance, relative
from megatron.training.monitoring.metrics import EXPERT_LOAD, Metrics, open_metrics, read_metrics
from megatron.training.plot import color, comparison, draw, load_svg, page, read_run
from megatron.training.step import Microbatch, auxiliary_factors
from tests.support.ranks import run_ranks

LOADS = (
    RouterLoad("decoder.blocks.1.moe.router", (3, 5, 4), 0.25, 1.0, 1.5, 2.0),
    RouterLoad("decoder.blocks.7.moe.router", (9, 1, 2), 0.0, 0.5, 2.5, 4.0),
    RouterLoad("mtp.0.decoder.blocks.1.moe.router", (4, 4, 4), 0.5, 0.75, 1.0, 6.0),
)
FULL = MoEConfig(
    num_experts=3,
    ffn_hidden_size=8,
    capacity_factor=1.0,
    router=RouterConfig(balance="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.2),
)


def test_load_balance_line_metrics_and_tables():
    log_part = load_balance(LOADS, FULL)
    assert log_part.words == (
        "load balance: worst 2.25 (layer 3, expert 0) | dropped 25.00% | router entropy 0.750 | "
        "aux loss 1.6667 | z loss 4.0000"
    )
    assert log_part.numbers == {
        "expert_load_max": 2.25,
        "router_entropy": 0.75,
        "tokens_dropped": 0.25,
        "aux_loss": pytest.approx(5 / 3),
        "z_loss": 4.0,
    }
    assert log_part.tables == {
        EXPERT_LOAD: {
            "layer 0": [0.75, 1.25, 1.0],
            "layer 3": [2.25, 0.25, 0.5],
            "mtp 1": [1.0, 1.0, 1.0],
        }
    }


def test_unused_router_features_are_left_out_of_the_line():
    log_part = load_balance(LOADS, MoEConfig(num_experts=3, ffn_hidden_size=8))
    assert log_part.words == "load balance: worst 2.25 (layer 3, expert 0) | router entropy 0.750"
    assert set(log_part.numbers) == {"expert_load_max", "router_entropy"}


def test_empty_loads_and_unknown_layer_names_are_accepted():
    assert relative((0, 0)) == [0.0, 0.0]
    assert layer_name("another.router") == "another.router"


class LastValues:
    """A metrics writer that stores the latest values."""

    def __init__(self):
        self.values = {}

    def write(self, kind, iteration, values):
        """Store the values."""
        self.values = dict(values)

    def close(self):
        """Close nothing."""


def test_tables_go_only_to_the_metrics_file(tmp_path):
    writer = LastValues()
    Metrics({"noting": lambda: writer}, pytest.fail).write("train", 1, {"a": 1, EXPERT_LOAD: {}})
    assert writer.values == {"a": 1.0}
    run = write_expert_metrics(tmp_path / "metrics.jsonl")
    (event, _) = read_metrics(run)
    assert event[EXPERT_LOAD]["layer 3"] == [2.25, 0.25, 0.5]
    assert event["expert_load_max"] == 2.25


def write_expert_metrics(path):
    """Write the metrics of a run with experts and return their path."""
    metrics = open_metrics(
        metrics_file=str(path), tensorboard_dir=None, resume_iteration=0, warn=pytest.fail
    )
    for iteration, loads in ((4, LOADS), (8, LOADS[::-1])):
        log_part = load_balance(loads, FULL)
        mtp_losses = {"mtp_1_loss": 3.5, "mtp_2_loss": 4.5}
        metrics.write(
            "train",
            iteration,
            {"lm_loss": 3.0, **mtp_losses, **log_part.numbers, **log_part.tables},
        )
    metrics.close()
    return path


def test_page_has_a_cell_for_each_expert_of_each_layer(tmp_path):
    run = read_run(str(write_expert_metrics(tmp_path / "metrics.jsonl")), "a <run>")
    assert run.loads_at == 8
    assert list(run.loads) == ["mtp 1", "layer 3", "layer 0"], (
        "the page shows the loads of the last iteration"
    )
    text = page([run], title="t", smoothing=0.0)
    cells = re.findall(r"<title>(.*?), expert (\d+): (.*?)</title></rect>", text)
    assert len(cells) == 9
    assert ("layer 3", "0", "2.25") in cells
    assert "load of experts, a &lt;run&gt; <small>of their layer's mean, iteration 8" in text
    rows = {row[0]: row[1] for row in comparison([run])}
    assert rows["load of the busiest expert (of the mean)"] == "2.25"
    assert rows["loss of large router logits (without its coefficient)"] == "4"
    assert rows["loss one token further ahead (nats per token)"] == "3.5"
    assert rows["loss two tokens further ahead (nats per token)"] == "4.5"
    assert rows["dropped by full experts (%)"] == "25"
    plain = read_run(str(write_expert_metrics(tmp_path / "plain.jsonl")), "b")
    plain.loads.clear()
    assert "expert-load" not in page([plain], title="t", smoothing=0.0)


def test_heat_map_cells_have_colors_and_escaped_names():
    assert (color(1.0), color(5.0)) == ("#ffffff", "#c2455f")
    assert color(0.0) == "#3b76c9"
    assert "&lt;layer&gt;, expert 1: 2.00" in load_svg({"<layer>": [0.0, 2.0]})


def test_picture_contains_the_heat_map(tmp_path):
    from matplotlib.image import imread

    run = read_run(str(write_expert_metrics(tmp_path / "metrics.jsonl")), "a")
    image = imread(draw([run], tmp_path / "all.png", title="t"))
    # The curves are blue; a strong red is an expert with much more than the mean.
    reddish = int(((image[..., 0] - image[..., 2]) > 0.5).sum())
    assert reddish > 300


# --- the factor of routers' losses ----------------------------------------------------------------


class RoutedModel:
    """Stub of a model whose routers have auxiliary losses."""

    has_auxiliary_losses = True


def router_factors(rank: int, world: int):
    """Return the loss factors that a context-parallel rank passes to its routers."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=2), rank=rank)
    dp_rank = groups.coordinates["dp"]
    batches = []
    for index in range(3):
        mask = torch.zeros(2, 9)
        mask[0, : 1 + rank % 2 + 2 * dp_rank + index] = 0.5
        zeros = torch.zeros(2, 9, dtype=torch.int64)
        batches.append(Microbatch(zeros, zeros, mask, SequenceLayout.of_rows(9)))
    factors = torch.tensor([3.0, 5.0, 7.0])
    arguments = auxiliary_factors(RoutedModel(), batches, factors, cp=groups["cp"])
    assert all(factor["aux_factor"].dtype == torch.float32 for factor in arguments)
    RoutedModel.has_auxiliary_losses = False
    assert auxiliary_factors(RoutedModel(), batches, factors, cp=groups["cp"]) == [{}] * 3
    return [float(factor["aux_factor"]) for factor in arguments]


def test_router_losses_scale_with_the_microbatch_share():
    factors_by_rank = run_ranks(router_factors, 4)
    for rank, factors in enumerate(factors_by_rank):
        dp_rank = rank // 2
        expected = [
            factor * 0.5 * sum(1 + cp_rank + 2 * dp_rank + index for cp_rank in range(2))
            for index, factor in enumerate((3.0, 5.0, 7.0))
        ]
        assert factors == pytest.approx(expected), rank
