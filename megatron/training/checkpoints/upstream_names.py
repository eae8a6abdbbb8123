# SPDX-License-Identifier: Apache-2.0
"""The tensors of a GPT in Megatron's `torch_dist` checkpoints, and this project's weights in them.

Layers are either one tensor with a first axis of layers, `decoder.layers.mlp.linear_fc2.weight`, or
a tensor each, `decoder.layers.0.mlp...`. Queries, keys and values are one tensor, whose rows are
for each group those of its queries, its key and its value; gate and up are one tensor, all rows of
the gate first. Rows of the vocabulary are padded at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import AttentionConfig
from megatron.hf.parts import Part, TensorMap
from megatron.training.checkpoints.dcp_folder import StoredTensor

_LAYERS = "decoder.layers"
_EXPERTS = re.compile(r"\.(experts|shared_experts|router)\.")
_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"
_POSITIONS = "embedding.position_embeddings.weight"  # there and here
_FINAL = "decoder.final_layernorm.weight"

Tensors = Mapping[str, StoredTensor]


def upstream_map(tensors: Tensors, config: GPTConfig) -> TensorMap:
    """Return all weights of a model by both names.

    Args:
        tensors: of the folder, which show how layers are stored and how the vocabulary is padded.
        config: the model.

    Raises:
        ValueError: what such folders are not read for.
    """
    found = [name for name in tensors if _EXPERTS.search(name)]
    if found or config.moe is not None or config.mtp_num_layers:
        raise ValueError(
            "mixtures of experts and layers of further prediction are not read from torch_dist "
            f"folders{f' ({found[0]})' if found else ''}: convert dense models"
        )
    attention = config.attention
    if config.pattern:
        raise ValueError(
            f"models of the blocks {config.pattern} are not read from torch_dist folders: convert "
            "GPTs"
        )
    if not isinstance(attention, AttentionConfig) or attention.sinks or attention.output_gate:
        raise ValueError(
            "latent attention, sinks and gates of attention are not read from torch_dist folders: "
            "convert models with plain attention"
        )
    made = _Map(tensors, config, attention)
    made.add_ends()
    for layer in range(config.num_layers):
        made.add_attention(layer)
        made.add_mlp(layer)
    return made.map


def shape_of_folder(tensors: Tensors) -> dict[str, object]:
    """Return what the tensors alone specify of the model, by flag, as far as they do."""
    layers = {int(found[1]) for n in tensors if (found := re.match(r"decoder\.layers\.(\d+)\.", n))}
    shapes = {re.sub(r"\.layers\.\d+\.", ".layers.", n): t.shape for n, t in tensors.items()}
    stacked = [t.shape[0] for n, t in tensors.items() if re.match(r"decoder\.layers\.[a-z]", n)]
    facts: dict[str, object] = {
        "num-layers": max(layers) + 1 if layers else max(stacked, default=0)
    }
    up, down = (shapes.get(f"{_LAYERS}.mlp.linear_{n}.weight") for n in ("fc1", "fc2"))
    if _FINAL in shapes:
        facts["hidden-size"] = shapes[_FINAL][-1]
    if up and down:
        facts["ffn-hidden-size"] = down[-1]
        facts["swiglu"] = up[-2] == 2 * down[-1]
    facts["normalization"] = "LayerNorm" if f"{_FINAL[:-6]}bias" in shapes else "RMSNorm"
    facts["untie-embeddings-and-output-weights"] = _HEAD in shapes
    facts["learned positions"] = shapes[_POSITIONS][0] if _POSITIONS in shapes else None
    facts["qk-layernorm"] = f"{_LAYERS}.self_attention.q_layernorm.weight" in shapes
    for flag, name in (
        ("bias of queries, keys and values", "self_attention.linear_qkv"),
        ("bias of attention's output", "self_attention.linear_proj"),
        ("bias of the MLP", "mlp.linear_fc2"),
    ):
        facts[flag] = f"{_LAYERS}.{name}.bias" in shapes
    return facts


def shape_of_model(config: GPTConfig) -> dict[str, object]:
    """Return the same of a model that flags describe."""
    attention = config.attention
    assert isinstance(attention, AttentionConfig)
    assert config.mlp is not None
    return {
        "num-layers": config.num_layers,
        "hidden-size": config.hidden_size,
        "ffn-hidden-size": config.mlp.ffn_hidden_size,
        "swiglu": config.mlp.gated,
        "normalization": config.norm.kind,
        "untie-embeddings-and-output-weights": not config.tied,
        "learned positions": config.max_position_embeddings,
        "qk-layernorm": attention.qk_norm,
        "bias of queries, keys and values": attention.qkv_bias,
        "bias of attention's output": attention.output_bias,
        "bias of the MLP": config.mlp.bias,
    }


class _Map:
    """A map that the parts of a model are added to."""

    def __init__(self, tensors: Tensors, config: GPTConfig, attention: AttentionConfig) -> None:
        self.map = TensorMap()
        self._tensors, self._config, self._attention = tensors, config, attention

    def add_ends(self) -> None:
        """Add embedding, final norm and head."""
        config = self._config
        shape = (config.vocab_size, config.hidden_size)
        ends = [(_EMBEDDING, "embedding.weight")]
        if not config.tied:
            ends.append((_HEAD, "head.weight"))
        for theirs, ours in ends:
            found = self._tensors.get(theirs)
            rows = found.shape[0] if found is not None and found.shape else 0
            padded = (max(rows, shape[0]), shape[1])
            self._add(Part(theirs, (0, 0), ours, (0, 0), shape), padded, shape)
        if config.max_position_embeddings is not None:
            table = (config.max_position_embeddings, config.hidden_size)
            self._add(Part(_POSITIONS, (0, 0), _POSITIONS, (0, 0), table), table, table)
        for kind in self._norm_kinds():
            size = (config.hidden_size,)
            ours = f"decoder.final_norm.{kind}"
            self._add(Part(f"{_FINAL[:-6]}{kind}", (0,), ours, (0,), size), size, size)

    def add_attention(self, layer: int) -> None:
        """Add the first block of a layer."""
        config, attention = self._config, self._attention
        hidden, channels = config.hidden_size, attention.kv_channels
        ours = f"decoder.blocks.{2 * layer}"
        inside = f"{ours}.attention"
        self._add_norm(layer, "self_attention.linear_qkv.layer_norm_", "input_layernorm.", ours)
        for kind in self._kinds(attention.qkv_bias):
            inner = (hidden,) if kind == "weight" else ()
            self._add_rows(
                layer, f"self_attention.linear_qkv.{kind}", self._runs(inside, kind), inner
            )
        heads = attention.num_attention_heads * channels
        self._whole(
            layer, "self_attention.linear_proj.weight", f"{inside}.output.weight", (hidden, heads)
        )
        if attention.output_bias:
            self._whole(
                layer, "self_attention.linear_proj.bias", f"{inside}.output.bias", (hidden,)
            )
        for kind in self._norm_kinds() if attention.qk_norm else ():
            for theirs, name in (("q_layernorm", "query_norm"), ("k_layernorm", "key_norm")):
                place = f"self_attention.{theirs}.{kind}"
                self._whole(layer, place, f"{inside}.{name}.{kind}", (channels,))

    def add_mlp(self, layer: int) -> None:
        """Add the second block of a layer."""
        mlp, hidden = self._config.mlp, self._config.hidden_size
        ours = f"decoder.blocks.{2 * layer + 1}"
        self._add_norm(layer, "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.", ours)
        for kind in self._kinds(mlp.bias):
            inner = (hidden,) if kind == "weight" else ()
            names = ("gate", "up") if mlp.gated else ("up",)
            runs = [(f"{ours}.mlp.{name}.{kind}", mlp.ffn_hidden_size) for name in names]
            self._add_rows(layer, f"mlp.linear_fc1.{kind}", runs, inner)
        shape = (hidden, mlp.ffn_hidden_size)
        self._whole(layer, "mlp.linear_fc2.weight", f"{ours}.mlp.down.weight", shape)
        if mlp.bias:
            self._whole(layer, "mlp.linear_fc2.bias", f"{ours}.mlp.down.bias", (hidden,))

    def _runs(self, inside: str, kind: str) -> list[tuple[str, int]]:
        """Return the runs of rows of queries, keys and values, of one group after another."""
        attention = self._attention
        heads = attention.num_attention_heads // attention.num_query_groups
        of_a_group = [("query", heads), ("key", 1), ("value", 1)]
        return [
            (f"{inside}.{name}.{kind}", count * attention.kv_channels)
            for _ in range(attention.num_query_groups)
            for name, count in of_a_group
        ]

    def _add_norm(self, layer: int, fused: str, plain: str, ours: str) -> None:
        """Add a norm, which is named after the linear layer after it where both are one."""
        for kind in self._norm_kinds():
            named = self._place(layer, f"{fused}{kind}")[0] in self._tensors
            theirs = f"{fused}{kind}" if named else f"{plain}{kind}"
            self._whole(layer, theirs, f"{ours}.norm.{kind}", (self._config.hidden_size,))

    def _whole(self, layer: int, theirs: str, ours: str, shape: tuple[int, ...]) -> None:
        self._add_rows(layer, theirs, [(ours, shape[0])], shape[1:])

    def _add_rows(
        self, layer: int, theirs: str, runs: list[tuple[str, int]], inner: tuple[int, ...]
    ) -> None:
        """Add a tensor whose rows are runs of rows of this project's tensors, in this order."""
        name, first, layers = self._place(layer, theirs)
        rows, totals = 0, dict.fromkeys((ours for ours, _ in runs), 0)
        for ours, count in runs:
            totals[ours] += count
        whole = (*layers, sum(totals.values()), *inner)
        taken = dict.fromkeys(totals, 0)
        rest = (0,) * len(inner)
        for ours, count in runs:
            part = Part(name, (*first, rows, *rest), ours, (taken[ours], *rest), (count, *inner))
            self._add(part, whole, (totals[ours], *inner))
            rows, taken[ours] = rows + count, taken[ours] + count

    def _place(self, layer: int, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return the name of a layer's tensor there, and index and size of its axis of layers."""
        own = f"{_LAYERS}.{layer}.{name}"
        if own in self._tensors:
            return own, (), ()
        return f"{_LAYERS}.{name}", (layer,), (self._config.num_layers,)

    def _add(self, part: Part, theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
        self.map.declare((part.theirs, theirs), (part.ours, ours), fp32=False)
        self.map.add(part)

    def _norm_kinds(self) -> Iterator[str]:
        yield from self._kinds(self._config.norm.kind == "LayerNorm")

    def _kinds(self, biased: bool) -> Iterator[str]:
        yield from ("weight", "bias") if biased else ("weight",)
