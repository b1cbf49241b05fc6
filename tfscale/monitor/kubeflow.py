"""Progress of a Kubeflow TrainJob (KEP-2779): rank 0 posts it to the status server by HTTPS."""

from __future__ import annotations

import datetime
import http.client
import json
import logging
import math
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tfscale.monitor.page import Numbers

logger = logging.getLogger("tfscale")

# Set by the controller in all containers of a TrainJob, where it expects its progress.
_PREFIX = "KUBEFLOW_TRAINER_STATUS_SERVER_"
_EVERY_S = 10.0
_LIMIT_S = 3.0  # of a post
_MOST_FAILURES = 8  # one after another; then nothing is posted any more
_MOST_REMAINING_S = 2**31 - 1  # the field is an int32


@dataclass(frozen=True)
class StatusServer:
    """The server that takes the progress of a TrainJob.

    Attributes:
        host: Name of the server.
        port: Its port.
        path: Of the job's status, with a query if there is one.
        ca_file: Certificates by which the server is known.
        token_file: Token that each post brings. The cluster renews it, so it is read each time.
    """

    host: str
    port: int
    path: str
    ca_file: str
    token_file: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> StatusServer | None:
        """The server that the variables of the controller name; None without them.

        An address that cannot be used is a warning: training does not depend on it.
        """
        url, ca_file, token_file = (environ.get(_PREFIX + n, "") for n in _NAMES)
        if not url:
            return None
        try:
            parts = urlsplit(url)
            port = parts.port or 443
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme != "https" or not parts.hostname or not ca_file or not token_file:
            logger.warning(
                "%sURL must be an https address, with a CA_CERT and a TOKEN beside it. Received: "
                "%s. The progress of the TrainJob is not posted.",
                _PREFIX,
                url,
            )
            return None
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.hostname, port, path, ca_file, token_file)


_NAMES = ("URL", "CA_CERT", "TOKEN")


class Poster:
    """Posts progress every ten seconds, while there is any.

    A post that fails is not repeated; the next one is due after twice the time, and after eight
    failures in a row there is none. No method raises, or takes longer than a few seconds.
    """

    def __init__(self, server: StatusServer, every_s: float = _EVERY_S) -> None:
        self._server, self._every_s = server, every_s
        self._due_at = 0.0
        self._n_failures = 0
        self._last: dict[str, Any] = {}

    @property
    def is_answered(self) -> bool:
        """True if the server has taken the last post."""
        return self._n_failures == 0 and bool(self._last)

    def post(self, numbers: Numbers, is_last: bool = False) -> None:
        """Post the numbers if that is due and they have changed; `is_last`: if they have."""
        now = time.monotonic()
        status = status_of(numbers)
        is_due = now >= self._due_at or is_last
        if self._n_failures >= _MOST_FAILURES or not is_due or not numbers.epoch:
            return
        if status == self._last:
            return
        problem = self._send(status)
        if problem:
            self._n_failures += 1
            if self._n_failures in (1, _MOST_FAILURES):
                more = " No more are posted." if self._n_failures == _MOST_FAILURES else ""
                logger.warning("The progress of the TrainJob was not posted: %s.%s", problem, more)
        else:
            self._n_failures, self._last = 0, status
        self._due_at = time.monotonic() + self._every_s * 2**self._n_failures

    def _send(self, status: dict[str, Any]) -> str:
        """Post a status; return why that failed, or "". Redirects count as failures."""
        connection = None
        try:
            token = Path(self._server.token_file).read_text().strip()
            # Of this server alone, and read each time, since it may be renewed, too.
            context = ssl.create_default_context(cafile=self._server.ca_file)
            connection = http.client.HTTPSConnection(
                self._server.host, self._server.port, timeout=_LIMIT_S, context=context
            )
            now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            body = json.dumps({"trainerStatus": {**status, "lastUpdatedTime": now}})
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", self._server.path, body, headers)
            answer = connection.getresponse()
            return "" if 200 <= answer.status < 300 else f"{answer.status} {answer.reason}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if connection is not None:
                connection.close()


def status_of(numbers: Numbers) -> dict[str, Any]:
    """The fields of `trainerStatus` without its time; those that are not known are left out.

    Examples:
        >>> from tfscale.monitor.kubeflow import status_of
        >>> from tfscale.monitor.page import Numbers
        >>> status_of(Numbers(epoch=1, progress=0.456))["progressPercentage"]
        45
    """
    status: dict[str, Any] = {}
    if numbers.progress is not None:
        status["progressPercentage"] = math.floor(100 * min(max(numbers.progress, 0.0), 1.0))
    if numbers.remaining_s is not None:
        remaining_s = math.ceil(min(max(numbers.remaining_s, 0.0), _MOST_REMAINING_S))
        status["estimatedRemainingSeconds"] = remaining_s
    values: dict[str, Any] = {"currentEpoch": numbers.epoch}
    if numbers.epochs is not None:
        values["totalEpochs"] = numbers.epochs
    values |= {key: value for key, value in numbers.metrics.items() if key}
    status["metrics"] = [{"name": name, "value": str(value)} for name, value in values.items()]
    return status
