# SPDX-License-Identifier: Apache-2.0
"""The parity tests detect all planted faults, and nine of ten random mutants.

Planted faults are typical mistakes in such code; the last ones change no number but disable a
feature, which only the trace of collectives shows. Random mutants are small edits, drawn by a seed,
of executed code in the modules that move and shard tensors.
"""

import re

import pytest

from tests.parity.expert_faults import EXPERT_FAULTS
from tests.parity.hunting import Hunt
from tests.parity.hybrid_faults import HYBRID_FAULTS
from tests.parity.rows import row_with
from tests.parity.verdict import assert_agrees, assert_same_numbers
from tests.support.executed import executed
from tests.support.mutants import planted, survey
from tests.support.mutation_operators import mutations, sample
from tests.support.ranks import RankFailure
from tests.support.source_text import modules_of

CORE = "megatron.core"

#: Faults that the engine itself refuses.
REFUSED = ("a tied weight is reduced before its second gradient", "buckets are reduced too early")

#: name: (module, function, code, faulty code, settings of a row that shows the fault)
FAULTS = {
    "gradient of a copied input is not summed over tp": (
        "comm.conjugates",
        "_Copy.backward",
        "all_reduce(grad, ctx.group)",
        "grad.clone()",
        {},
    ),
    "gradient of a gathered sequence is cut instead of reduce-scattered": (
        "comm.conjugates",
        "_Gather.backward",
        "reduce_scatter(grad, ctx.group)",
        "own_rows(grad, ctx.group).contiguous()",
        {"sequence_parallel": True},
    ),
    "a rank takes the rows of its neighbour": (
        "comm.conjugates",
        "own_rows",
        "x[group.rank * rows : (group.rank + 1) * rows]",
        "x.roll(rows, 0)[group.rank * rows : (group.rank + 1) * rows]",
        {"sequence_parallel": True, "dropout": 0.1},
    ),
    "kv heads held by several ranks keep their own gradients": (
        "weight_sharding",
        "gradient_plan",
        "elif num_shards < size:",
        "elif num_shards > size:",
        {"groups": 1},
    ),
    "norm weights see a part of the sequence, and nobody sums them": (
        "tensor_parallel.linear",
        "TensorParallelRegion.replicated_gradient",
        '"partial" if self.scatters else "identical"',
        '"identical"',
        {"sequence_parallel": True},
    ),
    "q/k norm weights see a part of the heads, and nobody sums them": (
        "transformer.attention",
        "SelfAttention.__init__",
        '"gradient": "partial"',
        '"gradient": "identical"',
        {"qk_norm": True},
    ),
    "a tied weight is reduced before its second gradient": (
        "distributed.gradient_bucket",
        "GradientBlock.grad_accumulated",
        "== handle.uses",
        "== 1",
        {"tp": 1, "dp": 2, "tied": True, "bucket": "small"},
    ),
    "gradients of the last step are kept": (
        "distributed.gradient_bucket",
        "GradientBlock._reset",
        "handle.overwrite_main_grad = True",
        "handle.overwrite_main_grad = handle.overwrite_main_grad",
        {"tp": 1, "dp": 2},
    ),
    "a microbatch overwrites the gradient of the one before": (
        "weight_gather.handle",
        "WeightHandle._accumulate_wgrad",
        "overwrite=self.overwrite_main_grad",
        "overwrite=True",
        {"tp": 1, "dp": 2, "accumulation": 3},
    ),
    "buckets are reduced too early": (
        "distributed.data_parallel",
        "DataParallel.set_is_last_backward",
        "if is_last else ()",
        "if not is_last else ()",
        {"tp": 1, "dp": 2, "accumulation": 2, "bucket": "small"},
    ),
    "the mean forgets the number of microbatches": (
        "weight_sharding",
        "loss_factor",
        "grid.gtp * num_microbatches",
        "grid.gtp",
        {"tp": 1, "dp": 2, "accumulation": 3},
    ),
    "the mean forgets the gtp ranks": (
        "weight_sharding",
        "loss_factor",
        "grid.dp * grid.gtp",
        "grid.dp",
        {"tp": 1, "gtp": 2},
    ),
    "replicas of a weight over gtp are not summed": (
        "distributed.gradient_bucket",
        "GradientBucket.needs_outer",
        "if self.bucket.outer.size == 1:",
        "if self.bucket.gtp:",
        {"tp": 1, "gtp": 2, "dp": 2},
    ),
    "replicas of a weight over gtp count in the norm": (
        "weight_gather.store",
        "owned_range",
        "if axis not in shard_axes]",
        "if axis not in (*shard_axes, 'dp_inner')]",
        {"tp": 1, "gtp": 2, "dp": 2},
    ),
    "experts are sharded over the dense gtp": (
        "weight_gather.bucket",
        "BucketGroups.of",
        'if expert else ("gtp", "dp_cp")',
        'if not expert else ("gtp", "dp_cp")',
        {"tp": 1, "gtp": 2, "dp": 2, "egtp": 4, "experts": "softmax"},
    ),
    "padding of the vocabulary takes part in the softmax": (
        "tensor_parallel.vocab_parallel",
        "_CrossEntropy.forward",
        "min(rows, vocab_size - first_token_id)",
        "rows",
        {},
    ),
    "embeddings of the other ranks' tokens are not masked": (
        "tensor_parallel.vocab_parallel",
        "VocabParallelEmbedding.addends",
        "self.weight.embedding(local.where(valid, 0), valid)",
        "self.weight.embedding(local.where(valid, 0))",
        {},
    ),
    "all ranks drop the attention of the first heads": (
        "transformer.attention",
        "CoreAttention.of",
        "build.region.group.rank * heads",
        "0 * heads",
        {"dropout": 0.1},
    ),
    "replicas count twice in the norm of the gradient": (
        "weight_gather.store",
        "owned_range",
        "if box.counted:",
        "if True:",
        {},
    ),
    "each rank starts from the values of the first": (
        "weight_gather.store",
        "WeightStore._initialize",
        "offsets=chunk.offsets",
        "offsets=tuple(0 for _ in chunk.offsets)",
        {},
    ),
    "updated shards of weights are not gathered": (
        "distributed.data_parallel",
        "DataParallel.start_param_sync",
        "in self.gatherers:",
        "in ():",
        {"tp": 1, "dp": 2, "placement": "optim"},
    ),
    "gathered weights outlive the optimizer's step": (
        "weight_gather.gatherer",
        "Gatherer.invalidate",
        "block.ready = False",
        "block.ready = not self.reshards",
        {"tp": 1, "dp": 2, "placement": "optim_grads", "early_gather": True},
    ),
    "shards of the outer ranks are not gathered": (
        "weight_gather.gatherer",
        "Gatherer.invalidate",
        "self._outer_stale.add(bucket.index)",
        "pass",
        {"tp": 1, "dp": 4, "placement": "optim_grads_params", "instances": 2, "outer": "optim"},
    ),
    "gradients of the outer ranks are not summed": (
        "distributed.gradient_bucket",
        "GradientBucket.needs_outer",
        "if self.bucket.outer.size == 1:",
        "if True:",
        {"tp": 1, "dp": 4, "placement": "optim_grads", "instances": 2},
    ),
    "a microbatch's cut gradients replace those of the one before": (
        "distributed.gradient_bucket",
        "GradientBucket.reduction_output",
        "start not in self._received",
        "True",
        {"tp": 1, "dp": 2, "placement": "optim_grads", "accumulation": 3},
    ),
    "ranges that several ranks hold count once for each in the norm": (
        "weight_gather.store",
        "owned_range",
        "math.prod(grid.size(axis) for axis in replicate_axes) if store.sharded else 1",
        "1",
        {"tp": 1, "dp": 4, "placement": "optim", "instances": 2},
    ),
    "the stages of a tied weight keep their own gradients": (
        "weight_sharding",
        "gradient_plan",
        "steps.append(GradientStep(TIED, names))",
        "pass",
        {"tp": 1, "pp": 2, "tied": True},
    ),
    "weight gradients that were put off are forgotten": (
        "pipeline_parallel.runtime",
        "AutogradWorker.weight_gradient",
        "self._queues.pop((chunk, microbatch)).drain()",
        "self._queues.pop((chunk, microbatch))",
        {"tp": 1, "pp": 2, "schedule": "zb-h1", "accumulation": 3},
    ),
    "a chunk sends what it got": (
        "pipeline_parallel.runtime",
        "AutogradWorker.forward",
        "return output.detach().contiguous()",
        "return (output if hidden is None else hidden).detach().clone()",
        {"tp": 1, "pp": 4, "accumulation": 3},
    ),
    "keys are taken for those of another rank of the ring": (
        "context_parallel.attention",
        "RingAttention.forward",
        "(group.rank - step) % group.size",
        "(group.rank + step) % group.size",
        {"tp": 1, "cp": 4},
    ),
    "copies of a key head keep their own gradients": (
        "context_parallel.attention",
        "_sum_copies",
        "x.unflatten(2, (groups, copies)).sum(3)",
        "x.unflatten(2, (groups, copies)).select(3, 0)",
        {"tp": 1, "cp": 2, "engine": "a2a", "groups": 1},
    ),
    "feature off: the engine that was asked for": (
        "context_parallel.attention",
        "context_attention",
        "choose(engine,",
        "choose(AUTO,",
        {"tp": 1, "cp": 2},
    ),
    "feature off: reduction as the last weight gradients of a stage come": (
        "pipeline_parallel.runtime",
        "AutogradWorker.weight_gradient",
        "self._engine.begin_last_backward(chunk)",
        "pass",
        {"tp": 1, "dp": 2, "pp": 2, "schedule": "zb-h1", "accumulation": 3},
    ),
    "feature off: sequence parallelism": (
        "tensor_parallel.linear",
        "TensorParallelRegion.scatters",
        "self.sequence_parallel and self.group.size > 1",
        "False",
        {"sequence_parallel": True},
    ),
    "feature off: reduction during backward": (
        "distributed.gradient_bucket",
        "GradientBlock.grad_accumulated",
        "self.num_unfinished == 0",
        "self.num_unfinished < 0",
        {"tp": 1, "dp": 2},
    ),
    "feature off: sums over the replicas of weights over gtp during backward": (
        "distributed.data_parallel",
        "DataParallel._wait_for_reductions",
        "and bucket.is_complete:",
        "and False:",
        {"tp": 1, "gtp": 2, "dp": 2, "placement": "optim", "bucket": "small"},
    ),
    "weights are encoded once for all steps": (
        "weight_gather.gatherer",
        "_Encoded.is_current",
        "not self.is_stale and self.version == self.block.data._version",
        "self.version >= 0",
        {"tp": 1, "gtp": 2, "dp": 2, "placement": "optim", "wire": "mxfp8"},
    ),
    "ranks scale by their own largest magnitudes": (
        "weight_gather.gatherer",
        "Gatherer._reduce_amax",
        'all_reduce(largest, group, op="max", out=largest)',
        "pass",
        {"tp": 1, "gtp": 2, "wire": "nvfp4"},
    ),
    "backward reads the encoding of 1-D scale blocks that forward reads": (
        "weight_gather.handle",
        "WeightHandle.get",
        "self.backward_block if backward else self.block",
        "self.block",
        {"tp": 1, "gtp": 2, "wire": "nvfp4", "scale_blocks": "1d"},
    ),
    "grouped products read forward's encoding in backward": (
        "weight_gather.handle",
        "_GroupedLinear.backward",
        "handle.get(backward=True)",
        "handle.get()",
        {"tp": 1, "gtp": 2, "wire": "nvfp4", "scale_blocks": "1d", "experts": "softmax", "egtp": 2},
    ),
    "feature off: weights are encoded once a step": (
        "weight_gather.gatherer",
        "_Encoded.is_current",
        "not self.is_stale and self.version == self.block.data._version",
        "False",
        {"tp": 1, "gtp": 2, "dp": 2, "placement": "optim", "wire": "mxfp8"},
    ),
    "feature off: one reduce-scatter over gtp a step": (
        "distributed.gradient_bucket",
        "GradientBucket.__init__",
        'config.gtp_reduce_scatter_per == "step"',
        "False",
        {"tp": 1, "gtp": 2, "dp": 2, "reduce_scatter": "step", "accumulation": 3},
    ),
    "a second microbatch's shards replace those of the first": (
        "distributed.gradient_bucket",
        "GradientBucket.finish_outer_grad_sync",
        "self.gradients.add_(summed)",
        "self.gradients.copy_(summed)",
        {"tp": 1, "gtp": 2, "dp": 2, "placement": "optim_grads", "accumulation": 3},
    ),
    "feature off: reduce-scatter of a sharded optimizer": (
        "distributed.gradient_bucket",
        "GradientBlock._start_reduction",
        "return reduce_scatter_async(buffer, group, out=output)",
        "return Pending(all_reduce_async(buffer, group, out=buffer).wait() is None or output)",
        {"tp": 1, "dp": 2, "placement": "optim"},
    ),
    **EXPERT_FAULTS,
    **HYBRID_FAULTS,
    "feature off: gathers ahead of need": (
        "distributed.data_parallel",
        "_gatherers",
        "prefetch=config.overlap_param_gather",
        "prefetch=False",
        {"tp": 1, "dp": 2, "placement": "optim_grads_params", "early_gather": True},
    ),
    "feature off: the early gather of a parameter sync": (
        "distributed.data_parallel",
        "DataParallel.start_param_sync",
        "gatherer.prefetch_next_step()",
        "pass",
        {"tp": 1, "dp": 2, "placement": "optim", "early_gather": True, "bucket": "small"},
    ),
    "feature off: one gather for several weights": (
        "weight_gather.bucket",
        "bucket_plans",
        "if strategy.weight and units[handle.name] != unit:",
        "if strategy.weight:",
        {"tp": 1, "dp": 2, "placement": "optim_grads_params"},
    ),
}


def test_text_of_every_planted_fault_exists_in_the_code():
    missing = []
    for name, (module, function, code, faulty, _) in FAULTS.items():
        try:
            planted(f"{CORE}.{module}", function, code, faulty)
        except ValueError as error:
            missing.append(f"{name}: {error}")
    assert not missing, "update these faults:\n" + "\n".join(missing)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_detected(name):
    module, function, code, faulty, changes = FAULTS[name]
    fault = planted(f"{CORE}.{module}", function, code, faulty)
    hunt = Hunt([row_with(**changes)])
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
    "comm",
    "moe.dispatch",
    "moe.layer",
    "moe.router",
    "ops.grouped_mm",
    "ops.permutation",
    "weight_sharding",
    "distributed",
    "weight_gather.store",
    "weight_gather.bucket",
    "weight_gather.gatherer",
    "weight_gather.handle",
    "tensor_parallel",
)

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
