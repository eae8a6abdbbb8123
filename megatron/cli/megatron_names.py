# SPDX-License-Identifier: Apache-2.0
"""Megatron's flags and values that this program does not have: for each the nearest way, and why.

A script written for Megatron names many flags. One that exists here has the same name and is an
option of the schema. Any other is in the tables below, so that it is answered by a line that says
what to write instead, or to leave it out, and the reason. Nothing is accepted and ignored.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What to tell somebody who gives a flag of Megatron.

    Args:
        nearest: flag that comes nearest, without dashes; None = leave it out.
        reason: why the flag is not here.
    """

    nearest: str | None
    reason: str

    def text(self, spelling: str) -> str:
        """Return the line for a flag as it was given, `--ckpt-format` or a key with its place."""
        mend = f"use --{self.nearest}" if self.nearest else "leave it out"
        return f"{spelling}: {mend}: {self.reason}"


_DISPATCH = "tokens of experts travel by all-gather or all-to-all of torch, over one group"
_SETS = "the load is balanced over a microbatch or a sequence"
_FORMAT = "checkpoints have one format, safetensors with a manifest, that loads on any layout"
_WRITER = "every rank writes its part once, in the background by a process of its own"
_FUSION = "each kernel has one implementation per device, chosen by --attention-backend and torch"
_GRAPHS = "one CUDA graph holds forward and backward of a whole step"
_FP8 = "weights and activations are fp32, bf16 or fp16"
_FAMILY = "only GPT is trained here"
_RNG = "random numbers follow from --seed and the position in the run: no state is saved or loaded"
_TOKENIZER = "a tokenizer is one file: tokenizer.json for hf, a .model for sentencepiece"
_JOB = "the loop has no such mode"

#: (nearest flag or "", reason, flags).
_ROWS: tuple[tuple[str, str, str], ...] = (
    # Model
    ("", "attention probabilities are always computed in fp32", "attention-softmax-in-fp32"),
    ("", "logits are scaled in fp32 by 1 / sqrt(head features)",
     "no-query-key-layer-scaling apply-query-key-layer-scaling"),
    ("", _FUSION,
     "no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion "
     "no-rope-fusion no-gradient-accumulation-fusion cross-entropy-loss-fusion "
     "cross-entropy-fusion-impl no-persist-layer-norm bias-swiglu-fusion masked-softmax-fusion "
     "apply-rope-fusion use-fused-weighted-squared-relu fused-residual-rmsnorm"),
    ("attention-backend", "it chooses the attention kernel", "use-flash-attn use-flash-attention "
     "flash-decode attention-impl"),
    ("position-embedding-type", "none there leaves positions out",
     "no-position-embedding use-rotary-position-embeddings"),
    ("swiglu", "without it MLPs have GELU, or the square of relu by --squared-relu",
     "openai-gelu onnx-safe quick-geglu glu-linear-offset activation-func"),
    ("hybrid-layer-pattern", "it is the name of the same",
     "hybrid-override-pattern"),
    ("hybrid-layer-pattern", "behind each / in it stand the blocks of one depth",
     "mtp-hybrid-override-pattern"),
    ("hybrid-layer-pattern", "one model class, whose blocks it says",
     "use-mcore-models use-legacy-models spec hybrid-attention-ratio hybrid-mlp-ratio "
     "is-hybrid-model model-name"),
    ("", "residuals are added after the sublayer",
     "apply-residual-connection-post-layernorm fp32-residual-connection"),
    ("yarn-rotary-scaling-factor", "it is of every attention, latent too",
     "rotary-scaling-factor"),
    ("window-size", "all layers have one window", "window-attn-skip-freq"),
    ("init-method-std", "every weight is drawn from a normal distribution",
     "init-method-xavier-uniform embedding-init-method-std"),
    ("", "weights are drawn from --seed alike on every layout and device",
     "no-initialization use-cpu-initialization data-parallel-random-init"),
    ("num-layers", "there is one decoder", "encoder-num-layers decoder-num-layers"),
    ("seq-length", "there is one decoder", "encoder-seq-length decoder-seq-length"),
    ("transformer-impl", "it names the layers", "export-te-mcore-model te-rng-tracker "
     "transformer-pipeline-model-parallel-size inference-rng-tracker"),
    ("mtp-num-layers", "each depth has one layer of its own, like the model's last",
     "mtp-use-repeated-layer"),
    # Layout
    ("pipeline-model-parallel-layout", "there is one decoder, and it says where it is cut",
     "pipeline-model-parallel-split-rank"),
    ("pipeline-model-parallel-layout", "a stage of E alone has the embedding and no layer",
     "standalone-embedding-stage"),
    ("", "transfers between stages are batched and overlap computing under every schedule",
     "no-overlap-p2p-communication overlap-p2p-communication no-batch-p2p-communication "
     "batch-p2p-communication overlap-p2p-communication-warmup-flush"),
    ("", "each stage reads its own batch and knows its shapes, which may differ between batches",
     "variable-seq-lengths enable-variable-seq-lengths"),
    ("", "each stage sums its gradients when its own last microbatch has filled them",
     "no-align-grad-reduce align-grad-reduce no-align-param-gather align-param-gather"),
    ("pipeline-schedule", "zb-h1 puts off every weight gradient, the head's too",
     "defer-embedding-wgrad-compute wgrad-deferral-limit"),
    ("", "a stage frees its output as soon as it is sent", "deallocate-pipeline-outputs "
     "no-deallocate-pipeline-outputs"),
    ("pipeline-model-parallel-size", "there is one pipeline, over NCCL on GPUs and gloo on CPUs",
     "pipeline-model-parallel-comm-backend"),
    ("cp-comm-type", "one engine attends over all ranks of context parallelism",
     "hierarchical-context-parallel-sizes"),
    ("context-parallel-size", "its zigzag order gives every rank as many pairs",
     "calculate-cp-balance context-parallel-load-balance"),
    ("context-parallel-size", "every sample is cut over as many ranks, whatever its documents",
     "hybrid-context-parallel dynamic-context-parallel max-seqlen-per-dp-cp-rank"),
    # Experts
    ("", "all experts of a rank are one grouped product, on a CPU too",
     "moe-grouped-gemm moe-use-legacy-grouped-gemm moe-mlp-glu-interleave-size"),
    ("", "tokens are put into the order of their experts by one kernel", "moe-permute-fusion"),
    ("", "a router computes in fp32, by one kernel of torch's for each operation",
     "moe-router-dtype moe-router-fusion moe-router-padding-for-quantization "
     "moe-router-padding-for-fp8"),
    ("", "an expert computes the tokens it has, none are padded",
     "moe-pad-expert-input-to-capacity"),
    ("moe-token-dispatcher-type", _DISPATCH,
     "moe-enable-deepep moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-num-sms"),
    ("expert-tensor-parallel-size", "it says over how many ranks each expert is cut",
     "moe-extended-tp"),
    ("moe-router-topk-scaling-factor", "weights are applied behind the experts",
     "moe-apply-probs-on-input"),
    ("moe-router-num-groups", "groups of experts limit where a token goes",
     "moe-router-topk-limited-devices"),
    ("moe-router-load-balancing-type", "the log has the load of every expert of every layer",
     "moe-per-layer-logging moe-router-force-load-balancing moe-router-force-biased"),
    ("moe-shared-expert-overlap", "it is what is computed while tokens are on their way",
     "overlap-moe-expert-parallel-comm delay-wgrad-compute-for-te-grouped-gemm "
     "ep-overlap-early-attn-memory-release"),
    ("", "python -m megatron.training.upcycle makes experts of a dense checkpoint",
     "moe-use-upcycling moe-upcycling-granularity"),
    ("recompute-granularity", "selective computes the features inside experts again",
     "moe-layer-recompute"),
    ("", "experts read the whole hidden state", "moe-latent-size"),
    ("", "a cache of latent attention keeps latents, and its way down is one product",
     "cache-mla-latents mla-down-proj-fusion"),
    ("overlap-param-gather", "its first gathers start at the end of the optimizer step",
     "overlap-param-gather-with-optimizer-step"),
    ("data-parallel-sharding-strategy", "one engine carries out every strategy",
     "use-megatron-fsdp use-custom-fsdp use-torch-fsdp2 init-model-with-meta-device"),
    ("param-gather-prefetch-bytes", "a budget of bytes decides what stays gathered, and how many "
     "buffers there are", "torch-fsdp2-no-reshard-after-forward fsdp-double-buffer "
     "suggested-communication-unit-size keep-fp8-transpose-cache"),
    ("exp-avg-dtype", "it stands alone, and masters and gradients are fp32",
     "use-precision-aware-optimizer main-params-dtype main-grads-dtype"),
    ("decoupled-lr", "--min-lr scales with it", "decoupled-min-lr"),
    ("weight-decay-group", "it goes by weight names", "no-weight-decay-cond-type"),
    ("ddp-bucket-size", "buckets are cut by this size alone",
     "ddp-num-buckets ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw"),
    ("", "gradients are summed in fp32 unless --grad-reduce-in-bf16 is given",
     "accumulate-allreduce-grads-in-fp32 grad-reduce-in-fp32 "
     "use-contiguous-buffers-in-local-ddp no-contiguous-buffers-in-local-ddp DDP-impl"),
    ("device", "nccl on a GPU, gloo on the CPU", "distributed-backend"),
    ("", "processes are counted and placed by torchrun",
     "world-size rank local-rank lazy-mpu-init standalone num-nodes "
     "use-tp-pp-dp-mapping enable-gloo-process-groups disable-gloo-process-groups "
     "use-ring-exchange-p2p use-sharp high-priority-stream-groups"),
    ("tensor-model-parallel-size", "there is one decoder and one layout",
     "encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size"),
    ("", "tensor parallel communication is not overlapped with products yet",
     "async-tensor-model-parallel-allreduce no-async-tensor-model-parallel-allreduce "
     "delay-wgrad-compute"),
    ("sequence-parallel", "it cuts what tensor parallelism leaves whole",
     "distribute-saved-activations scatter-gather-tensors-in-pipeline"),
    # Numbers
    ("recompute-granularity", "selective means norms and MLP activations",
     "recompute-activations recompute-modules checkpoint-activations"),
    ("cuda-graph-impl", _GRAPHS, "enable-cuda-graph external-cuda-graph cuda-graph-scope "
     "cuda-graph-modules cuda-graph-use-single-mempool cuda-graph-retain-backward-graph"),
    ("", _FP8, "transformer-engine-precision first-last-layers-bf16 num-layers-at-start-in-bf16 "
     "num-layers-at-end-in-bf16 keep-fp8-weight-transpose-cache"),
    ("bf16", "weights, activations and their kernels have one format",
     "params-dtype use-bf16 fp16-lm-cross-entropy disable-bf16-reduced-precision-matmul "
     "reuse-grad-buf-for-mxfp8-param-ag"),
    ("rerun-mode", "every step is looked at, on every rank: one with a NaN or Inf loss or gradient "
     "norm is computed once more, and changes no weight if it comes out so again",
     "no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-nan-in-grad"),
    ("loss-spike-factor", "a spike is a multiple of the median of the last losses",
     "check-for-spiky-loss"),
    ("clip-grad", "a large gradient is clipped, one that is not finite changes no weight",
     "check-for-large-grads"),
    ("", "faults are planted by tests, not by a run's options",
     "error-injection-rate error-injection-type"),
    ("muon-split-qkv", "it is a switch with a --no- form", "muon-no-split-qkv"),
    ("optimizer", "muon multiplies whole matrices, in bf16 on a GPU, by the published coefficients",
     "muon-tp-mode muon-fp32-matmul-prec muon-coefficient-type use-muon"),
    ("optimizer", "adam, sgd and muon are here, and adam is AdamW",
     "adam-decoupled "
     "override-opt-param-scheduler override-opt_param-scheduler use-checkpoint-opt-param-scheduler "
     "use-checkpoint-opt_param-scheduler override-lr-scheduler use-checkpoint-lr-scheduler"),
    ("lr-decay-iters", "the schedule's length is given by itself", "lr-decay-tokens"),
    ("global-batch-size", "the batch has one size for the whole run",
     "rampup-batch-size decrease-batch-size-if-needed step-batch-size-schedule batch-size"),
    # Data
    ("tokenizer-model", _TOKENIZER,
     "vocab-file merge-file tiktoken-pattern tiktoken-num-special-tokens "
     "tiktoken-special-tokens tokenizer-metadata special-tokens null-tokenizer-eod-id "
     "tokenizer-prompt-format vocab-extra-ids tokenizer-special-tokens"),
    ("tokenizer-hf-no-include-special-tokens", "special tokens are included without it",
     "tokenizer-hf-include-special-tokens"),
    ("", "token files are mapped, never copied to a folder of their own",
     "no-mmap-bin-files s3-cache-path object-storage-cache-path data-impl mmap-warmup "
     "dataset-impl num-dataset-builder-threads defer-npy-index-mmap mid-level-dataset-surplus"),
    ("reset-attention-mask", "masks are never stored: attention knows where documents end",
     "create-attention-mask-in-dataloader no-create-attention-mask-in-dataloader"),
    ("eval-iters", "validation takes the same samples every time",
     "full-validation multiple-validation-sets eval-micro-batch-size eval-global-batch-size "
     "skip-train test-mode"),
    ("dataloader-type", "it says in which order samples come", "data-sharding dataloader-save"),
    # Checkpoints
    ("", _FORMAT,
     "ckpt-format use-dist-ckpt dist-ckpt-format auto-detect-ckpt-format "
     "dist-ckpt-strictness dist-ckpt-optim-fully-reshardable "
     "ckpt-convert-update-legacy-dist-opt-format dist-ckpt-optim-memory-efficient "
     "load-main-params-from-ckpt strict-fsdp-dtensor-load dist-ckpt-save-pre-mcore-014 "
     "verify-integrity ckpt-assume-constant-structure"),
    ("async-save", _WRITER,
     "async-strategy use-persistent-ckpt-worker async-ckpt-use-cached-structure "
     "ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load "
     "ckpt-parallel-save ckpt-parallel-load ckpt-assume-constant-structure log-progress "
     "async-ckpt-use-cpu-shm ckpt-fully-parallel-load-exchange-algo async-ckpt-cpu-priority"),
    ("", _RNG, "no-load-rng no-save-rng"),
    ("", "python -m megatron.training.checkpoint convert reads torch_dist and DCP folders",
     "ckpt-convert-format ckpt-convert-save"),
    ("", "a checkpoint always holds optimizer state, so that a run can go on", "no-save-optim"),
    ("load", "name the iter_ folder itself to load one iteration",
     "ckpt-step exit-on-missing-checkpoint"),
    ("save", "it holds every checkpoint", "non-persistent-save-interval non-persistent-ckpt-type "
     "non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir "
     "non-persistent-local-ckpt-algo replication replication-factor replication-jump"),
    # Logs
    ("log-interval", "the log line has the time per iteration and no timers per stage",
     "timing-log-level timing-log-option log-timers-to-tensorboard barrier-with-L1-time "
     "no-barrier-with-level-1-timing"),
    ("tensorboard-dir", "everything in the log line goes there",
     "log-validation-ppl-to-tensorboard log-learning-rate-to-tensorboard log-energy "
     "log-loss-scale-to-tensorboard log-batch-size-to-tensorboard log-memory-to-tensorboard "
     "log-world-size-to-tensorboard tensorboard-log-interval tensorboard-queue-size "
     "log-max-attention-logit log-memory-interval log-device-memory-used logging-level "
     "one-logger-project one-logger-run-name enable-one-logger no-one-logger one-logger-async "
     "app-tag-run-name app-tag-run-version"),
    ("config", "options are YAML with the flags' own names", "yaml-cfg config-logger-dir"),
    # Other jobs
    ("log-straggler", "its report needs no server and no warm-up",
     "disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count"),
    ("use-pytorch-profiler", "a trace has shapes and operators as torch records them",
     "pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack "
     "pytorch-profiler-collect-chakra nvtx-ranges"),
    ("exit-signal-handler", "SIGTERM and Ctrl-C both end a run in order",
     "exit-signal-handler-for-dataloader"),
    ("sft", "templates are for preprocess_data --chat, which writes what it reads",
     "sft-tokenizer-prompt-format"),
    ("exit-signal-handler", "stopping in order, and saving, is built in",
     "adlr-autoresume adlr-autoresume-interval result-rejected-tracker-filename "
     "enable-ft-package calc-ft-timeouts run-workload-inspector-server inprocess-restart "
     "inprocess-max-iterations"),
    ("", _JOB, "iterations-to-skip train-sync-interval empty-unused-memory-level use-nccl-ub"),
    ("", _FAMILY,
     "mask-prob short-seq-prob mask-type mask-factor classes-fraction num-classes img-h img-w "
     "patch-dim iter-per-epoch dino-local-img-size ict-head-size titles-data-path "
     "biencoder-projection-dim decoder-seq-len fim-data fim-rate perform-rl-step"),
)  # fmt: skip

#: Families of flags, by how their names begin.
_PREFIXES: tuple[tuple[str, str], ...] = (
    ("fp8", _FP8),
    ("fp4", _FP8),
    ("tp-comm-", "tensor parallel communication is not overlapped with products yet"),
    (
        "experimental-attention-",
        "G in --hybrid-layer-pattern is a gated delta net, other attention is softmax",
    ),
    ("linear-attention-", "--hybrid-layer-pattern says where gated delta nets are"),
    ("dsa-", "attention is softmax, of heads or latents"),
    ("retro-", _FAMILY),
    ("bert-", _FAMILY),
    ("vision-", _FAMILY),
    ("swin-", _FAMILY),
    ("dino-", _FAMILY),
    ("retriever-", _FAMILY),
    ("rl-", _FAMILY),
    ("grpo-", _FAMILY),
    ("heterogeneous-layers-", "all layers are alike"),
    ("inference-", "sampling is python -m megatron.inference.generate"),
    ("cpu-offloading", "weights and activations stay on their device"),
    ("offload-", "weights and activations stay on their device"),
)

#: Megatron's names of values and ours, by option.
VALUE_NAMES: Mapping[str, Mapping[str, str]] = types.MappingProxyType(
    {
        "tokenizer-type": types.MappingProxyType(
            {
                "HuggingFaceTokenizer": "hf",
                "SentencePieceTokenizer": "sentencepiece",
                "GPTSentencePieceTokenizer": "sentencepiece",
                "Llama2Tokenizer": "sentencepiece",
                "ByteLevelTokenizer": "byte",
                "NullTokenizer": "null",
            }
        ),
        "optimizer": types.MappingProxyType({"dist_muon": "muon"}),
        "cp-comm-type": types.MappingProxyType({"allgather": "all_gather"}),
        "attention-backend": types.MappingProxyType({"local": "reference", "unfused": "reference"}),
    }
)

#: Why a value of Megatron is not here, by option and value.
_VALUE_REASONS: Mapping[tuple[str, str], str] = types.MappingProxyType(
    {
        ("transformer-impl", "transformer_engine"): "Transformer Engine is not used",
        ("exp-avg-dtype", "fp16"): "its range is too small for it",
        ("exp-avg-dtype", "fp8"): "its range is too small for it",
        ("exp-avg-sq-dtype", "fp16"): "its range is too small for it",
        ("exp-avg-sq-dtype", "fp8"): "its range is too small for it",
        ("cuda-graph-impl", "local"): _GRAPHS,
        ("cuda-graph-impl", "transformer_engine"): _GRAPHS,
        ("transformer-impl", "inference_optimized"): "the same layers train and sample",
        ("attention-backend", "flash"): "the fused kernel is triton's",
        ("attention-backend", "fused"): "the fused kernel is triton's",
        ("position-embedding-type", "learned_absolute"): "positions enter as rotations",
        ("position-embedding-type", "mrope"): "positions enter as rotations of one axis",
        ("position-embedding-type", "relative"): "positions enter as rotations",
        ("dataloader-type", "external"): "samples come from token files",
        ("cp-comm-type", "a2a+p2p"): "one engine attends over all ranks",
        ("softmax-type", "off-by-one"): "learnable starts there: its logits are 0 at first",
        ("moe-token-dispatcher-type", "flex"): _DISPATCH,
        ("moe-token-dispatcher-type", "alltoall_seq"): _DISPATCH,
        ("moe-router-load-balancing-type", "sinkhorn"): "a loss or a bias balances the load",
        ("moe-router-load-balancing-type", "global_aux_loss"): _SETS,
        ("moe-router-score-function", "sqrtsoftplus"): "scores are softmax or sigmoid",
        ("tokenizer-type", "GPT2BPETokenizer"): "save it as a tokenizer.json and take hf",
        ("tokenizer-type", "TikTokenizer"): "save it as a tokenizer.json and take hf",
        ("tokenizer-type", "BertWordPieceLowerCase"): "save it as a tokenizer.json and take hf",
        ("tokenizer-type", "MultimodalTokenizer"): "there is text alone",
    }
)


def answer(flag: str) -> Answer | None:
    """Return what to tell about a flag of Megatron that is not here; None if it is unknown.

    Args:
        flag: without dashes in front, words joined by `-`.
    """
    for nearest, reason, names in _ROWS:
        if flag in names.split():
            return Answer(nearest=nearest or None, reason=reason)
    for prefix, reason in _PREFIXES:
        if flag.startswith(prefix):
            return Answer(nearest=None, reason=reason)
    return None


def answered() -> dict[str, Answer]:
    """Return every flag that has an answer of its own, in the order of the tables."""
    names = [name for _, _, row in _ROWS for name in row.split()]
    found = {name: answer(name) for name in names}
    return {name: known for name, known in found.items() if known is not None}


def answered_prefixes() -> dict[str, str]:
    """Return the reason for each family of flags, by how their names begin."""
    return dict(_PREFIXES)


def our_value(flag: str, text: str) -> str:
    """Return our name of a value, which may be given by Megatron's."""
    return VALUE_NAMES.get(flag, {}).get(text, text)


def value_reason(flag: str, text: str) -> str:
    """Return `: REASON` for a value of Megatron that is not here, or nothing."""
    reason = _VALUE_REASONS.get((flag, text))
    return f": {reason}" if reason else ""
