"""Published silent faults of matrix optimizers on meshes, re-enacted: own code.

Each is a chain, the leaf that it breaks, and words of the cause that is to be named. The
threads are those of public repositories; a fault stands for its kind.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from orscale_jax import muon
from tests.runs import numbers_of

AXES = {"replica": 2, "data": 2, "tensor": 2}
SHAPES = {
    "up": (12, 16),
    "down": (16, 12),
    "square": (8, 8),
    "stack": (4, 8, 12),
    "b": (16,),
}
SPECS = {
    "up": P("data", "tensor"),
    "down": P(("tensor", "data")),
    "square": P("data", "tensor"),
    "stack": P("data", None, "tensor"),
    "b": P(),
}
NUMBERS = numbers_of(SHAPES)


def newton_schulz(x, norm=None):
    """Jordan's five steps, in the open."""
    x = x / (jnp.sqrt(jnp.sum(x * x, (-2, -1), keepdims=True)) if norm is None else norm)
    flat = x.shape[-2] <= x.shape[-1]
    x = x if flat else x.mT
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x if flat else x.mT


def names_of(entry):
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def gathered(x, spec, without=()):
    """The whole array, of the shards along the axes of a spec."""
    for axis, entry in enumerate(spec):
        for name in reversed([name for name in names_of(entry) if name not in without]):
            x = lax.all_gather(x, name, axis=axis, tiled=True)
    return x


def shard_of(x, spec, turned=0):
    """This device's shard, or that of another device."""
    for axis, entry in enumerate(spec):
        for name in names_of(entry):
            count = lax.axis_size(name)
            size = x.shape[axis] // count
            index = (lax.axis_index(name) + turned) % count
            x = lax.dynamic_slice_in_dim(x, index * size, size, axis)
    return x


def a_trainers(direction, scale=lambda m, n: 0.2 * math.sqrt(max(m, n))):
    """A Muon that sends by hand: a function of shards of the momentum and the weights."""

    def update(grads, state, params):
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)

        def one(name, m, w):
            spec = SPECS[name]
            if m.ndim < 2:
                return jnp.sign(m)
            local = functools.partial(direction, spec=spec)
            q = jax.shard_map(
                local, in_specs=(spec, spec), out_specs=spec, check_vma=False
            )(m, w)
            return scale(*m.shape[-2:]) * q

        return {k: one(k, momenta[k], params[k]) for k in momenta}, momenta

    return optax.GradientTransformation(optax.tree.zeros_like, update)


def right(m, w, spec):
    return shard_of(newton_schulz(gathered(m, spec)), spec)


def shards_alone(m, w, spec):
    return newton_schulz(m)


def tensor_shards_alone(m, w, spec):
    inner = P(*(tuple(x for x in names_of(e) if x != "tensor") for e in spec))
    return shard_of(newton_schulz(gathered(m, inner)), inner)


def replicas_counted(m, w, spec):
    """As a sum over all devices for the norm of what some of them hold twice."""
    squares = jnp.sum(m * m, (-2, -1), keepdims=True)
    if spec[0] == "data" and m.ndim == 3:  # Of experts, one norm each.
        squares = lax.psum(squares, ("replica", "tensor"))
    else:
        squares = lax.psum(squares, ("replica", "data", "tensor"))
    own = jnp.sqrt(squares)
    whole = gathered(m / own, spec)
    return shard_of(newton_schulz(whole, 1.0), spec)


def norms_of_shards(m, w, spec):
    own = jnp.sqrt(jnp.sum(m * m, (-2, -1), keepdims=True))
    return shard_of(newton_schulz(gathered(m / own, spec)), spec)


def another_shard(m, w, spec):
    return shard_of(newton_schulz(gathered(m, spec)), spec, turned=1)


def owners(m, w, spec):
    """Matrices by turns: what does not divide them evenly has no owner."""
    q = right(m, w, spec)
    count = lax.axis_size("data")
    index = lax.axis_index("data") * q.shape[0] + jnp.arange(q.shape[0])
    return q if q.ndim < 3 else q * (index < 5 - count)[:, None, None]


def rolled(m, w, spec):
    """Matrices come back in another order than they were sent."""
    q = newton_schulz(gathered(m, spec))
    turned = lax.axis_size("data") - 1
    return shard_of(jnp.roll(q, turned, 0) if q.ndim == 3 else q, spec)


def noise_of_its_own(m, w, spec):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("replica"))
    return right(m, w, spec) * (1 + 0.01 * jax.random.normal(key, m.shape))


def heads_by_rank(m, w, spec):
    """Heads of the columns, by a count that is not divided by the tensor shards."""
    part = P(*(tuple(x for x in names_of(e) if x != "tensor") for e in spec))
    whole = gathered(m, part)
    heads = jnp.stack(jnp.split(whole, 2, -1))
    return shard_of(jnp.concatenate([*newton_schulz(heads)], -1), part)


def not_finite(m, w, spec):
    """A mean over rows that a device has none of."""
    q = right(m, w, spec)
    rows = jnp.where(lax.axis_index("data") == 1, 0.0, 1.0)
    return q * rows / rows


def falls_back(m, w, spec):
    """AdamW's sign where the mesh leaves some rows over."""
    rows = gathered(m, spec).shape[-2]
    return jnp.sign(m) if rows % lax.axis_size(tuple(AXES)) else right(m, w, spec)


def plain(m, w, spec):
    """Newton–Schulz is left to another stage, which a mesh switches off."""
    many = lax.axis_size("data") * lax.axis_size("tensor") > 1
    return m if many else newton_schulz(m)


def rates_by_rank(m, w, spec):
    """A schedule by the progress of each rank's own data."""
    return right(m, w, spec) * (1 - 0.1 * lax.axis_index("data"))


def scale_of(name):
    """A scale by hand: of a shard, of padded rows, of rows and columns exchanged."""

    def direction(m, w, spec):
        whole = gathered(m, spec)
        rows, columns = whole.shape[-2:]
        if name == "shard":
            rows, columns = m.shape[-2:]
        many = lax.axis_size("data") * lax.axis_size("tensor") > 1
        if name == "padded" and many:
            rows, columns = -(-rows // 8) * 8, -(-columns // 8) * 8
        if name == "exchanged" and many:
            rows, columns = columns, rows
        return shard_of(newton_schulz(whole), spec) * max(1, columns / rows) ** 0.5

    return a_trainers(direction, lambda m, n: 1.0)


def clip(axes):
    """A clip by the norm of all gradients, summed over these axes of the mesh."""

    def clipped(grads, state, params=None):
        specs = {name: SPECS[name] for name in grads}

        def local(grads):
            squares = sum(jnp.sum(g * g) for g in grads.values())
            return {k: g / jnp.sqrt(lax.psum(squares, axes)) for k, g in grads.items()}

        run = jax.shard_map(local, in_specs=(specs,), out_specs=specs, check_vma=False)
        return run(grads), state

    return optax.GradientTransformation(lambda params: (), clipped)


def ratio(axes):
    """The ratio of the norms of weights and directions; the first summed over axes."""

    def update(updates, state, params):
        def one(u, w, spec):
            def local(u, w):
                named = [name for entry in spec for name in names_of(entry)]
                of_u = lax.psum(jnp.sum(u * u), named)
                return u * jnp.sqrt(lax.psum(jnp.sum(w * w), axes or named) / of_u)

            where = (spec, spec)
            return jax.shard_map(local, in_specs=where, out_specs=spec, check_vma=False)(
                u, w
            )

        return {k: one(u, params[k], SPECS[k]) for k, u in updates.items()}, state

    return optax.GradientTransformation(lambda params: (), update)


def inside_shard_map(optimizer):
    """The whole optimizer in shard_map, which it takes for one device."""

    def update(grads, state, params):
        specs = jax.tree.map(lambda x: P() if x.ndim == 0 else None, state)

        def spec_of(path, x):
            name = next((k.key for k in path if getattr(k, "key", None) in SPECS), None)
            return SPECS[name] if name and x.ndim == len(SHAPES[name]) else P()

        specs = jax.tree.map_with_path(spec_of, state)
        where = ({k: SPECS[k] for k in grads}, specs)
        run = jax.shard_map(
            optimizer.update, in_specs=(where[0], specs, where[0]), out_specs=where,
            check_vma=False,
        )  # fmt: skip
        return run(grads, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def codes_of_shards(rows=3):
    """8-bit momentum: codes by the gradient's shards, scales by the state's."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads, state, params=None):
        def one(name, m, g):
            m = 0.9 * m + g
            many = jax.sharding.get_abstract_mesh().shape["data"]
            length = m.shape[0] // many  # Of a device; one scale for each block of it.
            blocks = m.reshape(many, length, -1)
            scales = abs(blocks).max((1, 2), keepdims=True) / 127
            codes = jnp.round(blocks / scales)
            return (codes * jnp.roll(scales, many > 1, 0)).reshape(m.shape)

        momenta = {k: one(k, m, grads[k]) for k, m in state.items()}
        return momenta, momenta

    return optax.GradientTransformation(init, update)


OPTAX = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=NUMBERS)
OURS = muon(1e-2, weight_dimension_numbers=NUMBERS)
PLAIN = optax.contrib.muon(1e-2, beta=0.0, muon_weight_dimension_numbers=NUMBERS)

# Where it was published, the chain, a leaf that it breaks, and words of the cause.
FAULTS = {
    "shards along one axis orthogonalized": (
        "DeepSpeed 8437, 39 % off", a_trainers(tensor_shards_alone), "up",
        "along tensor is computed alone",
    ),
    "optax.contrib.muon inside of shard_map": (
        "xlstm-jax's loop", inside_shard_map(OPTAX), "up",
        "along data and tensor is computed alone",
    ),
    "ours inside of shard_map": (
        "xlstm-jax's loop", inside_shard_map(OURS), "up",
        "along data and tensor is computed alone",
    ),
    "heads counted for all ranks": (
        "Megatron-LM 6683, 29 % off", a_trainers(heads_by_rank), "up",
        "along tensor is computed alone",
    ),
    "a weight's norm summed over replicas": (
        "marin, 2.5 to 7 times", optax.chain(OURS, ratio(tuple(AXES))), "up",
        "it is 1.41 times as large: a norm",
    ),
    "a momentum's norm summed over replicas": (
        "marin, 2.5 to 7 times", a_trainers(replicas_counted), "up",
        "no cause was found",
    ),
    "a clip by a norm summed over replicas": (
        "NeMo-RL 3788", optax.chain(clip(tuple(AXES)), optax.sgd(1.0)), "up",
        "times as large",
    ),
    "a clip by each device's norm": (
        "DeepSpeed 8475, 34 % off", optax.chain(clip(()), optax.sgd(1.0)), "up",
        "each shard has a factor of its own",
    ),
    "shards divided by norms of their own": (
        "DeepSpeed 8475, before Muon", a_trainers(norms_of_shards), "up",
        "no cause was found",
    ),
    "the scale of a shard": (
        "Megatron-LM 6380", scale_of("shard"), "down", "times as large: a norm or",
    ),
    "the scale of padded rows": (
        "DeepSpeed 8384", scale_of("padded"), "up", "times as large: a norm or",
    ),
    "fan-in and fan-out exchanged": (
        "the recipes of several trainers", scale_of("exchanged"), "up",
        "times as large: a norm or",
    ),
    "a result that goes to another device": (
        "KellerJordan/Muon 28", a_trainers(another_shard), "up",
        "no cause was found",
    ),
    "matrices that no device computes": (
        "KellerJordan/Muon 28", a_trainers(owners), "stack",
        "1 of 4 matrices do not move on the mesh",
    ),
    "matrices in another order": (
        "KellerJordan/Muon 28", a_trainers(rolled), "stack",
        "no cause was found",
    ),
    "AdamW where the mesh leaves rows over": (
        "prime-rl 3438", a_trainers(falls_back), "up", "no cause was found",
    ),
    "no Newton–Schulz in one configuration": (
        "DeepSpeed 8442", a_trainers(plain), "up", "no cause was found",
    ),
    "replicas that drift": (
        "NeMo Automodel 3822", a_trainers(noise_of_its_own), "up",
        "hold the same entries",
    ),
    "a rate for each rank": (
        "nanochat 857", a_trainers(rates_by_rank), "up",
        "each shard has a factor of its own",
    ),
    "not finite on a mesh": (
        "dion 24, on one shard", a_trainers(not_finite), "up", "not finite",
    ),
    "8-bit momentum decoded by other shards": (
        "this library", optax.chain(codes_of_shards(), PLAIN), "up",
        "no cause was found",
    ),
}  # fmt: skip
