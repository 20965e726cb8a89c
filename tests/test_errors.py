"""Calls that must be refused: with which error, in which words, and before anything is written."""

from __future__ import annotations

import enum
import math
import re

import numpy as np
import pytest
from foreign import Lender

import cufa
from cufa import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError, flash_attn
from cufa.arrays import Arrays, sign
from cufa.problem import MAX_SEQLEN, make_problem
from cufa.testing import Memory, place, to_numpy

BATCH, HEADS, KV_HEADS, SEQLEN_Q, SEQLEN_K, HEAD_DIM, HEAD_DIM_V = 2, 6, 3, 5, 7, 8, 4


def good_call(xp):
    """Arguments that fit together."""
    return {
        "q": xp.ones((BATCH, HEADS, SEQLEN_Q, HEAD_DIM), "float32"),
        "k": xp.ones((BATCH, KV_HEADS, SEQLEN_K, HEAD_DIM), "float32"),
        "v": xp.ones((BATCH, KV_HEADS, SEQLEN_K, HEAD_DIM_V), "float32"),
        "out": xp.full((BATCH, HEADS, SEQLEN_Q, HEAD_DIM_V), 77, "float32"),
    }


def ones(*shape, dtype="float32"):
    """An array for a row of the tables."""
    return lambda xp, call: xp.ones(shape, dtype)


def changed(name, change):
    """The good call's argument `name`, changed."""
    return lambda xp, call: change(call[name])


def every_third_byte(xp, call):
    """Strides that are no multiple of the item size."""
    packed = np.zeros((2, 3, 7), [("a", "f4"), ("b", "i1")])["a"]
    if xp is np:
        return packed[..., None]
    raw = xp.zeros(2 * 3 * 7 * 5 + 16, "uint8")
    return xp.ndarray((2, 3, 7, 1), "float32", raw.data, (*packed.strides, 4))


def broadcast(*shape, dtype="float32"):
    """An array of any size that takes no memory."""
    return lambda xp, call: xp.broadcast_to(xp.zeros((), dtype), shape)


@pytest.mark.parametrize("algorithm", ["fa1", "fa3"])
def test_an_algorithm_for_gpus_alone_says_so(algorithm):
    q = np.zeros((3, 8), np.float32)
    with pytest.raises(UnsupportedError, match=rf"algorithm is '{algorithm}'.*'auto' or 'fa2'"):
        cufa.attention(q, q, q, algorithm=algorithm)


#: What is passed in place of a good argument, and what the message says.
BAD_CALLS = {
    ArgumentError: [
        ({"layout": "bsh"}, r"layout is 'bsh'; .*'bhsd', 'bshd'"),
        ({"layout": None}, r"layout is None; .*'bhsd', 'bshd'"),
        ({"algorithm": "fa9"}, r"algorithm is 'fa9'; .*'auto'"),
        ({"causal": "bottom"}, r"causal is 'bottom'; .*'top_left'"),
        ({"causal": 1}, r"causal is 1; .*False, True, 'top_left'"),
        ({"return_lse": "no"}, r"return_lse is 'no'; .*False, True"),
        (
            {"return_lse": ones(10**6)},
            r"return_lse is an array of shape \(1000000,\) and dtype float32; .*False, True",
        ),
        ({"causal": ones()}, r"causal is an array of shape \(\) and dtype float32; .*'top_left'"),
        ({"layout": ones(2)}, r"layout is an array of shape \(2,\) and dtype float32; .*'bhsd'"),
        ({"window": ones(2)}, r"window is an array of shape \(2,\) and dtype float32; .*pair"),
        (
            {"window": lambda xp, call: [1, 2, xp.ones(3, "float32")]},
            r"window is \[1, 2, an array of shape \(3,\) and dtype float32\]; .*pair",
        ),
        ({"window": {1, 2}}, r"window is \{1, 2\}; .*pair"),
        ({"scale": 10**400}, r"scale is 1000.*finite"),
        ({"window": 4}, r"window is 4; .*pair"),
        ({"window": (1,)}, r"window is \(1,\); .*pair"),
        ({"window": (1, 2, 3)}, r"window is \(1, 2, 3\); .*pair"),
        ({"window": (-3, 0)}, r"left bound -3; .*at least 0"),
        ({"window": (-1, -3)}, r"right bound -3; .*at least 0"),
        ({"scale": math.nan}, r"scale is nan; .*finite"),
        ({"scale": math.inf}, r"scale is inf; .*finite"),
        ({"softcap": 0.0}, r"softcap is 0\.0; .*positive"),
        ({"softcap": -5.0}, r"softcap is -5\.0; .*positive"),
        ({"softcap": math.inf}, r"softcap is inf; .*positive"),
        ({"softcap": math.nan}, r"softcap is nan; .*positive"),
        ({"q": lambda xp, call: call["out"], "k": ones(2, 3, 7, 4)}, r"out shares memory with q"),
        (
            {"v": lambda xp, call: call["out"][:, ::2], "k": ones(2, 3, 5, 8)},
            r"out shares memory with v",
        ),
    ],
    DTypeError: [
        ({"window": (1.5, 0)}, r"left bound 1\.5; .*integer or None"),
        ({"window": (0, "a")}, r"right bound 'a'; .*integer or None"),
        (
            {"window": lambda xp, call: (xp.ones(3, "float32"), 0)},
            r"left bound an array of shape \(3,\) and dtype float32; .*integer or None",
        ),
        ({"scale": ones(3)}, r"scale is an array of shape \(3,\) and dtype float32, .*number"),
        ({"dropout_seed": ones(3)}, r"dropout_seed is an array of shape \(3,\) .*integer"),
        ({"scale": "1.0"}, r"scale is '1\.0', a str; .*number"),
        ({"scale": bytearray(b"1")}, r"scale is bytearray.*number"),
        ({"scale": np.array("1")}, r"scale is .*str_; .*number"),
        ({"scale": np.complex64(1j)}, r"scale is .*complex64; .*number"),
        ({"scale": [1.0]}, r"scale is \[1\.0\], a list; .*number"),
        ({"scale": 1j}, r"scale is 1j, a complex; .*number"),
        ({"softcap": "x"}, r"softcap is 'x', a str; .*number"),
        ({"q": lambda xp, call: [[1.0]]}, r"q is a list; .*NumPy or CuPy"),
        ({"k": lambda xp, call: None}, r"k is a NoneType"),
        ({"mask": lambda xp, call: True}, r"mask is a bool"),
        ({"bias": lambda xp, call: np.float64(1)}, r"bias is a float64; .*np\.asarray"),
        (
            {"q": ones(2, 6, 5, 8, dtype="int32")},
            r"q is int32; .*float16, bfloat16, float32, float64",
        ),
        ({"q": ones(2, 6, 5, 8, dtype="complex64")}, r"q is complex64"),
        ({"k": ones(2, 3, 7, 8, dtype="float16")}, r"q is float32 and k is float16; .*equal"),
        ({"v": ones(2, 3, 7, 4, dtype="float64")}, r"q is float32 and v is float64; .*equal"),
        ({"out": ones(2, 6, 5, 4, dtype="float64")}, r"q is float32 and out is float64; .*equal"),
        ({"mask": ones(5, 7, dtype="int8")}, r"mask is int8; .*bool.*bias="),
        ({"mask": ones(5, 7)}, r"mask is float32; .*bool.*bias="),
        ({"bias": ones(5, 7, dtype="bool")}, r"bias is bool; it takes float16"),
        ({"alibi_slopes": ones(6, dtype="int64")}, r"alibi_slopes is int64; it takes float16"),
        ({"sink": ones(6, dtype="complex64")}, r"sink is complex64; it takes float16"),
    ],
    ShapeError: [
        ({"q": ones(8)}, r"q has 1 axes, shape \(8,\); it must have 2"),
        ({"q": ones(1, 2, 6, 5, 8)}, r"q has 5 axes"),
        ({"k": ones(3, 7, 8)}, r"q has 4 axes and k has 3"),
        ({"v": ones(7, 4)}, r"q has 4 axes and v has 2"),
        ({"k": ones(1, 3, 7, 8)}, r"q has batch 2 and k has batch 1"),
        ({"v": ones(3, 3, 7, 4)}, r"q has batch 2 and v has batch 3"),
        ({"k": ones(2, 3, 7, 9)}, r"q has head_dim 8 and k has head_dim 9"),
        ({"v": ones(2, 2, 7, 4)}, r"k has 3 heads and v has 2"),
        ({"v": ones(2, 3, 6, 4)}, r"k has seqlen 7 and v has seqlen 6"),
        ({"k": ones(2, 4, 7, 8), "v": ones(2, 4, 7, 4)}, r"q has 6 heads and k has 4; .*multiple"),
        ({"k": ones(2, 0, 7, 8), "v": ones(2, 0, 7, 4)}, r"q has 6 heads and k has 0; .*multiple"),
        ({"layout": "bshd", "out": None}, r"q has 5 heads and k has 7; .*'bshd'"),
        ({"q": ones(2, 6, 5, 0), "k": ones(2, 3, 7, 0)}, r"q has head_dim 0; .*at least 1"),
        ({"v": ones(2, 3, 7, 0), "out": None}, r"v has head_dim 0; .*at least 1"),
        (
            {"k": broadcast(2, 3, MAX_SEQLEN + 1, 8), "v": broadcast(2, 3, MAX_SEQLEN + 1, 4)},
            rf"k has seqlen {MAX_SEQLEN + 1}; .*at most",
        ),
        ({"mask": ones(5, 20, dtype="bool")}, r"mask has shape \(5, 20\); .*\(2, 6, 5, 7\)"),
        (
            {"mask": ones(1, 2, 6, 5, 7, dtype="bool")},
            r"mask has shape \(1, 2, 6, 5, 7\); .*broadcast",
        ),
        ({"bias": ones(2, 3, 5, 7)}, r"bias has shape \(2, 3, 5, 7\); .*broadcast"),
        ({"bias": ones(0, 6, 5, 7)}, r"bias has shape \(0, 6, 5, 7\); .*broadcast"),
        ({"alibi_slopes": ones(3)}, r"alibi_slopes has shape \(3,\); .*\(6,\) or \(2, 6\)"),
        ({"alibi_slopes": ones(3, 6)}, r"alibi_slopes has shape \(3, 6\)"),
        ({"sink": ones(2, 6)}, r"sink has shape \(2, 6\); it must be \(6,\)"),
        ({"v": every_third_byte, "out": None}, r"v has strides .*multiples of its item size 4"),
        ({"out": ones(2, 6, 5, 8)}, r"out has shape \(2, 6, 5, 8\); it must be \(2, 6, 5, 4\)"),
        ({"out": changed("out", lambda a: a[0])}, r"out has shape \(6, 5, 4\)"),
        (
            {"out": lambda xp, call: xp.zeros((2, 6, 5, 8), "f4")[..., ::2]},
            r"out has stride 8 bytes along its last axis",
        ),
        (
            {"out": changed("out", lambda a: a[..., ::-1])},
            r"out has stride -4 bytes along its last axis",
        ),
        (
            {"out": broadcast(2, 6, 5, 1), "v": ones(2, 3, 7, 1)},
            r"out has strides .*overlap in memory",
        ),
    ],
}
BAD_MERGES = {
    ArgumentError: [
        ({"layout": "sbhd"}, r"layout is 'sbhd'"),
    ],
    ShapeError: [
        ({"out_a": ones(4), "out_b": ones(4)}, r"out_a has 1 axes"),
        (
            {"out_b": ones(2, 6, 5, 3)},
            r"out_a has shape \(2, 6, 5, 4\) and out_b has \(2, 6, 5, 3\)",
        ),
        ({"lse_a": ones(2, 5, 6)}, r"lse_a has shape \(2, 5, 6\); .*must be \(2, 6, 5\)"),
        ({"lse_b": ones(2, 6)}, r"lse_b has shape \(2, 6\)"),
        ({"layout": "bshd"}, r"lse_a has shape \(2, 6, 5\); .*must be \(2, 5, 6\)"),
    ],
    DTypeError: [
        ({"out_b": ones(2, 6, 5, 4, dtype="float16")}, r"out_a is float32 and out_b is float16"),
        ({"lse_b": ones(2, 6, 5, dtype="float64")}, r"lse_b is float64; .*must be float32"),
        ({"lse_a": ones(2, 6, 5, dtype="float16")}, r"lse_a is float16; .*must be float32"),
        (
            {name: ones(2, 6, 5, 4, dtype="float16") for name in ("out_a", "out_b")}
            | {"lse_a": ones(2, 6, 5, dtype="float16")},
            r"lse_a is float16; .*float16 it must be float32",
        ),
        (
            {name: ones(2, 6, 5, 4, dtype="float64") for name in ("out_a", "out_b")},
            r"lse_a is float32; .*float64 it must be float64",
        ),
        ({"out_a": ones(2, 6, 5, 4, dtype="int32")}, r"out_a is int32; it takes float16"),
        ({"lse_a": ones(2, 6, 5, dtype="int64")}, r"lse_a is int64; it takes float16"),
        ({"out_a": lambda xp, call: 3.0}, r"out_a is a float"),
    ],
}


def named(table):
    """Rows as parameters, each named after its message."""
    return [
        pytest.param(changes, error, message, id=re.sub(r"\\|\.\*", "", message))
        for error, rows in table.items()
        for changes, message in rows
    ]


def build(xp, call, changes):
    """The call with some arguments changed."""
    made = {n: change(xp, call) if callable(change) else change for n, change in changes.items()}
    return {**call, **made}


def refuse(call, arguments, error, message, names=("q", "k", "v")):
    """`call` raises `error`, an instance of cufa's base class, with that message."""
    arrays = [arguments[name] for name in names]
    options = {name: value for name, value in arguments.items() if name not in names}
    with pytest.raises(error, match=message) as caught:
        call(*arrays, **options)
    assert isinstance(caught.value, cufa.CufaError)


@pytest.mark.parametrize(("changes", "error", "message"), named(BAD_CALLS))
def test_a_bad_call_is_refused_before_anything_is_written(xp, changes, error, message):
    good = good_call(xp)
    refuse(cufa.attention, build(xp, good, changes), error, message)
    assert (to_numpy(good["out"]) == 77).all()


@pytest.mark.parametrize(("changes", "error", "message"), named(BAD_MERGES))
def test_a_bad_merge_is_refused(xp, changes, error, message):
    rows = BATCH, HEADS, SEQLEN_Q
    outs = {
        "out_a": xp.ones((*rows, HEAD_DIM_V), "f4"),
        "out_b": xp.ones((*rows, HEAD_DIM_V), "f4"),
    }
    good = {**outs, "lse_a": xp.ones(rows, "f4"), "lse_b": xp.ones(rows, "f4")}
    names = ("out_a", "lse_a", "out_b", "lse_b")
    refuse(cufa.merge, build(xp, good, changes), error, message, names)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ArgumentError, ValueError),
        (ShapeError, ValueError),
        (DeviceError, ValueError),
        (DTypeError, TypeError),
        (UnsupportedError, NotImplementedError),
        (cufa.BuildError, RuntimeError),
        (cufa.OutOfMemoryError, MemoryError),
    ],
)
def test_errors_are_also_what_python_would_raise(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, cufa.CufaError)


def test_the_other_byte_order_is_refused():
    call = good_call(np)
    call["q"] = call["q"].astype(">f4")
    refuse(cufa.attention, call, DTypeError, r"q is stored in the other byte order \(>f4\)")


class Never(str):
    """A word that counts as false."""

    def __bool__(self) -> bool:
        return False


class Word(str, enum.Enum):
    TOP_LEFT = "top_left"


@pytest.mark.parametrize("word", [Never("top_left"), Word.TOP_LEFT, np.str_("top_left")], ids=type)
def test_a_word_counts_as_its_letters_for_this_call_and_for_later_ones(word):
    q, k = np.ones((3, 7), "float32"), np.ones((5, 7), "float32")
    v = np.arange(35, dtype="float32").reshape(5, 7)
    want, _ = cufa.reference.attention(q, k, v, causal="top_left")
    for causal in (word, "top_left"):
        np.testing.assert_allclose(cufa.attention(q, k, v, causal=causal), want, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("subclass", [np.ma.masked_array, np.matrix])
def test_arrays_with_a_meaning_of_their_own_are_refused(subclass):
    call = {name: subclass(np.ones((4, 8), "float32")) for name in "qkv"}
    refuse(cufa.attention, call, DTypeError, r"q is a (MaskedArray|matrix); pass a plain array")


def test_a_read_only_out_is_refused():
    call = good_call(np)
    call["out"].flags.writeable = False
    refuse(cufa.attention, call, ArgumentError, r"out is read-only")
    assert (call["out"] == 77).all()


def test_out_between_the_rows_of_an_input_is_accepted(xp):
    wide = place(xp, np.ones((BATCH, HEADS, SEQLEN_Q, 12), "float32"), Memory()).array
    call = {**good_call(xp), "q": wide[..., :8], "out": wide[..., 8:]}
    out = cufa.attention(call["q"], call["k"], call["v"], out=call["out"])
    assert (to_numpy(out) == 1).all()


class Tensor(Lender):
    """An array of a library that would have to let gradients through."""

    requires_grad = True


#: Calls of `flash_attn_func`, whose words are not those of `attention`.
BAD_FACADES = {
    ArgumentError: [
        ({"window_size": (-2, 0)}, r"^window_size has left bound -2; it must be at least 0"),
        ({"window_size": 4}, r"^window_size is 4; .*pair"),
        ({"softmax_scale": math.inf}, r"^softmax_scale is inf; it must be finite$"),
        ({"softcap": -1}, r"^softcap is -1\.0; it must be positive and finite, or 0 for no cap$"),
        ({"softcap": math.nan}, r"^softcap is nan; .*, or 0 for no cap$"),
        ({"softcap": math.inf}, r"^softcap is inf; .*, or 0 for no cap$"),
    ],
    ShapeError: [
        ({"attn_bias": ones(2, 3, 5, 7)}, r"^attn_bias has shape \(2, 3, 5, 7\); .*broadcast"),
        ({"alibi_slopes": ones(3)}, r"^alibi_slopes has shape \(3,\)"),
    ],
    DTypeError: [
        ({"window_size": (1.5, 0)}, r"^window_size has left bound 1\.5; .*integer or None"),
        ({"softmax_scale": "x"}, r"^softmax_scale is 'x', a str; .*number"),
        ({"softcap": "scale"}, r"^softcap is 'scale', a str; .*number"),
        ({"softcap": None}, r"^softcap is None, a NoneType; .*number"),
        ({"attn_bias": ones(5, 7, dtype="bool")}, r"^attn_bias is bool; it takes float16"),
        ({"attn_bias": lambda xp, call: [0.0]}, r"^attn_bias is a list; .*array"),
        (
            {"q": lambda xp, call: np.ma.masked_array(np.ones((4, 8)))},
            r"^q is a MaskedArray; pass a plain array \(and attn_bias= for masked keys\)$",
        ),
    ],
    UnsupportedError: [
        (
            {"attn_bias": lambda xp, call: Tensor(np.ones((5, 7)))},
            r"^attn_bias requires grad, .*; pass attn_bias\.detach\(\)$",
        ),
    ],
}


@pytest.mark.parametrize(("changes", "error", "message"), named(BAD_FACADES))
def test_names_of_flash_attn_are_those_in_its_errors(xp, changes, error, message):
    good = {name: a for name, a in good_call(xp).items() if name in "qkv"}
    with pytest.raises(error, match=message) as caught:
        cufa.flash_attn_func(**build(xp, good, changes))
    assert type(caught.value) is error
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_bias_of_another_device_has_its_name_of_flash_attn(monkeypatch):
    def elsewhere(q, k, v, *, bias, **options):
        plain = dict(causal=False, window=None, softcap=None, scale=None)
        rest = dict(layout="bhsd", return_lse=False, algorithm="auto")
        call = sign(Arrays(q, k, v, bias=bias), **plain, **rest)
        make_problem(call._replace(bias=call.bias._replace(device=0)))

    monkeypatch.setattr(flash_attn, "attention", elsewhere)
    q = np.ones((2, 3, 5, 8), "float32")
    with pytest.raises(DeviceError, match=r"^q is on the CPU \(NumPy\) and attn_bias is on GPU 0"):
        cufa.flash_attn_func(q, q, q, attn_bias=np.ones((5, 5), "float32"))


@pytest.mark.parametrize(
    "message",
    ["softcap is 'scale is 3', a str", "a bias is no window", "windows bias", "biased is"],
)
def test_other_words_of_an_error_stay_as_they_are(monkeypatch, message):
    def refused(*arrays, **options):
        raise ShapeError(message)

    monkeypatch.setattr(flash_attn, "attention", refused)
    with pytest.raises(ShapeError) as caught:
        cufa.flash_attn_func(None, None, None)
    assert str(caught.value) == message


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v", "out", "mask", "bias", "alibi_slopes", "sink"])
def test_numpy_mixed_with_cupy_is_refused(cupy, name):
    shapes = {"mask": (5, 7), "bias": (5, 7), "alibi_slopes": (6,), "sink": (6,)}
    options = {n: cupy.ones(s, "bool" if n == "mask" else "float32") for n, s in shapes.items()}
    call = {**good_call(cupy), **options}
    call[name] = cupy.asnumpy(call[name])
    message = rf"q is on GPU 0 \(CuPy\) and {name} is on the CPU \(NumPy\); .*one device"
    refuse(cufa.attention, call, DeviceError, message)


@pytest.mark.gpu
def test_numpy_queries_with_cupy_keys_are_refused(cupy):
    call = {**good_call(cupy), "q": good_call(np)["q"]}
    refuse(
        cufa.attention, call, DeviceError, r"q is on the CPU \(NumPy\) and k is on GPU 0 \(CuPy\)"
    )
