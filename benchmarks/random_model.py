"""Write a checkpoint of a Qwen2.5 shape with seeded random weights and a stand-in tokenizer.

For measuring speed where no hub can be reached: every id below the vocabulary has a text of its
own, so that detokenising costs what it costs with a real model.

    python benchmarks/random_model.py 0.5b OUT_DIR
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES = {  # hidden, intermediate, layers, heads, kv heads, vocabulary, tied head
    "tiny": (256, 512, 2, 4, 2, 1024, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}


def write_random_model(shape: str, directory: Path, seed: int = 0) -> Path:
    """Write config, tokenizer and bfloat16 weights of ``shape``; returns ``directory``."""
    hidden, inter, layers, heads, kv_heads, vocab, tied = SHAPES[shape]
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "eos_token_id": vocab - 1,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(directory, vocab)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(seed)

    def weight(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator, device=device) * 0.02).bfloat16().cpu()

    head_dim = hidden // heads
    tensors = {
        "model.embed_tokens.weight": weight(vocab, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    if not tied:
        tensors["lm_head.weight"] = weight(vocab, hidden)
    for i in range(layers):
        p = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{p}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{p}self_attn.{name}_proj.weight"] = weight(n * head_dim, hidden)
            tensors[f"{p}self_attn.{name}_proj.bias"] = weight(n * head_dim)
        tensors[f"{p}self_attn.o_proj.weight"] = weight(hidden, heads * head_dim)
        tensors[f"{p}mlp.gate_proj.weight"] = weight(inter, hidden)
        tensors[f"{p}mlp.up_proj.weight"] = weight(inter, hidden)
        tensors[f"{p}mlp.down_proj.weight"] = weight(hidden, inter)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _write_tokenizer(directory: Path, vocab: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [f"Ġw{i}" for i in range(len(alphabet), vocab)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    write_random_model(args.shape, args.directory)
