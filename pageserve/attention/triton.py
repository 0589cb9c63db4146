"""Attention over the paged pool by Triton kernels: decodes, prompt chunks and any mix of them.

Rows of one query token go to the decode kernel, whose work is cut evenly over the device whatever
the lengths; longer rows go to the prefill kernel. Which row is which is read on the device, so a
step is one launch, two if it mixes, and decode steps replay in CUDA graphs.

A long chunk of a prompt may go to the library instead, whose kernels are faster where the work is
one large causal square: see :meth:`TritonBackend.long_rows`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from pageserve.attention import AttentionMetadata
from pageserve.kernels.launch import compiling
from pageserve.kernels.paged_decode import (
    DecodePlan,
    paged_decode,
    plan_cascade,
    plan_decode,
    rope_and_paged_decode,
)
from pageserve.kernels.paged_prefill import paged_prefill
from pageserve.kernels.rope_cache import rope_and_cache
from pageserve.messages import ScheduledRow
from pageserve.utils import cdiv

LONG_QUERY = 1024  # tokens from which a chunk may go to the library
SQUARE = 1024  # its length is padded to a multiple: the library prepares for each length it meets
MAX_SQUARE = 16384  # that is timed at start-up
PrefillConfig = tuple[int, int, int, int]  # see paged_prefill
PREFILL_CONFIGS: list[PrefillConfig] = [(128, 64, 4, 4), (128, 64, 8, 3), (128, 128, 8, 2)]


class LongRow(NamedTuple):
    """A row whose attention the library computes."""

    row: int
    start: int  # of its query tokens in the flat batch
    num_tokens: int
    seq_len: int
    slot: int


@dataclass
class StepPlan:
    """What the layers of a step share; what it takes the pool to know is filled in later."""

    row_slots: torch.Tensor | None  # [num_rows] int32: block_table is a table of slots
    long_rows: Sequence[LongRow] = ()
    prefill_config: PrefillConfig | None = None
    cascade: bool = False  # decodes: rows may begin with the same blocks, which are read once
    decode: DecodePlan | None = None
    prefill_slots: torch.Tensor | None = None  # row_slots, -1 for long rows
    kv_rows: list[torch.Tensor] = field(default_factory=list)  # per long row, see _square_rows


class TritonBackend:
    """Paged attention on CUDA; on the CPU it runs under Triton's interpreter, for tests."""

    supports_cuda_graph = True
    fuses_rope = True

    prefill_config: PrefillConfig | None = None  # None: the kernel's own
    # Time of the library for a causal square over that of the paged kernel, by the square's size.
    library_costs: Mapping[int, float] = MappingProxyType({})
    times: Mapping[str, float] = MappingProxyType({})  # ms, what was measured

    def build_metadata(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        row_slots: torch.Tensor | None = None,
        long_rows: Sequence[LongRow] = (),
        cascade: bool = False,
    ) -> AttentionMetadata:
        """Describe a step. With ``row_slots`` [num_rows], row r's blocks are
        ``block_table[row_slots[r]]``, so the table of all slots serves without a gather;
        ``long_rows`` are left to the library (not in a CUDA graph, which they would be fixed in).
        ``cascade`` is for steps of decodes only: what consecutive rows have in common is read once.
        """
        config = self.prefill_config if max_query_len > PREFILL_CONFIGS[0][0] else None
        return AttentionMetadata(
            query_start_loc,
            seq_lens,
            block_table,
            slot_mapping,
            max_query_len,
            max_seq_len,
            StepPlan(row_slots, long_rows, config, cascade),
        )

    def narrow(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Describe the step as one of decodes: the last query token of each row."""
        return replace(metadata, max_query_len=1, plan=StepPlan(metadata.plan.row_slots))

    def long_rows(self, rows: Iterable[ScheduledRow]) -> list[LongRow]:
        """Return the rows that the library computes faster.

        It knows causal squares only, so it computes those queries too that an earlier step did,
        and padding: a row qualifies if enough of its square is wanted.
        """
        if not self.library_costs:
            return []
        rows = list(rows)
        starts = accumulate((r.num_scheduled_tokens for r in rows), initial=0)
        found = []
        for i, (row, start) in enumerate(zip(rows, starts, strict=False)):
            first, count = row.num_computed_tokens, row.num_scheduled_tokens
            seq_len = first + count
            wanted = seq_len**2 - first**2
            square = _square(seq_len)
            if count >= LONG_QUERY and wanted > self._library_cost(square) * square**2:
                found.append(LongRow(i, start, count, seq_len, row.slot))
        return found

    def _library_cost(self, square: int) -> float:
        """Return the cost of a square between those measured, whose logarithms it lies between."""
        sizes = list(self.library_costs)
        costs = list(self.library_costs.values())
        return float(np.interp(math.log(square), [math.log(s) for s in sizes], costs))

    def measure(self, kv_cache: torch.Tensor, num_heads: int, max_query_len: int) -> None:
        """Time prefills of 16-bit numbers, up to ``max_query_len`` tokens, on the first layer's
        pool, of which nothing is written; set ``prefill_config`` and ``library_costs``."""
        pool = kv_cache[0]
        _, num_blocks, num_kv_heads, block_size, head_dim = pool.shape
        if pool.dtype == torch.float32:
            return
        longest = min(num_blocks * block_size, max_query_len, MAX_SQUARE) // SQUARE * SQUARE
        if longest == 0:
            return
        device, scale = pool.device, head_dim**-0.5
        query = torch.randn(longest, num_heads, head_dim, dtype=pool.dtype, device=device)
        out = torch.empty_like(query)
        blocks = torch.arange(cdiv(longest, block_size), dtype=torch.int32, device=device)[None]
        slots = torch.zeros(16, dtype=torch.int32, device=device)

        def paged(length: int, prompts: int, config: PrefillConfig) -> Callable[[], object]:
            # Sixteen rows, most of them empty: what a step compiles.
            starts = torch.arange(17, dtype=torch.int32, device=device) * (length // prompts)
            starts = starts.clamp_max(length)
            return lambda: paged_prefill(
                query[:length], pool, blocks, starts, starts.diff(), length, scale,
                row_slots=slots, skip_decodes=True, out=out, config=config,
            )  # fmt: skip

        usual = min(longest, 8192)
        configs = {c: _time_tile(paged(usual, 4, c)) for c in PREFILL_CONFIGS}
        self.prefill_config = min(PREFILL_CONFIGS, key=configs.__getitem__)
        self.times = {f"4 prompts of {usual // 4} {c}": t for c, t in configs.items()}
        costs = {}
        for size in sorted({_square(longest // 8), _square(longest // 2), longest}):
            row = LongRow(0, 0, size, size, 0)
            kv_rows = _square_rows(row, blocks, num_kv_heads, block_size)
            library = _time(
                functools.partial(_attend_square, query, pool, row, kv_rows, scale, out)
            )
            kernel = _time(paged(size, 1, self.prefill_config))
            costs[size] = library / max(kernel, 1e-6)
            self.times |= {f"{size}, library": library, f"{size}, paged": kernel}
        if min(costs.values()) < 1:
            self.library_costs = costs

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Return the causal attention of every row, [num_tokens, num_heads, head_dim]."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        tokens, rows = query.shape[0], metadata.seq_lens.shape[0]
        if metadata.max_query_len == 1:
            return self._decode(query, kv_cache, metadata, scale, out, mixed=False)
        mixed = tokens != rows * metadata.max_query_len  # else no row has a single token
        if mixed:
            self._decode(query, kv_cache, metadata, scale, out, mixed=True)
        slots = metadata.plan.row_slots
        if metadata.plan.long_rows:
            slots = self._attend_long_rows(query, kv_cache, metadata, scale, out)
        return paged_prefill(
            query,
            kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.max_query_len,
            scale,
            row_slots=slots,
            skip_decodes=mixed,
            out=out,
            config=metadata.plan.prefill_config,
        )

    def begin_step(
        self, metadata: AttentionMetadata, kv_cache: torch.Tensor, num_heads: int
    ) -> None:
        """Cut the work of a step of decodes, some kernels ahead of the first that relies on it."""
        if metadata.max_query_len == 1:
            self._decode_plan(metadata, kv_cache, num_heads, kv_cache.dtype, None)

    def rope_and_forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        q_norm_weight: torch.Tensor | None,
        k_norm_weight: torch.Tensor | None,
        eps: float,
        narrowed: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Rotate, store and attend; one launch for a step of decodes only."""
        num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        norms = (q_norm_weight, k_norm_weight, eps)
        if metadata.max_query_len == 1:
            assert metadata.plan.decode is not None, "begin_step comes first"
            return rope_and_paged_decode(
                qkv,
                kv_cache,
                metadata.block_table,
                metadata.seq_lens,
                cos_sin,
                scale,
                metadata.plan.decode,
                num_heads,
                metadata.plan.row_slots,
                *norms,
            )
        query = rope_and_cache(
            qkv,
            positions,
            cos_sin,
            kv_cache,
            metadata.slot_mapping,
            num_heads,
            num_kv_heads,
            *norms,
        )
        if narrowed is not None:
            query, metadata = query[metadata.last_tokens], narrowed
        return self.forward(query, kv_cache, metadata, scale)

    def _attend_long_rows(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write the attention of the long rows to ``out``; return the slots of the others."""
        step: StepPlan = metadata.plan
        if step.prefill_slots is None:
            assert step.row_slots is not None
            num_kv_heads, block_size = kv_cache.shape[2:4]
            step.prefill_slots = step.row_slots.clone()
            for row in step.long_rows:
                step.prefill_slots[row.row] = -1
                step.kv_rows.append(
                    _square_rows(row, metadata.block_table, num_kv_heads, block_size)
                )
        for row, kv_rows in zip(step.long_rows, step.kv_rows, strict=True):
            _attend_square(query, kv_cache, row, kv_rows, scale, out)
        return step.prefill_slots

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        out: torch.Tensor,
        mixed: bool,
    ) -> torch.Tensor:
        query_start_loc = metadata.query_start_loc if mixed else None
        plan = self._decode_plan(metadata, kv_cache, query.shape[1], query.dtype, query_start_loc)
        return paged_decode(
            query,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            scale,
            plan,
            row_slots=metadata.plan.row_slots,
            query_start_loc=query_start_loc,
            out=out,
        )

    def _decode_plan(
        self,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        num_heads: int,
        dtype: torch.dtype,
        query_start_loc: torch.Tensor | None,
    ) -> DecodePlan:
        """Return the cut of the step's decode work, made by who asks first."""
        step: StepPlan = metadata.plan
        if step.decode is None:
            num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
            shape = (num_heads, num_kv_heads, head_dim, dtype)
            cascade = None
            if step.cascade:
                cascade = plan_cascade(
                    metadata.seq_lens, metadata.block_table, block_size, *shape, step.row_slots
                )
            step.decode = plan_decode(metadata.seq_lens, *shape, query_start_loc, cascade=cascade)
        return step.decode


def _square(seq_len: int) -> int:
    return cdiv(seq_len, SQUARE) * SQUARE


def _square_rows(
    row: LongRow, block_table: torch.Tensor, num_kv_heads: int, block_size: int
) -> torch.Tensor:
    """Return the rows [num_kv_heads * square] of a row's tokens in a layer's pool, seen as
    [2, num_blocks * num_kv_heads * block_size, head_dim]; padding repeats the last token."""
    device = block_table.device
    position = torch.arange(_square(row.seq_len), device=device).clamp_max_(row.seq_len - 1)
    block = block_table[row.slot][position // block_size].long()
    heads = torch.arange(num_kv_heads, device=device)[:, None]
    return ((block * num_kv_heads + heads) * block_size + position % block_size).flatten()


def _attend_square(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    row: LongRow,
    kv_rows: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Compute a row's attention by the library, as the last queries of a causal square."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, size = kv_cache.shape[2], _square(row.seq_len)
    key, value = kv_cache.view(2, -1, head_dim).index_select(1, kv_rows)
    key, value = (x.view(1, num_kv_heads, size, head_dim) for x in (key, value))
    tokens = slice(row.start, row.start + row.num_tokens)
    wanted = slice(row.seq_len - row.num_tokens, row.seq_len)
    if row.start + size <= query.shape[0] and row.seq_len == row.num_tokens:
        # What lies behind the row in the batch serves as padding.
        square = query[row.start : row.start + size].transpose(0, 1)[None]
    else:
        # Token after token like the query, and so is the result: copies of whole lines.
        padded = query.new_empty(size, num_heads, head_dim)
        padded[wanted] = query[tokens]
        padded[: wanted.start] = padded[wanted.stop :] = 0
        square = padded.transpose(0, 1)[None]
    attended = functional.scaled_dot_product_attention(
        square, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
    out[tokens] = attended[0, :, wanted].transpose(0, 1)


def _time_tile(run: Callable[[], object]) -> float:
    """Return :func:`_time`, infinity for a tile that is too large for the device."""
    try:
        return _time(run)
    except OutOfResources:
        return float("inf")


def _time(run: Callable[[], object], repeats: int = 5) -> float:
    """Return the least time in ms of a few runs on the GPU, after one to compile and prepare."""
    run()
    if compiling():
        return 0.0
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)
