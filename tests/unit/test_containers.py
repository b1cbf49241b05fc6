"""The examples in docs/containers: resources have fields of published schemas, files exist."""

import copy
import json
import re
import runpy
import shlex
from pathlib import Path

from tests.helpers.kubernetes_fields import KNOWN, problems_of, resources_of
from tfscale.launcher import cli

FOLDER = Path("docs/containers")
RULES = {kind: known["rules"] for kind, known in json.loads(KNOWN.read_text()).items()}
RESOURCES = {
    f"{resource['apiVersion']} {resource['kind']}": resource
    for path in sorted(FOLDER.glob("*.yaml"))
    for resource in resources_of(path)
}


def test_resources_have_fields_of_published_schemas():
    assert RESOURCES.keys() == RULES.keys() and len(RESOURCES) == 3
    for kind, resource in RESOURCES.items():
        assert problems_of(resource, RULES[kind]) == []
    wrong = copy.deepcopy(RESOURCES["kubeflow.org/v2beta1 MPIJob"])
    del wrong["spec"]["mpiReplicaSpecs"]
    wrong["spec"] |= {"slotsPerWorker": "2", "mpiImplementation": "LAM", "slots": 2}
    assert sorted(problems_of(wrong, RULES["kubeflow.org/v2beta1 MPIJob"])) == [
        ".spec.mpiImplementation='LAM' is no ['OpenMPI', 'Intel', 'MPICH']",
        ".spec.mpiReplicaSpecs is missing",
        ".spec.slots is unknown",
        ".spec.slotsPerWorker='2' is no integer",
    ]


def test_commands_of_resources_are_understood(tmp_path, monkeypatch, capsys):
    launcher = RESOURCES["kubeflow.org/v2beta1 MPIJob"]["spec"]["mpiReplicaSpecs"]["Launcher"]
    container = launcher["template"]["spec"]["containers"][0]
    trainer = RESOURCES["trainer.kubeflow.org/v1alpha1 TrainJob"]["spec"]["trainer"]
    for part, line in ((container, "{}:2\n"), (trainer, "{} slots=2\n")):
        hosts = tmp_path / "hostfile"
        hosts.write_text("".join(line.format(f"train-{i}.train.default.svc") for i in (0, 1)))
        words = shlex.join(part["command"] + part["args"]).replace("/etc/mpi/hostfile", str(hosts))
        program, run, *options = shlex.split(words)
        assert (program, run) == ("tfscale", "run")
        assert cli.main(["run", "--dry-run", *options]) == 0
        assert "train-1.train.default.svc" in capsys.readouterr().out + hosts.read_text()


def test_images_copy_what_exists():
    copied = re.findall(r"^COPY (\S+) ", (FOLDER / "Dockerfile").read_text(), re.M)
    assert all(Path(name).exists() for name in copied) and len(copied) == 2
    losses = runpy.run_path(str(FOLDER / "train.py"))["model"].history.history["loss"]
    assert losses[-1] < losses[0]
