# SPDX-License-Identifier: Apache-2.0
"""Write docs/performance.md from the .json files of bench_results and the CPU tables, cpu-*.md.

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
(targets were set for one H200), as [below](#first-hour-on-a-gpu):

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
GPU_COMMANDS = """
## First hour on a GPU

What tells most comes first. `make gpu` runs the machine's own `python3` (another one:
`PYTHON=python3.12`), 3.11 or 3.12, and installs nothing. That Python needs

- for `make gpu`: torch, triton, numpy, safetensors, pytest and transformers. With pytest-xdist the
  tests share ten processes, without it each file has one; pytest-timeout limits each test;
- for training: torch, triton, numpy and safetensors, and what a run uses, such as a tokenizer;
- for `make functional-gpu`: the packages of `make venv` (`PYTHON=.venv/bin/python`). With
  pytest-timeout alone `PYTEST_FLAGS="-q --continue-on-collection-errors"` leaves out the files that
  need others.

1. Beforehand, on Linux without a GPU and with 9 GB of disk: compile the kernels, and carry the
   checkout and the archive to the machine. `build` is ignored by git, so a clone has no archive.

   ```
   make gpu-cache                # build/nullcuda/triton-cache.tar.xz, 10 MB; minutes
   ```

   It serves on Hopper (sm_90) with the Triton of `tools/nullcuda/requirements.txt`, this checkout
   and the ptxas that it was made with; otherwise kernels are compiled again, which costs time only.

2. On the machine, at once: everything, in 9 minutes. Without a GPU the command fails.

   ```
   python3 -m tools.nullcuda.triton_cache unpack triton-cache.tar.xz /tmp/triton
   export TRITON_CACHE_DIR=/tmp/triton
   make gpu GPU_FLAGS="--require-gpu --output results"
   ```

   Where a command has a shorter limit, stages run apart, in this order; their results join one file
   a day. The second line runs the GPU tests alone, and so do the next two, with options of pytest.

   ```
   make gpu GPU_FLAGS="--require-gpu --output results --stages training --seconds 200"
   make gpu GPU_FLAGS="--require-gpu --output results --stages tests --seconds 300"
   export PYTHONPATH=.:megatron_core
   python3 -m pytest -c tests/gpu/pytest.ini --rootdir . -m gpu tests/gpu -x
   make gpu GPU_FLAGS="--require-gpu --output results --stages kernels engine decode hybrid"
   ```

3. Whatever they say, commit them, failures included:

   ```
   cp results/*.json bench_results/
   python -m tools.write_performance
   git add bench_results docs/performance.md && git commit
   ```

Which compilers are known to be wrong on Hopper is in [kernels.md](kernels.md). Where nothing can be
installed, carry another ptxas (140 MB), another Triton (0.7 GB) or both as folders, filled on a
machine with the same Python and a network:

```
python3 -m pip install --no-deps --target ptxas nvidia-cuda-nvcc==13.3.73
python3 -m pip install --no-deps --target triton-3.7.1 triton==3.7.1
```

and name them on the GPU's machine. ptxas must be set for `make gpu-cache` as well, or the cache is
not used. Under another Triton than torch's own, peers by torch.compile may fail.

```
export TRITON_PTXAS_PATH=$PWD/ptxas/nvidia/cu13/bin/ptxas
PYTHONPATH=$PWD/triton-3.7.1 make gpu GPU_FLAGS="--require-gpu --output results-3.7.1"
```

After an error of CUDA nothing later in that process counts: run that test file alone, with
`CUDA_LAUNCH_BLOCKING=1` and, where it is installed, under `compute-sanitizer`.
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
    results = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(results, key=lambda result: result["when"], reverse=True)


def read_cpu(folder: Path) -> str:
    """Return what benches have printed on CPUs."""
    return "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("cpu-*.md")))


def page(results: Sequence[Mapping], on_cpus: str = "") -> str:
    """Return docs/performance.md."""
    return _gpu_page(results) + GPU_COMMANDS + (CPU + on_cpus if on_cpus else "")


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
