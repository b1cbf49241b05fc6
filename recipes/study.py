"""Run a table of configurations, and write what came out as a table and a picture.

    python recipes/study.py global_shuffling
    python recipes/study.py global_shuffling --only gradients --seeds 1
    python recipes/study.py path/of/my_study.py --draw        # what is there, nothing is run
    python recipes/study.py global_shuffling --keep           # what the results lack

Runs go to `runs/studies/<study>/<configuration>-seed<seed>/`. What is finished is not run again;
an interrupted run resumes after its last epoch; a run with other flags is repeated. A
run that fails is reported, and the next one begins. Ctrl-C and SIGTERM end the run as well; a
second study.py in the same folder is refused, and so are files that differ from the commit, unless
`--dirty` is given. Results go to `recipes/results/<study>.md`, `.png`
and `.json`; the file `.json` holds every epoch of every run, and every record of theta where the
flags have `theta_every`.

With `--keep` the rows of the results that are there stay, of runs with the same flags: neither need
the folders of all runs be on one machine, nor must all be run again for one more configuration.
The note stays as well, unless there is another one.

`study.json` in the folder of a run notes its flags, commit, machine and load; of a run that was
interrupted the last part's, and under `parts` those of all.

A study is a Python file, `recipes/studies/<study>.py` or any other path, that defines:

    TITLE = "Global shuffling against fixed shards"      # heading
    SHOWS = "Text above the table: what for, after which figure of which paper."
    RECIPE = "lenet"                                     # recipes/lenet.py
    RANKS = 2                                            # 1: without a launcher
    FLAGS = {"data": "fashion_mnist", "epochs": 20}      # of all runs, as the recipe has them
    CONFIGURATIONS = {                                   # the first: what others are compared with
        "1 process": {"ranks": 1},                       # flags; `ranks` and `recipe` override
        "fixed shards": {"shuffle": "shards"},
    }
    SEEDS = (1, 2, 3)                                    # each is a run of its own
    METRIC = "val_accuracy"                              # a name in metrics.jsonl; last epoch
    THRESHOLD = ("val_loss", 0.5)                        # ends the time of the total speedup
    COLUMNS = {"largest batch": function}                # optional, more columns: see below
    SERIES = {"shards": {1: "1 process", 2: "fixed shards"}}  # optional, lines over X_LABEL
    X_LABEL = "Ranks"
    MAY_LOSE = (0.2, 0.5)                                # optional, points of METRIC: see below

A loss reaches a threshold from above, anything else from below. With THRESHOLD = None there is no
total speedup. A function of COLUMNS gets a list with the epochs of a run, each a dict as in
`metrics.jsonl`, and returns a number, or None; the table shows the mean over seeds and its standard
error. SERIES has the configurations of each line of the picture, by the number on its axis: the
metric and each column are drawn over it. MAY_LOSE compares each configuration with the first one,
seed by seed; METRIC is a share. It "passed" if it loses no more points than these on average, and
at the upper end of the one-sided confidence interval of 95 % (Student's t). It is "undecided" if
not, and the standard error is above half of the latter; else it "failed". All runs get `--resume`;
those on several ranks `--report` as well, which measures compute and communication.

Speedups, as [F] has them: the epoch speedup compares seconds of training per epoch, medians; the
total speedup seconds of training until the threshold, which contains what the configuration loses
in convergence. Validation is in neither. There are none if more programs than cores were running
when a run began, or a configuration has more ranks than the machine has cores. Compare times of
configurations of equal accuracy only.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

import study_picture
import study_report
import study_results
import study_runs
import study_subprocess
from command_line import flags_parser
from study_runs import Run

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "Run the configurations whose names contain this.")
flags.DEFINE_list("seeds", [], "Run these seeds only.")
flags.DEFINE_string("note", "", "A sentence to put under the table: what else to know.")
flags.DEFINE_bool("dirty", False, "Run although files differ from the commit; the table says so.")
flags.DEFINE_bool("draw", False, "Run nothing; write table and picture of what is there.")
flags.DEFINE_bool("keep", False, "Keep the rows of the results that are there.")
flags.DEFINE_string("data_dir", ".cache/data", "Passed to the recipes.")
flags.DEFINE_string("run_dir", "runs/studies", "Folder of the runs.")
flags.DEFINE_string("results_dir", str(study_runs.RECIPES / "results"), "Folder of the results.")


def main(arguments: list[str]) -> None:
    """Run what is missing, then write the results."""
    if len(arguments) != 2:
        sys.exit(f"A study must be named. Received: {arguments[1:]}. See --help.")
    study = study_runs.load(arguments[1])
    folder = Path(FLAGS.run_dir) / study.name
    every = list(study_runs.runs(study, folder))
    chosen = study_runs.choose(study, every, FLAGS.only, FLAGS.seeds)
    where = Path(FLAGS.results_dir) / study.name
    kept = study_results.read(every, where.with_suffix(".json")) if FLAGS.keep else {}
    missing = [run for run in chosen if run.folder not in kept]
    if missing and not FLAGS.draw:
        study_runs.require_commit(FLAGS.dirty)
    failed = 0 if FLAGS.draw else _finish(every, missing, folder)
    known = kept | {outcome.run.folder: outcome for outcome in study_runs.outcomes(study, folder)}
    outcomes = [known[run.folder] for run in every if run.folder in known]
    if outcomes:
        where.parent.mkdir(parents=True, exist_ok=True)
        note = FLAGS.note or (study_results.note_of(where.with_suffix(".json")) if kept else "")
        text = study_report.write(study, outcomes, where, note)
        study_picture.draw(study, outcomes, where.with_suffix(".png"))
        print(f"{text}\nResults are in {where}.md, .png and .json.")
    if failed or not outcomes:
        sys.exit(f"{failed} runs failed, {len(outcomes)} are there.")


def _finish(every: Sequence[Run], chosen: Sequence[Run], folder: Path) -> int:
    """Do what is left of some runs; return how many failed."""
    study_subprocess.end_on_signals()
    with study_subprocess.only_one(folder) as lock:
        for run in every:  # what cannot be read is told now, not after hours
            study_runs.is_finished(run)
        extra = [f"--data_dir={FLAGS.data_dir}"]
        return sum(not study_runs.finish(run, extra, lock) for run in chosen)


if __name__ == "__main__":
    app.run(main, flags_parser=flags_parser())
