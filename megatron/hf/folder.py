# SPDX-License-Identifier: Apache-2.0
"""An untrusted folder written by `save_pretrained`: config.json, safetensors and tokenizer files.

Only files directly in the folder are read: no paths, no links that leave the folder, no pickles. No
code is run, whatever config.json requests. Links are followed where the hub's cache creates them,
from `snapshots/REVISION/name` to `blobs/DIGEST` of the same model.

A GGUF file counts as a folder with the config.json that its metadata describe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron.cli.gguf_file import GGUFFile, gguf_path
from megatron.cli.tokenizers.gguf_metadata import has_tokenizer
from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing.safetensors_file import SafetensorsFile, TensorInfo
from megatron.core.untrusted_files import link_target, read_json
from megatron.hf.gguf import GGUFTensors, gguf_config
from megatron.hf.quantization_config import quantization_of
from megatron.hf.quantized import Quantization, QuantizedTensor, TensorFile
from megatron.hf.stored_layout import StoredLayout
from megatron.hf.tensor_map import MappedTensor

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

#: Files that an export copies from the original folder, besides weights and config.json.
CARRIED = (
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFolder:
    """A folder whose config.json and index have been read, but no weights.

    Args:
        path: path of the folder, or of the GGUF file.
        config: fields of config.json.
        files: file name of each tensor.
        follow_links: whether links that leave the folder are followed.
        is_gguf: whether the path is a GGUF file.
        has_gguf_tokenizer: whether the GGUF file contains a supported tokenizer.
        stored_names: the name of each tensor in its file if `files` has other names; None if not.
        num_left_out: number of tensors in the files that are not part of `files`, such as tensors
            of the vision tower of a multimodal model.
    """

    path: Path
    config: Mapping[str, Any]
    files: Mapping[str, str]
    follow_links: bool = False
    is_gguf: bool = False
    has_gguf_tokenizer: bool = False
    stored_names: Mapping[str, str] | None = None
    num_left_out: int = 0

    def file(self, name: str) -> Path | None:
        """Return the path of a file in the folder, None if absent or for a GGUF file. Raises
        ValueError if it is outside."""
        if self.is_gguf:
            return None
        return inside(self.path, name, follow_links=self.follow_links)

    @property
    def tokenizer(self) -> Path | None:
        """The first of tokenizer.json, tokenizer.model (SentencePiece) and vocab.json with
        merges.txt that exists; the GGUF file if it contains a tokenizer; None without any."""
        if self.is_gguf:
            return self.path if self.has_gguf_tokenizer else None
        path = self.file("tokenizer.json") or self.file("tokenizer.model")
        return path or (self.file("merges.txt") and self.file("vocab.json"))

    @contextlib.contextmanager
    def open_tensors(self) -> Iterator[OpenTensors]:
        """Open all weight files and check their headers.

        Raises:
            ValueError: a file is corrupt, or lacks a tensor that the index assigns to it.
        """
        with contextlib.ExitStack() as stack:
            if self.is_gguf:
                file = stack.enter_context(GGUFFile(self.path, follow_links=True))
                tensors = GGUFTensors(file, self.config)
                yield OpenTensors(dict.fromkeys(tensors.tensors, tensors))
                return
            opened = {}
            for name in sorted(set(self.files.values())):
                path = self.file(name)
                if path is None:
                    raise ValueError(f"{self.path / name} does not exist: the index names it")
                opened[name] = stack.enter_context(
                    SafetensorsFile(path, follow_links=self.follow_links)
                )
            for tensor, name in self.files.items():
                stored = tensor if self.stored_names is None else self.stored_names[tensor]
                if stored not in opened[name].tensors:
                    raise ValueError(
                        f"{self.path / name} lacks {stored}, which the index assigns to it"
                    )
            files: Mapping[str, TensorFile] = opened
            if self.stored_names is not None:
                files = {n: RenamedTensors(file, self.stored_names) for n, file in opened.items()}
            yield OpenTensors(
                {t: files[name] for t, name in self.files.items()},
                quantization=quantization_of(self.config, where=str(self.path / CONFIG)),
            )


class RenamedTensors:
    """An open file whose tensors have other names.

    Args:
        file: the file.
        stored_names: the name in its file of each tensor of all files.
    """

    def __init__(self, file: TensorFile, stored_names: Mapping[str, str]) -> None:
        self._file, self._stored_names, self.path = file, stored_names, file.path
        self.tensors: Mapping[str, TensorInfo] = {
            name: file.tensors[stored]
            for name, stored in stored_names.items()
            if stored in file.tensors
        }

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, header included."""
        return self._file.bytes_read

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        """See `TensorFile`."""
        self._file.read_box(self._stored_names[name], box, target)


class OpenTensors:
    """The tensors of a folder and the open files that contain them.

    A quantized weight appears as one dequantized tensor, in place of its values and scales.

    Args:
        files: the open file of each tensor, by the tensor's name.
        quantization: the folder's quantization; None without one.

    Raises:
        ValueError: quantized values and scales do not match; the message names the first tensor.
    """

    def __init__(
        self,
        files: Mapping[str, TensorFile],
        *,
        quantization: Quantization | None = None,
    ) -> None:
        self._files, self._quantization = files, quantization
        self._tensors = {name: file.tensors[name] for name, file in files.items()}
        self._quantized: Mapping[str, QuantizedTensor] = {}
        if quantization is None:
            return
        for name in [name for name in self._tensors if quantization.is_ignored(name)]:
            del self._tensors[name]
        self._quantized, problems = quantization.find(self._tensors)
        if problems:
            others_text = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise ValueError(f"{problems[0]}{others_text}")
        for name, tensor in self._quantized.items():
            for stored_name in tensor.names:
                del self._tensors[stored_name]
            self._tensors[name] = tensor.dequantized

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def find(self, name: str) -> TensorInfo:
        """Return a tensor's TensorInfo; for a quantized weight, the dequantized one."""
        return self._tensors[name]

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Read only the elements of a box of a tensor into `target` [*box.sizes].

        Raises:
            ValueError: a file cannot be read, or a quantized weight is not finite.
        """
        quantized = self._quantized.get(name)
        if quantized is None:
            self._files[name].read_box(name, box, target)
            return
        assert self._quantization is not None
        self._quantization.read_box(quantized, box, target, files=self._files)

    def read_mapped(self, tensor: MappedTensor, box: Box, target: torch.Tensor) -> None:
        """Read a box of a tensor, in the order of its table, into `target` [*box.sizes].

        Raises:
            ValueError: see `read_box`.
        """
        layout = self.layout_of(tensor)
        if layout is None:
            self.read_box(tensor.name, box, target)
            return
        stored_box = layout.stored_box(box, tensor.shape)
        stored = torch.empty(stored_box.sizes, dtype=target.dtype)
        self.read_box(tensor.name, stored_box, stored)
        target.copy_(layout.select(stored))

    def layout_of(self, tensor: MappedTensor) -> StoredLayout | None:
        """Return how the files store a tensor. Quantized matrices are never transposed."""
        if tensor.layout is None or tensor.name not in self._quantized:
            return tensor.layout
        return tensor.layout._replace(transposed=False)

    def stored_shape(self, tensor: MappedTensor) -> tuple[int, ...]:
        """Return the shape that a tensor must have in the files."""
        layout = self.layout_of(tensor)
        return tensor.shape if layout is None else layout.shape(tensor.shape)

    def is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is the bias of a quantized weight and all its elements are zero.

        Writers of GPTQ add such biases to layers that have none. Raises ValueError if the file
        cannot be read.
        """
        weight = f"{name.removesuffix('bias')}weight"
        shape = self._tensors[name].shape
        if not name.endswith(".bias") or weight not in self._quantized or len(shape) != 1:
            return False
        for band in row_boxes(shape, torch.float32.itemsize):
            values = torch.empty(band.sizes)
            self.read_box(name, band, values)
            if bool(values.any()):
                return False
        return True

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, headers included."""
        return sum({file.path: file.bytes_read for file in self._files.values()}.values())


def end_tokens(path: Path) -> tuple[int, ...]:
    """Return `eos_token_id` of generation_config.json, or else of config.json, as a tuple.

    Raises:
        ValueError: eos_token_id is neither an id nor a list of ids.
    """
    for name in (GENERATION_CONFIG, CONFIG):
        if gguf_path(path) is not None:
            eos_token_id, file = open_folder(path).config.get("eos_token_id"), path
        else:
            file = inside(path, name)
            eos_token_id = read_object(file).get("eos_token_id") if file is not None else None
        if eos_token_id is None:
            continue
        ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
        if not all(type(number) is int and number >= 0 for number in ids):
            raise ValueError(f"{file}: eos_token_id is {eos_token_id!r}: expected token ids")
        return tuple(ids)
    return ()


def is_folder(path: str | Path) -> bool:
    """Return whether a path is a Hugging Face folder or a GGUF file rather than one of our
    checkpoints."""
    path = Path(path)
    has_config = (path / CONFIG).is_file() and not any(path.glob("iter_*"))
    return has_config or gguf_path(path) is not None


def open_folder(
    path: str | Path, *, follow_links: bool = False, ignore_auto_map: bool = False
) -> HuggingFaceFolder:
    """Read a folder's config.json and the index of its tensors.

    Args:
        path: the folder.
        follow_links: follow links that leave the folder.
        ignore_auto_map: accept a model with `auto_map`; its code is not run.

    Raises:
        ValueError: this is not a Hugging Face folder, or it requests something unsafe.
    """
    path = Path(path)
    if (gguf := gguf_path(path)) is not None:
        return _open_gguf(gguf)
    if path.is_file():
        raise ValueError(
            f"{path} is a file: name a folder with {CONFIG} and safetensors, or a .gguf file; "
            "archives are not opened, unpack it first"
        )
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder; models are not downloaded")
    config_path = inside(path, CONFIG, follow_links=follow_links)
    if config_path is None:
        raise ValueError(f"{path} contains no {CONFIG}: name the folder of a Hugging Face model")
    config = read_object(config_path, follow_links=follow_links)
    if "auto_map" in config and not ignore_auto_map:
        raise ValueError(
            f"{config_path} has auto_map: the model requires custom code, which is never "
            "run; if its weights match the architecture that model_type names, import it "
            "with --ignore-auto-map"
        )
    files = _weight_map(path, follow_links)
    return HuggingFaceFolder(
        path=path,
        config=MappingProxyType(config),
        files=MappingProxyType(files),
        follow_links=follow_links,
    )


def _open_gguf(path: Path) -> HuggingFaceFolder:
    """Read the header of a GGUF file. Raises ValueError."""
    with GGUFFile(path, follow_links=True) as file:
        config = gguf_config(file)
        return HuggingFaceFolder(
            path=path,
            config=MappingProxyType(config),
            files=MappingProxyType(dict.fromkeys(GGUFTensors(file, config).tensors, path.name)),
            is_gguf=True,
            has_gguf_tokenizer=has_tokenizer(file.metadata),
        )


def inside(folder: Path, name: str, *, follow_links: bool = False) -> Path | None:
    """Return the path of a file directly in a folder, None if absent.

    Raises:
        ValueError: the name is a path, or the file is a link that leaves the folder.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{folder} names the file {name!r}: only files in the folder are read")
    path = folder / name
    if not path.is_symlink():
        return path if path.exists() else None
    try:
        target, allowed = link_target(path)
    except OSError:
        raise ValueError(f"{path} is a broken link") from None
    if not follow_links and not allowed:
        raise ValueError(
            f"{path} is a link to {target}, outside the folder: copy the folder with cp -rL if you "
            "trust it, or import it with --follow-links"
        )
    return path


def read_object(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError."""
    try:
        fields = read_json(path, follow_links=follow_links)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is not a JSON object")
    return fields


def _weight_map(path: Path, follow_links: bool) -> dict[str, str]:
    """Return the file of each tensor: from the index, or the single file for all tensors."""
    index = inside(path, INDEX, follow_links=follow_links)
    if index is not None:
        weight_map = read_object(index, follow_links=follow_links).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or not name.endswith(".safetensors"):
                raise ValueError(f"{index} puts {tensor} into {name!r}: only safetensors are read")
        for name in sorted(set(weight_map.values())):
            inside(path, name, follow_links=follow_links)
        return weight_map
    names = [p.name for p in sorted(path.glob("*.safetensors"))]
    if SINGLE in names:
        names = [SINGLE]
    if len(names) == 1:
        only_file = inside(path, names[0], follow_links=follow_links)
        assert only_file is not None
        with SafetensorsFile(only_file, follow_links=follow_links) as file:
            return dict.fromkeys(file.tensors, names[0])
    if names:
        raise ValueError(f"{path} contains {len(names)} safetensors files but no {INDEX}")
    if pickles := sorted(p.name for kind in _PICKLES for p in path.glob(kind)):
        raise ValueError(
            f"{path} contains weights as pickle only ({pickles[0]}), which can run code when it is "
            "opened and is never read: save the model as safetensors"
        )
    raise ValueError(f"{path} contains no safetensors")
