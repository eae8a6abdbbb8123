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
    "matches a single process": Claim(
        says="losses, and in most tests all gradients and weights, match a single process",
        numbers=True,
        needs=True,
    ),
    "matches a reference model": Claim(
        says="the same against an independent model in plain torch, or against recorded losses",
        numbers=True,
    ),
    "graph replay matches eager": Claim(
        says="steps replayed from a graph are bit-identical to eager steps",
        numbers=True,
    ),
    "bit-identical resume": Claim(
        says="after a save and a restart, all tensors and logged values equal an uninterrupted run",
        numbers=True,
    ),
    "bit-identical resume after SIGKILL": Claim(
        says="the same after SIGKILL at any point", numbers=True
    ),
    "resume on another layout": Claim(
        says="a run with other ranks resumes with the losses of an uninterrupted run", numbers=True
    ),
    "asynchronous save": Claim(says="training continues while a checkpoint is written"),
    "checkpoint retention": Claim(
        says=("old checkpoints are removed, except the newest good one and checkpoints in use")
    ),
    "graceful stop with a save": Claim(
        says=("a signal, Ctrl-C or a time limit stops all ranks after the same step")
    ),
    "recomputed bad steps": Claim(
        says=(
            "a step with NaN, Inf, a spike or flipped bits is computed again, then "
            "used or skipped; exit codes 16 and 17"
        )
    ),
    "replica check": Claim(says="weights that differ between replicas are detected"),
    "hang diagnosis": Claim(
        says="the report names rank, step and collective, with stacks", needs=True
    ),
    "straggler detection": Claim(says="the log names the slow rank", needs=True),
    "elastic restart": Claim(
        says="the launcher restarts the run, also with fewer ranks", needs=True
    ),
    "fine-tuning on chats": Claim(
        says="training on packed conversations matches separate conversations", numbers=True
    ),
    "Hugging Face": Claim(
        says=(
            "training from a Hugging Face folder, or export to one, with matching losses or logits"
        )
    ),
    "upcycling": Claim(says="a dense checkpoint is converted to experts and trained"),
    "generation": Claim(says="generated tokens equal a full recomputation"),
}

#: What steps are made of, as `settings_seen` names it; those that need several processes.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "numbers": (
        "fp32", "bf16", "fp16", "loss scale", "mean loss", "per-token loss",
        "gradient accumulation", "uneven batch", "packed documents",
    ),
    "optimizer": (
        "AdamW", "SGD", "Muon", "moments in bf16", "optimizer CPU offload",
        "per-weight lr and wd factors",
    ),
    "data parallel": (
        "overlapped grad reduce", "grad reduce at the end", "overlapped param gather",
        "param gather per weight",
        "state sharded over instances", "bf16 gradients summed in fp32",
    ),
    "memory": ("full recompute", "selective recompute", "CUDA graph (stand-in)"),
    "model": (
        "dropout", "RMSNorm", "LayerNorm", "tied embedding", "untied head", "gated MLP",
        "plain MLP",
        "biases", "q/k/v biases", "no positions", "scaled rope", "multi-token prediction",
    ),
    "attention": (
        "multi-head attention", "grouped-query attention", "fewer kv heads than tp", "q/k norm",
        "sliding window",
        "attention sinks", "latent attention", "ring attention", "context all-gather",
        "context all-to-all", "attention output gate",
    ),
    "recurrence": (
        "gated delta net", "Mamba-2", "fewer groups than tp", "norm over several ranks",
        "headwise recurrence", "segmented recurrence",
    ),
    "experts": (
        "softmax router", "sigmoid router", "router losses", "expert bias balancing",
        "dropless experts", "drop policy probs", "drop policy position", "shared expert",
        "gated shared expert", "all-to-all dispatcher", "all-gather dispatcher",
    ),
}  # fmt: skip

STRATEGIES: Mapping[str, str] = {
    "no_shard": "every rank stores everything",
    "optim": "optimizer state is sharded (ZeRO-1)",
    "optim_grads": "optimizer state and gradients are sharded (ZeRO-2)",
    "optim_grads_params": "optimizer state, gradients and weights are sharded (ZeRO-3)",
    "hybrid": "any of these within an instance; instances replicate, or also shard, the state",
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
_CONTEXTS = ("ring attention", "context all-gather", "context all-to-all")
_MULTI_RANK_ROWS = (
    "overlapped grad reduce", "grad reduce at the end", "overlapped param gather",
    "param gather per weight",
    "state sharded over instances", "bf16 gradients summed in fp32", "fewer kv heads than tp",
    "replica check", "fewer groups than tp", "norm over several ranks",
    "headwise recurrence", "segmented recurrence",
    *_CONTEXTS, "all-to-all dispatcher", "all-gather dispatcher",
    *(name for name, claim in CLAIMS.items() if claim.needs),
)  # fmt: skip
_SHARDED = tuple(name for name in STRATEGIES if name != "no_shard")
_GATHERED = ("overlapped param gather", "param gather per weight", "state sharded over instances")


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
    Impossible("one process shards nothing", strategies=_SHARDED, grids=("1",)),
    Impossible(
        "several ranks are compared with a single process, and the single process"
        " with the reference model",
        rows=("matches a reference model",),
        grids=tuple(name for name in GRIDS if name != "1"),
    ),
    Impossible("the feature needs several processes", rows=_MULTI_RANK_ROWS, grids=("1",)),
    Impossible("nothing is gathered", strategies=("no_shard",), rows=_GATHERED),
    Impossible(
        "bf16 gradients are summed in fp32 where they are reduce-scattered",
        strategies=("no_shard",),
        rows=("bf16 gradients summed in fp32",),
    ),
    Impossible(
        "param gather per weight needs sharded weights",
        strategies=("optim", "optim_grads"),
        rows=("param gather per weight",),
    ),
    Impossible(
        "state is sharded over instances only if there are instances",
        strategies=("optim", "optim_grads", "optim_grads_params"),
        rows=("state sharded over instances",),
    ),
    Impossible(
        "sends and receives between stages cannot be captured (refused)",
        rows=("graph replay matches eager", "CUDA graph (stand-in)"),
        grids=_PIPELINES,
    ),
    Impossible(
        "generation does not shard weights over data-parallel ranks",
        strategies=_SHARDED,
        rows=("generation",),
    ),
    Impossible(
        "generation has no context parallelism (refused) and no pipeline schedule",
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
