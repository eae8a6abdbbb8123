# SPDX-License-Identifier: Apache-2.0
"""The parity tests detect all planted faults, and nine of ten random mutants.

Planted faults are typical mistakes in such code; the last ones change no number but disable a
feature, which only the trace of collectives shows. Random mutants are small edits, drawn by a seed,
of executed code in the modules that move and shard tensors.
"""

import re

import pytest

from tests.parity.hunting import Hunt
from tests.parity.planted_faults import FAULTS
from tests.parity.rows import row_with
from tests.parity.verdict import assert_agrees, assert_same_numbers
from tests.support.executed import executed
from tests.support.mutants import survey
from tests.support.mutation_operators import mutations, sample
from tests.support.ranks import RankFailure
from tests.support.source_text import modules_of

CORE = "megatron.core"

#: Faults that the engine itself refuses.
REFUSED = ("a tied weight is reduced before its second gradient", "buckets are reduced too early")


def test_text_of_every_planted_fault_exists_in_the_code():
    missing = []
    for name, bug in FAULTS.items():
        try:
            bug.mutations()
        except ValueError as error:
            missing.append(f"{name}: {error}")
    assert not missing, "update these faults:\n" + "\n".join(missing)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_detected(name):
    (fault,) = FAULTS[name].mutations()
    hunt = Hunt([row_with(**FAULTS[name].settings)])
    row, ref = hunt.rows[0], hunt.reference(0)
    if name in REFUSED:
        with pytest.raises(RankFailure, match="after the reduction of its gradients"):
            hunt.runs(0, fault)
        return
    runs = hunt.runs(0, fault)  # must not crash, which would prove nothing
    if not name.startswith("feature off"):
        with pytest.raises(AssertionError):
            assert_same_numbers(row, runs, ref)
    else:
        assert_same_numbers(row, runs, ref)
        with pytest.raises(AssertionError):
            assert_agrees(row, runs, ref)


#: Modules of random mutants: they move, shard and reduce tensors.
MOVERS = (
    "comm", "moe.dispatch", "moe.layer", "moe.router", "ops.grouped_mm", "ops.permutation",
    "weight_sharding", "distributed", "weight_gather.store", "weight_gather.bucket",
    "weight_gather.gatherer", "weight_gather.handle", "tensor_parallel",
)  # fmt: skip

#: Functions that only validate arguments or fill memory for tests; they have separate tests.
CHECKS = ("check", "_shard_problems", "poison_")

#: A mutation that drops the call of a check; the refused values have separate tests.
DROPPED_CHECK = re.compile(r"(\w+\.)*check\w*\(.*\): call dropped")

#: Equivalent mutants by key, with the reason; an entry without matching code is an error.
EQUIVALENT = {
    **{
        f"{CORE}.weight_sharding|_origin|1|1 to 2|{number}": (
            "element -1 is element 0 of a list of one: no weight has three dimensions yet"
        )
        for number in (3, 4, 5)
    },
    f"{CORE}.weight_gather.bucket|_span_name|first_name == last_name"
    "|first_name == last_name: to NotEq|1": "a name for messages",
    f"{CORE}.weight_gather.gatherer|BufferPool.acquire"
    "|current_stream(self.device).wait_event(buffer.released)"
    "|current_stream(self.device).wait_event(buffer.released): call dropped|1": (
        "a CPU has no streams; the stream model of core/distributed orders them"
    ),
    f"{CORE}.weight_gather.gatherer|Gatherer._start_stale_outer_all_gathers"
    "|self._start_outer_all_gather(bucket)|self._start_outer_all_gather(bucket): call dropped|1": (
        "an early start; _finish_outer_all_gather starts what is missing"
    ),
    **{
        f"{CORE}.distributed.gradient_bucket|{owner}.__init__|0|0 to 1|{number}": (
            "counters that each step resets"
        )
        for owner, number in (("GradientBlock", 1), ("GradientBlock", 2), ("GradientBucket", 1))
    },
}

#: Rows of four ranks that execute nearly every line of those modules.
HUNTING_ROWS = [
    row_with(tp=2, dp=2, sequence_parallel=True, placement="optim", bucket="small", groups=1,
             accumulation=3, tied=True, norm="LayerNorm", qk_norm=True, bias="all", dropout=0.1,
             early_gather=True, link="late"),
    row_with(tp=1, dp=4, per_token=True, loss_scale=1024.0, bias="all", qk_norm=True, groups=4,
             placement="optim_grads_params", instances=2, outer="optim", accumulation=3,
             early_gather=True, link="late"),
    row_with(tp=2, dp=2, placement="optim_grads", accumulation=3),
    row_with(tp=4, dp=1, groups=2, sequence_parallel=True, overlap=False, bias="qkv", vocabulary=9),
    row_with(tp=2, dp=2, experts="sigmoid", ep=2, etp=2, shared="gated", capacity="probs"),
    row_with(tp=2, dp=2, experts="softmax", ep=2, etp=1, dispatcher="allgather", shared="plain",
             sequence_parallel=True, placement="optim_grads_params", documents="packed",
             predictions=1, recompute="full", capacity="position"),
]  # fmt: skip

SEED = 20


def _modules() -> list[str]:
    return [module for mover in MOVERS for module in modules_of(f"{CORE}.{mover}")]


def test_equivalent_mutants_exist_in_the_code():
    keys = {mutation.key for module in _modules() for mutation in mutations(module)}
    assert keys >= EQUIVALENT.keys()


@pytest.mark.slow(seconds=300)
@pytest.mark.timeout(900)
def test_nine_of_ten_random_mutants_are_detected():
    hunt, modules = Hunt(HUNTING_ROWS), _modules()
    candidates = [mutation for module in modules for mutation in mutations(module)]
    candidates = [m for m in candidates if m.function not in CHECKS and m.key not in EQUIVALENT]
    candidates = [m for m in candidates if DROPPED_CHECK.fullmatch(m.what) is None]
    drawn = sample(executed(candidates, hunt.spans(modules)), 30, seed=SEED)
    assert len(drawn) == 30
    verdicts = [hunt.verdict(mutation) for mutation in drawn]
    report = survey(verdicts)
    print(report)
    noticed = sum(verdict.noticed is not None for verdict in verdicts)
    assert noticed >= 27, report
