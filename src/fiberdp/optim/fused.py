"""One generated function for filter, moments and update, where a compiler is at hand (torch.compile).

torch keeps what it compiled in the system's temporary folder (or TORCHINDUCTOR_CACHE_DIR), so a second process starts faster.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch


@cache
def available() -> bool:
    """Whether code for the CPU can be generated here: it needs a C++ compiler."""
    return sys.platform == "linux" and any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def fused(function: Callable[..., None]) -> Callable[..., None] | None:
    """`function` compiled for vectors of any length; None where that cannot be had.

    Numbers among its arguments reach the generated code as 0-dimensional tensors, so that another learning rate is not another
    function.  If the compiler fails at the first call, `function` runs as it is, with a warning.
    """
    if not available():
        return None
    # imported late: together they take two seconds
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError
    from torch.utils._pytree import tree_map

    # its own code object: torch keeps generated code by code object, at most eight versions of each, whoever asked for them
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__)
    chosen: list[Callable[..., None]] = [torch.compile(own, dynamic=True)]

    def call(*arguments: Any) -> None:
        try:
            chosen[0](*tree_map(_number_to_tensor, arguments))
        except (TorchDynamoException, InductorError) as error:
            warnings.warn(f"the update could not be compiled ({str(error).splitlines()[0][:120]}): it runs uncompiled.", stacklevel=3)
            chosen[0] = function
            function(*arguments)

    return call


def _number_to_tensor(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, (int, float)) else value
