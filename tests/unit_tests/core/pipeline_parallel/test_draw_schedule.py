# SPDX-License-Identifier: Apache-2.0
"""The committed picture of the schedules matches the tool's output and shows simulated times."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools.draw_schedule import DEFAULT_OUTPUT, main


def draw_picture(tmp_path: Path, *flags: str) -> str:
    assert main([*flags, "--output", str(tmp_path / "deep/picture.svg")]) == 0
    return (tmp_path / "deep/picture.svg").read_text(encoding="utf-8")


def test_committed_picture_matches_the_tool_output(tmp_path):
    text = draw_picture(tmp_path)
    assert DEFAULT_OUTPUT.read_text(encoding="utf-8") == text, "run python tools/draw_schedule.py"


def test_every_compute_is_drawn_as_a_box(tmp_path):
    text = draw_picture(
        tmp_path, "--schedule", "1f1b", "zb-h1", "--stages", "2", "--microbatches", "3"
    )
    root = ElementTree.fromstring(text)
    namespace = "{http://www.w3.org/2000/svg}"
    boxes = [box for box in root.iter(f"{namespace}rect") if box.get("x") and box.get("stroke")]
    legend = 2 * 4
    assert len(boxes) - legend == 2 * 3 * 2 + 2 * 3 * 3
    # 1f1b takes 3 (m + p - 1) = 12, from the labels to the right margin.
    edges = [float(box.get("x")) + float(box.get("width")) for box in boxes[:12]]
    assert max(edges) == pytest.approx(960 - 16, abs=0.02)
    assert re.findall(r"bubble ([0-9.]+) %", text) == ["25.0", "10.0"]


def test_invalid_sizes_are_refused_without_output(tmp_path, capsys):
    output = tmp_path / "picture.svg"
    flags = ["--schedule", "interleaved", "--chunks", "1", "--output", str(output)]
    assert main(flags) == 2
    assert "use that or more chunks" in capsys.readouterr().err
    assert not output.exists()
