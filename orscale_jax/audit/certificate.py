"""Whether an update on a mesh is that of one device, and what its program sends."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orscale_jax.audit import hlo
from orscale_jax.audit.causes import Array, Shards, cause_of
from orscale_jax.audit.probe import draw, runnable, running_mesh
from orscale_jax.audit.program import collectives, flops_of
from orscale_jax.audit.state import leaves_by_path
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.sharding import param_shardings, typed_sharding
from orscale_jax.sharding.state_shardings import state_shardings
from orscale_jax.trees.boxes import PyTree, trained, unbox
from orscale_jax.trees.names import distinct_names, merged

# The second: an optimizer that closes over a mesh is made again for one device.
Optimizer: TypeAlias = (
    optax.GradientTransformation | Callable[[Mesh], optax.GradientTransformation]
)
# Of each leaf that moves, two updates are compared: the second has momentum. After the
# last leaf has begun to move, the others get fewer updates to do so.
_UPDATES, _MORE_UPDATES, _COMPARED = 128, 4, 2
# Rounding in float32 moves a polar factor by some 1e-4. A larger error is compared with
# what rounding does on one device: gradients are moved there, by little in float32, where
# some of them are then rounded to other numbers if the optimizer has a narrower dtype
# inside, and by a digit of bfloat16 in the parameters' own dtypes.
_TOLERANCE, _ROUNDINGS, _MARGIN = 1e-3, 4, 4
_NUDGE, _OWN_NUDGE = 2.0**-14, 2.0**-8


class Sent(NamedTuple):
    """The collectives of one kind in the compiled program of an update."""

    kind: str  #: Such as ``"all-gather"``.
    looped: bool  #: Whether they are inside of a loop.
    times: int  #: How often they run.
    nbytes: int  #: The bytes that each device sends by them.


class CertificateRow(NamedTuple):
    """How far the update of a parameter on a mesh is from that on one device."""

    #: The parameter's path, with dots.
    path: str
    #: The norm of the difference over the norm of the update on one device, of the worst
    #: matrix: in float32, and again in the parameters' own dtypes if these are others.
    errors: tuple[float, ...]
    #: The likely cause, if a difference is more than rounding; otherwise empty.
    cause: str


@dataclasses.dataclass(frozen=True)
class Certificate:
    """How an update on a mesh compares with that on one device. ``print`` shows a table.

    What the program does is read from its text, in which a loop whose length is not known
    counts once.

    Attributes:
      mesh: The mesh on which the updates ran, in words.
      rows: One :class:`CertificateRow` for each parameter.
      sent: One :class:`Sent` for each kind of collective in the program of an update.
      flops: The FLOPs of matrix products on each device in one update.
      repetition: The FLOPs of all devices over those of the same update on one device: 1
        if no product is repeated, and 0 if there are none.
      temporary_bytes: The bytes of temporary arrays on each device.
    """

    mesh: str
    rows: tuple[CertificateRow, ...]
    sent: tuple[Sent, ...]
    flops: int
    repetition: float
    temporary_bytes: int

    @property
    def same(self) -> bool:
        """Whether every update on the mesh is that on one device."""
        return not any(row.cause for row in self.rows)

    @property
    def bytes_sent(self) -> int:
        """The bytes that each device sends in one update."""
        return sum(sent.nbytes for sent in self.sent)

    @property
    def looped_bytes(self) -> int:
        """The part of these bytes that is sent inside of loops."""
        return sum(sent.nbytes for sent in self.sent if sent.looped)

    @property
    def verdict(self) -> str:
        """One line."""
        wrong = sum(bool(row.cause) for row in self.rows)
        worst = max((error for row in self.rows for error in row.errors), default=0.0)
        return (
            f"on {self.mesh}: {'NOT ' * bool(wrong)}the update of one device for "
            f"{f'{wrong} of' if wrong else 'all'} {len(self.rows)} parameters "
            f"(largest relative error {worst:.1e})"
        )

    def __str__(self) -> str:
        """The verdict, errors and causes by parameter, and what the program does."""
        lines = [self.verdict]
        names = [row.path or "(the only leaf)" for row in self.rows]
        for name, members in merged(names, [row.cause for row in self.rows]):
            errors = zip(*(self.rows[i].errors for i in members), strict=True)
            told = [*(f"{max(x):.1e}" for x in errors), name]
            if cause := self.rows[members[0]].cause:
                told.append(f"({cause})")
            lines.append("  ".join(told))
        lines.append(
            f"each device: {self.bytes_sent:,} bytes sent, {self.temporary_bytes:,} of "
            f"temporaries, {self.flops / 1e9:.3g} GFLOP; all devices together: "
            f"{self.repetition:.3g} × the products of one device"
        )
        lines += [
            f"{x.nbytes:,} bytes by {x.times:,} × {x.kind}{' in loops' * x.looped}"
            for x in self.sent
        ]
        return "\n".join(lines)


@param_shardings.audit()
def assert_same_on(
    mesh: Mesh | AbstractMesh, optimizer: Optimizer, params: PyTree
) -> Certificate:
    """Raise an AssertionError unless the update on a mesh is that of one device.

    It is a line for a test. The optimizer runs on the mesh and on one device, by the same
    random weights and gradients, until it has moved each parameter twice. The parameters
    are compared matrix by matrix: once in float32, and again in their own dtypes.

    Args:
      mesh: The mesh. If its devices are not there, as on an abstract mesh, devices that
        are there take their places, and the axes are shortened until there are enough.
      optimizer: Any Optax optimizer. If it closes over a mesh, pass the function that
        makes it from a mesh instead, such as ``lambda mesh: muon(1e-3, mesh=mesh)``.
      params: The parameters, which may be abstract; their values are not used. If they
        have a :class:`jax.sharding.NamedSharding`, its spec counts. Others are sharded
        over all axes of the mesh that divide theirs.

    Returns:
      The :class:`Certificate`, which also tells what the program sends.

    Raises:
      AssertionError: If an update differs by more than rounding. The message has the
        parameters, the errors, and the likely causes.
      ValueError: If the optimizer does not run, or there is only one device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from orscale_jax import assert_same_on, muon
      >>> mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), devices=jax.devices()[:8])
      >>> params = {"up": jnp.zeros((16, 32)), "bias": jnp.zeros(32)}
      >>> certificate = assert_same_on(mesh, muon(1e-3), params)
      >>> certificate.looped_bytes
      0
    """
    params, optimizer = trained(params, optimizer), getattr(optimizer, "tx", optimizer)

    def placed(leaf: Any) -> Any:
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf
        shape, left = np.shape(leaf), [*np.shape(leaf)]
        entries: list[tuple[str, ...]] = [()] * len(shape)
        for name, length in mesh.shape.items():  # Each cuts the longest that it divides.
            divided = [i for i, size in enumerate(left) if size and not size % length]
            if divided:
                axis = max(divided, key=left.__getitem__)
                left[axis] //= length
                entries[axis] += (name,)
        where = NamedSharding(mesh, PartitionSpec(*entries))
        return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf), sharding=where)

    certificate = certify(optimizer, jax.tree.map(placed, params), mesh, {})
    if not certificate.same:
        raise AssertionError(str(certificate))
    return certificate


def certify(
    optimizer: Optimizer,
    params: PyTree,
    mesh: Mesh | AbstractMesh,
    axes_of: Mapping[Any, MatrixAxes],
) -> Certificate:
    """Compare updates on a mesh with those of one device: see :func:`assert_same_on`."""
    running = running_mesh(mesh)
    leaves, structure = jax.tree.flatten(params)
    paths = [*leaves_by_path(unbox(params))]
    names = distinct_names(paths)
    # Without axes, the last two are a matrix.
    counted = [(*range(np.ndim(leaf)),) for leaf in leaves]
    readings = [
        axes_of.get(path) or MatrixAxes(axes[:-2], axes[-2:-1], axes[-1:])
        for path, axes in zip(paths, counted, strict=True)
    ]
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    specs = [
        x.spec if isinstance(x, NamedSharding) else PartitionSpec() for x in shardings
    ]
    first = np.reshape(running.local_devices[:1], (1,) * running.devices.ndim)
    single = Mesh(first, running.axis_names, axis_types=running.axis_types)
    chain_on = functools.partial(_Chain, optimizer, structure, specs)
    # A mesh may be there to compile for it only.
    target = mesh if isinstance(mesh, Mesh) else running
    own = [jnp.result_type(leaf) for leaf in leaves]
    wide = [
        jnp.promote_types(x, jnp.float32) if jnp.issubdtype(x, jnp.inexact) else x
        for x in own
    ]
    errors, causes = list[list[float]](), dict[int, str]()
    passes = (wide, _NUDGE), (own, _OWN_NUDGE)
    for dtypes, nudge in passes[: 1 + (own != wide)]:
        arrays = [
            [
                np.asarray(draw(np.shape(leaf), dtype, None)(3 * i + seed, size))
                for i, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True))
            ]
            for seed, size in enumerate((0.02, 1.0, 1.0))
        ]
        on_mesh, on_one = chain_on(running), chain_on(single)
        found, differences = _compared(on_mesh, on_one, arrays, readings)
        noise = _noise(on_one, arrays, readings, differences, nudge)
        for i, limit in ((i, _MARGIN * x) for i, x in noise.items()):
            if found[i] <= limit or limit >= 1:
                del differences[i]
            if limit >= 1:
                causes.setdefault(i, "rounding decides it, on one device as well")
        if not errors:
            program, alone = on_mesh.program, on_one.program
            if target != running:
                on_target = chain_on(target)
                arguments = jax.tree.map(on_target.like, on_mesh.arguments)
                state_shardings(on_target.optimizer, arguments[-1])  # It is told of them.
                program = on_target.compiled(arguments)
            causes |= _causes(on_mesh, on_one, arrays, readings, differences)
        for i in differences.keys() - causes.keys():
            causes[i] = "only in the parameters' dtypes: a cast, or a narrow sum"
        errors.append(found)
    of_rows = enumerate(zip(names, zip(*errors, strict=True), strict=True))
    return Certificate(
        " × ".join(f"{size} {name}" for name, size in running.shape.items()),
        tuple(CertificateRow(*row, causes.get(i, "")) for i, row in of_rows),
        *_of_program(program, alone, target.size),
    )


def _of_program(
    program: Any, alone: Any, devices: int
) -> tuple[tuple[Sent, ...], int, float, int]:
    """What a compiled program sends, its FLOPs, their repetition, and its temporaries."""
    issued, issued_alone = (
        [*hlo.runs(*hlo.parse(x.as_text() or ""), unknown_trips=1)]
        for x in (program, alone)
    )
    sent: dict[tuple[str, bool], tuple[int, int]] = {}
    for x in collectives(issued):
        times, nbytes = sent.get((x.kind, x.looped), (0, 0))
        sent[x.kind, x.looped] = times + x.times, nbytes + x.sent(devices)
    flops, flops_alone = (sum(map(flops_of, x)) for x in (issued, issued_alone))
    memory = program.memory_analysis()
    return (
        tuple(Sent(*key, *value) for key, value in sent.items()),
        flops,
        devices * flops / max(1, flops_alone),
        0 if memory is None else memory.temp_size_in_bytes,
    )


class _Chain:
    """An optimizer on a mesh, compiled once for parameters of one type."""

    def __init__(
        self, optimizer: Any, structure: Any, specs: Sequence[PartitionSpec], mesh: Mesh
    ) -> None:
        made = hasattr(optimizer, "update")
        self.optimizer = optimizer if made else optimizer(mesh)
        self.mesh, self.structure, self.specs = mesh, structure, specs
        self.update: Any = None

    def updates(
        self, weights: Sequence[Array], grads: Sequence[Sequence[Array]]
    ) -> Iterator[list[jax.Array]]:
        """The leaves of each update, by gradients in turn; the weights do not change."""
        where = [NamedSharding(self.mesh, spec) for spec in self.specs]
        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def replicated(x: Any) -> Any:
            placed = isinstance(getattr(x, "sharding", None), NamedSharding)
            return x if placed else jax.device_put(x, everywhere)

        with jax.set_mesh(self.mesh):
            params, *gradients = (
                jax.tree.unflatten(self.structure, jax.device_put([*arrays], where))
                for arrays in (weights, *grads)
            )
            state = jax.tree.map(replicated, self.optimizer.init(params))
        for gradient in itertools.cycle(gradients):
            arguments = gradient, state, params
            if self.update is None:
                self.program = self.compiled(arguments)
            with jax.set_mesh(self.mesh):
                updates, state = self.update(*arguments)
            yield jax.tree.leaves(updates)

    def like(self, x: Any) -> jax.ShapeDtypeStruct:
        """An abstract array on this mesh, from one on a mesh with the same axes."""
        where = NamedSharding(self.mesh, x.sharding.spec)
        is_weak = getattr(x, "weak_type", False)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where, weak_type=is_weak)

    def compiled(self, arguments: Any) -> Any:
        """The program of an update."""
        self.arguments = jax.tree.map(self.like, arguments)
        _, state, params = jax.tree.map(lambda x: x.sharding, self.arguments)
        try:
            with jax.set_mesh(self.mesh):
                update = runnable(self.optimizer, *self.arguments)
                self.update = jax.jit(update, out_shardings=(params, state))
                return self.update.lower(*self.arguments).compile()
        except Exception as error:  # Whatever a foreign update raises.
            raise ValueError(
                f"on {self.mesh.size} devices the optimizer does not run: "
                f"{type(error).__name__}: {error}\nIf it closes over a mesh, call "
                "assert_same_on with the function that makes it from a mesh. If its "
                "update needs other arguments, bind them with functools.partial."
            ) from error


# Of a leaf: the step, its shards on the mesh, and its update on one device.
_Differences: TypeAlias = dict[int, tuple[int, Shards, Array]]


def _compared(
    on_mesh: _Chain,
    on_one: _Chain,
    arrays: Sequence[Sequence[Array]],
    readings: Sequence[MatrixAxes],
) -> tuple[list[float], _Differences]:
    """The largest error of each leaf, and the update that has it if it needs a cause."""
    weights, *grads = arrays
    chains = on_mesh, on_one
    runs = zip(*(x.updates(weights, grads) for x in chains), strict=True)
    errors, moved = [0.0] * len(weights), [0] * len(weights)
    differences: _Differences = {}
    left = _UPDATES
    for step, (found, expected) in enumerate(runs):
        for i, axes in enumerate(readings):
            shards = [(x.index, _wide(x.data)) for x in found[i].addressable_shards]
            one = _wide(expected[i])
            off = np.zeros(one.shape, one.real.dtype)
            for at, values in shards:
                off[at] = np.maximum(off[at], abs(values - one[at]))
            error = _relative(off, one, axes)
            if error > max(errors[i], _TOLERANCE):
                differences[i] = step, shards, one
            errors[i] = max(errors[i], error)
            if one.any() or off.any():
                left = left if moved[i] else _MORE_UPDATES + 1
                moved[i] += 1
        left -= 1
        if not left or min(moved, default=_COMPARED) >= _COMPARED:
            break
    return errors, differences


def _noise(
    on_one: _Chain,
    arrays: Sequence[Sequence[Array]],
    readings: Sequence[MatrixAxes],
    differences: _Differences,
    nudge: float,
) -> dict[int, float]:
    """The largest errors that slightly other gradients make on one device."""
    weights, *grads = arrays
    signs, noise = np.random.default_rng(0), dict.fromkeys(differences, 0.0)
    steps = 1 + max((step for step, *_ in differences.values()), default=-1)
    for _ in range(_ROUNDINGS if steps else 0):
        nudged = [
            [
                (x * (1 + nudge * signs.choice((-1, 1), x.shape))).astype(x.dtype)
                for x in xs
            ]
            for xs in grads
        ]
        updates = itertools.islice(on_one.updates(weights, nudged), steps)
        for now, leaves in enumerate(updates):
            for i, (step, _, one) in differences.items():
                if step == now:
                    off = abs(_wide(leaves[i]) - one)
                    noise[i] = max(noise[i], _relative(off, one, readings[i]))
    return noise


def _causes(
    on_mesh: _Chain,
    on_one: _Chain,
    arrays: Sequence[Sequence[Array]],
    readings: Sequence[MatrixAxes],
    differences: _Differences,
) -> dict[int, str]:
    """The likely cause of each difference."""

    @functools.cache
    def by_shards(along: Sequence[str], step: int) -> list[Shards]:
        """The updates of devices that have only their own shards along some axes."""
        maps = []
        for spec, x in zip(on_mesh.specs, arrays[0], strict=True):
            entries = map(typed_sharding.names, spec)
            cut = [tuple(name for name in names if name in along) for names in entries]
            sharding = NamedSharding(on_mesh.mesh, PartitionSpec(*cut))
            maps.append(sharding.devices_indices_map(x.shape).values())
        result = [Shards() for _ in maps]
        for places in {str(at): at for at in zip(*maps, strict=True)}.values():
            weights, *grads = (
                [x[at] for x, at in zip(each, places, strict=True)] for each in arrays
            )
            try:
                *_, last = itertools.islice(on_one.updates(weights, grads), step + 1)
            except Exception:  # The optimizer refuses shards.
                break
            for shards, at, update in zip(result, places, last, strict=True):
                shards.append((at, _wide(update)))
        return result

    lengths = {name: size for name, size in on_mesh.mesh.shape.items() if size > 1}
    numbers = range(1, len(lengths) + 1)
    subsets = [x for n in numbers for x in itertools.combinations(lengths, n)]
    counts = sorted({math.prod(lengths[name] for name in some) for some in subsets})
    causes = {}
    for i, (step, shards, wanted) in differences.items():
        alone = ((" and ".join(x), by_shards(x, step)[i]) for x in subsets)
        causes[i] = cause_of(shards, wanted, readings[i], counts, alone)
    return causes


def _wide(x: Any) -> Array:
    """An array of the host, of float32 at least."""
    return np.asarray(x, jnp.promote_types(x.dtype, jnp.float32))


def _relative(off: Array, wanted: Array, axes: MatrixAxes) -> float:
    """The largest norm of a matrix's difference over that of the matrix."""
    off, norms = (np.asarray(axes.norms(jnp.asarray(abs(x)))) for x in (off, wanted))
    ratios = np.divide(off, norms, out=np.full_like(off, np.inf), where=norms > 0)
    ratios = np.where(off == 0, 0, np.nan_to_num(ratios, nan=np.inf))
    return float(np.max(ratios, initial=0))
