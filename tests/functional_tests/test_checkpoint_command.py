# SPDX-License-Identifier: Apache-2.0
"""The checkpoint command: list, inspect, verify and compare, and their exit codes."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megatron.cli.errors import ExitCode, OutputLost
from megatron.cli.standard_streams import guarded
from megatron.core.dist_checkpointing import (
    SaveFolderLock,
    Solo,
    StoreCoordinator,
    TensorChunk,
    latest_checkpoint,
    manifest,
    prune_checkpoints,
    read_manifest,
    save_checkpoint,
)
from megatron.training import checkpoint
from megatron.training.checkpointing.commands import inspection
from tests.support.inputs import generator
from tests.support.ranks import run_ranks, start_ranks

EXTRA = {
    "format": 1,
    "model": {"num_layers": 2, "attention": {"heads": 4}},
    "config": {"save": "runs/a", "lr": 0.1},
    "progress": {"iteration": 5, "consumed_samples": 40},
    "optimizer": {"kind": "adam", "steps": 5},
    "data": {"seed": 3},
    "window": {"loss": 1.5},
}
SHAPES = {"a.weight": (6, 10), "a.bias": (6,), "optimizer.exp_avg/a.weight": (6, 10), "one": ()}


def tensors() -> dict[str, torch.Tensor]:
    """Return the tensors of the test checkpoints."""
    random = generator(3)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def save(root: Path, step: int, values: dict[str, torch.Tensor], **extra: Any) -> Path:
    """Save whole tensors from one process."""
    chunks = [
        TensorChunk(
            name=name,
            shape=tuple(value.shape),
            offsets=(0,) * value.dim(),
            tensor=value,
            replica_ranks=(0,),
        )
        for name, value in values.items()
    ]
    return save_checkpoint(
        root, step, chunks, {**EXTRA, **extra}, coordinator=Solo(), block_bytes=1 << 20
    )


def save_in_columns(rank: int, world: int, root: Path, port: int) -> None:
    """Save the same tensors from two ranks with half of the columns each."""
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    chunks = []
    for name, value in tensors().items():
        cut = value.dim() == 2
        half = value.shape[-1] // 2 if cut else 0
        chunks.append(
            TensorChunk(
                name=name,
                shape=tuple(value.shape),
                offsets=(0, half * rank) if cut else (0,) * value.dim(),
                tensor=value[:, half * rank : half * (rank + 1)] if cut else value,
                replica_ranks=(rank,) if cut else (0, 1),
            )
        )
    coordinator = StoreCoordinator(store, rank, world, timeout_seconds=30)
    save_checkpoint(root, 5, chunks, EXTRA, coordinator=coordinator)


def command(capsys: Any, words: str) -> tuple[int, str, str]:
    """Run a command and return its exit code, stdout and stderr."""
    capsys.readouterr()
    code = checkpoint.main(words.split(), {})
    return code, *capsys.readouterr()


def flip(path: Path, position: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def hold(rank: int, world: int, root: Path) -> None:
    """Hold the lock of a folder until killed."""
    with SaveFolderLock(root):
        (root / "claimed").touch()
        time.sleep(60)


def test_list_shows_damage_and_the_checkpoint_to_load(tmp_path, capsys):
    root = tmp_path / "run"
    for step in (5, 10, 15):
        save(root, step, tensors())
    code, out, _ = command(capsys, f"list {root}")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["15", "10", "5"]
    assert out.count("  whole") == 3
    assert "a run would load: iter_0000015" in out
    assert "tracker: 15" in out
    assert "in use by: nobody" in out
    # Only reading finds a flipped bit; a missing file is found at once.
    shard = root / "iter_0000015" / "shard-00000.safetensors"
    flip(shard, shard.stat().st_size - 3)
    assert command(capsys, f"list {root}")[0] == 0
    code, out, _ = command(capsys, f"list {root} --verify")
    assert code == 1
    assert f"DAMAGED: {shard} is damaged: " in out
    assert "a run would load: iter_0000010" in out
    (root / "iter_0000010" / "shard-00000.safetensors").unlink()
    shutil.rmtree(root / "iter_0000015")
    (root / "iter_0000020.tmp-0123456789abcdef").mkdir()
    (root / "iter_0000015.damaged-01234567").mkdir()
    (root / "iter_0000030").mkdir()
    (root / "iter_0000030" / ".metadata").touch()
    code, out, _ = command(capsys, f"list {root}")
    assert code == 1
    assert out.count("DAMAGED") == 1
    assert "a run would load: iter_0000005" in out
    assert "  WARNING: falling back to" in out
    assert "temporary: iter_0000020.tmp-0123456789abcdef" in out
    assert "renamed: iter_0000015.damaged-01234567" in out
    assert "FOREIGN: of torch.distributed.checkpoint, see convert" in out


@pytest.mark.parametrize(
    "words",
    [
        "list {root}",
        "inspect {root}",
        "verify {root}",
        "compare {root} {root} --all",
        "list --help",
    ],
)
def test_command_ends_quietly_on_a_closed_pipe(words, tmp_path, capsys, monkeypatch):
    save(tmp_path / "run", 5, tensors())
    read_end, write_end = os.pipe()
    os.close(read_end)

    def broken(name, error):
        raise OutputLost(error)

    pipe = guarded(write_end, "stdout", broken, closed=False, like=None)
    monkeypatch.setattr("sys.stdout", pipe)
    code = checkpoint.main(words.format(root=tmp_path / "run").split(), {})
    monkeypatch.undo()
    os.close(write_end)
    assert code == ExitCode.OUTPUT_CLOSED
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("a x.safetensors", "missing --from, --to: give them"),
        ("a x.safetensors --from native", "missing --to: give it"),
        ("a x --to single-file", "missing --from: give it"),
    ],
)
def test_convert_names_missing_arguments_without_model_flags(words, line, capsys):
    code, out, err = command(capsys, f"convert {words}")
    assert (code, out) == (2, "")
    assert err == f"{checkpoint.PROG}: error: {line}\n"


def test_list_names_the_writer_without_taking_the_lock(tmp_path, capsys):
    root = tmp_path / "run"
    with start_ranks(hold, 1, root, init=False) as ranks:
        for _ in range(1000):
            if (root / "claimed").exists():
                break
            time.sleep(0.01)
        for _ in range(2):
            _, out, _ = command(capsys, f"list {root}")
            assert f"in use by: {(root / '.writer.lock').read_text().strip()}" in out
            assert "in use by: pid " in out
        ranks.kill(0)
        ranks.outcomes(timeout=20)
    assert "in use by: nobody" in command(capsys, f"list {root}")[1]


def test_inspect_shows_fields_totals_and_tensor_offsets(tmp_path, capsys):
    folder = save(tmp_path / "run", 5, tensors())
    code, out, _ = command(capsys, f"inspect {tmp_path / 'run'} --tensors a.*")
    assert code == 0
    assert "iteration 5," in out
    assert "weights: 3 tensors, 67 elements, 268 bytes" in out
    assert "optimizer.exp_avg: 1 tensors, 60 elements, 240 bytes" in out
    assert "  attention.heads: 4" in out
    begin = read_manifest(folder).tensors["a.bias"].chunks[0].begin
    assert f"[0:6] in shard-00000.safetensors at bytes [{begin}, {begin + 24})" in out
    assert "exp_avg/" not in out
    code, out, _ = command(capsys, f"inspect {folder} --json --tensors")
    report = json.loads(out)
    assert report["tensors"].keys() == SHAPES.keys()
    assert report["tensors"]["a.weight"]["shape"] == [6, 10]
    assert report["totals"]["weights"]["bytes"] == 268
    assert {name: report[name] for name in EXTRA if name != "format"} == {
        name: value for name, value in EXTRA.items() if name != "format"
    }
    assert json.loads(command(capsys, f"inspect {folder} --json")[1])["tensors"] == {}


@pytest.mark.parametrize(("options", "num_tensors"), [("", 3), (" --with-optimizer", 4)])
def test_experiment_state_is_not_counted_as_weights(options, num_tensors, tmp_path, capsys):
    averages = {f"experiment.average/{name}": value for name, value in tensors().items()}
    folder = save(tmp_path / "run", 5, tensors() | averages)
    code, out, _ = command(capsys, f"inspect {folder} --json")
    assert code == 0
    totals = json.loads(out)["totals"]
    assert {kind: row["tensors"] for kind, row in totals.items()} == {
        "weights": 3, "optimizer.exp_avg": 1, "experiment.average": 4,
    }  # fmt: skip
    file = tmp_path / "a.safetensors"
    words = f"convert {folder} {file} --from native --to single-file{options}"
    assert command(capsys, words)[0] == 0
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == {n for n in SHAPES if num_tensors == 4 or "/" not in n}


def test_verify_names_file_tensor_and_bytes(tmp_path, capsys):
    root = tmp_path / "run"
    folders = [save(root, step, tensors()) for step in (5, 10, 15)]
    (folders[0] / "notes.txt").write_text("mine")
    code, out, err = command(capsys, f"verify {root}")
    assert code == 0
    assert out.count("whole ") == 3
    shard_bytes = sum(file.bytes for file in read_manifest(folders[0]).files.values())
    header = next(iter(read_manifest(folders[0]).files.values())).header_bytes
    assert f"{shard_bytes - header} bytes of 4 tensors in 1 files verified" in out
    warnings = [line for line in err.splitlines() if "of a GPT of this version" not in line]
    assert warnings == [f"warning: {folders[0] / 'notes.txt'} is not part of the checkpoint"]
    # The newest and the oldest: neither hides the other.
    for folder in (folders[0], folders[2]):
        chunk = read_manifest(folder).tensors["a.weight"].chunks[0]
        flip(folder / chunk.file, chunk.begin + 17)
    code, out, err = command(capsys, f"verify {root}")
    assert code == 1
    assert out.count("whole ") == 1
    assert err.count("DAMAGED") == 2
    assert f"{folders[2] / chunk.file} is damaged: a.weight[0:6, 0:10]" in err
    assert f"in bytes [{chunk.begin}, {chunk.end})" in err
    (folders[1] / "shard-00000.safetensors").unlink()
    code, out, err = command(capsys, f"verify {folders[1]}")
    assert (code, out) == (1, "")
    assert f"cannot read {folders[1] / 'shard-00000.safetensors'}" in err


def test_compare_ignores_layout_and_names_differences(tmp_path, capsys):
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(save_in_columns, 2, tmp_path / "cut", server.port)
    cut = tmp_path / "cut" / "iter_0000005"
    assert len(read_manifest(cut).tensors["a.weight"].chunks) == 2, "the layouts are the same"
    changed_fields = {"config": {"save": "runs/b", "lr": 0.1}, "window": {"loss": 9.0}}
    whole = save(tmp_path / "whole", 5, tensors(), **changed_fields)
    code, out, _ = command(capsys, f"compare {cut} {whole}")
    assert code == 0, out
    assert "config.save: 'runs/a' and 'runs/b'" in out
    assert "equal: 4 of 4 common tensors are equal, 0 fields differ" in out

    values = tensors()
    values["a.weight"][4, 7] += 0.5  # in the second half, on the other rank
    largest = max(values["a.weight"].abs().max(), tensors()["a.weight"].abs().max())
    changed = save(tmp_path / "changed", 5, values)
    code, out, _ = command(capsys, f"compare {cut} {changed}")
    assert code == 1
    share = f"{0.5 / largest:.3g} of the largest element"
    assert f"a.weight: 1 of 60 elements differ, by at most 0.5, {share}" in out
    assert "different: 3 of 4 common tensors are equal, 0 fields differ" in out
    assert command(capsys, f"compare {cut} {changed} --tolerance {0.51 / largest:.4f}")[0] == 0
    assert command(capsys, f"compare {cut} {changed} --tolerance {0.49 / largest:.4f}")[0] == 1


def test_compare_reads_large_tensors_to_their_end(tmp_path, capsys):
    whole = torch.randn(3000, 400, generator=generator(8))  # two chunks of 4 MB
    save(tmp_path / "a", 5, {"a.weight": whole})
    for row, count in ((2999, 1), (1500, 2)):
        whole[row, 399] += 1.0
        save(tmp_path / f"b{row}", 5, {"a.weight": whole})
        code, out, _ = command(capsys, f"compare {tmp_path / 'a'} {tmp_path / f'b{row}'}")
        assert code == 1
        assert f"a.weight: {count} of 1200000 elements differ, by at most 1, " in out


@pytest.mark.parametrize(
    ("change", "text", "tolerant_code"),
    [
        ({"a.bias": torch.tensor([1.0, 2, 3, 4, 5, float("nan")])}, "by at most inf", 1),
        ({"a.weight": -tensors()["a.weight"] * 0}, "60 of 60 elements differ", 1),
        ({"a.weight": torch.zeros(5, 10)}, "a.weight: [6, 10] and [5, 10]", 1),
        ({"one": tensors()["one"].double()}, "one: F32 and F64, equal values", 0),
        ({"new": torch.zeros(2)}, "b/iter_0000005 only:\n  new", 1),
        ({"one": None}, "a/iter_0000005 only:\n  one", 1),
        ({"progress": {"iteration": 6}}, "progress.iteration: 5 and 6", 1),
    ],
)
def test_compare_finds_every_kind_of_difference(tmp_path, capsys, change, text, tolerant_code):
    save(tmp_path / "a", 5, tensors())
    extra = {"progress": change.pop("progress")} if "progress" in change else {}
    values = {**tensors(), **change}
    save(tmp_path / "b", 5, {k: v for k, v in values.items() if v is not None}, **extra)
    code, out, _ = command(capsys, f"compare {tmp_path / 'a'} {tmp_path / 'b'}")
    assert code == 1
    assert text in out
    words = f"compare {tmp_path / 'a'} {tmp_path / 'b'} --tolerance 0.01"
    assert command(capsys, words)[0] == tolerant_code


def test_compare_equates_nans_and_infs_but_not_signed_zeros(tmp_path, capsys):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1.0, 2.0])
    save(tmp_path / "a", 5, {"a.bias": values})
    save(tmp_path / "b", 5, {"a.bias": values.clone()})
    negative_zero = values.clone()
    negative_zero[3] = -0.0
    save(tmp_path / "c", 5, {"a.bias": negative_zero})
    assert command(capsys, f"compare {tmp_path / 'a'} {tmp_path / 'b'}")[0] == 0
    code, out, _ = command(capsys, f"compare {tmp_path / 'a'} {tmp_path / 'c'}")
    assert code == 1
    assert "a.bias: 1 of 6 elements differ, by at most 0, 0 of the largest" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("list {absent}", "there is no such folder"),
        ("list {root}/iter_0000005", "is one checkpoint: name the folder that contains it"),
        ("list {root} {root}", "unexpected argument"),
        ("list", "missing --root"),
        ("inspect {empty}", "contains no checkpoint: name another folder"),
        ("inspect {root} --tensors nothing*", "has no tensor with such a name"),
        ("verify {empty}", "contains no checkpoint"),
        ("compare {root}", "missing --second"),
        ("compare {root} {root} --tolerance -1", "--tolerance is -1.0"),
        ("remove {root}", "'remove' is not a command: use list, inspect, verify, compare"),
        ("", "'nothing' is not a command"),
    ],
)
def test_invalid_commands_are_refused_in_one_line(tmp_path, capsys, words, text):
    save(tmp_path / "root", 5, tensors())
    (tmp_path / "empty").mkdir()
    folders = {name: str(tmp_path / name) for name in ("root", "absent", "empty")}
    code, out, err = command(capsys, words.format(**folders))
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1


def test_every_command_has_help(capsys):
    code, out, _ = command(capsys, "--help")
    assert code == 0
    for name in checkpoint.COMMANDS:
        assert f"  {name} " in out
        code, text, _ = command(capsys, f"{name} --help")
        assert code == 0
        assert f"checkpoint {name} " in text
    assert "--from " in text
    assert "--from_" not in text
    assert "--num-layers" in text


def test_checkpoint_of_later_version_is_not_called_damaged(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(manifest, "VERSION", 2)
    folder = save(tmp_path / "run", 5, tensors())
    monkeypatch.undo()
    text = (
        "version 2, but this library reads 'megatron.core.dist_checkpointing' version 1: use the "
    )
    text += "megatron-core that wrote it or a later one, this is "
    for words in (f"inspect {folder}", f"compare {folder} {folder}"):
        code, _, err = command(capsys, words)
        assert code == 2
        assert text in err
        assert err.count("\n") == 1
    for words in (f"list {tmp_path / 'run'}", f"verify {folder}"):
        code, out, err = command(capsys, words)
        assert code == 1
        assert f"UNREADABLE: {folder / 'manifest.json'} cannot be used: " in out + err
        assert text in out + err
        assert "DAMAGED" not in out + err


def test_a_damaged_manifest_is_named(tmp_path, capsys):
    folder = save(tmp_path / "run", 5, tensors())
    flip(folder / "manifest.json", 200)
    for words in (f"inspect {folder}", f"compare {folder} {folder}", f"inspect {tmp_path / 'run'}"):
        code, out, err = command(capsys, words)
        assert (code, out) == (1, "")
        assert f"{folder / 'manifest.json'} has changed since it was written" in err
        assert err.count("\n") == 1


def prune_when_called(root: Path, monkeypatch: Any, name: str) -> None:
    """Prune all but the newest checkpoint when a function of the command is first called."""
    original = getattr(inspection, name)
    pruned: list[Path] = []

    def pruning(*arguments: Any, **options: Any) -> Any:
        if not pruned:
            pruned.extend(prune_checkpoints(root, keep_last=1))
            assert len(pruned) == 2, "retention had nothing to remove"
        return original(*arguments, **options)

    monkeypatch.setattr(inspection, name, pruning)


@pytest.mark.parametrize("words", ["verify {}", "list {}", "list {} --verify"])
def test_checkpoint_pruned_meanwhile_is_not_called_damaged(words, tmp_path, capsys, monkeypatch):
    for step in (5, 10, 15):
        save(tmp_path / "run", step, tensors())
    prune_when_called(tmp_path / "run", monkeypatch, "verify_contents")
    code, out, err = command(capsys, words.format(tmp_path / "run"))
    assert code == 0, err
    assert "iter_0000015" in out
    assert "DAMAGED" not in out + err
    assert ("removed meanwhile: " in out) == words.startswith("verify")


def test_list_survives_manifest_that_links_to_itself(tmp_path, capsys):
    for step in (5, 10):
        save(tmp_path, step, tensors())
    manifest_path = tmp_path / "iter_0000005" / "manifest.json"
    manifest_path.unlink()
    manifest_path.symlink_to(manifest_path)
    code, out, _ = command(capsys, f"list {tmp_path}")
    assert code == 1
    lines = out.splitlines()
    assert lines[2].endswith("whole")
    assert "DAMAGED" in lines[3]
    assert "a run would load: iter_0000010" in out


def test_checkpoint_link_out_of_run_folder_is_ignored(tmp_path, capsys):
    root, target = tmp_path / "run", save(tmp_path / "elsewhere", 10, tensors())
    save(root, 5, tensors())
    link = root / "iter_0000010"
    link.symlink_to(target)
    lines: list[str] = []
    assert latest_checkpoint(root, say=lines.append) == root / "iter_0000005"
    assert str(target) in lines[0]
    code, out, _ = command(capsys, f"list {root}")
    assert code == 1
    assert "a run would load: iter_0000005" in out
    assert "10.0 kB" not in out
    assert command(capsys, f"verify {root}")[0] == 1
    assert command(capsys, f"verify {link}")[0] == 0, "the user names it"
    link.unlink()
    (root / "kept").mkdir()
    inside = shutil.move(target, root / "kept" / "ten")
    link.symlink_to(inside)
    assert latest_checkpoint(root, say=lines.append) == link
    assert command(capsys, f"verify {root}")[0] == 0


#: A weight with a gradient, and a bias whose gradient is zero in exact arithmetic: largest first
#: and second moments. Rounding is 1e-9 of the largest gradient.
GRADIENT, ROUNDING = 1e-2, 1e-11


def trained(rounding: torch.Tensor, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a model after Adam steps, with the given rounding of the zero gradient."""
    random = generator(4)
    gradient = GRADIENT * torch.rand(4, 4, generator=random)
    return {
        "query.weight": torch.randn(4, 4, generator=random),
        "key.bias": 1e-3 * rounding,
        "optimizer.exp_avg/query.weight": gradient,
        "optimizer.exp_avg_sq/query.weight": gradient**2,
        "optimizer.exp_avg/key.bias": ROUNDING * rounding,
        "optimizer.exp_avg_sq/key.bias": (ROUNDING * rounding) ** 2,
        **changes,
    }


A, B = torch.tensor([1.0, -0.5, 0.3]), torch.tensor([-0.2, 0.7, -1.0])


def test_compare_ignores_rounding_of_zero_gradients(tmp_path, capsys):
    save(tmp_path / "a", 5, trained(A))  # 5 steps at 0.1: a weight moves by 0.5 at most
    save(tmp_path / "b", 5, trained(B))
    paths = f"{tmp_path / 'a'} {tmp_path / 'b'}"
    code, out, _ = command(capsys, f"compare {paths} --tolerance 1e-6")
    assert code == 0, out
    title = "tensors whose gradient is zero up to rounding, which does not count:\n"
    _, _, excused = out.partition(title)
    names = [line.split(":")[0].strip() for line in excused.splitlines()[:3]]
    assert names == ["key.bias", "optimizer.exp_avg/key.bias", "optimizer.exp_avg_sq/key.bias"]
    assert "equal: 3 of 6 common tensors are equal within 1e-06, 3 contain rounding" in out
    assert command(capsys, f"compare {paths}")[0] == 1, "bits differ"
    assert command(capsys, f"compare {paths} --tolerance 1e-10")[0] == 1, "above that share"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"optimizer.exp_avg/query.weight": torch.ones(4, 4)}, "optimizer.exp_avg/query.weight"),
        ({"key.bias": B + 2.0}, "key.bias"),  # no Adam moves it so far
        ({"optimizer.exp_avg/key.bias": GRADIENT * B}, "optimizer.exp_avg/key.bias"),
        ({"optimizer.exp_avg_sq/key.bias": torch.zeros(3)}, "key.bias"),  # one is not trained
    ],
)
def test_compare_reports_differences_above_rounding(changes, name, tmp_path, capsys):
    save(tmp_path / "a", 5, trained(A))
    save(tmp_path / "b", 5, trained(B, **changes))
    words = f"compare {tmp_path / 'a'} {tmp_path / 'b'} --tolerance 1e-6"
    code, out, _ = command(capsys, words)
    assert code == 1
    counted = out.partition("tensors that differ:\n")[2].partition("\ntensors whose")[0]
    assert f"  {name}: " in counted
