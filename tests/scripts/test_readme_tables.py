"""The README's tables say where a result is from, and refuse what proves nothing."""

import json

import pytest
import readme_tables


def on_a_gpu(name, **more):
    """The committed result of a study, as if it were from a GPU."""
    result = json.loads((readme_tables.RESULTS / f"{name}.json").read_text())
    command = f"python benchmarks/x.py --json {name}.json --requests 8"
    result["machine"] |= {"gpu": "NVIDIA Test", "command": command}
    return result | {"file": name, "device": "cuda", "dtype": "bfloat16"} | more


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("cpu_throughput", readme_tables.throughput),
        ("cpu_http_load", readme_tables.http_load),
        ("cpu_structured", readme_tables.structured),
        ("prefix", readme_tables.prefix),
        ("attention", readme_tables.attention),
    ],
)
def test_a_study_on_a_gpu_names_it_and_its_command(name, table):
    text = table(on_a_gpu(name))
    assert "NVIDIA Test" in text and "EPYC" not in text
    assert "`python benchmarks/x.py --requests 8`" in text


def test_cold_start_shows_both_starts_and_their_phases():
    start = {"server_seconds": 12.34, "phases": {"imports": 4.0, "capture": 0.01}, "kernels": {}}
    machine = {"gpu": "NVIDIA Test", "torch": "2", "commit": "abc", "command": "python x.py"}
    starts = {"cold": start, "warm": start | {"phases": {"imports": 3.0}}}
    text = readme_tables.cold_start({"model": "0.5b", "machine": machine, "starts": starts})
    assert "| seconds | server | imports | capture |\n|---|---|---|---|\n" in text
    assert "| cold | 12.3 | 4.0 |  |\n| warm | 12.3 | 3.0 |  |" in text


def test_unequal_tokens_are_told_in_16_bits_and_refused_in_float32():
    unequal = {"tokens_equal": False, "equal": {"pageserve": 20, "hf static 24": 19}}
    text = readme_tables.throughput(on_a_gpu("cpu_throughput", **unequal))
    assert "**GPU, bfloat16" in text and "pageserve 20, hf static 24 19" in text
    with pytest.raises(AssertionError):
        readme_tables.throughput(on_a_gpu("cpu_throughput", **unequal) | {"dtype": "float32"})


def test_a_failed_verification_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    run = {"dtype": "float32", "passed": False}
    (tmp_path / "cpu_verify_model.json").write_text(json.dumps({"runs": [run]}))
    with pytest.raises(AssertionError, match="failed verification"):
        readme_tables.verified_logits()


def test_numbers_keep_the_digits_that_say_something():
    assert [readme_tables._ms(x) for x in (2345.6, 345.6, 45.67, 0.5678)] == [
        "2,346", "346", "45.7", "0.568",
    ]  # fmt: skip
    assert [readme_tables._seconds(x) for x in (12.345, 0.123, 0.01234)] == [
        "12.3",
        "0.12",
        "0.012",
    ]
