# SPDX-License-Identifier: Apache-2.0
"""Embeddings and class outputs of texts: the final hidden states of a model, pooled by its
sentence-transformers configuration, or pooled at the last token and multiplied by the model's
classification head."""

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
    """How the hidden states of a text are pooled into one vector.

    Args:
        tokens: pool by the mean over all tokens, or take the last token.
        normalize: whether to normalize the vector to length 1.
        padding_token: id of a token that is skipped at the end of a text; None for none.
    """

    tokens: Literal["mean", "last"]
    normalize: bool
    padding_token: int | None = None

    def index_of(self, text: Sequence[int]) -> int:
        """Return the index of the last token that is not padding; 0 if there is none."""
        return max((i for i, token in enumerate(text) if token != self.padding_token), default=0)


class NoPooling(Exception):
    """A folder has no supported pooling configuration; the text is one line for the user."""


def read_pooling(folder: Path) -> Pooling:
    """Read the files of sentence-transformers in a folder: `modules.json` and the configuration of
    its Pooling module.

    Raises:
        NoPooling: the files are missing, or the kind of pooling is not supported.
    """
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise NoPooling("modules.json of the model's folder is not a list of modules")
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise NoPooling(
            f"modules.json of the model's folder lists the modules {', '.join(kinds)[:100]}"
        )
    path = modules[1].get("path")
    if not isinstance(path, str) or Path(path).name != path:
        raise NoPooling("modules.json of the model's folder names no folder for its Pooling module")
    config = _read(folder / path / "config.json")
    if not isinstance(config, dict):
        raise NoPooling("the configuration of the Pooling module is not an object")
    configured_modes = config.get("pooling_mode", [])
    modes = (
        {configured_modes} if isinstance(configured_modes, str) else set(map(str, configured_modes))
    )
    modes |= {key for key, value in config.items() if value is True and "_mode_" in key}
    pooling_of_mode: dict[str, Literal["mean", "last"]] = {
        "mean": "mean",
        "pooling_mode_mean_tokens": "mean",
        "lasttoken": "last",
        "pooling_mode_lasttoken": "last",
    }
    if len(modes) != 1 or not modes <= pooling_of_mode.keys():
        raise NoPooling(
            f"the model's folder pools with {', '.join(sorted(modes))[:100] or 'no mode'}"
        )
    return Pooling(tokens=pooling_of_mode[modes.pop()], normalize=kinds[-1] == "Normalize")


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except OSError:
        raise NoPooling(
            f"the model's folder has no {path.name}, a file of sentence-transformers"
        ) from None


class Embedder:
    """Embed a batch of texts in one forward pass. All ranks call it in the same order.

    Args:
        model: the model, or this rank's shard.
        pooling: pooling of the hidden states.
        device: device of the model.
        max_tokens: most tokens of a forward pass, including padding.
        token_multiple: rows are padded to a multiple of this number of tokens.
        link: link to the other pipeline stages; None for a single stage.
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

    def batch_size(self, lengths: Sequence[int]) -> int:
        """Return how many of the first texts fit one forward pass, at least one."""
        count = 1
        while count < len(lengths) and max(lengths[: count + 1]) * (count + 1) <= self.max_tokens:
            count += 1
        return count

    @torch.no_grad()
    def __call__(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the vector of each text: its embedding, or the outputs of the classification head.

        Rows are padded at the end; with causal attention no token of the text attends to padding.

        Args:
            texts: token ids of each text.
        """
        lengths = [len(text) for text in texts]
        padded_length = -(-max(lengths) // self._multiple) * self._multiple
        rows = [[*text, *[0] * (padded_length - len(text))] for text in texts]
        tokens = torch.tensor(rows, device=self._device)  # [b, s]
        layout = SequenceLayout.of_rows(padded_length, device=self._device)
        stage_inputs, link = {}, self._link
        if not link.is_first:
            stage_inputs["hidden_states"] = link.receive_hidden(self._model.boundary_shape(tokens))
        hidden = self._model(tokens, layout=layout, **stage_inputs)  # [s, b, h], or [s/tp, b, h]
        if link.is_last:
            vectors = self._pooled(hidden, texts)
            sends = link.send_results(vectors.flatten()) if link.count > 1 else ()
        else:
            config = self._model.config
            count = len(texts) * (config.num_labels or config.hidden_size)
            results, sends = link.expect_results(count), link.send_hidden(hidden)
            vectors = link.wait(results).view(len(texts), -1)
        for pending in sends:
            link.wait(pending)
        return vectors.tolist()

    def _pooled(self, hidden: torch.Tensor, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the vector of each row of final hidden states, fp64 [b, h], or [b, labels] with a
        classification head."""
        hidden = self._model.region.gathered(hidden)  # [s, b, h]
        if (classifier := self._model.classifier) is not None:
            rows = [hidden[self._pooling.index_of(text), row] for row, text in enumerate(texts)]
            return classifier(torch.stack(rows)).double()
        vectors = []
        for row, text in enumerate(texts):
            states = hidden[: len(text), row].float()  # [length, h]
            is_mean = self._pooling.tokens == "mean"
            vector = states.mean(0) if is_mean else states[self._pooling.index_of(text)]
            if self._pooling.normalize:
                vector = torch.nn.functional.normalize(vector, dim=0)
            vectors.append(vector)
        return torch.stack(vectors).double()
