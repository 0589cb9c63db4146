"""GGUF files as a stream of Hugging Face tensors.

Quantized tensors are expanded to float32 with the values the format defines. Files of the llama
architecture store the rows of q and k interleaved for their own rotary layout, which is undone.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize

from pageserve.checkpoint import ModelError, TensorInfo, read_gguf_header
from pageserve.model_config import ModelConfig
from pageserve.models.weights import NamedTensor, Progress, byte_progress

_GLOBAL_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_IN_CONFIG = "rope_freqs.weight"


def iterate_gguf(
    path: Path, config: ModelConfig, progress: Progress | None = None
) -> Iterator[NamedTensor]:
    """Yield the tensors of a .gguf file in float32 under their Hugging Face names.

    ``progress`` is told (phase, bytes read, bytes in all). Raises
    :class:`~pageserve.checkpoint.ModelError` for a truncated file or an unreadable tensor.
    """
    header = read_gguf_header(path)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    interleaved = heads if header.metadata["general.architecture"] == "llama" else {}
    report = byte_progress(header.tensors.values(), progress)
    data = np.memmap(path, mode="r")
    for info in header.tensors.values():
        if info.name != _IN_CONFIG:
            name, part = _hugging_face_name(info.name)
            tensor = _expand(data, info)
            if part in interleaved:
                tensor = _deinterleave(tensor, interleaved[part])
            yield name, tensor
        report(info)


def _hugging_face_name(name: str) -> tuple[str, str]:
    """Return the Hugging Face name, the given one if there is none, and the part it names."""
    if match := _LAYER_NAME.fullmatch(name):
        layer, part, kind = match.groups()
        return f"layers.{layer}.{_LAYER_NAMES.get(part, part)}.{kind}", part
    part, _, kind = name.rpartition(".")
    return f"{_GLOBAL_NAMES.get(part, part)}.{kind}", part


def _expand(data: np.ndarray, info: TensorInfo) -> torch.Tensor:
    raw = data[info.offset : info.offset + info.nbytes]
    try:
        values = dequantize(raw.reshape(-1), GGMLQuantizationType[info.dtype])
    except NotImplementedError as error:
        raise ModelError(
            f"{info.file}: tensor {info.name} has the type {info.dtype}, which cannot be read"
        ) from error
    if not values.flags.writeable:  # a view of the file, which torch would have to write-protect
        values = values.copy()
    return torch.from_numpy(values).float().reshape(info.shape)


def _deinterleave(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Bring each head's rows from pairs (0, d/2, 1, d/2 + 1, ...) into their natural order."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
