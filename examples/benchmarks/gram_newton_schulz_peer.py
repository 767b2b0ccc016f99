"""A step of gram-newton-schulz, the Muon of PyTorch with kernels of its own, timed.

    python -m examples.benchmarks.gram_newton_schulz_peer

Of the matrices of GPT-2 124M and of 4 blocks of a 1.1B model, as the stage *steps* of
:mod:`examples.benchmarks.gpu_session` has them: random float32 parameters and gradients,
five steps of Newton–Schulz, AdamW for the other leaves. Its Newton–Schulz multiplies in
float16 after the momentum was rounded to bfloat16. Prints milliseconds: with and without
its kernels, the Gram form and the plain iteration.

Needs one GPU of the Hopper generation or newer, PyTorch and gram-newton-schulz 0.1.6.
"""

import itertools
import time
from collections.abc import Callable

import torch
from gram_newton_schulz import Muon

from examples.benchmarks.gpu_session.speed import MODELS
from examples.benchmarks.models import Leaves
from examples.benchmarks.timing import Quartiles

TURNS, CALLS = 9, 8


def random(leaves: Leaves, matrices: bool) -> list[torch.nn.Parameter]:
    """The matrices, or the other leaves, with gradients."""
    found = []
    for leaf in leaves.values():
        if (leaf.numbers is not None) == matrices:
            p = torch.nn.Parameter(0.02 * torch.randn(leaf.shape, device="cuda"))
            p.grad = 0.02 * torch.randn_like(p)
            found.append(p)
    return found


def milliseconds_of(step: Callable[[], object]) -> Quartiles:
    def turn() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / CALLS

    turn()  # Compiles.
    turn()
    return Quartiles.of(turn() for _ in range(TURNS))


def main() -> None:
    names = ("GPT-2 124M", "4 blocks of a 1.1B model")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; quartiles, ms")
    forms = ("gram_newton_schulz", "standard_newton_schulz")
    for name, kernels, form in itertools.product(names, (True, False), forms):
        torch._dynamo.reset()
        leaves = MODELS[name]()
        others = random(leaves, matrices=False)
        muon = Muon(
            random(leaves, matrices=True),
            ns_algorithm=form,
            ns_use_kernels=kernels,
            scalar_optimizer=torch.optim.AdamW(others, fused=True) if others else None,
        )
        low, median, high, _ = milliseconds_of(muon.step)
        way = f"{form}, {'its' if kernels else 'no'} kernels"
        print(f"{name}: {way}: {low:.2f} {median:.2f} {high:.2f}", flush=True)


if __name__ == "__main__":
    main()
