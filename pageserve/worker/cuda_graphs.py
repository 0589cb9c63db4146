"""Whole steps as CUDA graphs: input building, forward pass, sampling and token feedback.

A step is captured once per bucket of shape and replayed with new contents of a few small buffers,
so the host sends some bytes and one launch a step. There are two kinds of bucket: decode steps,
one token per row, and mixed steps, in which ``num_tokens`` are shared among the rows in any way.
Padding rows have slot -1: they read token 0, write no KV and attend to nothing.

A step with rows that want more than the sampling kernels do (biases, allow-lists, log probabilities
…) ends at its logits, from which the caller samples: see :class:`Ending`. The masks of rows under a
grammar come along with the step, and a bucket that has some applies them.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from pageserve.attention.triton import SQUARE, LongRow, TritonBackend
from pageserve.kernels.compiler import KernelCompiler
from pageserve.kernels.input_batch import (
    InputBuffers,
    prepare_decode,
    prepare_inputs,
    store_sampled,
)
from pageserve.kernels.launch import compiling
from pageserve.kernels.paged_decode import cascade_rows
from pageserve.kernels.sampling import (
    RepetitionPenalties,
    apply_bitmasks,
    greedy_sample,
    sample,
)
from pageserve.messages import NewRequestData, ScheduledRow, SchedulerOutput
from pageserve.models.decoder import DecoderForCausalLM
from pageserve.utils import cdiv
from pageserve.worker.request_states import RequestStates, to_device
from pageserve.worker.sampling_metadata import token_bits

STAGES = 3  # host buffers in turn: two steps may be in flight while a third is prepared
MAX_MIXED_TOKENS = 2048  # beyond this the GPU is busy long enough to launch kernel by kernel
TILE = 128  # tokens that larger steps are padded to a multiple of
# A cascade pays on an H200 where rows read as many bytes of keys and values again in a layer, and
# these are half of all they read: else its launch and its merges take longer than it saves.
CASCADE_BYTES = 12 << 20
CASCADE_SHARE = 0.5
REHEARSAL_TOKENS = SQUARE  # that the pool of a rehearsal holds
GRAPH_BYTES = 4 << 20  # of a graph itself, beside what its step allocates


class Ending(Enum):
    """How a step ends."""

    GREEDY = "greedy"  # every row takes its best token
    DRAW = "draw"  # rows sample with temperature and filters, greedy ones among them
    LOGITS = "logits"  # the step leaves its logits, and who launched it samples


class GraphKey(NamedTuple):
    """What a graph is captured for."""

    num_tokens: int
    num_rows: int
    decode: bool  # every row has exactly one token, which samples; False: any mix
    ending: Ending
    masked: bool = False  # some row is under a grammar, and the step applies its mask
    cascade: bool = False  # what consecutive rows have in common is read once; decode only

    @property
    def leaves_logits(self) -> bool:
        """Whether who launches the step has to sample."""
        return self.ending is Ending.LOGITS


def row_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes of decode graphs: fine where padding would hurt, up to ``max_num_seqs``."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, *range(64, 256, 32), *range(256, 1025, 64)]
    return [s for s in sizes if s < max_num_seqs] + [max_num_seqs]


def token_buckets(max_num_batched_tokens: int) -> list[int]:
    """Token counts of mixed graphs."""
    limit = min(max_num_batched_tokens, MAX_MIXED_TOKENS)
    sizes = [64, 128, 192, 256, 384, 512, 768, 1024, 1536]
    return [s for s in sizes if s < limit] + [limit]


class _Stage(NamedTuple):
    """Pinned host memory of one step in flight; int32 but for ``sampled``, int64. The buffers that
    the graphs read look the same."""

    rows: torch.Tensor  # [max_rows, 2]: slot, first position; slot -1: padding
    last: torch.Tensor  # [max_rows, 2]: slot, last position; slot -1: the row does not sample
    starts: torch.Tensor  # [max_rows + 1]: query_start_loc
    masks: torch.Tensor  # [max_rows]: the row's bitmask; -1: it has none
    bitmasks: torch.Tensor  # [max_rows, words]: the first ones are in use
    sampled: torch.Tensor  # [max_rows]


class CUDAGraphRunner:
    """Captures and replays the steps of one model on one request table."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        kv_cache: torch.Tensor,
        states: RequestStates,
        *,
        vocab_limit: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.states = states
        self.vocab_limit = vocab_limit
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_size = kv_cache.shape[4]
        self.device = kv_cache.device
        self.backend = TritonBackend()
        self.row_sizes = row_buckets(max_num_seqs)
        self.token_sizes = token_buckets(max_num_batched_tokens)
        self.mixed_row_sizes = [n for n in (64, 256) if n < max_num_seqs] + [max_num_seqs]

        self.inputs = _make_stage(max_num_seqs, vocab_limit, device=self.device)
        self._logits = torch.empty(
            max_num_seqs, vocab_limit, dtype=kv_cache.dtype, device=self.device
        )
        self._decode_buffers = {n: InputBuffers.allocate(n, self.device) for n in self.row_sizes}
        pinned = self.device.type == "cuda"
        self._stages = [
            _make_stage(max_num_seqs, vocab_limit, pin_memory=pinned) for _ in range(STAGES)
        ]
        self._turn = 0
        self.replayed_tokens = 0  # size of the graph that the last step replayed, 0: it used none
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool: tuple[int, int] | None = None  # memory that all graphs share
        self._wanted: list[GraphKey] = []  # to be captured when there is time
        self._sampling = _SamplingTable(max_num_seqs, vocab_limit, self.device)
        shape = model.config.num_heads, model.config.num_kv_heads, model.config.head_dim
        self._cascade_rows = cascade_rows(*shape, kv_cache.dtype, self.device)
        self._block_bytes = kv_cache[0, :, 0].nbytes  # of a layer
        self._compared: list[int] | None = None  # slots last searched for a common prefix
        self._repeated = 0  # blocks, found by that

    def keys(self, ending: Ending) -> list[GraphKey]:
        """Buckets to capture, largest first, so that the smaller ones reuse the memory of the
        larger."""
        decode = [(n, n, True) for n in reversed(self.row_sizes)]
        mixed = [
            (tokens, rows, False)
            for tokens in reversed(self.token_sizes)
            for rows in reversed(self.mixed_row_sizes)
            if rows <= _bucket(self.mixed_row_sizes, min(tokens, self.mixed_row_sizes[-1]))
        ]
        return [GraphKey(*shape, ending) for shape in mixed + decode]

    @torch.inference_mode()
    def rehearse(self, compiler: KernelCompiler, capturing: bool) -> int:
        """Have ``compiler`` compile what any step may launch, and allocate what the largest does.

        Returns the bytes that capturing graphs will take (0 without ``capturing``). The pool may
        have fewer layers than the model: then only those are run, which compiles the same.
        """
        graph_bytes = 0
        with compiler.compile_ahead():
            self._measure()
            for ending in (Ending.DRAW, Ending.GREEDY, Ending.LOGITS):  # the slowest kernels first
                self._run(self._largest_key(ending))
            keys = self.keys(Ending.GREEDY)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self._run(keys[0])
            if capturing:
                graph_bytes = torch.cuda.max_memory_allocated() - before
                graph_bytes += (len(keys) + len(self._later_keys())) * GRAPH_BYTES
            for key in keys[1:] + self._cascade_keys(Ending.GREEDY):
                self._run(key)
            for size in (self.row_sizes[0], self.row_sizes[-1]):
                self._run(GraphKey(size, size, True, Ending.DRAW))
                self._run(GraphKey(size, size, True, Ending.GREEDY, masked=True))
        return graph_bytes

    def _later_keys(self) -> list[GraphKey]:
        """Return the buckets of all steps but plain greedy ones, in the order of capture. Steps
        that end at their logits are masked by who samples from them."""
        greedy, draw, logits = Ending.GREEDY, Ending.DRAW, Ending.LOGITS
        later = []
        for ending, masked in (
            (greedy, False),
            (draw, False),
            (logits, False),
            (greedy, True),
            (draw, True),
        ):
            keys = self._cascade_keys(ending)
            if masked or ending is not greedy:
                keys = self.keys(ending) + keys
            later += [key._replace(masked=masked) for key in keys]
        return later

    def _cascade_keys(self, ending: Ending) -> list[GraphKey]:
        """Buckets of decode steps whose rows begin with the same blocks."""
        if self._cascade_rows < 2:
            return []
        sizes = [n for n in reversed(self.row_sizes) if n > 1]
        return [GraphKey(n, n, True, ending, cascade=True) for n in sizes]

    def _measure(self) -> None:
        num_heads, longest = self.model.config.num_heads, self.max_num_batched_tokens
        self.backend.measure(self.kv_cache, num_heads, min(longest, self.states.max_model_len))

    def _largest_key(self, ending: Ending) -> GraphKey:
        tokens = cdiv(self.max_num_batched_tokens, TILE) * TILE
        return GraphKey(tokens, self.row_sizes[-1], False, ending)

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every bucket of greedy steps; without it steps are launched kernel by kernel.
        The others are left to :meth:`capture_next`. The table is not changed: all rows are padding.
        """
        self._measure()
        keys = self.keys(Ending.GREEDY)
        self._pool = torch.cuda.graph_pool_handle()
        self._capture_stream = torch.cuda.Stream()  # one for all: memory is reused within a stream
        self._wanted = self._later_keys()[::-1]
        for i, key in enumerate(keys):
            self._capture(key)
            if progress is not None:
                progress(i + 1, len(keys))
        torch.cuda.synchronize()

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more bucket, while no step is in flight; False if none is left."""
        while self._wanted:
            key = self._wanted.pop()
            if key not in self._graphs:
                self._capture_between_steps(key)
                return True
        return False

    def _capture(self, key: GraphKey) -> torch.cuda.CUDAGraph:
        """Capture one bucket; steps in flight finish first."""
        stream = self._capture_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(key)  # compiles what this bucket needs, and warms the libraries up
            stream.synchronize()
            # Not torch.cuda.graph(): that collects garbage and empties caches around each one.
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool)
            self._run(key)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs[key] = graph
        return graph

    def admit(self, new_requests: Sequence[NewRequestData]) -> None:
        """Note that requests enter the table, and how they sample."""
        if new_requests:
            self._sampling.put(new_requests)
            self._compared = None

    def record(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Note tokens that were sampled from the logits of a step, ``token_ids`` [n] of ``slots``
        [n] int64, both on the device."""
        self._sampling.see(slots, token_ids)

    def key_for(self, step: SchedulerOutput) -> GraphKey:
        """Return the bucket of a step."""
        num_rows, num_tokens = len(step.rows), step.num_scheduled_tokens
        slots = [row.slot for row in step.rows if row.samples]
        ending = self._sampling.ending(slots)
        masked = bool(step.bitmasks) and ending is not Ending.LOGITS
        if num_rows == num_tokens == len(slots):
            size = _bucket(self.row_sizes, num_rows)
            return GraphKey(size, size, True, ending, masked, self._cascades(slots))
        rows = _bucket(self.mixed_row_sizes, num_rows)
        if num_tokens > self.token_sizes[-1]:
            # Nothing to gain from a graph; whole tiles keep the variety of shapes small.
            return GraphKey(cdiv(num_tokens, TILE) * TILE, rows, False, ending, masked)
        return GraphKey(_bucket(self.token_sizes, num_tokens), rows, False, ending, masked)

    def _cascades(self, slots: list[int]) -> bool:
        """Whether the rows of these ``slots`` have so much in common that a cascade pays."""
        if self._cascade_rows < 2:
            return False
        if slots != self._compared:  # else as in the step before
            self._compared = slots
            self._repeated = self.states.num_repeated_blocks(slots, self._cascade_rows)
        if self._repeated * self._block_bytes < CASCADE_BYTES:
            return False
        return self._repeated >= CASCADE_SHARE * int(self.states.num_blocks[slots].sum())

    def replay(self, key: GraphKey, step: SchedulerOutput) -> torch.Tensor:
        """Launch a step. Returns one entry per row, whether it samples or not: the sampled ids,
        pinned int64 [num_rows], valid once the stream got there (record an event); with
        ``Ending.LOGITS`` the logits [num_rows, vocab_limit] on the device, valid until the next
        step, which nobody has sampled from."""
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % STAGES
        num_rows = len(step.rows)
        self._sampling.follow(step.rows, self.states.token_ids)
        self._stage(key, step, stage)
        graph = self._graphs.get(key)
        too_large = key.num_tokens > self.token_sizes[-1]
        if graph is None and self._pool is not None and not too_large:
            graph = self._capture_between_steps(key)
        self.replayed_tokens = 0 if graph is None else key.num_tokens
        if graph is None:
            self._run(key, self.backend.long_rows(step.rows) if too_large else ())
        else:
            graph.replay()
        if key.leaves_logits:
            return self._logits[:num_rows]
        stage.sampled[:num_rows].copy_(self.inputs.sampled[:num_rows], non_blocking=True)
        return stage.sampled[:num_rows]

    def _capture_between_steps(self, key: GraphKey) -> torch.cuda.CUDAGraph:
        """Capture a bucket that a live step needs. Warming up runs the step on padding rows, so
        its inputs are put aside meanwhile."""
        kept = [x.clone() for x in self.inputs]
        self.inputs.rows.fill_(-1)
        self.inputs.last.fill_(-1)
        self.inputs.starts.zero_()
        self.inputs.masks.fill_(-1)
        graph = self._capture(key)
        for target, source in zip(self.inputs, kept, strict=True):
            target.copy_(source)
        return graph

    def _stage(self, key: GraphKey, step: SchedulerOutput, stage: _Stage) -> None:
        """Send the step's few numbers to where its graph reads them."""
        num_rows = len(step.rows)
        rows = stage.rows.numpy()
        rows[:num_rows] = [(r.slot, r.num_computed_tokens) for r in step.rows]
        rows[num_rows : key.num_rows] = (-1, 0)
        sent = ["rows"]
        if not key.decode:
            counts = [r.num_scheduled_tokens for r in step.rows]
            starts = stage.starts.numpy()
            np.cumsum(counts, out=starts[1 : num_rows + 1])
            starts[num_rows + 1 : key.num_rows + 1] = starts[num_rows]
            last = stage.last.numpy()
            last[: key.num_rows] = rows[: key.num_rows]
            last[:num_rows, 1] += np.asarray(counts, dtype=np.int32) - 1
            last[:num_rows, 0][[not r.samples for r in step.rows]] = -1
            sent += ["starts", "last"]
        if key.masked:
            self._stage_masks(key, step, stage)
            sent += ["masks"]
        for name in sent:
            size = key.num_rows + (name == "starts")
            getattr(self.inputs, name)[:size].copy_(getattr(stage, name)[:size], non_blocking=True)

    def _stage_masks(self, key: GraphKey, step: SchedulerOutput, stage: _Stage) -> None:
        masks, bitmasks = stage.masks.numpy(), stage.bitmasks.numpy()
        masks[: key.num_rows] = -1
        rows = [i for i, row in enumerate(step.rows) if row.slot in step.bitmasks]
        for place, i in enumerate(rows):
            masks[i] = place
            bitmasks[place] = np.frombuffer(step.bitmasks[step.rows[i].slot], dtype="<i4")
        self.inputs.bitmasks[: len(rows)].copy_(stage.bitmasks[: len(rows)], non_blocking=True)

    def _run(self, key: GraphKey, long_rows: Sequence[LongRow] = ()) -> None:
        """The step itself, launched or captured; ``long_rows`` are only for launched ones."""
        num_rows, table, blocks = key.num_rows, self.states.token_ids, self.states.block_table
        rows = last = self.inputs.rows[:num_rows]
        if key.decode:
            buffers = self._decode_buffers[num_rows]
            prepare_decode(rows, table, blocks, self.block_size, buffers)
            input_ids, positions, slot_mapping = (
                buffers.input_ids,
                buffers.positions,
                buffers.slot_mapping,
            )
            query_start_loc, seq_lens = buffers.query_start_loc, buffers.seq_lens
            row_slots, max_query_len = buffers.row_slots, 1
        else:
            last = self.inputs.last[:num_rows]
            query_start_loc = self.inputs.starts[: num_rows + 1]
            max_query_len = key.num_tokens
            input_ids, positions, slot_mapping, seq_lens = prepare_inputs(
                rows, query_start_loc, table, blocks, self.block_size, key.num_tokens, max_query_len
            )
            row_slots = rows[:, 0].clamp_min(0)
            if compiling():  # nothing was prepared, and a lookup of random ids is an error
                input_ids.zero_()
        metadata = self.backend.build_metadata(
            query_start_loc,
            seq_lens,
            blocks,
            slot_mapping,
            max_query_len,
            self.states.max_model_len,
            row_slots=row_slots,
            long_rows=long_rows,
            cascade=key.cascade,
        )
        hidden = self.model(input_ids, positions, self.kv_cache, metadata, last_only=True)
        logits = self.model.compute_logits(hidden)[:, : self.vocab_limit]
        if key.leaves_logits:
            self._logits[:num_rows].copy_(logits)
            return
        if key.masked:
            apply_bitmasks(logits, self.inputs.masks[:num_rows], self.inputs.bitmasks)
        if key.ending is Ending.DRAW:
            sampled = sample(logits, *self._sampling.rows(row_slots, last[:, 1] + 1))
            store_sampled(last, sampled, table, self._sampling.seen)
        else:
            sampled = greedy_sample(logits)
            store_sampled(last, sampled, table)
        self.inputs.sampled[:num_rows].copy_(sampled)


class _SamplingTable:
    """How each slot samples, on the device, in the form the sampling kernel takes."""

    def __init__(self, max_num_seqs: int, vocab_limit: int, device: torch.device) -> None:
        # temperature, top_p, min_p, repetition_penalty
        self.floats = torch.zeros(4, max_num_seqs, device=device)
        self.ints = torch.zeros(2, max_num_seqs, dtype=torch.int32, device=device)  # top_k, prompt
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.vocab_limit = vocab_limit
        # A bit for every token of a slot, right where the request has a repetition penalty.
        words = cdiv(vocab_limit, 32)
        self.seen = torch.zeros(max_num_seqs, words, dtype=torch.int32, device=device)
        self._ends: dict[int, int] = {}  # slots with a penalty → tokens before their last draw
        self.draws = [False] * max_num_seqs
        self.special = [False] * max_num_seqs  # wants more than the kernel does

    def put(self, new_requests: Sequence[NewRequestData]) -> None:
        """Enter requests, greedy ones too: among drawing rows they need their temperature of 0."""
        for new in new_requests:
            p = new.sampling_params
            penalised = p.repetition_penalty != 1.0
            self.draws[new.slot] = penalised or not p.greedy
            self.special[new.slot] = p.logprobs is not None or (
                msgspec.structs.replace(p, repetition_penalty=1.0).edits_logits
            )
            self._ends.pop(new.slot, None)
            if penalised:
                self._ends[new.slot] = 0
                bits = token_bits(new.token_ids, self.vocab_limit)
                self.seen[new.slot] = to_device(torch.from_numpy(bits), self.seen.device)
        params = [n.sampling_params for n in new_requests]
        slots = torch.tensor([n.slot for n in new_requests])
        floats = torch.tensor(
            [[p.temperature, p.top_p, p.min_p, p.repetition_penalty] for p in params]
        )
        ints = torch.tensor(
            [[p.top_k, n.num_prompt_tokens] for p, n in zip(params, new_requests, strict=True)],
            dtype=torch.int32,
        )
        seeds = torch.from_numpy(np.array([n.seed for n in new_requests], np.uint64).view(np.int64))
        slots, floats, ints, seeds = (
            to_device(x, self.seeds.device) for x in (slots, floats, ints, seeds)
        )
        self.floats[:, slots] = floats.t()
        self.ints[:, slots] = ints.t()
        self.seeds[slots] = seeds

    def follow(self, rows: Sequence[ScheduledRow], token_ids: torch.Tensor) -> None:
        """Before a step: forget the tokens that were sampled and then dropped (a grammar came into
        force), of which a row tells by sampling the same position again. ``token_ids`` is the table
        of all slots."""
        for row in rows:
            if not row.samples or row.slot not in self._ends:
                continue
            end = row.num_computed_tokens + row.num_scheduled_tokens
            if end <= self._ends[row.slot]:
                self._recount(row.slot, token_ids[row.slot, :end].long())
            self._ends[row.slot] = end

    def _recount(self, slot: int, token_ids: torch.Tensor) -> None:
        size = self.seen.shape[1] * 32
        bits = torch.zeros(size + 1, dtype=torch.int32, device=token_ids.device)
        bits[token_ids.clamp_max(size)] = 1  # the last place is for ids that no logit stands for
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        self.seen[slot] = (bits[:-1].view(-1, 32) << shifts).sum(1, dtype=torch.int32)

    def see(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Set the bits of sampled ``token_ids`` [n] (-1: none) of different ``slots`` [n]."""
        ids = token_ids.clamp_min(0)
        self.seen[slots, ids // 32] |= torch.ones_like(ids, dtype=torch.int32) << (ids % 32).int()

    def ending(self, slots: Sequence[int]) -> Ending:
        """Return how a step must end in which ``slots`` sample."""
        if any(self.special[slot] for slot in slots):
            return Ending.LOGITS
        return Ending.DRAW if any(self.draws[slot] for slot in slots) else Ending.GREEDY

    def rows(self, slots: torch.Tensor, num_tokens: torch.Tensor) -> tuple[Any, ...]:
        """Return (temperature, top_k, top_p, min_p, seeds, output positions, penalties) of
        ``slots`` [n], whose requests have ``num_tokens`` [n] tokens so far."""
        temperature, top_p, min_p, repetition = self.floats.index_select(1, slots).unbind()
        top_k, num_prompt_tokens = self.ints.index_select(1, slots).unbind()
        seeds = self.seeds.index_select(0, slots)
        penalties = RepetitionPenalties(repetition, slots, self.seen)
        return temperature, top_k, top_p, min_p, seeds, num_tokens - num_prompt_tokens, penalties


def _make_stage(max_rows: int, vocab_limit: int, **where: Any) -> _Stage:
    short = {"dtype": torch.int32, **where}
    return _Stage(
        torch.full((max_rows, 2), -1, **short),
        torch.full((max_rows, 2), -1, **short),
        torch.zeros(max_rows + 1, **short),
        torch.full((max_rows,), -1, **short),
        torch.zeros(max_rows, cdiv(vocab_limit, 32), **short),
        torch.zeros(max_rows, dtype=torch.int64, **where),
    )


def _bucket(sizes: Sequence[int], n: int) -> int:
    return next(s for s in sizes if s >= n)
