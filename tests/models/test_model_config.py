"""What config.json, generation_config.json, the tokenizer and GGUF metadata mean."""

from pathlib import Path

import pytest
from helpers import edit_json

from pageserve.checkpoint import ModelError
from pageserve.config import ConfigError
from pageserve.model_config import (
    RopeConfig,
    load_generation_defaults,
    load_model_config,
    parse_generation_defaults,
)
from pageserve.sampling_params import GenerationDefaults

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def config(tmp_path):
    """Return ``config(**keys)``: the configuration of a directory with BASE changed by them."""

    def make(**keys):
        (tmp_path / "config.json").unlink(missing_ok=True)
        edit_json(tmp_path / "config.json", **(BASE | keys))
        return load_model_config(tmp_path)

    return make


def test_defaults_of_a_family(config):
    llama = config()
    assert (llama.num_kv_heads, llama.head_dim, llama.rope) == (4, 16, RopeConfig())
    assert not (llama.tie_word_embeddings or llama.qkv_bias or llama.o_bias or llama.qk_norm)
    qwen2 = config(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2)
    assert qwen2.qkv_bias and not qwen2.o_bias and qwen2.num_kv_heads == 2
    qwen3 = config(architectures=["Qwen3ForCausalLM"], attention_bias=True)
    assert qwen3.qk_norm and qwen3.qkv_bias and qwen3.o_bias and qwen3.head_dim == 128
    mistral = config(architectures=..., model_type="mistral", num_key_value_heads=None)
    assert (mistral.architecture, mistral.num_kv_heads) == ("MistralForCausalLM", 4)


# --- positions ------------------------------------------------------------------------------------


def test_scaling_under_every_name(config):
    expected = RopeConfig(500000.0, "llama3", 32.0, 8192, 1.0, 4.0)
    for content in (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3", "type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
    ):
        assert config(**content).rope == expected


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"type": None}, {}])
def test_unscaled(config, scaling):
    assert config(rope_scaling=scaling, rope_theta=3e4).rope == RopeConfig(3e4)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["made-up", "longrope", "su"])
def test_unknown_scaling_is_refused_by_name(config, key, name):
    with pytest.raises(ModelError, match=f"RoPE type {name}"):
        config(rope_scaling={key: name, "factor": 2.0})


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear"},
        {"type": "linear", "factor": "2"},
        {"type": "linear", "factor": 0.5},
        {"type": "yarn"},
        {"type": "llama3", "factor": 8.0},
        LLAMA3 | {"type": "llama3", "low_freq_factor": 4.0},
        {"type": "default", "partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_broken_scaling_is_refused(config, scaling):
    with pytest.raises(ModelError, match="factor"):
        config(rope_scaling=scaling)


def test_context_limits(config):
    def limit(scaling, **keys):
        return config(rope_scaling=scaling, **keys).max_position_embeddings

    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert limit(yarn, max_position_embeddings=64) == 256
    assert limit(yarn, max_position_embeddings=256) == 256
    assert limit({"type": "yarn", "factor": 4.0}, max_position_embeddings=64) == 256
    assert limit({"type": "linear", "factor": 4.0}) == 1024
    assert limit({"type": "dynamic", "factor": 4.0}) == 256, "dynamic is exact in its own context"
    assert limit(LLAMA3 | {"type": "llama3"}) == 256


# --- sliding windows ------------------------------------------------------------------------------


def test_sliding_window_limits_the_context(config):
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    limited = config(**mistral, sliding_window=100)
    assert limited.max_position_embeddings == 100
    assert "limited to 100 tokens" in limited.context_note
    assert config(**mistral, sliding_window=None).max_position_embeddings == 256
    assert config(**mistral, sliding_window=300).context_note == ""
    # Absent is not null: transformers' own default is a window of 4096.
    unsaid = config(**mistral, sliding_window=..., max_position_embeddings=32768)
    assert unsaid.max_position_embeddings == 4096


def test_sliding_window_of_qwen2(config):
    def limit(**keys):
        keys = {"use_sliding_window": True, "max_window_layers": 0} | keys
        config_ = config(architectures=["Qwen2ForCausalLM"], sliding_window=100, **keys)
        return config_.max_position_embeddings

    assert limit() == 100
    assert limit(use_sliding_window=False) == 256
    assert limit(max_window_layers=2) == 256, "no layer of the two slides"
    assert limit(layer_types=["full_attention", "full_attention"]) == 256
    assert limit(layer_types=["full_attention", "sliding_attention"], max_window_layers=2) == 100


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ...}, "no architecture"),
        ({"architectures": ..., "model_type": "gemma3"}, "gemma3"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": ...}, "has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size has the unusable value"),
        ({"num_hidden_layers": 0}, "num_hidden_layers has the unusable value"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_refusals_name_their_reason(config, keys, message):
    with pytest.raises(ModelError, match=message):
        config(**keys)


def test_no_config(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="JSON object"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


# --- end tokens -----------------------------------------------------------------------------------


def test_end_tokens_are_united(config, tmp_path):
    edit_json(tmp_path / "generation_config.json", eos_token_id=[2, 5])
    settings = {
        "eos_token": {"content": "</s>"},
        "added_tokens_decoder": {"7": {"content": "</s>"}},
    }
    edit_json(tmp_path / "tokenizer_config.json", **settings)
    assert config(eos_token_id=2).eos_token_ids == (2, 5, 7)


def test_tokenizer_end_token_from_tokenizer_json(config, tmp_path):
    edit_json(tmp_path / "tokenizer_config.json", eos_token="<e>")
    edit_json(tmp_path / "tokenizer.json", added_tokens=[{"id": 9, "content": "<e>"}], model={})
    assert config(eos_token_id=[3]).eos_token_ids == (3, 9)
    edit_json(tmp_path / "tokenizer.json", added_tokens=[], model={"vocab": {"<e>": 11}})
    assert config(eos_token_id=[3]).eos_token_ids == (3, 11)


def test_end_token_defaults_of_the_family(config):
    assert config().eos_token_ids == (2,)
    assert config(eos_token_id=None).eos_token_ids == ()
    assert config(architectures=["Qwen2ForCausalLM"]).eos_token_ids == ()


# --- generation defaults --------------------------------------------------------------------------


def test_generation_defaults(tmp_path):
    file = tmp_path / "generation_config.json"
    assert load_generation_defaults(tmp_path) == GenerationDefaults()
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    edit_json(file, do_sample=True, eos_token_id=2, **values)
    assert load_generation_defaults(tmp_path).as_dict() == values
    edit_json(file, do_sample=False)
    assert load_generation_defaults(tmp_path).as_dict() == values | {"temperature": 0.0}


@pytest.mark.parametrize(
    "values", [{"temperature": "hot"}, {"top_p": 2}, {"top_k": 1.5}, {"temperature": -1}], ids=str
)
def test_unusable_generation_defaults(tmp_path, values):
    edit_json(tmp_path / "generation_config.json", **values)
    with pytest.raises(ModelError, match=f"generation_config.json: .*{next(iter(values))}"):
        load_generation_defaults(tmp_path)


def test_overriding_generation_defaults():
    text = '{"temperature": 0, "top_k": 7, "min_p": null}'
    overrides = parse_generation_defaults(text)
    assert overrides.as_dict() == {"temperature": 0.0, "top_k": 7}
    both = overrides.over(GenerationDefaults(temperature=0.6, top_p=0.8))
    assert both == GenerationDefaults(temperature=0, top_p=0.8, top_k=7)


@pytest.mark.parametrize("text", ["", "[]", '{"heat": 1}', '{"top_p": 2}', '{"top_k": "7"}'])
def test_unusable_overrides_name_their_flag(text):
    with pytest.raises(ConfigError, match=r"--override-generation-config: .*temperature"):
        parse_generation_defaults(text)


# --- GGUF -----------------------------------------------------------------------------------------


def test_embedded_model(demo_gguf):
    config = load_model_config(demo_gguf)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49152)
    assert config.max_position_embeddings == 8192 and config.rope == RopeConfig(100000.0)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,)
    assert config.num_parameters == 134515008


def test_the_embedded_model_alone_has_defaults(demo_gguf):
    """Its authors recommend them; other .gguf files say nothing of sampling."""
    assert load_generation_defaults(demo_gguf).as_dict() == {"temperature": 0.2, "top_p": 0.9}
    assert load_generation_defaults(Path("other.gguf")) == GenerationDefaults()
