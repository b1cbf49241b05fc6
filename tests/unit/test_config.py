"""Settings: defaults, what the environment sets, and errors that name the variable."""

import dataclasses
import logging

import pytest

import tfscale
from tfscale import config
from tfscale.comm.backends import engine
from tfscale.config import ConfigError, Settings, parse_settings, read_size, variable_name

# A frozen list: what users set in their job scripts keeps its name and default.
DEFAULTS = {
    "TFSCALE_BACKEND": "auto",
    "TFSCALE_STALL_WARNING_S": 60.0,
    "TFSCALE_STALL_SHUTDOWN_S": 600.0,
    "TFSCALE_CHUNK_BYTES": 1 << 20,
    "TFSCALE_WINDOW_BYTES": 128 << 20,
    "TFSCALE_HOST_MEMORY": 512 << 10,
    "TFSCALE_REDUCE_THREADS": 0,
    "TFSCALE_PIN_CORE": "none",
    "TFSCALE_RANKS_PER_HOST": 0,
    "TFSCALE_SET_THREADS": True,
    "TFSCALE_SAVE_TIMEOUT_S": 10.0,
    "TFSCALE_TIMELINE": "",
    "TFSCALE_START_S": 60.0,
    "TFSCALE_LOG_LEVEL": "",
    "TFSCALE_METRICS": "",
    "TFSCALE_METRICS_TOKEN": "",
    "TFSCALE_COMPARE_AVERAGES": False,
}


def test_variables_and_defaults():
    fields = dataclasses.fields(Settings)
    assert {variable_name(f.name): f.default for f in fields} == DEFAULTS
    assert parse_settings({}) == Settings()
    assert parse_settings(dict.fromkeys(DEFAULTS, "")) == Settings()


def test_every_variable_is_read():
    texts = ("engine", "1.5", "3", "128", "4096", "0", "2", "3+4", "2", "off")
    environ = dict(zip(DEFAULTS, texts, strict=False))
    expected = Settings("engine", 1.5, 3.0, 128, 4096, 0, 2, "3+4", 2, False)
    assert parse_settings({**environ, "OTHER": "ignored"}) == expected


@pytest.fixture
def log():
    """The logger of tfscale; afterwards it is as it was before."""
    logger = logging.getLogger("tfscale")
    handlers, level = [*logger.handlers], logger.level
    yield logger
    for handler in {*logger.handlers} - {*handlers}:
        logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_level_of_the_log(monkeypatch, capsys, log):
    """Each line once: by a handler of tfscale, or by that of the program."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # pytest has its own
    monkeypatch.setattr(root, "level", root.level)  # absl and other tests set it
    root.setLevel(logging.WARNING)
    monkeypatch.setattr(config, "settings", lambda: Settings(log_level="info"))
    for _ in range(2):  # a job joined again
        tfscale.init()
        tfscale.shutdown()
    log.debug("too fine")
    log.info("shown by %s", "tfscale")
    logging.basicConfig(format="program: %(message)s")
    log.info("shown by the program")
    logging.getLogger("other").info("not of tfscale")
    expected = "INFO:tfscale:shown by tfscale\nprogram: shown by the program\n"
    assert capsys.readouterr().err == expected


def test_other_ranks_show_warnings_only(monkeypatch, log):
    monkeypatch.setattr(config, "settings", lambda: Settings(log_level="info"))
    with tfscale.testing.pretend_rank(1, 2):
        tfscale.init()
    assert not log.handlers and log.level == logging.NOTSET


def test_words_for_yes_and_no():
    for text, value in (("true", True), ("YES", True), ("0", False), ("No", False)):
        assert parse_settings({"TFSCALE_SET_THREADS": text}).set_threads is value


@pytest.mark.parametrize(
    ("name", "text", "range_of_values"),
    [
        ("BACKEND", "mpi", "one of auto, engine, horovod, single"),
        ("SET_THREADS", "maybe", "1 or 0"),
        ("LOG_LEVEL", "INFOS", "one of debug, info, warning, error"),
        ("PIN_CORE", "a", "none, last, a list"),
        ("PIN_CORE", "1,,2", "none, last, a list"),
        ("CHUNK_BYTES", "1e6", "a whole number"),
        ("CHUNK_BYTES", "1", r"in \[64, "),
        ("CHUNK_BYTES", str(2**31), r"in \[64, 1073741824\]"),
        ("STALL_WARNING_S", "0", r"in \[0.01, inf\]"),
        ("STALL_SHUTDOWN_S", "nan", r"in \["),
        ("WINDOW_BYTES", "0", r"in \[1, "),
        ("REDUCE_THREADS", "-1", r"in \[0, 1024\]"),
        ("HOST_MEMORY", "-2", r"in \[0, "),
    ],
)
def test_errors_name_the_variable(name, text, range_of_values):
    with pytest.raises(ConfigError, match=rf"TFSCALE_{name} must be .*{range_of_values}.*{text}"):
        parse_settings({f"TFSCALE_{name}": text})


def test_the_environment_is_read_once(monkeypatch):
    config.settings.cache_clear()
    for text in ("640", "1280"):
        monkeypatch.setenv("TFSCALE_CHUNK_BYTES", text)
        assert config.settings().chunk_bytes == 640
    config.settings.cache_clear()
    assert config.settings().chunk_bytes == 1280
    monkeypatch.undo()
    config.settings.cache_clear()


def test_the_core_of_each_rank_of_a_host():
    usable = [10, 11, 13, 20, 21, 23, 24, 30, 31, 32]  # each of three ranks has three
    places = [engine.HostPlace(rank, 3, 0, 1, 3, rank) for rank in range(3)]
    for rule, cores in (
        ("none", [-1, -1, -1]),
        ("7,3,5", [7, 3, 5]),
        ("7+8", [7, 15, 23]),
        ("last", [13, 23, 31]),
    ):
        assert [engine.pinned_core(rule, place, usable) for place in places] == cores
    bound = engine.HostPlace(1, 3, 0, 1, 2, 0)
    assert engine.pinned_core("last", bound, [2, 3]) == 3
    socket = [engine.HostPlace(rank, 4, 0, 1, 2, rank % 2) for rank in (2, 3)]
    assert [engine.pinned_core("last", place, range(8, 12)) for place in socket] == [9, 11]
    with pytest.raises(ConfigError, match="a core for each of the 3 ranks of a host"):
        engine.pinned_core("7,3", places[2], usable)


@pytest.mark.parametrize(
    ("text", "size"),
    [("100MB", 100 << 20), ("0.5mb", 1 << 19), ("2 GB", 2 << 30), ("77", 77), (12, 12)],
)
def test_sizes(text, size):
    assert read_size(text, "--shard-embeddings") == size


@pytest.mark.parametrize("text", ["", "0", "-1MB", "100kib", "MB", "1e3", "0.0001"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match="a number, or one with KB, MB or GB"):
        read_size(text, "--shard-embeddings")
