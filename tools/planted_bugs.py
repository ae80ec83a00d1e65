"""Plant bugs in a copy of postbus, one at a time, and see that each is caught: `python tools/planted_bugs.py [NAME …]`.

A proof is worth what it notices. Each bug is a change of one line that a tired person could make; the trial beside it
must go red on it: a fault of `postbus torture`, which names the verdict, or a test. The table goes to
docs/planted-bugs.json, from which docs/guarantees.md has it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "planted-bugs.json"
FAILED, FINDINGS = 1, 3


@dataclass(frozen=True)
class Bug:
    """A line of `file`, what becomes of it, and what must notice it.

    That is a fault with a store and trials, a soak with a store and seconds, or a test.
    """

    name: str
    file: str
    line: str
    planted: str
    caught_by: str
    what: str


BUGS = (
    Bug(
        "no-epoch-check",
        "store/deliveries.py",
        "return place < len(self.ids) and self.ids[place] == event_id and not self.done >> place & 1",
        "return event_id in self.ids",
        "tests/contract/test_blocks.py -k sqlite",
        "A late worker completes what another holds by now",
    ),
    Bug(
        "passed-without-rows",
        "store/sqlite/claim.py",
        "    _put(session, number, others)\n    if last > position:",
        "    if last > position:",
        "tests/contract/test_claim.py -k sqlite",
        "What a pass leaves to other workers is in no place (C1)",
    ),
    Bug(
        "passed-unread",
        "store/sqlite/claim.py",
        '        db.run("move_cursor", (last, max(last, looked), number))',
        '        db.run("move_cursor", (catalog.head, max(catalog.head, looked), number))',
        "tests/contract/test_claim.py -k sqlite",
        "A cursor moves to the head of the log, past what was not read (C2)",
    ),
    Bug(
        "skips-forgotten",
        "store/sqlite/claim.py",
        "            wanted = story.event_id not in skips and not erased",
        "            wanted = not erased",
        "tests/contract/test_blocks.py -k sqlite",
        "What was dealt with above the cursor is handed out again (C1)",
    ),
    Bug(
        "neighbours-die-unrun",
        "store/sqlite/claim.py",
        "        if shared and not room.is_last(each):",
        "        if shared:",
        "tests/contract/test_blocks.py -k sqlite",
        "An attempt that may not be repeated shares a block with others (I12)",
    ),
    Bug(
        "last-attempts-ahead",
        "worker.py",
        "            claimed = self._claiming.claim(subscription, limit, alone=not self._held, free=free)",
        "            claimed = self._claiming.claim(subscription, limit, alone=not self._held)",
        "tests/crash/test_poison.py -k begun",
        "A worker claims last attempts ahead of its handlers: killed, it ends some that it had not begun (I12)",
    ),
    Bug(
        "pruned-under-a-cursor",
        "store/status.py",
        "        elif type_ is None or session.catalog.wants(session.catalog.name(number), type_, tags):",
        "        elif type_ is None:",
        "tests/contract/test_prune.py -k sqlite",
        "Pruning removes what a queue has still to come to (I14)",
    ),
    Bug(
        "gaps-forgotten",
        "store/postgres/migrations/0001_initial.sql",
        "        IF last - pos > cardinality(fresh) THEN",
        "        IF false THEN",
        "tests/postgres/test_core_claims.py -k late_events",
        "Ids that a queue has passed without seeing them are not looked for again (C1, C3)",
    ),
    Bug(
        "skips-forgotten-pg",
        "store/postgres/migrations/0001_initial.sql",
        "WHERE k.subscription = sub AND k.event_id <= last) THEN",
        "WHERE k.subscription = sub AND k.event_id <= last AND false) THEN",
        "tests/postgres/test_core_claims.py -k overtakes",
        "What was dealt with above the cursor is handed out again (C1)",
    ),
    Bug(
        "position-is-the-sequence",
        "store/postgres/migrations/0001_initial.sql",
        "           SET position = coalesce(last, pos), missing = rest,",
        "           SET position = pg_sequence_last_value('postbus.events_id_seq'), missing = rest,",
        "tests/postgres/test_core.py -k handed_out_once",
        "A cursor moves to where the sequence stands, past what was not read (C2)",
    ),
    Bug(
        "closed-by-the-sequence",
        "store/postgres/migrations/0001_initial.sql",
        "            safe := postbus.head('events');\n        END IF;",
        "            safe := pg_sequence_last_value('postbus.events_id_seq');\n        END IF;",
        "tests/postgres/test_core_claims.py -k rolled_back",
        "Ids of open transactions are given up as rolled back (C3)",
    ),
    Bug(
        "closed-although-some-were-left",
        "store/postgres/migrations/0001_initial.sql",
        "    IF safe IS NOT NULL AND cardinality(late) < asked THEN",
        "    IF safe IS NOT NULL THEN",
        "tests/postgres/test_core_claims.py -k late_events",
        "What was missing is given up although not all that had come was read (C3)",
    ),
    Bug(
        "bits-unfenced",
        "store/postgres/migrations/0001_initial.sql",
        "       AND NOT postbus.is_done(b.done, (g.epoch & 1023)::integer);\n    IF fits",
        "       ;\n    IF fits",
        "tests/postgres/test_core_claims.py -k bits",
        "A success that was recorded is recorded again (I8, I9)",
    ),
    Bug(
        "neighbours-die-unrun-pg",
        "store/postgres/migrations/0001_initial.sql",
        "AND allowed IS NOT NULL THEN 3",
        "AND false THEN 3",
        "tests/postgres/test_core_claims.py -k last_attempt",
        "An attempt that may not be repeated shares a block with others (I12)",
    ),
    Bug(
        "no-pin",
        "store/postgres/migrations/0001_initial.sql",
        "    upper := least(upper, coalesce(pinned, upper));\n",
        "",
        "long-transaction postgres 2",
        "Readers pass positions that a transaction may still fill",
    ),
    Bug(
        "gap-passed",
        "store/postgres/reader.py",
        "        missing = rows and rows[-1][0] != after + len(rows)",
        "        missing = False",
        "long-transaction postgres 2",
        "A follower that reads without the pins goes on where an id is missing",
    ),
    Bug(
        "synchronous-normal",
        "store/sqlite/connection.py",
        '        if pragma("synchronous") != FULL:',
        '        if pragma("synchronous") != FULL or pragma("synchronous", "normal") == FULL:',
        "power-loss sqlite 40",
        "SQLite commits without waiting for the disk",
    ),
    Bug(
        "acknowledged-uncommitted",
        "store/committer.py",
        "            connection.rollback()\n            raise\n        return results",
        "            connection.rollback()\n            if 'results' not in locals():\n                raise\n"
        "        return results",
        "disk-full sqlite 3",
        "A commit that failed is acknowledged all the same",
    ),
    Bug(
        "checkpoint-before-effect",
        "follower.py",
        '        probe("read")\n',
        '        probe("read"); self._done(ahead.reached, self.follow.checkpoint.size)\n',
        "tests/crash/test_follower_kills.py -k killed_at_a_probe and sqlite and each",
        "A follower saves its position before it has handled what is there",
    ),
    Bug(
        "pruned-unverified",
        "spark/archive.py",
        "            _verify(spark, url, lake, bound)",
        "            pass",
        "tests/spark/test_archive.py -k what_the_lake_does_not_hold_exactly_stays",
        "The archive prunes without comparing lake and log",
    ),
    Bug(
        "client-clock",
        "store/postgres/store.py",
        "    return Session(db, db.catalog, db.catalog.now)",
        "    return Session(db, db.catalog, int(__import__('time').time() * 1_000_000))",
        "clock-jump postgres 8",
        "Due times and leases follow the clock of the client",
    ),
    Bug(
        "notify-without-poll",
        "worker.py",
        "        pause = self._settings.poll_interval",
        "        pause = 3_600.0",
        "tests/postgres/test_listening.py",
        "A worker looks only when it is told to",
    ),
    Bug(
        "reset-keeps-the-epoch",
        "store/leases.py",
        "    changes.replace(held, pending_row(session, held.row, session.now)._replace(alone=held.row.alone))",
        "    row = pending_row(session, held.row, session.now)._replace(alone=held.row.alone, epoch=held.epoch)\n"
        "    changes.replace(held, row)",
        "tests/contract/test_reset_expire.py -k sqlite",
        "After a reset, who held it before may still settle it",
    ),
    Bug(
        "key-not-parked",
        "follower.py",
        '        if self.follow.on_error == "park_key" and event.key is not None:',
        "        if False:",
        "tests/bus/test_following_keys.py",
        "Behind a dead letter, others of its key go on",
    ),
    Bug(
        "attempts-without-end",
        "store/leases.py",
        "    outcome = decide(own, error, row.attempt, row.max_retries,",
        "    outcome = decide(own, error, row.attempt - 2, row.max_retries,",
        "crashing-event sqlite 1",
        "Attempts that ended their worker are not all counted",
    ),
    Bug(
        "uid-forgotten",
        "store/sqlite/append.py",
        '        db.many("add_uid", uids)\n',
        "        pass\n",
        "http-cut sqlite 30",
        "The same uid is stored twice",
    ),
    Bug(
        "claim-unrecorded",
        "store/sqlite/claim.py",
        "    _log_picked(session, asked, found, epochs)\n",
        "",
        "calm sqlite 1",
        "A claim writes no audit row",
    ),
    Bug(
        "deposed-moves-on",
        "store/sqlite/queries.sql",
        " WHERE subscription = ?3 AND epoch = ?4 AND position <= ?1;",
        " WHERE subscription = ?3 AND ?4 IS NOT NULL;",
        "two-leaders sqlite 3",
        "A follower that was deposed still moves the checkpoint",
    ),
    Bug(
        "no-heartbeat",
        "worker.py",
        "        passed = self._store.extend(held, self._lease) if held else ()",
        "        passed = ()",
        "slow-handler sqlite 1",
        "Leases are not kept while a handler takes long",
    ),
    Bug(
        "damage-unnoticed",
        "store/records.py",
        "    if row[12] is not None and checksum(row[1], row[2], row[3], row[7]) != row[12]:",
        "    if False:",
        "bit-flip sqlite 200",
        "A payload that was damaged on disk is handed out",
    ),
    Bug(
        "restored-ids-again",
        "store/sqlite/store.py",
        '        session.db.run("jump_ids")\n        return session.db.value("draw_numbers", (NUMBERS_APART,))',
        '        return session.db.value("draw_numbers", (1,))',
        "restored-backup sqlite 2",
        "After a restore, ids and leases are given a second time",
    ),
    Bug(
        "undone-and-kept",
        "store/committer.py",
        "                connection.rollback()\n                raise\n",
        "                connection.commit()\n                raise\n",
        "calm sqlite 1",
        "A transaction that its caller undid is committed",
    ),
    Bug(
        "batch-cut-short",
        "store/sqlite/append.py",
        "    for draft in drafts:\n        if draft.supplied and",
        "    for draft in drafts[: max(1, len(drafts) - 1)]:\n        if draft.supplied and",
        "calm sqlite 1",
        "The last event of a batch is left out",
    ),
    Bug(
        "epoch-again",
        "store/sqlite/claim.py",
        '    first = session.db.value("draw_numbers", (len(blocks),)) - len(blocks) + 1',
        '    first = session.db.value("draw_numbers", (len(blocks),)) % 50 + 1_000',
        "tests/contract/test_restore.py -k sqlite",
        "Leases are numbered in a circle",
    ),
    Bug(
        "batch-again",
        "spark/lake.py",
        "        if self._fresh and not self._is_next(frame):",
        "        if False:",
        "spark-driver sqlite 6",
        "A batch that Spark brings a second time is written a second time",
    ),
    Bug(
        "handler-skipped",
        "execution.py",
        "                result = self._call(run)\n",
        "                result = self._call(run) if run.delivery.id % 20 else None\n",
        "calm sqlite 1",
        "Now and then a handler is not called",
    ),
    Bug(
        "finished-and-kept",
        "store/deliveries.py",
        '            db.run("drop_blocks", (json_array(gone),))',
        "            pass",
        "calm sqlite 1",
        "What is completed stays to be done",
    ),
    Bug(
        "pruned-and-kept",
        "store/retention.py",
        'removed = session.db.count("prune_events", (after, part.reached, kept))',
        'removed = session.db.count("prune_events", (after, after, kept))',
        "tests/contract/test_prune.py -k sqlite",
        "What was archived is no longer read, and stays in the tables all the same",
    ),
    Bug(
        "environments-encoding",
        "store/postgres/address.py",
        "if value is not None}, **TEXT}",
        "if value is not None}}",
        "tests/postgres/test_settings.py -k text_is_stored_as_it_is",
        "Text is sent in the encoding that the environment names",
    ),
    Bug(
        "callers-search-path",
        "store/postgres/address.py",
        "THEN pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false) END",
        "THEN 'pg_catalog' END",
        "tests/postgres/test_settings.py -k stands_in",
        "Functions of the role's own schemas are called in place of PostgreSQL's",
    ),
    Bug(
        "lost-answer-repeated",
        "store/postgres/append.py",
        '    gone = bool(pid) and all(ended for (ended,) in db.run("end_session", (pid, age)))',
        "    gone = True",
        "tests/postgres/test_outages.py -k still_on_its_way",
        "A publish is repeated while its first commit is still on its way",
    ),
    Bug(
        "lost-answer-forgotten",
        "store/postgres/queries.sql",
        "WHERE id > $2 AND uid = ANY ($1::text[])",
        "WHERE id < $2 AND uid = ANY ($1::text[])",
        "tests/postgres/test_outages.py -k whose_answer_is_lost",
        "What became of a commit without an answer is not looked up",
    ),
    Bug(
        "silent-server-waited-for",
        "store/postgres/address.py",
        "        if silent > self.longest or not self._lives():",
        "        if silent > self.longest:",
        "tests/postgres/test_frozen.py -k not_waited_for",
        "A server that stands still is waited for",
    ),
    Bug(
        "refused-for-good-retried",
        "store/postgres/address.py",
        "raise _refused(self.shown, error) or translate(self.shown, error) from None",
        "raise translate(self.shown, error) from None",
        "tests/postgres/test_refused.py -k refused_for_good",
        "An address that is refused for good is tried again as a server that is away",
    ),
    Bug(
        "dead-process-forgotten",
        "store/base.py",
        'db.run("named_owners")',
        'db.run("lease_owners")',
        "tests/contract/test_liveness.py -k stays_dead_through_housekeeping and sqlite",
        "Housekeeping removes the file by which a dead process is known while it is still named",
    ),
    Bug(
        "alive-until-shutdown",
        "store/liveness.py",
        "if os.getpid() == self._process and not self._is_named():",
        "if os.getpid() == self._process:",
        "tests/contract/test_liveness.py -k leaves_a_lease_behind and sqlite",
        "A worker that stops while a handler runs is no longer known, and its lease is waited for",
    ),
    Bug(
        "payload-in-error",
        "handlers.py",
        'wrong = getattr(self.model, "__name__", self.model), "; ".join(_misfits(error, words))',
        'wrong = getattr(self.model, "__name__", self.model), "; ".join(_misfits(error, words)) + repr(event.payload)',
        "tests/bus/test_handling.py -k repeats_nothing_of_the_payload and sqlite",
        "A payload that does not fit its model is quoted in logs and dead letters",
    ),
    Bug(
        "payload-in-traceback",
        "execution.py",
        'return INPUT.sub("]", text)',
        "return text",
        "tests/bus/test_handling.py -k repeats_nothing_of_the_payload and sqlite",
        "What pydantic quotes of a payload reaches logs and dead letters",
    ),
    Bug(
        "lead-kept",
        "store/committer.py",
        "        finally:\n            self._leave(slot)\n        if slot.error",
        "        finally:\n            pass\n        if slot.error",
        "tests/unit/test_committer.py -k any_line",
        "An interrupt while the lead is handed over leaves it with nobody",
    ),
    Bug(
        "lead-kept-by-a-traceback",
        "store/owned.py",
        "            self.manager.gen = weakref.proxy(self.manager.gen)\n",
        "",
        "tests/unit/test_committer.py -k any_line",
        "An interrupt at the ends of a transaction leaves the lead with its traceback for as long as that is kept",
    ),
    Bug(
        "locks-inherited",
        "store/sqlite/connection.py",
        "        if wal_index.identity(path) in forks.INHERITED:",
        "        if False:",
        "tests/crash/test_forks.py -k in_use_is_refused",
        "A forked child opens a file that its parent is in the midst of using",
    ),
    Bug(
        "open-across-a-fork",
        "store/sqlite/forks.py",
        "                held.enter_context(store.forking())",
        "                held.enter_context(suppress())",
        "fork-after-open sqlite 4",
        "A bus stays open while its process forks",
    ),
    Bug(
        "files-not-compared",
        "store/sqlite/connection.py",
        "        if self._files_there() != self._files:\n            self._refuse_other_files()\n\n",
        "        if False:\n            self._refuse_other_files()\n\n",
        "replaced-file sqlite 4",
        "Publishes go on into a file that was removed or replaced",
    ),
    Bug(
        "child-runs-on",
        "execution.py",
        "    os._exit(code)",
        "    return",
        "tests/crash/test_forks.py -k out_of_a_handler and sqlite",
        "A child that comes back out of a handler runs what its parent had before it",
    ),
    Bug(
        "left-in-the-midst",
        "store/postgres/connection.py",
        "not self.idle:\n            self.rollback()\n        self.connection  #",
        "False:\n            self.rollback()\n        self.connection  #",
        "interrupt postgres 4",
        "A connection that an interrupt left waiting for an answer is used again",
    ),
    Bug(
        "pages-without-a-bound",
        "store/lookups.py",
        '    rows = db.rows("events_by_id", (json_array(ids), PAGE_BYTES))\n',
        '    rows = db.rows("events_by_id", (json_array(ids), PAGE_BYTES << 20))\n',
        "tests/contract/test_bounds.py -k short_pages and sqlite",
        "A list of large events is read whole",
    ),
    Bug(
        "following-without-a-bound",
        "store/sqlite/connection.py",
        "            if size >= PAGE_BYTES:\n",
        "            if size >= PAGE_BYTES << 20:\n",
        "tests/contract/test_bounds.py -k page_by_page and sqlite",
        "A reader of the log takes as many large events as it asked for",
    ),
    Bug(
        "streams-without-a-bound",
        "http/buffers.py",
        "                each.hang_up()\n",
        "                pass\n",
        "tests/http/test_bounds.py -k make_room and sqlite",
        "Streams that nobody reads are kept for ever",
    ),
    Bug(
        "unread-at-the-end",
        "http/serve.py",
        "        self._untaken_seconds = HURRY\n",
        "",
        "tests/http/test_bounds.py -k ends_soon and sqlite",
        "A client that does not read its answer holds up the end of the server",
    ),
    Bug(
        "no-lingering-close",
        "http/serve.py",
        "        if not self._ended and self._lingers():\n",
        "        if False:\n",
        "tests/http/test_bounds.py -k gets_to_read_why and sqlite",
        "A client that is still sending is cut off before it can read why its body was refused",
    ),
    Bug(
        "forms-without-a-deadline",
        "dashboard/room.py",
        "        async with asyncio.timeout(FORM_SECONDS):\n",
        "        async with asyncio.timeout(None):\n",
        "tests/http/test_bounds.py -k form_that_comes_slowly and sqlite",
        "A form may take as long as it likes to come",
    ),
    Bug(
        "cookie-of-any-bytes",
        "dashboard/sessions.py",
        '        if not hmac.compare_digest(self._sealed(identity, int(ends)).encode(), (cookie or "").encode()):\n',
        '        if not hmac.compare_digest(self._sealed(identity, int(ends)), cookie or ""):\n',
        "tests/http/test_poison.py -k header_of_any_bytes and cookie and sqlite",
        "A session cookie with a character beyond ASCII is a 500",
    ),
    Bug(
        "time-of-any-form",
        "http/cloudevents.py",
        '        moment_of(told["time"])\n',
        "        pass\n",
        "tests/http/test_cloudevents.py -k no_cloudevent_is_refused and sqlite",
        "Any text is a CloudEvent's time",
    ),
    Bug(
        "null-for-no-data",
        "http/cloudevents.py",
        "    if event.payload is None:\n",
        "    if False:\n",
        "tests/http/test_cloudevents.py -k without_data_has_none and sqlite",
        "A CloudEvent without data comes back with null",
    ),
    Bug(
        "second-library",
        "store/sqlite/connection.py",
        "        if self._files_there() != self._files:\n            self._refuse_other_files()\n\n",
        "        if False:\n            self._refuse_other_files()\n\n",
        "tests/unit/test_sqlite_file.py -k second_sqlite",
        "Locks that another SQLite library in the process has dropped are not missed",
    ),
    Bug(
        "commit-uncompared",
        "store/sqlite/connection.py",
        '        self._apsw.execute("COMMIT")\n        self.require_same_files()\n',
        '        self._apsw.execute("COMMIT")\n',
        "tests/unit/test_sqlite_file.py -k replaced_within_a_transaction",
        "A commit into a file that was replaced meanwhile is acknowledged",
    ),
    Bug(
        "unicode-database",
        "store/postgres/inspection.py",
        '    if encoding != "UTF8":',
        "    if False:",
        "tests/postgres/test_settings.py -k cannot_hold_unicode",
        "A database that cannot hold every text is used",
    ),
    Bug(
        "follower-child-runs-on",
        "follower.py",
        "            end_child(self._process, error)\n            raise HandlerFailed(error) from error\n"
        "        end_child(self._process)\n",
        "            raise HandlerFailed(error) from error\n",
        "tests/crash/test_forks.py -k out_of_a_handler and sqlite and follow",
        "A child that comes back out of a follower's handler runs on",
    ),
    Bug(
        "retries-counted-twice",
        "store/leases.py",
        "            changes.replace(held, dead._replace(died_at=now, errors=errors))",
        "            changes.replace(held, dead._replace(died_at=now, errors=errors, retry_count=row.retry_count + 1))",
        "tests/contract/test_settle.py -k retry_count_counts and sqlite",
        "The last failure of a dead letter counts as a retry",
    ),
    Bug(
        "last-failure-told-otherwise",
        "http/working.py",
        '"retry_count": reported.retry_count,',
        '"retry_count": reported.max_retries + 1,',
        "tests/http/test_s3_walk.py -k fourth_failure and sqlite",
        "The answer to the last failure tells another count than the event",
    ),
    Bug(
        "clock-set-back",
        "store/base.py",
        "return abs(silent) > SILENT if",
        "return silent > SILENT if",
        "tests/contract/test_liveness.py -k another_host and sqlite",
        "A report from before the clock was set back keeps a dead handler of another host alive",
    ),
    Bug(
        "silent-shown-as-alive",
        "cli/top.py",
        "silent=all(each.gone for each in mine)",
        "silent=False",
        "tests/contract/test_liveness.py -k everybody_agrees and sqlite",
        "`top` shows a dead worker as alive",
    ),
    Bug(
        "untaken-for-good",
        "http/serve.py",
        "                self._watch()\n            else:\n                self.transport.abort()",
        "                self._watch()\n            else:\n                pass",
        "tests/http/test_bounds.py -k nobody_takes and sqlite",
        "An answer that nobody takes is kept for ever",
    ),
    Bug(
        "lingers-for-good",
        "http/serve.py",
        "        self._lingering = self.loop.call_later(LINGER_SECONDS, self.transport.abort)",
        "        self._lingering = self.loop.call_later(3600, self.transport.abort)",
        "tests/http/test_bounds.py -k goes_on_sending and sqlite",
        "A client that goes on sending what was refused is never hung up on",
    ),
    Bug(
        "no-drain",
        "http/serve.py",
        "        if sig == signal.SIGTERM and self._drain and not gate.leaving:",
        "        if False:",
        "tests/http/test_bounds.py -k says_that_it_leaves",
        "After SIGTERM a server ends before load balancers know",
    ),
    Bug(
        "grouping-squared",
        "spark/lake.py",
        "held + each.bytes <= size",
        "sum(one.bytes for one in group) + each.bytes <= size",
        "tests/spark/test_lake_mended.py -k and_not_with_their_square",
        "The work of a compaction grows with the square of its entries",
    ),
    Bug(
        "empty-subject",
        "http/cloudevents.py",
        ' or told.get(name) == "":',
        ":",
        "tests/http/test_cloudevents.py -k no_cloudevent_is_refused and sqlite",
        "A CloudEvent with an empty subject or schema is taken",
    ),
    Bug(
        "charset-ignored",
        "http/cloudevents.py",
        '    if charset == "utf-8":\n        return body\n',
        "    if charset:\n        return body\n",
        "tests/http/test_cloudevents.py -k charset_that_it_names and sqlite",
        "Text is taken for UTF-8, whatever charset it names",
    ),
    Bug(
        "block-without-data",
        "http/stream.py",
        '    yield b"retry: 1000\\n"',
        '    yield b"retry: 1000\\n\\n"',
        "tests/http/test_stream.py -k every_block and sqlite",
        "A stream begins with a block that some clients take for an event",
    ),
    Bug(
        "empty-event",
        "http/wire.py",
        "    if not given:\n",
        "    if False:\n",
        "tests/http/test_publishing.py -k empty_event and sqlite",
        "An event that says nothing is stored",
    ),
    Bug(
        "no-traceparent",
        "store/remote/link.py",
        "headers=headers | _traced()",
        "headers=headers",
        "tests/observability/test_tracing.py -k within_the_trace_at_hand",
        "Requests to a server do not tell of the span at hand",
    ),
    Bug(
        "pooler-untold",
        "store/postgres/address.py",
        "        if path is None:\n",
        "        if False:\n",
        "tests/postgres/test_refused.py -k nobody_told_of",
        "A pooler that loses settings is taken for the database",
    ),
    Bug(
        "url-read-as-another",
        "store/__init__.py",
        "    if found := NOT_IN_PATH.search(text):",
        "    if found := None:",
        "tests/unit/test_sqlite_file.py -k could_mean_another_file",
        "A SQLite URL with ? or # opens another file than it names",
    ),
    Bug(
        "loop-of-links",
        "store/__init__.py",
        "if error.errno == errno.ELOOP:",
        "if False:",
        "tests/unit/test_sqlite_file.py -k could_mean_another_file and loop",
        "A loop of symbolic links is a Python error",
    ),
    Bug(
        "control-characters",
        "cli/console.py",
        '    return _COMMANDING.sub(lambda found: f"\\\\u{ord(found[0]):04x}", text)',
        "    return text",
        "tests/cli/test_tail.py -k terminal_obeys",
        "What a terminal obeys comes through a pipe",
    ),
    Bug(
        "schema-of-a-keyword",
        "store/postgres/address.py",
        "        if KEYWORDS.fullmatch(schema):",
        "        if False:",
        "tests/postgres/test_refused.py -k without_quotes",
        "A keyword is taken as the name of a schema",
    ),
    Bug(
        "backslashes",
        "store/postgres/address.py",
        " -c standard_conforming_strings=on",
        "",
        "tests/postgres/test_settings.py -k backslashes",
        "Patterns are read as the database reads literals",
    ),
    Bug(
        "lost-while-settled",
        "worker.py",
        "        self._execution.settled.update(each.delivery.lease for each in batch)\n",
        "",
        "tests/bus/test_leases.py -k beside_a_settlement and sqlite",
        "A heartbeat beside a settlement calls the lease lost",
    ),
    Bug(
        "missing-folder-away",
        "store/sqlite/connection.py",
        "case apsw.CantOpenError() if not path.parent.is_dir():",
        "case apsw.CantOpenError() if False:",
        "tests/unit/test_sqlite_file.py -k missing_folder",
        "A SQLite file in a folder that is not there is tried again for good",
    ),
    Bug(
        "worker-tries-for-good",
        "worker.py",
        "            self.error = error\n",
        "",
        "tests/postgres/test_refused.py -k no_longer_log_in",
        "A worker whose role may no longer log in tries again for good",
    ),
    Bug(
        "open-at-import",
        "bus.py",
        "        self._begin()\n\n    def _begin",
        "        self._begin()\n        self._open_store()\n\n    def _begin",
        "tests/unit/test_config.py -k only_has_handlers",
        "A bus opens its store where it is made",
    ),
    Bug(
        "stored-and-unread",
        "store/postgres/store.py",
        "        except StoreUnavailable as error:  # behind the commit, which has stored the others\n",
        "        except ZeroDivisionError as error:\n",
        "tests/postgres/test_outages.py -k cannot_be_read_again",
        "Events that are stored, and cannot be read again, are told of as not stored",
    ),
    Bug(
        "pooler-waited-for",
        "store/postgres/address.py",
        '            if "statement_timeout" in',
        '            if self.pooled or "statement_timeout" in',
        "tests/postgres/test_pgbouncer.py -k stands_still",
        "A server that stands still behind a pooler is waited for",
    ),
    Bug(
        "traceback-of-a-client",
        "http/app.py",
        "        except ClientDisconnect:  #",
        "        except ZeroDivisionError:  #",
        "tests/http/test_bounds.py -k hangs_up_in_the_midst",
        "A client that hangs up leaves a traceback in the log",
    ),
    Bug(
        "opened-after-the-end",
        "store/postgres/store.py",
        "                db.retire()\n",
        "                db.close()\n",
        "tests/postgres/test_listening.py -k too_late",
        "Whoever comes too late opens a connection that nobody closes",
    ),
    Bug(
        "begun-and-left",
        "store/postgres/address.py",
        "            failed.callback(session.close)\n",
        "",
        "tests/postgres/test_refused.py -k cannot_be_begun",
        "A connection that cannot be begun is left open",
    ),
    Bug(
        "lead-kept-past-the-end",
        "follower.py",
        "        if self._outlasts:\n",
        "        if False:\n",
        "tests/postgres/test_listening.py -k lets_another_lead",
        "A follower that outlasts its shutdown keeps its lead when its handler has ended",
    ),
    Bug(
        "payload-in-reason",
        "handlers.py",
        "    if kind in PLAIN:\n",
        "    if kind:\n",
        "tests/bus/test_handling.py -k without_any_of_it and sqlite",
        "What pydantic's messages quote of a payload, such as the tag of a union, is in logs and dead letters",
    ),
    Bug(
        "arrow-waits-for-good",
        "store/postgres/extract.py",
        "            server.require_life(time.monotonic() - began)\n",
        "",
        "tests/postgres/test_frozen.py -k before_its_first_row",
        "A read by Arrow waits for a server that stands still",
    ),
)


def plant(bug: Bug, folder: Path) -> Path:
    """Return the sources with the bug in them, the tests beside."""
    source = folder / "src"
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    file = source / "postbus" / bug.file
    text = file.read_text()
    if text.count(bug.line) != 1:
        raise LookupError(f"{bug.name}: {bug.file} has its line {text.count(bug.line)} times: plant this bug anew")
    file.write_text(text.replace(bug.line, bug.planted))
    return source


def try_one(bug: Bug) -> dict[str, Any]:
    """Plant a bug and run what must notice it; return whether it did, and by which verdicts."""
    with tempfile.TemporaryDirectory(prefix="postbus-planted-") as name:
        folder = Path(name)
        source = plant(bug, folder)
        told: list[dict[str, Any]] = []
        if bug.caught_by.startswith("tests/"):
            paths, _, chosen = bug.caught_by.partition(" -k ")
            ended = run(
                source, folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths.split(), "-k", chosen
            )
            caught = ended.returncode == FAILED
        else:
            fault, store, number = bug.caught_by.split()
            what = ["--soak", number] if fault == "soak" else [fault, "--trials", number]
            asked = ["torture", *what, "--store", store, "--report", "report", "-o", "json"]
            ended = run(source, folder, "-c", "from postbus.cli import main; main()", *asked)
            caught = ended.returncode == FINDINGS
            told = json.loads(ended.stdout) if caught else []
        if not caught:
            print(ended.stdout[-1_500:], ended.stderr[-1_500:], file=sys.stderr)
    verdicts = sorted({verdict[0] for trial in told for verdict in trial["verdicts"]})
    return {**asdict(bug), "caught": caught, "verdicts": verdicts}


def run(source: Path, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python on the sources with the bug."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(  # noqa: S603  written above
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def main() -> int:
    """Try all bugs, or those named; write down what became of them."""
    parser = argparse.ArgumentParser(description="Plant bugs in a copy of postbus, and see that each is caught.")
    parser.add_argument("names", nargs="*")
    names: list[str] = parser.parse_args().names
    results: list[dict[str, Any]] = []
    known = {each["name"]: each for each in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    for bug in BUGS:
        if not names or bug.name in names:
            told = known[bug.name] = try_one(bug)
            results.append(told)
            table = [known[each.name] for each in BUGS if each.name in known]
            RESULTS.write_text(json.dumps(table, indent=1) + "\n")
            caught = "caught" if told["caught"] else "NOT CAUGHT"
            print(f"{bug.name:26} {caught:12} {bug.caught_by:40} {' '.join(told['verdicts'])}", flush=True)
    count = sum(each["caught"] for each in results)
    print(f"{count} of {len(results)} planted bugs were caught")
    return count < len(results)


if __name__ == "__main__":
    sys.exit(main())
