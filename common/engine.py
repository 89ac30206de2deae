"""Imports Flower's internal names. No other module imports them. For each name it states why the name is needed.

The names in :data:`INTERNALS` are not part of Flower's public interface, so any release may move them. Other modules
import them as ``from common.engine import NAME``. Flower's public modules (``flwr.app``, ``flwr.clientapp``,
``flwr.serverapp``) are imported directly. A name is loaded at its first use, so a site loads nothing of SuperLink.

``python -m common.engine`` checks that the installed Flower has every name; docs/lab/flower.md says how to upgrade.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.process import base_env

RUNTIME_CLIENT = "_runtime_client"
"""The attribute of a ServerApp's Grid that calls SuperLink: a ``RuntimeHttpClient``."""
ACQUIRE_TASK = "/flwr.proto.Runtime/AcquireTask"
"""The remote call of a SuperNode's runtime that requires the SuperNode's secret."""
AUTHENTICATION_SWITCH = "FLWR_OIDC_ENABLED"
"""The environment variable that makes SuperLink use ``config_loader`` to authenticate calls of its control routes."""
TABLES = {
    "message_ins": ("message_id", "created_at", "ttl"),
    "message_res": ("message_id", "reply_to_message_id", "src_node_id"),
    "node": ("online_until", "heartbeat_interval"),
    "objects": ("object_id", "content", "is_available"),
    "run_objects": ("object_id", "run_id"),
    "run": ("run_id", "primary_task_id"),
    "task": ("task_id", "finished_at"),
}
"""SuperLink's tables and the columns that :mod:`server.operations.storage` reads and writes."""


@dataclass(frozen=True, slots=True)
class Internal:
    """A name inside Flower that is not public.

    Attributes:
        where: ``module:name``, or ``module`` for a whole module.
        stands_for: What Consilium uses it for.
        needs: Names of its fields, members or parameters that are used.
    """

    where: str
    stands_for: str
    needs: tuple[str, ...] = ()

    def load(self) -> Any:
        """Import the name.

        Returns:
            The module, class or function.

        Raises:
            ImportError: If Flower has moved the module.
            AttributeError: If Flower has moved the name.
        """
        module, _, name = self.where.partition(":")
        found = importlib.import_module(module)
        return getattr(found, name) if name else found

    def missing(self) -> str | None:
        """Return a sentence that says what the installed Flower lacks of this name; None if nothing is missing."""
        try:
            found = self.load()
        except (ImportError, AttributeError) as error:
            return f"{self.where} is gone ({error})"
        gone = [name for name in self.needs if name not in _names(found)]
        return f"{self.where} has no {', '.join(gone)}" if gone else None


def _names(found: Any) -> set[str]:
    if fields := getattr(getattr(found, "DESCRIPTOR", None), "fields_by_name", None):
        return {*fields, *dir(found)}
    if inspect.isfunction(found):
        return set(inspect.signature(found).parameters)
    names = set(dir(found))
    if inspect.isclass(found) and inspect.isfunction(found.__init__):
        names |= set(inspect.signature(found.__init__).parameters)
    return names


_PROTO, _CORE = "flwr.proto", "flwr.supercore"

INTERNALS = {
    # a reply on its way through SuperLink: server/aggregation/inbox.py, server/operations/storage.py
    "MessageProto": Internal(f"{_PROTO}.message_pb2:Message", "a reply as SuperLink has it", ("metadata", "error")),
    "ObjectTree": Internal(
        f"{_PROTO}.message_pb2:ObjectTree", "the names of a reply's objects", ("object_id", "children")
    ),
    "Node": Internal(f"{_PROTO}.node_pb2:Node", "who asks SuperLink: a ServerApp is node 1", ("node_id",)),
    "PullAppMessagesRequest": Internal(
        f"{_PROTO}.runtime_pb2:PullAppMessagesRequest", "a ServerApp asks which replies are announced", ("message_ids",)
    ),
    "PullObjectRequest": Internal(
        f"{_PROTO}.message_pb2:PullObjectRequest", "a ServerApp asks for one object of a reply", ("node", "object_id")
    ),
    "ConfirmMessageReceivedRequest": Internal(
        f"{_PROTO}.message_pb2:ConfirmMessageReceivedRequest",
        "a ServerApp has a SuperLink delete a reply",
        ("node", "message_object_id"),
    ),
    "RunNotRunningException": Internal(f"{_CORE}.run:RunNotRunningException", "SuperLink's answer once a run is over"),
    # what a node may store at SuperLink: server/operations/storage.py
    "fleet_handlers": Internal(
        "flwr.superlink.servicer.fleet.fleet_handlers",
        "SuperLink's handlers of what nodes send; ours are put in front of four",
        ("activate_node", "push_messages", "push_object", "send_node_heartbeat"),
    ),
    "PushMessagesRequest": Internal(
        f"{_PROTO}.fleet_pb2:PushMessagesRequest",
        "a node's announcement of a reply",
        ("node", "messages_list", "message_object_trees"),
    ),
    "PushMessagesResponse": Internal(
        f"{_PROTO}.fleet_pb2:PushMessagesResponse", "the response to an announced reply", ("reconnect", "results")
    ),
    "Reconnect": Internal(
        f"{_PROTO}.fleet_pb2:Reconnect", "the time after which a node may connect again", ("reconnect",)
    ),
    "PushObjectRequest": Internal(
        f"{_PROTO}.message_pb2:PushObjectRequest",
        "a node stores an object of a reply",
        ("node", "object_id", "object_content", "session_id"),
    ),
    "PushObjectResponse": Internal(
        f"{_PROTO}.message_pb2:PushObjectResponse", "the response to a stored object", ("stored",)
    ),
    "sql_corestate": Internal(
        f"{_CORE}.corestate.sql_corestate",
        "SuperLink's tasks; the time in which a started ServerApp must report is set there",
        ("HEARTBEAT_DEFAULT_INTERVAL", "HEARTBEAT_PATIENCE"),
    ),
    "SqlMixin": Internal(
        f"{_CORE}.sql_mixin:SqlMixin", "SuperLink's database, whose sessions take turns", ("session",)
    ),
    "int64_to_uint64": Internal(
        f"{_CORE}.utils:int64_to_uint64", "the id of a node or run from its form in the database"
    ),
    "uint64_to_int64": Internal(f"{_CORE}.utils:uint64_to_int64", "the form of an id in the database"),
    "log": Internal(f"{_CORE}:log", "SuperLink's own log"),
    # who may call SuperLink's control routes: server/operations/superlink.py
    "flower_superlink": Internal("flwr.superlink.cli:flower_superlink", "the command of that name"),
    "config_loader": Internal(
        "flwr.superlink.config_loader",
        "the place where SuperLink looks for its authentication; ours is put there",
        ("get_control_authn_ee_plugins",),
    ),
    "AuthnType": Internal(
        "flwr.common.constant:AuthnType", "the kind under which our authentication is registered", ("OIDC",)
    ),
    "ACCESS_TOKEN_KEY": Internal(
        "flwr.common.constant:ACCESS_TOKEN_KEY", "the header that carries the operators' secret"
    ),
    "AccountInfo": Internal(
        f"{_CORE}.auth.typing:AccountInfo", "the account of a caller; Flower has one", ("flwr_aid", "account_name")
    ),
    "NOOP_FLWR_AID": Internal("flwr.common.constant:NOOP_FLWR_AID", "the id of Flower's one account"),
    "NOOP_ACCOUNT_NAME": Internal("flwr.common.constant:NOOP_ACCOUNT_NAME", "the name of Flower's one account"),
    # which node has a key: server/operations/registered_node.py
    "read_superlink_connection": Internal(
        "flwr.cli.flower_config:read_superlink_connection", "a connection of config.toml"
    ),
    "init_http_client_from_connection": Internal(
        "flwr.cli.utils:init_http_client_from_connection", "a client of SuperLink's control routes"
    ),
    "try_load_public_key": Internal(
        "flwr.cli.supernode.register:try_load_public_key", "a node's key as Flower reads it"
    ),
    "ListNodesRequest": Internal(f"{_PROTO}.control_pb2:ListNodesRequest", "asks for all nodes and their keys"),
    # a SuperNode that ends when it has lost the server: client/operations/supernode.py
    "flower_supernode": Internal("flwr.supernode.cli:flower_supernode", "the command of that name"),
    "fleet_http_connection": Internal(
        "flwr.supernode.fleet_http_connection",
        "the place where a SuperNode takes its rule for repeating calls; ours is put there",
        ("make_simple_http_retry_invoker",),
    ),
    "supernode_loop": Internal(
        "flwr.supernode.start_client_internal",
        "a SuperNode's main loop, where shorter waits for messages and their parts are set",
        ("time", "_push_messages", "pull_objects"),
    ),
    "pull_objects": Internal(
        f"{_CORE}.inflatable.inflatable_utils:pull_objects",
        "fetches the parts of a message, and waits for those not stored yet",
        ("initial_backoff",),
    ),
    "FleetHttpClient": Internal(
        "flwr.supernode.fleet_http_client:FleetHttpClient", "a SuperNode's calls of SuperLink", ("SendNodeHeartbeat",)
    ),
    # a SuperNode's tasks, taken by our launcher: client/app.py
    "load_superexec_auth_secret": Internal(f"{_CORE}.auth:load_superexec_auth_secret", "the SuperNode's secret file"),
    "RuntimeHttpClient": Internal(
        f"{_CORE}.runtime:RuntimeHttpClient",
        "asks a SuperNode's or SuperLink's runtime",
        ("from_server_address", "AcquireTask", "PullMessages", "PullObject", "ConfirmMessageReceived", "close"),
    ),
    "RuntimeVersionHttpInterceptor": Internal(
        f"{_CORE}.interceptors:RuntimeVersionHttpInterceptor",
        "states the version of the calling Flower",
        ("component_name",),
    ),
    "SuperExecAuthHttpInterceptor": Internal(
        f"{_CORE}.interceptors:SuperExecAuthHttpInterceptor",
        "proves that we have the SuperNode's secret",
        ("master_secret", "protected_methods"),
    ),
    "RuntimeTokenHttpInterceptor": Internal(
        f"{_CORE}.interceptors:RuntimeTokenHttpInterceptor", "proves that we took the task"
    ),
    "AcquireTaskRequest": Internal(
        f"{_PROTO}.runtime_pb2:AcquireTaskRequest", "asks for the next task", ("supported_task_types",)
    ),
    "TaskType": Internal(
        f"{_CORE}.constant:TaskType", "the kinds of tasks that messages become", ("CLIENT_APP", "AGENT_APP")
    ),
    "HeartbeatSender": Internal(
        f"{_CORE}.heartbeat:HeartbeatSender", "reports that a task is being worked on", ("start", "stop", "is_running")
    ),
    "make_task_heartbeat_fn_http": Internal(
        f"{_CORE}.heartbeat:make_task_heartbeat_fn_http", "the content of that report"
    ),
    "pull_task_input": Internal("flwr.supernode.runtime.run_clientapp:pull_task_input", "a task's message"),
    "clientapp_process": Internal(
        "flwr.supernode.runtime.run_clientapp",
        "the module of pull_task_input, where a shorter wait for a message's parts is set",
        ("pull_and_inflate_object_from_tree",),
    ),
    "pull_and_inflate_object_from_tree": Internal(
        f"{_CORE}.inflatable.inflatable_utils:pull_and_inflate_object_from_tree",
        "fetches the parts of a message, waits likewise, and builds the message",
        ("initial_backoff",),
    ),
    "push_message": Internal("flwr.supernode.runtime.run_clientapp:push_message", "its reply"),
    "push_task_output": Internal("flwr.supernode.runtime.run_clientapp:push_task_output", "sends the result of a task"),
    "SubStatus": Internal("flwr.common.constant:SubStatus", "the outcome of a task", ("COMPLETED", "FAILED")),
}
"""Every internal name of Flower, by the name under which this module exports it. A test compares them and their
``needs`` with the pinned version of Flower."""


def __getattr__(name: str) -> Any:
    if name not in INTERNALS:
        raise AttributeError(f"{name} is not among the internal names of Flower in INTERNALS")
    globals()[name] = found = INTERNALS[name].load()
    return found


def flower_env(home: Path, **extra: str) -> dict[str, str]:
    """Return the environment of a Flower process, with its own home and without telemetry, update checks or
    installation of packages.

    Args:
        home: The process's Flower home.
        **extra: Further variables.

    Returns:
        The environment.
    """
    return base_env(
        FLWR_HOME=str(home.absolute()),
        FLWR_TELEMETRY_ENABLED="0",
        FLWR_DISABLE_UPDATE_CHECK="1",
        FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
        **extra,
    )


def problems() -> list[str]:
    """Return a sentence for each internal name of which the installed Flower lacks a part; empty if none is missing."""
    return [f"{name} ({one.stands_for}): {gone}" for name, one in INTERNALS.items() if (gone := one.missing())]


if __name__ == "__main__":
    found = problems()
    sys.stdout.write("".join(f"{line}\n" for line in found) or "every internal of Flower is where it is expected\n")
    sys.exit(bool(found))
