# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint gives a later run: its model's shape, its options as they were, its weights."""

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
from tests.functional_tests.small_run import digests, flags, losses, run_here, write_tokens

SHORT = "--eval-interval 0 --train-iters 2 --lr-warmup-iters 0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with token files at `tokens` and a checkpoint in `save`."""
    root = tmp_path_factory.mktemp("saved")
    prefix = write_tokens(root / "tokens")
    assert run_here(flags(prefix, f"{SHORT} --save {root / 'save'}")) == 0
    return root


def printed(capsys, tmp_path, words: str) -> dict[str, object]:
    """Return what `--print-config` prints, by option name."""
    code = run_here([*words.split(), "--print-config"])
    out, err = capsys.readouterr()
    assert code == 0, err
    (tmp_path / "printed.yaml").write_text(out)
    return read_options(tmp_path / "printed.yaml", options(Config))


def test_checkpoint_gives_model_shape_and_explicit_flags_win(saved, tmp_path, capsys):
    words = f"--use-checkpoint-args --load {saved / 'save'}"
    got = printed(capsys, tmp_path, words)
    assert (got["num-layers"], got["hidden-size"], got["ffn-hidden-size"]) == (2, 48, 64)
    assert (got["normalization"], got["swiglu"], got["num-query-groups"]) == ("RMSNorm", True, 2)
    assert (got["seq-length"], got["train-iters"], got["vocab-size"]) == (24, 2, 61)
    assert (got["data-path"], got["split"]) == ((str(saved / "tokens"),), "90,10")
    assert got["lr-decay-style"] == "linear", "a default, not the checkpoint's: not the model's"
    (tmp_path / "defaults.yaml").write_text("hidden-dropout: 0.25\nattention-dropout: 0.25\n")
    more = f"--config {tmp_path / 'defaults.yaml'} --attention-dropout 0.0 --train-samples 40"
    more += " --data-path other"
    given = printed(capsys, tmp_path, f"{words} {more}")
    assert (given["hidden-dropout"], given["attention-dropout"]) == (0.25, 0.0)
    assert (given["train-iters"], given["train-samples"]) == (None, 40)
    assert (given["data-path"], given["split"]) == (("other",), "969,30,1"), "the data as a whole"
    again = f"--config {tmp_path / 'printed.yaml'}"
    assert printed(capsys, tmp_path, again) == given


SCHEDULE = (
    "--lr 1e-2 --min-lr 1e-3 --lr-decay-style linear --lr-decay-iters 40 --lr-warmup-iters 1 "
    "--weight-decay 0.3"
)
FROM_CHECKPOINT = "--use-checkpoint-opt_param-scheduler"


def test_checkpoint_lr_schedule_wins_if_requested(saved, tmp_path, capsys):
    names = ["lr", "min-lr", "lr-decay-style", "lr-decay-iters", "lr-warmup-iters", "weight-decay"]
    words = " ".join(flags(saved / "tokens", f"{SHORT} --train-iters 4 {SCHEDULE}"))
    first = printed(capsys, tmp_path, " ".join(flags(saved / "tokens", SHORT)))
    given = printed(capsys, tmp_path, words)
    assert all(given[name] != first[name] for name in names)
    load = f"--load {saved / 'save'}"
    taken = printed(capsys, tmp_path, f"{words} {load} {FROM_CHECKPOINT}")
    assert [taken[name] for name in names] == [first[name] for name in names]
    assert taken["train-iters"] == 4
    for more in (
        load,
        FROM_CHECKPOINT,
        f"--load {tmp_path / 'none'} {FROM_CHECKPOINT}",
        f"{load} {FROM_CHECKPOINT} --finetune",
        f"{load} {FROM_CHECKPOINT} --no-load-optim",
    ):
        kept = printed(capsys, tmp_path, f"{words} {more}")
        assert [kept[name] for name in names] == [given[name] for name in names], more


def test_a_schedule_that_counts_other_batches_is_refused(saved, capsys):
    more = f"--load {saved / 'save'} {FROM_CHECKPOINT} --global-batch-size 16"
    assert run_here(flags(saved / "tokens", f"{SHORT} {more}")) == ExitCode.USER_ERROR
    err = capsys.readouterr().err
    assert "--global-batch-size 8" in err
    assert "--use-checkpoint-opt-param-scheduler" in err


def test_options_overridden_by_checkpoint_are_logged(saved, capsys):
    more = f"{SHORT} --load {saved / 'save'} {FROM_CHECKPOINT} --lr 1e-2 --print-config"
    assert run_here(flags(saved / "tokens", more)) == 0
    assert "--lr is 0.005 as in " in capsys.readouterr().err


def test_a_run_goes_on_with_the_options_of_its_checkpoint(saved, tmp_path):
    more = "--train-iters 3 --log-interval 1 --eval-interval 0"
    words = f"--use-checkpoint-args --load {saved / 'save'} --global-batch-size 8 {more}"
    words += f" --metrics-file {tmp_path / 'm'}"
    assert run_here(words.split()) == 0
    assert list(losses(tmp_path / "m")) == [3]


def test_the_options_in_a_checkpoint_are_the_run_s_and_feed_back(saved, tmp_path, capsys):
    argv = " ".join(flags(saved / "tokens", f"{SHORT} --save {saved / 'save'}"))
    run = printed(capsys, tmp_path, argv)
    stored = read_extra(saved / "save" / "iter_0000002")["config"]
    assert stored == json.loads(json.dumps(run))
    known = options(Config)
    values = {o.name: o.from_json(stored[o.name], o.name) for o in known}
    (tmp_path / "stored.yaml").write_text(write_options(values, known))
    assert printed(capsys, tmp_path, f"--config {tmp_path / 'stored.yaml'}") == run


def test_pretrained_weights_load_until_own_checkpoint_exists(saved, tmp_path, capsys):
    pretrained = f"--pretrained-checkpoint {saved / 'save'} --metrics-file {tmp_path / 'm'}"
    pretrained += " --optimizer sgd"  # the other optimizer's state is left where it is
    argv = flags(saved / "tokens", f"{SHORT} {pretrained} --save {tmp_path / 'a'}")
    assert run_here([*argv, "--load", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    loaded = f"loaded the weights of {saved / 'save' / 'iter_0000002'}; starting at iteration 0"
    assert loaded in out
    fresh = tmp_path / "fresh"
    assert run_here(flags(saved / "tokens", f"{SHORT} --metrics-file {fresh}")) == 0
    assert losses(tmp_path / "m")[1] < losses(fresh)[1] - 0.05, "the weights are trained ones"
    capsys.readouterr()
    argv = flags(saved / "tokens", f"{SHORT} --train-iters 3 {pretrained} --load {tmp_path / 'a'}")
    assert run_here(argv) == 0
    assert f"loaded {tmp_path / 'a' / 'iter_0000002'}; resuming at" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--use-checkpoint-args", "--use-checkpoint-args needs --load or --pretrained-checkpoint"),
        ("--pretrained-checkpoint {0}", "--pretrained-checkpoint {0}: there is no checkpoint"),
        ("--pretrained-checkpoint {0}/iter_9", "--pretrained-checkpoint {0}/iter_9: there is no"),
    ],
)
def test_a_checkpoint_that_is_not_there(saved, tmp_path, capsys, more, message):
    absent = tmp_path / "absent"
    argv = flags(saved / "tokens", f"{SHORT} {more.format(absent)}")
    assert run_here(argv) == ExitCode.USER_ERROR
    assert message.format(absent) in capsys.readouterr().err


def test_command_line_options_suffice_without_checkpoint(saved, tmp_path, capsys):
    words = f"--use-checkpoint-args --load {tmp_path / 'absent'}"
    assert run_here(flags(saved / "tokens", f"{SHORT} {words}")) == 0
    assert f"no checkpoint in {tmp_path / 'absent'}" in capsys.readouterr().out
    assert run_here(flags(saved / "tokens", words, without=("--lr",))) == ExitCode.USER_ERROR
    err = capsys.readouterr().err
    assert f"no checkpoint in {tmp_path / 'absent'}" in err
    assert "--lr" in err


#: 4 steps of linear warm-up to a rate that stays.
WARM = "--lr 4e-3 --lr-warmup-iters 4 --lr-decay-iters 9 --lr-decay-style constant"
WARM += " --eval-interval 0"


def rates(metrics) -> dict[int, float]:
    """Return the learning rate of a run's steps by iteration."""
    events = read_metrics(metrics)
    return {e["iteration"]: e["learning_rate"] for e in events if e["kind"] == "train"}


@pytest.mark.parametrize(
    ("more", "updates", "said"),
    [
        ("", 2, "resuming at iteration 2"),
        ("--schedule-on-load restart", 0, "--schedule-on-load continue"),
        ("--no-load-optim", 0, "--schedule-on-load continue"),
        ("--no-load-optim --schedule-on-load continue", 2, "--schedule-on-load restart"),
    ],
)
def test_where_the_schedule_goes_on(saved, tmp_path, capsys, more, updates, said):
    metrics = tmp_path / "more.jsonl"
    words = f"{WARM} --train-iters 4 --load {saved / 'save'} --metrics-file {metrics} {more}"
    assert run_here(flags(saved / "tokens", words)) == 0
    # Data and iterations go on in any case.
    expected = {3: 4e-3 * updates / 4, 4: 4e-3 * (updates + 1) / 4}
    assert rates(metrics) == pytest.approx(expected)
    assert said in capsys.readouterr().out


def test_a_checkpoint_without_optimizer_state_goes_on_without(saved, tmp_path, capsys):
    prefix = saved / "tokens"
    words = f"{SHORT} --save {tmp_path / 'light'} --no-save-optim"
    assert run_here(flags(prefix, words)) == 0
    whole, light = (root / "iter_0000002" for root in (saved / "save", tmp_path / "light"))
    tensors = digests(whole)
    weights = {n: d for n, d in tensors.items() if not n.startswith("optimizer.")}
    assert len(tensors) > len(weights) > 0
    assert digests(light) == weights
    assert verify(["verify", str(light)], {}) == 0
    capsys.readouterr()
    words = f"{SHORT} --train-iters 3 --load {light.parent}"
    assert run_here(flags(prefix, words)) == ExitCode.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "--no-load-optim" in line
    # The same as leaving out the state of a checkpoint that has it.
    found = []
    for folder in (light, whole):
        metrics = tmp_path / f"{folder.parent.name}.jsonl"
        words = f"{SHORT} --train-iters 3 --load {folder.parent} --metrics-file {metrics}"
        assert run_here(flags(prefix, f"{words} --no-load-optim")) == 0
        found.append(losses(metrics))
    assert list(found[0]) == [3]
    assert found[0] == found[1]


def test_a_resumed_run_of_latent_attention_keeps_its_rotation(saved, tmp_path, capsys):
    prefix = saved / "tokens"
    latent = (
        f"{SHORT} --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 6 --v-head-dim 6 "
        "--qk-pos-emb-head-dim 4 --train-iters"
    )
    grouped = ("--group-query-attention", "--num-query-groups")
    save = tmp_path / "save"
    first = f"{latent} 2 --save {save} --qk-layernorm --rope-type rope"
    assert run_here(flags(prefix, first, without=grouped)) == 0
    capsys.readouterr()
    # The words of a run that began before the flags meant what they mean in Megatron-LM.
    again = f"{latent} 3 --load {save} --metrics-file {tmp_path / 'm'}"
    assert run_here(flags(prefix, again, without=grouped)) == 0
    assert list(losses(tmp_path / "m")) == [3]
    assert f"--position-embedding-type is rope as in {save}" in capsys.readouterr().err
    scaled = flags(prefix, f"{again} --qk-layernorm --rope-type yarn", without=grouped)
    assert run_here(scaled) == ExitCode.USER_ERROR
    assert "contains another model: rope.scaling" in capsys.readouterr().err
