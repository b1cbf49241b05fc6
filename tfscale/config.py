"""Settings, errors and exit codes: the only reader of the environment."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any


class ConfigError(ValueError):
    """An argument, option or environment variable is invalid.

    Examples:
        >>> tfscale.Allreduce(bucket_mb=-1)
        Traceback (most recent call last):
            ...
        tfscale.config.ConfigError: bucket_mb must be 'auto' or a number of MiB, 0 or more.
        Received: bucket_mb=-1.
    """


class PlanError(ValueError):
    """The exchange of a model cannot be planned.

    Examples:
        >>> exchange = tfscale.Chunked(replicated_dense=2)
        >>> exchange.dense_kinds(layers=[], size=2, global_batch=64)  # as a step on two ranks does
        Traceback (most recent call last):
            ...
        tfscale.config.PlanError: replicated_dense needs 2 Dense layers. Received: 0. Set it to 0
        or less.
    """


class ExchangeError(RuntimeError):
    """Communication cannot start, failed, or would give a wrong result.

    Examples:
        >>> tfscale.rank()
        Traceback (most recent call last):
            ...
        tfscale.config.ExchangeError: tfscale must be initialised first. Received: a call before
        tfscale.init() or after shutdown(). Call tfscale.init() at the start of the program.
    """


class RankError(RuntimeError):
    """A function that `tfscale.run` has started failed on a rank; the text holds its traceback.

    `__cause__` is the exception that the function raised there, where pickle could send it.

    Attributes:
        rank: Number of the rank that failed first; None where none is the cause, such as a host
            that cannot be reached.
        exit_code: That of `tfscale run` for such an end, see 'Errors and exit codes' in the
            documentation.

    Examples:
        >>> error = tfscale.RankError("rank 1 failed: division by zero", rank=1)
        >>> error.rank, error.exit_code
        (1, 1)
    """

    def __init__(self, text: str, rank: int | None = None, exit_code: int = 1) -> None:
        super().__init__(text)
        self.rank, self.exit_code = rank, exit_code


def require(fits: bool, name: str, requirement: str, value: Any, remedy: str = "") -> None:
    """Raise a ConfigError about an argument or setting unless it fits."""
    if not fits:
        text = f"{name} must be {requirement}. Received: {name}={value!r}."
        raise ConfigError(f"{text} {remedy}".rstrip())


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a value is an integer of `least` or more."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def check_integer(name: str, value: Any, least: int) -> int:
    """Return `value` as an int of at least `least`, or raise a ConfigError."""
    require(is_count(value, least), name, f"a whole number of at least {least}", value)
    return int(value)


def read_numbers(text: str, name: str, least: int = 1) -> tuple[int, ...]:
    """Return the numbers in "1,2,4", each at least `least`; `name` is the option that gave them."""
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < least:
        raise ConfigError(
            f"{name} must be numbers of {least} or more with commas between them. "
            f"Received: {name} {text}. Example: {name} 1,2,4"
        )
    return numbers


def read_size(text: Any, name: str) -> int:
    """Return the bytes of "100MB", of a number with KB, MB or GB (powers of 1024), or a number."""
    units = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)?", str(text).upper())
    size = int(float(match[1]) * units.get(match[2], 1)) if match else 0
    if size == 0:
        raise ConfigError(
            f"{name} must be a size above 0: a number, or one with KB, MB or GB. Received: "
            f"{name}={text!r}. Example: {name} 100MB"
        )
    return size


def read_input_shape(text: str) -> tuple[int, ...] | None:
    """Return the numbers of the option `--input-shape`, or None if it is not given."""
    return read_numbers(text, "--input-shape") if text else None


class exit_codes:
    """Exit codes of training processes besides success (0) and failure (1).

    Attributes:
        PREEMPTED: A checkpoint was written on request (SIGTERM): start the job again to resume.
            EX_TEMPFAIL of sysexits.h, "the user is invited to try again later"; schedulers can
            requeue on it.

    Examples:
        >>> tfscale.exit_codes.PREEMPTED
        75
    """

    PREEMPTED = 75


PREEMPTED = exit_codes.PREEMPTED


LOOPBACK = "127.0.0.1"
BACKENDS = ("auto", "engine", "horovod", "single")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Settings:
    """Settings that environment variables may change before `tfscale.init`.

    Attributes:
        backend: TFSCALE_BACKEND. Library that carries the messages, one of `BACKENDS`.
        stall_warning_s: TFSCALE_STALL_WARNING_S. Seconds after which a waiting collective is
            reported with its name and the missing ranks.
        stall_shutdown_s: TFSCALE_STALL_SHUTDOWN_S. Seconds after which it fails.
        chunk_bytes: TFSCALE_CHUNK_BYTES. Size of the pieces in which long vectors are sent and
            summed.
        window_bytes: TFSCALE_WINDOW_BYTES. Bytes of one plan that may be pending at a time.
        host_memory: TFSCALE_HOST_MEMORY. Bytes from which on ranks of a host read data from each
            other's memory instead of sending messages; 0 for never.
        reduce_threads: TFSCALE_REDUCE_THREADS. Threads that compute a local sum; 0 uses the cores
            of the host divided by its ranks, 4 at most.
        pin_core: TFSCALE_PIN_CORE. Core of the communication thread, by the rank's number on its
            host: "none" for any, a list ("7,15"), the first and a step ("7+8"), or "last" for the
            last core of the rank's own share.
        ranks_per_host: TFSCALE_RANKS_PER_HOST. Consecutive ranks that count as a host where data
            is exchanged; 0 for those that share memory.
        set_threads: TFSCALE_SET_THREADS. False keeps TensorFlow's numbers of threads even where
            several ranks share a host.
        save_timeout_s: TFSCALE_SAVE_TIMEOUT_S. Seconds for which a rank that saves sharded state
            waits for the others to join.
        start_s: TFSCALE_START_S. Seconds without a sign of a host after which `tfscale run` names
            it; after five times as long the job ends.
        timeline: TFSCALE_TIMELINE. Folder for a timeline of the whole job; "" for none.
        log_level: TFSCALE_LOG_LEVEL. Least level of tfscale's log that rank 0 shows on standard
            error, one of `LOG_LEVELS`; "" leaves it to the program.
        metrics: TFSCALE_METRICS. Address at which rank 0 serves metrics of the training,
            "HOST:PORT" or ":PORT"; "" for none.
        metrics_token: TFSCALE_METRICS_TOKEN. Bearer token that readers of the metrics must send;
            "" for none.
        compare_averages: TFSCALE_COMPARE_AVERAGES. True compares a digest of what every average of
            local SGD gives over the ranks, and ends the job if they differ.
    """

    backend: str = "auto"
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 600.0
    chunk_bytes: int = 1 << 20
    window_bytes: int = 128 << 20
    host_memory: int = 512 << 10
    reduce_threads: int = 0
    pin_core: str = "none"
    ranks_per_host: int = 0
    set_threads: bool = True
    save_timeout_s: float = 10.0
    start_s: float = 60.0
    timeline: str = ""
    log_level: str = ""
    metrics: str = ""
    metrics_token: str = dataclasses.field(default="", repr=False)
    compare_averages: bool = False

    def __post_init__(self) -> None:
        choices, remedy = f"one of {', '.join(BACKENDS)}", "Unset it to choose automatically."
        require(self.backend in BACKENDS, "TFSCALE_BACKEND", choices, self.backend, remedy)
        choices = 'none, last, a list ("7,15") or the first core and a step ("7+8")'
        is_rule = re.fullmatch(r"none|last|\d{1,4}(,\d{1,4})*|\d{1,4}\+\d{1,4}", self.pin_core)
        require(bool(is_rule), "TFSCALE_PIN_CORE", choices, self.pin_core, "The default is none.")
        choices = f"one of {', '.join(LOG_LEVELS)}"
        is_level = not self.log_level or self.log_level in LOG_LEVELS
        require(is_level, "TFSCALE_LOG_LEVEL", choices, self.log_level, "Example: info.")
        if self.metrics:
            parse_address(self.metrics, "TFSCALE_METRICS")
        for name, low, high in (
            ("stall_warning_s", 0.01, float("inf")),
            ("stall_shutdown_s", 0.01, float("inf")),
            ("save_timeout_s", 0.01, float("inf")),
            ("start_s", 0.01, float("inf")),
            ("chunk_bytes", 64, 2**30),
            ("window_bytes", 1, 2**50),
            ("host_memory", 0, 2**50),
            ("reduce_threads", 0, 1024),
            ("ranks_per_host", 0, 2**20),
        ):
            value, remedy = getattr(self, name), f"The default is {getattr(Settings, name)}."
            fits = low <= value <= high
            require(fits, variable_name(name), f"in [{low}, {high}]", value, remedy)


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT", ":PORT" (this host only) or "[IPV6]:PORT".

    `name` is the option or variable that gave it.

    Raises:
        ConfigError: It is none of these, or the port is not in [1, 65535].
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]*)):([0-9]{1,5})", text)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ConfigError(
            f"{name} must be HOST:PORT or :PORT, with a port in [1, 65535]. Received: {name} "
            f"{text}. Example: --metrics :9464"
        )
    return match[1] or match[2] or LOOPBACK, int(match[3])


def variable_name(field: str) -> str:
    """Return the environment variable that sets a field of `Settings`."""
    return f"TFSCALE_{field.upper()}"


def parse_settings(environ: Mapping[str, str]) -> Settings:
    """Read settings from environment variables, with defaults for those missing or empty.

    Raises:
        ConfigError: A value cannot be read or is outside of its range.
    """
    values: dict[str, Any] = {}
    for field, default in vars(Settings()).items():
        text = environ.get(variable_name(field), "")
        if text:
            values[field] = _parse(variable_name(field), text, type(default))
    return Settings(**values)


def _parse(name: str, text: str, kind: type) -> object:
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{name} must be 1 or 0. Received: {name}={text!r}.")
    try:
        return kind(text)
    except ValueError as error:
        word = "whole number" if kind is int else "number"
        raise ConfigError(f"{name} must be a {word}. Received: {name}={text!r}.") from error


def setting(field: str, environ: Mapping[str, str]) -> Any:
    """Return a field of `Settings` of an environment, for launchers."""
    name = variable_name(field)
    return getattr(parse_settings({name: environ.get(name, "")}), field)


@functools.cache
def settings() -> Settings:
    """Return the settings of this process, read from its environment at the first call."""
    return parse_settings(os.environ)


def environment() -> Mapping[str, str]:
    """Return a copy of the environment, for code that looks for a launcher's variables."""
    return dict(os.environ)


def take(variable: str) -> str:
    """Remove a variable from the environment, so that no child inherits it; return its value."""
    return os.environ.pop(variable, "")


def set_environment(variable: str, value: str) -> None:
    """Set an environment variable of this process and of those that it starts."""
    os.environ[variable] = value


def set_default_environment(**variables: str) -> None:
    """Set variables that are not set, for libraries that read them when they start."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def replace_environment(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables for other libraries, None removes one; return what was there before."""
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return before
