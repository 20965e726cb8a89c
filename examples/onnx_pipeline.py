"""Attention by cufa between two ONNX models: ONNX Runtime's values in and out, never copied.

    pip install -e . onnx onnxruntime
    python examples/onnx_pipeline.py

The first model projects tokens to queries, keys and values, the second projects the heads back.
What goes from one to the other are OrtValues, which have DLPack, and cufa returns what it got.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import cufa

try:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper
except ImportError:
    sys.exit('ONNX or its runtime is missing: pip install -e ".[pipelines]"')

Array = Any
BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 300, 8, 64
WIDTH = HEADS * HEAD_DIM
TOKENS, PER_HEAD = [BATCH, SEQLEN, WIDTH], [BATCH, SEQLEN, HEADS, HEAD_DIM]


def session(nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], **constants: Array):
    """A model of float32 tensors, ready to run on the CPU."""
    infos = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in some.items()]
        for some in (inputs, outputs)
    )
    initializers = [numpy_helper.from_array(a, name) for name, a in constants.items()]
    graph = helper.make_graph(nodes, "pipeline", *infos, initializers)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def projection(w_q: Array, w_k: Array, w_v: Array):
    """Tokens (batch, seqlen, width) to q, k and v, (batch, seqlen, heads, head_dim)."""
    nodes = []
    for name in "qkv":
        nodes.append(helper.make_node("MatMul", ["x", f"w_{name}"], [f"flat_{name}"]))
        nodes.append(helper.make_node("Reshape", [f"flat_{name}", "per_head"], [name]))
    outputs = dict.fromkeys("qkv", PER_HEAD)
    shape = np.array(PER_HEAD)
    return session(nodes, {"x": TOKENS}, outputs, w_q=w_q, w_k=w_k, w_v=w_v, per_head=shape)


def combination(w_out: Array):
    """What the heads attended to, (batch, seqlen, heads, head_dim), to tokens."""
    nodes = [
        helper.make_node("Reshape", ["attended", "tokens"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w_out"], ["y"]),
    ]
    shape = np.array(TOKENS)
    return session(nodes, {"attended": PER_HEAD}, {"y": TOKENS}, w_out=w_out, tokens=shape)


def plain_attention(q: Array, k: Array, v: Array) -> Array:
    """softmax(q @ k.T / sqrt(head_dim)) @ v for layout bshd, with every score at once."""
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / q.dtype.type(q.shape[-1] ** 0.5)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).swapaxes(1, 2)


def main() -> int:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((4, WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5)
    before, after = projection(*weights[:3]), combination(weights[3])
    x = onnxruntime.OrtValue.ortvalue_from_numpy(rng.standard_normal(TOKENS, np.float32))

    q, k, v = before.run_with_ort_values(["q", "k", "v"], {"x": x})
    attended = cufa.attention(q, k, v, layout="bshd")
    [y] = after.run_with_ort_values(["y"], {"attended": attended})

    qkv = [a.numpy() for a in (q, k, v)]
    exact = plain_attention(*(a.astype(np.float64) for a in qkv))
    error = abs(attended.numpy() - exact).max()
    bound = 2 * abs(plain_attention(*qkv) - exact).max()
    bound += 2 * np.finfo(np.float32).eps * abs(exact).max()
    print(f"q is an {type(q).__name__}, the result an {type(attended).__name__}; y is {y.shape()}")
    print(f"cufa between two models: error {error:.1e}, at most {bound:.1e}")
    return int(not error <= bound)  # a NaN fails


if __name__ == "__main__":
    sys.exit(main())
