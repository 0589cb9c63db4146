"""What a checkpoint says about its model: shapes, positions, end tokens and sampling defaults.

:func:`load_model_config` reads a Hugging Face directory or a GGUF file into one
:class:`ModelConfig`. Whatever the engine cannot compute exactly is refused here by name; nothing
is ever ignored in silence.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from pageserve.checkpoint import (
    GGUFHeader,
    ModelError,
    TensorInfo,
    list_tensors,
    read_gguf_header,
    read_json,
)
from pageserve.config import ConfigError
from pageserve.hub import DEMO_FILE
from pageserve.sampling_params import GenerationDefaults, ParameterError, SamplingParams

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

# What a family does when its config.json leaves a key out. A null in the file is not that: it
# switches a sliding window off, for one.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "head_dim": 128},
}
MODEL_TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}

_DTYPES = {
    "float32": "float32",
    "float64": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "F64": "float32",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; each field belongs to the types named in its comment."""

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0  # all but default
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, scale of cos and sin (None: from the factor)
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    freq_divisors: tuple[float, ...] | None = None  # a GGUF file's own table, head_dim / 2 values


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama line.

    ``max_position_embeddings`` is the longest context served exactly, in tokens; where that is
    less than the checkpoint claims, ``context_note`` says why. ``dtype`` is that of the stored
    weights. ``eos_token_ids`` unites config, generation config and tokenizer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    context_note: str = ""

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, a tied head counted once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = 2 * hidden * (q_size + kv_size) + 3 * hidden * inner + 2 * hidden
        layer += self.qkv_bias * (q_size + 2 * kv_size) + self.o_bias * hidden
        layer += self.mlp_bias * (2 * inner + hidden) + self.qk_norm * 2 * self.head_dim
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + hidden


# What the embedded model's authors recommend; at temperature 1 it rambles.
DEMO_DEFAULTS = GenerationDefaults(temperature=0.2, top_p=0.9)


def load_model_config(path: Path) -> ModelConfig:
    """Read the configuration of a model directory or .gguf file.

    Raises :class:`ModelError` that names the file and the key for anything missing, malformed or
    not served.
    """
    return _from_gguf(path) if path.suffix == ".gguf" else _from_directory(path)


def load_generation_defaults(path: Path) -> GenerationDefaults:
    """Read generation_config.json beside the weights, where ``do_sample: false`` means temperature
    0; of .gguf files, which have none, only the embedded model has defaults.

    Raises :class:`ModelError` for values no request could use.
    """
    file = path / "generation_config.json"
    if path.name == DEMO_FILE:
        return DEMO_DEFAULTS
    if path.suffix == ".gguf" or not file.exists():
        return GenerationDefaults()
    content = read_json(file)
    values = {key: content.get(key) for key in GenerationDefaults.__dataclass_fields__}
    if content.get("do_sample") is False:
        values["temperature"] = 0.0
    defaults = GenerationDefaults(**values)
    try:
        msgspec.convert(defaults.as_dict(), SamplingParams).validate()
    except (ParameterError, msgspec.ValidationError) as error:
        raise ModelError(f"{file}: {error} (--generation-config none ignores it)") from error
    return defaults


def parse_generation_defaults(text: str) -> GenerationDefaults:
    """Read the value of --override-generation-config, a JSON object.

    Raises :class:`ConfigError` for what is no such object and for values no request could use.
    """
    try:
        values = msgspec.json.decode(text, type=dict[str, float | int | None])
        defaults = GenerationDefaults(**values)
        msgspec.convert(defaults.as_dict(), SamplingParams).validate()
    except (ParameterError, msgspec.MsgspecError, TypeError) as error:
        known = ", ".join(GenerationDefaults.__dataclass_fields__)
        raise ConfigError(
            f"--override-generation-config: {error}; it takes a JSON object with some of {known}"
        ) from error
    return defaults


# --- Hugging Face directories ---------------------------------------------------------------------


class _Fields:
    """Typed look-ups in a config.json; null reads as the caller's default."""

    def __init__(self, content: dict[str, Any], source: str) -> None:
        self.content, self.source = content, source

    def get(self, key: str, *kinds: type, default: Any = None) -> Any:
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ModelError(f"{self.source}: {key} has the unusable value {value!r}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive int; without a default the key is required."""
        value = self.get(key, int, default=default)
        if value is None:
            raise ModelError(f"{self.source} has no {key}")
        if value < 1:
            raise ModelError(f"{self.source}: {key} has the unusable value {value}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, int, float, default=default)
        if value is None:
            raise ModelError(f"{self.source} has no {key}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, bool, default=default))


def _from_directory(path: Path) -> ModelConfig:
    if not (path / "config.json").exists():
        raise ModelError(f"{path} holds no config.json, so it is not a model directory")
    content = read_json(path / "config.json")
    config = _from_fields(content, str(path / "config.json"))
    if not content.get("dtype") and not content.get("torch_dtype"):
        config = replace(config, dtype=_stored_dtype(list_tensors(path).values()))
    return replace(config, eos_token_ids=_directory_eos(path, config.eos_token_ids))


def _from_fields(content: dict[str, Any], source: str) -> ModelConfig:
    architecture = _architecture(content, source)
    fields = _Fields(FAMILIES[architecture] | content, source)
    _refuse_unsupported(fields)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{source}: {num_heads} heads cannot share {num_kv_heads} KV heads")
    rope, limit = _rope(fields)
    limit, note = _limit_to_window(fields, architecture, limit)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.size("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=limit,
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=architecture == "Qwen2ForCausalLM" or _attention_bias(fields, architecture),
        o_bias=_attention_bias(fields, architecture),
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=_token_ids(fields.content.get("eos_token_id"), source),
        dtype=_declared_dtype(fields),
        context_note=note,
    )


def _architecture(content: dict[str, Any], source: str) -> str:
    names = content.get("architectures") or [MODEL_TYPES.get(str(content.get("model_type")))]
    name = names[0] if isinstance(names, list) and names else None
    if name not in FAMILIES:
        shown = name or content.get("model_type") or "no architecture"
        raise ModelError(f"{source} names {shown}; served are {', '.join(FAMILIES)}")
    return str(name)


def _refuse_unsupported(fields: _Fields) -> None:
    source = fields.source
    if quantization := fields.content.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(f"{source}: quantized checkpoints ({method or 'unknown'}) are not served")
    if (activation := fields.get("hidden_act", str, default="silu")) not in ("silu", "swish"):
        raise ModelError(f"{source}: hidden_act {activation} is not served, only silu")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor other than 1 is not served")


def _attention_bias(fields: _Fields, architecture: str) -> bool:
    families = ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return architecture in families and fields.flag("attention_bias")


def _declared_dtype(fields: _Fields) -> str:
    name = fields.content.get("dtype") or fields.content.get("torch_dtype") or "float32"
    dtype = _DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ModelError(f"{fields.source}: dtype {name} is not served")
    return dtype


def _stored_dtype(tensors: Iterable[TensorInfo]) -> str:
    """Return the dtype of the first floating tensor, as transformers' ``auto`` does."""
    return next((_DTYPES[info.dtype] for info in tensors if info.dtype in _DTYPES), "float32")


# --- positions ------------------------------------------------------------------------------------


def _rope(fields: _Fields) -> tuple[RopeConfig, int]:
    """Return the rotary settings and the longest context they serve.

    ``dynamic`` rescales all positions as a sequence grows beyond the trained context, which a
    shared KV pool cannot follow; within that context it is plain RoPE, so the context ends there.
    """
    limit = fields.size("max_position_embeddings")
    content = fields.get("rope_scaling", dict) or fields.get("rope_parameters", dict) or {}
    scaling = _Fields(content, f"{fields.source}: rope_parameters")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{fields.source}: partial_rotary_factor other than 1 is not served")
    name = content.get("rope_type") or content.get("type") or "default"
    if name not in get_args(RopeType):
        served = ", ".join(get_args(RopeType))
        raise ModelError(f"{fields.source}: RoPE type {name} is not served; served are {served}")
    if name in ("default", "dynamic"):
        return RopeConfig(theta, name), limit
    factor = scaling.number("factor")
    if factor < 1:
        raise ModelError(f"{scaling.source}: factor has the unusable value {factor}")
    if name == "linear":
        return RopeConfig(theta, "linear", factor), int(limit * factor)
    original = fields.size(  # a key beside the scaling wins, as in transformers
        "original_max_position_embeddings",
        scaling.size("original_max_position_embeddings", limit),
    )
    if name == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if not 0 < low < high:
            raise ModelError(f"{scaling.source}: low_freq_factor must lie below high_freq_factor")
        return RopeConfig(theta, "llama3", factor, original, low, high), limit
    yarn = RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        attention_factor=scaling.get("attention_factor", int, float),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        mscale=scaling.get("mscale", int, float),
        mscale_all_dim=scaling.get("mscale_all_dim", int, float),
        truncate=scaling.flag("truncate", True),
    )
    return yarn, max(limit, int(original * factor))


def _limit_to_window(fields: _Fields, architecture: str, limit: int) -> tuple[int, str]:
    """Return the context in which sliding-window and full attention agree, and a note if less.

    A window of w tokens sees position p from p + w - 1 at most, so up to w tokens nothing slides.
    """
    window = fields.get("sliding_window", int)
    if window is None or not _window_is_active(fields, architecture) or window >= limit:
        return limit, ""
    note = f"the context is limited to {window} tokens, the model's sliding attention window"
    return window, note


def _window_is_active(fields: _Fields, architecture: str) -> bool:
    if architecture == "MistralForCausalLM":
        return True
    if architecture == "LlamaForCausalLM" or not fields.flag("use_sliding_window"):
        return False
    layer_types = fields.get("layer_types", list)
    if layer_types is not None:
        return "sliding_attention" in layer_types
    first_sliding = fields.get("max_window_layers", int, default=28)
    return bool(first_sliding < fields.size("num_hidden_layers"))


# --- end tokens -----------------------------------------------------------------------------------


def _token_ids(value: Any, source: str) -> tuple[int, ...]:
    """Return the ids in an id, a list of ids or null, in ascending order."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"{source}: eos_token_id has the unusable value {value!r}")
    return tuple(sorted(set(ids)))


def _directory_eos(path: Path, ids: tuple[int, ...]) -> tuple[int, ...]:
    found = set(ids)
    file = path / "generation_config.json"
    if file.exists():
        found.update(_token_ids(read_json(file).get("eos_token_id"), str(file)))
    token_id = _tokenizer_eos(path)
    return tuple(sorted(found if token_id is None else found | {token_id}))


def _tokenizer_eos(path: Path) -> int | None:
    """Return the id of the tokenizer's eos_token, None if it has none."""
    settings = _optional_json(path / "tokenizer_config.json")
    token = settings.get("eos_token") or _optional_json(path / "special_tokens_map.json").get(
        "eos_token"
    )
    if isinstance(token, dict):
        token = token.get("content")
    if not token:
        return None
    for token_id, added in (settings.get("added_tokens_decoder") or {}).items():
        if added.get("content") == token:
            return int(token_id)
    tokenizer = _optional_json(path / "tokenizer.json")
    for added in tokenizer.get("added_tokens") or ():
        if added.get("content") == token:
            return int(added["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return vocab.get(token) if isinstance(vocab, dict) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


# --- GGUF -----------------------------------------------------------------------------------------

_GGUF_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_GGUF_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
_GGUF_EOS = ("eos", "eot", "eom")


def _from_gguf(path: Path) -> ModelConfig:
    """Put the metadata into config.json's words, so that both roads share one set of checks."""
    header = read_gguf_header(path)
    metadata, tensors = header
    name = str(metadata.get("general.architecture"))
    if name not in _GGUF_FAMILIES:
        raise ModelError(
            f"{path} holds the architecture {name}; served are {', '.join(_GGUF_FAMILIES)}"
        )
    if metadata.get(f"{name}.expert_count"):
        raise ModelError(f"{path} holds a mixture of experts, which is not served")
    content = {hf: metadata.get(f"{name}.{key}") for key, hf in _GGUF_KEYS.items()}
    content |= {
        "architectures": [_GGUF_FAMILIES[name]],
        "vocab_size": _gguf_vocab_size(path, header),
        "rope_scaling": _gguf_rope_scaling(metadata, name),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    config = _from_fields({k: v for k, v in content.items() if v is not None}, str(path))
    rotated = metadata.get(f"{name}.rope.dimension_count", config.head_dim)
    if not rotated == metadata.get(f"{name}.attention.value_length", rotated) == config.head_dim:
        raise ModelError(f"{path}: partly rotated heads or values of another size are not served")
    eos_ids = (metadata.get(f"tokenizer.ggml.{end}_token_id") for end in _GGUF_EOS)
    return replace(
        config,
        rope=replace(config.rope, freq_divisors=_gguf_freq_divisors(tensors)),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        eos_token_ids=tuple(sorted({i for i in eos_ids if i is not None})),
        dtype=_gguf_dtype(tensors),
    )


def _gguf_vocab_size(path: Path, header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path} has no tensor token_embd.weight")
    return embedding.shape[0]


def _gguf_rope_scaling(metadata: dict[str, Any], name: str) -> dict[str, Any] | None:
    def get(key: str) -> Any:
        return metadata.get(f"{name}.rope.{key}")

    kind = get("scaling.type")
    if kind is None and get("scale_linear"):
        return {"rope_type": "linear", "factor": get("scale_linear")}
    if kind in (None, "none"):
        return None
    scaling = {
        "rope_type": kind,
        "factor": get("scaling.factor"),
        "original_max_position_embeddings": get("scaling.original_context_length"),
        "beta_fast": get("scaling.yarn_beta_fast"),
        "beta_slow": get("scaling.yarn_beta_slow"),
    }
    if get("scaling.attn_factor") not in (None, 1.0):
        raise ModelError(f"{name}.rope.scaling.attn_factor other than 1 is not served")
    return scaling


def _gguf_freq_divisors(tensors: dict[str, TensorInfo]) -> tuple[float, ...] | None:
    """Return the table by which Llama 3 files divide their frequencies."""
    info = tensors.get("rope_freqs.weight")
    if info is None:
        return None
    if info.dtype != "F32" or len(info.shape) != 1:
        raise ModelError(f"{info.file}: rope_freqs.weight has an unexpected type")
    with info.file.open("rb") as stream:
        stream.seek(info.offset)
        return struct.unpack(f"<{info.shape[0]}f", stream.read(info.nbytes))


def _gguf_dtype(tensors: dict[str, TensorInfo]) -> str:
    """Return the precision to work in: that of the matrices, bfloat16 where they are quantized."""
    matrices = {info.dtype for info in tensors.values() if len(info.shape) > 1}
    return _DTYPES.get(matrices.pop(), "bfloat16") if len(matrices) == 1 else "bfloat16"
