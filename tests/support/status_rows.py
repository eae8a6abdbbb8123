# SPDX-License-Identifier: Apache-2.0
"""The rows and columns of docs/status.md: the claims of tests, and the cells of a training step.

A test claims a feature with `@pytest.mark.covers("…")`, a name of `CLAIMS`. It does not claim the
layouts: `coverage_recorder` records the layouts that the test trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A layout that trained, or generated.

    Args:
        world, tp, cp, pp, dp: sizes of the grid.
        ep, etp: expert parallel sizes; 1 for a model without experts.
        schedule: pipeline schedule; "" without a pipeline.
        strategy: a name of `STRATEGIES`; "" if a single rank had nothing to shard.
        settings: names of `SETTINGS`.
        did: other actions of the run: "saves", "async", "loads", "replays", "generates".
    """

    world: int
    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int
    sequence_parallel: bool
    schedule: str
    strategy: str
    settings: tuple[str, ...] = ()
    did: tuple[str, ...] = ()

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Ran:
        """Return the layout of a line of the coverage recorder."""
        lists = {name: tuple(fields[name]) for name in ("settings", "did")}
        return Ran(**{**fields, **lists})

    def fits(self, runs: str) -> bool:
        """Return whether the layout satisfies all words of a claim's `runs`.

        Words are the names of `did`, "alone" (one process) and "ranks" (several processes).
        """
        words = {*self.did, "alone" if self.world == 1 else "ranks"}
        return set(runs.split()) <= words


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A feature that tests may claim.

    Args:
        says: description for the page.
        numbers: the test compares the numbers of training with a reference, so the settings of the
            runs count as well.
        needs: the feature needs several processes, so a single process has no cell.
    """

    says: str
    numbers: bool = False
    needs: bool = False


CLAIMS: Mapping[str, Claim] = {
    "numbers of one process": Claim(
        says="losses, and in most tests every gradient and weight, equal those of one process",
        numbers=True,
        needs=True,
    ),
    "numbers of a definition": Claim(
        says="the same against an independent model in plain torch, or a text kept here",
        numbers=True,
    ),
    "numbers of eager steps": Claim(
        says="steps replayed from a recording equal those launched one by one, to the bit",
        numbers=True,
    ),
    "resumed to the same bits": Claim(
        says="saved, ended and started again: every tensor and number is that of a whole run",
        numbers=True,
    ),
    "killed and resumed to the same bits": Claim(
        says="the same behind SIGKILL at any point", numbers=True
    ),
    "resumed on another layout": Claim(
        says="a checkpoint of other ranks goes on with the losses of a whole run", numbers=True
    ),
    "saved asynchronously": Claim(says="training goes on while a checkpoint is written"),
    "retention": Claim(says="old checkpoints go, never one that is read or the newest good one"),
    "stopped with a save": Claim(says="a signal, Ctrl-C or a time limit ends all ranks in order"),
    "bad step computed again": Claim(
        says="NaN, Inf, spikes and flipped bits: computed again and used, or skipped, exit 16 or 17"
    ),
    "replica digests": Claim(says="weights that differ between replicas are found"),
    "dead or stuck rank named": Claim(
        says="rank, step, collective and stacks are told", needs=True
    ),
    "slow rank named": Claim(says="the log names it", needs=True),
    "elastic restart": Claim(says="the launcher starts again, also with fewer ranks", needs=True),
    "fine-tuning on chats": Claim(says="packed conversations learn the same", numbers=True),
    "Hugging Face": Claim(says="trained from a folder, or exported to one, with equal numbers"),
    "upcycled experts": Claim(says="a dense checkpoint trains on with experts"),
    "generation": Claim(says="tokens equal those of the whole model run anew"),
}

#: What steps are made of, as `settings_seen` names it; those that need several processes.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "numbers": (
        "fp32", "bf16", "fp16", "loss scale", "mean loss", "loss per token",
        "accumulated microbatches", "uneven batch", "packed documents",
    ),
    "optimizer": (
        "AdamW", "SGD", "Muon", "moments in bf16", "state in host memory", "factors by weight name",
    ),
    "data parallel": (
        "reduce overlapped", "reduce at the end", "gather overlapped", "gather by weight",
        "state cut over instances too", "bf16 gradients summed in fp32",
    ),
    "memory": ("full recompute", "selective recompute", "replayed graph (stand-in)"),
    "model": (
        "dropout", "RMSNorm", "LayerNorm", "tied embedding", "own head", "gated MLP", "plain MLP",
        "biases", "q/k/v biases", "no positions", "scaled rope", "multi-token prediction",
    ),
    "attention": (
        "every head its own kv", "grouped queries", "fewer kv heads than tp", "q/k norm", "window",
        "sinks", "latent attention", "context by ring", "context by all-gather",
        "context by all-to-all", "output gate",
    ),
    "recurrence": (
        "gated delta net", "Mamba-2", "fewer groups than tp", "norm over several ranks",
        "recurrence by heads", "recurrence by segments",
    ),
    "experts": (
        "softmax router", "sigmoid router", "losses of routers", "balance by biases",
        "dropless experts", "capacity by probs", "capacity by position", "shared expert",
        "gated shared expert", "tokens by all-to-all", "tokens by all-gather",
    ),
}  # fmt: skip

STRATEGIES: Mapping[str, str] = {
    "no_shard": "every rank keeps all",
    "optim": "optimizer state cut (ZeRO-1)",
    "optim_grads": "and gradients (ZeRO-2)",
    "optim_grads_params": "and weights (ZeRO-3)",
    "hybrid": "any of these inside instances, repeated or cut over them",
}

#: The columns. A step counts in every one that holds of its grid, whatever else is cut as well.
GRIDS: Mapping[str, Callable[[Ran], bool]] = {
    "1": lambda r: r.world == 1,
    "dp": lambda r: r.dp > 1,
    "tp": lambda r: r.tp > 1 and not r.sequence_parallel,
    "tp sp": lambda r: r.tp > 1 and r.sequence_parallel,
    "cp": lambda r: r.cp > 1,
    "1f1b": lambda r: r.schedule == "1f1b",
    "interl.": lambda r: r.schedule == "interleaved",
    "zb-h1": lambda r: r.schedule == "zb-h1",
    "ep": lambda r: r.ep > 1,
    "etp": lambda r: r.etp > 1,
    "tp dp": lambda r: r.tp > 1 and r.dp > 1,
    "cp dp": lambda r: r.cp > 1 and r.dp > 1,
    "pp dp": lambda r: r.pp > 1 and r.dp > 1,
    "tp cp": lambda r: r.tp > 1 and r.cp > 1,
    "tp pp": lambda r: r.tp > 1 and r.pp > 1,
    "cp pp": lambda r: r.cp > 1 and r.pp > 1,
    "tp ep": lambda r: r.tp > 1 and r.ep > 1,
    "cp ep": lambda r: r.cp > 1 and r.ep > 1,
    "pp ep": lambda r: r.pp > 1 and r.ep > 1,
    "3 axes": lambda r: sum(n > 1 for n in (r.tp, r.cp, r.pp, r.dp)) >= 3,
}

_PIPELINES = ("1f1b", "interl.", "zb-h1", "pp dp", "tp pp", "cp pp", "pp ep")
_CONTEXTS = ("context by ring", "context by all-gather", "context by all-to-all")
_MULTI_RANK_ROWS = (
    "reduce overlapped", "reduce at the end", "gather overlapped", "gather by weight",
    "state cut over instances too", "bf16 gradients summed in fp32", "fewer kv heads than tp",
    "replica digests", "fewer groups than tp", "norm over several ranks",
    "recurrence by heads", "recurrence by segments",
    *_CONTEXTS, "tokens by all-to-all", "tokens by all-gather",
    *(name for name, claim in CLAIMS.items() if claim.needs),
)  # fmt: skip
_SHARDED = tuple(name for name in STRATEGIES if name != "no_shard")
_GATHERED = ("gather overlapped", "gather by weight", "state cut over instances too")


@dataclass(frozen=True)
class Impossible:
    """Cells that are impossible; None stands for all.

    Args:
        why: the reason.
        strategies, rows, grids: names of the impossible cells.
    """

    why: str
    strategies: tuple[str, ...] | None = None
    rows: tuple[str, ...] | None = None
    grids: tuple[str, ...] | None = None

    def holds(self, strategy: str, row: str, grid: str) -> bool:
        """Return whether a cell is impossible for this reason."""
        constraints = ((self.strategies, strategy), (self.rows, row), (self.grids, grid))
        return all(names is None or name in names for names, name in constraints)


IMPOSSIBLE = (
    Impossible("one process has nothing to cut", strategies=_SHARDED, grids=("1",)),
    Impossible(
        "ranks are compared with one process, and that with the definition",
        rows=("numbers of a definition",),
        grids=tuple(name for name in GRIDS if name != "1"),
    ),
    Impossible("it is about several processes", rows=_MULTI_RANK_ROWS, grids=("1",)),
    Impossible("nothing is gathered", strategies=("no_shard",), rows=_GATHERED),
    Impossible(
        "bf16 gradients are summed in fp32 where they are reduce-scattered",
        strategies=("no_shard",),
        rows=("bf16 gradients summed in fp32",),
    ),
    Impossible(
        "gathers by weight, and state cut over instances too, are for cut weights",
        strategies=("optim", "optim_grads"),
        rows=("gather by weight",),
    ),
    Impossible(
        "state is cut over instances only where there are some",
        strategies=("optim", "optim_grads", "optim_grads_params"),
        rows=("state cut over instances too",),
    ),
    Impossible(
        "sends and receives between stages are not recorded (refused)",
        rows=("numbers of eager steps", "replayed graph (stand-in)"),
        grids=_PIPELINES,
    ),
    Impossible("weights are whole in generation", strategies=_SHARDED, rows=("generation",)),
    Impossible(
        "generation has no context parallelism (refused), and its stages follow no schedule",
        rows=("generation",),
        grids=("cp", "1f1b", "interl.", "zb-h1", "cp dp", "tp cp", "cp pp", "cp ep"),
    ),
)


def reason(strategy: str, row: str, grid: str) -> str | None:
    """Return why a cell cannot be, or None."""
    return next((i.why for i in IMPOSSIBLE if i.holds(strategy, row, grid)), None)


def all_settings() -> tuple[str, ...]:
    """Return the names of all settings, in order."""
    return tuple(name for names in SETTINGS.values() for name in names)
