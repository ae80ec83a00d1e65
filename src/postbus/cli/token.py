"""`postbus token`: who may use the HTTP API, and for what."""

from datetime import datetime, timedelta
from typing import Annotated, Any, Final

import typer

from postbus.cli.console import Output, confirm, emit, line, say, table
from postbus.cli.options import Format, Url, Yes, existing_log, parse_seconds
from postbus.errors import NotFound
from postbus.model import Token
from postbus.tokens import SCOPES, make_token

__all__ = ["group"]

COLUMNS: Final = "ID  NAME  SCOPES  MADE  EXPIRES  STATE"
group = typer.Typer(name="token", no_args_is_help=True, epilog="Example: postbus token create web --scope publish")
Expires = typer.Option(parser=parse_seconds, metavar="TIME", help="How long it may be used, such as 90d.")
Scopes = typer.Option(
    "--scope",
    help=f"What it allows, {', '.join(SCOPES)}; may be given again. No scope stands for another.",
    show_default=False,
)


@group.callback()
def token() -> None:
    """Make, list and revoke the tokens that the HTTP API asks for.

    To replace one without a gap: make the new one, give it out, then revoke the old one.
    """


@group.command(epilog="Example: postbus token create billing --scope work --scope read --expires 90d")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whom it is for.", show_default=False)],
    scope: Annotated[list[str], Scopes],
    *,
    expires: Annotated[float | None, Expires] = None,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Make a token and print it. It is shown only now: of the secret only a digest is kept.

    Send it as `Authorization: Bearer TOKEN`. Without --expires it holds until it is revoked.
    """
    with existing_log(url, "managing tokens") as store:
        made, secret = make_token(store, name, scope, None if expires is None else timedelta(seconds=expires))
        now = store.now()
    emit(output, _told(made, now) | {"token": secret}, lambda: [line(secret)])
    if output is Output.TABLE:
        say(f"token {made.id} for {name}: {', '.join(made.scopes)}. It is shown only this once.", style="dim")


@group.command("list", epilog="Example: postbus token list -o json")
def list_tokens(*, url: Url = None, output: Format = Output.TABLE) -> None:
    """List tokens, those that were revoked or have expired too; never their secrets."""
    with existing_log(url, "managing tokens") as store:
        rows = [_told(each, store.now()) for each in store.tokens()]
    emit(output, rows, lambda: [table(COLUMNS, map(_row, rows))])
    if not rows:
        say("no tokens: make one with postbus token create NAME --scope publish", style="dim")


@group.command(epilog="Example: postbus token revoke 3f2a9c81d0e4")
def revoke(
    identity: Annotated[str, typer.Argument(metavar="ID", help="As `token list` shows it.", show_default=False)],
    *,
    yes: Yes = False,
    url: Url = None,
) -> None:
    """Let a token be used no more: servers that run learn of it within seconds."""
    with existing_log(url, "managing tokens") as store:
        found = next((each for each in store.tokens() if each.id == identity), None)
        if found is None:
            raise NotFound(f"there is no token {identity!r}: postbus token list")
        confirm(f"Revoke the token of {found.name}?", yes=yes)
        store.revoke_token(identity)
    say(f"revoked {identity} ({found.name})")


def _told(token: Token, now: datetime) -> dict[str, Any]:
    state = "good" if token.is_good(now) else "revoked" if token.revoked_at is not None else "expired"
    told = {"id": token.id, "name": token.name, "scopes": list(token.scopes), "created_at": token.created_at}
    return told | {"expires_at": token.expires_at, "revoked_at": token.revoked_at, "state": state}


def _row(told: dict[str, Any]) -> tuple[object, ...]:
    scopes = " ".join(told["scopes"])
    return told["id"], told["name"], scopes, told["created_at"], told["expires_at"] or "never", told["state"]
