"""A study of two configurations and two seeds, whose recipe takes no time."""

from pathlib import Path

STUDY = """
TITLE = "Two batches"
SHOWS = "Nothing."
RECIPE = "fake"
FLAGS = {"epochs": 3, "augment": False}
CONFIGURATIONS = {"small batch": {"batch_size": 4}, "Large: 16": {"batch_size": 16, "report": True}}
SEEDS = (1, 2)
METRIC = "val_accuracy"
THRESHOLD = ("val_loss", 0.5)
COLUMNS = {
    "largest batch": lambda epochs: max(line["batch_size"] for line in epochs),
    "unknown of small ones": lambda epochs: None if epochs[0]["batch_size"] == 4 else 7,
}
"""
# Halves its loss per epoch; fails where a file says so.
FAKE = """
import json, pathlib, sys
flags = dict(a[2:].split("=") for a in sys.argv[1:] if "=" in a)
folder = pathlib.Path(flags["run_dir"]) / flags["run_name"]
with open(folder / "metrics.jsonl", "w") as file:
    for epoch in range(1, 4):
        batch = int(flags["batch_size"])
        line = {"epoch": epoch, "train_seconds": 8 / batch, "batch_size": batch}
        line |= {"val_loss": batch / 4 / 2**epoch, "val_accuracy": 0.5 + 0.1 * int(flags["seed"])}
        file.write(json.dumps(line) + "\\n")
if (pathlib.Path(__file__).parent / "fail").exists():
    sys.exit(3)
(folder / "run.json").write_text(json.dumps({"seconds": 1.0}))
with open(folder / "calls", "a") as file:
    file.write("x")
"""


def write(folder: Path) -> str:
    """Write `mine.py`, the study, and its recipe into a folder; return the study's path."""
    (folder / "fake.py").write_text(FAKE)
    path = folder / "mine.py"
    path.write_text(STUDY)
    return str(path)
