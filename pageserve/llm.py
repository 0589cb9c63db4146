"""Offline generation: the same engine core, in this process, without HTTP.

llm = LLM(model="SmolLM2-135M-Instruct")
for completion in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(completion.text)
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pageserve.config import CacheArgs, EngineConfig, ModelArgs, SchedulerArgs
from pageserve.engine.core import EngineCore
from pageserve.engine.output_processor import LogprobEntry, OutputProcessor
from pageserve.hub import resolve_model
from pageserve.messages import AddRequest, FinishReason, TokenLogprobs
from pageserve.sampling_params import SamplingParams, check_ids, for_choice
from pageserve.tokenizer import load_tokenizer


@dataclass
class Completion:
    """What became of one prompt. Times are seconds from the start of :meth:`LLM.generate`."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # all but the first token's
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    first_token_time: float = 0.0
    finish_time: float = 0.0


class LLM:
    """A loaded model that turns prompts into completions, batch by batch."""

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        """Load a model; ``options`` are the server's flags as keywords (``model=``, ``dtype=`` …).

        Raises TypeError on an unknown option, ``ModelError`` and ``ConfigError`` as the server.
        """
        self.config = config or _config(options)
        path = resolve_model(self.config.model.model, None)
        self.tokenizer = load_tokenizer(path, self.config.model.chat_template)
        self.engine = EngineCore(self.config)
        self.vocab_size = min(self.tokenizer.size, self.engine.ready.vocab_size)
        self._count = 0

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008
        n: int = 1,
        grammars: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt (text or token ids) ``n`` times; return all results in order.

        The n of a prompt share its blocks, and the i-th draws as one with ``seed + i`` would.
        ``grammars`` are what the texts must match, one for all or one per prompt, as
        :mod:`pageserve.grammar` takes them; a bad one is its completion's ``error``.
        Raises :class:`~pageserve.sampling_params.ParameterError` before anything runs.
        """
        start = time.monotonic()
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        assert len(every) == len(prompts), "one SamplingParams, or one per prompt"
        if grammars is None or isinstance(grammars, str):
            grammars = [grammars] * len(prompts)
        ids = [self._encode(p) for p in prompts]
        for prompt in ids:
            check_ids("prompt", prompt, self.vocab_size)
        for p in every:
            p.validate(self.vocab_size)
        completions = {}
        processors = {}
        outputs = []
        try:
            for prompt, p, grammar in zip(ids, every, grammars, strict=True):
                parent_id = None
                for i in range(n):
                    request_id = f"offline-{self._count}"
                    self._count += 1
                    request = AddRequest(
                        request_id, prompt, for_choice(p, i), start, grammar=grammar
                    )
                    request.parent_id = parent_id
                    parent_id = parent_id or request_id
                    completions[request_id] = Completion(prompt)
                    processors[request_id] = OutputProcessor(self.tokenizer, p, prompt)
                    outputs += self.engine.add(request)
            while outputs or self.engine.has_work():
                for output in outputs:
                    done = completions[output.request_id]
                    text = processors[output.request_id].process(output)
                    if text is None or done.finish_reason is not None:
                        continue
                    self._extend(done, text, time.monotonic() - start)
                    if text.finish_reason is not None and output.finish_reason is None:
                        self.engine.abort([output.request_id])  # a stop string ended it
                outputs = self.engine.step()
        except BaseException:  # Ctrl-C, too, must leave the engine fit for the next call
            self.engine.recover()
            raise
        return list(completions.values())

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        return list(prompt)

    @staticmethod
    def _extend(done: Completion, text: Any, now: float) -> None:
        if not done.token_ids:
            done.first_token_time = now
            done.num_cached_tokens = text.num_cached_tokens
        done.text += text.text
        done.token_ids += text.token_ids
        done.logprobs += [*(text.logprobs or ()), *text.end_logprobs]
        done.prompt_logprobs += text.prompt_logprobs or []
        if text.finish_reason is not None:
            done.finish_reason, done.stop_reason = text.finish_reason, text.stop_reason
            done.error, done.finish_time = text.error, now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        del self.engine


def _config(options: dict[str, Any]) -> EngineConfig:
    parts = []
    for cls in (ModelArgs, CacheArgs, SchedulerArgs):
        names = {f.name for f in dataclasses.fields(cls)}
        parts.append(cls(**{k: options.pop(k) for k in list(options) if k in names}))
    if options:
        raise TypeError(f"unknown option {next(iter(options))!r}")
    return EngineConfig(*parts)
