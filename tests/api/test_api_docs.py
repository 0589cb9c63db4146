"""/openapi.json tells the truth, and the pages load nothing from elsewhere."""

import re

import jsonschema
import pytest
import schemathesis
from api_harness import CHAT, CMPL, HI
from fakes import ScriptedEngine, byte_tokenizer
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from test_api_tools import QWEN_TOKENIZER, TOOLS, call_text

from pageserve.api.app import build_app
from pageserve.api.context import ServingContext
from pageserve.config import ServerArgs


@pytest.fixture
def document(api):
    return api.get("/openapi.json").json()


def schema_of(document, name):
    return {**document["components"]["schemas"][name], "components": document["components"]}


def test_every_route_is_described(api, document):
    routes = {
        re.sub(":path", "", route.path)
        for route in api.app.router.routes
        if route.path != "/openapi.json"
    }
    assert set(document["paths"]) == routes
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["description"]
            assert "200" in operation["responses"] and "400" in operation["responses"]


def test_references_lead_somewhere(document):
    names = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert names <= set(document["components"]["schemas"])
    assert {"ChatCompletionRequest", "CompletionRequest", "Error", "TokenizeRequest"} <= names


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("ChatCompletionRequest", {"messages": HI, "stop": "a", "temperature": 1}, {}),
        ("ChatCompletionRequest", {"messages": HI, "stop": ["a"]}, {"messages": HI, "n": "x"}),
        ("CompletionRequest", {"prompt": "a"}, {"prompt": True}),
        ("CompletionRequest", {"prompt": [[1], [2]], "logit_bias": {"1": 2}}, {"prompt": 1}),
        ("DetokenizeRequest", {"tokens": [1]}, {"tokens": "a"}),
    ],
)
def test_schemas_take_what_the_server_takes(document, name, good, bad):
    schema = schema_of(document, name)
    jsonschema.validate(good, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, schema)


@pytest.mark.parametrize(("path", "body"), [(CHAT, {}), (CMPL, None), ("/nope", {})])
def test_errors_match_their_schema(api, document, path, body):
    jsonschema.validate(api.post(path, body).json(), schema_of(document, "Error"))


RICH = {"return_token_ids": True, "prompt_logprobs": 2, "n": 2, "temperature": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2, **RICH}),
        (CHAT, {"messages": HI, "return_prompt_text": True, "max_tokens": 1}),
        (CMPL, {"prompt": "hi"}),
        (CMPL, {"prompt": ["a", "b"], "logprobs": 3, "echo": True, "stop": "o", **RICH}),
        ("/tokenize", {"prompt": "hi é", "return_token_strs": True}),
        ("/tokenize", {"content": "hi é", "with_pieces": True}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/apply-template", {"messages": HI}),
        *((path, None) for path in ("/v1/models", "/load", "/health", "/live", "/ready")),
        ("/version", None),
    ],
)
def test_answers_match_their_schema(make_api, document, path, body):
    api = make_api(server={"timings": True})
    response = api.get(path) if body is None else api.post(path, body)
    assert response.status_code == 200, response.text
    operation = document["paths"][path]["get" if body is None else "post"]
    name = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    schema = schema_of(document, name.rpartition("/")[2])
    jsonschema.validate(response.json(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**response.json(), "more": 1}, schema)


def test_calls_and_reasoning_match_their_schema(make_api, document):
    api = make_api(tokenizer=QWEN_TOKENIZER, script="Well. " + call_text())
    reply = api.chat(tools=TOOLS).json()
    assert reply["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(reply, schema_of(document, "ChatCompletion"))
    message = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    jsonschema.validate({**message, "reasoning_content": "hm"}, schema_of(document, "Message"))


def test_readiness_matches_its_schema(make_api, document):
    body = make_api(loaded=False).get("/ready").json()
    assert body["status"] == "loading"
    jsonschema.validate(body, schema_of(document, "Error"))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_are_whole(api, path):
    response = api.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", response.text)
    # What it asks for are routes of ours, relative, so that a prefix of a proxy stays.
    for target in re.findall(r"""(?:fetch\(|href=)"([^"]+)\"""", response.text):
        assert not target.startswith("/")
        assert api.get("/" + target).status_code in (200, 405), target


def test_playground_can_be_left_out(make_api):
    api = make_api(server={"ui": False})
    assert api.get("/").status_code == 404
    assert api.get("/docs").status_code == 200


# --- schemathesis ---------------------------------------------------------------------------------


def _app():
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(tokenizer, max_model_len=256)
    context = ServingContext(engine, ServerArgs(), ("tiny",), tokenizer=tokenizer)
    return build_app(context)


_operations = [
    result.ok()
    for result in schemathesis.openapi.from_asgi("/openapi.json", _app()).get_all_operations()
]


# A parametrization of our own: the library's gives all operations one and the same test id.
@pytest.mark.parametrize("operation", _operations, ids=lambda o: f"{o.method.upper()} {o.path}")
def test_whatever_the_document_allows_is_answered_as_it_says(operation):
    @settings(
        max_examples=5,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(operation.as_strategy())
    def check(case):
        case.call_and_validate(
            checks=[
                not_a_server_error,
                content_type_conformance,
                status_code_conformance,
                response_schema_conformance,
            ]
        )

    check()
