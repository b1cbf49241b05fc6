"""`tfscale plan --links`: advice whose claims are those of the studies, and exact without one."""

import re
from pathlib import Path

import pytest

from tfscale.config import ConfigError
from tfscale.launcher import cli
from tfscale.plan.costs import Scenario
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.machines import PRESETS
from tfscale.plan.published import dense, published
from tfscale.plan.slow_links import (
    EVIDENCE,
    PICTURES,
    TEXT,
    advise,
    kind_of,
    options_of,
    read_rate,
    read_time,
    with_links,
)

RESULTS = Path(__file__).parents[2] / "recipes" / "results"
MACHINE = with_links(PRESETS["ethernet-1g"], read_rate("10mbit"), read_time("100ms"))


def test_rates_and_times():
    assert [read_rate(t) for t in ("10mbit", "1gbit", "0.5Mbit", "500kbit")] == [
        1.25e6, 1.25e8, 62500, 62500,
    ]  # fmt: skip
    assert [read_time(t) for t in ("100ms", "1s", "50us")] == pytest.approx([0.1, 1.0, 5e-5])
    for action, text in ((read_rate, "10MB"), (read_rate, "0mbit"), (read_time, "100")):
        with pytest.raises(ConfigError, match=f"must be a number above 0.*{text}"):
            action(text)
    assert MACHINE.latency_s == 0.05 and MACHINE.bytes_per_s == 1.25e6


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda e: f"{e.study}-{e.row}")
def test_claims_are_those_of_the_studies(evidence):
    """Row: name, seeds, mean, standard error, bound."""
    text = (RESULTS / evidence.study).read_text()
    text = text.partition("Points of val_accuracy lost")[2]
    (found,) = re.findall(rf"^\| {re.escape(evidence.row)} \| \d+ \| (.*)$", text, re.M)
    lost, _, bound = (float(cell) for cell in found.split(" | ")[:3])
    assert (evidence.lost, evidence.bound) == (lost, bound)


def advised(model, may_lose, n_ranks=4, machine=MACHINE):
    table = published(model) if isinstance(model, str) else model
    text = advise(Scenario(table, machine, n_ranks, 128, 1), may_lose)
    (line,) = (line for line in text.splitlines() if "| advised" in line)
    return line.split("|")[1].strip(), text


def test_advice_follows_what_may_be_lost():
    for may_lose, n_ranks, name in (
        (0.0, 4, "exact"),  # int8 lost 0.04 points
        (3.7, 2, "local SGD, interval 30, sparse"),
        (0.2, 4, "int8 gradients"),
        (0.2, 2, "int8 gradients"),
        (3.5, 4, "int4 gradients"),  # 4 groups lost 2.35, an upper bound of 3.75
        (1.7, 2, "int4 gradients"),  # 2 groups lost 1.21, but would be slower
    ):
        found, text = advised("resnet50", may_lose, n_ranks)
        assert found == name, text
        evidence = [e for e in EVIDENCE if e.study in text.rpartition("Advice:")[2]]
        assert bool(evidence) == (name != "exact"), text
    assert "no study has measured what it loses" in text  # of what is faster still


def test_models_without_a_study_stay_exact():
    own = LayerTable("own", (dense("first", 4096, 4096), dense("second", 4096, 10)))
    for table in (own, "edsr"):
        name, text = advised(table, 10.0)
        assert name == "exact" and "No study covers this kind of model" in text
    assert kind_of(published("vgg-a")) == PICTURES
    attention = Layer("block/attention", (("q", 64),))
    assert kind_of(LayerTable("own", (attention,))) == TEXT


def test_sparse_averages_send_less_than_all_others():
    options = {o.name: o for o in options_of(Scenario(published("resnet50"), MACHINE, 4, 128, 1))}
    sparse = options["local SGD, interval 30, sparse"]
    # 0.72 MB to three others, in 30 steps.
    assert sparse.sent_bytes == pytest.approx(3 * 0.72e6 / 30, rel=0.02)
    assert sparse.step_s == min(o.step_s for o in options.values())
    assert options["exact"].step_s > 100  # two minutes
    # Half of the steps exact, the others with an average of all in eight, which nothing hides.
    half = options["local SGD in the second half"]
    average_bytes = 2 * 3 / 4 * 4 * published("resnet50").n_values
    apart_s = 5.5 + average_bytes / 8 / 1.25e6
    assert half.step_s == pytest.approx((options["exact"].step_s + apart_s) / 2, rel=0.01)
    assert half.sent_bytes == pytest.approx(
        (options["exact"].sent_bytes + average_bytes / 8) / 2, rel=0.01
    )
    # At 1.25 MB/s the bytes take as long as the step, which waits for nothing else.
    for name in ("exact", "int8 gradients"):
        assert options[name].sent_bytes / 1.25e6 == pytest.approx(options[name].step_s, rel=0.1)


def test_command(capsys):
    words = "plan --model resnet50 --links 10mbit --rtt 100ms --may-lose 0.2 --global-batch 128"
    assert cli.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "Links: 10 Mbit/s, round trip 100 ms." in out and "compression_fashion.md" in out
    assert out.count("# resnet50 on 4 ranks") == 1
    assert cli.main(["plan", "--model", "resnet50", "--may-lose", "1"]) == 2
    assert "--rtt and --may-lose are for --links" in capsys.readouterr().err
