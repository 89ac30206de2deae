"""Defines ``consilium dashboard``: serves the operator's dashboard and manages its users."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from common.errors import InvalidInput
from consilium.cli.options import LOG_TO, check_port
from consilium.cli.say import say
from server.dashboard.auth import Role, users_file

app = typer.Typer(
    add_completion=False,
    help="Serve a study's dashboard: budget, sites, ledger, labels, student.\n\n"
    "Options from --study to --oidc can also be environment variables, such as CONSILIUM_DASHBOARD_STUDY.",
)
user_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Manage the users who may sign in to the dashboard."
)
app.add_typer(user_app, name="user")

FromStdin = Annotated[bool, typer.Option("--password-stdin", help="Read the password from standard input, one line.")]
Name = Annotated[str, typer.Argument(help="The user's name.")]


def _setting(name: str, text: str, **limits: Any) -> Any:
    return typer.Option(envvar=f"CONSILIUM_DASHBOARD_{name}", show_envvar=False, help=text, **limits)


State = Annotated[
    Path, _setting("STATE", "The dashboard's own directory, where it stores its users and their decisions on labels.")
]


_PROXY = "Address of the TLS proxy before the dashboard; its X-Forwarded-For and X-Forwarded-Proto headers are trusted."
_HOSTS = "Host names that browsers use for the dashboard, separated by commas, besides those in the certificate."
_WEBHOOK = "Address (https) to which the names of alarms are sent when they begin and end."
_OIDC = "Settings (TOML) of an OpenID Connect provider, by which people sign in besides the local users."
_TOKEN = "File with the bearer token that a metrics scraper needs for /metrics."


@app.callback(invoke_without_command=True)
def dashboard(
    context: typer.Context,
    study: Annotated[Path | None, _setting("STUDY", "The study's directory; a read-only mount is enough.")] = None,
    state: State = Path("dashboard"),
    bind: Annotated[str, _setting("BIND", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _setting("PORT", "Port to listen on.", min=1, max=65535)] = 8050,
    certificate: Annotated[Path | None, _setting("CERTIFICATE", "TLS certificate (PEM).")] = None,
    key: Annotated[Path | None, _setting("KEY", "Private key of the certificate (PEM).")] = None,
    behind_proxy: Annotated[str | None, _setting("BEHIND_PROXY", _PROXY)] = None,
    hosts: Annotated[str, _setting("HOSTS", _HOSTS)] = "",
    metrics_token_file: Annotated[Path | None, _setting("METRICS_TOKEN_FILE", _TOKEN)] = None,
    alarm_webhook: Annotated[str | None, _setting("ALARM_WEBHOOK", _WEBHOOK)] = None,
    oidc: Annotated[Path | None, _setting("OIDC", _OIDC)] = None,
    log_to: Annotated[list[str] | None, LOG_TO] = None,
    session_hours: Annotated[
        float, typer.Option(min=0.001, max=168, help="Hours after which a user must sign in again.")
    ] = 12.0,
) -> None:
    """Serve the dashboard of one study. It reads the study's directory and can neither charge nor change it.

    Example: consilium dashboard --study trial --state trial-dashboard
    """
    if context.invoked_subcommand is not None:
        return
    if study is None:
        raise InvalidInput("--study is missing", remedy="give the study's directory: --study DIRECTORY")
    from server.dashboard.app import Options
    from server.dashboard.oidc import load_settings
    from server.dashboard.serve import Listen, options_for, serve

    listen = Listen(host=bind, port=port, certificate=certificate, key=key, proxy=behind_proxy)
    options = Options(
        study=study,
        state=state,
        session_hours=session_hours,
        metrics_token=None if metrics_token_file is None else read_token(metrics_token_file),
        certifier=certificate_command,
        webhook=alarm_webhook,
        oidc=None if oidc is None else load_settings(oidc),
        log_to=tuple(log_to or ()),
    )
    options = options_for(listen, options, hosts=hosts)
    check_port(bind, port)
    if oidc is None and not users_file(state).users():
        say(f"nobody can sign in yet: consilium dashboard user add NAME --role operator --state {state}", err=True)
    say(f"dashboard: {listen.url}")
    sys.stdout.flush()
    serve(options, listen)


@user_app.command("add")
def add(
    name: Name,
    role: Annotated[Role, typer.Option(help="What the user may do.")],
    state: State = Path("dashboard"),
    password_stdin: FromStdin = False,
) -> None:
    """Add a user. The command asks for the password and keeps only a salted scrypt hash of it.

    Example: consilium dashboard user add ada --role operator --state trial-dashboard
    """
    users_file(state).add(name, role, _password(password_stdin))
    say(f"{name} may sign in as {role}")


@user_app.command("password")
def password(name: Name, state: State = Path("dashboard"), password_stdin: FromStdin = False) -> None:
    """Give a user a new password; sessions opened with the old one end.

    Example: consilium dashboard user password ada --state trial-dashboard
    """
    users = users_file(state)
    known = users.users().get(name)
    if known is None:
        raise InvalidInput("user", value=name, limit="an existing user", remedy="see `consilium dashboard user list`")
    users.add(name, known.role, _password(password_stdin), replace=True)
    say(f"{name} has a new password")


@user_app.command("remove")
def remove(name: Name, state: State = Path("dashboard")) -> None:
    """Remove a user and end the user's sessions.

    Example: consilium dashboard user remove ada --state trial-dashboard
    """
    users_file(state).remove(name)
    say(f"{name} can no longer sign in")


@user_app.command("list")
def list_users(state: State = Path("dashboard")) -> None:
    """List the users who may sign in, with their roles.

    Example: consilium dashboard user list --state trial-dashboard
    """
    for user in users_file(state).users().values():
        say(f"{user.name:<24} {user.role}")


def certificate_command(study: Path, out: Path, reports: Path) -> Sequence[str]:
    """Return the command that writes a study's certificate into ``out`` at low priority.

    Args:
        study: The study's directory.
        out: Folder for the certificate.
        reports: Folder of the reports that hospitals sent to the dashboard.

    Returns:
        The command's words.
    """
    program = (
        "from server.dashboard.jobs import lower_priority; lower_priority(); "
        "from consilium.cli.main import main; main()"
    )
    words = ["certificate", str(study), "--out", str(out), "--reports", str(reports), "--no-copy"]
    return [sys.executable, "-P", "-c", program, *words]


def read_token(path: Path) -> str:
    """Read a metrics token from its file, without surrounding white space.

    Args:
        path: The file.

    Returns:
        The token.

    Raises:
        InvalidInput: If the file cannot be read, or the token has fewer than 16 characters.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidInput(
            "--metrics-token-file", value=str(path), limit=f"a readable file; the system says: {error.strerror}"
        ) from error
    if len(token) < 16:
        raise InvalidInput(
            "metrics token",
            value=f"{len(token)} characters",
            limit="at least 16 characters",
            remedy="write a longer random token",
        )
    return token


def _password(from_stdin: bool) -> str:
    """Read or ask for a password; raise InvalidInput if the input ends without one."""
    if from_stdin:
        return sys.stdin.readline().rstrip("\r\n")
    try:
        return str(typer.prompt("Password", hide_input=True, confirmation_prompt=True))
    except typer.Abort:
        raise InvalidInput(
            "no password was typed, so nothing was changed",
            remedy="run the command at a terminal, or give the password in one line with --password-stdin",
        ) from None
