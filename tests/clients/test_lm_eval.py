# SPDX-License-Identifier: Apache-2.0
"""lm-eval on a local task over the served routes, against transformers on the same folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch

from tests.support.hf_folders import load_folder, make_model, save_folder
from tests.support.llama_tokenizer import write_llama_tokenizer

pytestmark = pytest.mark.slow(seconds=60)

#: Question, choices, number of the right choice.
QUESTIONS = [
    ("the end of the", [" inn", " thin hat", " a"], 0),
    ("of the ham in", [" the", " often", " nine of them"], 2),
    ("in a tin", [" thing", " of ink"], 1),
]
TASK = """
task: ulm_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}]
"""
GENERATION = """
task: ulm_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer, as transformers writes it."""
    path = tmp_path_factory.mktemp("llama")
    tokenizer = write_llama_tokenizer(path)
    model = make_model("llama-3to1", vocab_size=len(tokenizer), eos_token_id=2, bos_token_id=1)
    # No tokens of single bytes: tokenizers replace bytes that are not UTF-8 in different ways.
    byte_tokens = [id for name, id in tokenizer.get_vocab().items() if name.startswith("<0x")]
    model.lm_head.weight.data[byte_tokens] = 0
    return save_folder(model, path)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The address of a server of the folder."""
    command = [sys.executable, "-m", "megatron.inference.serve", "--load", str(folder)]
    server = subprocess.Popen(
        [*command, "--device", "cpu", "--port", "0", "--served-model-name", "llama"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    lines: list[str] = []
    try:
        for line in server.stdout:
            lines.append(line)
            if match := re.search(r"serving \S+ at (http://\S+?)/?\s", line):
                yield match[1]
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        server.terminate()
        server.communicate(timeout=60)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks and their questions."""
    path = tmp_path_factory.mktemp("tasks")
    rows = [{"question": q, "choices": c, "label": n} for q, c, n in QUESTIONS]
    (path / "questions.json").write_text("\n".join(map(json.dumps, rows)))
    for name, task in (("choices", TASK), ("text", GENERATION)):
        text = task.replace("FILE", str(path / "questions.json"))
        (path / f"{name}.yaml").write_text(text.lstrip())
    return path


def evaluate(
    tasks: Path, model: str, task: str, model_args: dict[str, Any], **options: Any
) -> list[Any]:
    """Return the answers to a task's requests, in the order of the questions."""
    from lm_eval.tasks import TaskManager

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "none")
        results = lm_eval.simple_evaluate(
            model=model,
            model_args=model_args,
            tasks=[task],
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            bootstrap_iters=0,
            **options,
        )
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihoods_over_completions(
    folder: Path, url: str, tasks: Path, batch_size: int
) -> None:
    import transformers

    arguments = {
        "model": "llama",
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(folder),
        "batch_size": batch_size,
    }
    answers = evaluate(tasks, "local-completions", "ulm_choices", arguments)
    model, tokenizer = load_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for (question, choices, _), answer in zip(QUESTIONS, answers, strict=True):
        start = len(tokenizer(question, add_special_tokens=False)["input_ids"])
        for choice, (response,) in zip(choices, answer, strict=True):
            whole = tokenizer(question + choice, add_special_tokens=False, return_tensors="pt")
            ids = whole["input_ids"]
            with torch.no_grad():
                scores = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
            targets = ids[0, start:]
            expected = scores.gather(1, targets[:, None]).sum().item()
            loglikelihood, is_greedy = response
            is_argmax = torch.equal(scores.argmax(-1), targets)
            assert float(loglikelihood) == pytest.approx(expected, abs=1e-4)
            assert str(is_greedy) == str(is_argmax)


@pytest.mark.parametrize("route", ["completions", "chat-completions"])
def test_generated_texts(folder: Path, url: str, tasks: Path, route: str) -> None:
    import transformers

    path = "chat/completions" if route == "chat-completions" else route
    arguments = {"model": "llama", "base_url": f"{url}/v1/{path}", "tokenizer": str(folder)}
    arguments |= {"tokenizer_backend": "none" if route != "completions" else "huggingface"}
    is_chat = route == "chat-completions"
    answers = evaluate(tasks, f"local-{route}", "ulm_text", arguments, apply_chat_template=is_chat)
    model, tokenizer = load_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for (question, *_), ((text,),) in zip(QUESTIONS, answers, strict=True):
        if is_chat:
            turn = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(
                turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            prompt = tokenizer(question, add_special_tokens=False, return_tensors="pt")
        output = model.generate(prompt["input_ids"], max_new_tokens=12, do_sample=False)
        new = output[0, prompt["input_ids"].shape[1] :]
        expected = tokenizer.decode(new, skip_special_tokens=True)
        assert text.strip() == expected.split("\n\n")[0].strip()
