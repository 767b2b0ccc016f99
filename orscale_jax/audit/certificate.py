"""Whether an update on a mesh is that of one device, and what its program sends."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orscale_jax import validate
from orscale_jax.audit.probe import draw, runnable, running_mesh
from orscale_jax.audit.program import flops_of, parse, runs, sent_by
from orscale_jax.audit.state import leaves_by_path
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.sharding import param_shardings, typed_sharding
from orscale_jax.sharding.state_shardings import state_shardings
from orscale_jax.trees.boxes import PyTree, trained, unbox
from orscale_jax.trees.names import distinct_names, merged

Array: TypeAlias = np.ndarray[Any, Any]
Shards: TypeAlias = list[tuple[tuple[slice, ...], Array]]  # Places and values.
# The second: an optimizer that closes over a mesh is made again for one device.
Optimizer: TypeAlias = (
    optax.GradientTransformation | Callable[[Mesh], optax.GradientTransformation]
)
# How many updates a leaf gets until it moves. After the last leaf has begun to move, the
# others get few more to do so.
_UPDATES, _MORE_UPDATES, _OF_ZEROS = 128, 4, 16
# Rounding in float32 moves a polar factor by some 1e-4. A larger error is compared with
# what rounding does on one device: gradients are moved there, by little in float32, where
# some of them are then rounded to other numbers if the optimizer has a narrower dtype
# inside, and by a digit of bfloat16 in the parameters' own dtypes.
_TOLERANCE, _ROUNDINGS, _MARGIN = 1e-3, 4, 4
_NUDGE, _OWN_NUDGE = 2.0**-14, 2.0**-8
_CLOSE = 5e-3  # Of a multiple, in float32.


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
    #: The number of updates that were compared; 0 if it did not move.
    updates: int


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
        fewest = min((row.updates for row in self.rows if row.updates), default=0)
        still = sum(not row.updates for row in self.rows)
        return (
            f"on {self.mesh}: {'NOT ' * bool(wrong)}the update of one device for "
            f"{f'{wrong} of' if wrong else 'all'} {len(self.rows)} parameters "
            f"(largest relative error {worst:.1e} in {fewest} updates"
            f"{f'; {still} did not move' * bool(still)})"
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
    mesh: Mesh | AbstractMesh, optimizer: Optimizer, params: PyTree, *, steps: int = 6
) -> Certificate:
    """Raise an AssertionError unless the update on a mesh is that of one device.

    It is a line for a test. The optimizer runs on the mesh and on one device, by the same
    random weights and gradients, until it has moved each parameter ``steps`` times. In
    some gradients, the rows of one device are zero, or a whole matrix. The parameters are
    compared matrix by matrix: once in float32, and again in their own dtypes.

    Args:
      mesh: The mesh. If its devices are not there, as on an abstract mesh, devices that
        are there take their places, and the axes are shortened until there are enough.
      optimizer: Any Optax optimizer. If it closes over a mesh, pass the function that
        makes it from a mesh instead, such as ``lambda mesh: muon(1e-3, mesh=mesh)``.
      params: The parameters, which may be abstract; their values are not used. If they
        have a :class:`jax.sharding.NamedSharding`, its spec counts. Others are sharded
        over all axes of the mesh that divide theirs.
      steps: How many updates of each parameter are compared. Take more than the period of
        an optimizer that does some of its work at every n-th step only.

    Returns:
      The :class:`Certificate`, which also tells what the program sends.

    Raises:
      AssertionError: If an update differs by more than rounding, or no parameter moves.
        The message has the parameters, the errors, and the likely causes.
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
    validate.count("steps", steps)
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

    certificate = certify(optimizer, jax.tree.map(placed, params), mesh, {}, steps)
    if not certificate.same:
        raise AssertionError(str(certificate))
    return certificate


def certify(
    optimizer: Optimizer,
    params: PyTree,
    mesh: Mesh | AbstractMesh,
    axes_of: Mapping[Any, MatrixAxes],
    steps: int = 6,
) -> Certificate:
    """Compare updates on a mesh with those of one device: see :func:`assert_same_on`."""
    running = running_mesh(mesh)
    first = np.reshape(running.local_devices[:1], (1,) * running.devices.ndim)
    single = Mesh(first, running.axis_names, axis_types=running.axis_types)
    leaves, structure = [*_leaves(params, axes_of)], jax.tree.structure(params)
    chain_on = functools.partial(_Chain, optimizer, structure, [x.spec for x in leaves])
    own = [leaf.dtype for leaf in leaves]
    wide = [
        jnp.promote_types(dtype, jnp.float32)
        if jnp.issubdtype(dtype, jnp.inexact)
        else dtype
        for dtype in own
    ]
    passes = [(wide, _NUDGE)]
    if own != wide:
        passes.append((own, _OWN_NUDGE))
    errors, causes = list[list[float]](), dict[int, str]()
    for dtypes, nudge in passes:
        weights, *grads = [
            [
                np.asarray(draw(leaf.shape, dtype, None)(3 * i + seed, size))
                for i, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True))
            ]
            for seed, size in enumerate((0.02, 1.0, 1.0))
        ]
        on_mesh, on_one = chain_on(running), chain_on(single)
        comparison = _Comparison(on_mesh, on_one, weights, grads, leaves)
        found, differences, compared = comparison.errors(steps)
        if not any(compared):
            causes = dict.fromkeys(
                range(len(leaves)), f"no update in {_UPDATES} moves it"
            )
        for i in comparison.undecided(found, differences, nudge):
            causes.setdefault(i, "rounding decides it, on one device as well")
        if not errors:
            causes |= comparison.causes(differences)
            program, alone = on_mesh.program, on_one.program
            if isinstance(mesh, Mesh) and mesh != running:  # There to compile for only.
                program = chain_on(mesh).compiled_like(on_mesh)
            for zeros in _with_zeros(grads[0], leaves, running):
                some_zero = comparison._replace(grads=[zeros])
                worse, differences, _ = some_zero.errors(2, _OF_ZEROS)
                some_zero.undecided(worse, differences, nudge)
                for i, cause in some_zero.causes(differences).items():
                    if i not in causes and np.isfinite(differences[i][2]).all():
                        found[i] = worse[i]
                        causes[i] = f"where gradients are zero, {cause}"
            differences = {}
        for i in differences.keys() - causes.keys():
            causes[i] = "only in the parameters' dtypes: a cast, or a narrow sum"
        errors.append(found)
    of_leaves = zip(leaves, zip(*errors, strict=True), strict=True)
    rows = tuple(
        CertificateRow(leaf.name, of_passes, causes.get(i, ""), compared[i])
        for i, (leaf, of_passes) in enumerate(of_leaves)
    )
    devices = mesh.size if isinstance(mesh, Mesh) else running.size
    words = " × ".join(f"{size} {name}" for name, size in running.shape.items())
    return Certificate(words, rows, *_of_program(program, alone, devices))


class _Leaf(NamedTuple):
    """A parameter, the axes of the mesh that shard it, and those of its matrices."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    axes: MatrixAxes


def _leaves(params: PyTree, axes_of: Mapping[Any, MatrixAxes]) -> Iterator[_Leaf]:
    """The leaves of the parameters; without axes, the last two are a matrix."""
    leaf_of = leaves_by_path(unbox(params))
    for name, (path, leaf) in zip(distinct_names(leaf_of), leaf_of.items(), strict=True):
        sharding, axes = getattr(leaf, "sharding", None), (*range(np.ndim(leaf)),)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        last_two = MatrixAxes(axes[:-2], axes[-2:-1], axes[-1:])
        matrices = axes_of.get(path, last_two)
        yield _Leaf(name, np.shape(leaf), jnp.result_type(leaf), spec, matrices)


def _with_zeros(
    grads: Sequence[Array], leaves: Sequence[_Leaf], mesh: Mesh
) -> tuple[list[Array], list[Array]]:
    """Gradients without the entries of a device, and without a matrix of each leaf."""
    shards, matrices = [x.copy() for x in grads], [x.copy() for x in grads]
    for shard, matrix, leaf in zip(shards, matrices, leaves, strict=True):
        places = NamedSharding(mesh, leaf.spec).devices_indices_map(leaf.shape)
        shard[next(iter(places.values()))] = 0
        if matrix.ndim > 1:
            batch = leaf.axes.batch
            matrix[tuple(0 if i in batch else np.s_[:] for i in range(matrix.ndim))] = 0
    return shards, matrices


def _of_program(
    program: Any, alone: Any, devices: int
) -> tuple[tuple[Sent, ...], int, float, int]:
    """What a compiled program sends, its FLOPs, their repetition, and its temporaries."""
    issued, issued_alone = ([*runs(*parse(x.as_text()))] for x in (program, alone))
    sent: dict[tuple[str, bool], tuple[int, int]] = {}
    for run in issued:
        kind, nbytes = sent_by(run, devices)
        if kind:
            times, total = sent.get((kind, run.looped), (0, 0))
            sent[kind, run.looped] = times + run.times, total + nbytes
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

    def compiled_like(self, other: "_Chain") -> Any:
        """The program of the update of another chain, on this one's mesh."""
        arguments = jax.tree.map(self.like, other.arguments)
        state_shardings(self.optimizer, arguments[-1])  # It is told of them.
        return self.compiled(arguments)

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


class _Comparison(NamedTuple):
    """The same updates on a mesh and on one device."""

    on_mesh: _Chain
    on_one: _Chain
    weights: Sequence[Array]
    grads: Sequence[Sequence[Array]]
    leaves: Sequence[_Leaf]

    def errors(
        self, steps: int, left: int = _UPDATES
    ) -> tuple[list[float], _Differences, list[int]]:
        """The largest error of each leaf, and the update that has it, if it is large.

        Also the number of updates of each leaf that were compared.
        """
        chains = self.on_mesh, self.on_one
        updates = (chain.updates(self.weights, self.grads) for chain in chains)
        errors, moved = [0.0] * len(self.leaves), [0] * len(self.leaves)
        differences: _Differences = {}
        for step, (found, expected) in enumerate(zip(*updates, strict=True)):
            for i, leaf in enumerate(self.leaves):
                shards = [(x.index, _wide(x.data)) for x in found[i].addressable_shards]
                one = _wide(expected[i])
                off = np.zeros(one.shape, one.real.dtype)
                for at, values in shards:
                    off[at] = np.maximum(off[at], abs(values - one[at]))
                error = _relative(off, one, leaf.axes)
                if error > max(errors[i], _TOLERANCE):
                    differences[i] = step, shards, one
                errors[i] = max(errors[i], error)
                if one.any() or off.any():
                    if not moved[i]:  # At its pace.
                        left = min(_UPDATES, _MORE_UPDATES + (step + 1) * steps)
                    moved[i] += 1
            left -= 1
            if left < 1 or min(moved, default=steps) >= steps:
                break
        return errors, differences, moved

    def undecided(
        self, errors: Sequence[float], differences: _Differences, nudge: float
    ) -> list[int]:
        """Drop the differences that rounding explains; return what it decides alone."""
        random, noise = np.random.default_rng(0), dict.fromkeys(differences, 0.0)
        steps = 1 + max((step for step, *_ in differences.values()), default=-1)

        def nudged(x: Array) -> Array:
            return (x * (1 + nudge * random.choice((-1, 1), x.shape))).astype(x.dtype)

        for _ in range(_ROUNDINGS if steps else 0):
            others = jax.tree.map(nudged, self.grads)
            updates = itertools.islice(self.on_one.updates(self.weights, others), steps)
            for now, found in enumerate(updates):
                for i, (step, _, one) in differences.items():
                    if step == now:
                        off, axes = abs(_wide(found[i]) - one), self.leaves[i].axes
                        noise[i] = max(noise[i], _relative(off, one, axes))
        limits = {i: _MARGIN * error for i, error in noise.items()}
        for i, limit in limits.items():
            if errors[i] <= limit or limit >= 1:
                del differences[i]
        return [i for i, limit in limits.items() if limit >= 1]

    def causes(self, differences: _Differences) -> dict[int, str]:
        @functools.cache
        def by_shards(along: Sequence[str], step: int) -> list[Shards]:
            """The updates of devices that have only their own shards along some axes."""
            maps = []
            for spec, x in zip(self.on_mesh.specs, self.weights, strict=True):
                cut = [
                    tuple(name for name in typed_sharding.names(entry) if name in along)
                    for entry in spec
                ]
                sharding = NamedSharding(self.on_mesh.mesh, PartitionSpec(*cut))
                maps.append(sharding.devices_indices_map(x.shape).values())
            result = [Shards() for _ in maps]
            for places in {str(at): at for at in zip(*maps, strict=True)}.values():
                own, *own_grads = (
                    [x[at] for x, at in zip(each, places, strict=True)]
                    for each in (self.weights, *self.grads)
                )
                updates = self.on_one.updates(own, own_grads)
                try:
                    *_, last = itertools.islice(updates, step + 1)
                except Exception:  # The optimizer refuses shards.
                    break
                for shards, at, update in zip(result, places, last, strict=True):
                    shards.append((at, _wide(update)))
            return result

        lengths = [name for name, size in self.on_mesh.mesh.shape.items() if size > 1]
        subsets = [
            x for n in range(len(lengths)) for x in itertools.combinations(lengths, n + 1)
        ]
        return {
            i: _cause(shards, wanted, ((x, by_shards(x, step)[i]) for x in subsets))
            for i, (step, shards, wanted) in differences.items()
        }


def _cause(
    shards: Shards, wanted: Array, alone: Iterable[tuple[Sequence[str], Shards]]
) -> str:
    """The likely cause of a difference from one device, in words.

    ``alone`` are the updates of devices that see only their shards along some axes.
    """
    found = np.zeros_like(wanted)
    for at, values in shards:
        found[at] = values
    if not np.isfinite(found).all():
        return "it is not finite on the mesh"
    if any((found[at] != values).any() for at, values in shards):
        return "devices that hold the same entries have different updates of them"
    if not found.any() or not wanted.any():
        return f"it moves on {'the mesh' if found.any() else 'one device'} only"
    factor = _factor(found, wanted)
    if factor is not None and abs(factor - 1) < _CLOSE:
        return "it is off by a few digits of a narrow dtype: a cast, or a narrow sum"
    if factor is not None:
        return f"it is {factor:.3g} times as large: a norm or a scale of other shards"
    matrices = [*np.ndindex(found.shape[:-2])] if found.ndim > 2 else []
    if still := sum(not found[i].any() for i in matrices):
        return f"{still} of {len(matrices)} matrices do not move on the mesh"
    places = [*{str(at): at for at, _ in shards}.values()]
    for what, parts in (("shard", places), ("matrix", matrices)):
        factors = [_factor(found[i], wanted[i]) for i in parts if found[i].size > 1]
        if len(factors) > 1 and None not in factors:
            return f"each {what} has a factor of its own: a norm of each {what} alone"
    for names, of_shards in alone:
        factors = [_factor(found[at], values) for at, values in of_shards]
        if factors and None not in factors:
            return f"each shard along {' and '.join(names)} is computed alone"
    return "no cause was found"


def _factor(found: Array, wanted: Array) -> float | None:
    """The number by which one array is a multiple of the other, if it is one."""
    factor = float(np.vdot(wanted, found).real / (np.vdot(wanted, wanted).real or 1))
    off = np.linalg.norm(found - factor * wanted)
    return factor if off <= _CLOSE * np.linalg.norm(factor * wanted) else None


def _wide(x: Any) -> Array:
    """An array of the host, of float32 at least."""
    return np.asarray(x, jnp.promote_types(x.dtype, jnp.float32))


def _relative(off: Array, wanted: Array, axes: MatrixAxes) -> float:
    """The largest norm of a matrix's difference over that of the matrix."""
    off, norms = (np.asarray(axes.norms(jnp.asarray(abs(x)))) for x in (off, wanted))
    ratios = np.divide(off, norms, out=np.full_like(off, np.inf), where=norms > 0)
    ratios = np.where(off == 0, 0, np.nan_to_num(ratios, nan=np.inf))
    return float(np.max(ratios, initial=0))
