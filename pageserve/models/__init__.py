"""Models: one decoder, filled from safetensors or GGUF."""

from pathlib import Path

import torch

from pageserve.attention import AttentionBackend
from pageserve.model_config import ModelConfig
from pageserve.models.decoder import DecoderForCausalLM
from pageserve.models.gguf import iterate_gguf
from pageserve.models.weights import Progress, iterate_safetensors, load_weights

__all__ = ["DecoderForCausalLM", "load_model"]


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int,
    progress: Progress | None = None,
) -> DecoderForCausalLM:
    """Build the model of a directory or .gguf file and fill it, in ``dtype`` on ``device``.

    ``progress`` is told (phase, bytes read, bytes in all). Raises
    :class:`~pageserve.model_config.ModelError` for files that do not hold exactly this model.
    """
    model = DecoderForCausalLM(config, backend, max_model_len, dtype, device)
    if path.suffix == ".gguf":
        load_weights(model, iterate_gguf(path, config, progress))
    else:
        load_weights(model, iterate_safetensors(path, progress))
    model.prepare()
    return model.eval()
