# SPDX-License-Identifier: Apache-2.0
"""The comparison of replicas in a session: what is compared, and what is told of a difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.core.dist_checkpointing import optimizer_chunks, weight_chunks
from megatron.training.failures.fault_log import FaultRecord
from megatron.training.failures.replica_check import Difference, ReplicaCheck
from megatron.training.failures.session_faults import fault_log, host_names
from megatron.training.monitoring.metrics import Metrics
from megatron.training.session import Session


def compare_replicas(
    session: Session, *, say: Callable[[str], None], metrics: Metrics
) -> Callable[[int], None]:
    """Return what compares replicas behind a step, if the options ask for that, and say so.

    Args:
        say: shows one line.
        metrics: where a difference is kept.
    """
    interval = session.run.config.failures.check_weight_hash_across_dp_replicas_interval
    if interval is None:
        return lambda iteration: None
    place = session.place

    log, host_of = fault_log(session, say=say, metrics=metrics), host_names(session)

    def record(iteration: int, found: Sequence[Difference]) -> None:
        tensors = [name for one in found for name in one.tensors]
        log.add(
            FaultRecord(
                iteration,
                "replicas",
                "persistent" if all(one.is_clear for one in found) else "undecided",
                {rank: host_of(rank) for one in found for rank in one.blamed},
                tensors=tensors,
                numbers={"tensors": float(len(tensors))},
            )
        )

    check = ReplicaCheck(
        lambda: weight_chunks(session.model.store) + optimizer_chunks(session.optimizer),
        place.groups["world"],
        device=place.device,
        coordinator=place.coordinator,
        host_of=host_of,
        complete=session.step.engine.complete_weights,
        record=record,
    )
    say(check.line(interval))
    return check
