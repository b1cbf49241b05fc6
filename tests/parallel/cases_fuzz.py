"""Random plans of random collectives against numpy: 10,000 of them per number of ranks.

`FUZZ_SEED=n` draws others; a failure shows the seed, the plan and the call.
"""

import os
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes

SEED = int(os.environ.get("FUZZ_SEED", "1"))
N_PLANS, N_CALLS, N_RUNS = 50, 10, 20
SIZES = (0, 1, 1, 2, 3, 5, 7, 13, 64, 1000)
REDUCED = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
MOVED = (*REDUCED, "bool", "uint8", "complex64")
OPS = {
    tfscale.Sum: np.add.reduce,
    tfscale.Min: np.minimum.reduce,
    tfscale.Max: np.maximum.reduce,
    tfscale.Product: np.multiply.reduce,
}


@dataclass
class Planned:
    kind: str
    dtype: str
    dims: int
    members: list[int]
    op: str
    root: int

    def call(self, tensor, splits, sets):
        collective = getattr(tfscale, self.kind)
        options = {"process_set": sets[tuple(self.members)]}
        if self.kind in ("allreduce", "reducescatter"):
            return collective(tensor, op=self.op, **options)
        if self.kind == "broadcast":
            return collective(tensor, self.root, **options)
        if self.kind == "alltoall":
            return collective(tensor, splits, **options)[0]
        return collective(tensor, **options)

    def draw(self, random):
        """Return the tensors of all members, and their splits."""
        shape = [int(random.choice(SIZES)) for _ in range(self.dims)]
        while np.prod(shape) > 20_000:
            shape[int(np.argmax(shape))] = 1
        tensors, splits = [], []
        for _ in self.members:
            if self.kind in ("allgather", "alltoall"):
                shape = [int(random.choice(SIZES[:8])), *shape[1:]]
            cuts = np.sort(random.integers(0, shape[0] + 1, len(self.members) - 1))
            splits.append(np.diff([0, *cuts, shape[0]]))
            # Small whole numbers: exact in every dtype, also their sum and product.
            values = random.integers(1, 4, shape)
            tensors.append(values.astype(tf.as_dtype(self.dtype).as_numpy_dtype))
        return tensors, splits

    def expected(self, tensors, splits, place):
        if self.kind == "broadcast":
            return tensors[self.members.index(self.root)]
        if self.kind == "allgather":
            return np.concatenate(tensors)
        if self.kind == "alltoall":
            parts = [np.split(t, np.cumsum(s)) for t, s in zip(tensors, splits, strict=True)]
            return np.concatenate([part[place] for part in parts])
        wide = OPS[self.op](np.stack([np.asarray(t, np.float64) for t in tensors]))
        total = wide.astype(tensors[0].dtype)
        if self.kind == "allreduce":
            return total
        return np.array_split(total, len(self.members))[place]


def draw_plan(random, groups):
    kinds = ["allreduce", "allgather", "alltoall", "reducescatter", "broadcast"]
    plan = []
    for _ in range(N_CALLS):
        kind = str(random.choice(kinds))
        dtypes = REDUCED if kind in ("allreduce", "reducescatter") else MOVED
        members = list(groups[int(random.integers(len(groups)))])
        dims = int(random.integers(1, 4))
        op = list(OPS)[int(random.integers(len(OPS)))]
        root = members[int(random.integers(len(members)))]
        plan.append(Planned(kind, str(random.choice(dtypes)), dims, members, op, root))
    return plan


def traced(plan, sets):
    """Return a function of this rank's tensors and splits, one pair for each of its calls."""
    own = [call for call in plan if tfscale.rank() in call.members]
    signature = (
        [tf.TensorSpec([None] * call.dims, call.dtype) for call in own],
        [tf.TensorSpec([None], tf.int64) for _ in own],
    )

    def body(tensors, splits):
        return [call.call(t, s, sets) for call, t, s in zip(own, tensors, splits, strict=True)]

    return tf.function(body, input_signature=signature)


def run(function, plan, random):
    """Call it with new tensors; return the number of results that were compared."""
    rank, tensors, splits, wanted = tfscale.rank(), [], [], []
    for call in plan:
        every, cuts = call.draw(random)
        if rank in call.members:
            place = call.members.index(rank)
            tensors.append(tf.constant(every[place]))
            splits.append(tf.constant(cuts[place], tf.int64))
            wanted.append((call, call.expected(every, cuts, place)))
    results = function(tensors, splits) if wanted else []
    for (call, value), result in zip(wanted, results, strict=True):
        np.testing.assert_array_equal(result.numpy(), value, str(call), strict=True)
    return len(results)


@sizes(2, 3, timeout_s=300)
def case_random_plans():
    random = np.random.default_rng([SEED, tfscale.size()])
    last = tfscale.size() - 1
    groups = sorted({tuple(range(last + 1)), (0, last), (last,)}) + [tuple(range(last + 1))] * 4
    sets = {members: tfscale.add_process_set(members) for members in {*groups}}
    plans, n_results = [], 0
    for number in range(N_PLANS):
        plan = draw_plan(random, groups)
        plans.append((plan, traced(plan, sets)))
        for _ in range(N_RUNS):
            # Plans of before once more, in any order.
            chosen = int(random.integers(max(0, number - 5), number + 1))
            try:
                n_results += run(plans[chosen][1], plans[chosen][0], random)
            except Exception as error:
                where = f"FUZZ_SEED={SEED}, size {tfscale.size()}, plan {chosen} of {number + 1}"
                raise AssertionError(f"{where}: {plans[chosen][0]}") from error
    every = tfscale.allgather_object(n_results)
    assert every[last] == N_PLANS * N_CALLS * N_RUNS, every  # it belongs to all groups


@sizes(2, 3)
def case_rows_of_no_width():
    """Their number arrives, eagerly and traced."""
    size, rank = tfscale.size(), tfscale.rank()
    for rows, width in ([r + 2 for r in range(size)], (0,)), (list(range(size)), (3, 0, 2)):
        tensor = tf.zeros([rows[rank], *width])
        for gather in (tfscale.allgather, tf.function(tfscale.allgather)):
            assert gather(tensor).shape == (sum(rows), *width)
        every = [[n // 2, *[0] * (size - 2), n - n // 2] for n in rows]
        received, counts = tfscale.alltoall(tensor, every[rank])
        assert received.shape == (int(sum(counts)), *width)
        assert list(counts.numpy()) == [splits[rank] for splits in every]
