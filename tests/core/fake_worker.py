"""A worker without a model, a driver without a process, and one-call builders for scheduler tests.

The fake worker keeps a pool of (token, position) pairs and writes and reads it through the block
tables exactly as a real worker would. What it reads back must be the request's true tokens, so a
wrong block table, copy, shared prefix or preemption cannot go unnoticed.
"""

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pageserve.core.scheduler import Scheduler
from pageserve.core.structured_output import StructuredOutputManager
from pageserve.messages import (
    AddRequest,
    ModelRunnerOutput,
    RequestOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from pageserve.sampling_params import SamplingParams

VOCAB_SIZE = 50
EOS = 0

NextToken = Callable[[Sequence[int]], int]


def next_token(token_ids: Sequence[int]) -> int:
    """The model: a pure function of the whole prefix."""
    return zlib.crc32(array("I", token_ids).tobytes()) % VOCAB_SIZE


class Alphabet:
    """What the tokens say to a grammar: EOS, then a character each."""

    CHARS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]:,.<> "-+'
    eos_token_id = EOS
    bos_token_id = None
    tokens = (b"\xff<eos>", *(c.encode() for c in CHARS))

    def __call__(self, text: str | bytes) -> list[int]:
        return [1 + self.CHARS.index(c) for c in (text if isinstance(text, str) else text.decode())]


assert len(Alphabet.tokens) == VOCAB_SIZE
TOKENIZER = LLTokenizer(TokenizerWrapper(Alphabet()), n_vocab=VOCAB_SIZE, eos_token=EOS)


def compile_grammar(text: str) -> LLMatcher:
    matcher = LLMatcher(TOKENIZER, text, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(Alphabet.CHARS[t - 1] for t in token_ids if t != EOS)


def choose(token: int, mask: bytes | None) -> int:
    """The model's choice, or the next legal one above it, in a circle; -1 if there is none."""
    if token < 0:
        return token
    for candidate in ((token + i) % VOCAB_SIZE for i in range(VOCAB_SIZE)):
        if mask is None or mask[candidate // 8] >> candidate % 8 & 1:
            return candidate
    return -1


def generate(request: AddRequest, limit: int, model: NextToken = next_token) -> list[int]:
    """The tokens a request alone must get, ``limit`` bounding prompt + output."""
    params, matcher = request.sampling_params, None
    if request.grammar is not None and not request.grammar_trigger_ids:
        matcher = compile_grammar(request.grammar)
    tokens, output = list(request.prompt_token_ids), []
    while True:
        mask = None
        if matcher is not None:
            mask = legal(matcher, params.ignore_eos)
            if not any(mask):  # the grammar has ended
                if not request.grammar_trigger_ids:
                    return output
                matcher = mask = None
        if len(output) == params.max_tokens or len(tokens) >= limit:
            return output
        token = choose(model(tokens), mask)
        tokens.append(token)
        output.append(token)
        stops = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        if stops and len(output) >= params.min_tokens:
            return output
        if matcher is not None:
            matcher.consume_token(token)
        elif token in request.grammar_trigger_ids:
            assert request.grammar is not None
            matcher = compile_grammar(request.grammar)


def legal(matcher: LLMatcher, ignore_eos: bool) -> bytes:
    """The mask of the next token; all zero if nothing but EOS could come."""
    mask = bytearray(matcher.compute_bitmask())
    if ignore_eos or not any([mask[0] & ~1, *mask[1:]]):
        mask[0] &= ~1
    return bytes(mask)


class FakeWorker:
    """Executes steps in the order they are launched, on a pool of (token, position) pairs."""

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, model: NextToken = next_token
    ) -> None:
        self.block_size = block_size
        self.model = model
        self.pool: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.token_ids: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.block_tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.params: list[SamplingParams | None] = [None] * max_num_seqs
        self.num_prompt_tokens = [0] * max_num_seqs
        self.num_tokens_computed = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for new in step.new_requests:
            self.token_ids[new.slot] = list(new.token_ids)
            self.block_tables[new.slot] = list(new.block_ids)
            self.params[new.slot] = new.sampling_params
            self.num_prompt_tokens[new.slot] = new.num_prompt_tokens
        entered = {new.slot for new in step.new_requests}
        self._copy(step)
        for row in step.rows:
            assert not (row.slot in entered and row.new_block_ids), "blocks announced twice"
            self.block_tables[row.slot] += row.new_block_ids
        self._write(step)
        output = self._read_and_sample(step)
        output.prompt_logprobs = self._score(step) or None
        return output

    def address(self, slot: int, position: int) -> int:
        block_id = self.block_tables[slot][position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def _copy(self, step: SchedulerOutput) -> None:
        """All copies at once, as a parallel kernel may do it."""
        sources = [u.src_block_id for u in step.block_updates]
        targets = [u.dst_block_id for u in step.block_updates]
        assert len(set(targets)) == len(targets) and not set(targets) & set(sources)
        size = self.block_size
        for update, source, target in zip(step.block_updates, sources, targets, strict=True):
            self.block_tables[update.slot][update.index] = target
            self.pool[target * size : (target + 1) * size] = self.pool[
                source * size : (source + 1) * size
            ]

    def _write(self, step: SchedulerOutput) -> None:
        assert step.rows and len({row.slot for row in step.rows}) == len(step.rows)
        written: set[int] = set()
        for row in step.rows:
            assert row.num_scheduled_tokens > 0
            end = row.num_computed_tokens + row.num_scheduled_tokens
            if row.slot in step.bitmasks:  # a token sampled before its grammar was in force
                del self.token_ids[row.slot][end:]
            assert row.samples == (end == len(self.token_ids[row.slot]))
            for position in range(row.num_computed_tokens, end):
                address = self.address(row.slot, position)
                assert address not in written, "two rows write one slot"
                written.add(address)
                self.pool[address] = (self.token_ids[row.slot][position], position)
        self.num_tokens_computed += len(written)

    def _read_and_sample(self, step: SchedulerOutput) -> ModelRunnerOutput:
        sampled: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for row in step.rows:
            tokens = self.token_ids[row.slot]
            end = row.num_computed_tokens + row.num_scheduled_tokens
            seen = [self.pool[self.address(row.slot, p)] for p in range(end)]
            assert seen == [(tokens[p], p) for p in range(end)], "read another request's tokens"
            if row.samples:
                token = self.model(tokens)
                mask = step.bitmasks.get(row.slot)
                if mask is not None:
                    token = choose(token, mask)
                tokens.append(token)
                sampled.append(token)
                params = self.params[row.slot]
                wants = params is not None and params.logprobs is not None
                logprobs.append(TokenLogprobs(token, -0.5) if wants else None)
        return ModelRunnerOutput(step.step_id, sampled, logprobs if any(logprobs) else None)

    def _score(self, step: SchedulerOutput) -> list[list[TokenLogprobs]]:
        """The log probability of a prompt token is less its position."""
        scored = []
        for row in step.rows:
            params, last = self.params[row.slot], self.num_prompt_tokens[row.slot] - 1
            assert params is not None
            if params.prompt_logprobs is not None and row.num_computed_tokens < last:
                end = min(row.num_computed_tokens + row.num_scheduled_tokens, last)
                places = range(row.num_computed_tokens + 1, end + 1)
                tokens = self.token_ids[row.slot]
                scored.append([TokenLogprobs(tokens[p], -float(p)) for p in places])
        return scored


class Driver:
    """Runs a scheduler on a fake worker, ``depth`` steps in flight, and keeps what came out."""

    def __init__(
        self, scheduler: Scheduler, *, depth: int = 1, model: NextToken = next_token
    ) -> None:
        manager = scheduler.kv_cache_manager
        self.scheduler = scheduler
        self.depth = depth
        self.worker = FakeWorker(
            manager.block_pool.num_blocks, manager.block_size, scheduler.max_num_seqs, model
        )
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.steps: list[SchedulerOutput] = []
        self.added: dict[str, AddRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.final: dict[str, RequestOutput] = {}
        self.first: dict[str, RequestOutput] = {}

    def add(self, request: AddRequest, parent_id: str | None = None) -> RequestOutput | None:
        self.added[request.request_id] = request
        self.tokens[request.request_id] = []
        self.prompt_logprobs[request.request_id] = []
        request.parent_id = parent_id
        output = self.scheduler.add(request)
        self._collect([output] if output is not None else [])
        return output

    def abort(self, *request_ids: str) -> None:
        self._collect(self.scheduler.abort(request_ids))

    def launch(self) -> SchedulerOutput | None:
        step = self.scheduler.schedule()
        if step is not None:
            self.steps.append(step)
            self.in_flight.append((step, self.worker.execute(step)))
        return step

    def absorb(self) -> list[RequestOutput]:
        outputs = self.scheduler.update(*self.in_flight.popleft())
        self._collect(outputs)
        return outputs

    def step(self) -> list[RequestOutput]:
        """Plan and launch one step if there is one, absorb the oldest once ``depth`` are out."""
        self._collect(self.scheduler.absorb_grammars())
        launched = self.launch()
        self.scheduler.check_integrity()
        outputs: list[RequestOutput] = []
        if self.in_flight and (launched is None or len(self.in_flight) >= self.depth):
            outputs = self.absorb()
            self.scheduler.check_integrity()
        elif launched is None:
            self._collect(self.scheduler.absorb_grammars(timeout=10, idle=True))
            self.scheduler.check_integrity()
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left; more than ``max_steps`` is a hang."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work() and not self.in_flight, "requests starve"
        stats = self.scheduler.stats()
        assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
        assert stats.used_slots == stats.num_shared_blocks == 0

    def check_tokens(self) -> None:
        """Each request had one final output and exactly the tokens it must have."""
        assert self.final.keys() == self.added.keys()
        limit = min(self.scheduler.max_model_len, self.scheduler.max_pool_tokens + 1)
        for request_id, final in self.final.items():
            request, tokens = self.added[request_id], self.tokens[request_id]
            if final.finish_reason == "error":
                assert not tokens
                continue
            prompt, params = request.prompt_token_ids, request.sampling_params
            scored = [(t.token_id, t.logprob) for t in self.prompt_logprobs[request_id]]
            scores = [(token, -float(p)) for p, token in enumerate(prompt) if p]
            expected = generate(request, limit, self.worker.model)
            if final.finish_reason == "abort":
                assert tokens == expected[: len(tokens)]
                assert scored == scores[: len(scored)]
                continue
            assert scored == (scores if params.prompt_logprobs is not None else [])
            assert tokens == expected
            if final.grammar_ended:
                assert final.finish_reason == "stop"
                continue
            if params.max_tokens == 0:
                assert final.finish_reason == "length"
                continue
            ends = (EOS, *params.stop_token_ids) if not params.ignore_eos else params.stop_token_ids
            stops = tokens[-1] in ends and len(tokens) >= params.min_tokens
            assert final.finish_reason == ("stop" if stops else "length")

    def _collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.final, "output after the final one"
            self.first.setdefault(output.request_id, output)
            self.tokens[output.request_id] += output.new_token_ids
            self.prompt_logprobs[output.request_id] += output.prompt_logprobs or []
            if output.finish_reason is not None:
                self.final[output.request_id] = output


def create_scheduler(**changes: object) -> Scheduler:
    """A scheduler of 64 blocks of 4 tokens for 8 requests, unless told otherwise."""
    options: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "eos_token_ids": [EOS],
        "structured_output": StructuredOutputManager(compile_grammar, VOCAB_SIZE, [EOS]),
    }
    return Scheduler(**(options | changes))  # type: ignore[arg-type]


OUTER = ("priority", "cache_salt", "tenant", "weight", "grammar", "grammar_trigger_ids")


def create_request(
    request_id: str, prompt: Sequence[int] | int, max_tokens: int | None = 4, **changes: object
) -> AddRequest:
    """A greedy request; a prompt given as a length is made of tokens of its own."""
    if isinstance(prompt, int):
        first = zlib.crc32(request_id.encode())
        prompt = [(first + 7 * i) % 100_003 for i in range(prompt)]
    outer = {k: changes.pop(k) for k in OUTER if k in changes}
    options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | changes
    return AddRequest(request_id, list(prompt), SamplingParams(**options), 0.0, **outer)  # type: ignore[arg-type]


def create_requests(count: int, num_tokens: int, **changes: object) -> list[AddRequest]:
    """``count`` requests r0, r1, … with unlike prompts of equal length."""
    return [create_request(f"r{i}", num_tokens, **changes) for i in range(count)]  # type: ignore[arg-type]
