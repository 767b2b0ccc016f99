"""The paper's runs as data: one recipe for each row that its tables report.

`RECIPES["125m-orscale"]` and so on. What rows share is said once, and a row says what is
its own. The test beside it reads the paper's tables and finds every row here, and every
recipe there.

Where the paper leaves a setting open, its public configurations have it: the clip of the
gradient, the validations, the rates of most CIFAR-10 ablations.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from examples.pretrain.recipe import DecoderRecipe, ImageRecipe, MixtureRecipe, Recipe


@dataclasses.dataclass(frozen=True)
class Result:
    """What the paper reports of a run.

    Attributes:
      table: Where it stands: the LaTeX label of a table, or of a section.
      value: The validation loss in nats, or the share of right answers in per cent.
      spread: One standard deviation over three seeds; None for a single seed.
    """

    table: str
    value: float
    spread: float | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A run that the paper's tables report.

    Attributes:
      model: Preset of the model.
      recipe: How it is trained.
      results: What the paper reports of it.
      learning_rate_from: Where the learning rate stands: "paper" or "public logs". An
        "assumed" one is ours: the paper says "its best".
    """

    model: str
    recipe: Recipe
    results: tuple[Result, ...] = ()
    learning_rate_from: str = "paper"


Named = Iterable[tuple[str, Row]]


def _decoder(
    model: str, learning_rate: float, tokens: int, seq_len: int, batch_size: int
) -> Row:
    """A dense decoder's runs, appendix "Full hyperparameters"."""
    recipe = DecoderRecipe(
        optimizer="adamw",
        learning_rate=learning_rate,
        tokens=tokens,
        seq_len=seq_len,
        batch_size=batch_size,
    )
    return Row(model, recipe)


# The paper gives tokens in billions to two decimals; these make its numbers of steps.
_DENSE_125M = _decoder("125m", 1e-3, 5_242_880_000, 1024, 256)
_DENSE_399M = _decoder("399m", 9.503e-4, 8_919_711_744, 8192, 96)
_DENSE_545M = _decoder("545m", 9.143e-4, 14_040_432_640, 4096, 256)
_DENSE_1_1B = _decoder("1.1b", 8.561e-4, 28_541_190_144, 4096, 384)
_MIXTURE = Row(
    "moonlight_16b_a3b",
    MixtureRecipe(
        optimizer="adamw",
        learning_rate=4.2e-4,
        tokens=9_999_220_736,
        seq_len=8192,
        batch_size=2048,
        warmup_steps=60,
        val_every=50,
        val_batches=10,
        param_dtype="bfloat16",
    ),
)
_CIFAR10 = Row(
    "davidnet",
    ImageRecipe(
        optimizer="orscale_vision",
        learning_rate=0.02,
        adam_learning_rate=1e-3,
        adam_b2=0.999,
        weight_decay=5e-4,
        clip=None,
        warmup_steps=500,
        epochs=24,
        batch_size=512,
        val_every=None,
        val_batches=None,
    ),
)


def _row(
    base: Row,
    optimizer: str,
    *results: Result,
    learning_rate_from: str = "paper",
    **changes: Any,
) -> Row:
    """A run of a base with an optimizer, and what else is its own."""
    recipe = dataclasses.replace(base.recipe, optimizer=optimizer, **changes)
    return Row(base.model, recipe, results, learning_rate_from)


def _dense() -> Named:
    """Table "dense", and what other tables say of the same runs."""
    main, log, sweep = "tab:dense", "tab:calibration", "tab:lr-sweep"
    one_seed = Result(log, 3.2120), Result(sweep, 3.2120)
    for base, adamw, muon_moonlight, orscale in (
        (
            _DENSE_125M,
            [Result(main, 3.3721)],
            [Result(main, 3.2319), Result(sweep, 3.2319)],
            [Result(main, 3.2120, 0.0017), *one_seed],
        ),
        (
            _DENSE_399M,
            [Result(main, 2.9966)],
            [Result(main, 2.9198, 0.0016), Result(log, 2.9183)],
            [Result(main, 2.9223, 0.0022), Result(log, 2.9247)],
        ),
        (
            _DENSE_545M,
            [Result(main, 2.9235)],
            [Result(main, 2.8141, 0.0013)],
            [Result(main, 2.8052, 0.0013)],
        ),
        (
            _DENSE_1_1B,
            [Result(main, 2.7304)],
            [Result(main, 2.6360)],
            [Result(main, 2.6251)],
        ),
    ):
        yield base.model, _row(base, "adamw", *adamw)
        yield base.model, _row(base, "muon_moonlight", *muon_moonlight)
        yield base.model, _row(base, "orscale", *orscale)


def _mixture() -> Named:
    table = "tab:moe"
    yield "16b-a3b", _row(_MIXTURE, "adamw", Result(table, 5.2002))
    yield "16b-a3b", _row(_MIXTURE, "muon_moonlight", Result(table, 3.4715))
    yield "16b-a3b", _row(_MIXTURE, "orscale", Result(table, 3.3410))
    yield "16b-a3b", _row(_MIXTURE, "orscale", Result(table, 3.3556), r_max=10.0)


def _calibration() -> Named:
    """Table "calibration" and the clip's removal.

    AdamW's parameters stay at the shared rate.
    """
    table = "tab:calibration"
    for base, rate, results in (
        (_DENSE_399M, 2.376e-3, [Result(table, 2.9939)]),
        (_DENSE_125M, 3e-3, [Result(table, 3.2232), Result("tab:req-ablation", 3.2232)]),
    ):
        row = _row(
            base,
            "uncalibrated",
            *results,
            learning_rate=rate,
            adam_learning_rate=base.recipe.learning_rate,
        )
        yield base.model, row
    yield "125m", _row(_DENSE_125M, "bfloat16_calibration", Result(table, 3.2158))
    yield "125m", _row(_DENSE_125M, "unclipped", Result("app:req-details", 3.2187))


def _rate_sweep() -> Named:
    """Table "lr-sweep" without its cells at the recipe's rate, which `_dense` has."""
    sweep = {
        "muon_moonlight": {3e-4: 3.2841, 3e-3: 3.2372, 1e-2: 4.6262},
        "orscale": {3e-4: 3.2588, 3e-3: 3.2196, 1e-2: 3.3287},
    }
    for optimizer, losses in sweep.items():
        for rate, loss in losses.items():
            result = Result("tab:lr-sweep", loss)
            yield "125m", _row(_DENSE_125M, optimizer, result, learning_rate=rate)


def _text_ablations() -> Named:
    """Column "FW-125M" of table "req-ablation".

    Its setup differs from the other runs' in what the paper does not say, so that its
    losses compare with one another alone. The rates are the best of the public sweeps, or
    of the nearest relative in them.
    """
    losses = {
        "polar_factor_denominator": (0.02, 3.231),
        "momentum_denominator": (0.02, 3.252),
        "momentum_rms_denominator": (1e-3, 3.230),
        "decoupled_weight_decay": (1e-3, 3.305),
        "orscale_vision": (0.02, 3.228),
        "orscale": (1e-3, 3.226),
    }
    for optimizer, (rate, loss) in losses.items():
        row = _row(
            _DENSE_125M,
            optimizer,
            Result("tab:req-ablation", loss),
            learning_rate=rate,
            learning_rate_from="assumed",
            adam_learning_rate=_DENSE_125M.recipe.learning_rate,
        )
        yield "125m-ablation", row


def _cifar10() -> Named:
    """Table "cifar", the cells that its appendix mentions, and the ablations."""
    table, text, ablation = "tab:cifar", "app:cifar", "tab:req-ablation"
    for optimizer, rate, result in (
        ("muon_moonlight", 0.01, Result(table, 93.75, 0.17)),
        ("muon_moonlight", 5e-3, Result(text, 93.61)),
        ("muon_moonlight", 1e-3, Result(text, 93.18, 0.09)),
        ("muon_moonlight", 5e-4, Result(text, 92.41, 0.12)),
        ("muon", 0.04, Result(table, 93.70, 0.14)),
        ("muon", 0.02, Result(text, 93.67)),
        ("adamw", 0.01, Result(table, 93.12, 0.04)),
        ("lamb", 0.01, Result(table, 92.40, 0.20)),
    ):
        yield "cifar10", _row(_CIFAR10, optimizer, result, learning_rate=rate)
    best = Result(table, 94.05, 0.08), Result(ablation, 94.05, 0.08)
    yield "cifar10", _row(_CIFAR10, "orscale_vision", *best)


def _image_ablations() -> Named:
    """Column "CIFAR-10" of table "req-ablation"."""
    table, logs = "tab:req-ablation", "public logs"
    for optimizer, rate, source, result in (
        ("polar_factor_denominator", 0.02, logs, Result(table, 94.06, 0.09)),
        ("momentum_denominator", 5e-3, logs, Result(table, 93.84, 0.15)),
        ("momentum_rms_denominator", 0.06, logs, Result(table, 93.83, 0.17)),
        ("decoupled_weight_decay", 0.02, "assumed", Result(table, 93.55, 0.12)),
        ("orscale", 0.02, logs, Result(table, 94.05, 0.12)),
    ):
        row = _row(
            _CIFAR10,
            optimizer,
            result,
            learning_rate=rate,
            learning_rate_from=source,
            r_min=0.5,
            r_max=1.5,
        )
        yield "cifar10", row


def _named(*groups: Named) -> dict[str, Row]:
    """Rows by prefix and optimizer, and by what else tells them apart."""
    rows: dict[str, Row] = {}
    for prefix, row in (pair for group in groups for pair in group):
        recipe = row.recipe
        name = f"{prefix}-{recipe.optimizer.replace('_', '-')}"
        first = rows.get(name, row).recipe
        for field, short in (("learning_rate", "lr"), ("r_max", "r-max")):
            if getattr(recipe, field) != getattr(first, field):
                name += f"-{short}-{getattr(recipe, field):g}"
        if name in rows:
            raise ValueError(f"Two recipes have the name {name}.")
        rows[name] = row
    return rows


# By name, as `--recipe` takes it. Of an optimizer's runs on a model, the first has the
# plain name: that of the main table.
ROWS: dict[str, Row] = _named(
    _dense(),
    _mixture(),
    _calibration(),
    _rate_sweep(),
    _text_ablations(),
    _cifar10(),
    _image_ablations(),
)
RECIPES: dict[str, Recipe] = {name: row.recipe for name, row in ROWS.items()}
