"""What compiled programs send and multiply, counted by hand."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from examples.benchmarks import hlo, program as programs


def text(name, parameters, *lines):
    """A computation whose last line is the root, as XLA prints it."""
    named = [part.split(": ") for part in parameters.split("; ")]
    result = re.match(r"%[\w.-]+ = (.*?) [a-z][a-z-]*\(", lines[-1])[1]
    typed = ", ".join(f"{x}: {kind}" for x, kind in named)
    arguments = [f"%{x} = {kind} parameter({i})" for i, (x, kind) in enumerate(named)]
    body = [*arguments, *lines[:-1], f"ROOT {lines[-1]}"]
    return "\n".join(
        [f"{name} ({typed}) -> {result} {{", *(f"  {x}" for x in body), "}\n"]
    )


main = functools.partial(text, "ENTRY %main")


def cycles(count):
    return f'backend_config={{"estimated_cycles":"{count}"}}'


def trips(count):
    return f'backend_config={{"known_trip_count":{{"n":"{count}"}}}}'


def traced(scope):
    return f'metadata={{op_name="jit(step)/{scope}"}}'


# As XLA prints for a TPU: layouts with tiles, no noted trip count, a counter's start that
# is copied.
S, X = "s32[]{:T(128)}", "f32[8,128]{1,0:T(8,128)}"


def loop(direction="LT", noted=""):
    return (
        text(
            "%condition", f"p: ({S}, {X})",
            f"%limit = {S} constant(11)",
            f"%i = {S} get-tuple-element(%p), index=0",
            f"%lt = pred[]{{:T(512)}} compare(%i, %limit), direction={direction}",
        )
        + text(
            "%body", f"p: ({S}, {X})",
            f"%two = {S} constant(2)",
            f"%i = {S} get-tuple-element(%p), index=0",
            f"%x = {X} get-tuple-element(%p), index=1",
            f"%next = {S} add(%i, %two), {cycles(1)}",
            "%sum = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), to_apply=%add",
            f"%y = {X} convert(%sum), {cycles(9)}",
            f"%out = ({S}, {X}) tuple(%next, %y)",
        )
        + main(
            f"x: {X}",
            f"%one = {S} constant(1)",
            f"%start = {S} copy(%one)",
            f"%init = ({S}, {X}) tuple(%start, %x)",
            f"%while = ({S}, {X}) while(%init), condition=%condition, body=%body{noted}",
        )
    )  # fmt: skip


NOTED = f", {trips(7)}"


def sent_in(text):
    return [*programs.collectives([*hlo.runs(*hlo.parse(text))])]


def flops_in(text):
    return sum(map(programs.flops_of, hlo.runs(*hlo.parse(text))))


def collectives(found):
    """Of the text of a program, or of collectives in it."""
    found = sent_in(found) if isinstance(found, str) else found
    return [(c.kind, c.nbytes, c.times, c.looped) for c in found]


def test_a_loop_that_is_not_understood_is_refused():
    with pytest.raises(ValueError, match="how often does while run"):
        flops_in(loop("NE"))


def test_an_asynchronous_pair_counts_once_and_as_what_is_whole():
    program = main(
        "x: f32[16]{0}",
        "%g0 = (f32[16]{0}, f32[128]{0}) all-gather-start(%x), dimensions={0}",
        "%g1 = f32[128]{0} all-gather-done(%g0)",
        "%r0 = ((f32[128]{0}), f32[16]{0}) reduce-scatter-start(%g1), to_apply=%add",
        "%r1 = f32[16]{0} reduce-scatter-done(%r0)",
        "%p0 = (f32[16]{0}, f32[16]{0}, u32[]{:S(2)}) collective-permute-start(%r1)",
        "%p1 = f32[16]{0} collective-permute-done(%p0)",
    )
    assert collectives(program) == [
        ("all-gather", 512, 1, False),
        ("reduce-scatter", 512, 1, False),
        ("collective-permute", 64, 1, False),
    ]


@pytest.mark.parametrize(
    "line, sent",
    [
        ("f32[128]{0} all-gather(%x), replica_groups={}", 7 * 64),
        ("f32[16]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%sum", 64),
        ("f32[16]{0} collective-permute(%x), source_target_pairs={{0,1}}", 64),
    ],
)
def test_what_each_device_sends(line, sent):
    """Nothing to itself; an all-reduce goes both ways."""
    [found] = sent_in(main("x: f32[16]{0}", f"%a = {line}"))
    assert found.sent(8) == sent


@pytest.mark.parametrize(
    "product, flops",
    [
        # Four products of 8×32 by 32×16 as a TPU has them, over a dilated axis.
        (
            "convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, "
            "dim_labels=0bf_0oi->0bf",
            2 * 4 * 8 * 32 * 16,
        ),
        # And as a CPU has them.
        (
            "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={2}",
            2 * 4 * 8 * 32 * 16,
        ),
        # Places of the window before the first input are padding.
        (
            "convolution(%a, %b), window={size=4 pad=3_0}, dim_labels=0bf_0oi->0bf",
            2 * (1 + 2 + 3 + 4) * 8 * 32 * 16,
        ),
    ],
)
def test_flops_of_products(product, flops):
    operands = "a: f32[4,8,32]{2,1,0}; b: f32[4,16,32]{2,1,0}"
    assert flops_in(main(operands, f"%c = f32[4,8,16] {product}")) == flops


def test_a_compiled_program():
    mesh = jax.make_mesh((8,), ("data",))
    spec = P(None, "data", None)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def program(x):
        def one(x):
            whole = jax.lax.all_gather(x, "data", axis=0, tiled=True)
            product = whole @ whole.T @ whole
            return jax.lax.psum_scatter(product, "data", scatter_dimension=0, tiled=True)

        x = jax.lax.map(one, x)
        return jax.lax.all_to_all(x, "data", 0, 1, tiled=True).reshape(x.shape)

    x = jax.ShapeDtypeStruct((16, 64, 32), "float32", sharding=NamedSharding(mesh, spec))
    compiled = program.lower(x).compile().as_text()
    whole = 4 * 64 * 32
    assert flops_in(compiled) == 16 * 2 * (2 * 64 * 64 * 32)
    assert sorted(collectives(compiled)) == [
        ("all-gather", whole, 16, True),
        ("all-to-all", 2 * whole, 1, False),
        ("reduce-scatter", whole, 16, True),
    ]


def test_flops_without_loops_are_xlas_own():
    def program(x):
        y = jnp.einsum("bij,bkj->bik", x, x)
        return jnp.einsum("bij,bjk->ik", y, x)

    compiled = jax.jit(program).lower(jnp.ones((3, 16, 32))).compile()
    found = flops_in(compiled.as_text())
    assert found == pytest.approx(compiled.cost_analysis()["flops"], rel=0.01)


@pytest.mark.parametrize(
    "groups, wanted",
    [
        ("[4,2]<=[2,2,2]T(1,2,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
    ],
)
def test_numbers_in_a_shape_are_transposed(groups, wanted):
    program = main(
        "x: f32[16]{0}", f"%a = f32[16]{{0}} all-to-all(%x), replica_groups={groups}"
    )
    [found] = sent_in(program)
    assert found.groups == wanted
    # By each of the devices, to the others of its group.
    assert found.sent(8) == 64 * (len(wanted[0]) - 1) // len(wanted[0])
