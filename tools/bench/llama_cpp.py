# SPDX-License-Identifier: Apache-2.0
"""Generation with default options against llama.cpp, with the same weights and threads, in turns.

python -m tools.bench serve --peers
python -m tools.bench.llama_cpp --clock cpu --threads 1  on a machine that others use too

llama.cpp runs in this process through llama-cpp-python, which `pip install llama-cpp-python gguf`
builds from its source for this CPU; the log states the build. Both sides answer
greedily. The GGUF file holds the weights of our model: f32 and bf16 exactly, q8_0 against our int8
copies of the fp32 weights. Of 8 and 16 texts in fp32 and bf16, most first
tokens must be equal; llama.cpp also rounds activations, so later tokens of a random model differ.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megatron.core.inference.requests import EngineRequest
from megatron.core.models.inference_optimized import matrices
from megatron.core.ops.matmul.low_bit import CopyDtype
from tests.support.gguf_files import write_model
from tools.bench.harness import run_rows
from tools.bench.inference import (
    CLOCKS,
    DECODED,
    ROWS,
    Clock,
    Generation,
    engine_of,
    in_turns,
    llama,
    requests_of,
    row,
    with_weights_of,
)
from tools.bench.table import Row

#: Tokens of the longest text.
CONTEXT = 2048
#: Tokens of the prompt whose first token is timed.
LONG_PROMPT = 2000


class LlamaCpp:
    """A model that llama.cpp loads from a GGUF file, with one cache for `ROWS` texts.

    Args:
        path: of the file.
        exact_cache: store keys and values in fp32 instead of fp16.
    """

    def __init__(self, path: Path, *, exact_cache: bool) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        llama_cpp.llama_log_set(_DISCARD, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = ROWS * CONTEXT, ROWS, CONTEXT
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        if exact_cache:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(CONTEXT, 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )

    @property
    def build(self) -> str:
        """Version of the package, and the features of the CPU for which llama.cpp was built."""
        description = self._api.llama_print_system_info().decode()
        features = [word.split(" =")[0] for word in description.split(" | ") if " = 1" in word]
        return f"{self._api.__version__}, {', '.join(features)}"

    def close(self) -> None:
        """Free the model."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def answer(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Generate greedily for at most `ROWS` requests with equal numbers of new tokens."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        prompts = [list(request.prompt) for request in requests]
        texts = [[token] for token in self._decode(prompts, 0)]
        start = len(prompts[0])
        for step in range(requests[0].max_new_tokens - 1):
            tokens = self._decode([text[-1:] for text in texts], start + step)
            for text, token in zip(texts, tokens, strict=True):
                text.append(token)
        return texts

    def _decode(self, tokens: Sequence[Sequence[int]], start: int) -> list[int]:
        """Compute tokens of each text, whose positions begin at `start`; return the next ones."""
        batch, count, ends = self._batch, 0, []
        for sequence, ids in enumerate(tokens):
            for offset, token in enumerate(ids):
                batch.token[count], batch.pos[count] = token, start + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = offset == len(ids) - 1
                count += 1
            ends.append(count - 1)
        batch.n_tokens = count
        if self._api.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp did not compute a batch")
        rows = [self._api.llama_get_logits_ith(self._context, index) for index in ends]
        return [int(np.ctypeslib.as_array(r, (self._vocabulary,)).argmax()) for r in rows]


def _discard(level: int, text: bytes, user: ctypes.c_void_p) -> None:
    """Drop a line of llama.cpp's log."""


_DISCARD = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_discard)


def _rows_of(
    kind: str, dtype: torch.dtype, copies: CopyDtype | None, quick: bool, clock: Clock
) -> Iterator[Row]:
    """Yield the rows of one GGUF type against a model of a dtype."""
    peer_model = llama(DECODED).to(dtype)
    model = with_weights_of(peer_model)
    if dtype is torch.bfloat16 and all(handle.packs_bf16() for handle in matrices(model)):
        copies = "bf16"
    engine = engine_of(model, optimized=True, copies=copies, max_num_batched_tokens=CONTEXT)
    metadata = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": DECODED.vocabulary}
    rounds, new = (2, 8) if quick else (7, 32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, peer_model, kind, context=CONTEXT, metadata=metadata)
        peer = LlamaCpp(path, exact_cache=kind == "F32")
    label = f"{str(dtype).removeprefix('torch.')}{' with int8 copies' * (copies == 'int8')}"
    targets = {1: ">= 0.9", 8: ">= 1"} if kind in ("F32", "Q8_0") else {}
    cases = [
        (f"{count} rows", requests_of(count, 16, new, DECODED.vocabulary), targets.get(count))
        for count in (1, 8, ROWS)
    ]
    cases.append(("first token of 2,000", requests_of(1, LONG_PROMPT, 1, DECODED.vocabulary), None))
    for name, requests, target in cases:
        mcore = Generation.by_engine(engine, requests, clock)
        llama_cpp = Generation(lambda requests=requests: peer.answer(requests), clock)
        measured = in_turns((mcore.rate, llama_cpp.rate), rounds=rounds)
        if len(requests) > 1 and kind != "Q8_0":
            mcore.require_same(llama_cpp, "llama.cpp", share=0.7, tokens=1)
        yield row(f"{label}, {name}: tokens/s / llama.cpp {kind}", *measured, target or "")
    print(f"llama.cpp {peer.build}", file=sys.stderr)
    peer.close()


def rows(quick: bool = False, *, clock: Literal["wall", "cpu"] = "wall") -> list[Row]:
    """Measure decoding of 1, 8 and 16 texts and the first token of a long prompt."""
    cases: Sequence[tuple[str, torch.dtype, CopyDtype | None]] = (
        ("F32", torch.float32, None),
        ("BF16", torch.bfloat16, None),
        ("Q8_0", torch.float32, "int8"),
    )
    return [r for case in cases for r in _rows_of(*case, quick, CLOCKS[clock])]


if __name__ == "__main__":
    run_rows(rows, __doc__)
