"""Runs a step: request table, flat batch, forward pass, sampling, token feedback.

The only caller of the model, the attention planner and the sampler. It sees slots and counts,
never a request id, a queue or a client.
"""

import itertools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from pageserve.attention import AttentionBackend
from pageserve.messages import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from pageserve.models.decoder import DecoderForCausalLM
from pageserve.worker.input_batch import InputBatch
from pageserve.worker.prompt_logprobs import PromptScores, score_prompts, scoring_rows
from pageserve.worker.request_states import RequestStates, to_device
from pageserve.worker.sampler import Sampler, SamplerOutput
from pageserve.worker.sampling_metadata import build_sampling_metadata


@dataclass(frozen=True)
class StepHandle:
    """A launched step. Holds the tensors alive until the results were fetched."""

    step_id: int
    sampled: SamplerOutput | None  # on the host once `copied` has passed; None: no row samples
    wants_logprobs: list[int]  # alternatives wanted per sampling row, -1 for none
    copied: torch.cuda.Event | None
    samples: list[bool] | None = None  # which entries of `sampled` count; None: all
    started: torch.cuda.Event | None = None  # these two only where steps are timed
    ended: torch.cuda.Event | None = None
    prompt_scores: PromptScores | None = None  # on the host, too

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its sampled ids and log probabilities."""
        if self.copied is not None:
            self.copied.synchronize()
        scores = None if self.prompt_scores is None else self.prompt_scores.to_lists()
        if self.sampled is None:
            return ModelRunnerOutput(self.step_id, [], None, scores)
        token_ids = self.sampled.token_ids.tolist()
        if self.samples is not None:
            token_ids = list(itertools.compress(token_ids, self.samples))
        return ModelRunnerOutput(self.step_id, token_ids, self._logprob_lists(token_ids), scores)

    def _logprob_lists(self, token_ids: list[int]) -> list[TokenLogprobs | None] | None:
        sampled = self.sampled
        assert sampled is not None
        if sampled.logprobs is None:
            return None
        assert sampled.top_token_ids is not None and sampled.top_logprobs is not None
        columns = zip(
            token_ids,
            sampled.logprobs.tolist(),
            sampled.top_token_ids.tolist(),
            sampled.top_logprobs.tolist(),
            self.wants_logprobs,
            strict=True,
        )
        return [
            TokenLogprobs(token_id, logprob, top_ids[:k], top[:k]) if k >= 0 else None
            for token_id, logprob, top_ids, top, k in columns
        ]


Tensors = TypeVar("Tensors", SamplerOutput, PromptScores)


def _to_host(result: Tensors) -> Tensors:
    """Return a copy in pinned memory, valid once the stream got there (record an event)."""
    host = {}
    for field in fields(result):
        x = getattr(result, field.name)
        if isinstance(x, torch.Tensor):
            host[field.name] = torch.empty_like(x, device="cpu", pin_memory=True)
            host[field.name].copy_(x, non_blocking=True)
    return replace(result, **host)


if TYPE_CHECKING:  # imports Triton, which only CUDA machines need to have
    from pageserve.worker.cuda_graphs import CUDAGraphRunner


class ModelRunner:
    """Owns the request table; borrows the model and the KV pool from the worker."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        backend: AttentionBackend,
        kv_cache: torch.Tensor,  # [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_limit: int,
        eos_token_ids: list[int],
        timed: bool = False,
    ) -> None:
        """``timed`` steps carry events that tell when the device ran them (CUDA)."""
        self.model = model
        self.backend = backend
        self.kv_cache = kv_cache
        self.vocab_limit = vocab_limit
        self.eos_token_ids = eos_token_ids
        self.device = kv_cache.device
        self.states = RequestStates(
            max_num_seqs, max_model_len, kv_cache.shape[4], vocab_limit, self.device
        )
        self.timed = timed
        self.sampler = Sampler()
        self.graphs: CUDAGraphRunner | None = None  # set by the worker where Triton kernels run

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Launch a step; on an accelerator this returns before the step has run."""
        if not self.timed:
            return self._launch(step)
        started = self._event()
        handle = self._launch(step)
        return replace(handle, started=started, ended=handle.copied or self._event())

    def _launch(self, step: SchedulerOutput) -> StepHandle:
        self.states.apply(step, self.kv_cache)
        scoring = scoring_rows(step.rows, self.states)
        if self.graphs is not None:
            self.graphs.admit(step.new_requests)
            if not scoring:
                return self._execute_graph(step, self.graphs)
        batch = InputBatch.build(step.rows, self.states)
        hidden = self.forward(batch, last_only=not scoring)
        scores = None
        if scoring:
            compute_logits = self.model.compute_logits
            scores = score_prompts(scoring, hidden, compute_logits, self.states, self.vocab_limit)
            hidden = hidden[batch.query_start_loc[1:] - 1]
        if not len(batch.sampling_rows):
            return self._handle(step.step_id, None, [], scores)
        logits = self.model.compute_logits(hidden[batch.sampling_rows])
        return self._sample(step, logits, scores)

    def forward(self, batch: InputBatch, last_only: bool = False) -> torch.Tensor:
        """Run the model; returns the hidden states [num_tokens, hidden_size], or with ``last_only``
        those of each row's last token [num_rows, hidden_size]."""
        metadata = self.backend.build_metadata(
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            batch.slot_mapping,
            batch.max_query_len,
            batch.max_seq_len,
        )
        return self.model(
            batch.input_ids, batch.positions, self.kv_cache, metadata, last_only=last_only
        )

    def _execute_graph(self, step: SchedulerOutput, graphs: "CUDAGraphRunner") -> StepHandle:
        key = graphs.key_for(step)
        result = graphs.replay(key, step)
        samples = [row.samples for row in step.rows]
        if key.leaves_logits:
            sampling = torch.tensor([i for i, there in enumerate(samples) if there])
            return self._sample(step, result[to_device(sampling, self.device)])
        return StepHandle(step.step_id, SamplerOutput(result), [], self._event(), samples)

    def _sample(
        self, step: SchedulerOutput, logits: torch.Tensor, scores: PromptScores | None = None
    ) -> StepHandle:
        """Choose a token for every row that samples, whose ``logits`` these are."""
        rows = [
            self.states.row_sampling(
                r.slot, r.num_computed_tokens + r.num_scheduled_tokens, step.bitmasks.get(r.slot)
            )
            for r in step.rows
            if r.samples
        ]
        metadata = build_sampling_metadata(
            rows, self.states.token_ids, self.vocab_limit, self.eos_token_ids, self.device
        )
        sampled = self.sampler(logits.float(), metadata)
        slots = self.states.record(rows, sampled.token_ids)
        if self.graphs is not None:
            self.graphs.record(slots, sampled.token_ids)
        wants = [-1 if (k := row.params.logprobs) is None else k for row in rows]
        return self._handle(step.step_id, sampled, wants, scores)

    def _handle(
        self,
        step_id: int,
        sampled: SamplerOutput | None,
        wants: list[int],
        scores: PromptScores | None,
    ) -> StepHandle:
        if self.device.type != "cuda" or (sampled is None and scores is None):
            return StepHandle(step_id, sampled, wants, None, prompt_scores=scores)
        sampled = None if sampled is None else _to_host(sampled)
        scores = None if scores is None else _to_host(scores)
        return StepHandle(step_id, sampled, wants, self._event(), prompt_scores=scores)

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=self.timed)
        event.record()
        return event
