# SPDX-License-Identifier: Apache-2.0
"""Faults that the parity rows must detect, with the settings of a row that shows each.

The first three of experts are the most common silent faults in such code.
"""

from tests.support.mutants import bug_table

FAULTS = bug_table(r"""
gradient of a copied input is not summed over tp []
    comm.conjugates _Copy.backward: all_reduce(grad, ctx.group) => grad.clone()
gradient of a gathered sequence is cut instead of reduce-scattered [sequence_parallel]
    comm.conjugates _Gather.backward: reduce_scatter(grad, ctx.group)
    => own_rows(grad, ctx.group).contiguous()
a rank takes the rows of its neighbour [sequence_parallel dropout=0.1]
    comm.conjugates own_rows: x[group.rank * rows : (group.rank + 1) * rows]
    => x.roll(rows, 0)[group.rank * rows : (group.rank + 1) * rows]
kv heads held by several ranks keep their own gradients [groups=1]
    weight_sharding gradient_plan: elif num_shards < size: => elif num_shards > size:
norm weights see a part of the sequence, and nobody sums them [sequence_parallel]
    tensor_parallel.linear TensorParallelRegion.replicated_gradient: "partial" if self.scatters else
    "identical"
    => "identical"
q/k norm weights see a part of the heads, and nobody sums them [qk_norm]
    transformer.attention SelfAttention.__init__: options["gradient"] = "partial"
    => options["gradient"] = "identical"
key heads held by several ranks count once in the size of a norm [groups=1 qk_norm=projection]
    transformer.norm QueryKeyNorm.__init__: max(groups, tp) if tp > 1 else groups => groups
squares of queries and keys are summed over tp in forward alone [qk_norm=projection]
    transformer.norm _QueryKeyNorm.backward: ctx.sizes, ctx.group
    => ctx.sizes, type(ctx.group)("single", (0,), 0)
a tied weight is reduced before its second gradient [tp=1 dp=2 tied bucket=small]
    distributed.gradient_bucket GradientBlock.grad_accumulated: == handle.uses => == 1
gradients of the last step are kept [tp=1 dp=2]
    distributed.gradient_bucket GradientBlock._reset: handle.overwrite_main_grad = True
    => handle.overwrite_main_grad = handle.overwrite_main_grad
a microbatch overwrites the gradient of the one before [tp=1 dp=2 accumulation=3]
    weight_gather.handle WeightHandle._accumulate_wgrad: overwrite=self.overwrite_main_grad
    => overwrite=True
buckets are reduced too early [tp=1 dp=2 accumulation=2 bucket=small]
    distributed.data_parallel DataParallel.set_is_last_backward: if is_last else ()
    => if not is_last else ()
the mean forgets the number of microbatches [tp=1 dp=2 accumulation=3]
    weight_sharding loss_factor: grid.gtp * num_microbatches => grid.gtp
the mean forgets the gtp ranks [tp=1 gtp=2]
    weight_sharding loss_factor: grid.dp * grid.gtp => grid.dp
replicas of a weight over gtp are not summed [tp=1 gtp=2 dp=2]
    distributed.gradient_bucket GradientBucket.needs_outer: if self.bucket.outer.size == 1:
    => if self.bucket.gtp:
replicas of a weight over gtp count in the norm [tp=1 gtp=2 dp=2]
    weight_gather.store owned_range: if axis not in shard_axes]
    => if axis not in (*shard_axes, 'dp_inner')]
experts are sharded over the dense gtp [tp=1 gtp=2 dp=2 egtp=4 experts=softmax]
    weight_gather.bucket BucketGroups.of: if expert else ("gtp", "dp_cp")
    => if not expert else ("gtp", "dp_cp")
padding of the vocabulary takes part in the softmax []
    tensor_parallel.vocab_parallel _CrossEntropy.forward: min(rows, vocab_size - first_token_id)
    => rows
embeddings of the other ranks' tokens are not masked []
    tensor_parallel.vocab_parallel VocabParallelEmbedding.addends:
    self.weight.embedding(local.where(valid, 0), valid)
    => self.weight.embedding(local.where(valid, 0))
all ranks drop the attention of the first heads [dropout=0.1]
    transformer.attention CoreAttention.of: build.region.group.rank * heads => 0 * heads
replicas count twice in the norm of the gradient []
    weight_gather.store owned_range: if box.counted: => if True:
each rank starts from the values of the first []
    weight_gather.store WeightStore._initialize: offsets=chunk.offsets
    => offsets=tuple(0 for _ in chunk.offsets)
updated shards of weights are not gathered [tp=1 dp=2 placement=optim]
    distributed.data_parallel DataParallel.start_param_sync: in self.gatherers: => in ():
gathered weights outlive the optimizer's step [tp=1 dp=2 placement=optim_grads early_gather]
    weight_gather.gatherer Gatherer.invalidate: block.ready = False
    => block.ready = not self.reshards
shards of the outer ranks are not gathered [tp=1 dp=4 placement=optim_grads_params instances=2
    outer=optim]
    weight_gather.gatherer Gatherer.invalidate: self._outer_stale.add(bucket.index) => pass
gradients of the outer ranks are not summed [tp=1 dp=4 placement=optim_grads instances=2]
    distributed.gradient_bucket GradientBucket.needs_outer: if self.bucket.outer.size == 1:
    => if True:
a microbatch's cut gradients replace those of the one before [tp=1 dp=2 placement=optim_grads
    accumulation=3]
    distributed.gradient_bucket GradientBucket.reduction_output: start not in self._received => True
ranges that several ranks hold count once for each in the norm [tp=1 dp=4 placement=optim
    instances=2]
    weight_gather.store owned_range: math.prod(grid.size(axis) for axis in replicate_axes) if
    store.sharded else 1
    => 1
the stages of a tied weight keep their own gradients [tp=1 pp=2 tied]
    weight_sharding gradient_plan: steps.append(GradientStep(TIED, names)) => pass
weight gradients that were put off are forgotten [tp=1 pp=2 schedule=zb-h1 accumulation=3]
    pipeline_parallel.runtime AutogradWorker.weight_gradient: self._queues.pop((chunk,
    microbatch)).drain()
    => self._queues.pop((chunk, microbatch))
a chunk sends what it got [tp=1 pp=4 accumulation=3]
    pipeline_parallel.runtime AutogradWorker.forward: return output.detach().contiguous()
    => return (output if hidden is None else hidden).detach().clone()
keys are taken for those of another rank of the ring [tp=1 cp=4]
    context_parallel.attention RingAttention.forward: (group.rank - step) % group.size
    => (group.rank + step) % group.size
copies of a key head keep their own gradients [tp=1 cp=2 engine=a2a groups=1]
    context_parallel.attention _sum_copies: x.unflatten(2, (groups, copies)).sum(3)
    => x.unflatten(2, (groups, copies)).select(3, 0)
feature off: the engine that was asked for [tp=1 cp=2]
    context_parallel.attention context_attention: choose(engine, => choose(AUTO,
feature off: reduction as the last weight gradients of a stage come [tp=1 dp=2 pp=2 schedule=zb-h1
    accumulation=3]
    pipeline_parallel.runtime AutogradWorker.weight_gradient:
    self._engine.begin_last_backward(chunk)
    => pass
feature off: sequence parallelism [sequence_parallel]
    tensor_parallel.linear TensorParallelRegion.scatters: self.sequence_parallel and self.group.size
    > 1
    => False
feature off: reduction during backward [tp=1 dp=2]
    distributed.gradient_bucket GradientBlock.grad_accumulated: self.num_unfinished == 0
    => self.num_unfinished < 0
feature off: sums over the replicas of weights over gtp during backward [tp=1 gtp=2 dp=2
    placement=optim bucket=small]
    distributed.data_parallel DataParallel._wait_for_reductions: and bucket.is_complete:
    => and False:
weights are encoded once for all steps [tp=1 gtp=2 dp=2 placement=optim wire=mxfp8]
    weight_gather.gatherer _Encoded.is_current: not self.is_stale and self.version ==
    self.block.data._version
    => self.version >= 0
ranks scale by their own largest magnitudes [tp=1 gtp=2 wire=nvfp4]
    weight_gather.gatherer Gatherer._reduce_amax: all_reduce(largest, group, op="max", out=largest)
    => pass
backward reads the encoding of 1-D scale blocks that forward reads [tp=1 gtp=2 wire=nvfp4
    scale_blocks=1d]
    weight_gather.handle WeightHandle.get: self.backward_block if backward else self.block
    => self.block
grouped products read forward's encoding in backward [tp=1 gtp=2 wire=nvfp4 scale_blocks=1d
    experts=softmax egtp=2]
    weight_gather.handle _GroupedLinear.backward: handle.get(backward=True) => handle.get()
feature off: weights are encoded once a step [tp=1 gtp=2 dp=2 placement=optim wire=mxfp8]
    weight_gather.gatherer _Encoded.is_current: not self.is_stale and self.version ==
    self.block.data._version
    => False
feature off: one reduce-scatter over gtp a step [tp=1 gtp=2 dp=2 reduce_scatter=step accumulation=3]
    distributed.gradient_bucket GradientBucket.__init__: config.gtp_reduce_scatter_per == "step"
    => False
a second microbatch's shards replace those of the first [tp=1 gtp=2 dp=2 placement=optim_grads
    accumulation=3]
    distributed.gradient_bucket GradientBucket.finish_outer_grad_sync: self.gradients.add_(summed)
    => self.gradients.copy_(summed)
feature off: reduce-scatter of a sharded optimizer [tp=1 dp=2 placement=optim]
    distributed.gradient_bucket GradientBlock._start_reduction: return reduce_scatter_async(buffer,
    group, out=output)
    => return Pending(all_reduce_async(buffer, group, out=buffer).wait() is None or output)
gradients of experts are a mean over ep [tp=1 dp=2 experts=softmax ep=2]
    weight_gather.handle _wgrad_: grad.to(dtype) => grad.to(dtype) / 2
gradients of experts are off by etp / tp [tp=2 dp=1 experts=softmax etp=1 ep=2]
    weight_gather.handle _wgrad_: grad.to(dtype) => grad.to(dtype) * 2
the router's gradient is not summed over tp [experts=softmax etp=2]
    moe.router Router.__init__: shape, gradient={"tp": "partial"}
    => shape, gradient={"tp": "identical"}
experts are summed over the data-parallel ranks of dense weights [tp=1 dp=2 experts=softmax ep=2]
    weight_sharding gradient_plan: "expert_dp" if sharding.expert else "dense_dp" => "dense_dp"
gradients of gathered routing weights stay with their owner [tp=1 dp=2 experts=softmax ep=2
    dispatcher=allgather]
    moe.dispatch _by_all_gather: partial_gradient=True => partial_gradient=False
a rank picks the tokens of its neighbour's experts [tp=1 dp=2 experts=softmax ep=2
    dispatcher=allgather]
    moe.dispatch ExpertRanks.first_expert: self.group.rank // self.etp * self.num_local
    => (self.group.size - 1 - self.group.rank) // self.etp * self.num_local
loads are balanced over one rank's tokens [experts=sigmoid etp=2]
    moe.router Router._balanced: all_reduce(local_tokens, self.group) => local_tokens
biases drive tokens to the busy experts [tp=1 dp=2 experts=sigmoid ep=2]
    moe.router Balance.finish: tokens.mean() - tokens => tokens - tokens.mean()
experts have room for one token more [tp=1 dp=2 experts=softmax ep=2 capacity=position]
    moe.router within_capacity: index_in_expert < capacity => index_in_expert <= capacity
rows of a token's experts come back in the wrong order [tp=1 dp=2 experts=softmax ep=2]
    moe.dispatch _by_all_to_all: sum_rows(combined, send_permutation, weights=weights)
    => sum_rows(combined, send_permutation, weights=weights.flip(1))
rotated key features keep the gradient of this rank's heads [attention=latent groups=8]
    transformer.latent_attention LatentAttention._project: copy_to_group(key_rope, group)
    => key_rope
tokens of the next document are predicted [tp=1 dp=2 predictions=1 documents=packed]
    models.gpt shift_targets: document_ids[:, near] == document_ids[:, far]
    => document_ids[:, near] >= 0
a norm sees some of the value heads, and nobody sums its gradient [mixer=delta]
    ssm.gated_delta_net GatedDeltaNet._declare: "tp": "partial" => "tp": "identical"
decays are those of value heads in another order [mixer=delta]
    ops.recurrence.prologue.cpu recurrence_inputs: decay = -a_log.exp()
    => decay = -a_log.view(heads, -1).mT.exp()
a rank takes the weights of its neighbour's heads [tp=1 cp=2 mixer=delta]
    ssm.mixer UnitShard.of: [self.index] => [self.index - 1]
tokens come back by the map that took them [tp=1 cp=2 mixer=mamba]
    ops.sequences PackingIndices.of: tokens[rows] = np.arange(len(rows))
    => tokens[np.arange(len(rows))] = rows
states go on into the next document [tp=1 cp=2 mixer=delta documents=packed]
    context_parallel.packed_tokens whole_rows: [row * len(columns) + end for end in ends[1:]]
    => [row * len(columns) + ends[-1]]
a convolution borrows tokens of the document before [tp=1 cp=2 mixer=delta linear_mode=segments
    documents=packed]
    context_parallel.packed_tokens _halo_ranges: skipped = max(0, begin - (top + transfer.row))
    => skipped = 0
gradients of states are multiplied by what is not transposed [tp=1 cp=2 mixer=delta
    linear_mode=segments]
    ssm.state_passing _final_gradients: transposed=True => transposed=False
states are folded from one rank's summaries [tp=1 cp=2 mixer=mamba linear_mode=segments]
    ssm.state_passing StateExchange.of: slot = transfer.source * num_exports + transfer.export
    => slot = group.rank * num_exports + transfer.export
ranks that hold the same group keep their own gradients [mixer=mamba mamba_groups=1]
    weight_sharding gradient_plan: elif num_shards < size: => elif num_shards > size:
copies of a group meet heads in another order [tp=1 cp=2 mixer=mamba mamba_groups=1]
    ssm.mamba2 Mamba2.replicate_shared: columns.unflatten(-1, (copies, -1))
    => columns.unflatten(-1, (-1, copies)).mT
squares of a norm on several ranks are summed in forward alone [mixer=mamba norm_groups=1]
    ssm.mamba2 Mamba2._apply_norm: copy_to_group(reduce_from_group(squares, self._tp), self._tp)
    => reduce_from_group(squares, self._tp)
a short convolution forgets the tokens of the rank before [tp=1 cp=2 mixer=short_conv]
    ssm.short_conv ShortConv.run_recurrence: initial=halo => initial=None
channels are convolved before they are gated [mixer=short_conv]
    ssm.short_conv _product: return gate * x => return x
parallel mixers work one after the other [tp=1 dp=2 parallel]
    models.decoder ParallelMixers.forward: mixer(hidden, layout, **context) for mixer in self.mixers
    => hidden := mixer(hidden, layout, **context) for mixer in self.mixers
factors of a projection belong to other columns [mixer=mamba multipliers]
    ssm.mamba2 Mamba2.__init__: zip((*factors, gate), counts => zip((gate, *factors), counts
heads are gated by their neighbour [attention_gate]
    transformer.attention SelfAttention._gated: out * self._sigmoid(gate)
    => out * self._sigmoid(gate.roll(1, -2))
window blocks have the window of the other blocks [second_attention=window]
    transformer.attention AttentionConfig.window_block: ("window", "sinks", "rotary")
    => ("sinks", "rotary")
window blocks are rotated by the table of the other blocks [tp=1 cp=2 second_attention=window]
    transformer.attention SelfAttention.forward: rope = window_rope => rope = rope
a stage with window blocks alone has no rotary table [tp=1 pp=2 second_attention=window]
    models.gpt GPTModel._ropes: if window_rotary is not None: => if rotary is window_rotary:
the bounds of yarn's ramp are rounded [rotary=yarn]
    ops.rope _yarn: if scaling.truncate: => if not scaling.truncate:
queries are not scaled by position [rotary=query_scale]
    transformer.attention SelfAttention.forward: query = rope.scale(query) => query = query
queries are scaled by their positions on a rank [tp=1 cp=2 rotary=query_scale]
    transformer.attention RotaryEmbedding._query_scale: (positions // length)
    => ((positions - positions.min()) // length)
every rank of an expert adds the bias of its output [experts=sigmoid etp=2 expert_bias]
    moe.layer ExpertMLPs.forward: bias if self._adds_down_bias else bias * 0.0 => bias
biases of experts keep the gradient of one rank [experts=sigmoid etp=2 expert_bias]
    moe.layer ExpertMLPs._declare_biases: {"etp": "partial"} => {"etp": "identical"}
biases of experts go to the rows of the next expert [tp=1 dp=2 experts=softmax ep=2 expert_bias]
    ops.grouped_mm _AddRunBiases.forward: right=True => right=False
the bias of a router has the gradient of a rank's tokens [experts=softmax etp=2 expert_bias]
    moe.router Router.__init__: shape[:1], gradient={"tp": "partial"}
    => shape[:1], gradient={"tp": "identical"}
the norm of an output includes the stream [tp=1 dp=2 norm_placement=post]
    models.decoder DecoderBlock.forward: mixed = self.post_norm(mixed)
    => mixed = self.post_norm(mixed + stream)
norms of outputs see a part of the sequence, and nobody sums them [sequence_parallel
    norm_placement=post]
    tensor_parallel.linear TensorParallelRegion.replicated_gradient: "partial" if self.scatters else
    "identical"
    => "identical"
partial sums of embeddings are multiplied twice [sequence_parallel multipliers]
    tensor_parallel.vocab_parallel VocabParallelEmbedding.addends:
    self.weight.embedding(local.where(valid, 0), valid)
    => self.scaled(self.weight.embedding(local.where(valid, 0), valid))
the embedding of MTP layers has no multiplier [tp=1 dp=2 predictions=1 multipliers]
    models.gpt MultiTokenPrediction.__init__: factors.embedding_in(build.store.dtype) => 1.0
the last stage multiplies its logits by the factor of blocks [tp=1 pp=2 multipliers]
    models.gpt GPTModel._declare: "multiplier": factors.logits => "multiplier": factors.residual
blocks of other ranks have no soft cap [tp=1 cp=2 softcaps]
    context_parallel.blockwise _mask: softcap=options.softcap => softcap=None
the gradient of bounded logits lacks the slope of the bound [tp=1 dp=2 softcaps]
    tensor_parallel.vocab_parallel _CrossEntropy.forward: logits.mul_(slope) => pass
the bound of a masked attention logit comes after the mask [tp=1 dp=2 window=5 softcaps]
    ops.attention.cpu chunked_forward: .tanh_().mul_(mask.softcap) => .mul_(mask.softcap)
feature off: the mode of recurrences that was asked for [tp=1 cp=2 mixer=delta linear_mode=segments]
    ssm.mixer LinearRecurrentMixer._mode: choose_mode(self.context.linear_mode,
    => choose_mode("auto",
feature off: gathers ahead of need [tp=1 dp=2 placement=optim_grads_params early_gather]
    distributed.data_parallel _gatherers: prefetch=config.overlap_param_gather => prefetch=False
feature off: the early gather of a parameter sync [tp=1 dp=2 placement=optim early_gather
    bucket=small]
    distributed.data_parallel DataParallel.start_param_sync: gatherer.prefetch_next_step() => pass
feature off: one gather for several weights [tp=1 dp=2 placement=optim_grads_params]
    weight_gather.bucket bucket_plans: if strategy.weight and units[handle.name] != unit:
    => if strategy.weight:
""")
