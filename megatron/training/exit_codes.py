# SPDX-License-Identifier: Apache-2.0
"""The exit codes of the entry points, in one table.

Each rank exits with its own code; torchrun itself exits with 1 whenever any rank did not exit
with 0 and shows the rank's code in its summary.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a process ended."""

    OK = 0
    """The run reached its end, or an exit condition that was asked for."""
    CRASH = 1
    """An error nobody foresaw; a traceback was printed."""
    USER_ERROR = 2
    """Bad flag, file, layout or checkpoint; one line says what and how to mend it."""
    BAD_STEPS = 3
    """Too many steps in a row had a NaN or Inf loss or gradient norm
    (--max-consecutive-bad-steps)."""
    PEER_LOST = 4
    """Another rank died, stopped, fell silent or never came; one line names it."""
    SAVE_FAILED = 5
    """A checkpoint could not be written; earlier checkpoints are untouched."""
    COLLECTIVES_DIFFER = 6
    """Ranks came to different collectives (--check-collectives); one line names both."""
    REPLICAS_DIFFER = 7
    """Ranks that hold the same weights or optimizer state do not any more
    (--check-weight-hash-across-dp-replicas-interval); one line names ranks and tensors, nothing was
    saved."""
    LAUNCHER_LOST = 8
    """The launcher that started the processes, or its store, is gone (torchrun was killed): all
    ranks saved, if they could, and stopped. Start the same command again."""
    RESTART_ELSEWHERE = 16
    """A step was suspicious twice (--on-reproduced-fault restart): restart on other machines, where
    the same step shows whether the machine or the data is to blame. Or a rank is on a machine that
    has been found to compute wrongly."""
    FAILED_VALIDATION = 17
    """That step is suspicious on other machines too: the data or the settings are to blame."""
    HUNG_UP = 129
    """SIGHUP ended the process at once."""
    INTERRUPTED = 130
    """Ctrl-C ended the process at once."""
    USER_SIGNAL_1 = 138
    """SIGUSR1 (--exit-signal) ended the process at once."""
    USER_SIGNAL_2 = 140
    """SIGUSR2 (--exit-signal) ended the process at once."""
    OUTPUT_CLOSED = 141
    """A command's stdout was closed by who reads it, as in a pipe to head, before it was done."""
    TERMINATED = 143
    """SIGTERM ended the process at once."""
