"""The command line as an operator meets it: help, refusals, the memory plan and the chat client."""

import http.server
import json
import threading

import pytest
import torch

from pageserve import cli
from pageserve.llm import LLM
from pageserve.models import weights


def run(capsys, *argv: str) -> tuple[int, str, str]:
    try:
        code = cli.main(argv)
    except SystemExit as exit_:
        code = exit_.code
    return (code, *capsys.readouterr())


def test_help_fits_a_screen_and_is_grouped(capsys):
    code, out, _ = run(capsys, "serve", "--help")
    assert code == 0 and len(out.splitlines()) <= 70
    places = [out.index(f"\n{title}:") for title in ("model", "memory", "scheduling", "server")]
    assert places == sorted(places)
    assert "--port" not in run(capsys, "plan", "--help")[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bogus"], "bogus"),
        ([], "command"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--max-model", "5"], "--max-model"),  # no abbreviations
        (["plan", "--block-size", "0"], "--block-size must be at least 1"),
        (["plan", "--device", "tpu"], "--device"),
        (["plan", "--seed", "x"], "--seed"),
        (["plan", "--num-kv-blocks", "4", "--kv-cache-memory", "1"], "--num-kv-blocks"),
        (["plan", "--model", "/no/such/place"], "--model /no/such/place"),
        (["plan", "--max-model-len", "1000000"], "--max-model-len"),
        (["plan", "--kv-cache-memory", "0"], "--kv-cache-memory"),
    ],
)
def test_refusals_are_one_sentence_that_names_the_flag(capsys, demo_gguf, argv, words):
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == "" and words in err
    assert len(err.splitlines()) <= 2 and "Traceback" not in err


def test_plan_reads_no_weights(capsys, demo_gguf, monkeypatch):
    monkeypatch.setattr(weights, "load_weights", None)
    code, out, err = run(
        capsys, "plan", "--device", "cpu", "--num-kv-blocks", "100", "--max-model-len", "400"
    )
    rows = dict(line.split("  ", 1) for line in out.splitlines())
    rows = {name: text.strip() for name, text in rows.items()}
    assert code == 0 and err == ""
    assert "134.5 M parameters" in rows["model"]
    packs = torch.backends.mkldnn.is_available()  # weights of wide products in a second layout
    assert rows["weights"] == ("0.80 GiB" if packs else "0.50 GiB")
    assert rows["KV pool"].endswith("100 blocks of 16 tokens, 720 KiB each")
    assert rows["tokens resident"] == "1600"
    assert rows["longest request"] == "400 tokens"
    assert rows["max concurrency"].startswith("4.0 requests")


def test_plan_says_what_a_small_pool_can_hold(capsys, demo_gguf):
    _, out, _ = run(capsys, "plan", "--device", "cpu", "--num-kv-blocks", "3")
    assert "longest request   49 tokens" in out


def test_unknown_option_of_the_library():
    with pytest.raises(TypeError, match="unknown option 'modle'"):
        LLM(modle="x")


# --- chat -----------------------------------------------------------------------------------------


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers each request with the next (status, body) of the server's script."""

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.seen.append((self.headers, json.loads(self.rfile.read(length))))
        status, body = self.server.script.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


def frames(*events: object) -> str:
    lines = [e if isinstance(e, str) else "data: " + json.dumps(e) for e in events]
    return "".join(line + "\n\n" for line in lines)


def piece(text: str | None) -> dict:
    return {"choices": [{"delta": {"content": text} if text else {}}]}


DONE = "data: [DONE]"


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        server.seen, server.script = [], []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def talk(server, capsys, monkeypatch):
    def talk(*lines: str, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        answers = iter(lines)

        def read(_: str) -> str:
            try:
                return next(answers)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)
        return run(capsys, "chat", "--url", f"http://127.0.0.1:{server.server_port}/", *flags)

    return talk


def test_chat_streams_and_remembers(server, talk):
    usage = {"choices": [], "usage": {}}
    server.script += [
        (200, frames(piece(None), piece("Pa"), ": waiting", piece("ris"), usage, DONE)),
        (200, frames(piece("Rome"), DONE)),
    ]
    flags = ("--system", "be brief", "--max-tokens", "5", "--temperature", "0", "--api-key", "k")
    code, out, err = talk("France?", "Italy?", flags=flags)
    assert (code, out, err) == (0, "Paris\nRome\n\n", "")
    headers, body = server.seen[1]
    assert headers["Authorization"] == "Bearer k"
    assert body == {
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "France?"},
            {"role": "assistant", "content": "Paris"},
            {"role": "user", "content": "Italy?"},
        ],
    }


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((401, '{"error": {"message": "wrong key"}}'), "wrong key"),
        ((502, "bad gateway"), "bad gateway"),
        ((200, frames(piece("a"), {"error": {"message": "engine died"}})), "engine died"),
        ((200, frames(piece("a"))), "the stream ended early"),
    ],
)
def test_chat_shows_an_error_and_forgets_the_turn(server, talk, reply, message):
    server.script += [reply, (200, frames(piece("yes"), DONE))]
    code, out, err = talk("first", "second")
    assert code == 0 and message in err and out.endswith("yes\n\n")
    assert server.seen[1][1]["messages"] == [{"role": "user", "content": "second"}]


def test_chat_leaves_at_an_empty_line(server, talk):
    assert talk("", "never read")[0] == 0 and not server.seen


def test_chat_without_a_server(server, talk, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: "hi")
    code, _, err = run(capsys, "chat", "--url", "http://127.0.0.1:1")
    assert code == 1 and "is a server running at http://127.0.0.1:1?" in err
