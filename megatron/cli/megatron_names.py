# SPDX-License-Identifier: Apache-2.0
"""Megatron flags and values that this program does not have: for each the nearest option, and why.

A script written for Megatron uses many flags. A flag that exists here has the same name and is an
option of the schema. Any other flag is in the tables below, so that the error states the reason and
the option that does the same, or the advice to drop the flag if results do not depend on it, or
that it changes results in a way that is not supported. `megatron.training.config.megatron_flags`
has the flags that training accepts without effect or translates to several options. Alternative
names of options are aliases.

The tables include flags of forks and old versions. Advice never names an option that changes the
model, unless it is equivalent.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a Megatron flag.

    Args:
        nearest: the equivalent option, or the nearest one of an unsupported flag, without leading
            dashes; None if there is none.
        reason: why the flag does not exist here; for an unsupported flag, its effect.
        unsupported: whether results depend on the flag, and no option is equivalent.
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
        """Return the error line for a flag as written, `--ckpt-format` or a YAML key with its
        location."""
        near = f" (nearest: --{self.nearest})" if self.unsupported and self.nearest else ""
        return f"{spelling}: {self.advice}: {self.reason}{near}"


_DISPATCH = "tokens are dispatched by torch's all-gather or all-to-all, over one group"
_SETS = "the load is balanced over a microbatch or a sequence"
_FORMAT = "checkpoints have one format, safetensors with a manifest, that loads on any layout"
_WRITER = "every rank writes its shard once, in the background by a separate process"
_FUSION = "each kernel has one implementation per device, chosen by --attention-backend and torch"
_GRAPHS = "one CUDA graph captures forward and backward of a whole step"
_LAYER_GRAPHS = f"it only affects speed, and graphs of layers are not supported: {_GRAPHS}"
_FP8 = (
    "weights are fp32, bf16 or fp16, and linear layers compute in FP8 or FP4 by --fp8-format and "
    "--fp8-recipe, or --fp4-format"
)
_FAMILY = "only GPT is trained here"
_TOKENIZER = "a tokenizer is one file: of Hugging Face, SentencePiece or tiktoken"
_TP_OVERLAP = "tensor parallel communication is not overlapped with computation yet"
_JOB = "the loop has no such mode"

#: (nearest flag or "", reason, flags).
_ROWS: tuple[tuple[str, str, str], ...] = (
    # Names from other programs
    ("lr", "it is the maximum learning rate", "learning-rate max-lr"),
    ("lr-decay-style", "it selects the learning rate decay", "lr-scheduler-type lr-scheduler"),
    ("lr-warmup-iters", "warm-up in optimizer steps", "warmup-steps warmup-iters num-warmup-steps"),
    ("lr-warmup-fraction", "warm-up as a fraction of the decay length", "warmup warmup-ratio"),
    ("train-iters", "the length of a run is --train-iters steps or --train-samples samples",
     "epochs num-epochs num-train-epochs max-steps steps num-steps train-steps max-iters"),
    ("tensor-model-parallel-size", "it is the degree of tensor parallelism",
     "tp tp-size tensor-parallel tensor-parallel-size tensor-parallelism model-parallel-size"),
    ("pipeline-model-parallel-size", "it is the degree of pipeline parallelism",
     "pp pp-size pipeline-parallel-size"),
    ("context-parallel-size", "it is the degree of context parallelism", "cp cp-size"),
    ("expert-model-parallel-size", "it is the degree of expert parallelism",
     "ep ep-size expert-parallel-size"),
    ("num-layers-per-virtual-pipeline-stage", "a stage has several model chunks of this size",
     "vpp vp-size virtual-pipeline-model-parallel-size"),
    ("data-parallel-sharding-strategy", "optim is ZeRO-1, optim_grads ZeRO-2 and "
     "optim_grads_params ZeRO-3 or FSDP", "zero-stage zero fsdp sharding-strategy deepspeed "
     "deepspeed-config"),
    ("micro-batch-size", "it is the number of samples of a rank in one forward pass",
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
    ("ffn-hidden-size", "it is the intermediate size of an MLP", "intermediate-size d-ff ffn-dim"),
    ("clip-grad", "it is the maximum norm of the gradient",
     "max-grad-norm gradient-clipping grad-clip clip-grad-norm"),
    ("recompute-granularity", "activations are recomputed in the backward pass",
     "gradient-checkpointing activation-checkpointing deepspeed-activation-checkpointing"),
    ("bf16", "bf16 and fp16 are separate switches", "precision dtype torch-dtype mixed-precision"),
    ("save", "it is the folder of a run's checkpoints", "output-dir save-dir checkpoint-dir"),
    ("load", "a run resumes from the newest checkpoint of that folder",
     "resume resume-from resume-from-checkpoint load-dir"),
    ("load-hf", "it loads model, weights and tokenizer from a Hugging Face folder",
     "model-name-or-path pretrained-model-name-or-path model-path"),
    ("data-path", "it names token files, which preprocess_data writes",
     "dataset-name train-data train-file data-dir"),
    ("log-interval", "it is the number of iterations between log lines", "logging-steps log-every"),
    ("save-interval", "it is the number of iterations between saves", "save-steps save-every"),
    ("eval-interval", "it is the number of iterations between validations",
     "eval-steps eval-every"),
    # Model
    ("", _FUSION,
     "bias-swiglu-fusion masked-softmax-fusion apply-rope-fusion fused-residual-rmsnorm"),
    ("attention-backend", "it chooses the attention kernel",
     "use-flash-attention flash-decode attention-impl"),
    ("hybrid-layer-pattern", "each / in it starts the blocks of one depth",
     "mtp-hybrid-override-pattern"),
    ("hybrid-layer-pattern", "it defines the blocks of a hybrid, for pretrain_hybrid",
     "hybrid-attention-ratio hybrid-mlp-ratio is-hybrid-model model-name"),
    ("", "there is one model class, of the same architecture", "use-legacy-models"),
    ("moe-shared-expert-intermediate-size", "it is the intermediate size of all shared experts "
     "together: their number times --moe-ffn-hidden-size", "num-shared-experts n-shared-experts"),
    ("moe-aux-loss-coeff", "it is the coefficient of the load-balancing loss",
     "moe-loss-weight moe-loss-coeff"),
    ("", "initial weights depend on --seed alone, on every layout and device",
     "no-initialization data-parallel-random-init"),
    ("transformer-impl", "it selects the implementation of layers",
     "export-te-mcore-model export-force-local-attention "
     "transformer-pipeline-model-parallel-size inference-rng-tracker"),
    # Layout
    ("pipeline-model-parallel-layout", "there is one decoder, divided into stages by the layout",
     "pipeline-model-parallel-split-rank"),
    ("pipeline-model-parallel-layout", "a stage with E alone has the embedding and no layer",
     "standalone-embedding-stage"),
    ("pipeline-model-parallel-size", "there is one pipeline, over NCCL on GPUs and gloo on CPUs",
     "pipeline-model-parallel-comm-backend"),
    ("cp-comm-type", "one method exchanges data over all context-parallel ranks",
     "hierarchical-context-parallel-sizes"),
    ("context-parallel-size", "its zigzag order gives every rank equally many token pairs",
     "calculate-cp-balance context-parallel-load-balance"),
    ("context-parallel-size", "every sample is split over the same number of ranks",
     "hybrid-context-parallel dynamic-context-parallel max-seqlen-per-dp-cp-rank"),
    # Experts
    ("", "rows of gate and up are two separate matrices", "moe-mlp-glu-interleave-size"),
    ("", "routers compute in fp32, with one torch kernel per operation",
     "moe-router-padding-for-quantization moe-router-padding-for-fp8"),
    ("", "experts compute without padding tokens",
     "moe-pad-expert-input-to-capacity"),
    ("moe-token-dispatcher-type", _DISPATCH,
     "moe-enable-deepep moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-num-sms"),
    ("expert-tensor-parallel-size", "it is the number of ranks that shard each expert",
     "moe-extended-tp"),
    ("moe-router-num-groups", "expert groups limit the ranks of a token",
     "moe-router-topk-limited-devices"),
    ("moe-shared-expert-overlap", "it overlaps the shared expert with the token dispatch",
     "delay-wgrad-compute-for-te-grouped-gemm ep-overlap-early-attn-memory-release"),
    ("", "python -m megatron.training.upcycle converts a dense checkpoint to experts",
     "moe-use-upcycling moe-upcycling-granularity"),
    ("", "the KV cache of latent attention stores latents, and its down projection is one matmul",
     "cache-mla-latents mla-down-proj-fusion"),
    ("data-parallel-sharding-strategy", "one engine implements every strategy",
     "use-custom-fsdp use-torch-fsdp2 init-model-with-meta-device"),
    ("param-gather-prefetch-bytes", "a byte budget decides what stays gathered, and the number "
     "of buffers", "torch-fsdp2-no-reshard-after-forward fsdp-double-buffer "
     "suggested-communication-unit-size keep-fp8-transpose-cache"),
    ("reduce-scatter-with-fp32-accumulation", "it applies to every reduce-scatter of gradients, "
     "also over gtp", "gtp-remat-reduce-scatter-with-fp32-accumulation"),
    ("weight-decay-group", "it selects weights by name, norms included",
     "no-weight-decay-cond-type apply-wd-to-qk-layernorm"),
    ("ddp-bucket-size", "it alone sets the bucket size",
     "ddp-average-in-collective"),
    ("", "gradients are summed in fp32 unless --grad-reduce-in-bf16 is given",
     "grad-reduce-in-fp32"),
    ("", "torchrun sets the number of processes and their ranks",
     "world-size rank local-rank lazy-mpu-init standalone num-nodes enable-gloo-process-groups "
     "use-ring-exchange-p2p use-sharp"),
    ("tensor-model-parallel-size", "there is one decoder and one layout",
     "encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size"),
    ("sequence-parallel", "it shards activations that tensor parallelism replicates",
     "distribute-saved-activations distribute-checkpointed-activations "
     "scatter-gather-tensors-in-pipeline"),
    ("print-config", "it resolves the options without starting processes, given WORLD_SIZE and "
     "RANK as torchrun sets them", "fake-process-group"),
    # Numerics
    ("recompute-granularity", "selective means norms and MLP activations",
     "recompute-modules"),
    ("cuda-graph-impl", _GRAPHS, "enable-cuda-graph external-cuda-graph cuda-graph-scope "
     "cuda-graph-modules cuda-graph-use-single-mempool cuda-graph-retain-backward-graph"),
    ("", _FP8,
     "transformer-engine-precision keep-fp8-weight-transpose-cache fp8 fp4 fp8-e4m3 fp8-hybrid "
     "fp8-wgrad no-fp8-wgrad fp8-interval fp8-param fp4-param fp8-quantizer-factory "
     "fp4-quantizer-factory fp4-recipe fp8-dot-product-attention fp8-multi-head-attention"),
    ("bf16", "weights, activations and kernels have one dtype",
     "params-dtype use-bf16 fp16-lm-cross-entropy disable-bf16-reduced-precision-matmul"),
    ("weight-gather-format", "weights are stored in bf16 (--bf16), and weights sharded over gtp "
     "can be gathered in FP8, MXFP8 or NVFP4, in separate buffers",
     "fp8-param-gather fp4-param-gather reuse-grad-buf-for-mxfp8-param-ag"),
    ("rerun-mode", "every step is checked on every rank: one with a NaN or Inf loss or gradient "
     "norm is computed a second time, and skipped if that result is bad too",
     "check-for-nan-in-grad"),
    ("loss-spike-factor", "a spike is a multiple of the median of recent losses",
     "check-for-spiky-loss"),
    ("clip-grad", "a large gradient is clipped, a non-finite gradient skips the step",
     "check-for-large-grads"),
    ("", "tests inject errors, not options of a run",
     "error-injection-rate error-injection-type"),
    ("optimizer", "muon orthogonalizes matrices in bf16 on a GPU, with published coefficients",
     "muon-fp32-matmul-prec muon-coefficient-type use-muon"),
    ("optimizer", "adam, sgd and muon are supported, and adam is AdamW",
     "adam-decoupled"),
    ("use-checkpoint-opt-param-scheduler", "without it the flags define the schedule",
     "override-lr-scheduler use-checkpoint-lr-scheduler"),
    ("lr-decay-iters", "it is the length of the decay", "lr-decay-tokens"),
    ("allow-uneven-batch", "an uneven batch keeps its samples",
     "decrease-batch-size-if-needed"),
    # Data
    ("tokenizer-model", "Pai-Megatron-Patch's tokenizers are Hugging Face's: name the folder, "
     "with --tokenizer-type HuggingFaceTokenizer", "patch-tokenizer-type"),
    ("vocab-size", "it includes the tokenizer's tokens and added tokens",
     "extra-vocab-size"),
    ("tokenizer-model", _TOKENIZER,
     "tokenizer-metadata special-tokens null-tokenizer-eod-id "
     "tokenizer-prompt-format vocab-extra-ids tokenizer-special-tokens"),
    ("tokenizer-hf-no-include-special-tokens", "special tokens are included without it",
     "tokenizer-hf-include-special-tokens"),
    ("", "token files are memory-mapped, never copied to another folder",
     "s3-cache-path object-storage-cache-path data-impl mmap-warmup dataset-impl "
     "defer-npy-index-mmap mid-level-dataset-surplus"),
    ("reset-attention-mask", "masks are never stored: attention reads document boundaries",
     "create-attention-mask-in-dataloader"),
    ("eval-iters", "every validation uses the same samples",
     "full-validation multiple-validation-sets skip-train test-mode"),
    ("dataloader-type", "it selects the order of samples", "data-sharding dataloader-save"),
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
    ("save", "it contains all checkpoints", "non-persistent-save-interval non-persistent-ckpt-type "
     "non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir "
     "non-persistent-local-ckpt-algo replication replication-factor replication-jump"),
    # Logs
    ("tensorboard-dir", "every number of the log line is written there",
     "log-max-attention-logit log-device-memory-used"),
    ("config", "options are YAML with the names of flags", "yaml-cfg config-logger-dir"),
    # Other jobs
    ("log-straggler", "its report needs no server and no warm-up",
     "disable-straggler-on-startup"),
    ("use-pytorch-profiler", "a trace contains shapes and operators as torch records them",
     "pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack "
     "pytorch-profiler-collect-chakra nvtx-ranges"),
    ("exit-signal-handler", "both SIGTERM and Ctrl-C end a run gracefully",
     "exit-signal-handler-for-dataloader"),
    ("sft", "preprocess_data --chat applies the template and writes the data of --sft",
     "sft-tokenizer-prompt-format"),
    ("exit-signal-handler", "graceful exit with a save is built in",
     "adlr-autoresume adlr-autoresume-interval result-rejected-tracker-filename "
     "enable-ft-package calc-ft-timeouts run-workload-inspector-server inprocess-restart "
     "inprocess-max-iterations"),
    ("", _JOB, "train-sync-interval"),
)  # fmt: skip

#: Flags that results depend on, without an equivalent: (nearest flag or "", their effect, flags).
_UNSUPPORTED: tuple[tuple[str, str, str], ...] = (
    ("swiglu", "it selects an MLP activation other than GELU, its tanh form (--openai-gelu), gated "
     "silu (--swiglu), gated GELU (--geglu, --quick-geglu) and squared ReLU (--squared-relu)",
     "onnx-safe reglu liglu glu-activation activation-func"),
    ("load-hf", "it sets several properties of gpt-oss, which its Hugging Face folder describes",
     "enable-gpt-oss"),
    ("hybrid-layer-pattern", "it names code that builds the layers: G is a gated delta net, * "
     "attention, E experts, so that Qwen3-Next is GEGEGE*E repeated, for pretrain_hybrid", "spec"),
    ("", "it changes where or in which precision residuals are added",
     "apply-residual-connection-post-layernorm fp32-residual-connection"),
    ("", "it normalises embeddings, as BLOOM does", "embed-layernorm embedding-layernorm"),
    ("init-method-std", "it draws weights from another distribution than the normal one",
     "init-method-xavier-uniform embedding-init-method-std"),
    ("", "it draws output projections with --init-method-std: here that is divided by the square "
     "root of the number of blocks, as in Megatron-LM", "no-scaled-init"),
    ("num-layers", "it belongs to encoder-decoder models, which are not supported",
     "encoder-num-layers decoder-num-layers"),
    ("seq-length", "it belongs to encoder-decoder models, which are not supported",
     "encoder-seq-length decoder-seq-length"),
    ("mtp-num-layers", "it uses one layer for all depths: here each depth has its own",
     "mtp-use-repeated-layer"),
    ("", "it weights the inputs of experts instead of their outputs", "moe-apply-probs-on-input"),
    ("", "it routes tokens by random or biased logits, to benchmark an even load",
     "moe-router-force-load-balancing moe-router-force-biased"),
    ("", "its experts read a projection of the hidden state: here they read the full hidden state",
     "moe-latent-size"),
    ("", "it leaves batches out of training", "iterations-to-skip"),
    ("", _FAMILY,
     "mask-prob short-seq-prob mask-type mask-factor classes-fraction num-classes img-h img-w "
     "patch-dim iter-per-epoch dino-local-img-size ict-head-size titles-data-path "
     "biencoder-projection-dim decoder-seq-len fim-data fim-rate perform-rl-step"),
)  # fmt: skip

#: Families of flags by prefix: (prefix, whether results depend on them, reason).
_PREFIXES: tuple[tuple[str, bool, str], ...] = (
    ("tp-comm-overlap-", False, _TP_OVERLAP),
    ("tp-comm-bootstrap-", False, _TP_OVERLAP),
    (
        "experimental-attention-",
        True,
        "G in --hybrid-layer-pattern is a gated delta net, other attention is softmax attention",
    ),
    ("linear-attention-", True, "--hybrid-layer-pattern places gated delta nets"),
    ("dsa-", True, "attention is softmax attention, of heads or latents"),
    ("retro-", True, _FAMILY),
    ("bert-", True, _FAMILY),
    ("vision-", True, _FAMILY),
    ("swin-", True, _FAMILY),
    ("dino-", True, _FAMILY),
    ("retriever-", True, _FAMILY),
    ("rl-", True, _FAMILY),
    ("grpo-", True, _FAMILY),
    ("heterogeneous-layers-", True, "all layers are alike"),
    ("inference-", False, "use python -m megatron.inference.generate for sampling"),
    ("cpu-offloading", False, "weights and activations stay on their device"),
    ("offload-", False, "weights and activations stay on their device"),
    ("deepspeed-", False, "ZeRO is --data-parallel-sharding-strategy, and torchrun starts a run"),
)

#: Alternative names of options: the option, and its value if the name is a switch.
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

#: Megatron's names of values and this program's, by option.
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

#: Reasons for missing values of Megatron, by option and value.
_VALUE_REASONS: Mapping[tuple[str, str], str] = types.MappingProxyType(
    {
        (
            "main-grads-dtype",
            "bf16",
        ): "--grad-reduce-in-bf16 sums and reduces gradients in bf16, which changes rounding",
        (
            "train-mode",
            "finetune",
        ): "--sft is fine-tuning, on data of preprocess_data --chat",
        (
            "distributed-backend",
            "gloo",
        ): "gloo is for CPUs, where it is the default",
        ("dist-ckpt-strictness", "ignore_all"): "loading is strict",
        ("moe-router-dtype", "fp64"): "routers compute in fp32",
        ("exp-avg-dtype", "fp16"): "its range is too small for it",
        ("exp-avg-dtype", "fp8"): "its range is too small for it",
        ("exp-avg-sq-dtype", "fp16"): "its range is too small for it",
        ("exp-avg-sq-dtype", "fp8"): "its range is too small for it",
        ("cuda-graph-impl", "local"): _LAYER_GRAPHS,
        ("cuda-graph-impl", "transformer_engine"): _LAYER_GRAPHS,
        ("transformer-impl", "inference_optimized"): "it is for megatron.inference",
        ("position-embedding-type", "mrope"): "rotary embeddings have one position axis",
        ("position-embedding-type", "relative"): "positions are absolute or rotary",
        (
            "muon-tp-mode",
            "distributed",
        ): "one rank orthogonalizes each matrix as a whole, with the same result",
        (
            "muon-tp-mode",
            "blockwise",
        ): "matrices are updated as a whole, not separately in each tensor parallel rank's block",
        ("dataloader-type", "external"): "samples come from token files",
        ("cp-comm-type", "a2a+p2p"): "one method exchanges data over all ranks",
        ("softmax-type", "off-by-one"): "learnable starts equal to it: its logits are initially 0",
        ("moe-token-dispatcher-type", "flex"): _DISPATCH,
        ("moe-token-dispatcher-type", "alltoall_seq"): _DISPATCH,
        ("moe-router-load-balancing-type", "sinkhorn"): "a loss or a bias balances the load",
        ("moe-router-load-balancing-type", "global_aux_loss"): _SETS,
        ("moe-router-score-function", "sqrtsoftplus"): "scores are softmax or sigmoid",
        ("tokenizer-type", "BertWordPieceLowerCase"): "save it as a tokenizer.json and use hf",
        ("tokenizer-type", "BertWordPieceCase"): "save it as a tokenizer.json and use hf",
        ("tokenizer-type", "MultimodalTokenizer"): "only text is supported",
    }
)


def answer(flag: str) -> Answer | None:
    """Return the answer to a Megatron flag that does not exist here; None if it is unknown.

    Args:
        flag: name without leading dashes, `-` between words.
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
    """Return every flag with its own answer, in the order of the tables."""
    names = [name for _, _, row in (*_ROWS, *_UNSUPPORTED) for name in row.split()]
    answers = {name: answer(name) for name in names}
    return {name: flag_answer for name, flag_answer in answers.items() if flag_answer is not None}


def answered_prefixes() -> dict[str, Answer]:
    """Return the answer for each family of flags, by prefix."""
    return {
        prefix: Answer(nearest=None, reason=reason, unsupported=unsupported)
        for prefix, unsupported, reason in _PREFIXES
    }


def our_value(flag: str, text: str) -> str:
    """Return this program's name of a value that may be given by Megatron's name.

    Megatron's window of 127,0 means the 127 tokens before a token and none after it; this program's
    window includes the token itself.
    """
    if flag == "window-size" and (window := re.fullmatch(r"\(?(\d+), ?0\)?", text)):
        return str(int(window[1]) + 1)
    return VALUE_NAMES.get(flag, {}).get(text, text)


def value_reason(flag: str, text: str) -> str:
    """Return `: REASON` for a Megatron value that does not exist here; empty for others."""
    reason = _VALUE_REASONS.get((flag, text))
    return f": {reason}" if reason else ""
