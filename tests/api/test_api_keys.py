"""API keys: files, admin rights, rate limits with their headers, and what is counted by key."""

import asyncio
import base64
import hashlib
import json
import logging

import pytest
from api_harness import CHAT, CMPL, HI, error_of

from pageserve.api import keys
from pageserve.api.keys import TokenBucket, load_keys
from pageserve.config import ConfigError

SECRET = "sk-very-secret"


@pytest.fixture
def clock(monkeypatch):
    """The buckets' time, moved by hand."""
    now = [1000.0]
    monkeypatch.setattr(keys.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def make_keyed(make_api, tmp_path):
    """An app whose keys are given as entries of a file; ``bearer`` makes their headers."""

    def make(*entries, **options):
        path = tmp_path / "keys.json"
        path.write_text(json.dumps({"keys": entries}))
        server = {"api_keys_file": str(path), **options.pop("server", {})}
        return make_api(server=server, **options)

    return make


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


def ask(api, secret="a", **fields):
    return api.post(CMPL, {"prompt": "hi", "max_tokens": 3, **fields}, headers=bearer(secret))


# --- files ----------------------------------------------------------------------------------------


def test_toml_and_json_files_with_secrets_or_digests(make_api, tmp_path):
    digest = hashlib.sha256(b"hidden").hexdigest()
    toml = tmp_path / "keys.toml"
    toml.write_text(f'[[keys]]\nname = "a"\nkey = "plain"\n[[keys]]\nname = "b"\n'
                    f'key_sha256 = "{digest}"\nadmin = true\n')  # fmt: skip
    api = make_api(server={"api_keys_file": str(toml), "api_key": ("flag",)})
    for secret, status in (("plain", 200), ("hidden", 200), ("flag", 200), (digest, 401)):
        assert api.get("/v1/models", headers=bearer(secret)).status_code == status
    assert [(k.name, k.admin) for k in api.context.keys.keys] == [
        ("key-1", False), ("a", False), ("b", True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"keys": []}', "no keys"),
        ('{"keys": [{"name": "a"}]}', "either key or key_sha256"),
        ('{"keys": [{"name": "a", "key": "x", "key_sha256": "' + "0" * 64 + '"}]}', "either"),
        ('{"keys": [{"name": "a", "key": "x"}, {"name": "a", "key": "y"}]}', "two keys"),
        ('{"keys": [{"name": "a", "key": "x"}, {"name": "b", "key": "x"}]}', "another one"),
        ('{"keys": [{"name": "a", "key": "x", "rpm": 3}]}', "rpm"),
        ('{"keys": [{"name": "a", "key": "x", "max_concurrent": 0}]}', "max_concurrent"),
        ('{"keys": [{"name": "", "key": "x"}]}', "name"),
        ("{", "keys.json"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, words):
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        load_keys((), str(path))


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        ("", "empty"), (" ", "empty"), ("\n", "empty"), (" x", "spaces"), ("x\n", "spaces"),
    ],
)  # fmt: skip
def test_secrets_that_no_header_carries_are_refused(make_api, tmp_path, secret, words):
    """An empty one must not leave the server open."""
    with pytest.raises(ConfigError, match=f"--api-key must not .*{words}"):
        make_api(server={"api_key": (secret,)})
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "a", "key": secret}]}))
    with pytest.raises(ConfigError, match=r"--api-keys-file .*keys\.json") as caught:
        load_keys((), str(path))
    assert words in str(caught.value) or not secret  # the file's format refuses that one itself


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load_keys((), str(tmp_path / "nothing.toml"))


# --- credentials ----------------------------------------------------------------------------------


def test_browsers_may_send_the_key_as_a_password(make_keyed):
    api = make_keyed({"name": "a", "key": SECRET})
    page = api.get("/v1/models", headers={"accept": "text/html,*/*"})
    assert page.status_code == 401 and page.headers["www-authenticate"].startswith("Basic ")
    assert api.get("/v1/models").headers["www-authenticate"] == "Bearer"
    for text, status in ((f"me:{SECRET}", 200), (f":{SECRET}", 200), (SECRET, 401), ("a:b", 401)):
        basic = base64.b64encode(text.encode()).decode()
        response = api.get("/v1/models", headers={"authorization": f"Basic {basic}"})
        assert response.status_code == status, text


def test_metrics_can_be_protected(make_keyed):
    api = make_keyed({"name": "a", "key": "a"}, server={"protect_metrics": True}, loaded=False)
    assert api.get("/metrics").status_code == 401
    assert api.get("/metrics", headers=bearer("a")).status_code == 200  # while loading, too
    assert api.get("/health").status_code == 503


def test_secrets_appear_nowhere(make_keyed, caplog):
    api = make_keyed({"name": "team", "key": SECRET, "requests_per_minute": 1})
    with caplog.at_level(logging.DEBUG):
        bodies = [ask(api, SECRET).text for _ in range(3)] + [api.get("/metrics").text]
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    for text in (*bodies, caplog.text):
        assert SECRET not in text and digest not in text
    assert "team" in bodies[-1]


# --- limits ---------------------------------------------------------------------------------------


def test_bucket_refills_and_may_be_overdrawn(clock):
    bucket = TokenBucket(60)
    assert bucket.level == 60
    bucket.take(90)
    assert bucket.level == -30 and bucket.seconds_until(1) == 31
    clock[0] += 40
    assert bucket.level == 10 and bucket.seconds_until(10) == 0
    clock[0] += 1000
    assert bucket.level == 60


def test_requests_per_minute(make_keyed, clock):
    api = make_keyed(
        {"name": "a", "key": "a", "requests_per_minute": 2}, {"name": "b", "key": "b"}
    )  # fmt: skip
    remaining = []
    for _ in range(2):
        response = ask(api)
        assert response.status_code == 200
        remaining.append(response.headers["x-ratelimit-remaining-requests"])
    assert remaining == ["1", "0"]
    assert response.headers["x-ratelimit-limit-requests"] == "2"
    assert response.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert "x-ratelimit-limit-tokens" not in response.headers
    response = ask(api)
    error = error_of(response)
    assert response.status_code == 429
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert error["param"] is None
    assert response.headers["retry-after"] == "30"
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert ask(api, "b").status_code == 200  # others do not notice
    assert "x-ratelimit-limit-requests" not in ask(api, "b").headers
    assert api.get("/v1/models", headers=bearer("a")).status_code == 200  # costs nothing
    clock[0] += 30
    assert ask(api).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_per_minute(make_keyed, clock, stream):
    api = make_keyed({"name": "a", "key": "a", "tokens_per_minute": 60})
    response = ask(api, prompt="x" * 40, stream=stream, max_tokens=30, ignore_eos=True)
    assert response.status_code == 200  # what it will generate is not known yet
    assert response.headers["x-ratelimit-limit-tokens"] == "60"
    assert response.headers["x-ratelimit-remaining-tokens"] == "20"
    response = ask(api, stream=stream)  # the debt is 10, the prompt has 2
    assert response.status_code == 429 and response.headers["retry-after"] == "12"
    assert error_of(response)["code"] == "rate_limit_exceeded"
    clock[0] += 12
    assert ask(api, stream=stream).status_code == 200
    response = ask(api, prompt="x" * 61)
    assert response.status_code == 429 and response.headers["x-should-retry"] == "false"


def test_concurrency(make_keyed):
    api = make_keyed({"name": "a", "key": "a", "max_concurrent": 2}, {"name": "b", "key": "b"})

    async def scenario():
        api.engine.held = True
        body = {"messages": HI, "max_tokens": 2}
        running = [
            asyncio.create_task(api.send("POST", CHAT, json=body, headers=bearer("a")))
            for _ in range(2)
        ]
        while api.engine.num_live < 2:
            await asyncio.sleep(0)
        third = await api.send("POST", CHAT, json=body, headers=bearer("a"))
        api.engine.held = False
        return third, await asyncio.gather(*running)

    third, running = api.run(scenario())
    assert third.status_code == 429 and third.headers["retry-after"] == "1"
    assert [r.status_code for r in running] == [200, 200]
    assert ask(api).status_code == 200  # their places are free again
    assert all(key.num_active == 0 for key in api.context.keys.keys)


def test_limits_come_after_authentication_and_before_the_body(make_keyed, clock):
    api = make_keyed({"name": "a", "key": "a", "requests_per_minute": 1})
    assert ask(api, temperature="no").status_code == 400  # counted: it cost work
    assert ask(api, temperature="no").status_code == 429
    assert ask(api, "wrong").status_code == 401
    assert api.get(CHAT, headers=bearer("a")).status_code == 429


def test_token_limit_comes_after_validation_and_before_the_queue(make_keyed, clock):
    api = make_keyed(
        {"name": "a", "key": "a", "tokens_per_minute": 10},
        server={"max_queue": 1}, max_num_seqs=1, max_model_len=64,
    )  # fmt: skip
    assert ask(api, prompt="x" * 80).status_code == 400
    assert ask(api, prompt=["xxxx"] * 3).status_code == 429
    api.engine.stats.num_waiting = 1
    assert ask(api, prompt=["xx"] * 2).status_code == 503
    api.engine.stats.num_waiting = 0
    assert ask(api, prompt="x" * 10).status_code == 200  # the 503 has cost nothing


def test_priority_of_a_key_is_added(make_keyed):
    api = make_keyed({"name": "a", "key": "a", "priority": 5}, policy="priority")
    ask(api, priority=2)
    assert api.engine.requests[-1].priority == 7
    ask(api, priority=2**63 - 1)
    assert api.engine.requests[-1].priority == 2**63 - 1


def test_priority_of_a_key_that_nothing_would_keep(make_keyed):
    entries = [{"name": "a", "key": "a", "priority": 0}, {"name": "b", "key": "b", "priority": 5}]
    with pytest.raises(ConfigError, match=r"'b' has a priority.*--scheduling-policy priority"):
        make_keyed(*entries)
    make_keyed(*entries, policy="priority")
    make_keyed(entries[0])


# --- metrics --------------------------------------------------------------------------------------


def test_counters_by_key(make_keyed):
    api = make_keyed(
        {"name": "a", "key": "a"}, {"name": "b", "key": "b"}, server={"protect_metrics": False}
    )

    def value(name, key, **labels):
        pairs = {"engine": "0", "key": key, "model_name": "tiny", **labels}
        inner = ",".join(f'{k}="{v}"' for k, v in sorted(pairs.items()))
        return api.metrics()[f"pageserve:key_{name}_total{{{inner}}}"]

    assert value("requests", "b", status="5xx") == 0
    ask(api)
    ask(api, stream=True)
    ask(api, n="x")
    assert value("requests", "a", status="2xx") == 2
    assert value("requests", "a", status="4xx") == 1
    assert value("prompt_tokens", "a") == 4
    assert value("generation_tokens", "a") == 6
    assert value("generation_tokens", "b") == 0


# --- sharing --------------------------------------------------------------------------------------


def test_tenants_are_keys_or_users_where_there_are_no_keys(make_keyed, make_api):
    api = make_keyed({"name": "a", "key": "a", "weight": 3})
    ask(api, user="u")
    assert (api.engine.requests[-1].tenant, api.engine.requests[-1].weight) == ("a", 3)
    api = make_api()
    api.cmpl(user="u")
    assert (api.engine.requests[-1].tenant, api.engine.requests[-1].weight) == ("u", 1)
