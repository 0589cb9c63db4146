"""Files that do not hold exactly the promised model are refused with one clear sentence."""

import json
import logging
import shutil

import gguf
import pytest
import torch
import transformers
from helpers import (
    VOCAB_SIZE,
    DenseReferenceBackend,
    PagedRunner,
    edit_json,
    make_tiny_checkpoint,
    write_gguf,
)
from safetensors.torch import load_file, save_file

from pageserve.checkpoint import ModelError, list_tensors
from pageserve.model_config import load_model_config
from pageserve.models import load_model

TOKENS = [5, 17, 200, 3, 3, 150]
INDEX = "model.safetensors.index.json"


def load(path, dtype=torch.float32, progress=None):
    return load_model(
        path,
        load_model_config(path),
        backend=DenseReferenceBackend(),
        dtype=dtype,
        device="cpu",
        max_model_len=64,
        progress=progress,
    )


def logits(path):
    model = load(path)
    return PagedRunner(model, DenseReferenceBackend()).step([(0, TOKENS)])


def reference(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.fixture
def copy(tiny_checkpoint, tmp_path):
    """Return ``copy(family, **overrides)``: a checkpoint directory that a test may damage."""

    def make(family, **overrides):
        shutil.copytree(tiny_checkpoint(family, **overrides), tmp_path / "model")
        return tmp_path / "model"

    return make


def rewrite(path, change):
    """Apply ``change`` to the dict of tensors in a single-file checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


# --- tied heads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("differs", [False, True])
def test_spare_head_of_a_tied_model(copy, caplog, differs):
    path = copy("qwen2", tie_word_embeddings=True)

    def add_head(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"] = head.flip(0) if differs else head

    before = logits(path)
    rewrite(path, add_head)
    with caplog.at_level(logging.WARNING, "pageserve"):
        after = logits(path)
    torch.testing.assert_close(after, reference(path), rtol=0, atol=1e-4)
    assert torch.equal(after, before) is not differs
    assert len([r for r in caplog.records if r.name.startswith("pageserve")]) == differs


def test_derived_rotary_tables_are_ignored(copy):
    path = copy("llama")
    before = logits(path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(path, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert torch.equal(logits(path), before)


# --- missing, left over, misshapen ----------------------------------------------------------------


def test_missing_shard(copy):
    path = copy("llama", max_shard_size="60KB")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"shard {shard.name} is missing"):
        load(path)


def test_tensor_that_the_index_promises_in_vain(copy):
    path = copy("llama", max_shard_size="60KB")
    index = json.loads((path / INDEX).read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    shard = path / index["weight_map"][name]
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    with pytest.raises(ModelError, match=f"{name} in {shard.name}"):
        load(path)


def test_tensor_missing_from_the_index(copy):
    """A tensor that lies in no shard; k_proj is one part of a merged parameter."""
    path = copy("llama", max_shard_size="60KB")
    index = json.loads((path / INDEX).read_text())
    name = "model.layers.1.self_attn.k_proj.weight"
    shard = path / index["weight_map"].pop(name)
    (path / INDEX).write_text(json.dumps(index))
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    with pytest.raises(ModelError, match=r"lacks layers\.1\.self_attn\.k_proj\.weight"):
        load(path)


@pytest.mark.parametrize("family, name", [("llama", "norm.weight"), ("qwen2", "v_proj.bias")])
def test_missing_tensor(copy, family, name):
    path = copy(family)

    def remove(tensors):
        for key in [key for key in tensors if key.endswith(name)]:
            del tensors[key]

    rewrite(path, remove)
    with pytest.raises(ModelError, match="the checkpoint lacks"):
        load(path)


def test_unknown_tensor(copy):
    path = copy("llama")
    rewrite(path, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.ones(4)}))
    with pytest.raises(ModelError, match=r"layers\.0\.extra\.weight"):
        load(path)


def test_bias_of_a_model_without_is_not_ignored(copy):
    path = copy("qwen2")
    edit_json(path / "config.json", architectures=["MistralForCausalLM"], sliding_window=...)
    with pytest.raises(ModelError, match=r"does not know: .*bias"):
        load(path)


def test_wrong_shape(copy):
    path = copy("llama")
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(path, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    with pytest.raises(
        ModelError, match=r"k_proj\.weight has the shape \[48, 16\], not \[16, 48\]"
    ):
        load(path)


def test_vocabulary_of_another_size(copy):
    path = copy("qwen2")
    edit_json(path / "config.json", vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has the shape \[328, 48\]"):
        load(path)


# --- damaged files --------------------------------------------------------------------------------


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize("size", [-1024, -1, 200, 5, 0], ids=str)
@pytest.mark.parametrize("sharded", [False, True])
def test_truncated_safetensors(copy, size, sharded):
    path = copy("llama", **({"max_shard_size": "60KB"} if sharded else {}))
    file = sorted(path.glob("*.safetensors"))[-1]
    cut(file, size)
    with pytest.raises(ModelError, match=f"{file.name} is truncated"):
        load(path)
    with pytest.raises(ModelError, match=file.name):
        list_tensors(path)


def test_not_safetensors(copy):
    path = copy("llama")
    (path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"nope" + bytes(100))
    with pytest.raises(ModelError, match="not a safetensors file"):
        load(path)


def test_trailing_garbage_is_refused(copy):
    path = copy("llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(path)


def test_no_weights(copy):
    path = copy("llama")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds no safetensors weights"):
        load(path)


def test_index_cannot_point_outside(copy):
    path = copy("llama", max_shard_size="60KB")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../other.safetensors")
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the model directory"):
        load(path)


@pytest.fixture
def gguf_file(tiny_checkpoint, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"))
    write_gguf(tmp_path / "model.gguf", model)
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("size", [-1024, -1, 700, 100, 30, 20, 3, 0], ids=str)
def test_truncated_gguf(gguf_file, size):
    cut(gguf_file, size)
    with pytest.raises(ModelError, match=r"model\.gguf is (truncated|not a GGUF file)"):
        load(gguf_file)


def test_damaged_gguf(gguf_file):
    data = gguf_file.read_bytes()
    for damaged in (b"GGUX" + data[4:], data[:4] + bytes([9, 0, 0, 0]) + data[8:]):
        gguf_file.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.gguf"):
            load(gguf_file)


def test_gguf_tensor_missing(tiny_checkpoint, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen2"))
    del model.model.layers[1].mlp.up_proj
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(ModelError, match=r"lacks layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path / "model.gguf")


def test_gguf_of_another_architecture(gguf_file):
    writer = gguf.GGUFWriter(gguf_file, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="gemma3"):
        load(gguf_file)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"dtype": "bfloat16", "torch_dtype": ...},
        {"dtype": ..., "torch_dtype": "bfloat16"},
        {"dtype": "bfloat16", "torch_dtype": "bfloat16"},
        {"dtype": ..., "torch_dtype": ...},
    ],
    ids=["new", "old", "both", "neither"],
)
def test_dtype_key(copy, keys):
    path = copy("llama", dtype=torch.bfloat16)
    edit_json(path / "config.json", **keys)
    assert load_model_config(path).dtype == "bfloat16"


def test_mixed_dtypes_become_one(copy):
    path = copy("llama", dtype=torch.bfloat16)
    norm = "model.norm.weight"
    rewrite(path, lambda tensors: tensors.update({norm: tensors[norm].float()}))
    for dtype in (torch.bfloat16, torch.float32):
        assert {p.dtype for p in load(path, dtype).parameters()} == {dtype}
    torch.testing.assert_close(logits(path), reference(path), rtol=0, atol=1e-4)


# --- sizes and progress ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_counts_need_no_weights(tiny_checkpoint, family):
    path = tiny_checkpoint(family)
    model = load(path)
    assert load_model_config(path).num_parameters == sum(p.numel() for p in model.parameters())


def test_counts_with_every_bias(tmp_path):
    make_tiny_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    count = sum(p.numel() for p in load(tmp_path).parameters())
    assert load_model_config(tmp_path).num_parameters == count


def test_progress_counts_every_byte(tiny_checkpoint, gguf_file):
    for path in (tiny_checkpoint("llama", max_shard_size="60KB"), gguf_file):
        seen = []
        load(path, progress=lambda *args, seen=seen: seen.append(args))
        total = sum(info.nbytes for info in list_tensors(path).values())
        assert len(seen) == len(list_tensors(path))
        assert seen[-1] == ("loading weights", total, total)
        assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
