"""Checkpoints, caches and reference computations that tests of several packages share."""

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pageserve.attention import AttentionMetadata

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENIZER_SIZE = 320
VOCAB_SIZE = 328  # a few rows of padding, as real checkpoints have

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"rms_norm_eps": 1e-5}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "rope_theta": 1e6}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
}


# --- tiny random checkpoints ----------------------------------------------------------------------


def make_tiny_checkpoint(
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """Save a random model of ``family`` with a tokenizer to ``folder`` and return it.

    ``overrides`` go to the transformers configuration. Every weight matters: biases and norms
    are far from their neutral values.
    """
    config_class, defaults = FAMILIES[family]
    config = config_class(**(_COMMON | defaults | overrides))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(model)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(folder)
    return model


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Give matrices a size that keeps activations near 1, norms 1 ± 0.2 and biases ± 0.5."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                scale = 1.0 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5
                parameter.copy_(noise * scale)
            else:
                parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.5 * noise)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of TOKENIZER_SIZE tokens with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s?\w+|\s?[^\s\w]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = (
        "the cat sat on the mat and the dog sat there too; then another one came in the rain. "
        "What would you answer to somebody who asks how many tokens a short sentence has? "
        "Please write one line of code, explain it, and return a number between 1 and 100."
    )
    tokenizer.train_from_iterator([text] * 20, trainer)
    assert tokenizer.get_vocab_size() == TOKENIZER_SIZE, tokenizer.get_vocab_size()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )


def edit_json(file: Path, **changes: Any) -> None:
    """Set top-level keys of a JSON file; the value ``...`` removes a key."""
    content = json.loads(file.read_text()) if file.exists() else {}
    content |= changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


# --- GGUF -----------------------------------------------------------------------------------------


def write_gguf(
    file: Path,
    model: transformers.PreTrainedModel,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **metadata: Any,
) -> None:
    """Write ``model`` as llama.cpp's converter does: llama's q and k interleaved, norms in F32.

    ``metadata`` adds keys of the architecture, with ``__`` for a dot.
    """
    config = model.config
    arch = config.model_type if config.model_type != "mistral" else "llama"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{arch}.{key.replace('__', '.')}", value)
    names = gguf.get_tensor_name_map(_arch_enum(arch), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().numpy()
        module, _, kind = name.rpartition(".")
        if arch == "llama" and (part := module.rpartition(".")[2]) in heads:
            values = interleave(values, heads[part])
        target = f"{names.get_name(module)}.{kind}"
        if values.ndim == 1 or quantization is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, np.ascontiguousarray(values))
        else:
            packed = gguf.quantize(np.ascontiguousarray(values), quantization)
            writer.add_tensor(target, packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arch_enum(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Order each head's rows 0, d/2, 1, d/2 + 1, ... as GGUF files of the llama family do."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


# --- the embedded model as Hugging Face directories -----------------------------------------------


def make_demo_llama(gguf_file: Path, folder: Path) -> None:
    """Convert the embedded model with transformers' own GGUF reader, in float32."""
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del model.config.quantization_config, model.hf_quantizer  # of the file it came from
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def make_demo_qwen2(llama: Path, folder: Path) -> None:
    """Turn the converted model into Qwen2: the same weights, and zero q, k and v biases."""
    shutil.copytree(llama, folder, copy_function=os.link)
    config = json.loads((folder / "config.json").read_text())
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    biases = {
        f"model.layers.{layer}.self_attn.{name}_proj.bias": torch.zeros(size)
        for layer in range(config["num_hidden_layers"])
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size))
    }
    weights, extra = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / weights)
    save_file(biases, folder / extra, metadata={"format": "pt"})
    with (folder / weights).open("rb") as stream:
        stored = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    weight_map = {name: weights for name in stored if name != "__metadata__"}
    weight_map |= dict.fromkeys(biases, extra)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").unlink()  # a link: writing through it would change the original
    for key in ("architectures", "model_type", "attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(key, None)
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config))


def cached_folder(folder: Path, make: Any, *args: Any) -> Path:
    """Return ``folder``, made by ``make(*args, scratch)`` and moved into place if it is absent."""
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            make(*args, made)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not folder.exists():
                    raise
    return folder


# --- running a model ------------------------------------------------------------------------------


class DenseReferenceBackend:
    """Attention as in the textbook: gather a row's KV, mask, softmax. Slow and obviously right."""

    supports_cuda_graph = False
    fuses_rope = False

    def build_metadata(self, *args: Any) -> AttentionMetadata:
        return AttentionMetadata(*args)

    def narrow(self, metadata: AttentionMetadata) -> AttentionMetadata:
        starts = torch.arange(len(metadata.query_start_loc), dtype=torch.int32)
        return replace(metadata, query_start_loc=starts, max_query_len=1)

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for row, length in enumerate(lengths):
            begin, end = starts[row], starts[row + 1]
            blocks = kv_cache[:, metadata.block_table[row].long()]  # [2, n, kv heads, size, dim]
            keys, values = blocks.transpose(1, 2).flatten(2, 3)[:, :, :length].float()
            group = query.shape[1] // keys.shape[0]
            keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
            scores = query[begin:end].transpose(0, 1).float() @ keys.transpose(1, 2) * scale
            future = (
                torch.arange(length)[None] > torch.arange(length - end + begin, length)[:, None]
            )
            weights = scores.masked_fill(future.to(scores.device), -torch.inf).softmax(-1)
            out[begin:end] = (weights @ values).transpose(0, 1).to(out.dtype)
        return out


class PagedRunner:
    """Drives a model over its own small pool: rows are (sequence id, new token ids)."""

    def __init__(
        self, model: Any, backend: Any, *, num_blocks: int = 64, block_size: int = 4
    ) -> None:
        c = model.config
        self.model, self.backend, self.block_size = model, backend, block_size
        shape = (c.num_layers, 2, num_blocks, c.num_kv_heads, block_size, c.head_dim)
        dtype = model.embed_tokens.weight.dtype
        self.kv_cache = torch.full(shape, float("nan"), dtype=dtype)  # unwritten KV must not matter
        order = torch.Generator().manual_seed(0)
        self.free = torch.randperm(num_blocks, generator=order).tolist()
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    @torch.inference_mode()
    def step(
        self, rows: list[tuple[int, list[int]]], padding: int = 0, last_only: bool = False
    ) -> torch.Tensor:
        """Run one mixed batch and return the logits of all its tokens, [num_tokens, vocab], or
        those of each row's last one."""
        ids, positions, slots, starts, lengths = [], [], [], [0], []
        for sequence, tokens in rows:
            start = self.lengths.get(sequence, 0)
            self.lengths[sequence] = end = start + len(tokens)
            blocks = self.blocks.setdefault(sequence, [])
            while len(blocks) * self.block_size < end:
                blocks.append(self.free.pop())
            ids += tokens
            positions += range(start, end)
            size = self.block_size
            slots += [blocks[p // size] * size + p % size for p in range(start, end)]
            starts.append(len(ids))
            lengths.append(end)
        width = max(len(self.blocks[sequence]) for sequence, _ in rows)
        table = torch.zeros(len(rows), width, dtype=torch.int32)
        for row, (sequence, _) in enumerate(rows):
            table[row, : len(self.blocks[sequence])] = torch.tensor(self.blocks[sequence])
        metadata = self.backend.build_metadata(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            table,
            torch.tensor(slots + [-1] * padding),
            max(len(tokens) for _, tokens in rows),
            max(lengths),
        )
        pad = [0] * padding
        hidden = self.model(
            torch.tensor(ids + pad),
            torch.tensor(positions + pad),
            self.kv_cache,
            metadata,
            last_only,
        )
        return self.model.compute_logits(hidden[: len(ids)])
