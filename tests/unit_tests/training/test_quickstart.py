# SPDX-License-Identifier: Apache-2.0
"""The quickstart: its options, its stages, and a second call."""

from __future__ import annotations

import itertools
import json

import pytest

from megatron.cli.schema import build, flatten, options
from megatron.cli.yaml_file import read_options
from megatron.training import quickstart
from megatron.training.config import Config
from megatron.training.config.check import check
from megatron.training.config.resolve import resolve
from megatron.training.monitoring.metrics import open_metrics
from megatron.training.quickstart import Folder, QuickstartOptions, config_text, training_options


def _config(tmp_path, **quickstart_options) -> Config:
    values = training_options(QuickstartOptions(**quickstart_options), Folder(tmp_path))
    (tmp_path / "run.yaml").write_text(config_text(values))
    read = read_options(tmp_path / "run.yaml", options(Config))
    assert read == values, "an option of the run is unknown to the schema"
    return build(Config, read)


def test_quickstart_config_matches_its_documentation(tmp_path):
    config = _config(tmp_path)
    assert check(config, 2) == []
    run = resolve(config, 2)
    model = run.config.model
    channels = model.kv_channels
    layer = model.hidden_size * channels * 2 * (model.num_attention_heads + model.num_query_groups)
    layer += 3 * model.hidden_size * model.ffn_hidden_size
    weights = model.num_layers * layer + 2 * quickstart.VOCABULARY * model.hidden_size
    assert weights >= 5_000_000
    assert run.train_samples * run.config.training.seq_length >= 900_000
    assert run.num_microbatches >= 2
    # A conversation with two tools is longer than a sequence of training.
    assert model.max_position_embeddings >= 8 * run.config.training.seq_length
    assert run.config.parallel.sequence_parallel
    assert run.config.training.bf16
    assert run.warmup_samples > 0


@pytest.mark.parametrize("iterations", [1, 5, 40])
def test_short_quickstart_runs_are_valid(tmp_path, iterations):
    config = _config(tmp_path, train_iters=iterations + 1, nproc=1)
    assert check(config, 1) == []


@pytest.fixture
def stage_calls(monkeypatch):
    """Replace the stages that run as separate programs; return the options of each call."""
    calls = []

    def run_module(module, arguments, *, environment=None):
        words = dict(itertools.pairwise(arguments))
        calls.append(words)
        if module.endswith("preprocess_data"):
            open(words["--output-prefix"] + ".idx", "w").close()
        elif module == "torch.distributed.run":
            values = read_options(words["--config"], options(Config))
            metrics = open_metrics(
                metrics_file=values["metrics-file"],
                tensorboard_dir=None,
                resume_iteration=0,
                warn=pytest.fail,
            )
            metrics.write("validation", 0, {"lm_loss": 8.0})
            metrics.write("train", 1, {"lm_loss": 7.0, "tokens_per_second": 100.0})
            metrics.write("validation", 1, {"lm_loss": 4.0})
            metrics.write("end", 1, {"peak_memory_bytes": 5e8})
            metrics.close()
            folder = f"{values['save']}/iter_{values['train-iters']:07d}"
            quickstart.Path(folder).mkdir(parents=True)
        else:
            completions = [{"prompt": p, "text": "..."} for p in quickstart.PROMPTS]
            quickstart.Path(words["--output-json"]).write_text(json.dumps(completions))

    monkeypatch.setattr(quickstart, "run_module", run_module)
    monkeypatch.setattr(quickstart, "make_corpus", lambda f: f.corpus.write_text("") or "text")
    monkeypatch.setattr(quickstart, "make_tokenizer", lambda f: f.tokenizer.write_text("") or "t")
    return calls


def test_second_call_reuses_all_finished_stages(tmp_path, stage_calls, capsys):
    chosen = QuickstartOptions(output_dir=str(tmp_path / "q"), train_iters=6)
    quickstart.run(chosen)
    assert len(stage_calls) == 3
    summary = json.loads((tmp_path / "q" / "summary.json").read_text())
    assert summary["first_validation_loss"] == 8.0
    assert summary["last_validation_loss"] == 4.0
    assert summary["tokens_per_second"] == 100.0
    assert summary["peak_memory_bytes"] == 500_000_000
    assert summary["checkpoint"].endswith("iter_0000006")
    assert (tmp_path / "q" / "loss_curve.png").stat().st_size > 1000
    assert "50% of the first" in capsys.readouterr().out
    quickstart.run(chosen)
    assert len(stage_calls) == 3
    assert capsys.readouterr().out.count("done before") == 5


def test_mtp_layers_are_trained_and_used_for_speculation(tmp_path, stage_calls):
    chosen = QuickstartOptions(output_dir=str(tmp_path / "q"), train_iters=6, mtp_num_layers=1)
    quickstart.run(chosen)
    config = _config(tmp_path, mtp_num_layers=1)
    assert check(config, 2) == []
    assert flatten(config)["mtp-num-layers"] == 1
    assert stage_calls[-1]["--speculative-method"] == "mtp"


def test_folder_of_other_options_is_refused(tmp_path, stage_calls):
    quickstart.run(QuickstartOptions(output_dir=str(tmp_path / "q"), train_iters=6))
    with pytest.raises(ValueError, match="made with other options"):
        quickstart.run(QuickstartOptions(output_dir=str(tmp_path / "q"), train_iters=7))


def test_failing_stage_stops_the_quickstart(tmp_path):
    with pytest.raises(quickstart.RunStopped, match="ended with 2; its output above says why"):
        quickstart.run_module("megatron.training.plot", ["--metrics", str(tmp_path / "absent")])
