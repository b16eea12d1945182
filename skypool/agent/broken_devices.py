"""Finds out if a call has broken the context of a CUDA or ROCm device, which fails all later calls of its process.

After an error such as an illegal address or a failed assertion in a kernel, each use of the device in that process
fails. Only a new process can use it again.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from skypool.wire.error_text import text_of

_LIBRARIES = ("torch", "jaxlib", "cupy", "numba.cuda", "tensorflow", "pycuda")
"""Modules that use CUDA or ROCm devices. If a worker has loaded none of them, nothing is checked."""
_TYPES = frozenset({"AcceleratorError", "CUDARuntimeError", "CUDADriverError", "CudaAPIError"})
"""The names of exceptions that torch, CuPy and Numba raise for errors of a device."""
_WORDS = re.compile(
    r"CUDA (?:kernel |driver )?error|HIP error|CUDA_ERROR_|cudaError|hipError|CUDNN_STATUS|CUBLAS_STATUS"
)
"""Parts of the messages of device errors that torch before 2.8, JAX, TensorFlow and PyCUDA raise."""
_NOT_READY = 600
"""The status, from `cuStreamQuery`, of a context whose kernels still run."""
_FINE = frozenset({0, 3, 4, _NOT_READY})
"""The statuses of contexts that are not broken; 3 and 4 are those of a driver that is not initialized, or no longer."""
_LOOK = 0.0005
"""Seconds between two looks at a context whose kernels still run."""


def is_in_use() -> bool:
    """Return True if this process has loaded a library that uses CUDA or ROCm devices."""
    return any(name in sys.modules for name in _LIBRARIES)


def is_at_fault(error: BaseException) -> bool:
    """Return True if a device seems to be at fault: an exception, or one that led to it, looks like its error."""
    return any(type(each).__name__ in _TYPES or _WORDS.search(text_of(each)) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then all its causes and contexts, and the members of all exception groups among these."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions


class Contexts:
    """CUDA contexts of this process, as NVIDIA's driver knows them, whatever library made them.

    Nothing is loaded: if the driver's library is not loaded in this process, no context counts as broken.
    """

    def __init__(self) -> None:
        self._driver: Any = None

    def are_broken(self, patience: float = 0.0) -> bool:
        """Return True if a context of this process can no longer be used.

        Waits at most `patience` seconds for kernels that still run and may yet fail. Kernels on streams that are
        independent of the default stream are not waited for.
        """
        until = time.monotonic() + patience
        while True:
            statuses = self._statuses()
            if not _FINE.issuperset(statuses):
                return True
            if _NOT_READY not in statuses or time.monotonic() >= until:
                return False
            time.sleep(_LOOK)

    def _statuses(self) -> list[int]:
        """Return the status of each device's context in this process; [] if the driver is not loaded or initialised."""
        if self._driver is None:
            try:
                self._driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            except OSError:
                return []
        count = ctypes.c_int()
        if self._driver.cuDeviceGetCount(ctypes.byref(count)):
            return []  # it was not initialized
        return [self._status(device) for device in range(count.value)]

    def _status(self, device: int) -> int:
        """Return the status of the primary context of a device. Libraries use only these contexts."""
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        self._driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
        if not is_active.value:
            return 0
        context = ctypes.c_void_p()
        status: int = self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        if not status:
            status = self._driver.cuCtxPushCurrent_v2(context)
            if not status:
                status = self._driver.cuStreamQuery(None)
                self._driver.cuCtxPopCurrent_v2(ctypes.byref(context))
            self._driver.cuDevicePrimaryCtxRelease_v2(device)
        return status
