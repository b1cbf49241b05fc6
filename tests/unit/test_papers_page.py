"""docs/papers.md: every artefact exists, and its figures are those of the committed files."""

import functools
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import theta_and_accuracy

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/papers.md"
RESULTS = ROOT / "recipes/results"
VERDICTS = (
    *("confirmed", "contradicted", "no difference", "undecided", "not tested", "simulated"),
    *("agrees, one", "disagrees, one", "disagrees, two rounds"),
)


@functools.cache
def content(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def runs(study: str) -> list[dict]:
    """Return the runs of a study, each with its seed."""
    found = content(RESULTS / f"{study}.json")["runs"]
    for run in found:
        run["seed"] = int(re.search(r"--seed=(\d+)", run["command"])[1])
    return found


def last_epochs(study: str) -> dict[str, dict[int, dict]]:
    """Return the last epoch of each run by configuration and seed."""
    found: dict[str, dict[int, dict]] = {}
    for run in runs(study):
        found.setdefault(run["configuration"], {})[run["seed"]] = run["epochs"][-1]
    return found


def metric_of(study: str) -> str:
    return content(RESULTS / f"{study}.json")["metric"]


def with_error(values: Sequence[float], digits: int = 2) -> str:
    """Return `mean (standard error)`."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.{digits}f} ({error:.{digits}f})".replace("-0.00", "0.00")


def lost(study: str, base: str, other: str) -> str:
    """Return the losses of `other` against `base`, paired by seed, in points or dB."""
    rows, metric = last_epochs(study), metric_of(study)
    unit = 1 if metric == "val_psnr" else 100
    pairs = [
        unit * (rows[base][seed][metric] - rows[other][seed][metric])
        for seed in sorted({*rows[base]} & {*rows[other]})
    ]
    assert len(pairs) > 2  # with fewer seeds there is no difference to tell
    return with_error(pairs)


def percents(study: str, names: Iterable[str]) -> str:
    """Return the mean accuracies of configurations, in per cent."""
    rows, metric = last_epochs(study), metric_of(study)
    means = (statistics.mean(100 * e[metric] for e in rows[name].values()) for name in names)
    return ", ".join(f"{mean:.2f}" for mean in means)


def ranks_of(values: Sequence[float]) -> list[float]:
    """Return the rank of each value among all of them; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    return statistics.correlation(ranks_of(first), ranks_of(second))


def theta_correlations(study: str, most: float = float("inf")) -> str:
    """Return, by seed, the rank correlation of final theta and final metric over configurations.

    Args:
        study: Of which runs that recorded theta count.
        most: The largest batch that counts.
    """
    found = []
    metric = metric_of(study)
    by_seed: dict[int, list[dict]] = {}
    for rows in last_epochs(study).values():
        for seed, epoch in rows.items():
            if "theta" in epoch and epoch["batch_size"] <= most:
                by_seed.setdefault(seed, []).append(epoch)
    for _, epochs in sorted(by_seed.items()):
        found.append(rank_correlation([e["theta"] for e in epochs], [e[metric] for e in epochs]))
    return ", ".join(f"{value:.1f}" for value in found)


def rises_of_theta(study: str, decay: int, configurations: Sequence[str]) -> str:
    """Return the least and the largest rise of theta from the first decay to the end."""
    rises = []
    for run in runs(study):
        if run["configuration"] in configurations:
            before, end = (run["epochs"][i]["theta"] for i in (decay - 1, -1))
            rises.append(100 * (end / before - 1))
    return f"{min(rises):.1f} to {max(rises):.1f} %"


def below_clocks(study: str, name: str, intervals: tuple[int, int]) -> str:
    """Return the points lost against what two clocks have at as many updates.

    Accuracy is interpolated over the number of updates, which is as the sum of 1 / batch.

    Args:
        study: Of which runs.
        name: The configuration.
        intervals: Of the clocks, K, between whose updates are those of the configuration.
    """
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for run in runs(study):
        updates = sum(1 / epoch["batch_size"] for epoch in run["epochs"])
        accuracy = 100 * run["epochs"][-1]["val_accuracy"]
        found.setdefault(run["configuration"], {})[run["seed"]] = updates, accuracy
    fewer, more = (found[f"clock, K = {k}"] for k in intervals)
    losses = []
    for seed, (updates, accuracy) in found[name].items():
        (low, at_low), (high, at_high) = fewer[seed], more[seed]
        assert low <= updates <= high
        line = at_low + (at_high - at_low) * (updates - low) / (high - low)
        losses.append(line - accuracy)
    return with_error(losses)


def rise_after(study: str, decay: int, name: str, base: str = "") -> str:
    """Return the rise of theta after the first decay, in %: mean and error, or less that of `base`.

    Args:
        study: Of which runs.
        decay: Epochs before the decay.
        name: Configuration.
        base: Another one, whose rise with the same seed is subtracted.
    """
    rises: dict[str, dict[int, float]] = {}
    for run in runs(study):
        before, end = (run["epochs"][i]["theta"] for i in (decay - 1, -1))
        rises.setdefault(run["configuration"], {})[run["seed"]] = 100 * (end / before - 1)
    own, other = rises[name], rises.get(base, {})
    values = [own[s] - other[s] for s in sorted(own) if s in other] if base else [*own.values()]
    assert len(values) > 2
    return with_error(values, 1)


def peaks(study: str, batches: Iterable[int]) -> str:
    """Return the mean update at which theta is largest, by batch."""
    rows = last_epochs(study)
    found = (rows[f"batch {batch}"].values() for batch in batches)
    return ", ".join(f"{statistics.mean(e['theta_peak_update'] for e in of):.1f}" for of in found)


def epochs_to_loss(study: str, names: Iterable[str], loss: float) -> str:
    """Return the mean epochs until a validation loss, by configuration."""
    means = []
    for name in names:
        reached = [
            next(e["epoch"] for e in run["epochs"] if e["val_loss"] <= loss)
            for run in runs(study)
            if run["configuration"] == name
        ]
        means.append(f"{statistics.mean(reached):.3g}")
    return ", ".join(means)


def weights(study: str, name: str) -> str:
    """Return gamma of rank 0 at the first average and at the last, means over seeds."""
    found = [run["epochs"] for run in runs(study) if run["configuration"] == name]
    return " to ".join(
        f"{statistics.mean(epochs[i]['averaging_weight'] for epochs in found):.2f}" for i in (0, -1)
    )


def distances(names: Iterable[str]) -> str:
    """Return D of the groups' models in `local_sgd_fashion`, one seed."""
    summary = content(RESULTS / "local_sgd_fashion.json")["summary"]
    last = {row["name"]: row["more"][-1] for row in summary}
    return ", ".join(f"{last[name][0]:.2f}" for name in names)


def milliseconds(run: dict) -> float:
    (samples,) = run["samples"].values()
    return 1e3 * statistics.median(samples)


def steps_of(path: Path, group: str, system: str) -> list[float]:
    """Return the median step or collective of each round, in milliseconds."""
    found = content(path)["runs"]
    rounds = {
        run["round"]: milliseconds(run)
        for run in found
        if run["group"] == group and run["system"] == system and run["suite"] == "step"
    }
    return [rounds[key] for key in sorted(rounds)]


def ratios(group: str, longer: str, shorter: str) -> str:
    """Return, by round, how many times as long a step of one system takes as of another."""
    path = ROOT / "docs/benchmarks.json"
    pairs = zip(steps_of(path, group, longer), steps_of(path, group, shorter), strict=True)
    return " and ".join(f"{long / short:.2f}" for long, short in pairs)


def whole_run(row: str) -> dict:
    """Return the run of `whole_runs` that trained so."""
    (found,) = (r for r in content(RESULTS / "whole_runs.json")["runs"] if r["row"] == row)
    return found


def last_of_batches(row: str) -> str:
    """Return the seconds of the last epoch in batches of each size."""
    last = {epoch["batch_size"]: epoch["train_seconds"] for epoch in whole_run(row)["epochs"]}
    return ", ".join(f"{last[batch]:.1f}" for batch in (128, 256, 512))


def overlap(cases: Iterable[str]) -> tuple[str, str]:
    """Return the overlap ratios R and the milliseconds of a step, by case."""
    percent, step = [], []
    for run in content(RESULTS / "overlap_ratio.json")["runs"]:
        for case, of_ranks in run["overlap_percent"].items():
            by_step = [statistics.mean(values) for values in zip(*of_ranks, strict=True)]
            percent.append((case, statistics.median(by_step)))
            step.append((case, milliseconds(run)))
    return tuple(", ".join(f"{dict(of)[case]:.0f}" for case in cases) for of in (percent, step))


@functools.cache
def expected() -> dict[str, str]:
    """Return sentences of the page with the figures that the files give."""
    growth, groups = "growth_rules_1024", "local_sgd_groups"
    edsr, resnet = "adaptive_batch_edsr_small", "adaptive_batch"
    sizes = "batch_size_scaling_fashion"
    grown = [n for n in last_epochs(growth) if n not in ("small batch", "large batch")]
    by_batch, batch_ms = overlap([f"b{n}-k7-f2" for n in (16, 32, 64, 128)])
    by_filters, _ = overlap([f"b32-k7-f2-w{n}" for n in (128, 256, 512)])
    _, by_f = overlap([f"b32-k7-f{n}" for n in (0, 1, 2, 3)])
    k_percent, k_ms = overlap([f"b32-k{n}-f2" for n in (3, 5, 7, 9)])
    best_percent, best_ms = overlap(["b32-k4-f2"])
    return {
        "theta 1024": f"{theta_correlations(growth)} (`growth_rules_1024`)",
        "theta phantom": f"{theta_correlations('theta_phantom_batches')} (`theta_phantom_batches`)",
        "theta lenet": f"{theta_correlations('theta_lenet', 512)} (`theta_lenet`, to 512)",
        "theta small": f"{theta_correlations('theta_small')} (`theta_small`)",
        "theta rules small": f"{theta_correlations('growth_rules_small')} (`growth_rules_small`)",
        "theta phantom small": f"{theta_correlations('theta_phantom_small')} "
        "(`theta_phantom_small`)",
        "4 groups in step": f"4 groups lose {lost(groups, '512 in step', '4 groups')} points more",
        "2 groups in step": f"2 groups {lost(groups, '256 in step', '2 groups')}",
        "groups": f"2 groups lose {lost(groups, '1 group', '2 groups')} points, 4 groups "
        f"{lost(groups, '1 group', '4 groups')}",
        "groups, others": f"2 groups lose {lost('local_sgd_mnist', '1 group', '2 groups')} on "
        f"MNIST, {lost('vgg_to_92', '1 group', '2 groups')} on all pictures, and with ResNet-20 "
        f"{lost('resnet20_to_92', '1 group', '2 groups')}",
        "two chunks": f"{ratios('resnet50 1gbit', 'tfscale-chunked', 'tfscale-allreduce')} times "
        "as long as eight buckets",
        "two chunks, small": "ResNet-20: "
        f"{ratios('resnet20 1gbit', 'tfscale-chunked', 'tfscale-allreduce')}",
        "EDSR": f"`AdaptiveBatchSize` loses {lost(edsr, 'small batch', 'AdaptiveBatchSize')} dB",
        "EDSR large": f"{lost(edsr, 'small batch', 'large batch, root scaling')} dB below 2",
        "EDSR fixed": f"{lost(edsr, 'small batch', 'growing batch, fixed rate')} dB below the small"
        f" batch and {lost(edsr, 'growing batch, fixed rate', 'AdaptiveBatchSize')} above",
        "batches": " ".join(
            lost("theta_phantom_batches", "batch 64", f"batch {n}") + ","
            for n in (128, 256, 512, 1024)
        ).rstrip(","),
        "ResNet-8": f"ResNet-8 loses {lost(resnet, 'small batch', 'AdaptiveBatchSize')}",
        "ResNet-8 fixed": f"{lost(resnet, 'small batch', 'growing batch, fixed rate')} below 64, "
        f"{lost(resnet, 'growing batch, fixed rate', 'AdaptiveBatchSize')} above",
        "ResNet-8 large": "ResNet-8 with 512 "
        + lost(resnet, "small batch", "large batch, linear scaling"),
        "VGG": f"small VGG {lost(groups, '1 group', 'AdaptiveBatchSize')} and "
        f"{lost('vgg_to_92', '1 group', 'AdaptiveBatchSize')}",
        "ResNet-20": f"ResNet-20 {lost('resnet20_to_92', '1 group', 'AdaptiveBatchSize')}",
        "1024": f"1024 throughout loses {lost(growth, 'theta, 10 % twice', 'large batch')} points",
        "clock": f"the peak loses {lost(growth, 'every 3 epochs', 'theta, peak')} against K = 3",
        "clock, small": "K = 5 gains "
        + lost("growth_rules_small", "every 5 epochs", "theta, 10 % twice"),
        "clock, VGG": f"loses {below_clocks('theta_or_clock', 'theta', (2, 6))} points against the "
        "line between K = 2 and 6, and a `BatchSizeSchedule` of its ladder "
        + lost("theta_or_clock", "theta", "schedule, K = 4"),
        "rise": f"{rises_of_theta(growth, 12, grown)} where the batch grows",
        "rise, fixed": rises_of_theta(
            "theta_lenet", 12, [f"batch {n}" for n in (64, 128, 256, 512)]
        )
        + " with fixed batches",
        "first decay, theta": "lets theta rise by "
        + rise_after("first_decay_lenet", 8, "to beta mu", "to beta mu_0")
        + " % more than one to beta mu_0, which lets it rise by "
        + rise_after("first_decay_lenet", 8, "to beta mu_0"),
        "no decay, theta": "and none by "
        + rise_after("first_decay_lenet", 8, "to beta mu_0", "no decay")
        + " less",
        "first decay": f"loses {lost('first_decay_lenet', 'to beta mu_0', 'to beta mu')} points",
        "peaks": f"at updates {peaks('theta_lenet', (64, 128, 256, 512, 1024, 2048))}",
        "peaks, ResNet": f"at updates {peaks('theta_fashion', (128, 256, 2048))}",
        "theta fashion": f"{theta_correlations('theta_fashion')} (`theta_fashion`)",
        "peaks, EDSR": f"at updates {peaks('theta_phantom_batches', (64, 128, 256, 512, 1024))}",
        "R by batch": f"R is {by_batch} %",
        "ms by batch": f"{batch_ms} ms",
        "R by filters": f"R is {by_filters} %",
        "f": f"{by_f} ms with f = 0, 1, 2, 3",
        "k": f"R is {k_percent} % and a step {k_ms} ms",
        "best k": f"{best_percent} % and {best_ms} ms",
        "VGG-A chunked": ratios("vgg_a 1gbit", "tfscale-allreduce", "tfscale-chunked"),
        "sharded": f"{ratios('vgg_like 1gbit', 'tfscale-allreduce', 'tfscale-sharded')} times "
        f"(VGG-like), {ratios('vgg_a 1gbit', 'tfscale-allreduce', 'tfscale-sharded')} (VGG-A), "
        f"{ratios('resnet50 1gbit', 'tfscale-allreduce', 'tfscale-sharded')} (ResNet-50), "
        f"{ratios('resnet20 1gbit', 'tfscale-allreduce', 'tfscale-sharded')} (ResNet-20)",
        "Horovod": f"{ratios('resnet50 1gbit', 'horovod', 'tfscale-allreduce')} times as long "
        f"(ResNet-50), {ratios('vgg_a 1gbit', 'horovod', 'tfscale-allreduce')} (VGG-A), "
        f"{ratios('resnet20 1gbit', 'horovod', 'tfscale-allreduce')} (ResNet-20)",
        "equal": "on 2 and 4 ranks and, sharded, on 4: "
        + ", ".join(
            lost("strong_scaling_small", "1 process", name)
            for name in ("2 ranks", "4 ranks", "4 ranks, sharded")
        ),
        "[F] epochs": "epochs to a validation loss of 0.8: "
        + epochs_to_loss(sizes, [f"{n}, 1 process" for n in (16, 64, 256)], 0.8),
        "[F] two ranks": "on two ranks "
        + epochs_to_loss(sizes, [f"{n}, 2 ranks" for n in (16, 64, 256)], 0.8),
        "[F] accuracy": ", ".join(
            lost(sizes, f"{n}, 1 process", f"{n}, 2 ranks") for n in (16, 64, 256, 512)
        ),
        "[F] shares": "lose "
        + lost("global_shuffling", "gradients, global", "gradients, shards")
        + " points, sorted ones "
        + lost("global_shuffling", "gradients, global", "gradients, sorted shards"),
        "[F] averages": lost("global_shuffling", "averaging, global", "averaging, sorted shards")
        + " points",
        "[S] ranks": percents(
            "parameter_averaging",
            ("averaged each epoch", "4 ranks, each epoch", "8 ranks, each epoch"),
        )
        + " % on 2, 4, 8 ranks",
        "[S] end": percents(
            "parameter_averaging",
            ("averaged at the end", "averaged every 4 epochs", "averaged each epoch"),
        )
        + " % at the end, every 4 epochs, every epoch",
        "[F] LeNet-5": "0.5 with 16 and 64: "
        + epochs_to_loss("batch_sizes_mnist", ["LeNet-5, 16", "LeNet-5, 64"], 0.5)
        + " (LeNet-5)",
        "[F] TorchNet": "(LeNet-5), "
        + epochs_to_loss("batch_sizes_mnist", ["TorchNet, 16", "TorchNet, 64"], 0.5)
        + " (TorchNet)",
        "[F] fixed shares": "two ranks with 16 take "
        + epochs_to_loss(
            "batch_sizes_mnist", [f"{n}, 16, 2 ranks" for n in ("LeNet-5", "TorchNet")], 0.5
        )
        + " epochs",
        "[S] eight, end": "at the end only loses "
        + lost("parameter_averaging_eight", "each epoch", "at the end")
        + " points against each epoch, every 4 epochs "
        + lost("parameter_averaging_eight", "each epoch", "every 4 epochs"),
        "[S] eight": "8 ranks lose "
        + lost("parameter_averaging_eight", "1 process", "each epoch")
        + " points against one process",
        "[S] eight, weights": "8 ranks: lambda 1 loses "
        + lost("parameter_averaging_eight", "each epoch", "each epoch, lambda 1"),
        "EDSR groups": f"2 groups lose {lost('local_sgd_edsr_small', '1 group', '2 groups')} dB, "
        f"4 groups {lost('local_sgd_edsr_small', '1 group', '4 groups')}; 4 groups lose "
        + lost("local_sgd_edsr_small", "64 in step", "4 groups"),
        "variants": percents("local_sgd_variants", ["every 8 steps"])
        + " %; post-local {}, AdaComm {}, a growing interval {}, QSR {}, a distance guard {}, "
        "SASGD {}".format(
            *(
                percents("local_sgd_variants", [name])
                for name in (
                    *("post-local", "AdaComm", "growing interval", "QSR", "distance guard"),
                    "SASGD",
                )
            )
        ),
        "within": "sharded inside loses "
        + lost("local_sgd_within", "allreduce inside (baseline)", "sharded inside (method)"),
        "[S] gamma": f"{weights('parameter_averaging_fashion', '2 ranks, lambda 1')} with lambda 1",
        "[S] gamma 10": f"{weights('parameter_averaging_fashion', '2 ranks, lambda 10')} with 10",
        "[S] weights": "lambda 1 loses "
        + lost("parameter_averaging_fashion", "2 ranks", "2 ranks, lambda 1")
        + " points, lambda 10 "
        + lost("parameter_averaging_fashion", "2 ranks", "2 ranks, lambda 10"),
        "[S] batch": lost("parameter_averaging_fashion", "2 ranks", "2 ranks, B = 128"),
        "D, linear": f"D is {distances(('2 groups', '4 groups', '8 groups'))}",
        "D, fixed": "D is "
        + distances(("2 groups, fixed rate", "4 groups, fixed rate", "8 groups, fixed rate")),
        "whole": "{:.2f} minutes instead of {:.2f} with 128 throughout".format(
            *(
                whole_run(row)["n_train_s"] / 60
                for row in ("auto, batch doubled every 2 epochs", "auto")
            )
        ),
        "whole, epochs": "in batches of 128, 256, 512 takes "
        + last_of_batches("auto, batch doubled every 2 epochs"),
        "interval": percents(
            "local_sgd_fashion", ("4 groups, I = 2", "4 groups", "4 groups, I = 16")
        )
        + " % with I = 2, 8, 16",
    }


def text() -> str:
    """Return the page without line breaks."""
    return " ".join(PAGE.read_text(encoding="utf-8").split())


def rows() -> list[list[str]]:
    """Return the cells of the tables of claims."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    return [[c.strip() for c in row] for row in cells if len(row) == 5 and "---" not in row[0]]


def test_rank_correlation():
    assert ranks_of([3, 1, 3]) == [1.5, 0, 1.5]
    assert rank_correlation([1, 2, 3, 4], [9, 8, 7, 0]) == -1
    assert rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)


def test_the_table_of_theta_and_accuracy_is_that_of_the_files():
    table = (RESULTS / "theta_and_accuracy.md").read_text(encoding="utf-8")
    for study, of_seeds in content(RESULTS / "theta_and_accuracy.json").items():
        found = theta_and_accuracy.correlations(
            theta_and_accuracy.points(content(RESULTS / f"{study}.json"))
        )
        assert {str(seed): value for seed, value in found.items()} == pytest.approx(of_seeds)
        assert f"[{study}]({study}.md)" in table
    assert [theta_and_accuracy.verdict(values) for values in ([-1, -0.1], [0.2, 1], [-1, 1])] == [
        "confirms", "contradicts", "open"
    ]  # fmt: skip


@pytest.mark.parametrize("name", expected())
def test_figures_are_those_of_the_files(name):
    assert expected()[name] in text()


def test_every_artefact_exists():
    page = PAGE.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page)
    names = re.findall(r"`((?:tests|tools|docs|recipes)/[\w./]+)`", page)
    missing = [link for link in links if not (PAGE.parent / link).exists()]
    assert len(links) > 30
    assert not missing + [name for name in names if not (ROOT / name).exists()]


def test_rows_have_a_verdict_and_an_artefact_or_a_reason():
    found = [row for row in rows() if row[0] != "where"]
    assert len(found) >= 40
    for where, claim, ours, verdict, artefact in found:
        assert where and claim and verdict.replace("*", "").startswith(VERDICTS), where
        is_tested = not verdict.replace("*", "").startswith("not tested")
        assert not is_tested or (ours and re.search(r"\]\(|`(tests|tools)/", artefact)), where
        assert is_tested or ":" in verdict, where  # and why
        # One seed contradicts nothing, nor does one round.
        assert not ("contradicted" in verdict and re.search(r"one (seed|round)", ours)), where
