"""The cost of compiled programs, counted by hand: kernels, traffic, what crosses."""

import pytest

from examples.benchmarks import hlo_cost
from orscale_jax.newton_schulz.hardware import H100, Link
from tests.examples.benchmarks.test_program import (
    NOTED,
    collectives,
    cycles,
    loop,
    main,
    text,
    traced,
    trips,
)

OPERANDS = "a: bf16[4,32]{1,0}; b: bf16[16,32]{1,0}"
PRODUCT = "%c = f32[4,16]{1,0} convolution(%a, %b), dim_labels=bf_oi->bf"
FUSED = "f32[4,16]{1,0} fusion(%a, %b)"
FUSION = (
    text("%inner", OPERANDS, f"{PRODUCT}, {cycles(70)}")
    + text("%outer", OPERANDS, f"%f = {FUSED}, kind=kOutput, calls=%inner, {cycles(80)}")
    + main(OPERANDS, f"%f = {FUSED}, kind=kCustom, calls=%outer, {cycles(100)}")
)
CALLS = (
    text("%exchange", "p: f32[64]", "%all = f32[64] all-to-all(%p), dimensions={0}")
    + text("%doubled", "p: f32[64]", f"%d = f32[64] add(%p, %p), {cycles(10)}")
    + text("%as_it_is", "p: f32[64]", f"%c = f32[64] copy(%p), {cycles(5)}")
    + main(
        "x: f32[64]; which: pred[]",
        "%started = ((f32[64]{0}), f32[64]{0}, u32[]) async-start(%x), calls=%exchange",
        f"%called = f32[64]{{0}} call(%x), to_apply=%doubled, {cycles(10)}",
        "%exchanged = f32[64]{0} async-done(%started), calls=%exchange",
        "%either = f32[64]{0} conditional(%which, %exchanged, %called), "
        "branch_computations={%doubled, %as_it_is}",
    )
)
# A turn of a loop: it reads one of eight slices, and writes over it.
STACK = "stack: f32[8,64]{1,0}; i: s32[]; scale: f32[64]{0}"
BOTH = "(f32[8,64]{1,0}, f32[1,64]{1,0})"
IN_PLACE = text(
    "%turn", STACK,
    "%row = f32[1,64]{1,0} dynamic-slice(%stack, %i), dynamic_slice_sizes={1,64}",
    "%wide = f32[1,64]{1,0} bitcast(%scale)",
    "%scaled = f32[1,64]{1,0} multiply(%row, %wide)",
    "%new = f32[8,64]{1,0} dynamic-update-slice(%stack, %scaled, %i)",
    f"%both = {BOTH} tuple(%new, %scaled)",
)  # fmt: skip
STARTED = f"((f32[8,64], s32[], f32[64]), {BOTH}, u32[])"
ASYNCHRONOUS = IN_PLACE + main(
    STACK,
    f"%f = {STARTED} fusion-start(%stack, %i, %scale), kind=kLoop, calls=%turn",
    f"%g = {BOTH} fusion-done(%f)",
)
IN_PLACE += main(
    STACK, f"%f = {BOTH} fusion(%stack, %i, %scale), kind=kLoop, calls=%turn"
)


@pytest.mark.parametrize("noted, times", [("", 5), (NOTED, 7)])
def test_a_body_counts_as_often_as_it_runs(noted, times):
    cost = hlo_cost.of(loop(noted=noted))
    assert cost.cycles == times * 10
    assert cost.kernels == 1 + times * 3
    assert collectives(cost.collectives) == [("all-reduce", 2 * 8 * 128, times, True)]
    assert cost.looped_bytes == cost.collective_bytes == times * 2048


def test_a_computation_goes_on_after_attributes_in_several_lines():
    """As those of kernels by Pallas are printed."""
    program = main(
        "x: f32[64]{0}",
        "%k = f32[64]{0} custom-call(%x), frontend_attributes={kernel_metadata={\n"
        '"a":"b"\n}}, metadata={op_name="jit(step)/gradient/pallas_call"}',
        f"%y = f32[64]{{0}} add(%k, %k), {cycles(2**63 - 1)}, {traced('optimizer/add')}",
    )
    costs = hlo_cost.by_scope(program, ("gradient", "optimizer"))
    assert [(x.kernels, x.cycles) for x in costs.values()] == [(1, 0), (1, 0), (0, 0)]


def test_a_fusion_is_one_kernel_with_the_products_inside():
    cost = hlo_cost.of(FUSION)
    assert (cost.cycles, cost.kernels, cost.flops) == (100, 1, 2 * 4 * 16 * 32)


@pytest.mark.parametrize(
    ("program", "read", "written"),
    [
        (FUSION, 2 * (4 * 32 + 16 * 32), 4 * 4 * 16),
        (IN_PLACE, 4 * (64 + 64) + 4, 4 * (64 + 64)),
        (ASYNCHRONOUS, 4 * (64 + 64) + 4, 4 * (64 + 64)),
        # An exchange, a doubling and the two branches, which do the doubling again.
        (CALLS, 4 * 64 * (1 + 2 + 2 + 1), 4 * 64 * 4),
        (loop(noted=NOTED), 4 + 7 * 6152, 4 + 7 * 6148),
    ],
)
def test_traffic_of_kernels(program, read, written):
    assert hlo_cost.of(program).traffic == (read, written)


def test_what_is_called_counts_once_and_both_branches_do():
    cost = hlo_cost.of(CALLS)
    assert (cost.cycles, cost.kernels) == (10 + 10 + 5, 1 + 1 + 2)
    assert collectives(cost.collectives) == [("all-to-all", 4 * 64, 1, False)]
    assert cost.looped_bytes == 0


def test_parts_by_what_they_were_traced_in():
    """A loop or a call decides for all that it runs, a use for what has no name."""
    pair = "(s32[], f32[8])"
    program = (
        text(
            "%body", f"p: {pair}",
            "%i = s32[] get-tuple-element(%p), index=0",
            "%x = f32[8] get-tuple-element(%p), index=1",
            # What the compiler makes itself says nothing of where it comes from.
            f"%zero = f32[8] broadcast(%i), {cycles(2)}",
            f"%y = f32[8] add(%x, %zero), {traced('optimizer/add')}, {cycles(3)}",
            f"%out = {pair} tuple(%i, %y)",
        )
        + text(
            "%shared", "p: f32[64]",
            f"%d = f32[64] add(%p, %p), {traced('gradient/while/add')}, {cycles(20)}",
        )
        + main(
            "x: f32[8]",
            "%start = s32[] constant(0)",
            f"%init = {pair} tuple(%start, %x)",
            f"%while = {pair} while(%init), condition=%c, body=%body, "
            f"{traced('gradient/while')}, {trips(10)}",
            "%z = f32[8] get-tuple-element(%while), index=1",
            f"%outside = f32[8] copy(%z), {traced('optimizers/add')}, {cycles(7)}",
            "%gathered = f32[64] all-gather(%outside), dimensions={0}",
            f"%again = f32[64] copy(%gathered), {cycles(5)}",
            "%called = f32[64] call(%again), to_apply=%shared, "
            f"{traced('optimizer/add')}",
            f"%result = f32[64] copy(%called), {cycles(1)}",
            "%out = (f32[8], f32[64]) tuple(%outside, %result)",
        )
    )  # fmt: skip
    parts = hlo_cost.by_scope(program, ("optimizer", "gradient"))
    assert {scope: cost.cycles for scope, cost in parts.items()} == {
        "gradient": 10 * (2 + 3),
        "optimizer": 20 + 5 + 1,
        "": 7,
    }
    assert parts["optimizer"].collective_bytes == 4 * 64
    assert hlo_cost.of(program).cycles == 50 + 26 + 7


def test_a_grouped_product_multiplies_every_row_once():
    """Rows with the matrix of their group, and the gradient of four matrices."""
    masked = text(
        "%masked", "a: bf16[4,64,16]; b: bf16[4,64,32]; mask: pred[4,64]",
        "%c = bf16[4,16,32] convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, "
        "dim_labels=0fb_0io->0bf",
    )  # fmt: skip
    program = masked + main(
        "x: bf16[64,32]; w: bf16[4,32,16]; n: s32[1]",
        "%y = bf16[64,16] custom-call(%n, %n, /*index=2*/%x, %w), custom_call_target="
        '"tpu_custom_call", frontend_attributes={ragged_dot_tiling="128,32,16"}',
        "%dw = bf16[4,16,32] fusion(%y, %x, %n), kind=kOutput, calls=%masked, "
        'backend_config={"estimated_cycles":"400","mask_aggregator_config":'
        '{"mask_dim_to_iteration_index":["1","4"]}}',
        "%out = (bf16[64,16], bf16[4,16,32]) tuple(%y, %dw)",
    )
    cost = hlo_cost.of(program)
    assert cost.flops == 2 * (2 * 64 * 32 * 16)
    assert cost.cycles == 400 // 4


def test_products_between_the_start_and_the_end_of_a_collective():
    """Each kind of collective that is exposed, or is not, stands once."""
    a = "f32[8,8]{1,0}"
    product = "dot({0}, {0}), lhs_contracting_dims={{1}}".format
    pairs = "source_target_pairs={{0,1},{1,0}}"
    program = (
        text(
            "%permuted", f"p: {a}", f"%own = {a} {product('%p')}",
            f"%r = {a} collective-permute(%p), {pairs}",
        )
        + text(
            "%copied", f"q: {a}", f"%all = {a} all-reduce(%q), to_apply=%sum",
            f"%c = {a} copy(%all)",
        )
        + text("%moved", f"e: {a}", f"%m = {a} all-to-all(%e), dimensions={{0}}")
        + main(
            f"x: {a}",
            f"%first = (({a}), {a}) all-to-all-start(%x), dimensions={{0}}",
            f"%second = (({a}), f32[16,8]) all-gather-start(%x), dimensions={{0}}",
            f"%product = {a} {product('%x')}",
            f"%one = {a} all-to-all-done(%first)",
            "%two = f32[16,8] all-gather-done(%second)",
            f"%third = {a} all-reduce-start(%product), to_apply=%sum",
            f"%other = {a} add(%one, %one)",
            f"%three = {a} all-reduce-done(%third)",
            f"%four = {a} all-to-all(%three), dimensions={{0}}",
            f"%again = {a} {product('%four')}",
            f"%five = {a} fusion(%again), kind=kCustom, calls=%permuted",
            f"%six = {a} fusion(%five), kind=kLoop, calls=%copied",
            f"%sent = (({a}), {a}) async-start(%six), calls=%moved",
            f"%offloaded = (({a}), {a}) call-start(%six), to_apply=%moved",
            f"%seven = {a} async-done(%sent), calls=%moved",
            f"%beside = {a} {product('%six')}",
            f"%eight = {a} call-done(%offloaded)",
        )
    )  # fmt: skip
    nbytes, flops = 4 * 64, 2 * 8**3
    cost = hlo_cost.of(program)
    assert [(c.kind, c.total, c.flops) for c in cost.collectives] == [
        ("all-to-all", nbytes, flops),
        ("all-gather", 2 * nbytes, flops),
        ("all-reduce", nbytes, 0),
        ("all-to-all", nbytes, 0),
        ("collective-permute", nbytes, flops),
        ("all-reduce", nbytes, 0),
        ("all-to-all", nbytes, 0),
        ("all-to-all", nbytes, flops),
    ]
    assert cost.exposed_bytes == 4 * nbytes
    # Two all-reduces and two exchanges, between two nodes of one device or within one.
    links = H100._replace(flops_per_second=1.0, fast=Link(16.0, 0.0), slow=Link(4.0, 0.0))
    for nodes, rate in (({0: 0, 1: 0}, 16), ({0: 0, 1: 1}, 4)):
        waited = hlo_cost.exposed_seconds(cost, nodes, links)
        assert waited == (2 * 2 + 2) * nbytes / 2 / rate
    # With products of 4 s, two exchanges of 8, and a gather and a permutation of 16, too.
    links = links._replace(flops_per_second=flops / 4)
    waited = hlo_cost.exposed_seconds(cost, {0: 0, 1: 0}, links)
    assert waited == (2 * 2 + 2) * 8 + 2 * (8 - 4) + 2 * (16 - 4)


@pytest.mark.parametrize("times", [1, 5])
def test_a_loop_exposes_what_it_runs_as_often_as_it_runs(times):
    a = "f32[8,8]{1,0}"
    program = text("%body", f"p: {a}", f"%r = {a} all-to-all(%p), dimensions={{0}}")
    program += main(
        f"x: {a}", f"%w = {a} while(%x), condition=%c, body=%body, {trips(times)}"
    )
    assert hlo_cost.of(program).exposed_bytes == times * 4 * 64


# What crosses between regions of devices.
HALVES = {device: device // 4 for device in range(8)}
# As two slices of four number their devices.
SLICES = {100_000 * (n + 1) + device: n for n in range(2) for device in range(4)}
X16, LISTED = "f32[16]{0}", "replica_groups={{0,1,2,3,4,5,6,7}}"
PAIRED = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
GIVEN = f"x: {X16}; y: f32[64]{{0}}"


def figures(program, regions=HALVES):
    """Bytes and messages of each device, if all have the same; buffers; collectives."""
    found = hlo_cost.crossings(program, regions)
    assert found.received.keys() == found.messages.keys() == regions.keys()
    [received] = set(found.received.values())
    [messages] = set(found.messages.values())
    return received, messages, found.buffers, found.collectives


@pytest.mark.parametrize(
    "line, expected",
    [
        # Four of eight parts of 64 bytes / 8.
        (f"{X16} all-to-all(%x), {LISTED}", (32, 4, 64, 1)),
        (f"{X16} all-to-all(%x), {PAIRED}", (32, 1, 64, 1)),
        # What four devices hold, shared by four.
        (f"f32[128]{{0}} all-gather(%x), {LISTED}", (64, 1, 512, 1)),
        (f"f32[32]{{0}} all-gather(%x), {PAIRED}", (64, 1, 128, 1)),
        (f"f32[2]{{0}} reduce-scatter(%x), {LISTED}, to_apply=%sum", (8, 1, 8, 1)),
        (f"{X16} all-reduce(%x), {LISTED}, to_apply=%sum", (16, 2, 64, 1)),
        (f"{X16} all-reduce(%x), replica_groups={{}}, to_apply=%sum", (16, 2, 64, 1)),
        (
            f"{X16} collective-permute(%x), source_target_pairs="
            "{{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}",
            (64, 1, 64, 1),
        ),
        (
            f"{X16} collective-permute(%x), source_target_pairs={{{{0,1}},{{1,0}}}}",
            (0,) * 4,
        ),
        (f"{X16} all-to-all(%x), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}", (0,) * 4),
        (f"{X16} multiply(%x, %x)", (0,) * 4),
    ],
)
def test_what_each_device_receives(line, expected):
    assert figures(main(GIVEN, f"%a = {line}")) == expected


@pytest.mark.parametrize(
    "groups, crosses",
    [
        ("[2,4]<=[8]", False),
        ("[1,8]<=[8]", True),
        ("[4,2]<=[2,4]T(1,0)", True),
        ("[4,2]<=[4,2]", False),
        ("mesh['dcn'=2,'fsdp'=4] {'dcn'}", True),
        ("mesh['dcn'=2,'fsdp'=4] {'fsdp'}", False),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", False),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", True),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", False),
        ("mesh['a'=4,'b'=2] {'a':(1)2,'b'}", True),
    ],
)
def test_forms_of_groups(groups, crosses):
    program = main(GIVEN, f"%a = {X16} all-to-all(%x), replica_groups={groups}")
    assert figures(program)[0] == (32 if crosses else 0)


def test_a_form_that_is_unknown_is_refused():
    line = f"%a = {X16} all-to-all(%x), replica_groups=mesh['a'=8] {{'a'/2}}"
    with pytest.raises(ValueError, match="which devices"):
        hlo_cost.crossings(main(GIVEN, line), HALVES)


def test_what_crosses_beside_a_chain_of_kernels_is_one():
    rest = f'{X16} all-to-all(%x), {LISTED}, frontend_attributes={{chain_id="0"}}'
    assert figures(main(GIVEN, f"%a = {rest}", f"%b = {rest}")) == (32, 4, 64, 1)


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
    sent = (
        "send(%y, %t), is_host_transfer=true, frontend_attributes="
        f'{{_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    program = main(
        GIVEN,
        "%t = token[] after-all()",
        f"%s = (f32[64]{{0}}, u32[], token[]) {sent}",
        f"%r = (f32[64]{{0}}, u32[], token[]) {sent.replace('send', 'recv')}",
        "%done = token[] send-done(%s), is_host_transfer=true",
        # Of one slice.
        f"%a = {X16} all-to-all(%x), replica_groups={{{{0,1,2,3}}}}",
    )
    assert figures(program, SLICES) == expected
