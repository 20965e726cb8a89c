"""Arrays of other libraries, borrowed for one call: DLPack or the CUDA array interface in, DLPack
out.

Nothing here runs for NumPy and CuPy arrays, and no library is imported for the sake of an array:
whoever made it has imported its own. What concerns GPUs and streams is in `cufa.gpu.exchange`.

Sources: DLPack's header, version 1.0, and its specification for Python (dmlc.github.io/dlpack);
the CUDA array interface, version 3 (numba's documentation).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from cufa.arrays import is_cupy, is_foreign
from cufa.errors import ArgumentError, CufaError, DeviceError, DTypeError, UnsupportedError

Array = Any
Importer = Callable[[Any], Array]

# DLDeviceType: where an array's memory is.
_HOST = (1, 3)  # kDLCPU, and kDLCUDAHost: pinned
_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
# DLDataTypeCode.
_UINT, _BFLOAT = 1, 4
#: A bit of DLManagedTensorVersioned.flags.
_READ_ONLY = 1
#: Libraries whose arrays never change, which DLPack before 1.0 cannot say.
_IMMUTABLE = {"jax", "jaxlib", "tensorflow"}
#: Libraries where `from_dlpack` is a method of the arrays' type.
_IMPORTS_BY_TYPE = {"onnxruntime"}


def lend(
    function: Callable[..., Any], arrays: dict[str, Array], *, writes: str | None = "out"
) -> Any:
    """`function(**arrays)`, computed on NumPy or CuPy arrays that share the memory of those given.

    Parameters
    ----------
    function : callable
        Takes NumPy or CuPy arrays by these names and returns one array or a tuple of them. On a GPU
        its work is in CuPy's current stream.
    arrays : dict of str to array or None
        What is neither foreign nor None is passed on as it is, for `function` to refuse if it must.
    writes : str or None, default "out"
        Which of them `function` writes to and returns; it may be a name that is none of theirs.
        None: it writes to none and returns no arrays, but numbers about them.

    Returns
    -------
    array or tuple of arrays
        In the library of the first of `arrays` if that one is foreign and its library can import
        DLPack, else NumPy's or CuPy's. The array given as `writes` is returned as itself. If
        that is None, what `function` returns.

    Raises
    ------
    ArgumentError
        The array given as `writes` cannot be written.
    DeviceError
        An array is neither in host memory nor on a CUDA GPU, or is on one and there is no CuPy.
    DTypeError
        A JAX tracer, or an array that its own library does not export.
    UnsupportedError
        An array requires grad.
    """
    foreign = {name: a for name, a in arrays.items() if is_foreign(a)}
    for name, a in foreign.items():
        _refuse(name, a, writes)
    own = arrays | {name: _borrow(name, a, writes) for name, a in foreign.items()}
    result = function(**own)

    loans = [(a, own[name]) for name, a in foreign.items() if is_cupy(own[name])]
    if loans:
        _exchange().settle(loans)
        if writes and (importer := _importer(arrays.get(writes))):
            # Makes its stream wait for the result, in any dtype as wide.
            importer(own[writes].view(f"i{own[writes].itemsize}"))
    if writes is None:
        return result

    give = _importer(next(iter(arrays.values())))

    def returned(a: Array) -> Array:
        if a is own.get(writes):
            return arrays[writes]
        return a if give is None else _export(a, give)

    return tuple(map(returned, result)) if isinstance(result, tuple) else returned(result)


# --------------------------------------------------------------------------------------------- in


def _refuse(name: str, a: Array, writes: str | None) -> None:
    """Raise if `a` has a protocol that it cannot keep."""
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(a).__mro__}
    if ("jax", "Tracer") in bases:
        raise DTypeError(
            f"{name} is a JAX tracer, which has no values yet; inside jit call cufa through "
            "jax.pure_callback, or call it between jitted functions"
        )
    if getattr(a, "requires_grad", False) is True:
        raise UnsupportedError(
            f"{name} requires grad, and no gradient would flow through cufa; pass {name}.detach()"
        )
    immutable = _IMMUTABLE & {library for library, _ in bases}
    if name == writes and immutable:
        raise ArgumentError(
            f"{name} is an array of {min(immutable)}, which cannot be written; leave {name}= away "
            "and take what is returned"
        )


def _borrow(name: str, a: Array, writes: str | None) -> Array:
    """A NumPy or CuPy array over the memory of a foreign one, to be read in stream order."""
    if not hasattr(a, "__dlpack__"):
        exchange = _exchange()
        with _named(name, a, "__cuda_array_interface__", DTypeError):
            read_only = a.__cuda_array_interface__["data"][1]
            own = exchange.from_interface(a)
    else:
        with _named(name, a, "__dlpack_device__", DeviceError):
            device, ordinal = map(int, a.__dlpack_device__())
        if device not in _HOST + _CUDA:
            raise DeviceError(
                f"{name} is on device {ordinal} of DLPack's type {device}; it must be in host "
                "memory or on a CUDA GPU"
            )
        importer = np.from_dlpack if device in _HOST else _exchange().from_dlpack
        relay = Relay(a, _BFLOAT, _UINT)
        with _named(name, a, "__dlpack__", DTypeError):
            own = importer(relay)
        read_only = relay.read_only
        own = own.view(_bfloat16(name)) if relay.recoded else own
    if name == writes and read_only:
        raise ArgumentError(f"{name} is read-only; pass an array that can be written")
    return own


@contextmanager
def _named(name: str, a: Array, protocol: str, kind: type[CufaError]) -> Iterator[None]:
    """What a library raises while it lends an array becomes an error that names the array."""
    try:
        yield
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise kind(
            f"{name} is a {type(a).__name__} whose {protocol} cannot be used: {error}"
        ) from error


def _exchange() -> ModuleType:
    """`cufa.gpu.exchange`, which imports CuPy."""
    try:
        from cufa.gpu import exchange
    except ImportError as error:
        raise DeviceError(
            f"the arrays are on a GPU, and CuPy cannot be imported ({error}); install cufa with "
            "its extra cuda12 or cuda13, or move them to the CPU"
        ) from error
    return exchange


# -------------------------------------------------------------------------------------------- out


def _importer(a: Array) -> Importer | None:
    """`from_dlpack` of the library of a foreign array, None if it has none."""
    if not is_foreign(a):
        return None
    spaces: list[Any] = [a.__array_namespace__()] if hasattr(a, "__array_namespace__") else []
    for base in type(a).__mro__:
        library = base.__module__.partition(".")[0]
        spaces.append(base if library in _IMPORTS_BY_TYPE else sys.modules.get(library))
    importers = (getattr(space, "from_dlpack", None) for space in spaces)
    return next(filter(callable, importers), None)


def _export(a: Array, give: Importer) -> Array:
    """A NumPy or CuPy array as one of another library, over the same memory."""
    is_bfloat16 = a.dtype.name == "bfloat16"
    lent = a.view(np.uint16) if is_bfloat16 else a
    if is_cupy(a):
        lent = _exchange().Lent(lent, give)
    return give(Relay(lent, _UINT, _BFLOAT) if is_bfloat16 else lent)


# ----------------------------------------------------------------------------- bfloat16 in DLPack


class Relay:
    """The DLPack of an array with another code for its dtype, where elements have 16 bits.

    NumPy has no bfloat16 of its own, and neither imports nor exports that of `ml_dtypes`. It does
    uint16, which is as wide: only the dtype's code has to change, and no element does.
    """

    #: Whether the array had the code that is changed; known once it has been imported.
    recoded = False
    read_only = False

    def __init__(self, a: Array, code: int, other: int) -> None:
        self._a, self._code, self._other = a, code, other

    def __dlpack_device__(self) -> Any:
        return self._a.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._a.__dlpack__(**options)
        tensor: Any
        if _is_capsule(capsule, _VERSIONED):
            tensor = _Versioned.from_address(_pointer(capsule, _VERSIONED))
            if tensor.major != 1:
                return capsule  # laid out in a way that its importer knows, or refuses
            self.read_only = bool(tensor.flags & _READ_ONLY)
        else:
            tensor = _Unversioned.from_address(_pointer(capsule, _UNVERSIONED))
        self.recoded = (tensor.code, tensor.bits) == (self._code, 16)
        if self.recoded:
            tensor.code = self._other
        return capsule


class _Unversioned(ctypes.Structure):
    """The head of DLManagedTensor: that of a DLTensor, up to its dtype."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


class _Versioned(ctypes.Structure):
    """The head of DLManagedTensorVersioned, up to the dtype."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        *_Unversioned._fields_,
    )


_UNVERSIONED, _VERSIONED = b"dltensor", b"dltensor_versioned"
_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.restype, _is_capsule.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _bfloat16(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes  # noqa: F401, teaches NumPy the name
    except ImportError as error:
        raise DTypeError(
            f"{name} is bfloat16, which NumPy has from ml_dtypes only: pip install ml_dtypes"
        ) from error
    return np.dtype("bfloat16")
