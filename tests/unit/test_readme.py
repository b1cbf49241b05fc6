"""Every code block of the README runs: Python on one process and on two ranks, commands dry."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.helpers.launching import launch_script
from tfscale import cli

README = Path(__file__).resolve().parents[2] / "README.md"
# Blocks run in their order and see the names of those before them, as a reader does.
DRIVER = """
import json, sys, traceback
import keras
names = {"__name__": "__main__"}
for number, text in enumerate(json.loads(BLOCKS), 1):
    try:
        exec(compile(text, f"README.md, Python block {number}", "exec"), names)
    except SystemExit as error:
        assert not error.code, error
    print(f"block {number} done", flush=True)
"""


def blocks(*languages: str) -> list[str]:
    """Return the text of the fenced blocks in one of some languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("size", [0, 2])
def test_python_blocks_run(size, tmp_path, monkeypatch):
    texts = blocks("python", "py")
    assert texts
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    code = f"import os; os.chdir({str(tmp_path)!r})\nBLOCKS = {json.dumps(texts)!r}\n{DRIVER}"
    result = launch_script(size, code, timeout_s=400)
    assert result.exit_code == 0, result.output[-8000:]
    assert result.output.count(f"block {len(texts)} done") == max(1, size)


def command_lines() -> list[str]:
    lines = "\n".join(blocks("bash", "sh", "shell", "console")).replace("\\\n", " ").splitlines()
    lines = [line.split(" #")[0].strip().removeprefix("$ ") for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


def test_commands_exist(capsys):
    makefile = (README.parent / "Makefile").read_text() if command_lines() else ""
    for line in command_lines():
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
