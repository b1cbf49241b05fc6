"""`tfscale.ray.run` and `RayExecutor` on two virtual nodes of a real Ray cluster.

Ray is not among the packages of the tests: `make test-ray` has it in another environment.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

import numpy as np  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.placement_group import placement_group_table  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

import tfscale  # noqa: E402
from tests.helpers.killed_job import is_alive  # noqa: E402
from tests.helpers.launching import job_variables  # noqa: E402
from tfscale.comm.process import discover  # noqa: E402
from tfscale.ray import RayExecutor  # noqa: E402

LIMIT_S = 280  # only ends a hang
pytestmark = pytest.mark.timeout(LIMIT_S + 20)
MEMORY = 100 << 20


@pytest.fixture(scope="module")
def cluster():
    """A cluster whose first node holds the driver and no rank; nodes with two CPUs are added."""
    os.environ.update(job_variables())
    arguments = {"num_cpus": 0, "object_store_memory": MEMORY}
    made = Cluster(initialize_head=True, head_node_args=arguments)
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def nodes(cluster, tmp_path, monkeypatch):
    """Two nodes; afterwards all resources are free, and no process and no folder is left."""
    monkeypatch.setenv("TFSCALE_OF_TEST", str(tmp_path))
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    cluster.wait_for_nodes()
    yield cluster
    until(lambda: all(g["state"] == "REMOVED" for g in placement_group_table().values()))
    until(lambda: not processes_of(tmp_path))


def processes_of(folder):
    """Processes of ranks and of MPI that a test has started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"TFSCALE_OF_TEST={folder}".encode() in environ and b"tfscale.launcher" in command:
            found.append(int(entry.name))
    return found


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank():
    return discover(os.environ).rank


def test_results_by_rank_on_two_nodes(nodes, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    offset = ray.put(10)

    def work(factor, offset, extra=0):
        tfscale.init()
        total = tfscale.allreduce(float(rank()), op=tfscale.Sum)
        print("output of rank", rank())
        own = rank() * factor + offset + extra, os.getcwd(), os.environ["TFSCALE_CALL_FOLDER"]
        return own, float(total), tfscale.local_size(), np.full(10 << 20, rank(), np.uint8)

    results = tfscale.ray.run(work, (2, offset), {"extra": 0.5}, 4)
    assert [r[0][0] for r in results] == [10.5, 12.5, 14.5, 16.5]
    assert [(r[1], r[3].sum()) for r in results] == [(6.0, i * (10 << 20)) for i in range(4)]
    assert {r[0][1] for r in results} == {str(tmp_path)}
    folders = [r[0][2] for r in results]  # each node has its own
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert not any(map(os.path.exists, folders))
    assert re.findall("output of rank .", capfd.readouterr().out) == ["output of rank 0"]


class Broken(Exception):
    pass


def test_the_error_of_a_rank_has_its_traceback_and_number(nodes):
    def fails():
        if rank() == 2:
            raise Broken("no data")
        time.sleep(LIMIT_S)  # ends with the other rank

    with pytest.raises(tfscale.RankError, match="rank 2 failed: Broken: no data") as error:
        tfscale.ray.run(fails)
    assert error.value.rank == 2 and isinstance(error.value.__cause__, Broken)
    assert 'raise Broken("no data")' in str(error.value) and __file__ in str(error.value)
    assert "ray" not in str(error.value).replace("test_ray", "").lower().replace(
        str(Path.cwd()), ""
    )


def when_started(folder, size, act):
    """Call a function when all ranks have made their files."""

    def wait():
        until(lambda: len(list(folder.glob("started-*"))) >= size)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def waits(folder, attempts=1):
    """Wait for the end in the first attempts; return the number of the attempt."""
    attempt = int(os.environ["TFSCALE_RESTART"])
    if attempt < attempts:
        (folder / f"started-{rank()}").touch()
        time.sleep(LIMIT_S)
    return attempt


def kill_actors():
    """Kill the actor of one node, as Ray does for want of memory."""
    pids = [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit()]
    commands = {}
    for pid in pids:
        try:
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
    actors = [pid for pid, command in commands.items() if command.startswith(b"ray::_Node")]
    os.kill(max(actors), signal.SIGKILL)


def test_a_lost_node_is_named(nodes, tmp_path):
    lost = nodes.worker_nodes and next(iter(nodes.worker_nodes))
    thread = when_started(tmp_path, 4, lambda: nodes.remove_node(lost, allow_graceful=False))
    with pytest.raises(tfscale.RankError) as error:
        tfscale.ray.run(waits, (tmp_path,))
    thread.join()
    assert lost.node_id[:6] in str(error.value)
    assert re.match(
        r"Ray node \S+ or its actor was lost, with ranks (0, 1|2, 3): ", str(error.value)
    )
    assert error.value.rank in (0, 2)
    assert isinstance(error.value.__cause__, ray.exceptions.RayActorError)


def folders_of_actors():
    return set(Path(tempfile.gettempdir()).glob("tfscale-ray-*"))


def test_a_lost_actor_is_replaced_at_a_restart(nodes, tmp_path, capfd):
    of_others = folders_of_actors()
    thread = when_started(tmp_path, 4, kill_actors)
    assert tfscale.ray.run(waits, (tmp_path,), max_restarts=1) == [1] * 4
    thread.join()
    assert "tfscale: restart 1 of 1, with 4 ranks." in capfd.readouterr().err
    # The function that the killed actor had written was removed when the next one began.
    assert folders_of_actors() <= of_others


ACTOR = """
import os, sys, time
from tfscale.ray.job import _Node

node = _Node(b"function", os.getcwd())
print(node._folder, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_actor_is_removed_by_the_next(tmp_path):
    """Not those of actors that live, and none of another kind."""
    other = tmp_path / "tfscale-ray-other"
    other.mkdir()
    actors, folders = [], []
    try:
        for number in range(3):
            if number == 2:
                actors[0].kill()
                actors[0].wait()
            command, pipe = [sys.executable, "-c", ACTOR], subprocess.PIPE
            environ = {**os.environ, "TMPDIR": str(tmp_path)}
            actors.append(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ)
            )
            folders.append(Path(actors[-1].stdout.readline().strip()))
        assert [folder.exists() for folder in (*folders, other)] == [False, True, True, True]
    finally:
        for actor in actors:
            actor.kill()
            actor.communicate()


def test_a_lost_node_is_replaced_at_a_restart(nodes, tmp_path, capfd):
    nodes.add_node(num_cpus=2, object_store_memory=MEMORY)
    nodes.wait_for_nodes()

    def remove():
        groups = [g for g in placement_group_table().values() if g["state"] == "CREATED"]
        (used,) = [set(group["bundles_to_node_id"].values()) for group in groups]
        lost = next(node for node in nodes.worker_nodes if node.node_id in used)
        nodes.remove_node(lost, allow_graceful=False)

    thread = when_started(tmp_path, 4, remove)
    assert tfscale.ray.run(waits, (tmp_path,), max_restarts=1) == [1] * 4
    thread.join()
    assert "tfscale: restart 1 of 1, with 4 ranks." in capfd.readouterr().err


def trains(folder):
    """Train, and kill rank 1 in the first attempt; return the epochs begun, and the weights."""
    import keras  # here, as ranks of other tests import this module, too

    epochs = []

    def begin_epoch(epoch, logs):
        epochs.append(epoch)
        if epoch == 2 and os.environ["TFSCALE_RESTART"] == "0" and tfscale.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    tfscale.init()
    keras.utils.set_random_seed(1)
    x = np.arange(64, dtype=np.float32).reshape(32, 2) / 64
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    data = tfscale.data.GlobalBatches(x, x.sum(axis=1), batch_size=8, seed=1)
    ends = keras.callbacks.LambdaCallback(on_epoch_begin=begin_epoch)
    checkpoint = tfscale.callbacks.Checkpoint(folder, every_n_steps=1, asynchronous=False)
    callbacks = [checkpoint, tfscale.callbacks.Synchronize(), ends]
    model.fit(data, epochs=4, verbose=0, callbacks=callbacks)
    return epochs, model.get_weights()


def test_a_restart_continues_from_the_last_checkpoint(nodes, tmp_path):
    whole = tfscale.ray.run(trains, (tmp_path / "whole",), num_workers=1)
    results = tfscale.ray.run(trains, (tmp_path / "cut",), num_workers=2, max_restarts=1)
    for epochs, weights in results:
        assert epochs in ([1, 2, 3], [2, 3])  # by the last checkpoint that both had written
        for value, expected in zip(weights, whole[0][1], strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_too_few_resources_are_an_error_that_names_what_is_there(nodes):
    with pytest.raises(tfscale.ConfigError) as error:
        tfscale.ray.run(rank, num_workers=5, cpus_per_worker=2, timeout_s=2)
    text = str(error.value)
    assert "Received: 5 ranks with CPU 2 each (PACK), not placed in 2 s; of 3 nodes" in text
    assert text.count("has CPU 2") == 2 and "free are in all CPU 4." in text
    with pytest.raises(tfscale.ConfigError, match=r"slots 1 each .PACK., not placed in 2 s"):
        tfscale.ray.run(rank, num_workers=1, resources_per_worker={"slots": 1}, timeout_s=2)


def test_it_is_called_in_a_task(nodes):
    @ray.remote(num_cpus=1)
    def caller(fails):
        return tfscale.ray.run(lambda: 1 / (rank() - (1 if fails else 9)), num_workers=2)

    assert ray.get(caller.remote(False)) == [-1 / 9, -1 / 8]
    with pytest.raises(tfscale.RankError, match="rank 1 failed: ZeroDivisionError"):
        ray.get(caller.remote(True))


def test_the_placement_group_of_the_caller(nodes):
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 2}])
    found = tfscale.ray.run(rank, num_workers=3, placement_group=group)
    assert found == [0, 1, 2]
    with pytest.raises(tfscale.ConfigError, match="4 ranks with CPU 1 each, 1 too many"):
        tfscale.ray.run(rank, placement_group=group)
    assert group.wait(10)  # it remains

    @ray.remote(num_cpus=1)
    def call_in_group():
        executor = RayExecutor(None, num_workers=2)  # one more CPU is free outside of the group
        executor.start()
        ranks = executor.run(rank)
        executor.shutdown()
        return ranks

    where = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    assert ray.get(call_in_group.options(scheduling_strategy=where).remote()) == [0, 1]
    assert group.wait(10)
    ray.util.remove_placement_group(group)


SCRIPT = """
import os, signal, sys, time, ray, tfscale
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in background
ray.init(address=sys.argv[1], log_to_driver=False)

def work():
    print(f"READY {os.getpid()} .", flush=True)
    time.sleep(1e6)  # until the end of the caller ends this rank, which is the test

try:
    tfscale.ray.run(work, num_workers=2, all_output=True)
except KeyboardInterrupt:
    print("INTERRUPTED", len(ray.util.placement_group_table()), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_caller(nodes, tmp_path, number):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), nodes.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        text, pids = "", []
        while len(pids) < 2:
            line = script.stdout.readline()
            assert line, text
            text += line
            pids = [int(pid) for pid in re.findall(r"READY (\d+) \.", text)]
        script.send_signal(number)
        output, _ = script.communicate(timeout=LIMIT_S)
        assert ("INTERRUPTED" in output) == (number == signal.SIGINT)
    until(lambda: not any(map(is_alive, pids)))


def test_arguments_that_ray_replaces():
    with pytest.raises(tfscale.ConfigError, match="hosts is an argument of tfscale.run"):
        tfscale.ray.run(rank, hosts="node1:2")
    with pytest.raises(tfscale.ConfigError, match="strategy must be one of PACK"):
        tfscale.ray.run(rank, strategy="pack")
    with pytest.raises(TypeError, match="unexpected keyword argument 'workers'"):
        tfscale.ray.run(rank, workers=2)


# Horovod's interface.


class Counter:
    def __init__(self, first):
        self.first = first


def test_horovods_executor(nodes):
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=2, use_gpu=False)
    with pytest.raises(tfscale.ConfigError, match="RayExecutor must be started first"):
        executor.run(rank)
    executor.start(Counter, executable_args=[5], extra_env_vars={"MORE": "yes"})
    with pytest.raises(tfscale.ConfigError, match="start\\(\\) is called once"):
        executor.start()
    assert executor.run(lambda n, k: (rank() * n, k, os.environ["MORE"]), [3], {"k": 1}) == [
        (0, 1, "yes"),
        (3, 1, "yes"),
    ]
    assert ray.get(executor.run_remote(pow, [2, 3])) == [8, 8]
    assert executor.execute(lambda counter: counter.first + rank()) == [5, 6]
    assert executor.execute_single(lambda counter: (counter.first, rank())) == (5, 0)
    executor.shutdown()
    with pytest.raises(tfscale.ConfigError, match="after shutdown"):
        executor.execute(rank)


def test_hosts_with_slots(nodes):
    executor = RayExecutor(None, num_hosts=2, num_slots=2, cpus_per_slot=1)
    executor.start()
    folders = executor.run(lambda: os.environ["TFSCALE_CALL_FOLDER"])
    assert folders[0] == folders[1] != folders[2] == folders[3]
    executor.shutdown()


@pytest.mark.parametrize(
    "arguments",
    [{"min_workers": 1, "max_workers": 4}, {"num_workers": 2, "use_gpu": True}, {}],
)
def test_arguments_of_horovod_that_are_refused(arguments):
    with pytest.raises(tfscale.ConfigError):
        RayExecutor(None, **arguments)
