"""What crosses between regions, on programs whose exchanges are counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from examples.benchmarks import hlo_cost

HALVES = {device: device // 4 for device in range(8)}
# As two slices of four number their devices.
SLICES = {100_000 * (n + 1) + device: n for n in range(2) for device in range(4)}
X, Y = "f32[16]{0}", "f32[64]{0}"


def program(*lines):
    x, y = f"%x = {X} parameter(0)", f"%y = {Y} parameter(1)"
    body = "\n".join(f"  {text}" for text in (x, y, *lines))
    return f"ENTRY %main (x: f32[16], y: f32[64]) -> f32[64] {{\n{body}\n}}\n"


def figures(text, regions=HALVES):
    """Bytes and messages of each device, if all have the same; buffers; collectives."""
    found = hlo_cost.crossings(text, regions)
    assert found.received.keys() == found.messages.keys() == regions.keys()
    [received] = set(found.received.values())
    [messages] = set(found.messages.values())
    return received, messages, found.buffers, found.collectives


LISTED = "replica_groups={{0,1,2,3,4,5,6,7}}"
PAIRED = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"


@pytest.mark.parametrize(
    "line, expected",
    [
        # Four of eight parts of 64 bytes / 8.
        (f"%a = {X} all-to-all(%x), {LISTED}", (32, 4, 64, 1)),
        (f"%a = {X} all-to-all(%x), {PAIRED}", (32, 1, 64, 1)),
        # What four devices hold, shared by four.
        (f"%a = f32[128]{{0}} all-gather(%x), {LISTED}", (64, 1, 512, 1)),
        (f"%a = f32[32]{{0}} all-gather(%x), {PAIRED}", (64, 1, 128, 1)),
        (f"%a = f32[2]{{0}} reduce-scatter(%x), {LISTED}, to_apply=%sum", (8, 1, 8, 1)),
        (f"%a = {X} all-reduce(%x), {LISTED}, to_apply=%sum", (16, 2, 64, 1)),
        (f"%a = {X} all-reduce(%x), replica_groups={{}}, to_apply=%sum", (16, 2, 64, 1)),
        (
            f"%a = {X} collective-permute(%x), source_target_pairs="
            "{{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}",
            (64, 1, 64, 1),
        ),
        (
            f"%a = {X} collective-permute(%x), source_target_pairs={{{{0,1}},{{1,0}}}}",
            (0, 0, 0, 0),
        ),
        (
            f"%a = {X} all-to-all(%x), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}",
            (0,) * 4,
        ),
        (f"%a = {X} multiply(%x, %x)", (0, 0, 0, 0)),
    ],
)
def test_what_each_device_receives(line, expected):
    assert figures(program(line)) == expected


@pytest.mark.parametrize(
    "groups, crosses",
    [
        ("[2,4]<=[8]", False),
        ("[1,8]<=[8]", True),
        ("[4,2]<=[2,4]T(1,0)", True),
        ("[4,2]<=[4,2]", False),
        ("mesh['dcn'=2,'fsdp'=4] {'dcn'}", True),
        ("mesh['dcn'=2,'fsdp'=4] {'fsdp'}", False),
        ("mesh['dcn'=2,'fsdp'=4] {'fsdp','dcn'}", True),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", False),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", True),
        ("mesh['a'=4,'b'=2], device_ids=([8]) {'b'}", False),
        ("mesh['a'=8] {'a':(1)2}", True),
        ("mesh['a'=8] {'a':(2)4}", False),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", False),
        ("mesh['a'=4,'b'=2] {'a':(1)2,'b'}", True),
    ],
)
def test_forms_of_groups(groups, crosses):
    text = program(f"%a = {X} all-to-all(%x), replica_groups={groups}, dimensions={{0}}")
    received = 32 if crosses else 0
    assert figures(text)[0] == received


def test_a_form_that_is_unknown_is_refused():
    text = program(f"%a = {X} all-to-all(%x), replica_groups=mesh['a'=8] {{'a'/2}}")
    with pytest.raises(ValueError, match="which devices"):
        hlo_cost.crossings(text, HALVES)


def test_numbers_in_a_shape_are_transposed():
    text = program(f"%a = {X} all-to-all(%x), replica_groups=[4,2]<=[2,2,2]T(1,2,0)")
    [found] = hlo_cost.of(text).collectives
    assert found.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    text = text.replace("[4,2]<=[2,2,2]T(1,2,0)", "mesh['a'=2,'b'=2,'c'=2] {'c','a'}")
    [found] = hlo_cost.of(text).collectives
    assert found.groups == ((0, 4, 1, 5), (2, 6, 3, 7))


def test_an_asynchronous_pair_counts_once():
    text = program(
        f"%s = ({X}, f32[128]{{0}}) all-gather-start(%x), {LISTED}, dimensions={{0}}",
        "%d = f32[128]{0} all-gather-done(%s)",
        f"%p = ({X}, {X}, u32[], u32[]) collective-permute-start(%x), "
        "source_target_pairs={{0,4},{1,5},{2,6},{3,7},{4,0},{5,1},{6,2},{7,3}}",
        f"%q = {X} collective-permute-done(%p)",
    )
    assert figures(text) == (64 + 64, 2, 512 + 64, 2)


WRAPPED = """
%exchange (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  ROOT %all = f32[16]{0} all-to-all(%p), replica_groups=[1,8]<=[8], dimensions={0}
}

ENTRY %main (x: f32[16]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %started = ((f32[16]{0}), f32[16]{0}, u32[]) async-start(%x), calls=%exchange
  ROOT %all = f32[16]{0} async-done(%started), calls=%exchange
}
"""


def test_a_collective_in_an_asynchronous_call():
    assert figures(WRAPPED) == (32, 4, 64, 1)


def test_a_collective_beside_a_chain_of_kernels_is_one():
    rest = f'{X} all-to-all(%x), {LISTED}, frontend_attributes={{chain_id="0"}}'
    assert figures(program(f"%a = {rest}", f"%b = {rest}")) == (32, 4, 64, 1)


HOSTS = 'send(%y, %t), is_host_transfer=true, frontend_attributes={{_xla_megascale_target={},_xla_megascale_transfer_type="{}"}}'  # noqa: E501
PAIRS_OF_SLICES = "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}"
ALL_OF_SLICES = "{{100000,100001,100002,100003,200000,200001,200002,200003}}"
BETWEEN = ",".join(f"{{10000{i}->20000{i}}},{{20000{i}->10000{i}}}" for i in range(4))


@pytest.mark.parametrize(
    "target, kind, expected",
    [
        (PAIRS_OF_SLICES, "ALL_GATHER", (256, 1, 512, 1)),
        ('"{1,2}x{0:3}"', "ALL_GATHER", (256, 1, 512, 1)),
        (ALL_OF_SLICES, "ALL_TO_ALL", (128, 4, 256, 1)),
        ('"{1,2}x{0:3}"', "ALL_REDUCE", (256, 2, 256, 1)),
        (PAIRS_OF_SLICES, "REDUCE_SCATTER", (128, 1, 128, 1)),
        (f"{{{BETWEEN}}}", "ONE_TO_ONE", (256, 1, 256, 1)),
    ],
)
def test_several_slices_send_by_their_hosts(target, kind, expected):
    sent = HOSTS.format(target, kind)
    text = program(
        "%t = token[] after-all()",
        f"%s = ({Y}, u32[], token[]) {sent}",
        f"%r = ({Y}, u32[], token[]) {sent.replace('send', 'recv')}",
        "%done = token[] send-done(%s), is_host_transfer=true",
        # Of one slice.
        f"%a = {X} all-to-all(%x), replica_groups={{{{0,1,2,3}}}}",
    )
    assert figures(text, SLICES) == expected


def test_a_loop_sends_as_often_as_it_runs():
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"))
    spec = P(None, ("dcn", "fsdp"))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def run(x):
        def one(x):
            inside = jax.lax.psum(x, "fsdp")
            return x + inside + jax.lax.ppermute(x, "dcn", [(0, 1), (1, 0)])

        return jax.lax.map(one, x)

    where = NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((5, 64, 32), jnp.float32, sharding=where)
    text = run.lower(x).compile().as_text()
    assert figures(text) == (5 * 4 * 8 * 32, 5, 5 * 4 * 8 * 32, 5)
