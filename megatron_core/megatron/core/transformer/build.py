# SPDX-License-Identifier: Apache-2.0
"""LayerBuild: what every layer's constructor needs in addition to its own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from megatron.core.backend import Backend
from megatron.core.context_parallel.layout import ContextParallel
from megatron.core.initialize import InitSpec
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.weight_gather import WeightStore


@dataclass(frozen=True, eq=False)
class LayerBuild:
    """The surroundings a layer is built in.

    Args:
        store: where weights are declared.
        region: the tp group and whether the sequence is sharded outside blocks.
        backend: the implementations to use.
        hidden_size: h.
        init: initial values of input projections.
        output_init: initial values of projections back into the residual stream.
        seed: of dropout.
        context: the ranks that share the tokens of a row.
    """

    store: WeightStore
    region: TensorParallelRegion
    backend: Backend
    hidden_size: int
    init: InitSpec
    output_init: InitSpec
    seed: int = 0
    context: ContextParallel = field(default_factory=ContextParallel)

    def column_linear(
        self,
        name: str,
        outputs: Sequence[tuple[str, int, int | None]],
        *,
        input_size: int | None = None,
        **options: object,
    ) -> nn.Module:
        """Build the backend's `ColumnParallelLinear`, into a block.

        Args:
            name, outputs, options: of that layer.
            input_size: None is h.
        """
        return self.backend.column_linear(
            name,
            outputs,
            input_size=input_size or self.hidden_size,
            store=self.store,
            region=self.region,
            init=self.init,
            **options,
        )

    def row_linear(self, name: str, input_size: int, *, bias: bool = False) -> nn.Module:
        """Build the backend's `RowParallelLinear`, from a block back into the residual stream."""
        return self.backend.row_linear(
            name,
            input_size=input_size,
            output_size=self.hidden_size,
            store=self.store,
            region=self.region,
            init=self.output_init,
            bias=bias,
        )
