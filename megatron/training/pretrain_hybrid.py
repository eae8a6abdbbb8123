# SPDX-License-Identifier: Apache-2.0
"""Entry script: pretrain a hybrid model, whose blocks are defined by a layer pattern.

    torchrun --nproc-per-node 2 -m megatron.training.pretrain_hybrid --hybrid-layer-pattern G-*- ...

The same program as pretrain_gpt, for any pattern. Recurrent blocks encode the order of tokens, so
such models are mostly trained with --position-embedding-type none.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config import Config
from megatron.training.config.layer_pattern_options import FLAG
from megatron.training.pretrain_gpt import Program, run_program


def _problems(config: Config) -> Iterator[str]:
    if config.hybrid.hybrid_layer_pattern is None:
        yield f"missing {FLAG}: give it, as in G-G-G-*-, or start pretrain_gpt"


PRETRAIN_HYBRID = Program(
    name="pretrain_hybrid",
    description="Pretrain a model of the blocks of a pattern; start several processes with "
    "torchrun.",
    problems=_problems,
    replaced={"num-layers": "hybrid-layer-pattern"},
)


if __name__ == "__main__":
    run_program(PRETRAIN_HYBRID)
