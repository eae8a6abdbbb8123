# SPDX-License-Identifier: Apache-2.0
"""What a run does about a step that went wrong: report, go on, roll back, or stop with a code.

Every rank calls it with the same outcome, so all of them do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.training.config import Config
from megatron.training.errors import RunStopped
from megatron.training.exit_codes import ExitCode
from megatron.training.failures.bad_steps import doubt_text, where_text
from megatron.training.failures.fault_log import FaultLog, FaultRecord
from megatron.training.failures.suspect_step import Suspect
from megatron.training.monitoring.step_window import StepOutcome
from megatron.training.progress_state import Progress


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Decisions about bad steps.

    Args:
        config: what the user wants done.
        say: shows one line.
        log: keeps faults.
        host_of: returns the machine of a rank.
        save: writes a checkpoint of the current progress; None without --save.
        judge: returns how a run with a suspect step ends, the same on every rank.
        acquit: called with every sound step and its loss.
        roll_back: loads the last checkpoint's weights and returns its progress; None if there is
            none.
    """

    config: Config
    say: Callable[[str], None]
    log: FaultLog
    host_of: Callable[[int], str]
    save: Callable[[Progress], object] | None = None
    judge: Callable[[Suspect], RunStopped] | None = None
    acquit: Callable[[int, float], None] = lambda iteration, loss: None
    roll_back: Callable[[], Progress | None] = lambda: None

    def after_step(self, progress: Progress, outcome: StepOutcome, limit: float) -> None:
        """Look at a step before it is counted.

        Args:
            limit: of the loss.

        Raises:
            RunStopped: it is suspicious every time, and other machines shall say why.
        """
        iteration, doubt = progress.iteration + 1, outcome.doubt
        if doubt is None:
            self.acquit(iteration, outcome.loss)
            return
        hosts = {rank: self.host_of(rank) for rank in doubt.ranks}
        wants = self.config.failures.on_reproduced_fault == "restart"
        judge = self.judge if wants and doubt.verdict == "reproduced" else None
        where, stops = where_text(hosts), judge is not None
        self.say(doubt_text(iteration, doubt, where, limit=limit, stops=stops))
        numbers = {"loss": doubt.values[0], "limit": limit} if doubt.kind == "spike" else {}
        self.log.add(
            FaultRecord(
                iteration, doubt.kind, doubt.verdict, hosts, values=doubt.values, numbers=numbers
            )
        )
        if doubt.verdict == "transient":
            self.acquit(iteration, outcome.loss)
        if judge is None:
            return
        if self.save is not None:
            self.save(progress)  # of the state before this step
        named = {str(rank): host for rank, host in hosts.items()}
        raise judge(Suspect(iteration, named, doubt.kind, doubt.values))

    def after_count(self, progress: Progress, outcome: StepOutcome) -> None:
        """Look at the number of bad steps in a row.

        Raises:
            RunStopped: it is too high.
        """
        bad = progress.consecutive_bad_steps
        last = f"(last loss {outcome.loss}, gradient norm {outcome.grad_norm})"
        limit = self.config.training.max_consecutive_bad_steps
        if bad >= limit:
            what = "a NaN or Inf loss or gradient norm" + (" or a spike" if outcome.spiked else "")
            raise RunStopped(
                ExitCode.BAD_STEPS,
                f"stopped at iteration {progress.iteration}: {limit} steps in a row had {what} "
                f"{last}; none of them changed a weight; lower --lr or look at the data, and "
                "resume from the last checkpoint",
            )
        if bad and bad == self.config.failures.rollback_after_bad_steps:
            self._roll_back(progress, last)

    def _roll_back(self, progress: Progress, last: str) -> None:
        """Take weights and optimizer back; the position in the data stays behind the bad steps.

        Raises:
            RunStopped: there is no checkpoint.
        """
        back = self.roll_back()
        if back is None:
            raise RunStopped(
                ExitCode.BAD_STEPS,
                f"stopped at iteration {progress.iteration}: {progress.consecutive_bad_steps} bad "
                f"steps in a row {last}, and there is no checkpoint to roll back to yet: lower "
                "--save-interval",
            )
        progress.update_samples = back.update_samples
        progress.recent_losses = list(back.recent_losses)
        progress.rollbacks += 1
        self.say(
            f"iteration {progress.iteration}: {progress.consecutive_bad_steps} bad steps in a row "
            f"{last}: rolled back to the weights of iteration {back.iteration}, going on with the "
            f"data behind sample {progress.consumed_samples:,}"
        )
        self.log.event(progress.iteration, {"rolled_back_to": float(back.iteration)})
