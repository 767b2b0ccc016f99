"""Text from the model of a run, and the model itself."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.pretrain import sample
from examples.pretrain.errors import UsageError
from examples.pretrain.operation.checkpoint import load_model
from examples.pretrain.sample import Sampling
from examples.pretrain.setup import split
from tests.examples.pretrain import tiny

GREEDY = Sampling(temperature=0, length=8)
CONTEXT = tiny.TINY["seq_len"]


@pytest.fixture
def finished(tmp_path_factory):
    return tiny.finished_run(tmp_path_factory.getbasetemp())[0]


@pytest.fixture
def orscale(finished):
    return finished / "orscale"


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of OrScale's run, to be changed."""
    for name in ("config.json", "orscale/checkpoints"):
        there = tmp_path / "run" / name
        there.parent.mkdir(exist_ok=True, parents=True)
        copy = shutil.copytree if (finished / name).is_dir() else shutil.copy
        copy(finished / name, there)
    return tmp_path / "run" / "orscale"


def change(folder, **facts):
    path = folder.parent / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def assert_is_checkpoint(model, folder):
    def named(path):  # The checkpoint's layers are numbered by strings.
        return path.replace("'", "")

    saved = {named(name): x for name, x in tiny.last_state(folder).items()}
    params, variables = split(model)
    leaves = jax.tree.leaves_with_path({"params": params, "variables": variables})
    for path, leaf in leaves:
        name = named(jax.tree_util.keystr(path))
        np.testing.assert_array_equal(leaf, saved[name], err_msg=name)


@pytest.mark.extended
def test_the_model_is_that_of_the_newest_checkpoint(orscale):
    model = load_model(orscale)
    assert_is_checkpoint(model, orscale)
    assert model(jnp.zeros((1, 3), jnp.int32)).shape == (1, 3, 256)


def test_a_greedy_text_takes_the_likeliest_byte_every_time(orscale):
    text = sample.sample(orscale, "the mo", GREEDY).encode()
    logits_TxV = load_model(orscale)(jnp.array([list(text)]))[0]
    likeliest = bytes(logits_TxV.argmax(-1).tolist())
    assert text[6:] == likeliest[5:-1] and len(text) == 6 + GREEDY.length


@pytest.mark.extended
def test_the_same_seed_gives_the_same_text(orscale):
    texts = [sample.sample(orscale, "the ", Sampling(seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("the ") for text in texts)


def test_draws_follow_the_logits():
    logits = jnp.log(jnp.array([0.1, 0.6, 0.3]))

    def shares(temperature):
        keys = jax.random.split(jax.random.key(0), 2000)
        drawn = jax.vmap(lambda key: sample.draw(key, logits, temperature))(keys)
        return np.bincount(drawn, minlength=3) / len(keys)

    np.testing.assert_allclose(shares(1.0), [0.1, 0.6, 0.3], atol=0.04)
    assert shares(0.5)[1] > 0.7 and shares(0)[1] == 1


@pytest.mark.parametrize(
    "prompt", ["", "grüße 語", "\udcff", "x" * 5 * CONTEXT, "a\x1b[2J"]
)
def test_any_prompt_is_continued(orscale, prompt):
    text = sample.sample(orscale, prompt, GREEDY)
    shown = prompt.replace("\udcff", "\ufffd").replace("\x1b", "\ufffd")
    assert text.startswith(shown) and len(text) > len(prompt)


def test_the_model_reads_the_last_bytes_of_a_long_prompt(orscale):
    words = "the model reads a line of text"
    long, short = (sample.sample(orscale, p, GREEDY) for p in (words, words[-CONTEXT:]))
    assert long[len(words) :] == short[CONTEXT:]


def test_the_model_may_end_the_text():
    class Ends(nnx.Module):
        """Says "a", and then that the document is over."""

        def hidden(self, tokens_1xT):
            return jax.nn.one_hot(jnp.where(tokens_1xT == ord("a"), 0, ord("a")), 300)

        def logits(self, x_1xTxV):
            return x_1xTxV.at[..., 299].set(9.0)  # No byte, so never drawn.

    assert bytes(sample.generate(Ends(), b"x", 4, GREEDY)) == b"a"


def test_a_damaged_checkpoint_is_passed_over_and_stays(copied):
    steps = sorted(int(p.name) for p in (copied / "checkpoints").iterdir())
    newest = copied / "checkpoints" / str(steps[-1])
    shutil.rmtree(newest / "state")
    with pytest.warns(match=f"are those of step {steps[-2]}, since newer ones"):
        model = load_model(copied)
    assert newest.exists()
    newest.rename(copied / "damaged")
    assert_is_checkpoint(model, copied)
    for step in steps[:-1]:
        shutil.rmtree(copied / "checkpoints" / str(step) / "state")
    with pytest.raises(
        UsageError, match=f"no checkpoint can be read: step {steps[-2]}: "
    ):
        load_model(copied)
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(UsageError, match="no checkpoint is there yet"):
        load_model(copied)


def test_an_interrupted_run_of_an_earlier_version_has_a_model(copied):
    assert not (copied / "result.json").exists()
    change(copied, router="matrix", an_option_of_before=3)
    assert sample.sample(copied, "the", GREEDY).startswith("the")


def test_a_byte_beyond_the_vocabulary_is_refused():
    sample.check_prompt("u", "byte", 128)
    with pytest.raises(UsageError, match="byte 195, but the vocabulary ends at 127"):
        sample.check_prompt("ü", "byte", 128)


@pytest.mark.parametrize("unit", ["token", "image"])
def test_what_writes_no_text_is_refused_by_name(copied, unit):
    change(copied, unit=unit)
    with pytest.raises(UsageError, match=f"A model of {unit}s writes no text"):
        sample.sample(copied, "x", GREEDY)


def test_the_command_takes_a_run_of_one_or_of_all_optimizers(finished, capsys):
    options = ["the ", "--length", "5", "--temperature", "0"]
    assert sample.main([*options, "--run", str(finished)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(" ─")[0] for line in shown[::2]] == [
        "AdamW",
        "muon",
        "OrScale",
    ]
    assert sample.main([*options, "--run", str(finished / "orscale")]) == 0
    assert capsys.readouterr().out.splitlines() == shown[-2:]


def test_the_command_names_what_is_missing(tmp_path, copied, capsys):
    shutil.rmtree(copied / "checkpoints")
    for folder, message in (
        (tmp_path / "nothing", "nothing is not the folder of a run"),
        (copied.parent, "run holds no checkpoint yet"),
        (copied, "no checkpoint is there yet"),
        (copied / "adamw", "adamw is not the folder of a run"),
    ):
        assert sample.main(["x", "--run", str(folder)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [("{", "is damaged"), ("[]", "is damaged"), ("{}", "has no config.json of a run")],
)
def test_a_damaged_configuration_is_refused(copied, text, message):
    (copied.parent / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_model(copied)


@pytest.mark.parametrize("option", ["length", "temperature", "seed"])
def test_impossible_options_are_refused(option):
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} -1 must be"):
        Sampling(**{option: -1})


@pytest.mark.extended
def test_a_mixture_is_loaded_and_sampled_at_the_end_of_its_run(tmp_path, capsys):
    data = tiny.write_texts(tmp_path / "texts")
    options = {"optimizer": ("orscale",), "sample": "the ", "log_every": 50}
    assert tiny.main(tiny.arguments(data, tmp_path / "run", "demo-moe", **options)) == 0
    assert "\nthe " in capsys.readouterr().out
    model = load_model(tmp_path / "run" / "orscale")
    assert_is_checkpoint(model, tmp_path / "run" / "orscale")


def test_a_run_refuses_a_text_that_its_models_cannot_continue(tmp_path, capsys):
    data = tiny.write_texts(tmp_path / "texts")
    options = {"sample": "ü", "model.vocab_size": 128}
    assert tiny.main(tiny.arguments(data, tmp_path / "run", **options)) == 2
    assert "vocabulary ends at 127" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
