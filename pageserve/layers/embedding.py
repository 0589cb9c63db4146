"""Token ids to vectors."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pageserve.layers.module import Module


class Embedding(Module):
    """A table of one vector per token id; ``weight`` is [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(vocab_size, hidden_size, **factory), requires_grad=False
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens] ids to [num_tokens, hidden_size]."""
        return F.embedding(input_ids, self.weight)
