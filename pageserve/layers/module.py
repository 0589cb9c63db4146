"""The base of everything that holds weights."""

from typing import Any

from torch import nn


class Module(nn.Module):
    """A torch module without hooks: to call it is to call ``forward``.

    A step makes some hundred such calls, and looking for hooks costs more than what some do.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__call__ = cls.forward  # type: ignore[method-assign]
