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

from tools.bench.results import rows_of, text_of
from tools.bench.table import DECODE_PROMISE, LONG_TRAINING_MFU, TRAINING_MFU, verdict

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "bench_results", ROOT / "docs/performance.md"
COMMAND = "make gpu"

HEADER = """<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by tools/write_performance.py: python -m tools.write_performance -->
# Performance on GPUs

`make gpu` takes nine minutes on a machine with one GPU and writes
[bench_results](../bench_results/README.md). A tool writes this page from these files; no number is
typed by hand.

All results are ratios within one run. Our implementation and a peer alternate in one process on one
device, and a ratio is the median over rounds. Before each call the benchmark overwrites a buffer
larger than the caches.

- The **roofline** is a lower bound of the run time. It is the longer of two times: the FLOPs of the
  formula at the bf16 matrix rate measured in the same run, and the bytes at the measured copy
  bandwidth. It counts one read or write per tensor, so recomputation and temporary buffers count
  against a kernel.
- The **share** is the roofline divided by the measured time.

"""
NOTHING = f"""## Not measured yet

No GPU has run this suite yet, so there are no numbers. Run it on a machine with an NVIDIA GPU
(targets are set for one H200), as described [below](#first-hour-on-a-gpu):

```
{COMMAND}
python -m tools.write_performance
```

These checks run without a GPU:

- In Triton's interpreter, kernels agree with their references, forward and all gradients: in fp32,
  and in bf16 and TF32 with the rounding of tensor cores, within the bounds of the GPU tests.
- Kernels compile ahead of time for sm_90 and sm_100. Records hold their registers, stack and shared
  memory, and `make gpu-compile` inspects the machine code ([kernels.md](kernels.md)).
- `python -m tools.gpu --rehearse` runs the suite in small sizes on a CPU, except for the device
  tests.
- `make gpu-null` runs the suite on torch's CUDA build with a driver that computes nothing. Records
  hold its launches, host waits and peak memory
  ([observability.md](observability.md#without-a-gpu)).
"""
GPU_COMMANDS = """
## First hour on a GPU

The most informative stages run first. `make gpu` uses the machine's own `python3` (or, for
instance, `PYTHON=python3.12`), version 3.11 or 3.12, and installs nothing. It needs these packages:

- for `make gpu`: torch, triton, numpy, safetensors, pytest and transformers. With pytest-xdist the
  tests share ten processes; without it each file has its own process. pytest-timeout limits the
  time of each test.
- for training: torch, triton, numpy, safetensors, and the packages of the chosen options, such as a
  tokenizer.
- for `make functional-gpu`: the packages of `make venv` (`PYTHON=.venv/bin/python`). With
  pytest-timeout alone, `PYTEST_FLAGS="-q --continue-on-collection-errors"` skips the files that
  need other packages.

1. Beforehand, on a Linux machine without a GPU and with 9 GB of disk space: compile the kernels.
   Copy the checkout and the archive to the GPU machine. Git ignores `build`, so a clone does not
   contain the archive.

   ```
   make gpu-cache                # build/nullcuda/triton-cache.tar.xz, 10 MB; minutes
   ```

   The cache is valid on Hopper (sm_90) for this checkout, the Triton of
   `tools/nullcuda/requirements.txt` and the same ptxas. Otherwise kernels are compiled again, which
   only costs time.

2. On the GPU machine: run all stages, in 9 minutes. Without a GPU the command fails.

   ```
   python3 -m tools.nullcuda.triton_cache unpack triton-cache.tar.xz /tmp/triton
   export TRITON_CACHE_DIR=/tmp/triton
   make gpu GPU_FLAGS="--require-gpu --output results"
   ```

   If commands have a shorter time limit, run the stages separately, in this order. Results of one
   day are merged into one file. The second line runs only the GPU tests. The next two lines do the
   same with pytest options.

   ```
   make gpu GPU_FLAGS="--require-gpu --output results --stages training --seconds 200"
   make gpu GPU_FLAGS="--require-gpu --output results --stages tests --seconds 300"
   export PYTHONPATH=.:megatron_core
   python3 -m pytest -c tests/gpu/pytest.ini --rootdir . -m gpu tests/gpu -x
   make gpu GPU_FLAGS="--require-gpu --output results --stages kernels engine decode hybrid"
   ```

3. Commit the results, including failures:

   ```
   cp results/*.json bench_results/
   python -m tools.write_performance
   git add bench_results docs/performance.md && git commit
   ```

[kernels.md](kernels.md) lists the compilers that produce wrong code on Hopper. If nothing can be
installed, copy another ptxas (140 MB), another Triton (0.7 GB) or both as folders. Download them on
a machine with the same Python version and network access:

```
python3 -m pip install --no-deps --target ptxas nvidia-cuda-nvcc==13.3.73
python3 -m pip install --no-deps --target triton-3.7.1 triton==3.7.1
```

Then set their paths on the GPU machine. Set the same ptxas for `make gpu-cache`, or the cache is
not used. With a Triton version other than torch's, torch.compile peers may fail.

```
export TRITON_PTXAS_PATH=$PWD/ptxas/nvidia/cu13/bin/ptxas
PYTHONPATH=$PWD/triton-3.7.1 make gpu GPU_FLAGS="--require-gpu --output results-3.7.1"
```

After a CUDA error, later results of the same process are invalid. Run that test file alone, with
`CUDA_LAUNCH_BLOCKING=1` and, if installed, under `compute-sanitizer`.
"""
CPU = """
## Decoding on a CPU

The benchmark decodes 1 or 16 greedy requests with `--transformer-impl inference_optimized`. It
compares them with transformers' `generate`, the model's own forward, and the matrix products of a
step alone. The implementations alternate in one process, and a ratio is the median over rounds. The
33.6 M Llama shape has 8 layers of hidden size 512.

```
python -m tools.bench.inference --only forward --clock cpu --threads 1 > bench_results/cpu-decode.md
```

"""
#: Targets on one H200, in bf16; open until a result file has a row for it.
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
        "0.9 of 691 TFLOP/s, the published rate of backward",
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
    """Return the tables of benchmarks on CPUs."""
    return "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("cpu-*.md")))


def page(results: Sequence[Mapping], on_cpus: str = "") -> str:
    """Return docs/performance.md."""
    return _gpu_page(results) + GPU_COMMANDS + (CPU + on_cpus if on_cpus else "")


def _gpu_page(results: Sequence[Mapping]) -> str:
    lines = [HEADER, "## Targets\n", "| what | target |\n|---|---|\n"]
    lines[1] += "\n"
    lines += [f"| {what} | {target} |\n" for what, target in PROMISES]
    lines.append("\n")
    if not results:
        return "".join([*lines, NOTHING])
    lines.append(f"{_counted(results[0])}\n\n")
    return "".join([*lines, "\n".join(text_of(result) for result in results)])


def _counted(result: Mapping) -> str:
    """Return a sentence with the number of targets that the newest result meets."""
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
