"""Text from a run's model, whose tokens are bytes.

python -m examples.pretrain.sample --run runs/demo/orscale "def update("
"""

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from examples.pretrain.data import SEPARATOR
from examples.pretrain.errors import UsageError, exit_code_of
from examples.pretrain.operation.checkpoint import checkpoint_steps, load_model
from examples.pretrain.operation.rundir import run_facts
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.output import Output

BYTES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Continue a text with the model of a run's newest checkpoint."""

    # The text to continue. None: a new document.
    prompt: tyro.conf.Positional[str] = ""
    # Folder of a run: of one optimizer, or of several, whose models then take turns.
    run: pathlib.Path = pathlib.Path("runs/text")
    # Bytes to write, at most: the model may end the text before.
    length: int = 200
    # The logits are divided by it. 0 takes the likeliest byte every time.
    temperature: float = 0.8
    # Of the draws; the same seed gives the same text.
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fine, wanted in (
            ("length", self.length >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0"),
            ("seed", 0 <= self.seed < 2**32, "at least 0 and below 2**32"),
        ):
            if not fine:
                option = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise UsageError(f"{option} must be {wanted}.")


def sample(folder: pathlib.Path, prompt: str, sampling: Sampling) -> str:
    """The prompt and what the model of a run's newest checkpoint makes of it.

    The folder is that of one optimizer. The model reads the last bytes of the prompt, as
    many as the run's sequences have.
    """
    facts = run_facts(folder)
    check_prompt(prompt, facts["unit"], facts.get("model.vocab_size", 0))
    given = os.fsencode(prompt)
    added = generate(load_model(folder), given, facts["seq_len"], sampling)
    decoded = (given + bytes(added)).decode(errors="replace")
    return "".join(  # Without what a terminal would act on.
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for c in decoded
    )


def check_prompt(prompt: str, unit: str, vocab_size: int) -> None:
    """Refuses a prompt for a model whose tokens are no bytes, or lack one of its."""
    if unit != "byte":
        raise UsageError(
            f"A model of {unit}s writes no text: only those that were trained on text "
            "files do. examples.pretrain.operation.checkpoint.load_model loads any model."
        )
    largest = max(os.fsencode(prompt), default=0)
    if largest >= vocab_size:
        raise UsageError(
            f"The prompt {prompt!r} holds byte {largest}, but the vocabulary ends at "
            f"{vocab_size - 1}: use other characters."
        )


def generate(
    model: Any, prompt: bytes, context: int, sampling: Sampling
) -> Iterator[int]:
    """The bytes that follow a prompt, until the model ends the document.

    The model looks back on `context` bytes, at most. An empty prompt begins a document.
    """
    graphdef, state = nnx.split(model)
    text = list(prompt or SEPARATOR)
    key = jax.random.key(sampling.seed)
    for index in range(sampling.length):
        seen = text[-context:]
        window = np.zeros((1, context), np.int32)
        window[0, : len(seen)] = seen
        logits = _next_logits(graphdef, state, window, len(seen) - 1)
        byte = int(draw(jax.random.fold_in(key, index), logits, sampling.temperature))
        if byte == SEPARATOR[0]:
            return
        yield byte
        text.append(byte)


@functools.partial(jax.jit, static_argnums=0)
def _next_logits(graphdef: Any, state: Any, tokens_1xT: Any, last: Any) -> jax.Array:
    """The logits of the byte after position `last`; none looks at what follows it."""
    model = nnx.merge(graphdef, state)
    hidden = model.hidden(tokens_1xT)
    hidden_1xTxD = hidden[0] if isinstance(hidden, tuple) else hidden
    logits_1x1xV = model.logits(jax.lax.dynamic_slice_in_dim(hidden_1xTxD, last, 1, 1))
    return logits_1x1xV[0, 0, :BYTES].astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def draw(key: jax.Array, logits_V: jax.Array, temperature: float) -> jax.Array:
    """A byte; the likeliest one at temperature 0."""
    if temperature == 0:
        return logits_V.argmax()
    return jax.random.categorical(key, logits_V / temperature)


def show_samples(
    run: pathlib.Path, prompt: str, console: Output, sampling: Sampling = Sampling()
) -> None:
    """Prints what the models of a run, or the one of an optimizer's folder, write."""
    folders = [run := run.resolve()]
    if (run / "config.json").exists():
        folders = [run / name for name in OPTIMIZERS if checkpoint_steps(run / name)]
    if not folders:
        raise UsageError(f"{run} holds no checkpoint yet.")
    for folder in folders:
        text = sample(folder, prompt, sampling)
        known = OPTIMIZERS.get(folder.name)
        label = known.label if known else folder.name  # Of a copied folder.
        console.rule(label, align="left", style="dim")
        console.print(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code."""

    def run() -> None:
        prog = "python -m examples.pretrain.sample"
        sampling = tyro.cli(Sampling, args=arguments, prog=prog)
        show_samples(sampling.run, sampling.prompt, Output(), sampling)

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main())
