"""A small GPT learns to write, one character after the other: training in NumPy or CuPy alone.

    python examples/train_char_gpt.py
    python examples/train_char_gpt.py --text my.txt --steps 2000

It reads the Python Language Reference, which Python brings along for `help()` in the module
pydoc_data.topics: half a million characters, (c) Python Software Foundation, under Python's own
licence, read where they are installed. `--text` takes any other file.

The model is a GPT: blocks of causal self-attention with rotary positions and of a GELU network,
each after an RMSNorm, and one matrix for embedding and output. There is no autograd: a function
returns its result and a function that takes gradients back, as `cufa.attention_vjp` does.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cufa

Array = Any
#: Parameters or gradients: arrays in dicts and lists.
Tree = Any
#: From the derivative by a result to those by parameters and input.
Back = Callable[[Array], tuple[Tree, Array]]

HEAD_DIM = 32
PEAK_RATE = 3e-3
TEMPERATURE = 0.8
PICTURES = (".png", ".pdf", ".svg")

# ------------------------------------------------------------------------------------------- layers


def norm(gain: Array, x: Array) -> tuple[Array, Back]:
    """RMSNorm (Zhang and Sennrich, arXiv:1910.07467); gradients by `gain` and `x`."""
    size = 1 / ((x * x).mean(axis=-1, keepdims=True) + 1e-5) ** 0.5
    unit = x * size

    def vjp(dy: Array) -> tuple[Array, Array]:
        dgain = (dy * unit).reshape(-1, len(gain)).sum(axis=0)
        dunit = dy * gain
        return dgain, size * (dunit - unit * (dunit * unit).mean(axis=-1, keepdims=True))

    return unit * gain, vjp


def gelu(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Hendrycks and Gimpel, arXiv:1606.08415, in the form with tanh."""
    c, d = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    tanh = np.tanh(c * x * (1 + d * square))

    def vjp(dy: Array) -> Array:
        inner = c * (1 + 3 * d * square)
        return dy * 0.5 * (1 + tanh + x * (1 - tanh * tanh) * inner)

    return 0.5 * x * (1 + tanh), vjp


def feed_forward(params: Tree, x: Array) -> tuple[Array, Back]:
    """Norm, matrix, GELU, matrix; gradients by `params` and `x`."""
    h, through_norm = norm(params["norm"], x)
    a, through_gelu = gelu(h @ params["up"])

    def vjp(dy: Array) -> tuple[Tree, Array]:
        dh = through_gelu(dy @ params["down"].T)
        dnorm, dx = through_norm(dh @ params["up"].T)
        return {"norm": dnorm, "up": rows(h).T @ rows(dh), "down": rows(a).T @ rows(dy)}, dx

    return a @ params["down"], vjp


def cross_entropy(
    matrix: Array, x: Array, targets: Array
) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
    """Mean of -log softmax(x @ matrix.T) at `targets`, which are 1 in rows of 0; gradients by both.

    In natural-log units, for each character.
    """
    logits = rows(x) @ matrix.T
    logits -= logits.max(axis=-1, keepdims=True)
    total = np.exp(logits).sum(axis=-1, keepdims=True)

    def vjp() -> tuple[Array, Array]:
        dlogits = (np.exp(logits) / total - targets) / len(logits)
        return dlogits.T @ rows(x), (dlogits @ matrix).reshape(x.shape)

    return (np.log(total)[:, 0] - (logits * targets).sum(axis=-1)).mean(), vjp


def rows(a: Array) -> Array:
    return a.reshape(-1, a.shape[-1])


# ---------------------------------------------------------------------------------------- attention


def flash_attention(
    layer: cufa.MultiHeadAttention, params: Tree, x: Array, recompute: bool = False
) -> tuple[Array, Back]:
    """Causal self-attention by cufa; gradients by `params` and `x`."""
    y, vjp = layer.vjp(params, x, causal=True, algorithm="fa2", recompute=recompute)
    return y, lambda dy: vjp(dy)[:2]


def standard_attention(
    layer: cufa.MultiHeadAttention, params: Tree, x: Array, recompute: bool = False
) -> tuple[Array, Back]:
    """The same by the formula and its gradient, with the whole matrix of scores."""
    q, k, v = (a.swapaxes(1, 2) for a in layer.project(params, x))
    scale = q.shape[-1] ** -0.5
    scores = scale * (q @ k.swapaxes(2, 3))
    scores += np.triu(np.full_like(scores, -np.inf), 1)  # hides the keys that are yet to come
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = (weights @ v).swapaxes(1, 2)

    def vjp(dy: Array) -> tuple[Tree, Array]:
        of_join, dout = layer.join_backward(dy, params, out)
        dout = dout.swapaxes(1, 2)
        dweights = dout @ v.swapaxes(2, 3)
        dscores = weights * (dweights - (dweights * weights).sum(axis=-1, keepdims=True)) * scale
        back = dscores @ k, dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dout
        of_heads, dx, _ = layer.project_backward(*(a.swapaxes(1, 2) for a in back), params, x)
        return {**of_heads, **of_join}, dx

    return layer.join(params, out), vjp


ATTENTION = {"fa2": flash_attention, "standard": standard_attention}

# -------------------------------------------------------------------------------------------- model


class Config(NamedTuple):
    vocabulary: int
    layers: int = 3
    width: int = 128
    context: int = 64
    head_dim: int = HEAD_DIM


class GPT:
    """The network: its sizes, and from parameters and tokens to a loss and its gradients."""

    def __init__(
        self,
        config: Config,
        xp: Any = np,
        algorithm: str = "fa2",
        recompute: bool = False,
        dtype: Any = "float32",
    ) -> None:
        self.config, self.xp, self.recompute, self.dtype = config, xp, recompute, dtype
        heads = config.width // config.head_dim
        self.attention = cufa.MultiHeadAttention(config.width, heads, rotary=True)
        self.attend = ATTENTION[algorithm]
        self.feed_forward = cufa.checkpoint(feed_forward) if recompute else feed_forward
        self.one_hot = xp.eye(config.vocabulary, dtype=dtype)  # a row for each token

    def init(self, rng: np.random.Generator) -> Tree:
        """Parameters to start from; what blocks add is small at first, as in GPT-2."""
        width, added = self.config.width, (2 * self.config.layers) ** -0.5

        def normal(inputs: int, outputs: int, size: float = 1.0) -> Array:
            drawn = rng.normal(0, size * inputs**-0.5, (inputs, outputs))
            return self.xp.asarray(drawn.astype(self.dtype))

        def block() -> Tree:
            attention = self.attention.init(rng, self.dtype, self.xp)
            attention["wo"] *= added
            up, down = normal(width, 4 * width), normal(4 * width, width, added)
            mlp = {"norm": self.xp.ones(width, self.dtype), "up": up, "down": down}
            return {"norm": self.xp.ones(width, self.dtype), "attention": attention, "mlp": mlp}

        return {
            "embedding": normal(width, self.config.vocabulary).T.copy(),
            "blocks": [block() for _ in range(self.config.layers)],
            "norm": self.xp.ones(width, self.dtype),
        }

    def loss(self, params: Tree, tokens: Array, targets: Array) -> tuple[Array, Callable[[], Tree]]:
        """Mean loss of predicting `targets`, (batch, seqlen) as `tokens`, and its gradients."""
        x, through_network = self.hidden(params, tokens)
        matrix, wanted = params["embedding"], self.one_hot[targets.ravel()]
        loss, through_loss = cross_entropy(matrix, x, wanted)

        def vjp() -> Tree:
            dmatrix, dx = through_loss()
            gradients = through_network(dx)
            gradients["embedding"] += dmatrix  # one matrix, used twice
            return gradients

        return loss, vjp

    def hidden(self, params: Tree, tokens: Array) -> tuple[Array, Callable[[Array], Tree]]:
        """What the blocks make of each token, (batch, seqlen, width)."""
        x, back = params["embedding"][tokens], []
        for part in params["blocks"]:
            x, through_block = self._block(part, x)
            back.append(through_block)
        x, through_norm = norm(params["norm"], x)

        def vjp(dx: Array) -> Tree:
            dnorm, dx = through_norm(dx)
            blocks = []
            for through_block in reversed(back):
                dblock, dx = through_block(dx)
                blocks.insert(0, dblock)
            dembedding = self.one_hot[tokens.ravel()].T @ rows(dx)
            return {"embedding": dembedding, "blocks": blocks, "norm": dnorm}

        return x, vjp

    def _block(self, params: Tree, x: Array) -> tuple[Array, Back]:
        """x + attention(norm(x)), then x + feed_forward(x)."""
        h, through_norm = norm(params["norm"], x)
        a, through_attention = self.attend(self.attention, params["attention"], h, self.recompute)
        x = x + a
        a, through_mlp = self.feed_forward(params["mlp"], x)

        def vjp(dx: Array) -> tuple[Tree, Array]:
            dmlp, da = through_mlp(dx)
            dx = dx + da
            dattention, dh = through_attention(dx)
            dnorm, da = through_norm(dh)
            return {"norm": dnorm, "attention": dattention, "mlp": dmlp}, dx + da

        return x + a, vjp

    def write(self, params: Tree, tokens: list[int], rng: np.random.Generator) -> Iterator[int]:
        """Tokens that follow, drawn one by one from what the model expects, without end."""
        while True:
            seen = self.xp.asarray([tokens[-self.config.context :]])
            x, _ = self.hidden(params, seen)
            logits = x[0, -1] @ params["embedding"].T
            host = logits if isinstance(logits, np.ndarray) else logits.get()
            noise = rng.gumbel(
                size=host.shape
            )  # argmax(x + Gumbel noise) is a draw from softmax(x)
            tokens = [*tokens, int((host / TEMPERATURE + noise).argmax())]
            yield tokens[-1]


# ----------------------------------------------------------------------------------------- training


class AdamW:
    """Loshchilov and Hutter, arXiv:1711.05101; decay of matrices alone."""

    def __init__(self, params: Tree, decay: float = 0.1) -> None:
        self.params, self.decay, self.steps = list(leaves(params)), decay, 0
        self.mean, self.square = ([np.zeros_like(p) for p in self.params] for _ in range(2))

    def step(self, gradients: Tree, rate: float, beta1: float = 0.9, beta2: float = 0.99) -> None:
        """Move the parameters, in place; gradients whose norm is above 1 are scaled down to it."""
        self.steps += 1
        arrays = list(leaves(gradients))
        length = float(sum((g * g).sum() for g in arrays)) ** 0.5
        shrink = 1 / max(1.0, length)
        for p, g, m, s in zip(self.params, arrays, self.mean, self.square, strict=True):
            g = g * shrink
            m += (1 - beta1) * (g - m)
            s += (1 - beta2) * (g * g - s)
            size = (s / (1 - beta2**self.steps)) ** 0.5 + 1e-8
            if p.ndim > 1:
                p *= 1 - rate * self.decay
            p -= rate / (1 - beta1**self.steps) * m / size


def leaves(tree: Tree) -> Iterator[Array]:
    """The arrays of a tree; in the same order for parameters and gradients."""
    if isinstance(tree, dict):
        for name in sorted(tree):
            yield from leaves(tree[name])
    elif isinstance(tree, list):
        for part in tree:
            yield from leaves(part)
    else:
        yield tree


def rate_at(step: int, steps: int) -> float:
    """The learning rate: up in a straight line, then down along a cosine to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return PEAK_RATE * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return PEAK_RATE * (0.55 + 0.45 * math.cos(math.pi * done))


class Text:
    """Characters as tokens, the last tenth held out."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        number = {c: n for n, c in enumerate(self.characters)}
        tokens = np.array([number[c] for c in text], np.int64)
        self.train, self.held_out = np.split(tokens, [len(tokens) * 9 // 10])


def stretches(model: GPT, tokens: Array, batch: int, rng: np.random.Generator) -> list[Array]:
    """Random stretches of the text, (batch, context), and the same one character later."""
    starts = rng.integers(len(tokens) - model.config.context, size=batch)
    drawn = tokens[starts[:, None] + np.arange(model.config.context + 1)]
    return [model.xp.asarray(a) for a in (drawn[:, :-1], drawn[:, 1:])]


def train(
    model: GPT, params: Tree, tokens: Array, steps: int, batch: int, rng: np.random.Generator
) -> Iterator[float]:
    """The loss of each step, before it; `params` change in place."""
    optimizer = AdamW(params)
    for step in range(steps):
        loss, vjp = model.loss(params, *stretches(model, tokens, batch, rng))
        optimizer.step(vjp(), rate_at(step, steps))
        yield float(loss)


def mean_loss(model: GPT, params: Tree, tokens: Array, batches: int = 8) -> float:
    """Over stretches that are the same each time."""
    rng = np.random.default_rng(0)
    drawn = (stretches(model, tokens, 32, rng) for _ in range(batches))
    return sum(float(model.loss(params, *pair)[0]) for pair in drawn) / batches


# --------------------------------------------------------------------------------------------- main


def language_reference() -> str:
    """The text that pydoc shows."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise SystemExit(f"no text to read ({error}); --text takes any file of text") from None
    return "\n".join(topics[name] for name in sorted(topics))


def note(line: str, end: str = "\n") -> None:
    """Text for the reader's eyes, apart from what the model writes."""
    print(line, end=end, file=sys.stderr, flush=True)


def progress(losses: Iterator[float], steps: int) -> Iterator[float]:
    """Pass the losses on; a terminal shows a bar with the latest, a file a line each tenth."""
    shown, start, recent = sys.stderr.isatty(), time.perf_counter(), []
    for done, loss in enumerate(losses, 1):
        recent = [*recent[-19:], loss]
        line = f"{done}/{steps}  loss {sum(recent) / len(recent):.3f}"
        line += f"  {time.perf_counter() - start:.0f} s"
        if shown:
            note(f"\rtraining [{'#' * (24 * done // steps):24}] {line} ", end="")
        elif done % max(1, steps // 10) == 0:
            note(f"training {line}")
        yield loss
    if shown:
        note("")


def draw(losses: list[float], held_out: tuple[float, float], title: str, path: Path) -> None:
    """A picture of the losses against the steps."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        note('no picture: it needs matplotlib (pip install -e ".[tools]")')
        return
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = max(1, len(losses) // 40)
    means = np.convolve(losses, np.ones(width) / width, "valid")
    axes.plot(losses, color="C0", alpha=0.25, linewidth=0.8)
    axes.plot(np.arange(len(means)) + width / 2, means, color="C0", label="training")
    axes.plot([0, len(losses)], held_out, "o", color="C1", label="held out")
    axes.set(xlabel="step", ylabel="loss, nats a character", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    note(f"loss curve in {path}")


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


def at_least(least: int) -> Callable[[str], int]:
    """An option that is an integer, for argparse, as the next three are."""

    def integer(text: str) -> int:
        with suppress(ValueError):
            if int(text) >= least:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least {least}")

    return integer


def whole_heads(text: str) -> int:
    """An option that is the width of some heads."""
    width = at_least(HEAD_DIM)(text)
    if width % HEAD_DIM:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {HEAD_DIM}, that of a head")
    return width


def text_of(name: str) -> str:
    """An option that is a file, as what is in it."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(
            f"{name} cannot be read ({error}); it must be a file of text in UTF-8"
        ) from None


def picture_file(name: str) -> Path:
    """An option that is a file to be written, where it can be."""
    path = Path(name)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{name} must end in one of {', '.join(PICTURES)}")
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{name} must be a file in a folder that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{name} may not be written; name another file")
    return path


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, all of them checked: nothing is left to fail once the model is trained."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add, positive = parser.add_argument, at_least(1)
    add("--backend", choices=("auto", "numpy", "cupy"), default="auto")
    add("--text", type=text_of, metavar="FILE", help="what to learn from")
    add("--steps", type=positive, default=600)
    add("--batch", type=positive, default=16, help="stretches of text for each step")
    add("--context", type=positive, default=64, help="characters of a stretch")
    add("--layers", type=positive, default=3)
    add("--width", type=whole_heads, default=128)
    add("--algorithm", choices=tuple(ATTENTION), default="fa2")
    add("--recompute", action="store_true", help="less memory, more time")
    add("--characters", type=at_least(0), default=400, help="to write at the end")
    add("--picture", type=picture_file, default="loss.png", help=f"one of {', '.join(PICTURES)}")
    add("--seed", type=at_least(0), default=0)
    options = parser.parse_args(arguments)
    if options.text is None:
        options.text = language_reference()
    if len(options.text) <= 10 * options.context:  # a tenth is held out
        parser.error(
            f"argument --context: {options.context} is too long for a text of "
            f"{len(options.text)} characters; it must be less than a tenth of that"
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    sys.stdout.reconfigure(errors="replace")  # a terminal need not have every character
    text = Text(options.text)
    xp = pick_backend(options.backend)
    sizes = options.layers, options.width, options.context
    model = GPT(Config(len(text.characters), *sizes), xp, options.algorithm, options.recompute)
    rng = np.random.default_rng(options.seed)
    params = model.init(rng)
    count = sum(a.size for a in leaves(params))
    title = f"{count / 1e6:.2f} M parameters, attention {options.algorithm}, {xp.__name__}"
    note(f"{len(text.train)} characters to learn from, {len(text.characters)} different; {title}")

    before, start = mean_loss(model, params, text.held_out), time.perf_counter()
    curve = train(model, params, text.train, options.steps, options.batch, rng)
    losses = list(progress(curve, options.steps))
    taken, after = time.perf_counter() - start, mean_loss(model, params, text.held_out)
    note(f"{options.steps} steps in {taken:.0f} s; held-out loss {before:.2f}, now {after:.2f}")

    newest = model.write(params, [int(text.held_out[0])], rng)
    for token in islice(newest, options.characters):
        print(text.characters[token], end="", flush=True)
    print()
    draw(losses, (before, after), title, options.picture)
    return int(not after < before)  # a NaN fails


if __name__ == "__main__":
    sys.exit(main())
