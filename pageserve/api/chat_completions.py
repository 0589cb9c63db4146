"""POST /v1/chat/completions."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pageserve.api.chat import mark_messages, mark_plain, render_chat
from pageserve.api.chat_plan import ChatPlan, plan_chat, tool_sampling
from pageserve.api.choices import Prompt
from pageserve.api.context import ServingContext
from pageserve.api.errors import APIError, bad_request
from pageserve.api.protocol import ChatCompletionRequest, TemplateRequest
from pageserve.api.serving import (
    add_warnings,
    check_text_length,
    compile_constraint,
    fit_prompt,
    read_generation,
    respond,
    sampling_params,
)
from pageserve.api.template import TemplateError
from pageserve.api.tool_formats import ToolFormat
from pageserve.api.tool_protocol import Tool
from pageserve.api.tools import prepare_messages
from pageserve.sampling_params import SamplingParams
from pageserve.tokenizer import PLAIN_MARK


async def create_chat_completion(context: ServingContext, http: Request) -> Response:
    """Answer one request; raises :class:`APIError` before anything is sent."""
    arrival = time.monotonic()
    request, headers = await read_generation(context, http, ChatCompletionRequest)

    def prepare() -> tuple[Prompt, SamplingParams, ChatPlan | None]:
        params = _params(context, request)
        rendered = render(context, request)
        params = tool_sampling(context, request, params, rendered.tool_format)
        prompt = _encode(context, request, rendered.text)
        plan = plan_chat(context, request, prompt.text, rendered.tool_format)
        return prompt, params, plan

    prompt, params, plan = await context.in_thread(prepare, apart=request.chat_template is not None)
    grammar = await compile_constraint(context, request)
    if plan is not None:
        grammar = await plan.grammar(context.grammars, grammar)
        headers = add_warnings(headers, plan.calls.relaxed if plan.calls is not None else ())
    return respond(context, http, request, [prompt], params, grammar, headers, arrival, plan)


class Rendered(NamedTuple):
    """The prompt text of a conversation, and the form of calls that it shows or asks for."""

    text: str
    tool_format: ToolFormat


def render(context: ServingContext, request: ChatCompletionRequest | TemplateRequest) -> Rendered:
    """Return the prompt of a conversation, special tokens in contents marked if they are to stay
    text; raises :class:`APIError`."""
    kwargs = dict(request.chat_template_kwargs)
    effort = getattr(request, "reasoning_effort", None)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    tokenizer = context.loaded_tokenizer
    messages: Sequence[Mapping[str, Any]] = request.messages or []
    tools: Sequence[Tool] | None = request.tools
    documents: Sequence[Mapping[str, Any]] | None = request.documents
    if context.config.escape_special_in_content:
        messages = mark_messages(tokenizer, messages)
        tools, documents = mark_plain(tokenizer, tools), mark_plain(tokenizer, documents)
        kwargs = mark_plain(tokenizer, kwargs)
    template = request.chat_template
    if template is None:
        template = tokenizer.get_chat_template(tools=bool(tools))
    failures = []
    for shown in prepare_messages(template or "", messages, tools):
        try:
            text = render_chat(
                tokenizer,
                shown.messages,
                tools=shown.tools,
                documents=documents,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                chat_template=request.chat_template,
                chat_template_kwargs=kwargs,
            )
        except TemplateError as error:
            failures.append(error)
            if error.param != "messages":  # no other form of them helps
                break
        else:
            return Rendered(text, shown.tool_format)
    raise template_failed(failures[-1])


def template_failed(error: TemplateError) -> APIError:
    """Return the 400 of messages that the template does not take."""
    code = "invalid_messages" if error.param == "messages" else "invalid_value"
    return bad_request(code, str(error), error.param)


def _encode(context: ServingContext, request: ChatCompletionRequest, text: str) -> Prompt:
    marked, text = text, text.replace(PLAIN_MARK, "")
    if request.truncate_prompt_tokens is None:
        check_text_length(context, request, text, "messages")
    token_ids = context.loaded_tokenizer.encode_marked(marked, request.add_special_tokens)
    return Prompt(fit_prompt(context, request, token_ids, "messages"), text)


def _params(context: ServingContext, request: ChatCompletionRequest) -> SamplingParams:
    given = request.max_completion_tokens
    max_tokens = request.max_tokens if given is None else given
    logprobs = request.top_logprobs if request.logprobs else None
    return sampling_params(context, request, max_tokens, logprobs, request.prompt_logprobs)
