# SPDX-License-Identifier: Apache-2.0
"""The language model of multimodal folders: logits, export as a text-only class, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.cli.errors import ExitCode
from tests.support.closeness import assert_all_equal
from tests.support.hf_converter import checkpoint_model, convert, tensors
from tests.support.hf_folders import VOCABULARY, change_json, load_folder, make_model, save_folder
from tests.support.inputs import generator, one_thread

TOKENS = torch.randint(VOCABULARY, (2, 50), generator=generator(4))
_IMAGES = {"hidden_size": 12, "intermediate_size": 10, "num_attention_heads": 2}
_TOWER = {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4, **_IMAGES}
_QWEN = {
    **_IMAGES, "depth": 1, "num_heads": 2, "out_hidden_size": 48, "patch_size": 2,
    "num_position_embeddings": 4, "deepstack_visual_indexes": [],
}  # fmt: skip

#: case of the language model: (class of the whole model, vision_config, further fields)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ministral3": ("Mistral3", {"model_type": "pixtral", **_TOWER}, {"spatial_merge_size": 1}),
    "mistral-window-yarn": (
        "Mistral3",
        {"model_type": "pixtral", **_TOWER},
        {"spatial_merge_size": 1},
    ),
    "qwen3_5": ("Qwen3_5", _QWEN, {}),
    "qwen3_5_moe": ("Qwen3_5Moe", _QWEN, {}),
    "gemma3": (
        "Gemma3",
        {"model_type": "siglip_vision_model", **_TOWER},
        {"mm_tokens_per_image": 4},
    ),
}
IDS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5}


def multimodal_folder(case: str, folder: Path) -> Path:
    """Write a multimodal model around the language model of a case."""
    transformers = pytest.importorskip("transformers")
    name, vision, fields = CASES[case]
    text = make_model(case)
    config_class = getattr(transformers, f"{name}Config")
    tied = text.config.tie_word_embeddings
    config = config_class(
        text_config=text.config.to_dict(),
        vision_config=vision,
        tie_word_embeddings=tied,
        **fields,
        **(IDS if name.startswith("Qwen") else {}),
    )
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return save_folder(model, folder)


@pytest.mark.parametrize("case", CASES)
def test_language_model_of_a_multimodal_folder(case: str, tmp_path: Path) -> None:
    source = multimodal_folder(case, tmp_path / "source")
    words = ["import", "--hf", source, "--save", tmp_path / "a"]
    printed = convert(*words, code=ExitCode.USER_ERROR)
    assert "--text-only" in printed
    assert not (tmp_path / "a").exists()
    vision = [n for n in tensors(source) if any(w in n for w in ("vis", "multi_modal"))]
    printed = convert(*words, "--text-only")
    assert f"left out {len(vision)} tensors" in printed
    # Gemma 3 has a cap of logits in its text-only class alone.
    uncapped = {"final_logit_softcapping": None} if case == "gemma3" else {}
    text = make_model(case, **uncapped)
    with one_thread(), torch.no_grad():
        expected = load_folder(source, "AutoModelForImageTextToText")(TOKENS).logits
        logits = checkpoint_model(tmp_path / "a/iter_0000000").full_logits(TOKENS).transpose(0, 1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    convert("export", "--load", tmp_path / "a", "--save", tmp_path / "out", "--verify")
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert fields["architectures"] == [type(text).__name__]
    assert fields["model_type"] == text.config.model_type
    assert_all_equal(tensors(tmp_path / "out"), tensors(save_folder(text, tmp_path / "text")))


def test_bad_multimodal_folders_are_refused_by_name(tmp_path: Path) -> None:
    plain = save_folder(make_model("llama-3to1"), tmp_path / "plain")
    words = ["import", "--save", tmp_path / "a", "--text-only", "--hf"]
    assert "model_type is 'llama'" in convert(*words, plain, code=ExitCode.USER_ERROR)
    source = multimodal_folder("ministral3", tmp_path / "source")
    file = source / "model.safetensors"
    stored = tensors(source)
    save_file({**stored, "audio_tower.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    printed = convert(*words, source, code=ExitCode.USER_ERROR)
    assert "audio_tower.weight does not belong to the model" in printed
    save_file(stored, file, metadata={"format": "pt"})
    for text_config, name in (
        (None, "text_config is absent"),
        ([], "text_config is []"),
        ({"model_type": "t5"}, "text_config.model_type is 't5'"),
    ):
        change_json(source / "config.json", text_config=text_config)
        assert name in convert(*words, source, code=ExitCode.USER_ERROR)
    assert not (tmp_path / "a").exists()
