"""Every code block of README and of the pages for users runs: on one process and on two ranks."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.helpers.launching import launch_script
from tfscale.launcher import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", ROOT / "docs" / "data.md"]
PYTHON = [*DOCUMENTS, ROOT / "docs" / "from-horovod.md"]
# Blocks run in their order and see the names of those before them, as a reader does.
DRIVER = """
import json, sys, traceback
import keras
names = {"__name__": "__main__"}
for number, text in enumerate(json.loads(BLOCKS), 1):
    try:
        exec(compile(text, f"Python block {number}", "exec"), names)
    except SystemExit as error:
        assert not error.code, error
    print(f"block {number} done", flush=True)
"""


def blocks(document: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize(
    "document",
    [pytest.param(p, marks=[] if p.stem == "README" else pytest.mark.slow) for p in PYTHON],
    ids=lambda path: path.stem,
)
def test_python_blocks_run(document, size, tmp_path, monkeypatch):
    texts = blocks(document, "python", "py")
    assert texts
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    code = f"import os; os.chdir({str(tmp_path)!r})\nBLOCKS = {json.dumps(texts)!r}\n{DRIVER}"
    result = launch_script(size, code, timeout_s=400)
    assert result.exit_code == 0, result.output[-8000:]
    assert result.output.count(f"block {len(texts)} done") == max(1, size)


@pytest.mark.timeout(420)
def test_the_example_prints_the_same_losses_on_every_number_of_ranks(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    text = blocks(ROOT / "README.md", "python")[0]
    printed = []
    for size in (0, 2, 4):
        result = launch_script(size, text, timeout_s=130)
        assert result.exit_code == 0, result.output[-8000:]
        printed.append(re.findall(r"(\w+: [\d.e+-]+)(?= |$)", result.output, re.MULTILINE))
    assert len(printed[0]) == 3 * 4  # accuracy and loss, of training and validation
    assert printed[0] == printed[1] == printed[2]


def command_lines(document: Path) -> list[str]:
    lines = (
        "\n".join(blocks(document, "bash", "sh", "shell", "console"))
        .replace("\\\n", " ")
        .splitlines()
    )
    lines = [line.split(" #")[0].strip().removeprefix("$ ") for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_commands_exist(document, capsys):
    makefile = (ROOT / "Makefile").read_text()
    lines = command_lines(document)
    assert lines
    for line in lines:
        words = shlex.split(line)
        if words[0] == "make":
            targets = [w for w in words[1:] if "=" not in w]
            assert all(re.search(rf"^{t}:", makefile, re.MULTILINE) for t in targets), line
        elif words[:2] == ["tfscale", "run"]:
            assert cli.main(["run", "--dry-run", *words[2:]]) == 0, line
        elif words[0] == "tfscale":
            with pytest.raises(SystemExit) as end:
                cli.main([words[1], "--help"])
            assert end.value.code == 0, line
    capsys.readouterr()
