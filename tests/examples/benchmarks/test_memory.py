"""The table of the page on memory, against the command and against counts by hand."""

from pathlib import Path

import pytest

from examples.benchmarks import memory

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"
# Of TinyLlama, of Llama 2 7B, and of Moonlight, whose authors' 15.96 billion are these.
PARAMETERS = {"1.1B": 1_100_048_384, "7B": 6_738_415_616, "16B": 15_958_142_464}
# Embeddings, heads, norms and routers, which take AdamW.
ADAMW = {
    "1.1B": 2 * 32000 * 2048 + 45 * 2048,
    "7B": 2 * 32000 * 4096 + 65 * 4096,
    "16B": 2 * 163840 * 2048 + 55 * 2048 + 27 * 512 + 26 * 2048 * 64,
}


@pytest.mark.extended
@pytest.mark.parametrize("model", ["7B"])
def test_the_tables_on_the_page(model):
    assert f"\n{memory.table(model)}\n\n" in PAGE.read_text()


@pytest.mark.parametrize("model", memory.MODELS)
def test_the_models(model):
    """All of each is there, stacked, and divides the chips."""
    for chips in memory.COUNTS:
        params, numbers = memory.placed(model, chips, "float32")
        sizes = {name: array.size for name, array in params.items()}
        assert sum(sizes.values()) == PARAMETERS[model]
        ours = sum(size for name, size in sizes.items() if numbers[name] is None)
        assert ours == ADAMW[model]
        weights = memory.of_weights(params)
        assert weights.per_parameter == 4
        norms = sum(size for name, size in sizes.items() if "norm" in name)
        sharded = (PARAMETERS[model] - norms) // chips
        assert weights.per_chip == 4 * (sharded + norms)


def choice_of(name):
    [choice] = [choice for choice in memory.CHOICES if choice.name == name]
    return choice


# Bytes for each entry of a matrix and for each of AdamW's.
BYTES = {
    '`keep_master_weights(muon)`, `mu_dtype="bfloat16"`': (4, 8),
    "`keep_master_weights(muon)`": (6, 10),
    "`keep_master_weights(muon, bits=8)`, all in 8 bits": (2.0625, 3.125),
    "`optax.adamw`": (8, 8),
    '`optax.adamw`, `mu_dtype="bfloat16"`': (6, 6),
    "`muon`": (4, 8),
    '`muon`, `mu_dtype="bfloat16"`': (2, 6),
    '`muon`, `mu_dtype="int8"`': (1.0625, 8),
}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name, each", BYTES.items())
def test_bytes_for_each_parameter_by_hand(name, each):
    of_matrices, of_others = each
    choice = choice_of(name)
    for model in memory.MODELS:
        params, numbers = memory.placed(model, 8, choice.weights)
        on_chip, on_host = memory.of_state(params, numbers, choice)
        ours = PARAMETERS[model] - ADAMW[model]
        whole = of_matrices * ours + of_others * ADAMW[model]
        assert on_chip.per_parameter == pytest.approx(whole / PARAMETERS[model], abs=1e-4)
        assert on_host == (0, 0)


def test_what_is_offloaded_is_not_on_the_chips():
    params, numbers = memory.placed("1.1B", 64, "float32")
    offloaded = choice_of("`muon`, momentum and moments offloaded")
    on_chip, on_host = memory.of_state(params, numbers, offloaded)
    [all_of_it, nothing] = memory.of_state(params, numbers, choice_of("`muon`"))
    assert on_host.per_chip + on_chip.per_chip == all_of_it.per_chip
    assert nothing.per_chip == 0 < on_chip.per_chip < 100  # Counts.


def test_every_choice_is_counted_by_hand_or_offloaded():
    on_chips = {choice.name for choice in memory.CHOICES if not choice.on_host}
    assert on_chips == set(BYTES)
