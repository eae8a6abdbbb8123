# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md equals the output of its tool; synthetic results, verdicts, failing
stages."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from tools import write_performance
from tools.bench import timing
from tools.bench.cases import Case, require_same
from tools.bench.harness import Bench
from tools.bench.results import joined, rows_of, text_of
from tools.bench.table import (
    DECODE_PROMISE,
    LONG_TRAINING_MFU,
    TRAINING_MFU,
    Peer,
    Row,
    format_table,
    open_targets,
    verdict,
)
from tools.bench.timing import ratio_of
from tools.gpu_stages import Stage, run_stage


def row(**changes) -> Row:
    return (
        Row(
            bench="kernels",
            what="delta rule, forward",
            unit="ms",
            ours=0.9,
            peers={
                "fla": Peer(figure=1.9, ratio=2.11),
                "transformers autocast": Peer(figure=2, ratio=1),
            },
            bound=0.25,
            share=0.278,
            targets=["fla >= 1.6", "ms <= 0.88"],
            note="",
        )
        | changes
    )


def test_performance_page_is_up_to_date():
    folder, text = write_performance.RESULTS, write_performance.PAGE.read_text("utf-8")
    written = write_performance.page(
        text, write_performance.read(folder), write_performance.read_cpu(folder)
    )
    assert written == text, "python -m tools.write_performance"
    assert DECODE_PROMISE in text
    for share in (TRAINING_MFU, LONG_TRAINING_MFU):
        assert f"{100 * share:.0f} % of the data sheet's peak" in text
    if not list(folder.glob("*.json")):
        assert "there are no numbers" in text
        assert "\nmake gpu\n" in text


def test_synthetic_results_are_rendered(tmp_path):
    stages = {
        "tests": {"when": "2031-05-06T07:08:09", "seconds": 61.0, "commands": 9, "problems": {}},
        "kernels": {
            "when": "2031-05-06T07:10:09",
            "seconds": 100.5,
            "commands": 1,
            "problems": {"rope": "ValueError: a | b"},
            "rates": {"copy_bytes_per_second": 4.3e12, "matmul_flops": 790e12},
            "rows": [row(), row(what="split", peers={}, note="fla cannot be imported")],
            "kernels": {"a step": [{"kernel": "k<a|b>", "ms": 1.5, "calls": 2.0, "share": 0.25}]},
        },
    }
    machine = {"device": "NVIDIA H200", "torch": "9.9"}
    peers = {"fla": None, "mamba_ssm": "ModuleNotFoundError: No module named 'mamba_ssm'"}
    older = {"when": "2030-01-01T00:00:00", "machine": machine | {"device": "Older"}, "stages": {}}
    for name, content in (
        ("b", older),
        ("a", {"when": "2031-05-06T07:10:09", "stages": stages, "peers": peers}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": machine} | content))
    before = write_performance.PAGE.read_text("utf-8")
    text = write_performance.page(before, write_performance.read(tmp_path), "| new |\n")
    # Sections replace earlier ones, also results.
    assert write_performance.page(text, write_performance.read(tmp_path), "| new |\n") == text
    assert text.endswith("```\n\n| new |\n")
    assert text.index("## NVIDIA H200, 2031-05-06") < text.index("## Older, 2030-01-01")
    assert "(NVIDIA H200, 2031-05-06): 1 met, 2 missed, 1 open." in text
    for phrase in ("fla 1.9 ms (2.11 x)", "copies 4.30 TB/s and multiplies 790 TFLOP/s", "28%"):
        assert phrase in text, phrase
    assert "- split: fla >= 1.6 (fla cannot be imported)" in text
    assert "rope: ValueError: a / b" in text
    assert "`k<a/b>`" in text
    assert "\nfla can be imported.\n" in text
    assert "mamba_ssm cannot be imported: ModuleNotFoundError: No module named 'mamba_ssm'." in text
    assert "there are no numbers" not in text


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("fla >= 1.6", "met"),
        ("fla >= 2.2", "missed"),
        ("transformers autocast >= 1.0", "met"),
        ("mamba_ssm >= 1", "open"),
        ("ms <= 0.88", "missed"),
        ("ms <= 0.9", "met"),
        ("share >= 0.85", "missed"),
        ("share >= 0.278", "met"),
    ],
)
def test_verdict_compares_figure_with_target(target, expected):
    assert verdict(row(), target) == expected
    assert verdict(row(ours=None, share=None, peers={}), target) == "open"


def test_malformed_target_is_refused():
    with pytest.raises(ValueError, match=re.escape("write 'share >= 0.85'")):
        verdict(row(), "share > 3")
    assert open_targets([row(ours=None, targets=["ms <= 1"], note="why")]) == [
        "delta rule, forward: ms <= 1 (why)"
    ]
    assert len({len(line) for line in format_table([row(), row(note="x")]).splitlines()}) == 1


def test_stages_of_a_day_are_joined_in_one_file(tmp_path):
    stage_files, folder = tmp_path / "parts", tmp_path / "out"
    stage_files.mkdir()
    ended = {"when": "2031-05-06T07:08:09", "seconds": 1.0, "commands": 1, "problems": {"a": "b"}}
    (stage_files / "decode.json").write_text(
        json.dumps({"rows": [row(bench="decode")], "rates": {}, "problems": {"c": "d"}})
    )
    path, _ = joined({"decode": ended}, stage_files, folder, peers={"a": None, "b": "gone"})
    later = ended | {"when": "2031-05-06T09:00:00", "problems": {}}
    again, report = joined({"tests": later}, stage_files, folder, peers={"b": None})
    assert path == again
    assert path.name.endswith("-2031-05-06.json")
    assert report == json.loads(path.read_text())
    assert report["stages"]["decode"]["problems"] == {"a": "b", "c": "d"}
    assert [r["bench"] for r in rows_of(report)] == ["decode"]
    assert report["machine"]["torch"]
    assert report["peers"] == {"a": None, "b": None}
    assert "| tests | 1 | 1 | none |" in text_of(report)


class _Clock:
    """A clock that advances by one second per reading; calls can advance it further."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        self.seconds += 1.0
        return self.seconds


def test_failing_case_does_not_stop_later_cases(tmp_path, capsys, monkeypatch):
    """Every call takes one second of a fake clock, so that rates and figures are known."""
    clock = _Clock()
    monkeypatch.setattr(timing, "time", clock)
    options = argparse.Namespace(
        rehearse=True, quick=False, part=str(tmp_path / "part.json"), seconds=math.inf
    )
    bench = Bench("some", options)

    def slow_peer():
        clock.seconds += 2.0

    def good(bench):
        yield Case(
            name="sum",
            mcore=lambda: None,
            peers={"other": slow_peer},
            moved_bytes=32.0,
            flops=1.0,
            count=2,
            targets=["other >= 1"],
        )

    def bad(bench):
        require_same("two", torch.ones(2), torch.tensor([1.0, 1.1]), 0.05)

    def slow(bench):
        bench.end = time.monotonic()

    cases = (("bad", bad), ("good", good), ("slow", slow), ("late", good))
    assert bench.run(cases) == 1
    report = json.loads((tmp_path / "part.json").read_text())
    assert report["problems"] == {
        "bad": "ValueError: two: error 0.091 > 0.05: the race is void",
        "late": "not started: no time left",
    }
    copied, multiplied = 2 * 4 * 2**12, 2 * 32**3  # bytes and operations per second
    assert report["rates"] == {"copy_bytes_per_second": copied, "matmul_flops": multiplied}
    (row_of_good,) = report["rows"]
    share = 32 / copied  # more than 1 / multiplied
    assert row_of_good["ours"] == 1000 / 2
    assert row_of_good["share"] == pytest.approx(share)
    assert row_of_good["bound"] == pytest.approx(share * 1000 / 2)
    assert row_of_good["peers"]["other"] == {"figure": 3000 / 2, "ratio": 3.0}
    assert capsys.readouterr().out.endswith("1 rows, 2 problems\n")


def test_ratio_is_the_median_over_rounds():
    assert ratio_of([1.0, 2.0, 4.0], [3.0, 2.0, 8.0]) == 2.0


def test_failing_or_hanging_command_leaves_others_running(tmp_path, capsys):
    alive = tmp_path / "alive"
    child = f"import os, time; open({str(alive)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    commands = {
        "fails": "print('the reason'); raise SystemExit(3)",
        "passes": "print('3 passed')",
        "hangs": f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])",
        "late": "pass",
    }
    stage = Stage("s", {n: [sys.executable, "-c", c] for n, c in commands.items()}, 4.0, jobs=1)
    start = time.monotonic()
    outcome = run_stage(stage, folder=tmp_path, environment=os.environ, deadline=start + 60)
    assert time.monotonic() - start < 20
    assert outcome.problems["fails"] == "failed with exit code 3"
    assert re.fullmatch(r"not finished after \d+ s", outcome.problems["hangs"])
    assert outcome.problems["late"] == "not started: no time left"
    assert "passes" not in outcome.problems
    assert outcome.last_lines["passes"] == "3 passed"
    limit = time.monotonic() + 10  # the system takes a while
    while _runs(int(alive.read_text())) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not _runs(int(alive.read_text())), "a process outlives its stage"
    assert "the reason" in capsys.readouterr().out
    over = run_stage(stage, folder=tmp_path, environment=os.environ, deadline=start)
    assert set(over.problems) == set(commands)


def _runs(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
