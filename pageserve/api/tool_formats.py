"""The forms in which models write tool calls, as records.

Whoever shows tools to a model, reads its calls or holds it to them goes by such a record; nothing
else knows one family of models from another.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from pageserve.api.template import names_in


def _spaced(pattern: str, most: str) -> str:
    """Return a pattern with JSON's white space for each S, bounded if it is of what a model is to
    write: one that likes blanks would come to no end."""
    return pattern.replace("S", rf"[ \t\r\n]{most}")


@dataclass(frozen=True)
class ToolFormat:
    """A form of calls under vLLM's name for it.

    ``open`` opens calls, ``close`` closes each of them, and ``arguments_key`` is the member with
    the arguments. Without ``close`` a call ends where its object does, and more may follow behind
    the same opening, ``separators`` (single characters) or white space between them; with
    ``listed`` all stand in brackets. ``bare`` matches what makes an answer calls if it begins so,
    without an opening; it is empty if there must be one.

    As regular expressions for grammars: what stands before the first call (``start``), between two
    (``separator``) and behind the last (``end``); a call's object up to its arguments (``head``)
    and from there on (``tail``). NAME in them is the tool's.

    A template writes the form if it has all ``marks`` and none of ``other_marks``, regular
    expressions too. ``short_ids`` says that it takes only ids of nine letters and digits,
    ``one_at_once`` that it shows no more than one call of a message, ``tools_at_user`` that it
    shows the tools in the first message behind a system's, and that as the user's whoever's it is.
    """

    name: str
    open: str
    marks: tuple[str, ...]
    head: str
    tail: str
    separator: str
    other_marks: tuple[str, ...] = ()
    arguments_key: str = "arguments"
    close: str = ""
    separators: str = ""
    listed: bool = False
    bare: str = ""
    start: str = ""
    end: str = ""
    short_ids: bool = False
    one_at_once: bool = False
    tools_at_user: bool = False


HERMES = ToolFormat(
    "hermes",
    open="<tool_call>",
    close="</tool_call>",
    marks=("<tool_call>",),
    other_marks=("<function=",),  # Qwen3-Coder: XML inside of the same tags
    start=r"\n",
    head=r'\{"name": "NAME", "arguments": ',
    tail=r"\}",
    end=r"\n",
    separator=r"\n",
)
# Shown tools as OpenAI's objects, models like to begin as those do, with the type.
_LLAMA_HEAD = r'S\{S("type"S:S"function"S,S)*"name"S:S"NAME"S'
_LLAMA_KEY = r',S"(parameters|arguments)"S:S'
LLAMA_3 = ToolFormat(
    "llama3_json",
    open="<|python_tag|>",
    marks=(r"<\|start_header_id\|>ipython", '"parameters": '),
    other_marks=("<function=",),  # Functionary
    arguments_key="parameters",
    separators=";,",
    bare=_spaced(rf"{_LLAMA_HEAD}(\}}|{_LLAMA_KEY}\{{)", "*"),
    head=_spaced(_LLAMA_HEAD + _LLAMA_KEY, "{0,16}"),
    tail=_spaced(r"S\}", "{0,16}"),
    separator=r"; ?|\n",
    one_at_once=True,
    tools_at_user=True,
)
MISTRAL = ToolFormat(
    "mistral",
    open="[TOOL_CALLS]",
    marks=(r"\[TOOL_CALLS\] ?\[",),
    other_marks=(r"\[ARGS\]",),  # of later versions, whose calls are no list
    separators=",",
    listed=True,
    start=r" ?\[",
    head=r'\{"name": "NAME", "arguments": ',
    tail=r'(, "id": "[a-zA-Z0-9]{9}")?\}',
    end=r"\]",
    separator=r", ?",
    short_ids=True,
)
FORMATS = (HERMES, LLAMA_3, MISTRAL)


@lru_cache(maxsize=4)
def tool_format(template: str) -> ToolFormat | None:
    """Return the form in which a chat template, given as source, writes calls of the tools that it
    shows; None if it shows none or writes a form that is not known."""
    if "tools" not in names_in(template):
        return None

    def has(mark: str) -> bool:
        return re.search(mark, template) is not None

    return next(
        (f for f in FORMATS if all(map(has, f.marks)) and not any(map(has, f.other_marks))), None
    )
