# SPDX-License-Identifier: Apache-2.0
"""Convert Hugging Face folders to checkpoints and back.

    python -m megatron.hf.convert import --hf Qwen3-0.6B --save runs/qwen
    python -m megatron.hf.convert export --load runs/tuned --save Qwen3-0.6B-tuned --verify

One process streams the weights, so memory use does not grow with model size. Only `--verify`, which
compares the logits of the converted model and of `transformers`, loads both models.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from megatron.cli.errors import run_entry_point
from megatron.cli.flags import HelpRequested, parse_command_line
from megatron.cli.standard_streams import run_command

if TYPE_CHECKING:
    import torch

#: Largest allowed difference between two fp32 logits, relative to the largest logit.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class LogitDifference:
    """Difference between the logits of a converted model and of `transformers`.

    Args:
        max_difference: largest absolute difference.
        max_logit: largest absolute logit of `transformers`.
    """

    max_difference: float
    max_logit: float

    def __str__(self) -> str:
        return f"{self.max_difference:.3g}, the largest is {self.max_logit:.3g}"


#: Batch size and sequence length that are compared: long enough to show a wrong RoPE scaling.
ROWS, MAX_TOKENS = 2, 64


def compare_logits(
    checkpoint: Path, folder: Path, *, dtype: torch.dtype | None = None
) -> LogitDifference:
    """Compare the fp32 logits, or class outputs, of a checkpoint and of a Hugging Face folder.

    Both models are in memory at once.

    Args:
        checkpoint, folder: paths of the two models.
        dtype: dtype that the conversion used; the weights of both models are rounded to it first.

    Raises:
        ValueError: transformers is not installed, or the difference is above `TOLERANCE` of
            the largest logit.
    """
    import torch

    from megatron.core.dist_checkpointing import (
        CheckpointError,
        load_checkpoint,
        read_extra,
        weight_chunks,
    )
    from megatron.core.models.gpt import GPTConfig, GPTModel
    from megatron.core.process_groups import ProcessGroupCollection
    from megatron.core.weight_gather import Storage

    hf_model = _load_with_transformers(folder)
    config = GPTConfig.from_json(read_extra(checkpoint)["model"])
    model = GPTModel(config, ProcessGroupCollection.single(), storage=Storage(initialize=False))
    try:
        chunks = weight_chunks(model.store)
        load_checkpoint(checkpoint, chunks, convert_dtype=True)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (ROWS, MAX_TOKENS), generator=generator)
    with torch.no_grad():
        weights = [chunk.tensor for chunk in chunks if chunk.name not in model.store.states]
        for weight in (*weights, *hf_model.parameters()):
            weight.copy_(weight.to(dtype or weight.dtype))
        if model.classifier is not None:
            rows = tokens.split(1)  # without a padding token, transformers takes one row at a time
            expected = torch.cat([hf_model(row, use_cache=False).logits for row in rows])
            logits = model.classifier(model(tokens)[-1])  # [b, labels]
        else:
            expected = hf_model(tokens, use_cache=False).logits  # [b, s, v]
            logits = model.full_logits(tokens).transpose(0, 1)  # [b, s, v]
    difference = LogitDifference(
        float((logits - expected).abs().max()), float(expected.abs().max())
    )
    if not difference.max_difference <= TOLERANCE * difference.max_logit:
        raise ValueError(
            f"the logits of {checkpoint} and of {folder} in transformers differ by up to "
            f"{difference}: the limit is {TOLERANCE:g} of that: do not use one for the other"
        )
    return difference


def _load_with_transformers(folder: Path) -> torch.nn.Module:
    """Return the model of a folder in fp32, built by transformers. Raises ValueError."""
    try:
        import transformers
    except ImportError:
        raise ValueError("--verify needs transformers: pip install transformers") from None
    import torch

    from megatron.hf.architectures import ARCHITECTURES

    fields, _ = transformers.PreTrainedConfig.get_config_dict(str(folder), local_files_only=True)
    fields |= ARCHITECTURES[fields["model_type"]].reference_fields(fields)
    config_class = transformers.CONFIG_MAPPING[fields["model_type"]]
    hf_config = config_class.from_dict(fields)
    model_class = transformers.AutoModelForCausalLM
    if "ForSequenceClassification" in str(fields.get("architectures")):
        model_class = transformers.AutoModelForSequenceClassification
        hf_config.pad_token_id = None  # the last token is the last token of the row
    return model_class.from_pretrained(
        str(folder),
        config=hf_config,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        experts_implementation="eager",  # other implementations require divisible sizes
    ).eval()


PROG = "python -m megatron.hf.convert"
T = TypeVar("T")
DtypeName = Literal["float32", "bfloat16", "float16"]
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Options of `import`: Hugging Face folder to checkpoint."""

    hf: str
    """Folder with config.json and safetensors of a supported architecture."""
    save: str
    """Folder of checkpoints in which to write iter_0000000."""
    dtype: DtypeName | None = None
    """Dtype to convert weights to; None = keep their dtype."""
    verify: bool = False
    """Compare logits with transformers afterwards; takes both models' memory."""
    follow_links: bool = False
    """Follow symbolic links that leave the folder."""
    ignore_auto_map: bool = False
    """Import a model with auto_map; its custom code is never run."""
    text_only: bool = False
    """Import the language model of a multimodal folder, and leave out what processes images."""

    def __post_init__(self) -> None:
        if self.text_only and self.verify:
            raise ValueError(
                "--verify compares whole folders, and --text-only imports a part of one: leave out "
                "--verify, and use it when you export"
            )


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Options of `export`: checkpoint to Hugging Face folder."""

    load: str
    """Folder of checkpoints (the latest is exported) or an iter_ folder; any training layout."""
    save: str
    """Folder to create."""
    like: str | None = None
    """Folder whose config.json and tokenizer files are copied; None = the folder that the model
    was imported from."""
    dtype: DtypeName | None = None
    """Dtype to convert weights to; None = keep their dtype."""
    max_shard_size: str = "5GB"
    """Maximum size of a weight file: bytes, or a number with KB, MB or GB (powers of 1000)."""
    verify: bool = False
    """Compare logits with transformers afterwards; takes both models' memory."""

    def __post_init__(self) -> None:
        shard_bytes(self.max_shard_size)


def shard_bytes(text: str) -> int:
    """Return a size in bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15}) ?([KMG]B)?", text.strip().upper())
    size = int(match[1]) * _UNITS[match[2] or ""] if match else 0
    if size < 1:
        raise ValueError(f"--max-shard-size is {text!r}: give a size like 5GB")
    return size


def import_model(config: ImportConfig) -> None:
    """Convert a folder into a checkpoint. Raises ValueError."""
    from megatron.hf.config_json import DTYPES, read_folder
    from megatron.hf.folder import open_folder
    from megatron.hf.read_weights import reading_lines
    from megatron.hf.text_only import text_only_folder
    from megatron.training.checkpointing.hf_import import import_folder

    try:
        folder = open_folder(
            config.hf,
            follow_links=config.follow_links,
            ignore_auto_map=config.ignore_auto_map,
        )
        if config.text_only:
            folder = text_only_folder(folder)
        model = read_folder(folder)
    except ValueError as error:
        raise ValueError(f"--hf: {error}") from None
    dtype = None if config.dtype is None else DTYPES[config.dtype]
    checkpoint = import_folder(folder, model, config.save, dtype=dtype)
    print(f"imported {config.hf} as {checkpoint}", flush=True)
    for line in reading_lines(folder, model):
        print(line, flush=True)
    if config.verify:
        _verify(checkpoint, Path(config.hf), dtype, written=checkpoint)


def export_model(config: ExportConfig) -> None:
    """Convert a checkpoint into a folder. Raises ValueError."""
    from megatron.core.dist_checkpointing import Solo
    from megatron.hf.config_json import DTYPES
    from megatron.training.checkpointing.find import load_newest
    from megatron.training.checkpointing.hf_export import Exported, export_folder

    dtype = None if config.dtype is None else DTYPES[config.dtype]

    def export(checkpoint: Path) -> Exported:
        return export_folder(
            checkpoint,
            config.save,
            like=config.like,
            dtype=dtype,
            max_shard_bytes=shard_bytes(config.max_shard_size),
        )

    loaded = load_newest(config.load, export, Solo())
    if loaded is None:
        raise ValueError(f"--load {config.load}: there is no checkpoint: name another folder")
    checkpoint, exported = loaded
    files = f"{len(exported.files)} file{'s' * (len(exported.files) > 1)}"
    print(f"exported {checkpoint} to {exported.folder} ({files} of weights)", flush=True)
    if exported.note is not None:
        print(exported.note, flush=True)
    if config.verify:
        _verify(checkpoint, exported.folder, dtype, written=exported.folder)


def _verify(checkpoint: Path, folder: Path, dtype: torch.dtype | None, *, written: Path) -> None:
    from megatron.hf.convert import compare_logits

    try:
        difference = compare_logits(checkpoint, folder, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"{written} was written, but not verified: {error}") from None
    print(f"verified: logits differ from those of transformers by up to {difference}", flush=True)


def run(argv: Sequence[str]) -> None:
    """Run `import` or `export`. Raises ValueError."""
    command, arguments = (argv[0], argv[1:]) if argv else ("", ())
    if command == "import":
        import_model(
            _parse(ImportConfig, arguments, "import", "Hugging Face folder to checkpoint.")
        )
    elif command == "export":
        export_model(
            _parse(ExportConfig, arguments, "export", "Checkpoint to Hugging Face folder.")
        )
    elif command in ("-h", "--help"):
        raise HelpRequested(
            f"usage: {PROG} import --hf FOLDER --save DIR [options]\n"
            f"       {PROG} export --load DIR --save FOLDER [options]\n"
            f"Options: {PROG} import --help, {PROG} export --help\n"
        )
    else:
        raise ValueError(f"{command or 'nothing'!r} is not a command: use import or export")


def _parse(schema: type[T], argv: Sequence[str], command: str, description: str) -> T:
    line = parse_command_line(schema, argv, prog=f"{PROG} {command}", description=description)
    return line.config


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command and return its exit code."""
    return run_entry_point(lambda: run(argv), prog=PROG)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], os.environ))
