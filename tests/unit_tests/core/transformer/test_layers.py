# SPDX-License-Identifier: Apache-2.0
"""Norm, MLP, rope tables and attention against formulas, gradients included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel
from megatron.core.transformer import (
    MLP,
    AttentionConfig,
    LayerBuild,
    MLPConfig,
    Norm,
    NormConfig,
    RopeConfig,
    RotaryEmbedding,
    SelfAttention,
)
from megatron.core.weight_gather import WeightStore
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator
from tests.support.layers import make_layer_build
from tests.support.nan_memory import nan_memory

S, B, H = 5, 2, 12


def logical_tensors(store: WeightStore, flat_of) -> dict[str, torch.Tensor]:
    """Return views of whole logical tensors in each handle's storage."""
    tensors = {}
    for handle in store.handles.values():
        flat = flat_of(handle).view(-1)
        for box in store.boxes(handle):
            tensors[box.name] = flat[box.start : box.start + box.numel].view(box.sizes)
    return tensors


def values(*shape: int, key: int = 0) -> torch.Tensor:
    """Return normally distributed values."""
    return torch.randn(shape, generator=generator(2, key, *shape))


def compare_with_formula(build: LayerBuild, run, formula, *inputs: torch.Tensor) -> None:
    """Compare output, input gradients and weight gradients of a layer with an fp64 formula.

    Args:
        run: maps inputs to one output or a tuple.
        formula: maps (logical_tensors fp64 weights, *fp64 inputs) to the same outputs.
    """
    store = build.store
    store.materialize()
    weights = logical_tensors(store, lambda handle: handle.get())
    for name, weight in weights.items():  # away from ones and zeros
        weight += 0.3 * values(*weight.shape, key=len(name))
    engine = DataParallel(store, store.groups)
    fp64_weights = {n: w.double().requires_grad_(True) for n, w in weights.items()}
    fp32_inputs = [x.clone().requires_grad_(True) for x in inputs]
    fp64_inputs = [x.double().requires_grad_(True) for x in inputs]
    engine.begin_step()
    with nan_memory():
        outputs = run(*fp32_inputs)
        expected = formula(fp64_weights, *fp64_inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        expected = expected if isinstance(expected, tuple) else (expected,)
        factors = [values(*out.shape, key=50 + i) for i, out in enumerate(expected)]
        engine.backward(
            sum((o * f).sum() for o, f in zip(outputs, factors, strict=True)), last=True
        )
        engine.finish()
    sum((o * f).sum() for o, f in zip(expected, factors, strict=True)).backward()
    actual = {f"output {i}": out for i, out in enumerate(outputs)}
    actual |= {f"input gradient {i}": x.grad for i, x in enumerate(fp32_inputs)}
    actual |= logical_tensors(store, lambda handle: handle.main_grad)
    reference = {f"output {i}": out for i, out in enumerate(expected)}
    reference |= {f"input gradient {i}": x.grad for i, x in enumerate(fp64_inputs)}
    reference |= {n: fp64_weight.grad for n, fp64_weight in fp64_weights.items()}
    assert_all_close(actual, reference, bound=5e-6)


def reference_norm(config: NormConfig, weights, x: torch.Tensor) -> torch.Tensor:
    """Return the norm of the formula."""
    if config.kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    weight = weights["n.weight"] + (1.0 if config.zero_centered else 0.0)
    out = x / (x.square().mean(-1, keepdim=True) + config.epsilon).sqrt() * weight
    return out + weights["n.bias"] if "n.bias" in weights else out


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_matches_formula(kind: str, zero_centered: bool, residual: bool):
    config = NormConfig(kind=kind, epsilon=0.1, zero_centered=zero_centered)
    build = make_layer_build(H, seed=3)
    norm = Norm("n", H, config=config, build=build)

    def formula(weights, x, stream=None):
        if stream is None:
            return reference_norm(config, weights, x)
        return reference_norm(config, weights, x + stream), x + stream

    streams = (values(S, B, H, key=1),) if residual else ()
    compare_with_formula(build, norm, formula, values(S, B, H), *streams)


def test_initial_norm_has_unit_scale():
    for zero_centered in (False, True):
        build = make_layer_build(H, seed=3)
        norm = Norm("n", H, config=NormConfig(zero_centered=zero_centered), build=build)
        build.store.materialize()
        x = values(S, B, H)
        with torch.no_grad():
            rms = norm(x).square().mean(-1).sqrt()
        assert float((rms - 1.0).abs().max()) < 1e-3


FORMULAS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("gated", "activation"),
    [(True, "silu"), (True, "gelu")] + [(False, name) for name in FORMULAS],
)
def test_mlp_matches_formula(gated: bool, activation: str, bias: bool):
    build = make_layer_build(H, seed=3)
    config = MLPConfig(ffn_hidden_size=10, gated=gated, activation=activation, bias=bias)
    mlp = MLP("m", config=config, build=build)
    layout = SequenceLayout.of_rows(S)
    act = FORMULAS["gelu_tanh" if gated and activation == "gelu" else activation]

    def formula(weights, x):
        inner = F.linear(x, weights["m.up.weight"], weights.get("m.up.bias"))
        if gated:
            gate = F.linear(x, weights["m.gate.weight"], weights.get("m.gate.bias"))
            inner = act(gate) * inner
        else:
            inner = act(inner)
        return F.linear(inner, weights["m.down.weight"], weights.get("m.down.bias"))

    compare_with_formula(build, lambda x: mlp(x, layout), formula, values(S, B, H))


def reference_rope(
    x: torch.Tensor, base: float, features: int, *, interleaved: bool
) -> torch.Tensor:
    """Rotate the leading features of [s, b, n, d] as complex numbers."""
    half = features // 2
    angle = torch.arange(x.shape[0]).double()[:, None] * base ** (
        -torch.arange(half).double() / half
    )
    rotation = torch.polar(torch.ones_like(angle), angle)[:, None, None]  # [s, 1, 1, r/2]
    head, unrotated = x[..., :features], x[..., features:]
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).mT
    rotated_pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * rotation)
    rotated_pairs = rotated_pairs if interleaved else rotated_pairs.mT
    return torch.cat([rotated_pairs.flatten(-2), unrotated], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("groups", "qk_norm", "percent", "window", "sinks", "gated"),
    [
        (4, False, 1.0, None, False, False),
        (2, True, 0.5, None, True, False),
        (2, False, 1.0, 3, True, True),
        (1, True, 0.25, None, False, True),
    ],
)
def test_attention_matches_formula(
    groups, qk_norm, percent, window, sinks, gated, interleaved: bool
):
    n, d = 4, 8
    build = make_layer_build(H, seed=3)
    config = AttentionConfig(
        num_attention_heads=n,
        num_query_groups=groups,
        kv_channels=d,
        qkv_bias=True,
        output_bias=True,
        qk_norm=qk_norm,
        window=window,
        sinks=sinks,
        output_gate=gated,
    )
    norm = NormConfig(epsilon=0.1)
    attention = SelfAttention("a", 0, config=config, norm=norm, build=build)
    layout = SequenceLayout.of_rows(S)
    rope_config = RopeConfig(base=30.0, percent=percent, interleaved=interleaved)
    rope = RotaryEmbedding(rope_config, d)(layout.positions)

    def heads(weights, projection, x):
        out = F.linear(x, weights[f"a.{projection}.weight"], weights[f"a.{projection}.bias"])
        out = out.unflatten(-1, (-1, d))  # [s, b, heads, d]
        if qk_norm and projection != "value":
            weight = {"n.weight": weights[f"a.{projection}_norm.weight"]}
            out = reference_norm(norm, weight, out)
        if projection != "value":
            out = reference_rope(out, 30.0, int(d * percent), interleaved=interleaved)
        return out.repeat_interleave(n // out.shape[2], 2)

    def formula(weights, x):
        query, key, value = (
            heads(weights, projection, x) for projection in ("query", "key", "value")
        )
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) / math.sqrt(d)
        scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
        if window is not None:
            scores = scores.masked_fill(torch.ones(S, S).tril(-window).bool(), -math.inf)
        if sinks:  # an additional column without a value
            column = weights["a.sinks"][None, :, None, None].expand(B, n, S, 1)
            scores = torch.cat([scores, column], -1)
        mixed = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1)[..., :S], value).flatten(2)
        if gated:
            mixed = mixed * F.linear(x, weights["a.gate.weight"], weights["a.gate.bias"]).sigmoid()
        return F.linear(mixed, weights["a.output.weight"], weights["a.output.bias"])

    compare_with_formula(build, lambda x: attention(x, layout, rope=rope), formula, values(S, B, H))
    assert (attention.sinks is not None) == sinks
    if sinks:
        assert not attention.sinks.sharding.weight_decay


def test_invalid_layer_config_is_refused():
    shape = {"num_attention_heads": 4, "num_query_groups": 3, "kv_channels": 8}
    with pytest.raises(ValueError, match="num-query-groups 3 must divide num-attention-heads 4"):
        SelfAttention(
            "a",
            0,
            config=AttentionConfig(**shape),
            norm=NormConfig(),
            build=make_layer_build(H, seed=3),
        )
    with pytest.raises(ValueError, match="use >= 1"):
        SelfAttention(
            "a",
            0,
            config=AttentionConfig(**{**shape, "num_query_groups": 0}),
            norm=NormConfig(),
            build=make_layer_build(H, seed=3),
        )
    with pytest.raises(ValueError, match="'swish'"):
        MLP(
            "m",
            config=MLPConfig(ffn_hidden_size=8, activation="swish"),
            build=make_layer_build(H, seed=3),
        )
    with pytest.raises(ValueError, match=r"'BatchNorm'.*RMSNorm"):
        NormConfig(kind="BatchNorm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm epsilon is 0.0: use a positive number"):
        NormConfig(epsilon=0.0)
    for invalid in ({"base": 1.0}, {"percent": 0.0}, {"percent": 1.5}):
        with pytest.raises(ValueError, match=r"rotary base .* must be above 1 and rotary percent"):
            RopeConfig(**invalid)
    with pytest.raises(ValueError, match=r"0.3 of 10 features per head is 3: rotary position"):
        RopeConfig(percent=0.3).rotary_features(10)
