"""The commands of the golden set, in the order in which they are run on the shop that `shop.stocked` prepares.

`-o json` is added where `raw` does not say otherwise. What takes long, or runs until it is stopped, is recorded by what
it refuses: `demo`, `worker`, `serve`, and what needs Spark.
"""

from typing import Final, NamedTuple

__all__ = ["COMMANDS", "Command"]


class Command(NamedTuple):
    """A command line, and what it reads."""

    line: str
    stdin: str | None = None
    raw: bool = False


LINES: Final = '{"type": "user.left", "payload": 1}\n\n{"type": "user.left", "tags": ["eu"]}\n'
REFUSED: Final = (
    Command("--version", raw=True),
    Command("nothing", raw=True),
    Command("stats --url sqlite:///nothing.db"),
    Command("stats --url mysql://nowhere"),
    Command("stats --url sqlite:///shop.db?mode=ro"),
    Command("migrate --url http://127.0.0.1:1"),
    Command("demo --events 5"),
    Command("worker shop", raw=True),
    Command("serve --host 0.0.0.0", raw=True),
    Command("serve --lease soon", raw=True),
    Command("torture nothing"),
    Command("pipeline ingest"),
    Command("pipeline ingest --lake lake --continuous soon"),
    Command("pipeline report --output table --to report.html", raw=True),
    Command("pipeline replay --into subscription --rate 5"),
    Command("pipeline replay --into parquet"),
    Command("pipeline run", raw=True),
)
LOOKED: Final = (
    Command("events list"),
    Command("events list --limit 2"),
    Command("events list --limit 2 --after 8"),
    Command("events list --status pending --type order.* --tag eu"),
    Command("events list --subscription mail"),
    Command("events list --subscription nobody"),
    Command("events show 1"),
    Command("events show 2 --subscription sales"),
    Command("events show 4"),
    Command("events show 999"),
    Command("tail -n 2"),
    Command("tail --after 7 --type user.*"),
    Command("tail --after 0 --subscription mail"),
    Command("tail -n 4 --audit --subscription default"),
    Command("tail --after 999"),
    Command("tail --after 1 -n 1"),
    Command("subscriptions list"),
    Command("dlq list"),
    Command("dlq list --type payment.* --limit 1"),
    Command("dlq list --subscription nobody"),
    Command("dlq show 4"),
    Command("dlq show 999"),
    Command("stats"),
    Command("top --once"),
    Command("doctor"),
    Command("doctor --deep"),
    Command("check depth --warn 1 --crit 1000"),
    Command("check depth --crit 1 --subscription mail"),
    Command("check dead --crit 100"),
    Command("check dead --crit 1 --format nagios", raw=True),
    Command("check dead --warn 1 --format nagios --url sqlite:///nothing.db", raw=True),
    Command("check lag --warn 100"),
    Command("check age --warn 5m"),
    Command("check lag --warn 1 --subscription mail"),
    Command("check dead"),
    Command("check dead --warn 2 --crit 1"),
)
CHANGED: Final = (
    Command("subscriptions pause mail"),
    Command("subscriptions pause mail"),
    Command("subscriptions resume mail"),
    Command("subscriptions pause nobody"),
    Command("subscriptions pause lake"),
    Command("subscriptions rewind sales --to beginning --dry-run"),
    Command("subscriptions rewind sales --to 2030-01-01T00:00:00Z --dry-run"),
    Command("subscriptions rewind sales --to 1 --yes"),
    Command("subscriptions rewind sales --to 999 --dry-run"),
    Command("subscriptions rewind sales --to tomorrow"),
    Command("subscriptions rewind mail --to now"),
    Command("subscriptions rewind nobody --to now"),
    Command("subscriptions delete mail --dry-run"),
    Command("subscriptions delete mail"),
    Command("subscriptions delete mail --yes"),
    Command("subscriptions delete mail --yes"),
    Command("dlq retry"),
    Command("dlq retry 4 --type payment.*"),
    Command("dlq retry 999"),
    Command("dlq retry 4 --dry-run"),
    Command("dlq retry --all --type payment.* --dry-run"),
    Command("dlq retry --all"),
    Command("dlq retry --all --subscription nobody --yes"),
    Command("dlq retry 4"),
    Command("dlq purge"),
    Command("dlq purge 10 --dry-run"),
    Command("dlq purge 10"),
    Command("dlq purge 10 --yes"),
    Command("dlq purge --older-than-days 0 --by died_at --dry-run"),
    Command("dlq purge --older-than-days 0 --type payment.* --yes"),
    Command("token list"),
    Command("token create web --scope read --scope publish --expires 90d"),
    Command("token create web --scope everything"),
    Command("token list"),
    Command("token revoke 0123456789ab --yes", raw=True),
    Command(
        """publish order.placed '{"order_id": 8}' --tag eu --key ann --title Order --priority 5 --metadata source=cli"""
    ),
    Command("publish report.due --delay 5m --max-retries 1 --uid report-1"),
    Command("publish order.placed NaN"),
    Command("publish 'order.*'"),
    Command("publish -", LINES),
    Command("publish user.left -", "1\n2\n"),
    Command("publish -", '{"type": "a"}\n{"type": "*"}\n'),
    Command("publish - -o jsonl", '{"type": "user.left"}\n', raw=True),
    Command("import orders --type =order.placed --payload body --from sqlite:///old.db --dry-run"),
    Command("import orders --type =order.placed --payload body --key customer --from sqlite:///old.db"),
    Command("import nothing --type =order.placed --payload body --from sqlite:///old.db"),
    Command("erase"),
    Command("erase --uid order-1 --dry-run"),
    Command("erase --uid order-1"),
    Command("erase --uid order-1 --yes"),
    Command("events show 1"),
    Command("pipeline compact --lake lake"),
    Command("pipeline archive --lake lake --older-than 30d --dry-run"),
)
MADE: Final = (
    Command("migrate"),
    Command("migrate --sql", raw=True),
    Command("migrate --sql --roles", raw=True),
    Command("torture --list"),
    Command("grafana --what alerts", raw=True),
    Command("grafana --output monitoring", raw=True),
    Command("bench --events 2 --seconds 60 --rate 1000"),
    Command("publish report.due --delay 5m --max-retries 1 --uid report-1"),
    Command("publish report.due 1 --uid report-1"),
    Command("restore-mark --dry-run"),
    Command("restore-mark"),
    Command("restore-mark --yes"),
    Command("publish after.restore"),
)
COMMANDS: Final = (*REFUSED, *LOOKED, *CHANGED, *MADE)
