"""Checkpoint tensors into a model's parameters, each exactly once.

Every tensor has one place, found by its Hugging Face name; what is missing, left over or of
another shape stops the load with a :class:`ModelError`, so no parameter stays uninitialised.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from pageserve.checkpoint import ModelError, TensorInfo, list_tensors
from pageserve.layers.linear import MergedLinear
from pageserve.models.decoder import DecoderForCausalLM

logger = logging.getLogger(__name__)

NamedTensor = tuple[str, torch.Tensor]
Progress = Callable[[str, int, int], None]

# Tables that old checkpoints store although they follow from the configuration.
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_HEAD = "lm_head.weight"


def load_weights(model: DecoderForCausalLM, tensors: Iterable[NamedTensor]) -> None:
    """Copy named tensors into ``model``, casting to its dtype and device.

    Raises :class:`~pageserve.checkpoint.ModelError` that names the tensor at fault.
    """
    targets = weight_targets(model)
    spare_head, unknown = None, []
    pending = set(targets)
    for name, tensor in tensors:
        name = name.removeprefix("model.")
        if name in pending:
            _copy(targets[name], tensor, name)
            pending.discard(name)
        elif name == _HEAD and model.config.tie_word_embeddings:
            spare_head = tensor
        elif not name.endswith(_DERIVED):
            unknown.append(name)
    if pending:
        raise ModelError(f"the checkpoint lacks {_list(pending)}")
    if unknown:
        raise ModelError(f"the checkpoint has tensors this model does not know: {_list(unknown)}")
    if spare_head is not None:
        _keep_differing_head(model, spare_head)


def weight_targets(model: DecoderForCausalLM) -> dict[str, torch.Tensor]:
    """Return where each checkpoint tensor goes: its name less ``model.`` → a view to fill."""
    targets: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                parent = path.rpartition(".")[0]
                for part, rows in module.rows.items():
                    targets[f"{parent}.{part}.{kind}"] = parameter[rows]
            else:
                targets[f"{path}.{kind}"] = parameter
    if model.config.tie_word_embeddings:
        del targets[_HEAD]
    return targets


def iterate_safetensors(path: Path, progress: Progress | None = None) -> Iterator[NamedTensor]:
    """Yield the tensors of a model directory, file by file, one in memory at a time.

    ``progress`` is told (phase, bytes read, bytes in all). Raises
    :class:`~pageserve.checkpoint.ModelError` that names the file for missing or damaged shards.
    """
    infos = list_tensors(path)
    report = byte_progress(infos.values(), progress)
    for file in dict.fromkeys(info.file for info in infos.values()):
        try:
            with safe_open(file, framework="pt", device="cpu") as stream:
                for name in stream.keys():  # noqa: SIM118 (not a mapping)
                    yield name, stream.get_tensor(name)
                    report(infos[name])
        except SafetensorError as error:
            raise ModelError(f"{file} cannot be read: {error}") from error


def byte_progress(
    infos: Iterable[TensorInfo], progress: Progress | None
) -> Callable[[TensorInfo], None]:
    """Return a function that counts one tensor as loaded and tells ``progress``."""
    total, done = sum(info.nbytes for info in infos), 0

    def report(info: TensorInfo) -> None:
        nonlocal done
        done += info.nbytes
        if progress is not None:
            progress("loading weights", done, total)

    return report


def _copy(target: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    if target.shape != tensor.shape:
        raise ModelError(
            f"tensor {name} has the shape {list(tensor.shape)}, not {list(target.shape)}"
        )
    target.copy_(tensor)


def _keep_differing_head(model: DecoderForCausalLM, head: torch.Tensor) -> None:
    """Use a stored head although the configuration ties it, if it is not the embedding.

    transformers does the same; a head that equals the embedding stays tied.
    """
    tied = model.embed_tokens.weight
    if head.shape == tied.shape and torch.equal(head.to(tied), tied):
        return
    untied = torch.empty_like(tied)
    _copy(untied, head, _HEAD)
    model.lm_head.weight = nn.Parameter(untied, requires_grad=False)
    logger.warning(
        "the configuration ties lm_head to the embedding, but the checkpoint holds another "
        "lm_head.weight, which is used"
    )


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
