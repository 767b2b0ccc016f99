"""The reader of compiled programs, on programs whose cost is counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from examples.benchmarks import hlo_cost

# As XLA prints for a TPU: layouts with tiles, no noted trip count, a counter's start that
# is copied.
LOOP = """
%%condition (p: (s32[], f32[8,128])) -> pred[] {
  %%limit = s32[]{:T(128)} constant(11)
  %%p = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %%i = s32[]{:T(128)} get-tuple-element(%%p), index=0
  ROOT %%lt = pred[]{:T(512)} compare(%%i, %%limit), direction=%(direction)s
}

%%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %%two = s32[]{:T(128)} constant(2)
  %%p = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %%i = s32[]{:T(128)} get-tuple-element(%%p), index=0
  %%x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%%p), index=1
  %%next = s32[]{:T(128)} add(%%i, %%two), backend_config={"estimated_cycles":"1"}
  %%sum = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} all-reduce(%%x), to_apply=%%add
  %%y = f32[8,128]{1,0:T(8,128)} convert(%%sum), backend_config={"estimated_cycles":"9"}
  ROOT %%out = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%%next, %%y)
}

ENTRY %%main (x: f32[8,128]) -> (s32[], f32[8,128]) {
  %%one = s32[]{:T(128)} constant(1)
  %%start = s32[]{:T(128)} copy(%%one)
  %%x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %%init = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%%start, %%x)
  ROOT %%while = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%%init), condition=%%condition, body=%%body%(noted)s
}
"""  # noqa: E501
NOTED = ', backend_config={"known_trip_count":{"n":"7"}}'
FUSION = """
%inner (a: bf16[4,32], b: bf16[16,32]) -> f32[4,16] {
  %a = bf16[4,32]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  ROOT %c = f32[4,16]{1,0} convolution(%a, %b), dim_labels=bf_oi->bf, backend_config={"estimated_cycles":"70"}
}

%outer (a: bf16[4,32], b: bf16[16,32]) -> f32[4,16] {
  %a = bf16[4,32]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  ROOT %f = f32[4,16]{1,0} fusion(%a, %b), kind=kOutput, calls=%inner, backend_config={"estimated_cycles":"80"}
}

ENTRY %main (a: bf16[4,32], b: bf16[16,32]) -> f32[4,16] {
  %a = bf16[4,32]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  ROOT %f = f32[4,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%outer, backend_config={"estimated_cycles":"100"}
}
"""  # noqa: E501
CALLS = """
%exchange (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %all = f32[64]{0} all-to-all(%p), dimensions={0}
}

%doubled (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %d = f32[64]{0} add(%p, %p), backend_config={"estimated_cycles":"10"}
}

%as_it_is (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %c = f32[64]{0} copy(%p), backend_config={"estimated_cycles":"5"}
}

ENTRY %main (x: f32[64], which: pred[]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %which = pred[] parameter(1)
  %started = ((f32[64]{0}), f32[64]{0}, u32[]) async-start(%x), calls=%exchange
  %called = f32[64]{0} call(%x), to_apply=%doubled, backend_config={"estimated_cycles":"10"}
  %exchanged = f32[64]{0} async-done(%started), calls=%exchange
  ROOT %either = f32[64]{0} conditional(%which, %exchanged, %called), branch_computations={%doubled, %as_it_is}
}
"""  # noqa: E501
# A turn of a loop: it reads one of eight slices, and writes over it.
IN_PLACE = """
%turn (stack: f32[8,64], i: s32[], scale: f32[64]) -> (f32[8,64], f32[1,64]) {
  %stack = f32[8,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %scale = f32[64]{0} parameter(2)
  %row = f32[1,64]{1,0} dynamic-slice(%stack, %i), dynamic_slice_sizes={1,64}
  %wide = f32[1,64]{1,0} bitcast(%scale)
  %scaled = f32[1,64]{1,0} multiply(%row, %wide)
  %new = f32[8,64]{1,0} dynamic-update-slice(%stack, %scaled, %i)
  ROOT %both = (f32[8,64]{1,0}, f32[1,64]{1,0}) tuple(%new, %scaled)
}

ENTRY %main (stack: f32[8,64], i: s32[], scale: f32[64]) -> (f32[8,64], f32[1,64]) {
  %stack = f32[8,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %scale = f32[64]{0} parameter(2)
  ROOT %f = (f32[8,64]{1,0}, f32[1,64]{1,0}) fusion(%stack, %i, %scale), kind=kLoop, calls=%turn
}
"""  # noqa: E501
ASYNCHRONOUS = """
ENTRY %main (x: f32[16]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %g0 = (f32[16]{0}, f32[128]{0}) all-gather-start(%x), dimensions={0}
  %g1 = f32[128]{0} all-gather-done(%g0)
  %r0 = ((f32[128]{0}), f32[16]{0}) reduce-scatter-start(%g1), to_apply=%add
  %r1 = f32[16]{0} reduce-scatter-done(%r0)
  %p0 = (f32[16]{0}, f32[16]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%r1)
  ROOT %p1 = f32[16]{0} collective-permute-done(%p0)
}
"""


def collectives(cost):
    return [(c.kind, c.nbytes, c.times, c.looped) for c in cost.collectives]


@pytest.mark.parametrize("noted, trips", [("", 5), (NOTED, 7)])
def test_a_body_counts_as_often_as_it_runs(noted, trips):
    cost = hlo_cost.of(LOOP % {"direction": "LT", "noted": noted})
    assert cost.cycles == trips * 10
    assert cost.kernels == 1 + trips * 3
    assert collectives(cost) == [("all-reduce", 2 * 8 * 128, trips, True)]
    assert cost.looped_bytes == cost.collective_bytes == trips * 2048


def test_a_loop_that_is_not_understood_is_refused():
    with pytest.raises(ValueError, match="how often does while run"):
        hlo_cost.of(LOOP % {"direction": "NE", "noted": ""})


def test_a_fusion_is_one_kernel_with_the_products_inside():
    cost = hlo_cost.of(FUSION)
    assert cost.cycles == 100
    assert cost.kernels == 1
    assert cost.flops == 2 * 4 * 16 * 32


@pytest.mark.parametrize(
    ("text", "read", "written"),
    [
        (FUSION, 2 * (4 * 32 + 16 * 32), 4 * 4 * 16),
        (IN_PLACE, 4 * (64 + 64) + 4, 4 * (64 + 64)),
        # An exchange, a doubling and the two branches, which do the doubling again.
        (CALLS, 4 * 64 * (1 + 2 + 2 + 1), 4 * 64 * 4),
        (LOOP % {"direction": "LT", "noted": NOTED}, 4 + 7 * 6152, 4 + 7 * 6148),
    ],
)
def test_traffic_of_kernels(text, read, written):
    assert hlo_cost.of(text).traffic == (read, written)


def test_traffic_of_a_step_in_place():
    """A step x += y reads both arrays, and writes one."""
    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    step = jax.jit(lambda x, y: x + y, donate_argnums=0).lower(x, x).compile()
    nbytes = 4 * 256 * 1024
    assert hlo_cost.of(step.as_text()).traffic == (2 * nbytes, nbytes)


def test_what_is_called_counts_once_and_both_branches_do():
    cost = hlo_cost.of(CALLS)
    assert cost.cycles == 10 + 10 + 5
    assert cost.kernels == 1 + 1 + 2
    assert collectives(cost) == [("all-to-all", 4 * 64, 1, False)]
    assert cost.looped_bytes == 0


def test_an_asynchronous_pair_counts_once_and_as_what_is_whole():
    assert collectives(hlo_cost.of(ASYNCHRONOUS)) == [
        ("all-gather", 512, 1, False),
        ("reduce-scatter", 512, 1, False),
        ("collective-permute", 64, 1, False),
    ]


@pytest.mark.parametrize(
    "product, flops",
    [
        # Four products of 8×32 by 32×16 as a TPU has them, over a dilated axis.
        (
            "f32[4,8,16] convolution(%a, %b), "
            "window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0oi->0bf",
            2 * 4 * 8 * 32 * 16,
        ),
        # And as a CPU has them.
        (
            "f32[4,8,16] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={2}",
            2 * 4 * 8 * 32 * 16,
        ),
        # Places of the window before the first input are padding.
        (
            "f32[4,8,16] convolution(%a, %b), "
            "window={size=4 pad=3_0}, dim_labels=0bf_0oi->0bf",
            2 * (1 + 2 + 3 + 4) * 8 * 32 * 16,
        ),
    ],
)
def test_flops_of_products(product, flops):
    text = f"""
ENTRY %main (a: f32[4,8,32], b: f32[4,16,32]) -> f32[4,8,16] {{
  %a = f32[4,8,32]{{2,1,0}} parameter(0)
  %b = f32[4,16,32]{{2,1,0}} parameter(1)
  ROOT %c = {product}
}}
"""
    assert hlo_cost.of(text).flops == flops


def test_a_compiled_program():
    mesh = jax.make_mesh((8,), ("data",))
    spec = P(None, "data", None)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def program(x):
        def one(x):
            whole = jax.lax.all_gather(x, "data", axis=0, tiled=True)
            gram = whole @ whole.T
            return jax.lax.psum_scatter(
                gram @ whole, "data", scatter_dimension=0, tiled=True
            )

        x = jax.lax.map(one, x)
        return jax.lax.all_to_all(x, "data", 0, 1, tiled=True).reshape(x.shape)

    x = jax.ShapeDtypeStruct((16, 64, 32), "float32", sharding=NamedSharding(mesh, spec))
    compiled = program.lower(x).compile()
    cost = hlo_cost.of(compiled.as_text())
    whole = 4 * 64 * 32
    assert cost.flops == 16 * 2 * (2 * 64 * 64 * 32)
    assert sorted(collectives(cost)) == [
        ("all-gather", whole, 16, True),
        ("all-to-all", 2 * whole, 1, False),
        ("reduce-scatter", whole, 16, True),
    ]
    assert cost.looped_bytes == 2 * 16 * whole


def test_flops_without_loops_are_xlas_own():
    def program(x):
        y = jnp.einsum("bij,bkj->bik", x, x)
        return jnp.einsum("bij,bjk->ik", y, x)

    compiled = jax.jit(program).lower(jnp.ones((3, 16, 32))).compile()
    found = hlo_cost.of(compiled.as_text()).flops
    assert found == pytest.approx(compiled.cost_analysis()["flops"], rel=0.01)


CHAIN = """
%first (p: bf16[2,8]) -> bf16[16,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  ROOT %g = bf16[16,8]{1,0} all-gather(%p), frontend_attributes={chain_id="0"}
}

%second (p: bf16[2,8]) -> bf16[16,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  ROOT %g = bf16[16,8]{1,0} all-gather(%p), frontend_attributes={chain_id="0"}
}

ENTRY %main (x: bf16[2,8]) -> (bf16[16,8], bf16[16,8]) {
  %x = bf16[2,8]{1,0} parameter(0)
  %a = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%first
  %b = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%second
  ROOT %out = (bf16[16,8]{1,0}, bf16[16,8]{1,0}) tuple(%a, %b)
}
"""


def test_a_collective_beside_a_chain_of_kernels_is_one():
    assert hlo_cost.of(CHAIN).collective_bytes == 16 * 8 * 2


# What the compiler makes itself, such as `%zero`, says nothing of where it comes from.
SCOPES = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %zero = f32[8] broadcast(%i), backend_config={"estimated_cycles":"2"}
  %y = f32[8] add(%x, %zero), metadata={op_name="jit(step)/optimizer/add"}, backend_config={"estimated_cycles":"3"}
  ROOT %out = (s32[], f32[8]) tuple(%i, %y)
}

%shared (p: f32[64]) -> f32[64] {
  %p = f32[64] parameter(0)
  ROOT %d = f32[64] add(%p, %p), metadata={op_name="jit(step)/gradient/while/add"}, backend_config={"estimated_cycles":"20"}
}

ENTRY %main (x: f32[8]) -> (f32[8], f32[64]) {
  %x = f32[8] parameter(0), metadata={op_name="x"}
  %start = s32[] constant(0)
  %init = (s32[], f32[8]) tuple(%start, %x)
  %while = (s32[], f32[8]) while(%init), condition=%c, body=%body, metadata={op_name="jit(step)/gradient/while"}, backend_config={"known_trip_count":{"n":"10"}}
  %z = f32[8] get-tuple-element(%while), index=1
  %outside = f32[8] copy(%z), metadata={op_name="jit(step)/optimizers/add"}, backend_config={"estimated_cycles":"7"}
  %gathered = f32[64] all-gather(%outside), dimensions={0}
  %again = f32[64] copy(%gathered), backend_config={"estimated_cycles":"5"}
  %called = f32[64] call(%again), to_apply=%shared, metadata={op_name="jit(step)/optimizer/add"}
  %result = f32[64] copy(%called), backend_config={"estimated_cycles":"1"}
  ROOT %out = (f32[8], f32[64]) tuple(%outside, %result)
}
"""  # noqa: E501


def test_parts_by_what_they_were_traced_in():
    """A loop or a call decides for all that it runs, a use for what has no name."""
    parts = hlo_cost.by_scope(SCOPES, ("optimizer", "gradient"))
    assert {scope: cost.cycles for scope, cost in parts.items()} == {
        "gradient": 10 * (2 + 3),
        "optimizer": 20 + 5 + 1,
        "": 7,
    }
    assert parts["optimizer"].collective_bytes == 4 * 64
    assert hlo_cost.of(SCOPES).cycles == 50 + 26 + 7


# As XLA has the product of rows with the matrix of their group on a TPU, and the gradient
# of the four matrices.
GROUPED = """
%masked (dy: bf16[64,16], x: bf16[64,32], mask: pred[4,64]) -> bf16[4,16,32] {
  %a = bf16[4,64,16]{2,1,0} parameter(0)
  %b = bf16[4,64,32]{2,1,0} parameter(1)
  ROOT %c = bf16[4,16,32]{2,1,0} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0fb_0io->0bf
}

ENTRY %main (x: bf16[64,32], w: bf16[4,32,16], n: s32[1]) -> (bf16[64,16], bf16[4,16,32]) {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[4,32,16]{2,1,0} parameter(1)
  %n = s32[1]{0} parameter(2)
  %y = bf16[64,16]{1,0} custom-call(%n, %n, /*index=2*/%x, %w), custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="128,32,16"}
  %dw = bf16[4,16,32]{2,1,0} fusion(%y, %x, %n), kind=kOutput, calls=%masked, backend_config={"estimated_cycles":"400","mask_aggregator_config":{"mask_dim_to_iteration_index":["1","4"]}}
  ROOT %out = (bf16[64,16], bf16[4,16,32]) tuple(%y, %dw)
}
"""  # noqa: E501


def test_a_grouped_product_multiplies_every_row_once():
    cost = hlo_cost.of(GROUPED)
    assert cost.flops == 2 * (2 * 64 * 32 * 16)
    assert cost.cycles == 400 // 4


# Each kind of exposed or hidden collective stands once.
SCHEDULED = """
ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %first = ((f32[8,8]{1,0}), f32[8,8]{1,0}) all-to-all-start(%x), dimensions={0}
  %second = ((f32[8,8]{1,0}), f32[16,8]{1,0}) all-gather-start(%x), dimensions={0}
  %product = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}
  %one = f32[8,8]{1,0} all-to-all-done(%first)
  %two = f32[16,8]{1,0} all-gather-done(%second)
  %third = f32[8,8]{1,0} all-reduce-start(%product), to_apply=%sum
  %other = f32[8,8]{1,0} add(%one, %one)
  %three = f32[8,8]{1,0} all-reduce-done(%third)
  %four = f32[8,8]{1,0} all-to-all(%three), dimensions={0}
  %again = f32[8,8]{1,0} dot(%four, %x), lhs_contracting_dims={1}
  %five = f32[8,8]{1,0} fusion(%again), kind=kCustom, calls=%permuted
  ROOT %six = f32[8,8]{1,0} fusion(%five), kind=kLoop, calls=%copied
}
"""
KERNELS = """
%permuted (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %own = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}
  ROOT %r = f32[8,8]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}

%copied (q: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  %all = f32[8,8]{1,0} all-reduce(%q), to_apply=%sum
  ROOT %c = f32[8,8]{1,0} copy(%all)
}
"""
BYTES, FLOPS = 4 * 64, 2 * 8**3


def test_products_between_start_and_done():
    cost = hlo_cost.of(KERNELS + SCHEDULED)
    assert [(c.kind, c.total, c.flops) for c in cost.collectives] == [
        ("all-to-all", BYTES, FLOPS),
        ("all-gather", 2 * BYTES, FLOPS),
        ("all-reduce", BYTES, 0),
        ("all-to-all", BYTES, 0),
        ("collective-permute", BYTES, FLOPS),
        ("all-reduce", BYTES, 0),
    ]
    assert cost.exposed_bytes == 3 * BYTES


@pytest.mark.parametrize("times", [1, 5])
def test_a_loop_exposes_what_it_runs_as_often_as_it_runs(times):
    text = f"""
%body (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  ROOT %r = f32[8,8]{{1,0}} all-to-all(%p), dimensions={{0}}
}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  ROOT %w = f32[8,8]{{1,0}} while(%x), condition=%c, body=%body, backend_config={{"known_trip_count":{{"n":"{times}"}}}}
}}
"""  # noqa: E501
    assert hlo_cost.of(text).exposed_bytes == times * BYTES
