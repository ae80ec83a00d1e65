"""`postbus restore-mark`: the step after restoring a backup."""

from typing import Final

from postbus.cli.console import Output, confirm, emit, say, stderr
from postbus.cli.options import DryRun, Format, Url, Yes, existing_log
from postbus.telling import many

__all__ = ["EXAMPLES", "restore_mark"]

ACTOR: Final = "restore-mark"
EXAMPLES: Final = """\
Example: postbus restore-mark --dry-run

Example: postbus restore-mark --yes --url sqlite:///restored.db"""


def restore_mark(*, dry_run: DryRun = False, yes: Yes = False, url: Url = None, output: Format = Output.TABLE) -> None:
    """Mark a bus as restored from a backup, before any program opens it again.

    It gets a new log id, so that positions in the old log are refused. Event ids go on from the next multiple of
    1,000,000,000, and leases are given above all earlier ones, so that nothing given out after the backup is given
    again. What was leased when the backup was taken is due now. Tokens revoked and events erased since are as they
    were: revoke and erase them once more. If you restore the same backup a second time, run this once more than the
    first time.
    """
    with existing_log(url, "marking a restored store") as store:
        leased = sum(each.processing for each in store.stats().subscriptions)
        good = sum(each.is_good(store.now()) for each in store.tokens())
        log_id = None
        if not dry_run:
            confirm(f"Mark {store.url} as restored, and put back {many(leased, 'lease')}?", yes=yes)
            with stderr().status("marking …"):
                log_id = store.restore_mark(ACTOR)
        told = {"url": store.url, "log_id": log_id, "leases": leased, "tokens": good, "dry_run": dry_run}
    emit(output, told, lambda: ())
    if output is Output.TABLE:
        would = "would be put back" if dry_run else f"put back; the log is now {log_id}"
        say(f"{told['url']}: {many(leased, 'lease')} {would}")
    say(
        f"{many(good, 'token')} good as of the backup (postbus token list): what was revoked or erased since then must "
        "be revoked and erased again",
        style="yellow",
    )
