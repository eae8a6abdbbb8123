# SPDX-License-Identifier: Apache-2.0
"""Folders with a classification head: import, outputs equal to transformers', and export."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.launch import Launch
from megatron.cli.tokenizers import train_bpe
from megatron.hf import open_folder, read_folder
from megatron.hf.classifier import read_classifier
from megatron.inference import ModelSource
from megatron.inference.load_model import load_checkpoint_model
from megatron.inference.server.engine.embedder import Embedder, Pooling
from megatron.training.checkpointing.hf_import import folder_defaults
from tests.support.closeness import assert_all_equal, assert_close_by_metric
from tests.support.hf_converter import convert, imported, tensors
from tests.support.hf_folders import change_json, load_folder, make_classifier, save_folder
from tests.support.inputs import one_thread

PADDING = 5
#: Different lengths; padding inside, at the end, and nothing else.
TEXTS = [[1, 2, 3], [9], [PADDING, 6, 7, 8, 9, 10, 20, PADDING, PADDING], [PADDING, PADDING]]
CASES = {
    "llama-tied-llama3": 1, "qwen3-8to1": 3, "qwen2-3to1-linear": 2, "mistral-window-yarn": 1,
    "seedoss": 1, "mixtral": 2, "qwen2moe": 2, "qwen3moe-yarn": 1, "deepseek": 4, "qwen3next": 1,
}  # fmt: skip
CLASSIFIER = "AutoModelForSequenceClassification"


def write(folder: Path, case: str, num_labels: int, **changes: Any) -> Any:
    """Write a folder with a tokenizer; return the model."""
    model = make_classifier(case, num_labels, pad_token_id=PADDING, **changes)
    save_folder(model, folder)
    train_bpe(["abc"] * 3, 257, folder / "tokenizer.json")
    return model


def reference(model: Any) -> torch.Tensor:
    """Return the outputs of transformers for `TEXTS`, padded in one batch."""
    width = max(map(len, TEXTS))
    rows = torch.tensor([text + [PADDING] * (width - len(text)) for text in TEXTS])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in TEXTS])
    with torch.no_grad():
        return model(rows, attention_mask=mask, use_cache=False).logits


def outputs(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the loaded model for `TEXTS` in one batch, and one by one."""
    source = ModelSource(load=str(path), device="cpu")
    launch = Launch.from_environment({})
    pooling = Pooling(tokens="last", normalize=False, padding_token=PADDING)
    with load_checkpoint_model(source, launch, allow_classifier=True) as loaded:
        embedder = Embedder(loaded.model, pooling, torch.device("cpu"), max_tokens=1000)
        alone = [embedder([text])[0] for text in TEXTS]
        return torch.tensor(embedder(TEXTS)), torch.tensor(alone)


@pytest.mark.parametrize("case", CASES)
def test_outputs_match_transformers_and_survive_export(case: str, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "model", tmp_path / "checkpoint"
    with one_thread():
        expected = reference(write(folder, case, CASES[case]))
        batch, alone = outputs(folder)
        assert_close_by_metric("folder", batch, expected)
        assert_close_by_metric("alone", alone, expected)
        imported(folder, checkpoint)
        assert_close_by_metric("checkpoint", outputs(checkpoint)[0], expected)
        (checkpoint / "hugging_face/config.json").unlink()  # it is written, not copied
        convert("export", "--load", checkpoint, "--save", tmp_path / "out")
        assert_all_equal(tensors(tmp_path / "out"), tensors(folder))
        exported = load_folder(tmp_path / "out", CLASSIFIER)
        exported.config.pad_token_id = PADDING
        assert_close_by_metric("export", reference(exported), expected)


def test_names_of_labels_survive_conversion(tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "model", tmp_path / "checkpoint"
    write(folder, "qwen3-8to1", 3)
    names = {"0": "no", "1": "maybe", "2": "yes"}
    change_json(folder / "config.json", id2label=names, label2id={v: k for k, v in names.items()})
    convert("import", "--hf", folder, "--save", checkpoint, "--verify")
    convert("export", "--load", checkpoint, "--save", tmp_path / "out", "--verify")
    assert json.loads((tmp_path / "out/config.json").read_text())["id2label"] == names
    assert read_classifier(tmp_path / "out", 3).labels == ("no", "maybe", "yes")


@pytest.mark.parametrize(
    ("num_labels", "fields", "activation"),
    [
        (1, {}, "sigmoid"),
        (2, {}, "softmax"),
        (1, {"problem_type": "regression"}, "none"),
        (3, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (3, {"problem_type": "single_label_classification"}, "softmax"),
    ],
)
def test_activation_is_that_of_transformers_pipeline(
    num_labels: int, fields: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = write(tmp_path, "qwen3-8to1", num_labels, vocab_size=257, **fields)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    pipeline = transformers.pipeline(
        "text-classification", model=model, tokenizer=tokenizer, device="cpu"
    )
    expected = {entry["label"]: entry["score"] for entry in pipeline("abcab", top_k=None)}
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("abcab")["input_ids"]])).logits[0].tolist()
    classifier = read_classifier(tmp_path, num_labels)
    assert classifier.activation == activation
    scores = dict(zip(classifier.labels, classifier.scores(logits), strict=True))
    assert scores == pytest.approx(expected, abs=1e-6)


def test_activation_of_cross_encoders(tmp_path: Path) -> None:
    folder = tmp_path / "config.json"
    names = {"linear.Identity": "none", "activation.Sigmoid": "sigmoid"}
    for name, activation in names.items():
        path = f"torch.nn.modules.{name}"
        for fields in (
            {"sentence_transformers": {"activation_fn": path, "version": "5.0.0"}},
            {"sbert_ce_default_activation_function": path},
        ):
            folder.write_text(json.dumps({"id2label": {"0": "LABEL_0"}, **fields}))
            assert read_classifier(tmp_path, 1).activation == activation
    assert read_classifier(None, 1).scores([-800.0]) == [0.0]
    assert read_classifier(None, 2).scores([800.0, 801.0])[1] == pytest.approx(1 / (1 + 1 / math.e))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label"),
        ({"id2label": ["a", "b"]}, "id2label"),
        ({"id2label": {"0": "a", "1": 2}}, "id2label"),
        ({"num_labels": 4}, "num_labels"),
        ({"id2label": {str(n): "x" for n in range(4)}}, "score.weight"),
        ({"problem_type": "ranking"}, "problem_type"),
        ({"pad_token_id": "x"}, "pad_token_id"),
        ({"sbert_ce_default_activation_function": "os.system"}, "os.system"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "Qwen3ForSequenceClassification"),
    ],
)
def test_invalid_folder_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, "qwen3-8to1", 3)
    change_json(tmp_path / "config.json", **fields)

    def load() -> None:
        outputs(tmp_path)
        read_classifier(tmp_path, 3)

    with pytest.raises(ValueError, match=message) as error:
        load()
    assert "\n" not in str(error.value)


def test_mamba_has_no_classification_head(tmp_path: Path) -> None:
    config = {"model_type": "mamba2", "architectures": ["Mamba2ForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match="Mamba2ForCausalLM"):
        read_folder(open_folder(tmp_path))


def test_classifier_neither_generates_nor_trains(tmp_path: Path) -> None:
    write(tmp_path, "qwen3-8to1", 1)
    source, launch = ModelSource(load=str(tmp_path), device="cpu"), Launch.from_environment({})
    with (
        pytest.raises(ValueError, match="classification head"),
        load_checkpoint_model(source, launch),
    ):
        raise AssertionError
    with pytest.raises(ValueError, match="classification head"):
        folder_defaults({"load-hf": str(tmp_path)})
