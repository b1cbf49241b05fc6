"""Restarts of a job: after which ends, and on which hosts."""

import pytest

from tfscale.launcher import restarting
from tfscale.launcher.attempt import Outcome
from tfscale.launcher.mpi_command import LaunchSpec, Mpi
from tfscale.launcher.reports import Report
from tfscale.launcher.restarting import Job, RestartRule, lost_place, may_restart, next_places

MPICH = Mpi("mpich", "5.0.2", "/mpi/mpiexec")
HOSTS = (("a", 2), ("b", 2), ("c", 2))


def failed(rank=1, status=None, number=9, has_joined=True, is_told=False):
    report = Report(rank, "x", status, number, True, has_joined, is_told=is_told)
    return Outcome(report.exit_code, report)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (failed(), True),
        (failed(has_joined=False), True),
        (failed(status=1, number=None), True),
        (failed(status=1, number=None, has_joined=False), False),
        (failed(status=1, number=None, has_joined=False, is_told=True), True),
        (Outcome(255), True),
        (Outcome(0, is_orderly=True), False),
        (Outcome(5, is_orderly=True), False),
        (Outcome(75), False),
        (Outcome(143, was_stopped=True), False),
    ],
)
def test_what_is_started_again(outcome, expected):
    assert may_restart(outcome) == expected


def test_pauses_grow():
    assert [restarting.pause_s(n) for n in (0, 1, 2, 6, 5000)] == [1, 2, 4, 60, 60]


@pytest.mark.parametrize(
    ("places", "lost", "rule", "size", "expected"),
    [
        (HOSTS, ("b", 2), (3,), 4, HOSTS),
        (HOSTS[::2], None, (3,), 4, HOSTS[::2]),
        (HOSTS[:1], None, (3,), 4, None),
        # Fewer ranks are allowed: places may be given up.
        (HOSTS, ("b", 2), (3, 2), 6, HOSTS[::2]),
        ((("a", 1), ("b", 1)), ("b", 1), (3, 2), 2, (("a", 1), ("b", 1))),
        ((("a", 1),), None, (3, 2), 2, None),
        ((("", 4),), ("", 1), (3, 2), 4, (("", 3),)),
        ((("", 2),), ("", 1), (3, 2), 4, (("", 2),)),
    ],
)
def test_next_places(places, lost, rule, size, expected):
    assert next_places(places, lost, RestartRule(*rule), size) == expected


def test_lost_place():
    assert lost_place(failed(3), HOSTS) == ("b", 2)
    assert lost_place(failed(3), ()) == ("", 1)
    assert lost_place(failed(3, 1, None, is_told=True), HOSTS) is None


class Launcher:
    """Stands in for MPI: attempts that end as told, and hosts that do not answer."""

    def __init__(self, monkeypatch, outcomes, dead=()):
        self.commands, self.outcomes, self.dead = [], list(outcomes), dead
        monkeypatch.setattr(restarting, "run_attempt", self.run_attempt)
        monkeypatch.setattr(restarting.Job, "_answers", lambda job, host: host not in self.dead)
        monkeypatch.setattr(restarting, "pause_s", lambda n: 0.0)

    def run_attempt(self, command, environ, *_, **__):
        ours = " ".join(f"{n}={v}" for n, v in environ.items() if n.startswith("TFSCALE"))
        self.commands.append(f"{ours} {' '.join(command)}")
        return self.outcomes.pop(0)


def run(rule, size=4):
    return Job(LaunchSpec(("python", "t.py"), size, n_cores=8), MPICH, rule, {}).run()


def test_ranks_are_told_of_a_signal_that_stands_for_sigterm():
    for kind, is_slurm in (("mpich", False), ("openmpi", False), ("mpich", True)):
        spec = LaunchSpec(("python", "t.py"), 2, is_slurm=is_slurm)
        given = Job(spec, Mpi(kind, "5.0", "/mpi/mpiexec"), RestartRule(0), {}).variables()
        assert (given.get("TFSCALE_STOP_SIGNAL") == "SIGUSR1") == (kind == "openmpi" or is_slurm)


def test_restarts_are_counted_and_the_last_failure_counts(monkeypatch, capsys):
    launcher = Launcher(monkeypatch, [failed(), failed(), failed(0, 7, None)])
    assert run(RestartRule(2)) == 7
    for number, command in enumerate(launcher.commands):
        assert command.startswith(f"TFSCALE_RESTART={number} ") and " -n 4 " in command
    assert len(launcher.commands) == 3
    err = capsys.readouterr().err
    assert "tfscale: restart 2 of 2, with 4 ranks.\n" in err
    assert err.count("was killed by signal 9") == 2
    assert err.endswith("rank 0 on host x failed with exit status 7.\n")


def test_a_restart_may_succeed_and_preemption_is_left_to_the_scheduler(monkeypatch):
    for outcome in (Outcome(0, is_orderly=True), Outcome(75, is_orderly=True)):
        launcher = Launcher(monkeypatch, [failed(), outcome])
        assert run(RestartRule(3)) == outcome.exit_code
        assert len(launcher.commands) == 2


def test_a_spare_host_takes_over(monkeypatch):
    launcher = Launcher(monkeypatch, [Outcome(255), Outcome(0)], dead=("b",))
    assert run(RestartRule(3, places=HOSTS)) == 0
    hosts = [command.partition("-hosts ")[2].split()[0] for command in launcher.commands]
    assert hosts == ["a:2,b:2", "a:2,c:2"]


def test_fewer_ranks_until_too_few_hosts_are_left(monkeypatch, capsys):
    launcher = Launcher(monkeypatch, [failed(5), failed(0), failed(0)])
    assert run(RestartRule(2, 2, HOSTS), 6) == 137
    hosts = [command.partition("-hosts ")[2].split()[0] for command in launcher.commands]
    assert hosts == ["a:2,b:2,c:2", "a:2,b:2", "b:2"]
    assert "NUM_THREADS" not in launcher.commands[2]  # the cores of b are not known here
    assert "restart 2 of 2, with 2 ranks" in capsys.readouterr().err
    launcher = Launcher(monkeypatch, [failed()], dead=("b", "c"))
    assert run(RestartRule(2, places=HOSTS)) == 137
    assert len(launcher.commands) == 1
    assert "too few hosts are left" in capsys.readouterr().err
