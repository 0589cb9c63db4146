"""Keys, request ids, HEAD, CORS, prefixes, and what is open without a key."""

import logging

import pytest
from api_harness import CHAT, HI, error_of

KEY = "sk-secret-key"
OPEN = ["/health", "/v1/health", "/live", "/ready", "/version", "/metrics"]
PROTECTED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("HEAD", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/v1/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/"),
    ("GET", "/nothing"),
    ("GET", "/v1/models/"),
    ("GET", "//v1/models"),
    ("GET", "/V1/MODELS"),
    ("GET", "/health/"),
    ("GET", "/HEALTH"),
    ("DELETE", "/v1/models"),
]


@pytest.fixture
def locked(make_api):
    return make_api(server={"api_key": ("another", KEY)})


def ask(api, method, path, headers):
    return api.run(api.send(method, path, headers=headers))


@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_every_other_route_needs_a_key(locked, method, path, caplog):
    with caplog.at_level(logging.DEBUG):
        for headers, code in (
            ({}, "missing_api_key"),
            ({"authorization": "Bearer"}, "invalid_api_key"),
            ({"authorization": "Bearer "}, "invalid_api_key"),
            ({"authorization": f"Basic {KEY}"}, "missing_api_key"),
            ({"authorization": "Bearer wrong"}, "invalid_api_key"),
            ({"authorization": f"Bearer {KEY}x"}, "invalid_api_key"),
            ({"authorization": "Bearer schlüssel".encode()}, "invalid_api_key"),
            ({"x-api-key": "wrong"}, "invalid_api_key"),
            (
                [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer x")],
                "missing_api_key",
            ),
        ):
            response = ask(locked, method, path, headers)
            assert response.status_code == 401, headers
            if method != "HEAD":
                assert error_of(response)["code"] == code, headers
    assert KEY not in caplog.text and "wrong" not in caplog.text


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY}"},
        {"x-api-key": KEY},
        {"authorization": "Bearer another"},
    ],
)
def test_right_keys(locked, headers):
    assert ask(locked, "GET", "/v1/models", headers).status_code == 200
    assert ask(locked, "GET", "/nothing", headers).status_code == 404
    assert locked.post(CHAT, {"messages": HI}, headers=headers).status_code == 200


@pytest.mark.parametrize("path", OPEN)
def test_probes_and_options_are_open(locked, path):
    assert locked.get(path).status_code == 200
    assert ask(locked, "OPTIONS", path, {}).status_code == 405
    assert ask(locked, "OPTIONS", "/v1/models", {}).status_code == 405


def test_without_keys_everything_is_open(api):
    assert api.get("/v1/models", headers={"authorization": "Bearer whatever"}).status_code == 200


def test_request_id_is_echoed_or_made(api):
    assert api.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("", "x" * 129, "a b", "é".encode()):
        made = api.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert len(made) == 32
    ids = {api.get(path).headers["x-request-id"] for path in ("/health", "/nope", CHAT)}
    assert len(ids) == 3


def test_head_works_where_get_does(api):
    for path in (*OPEN, "/v1/models", "/v1/models/org/tiny", "/openapi.json"):
        response = ask(api, "HEAD", path, {})
        assert (response.status_code, response.content) == (200, b"")
    assert ask(api, "HEAD", CHAT, {}).status_code == 405


def test_root_path_with_and_without_the_prefix(make_api):
    api = make_api(server={"root_path": "/llm", "api_key": (KEY,)})
    headers = {"authorization": f"Bearer {KEY}"}
    for prefix in ("", "/llm"):
        assert api.get(prefix + "/health").status_code == 200
        assert api.get(prefix + "/v1/models").status_code == 401
        assert api.get(prefix + "/v1/models", headers=headers).status_code == 200
        assert api.post(prefix + CHAT, {"messages": HI}, headers=headers).status_code == 200


def test_no_cors_by_default(api):
    response = api.get("/v1/models", headers={"origin": "http://evil"})
    assert "access-control-allow-origin" not in response.headers


def test_cors_for_listed_origins_only(make_api):
    api = make_api(server={"allow_origin": ("http://good",), "api_key": (KEY,)})
    preflight = {"origin": "http://good", "access-control-request-method": "POST"}
    response = ask(api, "OPTIONS", CHAT, preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://good"
    response = api.get("/v1/models", headers={"origin": "http://evil"})
    assert "access-control-allow-origin" not in response.headers
    # A browser can read why it was refused.
    response = api.get("/v1/models", headers={"origin": "http://good"})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "http://good"


def test_pages_may_read_what_the_server_says_of_their_request(make_api):
    api = make_api(server={"allow_origin": ("http://good",)})
    body = {"messages": HI, "num_ctx": 1, "guided_choice": ["a"]}
    headers = api.post(CHAT, body, headers={"origin": "http://good"}).headers
    exposed = set(headers["access-control-expose-headers"].split(", "))
    assert {name for name in headers if name.startswith("x-")} <= exposed
    assert {"x-pageserve-ignored", "x-pageserve-warning"} <= set(headers)


def test_openapi_lists_routes_and_the_pages_that_need_a_cdn_are_off(api):
    paths = api.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize"} <= set(paths)
    assert api.get("/redoc").status_code == 404


def test_pages_of_other_sites_may_not_post(make_api):
    """A request without a body needs no preflight, so CORS alone would not stop it."""
    api = make_api(server={"allow_origin": ("http://good",)})
    for origin, status in (("http://evil", 403), ("http://good", 200)):
        headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
        response = api.post("/reset_prefix_cache", headers=headers)
        assert response.status_code == status, response.text
    assert api.post("/reset_prefix_cache").status_code == 200
    own = {"Origin": "http://test", "Sec-Fetch-Site": "same-origin"}
    assert api.post("/reset_prefix_cache", headers=own).status_code == 200
