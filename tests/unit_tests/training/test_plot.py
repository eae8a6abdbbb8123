# SPDX-License-Identifier: Apache-2.0
"""Plots of runs: the plotted values, the table, the PNG and the self-contained page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from megatron.training.monitoring.metrics import open_metrics
from megatron.training.plot import (
    PlotOptions,
    comparison,
    draw,
    metrics_file,
    page,
    plot_loss,
    read_run,
    short_names,
    smooth,
)


def write(path, factor=1.0):
    metrics = open_metrics(
        metrics_file=str(path), tensorboard_dir=None, resume_iteration=0, warn=pytest.fail
    )
    metrics.write("validation", 0, {"lm_loss": 8.3})
    for iteration in range(1, 6):
        values = {"lm_loss": 8.0 * factor / iteration, "grad_norm": 1.0, "memory_bytes": 2e9}
        metrics.write("train", iteration, values)
    metrics.write("train", 6, {"grad_norm": float("inf")})  # a skipped step has no loss
    metrics.write("validation", 5, {"lm_loss": 2.0})
    metrics.close()
    return path


@pytest.fixture
def metrics_path(tmp_path):
    return write(tmp_path / "a" / "metrics.jsonl")


def test_curves_are_read_from_a_metrics_file(metrics_path):
    run = read_run(str(metrics_path), "a")
    curves = {key: (list(c.steps), list(c.values)) for key, c in run.curves.items()}
    assert curves == {
        "validation/lm_loss": ([0, 5], [8.3, 2.0]),
        "train/lm_loss": ([1, 2, 3, 4, 5], [8.0, 4.0, 8.0 / 3, 2.0, 1.6]),
        "train/grad_norm": ([1, 2, 3, 4, 5], [1.0] * 5),
        "train/memory_bytes": ([1, 2, 3, 4, 5], [2000.0] * 5),
    }


def test_run_is_located_by_metrics_file_or_folder(metrics_path):
    assert metrics_file(str(metrics_path.parent)) == metrics_path == metrics_file(str(metrics_path))
    write(metrics_path.parent / "q" / "checkpoints" / "metrics.jsonl")
    assert metrics_file(str(metrics_path.parent / "q")).parent.name == "checkpoints"
    with pytest.raises(ValueError, match="does not exist: name a "):
        metrics_file(str(metrics_path.parent / "nothing"))


def test_short_names_distinguish_paths():
    assert short_names(["runs/a/metrics.jsonl", "runs/b"]) == ["a", "b"]
    assert short_names(["x/a/save", "x/b/save"]) == ["a/save", "b/save"]
    assert len(set(short_names(["a", "a"]))) == 2


def test_smoothing_is_a_bias_corrected_exponential_mean():
    assert smooth([3.0, 5.0], 0.0) == [3.0, 5.0]
    assert smooth([4.0] * 9, 0.9) == pytest.approx([4.0] * 9)
    assert smooth([1.0, 4.0], 0.5) == pytest.approx([1.0, (0.5 * 1 + 4) / 1.5])


def test_table_compares_last_values_with_the_first_run(metrics_path, tmp_path):
    second_file = write(tmp_path / "b" / "metrics.jsonl", factor=1.1)
    rows = comparison([read_run(str(metrics_path), "a"), read_run(str(second_file), "b")])
    assert rows[0] == ["last value", "a", "b"]
    assert rows[1] == ["training loss (nats per token)", "1.6", "1.76 (+10.00%)"]
    assert rows[-1] == ["iteration", "5", "5"]


def test_png_contains_curves_and_panels(metrics_path, tmp_path):
    from matplotlib.image import imread

    image = imread(plot_loss(metrics_path, tmp_path / "out" / "loss.png"))
    assert image.shape[0] > 200
    assert image.min() < 0.5, "nothing is drawn"
    runs = [read_run(str(metrics_path), name) for name in "ab"]
    panels = imread(draw(runs, tmp_path / "all.png", title="t", smoothing=0.5))
    assert panels.shape[1] > image.shape[1]


class Links(HTMLParser):
    """Collect the resources that a page would load."""

    def __init__(self):
        super().__init__()
        self.loaded, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [(tag, k) for k, v in attributes if k in ("src", "href", "srcset", "data")]


def test_page_is_self_contained_and_holds_the_values(metrics_path):
    runs = [read_run(str(metrics_path), "a </script><b>"), read_run(str(metrics_path), "b")]
    text = page(runs, title="<x> & y", smoothing=0.3)
    links = Links()
    links.feed(text)
    assert links.loaded == []
    assert links.tags.count("script") == 2
    assert not re.search(r"url\(|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "<title>&lt;x&gt; &amp; y</title>" in text
    assert "<td>1.6 (+0.00%)</td>" in text
    embedded = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    assert embedded["runs"] == ["a </script><b>", "b"]
    assert embedded["smoothing"] == 0.3
    loss = next(p for p in embedded["panels"] if p["title"] == "training loss")
    assert loss["curves"][1] == [[1, 2, 3, 4, 5], [8.0, 4.0, 8.0 / 3, 2.0, 1.6]]


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "megatron.training.plot", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_command_prints_a_table_and_writes_the_page(metrics_path, tmp_path):
    html = tmp_path / "out" / "page.html"
    process = command(
        "--metrics", metrics_path, metrics_path.parent, "--names", "x", "y", "--html", html
    )
    assert process.returncode == 0, process.stderr
    assert re.search(r"training loss \(nats per token\) +1.6 +1.6 \(\+0.00%\)", process.stdout)
    assert process.stdout.splitlines()[-1] == str(html)
    assert html.read_text().startswith("<!doctype html>")


def test_binary_metrics_file_is_a_user_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        read_run(str(tmp_path), "a")


@pytest.mark.parametrize("load", ["a", {}, {"0": 1}, {"0": ["a"]}, {"0": [1], "1": [1, 2]}])
def test_values_that_cannot_be_plotted_are_left_out(metrics_path, load):
    event = {"kind": "train", "iteration": 9, "expert_load": load, "lm_loss": 10**400}
    with metrics_path.open("a") as file:
        print(json.dumps(event), file=file)
    run = read_run(str(metrics_path), "a")
    assert run.curves["train/lm_loss"].steps[-1] == 5
    assert not run.loads


def test_metrics_without_losses_exit_with_one_line(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    process = command("--metrics", tmp_path / "empty.jsonl")
    assert process.returncode == 2
    assert "has no losses" in process.stderr
    assert process.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"names": ("a",)}, "--names gives 1 for 2 runs"),
        ({"smoothing": 1.0}, "--smoothing is 1.0"),
    ],
)
def test_invalid_plot_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        PlotOptions(metrics=("a", "b"), **options)
