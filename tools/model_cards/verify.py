# SPDX-License-Identifier: Apache-2.0
"""Compare a small random model with transformers, and its layouts with one rank."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.models.gpt import logical_weights
from megatron.core.models.layer_pattern import EXPERTS
from megatron.hf.architectures import ARCHITECTURES
from megatron.hf.config_json import read_model
from megatron.inference.generate import main as generate
from tests.functional_tests.small_run import losses, run_on
from tests.support.hf_converter import checkpoint_model, convert, imported, tensors
from tests.support.hf_family_cases import FAMILY_CASES
from tests.support.hf_folders import (
    ALL_CASES,
    VOCABULARY,
    change_json,
    make_model,
    save_folder,
)
from tests.support.hf_gradients import (
    gradients_by_name,
    hf_gradients,
    mcore_gradients,
    zero_gradients,
)
from tests.support.inputs import generator, one_thread
from tools.model_cards.members import members_of

#: Largest differences of logits and gradients, relative to the largest of a tensor, and of losses.
BOUND, LOSS_BOUND = 1e-4, 1e-5
STEPS, NEW_TOKENS, PROMPT_LENGTHS = 3, 12, (1, 3, 7, 12)

RUN = (
    "--mock-data --seq-length 24 --micro-batch-size 2 --global-batch-size 4 --eval-interval 0 "
    f"--train-iters {STEPS} --lr 0.1 --optimizer sgd --log-interval 1 --progress plain --device cpu"
)
#: Layouts of two ranks; {split} divides the blocks over two stages.
LAYOUTS: Mapping[str, str] = {
    "dp 2 ZeRO-1": "--use-distributed-optimizer",
    "tp 2 sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp 2": "--pipeline-model-parallel-size 2 {split}",
    "cp 2": "--context-parallel-size 2",
    "ep 2": "--expert-model-parallel-size 2",
}
#: Numbers of experts and of Mamba-2's groups; layouts need even ones.
_COUNTS = (
    "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "n_groups",
    "mamba_n_groups",
)  # fmt: skip


def case_of(model_type: str) -> str:
    """Return the name of the small model of a model type; Kimi-K2 is DeepSeek-V3's class."""
    cases = {**FAMILY_CASES, **ALL_CASES}
    names = [name for name, (kind, _) in cases.items() if kind == _stem(model_type)]
    if not names:
        raise ValueError(f"no small model of {model_type} in tests/support")
    return names[0]


def _stem(model_type: str) -> str:
    """Return the class's name without its head, the stem of its configuration's name."""
    return re.sub(r"(ForCausalLM|LMHeadModel)$", "", ARCHITECTURES[model_type].class_name)


def verify(model_type: str, folder: Path) -> dict[str, Any]:
    """Return the cards of a model type; `problems` lists what does not hold.

    Args:
        folder: an empty folder for the files.
    """
    case = case_of(model_type)
    card: dict[str, Any] = {"case": case, "problems": []}
    hf_model = make_model(case, eos_token_id=None)
    source = save_folder(hf_model, folder / "source")
    if hf_model.config.model_type != model_type:
        change_json(source / "config.json", model_type=model_type)
    checks: Mapping[str, Callable[[], Mapping[str, Any]]] = {
        "values": lambda: _values(hf_model, imported(source, folder / "checkpoints")),
        "files": lambda: _files(source, folder),
        "text": lambda: _text(hf_model, source, folder),
        "layouts": lambda: {"layouts": _layouts(case, model_type, folder)},
        "sizes": lambda: {"members": _members(model_type)},
    }
    for name, check in checks.items():
        try:
            card |= check()
        except Exception as error:  # one model type must not end the run
            card["problems"].append(f"{name}: {type(error).__name__}: {str(error).strip()[:300]}")
    return card


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    largest = float(expected.abs().max())
    return float((actual - expected).abs().max()) / (largest or 1.0)


def _values(hf_model: Any, checkpoint: Path) -> dict[str, Any]:
    """Compare logits and the gradient of every parameter."""
    model = checkpoint_model(checkpoint)
    with one_thread():
        logits, gradients = hf_gradients(hf_model)
        actual_logits, actual = mcore_gradients(model)
    kind = ARCHITECTURES[hf_model.config.model_type]
    expected = gradients_by_name(kind, model, gradients)
    # Sums that nearly vanish have no relative error: they are compared with the largest gradient.
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    errors = {
        name: float((actual[name] - gradient).abs().max())
        / max(float(gradient.abs().max()), 1e-3 * scale)
        for name, gradient in expected.items()
        if name not in zero_gradients(model.config, expected)
    }
    card = {
        "logit_error": _relative(actual_logits, logits),
        "gradient_error": max(errors.values()),
        "num_gradients": len(errors),
        "blocks": model.config.blocks,
    }
    assert card["logit_error"] <= BOUND, f"logits differ by {card['logit_error']:.1e}"
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= BOUND, f"the gradient of {worst} differs by {errors[worst]:.1e}"
    return card


def _files(source: Path, folder: Path) -> dict[str, Any]:
    """Export the imported model and compare all files."""
    convert("export", "--load", folder / "checkpoints", "--save", folder / "exported")
    before, after = tensors(source), tensors(folder / "exported")
    assert before.keys() == after.keys(), "the exported tensors have other names"
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), f"exported tensor {name} differs"
    configs = [
        json.loads((path / "config.json").read_text()) for path in (source, folder / "exported")
    ]
    assert configs[0] == configs[1], "the exported config.json differs"
    return {"num_tensors": len(before)}


def _text(hf_model: Any, source: Path, folder: Path) -> dict[str, Any]:
    """Compare greedy tokens of prompts of different lengths."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    fields = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "model": fields, "pre_tokenizer": {"type": "Whitespace"}}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    prompts = [
        torch.randint(8, VOCABULARY, (length,), generator=generator(length)).tolist()
        for length in PROMPT_LENGTHS
    ]
    path = folder / "out.json"
    line = f"--load {source} --temperature 0 --max-new-tokens {NEW_TOKENS} --device cpu"
    arguments = [*line.split(), "--output-json", str(path)]
    for prompt in prompts:
        arguments += ["--prompt", " ".join(f"w{token}" for token in prompt)]
    with contextlib.redirect_stdout(io.StringIO()):
        assert generate(arguments, {}) == 0, "generation failed"
    equal = 0
    for prompt, output in zip(prompts, json.loads(path.read_text()), strict=True):
        ids = torch.tensor([prompt])
        with one_thread(), torch.no_grad():
            for _ in range(NEW_TOKENS):  # without transformers' cache
                token = hf_model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, token], dim=1)
        equal += output["ids"] == ids[0, len(prompt) :].tolist()
    assert equal == len(prompts), f"greedy tokens of {equal} of {len(prompts)} prompts are equal"
    return {"equal_texts": equal, "num_texts": len(prompts)}


def _layouts(case: str, model_type: str, folder: Path) -> dict[str, str]:
    """Train a few steps on each layout and compare the losses with one rank; return the layouts
    that are equal, or the reason of a refusal."""
    fields = make_model(case).config.to_dict()
    even = {
        name: fields[name] + (fields.get("n_group") or 1)
        for name in _COUNTS
        if isinstance(fields.get(name), int) and fields[name] % 2
    }
    hf_model = make_model(case, **even)
    source = save_folder(hf_model, folder / "trained")
    config = read_model(hf_model.config.to_dict(), where="config.json").config
    options = f"{RUN} --load-hf {source} "
    whole, stages = "", f"--decoder-first-pipeline-num-layers {config.num_layers // 2}"
    if config.pattern:
        whole = f"--hybrid-layer-pattern {config.pattern}"
        stages = f"--hybrid-layer-pattern {_two_stages(config.pattern)}"
    expected = _losses(1, f"{options}{whole}", folder / "one")
    cards = {}
    for name, layout in LAYOUTS.items():
        if name == "ep 2" and EXPERTS not in config.blocks:
            continue
        words = f"{options}{layout.format(split=stages)} {'' if name == 'pp 2' else whole}"
        try:
            actual = _losses(2, words, folder / name.replace(" ", "_"))
        except AssertionError as error:
            reasons = re.findall(r"error: (.*)", str(error)) or [repr(error)[-200:]]
            cards[name] = f"failed: {reasons[0][:200]}"
            continue
        worst = max(abs(actual[step] / expected[step] - 1.0) for step in expected)
        cards[name] = "equal" if worst <= LOSS_BOUND else f"losses differ by {worst:.1e}"
    assert all(text == "equal" for text in cards.values()), json.dumps(cards)
    return cards


def _two_stages(pattern: str) -> str:
    groups = re.findall(r"\([^)]*\)|.", pattern)  # blocks in parentheses are parallel
    middle = len(groups) // 2
    return f"{''.join(groups[:middle])}|{''.join(groups[middle:])}"


def _losses(world: int, words: str, folder: Path) -> Mapping[int, float]:
    metrics = folder / "metrics.jsonl"
    folder.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        run_on(world, f"{words} --metrics-file {metrics}".split())
    return losses(metrics)


def _members(model_type: str) -> dict[str, int]:
    """Return the number of parameters of each published model, equal to transformers' count."""
    import transformers

    kind = _stem(model_type)
    config_class = getattr(transformers, f"{kind}TextConfig", None)
    config_class = config_class or getattr(transformers, f"{kind}Config")
    counts = {}
    for name, fields in members_of(model_type).items():
        config = config_class(**fields)
        with torch.device("meta"):
            hf_model = getattr(transformers, ARCHITECTURES[model_type].class_name)(config)
        expected = sum(parameter.numel() for parameter in hf_model.parameters())
        raw = config.to_dict()
        model = read_model(raw, where="config.json").config
        weights = logical_weights(model)
        actual = sum(torch.Size(shape).numel() for shape in weights.values())
        # Biases that select experts are buffers or parameters there.
        moe = model.moe
        biases = 0
        if moe is not None and moe.router.expert_bias:
            biases = model.blocks.count(EXPERTS) * moe.num_experts
        counts_agree = expected in (actual, actual + biases)
        assert counts_agree, f"{name} has {actual} parameters, {expected} in transformers"
        counts[name] = expected
    return counts
