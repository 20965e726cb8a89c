"""Arrays on a GPU, borrowed from and lent to other libraries: in which order streams use them.

Each library puts its work into streams of its own. Four waits, none of them on the host, keep two
libraries from reading what is not yet written, and from writing what is still being read:

1. An array comes in: CuPy's current stream waits for the work that makes it. A library with DLPack
   does that when it is told our stream; for the CUDA array interface, `from_interface` does.
2. The result goes out: the stream that its importer names waits for our kernel. CuPy does that.
3. The call is over (`settle`): the lender's stream, if it can be known, waits for our kernel before
   it writes to an input or gives its memory to another array. If it cannot be known, as with JAX,
   the input is kept until the kernel has ended.
4. The importer drops the result (`Lent`): CuPy's stream waits for the importer's before CuPy gives
   the memory to another array. If the importer need not have read it in the stream that it named,
   as JAX has not, the memory is kept until the device has ended all work given to it so far.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import cupy
from cupy.cuda import Event, MemoryPointer, UnownedMemory, runtime

Array = Any
_LEGACY = 1  # cudaStreamLegacy: the default stream, as DLPack writes it

from_dlpack = cupy.from_dlpack


def from_interface(a: Array) -> Array:
    """A CuPy array over the memory of one with the CUDA array interface.

    The interface's stream, or the default one if it names none, is waited for: libraries that
    leave it away have mostly launched their kernels there.
    """
    own = cupy.asarray(_WithoutStream(a))
    with own.device:
        stream = _current_stream()
        if not runtime.streamIsCapturing(stream):
            _order(_interface_stream(a), stream)
    return own


class _WithoutStream:
    """The interface of an array but for its stream, for which CuPy would make the host wait."""

    def __init__(self, a: Array) -> None:
        self.lender = a
        self.__cuda_array_interface__ = {**a.__cuda_array_interface__, "stream": None}


def settle(loans: list[tuple[Array, Array]]) -> None:
    """Protect borrowed arrays from their lenders until the work in CuPy's current stream has ended.

    Pairs of a foreign array and the CuPy array over its memory, all on one device. In a stream that
    is being captured into a graph nothing is done: the graph's owner keeps its arrays.
    """
    with loans[0][1].device:
        stream = _current_stream()
        if runtime.streamIsCapturing(stream):
            return
        lenders = [(_lender_stream(a), own) for a, own in loans]
        for lender in {lender for lender, _ in lenders if lender is not None}:
            _order(stream, lender)
        kept = [own for lender, own in lenders if lender is None]
        if kept:
            ended = Event(block=True, disable_timing=True)
            ended.record()
            _keeper.keep(ended.synchronize, kept)


class Lent:
    """The DLPack of a CuPy array whose memory returns to CuPy only after its reader's last work.

    `importer` is the `from_dlpack` that takes it.
    """

    def __init__(self, a: Array, importer: Any) -> None:
        self._a = a
        with a.device:
            self._home = _current_stream()
        torch = sys.modules.get("torch")
        self._reads_in_named_stream = torch is not None and importer is torch.from_dlpack

    def __dlpack_device__(self) -> Any:
        return self._a.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        a = self._a
        with a.device:
            home, named = self._home, _LEGACY if stream is None else stream
            if named not in (-1, home):
                lease = _Lease(a, home, named if self._reads_in_named_stream else None)
                memory = UnownedMemory(a.data.ptr, a.nbytes, lease, a.device.id)
                a = cupy.ndarray(a.shape, a.dtype, MemoryPointer(memory, 0), a.strides)
            return a.__dlpack__(stream=stream, **options)


class _Lease:
    """Owns an array until its reader has let go of it; None for a reader in unknown streams."""

    def __init__(self, a: Array, home: int, reader: int | None) -> None:
        self._a, self._home, self._reader = a, home, reader

    def __del__(self) -> None:
        # An error has nowhere to go from here, and comes only when Python or CUDA is shut down.
        with contextlib.suppress(RuntimeError), self._a.device as device:
            if self._reader is None:
                _keeper.keep(device.synchronize, [self._a])
            elif not runtime.streamIsCapturing(self._home):
                _order(self._reader, self._home)


class _Keeper:
    """Holds arrays until some work has ended, in a thread that does nothing else."""

    def __init__(self) -> None:
        self._held: SimpleQueue[tuple[Callable[[], None], list[Array]]] = SimpleQueue()
        self._start = threading.RLock()  # a lease may end, and come here, at any allocation
        self._thread: threading.Thread | None = None

    def keep(self, wait: Callable[[], None], arrays: list[Array]) -> None:
        """Hold `arrays` until `wait` has returned."""
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cufa-keeper", daemon=True)
                self._thread.start()
        self._held.put((wait, arrays))

    def _run(self) -> None:
        _allow_waiting_during_captures()
        while True:
            wait, arrays = self._held.get()
            # If a kernel has failed, whoever waits for its result is told.
            with contextlib.suppress(runtime.CUDARuntimeError):
                wait()
            del wait, arrays  # now, not when the next pair has come


_keeper = _Keeper()


def _allow_waiting_during_captures() -> None:
    """Else this thread's waits would be errors, and end the capture, while another one captures.

    In mode "global", which PyTorch's graphs have; CuPy's are "relaxed". Without the bindings, which
    come with the extras cuda12 and cuda13, only the latter can be captured beside JAX.
    """
    with contextlib.suppress(ImportError):
        from cuda.bindings import runtime as cuda_runtime

        relaxed = cuda_runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        cuda_runtime.cudaThreadExchangeStreamCaptureMode(relaxed)


def _lender_stream(a: Array) -> int | None:
    """The stream in which the library of `a` goes on using it, None if that cannot be known."""
    if not hasattr(a, "__dlpack__"):
        return _interface_stream(a)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(a, torch.Tensor):
        return torch.cuda.current_stream(a.device).cuda_stream or _LEGACY
    return None


def _interface_stream(a: Array) -> int:
    return a.__cuda_array_interface__.get("stream") or _LEGACY


def _current_stream() -> int:
    """CuPy's, of the current device."""
    return cupy.cuda.get_current_stream().ptr or _LEGACY


def _order(first: int, then: int) -> None:
    """Work given to stream `then` from now on starts after all that is in stream `first`."""
    if first != then:
        event = Event(disable_timing=True)
        runtime.eventRecord(event.ptr, first)
        runtime.streamWaitEvent(then, event.ptr)
