"""Runs Flower's SuperNode in a process that ends when the SuperNode stops talking to the server.

``client.operations.daemons`` starts this program, and its supervisor starts the program again after it ended. Flower's
own command keeps running, offline, in two cases:

* A call to the server failed and Flower did not repeat it. Its main loop ends, but the thread of the SuperNode's local
  API does not.
* The thread that sends heartbeats failed.

In both cases this process ends after a line that says why, in the second with Flower's exit status 0. A call that
fails before the server has answered, such as a TLS handshake that timed out, is repeated without a limit. A certificate
that is not accepted ends the process at once, as Flower intends. Each heartbeat that the server accepts touches a file,
by which the supervisor sees whether the node is online.

Flower's SuperNode asks the server for a message every three seconds. The steps of a query follow each other closely. So
for a minute after its start and after each reply, this process asks more often: after 0.2 s, 0.4 s and 0.8 s, then
every second.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

LOST = 1
"""Exit status of a SuperNode that has lost the server."""
BUSY_S = 60.0
"""For this many seconds after the start or a reply, each wait for a message is at most :data:`BUSY_WAIT_S`."""
FIRST_WAIT_S, BUSY_WAIT_S = 0.2, 1.0
"""First and longest wait in seconds between two requests for a message during :data:`BUSY_S`. Each wait is twice the
one before, up to the longest. After each reply the server gets at most two more requests than if every wait were one
second. :data:`FIRST_WAIT_S` is also the first wait for a part of an announced message that SuperLink has not stored;
Flower waits 1 s for such a part.
"""
LOCAL_WAIT_S = 0.1
"""Longest wait in seconds before the SuperNode looks again whether the worker on this machine has answered."""


def main() -> None:
    """Run the SuperNode. The first argument is the file of the last heartbeat; the others are Flower's own."""
    from common.engine import FleetHttpClient, fleet_http_connection, flower_supernode, pull_objects, supernode_loop

    contact = Path(sys.argv.pop(1))
    contact.unlink(missing_ok=True)
    FleetHttpClient.SendNodeHeartbeat = noting(FleetHttpClient.SendNodeHeartbeat, contact)
    flower = fleet_http_connection
    flower.make_simple_http_retry_invoker = repeating(flower.make_simple_http_retry_invoker)
    waits = ShorterWaits()
    supernode_loop.time = waits
    supernode_loop.pull_objects = functools.partial(pull_objects, initial_backoff=FIRST_WAIT_S)
    supernode_loop._push_messages = waits.busy_after(supernode_loop._push_messages)
    threading.excepthook = _end
    flower_supernode()
    _report_error("the connection to the server ended")
    os._exit(LOST)  # Flower's local API has a thread that would keep the process running


class ShorterWaits:
    """Takes the place of the module ``time`` in Flower's main loop, and makes the loop's waits shorter for a while.

    The waits are shorter after the start and after each reply.

    Args:
        clock: Returns the time in seconds; it never goes back.
        sleep: Waits for a number of seconds.
    """

    _busy_until: float
    _wait_s: float

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._wait_shortly()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Wait for at most a number of seconds. Flower's loop has two kinds of waits.

        * Waits below one second are for the answer of the worker on this machine. They last at most
          :data:`LOCAL_WAIT_S`.
        * Waits of one second or more are for a message from the server. In the :data:`BUSY_S` after the start or a
          reply, the first lasts :data:`FIRST_WAIT_S`, and each further one twice as long, up to :data:`BUSY_WAIT_S`.
          Later they are as long as Flower wants.

        Args:
            seconds: The wait that Flower wants.
        """
        if seconds < 1:
            self._sleep(min(seconds, LOCAL_WAIT_S))
        elif self._clock() < self._busy_until:
            self._sleep(min(seconds, self._wait_s))
            self._wait_s = min(2 * self._wait_s, BUSY_WAIT_S)
        else:
            self._sleep(seconds)

    def busy_after(self, push: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Flower's function that sends a reply: after each call, even a failed one, waits are short again."""

        @functools.wraps(push)
        def pushed(*args: Any, **kwargs: Any) -> Any:
            try:
                return push(*args, **kwargs)
            finally:
                self._wait_shortly()

        return pushed

    def _wait_shortly(self) -> None:
        self._busy_until, self._wait_s = self._clock() + BUSY_S, FIRST_WAIT_S


def noting(heartbeat: Callable[..., Any], contact: Path) -> Callable[..., Any]:
    """Return Flower's heartbeat call, with a file touched whenever the server accepts a heartbeat.

    Args:
        heartbeat: ``FleetHttpClient.SendNodeHeartbeat``.
        contact: The file.

    Returns:
        The call, with the same arguments and result.
    """

    @functools.wraps(heartbeat)
    def noted(*args: Any, **kwargs: Any) -> Any:
        answer = heartbeat(*args, **kwargs)
        if answer.success:
            contact.touch()
        return answer

    return noted


def repeating(make_retries: Callable[[], Any]) -> Callable[[], Any]:
    """Return a replacement of Flower's rule for repeating calls, under which unanswered calls are always repeated.

    Flower gives a call up if the error's text contains ``ssl``. A TLS handshake that timed out has such a text, and a
    reply of this site that waits in memory would be lost. Errors about certificates, and errors in the server's answer,
    are still decided by Flower's rule. When the server refuses a request (status 401), Flower ends this process without
    a word, so the server's reason is written to the log first.

    Args:
        make_retries: Flower's function that makes its rule, ``make_simple_http_retry_invoker``.

    Returns:
        A function to use in its place.
    """

    def make() -> Any:
        retries = make_retries()
        gives_up = retries.should_giveup

        def should_giveup(error: Exception) -> bool:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
                word = re.fullmatch(r"[a-z-]{1,40}", error.response.text.strip())
                sys.stderr.write(f"[code: 401] refused: {word[0] if word else 'unknown'}\n")  # Flower ends silently
                sys.stderr.flush()
            unanswered = isinstance(error, httpx.TransportError) and "certificate" not in str(error).lower()
            return not unanswered and bool(gives_up(error))

        retries.should_giveup = should_giveup
        return retries

    return make


def _end(failed: threading.ExceptHookArgs) -> None:
    """Interrupt the process after one of its threads died. The SuperNode then tells the server that it leaves."""
    _report_error(f"the heartbeats to the server ended: {failed.exc_type.__name__}: {failed.exc_value}")
    os.kill(os.getpid(), signal.SIGINT)


def _report_error(what: str) -> None:
    sys.stderr.write(f"error: {what}; the SuperNode is started again\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
