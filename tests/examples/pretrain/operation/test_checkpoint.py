"""Checkpoints: what is saved comes back, and what is damaged is noticed."""

import errno
import io
import os
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from examples.pretrain.errors import RunError
from examples.pretrain.operation import checkpoint
from examples.pretrain.operation.checkpoint import Checkpoints
from examples.pretrain.operation.processes import writing
from examples.pretrain.output import Output

# Whole numbers, whose sums are exact; the kernel is large enough for a file of its own.
STATE = {
    "params": {"kernel": jax.random.randint(jax.random.key(0), (64, 64), 0, 99) * 1.0},
    "variables": {"routing_bias": jnp.arange(8, dtype=jnp.bfloat16)},
    "opt_state": (jnp.int32(7), {"mu": jnp.ones((8, 8))}),
}
# Checkpoints asks for nothing else.
SETUP = types.SimpleNamespace(
    abstract=jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE
    )
)


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def open_checkpoints(tmp_path, out):
    console = Output(file=out, width=1000)
    return lambda: Checkpoints(tmp_path / "checkpoints", keep=2, console=console)


def after(steps):
    return jax.tree.map(lambda x: x + steps, STATE)


def save(open_checkpoints, *steps):
    with open_checkpoints() as checkpoints:
        for step in steps:
            checkpoints.save(step, after(step))


def restored_step(open_checkpoints):
    """The step of what comes back, once its arrays are seen to be those of the step."""
    with open_checkpoints() as checkpoints:
        state, step = checkpoints.restore(SETUP)
    jax.tree.map(np.testing.assert_array_equal, state, after(step))
    return step


def data_files(folder):
    return sorted((folder / "state").glob("**/d/*"), key=lambda path: path.stat().st_size)


@pytest.mark.extended
def test_the_newest_ones_are_kept(open_checkpoints, tmp_path):
    with open_checkpoints() as checkpoints:
        assert checkpoints.restore(SETUP) is checkpoints.latest_step is None
    save(open_checkpoints, 3, 5, 9)
    assert restored_step(open_checkpoints) == 9
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"5", "9"}


@pytest.mark.extended
def test_the_next_step_may_take_the_memory_at_once(open_checkpoints):
    step = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    state = step(after(-1))  # What donates never wrote to the arrays of STATE.
    with open_checkpoints() as checkpoints:
        for number in range(5):
            checkpoints.save(number, state)
            state = step(state)
    assert restored_step(open_checkpoints) == 4


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a bit": flip,
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "removed": os.unlink,
}


@pytest.mark.extended
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_moved_aside(damage, open_checkpoints, tmp_path, out):
    save(open_checkpoints, 5, 9)
    damage(data_files(tmp_path / "checkpoints" / "9")[-1])
    assert restored_step(open_checkpoints) == 5
    message = out.getvalue()
    assert "The checkpoint of step 9 is damaged" in message
    aside = tmp_path / "checkpoints" / "damaged_checkpoint_9"
    assert f"It is now {aside}, and" in message
    assert "carries on from step 5" in message
    assert aside.is_dir()
    save(open_checkpoints, 9)  # The run comes by again.
    assert restored_step(open_checkpoints) == 9


@pytest.mark.extended
def test_another_damaged_checkpoint_of_the_step_is_kept_too(open_checkpoints, tmp_path):
    for _ in range(3):
        save(open_checkpoints, 5, 9)
        flip(data_files(tmp_path / "checkpoints" / "9")[-1])
        assert restored_step(open_checkpoints) == 5
    names = {f"damaged_checkpoint_9{again}" for again in ("", "_again", "_again_again")}
    there = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert there == {"5"} | names


@pytest.mark.extended
def test_other_arrays_than_were_saved_are_noticed(open_checkpoints, monkeypatch, out):
    """What no storage layer has complained about."""
    save(open_checkpoints, 5)
    monkeypatch.setattr(checkpoint, "checksums", lambda state: {"params.kernel": 1})
    save(open_checkpoints, 9)
    monkeypatch.undo()
    assert restored_step(open_checkpoints) == 5
    assert "damaged (opt_state.0 is not what was saved)" in out.getvalue()


@pytest.mark.extended
def test_when_all_are_damaged_none_is_touched(open_checkpoints, tmp_path):
    save(open_checkpoints, 5, 9)
    for step in ("5", "9"):
        flip(data_files(tmp_path / "checkpoints" / step)[-1])
    with open_checkpoints() as checkpoints, pytest.raises(RunError) as error:
        checkpoints.restore(SETUP)
    for text in ("can be read: step 9: ", "; step 5: ", "Delete the folder"):
        assert text in str(error.value)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"5", "9"}


def test_a_full_disk_is_named(open_checkpoints, tmp_path, monkeypatch):
    """While the checkpoint is written, which is after `save` has returned."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(open_checkpoints, 5)
    handler = ocp.JsonCheckpointHandler
    monkeypatch.setattr(handler, "_save_fn", full)
    with pytest.raises(RunError, match="to: No space left on device"), writing(tmp_path):
        save(open_checkpoints, 9)
    monkeypatch.undo()
    assert restored_step(open_checkpoints) == 5


POSITIONS = {
    "a list": "[]", "null": "null", "a number": "7", "no checksums": '{"next_batch": 9}',
    "sums in a list": '{"next_batch": 9, "checksums": [["params.kernel", 1]]}',
    "no numbers": '{"next_batch": 9, "checksums": {"params.kernel": []}}',
    "another step": '{"next_batch": 8, "checksums": {}}',
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("content", POSITIONS.values(), ids=POSITIONS)
def test_a_position_of_another_shape_is_damage(content, open_checkpoints, tmp_path, out):
    save(open_checkpoints, 5, 9)
    (tmp_path / "checkpoints" / "9" / "position" / "metadata").write_text(content)
    assert restored_step(open_checkpoints) == 5
    assert "The checkpoint of step 9 is damaged" in out.getvalue()


@pytest.mark.extended
@pytest.mark.parametrize("content", ["[]", "7", "null", "{", ""])
@pytest.mark.parametrize("step", [5, 9])
def test_metadata_of_another_shape_blocks_no_run(
    content, step, open_checkpoints, tmp_path
):
    """Of the newest one, and of an older one that is not read."""
    save(open_checkpoints, 5, 9)
    for metadata in (tmp_path / "checkpoints" / str(step)).rglob("*METADATA*"):
        metadata.write_text(content)
    assert restored_step(open_checkpoints) == {5: 9, 9: 5}[step]
    save(open_checkpoints, 12)
    assert restored_step(open_checkpoints) == 12


@pytest.mark.extended
def test_a_copy_under_another_number_is_damage(open_checkpoints, tmp_path, out):
    save(open_checkpoints, 5, 9)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "9", folder / "10")
    assert restored_step(open_checkpoints) == 9
    assert (
        "step 10 is damaged (ValueError: it is a checkpoint of step 9)" in out.getvalue()
    )


@pytest.mark.extended
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_neither_saved_nor_restored(
    bad, open_checkpoints, monkeypatch, out
):
    spoiled = after(9) | {"variables": {"routing_bias": jnp.full(8, bad, jnp.bfloat16)}}
    save(open_checkpoints, 5)
    message = r"Step 9: variables\.routing_bias is not finite.* resumes from step 5\."
    with open_checkpoints() as checkpoints, pytest.raises(RunError, match=message):
        checkpoints.save(9, spoiled)
    with monkeypatch.context() as context, open_checkpoints() as checkpoints:
        context.setattr(checkpoint, "_not_finite", lambda state: "")
        checkpoints.save(9, spoiled)  # As it was saved before there was such a check.
    assert restored_step(open_checkpoints) == 5
    assert "damaged (variables.routing_bias is not finite)" in out.getvalue()


@pytest.mark.extended
def test_the_first_one_is_read_back(tmp_path, out):
    """Orbax loses those in a folder whose name it takes for a pattern."""
    setup = types.SimpleNamespace(abstract=SETUP.abstract, initial_state=lambda: STATE)
    console = Output(file=out, width=1000)
    with Checkpoints(tmp_path / "fine", 2, console) as checkpoints:
        jax.tree.map(np.testing.assert_array_equal, checkpoints.begin(setup), STATE)
    with (
        Checkpoints(tmp_path / "lr[3]", 2, console) as checkpoints,
        pytest.raises(RunError, match=r"was written, but cannot be read: .*--out"),
    ):
        checkpoints.begin(setup)


# Checksums

DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool")


def array(dtype, shape=(6, 8)):
    values = np.random.default_rng(0).normal(size=shape)
    return np.array(jnp.asarray(values if "float" in dtype else 100 * values, dtype))


def checksum(x):
    return checkpoint.checksums([x])["0"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bit_counts(dtype):
    x = array(dtype)
    bits = 1 if dtype == "bool" else 8 * x.itemsize
    changed = set()
    for place in (0, 1, 7, 8, 47):
        for bit in range(bits):
            flipped = x.copy()
            byte = x.itemsize * place + bit // 8
            flipped.view(np.uint8).reshape(-1)[byte] ^= 1 << bit % 8
            changed.add(checksum(flipped))
    assert len(changed) == 5 * bits and checksum(x) not in changed


@pytest.mark.usefixtures("enable_x64")
def test_the_upper_bits_of_long_numbers_count():
    for x in (np.arange(3.0), np.arange(3)):
        assert checksum(x) != checksum(-x)


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_the_order_of_entries_counts(dtype):
    """Also of numbers that differ in their sign alone, and of rows that are far apart."""
    x = array(dtype, (4, 32_768))
    x[0, :2] = 3, -3 if dtype != "uint8" else 4
    before = checksum(x)
    for a, b in (((0, 0), (0, 1)), ((0, 0), (2, 0)), ((1, 5), (3, 6))):
        swapped = x.copy()
        swapped[a], swapped[b] = x[b], x[a]
        assert x[a] != x[b] and checksum(swapped) != before
    assert checksum(x[::-1]) != before
    assert checksum(np.zeros_like(x)) != before


def test_checksums_have_the_paths_of_their_arrays_and_know_no_sharding():
    x = array("float32", (8, 16))
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    for spec in (jax.P(), jax.P("a"), jax.P("b", "a"), jax.P(None, ("a", "b"))):
        assert checksum(jax.device_put(x, jax.NamedSharding(mesh, spec))) == checksum(x)
    tree = {"params": {"kernel": jnp.ones((2, 3))}, "count": (jnp.int32(3), None)}
    found = checkpoint.checksums(tree)
    assert found.keys() == {"params.kernel", "count.0"}
    assert all(isinstance(value, int) for value in found.values())
    assert found == checkpoint.checksums(jax.tree.map(np.asarray, tree))
