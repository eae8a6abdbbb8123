# SPDX-License-Identifier: Apache-2.0
"""File kinds: for each, a valid folder, how its content is damaged, and the readers."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from megatron.cli.errors import run_entry_point
from megatron.core.dist_checkpointing import manifest
from megatron.hf import convert
from megatron.inference import generate
from megatron.training import checkpoint, inspect_data, plot, preprocess_data, pretrain_gpt
from megatron.training.data.chat import BUILT_IN
from megatron.training.data.journaled_output import Output
from megatron.training.fault_tolerance.faults import SuspectStep
from tests.functional_tests.small_run import write_tokens
from tests.support.hostile_files import (
    fresh_copy,
    spoil,
    spoiled_header,
    spoiled_json,
    spoiled_lines,
    spoiled_template,
    spoiled_words,
    spoiled_yaml,
)
from tests.support.tiktoken_files import write_ranks, write_vocabulary

#: A reader takes the folder and returns an exit code.
Reader = Callable[[Path], int]


@dataclass(frozen=True)
class Kind:
    """One kind of input file.

    Args:
        base: name of the valid folder.
        file: the file in the folder that is damaged.
        readers: readers of the folder, the fastest first; a trial picks one.
        text, seal: see `spoil`.
    """

    base: str
    file: str
    readers: tuple[Reader, ...]
    text: Callable[[bytes, random.Random], bytes] = spoiled_json
    seal: Callable[[bytes], bytes] | None = None


def call(main: Callable[[Sequence[str], dict[str, str]], int], *words: str) -> Reader:
    """Return a reader that calls an entry point; `@/` in `words` stands for the folder."""
    return lambda folder: main([word.replace("@", str(folder), 1) for word in words], {})


def command(run: Callable[[Sequence[str]], None], *words: str) -> Reader:
    """Return a reader that calls `run` with the error handling of an entry point."""

    def main(argv: Sequence[str], environment: dict[str, str]) -> int:
        return run_entry_point(lambda: run(argv), prog="test", err=sys.stderr, out=sys.stdout)

    return call(main, *words)


def _plot(argv: Sequence[str]) -> None:
    with mock.patch.object(sys, "argv", ["plot", *argv]):
        plot.main()


def _sealed(content: bytes) -> bytes:
    """Return a manifest whose digest matches its content."""
    kind, _, _ = manifest._split_head(content, Path("manifest"))
    length = len(manifest._HEAD % (kind.encode(), b"0" * manifest._HEX_DIGITS))
    body = content[length:]
    digest = manifest.digest(body, kind)[-manifest._HEX_DIGITS :]
    return manifest._HEAD % (kind.encode(), digest.encode()) + body


def _try_sealed(content: bytes) -> bytes:
    with contextlib.suppress(Exception):
        return _sealed(content)
    return content


def _spoiled_manifest(content: bytes, rng: random.Random, inside: tuple[str, ...] = ()) -> bytes:
    """Damage the content after the digest, so that `_sealed` can fix the digest."""
    kind, _, _ = manifest._split_head(content, Path("manifest"))
    length = len(manifest._HEAD % (kind.encode(), b"0" * manifest._HEX_DIGITS))
    spoiled = spoiled_json(b"{" + content[length:], rng, inside)
    return content[:length] + spoiled[1:]


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
VOCABULARY = 8
RUN = "iter_0000002"
GENERATE = ("--prompt", "a", "--device", "cpu", "--max-new-tokens", "1")
SAVED = (
    call(checkpoint.main, "verify", "@/run"),
    call(checkpoint.main, "list", "@/run"),
    call(checkpoint.main, "inspect", "@/run"),
    call(checkpoint.main, "inspect", f"@/run/{RUN}", "--tensors"),
    call(convert.main, "export", "--load", "@/run", "--save", "@/out"),
    call(generate.main, "--load", "@/run", "--prompt", "1", *GENERATE[2:]),
)
IMPORTED = (
    call(checkpoint.main, "verify", "@/imported"),
    call(convert.main, "export", "--load", "@/imported", "--save", "@/out"),
    call(generate.main, "--load", "@/imported", *GENERATE),
)
FOLDER = (
    call(convert.main, "import", "--hf", "@/hf", "--save", "@/imported"),
    call(generate.main, "--load", "@/hf", *GENERATE),
)
TRAINING = shlex.split(
    "--num-layers 1 --hidden-size 8 --ffn-hidden-size 8 --num-attention-heads 1 --seq-length 8"
    " --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
    " --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 1 --lr 1e-3"
    " --attention-dropout 0 --hidden-dropout 0 --eval-interval 0 --progress plain --split 100,0,0"
)
DATA = ("--data-path", "@/data", "--metrics-file", "@/metrics.jsonl")


def train(*words: str, steps: int = 2) -> Reader:
    """Return a reader that trains until a step."""
    return call(pretrain_gpt.main, *TRAINING, "--train-iters", str(steps), *words)


def prepare(*words: str) -> Reader:
    """Return a reader that writes token files."""
    run = preprocess_data._main
    return command(run, "--output-prefix", "@/tokens", "--workers", "1", *words)


CONVERTED = (
    call(
        checkpoint.main,
        *("convert", "@/dcp", "@/out.safetensors", "--from", "dcp", "--to", "single-file"),
    ),
)
RESUMED = (train(*DATA, "--load", "@/run", steps=3),)
SAVE = ("--load", "@/run", "--save", "@/run")
WITH_TOKENIZER = (
    prepare("--input", "@/text.jsonl", "--tokenizer-model", "@/hf/tokenizer.json"),
    *FOLDER,
)
CHATS = (
    prepare(
        *("--input", "@/chats.jsonl", "--tokenizer-type", "byte"),
        *("--chat", "--chat-template", "@/template.jinja"),
    ),
)
INSPECTED = (command(inspect_data._main, "@/data", "--document", "0"), train(*DATA))
CACHED = (train(*DATA, "--data-cache-path", "@/cache"),)


def as_bytes(file: str, *options: str) -> tuple[Reader, ...]:
    """Return the reader that tokenizes a file as bytes."""
    words = ("--tokenizer-type", "byte", "--append-eod")
    return (prepare("--input", f"@/{file}", *words, *options),)


def with_model(kind: str, file: str) -> tuple[Reader, ...]:
    """Return the reader that tokenizes with a vocabulary."""
    words = ("--tokenizer-type", kind, "--tokenizer-model", f"@/{file}")
    return (prepare("--input", "@/text.jsonl", *words),)


MANIFEST = f"run/{RUN}/manifest.json"
KINDS: dict[str, Kind] = {
    "manifest": Kind("run", MANIFEST, (*SAVED, *RESUMED), _spoiled_manifest, _try_sealed),
    "state of a run": Kind(
        "run",
        MANIFEST,
        (*RESUMED, *SAVED[2:]),
        partial(_spoiled_manifest, inside=("extra",)),
        _try_sealed,
    ),
    "imported model": Kind(
        "imported",
        "imported/iter_0000000/manifest.json",
        IMPORTED,
        partial(_spoiled_manifest, inside=("extra",)),
        _try_sealed,
    ),
    "tracker": Kind(
        "run",
        "run/latest_checkpointed_iteration.txt",
        (*SAVED, *RESUMED),
        lambda content, rng: str(rng.choice((-1, 3, "٣", 1 << 70, "\0", "release"))).encode(),
    ),
    "shard": Kind("run", f"run/{RUN}/shard-00000.safetensors", (*SAVED, *RESUMED), spoiled_header),
    "lock": Kind("run", "run/.writer.lock", (*SAVED[:2], train(*DATA, *SAVE)), spoiled_words),
    "carried tokenizer": Kind("imported", "imported/hugging_face/tokenizer.json", IMPORTED[1:]),
    "carried config": Kind("imported", "imported/hugging_face/config.json", IMPORTED[1:]),
    "config.json": Kind("hf", "hf/config.json", FOLDER),
    "generation_config.json": Kind("hf", "hf/generation_config.json", FOLDER),
    "tokenizer.json": Kind("hf", "hf/tokenizer.json", WITH_TOKENIZER),
    "tokenizer_config.json": Kind("hf", "hf/tokenizer_config.json", WITH_TOKENIZER),
    "index of weights": Kind("hf", "hf/model.safetensors.index.json", FOLDER),
    "safetensors": Kind("hf", f"hf/{SHARDS[0]}", FOLDER, spoiled_header),
    "chat template": Kind("text", "template.jinja", CHATS, spoiled_template),
    "chats": Kind("text", "chats.jsonl", CHATS, spoiled_lines),
    "JSON lines": Kind("text", "text.jsonl", as_bytes("text.jsonl"), spoiled_lines),
    "compressed lines": Kind(
        "text",
        "more.jsonl.gz",
        as_bytes("more.jsonl.gz"),
        lambda content, rng: gzip.compress(spoiled_lines(gzip.decompress(content), rng)),
    ),
    "plain text": Kind("text", "plain.txt", as_bytes("plain.txt"), spoiled_words),
    "Parquet": Kind("text", "rows.parquet", as_bytes("rows.parquet"), spoiled_words),
    "journal": Kind("halfway", "tokens.journal", as_bytes("text.jsonl", "--resume"), spoiled_lines),
    "journal of all": Kind(
        "nearly", "tokens.journal", as_bytes("text.jsonl", "--resume"), spoiled_lines
    ),
    "SentencePiece": Kind(
        "text",
        "sentencepiece.model",
        with_model("sentencepiece", "sentencepiece.model"),
        spoiled_words,
    ),
    "tiktoken vocabulary": Kind("text", "tiktoken.json", with_model("tiktoken", "tiktoken.json")),
    "tiktoken ranks": Kind(
        "text", "ranks.tiktoken", with_model("tiktoken", "ranks.tiktoken"), spoiled_lines
    ),
    "token index": Kind("data", "data.idx", INSPECTED, spoiled_words),
    "tokens": Kind("data", "data.bin", INSPECTED, spoiled_words),
    "description of tokens": Kind("data", "data.json", INSPECTED),
    "cached order": Kind("data", "cache/NPY", CACHED, spoiled_words),
    "cached manifest": Kind("data", "cache/JSON", CACHED),
    "paths": Kind(
        "data", "paths.json", (train("--per-split-data-args-path", "@/paths.json", *DATA[2:]),)
    ),
    "YAML": Kind(
        "data",
        "options.yaml",
        (call(pretrain_gpt.main, "--config", "@/options.yaml", "--exit-interval", "1"),),
        spoiled_yaml,
    ),
    "faulty machines": Kind("run", "run/faulty_hosts.json", (train(*DATA, *SAVE, steps=3),)),
    "suspect step": Kind(
        "run",
        "run/suspect_step.json",
        (train(*DATA, *SAVE, "--on-reproduced-fault", "restart", steps=3),),
    ),
    "metrics": Kind(
        "run",
        "metrics.jsonl",
        (command(_plot, "--metrics", "@/metrics.jsonl", "--output", "@/out.png"), *RESUMED),
        spoiled_lines,
    ),
    "prompts": Kind(
        "hf",
        "prompts.txt",
        (call(generate.main, "--load", "@/hf", "--prompt-file", "@/prompts.txt"),),
        spoiled_words,
    ),
    "torch's metadata": Kind("torch", "dcp/.metadata", CONVERTED, spoiled_words),
    "torch's tensors": Kind("torch", "dcp/__0_0.distcp", CONVERTED, spoiled_words),
}


def make_bases(root: Path) -> None:
    """Create the valid folders."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for name, make in _MAKERS.items():
            (root / name).mkdir()
            make(root / name)


def _check_success(code: int) -> None:
    assert code == 0, f"a valid folder gives exit code {code}"


def _make_hf(folder: Path) -> None:
    save_llama(folder / "hf")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(0, "<s>"), _special(1, "</s>")],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "<unk>": 5},
            "merges": [["a", "b"]],
            "unk_token": "<unk>",
        },
    }
    (folder / "hf" / "tokenizer.json").write_text(json.dumps(tokenizer))
    description = {
        "eos_token": {"content": "</s>", "special": True},
        "bos_token": "<s>",
        "chat_template": BUILT_IN["chatml"],
        "model_max_length": 1 << 20,
    }
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(description))
    (folder / "prompts.txt").write_text("a\nb a\n\n")
    (folder / "text.jsonl").write_text('{"text": "a b ab"}\n')


def _special(number: int, content: str) -> dict[str, object]:
    switches = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **switches}


def save_llama(folder: Path, *, shards: Sequence[str] = SHARDS) -> None:
    """Write a small model as transformers does, with its weights in the files `shards`."""
    hidden, head_dim, heads, groups, ffn = 16, 6, 4, 2, 24
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj": (heads * head_dim, hidden),
            f"{layer}.self_attn.k_proj": (groups * head_dim, hidden),
            f"{layer}.self_attn.v_proj": (groups * head_dim, hidden),
            f"{layer}.self_attn.o_proj": (hidden, heads * head_dim),
            f"{layer}.mlp.gate_proj": (ffn, hidden),
            f"{layer}.mlp.up_proj": (ffn, hidden),
            f"{layer}.mlp.down_proj": (hidden, ffn),
            f"{layer}.input_layernorm": (hidden,),
            f"{layer}.post_attention_layernorm": (hidden,),
        }
    shapes["model.norm"] = (hidden,)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": 7,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"eos_token_id": 7, "temperature": 0.7, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    files = {name: shards[i % len(shards)] for i, name in enumerate(tensors)}
    for file in shards:
        shard_tensors = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(shard_tensors, folder / file, metadata={"format": "pt"})
    if len(shards) == 1:
        return
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _make_imported(folder: Path) -> None:
    _make_hf(folder)
    _check_success(FOLDER[0](folder))


def _make_data(folder: Path) -> None:
    write_tokens(folder / "data", documents=8)
    _describe(folder)
    _check_success(train(*DATA, "--data-cache-path", "@/cache")(folder))
    for pattern, name in (("*.npy", "NPY"), ("*.json", "JSON")):
        cached = sorted((folder / "cache").rglob(pattern))[0]
        cached.with_name(name).symlink_to(cached.name)
    paths = {name: [str(folder / "data")] for name in ("train", "valid", "test")}
    (folder / "paths.json").write_text(json.dumps(paths))
    lines = [
        f"{name}: {value or 'true'}"
        for name, _, value in (o.partition(" ") for o in " ".join(TRAINING)[2:].split(" --"))
    ]
    lines += [
        "mock-data: true",
        "vocab-size: 61",
        "train-iters: 2",
        f"metrics-file: {folder / 'new.jsonl'}",
    ]
    (folder / "options.yaml").write_text("\n".join(lines) + "\n")


def _describe(folder: Path) -> None:
    description = {"type": "null", "vocab_size": 61, "eod": 60, "fingerprint": "null-60"}
    (folder / "data.json").write_text(json.dumps({"tokenizer": description}))


def _make_run(folder: Path) -> None:
    write_tokens(folder / "data", documents=8)
    _describe(folder)
    _check_success(train(*DATA, "--save", "@/run", "--save-interval", "1")(folder))
    (folder / "run" / ".writer.lock").touch()
    host = {"host": "a", "rank": 1, "iteration": 3, "kind": "nan", "values": ["nan", "nan"]}
    hosts = {"hosts": [{**host, "sound": "0x1.8p+2", "sound_on": ["b"]}]}
    (folder / "run" / "faulty_hosts.json").write_text(json.dumps(hosts))
    suspect = SuspectStep(3, {"0": "a"}, "nan", (float("nan"), 1.0))
    (folder / "run" / "suspect_step.json").write_text(json.dumps(suspect.to_json()))


def _make_text(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    import sentencepiece

    texts = [f"the {i} quick brown fox jumps over {i * i} lazy dogs, né 語" for i in range(20)]
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(lines)
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "plain.txt").write_text("\n".join(texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "rows.parquet")
    roles = ("user", "assistant")
    chats = [
        {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts[:4])]}
        for _ in range(3)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "template.jinja").write_text(BUILT_IN["chatml"])
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 3),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "sentencepiece.model").write_bytes(model.getvalue())
    write_vocabulary(folder / "tiktoken.json")
    write_ranks(folder / "ranks.tiktoken")


def _make_interrupted(folder: Path, *, interrupted_method: str) -> None:
    lines = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(9))
    (folder / "text.jsonl").write_text(lines)
    config = preprocess_data.PreprocessConfig(
        input=(str(folder / "text.jsonl"),),
        output_prefix=str(folder / "tokens"),
        tokenizer_type="byte",
        append_eod=True,
        workers=1,
    )
    with (
        mock.patch.object(Output, interrupted_method, side_effect=OSError),
        contextlib.suppress(OSError),
    ):
        preprocess_data.preprocess(config, block_bytes=16, commit_bytes=1)
    assert (folder / "tokens.journal").stat().st_size


def _make_torch(folder: Path) -> None:
    state = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)


_MAKERS = {
    "hf": _make_hf,
    "imported": _make_imported,
    "data": _make_data,
    "run": _make_run,
    "text": _make_text,
    "torch": _make_torch,
    "halfway": partial(_make_interrupted, interrupted_method="finish"),
    "nearly": partial(_make_interrupted, interrupted_method="publish"),
}


def trial(root: Path, scratch: Path, name: str, number: int) -> int:
    """Damage a file of a kind, read the folder, and return the exit code.

    Args:
        root: folder that contains the valid folders.
        scratch: folder for copies.
        name: name of the kind.
        number: seed of the damage.
    """
    kind = KINDS[name]
    rng = random.Random(f"{name} {number}")
    folder, path = _sound_copy(root, scratch, kind)
    spoil(path, rng, text=kind.text, seal=kind.seal)
    return rng.choice(kind.readers)(folder)


def sound_trial(root: Path, scratch: Path, name: str, reader: int) -> int:
    """Read a valid file of a kind with one of its readers and return the exit code."""
    kind = KINDS[name]
    return kind.readers[reader](_sound_copy(root, scratch, kind)[0])


def _sound_copy(root: Path, scratch: Path, kind: Kind) -> tuple[Path, Path]:
    """Copy a valid folder and replace the folder's path in the kind's file by the copy's."""
    folder = fresh_copy(root / kind.base, scratch / str(os.getpid()))
    path = (folder / kind.file).resolve()
    sound = path.read_bytes()
    if (root_bytes := str(root / kind.base).encode()) in sound:
        sound = sound.replace(root_bytes, str(folder).encode())
        path.write_bytes(kind.seal(sound) if kind.seal is not None else sound)
    np.random.seed(0)
    return folder, path
