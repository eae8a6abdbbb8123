# SPDX-License-Identifier: Apache-2.0
"""Inputs that can see a bug: different on every dp_rank, with weights off their initial values.

Equal data on all lanes hides a missing reduction; an even loss mask hides a wrong token count; a
norm weight of one and a bias of zero hide a missing factor or term; equal sizes hide a swapped
dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.models.gpt import MTPTargets


@dataclass(frozen=True)
class Microbatch:
    """One dp_rank's microbatch: tokens, labels [b, s] int64; loss_mask [b, s] fp32; sample_ids [b];
    positions and document_ids [b, s] of packed rows; what multi-token prediction reads and
    predicts, if anything; its share of the step's samples, if they are not divided evenly."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    sample_ids: torch.Tensor
    positions: torch.Tensor | None = field(default=None, kw_only=True)
    document_ids: torch.Tensor | None = field(default=None, kw_only=True)
    mtp_targets: MTPTargets | None = field(default=None, kw_only=True)
    share: float | None = field(default=None, kw_only=True)

    @cached_property
    def layout(self) -> SequenceLayout:
        """The layout of whole rows for training."""
        return SequenceLayout.of_rows(
            self.tokens.shape[1],
            positions=self.positions,
            document_ids=self.document_ids,
            sample_ids=self.sample_ids,
            device=self.tokens.device,
        )

    @property
    def without_dropout(self) -> SequenceLayout:
        """The layout for evaluation."""
        return self.layout.with_samples(None)

    def to(self, device: torch.device) -> Microbatch:
        """Return the microbatch on a device."""
        if device.type == "cpu":
            return self
        mtp_targets = self.mtp_targets
        if mtp_targets is not None:
            mtp_targets = MTPTargets(**_on(device, vars(mtp_targets)))
        return replace(self, mtp_targets=mtp_targets, **_on(device, vars(self)))

    def mtp_arguments(self, factor: torch.Tensor) -> dict[str, MTPTargets]:
        """Return the MTP targets with token losses weighted by a factor, as keyword arguments."""
        return {} if self.mtp_targets is None else {"mtp_targets": self.mtp_targets.scaled(factor)}


def _on(device: torch.device, fields: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the tensor fields, moved to a device."""
    return {n: v.to(device) for n, v in fields.items() if isinstance(v, torch.Tensor)}


def generator(*key: int) -> torch.Generator:
    """Return a generator whose stream is a function of all numbers of `key`."""
    seed = 0x9E3779B97F4A7C15
    for number in key:
        seed = (seed ^ (number + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9 % 2**63
    return torch.Generator().manual_seed(seed)


def microbatch(
    *, seed: int, dp_rank: int, index: int, batch: int, sequence: int, vocabulary: int
) -> Microbatch:
    """Make microbatch `index` of a data-parallel rank, with distinct tokens and token counts.

    The loss mask drops between a tenth and a half of the tokens. Later ranks and microbatches drop
    more.
    """
    source = generator(seed, dp_rank, index)
    text = torch.randint(0, vocabulary, (batch, sequence + 1), generator=source)
    dropped = min(0.5, 0.1 + 0.13 * dp_rank + 0.07 * index)
    mask = (torch.rand(batch, sequence, generator=source) >= dropped).float()
    mask[0, dp_rank % sequence] = 1.0
    ids = torch.arange(batch) + batch * (dp_rank + 1000 * index)
    return Microbatch(text[:, :-1].clone(), text[:, 1:].clone(), mask, ids)


def perturbed(
    weights: Mapping[str, torch.Tensor], *, seed: int, scale: float = 0.1
) -> dict[str, torch.Tensor]:
    """Return the weights, each moved by normal noise that is a function of (seed, name).

    Meant for logical, unsharded weights: every layout then starts from equal, uneven values.
    """
    moved = {}
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator(seed, *name.encode()))
        moved[name] = weight.detach() + scale * noise.to(weight.dtype)
    return moved


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread: small tensors are faster so, and sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
