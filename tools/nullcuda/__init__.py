# SPDX-License-Identifier: Apache-2.0
"""A CUDA device that computes nothing, under torch's real CUDA wheel: `make gpu-null`.

Most problems of the first day on a GPU are not arithmetic: an exception in a branch that no CPU
takes, a host wait in the middle of a step, a call that CUDA refuses during graph
capture, an unexpected memory peak. They all happen in Python, in torch's dispatcher, in its
caching allocator, in streams and graphs, and need no GPU. So a thousand lines of C stand in for the
libraries below torch:

    libcudart   memory is address space that nobody touches, up to the device's size; streams and
                events know what captures need, and refuse what CUDA refuses
    cuBLAS(Lt)  each product is one launch
    cuDNN       each graph of operations, such as attention, is one launch
    libcuda     Triton's kernels are loaded and launched
    NVRTC       kernels that torch compiles itself are launched, not compiled

torch, its CUDA build of 3 GB, is the real one, and so are autograd, the caching allocator, streams,
events, `CUDAGraph`, pinned memory and Triton's launches. What the device shows: exceptions, memory
peaks, launches, waits of the host, calls refused in captures, the host's time. It cannot show
values (kernels do nothing: their outputs read as zero, and no test compares them), speed, NCCL
(torch's fake process group is in its place and moves nothing), CUPTI.

    make gpu-null                                   everything (5 minutes on two cores)
    make gpu-null NULL_FLAGS="--only steps"         measured steps against record.json
    make gpu-null NULL_FLAGS="--only steps --record"    rewrites record.json
    make gpu-null NULL_FLAGS="--only steps --trace 30"  who launches what
    make gpu-null NULL_FLAGS="--memory 141GiB"      another size of the device
    make gpu-cache                                  Triton's compiled kernels, for a real machine

    environment.py  the Python environment in build/nullcuda: torch's CUDA wheel, pinned
    libraries.py    builds stand_in/*.c into one library, for the symbols that this torch asks for
    site/           what each process over the device loads first: Triton's driver
    device.py       counters, and the calls behind them, in such a process
    plugin.py       lets tests/gpu, and whole runs on four devices, run without comparing values
    values.py       plausible values where the host cannot continue without one
    benches.py      lets a bench of tools/bench run without comparing values
    steps.py        measured steps: training and decode of each kind of layer, ranks of experts
    record.py       those steps against record.json
    triton_cache.py packs compiled kernels, unpacks them at another path

Only Linux on x86-64 has the wheels. A C compiler and `nm` are needed, and 9 GB of disk.
"""
