"""The dashboard in a real browser: what an operator does with it, by mouse, by keyboard, on a telephone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from postbus import Discard
from tests.dashboard.browser import Witness
from tests.dashboard.browser import browser as a_browser
from tests.http.serving import Served, serving

PAGES = ("", "events", "events/1", "dead", "dead/confirm?act=retry", "subscriptions", "workers", "pipeline", "system")
CORPUS = (
    "<script>document.title='run'</script>",
    "<img src=x onerror=\"document.title='run'\">",
    '"><svg onload="document.title=\'run\'">',
    "javascript:document.title='run'",
    "{{ 7 + 7 }}</script><script>document.title='run'</script>",
    "' onmouseover='document.title=1' x='",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Give a browser."""
    with a_browser() as started:
        yield started


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Give a server; how pages come out does not depend on the store."""
    with serving("sqlite", tmp_path) as served:
        yield served


@pytest.fixture
def open_page(browser: Browser, served: Served) -> Iterator[Callable[..., Page]]:
    """Give a function that opens a page of the dashboard; whatever goes wrong in it fails the test."""
    opened: list[tuple[Page, Witness]] = []

    def open_page(path: str = "", **options: Any) -> Page:
        page = browser.new_context(**options).new_page()
        opened.append((page, Witness(page, served.url)))
        page.goto(f"{served.url}/dashboard/{path}")
        return page

    yield open_page
    for page, witness in opened:
        assert witness.wrong == []
        page.context.close()


def kill(served: Served, message: str = "order 17 has no address", **fields: Any) -> int:
    """Have an event die."""
    event = served.bus.publish(**{"type": "order", **fields})
    (delivery,) = served.bus.poll_many(1, types=[event.type])
    served.bus.finalize(delivery, success=False, errors=[Discard(message)], retry=False)
    return event.id


def test_an_event_dies_is_understood_retried_and_completes_without_a_reload(
    served: Served, open_page: Callable[..., Page]
):
    """Publish, fail, see it die, read its error, retry, see it complete: live, on pages that are never reloaded."""
    page = open_page()
    expect(page.get_by_text("All is well")).to_be_visible()
    event_id = kill(served)
    page.get_by_role("link", name="1 dead letter in default").click()
    expect(page.get_by_role("cell", name="order <n> has no address")).to_be_visible()
    page.get_by_role("link", name=str(event_id), exact=True).click()
    expect(page.locator("pre").first).to_contain_text("order 17 has no address")
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("status")).to_have_text("1 will be tried again.")
    page.goto(f"{served.url}/dashboard/events/{event_id}")
    expect(page.locator(".mark.PENDING")).to_be_visible()
    served.bus.subscribe("order", lambda _: None)
    expect(page.locator(".mark.COMPLETED")).to_be_visible(timeout=20_000)
    expect(page.locator("svg.lanes .done")).to_have_count(1)


def test_all_that_died_of_one_error_are_discarded_after_the_count_was_repeated(
    served: Served, open_page: Callable[..., Page]
):
    """Grouped, chosen by a link, confirmed by a button that says how many."""
    for number in range(3):
        kill(served, f"order {number} has no address")
    other = kill(served, "no such customer")
    page = open_page("dead")
    page.get_by_role("row", name="order <n> has no address").get_by_role("link", name="Discard …").click()
    page.get_by_role("button", name="Discard 3 dead letters").click()
    expect(page.get_by_role("status")).to_contain_text("3 discarded")
    expect(page.locator("input[name=letter]")).to_have_count(1)
    assert [each.event.id for each in served.bus.dlq.list()] == [other]


def test_a_subscription_is_paused_and_rewound(served: Served, open_page: Callable[..., Page]):
    """With a preview of what would come again (S4.10)."""
    seen: list[int] = []
    events = served.bus.publish_many([{"type": "a"}] * 4)
    served.bus.follow("sales")(lambda event: seen.append(event.id))
    served.bus.wait_for("sales", events[-1].id, timeout=30)
    page = open_page("subscriptions")
    card = page.locator("section", has=page.get_by_role("heading", name="sales"))
    card.get_by_role("button", name="Pause").click()
    expect(card.get_by_text("paused", exact=True)).to_be_visible()
    card.get_by_role("button", name="Resume").click()
    card.get_by_role("textbox").fill(str(events[0].id))
    card.get_by_role("button", name="Rewind …").click()
    expect(page.get_by_text("Handled again")).to_be_visible()
    page.get_by_role("button", name="Rewind, 3 again").click()
    served.bus.wait_for("sales", events[-1].id, timeout=30)
    expect(card.get_by_text("4 of 4, up to date")).to_be_visible(timeout=20_000)
    assert seen[4:] == [each.id for each in events[1:]]


def test_a_filter_can_be_sent_to_a_colleague(served: Served, open_page: Callable[..., Page]):
    """It is in the address, and so is the page; typing goes on while the list is renewed."""
    served.bus.publish_many([{"type": "order.placed"}] * 60 + [{"type": "mail"}])
    page = open_page("events")
    page.get_by_label("Type").fill("order.*")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("row")).to_have_count(51)
    page.get_by_role("link", name="Older").click()
    expect(page.get_by_role("row")).to_have_count(11)
    again = open_page(page.url.partition("/dashboard/")[2])
    expect(again.get_by_role("row")).to_have_count(11)
    live = open_page("events")
    live.get_by_label("Type").fill("unfinis")
    served.bus.publish("fresh")
    expect(live.get_by_role("cell", name="fresh")).to_be_visible(timeout=20_000)
    expect(live.get_by_label("Type")).to_have_value("unfinis")


def test_a_page_that_is_not_renewed_says_so_and_recovers(browser: Browser, served: Served):
    """A stream that is refused, and a look that fails, show as "not live" until both work again."""
    page = browser.new_context().new_page()
    mark = page.get_by_text("not live")
    page.route("**/live", lambda route: route.fulfill(status=503), times=1)
    page.goto(f"{served.url}/dashboard/events")
    expect(mark).to_be_visible()
    expect(mark).to_be_hidden(timeout=20_000)
    served.bus.publish("fresh")
    expect(page.get_by_role("cell", name="fresh")).to_be_visible(timeout=20_000)
    page.route("**/events", lambda route: route.fulfill(status=503))
    served.bus.publish("a")
    expect(mark).to_be_visible(timeout=20_000)
    page.unroute("**/events")
    served.bus.publish("b")
    expect(mark).to_be_hidden(timeout=20_000)
    page.context.close()


def test_what_somebody_opened_stays_open(served: Served, open_page: Callable[..., Page]):
    """An error that is being read is not folded away by the next look; one that was closed stays closed."""
    event = served.bus.publish("order")
    (delivery,) = served.bus.poll_many(1)
    served.bus.finalize(delivery, errors=["one thing", "another thing"])
    page = open_page(f"events/{event.id}")
    for summary in page.locator("summary").all():
        summary.click()
    page.evaluate("addEventListener('htmx:afterSettle', () => { document.title = 'looked again'; })")
    served.bus.publish("fresh")
    expect(page).to_have_title("looked again", timeout=20_000)
    expect(page.locator("details pre", has_text="one thing")).to_be_visible()
    expect(page.locator("details pre", has_text="another thing")).to_be_hidden()


def test_nothing_that_was_published_runs(served: Served, open_page: Callable[..., Page]):
    """Markup in every field is shown as text on every page."""
    for each in CORPUS:
        kill(
            served,
            each,
            type=each,
            payload={each: each},
            tags=[each.replace(",", "")],
            key=each,
            title=each,
            description=each,
        )
    for path in (*PAGES, *(f"events/{number}" for number in range(2, len(CORPUS) + 1))):
        page = open_page(path)
        page.wait_for_load_state("load")
        assert "run" not in page.title()
        assert page.locator("main script:not([type='application/json']), main img, main [onmouseover]").count() == 0
        page.context.close()


def test_it_can_be_used_by_keyboard_alone(served: Served, open_page: Callable[..., Page]):
    """From the overview to a retried dead letter, with Tab and Enter."""
    event_id = kill(served)
    page = open_page()

    def reach(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            focused = page.evaluate("document.activeElement.innerText || document.activeElement.ariaLabel || ''")
            if focused.strip() == name:
                page.keyboard.press("Enter")
                return
        pytest.fail(f"{name!r} cannot be reached")

    reach("1 dead letter in default")
    page.wait_for_url("**/dead?**")
    reach(str(event_id))
    page.wait_for_url(f"**/events/{event_id}**")
    reach("Retry")
    expect(page.get_by_role("status")).to_have_text("1 will be tried again.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_shuts_anybody_out(served: Served, open_page: Callable[..., Page], scheme: str):
    """axe-core finds no serious violation; nothing is wider than a telephone of 390 pixels."""
    kill(served)
    served.bus.follow("sales")(lambda _: None)
    served.bus.publish("order.with.a.rather.long.name", {"long": "x" * 300}, tags=["eu", "web"], key="customer-17")
    page = open_page(color_scheme=scheme, viewport={"width": 390, "height": 800})
    for path in PAGES:
        page.goto(f"{served.url}/dashboard/{path}")
        found = Axe().run(page).response["violations"]
        assert [(path, each["id"]) for each in found if each["impact"] in ("serious", "critical")] == []
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, path


def test_signing_in_and_out(browser: Browser, tmp_path: Path):
    """A token gives a session in which pages and their stream work; out is out."""
    with serving("sqlite", tmp_path, auth=True, local=False) as served:
        token = served.token("read", "admin")
        served.app.state.desk.tokens.refresh()
        page = browser.new_context().new_page()
        page.goto(f"{served.url}/dashboard/events")
        page.get_by_label("Token").fill(token)
        with page.expect_response("**/live"):
            page.get_by_role("button", name="Sign in").click()
        assert page.url.endswith("/dashboard/events")
        served.bus.publish("fresh")
        expect(page.get_by_role("cell", name="fresh")).to_be_visible(timeout=20_000)
        page.get_by_role("button", name="Sign out").click()
        page.goto(f"{served.url}/dashboard/")
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        page.context.close()
