"""What a chat request asks of its output: which parts it is taken apart into, what is banned."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from pageserve.api import reasoning
from pageserve.api.chat_output import ChatParser
from pageserve.api.context import ServingContext
from pageserve.api.grammars import GrammarCompiler
from pageserve.api.protocol import ChatCompletionRequest
from pageserve.api.reasoning import ReasoningParser
from pageserve.api.structured_output import Constraint, constraint_of
from pageserve.api.tool_formats import FORMATS, ToolFormat
from pageserve.api.tool_grammar import ToolGrammar, behind_reasoning, tool_grammar
from pageserve.api.tool_parser import ToolParser
from pageserve.api.tool_protocol import ToolChoice
from pageserve.sampling_params import SamplingParams
from pageserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatPlan:
    """How one request's outputs are taken apart. ``block`` says where the output begins: inside of
    a reasoning block, or perhaps before one; None means that there is none. ``constrained`` says
    that the request gives the answer a form. ``tool_names`` are those of the tools allowed."""

    tokenizer: Tokenizer
    tool_format: ToolFormat
    choice: ToolChoice
    tool_names: frozenset[str]
    block: Literal["inside", "before"] | None
    parallel_tool_calls: bool
    include_reasoning: bool
    stream: bool
    constrained: bool
    calls: ToolGrammar | None = None

    @property
    def trigger_ids(self) -> tuple[int, ...]:
        """Tokens behind which the grammar is in force; none means from the start."""
        return self.calls.trigger_ids if self.calls is not None else ()

    async def grammar(self, compiler: GrammarCompiler, constraint: str | None) -> str | None:
        """Return the grammar of the whole output. ``constraint`` is the request's own, if it has
        one; it holds an answer, neither calls nor reasoning. Raises :class:`APIError`."""
        grammar = constraint
        if self.calls is not None:
            calls = Constraint("tools", self.calls.source, "tools")
            grammar = await compiler.compile(calls, self.tokenizer)
            if self.calls.anywhere:
                return grammar
            if constraint is not None and self.choice.mode == "auto":
                either = Constraint("either", [grammar, constraint], "tools")
                grammar = await compiler.compile(either, self.tokenizer)
        if grammar is None or self.block is None:
            return grammar
        return behind_reasoning(self.tokenizer, self.block, grammar)

    def parser(self) -> ChatParser:
        """Return a parser for one choice."""
        named = self.choice.mode == "named"
        block = ReasoningParser(opened=self.block == "inside") if self.block else None
        parser = ToolParser(
            self.tool_format,
            self.tool_names,
            incremental=self.stream,
            single=named or not self.parallel_tool_calls,
            exclusive=self.constrained,
        )
        return ChatParser(
            self.tokenizer,
            reasoning=block,
            tools=parser if self.choice.mode != "none" else None,
            include_reasoning=self.include_reasoning,
            calls_finish="stop" if named else "tool_calls",
        )


def plan_chat(
    context: ServingContext, request: ChatCompletionRequest, prompt: str, form: ToolFormat
) -> ChatPlan | None:
    """Return how to take the outputs of a request apart, with calls in a form that the ``prompt``
    asks for; None if they are plain text.

    Raises :class:`APIError` for a strict tool whose schema cannot be enforced.
    """
    tokenizer = context.loaded_tokenizer
    choice = request.tool_use
    block = None
    if context.config.reasoning_field != "none" and reasoning.thinks(tokenizer):
        block = reasoning.place(prompt, continued=request.continue_final_message)
    if choice.mode == "none" and block is None:
        return None
    calls = None
    constrained = constraint_of(request) is not None
    free = choice.mode == "auto" and not constrained
    if choice.mode != "none" and not (free and context.config.tool_grammar == "off"):
        calls = tool_grammar(
            tokenizer,
            form,
            request.tools or [],
            choice,
            parallel=request.parallel_tool_calls,
            free=free,
            may_think=block == "before",
        )
    names = choice.names or {tool["function"]["name"] for tool in request.tools or []}
    return ChatPlan(
        tokenizer,
        form,
        choice,
        frozenset(names),
        block,
        request.parallel_tool_calls,
        request.include_reasoning,
        request.stream,
        constrained,
        calls,
    )


def tool_sampling(
    context: ServingContext,
    request: ChatCompletionRequest,
    params: SamplingParams,
    form: ToolFormat,
) -> SamplingParams:
    """Return the parameters with what the tools of a request change: what opens calls is banned if
    no tool may be called, and is text, though it may be a special token, if one may. Tokens that
    open calls of another form are banned in any case."""
    tokenizer = context.loaded_tokenizer
    if not request.tools:
        return params
    replace = msgspec.structs.replace
    forbidden = request.tool_use.mode == "none"
    tags = [f.open for f in FORMATS if forbidden or f is not form]
    banned = [i for tag in tags if (i := tokenizer.token_id(tag)) is not None]
    if banned:
        bias = (params.logit_bias or {}) | dict.fromkeys(banned, -100.0)
        params = replace(params, logit_bias=bias)
    token_id = tokenizer.token_id(form.open)
    if forbidden and token_id is None:
        words = [*(params.bad_words_token_ids or []), tokenizer.encode(form.open, False)]
        return replace(params, bad_words_token_ids=words)
    if not forbidden and token_id in tokenizer.special_ids:
        return replace(params, skip_special_tokens=False)
    return params
