"""The dashboard's pages and what their buttons do, asked for by plain HTTP on both stores."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from postbus import Discard, EventBus, StoreUnavailable
from postbus.dashboard.pages import PER_PAGE
from postbus.dashboard.sessions import COOKIE
from postbus.http.app import create_app
from postbus.model import Delivery, Stream
from postbus.store import log_of
from tests.dashboard.asking import act, confirm, dead, kill, see
from tests.http.serving import Served, serving

PAGES = ("", "events", "dead", "subscriptions", "workers", "pipeline", "system")
NASTY = "<script>document.title='run'</script>\"'&"
NAME = "<script>document.title='run'<b>\"'&?#"


# ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", PAGES)
def test_every_page_of_an_empty_bus_is_there(served: Served, page: str):
    """Nothing to show is not an error (S0.9)."""
    assert "postbus" in see(served, page)


def test_the_overview_tells_what_needs_attention(served: Served, eventually: Callable[..., Any]):
    """Dead letters, events nobody handles, pauses: each with a link to them (S0.9)."""
    kill(served.bus, 2)
    served.bus.publish("lonely")
    served.bus.subscriptions.create("side", "side.*")
    served.bus.subscriptions.pause("side")
    told = eventually(lambda: "2 dead letters in default" in (page := see(served, "")) and page, within=30)
    assert "nobody handles lonely in default: 1 event waiting" in told
    assert "side is paused" in told


def test_what_followers_left_behind_needs_attention_too(served: Served, eventually: Callable[..., Any]):
    """Not all is well where a follower has dead letters, or events parked behind them."""
    served.bus.subscriptions.delete("default")
    assert eventually(lambda: "All is well" in see(served, ""), within=30)

    @served.bus.follow("sales", on_error="park_key")
    def sell(event: object) -> None:
        raise Discard("no")

    served.bus.publish_many([{"type": "a", "key": "k"}] * 3)
    eventually(lambda: "2 events parked behind a dead letter in sales" in see(served, ""), within=30)
    told = see(served, "")
    assert "1 dead letter in sales" in told
    assert "1 dead letters, 2 parked" in told
    assert "All is well" not in told
    assert "Dead 1 , 2 parked behind" in see(served, "subscriptions")


def test_an_event_shows_its_whole_story(served: Served):
    """Status, error of each attempt, audit rows, payload with integers beyond 64 bits (S0.9, S3.11)."""
    (dead,) = kill(served.bus)
    told = see(served, f"events/{dead}")
    assert "Discard" in told
    assert "order 17 has no address" in told
    assert "Retry" in told
    big = served.bus.publish("big", {"n": 1 << 70}, tags=["eu"], key="k")
    told = see(served, f"events/{big.id}")
    assert str(1 << 70) in told
    assert "No worker that is alive handles big in default." in told


def test_what_is_not_there_is_said_to_be_so(served: Served):
    """A wrong id, status, cursor or page is a page that says so, with the right status."""
    assert "there is no event 999" in see(served, "events/999", 404)
    assert "There is no such page." in see(served, "nothing/here", 404)
    see(served, "events", 422, status="ASLEEP")
    see(served, "events", 422, after="x")
    see(served, "events", 404, subscription="nobody")
    see(served, f"events/{1 << 70}", 404)
    for digits in ("9" * 5_000, "٣", "1e3"):
        see(served, f"events/{digits}", 404)
        see(served, "events", 422, after=digits)
        see(served, "events", number=digits)


def test_what_was_deleted_since_the_last_count_spoils_no_page(
    served: Served, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any]
):
    """A queue that is still in the figures is shown with them."""
    monkeypatch.setattr("postbus.dashboard.pulse.SHARE", 1e6)
    served.bus.subscriptions.create("side", "side.*")
    eventually(lambda: "side" in see(served, ""))
    served.bus.subscriptions.delete("side")
    assert "side" in see(served, "")


def test_what_came_between_two_looks_spoils_no_page(served: Served, monkeypatch: pytest.MonkeyPatch):
    """A Spark stream that begins, or goes, while the page of the pipeline is made."""
    store = log_of(served.bus.store)
    before = store.subscriptions

    def then_another() -> Any:
        found = before()
        store.consumer("late", Stream.EVENTS, 0)
        return found

    monkeypatch.setattr(store, "subscriptions", then_another)
    assert "Spark streams" in see(served, "pipeline")


def test_a_bus_without_the_default_subscription_has_a_page_of_events(served: Served):
    """Events are shown as they stand in a subscription that is there; without any, simply as they are."""
    served.bus.subscriptions.create("side", "side.*")
    served.bus.subscriptions.delete("default")
    served.bus.publish("side.a")
    assert "side.a pending" in see(served, "events")
    see(served, "events", 404, subscription="default")
    served.bus.subscriptions.delete("side")
    assert "side.a not wanted here" in see(served, "events")


def test_the_system_page_does_not_read_the_whole_store(served: Served, eventually: Callable[..., Any]):
    """Damage is looked for by `postbus doctor` itself; all else that it finds is here."""
    told = eventually(lambda: "leases none has run out" in (page := see(served, "system")) and page)
    assert "every page read" not in told


def test_the_system_page_says_that_the_store_is_away(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Instead of looking for ever."""

    def away() -> Any:
        raise StoreUnavailable("the disk is gone")

    monkeypatch.setattr(served.bus.store, "handlers", away)
    assert "The store does not answer: the disk is gone" in see(served, "system")


def test_events_are_filtered_and_paged_by_key(served: Served):
    """The filter is in the address; a page goes on where the last one ended, whatever was published since."""
    wanted = [each.id for each in served.bus.publish_many([{"type": "a", "tags": ["x"]}] * (PER_PAGE + 5))]
    served.bus.publish_many([{"type": "b"}] * 3)
    text = served.http.get("/dashboard/events", params={"type": "a", "tag": "x"}).text
    first = [int(each) for each in re.findall(r"/dashboard/events/(\d+)\"", text)]
    assert first == wanted[: -PER_PAGE - 1 : -1]
    older = unescape(re.search(r'rel="next" href="([^"]+)"', text)[1])  # type: ignore[index]
    served.bus.publish("a", tags=["x"])
    text = served.http.get(older).text
    assert [int(each) for each in re.findall(r"/dashboard/events/(\d+)\"", text)] == wanted[4::-1]
    assert 'rel="next"' not in text


def test_a_search_ends_in_time_and_says_how_far_it_got(served: Served, monkeypatch: pytest.MonkeyPatch):
    """What was not looked at is not said not to be there: one can look on."""
    first = served.bus.publish("rare").id
    served.bus.publish_many([{"type": "common"}] * 200)
    monkeypatch.setattr("postbus.dashboard.pages.WITHIN", type(served.bus.store.now() - served.bus.store.now())(0))
    text = served.http.get("/dashboard/events", params={"type": "rare"}).text
    assert "as far as was looked" in text
    for _ in range(201):
        older = re.search(r'rel="next" href="([^"]+)"', text)
        if older is None:
            break
        text = served.http.get(unescape(older[1])).text
        if f"/dashboard/events/{first}" in text:
            break
    assert f"/dashboard/events/{first}" in text


def test_what_people_publish_is_shown_as_text(served: Served):
    """Types, tags, keys, titles, payloads, errors: nothing becomes markup, nothing runs."""
    served.bus.publish(
        NASTY, {NASTY: NASTY}, tags=["<b>"], key=NASTY, title=NASTY, description=NASTY, metadata={"m": NASTY}
    )
    kill(served.bus, message=NASTY)
    served.bus.subscriptions.create(NAME, "*")
    for page in (*PAGES, "events/1", "events/2", f"events?subscription={quote(NAME)}", "dead/confirm?act=retry"):
        text = served.http.get(f"/dashboard/{page}").text
        assert "<script>document" not in text
        assert '<b>"' not in text
    assert NASTY in see(served, "events/1")


def test_payloads_can_be_masked(kind: str, tmp_path: Path):
    """Then a page shows their shape, and nothing of what they say."""
    with serving(kind, tmp_path, mask=True) as served:
        made = served.bus.publish(
            "a", {"card": "4111", "list": [1, None]}, title="4111", description="4111", metadata={"m": "4111"}
        )
        told = see(served, f"events/{made.id}")
        assert '"card": "•••"' in told
        assert "4111" not in told


def test_it_can_be_mounted_below_another_application(kind: str, tmp_path: Path):
    """Every address in every page has the prefix (`app.mount("/bus", …)`)."""
    with serving(kind, tmp_path) as served:
        kill(served.bus, 2)
        outer = FastAPI()
        outer.mount("/bus", served.app)
        client = TestClient(outer, base_url="http://127.0.0.1")
        for page in (*PAGES, "events/1"):
            text = client.get(f"/bus/dashboard/{page}").text
            assert all(
                each.startswith("/bus/dashboard/") for each in re.findall(r'(?:href|src|action)="(/[^"]*)"', text)
            )
        assert client.get("/bus/dashboard/static/dashboard.js").status_code == 200
        sent = client.post(
            "/bus/dashboard/dead/act",
            data={"act": "retry", "all": "1", "before": served.bus.store.now().isoformat()},
            headers={"origin": "http://127.0.0.1"},
            follow_redirects=False,
        )
        assert sent.headers["location"] == "/bus/dashboard/dead?did=retried&count=2"


def test_the_slash_may_be_left_out(served: Served):
    """`/dashboard`, as `postbus serve` prints it, leads there, mounted or not; it is no part of the API."""
    outer = FastAPI()
    outer.mount("/bus", served.app)
    mounted = TestClient(outer, base_url="http://127.0.0.1", follow_redirects=False)
    assert served.http.get("/dashboard").headers["location"] == "/dashboard/"
    assert mounted.get("/bus/dashboard").headers["location"] == "/bus/dashboard/"
    refused = served.http.post("/dashboard")
    assert (refused.status_code, sorted(refused.headers["allow"].split(", "))) == (405, ["GET", "HEAD"])
    assert "/dashboard" not in served.http.get("/openapi.json").json()["paths"]


# ── acting ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_dead_letters_are_grouped_by_what_they_died_of(served: Served):
    """Numbers and ids in a message do not make it another error; one group is retried and the other left."""
    first = kill(served.bus, 3, "order 17 has no address")
    first += kill(served.bus, 1, "order 18 has no address")
    other = kill(served.bus, 2, "no such customer")
    told = see(served, "dead")
    assert "4 Discard order <n> has no address" in told
    fault = "Discard: order <n> has no address"
    assert "Retry 4 dead letters?" in see(served, "dead/confirm", act="retry", fault=fault)
    done = act(served, "dead/act", **confirm(served, "dead/confirm", act="retry", fault=fault))
    assert done.headers["location"].endswith("/dead?did=retried&count=4")
    assert "4 will be tried again." in see(served, "dead", did="retried", count="4")
    assert dead(served.bus) == set(other)
    assert served.bus.get(first[0]).status == "PENDING"


def test_selected_ones_are_discarded_and_no_others(served: Served):
    """What is ticked, after the count was repeated; the event and its history stay, with who did it (I13)."""
    one, two, three = kill(served.bus, 3)
    letters = [f"{one}:default", f"{two}:default"]
    assert "Discard 2 dead letters?" in see(served, "dead/confirm", act="discard", letter=letters)
    act(served, "dead/act", act="discard", letter=letters)
    assert dead(served.bus) == {three}
    last = served.bus.store.logs(one)[-1]
    assert (last.action, last.worker_id) == ("PURGED", "dashboard")


def test_nothing_selected_is_nothing_done(served: Served):
    """Neither the buttons for those that are ticked, nor a form without a word, mean all."""
    kill(served.bus, 2)
    assert "Nothing is selected." in see(served, "dead/confirm", 422, act="discard", selected="1")
    assert act(served, "dead/act", act="discard").status_code == 422
    assert len(dead(served.bus)) == 2


def test_all_that_match_are_meant_whatever_their_error(served: Served):
    """By type and subscription, counted before."""
    first = kill(served.bus, 2, "one") + kill(served.bus, 1, "two")
    assert "Retry 3 dead letters?" in see(served, "dead/confirm", act="retry", type="order")
    assert "Retry 0 dead letters?" in see(served, "dead/confirm", act="retry", type="mail")
    none = confirm(served, "dead/confirm", act="retry", type="mail")
    assert act(served, "dead/act", **none).headers["location"].endswith("count=0")
    assert dead(served.bus) == set(first)
    every = confirm(served, "dead/confirm", act="retry", subscription="default")
    assert act(served, "dead/act", **every).headers["location"].endswith("count=3")
    assert dead(served.bus) == set()


def test_an_orphan_is_taken_back(served: Served):
    """The worker that holds it does not come back: it is pending again, and the audit log says who did it (S3.10)."""
    event = served.bus.publish("a")
    assert served.bus.poll(worker_id="w:1") is not None
    assert "Take it back" in see(served, f"events/{event.id}")
    assert act(served, f"events/{event.id}/reset", subscription="default").status_code == 303
    assert served.bus.get(event.id).status == "PENDING"
    assert served.bus.store.logs(event.id)[-1].worker_id == "dashboard"


def test_a_queue_is_rewound_after_a_preview(served: Served):
    """What was completed is handed out again, once it was confirmed (N.29)."""
    events = served.bus.publish_many([{"type": "a"}] * 3)
    for _ in events:
        served.bus.finalize(taken(served.bus), success=True)
    preview = see(served, "subscriptions/default/rewind", to=str(events[0].id))
    assert f"It goes on after {events[0].id} instead of {events[2].id}." in preview
    assert "Handled again 2 events" in preview
    assert act(served, "subscriptions/default/rewind", to=str(events[0].id)).headers["location"].endswith("count=2")
    assert [taken(served.bus).id for _ in range(2)] == [each.id for each in events[1:]]


def taken(bus: EventBus) -> Delivery:
    """Return what is due."""
    delivery = bus.poll(worker_id="w:1")
    assert delivery is not None
    return delivery


def test_a_subscription_is_paused_and_rewound_after_a_preview(served: Served):
    """What would come again is told before, and comes only when it was confirmed (S4.10)."""
    seen: list[int] = []
    events = served.bus.publish_many([{"type": "a"}] * 5)
    served.bus.follow("s")(lambda event: seen.append(event.id))
    served.bus.wait_for("s", events[-1].id, timeout=30)
    act(served, "subscriptions/s/pause")
    assert "s ordered paused" in see(served, "subscriptions")
    assert "Handled again 3 events" in see(served, "subscriptions/s/rewind", to=str(events[1].id))
    assert len(seen) == 5
    act(served, "subscriptions/s/resume")
    assert act(served, "subscriptions/s/rewind", to=str(events[1].id)).headers["location"].endswith("count=3")
    served.bus.wait_for("s", events[-1].id, timeout=30)
    assert seen[5:] == [each.id for each in events[2:]]
    see(served, "subscriptions/s/rewind", 422, to="yesterday")
    see(served, "subscriptions/nobody/rewind", 404, to="1")


# ── who may ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def sign_in(served: Served, *scopes: str) -> httpx2.Response:
    """Sign in with a new token of these scopes."""
    token = served.token(*scopes)
    served.app.state.desk.tokens.refresh()
    return served.http.post("/dashboard/sign-in?next=/dead", data={"token": token}, headers={"origin": served.url})


def addresses(served: Served) -> list[tuple[str, str]]:
    """Return method and path of all there is but what is open."""
    dashboard: Any = served.app.routes[-1]
    found = [
        (next(iter(each.methods - {"HEAD"})), each.path) for each in dashboard.app.routes if hasattr(each, "methods")
    ]
    filled = [
        (how, path.replace("{event_id}", "1").replace("{name}", "s").replace("{act:str}", "pause"))
        for how, path in found
    ]
    return [each for each in filled if not each[1].startswith("/sign-")]


def test_nobody_gets_in_without_a_session(guarded: Served):
    """Pages lead to the sign-in page, and everything else is refused."""
    assert len(addresses(guarded)) == 16
    for how, path in addresses(guarded):
        answer = guarded.http.request(how, f"/dashboard{path}", headers={"origin": guarded.url})
        refused = answer.status_code == 401 or answer.headers.get("location", "").startswith("/dashboard/sign-in?next=")
        assert refused, (how, path)


def test_who_may_only_look_cannot_act(guarded: Served):
    """The scope read shows pages without buttons; admin has both (deny by default)."""
    kill(guarded.bus)
    assert sign_in(guarded, "read").headers["location"] == "/dashboard/dead"
    assert "Retry" not in see(guarded, "dead")
    answers = {
        (how, path): guarded.http.request(how, f"/dashboard{path}", headers={"origin": guarded.url}).status_code
        for how, path in addresses(guarded)
        if path != "/live"
    }
    acts = {each for each in answers if each[0] == "POST" or each[1] in ("/dead/confirm", "/subscriptions/s/rewind")}
    assert {each for each, status in answers.items() if status == 403} == acts
    sign_in(guarded, "admin")
    assert "Retry" in see(guarded, "dead")
    assert act(guarded, "dead/act", **confirm(guarded, "dead/confirm", act="retry")).status_code == 303
    assert served_by(guarded) == "dashboard:test"


def served_by(guarded: Served) -> str | None:
    """Return who did what was done last to the first event."""
    return guarded.bus.store.logs(1)[-1].worker_id


def test_a_token_that_may_not_look_gets_no_session(guarded: Served):
    """Nor does one that is wrong, or a form from elsewhere."""
    for scopes in (("publish",), ("work",)):
        assert sign_in(guarded, *scopes).status_code == 401
    wrong = guarded.http.post("/dashboard/sign-in", data={"token": "postbus_x_y"}, headers={"origin": guarded.url})
    assert (wrong.status_code, wrong.headers.get("set-cookie")) == (401, None)
    token = guarded.token("read")
    guarded.app.state.desk.tokens.refresh()
    assert guarded.http.post("/dashboard/sign-in", data={"token": token}).status_code == 401


def test_a_session_is_sealed_expires_and_ends_with_its_token(guarded: Served, monkeypatch: pytest.MonkeyPatch):
    """A cookie that was changed, is old, or whose token was revoked lets nobody in."""
    sign_in(guarded, "read")
    see(guarded, "dead")
    (cookie,) = [each for each in guarded.http.cookies.jar if each.name == COOKIE]
    assert (cookie.path, cookie.has_nonstandard_attr("HttpOnly"), cookie.get_nonstandard_attr("SameSite")) == (
        "/dashboard", True, "strict",
    )  # fmt: skip
    identity, ends, seal = str(cookie.value).split(".")
    for changed in (f"{identity}.{int(ends) + 1}.{seal}", f"{identity}.{ends}.{'0' * 64}", "x", f"{identity}.{ends}"):
        answer = httpx2.get(f"{guarded.url}/dashboard/dead", cookies={COOKIE: changed}, trust_env=False)
        assert answer.status_code == 303, changed
    with monkeypatch.context() as later:
        later.setattr("postbus.dashboard.sessions.time", SimpleNamespace(time=lambda: float(ends) + 1))
        assert guarded.http.get("/dashboard/dead").status_code == 303
    see(guarded, "dead")
    log_of(guarded.bus.store).revoke_token(identity)
    guarded.app.state.desk.tokens.refresh()
    assert guarded.http.get("/dashboard/dead").status_code == 303


def test_a_store_that_is_away_is_a_page_that_says_so(guarded: Served, monkeypatch: pytest.MonkeyPatch):
    """Also where only the session is looked up, or somebody signs in: no bare error."""
    sign_in(guarded, "read")

    def away() -> Any:
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(guarded.bus.store, "tokens", away)
    monkeypatch.setattr("postbus.tokens.REMEMBER", -1.0)
    assert "the store is away" in see(guarded, "dead", 503)
    again = guarded.http.post("/dashboard/sign-in", data={"token": "postbus_x_y"}, headers={"origin": guarded.url})
    assert (again.status_code, "the store is away" in again.text) == (503, True)


def test_a_form_from_elsewhere_does_nothing(served: Served):
    """A page of another site cannot press our buttons, signed in or not."""
    kill(served.bus)
    elsewhere = [{"origin": "http://evil.example"}, {}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}]
    for headers in elsewhere:
        answer = served.http.post("/dashboard/dead/act", data={"act": "discard"}, headers=headers)
        assert answer.status_code == 403
    assert len(dead(served.bus)) == 1


def test_signing_in_leads_nowhere_else(guarded: Served):
    """`next` cannot name another host."""
    token = guarded.token("read")
    guarded.app.state.desk.tokens.refresh()
    for where in ("//evil.example", "https://evil.example", "/\\evil.example"):
        answer = guarded.http.post(
            "/dashboard/sign-in", params={"next": where}, data={"token": token}, headers={"origin": guarded.url}
        )
        assert answer.headers["location"] == "/dashboard/", where


def test_an_application_of_ones_own_has_it_too(tmp_path: Path):
    """`create_app` alone brings the dashboard."""
    bus = EventBus(f"sqlite:///{tmp_path / 'bus.db'}")
    with TestClient(create_app(bus, auth=False)) as client:
        assert "Overview" in client.get("/dashboard/").text
