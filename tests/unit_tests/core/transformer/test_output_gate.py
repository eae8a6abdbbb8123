# SPDX-License-Identifier: Apache-2.0
"""GPT with attention output gates over tp, sp and cp ranks against one process.

The cases have more, as many and fewer kv heads than ranks.
"""

from __future__ import annotations

import dataclasses

import pytest

from megatron.core import ProcessGroupCollection
from megatron.core.models import GPTConfig
from megatron.core.transformer import AttentionConfig
from tests.support.closeness import assert_piece_close
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.models.test_latent_parallel import CONFIG, Case, on_rank, train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gated(Case):
    """A model with output gates and `groups` kv heads."""

    groups: int = 2

    @property
    def config(self) -> GPTConfig:
        attention = AttentionConfig(
            num_attention_heads=4,
            num_query_groups=self.groups,
            kv_channels=6,
            qkv_bias=True,
            qk_norm=True,
            output_gate=True,
        )
        return dataclasses.replace(CONFIG, attention=attention)


TWO_RANKS = (
    Gated(tp=2, groups=4, split=True),
    Gated(tp=2, groups=2, sequence_parallel=True, documents=True),
    Gated(tp=2, groups=1),
    Gated(cp=2, groups=2, engine="a2a", documents=True),
)
FOUR_RANKS = (Gated(tp=4, groups=2, sequence_parallel=True), Gated(tp=4, groups=1))


@pytest.mark.parametrize(("world", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["two", "four"])
def test_gradients_match_one_process(world: int, cases: tuple[Gated, ...]) -> None:
    rank_results = run_ranks(on_rank, world, list(cases))
    for index, case in enumerate(cases):
        with one_thread():
            plain = dataclasses.replace(case, split=False)
            _, gradients, _, _ = train_step(plain, ProcessGroupCollection.single())
        names = {name for name, _ in gradients}
        compared = set()
        for rank_result in rank_results:
            _, (_, shards, _, _) = rank_result[index]
            for (name, offsets), shard in shards.items():
                expected = gradients[name, (0,) * len(offsets)]
                assert_piece_close(f"{case}: {name}", shard, expected, offsets)
                if "attention.gate" in name and case.tp > 1:
                    assert shard.shape[0] * case.tp == expected.shape[0], (
                        "gates are sharded over tp"
                    )
                compared.add(name)
        assert compared == names
        assert {n for n in names if "attention.gate" in n} == {
            f"decoder.blocks.{block}.attention.gate.{kind}"
            for block in (0, 2)
            for kind in ("weight", "bias")
        }
