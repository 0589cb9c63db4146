"""Logits equal transformers' in float32: every family, shape, rotary type and file format."""

import shutil

import gguf
import pytest
import torch
import transformers
from helpers import VOCAB_SIZE, DenseReferenceBackend, PagedRunner, write_gguf

from pageserve.attention.torch_blockwise import TorchBlockwiseBackend
from pageserve.model_config import load_model_config
from pageserve.models import load_model

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 16}),
    "llama MHA": ("llama", {"num_key_value_heads": 6}),
    "llama MQA": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "mistral wide heads": ("mistral", {"head_dim": 12}),
    "mistral in its window": ("mistral", {"sliding_window": 128}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2 MHA": ("qwen2", {"num_key_value_heads": 6}),
    "qwen2 MQA": ("qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "yarn": ("qwen2", {"rope_scaling": YARN, "max_position_embeddings": 64}),
    "yarn attention factor": ("qwen2", {"rope_scaling": YARN | {"attention_factor": 0.9}}),
}


def reference_logits(model, prompts):
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


def run(path, prompts, **options):
    """Return the logits of several prompts computed as one batch from the files in ``path``."""
    config = load_model_config(path)
    backend = DenseReferenceBackend()
    defaults = {
        "dtype": torch.float32,
        "device": "cpu",
        "max_model_len": config.max_position_embeddings,
    }
    model = load_model(path, config, backend=backend, **(defaults | options))
    runner = PagedRunner(model, backend, num_blocks=128)
    logits = runner.step(list(enumerate(prompts)))
    return logits.split([len(prompt) for prompt in prompts])


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def assert_equal_logits(found, expected):
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=TOLERANCE)
        assert torch.equal(ours.argmax(-1), reference.argmax(-1))


def load_reference(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tiny_checkpoint, name):
    family, overrides = CASES[name]
    path = tiny_checkpoint(family, **overrides)
    prompts = prompts_of(1, 7, 120)
    if "yarn" in name:
        prompts = prompts_of(1, 200)  # beyond the original context
    assert_equal_logits(run(path, prompts), reference_logits(load_reference(path), prompts))


def test_sharded_equals_single(tiny_checkpoint):
    single = tiny_checkpoint("llama")
    sharded = tiny_checkpoint("llama", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) >= 3
    prompts = prompts_of(9)
    assert torch.equal(run(single, prompts)[0], run(sharded, prompts)[0])


def test_biases_matter(tiny_checkpoint, tmp_path):
    """Guards the cases above: a loader that skipped the biases would not pass them."""
    path = tiny_checkpoint("qwen2")
    model = load_reference(path)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.zero_()
    model.save_pretrained(tmp_path)
    prompts = prompts_of(9)
    assert (run(path, prompts)[0] - run(tmp_path, prompts)[0]).abs().max() > 0.1
    assert_equal_logits(run(tmp_path, prompts), reference_logits(model, prompts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(tiny_checkpoint, dtype):
    path = tiny_checkpoint("qwen3", dtype=dtype)
    prompts = prompts_of(33)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    expected = reference_logits(load_reference(path), prompts)[0]
    theirs = (reference_logits(model, prompts)[0] - expected).abs().mean()
    ours = (run(path, prompts, dtype=dtype)[0] - expected).abs().mean()
    assert 0 < ours < 1.5 * theirs


# --- incremental decode ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_decoding_one_by_one_equals_recomputing(tiny_checkpoint, family):
    path = tiny_checkpoint(family)
    config = load_model_config(path)
    backend = DenseReferenceBackend()
    model = load_model(
        path, config, backend=backend, dtype=torch.float32, device="cpu", max_model_len=512
    )
    (tokens,) = prompts_of(300)
    whole = PagedRunner(model, backend, num_blocks=128).step([(0, tokens)])
    runner = PagedRunner(model, backend, num_blocks=128, block_size=7)
    rows = [runner.step([(0, [token])]) for token in tokens[:30]]
    chunks = [runner.step([(0, tokens[i : i + 45])]) for i in range(30, 300, 45)]
    torch.testing.assert_close(torch.cat(rows + chunks), whole, rtol=0, atol=TOLERANCE)


def test_mixed_batches_and_padding_change_nothing(tiny_checkpoint):
    """Prompt chunks beside decodes of other sequences, with padding tokens that own no slot."""
    path = tiny_checkpoint("qwen2")
    backend = DenseReferenceBackend()
    model = load_model(
        path,
        load_model_config(path),
        backend=backend,
        dtype=torch.float32,
        device="cpu",
        max_model_len=512,
    )
    a, b, c = prompts_of(20, 33, 11)
    runner = PagedRunner(model, backend, block_size=3)
    first = runner.step([(0, a[:8]), (1, b[:1])])
    second = runner.step([(1, b[1:2]), (2, c), (0, a[8:15])], padding=5)
    third = runner.step([(0, a[15:]), (1, b[2:])], padding=1)
    for tokens, parts in (
        (a, [first[:8], second[12:19], third[:5]]),
        (b, [first[8:], second[:1], third[5:]]),
        (c, [second[1:12]]),
    ):
        alone = PagedRunner(model, backend).step([(0, tokens)])
        torch.testing.assert_close(torch.cat(parts), alone, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("backend_class", [DenseReferenceBackend, TorchBlockwiseBackend])
def test_last_tokens_alone_equal_those_of_all(tiny_checkpoint, backend_class):
    """The last layer computes what is read of it and stores the keys and values of every token."""
    path = tiny_checkpoint("qwen3")
    config = load_model_config(path)
    backend = DenseReferenceBackend()
    if backend_class is TorchBlockwiseBackend:
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        backend = TorchBlockwiseBackend(*heads, block_size=4, dtype=torch.float32)
    model = load_model(
        path, config, backend=backend, dtype=torch.float32, device="cpu", max_model_len=512
    )
    a, b, c = prompts_of(20, 33, 11)
    steps = [[(0, a[:8]), (1, b[:1])], [(1, b[1:2]), (2, c), (0, a[8:15])], [(0, a[15:])]]
    steps += [[(0, a[:1]), (1, b[2:3]), (2, c[:1])]]
    whole, narrow = PagedRunner(model, backend), PagedRunner(model, backend)
    for rows in steps:
        last = torch.tensor([len(tokens) for _, tokens in rows]).cumsum(0) - 1
        found = narrow.step(rows, last_only=True)
        torch.testing.assert_close(found, whole.step(rows)[last], rtol=0, atol=1e-5)
    assert torch.equal(narrow.kv_cache.isnan(), whole.kv_cache.isnan())


# --- GGUF -----------------------------------------------------------------------------------------

GGUF_CASES = ["llama", "llama tied", "llama MQA", "mistral", "qwen2", "qwen2 untied", "qwen3"]


@pytest.mark.parametrize("name", GGUF_CASES)
def test_gguf_equals_safetensors(tiny_checkpoint, tmp_path, name):
    family, overrides = CASES[name]
    path = tiny_checkpoint(family, **overrides)
    file = tmp_path / "model.gguf"
    write_gguf(file, load_reference(path))
    prompts = prompts_of(5, 40)
    for ours, theirs in zip(run(file, prompts), run(path, prompts), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_yarn_equals_transformers(tiny_checkpoint, tmp_path, family):
    path = tiny_checkpoint(family, rope_scaling=YARN, max_position_embeddings=64)
    file = tmp_path / "model.gguf"
    scaling = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 64,
    }
    write_gguf(file, load_reference(path), **scaling)
    assert load_model_config(file).max_position_embeddings == 256
    prompts = prompts_of(200)
    assert_equal_logits(run(file, prompts), reference_logits(load_reference(path), prompts))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_gguf_quantized_equals_its_own_values(tiny_checkpoint, tmp_path, kind):
    """The reference holds the values that the file's format defines, set into transformers."""
    overrides = {"hidden_size": 96, "intermediate_size": 128}
    model = load_reference(tiny_checkpoint("llama", **overrides))
    quantization = gguf.GGMLQuantizationType[kind]
    file = tmp_path / "model.gguf"
    write_gguf(file, model, quantization)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            packed = gguf.quantize(parameter.detach().numpy(), quantization)
            values = torch.from_numpy(gguf.dequantize(packed, quantization).copy())
            assert not torch.equal(values, parameter), name
            parameter.data.copy_(values)
    prompts = prompts_of(40)
    assert_equal_logits(run(file, prompts), reference_logits(model, prompts))


# --- the embedded model ---------------------------------------------------------------------------

DEMO_PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


def test_embedded_model_equals_transformers_reading_the_same_file(demo_gguf, demo_llama_dir):
    expected = reference_logits(load_reference(demo_llama_dir), [DEMO_PROMPT])
    assert_equal_logits(run(demo_gguf, [DEMO_PROMPT], max_model_len=64), expected)


def test_embedded_model_as_qwen2_gives_the_same_logits(demo_gguf, demo_qwen2_dir):
    assert load_model_config(demo_qwen2_dir).architecture == "Qwen2ForCausalLM"
    as_qwen2 = run(demo_qwen2_dir, [DEMO_PROMPT], max_model_len=64)[0]
    torch.testing.assert_close(
        as_qwen2, run(demo_gguf, [DEMO_PROMPT], max_model_len=64)[0], rtol=0, atol=TOLERANCE
    )


def test_demo_directories_are_complete(demo_llama_dir, demo_qwen2_dir, tmp_path):
    """transformers loads the Qwen2 form with no tensor missing and finds the same tokenizer."""
    shutil.copytree(demo_qwen2_dir, tmp_path / "copy", symlinks=True)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "copy", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    llama, qwen2 = (
        transformers.AutoTokenizer.from_pretrained(path)
        for path in (demo_llama_dir, demo_qwen2_dir)
    )
    text = "Hello  world\n 123 é"
    assert llama(text).input_ids == qwen2(text).input_ids
