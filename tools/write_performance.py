# SPDX-License-Identifier: Apache-2.0
"""Write docs/performance.md from every .json file of bench_results, and what was printed there on
CPUs, cpu-*.md.

python -m tools.write_performance            write it
python -m tools.write_performance --check    exit 1 unless it is as written
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.bench.gpu_results import rows_of, text_of
from tools.bench.gpu_rows import DECODE_PROMISE, LONG_TRAINING_MFU, TRAINING_MFU, verdict

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "bench_results", ROOT / "docs/performance.md"
COMMAND = "make gpu"

HEADER = """<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by tools/write_performance.py: python -m tools.write_performance -->
# Performance on GPUs

`make gpu` measures it, in nine minutes on a machine with one GPU, and writes
[bench_results](../bench_results/README.md), from which this page is made. No number here was typed
in.

Only ratios of one run count: ours and a peer take turns in one process on one device, and a ratio
is the median over rounds of that turn's two figures. Before each call a buffer larger than the
caches is written. A **roofline** is the time that the operations of the formula take at the rate at
which this device multiplied bf16 matrices in the same run, or that its bytes take at the rate at
which it copied memory, whichever is longer; every tensor is read or written once in it, so what a
kernel computes twice or keeps for itself counts against it. The **share** is how near we are.

"""
NOTHING = f"""## Not measured yet

No GPU has run this: there are no numbers. What remains to be run, on a machine with an NVIDIA GPU
(targets were set for one H200) and Python 3.11 or 3.12 with torch, triton, numpy, safetensors,
pytest and transformers:

```
{COMMAND}
python -m tools.write_performance
```

What is known without a GPU: kernels agree with their references in Triton's interpreter, forward
and all gradients, in fp32 and, with bf16 and TF32 rounded as tensor cores do, within the bounds of
the GPU tests; they compile ahead of time for sm_90 and sm_100, with registers, stack and shared
memory on record, and `make gpu-compile` looks at their code ([kernels.md](kernels.md));
`python -m tools.gpu --rehearse` runs the suite, tiny, on a CPU, all but the tests of the device
itself; and `make gpu-null` runs it on torch's CUDA build over a device that computes nothing, with
launches, host waits and peaks of memory on record
([observability.md](observability.md#without-a-gpu)).
"""
CPU = """
## Decoding on a CPU

A greedy request, or 16, by `--transformer-impl inference_optimized`, against transformers'
`generate`, the model's own forward and the products of a step alone. Sides take turns in one
process; a ratio is the median over rounds. The 33.6 M Llama shape has 8 layers of 512.

```
python -m tools.bench.inference --only forward --clock cpu --threads 1 > bench_results/cpu-decode.md
```

"""
#: What was promised of one H200, in bf16; open until a result file has a row for it.
PROMISES: tuple[tuple[str, str], ...] = (
    (
        "gated delta rule, 16/32 heads of 128, 32,768 tokens, forward",
        "1.6 x flash-linear-attention in the same run; 0.88 ms on an H200",
    ),
    (
        "the same, forward + backward",
        "1.6 x flash-linear-attention in the same run; 3.4 ms on an H200",
    ),
    (
        "the same, 4 x 8,192 packed tokens, forward",
        "1.6 x flash-linear-attention in the same run; 0.43 ms on an H200",
    ),
    (
        "state-space dual, 128 heads of 64, state 128, 32,768 tokens, forward",
        "22.7 million tokens/s",
    ),
    ("decode of recurrent layers and of paged attention", DECODE_PROMISE),
    (
        "decode of an 8 B Llama by CUDA graphs, 1 and 64 rows",
        "0.75 and 0.60 of the data sheet's bandwidth over weights, keys and values",
    ),
    (
        "causal attention of whole rows, forward and backward",
        "the faster of cuDNN's and FlashAttention-2's kernels in the same run",
    ),
    (
        "experts, forward, 32,768 tokens of 2,048: 128 of 768, top 8, and 512 of 512, top 10",
        "torch's grouped_mm in the same run; 242 and 181 TFLOP/s",
    ),
    (
        "linear cross entropy, 8,192 x 2,048 x 131,072, forward + backward",
        "0.9 of 691 TFLOP/s, as published of backward",
    ),
    ("top-p sampling, 64 rows of 131,072 logits", "0.3 ms"),
    ("RMSNorm, SwiGLU, rope, forward and backward", "85 % of the bandwidth of copies"),
    (
        "training step of Llama 1.3 B, rows of 4,096 tokens",
        f"transformers' tokens/s; {100 * TRAINING_MFU:.0f} % of the data sheet's peak",
    ),
    (
        "the same on one row of 32,768 tokens",
        f"{100 * LONG_TRAINING_MFU:.0f} % of the data sheet's peak",
    ),
    ("training step of a 1.3 B hybrid", "1.2 x the step with the reference ops"),
)


def read(folder: Path) -> list[dict]:
    """Return every result in a folder, the newest first."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda result: result["when"], reverse=True)


def read_cpu(folder: Path) -> str:
    """Return what benches have printed on CPUs."""
    return "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("cpu-*.md")))


def page(results: Sequence[Mapping], on_cpus: str = "") -> str:
    """Return docs/performance.md."""
    return _gpu_page(results) + (CPU + on_cpus if on_cpus else "")


def _gpu_page(results: Sequence[Mapping]) -> str:
    lines = [HEADER, "## What was promised\n", "| what | target |\n|---|---|\n"]
    lines[1] += "\n"
    lines += [f"| {what} | {target} |\n" for what, target in PROMISES]
    lines.append("\n")
    if not results:
        return "".join([*lines, NOTHING])
    lines.append(f"{_counted(results[0])}\n\n")
    return "".join([*lines, "\n".join(text_of(result) for result in results)])


def _counted(result: Mapping) -> str:
    """Say how many targets the newest result meets."""
    verdicts = [verdict(row, target) for row in rows_of(result) for target in row["targets"]]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("met", "missed", "open"))
    device, day = result["machine"]["device"], result["when"][:10]
    return f"Of the {len(verdicts)} targets in the newest results ({device}, {day}): {counts}."


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if it differs")
    options = parser.parse_args()
    text = page(read(RESULTS), read_cpu(RESULTS))
    if options.check:
        same = PAGE.is_file() and PAGE.read_text("utf-8") == text
        print(f"{PAGE.name} is {'as' if same else 'not as'} tools/write_performance.py writes it")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
