# SPDX-License-Identifier: Apache-2.0
"""Megatron's flags and values that this program does not have: for each the nearest way, and why.

A script written for Megatron names many flags. One that exists here has the same name and is an
option of the schema. Any other is in the tables below, so that it is answered by a line with the
reason: the option that does the same, the advice to leave it out where results do not depend on it,
or that it changes results in a way that is not supported. What has no effect in training, and is
accepted there, is in the table of `megatron.training.config.megatron_flags`, and what stands for
several options in `translated_flags`. Other names of our options are aliases.

Forks and old versions have flags of their own: they are in the same tables. Advice never names an
option that changes the model, unless it is the same thing.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What to tell somebody who gives a flag of Megatron.

    Args:
        nearest: flag that does the same or, of an unsupported one, comes nearest, without dashes;
            None = there is none.
        reason: why the flag is not here; of an unsupported one what it does.
        unsupported: whether results depend on the flag, and nothing here does the same.
    """

    nearest: str | None
    reason: str
    unsupported: bool = False

    @property
    def advice(self) -> str:
        """What to do about the flag."""
        if self.unsupported:
            return "not supported"
        return f"use --{self.nearest}" if self.nearest else "leave it out"

    def text(self, spelling: str) -> str:
        """Return the line for a flag as it was given, `--ckpt-format` or a key with its place."""
        near = f" (nearest: --{self.nearest})" if self.unsupported and self.nearest else ""
        return f"{spelling}: {self.advice}: {self.reason}{near}"


_DISPATCH = "tokens of experts travel by all-gather or all-to-all of torch, over one group"
_SETS = "the load is balanced over a microbatch or a sequence"
_FORMAT = "checkpoints have one format, safetensors with a manifest, that loads on any layout"
_WRITER = "every rank writes its part once, in the background by a process of its own"
_FUSION = "each kernel has one implementation per device, chosen by --attention-backend and torch"
_GRAPHS = "one CUDA graph holds forward and backward of a whole step"
_LAYER_GRAPHS = f"it only makes a step faster, and graphs of layers are not here: {_GRAPHS}"
_FP8 = (
    "weights are fp32, bf16 or fp16, and linear layers multiply in FP8 or FP4 by --fp8-format and "
    "--fp8-recipe, or --fp4-format"
)
_FAMILY = "only GPT is trained here"
_TOKENIZER = "a tokenizer is one file: of Hugging Face, SentencePiece or tiktoken"
_TP_OVERLAP = "tensor parallel communication is not overlapped with products yet"
_JOB = "the loop has no such mode"

#: (nearest flag or "", reason, flags).
_ROWS: tuple[tuple[str, str, str], ...] = (
    # Words of other programs
    ("lr", "it is the highest learning rate", "learning-rate max-lr"),
    ("lr-decay-style", "it names how the learning rate falls", "lr-scheduler-type lr-scheduler"),
    ("lr-warmup-iters", "warm-up in optimizer steps", "warmup-steps warmup-iters num-warmup-steps"),
    ("lr-warmup-fraction", "warm-up as a share of the decay length", "warmup warmup-ratio"),
    ("train-iters", "a run is as long as its optimizer steps or its --train-samples",
     "epochs num-epochs num-train-epochs max-steps steps num-steps train-steps max-iters"),
    ("tensor-model-parallel-size", "it is the degree of tensor parallelism",
     "tp tp-size tensor-parallel tensor-parallel-size tensor-parallelism model-parallel-size"),
    ("pipeline-model-parallel-size", "it is the degree of pipeline parallelism",
     "pp pp-size pipeline-parallel-size"),
    ("context-parallel-size", "it is the degree of context parallelism", "cp cp-size"),
    ("expert-model-parallel-size", "it is the degree of expert parallelism",
     "ep ep-size expert-parallel-size"),
    ("num-layers-per-virtual-pipeline-stage", "a stage has several chunks of so many layers",
     "vpp vp-size virtual-pipeline-model-parallel-size"),
    ("data-parallel-sharding-strategy", "optim is ZeRO-1, optim_grads ZeRO-2 and "
     "optim_grads_params ZeRO-3 or FSDP", "zero-stage zero fsdp sharding-strategy deepspeed "
     "deepspeed-config"),
    ("micro-batch-size", "it counts the samples of a rank in one forward pass",
     "batch-size mbs per-device-train-batch-size train-micro-batch-size-per-gpu"),
    ("global-batch-size", "microbatches follow from it, the micro-batch size and the ranks",
     "gbs train-batch-size gradient-accumulation-steps grad-accum"),
    ("seq-length", "it is the number of tokens in a sample",
     "seq-len sequence-length max-seq-length max-seq-len context-length block-size"),
    ("hidden-size", "it is the number of features between layers",
     "d-model dim hidden-dim n-embd embed-dim"),
    ("num-layers", "it is the number of layers", "n-layers n-layer num-hidden-layers layers"),
    ("num-attention-heads", "it is the number of query heads", "n-heads n-head num-heads heads"),
    ("num-query-groups", "it is the number of key and value heads, with --group-query-attention",
     "num-key-value-heads num-kv-heads n-kv-heads"),
    ("ffn-hidden-size", "it is the width inside an MLP", "intermediate-size d-ff ffn-dim"),
    ("clip-grad", "it is the highest norm of the gradient",
     "max-grad-norm gradient-clipping grad-clip clip-grad-norm"),
    ("recompute-granularity", "activations are recomputed in the backward pass",
     "gradient-checkpointing activation-checkpointing deepspeed-activation-checkpointing"),
    ("bf16", "bf16 or fp16 is a switch of its own", "precision dtype torch-dtype mixed-precision"),
    ("save", "it is the folder of a run's checkpoints", "output-dir save-dir checkpoint-dir"),
    ("load", "a run goes on from the newest checkpoint of that folder",
     "resume resume-from resume-from-checkpoint load-dir"),
    ("load-hf", "it takes model, weights and tokenizer from a Hugging Face folder",
     "model-name-or-path pretrained-model-name-or-path model-path"),
    ("data-path", "it names token files, which preprocess_data writes",
     "dataset-name train-data train-file data-dir"),
    ("log-interval", "it counts the iterations between log lines", "logging-steps log-every"),
    ("save-interval", "it counts the iterations between saves", "save-steps save-every"),
    ("eval-interval", "it counts the iterations between validations", "eval-steps eval-every"),
    # Model
    ("", _FUSION,
     "bias-swiglu-fusion masked-softmax-fusion apply-rope-fusion fused-residual-rmsnorm"),
    ("attention-backend", "it chooses the attention kernel",
     "use-flash-attention flash-decode attention-impl"),
    ("hybrid-layer-pattern", "behind each / in it stand the blocks of one depth",
     "mtp-hybrid-override-pattern"),
    ("hybrid-layer-pattern", "it says which blocks a hybrid has, for pretrain_hybrid",
     "hybrid-attention-ratio hybrid-mlp-ratio is-hybrid-model model-name"),
    ("", "there is one model class, of the same architecture", "use-legacy-models"),
    ("moe-shared-expert-intermediate-size", "it is the width of all shared experts together: their "
     "number times --moe-ffn-hidden-size", "num-shared-experts n-shared-experts"),
    ("moe-aux-loss-coeff", "it is the coefficient of the loss that balances the load of experts",
     "moe-loss-weight moe-loss-coeff"),
    ("", "weights are drawn from --seed alike on every layout and device",
     "no-initialization data-parallel-random-init"),
    ("transformer-impl", "it names the layers",
     "export-te-mcore-model export-force-local-attention "
     "transformer-pipeline-model-parallel-size inference-rng-tracker"),
    # Layout
    ("pipeline-model-parallel-layout", "there is one decoder, and it says where it is cut",
     "pipeline-model-parallel-split-rank"),
    ("pipeline-model-parallel-layout", "a stage of E alone has the embedding and no layer",
     "standalone-embedding-stage"),
    ("pipeline-model-parallel-size", "there is one pipeline, over NCCL on GPUs and gloo on CPUs",
     "pipeline-model-parallel-comm-backend"),
    ("cp-comm-type", "one engine attends over all ranks of context parallelism",
     "hierarchical-context-parallel-sizes"),
    ("context-parallel-size", "its zigzag order gives every rank as many pairs",
     "calculate-cp-balance context-parallel-load-balance"),
    ("context-parallel-size", "every sample is cut over as many ranks, whatever its documents",
     "hybrid-context-parallel dynamic-context-parallel max-seqlen-per-dp-cp-rank"),
    # Experts
    ("", "rows of gate and up are two matrices of their own", "moe-mlp-glu-interleave-size"),
    ("", "a router computes in fp32, by one kernel of torch's for each operation",
     "moe-router-padding-for-quantization moe-router-padding-for-fp8"),
    ("", "an expert computes the tokens it has, none are padded",
     "moe-pad-expert-input-to-capacity"),
    ("moe-token-dispatcher-type", _DISPATCH,
     "moe-enable-deepep moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-num-sms"),
    ("expert-tensor-parallel-size", "it says over how many ranks each expert is cut",
     "moe-extended-tp"),
    ("moe-router-num-groups", "groups of experts limit where a token goes",
     "moe-router-topk-limited-devices"),
    ("moe-shared-expert-overlap", "it is what is computed while tokens are on their way",
     "delay-wgrad-compute-for-te-grouped-gemm ep-overlap-early-attn-memory-release"),
    ("", "python -m megatron.training.upcycle makes experts of a dense checkpoint",
     "moe-use-upcycling moe-upcycling-granularity"),
    ("", "a cache of latent attention keeps latents, and its way down is one product",
     "cache-mla-latents mla-down-proj-fusion"),
    ("data-parallel-sharding-strategy", "one engine carries out every strategy",
     "use-custom-fsdp use-torch-fsdp2 init-model-with-meta-device"),
    ("param-gather-prefetch-bytes", "a budget of bytes decides what stays gathered, and how many "
     "buffers there are", "torch-fsdp2-no-reshard-after-forward fsdp-double-buffer "
     "suggested-communication-unit-size keep-fp8-transpose-cache"),
    ("reduce-scatter-with-fp32-accumulation", "it holds for every reduce-scatter of gradients, "
     "those over gtp too", "gtp-remat-reduce-scatter-with-fp32-accumulation"),
    ("weight-decay-group", "it goes by weight names, norms included",
     "no-weight-decay-cond-type apply-wd-to-qk-layernorm"),
    ("ddp-bucket-size", "buckets are cut by this size alone",
     "ddp-average-in-collective"),
    ("", "gradients are summed in fp32 unless --grad-reduce-in-bf16 is given",
     "grad-reduce-in-fp32"),
    ("", "processes are counted and placed by torchrun",
     "world-size rank local-rank lazy-mpu-init standalone num-nodes enable-gloo-process-groups "
     "use-ring-exchange-p2p use-sharp"),
    ("tensor-model-parallel-size", "there is one decoder and one layout",
     "encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size"),
    ("sequence-parallel", "it cuts what tensor parallelism leaves whole",
     "distribute-saved-activations distribute-checkpointed-activations "
     "scatter-gather-tensors-in-pipeline"),
    ("print-config", "it resolves the options of a world without starting it, given WORLD_SIZE and "
     "RANK as torchrun sets them", "fake-process-group"),
    # Numbers
    ("recompute-granularity", "selective means norms and MLP activations",
     "recompute-modules"),
    ("cuda-graph-impl", _GRAPHS, "enable-cuda-graph external-cuda-graph cuda-graph-scope "
     "cuda-graph-modules cuda-graph-use-single-mempool cuda-graph-retain-backward-graph"),
    ("", _FP8,
     "transformer-engine-precision keep-fp8-weight-transpose-cache fp8 fp4 fp8-e4m3 fp8-hybrid "
     "fp8-wgrad no-fp8-wgrad fp8-interval fp8-param fp4-param fp8-quantizer-factory "
     "fp4-quantizer-factory fp4-recipe fp8-dot-product-attention fp8-multi-head-attention"),
    ("bf16", "weights, activations and their kernels have one format",
     "params-dtype use-bf16 fp16-lm-cross-entropy disable-bf16-reduced-precision-matmul"),
    ("weight-gather-format", "weights are stored in bf16 (--bf16), and those over gtp may be "
     "gathered in FP8, MXFP8 or NVFP4, in buffers of their own",
     "fp8-param-gather fp4-param-gather reuse-grad-buf-for-mxfp8-param-ag"),
    ("rerun-mode", "every step is looked at, on every rank: one with a NaN or Inf loss or gradient "
     "norm is computed once more, and changes no weight if it comes out so again",
     "check-for-nan-in-grad"),
    ("loss-spike-factor", "a spike is a multiple of the median of the last losses",
     "check-for-spiky-loss"),
    ("clip-grad", "a large gradient is clipped, one that is not finite changes no weight",
     "check-for-large-grads"),
    ("", "faults are planted by tests, not by a run's options",
     "error-injection-rate error-injection-type"),
    ("optimizer", "muon multiplies whole matrices, in bf16 on a GPU, by the published coefficients",
     "muon-fp32-matmul-prec muon-coefficient-type use-muon"),
    ("optimizer", "adam, sgd and muon are here, and adam is AdamW",
     "adam-decoupled"),
    ("use-checkpoint-opt-param-scheduler", "without it the schedule is as given",
     "override-lr-scheduler use-checkpoint-lr-scheduler"),
    ("lr-decay-iters", "the schedule's length is given by itself", "lr-decay-tokens"),
    ("allow-uneven-batch", "a batch that does not divide keeps its samples",
     "decrease-batch-size-if-needed"),
    # Data
    ("tokenizer-model", "the tokenizers of Pai-Megatron-Patch are Hugging Face's: name the folder, "
     "with --tokenizer-type HuggingFaceTokenizer", "patch-tokenizer-type"),
    ("vocab-size", "it counts the tokens of the tokenizer and those added to them",
     "extra-vocab-size"),
    ("tokenizer-model", _TOKENIZER,
     "tokenizer-metadata special-tokens null-tokenizer-eod-id "
     "tokenizer-prompt-format vocab-extra-ids tokenizer-special-tokens"),
    ("tokenizer-hf-no-include-special-tokens", "special tokens are included without it",
     "tokenizer-hf-include-special-tokens"),
    ("", "token files are mapped, never copied to a folder of their own",
     "s3-cache-path object-storage-cache-path data-impl mmap-warmup dataset-impl "
     "defer-npy-index-mmap mid-level-dataset-surplus"),
    ("reset-attention-mask", "masks are never stored: attention knows where documents end",
     "create-attention-mask-in-dataloader"),
    ("eval-iters", "validation takes the same samples every time",
     "full-validation multiple-validation-sets skip-train test-mode"),
    ("dataloader-type", "it says in which order samples come", "data-sharding dataloader-save"),
    # Checkpoints
    ("", _FORMAT,
     "use-dist-ckpt dist-ckpt-format ckpt-convert-update-legacy-dist-opt-format "
     "dist-ckpt-optim-memory-efficient load-main-params-from-ckpt strict-fsdp-dtensor-load "
     "dist-ckpt-save-pre-mcore-014"),
    ("async-save", _WRITER,
     "ckpt-parallel-save ckpt-parallel-load ckpt-fully-parallel-load-exchange-algo "
     "async-ckpt-cpu-priority"),
    ("", "python -m megatron.training.checkpoint convert reads torch_dist and DCP folders",
     "ckpt-convert-format ckpt-convert-save"),
    ("load", "name the iter_ folder itself to load one iteration",
     "ckpt-step exit-on-missing-checkpoint"),
    ("save", "it holds every checkpoint", "non-persistent-save-interval non-persistent-ckpt-type "
     "non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir "
     "non-persistent-local-ckpt-algo replication replication-factor replication-jump"),
    # Logs
    ("tensorboard-dir", "everything in the log line goes there",
     "log-max-attention-logit log-device-memory-used"),
    ("config", "options are YAML with the flags' own names", "yaml-cfg config-logger-dir"),
    # Other jobs
    ("log-straggler", "its report needs no server and no warm-up",
     "disable-straggler-on-startup"),
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
    ("", _JOB, "train-sync-interval"),
)  # fmt: skip

#: Results depend on these, and nothing here does the same: (nearest flag or "", what they do,
#: flags).
_UNSUPPORTED: tuple[tuple[str, str, str], ...] = (
    ("swiglu", "it chooses another activation of MLPs than GELU, silu with a gate (--swiglu) and "
     "the square of relu (--squared-relu)",
     "openai-gelu onnx-safe quick-geglu geglu reglu liglu glu-activation glu-linear-offset "
     "activation-func activation-func-clamp-value"),
    ("load-hf", "it stands for several properties of gpt-oss, which its Hugging Face folder says",
     "enable-gpt-oss"),
    ("hybrid-layer-pattern", "it names code that builds the layers: G is a gated delta net, * "
     "attention, E experts, so that Qwen3-Next is GEGEGE*E repeated, for pretrain_hybrid", "spec"),
    ("", "it changes where or in which precision residuals are added",
     "apply-residual-connection-post-layernorm fp32-residual-connection"),
    ("", "it normalises embeddings, as BLOOM does", "embed-layernorm embedding-layernorm"),
    ("window-size", "it gives some layers no window: all layers have one", "window-attn-skip-freq"),
    ("init-method-std", "it draws weights from another distribution than that normal one",
     "init-method-xavier-uniform embedding-init-method-std"),
    ("", "it draws output projections with --init-method-std: here that is divided by the root of "
     "the number of blocks, as in Megatron-LM", "no-scaled-init"),
    ("num-layers", "it is of an encoder beside a decoder, and there is one decoder",
     "encoder-num-layers decoder-num-layers"),
    ("seq-length", "it is of an encoder beside a decoder, and there is one decoder",
     "encoder-seq-length decoder-seq-length"),
    ("mtp-num-layers", "it uses one layer for all depths: each has its own here",
     "mtp-use-repeated-layer"),
    ("", "it weighs what experts read instead of their outputs", "moe-apply-probs-on-input"),
    ("", "it routes tokens by random or biased logits, to measure speed with an even load",
     "moe-router-force-load-balancing moe-router-force-biased"),
    ("", "its experts read a projection of the hidden state: they read the whole here",
     "moe-latent-size"),
    ("", "it leaves batches out of training", "iterations-to-skip"),
    ("", _FAMILY,
     "mask-prob short-seq-prob mask-type mask-factor classes-fraction num-classes img-h img-w "
     "patch-dim iter-per-epoch dino-local-img-size ict-head-size titles-data-path "
     "biencoder-projection-dim decoder-seq-len fim-data fim-rate perform-rl-step"),
)  # fmt: skip

#: Families of flags, by how their names begin: (beginning, whether results depend on them, reason).
_PREFIXES: tuple[tuple[str, bool, str], ...] = (
    ("tp-comm-overlap-", False, _TP_OVERLAP),
    ("tp-comm-bootstrap-", False, _TP_OVERLAP),
    (
        "experimental-attention-",
        True,
        "G in --hybrid-layer-pattern is a gated delta net, other attention is softmax",
    ),
    ("linear-attention-", True, "--hybrid-layer-pattern says where gated delta nets are"),
    ("dsa-", True, "attention is softmax, of heads or latents"),
    ("retro-", True, _FAMILY),
    ("bert-", True, _FAMILY),
    ("vision-", True, _FAMILY),
    ("swin-", True, _FAMILY),
    ("dino-", True, _FAMILY),
    ("retriever-", True, _FAMILY),
    ("rl-", True, _FAMILY),
    ("grpo-", True, _FAMILY),
    ("heterogeneous-layers-", True, "all layers are alike"),
    ("inference-", False, "sampling is python -m megatron.inference.generate"),
    ("cpu-offloading", False, "weights and activations stay on their device"),
    ("offload-", False, "weights and activations stay on their device"),
    ("deepspeed-", False, "ZeRO is --data-parallel-sharding-strategy, and torchrun starts a run"),
)

#: Other names of our options: the option, and the value that the name stands for if it is a switch.
ALIASES: Mapping[str, tuple[str, str]] = types.MappingProxyType(
    {
        "do-layernorm-bias-weight-decay": ("weight-decay-group", "*=1"),
        "hybrid-override-pattern": ("hybrid-layer-pattern", ""),
        "muon-no-split-qkv": ("muon-split-qkv", "false"),
        "qk-nope-head-dim": ("qk-head-dim", ""),
        "qk-rope-head-dim": ("qk-pos-emb-head-dim", ""),
        "recompute-activations": ("recompute-granularity", "selective"),
        "use-gated-attention": ("attention-output-gate", "true"),
        "use-rotary-position-embeddings": ("position-embedding-type", "rope"),
        "vocab-file": ("tokenizer-model", ""),
        "wandb-name": ("wandb-exp-name", ""),
    }
)

#: Megatron's names of values and ours, by option.
VALUE_NAMES: Mapping[str, Mapping[str, str]] = types.MappingProxyType(
    {
        "tokenizer-type": types.MappingProxyType(
            {
                "HuggingFaceTokenizer": "hf",
                "GPT2BPETokenizer": "hf",
                "SentencePieceTokenizer": "sentencepiece",
                "GPTSentencePieceTokenizer": "sentencepiece",
                "Llama2Tokenizer": "sentencepiece",
                "TikTokenizer": "tiktoken",
                "ByteLevelTokenizer": "byte",
                "NullTokenizer": "null",
            }
        ),
        "optimizer": types.MappingProxyType({"dist_muon": "muon"}),
        "cp-comm-type": types.MappingProxyType({"allgather": "all_gather"}),
        "linear-cp-mode": types.MappingProxyType({"chunkwise": "segments"}),
        "attention-backend": types.MappingProxyType(
            {"local": "reference", "unfused": "reference", "flash": "auto", "fused": "auto"}
        ),
    }
)

#: Why a value of Megatron is not here, by option and value.
_VALUE_REASONS: Mapping[tuple[str, str], str] = types.MappingProxyType(
    {
        (
            "main-grads-dtype",
            "bf16",
        ): "--grad-reduce-in-bf16 keeps and reduces gradients in bf16, which changes rounding",
        (
            "train-mode",
            "finetune",
        ): "--sft is fine-tuning, on what preprocess_data --chat writes",
        (
            "distributed-backend",
            "gloo",
        ): "it is for CPUs, where it is taken without being asked for",
        ("dist-ckpt-strictness", "ignore_all"): "loading is strict",
        ("moe-router-dtype", "fp64"): "routers compute in fp32",
        ("exp-avg-dtype", "fp16"): "its range is too small for it",
        ("exp-avg-dtype", "fp8"): "its range is too small for it",
        ("exp-avg-sq-dtype", "fp16"): "its range is too small for it",
        ("exp-avg-sq-dtype", "fp8"): "its range is too small for it",
        ("cuda-graph-impl", "local"): _LAYER_GRAPHS,
        ("cuda-graph-impl", "transformer_engine"): _LAYER_GRAPHS,
        ("transformer-impl", "inference_optimized"): "it is for megatron.inference",
        ("position-embedding-type", "mrope"): "positions enter as rotations of one axis",
        ("position-embedding-type", "relative"): "positions are absolute or rotations",
        (
            "muon-tp-mode",
            "distributed",
        ): "one rank multiplies each matrix whole, to the same result",
        (
            "muon-tp-mode",
            "blockwise",
        ): "matrices are updated whole, not each tensor parallel rank's block by itself",
        ("dataloader-type", "external"): "samples come from token files",
        ("cp-comm-type", "a2a+p2p"): "one engine attends over all ranks",
        ("softmax-type", "off-by-one"): "learnable starts there: its logits are 0 at first",
        ("moe-token-dispatcher-type", "flex"): _DISPATCH,
        ("moe-token-dispatcher-type", "alltoall_seq"): _DISPATCH,
        ("moe-router-load-balancing-type", "sinkhorn"): "a loss or a bias balances the load",
        ("moe-router-load-balancing-type", "global_aux_loss"): _SETS,
        ("moe-router-score-function", "sqrtsoftplus"): "scores are softmax or sigmoid",
        ("tokenizer-type", "BertWordPieceLowerCase"): "save it as a tokenizer.json and take hf",
        ("tokenizer-type", "BertWordPieceCase"): "save it as a tokenizer.json and take hf",
        ("tokenizer-type", "MultimodalTokenizer"): "there is text alone",
    }
)


def answer(flag: str) -> Answer | None:
    """Return what to tell about a flag of Megatron that is not here; None if it is unknown.

    Args:
        flag: without dashes in front, words joined by `-`.
    """
    for unsupported, rows in ((False, _ROWS), (True, _UNSUPPORTED)):
        for nearest, reason, names in rows:
            if flag in names.split():
                return Answer(nearest=nearest or None, reason=reason, unsupported=unsupported)
    for prefix, unsupported, reason in _PREFIXES:
        if flag.startswith(prefix):
            return Answer(nearest=None, reason=reason, unsupported=unsupported)
    return None


def answered() -> dict[str, Answer]:
    """Return every flag that has an answer of its own, in the order of the tables."""
    names = [name for _, _, row in (*_ROWS, *_UNSUPPORTED) for name in row.split()]
    answers = {name: answer(name) for name in names}
    return {name: flag_answer for name, flag_answer in answers.items() if flag_answer is not None}


def answered_prefixes() -> dict[str, Answer]:
    """Return the answer for each family of flags, by how their names begin."""
    return {
        prefix: Answer(nearest=None, reason=reason, unsupported=unsupported)
        for prefix, unsupported, reason in _PREFIXES
    }


def our_value(flag: str, text: str) -> str:
    """Return our name of a value, which may be given by Megatron's.

    Megatron's window of 127,0 is the 127 tokens before a token and none after it; ours counts the
    token too.
    """
    if flag == "window-size" and (window := re.fullmatch(r"\(?(\d+), ?0\)?", text)):
        return str(int(window[1]) + 1)
    return VALUE_NAMES.get(flag, {}).get(text, text)


def value_reason(flag: str, text: str) -> str:
    """Return `: REASON` for a value of Megatron that is not here, or nothing."""
    reason = _VALUE_REASONS.get((flag, text))
    return f": {reason}" if reason else ""
