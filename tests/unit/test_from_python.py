"""Calls of `tfscale.run` that are refused before a rank is started, and what they name."""

import argparse
import functools
import inspect
import threading

import pytest

import tfscale
from tests.helpers.environment import QUIET
from tfscale.launcher import cli

lock = threading.Lock()
config = {"rates": [0.1, lock]}


def uses_nothing():
    return 1


def made(value):
    """Return a function that is pickled by value, with a closure."""

    def inner():
        return [value for _ in range(2)]

    return inner


class Trainer:
    def __init__(self):
        self.guard = lock

    def train(self):
        return self.guard


def of_main(function):
    """Return a function as a notebook's cell defines it: its module cannot be imported."""
    function.__module__ = "__main__"
    return function


CULPRITS = {
    "a closure": (
        lambda: tfscale.run(made(lock)),
        "variable value of function 'made.<locals>.inner'",
    ),
    "a global": (
        lambda: tfscale.run(of_main(lambda: [config for _ in "ab"])),
        "variable config['rates'][1] of function",
    ),
    "a default": (
        lambda: tfscale.run(of_main(lambda guard=lock: guard)),
        "variable guard of function",
    ),
    "a function in a function": (
        lambda: tfscale.run(made({"inner": made(lock)})),
        "variable value of function 'made.<locals>.inner'",
    ),
    "a method": (lambda: tfscale.run(Trainer().train), "self.guard of method 'Trainer.train'"),
    "an argument": (lambda: tfscale.run(print, (1, lock)), "args[1], of type _thread.lock"),
    "a name": (lambda: tfscale.run(print, kwargs={"sep": [lock]}), "kwargs['sep'][0], of type"),
    "a part of a call": (
        lambda: tfscale.run(functools.partial(print, lock)),
        "func.args[0], of type _thread.lock",
    ),
    "an object": (lambda: tfscale.run(print, (Trainer(),)), "args[0].guard, of type _thread.lock"),
    "a generator": (lambda: tfscale.run(print, ((i for i in "a"),)), "args[0], of type "),
}


@pytest.mark.parametrize("name", CULPRITS)
def test_what_cannot_be_pickled_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    call, text = CULPRITS[name]
    with pytest.raises(tfscale.ConfigError) as error:
        call()
    assert f"Received: {text}" in str(error.value)
    assert isinstance(error.value.__cause__, TypeError)
    assert list(tmp_path.iterdir()) == []


REFUSED = {
    "func": (dict(func=3), tfscale.ConfigError, "func must be a function"),
    "np": (dict(np=0), tfscale.ConfigError, "np must be a whole number of at least 1"),
    "hosts": (dict(hosts="a:x"), tfscale.ConfigError, "Received: a:x"),
    "exchange": (dict(distribute=True, exchange="fast"), tfscale.ConfigError, "exchange='fast'"),
    "verify": (dict(distribute=True, verify=0), tfscale.ConfigError, "verify=0"),
    "batch_norm": (dict(distribute=True, batch_norm="x"), tfscale.ConfigError, "batch_norm='x'"),
    "max_np": (dict(max_np=4), tfscale.ConfigError, "max_np=4. Name the hosts"),
    "ssh_port": (dict(ssh_port=22), tfscale.ConfigError, "~/.ssh/config"),
    "unknown": (dict(nproc=2), TypeError, "unexpected keyword argument 'nproc'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit(name):
    arguments, kind, text = REFUSED[name]
    with pytest.raises(kind, match=".*") as error:
        tfscale.run(**{"func": uses_nothing, **arguments})
    assert text in str(error.value)


def test_the_arguments_are_the_options_of_the_command():
    names = {"size": "np"}
    commands = argparse.ArgumentParser().add_subparsers()
    cli.COMMANDS["run"](commands)
    options = {names.get(a.dest, a.dest) for a in commands.choices["run"]._actions}
    # The input stays with the caller, and nothing is only shown.
    options -= {"help", "command", "stdin", "dry_run"}
    given = set(inspect.signature(tfscale.run).parameters)
    assert given == options | {"func", "args", "kwargs", "horovod"}


@pytest.mark.parametrize(
    ("environ", "is_rank"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "TFSCALE_JOB": "x"}, True),  # the only rank of a job
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun jupyter lab
    ],
)
def test_a_rank_cannot_call_it(environ, is_rank, monkeypatch):
    for name, value in {**QUIET, **environ}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(tfscale.ConfigError) as error:
        tfscale.run(3)
    assert ("its caller must not be one" in str(error.value)) == is_rank
