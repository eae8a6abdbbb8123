# SPDX-License-Identifier: Apache-2.0
"""Model shape, options and weights that a later run takes from a checkpoint."""

from __future__ import annotations

import json

import pytest

from megatron.cli.errors import ExitCode
from megatron.cli.schema import options
from megatron.cli.yaml_file import read_options, write_options
from megatron.core.dist_checkpointing import read_extra
from megatron.training.checkpoint import main as verify
from megatron.training.config import Config
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import digests, flags, losses, run_in_process, write_tokens

SHORT = "--eval-interval 0 --train-iters 2 --lr-warmup-iters 0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with token files at `tokens` and a checkpoint in `save`."""
    root = tmp_path_factory.mktemp("saved")
    prefix = write_tokens(root / "tokens")
    assert run_in_process(flags(prefix, f"{SHORT} --save {root / 'save'}")) == 0
    return root


def printed(capsys, tmp_path, words: str) -> dict[str, object]:
    """Return the options that `--print-config` prints, by name."""
    code = run_in_process([*words.split(), "--print-config"])
    out, err = capsys.readouterr()
    assert code == 0, err
    (tmp_path / "printed.yaml").write_text(out)
    return read_options(tmp_path / "printed.yaml", options(Config))


def test_checkpoint_gives_model_shape_and_explicit_flags_win(saved, tmp_path, capsys):
    words = f"--use-checkpoint-args --load {saved / 'save'}"
    values = printed(capsys, tmp_path, words)
    assert (values["num-layers"], values["hidden-size"], values["ffn-hidden-size"]) == (2, 48, 64)
    assert (values["normalization"], values["swiglu"], values["num-query-groups"]) == (
        "RMSNorm",
        True,
        2,
    )
    assert (values["seq-length"], values["train-iters"], values["vocab-size"]) == (24, 2, 61)
    assert (values["data-path"], values["split"]) == ((str(saved / "tokens"),), "90,10")
    assert values["lr-decay-style"] == "linear", "a default, not the checkpoint's: not the model's"
    (tmp_path / "defaults.yaml").write_text("hidden-dropout: 0.25\nattention-dropout: 0.25\n")
    overrides = f"--config {tmp_path / 'defaults.yaml'} --attention-dropout 0.0 --train-samples 40"
    overrides += " --data-path other"
    overridden = printed(capsys, tmp_path, f"{words} {overrides}")
    assert (overridden["hidden-dropout"], overridden["attention-dropout"]) == (0.25, 0.0)
    assert (overridden["train-iters"], overridden["train-samples"]) == (None, 40)
    assert (overridden["data-path"], overridden["split"]) == (("other",), "969,30,1"), (
        "the data as a whole"
    )
    again = f"--config {tmp_path / 'printed.yaml'}"
    assert printed(capsys, tmp_path, again) == overridden


SCHEDULE = (
    "--lr 1e-2 --min-lr 1e-3 --lr-decay-style linear --lr-decay-iters 40 --lr-warmup-iters 1 "
    "--weight-decay 0.3"
)
FROM_CHECKPOINT = "--use-checkpoint-opt_param-scheduler"


def test_checkpoint_lr_schedule_wins_if_requested(saved, tmp_path, capsys):
    names = ["lr", "min-lr", "lr-decay-style", "lr-decay-iters", "lr-warmup-iters", "weight-decay"]
    words = " ".join(flags(saved / "tokens", f"{SHORT} --train-iters 4 {SCHEDULE}"))
    saved_values = printed(capsys, tmp_path, " ".join(flags(saved / "tokens", SHORT)))
    flag_values = printed(capsys, tmp_path, words)
    assert all(flag_values[name] != saved_values[name] for name in names)
    load = f"--load {saved / 'save'}"
    checkpoint_values = printed(capsys, tmp_path, f"{words} {load} {FROM_CHECKPOINT}")
    assert [checkpoint_values[name] for name in names] == [saved_values[name] for name in names]
    assert checkpoint_values["train-iters"] == 4
    for extra_flags in (
        load,
        FROM_CHECKPOINT,
        f"--load {tmp_path / 'none'} {FROM_CHECKPOINT}",
        f"{load} {FROM_CHECKPOINT} --finetune",
        f"{load} {FROM_CHECKPOINT} --no-load-optim",
    ):
        unchanged_values = printed(capsys, tmp_path, f"{words} {extra_flags}")
        assert [unchanged_values[name] for name in names] == [
            flag_values[name] for name in names
        ], extra_flags


def test_checkpoint_schedule_with_other_batch_size_is_refused(saved, capsys):
    options = f"--load {saved / 'save'} {FROM_CHECKPOINT} --global-batch-size 16"
    assert run_in_process(flags(saved / "tokens", f"{SHORT} {options}")) == ExitCode.USER_ERROR
    err = capsys.readouterr().err
    assert "--global-batch-size 8" in err
    assert "--use-checkpoint-opt-param-scheduler" in err


def test_run_resumes_with_options_of_its_checkpoint(saved, tmp_path):
    options = "--train-iters 3 --log-interval 1 --eval-interval 0"
    words = f"--use-checkpoint-args --load {saved / 'save'} --global-batch-size 8 {options}"
    words += f" --metrics-file {tmp_path / 'm'}"
    assert run_in_process(words.split()) == 0
    assert list(losses(tmp_path / "m")) == [3]


def test_options_in_checkpoint_reproduce_the_run(saved, tmp_path, capsys):
    argv = " ".join(flags(saved / "tokens", f"{SHORT} --save {saved / 'save'}"))
    run = printed(capsys, tmp_path, argv)
    stored = read_extra(saved / "save" / "iter_0000002")["config"]
    assert stored == json.loads(json.dumps(run))
    all_options = options(Config)
    values = {o.name: o.from_json(stored[o.name], o.name) for o in all_options}
    (tmp_path / "stored.yaml").write_text(write_options(values, all_options))
    assert printed(capsys, tmp_path, f"--config {tmp_path / 'stored.yaml'}") == run


def test_pretrained_weights_load_until_own_checkpoint_exists(saved, tmp_path, capsys):
    pretrained = f"--pretrained-checkpoint {saved / 'save'} --metrics-file {tmp_path / 'm'}"
    pretrained += " --optimizer sgd"  # the other optimizer's state is not loaded
    argv = flags(saved / "tokens", f"{SHORT} {pretrained} --save {tmp_path / 'a'}")
    assert run_in_process([*argv, "--load", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    loaded = f"loaded the weights of {saved / 'save' / 'iter_0000002'}; starting at iteration 0"
    assert loaded in out
    fresh = tmp_path / "fresh"
    assert run_in_process(flags(saved / "tokens", f"{SHORT} --metrics-file {fresh}")) == 0
    assert losses(tmp_path / "m")[1] < losses(fresh)[1] - 0.05, "the weights are trained ones"
    capsys.readouterr()
    argv = flags(saved / "tokens", f"{SHORT} --train-iters 3 {pretrained} --load {tmp_path / 'a'}")
    assert run_in_process(argv) == 0
    assert f"loaded {tmp_path / 'a' / 'iter_0000002'}; resuming at" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--use-checkpoint-args", "--use-checkpoint-args needs --load or --pretrained-checkpoint"),
        ("--pretrained-checkpoint {0}", "--pretrained-checkpoint {0}: there is no checkpoint"),
        ("--pretrained-checkpoint {0}/iter_9", "--pretrained-checkpoint {0}/iter_9: there is no"),
    ],
)
def test_absent_checkpoint_is_refused(saved, tmp_path, capsys, options, message):
    absent = tmp_path / "absent"
    argv = flags(saved / "tokens", f"{SHORT} {options.format(absent)}")
    assert run_in_process(argv) == ExitCode.USER_ERROR
    assert message.format(absent) in capsys.readouterr().err


#: 4 steps of linear warm-up to a constant rate.
WARM = "--lr 4e-3 --lr-warmup-iters 4 --lr-decay-iters 9 --lr-decay-style constant"
WARM += " --eval-interval 0"


def rates(metrics) -> dict[int, float]:
    """Return the learning rate of a run's steps by iteration."""
    events = read_metrics(metrics)
    return {e["iteration"]: e["learning_rate"] for e in events if e["kind"] == "train"}


@pytest.mark.parametrize(
    ("options", "updates", "message"),
    [
        ("", 2, "resuming at iteration 2"),
        ("--schedule-on-load restart", 0, "--schedule-on-load continue"),
        ("--no-load-optim", 0, "--schedule-on-load continue"),
        ("--no-load-optim --schedule-on-load continue", 2, "--schedule-on-load restart"),
    ],
)
def test_schedule_continues_or_restarts_on_load(saved, tmp_path, capsys, options, updates, message):
    metrics = tmp_path / "more.jsonl"
    words = f"{WARM} --train-iters 4 --load {saved / 'save'} --metrics-file {metrics} {options}"
    assert run_in_process(flags(saved / "tokens", words)) == 0
    # Data and iterations continue in any case.
    expected = {3: 4e-3 * updates / 4, 4: 4e-3 * (updates + 1) / 4}
    assert rates(metrics) == pytest.approx(expected)
    assert message in capsys.readouterr().out


def test_checkpoint_without_optimizer_state_resumes(saved, tmp_path, capsys):
    prefix = saved / "tokens"
    words = f"{SHORT} --save {tmp_path / 'light'} --no-save-optim"
    assert run_in_process(flags(prefix, words)) == 0
    whole, light = (root / "iter_0000002" for root in (saved / "save", tmp_path / "light"))
    tensors = digests(whole)
    weights = {n: d for n, d in tensors.items() if not n.startswith("optimizer.")}
    assert len(tensors) > len(weights) > 0
    assert digests(light) == weights
    assert verify(["verify", str(light)], {}) == 0
    capsys.readouterr()
    words = f"{SHORT} --train-iters 3 --load {light.parent}"
    assert run_in_process(flags(prefix, words)) == ExitCode.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "--no-load-optim" in line
    # The same as not loading the state of a checkpoint that contains it.
    run_losses = []
    for folder in (light, whole):
        metrics = tmp_path / f"{folder.parent.name}.jsonl"
        words = f"{SHORT} --train-iters 3 --load {folder.parent} --metrics-file {metrics}"
        assert run_in_process(flags(prefix, f"{words} --no-load-optim")) == 0
        run_losses.append(losses(metrics))
    assert list(run_losses[0]) == [3]
    assert run_losses[0] == run_losses[1]


def test_resumed_mla_run_keeps_its_rope_type(saved, tmp_path, capsys):
    prefix = saved / "tokens"
    latent = (
        f"{SHORT} --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 6 --v-head-dim 6 "
        "--qk-pos-emb-head-dim 4 --train-iters"
    )
    grouped = ("--group-query-attention", "--num-query-groups")
    save = tmp_path / "save"
    initial_flags = f"{latent} 2 --save {save} --qk-layernorm --rope-type rope"
    assert run_in_process(flags(prefix, initial_flags, without=grouped)) == 0
    capsys.readouterr()
    # Flags of a run that started before the flags had Megatron-LM's meaning.
    again = f"{latent} 3 --load {save} --metrics-file {tmp_path / 'm'}"
    assert run_in_process(flags(prefix, again, without=grouped)) == 0
    assert list(losses(tmp_path / "m")) == [3]
    assert f"--position-embedding-type is rope as in {save}" in capsys.readouterr().err
    scaled = flags(prefix, f"{again} --qk-layernorm --rope-type yarn", without=grouped)
    assert run_in_process(scaled) == ExitCode.USER_ERROR
    assert "contains another model: rope.scaling" in capsys.readouterr().err
