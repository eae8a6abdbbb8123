# SPDX-License-Identifier: Apache-2.0
"""MoE: router, dispatch and experts of one block (Shazeer et al. 2017; Fedus et al. 2021).

hidden [s, b, h] → rows [t, h] of this rank → router → dispatch → experts → weighted sums [t, h] →
[s, b, h], plus the shared expert's output, which is computed while rows are in flight.

`ExpertMLPs` are this rank's experts, applied to rows sorted by expert, one run of rows per expert.

gated: down_e(activation(gate_e(x)) · up_e(x)), gate and up one matmul; plain as in `MLP`.

| weight | logical | local |
|---|---|---|
| gate, up | [E, f, h] each | [2 E/ep, f/etp, h], an expert's gate before its up |
| down | [E, h, f] | [E/ep, h, f/etp] |
| biases of gate, up | [E, f] each | [2 E/ep, f/etp] |
| bias of down | [E, h] | [E/ep, h] |

A rank's outputs are partial sums over etp: the first etp rank adds the bias of down.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from megatron.core.backend import LayerBuild, Mixer
from megatron.core.comm.symmetric_memory import SequenceParallelComm
from megatron.core.context_parallel import SequenceLayout
from megatron.core.initialize import InitSpec
from megatron.core.moe.dispatch import (
    ExpertRanks,
    Padding,
    RankCapacity,
    choose_dispatcher,
    dispatch,
    partial_sums,
)
from megatron.core.moe.moe_config import MoEConfig
from megatron.core.moe.router import Router, Routing, Share
from megatron.core.ops.grouped_mm import add_run_biases
from megatron.core.ops.swiglu import activate, gated
from megatron.core.transformer.mlp import MLP, gate_options
from megatron.core.transformer.recompute import discard_until_backward
from megatron.core.weight_gather import RowRuns, WeightHandle
from megatron.core.weight_sharding import Shard, SubWeight, WeightSharding


class ExpertMLPs(nn.Module):
    """The experts of one rank.

    Attributes:
        recomputes: recompute the activations in backward instead of saving them.
    """

    def __init__(self, name: str, *, config: MoEConfig, build: LayerBuild) -> None:
        super().__init__()
        self.config, self.recomputes = config, False
        self._function = build.backend.elementwise(gated if config.gated else activate)
        self._gate_options = gate_options(config)
        count, f, h = config.num_experts, config.ffn_hidden_size, build.hidden_size
        by_expert = Shard(axis="ep", dim=0)
        projections = ["gate", "up"] if config.gated else ["up"]
        input_shards = (by_expert, Shard(axis="etp", dim=1))
        sub_weights = tuple(
            SubWeight(name=f"{name}.{projection}.weight", shape=(count, f, h), shards=input_shards)
            for projection in projections
        )
        self.input = build.store.declare(
            WeightSharding(
                name=f"{name}.input.weight" if config.gated else sub_weights[0].name,
                sub_weights=sub_weights,
                interleave=count if config.gated else 1,
                expert=True,
                gtp=True,
            ),
            build.init,
        )
        down_shards = (by_expert, Shard(axis="etp", dim=2))
        self.down = build.store.declare(
            WeightSharding.of(
                f"{name}.down.weight", (count, h, f), *down_shards, expert=True, gtp=True
            ),
            build.output_init,
        )
        self.input_bias: WeightHandle | None = None
        self.down_bias: WeightHandle | None = None
        if config.bias:
            self._declare_biases(name, projections, build=build)
        local_count = count // build.store.groups.grid.ep
        make_product = build.backend.grouped_linear
        self._input_product = make_product(self.input, local_count, build.store)
        self._down_product = make_product(self.down, local_count, build.store)

    def _declare_biases(self, name: str, projections: list[str], *, build: LayerBuild) -> None:
        count, f = self.config.num_experts, self.config.ffn_hidden_size
        by_expert, zeros = Shard(axis="ep", dim=0), InitSpec.constant(0.0)
        shards = (by_expert, Shard(axis="etp", dim=1))
        sub_weights = tuple(
            SubWeight(name=f"{name}.{projection}.bias", shape=(count, f), shards=shards)
            for projection in projections
        )
        self.input_bias = build.store.declare(
            WeightSharding(
                name=f"{name}.input.bias" if self.config.gated else sub_weights[0].name,
                sub_weights=sub_weights,
                interleave=count if self.config.gated else 1,
                expert=True,
                weight_decay=False,
            ),
            zeros,
        )
        down_bias = WeightSharding.of(
            f"{name}.down.bias",
            (count, build.hidden_size),
            by_expert,
            expert=True,
            gradient={"etp": "partial"},
            weight_decay=False,
        )
        self.down_bias = build.store.declare(down_bias, zeros)
        etp = build.store.groups.grid.size("etp")
        self._adds_down_bias = build.store.groups["etp_ep"].rank % etp == 0

    def forward(self, rows: torch.Tensor, runs: RowRuns) -> torch.Tensor:
        """Return [r, h] partial(etp) from rows [r, h]."""
        inner = self._input_product(rows, runs)  # [r, 2f/etp] or [r, f/etp]
        if self.input_bias is not None:
            inner = add_run_biases(
                inner, self.input_bias.use(torch.float32).view(-1, inner.shape[1]), runs
            )
        active = self._activate(inner)  # [r, f/etp]
        y = self._down_product(active, runs)
        if self.down_bias is not None:
            bias = self.down_bias.use(torch.float32)
            y = add_run_biases(y, bias if self._adds_down_bias else bias * 0.0, runs)
        if self.recomputes and torch.is_grad_enabled():
            source = inner.detach()
            discard_until_backward(active, lambda: self._activate(source), used_by=y)
        return y

    def _activate(self, inner: torch.Tensor) -> torch.Tensor:
        return self._function(inner, self.config.activation, **self._gate_options)


class MoE(Mixer):
    """The mixture of experts of one block.

    Args:
        name: prefix of its weights.

    Raises:
        ValueError: the config does not fit the numbers of ranks.

    Attributes:
        dispatcher: "alltoall" or "allgather".
        overlaps: whether the shared expert is computed while rows are in flight.
        capacity: capacity of this rank for a training microbatch (one with samples), and for an
            evaluation that requests it; None has no limit, as in generation.
    """

    def __init__(self, name: str, *, config: MoEConfig, build: LayerBuild) -> None:
        super().__init__()
        grid, region = build.store.groups.grid, build.region
        etp = grid.size("etp")
        problems = config.problems(tp=region.group.size, etp=etp, ep=grid.ep)
        if problems:
            raise ValueError("; ".join(problems))
        self.region = region
        self.ranks = ExpertRanks(build.store.groups["etp_ep"], etp, config.num_experts)
        self.dispatcher = choose_dispatcher(
            build.backend.dispatcher, topk=config.router.topk, ep=grid.ep
        )
        self.overlaps = build.backend.overlap_shared_expert
        self.capacity: RankCapacity | None = None
        factor = build.backend.expert_rank_capacity_factor
        if factor is not None and self.ranks.group.size > 1:
            self.capacity = RankCapacity(factor, build.store.device)
        # Batch-invariant: padded and exact dispatch sum in different orders, so only one is used.
        self._exact = build.store.row_tiles
        self._no_rows = torch.empty(
            (0, build.hidden_size), dtype=build.store.dtype, device=build.store.device
        )
        self.router = Router(f"{name}.router", config=config, build=build)
        self.experts = ExpertMLPs(f"{name}.experts", config=config, build=build)
        self.shared: SharedExpert | None = None
        if config.shared is not None:
            self.shared = SharedExpert(name, config=config, build=build)

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed in backward instead of saved."""
        return self.experts.recomputes

    @recomputes.setter
    def recomputes(self, recomputes: bool) -> None:
        self.experts.recomputes = recomputes
        if self.shared is not None:
            self.shared.mlp.recomputes = recomputes

    def forward(
        self,
        hidden: torch.Tensor,
        layout: SequenceLayout,
        *,
        aux_factor: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return [s, b, h] from hidden [s, b, h] ([s/tp, b, h] both under sequence parallelism).

        Args:
            aux_factor: fp32 scalar, factor of the router's auxiliary losses; None omits them.
        """
        share = Share(hidden, layout, region=self.region)
        rows = share.rows(hidden)  # [t, h]
        routing = self.router(rows, share, aux_factor=aux_factor)
        shared: list[torch.Tensor] = []

        def overlap_fn() -> None:
            if self.shared is not None:
                shared.append(self.shared(hidden, layout))

        expert_output = dispatch(
            rows,
            routing,
            self.experts,
            ranks=self.ranks,
            dispatcher=self.dispatcher,
            overlap_fn=overlap_fn if self.overlaps else None,
            padding=self._padding(share.count, layout),
            capacity=self._capacity_for(layout),
        )  # [t, h]
        if not self.overlaps:
            overlap_fn()
        output = share.whole(expert_output)
        return output + shared[0] if shared else output

    def decode(
        self, x: torch.Tensor, layout: SequenceLayout, *, comm: SequenceParallelComm, **_: object
    ) -> tuple[torch.Tensor, None]:
        """See `Mixer.decode`.

        If the expert ranks are the sequence-parallel ranks, each rank gathers and routes the tokens
        of all ranks, and shared and routed experts are reduced together: two collectives. They skip
        the padding if it is at the end of each rank's tokens.
        """
        paged = layout.rows_with_past
        same_ranks = self.ranks.group.ranks == self.region.group.ranks
        if not (self.region.scatters and same_ranks and self.router.capacity_factor is None):
            run = partial(self, x.unsqueeze(1), layout)
            # The host reads the number of tokens of each expert, which a graph cannot record.
            y = run() if paged.graph is None else paged.graph.call_for(run)
            return y.squeeze(1), None
        # With prefill rows, padding lies between decode rows and prefill rows, not at the end.
        if comm.way == "torch.distributed" or paged.prefill is not None:
            return comm.reduce_scatter(self._partial_sums(comm.all_gather(x), layout)), None
        real = paged.slot_mapping.view(self.region.group.size, -1) >= 0
        rows = real.sum(1, dtype=torch.int32)  # [tp]
        sums = self._partial_sums(comm.all_gather_v(x, rows), layout)
        return comm.reduce_scatter_v(sums, rows), None

    def _partial_sums(self, gathered: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        """Return the partial sums [t, h] of this rank's experts for the tokens of all ranks."""
        share = Share(gathered.unsqueeze(1), layout, region=self.region)
        routing = self.router(gathered, share)
        sums = partial_sums(gathered, routing, self.experts, ranks=self.ranks)
        return sums if self.shared is None else sums + self.shared.partial_sums(gathered, layout)

    @torch.no_grad()
    def join(self, most_tokens: int) -> None:
        """Compute this rank's experts in a generation step in which the rank has no tokens.

        Args:
            most_tokens: number of tokens of the rank with the most tokens.
        """
        no_experts = torch.empty(
            (0, self.router.config.topk), dtype=torch.int64, device=self._no_rows.device
        )
        dispatch(
            self._no_rows,
            Routing(no_experts, no_experts.float()),
            self.experts,
            ranks=self.ranks,
            dispatcher=self.dispatcher,
            padding=self._padding_to(most_tokens),
        )

    def _capacity_for(self, layout: SequenceLayout) -> RankCapacity | None:
        """Return the capacity for the rows of a microbatch, or None."""
        limits = layout.sample_ids is not None or (
            self.capacity is not None and self.capacity.in_evaluation
        )
        return self.capacity if limits else None

    def _padding(self, rows: int, layout: SequenceLayout) -> Padding | None:
        """Return the padding of a generation step; None outside generation."""
        if layout.paged is None:
            return None
        if layout.paged.most_tokens is None:
            return Padding(rows=rows, uneven=False, exact=self._exact)
        return self._padding_to(layout.paged.most_tokens)

    def _padding_to(self, most_tokens: int) -> Padding:
        """Return the padding of ranks with different numbers of rows."""
        rows = -(-most_tokens // self.region.group.size)
        return Padding(rows=rows, uneven=True, exact=self._exact)


def capacities_of(model: nn.Module) -> list[tuple[str, RankCapacity]]:
    """Return the capacities of a model's layers, each with the name of its router."""
    layers = (module for module in model.modules() if isinstance(module, MoE))
    return [(m.router.name, m.capacity) for m in layers if m.capacity is not None]


class SharedExpert(nn.Module):
    """The MLP for every token, with its optional gate."""

    def __init__(self, name: str, *, config: MoEConfig, build: LayerBuild) -> None:
        super().__init__()
        assert config.shared is not None
        self.mlp = MLP(f"{name}.shared", config=config.shared, build=build)
        self.gate = None
        self._sigmoid = build.backend.elementwise(torch.sigmoid)
        if config.shared_gate:
            kind = build.region.replicated_gradient
            sharding = WeightSharding.of(
                f"{name}.shared_gate.weight", (1, build.hidden_size), gradient={"tp": kind}
            )
            self.gate = build.store.declare(sharding, build.init)

    def forward(self, hidden: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        """Return [s, b, h] from hidden [s, b, h] ([s/tp, b, h] under sequence parallelism)."""
        return self._gated(self.mlp(hidden, layout), hidden)

    def partial_sums(self, gathered: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        """Return the output [t, h] partial(tp) for the tokens of all ranks, in generation."""
        active, down = self.mlp.decode(gathered, layout)
        return self._gated(down.weight.linear(active), gathered)

    def _gated(self, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return out if self.gate is None else out * self._sigmoid(self.gate.linear(hidden))
