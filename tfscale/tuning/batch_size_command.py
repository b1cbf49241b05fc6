"""`tfscale tune batch-size`: runs a recipe for a few epochs, and measures its gradients."""

from __future__ import annotations

import argparse
import sys

SIZES = "16,32,64,128,256,512,1024"


def add_batch_size(tuners: argparse._SubParsersAction) -> None:
    """Add the parser; its handler imports TensorFlow."""
    parser = tuners.add_parser(
        "batch-size",
        help="look for the batch size to start with and to end with",
        usage="tfscale tune batch-size [options] recipe.py ...",
        description="Runs a training script in one process, and measures at some epochs how the "
        "gradient depends on the batch size. The script must train with model.fit on "
        "tfscale.data.GlobalBatches or on arrays. It is stopped after the last measurement.",
    )
    parser.add_argument("--sizes", default=SIZES, metavar="B,...", help=f"default: {SIZES}")
    parser.add_argument("--samples", type=int, default=4096, metavar="N", help="per size and stage")
    parser.add_argument("--stages", default="0,1,3", metavar="E,...", help="epochs trained before")
    parser.add_argument("--output", default="batch_size", metavar="DIR", help="for JSON and PNG")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(handler=_tune)


def _tune(options: argparse.Namespace) -> int:
    from tfscale.tuning.batch_size_advice import advise, as_text, write
    from tfscale.tuning.batch_size_probe import integers, probe_script

    stages = probe_script(
        [options.script, *options.arguments],
        batch_sizes=integers("--sizes", options.sizes),
        at_epochs=integers("--stages", options.stages),
        samples=options.samples,
    )
    advice = advise(stages)
    write(stages, advice, options.output)
    sys.stdout.write(as_text(stages, advice))
    sys.stdout.write(f"Results are in {options.output}.\n")
    return 0
