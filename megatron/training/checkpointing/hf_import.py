# SPDX-License-Identifier: Apache-2.0
"""Read a Hugging Face folder: options that `--load-hf` supplies, and import as a checkpoint.

The import is streamed chunk by chunk, without building a model. The checkpoint contains weights
only, in their original dtype; `hugging_face/` next to it keeps the folder's tokenizer, config.json
and generation_config.json for a later export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from megatron.cli.tokenizers import build_tokenizer, guess_type
from megatron.cli.tokenizers.gguf_metadata import gguf_chat_fields, gguf_tokenizer_json
from megatron.core.boxes import row_boxes
from megatron.core.dist_checkpointing import (
    CheckpointError,
    Solo,
    TensorChunk,
    list_checkpoints,
    save_checkpoint,
)
from megatron.core.dist_checkpointing.safetensors_file import DTYPES, as_bytes
from megatron.core.models.layer_pattern import without_stages
from megatron.core.untrusted_files import (
    MAX_TOKENIZER_BYTES,
    make_folder,
    read_regular,
    replace_file,
)
from megatron.hf.config_json import HuggingFaceModel, read_folder
from megatron.hf.folder import CARRIED, CONFIG, HuggingFaceFolder, OpenTensors, open_folder
from megatron.hf.read_weights import check_copies, check_tensors
from megatron.hf.tensor_map import MappedTensor, TensorMap
from megatron.training.checkpointing.state import FORMAT
from megatron.training.config.model_table import model_options, options_problem

#: Folder next to the checkpoint for the copied files.
CARRIED_FOLDER = "hugging_face"


def import_folder(
    folder: HuggingFaceFolder,
    model: HuggingFaceModel,
    save: str,
    *,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a folder's weights as `SAVE/iter_0000000` and return its path.

    Args:
        folder: the Hugging Face folder.
        model: the model that its config.json describes.
        save: folder of checkpoints, created if missing.
        dtype: dtype of the written weights; None keeps their dtype.

    Raises:
        ValueError: the folder is damaged, or the checkpoint cannot be written.
    """
    root = Path(save)
    # Other checkpoints are rejected too: a run would resume from the new one instead of its latest.
    if checkpoints := list_checkpoints(root):
        raise ValueError(
            f"--save {save} already contains {checkpoints[0].name}: name another folder"
        )
    with folder.open_tensors() as opened:
        mapped = check_tensors(folder, opened, model)
        chunks = [_chunk(opened, mapped, tensor, dtype) for tensor in mapped.mcore_tensors.values()]
        check_copies(folder, opened, mapped, chunks=chunks)
        carried = {name: folder.file(name) for name in (CONFIG, *CARRIED)}
        tokenizer = _tokenizer(folder, root / CARRIED_FOLDER, model.config.vocab_size)
        extra = _extra(
            model,
            tokenizer,
            {
                chunk.tensor.dtype
                for chunk in chunks
                if not _keeps_dtype(mapped.mcore_tensors[chunk.name])
            },
        )
        try:
            _copy_files(carried, root / CARRIED_FOLDER, follow_links=folder.follow_links)
            for name, content in _derived_files(folder).items():
                replace_file(root / CARRIED_FOLDER / name, content, sync=True)
            return save_checkpoint(root, 0, chunks, extra, coordinator=Solo())
        except (CheckpointError, OSError) as error:
            raise ValueError(f"--save {save}: {error}") from error


def _copy_files(files: Mapping[str, Path | None], target: Path, *, follow_links: bool) -> None:
    """Copy the files that are not None. Raises OSError."""
    make_folder(target, root=target.parent)
    for name, path in files.items():
        if path is not None:
            content = read_regular(path, MAX_TOKENIZER_BYTES, follow_links=follow_links)
            replace_file(target / name, content, sync=True)


def _derived_files(folder: HuggingFaceFolder) -> dict[str, bytes]:
    """Return the files of a Hugging Face folder that stand for the metadata of a GGUF file, or the
    config.json of the language model of a multimodal folder; none for any other folder."""
    if not folder.is_gguf and folder.stored_names is None:
        return {}
    files = {CONFIG: json.dumps(dict(folder.config), indent=1).encode()}
    if folder.is_gguf and folder.tokenizer is not None:
        fields = json.dumps(gguf_chat_fields(folder.path), indent=1)
        files["tokenizer_config.json"] = fields.encode()
        files["tokenizer.json"] = gguf_tokenizer_json(folder.path)
    return files


def _chunk(
    opened: OpenTensors, mapped: TensorMap, tensor: MappedTensor, dtype: torch.dtype | None
) -> TensorChunk:
    """Return the chunk of a tensor that is read when it is written."""
    stored_dtypes = {
        DTYPES[opened.find(tensor_slice.hf_name).dtype] for tensor_slice in tensor.slices
    }
    chosen = None if tensor.keep_dtype else dtype
    target_dtype = (
        torch.float32 if tensor.fp32 else chosen or reduce(torch.promote_types, stored_dtypes)
    )
    return TensorChunk(
        name=tensor.name,
        shape=tensor.shape,
        offsets=(0,) * len(tensor.shape),
        tensor=torch.empty(tensor.shape, dtype=target_dtype, device="meta"),
        replica_ranks=(0,),
        byte_stream=partial(_row_blocks, opened, mapped, tensor, target_dtype),
    )


def _keeps_dtype(tensor: MappedTensor) -> bool:
    """Return whether a tensor keeps its dtype when the weights' dtype changes."""
    return tensor.fp32 or tensor.keep_dtype


def _row_blocks(
    opened: OpenTensors, mapped: TensorMap, tensor: MappedTensor, dtype: torch.dtype
) -> Iterator[memoryview]:
    """Yield a tensor's bytes in blocks of rows of at most `ROW_BOX_BYTES`."""
    for tensor_slice in tensor.slices:
        for band in row_boxes(tensor_slice.sizes, dtype.itemsize):
            box = tensor_slice.hf_box(band)
            block = torch.empty(box.sizes, dtype=dtype)
            opened.read_mapped(mapped.hf_tensors[tensor_slice.hf_name], box, block)
            yield as_bytes(block)


def _tokenizer(folder: HuggingFaceFolder, target: Path, vocab_size: int) -> dict[str, Any]:
    """Return how to rebuild the folder's tokenizer from its copy in `target`."""
    tokenizer = {
        "type": None,
        "model": None,
        "vocab_size": vocab_size,
        "fingerprint": None,
        "eod": None,
        "special_tokens": None,
    }
    path = folder.tokenizer
    if path is None:
        return tokenizer
    built = build_tokenizer(guess_type(path), model=path)
    return {
        **tokenizer,
        "type": guess_type(path),
        "model": str(target.absolute() / ("tokenizer.json" if folder.is_gguf else path.name)),
        "fingerprint": built.fingerprint,
        "eod": built.eod,
        "special_tokens": built.special_tokens.to_json(),
    }


def _extra(
    model: HuggingFaceModel, tokenizer: dict[str, Any], dtypes: set[torch.dtype]
) -> dict[str, Any]:
    """Return the checkpoint's `extra`: the fields that training writes, without progress."""
    options = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in folder_options(model).items()
    }
    if tokenizer["type"] is not None:
        options["tokenizer-type"] = tokenizer["type"]
        options["tokenizer-model"] = tokenizer["model"]
    return {
        "format": FORMAT,
        "model": model.config.to_json(),
        "config": {
            **options,
            "bf16": dtypes == {torch.bfloat16},
            "fp16": dtypes == {torch.float16},
        },
        "tokenizer": tokenizer,
        "weights_only": True,
    }


#: Options that may differ from the folder's: no weight and no output depends on them.
FREE = frozenset(
    {
        "attention-dropout",
        "hidden-dropout",
        "init-method-std",
        "max-position-embeddings",
        "tokenizer-model",
        "tokenizer-type",
    }
)


def folder_defaults(user_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option values that `--load-hf` supplies, by option name.

    Raises:
        ValueError: the folder cannot be used, options cannot describe its model, or explicit
            options describe another model; the message names all of them.
    """
    path = user_values.get("load-hf")
    if path is None:
        return {}
    folder, model = open_model(path, flag="--load-hf")
    if problem := options_problem(model.config):
        raise ValueError(f"--load-hf {path}: {problem}")
    folder_values = {**folder_options(model), **tokenizer_options(folder)}
    conflicts = [
        f"--{name} is {user_values[name]!r}, there {value!r}"
        for name, value in folder_values.items()
        if name in user_values and not _same(name, user_values[name], value) and name not in FREE
    ]
    if conflicts:
        raise ValueError(
            f"--load-hf {path} contains another model: {'; '.join(conflicts)}: drop these"
        )
    return {name: value for name, value in folder_values.items() if name not in user_values}


def _same(name: str, user_value: Any, value: Any) -> bool:
    """Return whether an explicit option value is equivalent to the folder's."""
    if name == "hybrid-layer-pattern" and isinstance(user_value, str):
        return without_stages(user_value) == value  # stage boundaries are the run's choice
    return list(user_value) == list(value) if isinstance(value, tuple) else user_value == value


def open_model(path: str, *, flag: str) -> tuple[HuggingFaceFolder, HuggingFaceModel]:
    """Open a folder and parse its config.json. Raises ValueError, which names `flag`."""
    try:
        folder = open_folder(path)
        model = read_folder(folder)
        with folder.open_tensors() as opened:  # before building anything from config.json
            check_tensors(folder, opened, model)
        return folder, model
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def folder_options(model: HuggingFaceModel) -> dict[str, Any]:
    """Return the options that describe a folder's model, by name."""
    return {"max-position-embeddings": model.max_length, **model_options(model.config)}


def tokenizer_options(folder: HuggingFaceFolder) -> dict[str, Any]:
    """Return the options of a folder's tokenizer, by name; empty if it has no tokenizer."""
    path = folder.tokenizer
    if path is None:
        return {}
    return {"tokenizer-type": guess_type(path), "tokenizer-model": str(path.absolute())}
