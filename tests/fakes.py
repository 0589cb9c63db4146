"""An engine that says what a test tells it to, and a byte-level tokenizer to say it with."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pageserve.engine.client import EngineDeadError, OutputSink
from pageserve.messages import (
    ENGINE_DEAD,
    AddRequest,
    EngineReady,
    LoadProgress,
    RequestOutput,
    RequestProgress,
    SchedulerStats,
    StepStats,
    TokenLogprobs,
)
from pageserve.tokenizer import Tokenizer

WORDS = ("Hello", " world", " the", "是", "STOP")
SPECIALS = ("<|end|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Script = Sequence[int] | Callable[[AddRequest], Sequence[int]]


def byte_tokenizer(
    chat_template: str | None = TEMPLATE, added: Sequence[str] = (), special: Sequence[str] = ()
) -> Tokenizer:
    """A token for each byte (ids 0 to 255), a few words after them, then three special tokens, then
    those ``added``, of which the ``special`` ones are hidden from text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    backend.add_tokens(
        [AddedToken(token, special=token in special, normalized=False) for token in added]
    )
    templates = {} if chat_template is None else {"default": chat_template}
    return Tokenizer(backend, {"eos_token": "<|im_end|>"}, templates)


def _byte_of(char: str) -> int:
    """The byte that GPT-2's printable alphabet writes as ``char``."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return ord(char) if ord(char) in plain else rest[ord(char) - 256]


class ScriptedEngine:
    """An :class:`pageserve.engine.client.EngineClient` that emits ``script``, then EOS.

    A step emits ``tokens_per_step`` tokens of each running request after ``step_delay`` seconds.
    ``fail_at`` makes a request end as an engine error before its token of that index; ``die_at``
    kills the whole engine there. ``held`` set means that nothing runs. ``num_cached`` is what the
    prefix cache claims to know of each prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script | str = "Hello world",
        *,
        max_model_len: int = 4096,
        num_kv_blocks: int = 1024,
        max_num_seqs: int = 64,
        tokens_per_step: int = 1,
        step_delay: float = 0.0,
        fail_at: int | None = None,
        die_at: int | None = None,
        error: str = "NaN in the logits",
        num_cached: int = 0,
        loaded: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.script: Script = (
            tokenizer.encode(script, add_special_tokens=False)
            if isinstance(script, str)
            else script
        )
        self.facts = EngineReady(
            max_model_len=max_model_len,
            vocab_size=tokenizer.size + 16,
            eos_token_ids=[tokenizer.eos_token_id or 0],
            block_size=16,
            num_kv_blocks=num_kv_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            dtype="float32",
            device="cpu",
            attention_backend="torch_blockwise",
            fingerprint="fp_0123456789",
            memory_bytes={"weights": 1000, "kv_cache": 2000},
        )
        self.ready: EngineReady | None = self.facts if loaded else None
        self.progress = LoadProgress("reading weights", 1, 4)
        self.startup_seconds = {"starting": 0.25}
        self.stats = SchedulerStats()
        self.on_step: Callable[[StepStats], None] = lambda step: None
        self.dead: str | None = None
        self.busy_since: float | None = None
        self.tokens_per_step = tokens_per_step
        self.step_delay = step_delay
        self.fail_at = fail_at
        self.die_at = die_at
        self.error = error
        self.num_cached = num_cached
        self.held = False
        self.deaf = False  # questions are never answered
        self.num_resets = 0
        self.requests: list[AddRequest] = []  # all that were ever submitted
        self.aborted: list[str] = []  # ids aborted while they ran
        self._running: dict[str, _Run] = {}
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.ready = self.facts

    async def stop(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()

    @property
    def num_live(self) -> int:
        """Requests the engine still works on."""
        return len(self._running)

    def submit(self, request: AddRequest, sink: OutputSink) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        script = self.script(request) if callable(self.script) else self.script
        self.requests.append(request)
        self._running[request.request_id] = _Run(self, request, list(script), sink)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.get_running_loop().create_task(self._loop())

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            run = self._running.get(request_id)
            if run is not None:
                self.forget(request_id)
                run.sink(RequestOutput(request_id, [], "abort"))

    def forget(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    async def get_progress(self, request_ids: list[str] | None = None) -> list[RequestProgress]:
        await self._answer()
        ids = list(self._running) if request_ids is None else request_ids
        runs = [self._running[i] for i in ids if i in self._running]
        waiting = [run for run in self._running.values() if not run.steps]
        return [
            RequestProgress(
                run.request.request_id,
                0 if run.steps else waiting.index(run) + 1,
                len(run.request.prompt_token_ids),
                self.num_cached,
                len(run.request.prompt_token_ids) if run.steps else 0,
                run.num_emitted,
            )
            for run in runs
        ]

    async def reset_prefix_cache(self) -> int:
        await self._answer()
        self.num_resets += 1
        return 7

    async def _answer(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self.deaf:
            await asyncio.Event().wait()

    def die(self, message: str = "killed") -> None:
        """Lose the engine process."""
        self.dead = message
        running, self._running = self._running, {}
        for request_id, run in running.items():
            run.sink(RequestOutput(request_id, [], "error", error=ENGINE_DEAD))

    async def _loop(self) -> None:
        while self._running:
            await asyncio.sleep(self.step_delay)
            if not self.held:
                self._step()

    def _step(self) -> None:
        runs = list(self._running.values())[: self.facts.max_num_seqs]
        outputs = [(run, run.step()) for run in runs]
        if self.dead is not None:
            return
        old = self.stats
        for run, output in outputs:
            if output.finish_reason is not None:
                del self._running[run.request.request_id]
        fresh = [run for run, _ in outputs if run.steps == 1]
        self.stats = SchedulerStats(
            num_running=min(len(self._running), self.facts.max_num_seqs),
            num_waiting=max(0, len(self._running) - self.facts.max_num_seqs),
            num_free_blocks=self.facts.num_kv_blocks - len(self._running),
            num_used_blocks=len(self._running),
            num_scheduled_tokens=sum(run.num_scheduled for run, _ in outputs),
            prefix_cache_queries_total=old.prefix_cache_queries_total
            + sum(len(run.request.prompt_token_ids) for run in fresh),
            prefix_cache_hits_total=old.prefix_cache_hits_total + self.num_cached * len(fresh),
            steps_total=old.steps_total + 1,
        )
        self.on_step(StepStats(self.stats.num_scheduled_tokens, 8, 0.001, 0.002, 0.003, 0.004))
        for run, output in outputs:
            if run.request.request_id in self._running or output.finish_reason is not None:
                run.sink(output)


class _Run:
    """One request inside the scripted engine."""

    def __init__(
        self, engine: ScriptedEngine, request: AddRequest, script: list[int], sink: OutputSink
    ) -> None:
        self.engine = engine
        self.request = request
        self.script = script
        self.sink = sink
        self.steps = 0
        self.num_emitted = 0
        self.num_scheduled = 0
        self.scheduled_time = 0.0

    def step(self) -> RequestOutput:
        self.steps += 1
        if self.steps == 1:
            self.scheduled_time = time.monotonic()
            self.num_scheduled = len(self.request.prompt_token_ids)
        else:
            self.num_scheduled = 1
        output = RequestOutput(
            self.request.request_id,
            [],
            num_cached_tokens=self.engine.num_cached,
            scheduled_time=self.scheduled_time,
            new_logprobs=None if self.request.sampling_params.logprobs is None else [],
        )
        params, prompt = self.request.sampling_params, self.request.prompt_token_ids
        if self.steps == 1 and params.prompt_logprobs is not None:
            output.prompt_logprobs = [_logprobs(t, params.prompt_logprobs) for t in prompt[1:]]
        if params.max_tokens == 0:
            output.finish_reason = "length"
        for _ in range(self.engine.tokens_per_step):
            if output.finish_reason is None:
                self._token(output)
        return output

    def _token(self, output: RequestOutput) -> None:
        engine, params = self.engine, self.request.sampling_params
        if self.num_emitted == engine.fail_at:
            output.finish_reason, output.error = "error", engine.error
            return
        if self.num_emitted == engine.die_at:
            engine.die()
            return
        eos = engine.facts.eos_token_ids[0]
        token = self.script[self.num_emitted] if self.num_emitted < len(self.script) else eos
        self.num_emitted += 1
        output.new_token_ids.append(token)
        if output.new_logprobs is not None:
            output.new_logprobs.append(_logprobs(token, params.logprobs or 0))
        if self.num_emitted > params.min_tokens:
            if token == eos and not params.ignore_eos:
                output.finish_reason = "stop"
            elif token in params.stop_token_ids:
                output.finish_reason, output.stop_reason = "stop", token
        if output.finish_reason is None and self.num_emitted == params.max_tokens:
            output.finish_reason = "length"


def _logprobs(token: int, k: int) -> TokenLogprobs:
    """The token itself at -0.5 as the second best, other ids around it."""
    others = [i for i in range(k + 1) if i != token]
    top = [others[0], token, *others[1:]][:k] if k else []
    values = [-0.25, -0.5, *(-1.0 - i for i in range(k))][:k]
    return TokenLogprobs(token, -0.5, top, values, rank=2)


def scripted(text: Any) -> Callable[[AddRequest], list[int]]:
    """Say ``text`` back in bytes, whatever was asked."""
    data = text.encode() if isinstance(text, str) else bytes(text)
    return lambda request: list(data)
