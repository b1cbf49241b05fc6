"""`tfscale tune links`: what it starts, what it trusts, what it says."""

import argparse
import dataclasses
import json
from unittest import mock

import pytest

from tests.helpers.single_job import single_job  # noqa: F401
from tfscale.launcher import cli
from tfscale.plan.costs import transfer_s
from tfscale.plan.machines import PRESETS
from tfscale.testing import pretend_rank
from tfscale.tune.links import SIZES, link_of, machine_from, spread_of, too_noisy


def options(**given):
    settings = {"output": "machine.json", "model": None, "model_file": None, "input_shape": ""}
    return argparse.Namespace(**settings | {"batch": 32, "max_spread": 0.3} | given)


def test_the_command_starts_ranks():
    with mock.patch.object(cli, "main", wraps=cli.main) as main:
        words = ["tune", "links", "-np", "3", "--model", "a:b", "--max-spread", "0.5"]
        main.side_effect = lambda argv: 0 if argv[0] == "run" else mock.DEFAULT
        assert cli.main(words) == 0
    started = main.call_args.args[0]
    assert started[:4] == ["run", "-np", "3", "--"]
    assert started[5:7] == ["-m", "tfscale.tune.links"]
    assert json.loads(started[7]) == vars(options(model="a:b", max_spread=0.5))


def test_what_cannot_be_is_told_before_ranks_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("")
    for words, text in (
        (["--input-shape", "48x48", "--model", "a:b"], "--input-shape must be"),
        (["--batch", "0"], "--batch must be"),
        (["--max-spread", "-1"], "--max-spread must be"),
        (["--output", "a_file/machine.json"], "--output must name a file"),
        (["--output", "."], "--output must name a file"),
        (["-np", "1"], "-np must be 2 or more"),
    ):
        with mock.patch.object(cli.Job, "run", side_effect=AssertionError("ranks were started")):
            assert cli.main(["tune", "links", *words]) == 2
        assert text in capsys.readouterr().err


def test_spread_is_half_of_the_middle_half_and_noise_is_not_trusted():
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3)
    assert spread_of([0.0, 0.0, 0.0]) == 0.0
    steady = dataclasses.replace(PRESETS["ethernet-1g"], spread={"latency_s": 0.1})
    noisy = dataclasses.replace(steady, spread={"latency_s": 0.1, "bytes_per_s": 0.4})
    assert too_noisy(steady, 0.3) == []
    assert too_noisy(noisy, 0.3) == ["bytes_per_s"]


def test_the_equations_are_solved():
    """Gathers of alpha = 1 ms and 1 ns per byte over 3 ranks, and sums of half a ns per byte."""

    gathers = [2e-3 + n * (2 / 3) * 1e-9 for n in SIZES]
    sums = [2 * gather + n * 0.5e-9 for n, gather in zip(SIZES, gathers, strict=True)]
    found = link_of(3, gathers, sums)
    assert found["latency_s"] == pytest.approx(1e-3)
    assert found["bytes_per_s"] == pytest.approx(1e9)
    assert found["reduce_bytes_per_s"] == pytest.approx(2e9)
    # Sums that are hidden by the messages cost nothing, not less than nothing.
    assert link_of(3, gathers, gathers)["reduce_bytes_per_s"] == pytest.approx(1e13)


def test_a_machine_of_two_hosts_is_found_again(monkeypatch):
    """Messages between hosts and inside of them have latencies of their own."""
    truth = dataclasses.replace(
        PRESETS["ethernet-1g"],
        latency_s=1e-3,
        ranks_per_host=4,
        host_latency_s=1e-4,
        host_bytes_per_s=1e9,
    )

    def rounds(n_ranks):
        gathers = [transfer_s(n, n_ranks, truth) for n in SIZES]
        sums = [2 * s + n / truth.reduce_bytes_per_s for n, s in zip(SIZES, gathers, strict=True)]
        return [link_of(n_ranks, gathers, sums)] * 3

    compute = [{"flops_per_s": 1e9, "half_batch": 1.0, "memory_bytes_per_s": 1e9}] * 3
    with pretend_rank(size=8, local_size=4):
        found = machine_from(rounds(8), rounds(4), compute)
    assert found.ranks_per_host == 4
    for name in ("latency_s", "host_latency_s", "bytes_per_s", "host_bytes_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name)), name
