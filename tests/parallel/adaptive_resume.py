"""A run with growing batches, as a script: FOLDER NAME [EPOCH], interrupted in EPOCH if given.

Writes the weights of rank 0 to FOLDER/NAME.npz. See test_adaptive_resume.py.
"""

import sys
from pathlib import Path

import numpy as np

import tfscale
from tests.parallel import cases_adaptive
from tests.parallel.cases_equality import float64
from tfscale.callbacks import BackupAndRestore


def main() -> None:
    """Train, interrupted or not."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    tfscale.init()
    extra = [BackupAndRestore(str(folder / "backup"))]
    if len(sys.argv) > 3:
        extra.append(cases_adaptive.InterruptIn(int(sys.argv[3])))
    with float64():
        model, _ = cases_adaptive.fit(
            cases_adaptive.adam,
            folder / f"{name.split('-')[0]}.jsonl",
            extra=extra if name != "whole" else (),
            interval=None,
            decay_epochs=(7,),
        )
        if tfscale.rank() == 0:
            np.savez(folder / f"{name}.npz", *model.get_weights())
    tfscale.barrier()
    tfscale.shutdown()


if __name__ == "__main__":
    main()
