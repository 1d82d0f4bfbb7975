"""Logistic regression on hand-written digits in JAX: an elastic job through swell's three signals.

    python examples/jax_digits.py                                        (alone)
    swell run --command --workers 1:3 -- python examples/jax_digits.py
    swell submit --command -- python examples/jax_digits.py

One process per worker; JAX divides every batch among them. The batch and its order do not depend on the
number of workers, so neither does the result. See docs/guides/any-command.md for the contract.
"""

import argparse
import time

import jax
import numpy as np
import signals
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch-size", type=int, default=240)
parser.add_argument("--lr", type=float, default=0.5)
parser.add_argument("--step-ms", type=float, default=0.0, help="least time of a step, to watch resizes")
args = parser.parse_args()

if signals.workers > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(signals.meet, signals.workers, signals.rank)
mesh = jax.make_mesh((signals.workers,), ("workers",), axis_types=(AxisType.Auto,))
divided, whole = NamedSharding(mesh, P("workers")), NamedSharding(mesh, P())

digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)


def loss_of(weights, x, y, mask):
    """Mean cross-entropy over the samples of the batch; padding is masked out."""
    logits = x @ weights["w"] + weights["b"]
    each = -jax.nn.log_softmax(logits)[np.arange(len(y)), y]
    return (each * mask).sum() / mask.sum()


@jax.jit
def train_step(weights, x, y, mask, asked):
    """One step of gradient descent; `asked` tells every worker whether any of them was asked to save."""
    loss, slope = jax.value_and_grad(loss_of)(weights, x, y, mask)
    return jax.tree.map(lambda w, s: w - args.lr * s, weights, slope), loss, asked.max()


def divide(*arrays):
    """This worker's part of each array, as part of an array that spans all workers."""
    for array in arrays:
        yield jax.make_array_from_process_local_data(divided, np.split(array, signals.workers)[signals.rank])


def batch(step):
    """The samples of a step, padded so that every worker gets as many."""
    chosen = np.random.default_rng(step).choice(len(labels), args.batch_size, replace=False)
    padding = -args.batch_size % signals.workers
    mask = np.pad(np.ones(args.batch_size, np.float32), (0, padding))
    return images[np.pad(chosen, (0, padding))], labels[np.pad(chosen, (0, padding))], mask


step, weights = 0, {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
if (signals.state / "model.npz").exists():
    with np.load(signals.state / "model.npz") as saved:
        step, weights = int(saved["step"]), {"w": saved["w"], "b": saved["b"]}
weights = jax.device_put(weights, whole)


def save():
    """Write the model, on rank 0."""
    if signals.rank == 0:
        there = {name: np.asarray(array.addressable_data(0)) for name, array in weights.items()}
        signals.save("model.npz", lambda path: np.savez(path.open("wb"), step=step, **there))


while step < args.steps:
    asked = np.full(signals.workers, signals.save_now(), np.int32)
    weights, loss, leaving = train_step(weights, *divide(*batch(step), asked))
    step += 1
    leaving = int(leaving)
    time.sleep(args.step_ms / 1000)
    if signals.rank == 0 and (step % 10 == 0 or step == args.steps):
        signals.progress(step, args.steps, loss=float(loss))
    if leaving or signals.save_due():
        save()
    if leaving and step < args.steps:
        signals.leave()

if signals.rank == 0:
    final = {name: np.asarray(array.addressable_data(0)) for name, array in weights.items()}
    right = (images @ final["w"] + final["b"]).argmax(1) == labels
    print(f"final accuracy {right.mean():.4f} loss {float(loss):.5f} weights {np.abs(final['w']).sum():.4f}")
