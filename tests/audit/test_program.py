"""What the certificate reads off a compiled program, counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from orscale_jax.audit.program import flops_of, parse, runs, sent_by
from tests.runs import mesh_of


def sent(text, devices=8):
    """Kind, bytes that each device sends, times, and whether it is in a loop."""
    issued = [*runs(*parse(text))]
    found = [(*sent_by(run, devices), run.times, run.looped) for run in issued]
    return [each for each in found if each[0]]


def flops(text):
    return sum(map(flops_of, runs(*parse(text))))


def main(*lines):
    return "\n".join(["ENTRY %main (x: f32[16]) -> f32[16] {", *lines, "}\n"])


X = "  %x = f32[16]{0} parameter(0)"  # 64 bytes.


@pytest.mark.parametrize(
    "line, nbytes",
    [
        ("f32[128]{0} all-gather(%x), replica_groups={}", 7 * 64),
        ("bf16[128]{0} all-gather(%x), replica_groups={}", 7 * 32),
        ("f8e4m3fn[128]{0} all-gather(%x), replica_groups={}", 7 * 16),
        ("f32[16]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%s", 2 * 32),
        ("f32[2]{0} reduce-scatter(%x), replica_groups=[1,8]<=[8]", 7 * 8),
        ("f32[16]{0} collective-permute(%x), source_target_pairs={{0,1}}", 64),
        ("f32[16]{0} all-to-all(%x), replica_groups=[4,2]<=[2,2,2]T(1,2,0)", 32),
        (
            "f32[16]{0} all-to-all(%x), "
            "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}", 48,
        ),
    ],
)  # fmt: skip
def test_what_each_device_sends(line, nbytes):
    """Nothing to itself; an all-reduce goes both ways."""
    [found] = sent(main(X, f"  ROOT %a = {line}"))
    assert found == (line.split("(")[0].split()[-1], nbytes, 1, False)


def test_an_asynchronous_pair_counts_once():
    text = main(
        X,
        "  %g = (f32[16]{0}, f32[32]{0}) all-gather-start(%x), replica_groups={{0,1}}",
        "  ROOT %h = f32[32]{0} all-gather-done(%g)",
    )
    assert sent(text) == [("all-gather", 64, 1, False)]


@pytest.mark.parametrize(
    "product",
    [
        "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={2}",
        # As a TPU has four products: over a dilated axis.
        "convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, "
        "dim_labels=0bf_0oi->0bf",
    ],
)
def test_flops_of_products(product):
    a, b = (f"  %{x} = f32[4,{n},32] parameter(0)" for x, n in (("a", 8), ("b", 16)))
    assert flops(main(a, b, f"  ROOT %c = f32[4,8,16] {product}")) == 2 * 4 * 8 * 32 * 16


@pytest.mark.compiled
def test_a_compiled_loop():
    mesh, spec = mesh_of({"data": 8}), P(None, "data", None)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def program(x):
        def one(x):
            whole = jax.lax.all_gather(x, "data", axis=0, tiled=True)
            product = whole @ whole.T @ whole
            return jax.lax.psum_scatter(product, "data", scatter_dimension=0, tiled=True)

        x = jax.lax.map(one, x)
        return jax.lax.all_to_all(x, "data", 0, 1, tiled=True).reshape(x.shape)

    text = program.lower(jnp.ones((16, 64, 32))).compile().as_text()
    whole = 4 * 64 * 32
    assert flops(text) == 16 * 2 * (2 * 64 * 64 * 32)
    assert sorted(sent(text)) == [
        ("all-gather", 16 * whole * 7 // 8, 16, True),
        ("all-to-all", 2 * whole * 7 // 8, 1, False),
        ("reduce-scatter", 16 * whole * 7 // 8, 16, True),
    ]


def test_flops_without_loops_are_xlas_own():
    def program(x):
        y = jnp.einsum("bij,bkj->bik", x, x)
        return jnp.einsum("bij,bjk->ik", y, x)

    compiled = jax.jit(program).lower(jnp.ones((3, 16, 32))).compile()
    found = flops(compiled.as_text())
    assert found == pytest.approx(compiled.cost_analysis()["flops"], rel=0.01)
