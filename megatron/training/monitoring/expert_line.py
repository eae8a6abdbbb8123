# SPDX-License-Identifier: Apache-2.0
"""The line of a run's log on its experts: where they are, how tokens come there, what a token
uses."""

from __future__ import annotations

import math

from megatron.core.models.gpt import GPTConfig, logical_weights
from megatron.core.models.pattern import EXPERTS
from megatron.core.moe.dispatch import choose_dispatcher, dispatched_rows
from megatron.training.config.resolve import Run
from megatron.training.run_groups import rank_grid


def expert_line(run: Run, model: GPTConfig) -> str | None:
    """Return what is so of a run's experts and why; None where there are none."""
    moe = model.moe
    if moe is None:
        return None
    grid = rank_grid(run)
    layers, noun = model.blocks.count(EXPERTS), "blocks" if model.pattern else "layers"
    total, active = (f"{count:,}" for count in parameters(model))
    scores = moe.router.score_function
    scores += ", weights that sum to 1" if moe.router.normalize else ", weights as they are"
    shared = "" if moe.shared_ffn_hidden_size is None else " and a shared one"
    return (
        f"experts: {moe.num_experts} in {layers} of {model.num_layers} {noun}, a token goes to "
        f"{moe.router.topk}{shared} by {scores}; expert parallel {grid.ep}, expert tensor parallel "
        f"{grid.size('etp')}, expert data parallel {grid.edp}; {_dispatcher(run, model)}; a token "
        f"uses {active} of {total} parameters"
    )


def _dispatcher(run: Run, model: GPTConfig) -> str:
    """Say how tokens come to their experts, and what that moves."""
    grid, moe, parallel = rank_grid(run), model.moe, run.config.parallel
    etp = grid.size("etp")
    if etp * grid.ep == 1:
        return "all experts are on every rank, no token travels"
    assert moe is not None
    wanted, topk = parallel.moe_token_dispatcher_type, moe.router.topk
    chosen = choose_dispatcher(wanted, topk=topk, ep=grid.ep)
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    tokens = run.config.training.micro_batch_size * run.config.training.seq_length
    share = math.ceil(tokens / ranks)
    rows = {
        kind: dispatched_rows(kind, tokens=share, topk=topk, etp=etp, ep=grid.ep)
        for kind in ("alltoall", "allgather")
    }
    shown = ", ".join(f"{kind} {rows[kind]:,}" for kind in sorted(rows, key=rows.__getitem__))
    why = "least rows" if wanted == "auto" else "asked for; rows"
    return f"tokens by {chosen}: {why} of a rank, there and back: {shown}"


def parameters(model: GPTConfig) -> tuple[int, int]:
    """Return the parameters of a model, and those that a token uses: of its own experts alone."""
    total = active = 0.0
    share = 0.0 if model.moe is None else model.moe.router.topk / model.moe.num_experts
    for name, shape in logical_weights(model).items():
        count = math.prod(shape)
        total += count
        active += count * share if ".moe.experts." in name else count
    return round(total), round(active)
