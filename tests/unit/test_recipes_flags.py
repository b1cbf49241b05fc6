"""Flags of the recipes: what is refused, what is noted, and that published commands are taken."""

import contextlib
import re
import runpy
from pathlib import Path

import command_line
import pytest
import training
from absl.testing import flagsaver
from command_line import flags_parser

RECIPES = Path(command_line.__file__).parent
PAPERS = {"resnet": 1e-4, "vgg": 5e-4}  # L2 of He et al., of Simonyan and Zisserman


@contextlib.contextmanager
def _recipe(name, words):
    """Read a recipe's flags from words, and give what it defines."""
    with flagsaver.flagsaver():  # which forgets the recipe's own flags afterwards
        names = runpy.run_path(str(RECIPES / f"{name}.py"))
        flags_parser()([name, *words])
        yield names


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(training.hvd, "init", lambda: None)
    monkeypatch.setattr(training.hvd, "rank", lambda: 0)
    monkeypatch.setattr(training.hvd, "size", lambda: 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--adaptive-batch 256 --schedule cosine", "Received: --schedule cosine. Leave"),
        ("--batch-schedule 3:256 --schedule cosine", "--batch-schedule takes the place"),
        ("--average-every 1 --groups 2", "exchange no gradients. Received: --groups 2"),
        ("--average-every 1 --interval 8", "Received: --interval 8"),
        ("--average-every 1 --exchange sharded", "Received: --exchange sharded"),
        ("--average-every 1 --compression bf16", "Received: --compression bf16"),
        ("--distance-weights 1", "--distance-weights needs --average-every"),
        ("--overlap 2", "--overlap needs --groups"),
        ("--theta-norms", "--theta-norms needs --theta-every"),
        ("--adaptive-interval 3", "--adaptive-interval needs --adaptive-batch"),
        ("--adaptive-rule peak", "--adaptive-rule needs --adaptive-batch"),
        ("--adaptive-signal noise_scale", "--adaptive-signal needs --adaptive-batch"),
        ("--batch-schedule 3:256 --adaptive-interval 3", "needs --adaptive-batch"),
    ],
)
def test_flags_without_effect_are_refused(words, told):
    with _recipe("lenet", words.split()), pytest.raises(SystemExit, match=told):
        training.start()


def _read_commands():
    """Return the rows of README's table that have a command: recipe, words."""
    table = (RECIPES / "README.md").read_text().split("## Studies")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    found = []
    for _, _, _, command, _, _ in rows:
        for recipe, words in re.findall(r"`(\w+)\.py (.*?)`", command):
            found.append((recipe, words.split()))
    assert {recipe for recipe, _ in found} == {"edsr", "resnet", "vgg", "lenet", "mlp"}
    return found


@pytest.mark.parametrize(("recipe", "words"), _read_commands())
def test_commands_that_are_published_are_taken(recipe, words, monkeypatch):
    with _recipe(recipe, words) as names:
        command_line.check_flags()
        if recipe not in PAPERS:
            return
        monkeypatch.setattr(training, "distributed", lambda optimizer: optimizer)
        options = (128,) if recipe == "resnet" else ()
        optimizer = names["build_optimizer"](*options, 100)
        # [T] and He et al. add the decay to the gradient, inside of the momentum.
        assert optimizer.weight_decay == pytest.approx(PAPERS[recipe] / (1 - optimizer.momentum))
