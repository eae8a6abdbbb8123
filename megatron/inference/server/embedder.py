# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts: the final hidden states of a model, pooled as its folder says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference.stages import PipelineGroups, StageLink
from megatron.core.models.gpt import GPTModel
from megatron.core.untrusted_files import read_json


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How the hidden states of a text become one vector.

    Args:
        tokens: the mean of all, or the last one.
        normalize: to a length of 1.
    """

    tokens: Literal["mean", "last"]
    normalize: bool


class NoPooling(Exception):
    """A folder does not say how its model embeds texts, or says what is not done here; the text
    is one line for the user."""


def read_pooling(folder: Path) -> Pooling:
    """Read what sentence-transformers writes to a folder: `modules.json`, and the configuration of
    its module of pooling.

    Raises:
        NoPooling: there is none, or it is of another kind.
    """
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise NoPooling("modules.json of the model's folder is no list of modules")
    kinds = [str(one.get("type", "")).rsplit(".", 1)[-1] for one in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise NoPooling(f"modules.json of the model's folder has {', '.join(kinds)[:100]}")
    path = modules[1].get("path")
    if not isinstance(path, str) or Path(path).name != path:
        raise NoPooling("modules.json of the model's folder names no folder for its Pooling")
    config = _read(folder / path / "config.json")
    if not isinstance(config, dict):
        raise NoPooling("the configuration of Pooling is no object")
    named = config.get("pooling_mode", [])
    given = {named} if isinstance(named, str) else set(map(str, named))
    given |= {key for key, value in config.items() if value is True and "_mode_" in key}
    known: dict[str, Literal["mean", "last"]] = {
        "mean": "mean",
        "pooling_mode_mean_tokens": "mean",
        "lasttoken": "last",
        "pooling_mode_lasttoken": "last",
    }
    if len(given) != 1 or not given <= known.keys():
        raise NoPooling(
            f"the model's folder pools by {', '.join(sorted(given))[:100] or 'nothing'}"
        )
    return Pooling(tokens=known[given.pop()], normalize=kinds[-1] == "Normalize")


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except OSError:
        raise NoPooling(f"the model's folder has no {path.name} of sentence-transformers") from None


class Embedder:
    """Embed texts by one forward pass of all of their tokens.

    Args:
        model: all of it, or a rank's part; all ranks call alike.
        pooling: of its hidden states.
        device: of the model.
        max_tokens: of a forward pass, padding included.
        token_multiple: what a row's tokens are padded to a multiple of.
        link: to the other pipeline stages; None for a single one.
    """

    def __init__(
        self,
        model: GPTModel,
        pooling: Pooling,
        device: torch.device,
        *,
        max_tokens: int,
        token_multiple: int = 1,
        link: StageLink | None = None,
    ) -> None:
        single = PipelineGroups.single()
        self._link = link or StageLink(single, dtype=torch.float32, device=device)
        self._model, self._pooling, self._device = model, pooling, device
        self.max_tokens, self._multiple = max_tokens, token_multiple

    def batch(self, lengths: Sequence[int]) -> int:
        """Return how many of the first texts one forward pass takes, at least one."""
        count = 1
        while count < len(lengths) and max(lengths[: count + 1]) * (count + 1) <= self.max_tokens:
            count += 1
        return count

    @torch.no_grad()
    def __call__(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the vector of each text, given as its tokens.

        A row is padded at its end, where no token of the text attends to.
        """
        lengths = [len(text) for text in texts]
        longest = -(-max(lengths) // self._multiple) * self._multiple
        rows = [[*text, *[0] * (longest - len(text))] for text in texts]
        tokens = torch.tensor(rows, device=self._device)  # [b, s]
        layout = SequenceLayout.of_rows(longest, device=self._device)
        before, link = {}, self._link
        if not link.is_first:
            before["hidden_states"] = link.receive_hidden(self._model.boundary_shape(tokens))
        hidden = self._model(tokens, layout=layout, **before)  # [s, b, h], or [s/tp, b, h]
        if link.is_last:
            found = self._pooled(hidden, lengths)
            sends = link.send_results(found.flatten()) if link.count > 1 else ()
        else:
            count = len(texts) * self._model.config.hidden_size
            results, sends = link.expect_results(count), link.send_hidden(hidden)
            found = link.wait(results).view(len(texts), -1)
        for pending in sends:
            link.wait(pending)
        return found.tolist()

    def _pooled(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return the vector of each row of final hidden states, fp64 [b, h]."""
        hidden = self._model.head.gathered(hidden).float()  # [s, b, h]
        found = []
        for row, length in enumerate(lengths):
            states = hidden[:length, row]  # [length, h]
            vector = states.mean(0) if self._pooling.tokens == "mean" else states[-1]
            if self._pooling.normalize:
                vector = torch.nn.functional.normalize(vector, dim=0)
            found.append(vector)
        return torch.stack(found).double()
