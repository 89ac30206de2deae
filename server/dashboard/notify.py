"""Sends alarms to a webhook: a POST request when an alarm begins or ends, repeated until it succeeds.

The service starts it. A message contains the study's name, and the name and level of each alarm that began or ended.
These names come from a fixed list. A message contains no figure, no site and no secret. The URL must be https, or http
on this machine. Redirections are not followed.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from urllib.parse import urlsplit

from common.errors import InvalidInput
from common.https import opener
from server.dashboard.views.alarms import Alarm

TIMEOUT_S = 10.0
RETRY_S = 60.0
FAILED = Alarm(
    "webhook-fails",
    "warning",
    "Alarms do not reach the webhook",
    "The webhook was not told of the alarms shown here. Check the dashboard's log and the URL in `--alarm-webhook`.",
)

logger = logging.getLogger(__name__)


class Webhook:
    """Posts messages to a URL; each lists the alarms that began and ended since the message before.

    Args:
        url: The URL.
        study: Name of the study.
        clock: Monotonic clock in seconds.

    Attributes:
        failing: True if the last message was not accepted.

    Raises:
        InvalidInput: If the URL is neither https nor http on this machine.
    """

    def __init__(self, url: str, *, study: str, clock: Callable[[], float]) -> None:
        parts = urlsplit(url)
        loopback = parts.hostname in ("localhost", "127.0.0.1", "::1")
        if parts.hostname is None or not (parts.scheme == "https" or (parts.scheme == "http" and loopback)):
            raise InvalidInput(
                "--alarm-webhook",
                value=f"{parts.scheme}://{parts.hostname or ''}",
                limit="an https URL, or http to this machine",
            )
        self._url, self._study, self._clock = url, study, clock
        self._told: frozenset[tuple[str, str]] = frozenset()
        self._again = 0.0
        self.failing = False
        self._stopping = threading.Event()

    def tell(self, alarms: Sequence[Alarm]) -> None:
        """Send a message if alarms began or ended since the last message.

        After a failure no message is sent for :data:`RETRY_S` seconds; the change is sent afterwards.

        Args:
            alarms: The current alarms.
        """
        standing = frozenset((alarm.name, str(alarm.level)) for alarm in alarms if alarm != FAILED)
        if standing == self._told or self._clock() < self._again:
            return
        message = {
            "study": self._study,
            "began": [{"name": name, "level": level} for name, level in sorted(standing - self._told)],
            "ended": [{"name": name, "level": level} for name, level in sorted(self._told - standing)],
            "standing": len(standing),
        }
        try:
            _post(self._url, json.dumps(message).encode())
        except (OSError, ValueError, HTTPException) as error:
            logger.warning("webhook=failed reason=%s", type(error).__name__)
            self.failing, self._again = True, self._clock() + RETRY_S
        else:
            self._told, self.failing = standing, False

    def start(self, alarms: Callable[[], Sequence[Alarm]], *, every_s: float) -> None:
        """Call :meth:`tell` repeatedly in a daemon thread until :meth:`stop`.

        Args:
            alarms: Returns the current alarms.
            every_s: Seconds between two calls.
        """

        def follow() -> None:
            while not self._stopping.wait(every_s):
                try:
                    self.tell(alarms())
                except Exception:  # an error while computing the alarms must not end this thread
                    logger.exception("alarms=unknown")

        threading.Thread(target=follow, name="webhook", daemon=True).start()

    def stop(self) -> None:
        """End the thread after its current call."""
        self._stopping.set()


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, data=body, method="POST", headers={"content-type": "application/json"})
    with opener(plain=True).open(request, timeout=TIMEOUT_S) as answer:
        answer.read(1024)
