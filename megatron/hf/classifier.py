# SPDX-License-Identifier: Apache-2.0
"""Fields of config.json about a classification head: labels, activation and padding token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.hf.fields import Fields
from megatron.hf.folder import CONFIG, inside, read_object

Activation = Literal["none", "sigmoid", "softmax"]

#: Number of labels if config.json does not specify it.
DEFAULT_NUM_LABELS = 2


def default_label(label: int) -> str:
    """Return the name that transformers gives to a label without one."""
    return f"LABEL_{label}"


def read_labels(fields: Fields) -> tuple[str, ...]:
    """Return the names of the labels, in the order of the head's outputs. Raises ValueError."""
    names = fields.raw.get("id2label")
    if not names:
        count = fields.count("num_labels", DEFAULT_NUM_LABELS)
        if count > 1 << 20:
            fields.refuse("num_labels", f"more than {1 << 20}")
        return tuple(map(default_label, range(count)))
    keys = [str(label) for label in range(len(names))]
    if not isinstance(names, dict) or names.keys() != set(keys):
        fields.refuse("id2label", "expected an object with the keys 0 to num_labels - 1")
    if fields.raw.get("num_labels") not in (None, len(names)):
        fields.refuse("num_labels", f"id2label has {len(names)} labels")
    if not all(isinstance(name, str) for name in names.values()):
        fields.refuse("id2label", "expected texts")
    return tuple(names[key] for key in keys)


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """How the outputs of a classification head are read.

    Args:
        labels: name of each output.
        activation: function of the outputs that gives scores or probabilities.
        padding_token: id of the token that is skipped at the end of a text; None for none.
    """

    labels: Sequence[str]
    activation: Activation
    padding_token: int | None = None

    def scores(self, outputs: Sequence[float]) -> list[float]:
        """Return the outputs after the activation."""
        if self.activation == "none":
            return list(outputs)
        if self.activation == "sigmoid":
            # exp(-|x|) cannot overflow.
            return [(1.0 if x >= 0 else math.exp(x)) / (1.0 + math.exp(-abs(x))) for x in outputs]
        largest = max(outputs)
        powers = [math.exp(x - largest) for x in outputs]
        return [power / math.fsum(powers) for power in powers]


def read_classifier(folder: Path | None, num_labels: int) -> Classifier:
    """Return the classifier that config.json of a folder describes.

    In the folder of a cross-encoder, sentence-transformers has written the activation. Else, as in
    the pipelines of transformers, `problem_type` selects it; without this field it is sigmoid for
    one label and softmax for several.

    Args:
        folder: the folder; None for the defaults.
        num_labels: number of outputs of the head.

    Raises:
        ValueError: a field is invalid.
    """
    path = None if folder is None else inside(folder, CONFIG, follow_links=True)
    fields = Fields({"num_labels": num_labels} if path is None else read_object(path), str(path))
    labels = read_labels(fields)
    if len(labels) != num_labels:
        fields.refuse("id2label", f"the head has {num_labels} outputs")
    activations: dict[str | None, Activation] = {
        None: "sigmoid" if num_labels == 1 else "softmax",
        "regression": "none",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    problem_type = fields.find("problem_type")
    if problem_type not in activations or (num_labels, activations[problem_type]) == (1, "softmax"):
        fields.refuse("problem_type", f"with {num_labels} labels it is not supported")
    padding_token = fields.find("pad_token_id")
    if padding_token is not None and type(padding_token) is not int:
        fields.refuse("pad_token_id", "expected a token id")
    return Classifier(
        labels=labels,
        activation=_cross_encoder_activation(fields) or activations[problem_type],
        padding_token=padding_token,
    )


def _cross_encoder_activation(fields: Fields) -> Activation | None:
    """Return the activation that sentence-transformers writes; None without one."""
    old_name = "sbert_ce_default_activation_function"
    nested = fields.inner("sentence_transformers")
    for source, name in ((nested, "activation_fn"), (fields, old_name)):
        class_name = None if source is None else source.find(name)
        if source is None or class_name is None:
            continue
        activations: dict[str, Activation] = {
            "torch.nn.modules.linear.Identity": "none",
            "torch.nn.modules.activation.Sigmoid": "sigmoid",
        }
        if not isinstance(class_name, str) or class_name not in activations:
            source.refuse(name, f"supported are {', '.join(activations)}")
        return activations[class_name]
    return None
