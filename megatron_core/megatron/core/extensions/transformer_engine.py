# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's layers as a `Backend`: `--transformer-impl transformer_engine`.

TE (NVIDIA, Apache-2.0) computes the matmuls, norms and collectives of a tensor-parallel layer; this
package stores weights and gradients. A TE module is built without memory, and its weight is a
`HandleWeight`, which implements TE's `DistributedWeight` protocol (TE >= 2.19) over a
`WeightHandle`:

| TE calls | implemented by |
|---|---|
| materialize_group_for_forward, _for_backward | `WeightHandle.get()`: gathered if need be |
| grad_buffer | `main_grad` if the next gradient overwrites it, else a buffer of its shape |
| finalize_group_grads | the gradient is accumulated: a separate buffer is added to `main_grad` |

TE saves the protocol object for backward, never the gathered weight, so TE layers work with every
sharding strategy like this package's own layers. Biases and norm weights are ordinary copies
(`WeightHandle.use`), whose gradients arrive through autograd; biases are added outside of TE.

A split backward replaces the module's store of delayed weight gradients: gradients that TE would
keep until `backward_dw` wait in the store's `WgradQueue` instead.

With a `QuantizationConfig` a layer multiplies in FP8 or FP4 by TE's recipe, see
`ModelQuantization`. A weight that is gathered in the recipe's format becomes a TE tensor over the
gathered bytes. Any other weight is quantized at each use, because a copy cached by TE would outlive
the gathered bytes. The scales of delayed scaling belong to the model
(`quantization.DelayedScaling`), because TE updates its own once per microbatch and saves them by
pickle.

Attention over whole rows is `te.DotProductAttention`: causal, with windows, grouped queries, sinks,
and documents packed into rows (`cu_seqlens`). This package computes context parallelism, attention
dropout (its masks are reproducible), and documents with padding or without cu_seqlens.

This package also computes the embedding, the output layer, the router, recurrences and replicated
linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from torch.nn import functional
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megatron.core.backend import Backend
from megatron.core.context_parallel import SequenceLayout
from megatron.core.extensions import GATHERED, QuantizationConfig
from megatron.core.extensions.quantization import DelayedScales, DelayedScaling
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelRegion,
)
from megatron.core.weight_gather import RowRuns, WeightHandle, WeightStore
from megatron.core.weight_gather.gather_format import EncodedWeight, gather_formats


def backend(base: Backend, config: QuantizationConfig | None = None) -> Backend:
    """Return `base` with TE's linear layers, grouped linear layers, norms and attention.

    Args:
        config: recipe of the decoder's layers; None multiplies in the dtype of the weights.
    """
    plain = _linear_backends(None)
    te_backend = replace(
        base,
        name="transformer_engine",
        rms_norm=partial(TENorm, te.RMSNorm),
        layer_norm=partial(TENorm, te.LayerNorm),
        attention_layer=TEAttention,
        **plain,
    )
    if config is None:
        return te_backend
    quantization = ModelQuantization(config)
    quantized = _linear_backends(quantization)
    return replace(
        te_backend,
        layer_parts=lambda layer, count: quantized if config.covers(layer, count) else plain,
        step_state=quantization.scaling,
    )


def _linear_backends(quantization: ModelQuantization | None) -> dict[str, Any]:
    return {
        "column_linear": partial(TEColumnParallelLinear, quantization=quantization),
        "row_linear": partial(TERowParallelLinear, quantization=quantization),
        "grouped_linear": partial(TEGroupedLinear, quantization=quantization),
    }


def quantization_problem(config: QuantizationConfig) -> str | None:
    """Return TE's reason why this process's GPU does not support a recipe; None if it does.

    Also None without a GPU.
    """
    if not torch.cuda.is_available():
        return None
    checks = {
        "delayed": te.is_fp8_available,
        "tensorwise": te.is_fp8_available,
        "blockwise": te.is_fp8_block_scaling_available,
        "mxfp8": te.is_mxfp8_available,
        "nvfp4": te.is_nvfp4_available,
    }
    available, reason = checks[config.recipe](return_reason=True)
    return None if available else reason


class ModelQuantization:
    """TE's recipe for a model, and the state of delayed scaling."""

    def __init__(self, config: QuantizationConfig) -> None:
        self.config, self.scaling = config, DelayedScaling(config)
        fp8_format = recipes.Format.HYBRID if config.hybrid else recipes.Format.E4M3
        #: TE's own amax history is unused: 1 is the smallest length.
        self.recipe: recipes.Recipe = {
            "delayed": partial(recipes.DelayedScaling, amax_history_len=1),
            "tensorwise": recipes.Float8CurrentScaling,
            "blockwise": recipes.Float8BlockScaling,
            "mxfp8": recipes.MXFP8BlockScaling,
            "nvfp4": recipes.NVFP4BlockScaling,
        }[config.recipe](fp8_format=fp8_format)

    def of_weight(self, handle: WeightHandle, store: WeightStore) -> WeightQuantization:
        """Return the quantization of a weight [..., o, h].

        Raises:
            ValueError: a size is not a multiple of the recipe's block.
        """
        name = handle.sharding.name
        self.config.check_weight(name, tuple(handle.shape))
        delayed = self.config.recipe == "delayed"
        scales = self.scaling.scales_of(name, store=store) if delayed else None
        gathered = GATHERED.get(self.config.recipe)
        if gathered is not None:
            handle.matmul_format = type(gather_formats(gathered)[0])
        return WeightQuantization(self, scales)


class WeightQuantization:
    """Quantization of the matmuls of one weight.

    Args:
        model: the recipe of the model.
        scales: scales of delayed scaling, for all matrices of the weight; None with other recipes.
    """

    def __init__(self, model: ModelQuantization, scales: DelayedScales | None) -> None:
        self.config, self._recipe, self._scales = model.config, model.recipe, scales
        self._gathered_quantizers: dict[bool, Any] = {}

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which a TE module is called."""
        return te.autocast(enabled=True, recipe=self._recipe)

    def bind(self, module: nn.Module, count: int) -> None:
        """Replace the scales of a module of `count` matmuls with the model's scales."""
        if self._scales is None:
            return
        with self.autocast():
            module.init_fp8_metadata(num_gemms=count)
        # With this key TE assumes that it already registered the module for scale updates.
        module.fp8_meta[FP8GlobalStateManager.get_buffer_info()] = ()
        forward, backward = (module.quantizers[key] for key in ("scaling_fwd", "scaling_bwd"))
        # Per matmul TE has three forward quantizers (input, weight, output) and two backward ones
        # (gradients of the output and of the input).
        for matmul in range(count):
            forward[3 * matmul] = self._quantizer(0, forward[0].dtype)
            forward[3 * matmul + 1] = self._quantizer(1, forward[0].dtype)
            backward[2 * matmul] = self._quantizer(2, backward[0].dtype)

    def for_input_gradient(
        self, module: nn.Module, matrices: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return a module's matrices [o, h], quantized columnwise for the input gradient.

        `te.Linear` would do this itself; TE's other modules multiply by the matrices they get.
        """
        quantized = []
        for number, matrix in enumerate(matrices):
            quantizer = module.quantizers["scaling_fwd"][3 * number + 1].copy()
            quantizer.set_usage(rowwise=False, columnwise=True)
            quantized.append(quantizer(matrix))
        return quantized

    def gathered(
        self, encoded: EncodedWeight, count: int, *, backward: bool, **options: Any
    ) -> list[torch.Tensor]:
        """Return the `count` matrices [o, h] of a weight as TE tensors over gathered bytes.

        Args:
            backward: whether an input gradient reads them, columnwise.
            options: dtype, device and requires_grad of the tensors.
        """
        make = {"tensorwise": _float8_tensor, "mxfp8": _mxfp8_tensor, "nvfp4": _nvfp4_tensor}
        if backward not in self._gathered_quantizers:
            quantizer = self._gathered_quantizer(encoded, columns=backward)
            self._gathered_quantizers[backward] = quantizer
        options["quantizer"] = self._gathered_quantizers[backward]
        rows, blocks = len(encoded.quantized) // count, len(encoded.scales) // count
        pairs = zip(encoded.quantized.split(rows), encoded.scales.split(blocks), strict=True)
        matrices = [replace(encoded, quantized=data, scales=scales) for data, scales in pairs]
        return [
            make[self.config.recipe](matrix, columns=backward, **options) for matrix in matrices
        ]

    def _gathered_quantizer(self, encoded: EncodedWeight, *, columns: bool) -> Any:
        """Return the quantizer that TE associates with a gathered weight."""
        usage = {"rowwise": not columns, "columnwise": columns}
        if self.config.recipe == "tensorwise":
            usage["rowwise"] = True
            return te.Float8CurrentScalingQuantizer(
                te.DType.kFloat8E4M3, encoded.quantized.device, **usage
            )
        square = encoded.block[0] == encoded.block[1]
        if self.config.recipe == "mxfp8":
            return te.MXFP8Quantizer(te.DType.kFloat8E4M3, with_2d_quantization=square, **usage)
        return te.NVFP4Quantizer(te.DType.kFloat4E2M1, with_2d_quantization=square, **usage)

    def _quantizer(self, index: int, dtype: Any) -> te.Float8Quantizer:
        """Return the quantizer of tensor `index` of `QUANTIZED_TENSORS`."""
        assert self._scales is not None
        scale, amax = self._scales.scale[index], self._scales.amax[index : index + 1]
        return te.Float8Quantizer(scale, amax, dtype)

    def padded(
        self, rows: torch.Tensor, runs: RowRuns
    ) -> tuple[torch.Tensor, list[int], torch.Tensor | None]:
        """Pad runs of rows [r, h] with zeros to the multiple that quantized matmuls need.

        Returns:
            rows [p, h], the length of each run, and the index of each original row, int64 [r], or
            None instead of the index if no run was padded.
        """
        # The weight gradient reduces over the rows, so their number must fit like a weight's size.
        multiple = self.config.weight_multiple
        padded_counts = [-(-count // multiple) * multiple for count in runs.counts]
        if padded_counts == list(runs.counts):
            return rows, padded_counts, None
        # Computed on the device: copying pageable host memory would wait for the device.
        ends = runs.ends.long()
        padding = -ends.diff(prepend=ends.new_zeros(1)) % multiple
        row = torch.arange(len(rows), device=rows.device)
        run = torch.searchsorted(ends, row, right=True)
        index = row + (padding.cumsum(0) - padding)[run]
        return (
            rows.new_zeros(sum(padded_counts), rows.shape[-1]).index_copy(0, index, rows),
            padded_counts,
            index,
        )


def _float8_tensor(matrix: EncodedWeight, *, columns: bool, **options: Any) -> torch.Tensor:
    """Return a matrix in E4M3 with one scale; TE transposes it if the GPU needs that."""
    return te.Float8Tensor(
        shape=matrix.quantized.shape,
        data=matrix.quantized,
        fp8_scale_inv=matrix.scale,
        fp8_dtype=te.DType.kFloat8E4M3,
        **options,
    )


def _mxfp8_tensor(
    matrix: EncodedWeight, *, columns: bool, quantizer: Any, **options: Any
) -> torch.Tensor:
    """Return a matrix in E4M3 with a scale for 32 elements of a row or of a column."""
    shape, scales = matrix.quantized.shape, matrix.scales
    if matrix.block == (32, 32):
        scales = scales.repeat_interleave(32, int(columns))
    return te.MXFP8Tensor(
        shape=shape,
        fp8_dtype=te.DType.kFloat8E4M3,
        quantizer=quantizer,
        with_gemm_swizzled_scales=False,
        **_usage_fields(
            columns,
            data=matrix.quantized,
            scale_inv=_pad_scales(scales, quantizer.get_scale_shape(shape, columnwise=columns)),
        ),
        **options,
    )


def _nvfp4_tensor(
    matrix: EncodedWeight, *, columns: bool, quantizer: Any, **options: Any
) -> torch.Tensor:
    """Return a matrix in E2M1, two elements per byte, with a scale for 16 elements.

    The 16 elements are adjacent in a row, or in a column. Columns are stored as rows of the
    transpose.
    """
    codes, scales = matrix.quantized, matrix.scales  # [o, h/2]
    shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
    if columns:
        elements = torch.stack((codes & 15, codes >> 4), 2).flatten(1).t()  # [h, o]
        codes, scales = elements[:, ::2] | (elements[:, 1::2] << 4), scales.t()
    if matrix.block == (16, 16):
        scales = scales.repeat_interleave(16, 0)
    return te.NVFP4Tensor(
        shape=shape,
        fp4_dtype=te.DType.kFloat4E2M1,
        quantizer=quantizer,
        with_gemm_swizzled_scales=False,
        amax_rowwise=None if columns else matrix.amax,
        amax_columnwise=matrix.amax if columns else None,
        **_usage_fields(
            columns,
            data=codes,
            scale_inv=_pad_scales(scales, quantizer.get_scale_shape(shape, columnwise=columns)),
        ),
        **options,
    )


def _usage_fields(columns: bool, **fields: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Return a tensor's fields for rowwise or columnwise usage, and None for the other."""
    present, absent = ("columnwise", "rowwise") if columns else ("rowwise", "columnwise")
    fields_by_name: dict[str, torch.Tensor | None] = {f"{absent}_{name}": None for name in fields}
    return fields_by_name | {f"{present}_{name}": field for name, field in fields.items()}


def _pad_scales(scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return scales padded with zeros to the shape that TE's matmuls read."""
    padded = scales.new_zeros(tuple(shape))
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return padded


class TEColumnParallelLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` computed by `te.Linear`; its weight is declared in the same way."""

    def __init__(
        self,
        name: str,
        *args: Any,
        store: WeightStore,
        quantization: ModelQuantization | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, *args, store=store, **options)
        self._quantization = quantization and quantization.of_weight(self.weight, store)
        self._layer = self._build_layer(te.Linear)

    def take_norm(self, norm: Any) -> bool:
        """Also compute `norm`, a `transformer.Norm`, of the input, by `te.LayerNormLinear`; not a
        LayerNorm without bias, which TE does not have."""
        if norm.config.kind == "LayerNorm" and norm.bias is None:
            return False
        kind = partial(
            te.LayerNormLinear,
            eps=norm.config.epsilon,
            normalization=norm.config.kind,
            zero_centered_gamma=norm.config.zero_centered,
        )
        copied = {"layer_norm_weight": norm.weight}
        if norm.bias is not None:
            copied["layer_norm_bias"] = norm.bias
        self._layer = self._build_layer(kind, copied=copied)
        return True

    def _build_layer(self, kind: Callable[..., nn.Module], **options: Any) -> _Layer:
        return _linear(
            kind,
            self.weight,
            self.bias,
            mode="column",
            region=self.region,
            quantization=self._quantization,
            **options,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [s, b, o/tp] from x [s, b, h] ([s/tp, b, h] under sequence parallelism)."""
        return self._layer(x)


class TERowParallelLinear(RowParallelLinear):
    """`RowParallelLinear` computed by `te.Linear`; its weight is declared in the same way."""

    def __init__(
        self,
        name: str,
        *,
        store: WeightStore,
        quantization: ModelQuantization | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, store=store, **options)
        self._layer = _linear(
            te.Linear,
            self.weight,
            self.bias,
            mode="row",
            region=self.region,
            quantization=quantization and quantization.of_weight(self.weight, store),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [s, b, o] ([s/tp, b, o] under sequence parallelism) from x [s, b, h/tp]."""
        return self._layer(x)


class TEGroupedLinear:
    """The matrices of one weight's experts, applied by `te.GroupedLinear`.

    Args:
        handle: handle of a weight whose local tensor concatenates a matrix [o, h] for each run:
            [num_runs · c, o/c, h] for any c.
        num_runs: number of runs, one per expert.
    """

    def __init__(
        self,
        handle: WeightHandle,
        num_runs: int,
        store: WeightStore,
        *,
        quantization: ModelQuantization | None = None,
    ) -> None:
        count, rows, width = handle.shape
        module = te.GroupedLinear(
            num_runs,
            width,
            count * rows // num_runs,
            bias=False,
            params_dtype=handle.dtype,
            device="meta",
            fuse_wgrad_accumulation=True,
            use_grouped_tensor=False,  # that path does not support distributed weights
        )
        self._quantization = quantization and quantization.of_weight(handle, store)
        self._layer = _Layer(
            module,
            handle,
            [f"weight{run}" for run in range(num_runs)],
            quantization=self._quantization,
        )

    def __call__(self, rows: torch.Tensor, runs: RowRuns) -> torch.Tensor:
        """Return [r, o] from rows [r, h].

        TE reads the row counts on the host. `runs` reads them once for all matmuls of the layer's
        experts, which is the only wait for the device here.
        """
        trailing = len(rows) - sum(runs.counts)  # TE multiplies every row of its input
        if trailing:
            y = self._product(rows[:-trailing], runs)
            return functional.pad(y, (0, 0, 0, trailing))
        return self._product(rows, runs)

    def _product(self, rows: torch.Tensor, runs: RowRuns) -> torch.Tensor:
        """Return [r, o] from the rows [r, h] of all runs, without trailing rows."""
        if self._quantization is None:
            return self._layer(rows, list(runs.counts))
        rows, counts, index = self._quantization.padded(rows, runs)
        y = self._layer(rows, counts)
        return y if index is None else y.index_select(0, index)


def _linear(
    kind: Callable[..., nn.Module],
    weight: WeightHandle,
    bias: WeightHandle | None,
    *,
    mode: str,
    region: TensorParallelRegion,
    copied: dict[str, WeightHandle] | None = None,
    quantization: WeightQuantization | None = None,
) -> _Layer:
    """Return `te.Linear` or `te.LayerNormLinear` over a weight [o, h] of this rank."""
    rows, width = weight.shape
    tp = region.group.size
    module = kind(
        width * tp if mode == "row" else width,
        rows * tp if mode == "column" else rows,
        bias=False,
        parallel_mode=mode if tp > 1 else None,
        tp_group=region.group.handle,
        tp_size=tp,
        sequence_parallel=region.scatters,
        params_dtype=weight.dtype,
        device="meta",
        fuse_wgrad_accumulation=True,
    )
    return _Layer(module, weight, ["weight"], bias=bias, copied=copied, quantization=quantization)


class _Layer:
    """A TE module whose weights belong to a store.

    It is not an `nn.Module`, because then TE's module would be a child module: a model's parameters
    are the parameters of its store.

    Args:
        module: TE module on the meta device, without a bias.
        handle: handle of the weight matrices.
        names: names of the module's parameters for the matrices, in order.
        bias: added outside of TE, which computes its gradient together with the weight's gradient:
            never if the weight is frozen, and too late in a split backward.
        copied: parameters that the module gets as copies, by name.
        quantization: quantization of the matmuls; None computes them in the dtype of the weight.
    """

    def __init__(
        self,
        module: nn.Module,
        handle: WeightHandle,
        names: list[str],
        *,
        bias: WeightHandle | None = None,
        copied: dict[str, WeightHandle] | None = None,
        quantization: WeightQuantization | None = None,
    ) -> None:
        self._quantization = quantization
        self._module, self._handle, self._names = module, handle, names
        self._bias, self._copied = bias, copied or {}
        for name in (*names, *self._copied):
            del module._parameters[name]
        self._weights: list[HandleWeight] = []

    def __call__(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Return the module's output for x [..., h]."""
        weights = self._weights or self._bind()
        trainable = self._handle.trainable
        if weights[0].requires_grad is not trainable:
            for weight in weights:
                weight.requires_grad_(trainable)
        attributes = vars(self._module)
        attributes.update({n: handle.use(x.dtype) for n, handle in self._copied.items()})
        with nullcontext() if self._quantization is None else self._quantization.autocast():
            y = self._module(x, *args)
        for name in self._copied:  # the attribute would keep the autograd graph alive
            del attributes[name]
        return y if self._bias is None else y + self._bias.use()

    def _bind(self) -> list[HandleWeight]:
        """Set the module's weights, after the store has been materialised."""
        quantize = gathered = None
        if self._quantization is not None:
            quantize = partial(self._quantization.for_input_gradient, self._module)
            gathered = self._quantization.gathered
        self._weights = HandleWeight.of(
            self._handle, len(self._names), quantize=quantize, gathered=gathered
        )
        attributes = vars(self._module)
        attributes.update(zip(self._names, self._weights, strict=True))
        attributes["wgrad_store"] = DelayedGradients(self._weights[0].matrices)
        if self._quantization is not None:
            self._quantization.bind(self._module, len(self._names))
        return self._weights


#: Quantizes the matrices of a weight.
Quantize = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

#: Converts gathered bytes to matrices, see `WeightQuantization.gathered`.
Gathered = Callable[..., list[torch.Tensor]]


class HandleWeight(nn.Parameter):
    """A weight of a TE module: TE's `DistributedWeight` protocol over a weight handle.

    It has the shape of the gathered matrix and no memory of its own; the first matrix of a handle
    represents all matrices of the handle.
    """

    is_distributed_weight = True
    matrices: Matrices
    number: int

    @staticmethod
    def of(handle: WeightHandle, count: int, **options: Any) -> list[HandleWeight]:
        """Return the weights of the `count` matrices of a handle; options as for `Matrices`."""
        matrices = Matrices(handle, count, **options)
        element = torch.empty((), dtype=handle.dtype, device=handle.anchor.device)
        weights = []
        for index in range(count):
            weight = HandleWeight(element.expand(matrices.shape), handle.trainable)
            weight.matrices, weight.number = matrices, index
            weights.append(weight)
        return weights

    def materialize_group_for_forward(self) -> list[torch.Tensor]:
        """Return the matrices [o, h] for the forward product."""
        return self.matrices.get()

    def materialize_group_for_backward(self) -> list[torch.Tensor]:
        """Return the matrices [o, h] for the input gradient."""
        return self.matrices.get(backward=True)

    def grad_buffer(self) -> torch.Tensor:
        """Return the buffer for this matrix's gradient, fp32 [o, h]."""
        return self.matrices.buffer(self.number)

    def finalize_group_grads(self, written: Any) -> list[None]:
        """Accumulate the gradients that were written to the buffers."""
        return self.matrices.accumulate()


class Matrices:
    """The concatenated matrices of a handle's weight, and the accumulation of their gradients.

    Args:
        handle: handle of a weight [count · c, o/c, h], or [o, h] for one matrix.
        count: number of matrices.
        quantize: quantizes the matrices for an input gradient; None leaves them.
        gathered: converts a weight that is gathered in the format in which it is multiplied.

    Attributes:
        shape: (o, h) of each matrix.
    """

    def __init__(
        self,
        handle: WeightHandle,
        count: int,
        *,
        quantize: Quantize | None = None,
        gathered: Gathered | None = None,
    ) -> None:
        self.handle, self.count = handle, count
        self._quantize, self._gathered = quantize, gathered
        width = handle.shape[-1]
        self.shape = (math.prod(handle.shape) // (count * width), width)
        self._whole: torch.Tensor | None = None
        self._buffers: list[torch.Tensor] = []

    def _split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.view(self.count, *self.shape).unbind(0))

    def get(self, *, backward: bool = False) -> list[torch.Tensor]:
        """Return the matrices; TE reads requires_grad from each."""
        trained = self.handle.trainable
        if self._gathered is not None:
            encoded = self.handle.get_encoded(backward=backward)
            if encoded is not None:
                return self._gathered(
                    encoded,
                    self.count,
                    backward=backward,
                    dtype=self.handle.dtype,
                    device=encoded.quantized.device,
                    requires_grad=trained,
                )
        whole = self.handle.get(backward=backward).detach()
        if backward and self._quantize is not None:
            return self._quantize(self._split(whole))
        return [matrix.requires_grad_(trained) for matrix in self._split(whole)]

    def buffer(self, number: int) -> torch.Tensor:
        """Return a gradient buffer, fp32 [o, h]; without memory if the gradient is delayed."""
        if number == 0:
            if self.handle.deferral.splits:
                self._buffers = [self._empty_buffer() for _ in range(self.count)]
            else:
                self._whole = self.handle.gradient_buffer()
                self._buffers = self._split(self._whole)
        return self._buffers[number]

    def _empty_buffer(self) -> torch.Tensor:
        device = self.handle.anchor.device
        buffer = torch.empty(self.shape, dtype=torch.float32, device=device)
        buffer.untyped_storage().resize_(0)
        return buffer

    def accumulate(self) -> list[None]:
        """Accumulate the written gradients; do nothing if they are delayed."""
        whole, self._whole = self._whole, None
        self._buffers = []
        if whole is not None:
            self.handle.accumulate_written_grad(partial(_add_written_gradient, whole))
        return [None] * self.count

    def delay(self, product: Callable[[], Any]) -> None:
        """Accumulate the gradients that `product` writes to buffers, now or through the queue."""
        buffers, self._buffers = self._buffers, []

        def write(main_grad: torch.Tensor, *, overwrite: bool) -> None:
            whole = main_grad if overwrite else torch.empty_like(main_grad)
            for buffer, matrix in zip(buffers, self._split(whole), strict=True):
                buffer.set_(matrix)
            product()
            if whole is not main_grad:
                main_grad.add_(whole)

        self.handle.accumulate_written_grad(write)


def _add_written_gradient(whole: torch.Tensor, main_grad: torch.Tensor, *, overwrite: bool) -> None:
    """Add the gradient from TE to `main_grad`, unless TE wrote to `main_grad` itself."""
    if whole.data_ptr() != main_grad.data_ptr():
        main_grad.add_(whole)


class DelayedGradients:
    """Replaces TE's `WeightGradStore` in a module.

    A weight gradient that is computed after backward then waits in this package's queue.
    """

    def __init__(self, matrices: Matrices) -> None:
        self._matrices = matrices

    def delay_wgrad_compute(self) -> bool:
        """Return whether weight gradients are computed separately from input gradients."""
        return self._matrices.handle.deferral.splits

    def put(self, tensors: list[Any], product: Callable[..., Any]) -> None:
        """Store a weight gradient for later: `product(*tensors)` writes it."""
        self._matrices.delay(partial(product, *tensors))


class TEAttention:
    """Causal attention over whole rows, computed by `te.DotProductAttention`.

    Args:
        scale: factor on the logits.
        window: number of visible tokens including the query's own; None: all earlier tokens too.
    """

    def __init__(self, *, scale: float, window: int | None) -> None:
        self._scale = scale
        self._window = (-1 if window is None else window - 1, 0)
        self._module: nn.Module | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Return [s, b, n, d]; None for documents without cu_seqlens or with padding.

        Args:
            query: [s, b, n, d].
            key, value: [s, b, g, d].
            layout: of the rows.
            sinks: [n], learned logits.
        """
        length, batch = query.shape[:2]
        documents = layout.documents
        by_ids = documents is None and layout.document_ids is not None
        if by_ids or (documents is not None and documents[0][-1] != length):
            return None
        module = self._module
        if module is None:
            module = self._module = self._build_module(query, key, learns_sinks=sinks is not None)
        if sinks is not None:
            vars(module)["softmax_offset"] = sinks
        if documents is None:
            out = module(query, key, value, qkv_format="sbhd", attn_mask_type="causal")
            out = out.view(query.shape)
        else:
            bounds, longest = layout.cu_seqlens(batch)
            packed = [x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)]  # [b · s, ...]
            out = module(
                *packed,
                qkv_format="thd",
                attn_mask_type="padding_causal",
                cu_seqlens_q=bounds,
                cu_seqlens_kv=bounds,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
            out = out.view(batch, length, *query.shape[2:]).transpose(0, 1)
        if sinks is not None:
            del vars(module)["softmax_offset"]  # the attribute would keep the autograd graph alive
        return out

    def _build_module(
        self, query: torch.Tensor, key: torch.Tensor, *, learns_sinks: bool
    ) -> nn.Module:
        module = te.DotProductAttention(
            query.shape[2],
            query.shape[3],
            num_gqa_groups=key.shape[2],
            attention_dropout=0.0,
            window_size=self._window,
            softmax_scale=self._scale,
            softmax_type="learnable" if learns_sinks else "vanilla",
        )
        if learns_sinks:
            del module._parameters["softmax_offset"]
        return module


class TENorm:
    """The norm of a layer, computed by a module of TE.

    Args:
        kind: `te.RMSNorm` or `te.LayerNorm`.
        eps: added to the mean square or the variance.
        zero_centered: the weight is stored as weight - 1.
    """

    def __init__(self, kind: type[nn.Module], *, eps: float, zero_centered: bool) -> None:
        self._kind, self._settings = kind, {"eps": eps, "zero_centered_gamma": zero_centered}
        self._module: nn.Module | None = None

    def __call__(
        self, x: torch.Tensor, *handles: WeightHandle, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return norm(x), or (norm(x + residual), x + residual), from x [..., h].

        Args:
            handles: of the weight [h], and of LayerNorm's bias [h], which is zero without one.
        """
        stream = x if residual is None else x + residual
        if self._module is None:
            width = x.shape[-1]
            self._module = self._kind(width, dtype=x.dtype, device="meta", **self._settings)
        for name, handle in zip(("weight", "bias"), handles, strict=False):
            # TE computes in the weight's dtype, and reads the weight again in backward. The
            # gradient of an fp32 copy arrives unrounded.
            self._module._parameters[name] = handle.use(torch.float32).to(x.dtype)
        if len(handles) == 1 and self._module._parameters.get("bias") is not None:
            self._module._parameters["bias"] = x.new_zeros(x.shape[-1])
        normed = self._module(stream)
        return normed if residual is None else (normed, stream)
