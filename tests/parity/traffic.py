# SPDX-License-Identifier: Apache-2.0
"""Formulas for the collectives of a row in one step, compared with its trace.

They detect a feature that is silently off (sequence parallelism that does not shard, a sharded
optimizer that all-reduces, a reduction that does not overlap) although the numbers are right.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.context_parallel.attention import sent_groups
from megatron.core.distributed.formulas import BucketSize
from megatron.core.pipeline_parallel import ActionKind
from megatron.core.process_groups import GROUP_NAMES
from megatron.core.weight_gather.gatherer import GatherCounts
from tests.parity.expert_traffic import assert_expert_traffic
from tests.parity.recurrent_traffic import Sent, sent_by_mixers
from tests.parity.rows import CUT_WEIGHTS, shards_over_gtp, world_of
from tests.parity.sequences import SEQUENCE, cut_of
from tests.parity.stages import Blocks, StageBlocks
from tests.parity.training import BATCH, HEAD_DIM, HEADS, HIDDEN, LAYERS, Run, Step
from tests.support.activation import assert_active, assert_silent, matching, table
from tests.support.covering_array import Row

#: Features of a padded head of latent attention: rotary and non-rotary features.
LATENT_CHANNELS = HEAD_DIM - 1 + 4

#: Weights that backward does not read: an embedding has no dgrad, and the head's is in forward.
WITHOUT_DGRAD = ("embedding.weight", "head.weight")

CUT_GRADIENTS = ("optim_grads", CUT_WEIGHTS)


def assert_traffic(row: Row, runs: Sequence[Run], number: int) -> None:
    """Assert that step `number` ran exactly the row's collectives on every rank."""
    steps = [run.steps[number] for run in runs]
    for rank, (run, step) in enumerate(zip(runs, steps, strict=True)):
        _check_dp_traffic(row, step, is_last_step=number == len(run.steps) - 1)
        _launched(row, run, step)
        _gathers(row, run)
        if run.leased_bytes:
            raise AssertionError(f"{run.leased_bytes} bytes were never released")
        if (run.late > 0) != (row["link"] == "late"):
            raise AssertionError(f"{run.late} collectives were late, expected {row['link']}")
        if row["tp"] > 1:
            _in_regions(row, run.stage, step)
        else:
            assert_silent(step.records, group="tp")
        _between_stages(row, run.stage, step)
        mixers = sent_by_mixers(row, run.stage, rank, number) if row["cp"] > 1 else Sent()
        _over_the_sequence(row, run.stage, step, mixers)
    # Norms of all heads: q/k norms, and the norm of a gated delta net.
    partial = row["sequence_parallel"] or row["qk_norm"] is True or row["mixer"] == "delta"
    partial = partial or row["experts"] is not None
    _once_a_step(row, runs, number, group="tp", expected=row["tp"] > 1 and partial)
    assert_expert_traffic(row, runs, number)
    for size in (2, 4):  # kv heads on several ranks
        replicas = {row["tp"] // row["groups"]}
        if row["mixer"] == "mamba":
            replicas.add(row["tp"] // row["mamba_groups"])
        _once_a_step(row, runs, number, group=f"tp/{size}", expected=size in replicas)
    _ties(row, runs, number)


def _between_stages(row: Row, stage: StageBlocks, step: Step) -> None:
    """Assert that the executed actions and the point-to-point traffic match the schedule."""
    if row["pp"] == 1:
        assert_silent(step.records, group="pp")
        assert_silent(step.records, group="pp_backward")
        return
    if step.actions != list(stage.listed):
        raise AssertionError("the executed actions differ from the schedule")
    local = SEQUENCE if row["cp"] == 1 and row["documents"] == "whole" else cut_of(row).local_length
    rows = local // row["tp"] if row["sequence_parallel"] else local
    for kind, group, of in (
        ("send", "pp", ActionKind.SEND_FORWARD),
        ("receive", "pp", ActionKind.RECEIVE_FORWARD),
        ("send", "pp_backward", ActionKind.SEND_BACKWARD),
        ("receive", "pp_backward", ActionKind.RECEIVE_BACKWARD),
    ):
        count = sum(action.kind is of for action in stage.listed)
        size = 4 * rows * BATCH * HIDDEN * count
        assert_active(step.records, kind=kind, group=group, exactly=count, exactly_bytes=size)
    split = [ActionKind.INPUT_GRADIENT in {a.kind for a in stage.listed}]
    if any(split) != (row["schedule"] == "zb-h1"):
        raise AssertionError(f"{row['schedule']}, but backward is split: {split}")


def _over_the_sequence(row: Row, stage: StageBlocks, step: Step, mixers: Sent) -> None:
    """Assert the cp traffic of attention, of recurrent mixers, and of token counts."""
    cp = row["cp"]
    if cp == 1:
        assert_silent(step.records, group="cp")
        return
    forward = (stage.attentions.count + stage.attentions.again) * row["accumulation"]
    backward = stage.attentions.count * row["accumulation"]
    heads, groups = HEADS // row["tp"], max(1, row["groups"] // row["tp"])
    channels = HEAD_DIM if row["attention"] == "grouped" else LATENT_CHANNELS
    head = cut_of(row).local_length * BATCH * channels * 4  # bytes on this rank
    pair = 2 * groups * head
    sent = heads + 2 * cp * sent_groups(groups, cp)  # heads that leave under a2a
    expected = {
        "p2p": {
            "send": ((cp - 1) * (forward + backward) + cp * backward, pair),
            "receive": ((cp - 1) * (forward + backward) + cp * backward, pair),
        },
        "all_gather": {
            "all_gather": (forward + backward, cp * pair),
            "reduce_scatter": (backward, cp * pair),
        },
        "a2a": {"all_to_all": (2 * (forward + backward), (sent + heads) * head / 2)},
    }[row["engine"]]
    for kind in ("send", "receive", "all_gather", "reduce_scatter", "all_to_all"):
        count, bytes_each = expected.get(kind, (0, 0))
        size = count * bytes_each + mixers[kind]
        count += mixers[f"{kind}+"]
        records = matching(step.records, kind=kind, group="cp")
        if (len(records), sum(r.bytes for r in records)) != (count, size):
            raise AssertionError(
                f"{len(records)} {kind} over cp, expected {count} of {size} B:\n"
                f"{table(step.records)}"
            )
    counted = (not row["per_token"]) + (row["experts"] is not None)  # tokens, and auxiliary losses
    assert_active(step.records, kind="all_reduce", group="cp", exactly=counted)


def _ties(row: Row, runs: Sequence[Run], number: int) -> None:
    """Assert that the gradient of a weight shared by the first and last stage is reduced once."""
    rows_per_rank = -(-row["vocabulary"] // row["tp"])  # at most, on a rank
    for rank, run in enumerate(runs):
        sums = matching(run.steps[number].records, kind="all_reduce", group="tied")
        tied = _is_shared(row) and row["pp"] > 1 and (run.stage.embedding or run.stage.head)
        tied = tied and rank % row["tp"] * rows_per_rank < row["vocabulary"]
        # A rank whose range of the optimizer state excludes the weight reduces nothing.
        whole = row["placement"] == "no_shard" and row["gtp"] == 1
        allowed = {1} if whole or _dp_size(row) == 1 else {0, 1}
        if len(sums) not in (allowed if tied else {0}):
            raise AssertionError(f"{len(sums)} sums over tied stages, tied is {tied}")
    if _is_shared(row) and row["pp"] > 1:
        everywhere = [record for run in runs for record in run.steps[number].records]
        assert_active(everywhere, kind="all_reduce", group="tied", at_least=2)


def _is_shared(row: Row) -> bool:
    """Return whether the first and the last stage share a weight: MTP layers also use the
    embedding."""
    return row["tied"] or row["predictions"] > 0


def _dp_size(row: Row) -> int:
    """Return the number of ranks with different tokens."""
    return row["gtp"] * row["dp"] * row["cp"]


def _shares(row: Row) -> bool:
    """Return whether several ranks share the weights of one kind, dense or experts."""
    ranks = row["tp"] * _dp_size(row)
    experts = row["experts"] is not None and ranks > row["etp"] * row["ep"]
    return _dp_size(row) > 1 or experts


def _launched(row: Row, run: Run, step: Step) -> None:
    """Assert that blocks are reduced during backward, except unsharded ones without overlap, and
    that buckets over gtp are summed over replicas as soon as their blocks are reduced."""
    cut = row["placement"] in CUT_GRADIENTS
    once = row["reduce_scatter"] == "step"
    cut = [
        b for b in run.buckets if (b.gtp and not once) or (cut and not b.gtp and not b.single_rank)
    ]
    launched = sum(len(bucket.blocks) for bucket in (run.buckets if row["overlap"] else cut))
    if step.launched_in_backward != launched:
        raise AssertionError(
            f"{step.launched_in_backward} blocks reduced during backward, expected {launched}"
        )
    over_replicas = [b for b in run.buckets if b.gtp and b.outer > 1]
    if (
        row["overlap"]
        and len(over_replicas) > 3
        and 2 * step.outer_in_backward < len(over_replicas)
    ):
        raise AssertionError(
            f"{step.outer_in_backward} of {len(over_replicas)} sums over replicas in backward"
        )
    if row["pp"] > 1:
        return  # the number of layers depends on the stage
    if _shares(row) and row["placement"] == CUT_WEIGHTS:  # layers, embedding and head
        units = LAYERS + row["predictions"]
        with_experts = 0 if row["experts"] is None else 1 + row["predictions"]
        least = units + with_experts + 2
        by_unit = len(run.buckets) == least
        if by_unit != (row["granularity"] == "unit") or len(run.buckets) < least:
            raise AssertionError(f"by {row['granularity']}, but there are {len(run.buckets)}")
    elif shards_over_gtp(row):
        if not any(bucket.gtp for bucket in run.buckets):
            raise AssertionError("nothing is sharded over gtp")
    elif (len(run.buckets) > 2) != (row["bucket"] == "small"):
        raise AssertionError(f"{row['bucket']} buckets, but there are {len(run.buckets)}")


def _check_dp_traffic(row: Row, step: Step, *, is_last_step: bool) -> None:
    """Assert the data-parallel traffic by the formula of each bucket; gathers in the last step.

    A per-token loss also sums the number of tokens; the reported loss is summed over
    the world.
    """
    if world_of(row) > 1:
        world_sums = matching(step.records, kind="all_reduce", group="world")[:1]
        assert_active(world_sums, exactly=1, exactly_bytes=8)
    if _dp_size(row) == 1:
        assert_silent(step.records, group="dense_dp")
    if not _shares(row):
        return
    expected = {(t.kind, t.group): (t.count, t.bytes) for t in step.dp_traffic}
    if row["per_token"] and _dp_size(row) > 1:  # the number of tokens, fp32
        count, size = expected.get(("all_reduce", "dense_dp"), (0, 0))
        expected["all_reduce", "dense_dp"] = count + 1, size + 4
    data_groups = ("dense_dp", "expert_dp", "shard", "replicate", "shard_gather")
    groups = {name for group in data_groups for name in (group, f"expert_{group}")}
    groups &= set(GROUP_NAMES)
    if shards_over_gtp(row):
        groups |= {"gtp", "gtp_gather", "dp_cp", "egtp", "egtp_gather", "edp"}
    seen = {(r.kind, r.group) for r in step.records if r.group in groups}
    for kind, group in sorted(seen | expected.keys()):
        early = kind == "all_gather" or group.endswith(
            "_gather"
        )  # these start in the previous step
        if early and not is_last_step:
            continue
        count, size = expected.get((kind, group), (0, 0))
        assert_active(step.records, kind=kind, group=group, exactly=count, exactly_bytes=size)


def _gathers(row: Row, run: Run) -> None:
    """Assert that weights are prefetched if requested, and gathered according to the plan."""
    kinds = [
        [b for b in run.buckets if b.gtp],
        [b for b in run.buckets if not (b.gtp or b.single_rank)],
    ]
    kinds = [kinds[0], kinds[1] if row["placement"] != "no_shard" else []]
    assert len(run.steps[0].gathers) == sum(map(bool, kinds))
    for number, kind in enumerate(filter(None, kinds)):
        early = row["early_gather"] or kind[0].gtp
        after = run.steps[-1].gathers[number]
        if after.mismatches or (after.prefetched > 0) != early:
            raise AssertionError(f"early gathers are {early}, but there were {after}")
        for step in run.steps:
            if (step.in_flight[number] > 0) != early:
                raise AssertionError(f"{step.in_flight} gathers under way after a step")
        before = run.steps[-2].gathers[number]
        if kind[0].gtp:
            _gathers_over_gtp(row, run, kind, before, after)
        else:
            _gathers_of_strategy(row, run, before, after)


def _gathers_over_gtp(
    row: Row, run: Run, buckets: Sequence[BucketSize], before: GatherCounts, after: GatherCounts
) -> None:
    """Assert that all gathers but the first are prefetched, with two weights at a time."""
    gathered = after.gathers - before.gathers
    over = ("gtp_gather", "egtp_gather")
    records = [
        record
        for name in over
        for record in matching(run.steps[-1].records, kind="all_gather", group=name)
    ]
    if len(records) != gathered or after.prefetched - before.prefetched < gathered - 1:
        raise AssertionError(f"{len(records)} gathers over gtp, by the plan {gathered}: {after}")
    blocks = [block for bucket in buckets for block in bucket.blocks]
    encodes = len(blocks) * (row["wire"] != "bf16")
    if row.get("scale_blocks") == "1d":
        encodes += sum(name not in WITHOUT_DGRAD for name in run.over_gtp)
    if after.encodes - before.encodes != encodes:
        raise AssertionError(f"{after} after {before}: {encodes} planes are encoded once a step")
    sizes = [4 * block.numel + size for block in blocks for size in block.encoded or (0,)]
    largest = sum(sorted(sizes)[-2:])
    if not 0 < after.peak_bytes <= largest:
        raise AssertionError(f"{after.peak_bytes} bytes gathered at a time, at most {largest}")


def _gathers_of_strategy(row: Row, run: Run, before: GatherCounts, after: GatherCounts) -> None:
    """Assert the number of gathers of the plan, and its memory budget."""
    gathered = after.gathers - before.gathers
    over = "shard_gather" if row["placement"] == CUT_WEIGHTS else "shard"
    over = "dense_dp" if (over, row["instances"]) == ("shard", 1) else over
    records = run.steps[-1].records
    if row["experts"] is None:
        assert_active(records, kind="all_gather", group=over, exactly=gathered)
    else:  # experts have separate dp groups, where a gather over one rank moves nothing
        of_experts = "expert_dp" if over == "dense_dp" else f"expert_{over}"
        gathers = [r for name in (over, of_experts) for r in matching(records, group=name)]
        if not 0 < len([r for r in gathers if r.kind == "all_gather"]) <= gathered:
            raise AssertionError(f"{gathered} gathers, and not as many collectives")
    if row["placement"] == CUT_WEIGHTS:
        sizes = [4 * b.numel for b in run.buckets]
        kinds = [[b for b in run.buckets if not b.root and b.expert is e] for e in (False, True)]
        root = sum(4 * b.numel for b in run.buckets if b.root)
        largest = sum(max((4 * b.numel for b in kind), default=0) for kind in kinds)
        if not 0 < after.peak_bytes <= root + 2 * largest:
            raise AssertionError(f"{after.peak_bytes} bytes of {sizes} were gathered at a time")
        gathers_per_bucket = gathered / len(
            [bucket for bucket in run.buckets if not bucket.single_rank]
        )
        if not 1.0 <= gathers_per_bucket <= 3.0 * row["accumulation"]:
            raise AssertionError(f"a bucket was gathered {gathers_per_bucket} times in a step")


def _all_reduces_in_regions(row: Row, stage: StageBlocks) -> int:
    """Return the number of a rank's all-reduces over tp in all microbatches: a maximum and a sum
    per loss, and without sequence parallelism one per end of a region, in forward, backward and
    recomputation.

    Latent attention has three regions: for queries, for keys and values, for rotary features.
    """
    if row["tp"] == 1:
        return 0
    whole, latent = _regions(stage), stage.latent
    ends = 2 * whole.count + whole.again + 4 * latent.count + latent.again
    ends += stage.embeddings + stage.heads
    count = 2 * stage.heads + (0 if row["sequence_parallel"] else ends)
    if row["mixer"] == "mamba" and (row["norm_groups"] or row["mamba_groups"]) < row["tp"]:
        # Squares of a norm that is sharded over ranks, in forward and in backward.
        count += 2 * stage.recurrent.count + stage.recurrent.again
    if row["qk_norm"] == "projection":  # squares of queries and keys, forward and backward
        count += 2 * stage.attentions.count + stage.attentions.again
    return count * row["accumulation"]


def _regions(stage: StageBlocks) -> Blocks:
    """Return the tensor-parallel regions with one entry and one end, including shared experts."""
    count = stage.plain.count + stage.shared.count
    return Blocks(count, stage.plain.again + stage.shared.again)


def _in_regions(row: Row, stage: StageBlocks, step: Step) -> None:
    """Assert the tp traffic of one region per block, and one at each end of the model.

    With sequence parallelism, entering a region gathers (in backward once more, for the weight's
    gradient) and leaving it scatters; in backward the reverse. A recomputed region repeats both.
    Without sequence parallelism, ranks split the rows of experts, and gather the outputs.
    """
    whole, latent, experts = _regions(stage), stage.latent, stage.experts
    ends = stage.embeddings + stage.heads
    gathers = 3 * whole.count + whole.again + 6 * latent.count + 3 * latent.again + ends
    scatters = 2 * whole.count + whole.again + 4 * latent.count + latent.again + ends
    if not row["sequence_parallel"]:
        gathers, scatters = 2 * experts.count + experts.again, 0
    for kind, count in (("all_gather", gathers), ("reduce_scatter", scatters)):
        exactly = count * row["accumulation"]
        assert_active(step.records, kind=kind, group="tp", exactly=exactly)


def _once_a_step(row: Row, runs: Sequence[Run], number: int, *, group: str, expected: bool) -> None:
    """Assert one additional all-reduce on `group`, of gradients that are partial on its ranks.

    With weights sharded over gtp it may be two: one of shards and one of replicated gradients.
    A rank whose gradient shard or stage has no partial gradient runs none, but some rank must.
    """
    beyond = [_all_reduces_in_regions(row, run.stage) if group == "tp" else 0 for run in runs]
    for run, before in zip(runs, beyond, strict=True):
        records = run.steps[number].records
        extra = len(matching(records, kind="all_reduce", group=group)) - before
        everywhere = row["placement"] == "no_shard" and row["pp"] * row["gtp"] == 1
        allowed = {int(expected)} if everywhere else {0, int(expected)}
        if expected and shards_over_gtp(row):
            allowed.add(2)
        if extra not in allowed:
            raise AssertionError(
                f"{extra} gradient sums over {group}, expected {allowed}:\n{table(records)}"
            )
    if expected:
        records = [record for run in runs for record in run.steps[number].records]
        assert_active(records, kind="all_reduce", group=group, at_least=sum(beyond) + 1)
