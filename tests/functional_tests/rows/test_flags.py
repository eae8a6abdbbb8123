# SPDX-License-Identifier: Apache-2.0
"""Entry points print help and configs quickly, and no run prints or saves secrets."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.cli.errors import ExitCode
from tests.functional_tests.small_run import flags, run_in_process, write_tokens

SHORT = "--eval-interval 0 --train-iters 2 --lr-warmup-iters 0"


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens", documents=12)


#: Entry points with the arguments that --print-config requires.
ENTRY_POINTS = {
    "megatron.training.pretrain_gpt": " ".join(flags(Path("absent"))),
    "megatron.training.pretrain_hybrid": " ".join(
        flags(Path("absent"), "--hybrid-layer-pattern *-*-")
    ),
    "megatron.training.preprocess_data": "--input absent.jsonl --output-prefix absent",
    "megatron.training.plot": "--metrics absent.jsonl",
    "megatron.training.quickstart": "",
    "megatron.training.inspect_data": "--data-path absent",
    "megatron.training.train_tokenizer": "--input a.txt --output absent --vocab-size 300",
    "megatron.training.checkpoint inspect": "absent",
    "megatron.training.checkpoint convert": "absent a --from dcp --to single-file",
    "megatron.inference.generate": "--load absent --prompt a",
    "megatron.inference.bench": "--load absent",
    "megatron.hf.convert import": "--hf absent --save absent",
    "megatron.hf.convert export": "--load absent --save absent",
}


def run_timed(words: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run a module with its imports logged to stderr; return its CPU seconds and the process."""
    command = [sys.executable, "-X", "importtime", "-m", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment
        )
        _, status, used = os.wait4(job.pid, 0)
        job.returncode = os.waitstatus_to_exitcode(status)
        texts = [file.seek(0) or file.read() for file in (out, err)]
    process = subprocess.CompletedProcess(command, job.returncode, *texts)
    return used.ru_utime + used.ru_stime, process


@pytest.fixture(scope="module")
def entry_point_outputs():
    """Run every entry point with --help and --print-config, two at a time."""
    commands = {(name, "--help"): [*name.split(), "--help"] for name in ENTRY_POINTS}
    for name, arguments in ENTRY_POINTS.items():
        commands[name, "--print-config"] = [*name.split(), *arguments.split(), "--print-config"]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(commands, pool.map(run_timed, commands.values()), strict=True))


@pytest.mark.parametrize("flag", ["--help", "--print-config"])
@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_entry_points_print_help_and_config_quickly(entry_point_outputs, module, flag):
    seconds, process = entry_point_outputs[module, flag]
    assert process.returncode == 0, process.stderr[-2000:]
    assert len(process.stdout.splitlines()) >= 3
    assert ("--print-config" in process.stdout) == (flag == "--help")
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "encodings" in imported, "the list of imports is missing"
    assert not {"torch", "torch.cuda", "transformers"} & imported
    assert seconds < 3.0


SECRETS = {
    "WANDB_API_KEY": "wandb-5e8f1c",
    "HF_TOKEN": "hf_9a77e2",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-41b6d0",
    "MLFLOW_TRACKING_URI": "https://someone:uri-c05d3a@localhost:1",
    "AWS_SECRET_ACCESS_KEY": "aws-8d20f7",
    "OPENAI_API_KEY": "sk-77aa31",
}
SECRET_TEXTS = (
    "wandb-5e8f1c",
    "hf_9a77e2",
    "mlflow-41b6d0",
    "uri-c05d3a",
    "aws-8d20f7",
    "sk-77aa31",
)


def test_run_output_contains_no_secrets_from_environment(prefix, tmp_path, capfd, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    outputs = tmp_path / "wrote"
    options = (
        f"{SHORT} --save {outputs / 'save'} --tensorboard-dir {outputs / 'tb'} --log-interval 1"
    )
    assert run_in_process(flags(prefix, options)) == 0
    assert run_in_process(flags(prefix, f"{options} --print-config")) == 0
    assert run_in_process(flags(prefix, f"{options} --load {prefix}.bin")) != 0
    (tmp_path / "run.yaml").write_text("tensorboard-dir: ${WANDB_API_KEY}")
    assert run_in_process(flags(prefix, f"--config {tmp_path / 'run.yaml'}")) == ExitCode.USER_ERROR
    assert run_in_process(flags(prefix, f"--data-cache-path {SECRETS['MLFLOW_TRACKING_URI']}")) == 2
    out, err = capfd.readouterr()
    assert "lm loss" in out
    assert "looks like a secret" in err
    assert "contains a user and a password" in err
    texts = {"stdout": out.encode(), "stderr": err.encode()}
    texts.update({str(file): file.read_bytes() for file in outputs.rglob("*") if file.is_file()})
    assert len(texts) >= 6, "a manifest, shards, metrics and TensorBoard's file"
    leaks = [
        (source, secret)
        for source, text in texts.items()
        for secret in SECRET_TEXTS
        if secret.encode() in text
    ]
    assert not leaks
