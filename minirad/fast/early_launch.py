"""Kernels that begin before the one in front of them has ended (Hopper's programmatic dependent launch).

Between two kernels the memory has nothing to do for one or two microseconds, which for a decode step of
one request adds up to a fifth of its time. A kernel that is launched with `launch_options` may start as
soon as all programs of the one in front have said `let_next_begin`; it may then read what no kernel writes
(weights), and calls `wait_for_previous` before it touches what another kernel wrote. Both do no harm
where the launch is an ordinary one.

Every kernel of such a chain has to wait, also one that reads nothing of the one before: otherwise the kernel
before that one might not have ended yet. Importing this module needs the package triton.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["launch_options", "let_next_begin", "share_most", "wait_for_previous"]

OLDEST_GPU = (9, 0)  # compute capability
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


@triton.jit
def let_next_begin():
    """The next kernel may start once all programs of this one have called this, or have ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_previous():
    """Waits until the kernel in front has ended and what it wrote can be seen."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """What to launch a kernel with that takes the constant EARLY."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST_GPU:
        return {"EARLY": False}
    from triton.backends.nvidia.compiler import CUDAOptions

    if "launch_pdl" not in CUDAOptions.__dataclass_fields__:  # Triton before 3.4
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@cache
def share_most(kernel: int) -> None:
    """Has processors that run a kernel (its CUfunction) keep all of their memory for sharing, none as cache.

    How a processor parts its memory holds for all kernels on it, and changes only when it is empty. Beside a
    kernel that shares little, the next one, which needs much, could not begin (bench/LOG.md).
    """
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(kernel), CARVEOUT, 100)
