# SPDX-License-Identifier: Apache-2.0
"""Launch: the environment of torchrun, other launchers, and the store of ranks."""

from __future__ import annotations

import importlib
import socket
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.cli import error_reports
from megatron.cli.errors import ExitCode, RunStopped
from megatron.cli.launch import Launch
from megatron.training.pretrain_gpt import main
from tests.functional_tests.small_run import flags, write_tokens

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_empty_environment_is_a_single_process():
    assert Launch.from_environment({}) == Launch(rank=0, world_size=1, local_rank=0)


def test_torchrun_environment_is_read():
    assert Launch.from_environment(TORCHRUN) == Launch(
        rank=3,
        world_size=4,
        local_rank=1,
        address="host",
        port=29500,
        launcher_serves=True,
        attempt=2,
    )


SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"}


@pytest.mark.parametrize(
    ("environment", "texts"),
    [
        (SRUN, ["SLURM_NTASKS is 4", "torchrun --standalone --nproc-per-node 4 -m"]),
        (
            {**SRUN, "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"},
            ["srun --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 "],
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            ["OMPI_COMM_WORLD_SIZE is 2", "torchrun --standalone --nproc-per-node 2 -m"],
        ),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "6", "MPI_LOCALNRANKS": "2"},
            ["PMI_SIZE is 6", "torchrun --nnodes 3 --nproc-per-node 2 "],
        ),
    ],
)
def test_processes_of_other_launchers_are_refused(environment, texts):
    """Each process would otherwise run as a single process and overwrite the others' files."""
    with pytest.raises(ValueError, match="torchrun") as caught:
        Launch.from_environment(environment)
    assert all(text in str(caught.value) for text in texts), caught.value


@pytest.mark.parametrize(
    "environment",
    [
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # one task of a larger job
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"},  # a shell started by salloc
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_single_process_of_another_launcher_is_accepted(environment):
    assert Launch.from_environment(environment) == Launch()


def test_torchrun_started_by_srun_takes_precedence():
    assert Launch.from_environment({**SRUN, **TORCHRUN}) == Launch.from_environment(TORCHRUN)


@pytest.mark.parametrize("module", ["training.pretrain_gpt", "inference.serve"])
def test_entry_script_under_srun_writes_no_file(module, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(error_reports, "PATIENCE_SECONDS", 0.0)
    program = importlib.import_module(f"megatron.{module}")
    argv = ["--load", str(tmp_path)]
    if program.__name__.endswith("pretrain_gpt"):
        argv = flags(write_tokens(tmp_path / "tokens"), f"--save {tmp_path / 'save'}")
    codes = [program.main(argv, {**SRUN, "SLURM_PROCID": str(rank)}) for rank in range(4)]
    assert codes == [ExitCode.USER_ERROR] * 4
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert "torchrun --standalone --nproc-per-node 4 -m" in err
    assert not (tmp_path / "save").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_PORT", None),
        ("LOCAL_RANK", None),
        ("MASTER_PORT", "abc"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("RANK", "x"),
        ("RANK", ""),
        ("RANK", "-1"),
        ("RANK", "4"),
        ("WORLD_SIZE", "two"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "-1"),
        ("LOCAL_RANK", "1.5"),
        ("TORCHELASTIC_RESTART_COUNT", "often"),
    ],
)
def test_invalid_environment_variable_is_named_in_one_line(name, value):
    environment = {k: v for k, v in {**TORCHRUN, name: value}.items() if v is not None}
    with pytest.raises(ValueError, match=name) as caught:
        Launch.from_environment(environment)
    assert (value or "") in str(caught.value)


def _rank(rank: int, port: int, address: str = "127.0.0.1", *, serves: bool = False) -> Launch:
    return Launch(rank=rank, world_size=2, address=address, port=port, launcher_serves=serves)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("serves", "code"), [(False, ExitCode.PEER_LOST), (True, ExitCode.LAUNCHER_LOST)]
)
def test_port_without_listener_is_named(serves, code):
    port = _free_port()
    with pytest.raises(RunStopped, match=f"MASTER_PORT {port} of MASTER_ADDR 127.0.0.1") as caught:
        _rank(1, port, serves=serves).connect(timeout_seconds=0.05, is_first_client=True)
    assert caught.value.code == code


def test_port_in_use_is_named():
    with (
        socket.create_server(("", 0)) as listener,
        pytest.raises(ValueError, match=f"MASTER_PORT {listener.getsockname()[1]} "),
    ):
        _rank(0, listener.getsockname()[1]).connect(timeout_seconds=1.0, is_first_client=True)


def test_unresolvable_address_is_named():
    with pytest.raises(ValueError, match=r"MASTER_ADDR no-such-host\.invalid"):
        _rank(1, 29500, "no-such-host.invalid").connect(timeout_seconds=0.05, is_first_client=True)


def test_port_of_another_program_is_named():
    """The program accepts connections and does not speak the store's protocol."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ValueError, match=f"MASTER_PORT {listener.getsockname()[1]} "),
    ):
        _rank(1, listener.getsockname()[1]).connect(timeout_seconds=0.2, is_first_client=True)


def test_keys_of_ranks_outlive_the_launchers_store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = _rank(0, server.port, serves=True)
    (address, port), rank_store = launch.serve_store(timeout_seconds=10.0)
    clients = [
        replace(launch, rank=rank, rank0_store=(address, port)).open_store(timeout_seconds=10.0)
        for rank in range(2)
    ]
    clients[0].set("a", "b")
    assert clients[1].get("a") == b"b"
    assert clients[1].add("n", 2) == 2
    del server
    assert clients[1].get("a") == b"b"
    assert clients[1].add("n", 3) == 5
    clients[1].set("c", "d")
    clients[0].wait(["c"], timedelta(seconds=10))
    assert clients[0].delete_key("c")
    assert not clients[1].check(["c"])
    with pytest.raises(dist.DistStoreError):
        clients[0].wait(["never"], timedelta(seconds=0.01))
    del rank_store
    with pytest.raises(dist.DistNetworkError):
        clients[1].check(["a"])


def test_single_process_has_its_own_store():
    store = Launch().open_store(timeout_seconds=1.0, is_first_client=True)
    store.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize(("rank", "address"), [(1, "127.0.0.1"), (0, "no-such-host.invalid")])
def test_failed_start_is_reported_by_any_rank(rank, address, capsys):
    """Local ranks other than 0 report too, because local rank 0 may be the missing rank."""
    argv = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1e-3"
    argv += " --micro-batch-size 1 --train-iters 1 --mock-data --tokenizer-type null"
    argv += " --vocab-size 9 --distributed-timeout-minutes 0.01"
    port = str(_free_port())
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    code = main(argv.split(), environment)
    assert code == (ExitCode.PEER_LOST if rank else ExitCode.USER_ERROR)
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert f"MASTER_ADDR {address}" in err
