"""The page of `scalelong report` in a real browser: Chromium without a window, driven by selenium."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_page import hostile_comparison, hostile_run

from scalelong.report import page as page_module
from scalelong.report import read_content, write_page

pytest.importorskip("jinja2")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
PAGES = ("comparison", "rates", "running", "single", "several", "hostile")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def pages(cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One page of every kind."""
    folder = tmp_path_factory.mktemp("pages")
    sources = {name: [cases / name] for name in PAGES} | {"several": [cases / "single", cases / "lost"]}
    sources["hostile"] = [hostile_comparison(folder / "hostile"), hostile_run(folder / "hostile")]
    for name, places in sources.items():
        write_page(read_content(places), folder / f"{name}.html", live=name == "running")
    return folder


def visit(browser: Any, path: Path, *, width: int = 1200, theme: str = "light", media: str = "") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    # A smooth scroll would move a button away from under the mouse.
    features = [{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(path.as_uri())


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_draws_its_curves_without_errors_requests_or_foreign_scripts(
    browser: Any, pages: Path, name: str
) -> None:
    browser.get_log("performance")
    browser.get_log("browser")
    visit(browser, pages / f"{name}.html")
    empty = """return [...document.querySelectorAll('.chart')].filter((chart) =>
        ![...chart.querySelectorAll('.canvas path.curve, .canvas path.member')].some((path) => path.getAttribute('d'))
        ).map((chart) => chart.id)"""
    charts = browser.execute_script("return document.querySelectorAll('.chart').length")
    assert charts >= 3
    assert browser.execute_script(empty) == []
    assert browser.execute_script("return window.hacked") is None
    assert not browser.find_elements("css selector", "img[onerror], img:not([src^='data:'])")
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    # The browser's own first tab asks for pages of the browser.
    sent = [one["request"]["url"] for one in requests if one["documentURL"].startswith("file:")]
    assert {url.partition(":")[0] for url in sent} <= {"file", "data"}
    assert (pages / f"{name}.html").as_uri() in sent


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_400_pixels_does_not_scroll_sideways_even_when_all_is_unfolded(
    browser: Any, pages: Path, name: str
) -> None:
    visit(browser, pages / f"{name}.html", width=400)
    browser.execute_script("document.querySelectorAll('details').forEach((details) => details.open = true)")
    assert browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [400, 400]


def test_a_series_is_switched_off_by_mouse_and_on_again_by_keyboard(browser: Any, pages: Path) -> None:
    visit(browser, pages / "comparison.html")
    button = find(browser, "#c0-validation .legend li:nth-child(4) button")
    assert button.text == "LS"
    drawn = "#c0-validation .canvas [data-series='LS']"
    assert browser.find_elements("css selector", drawn)
    button.click()
    assert not browser.find_elements("css selector", drawn)
    button = browser.switch_to.active_element
    assert (button.text, button.get_attribute("aria-pressed")) == ("LS", "false")
    button.send_keys(webdriver.Keys.SPACE)
    assert browser.find_elements("css selector", drawn)
    assert browser.switch_to.active_element.get_attribute("aria-pressed") == "true"


def test_the_axis_becomes_logarithmic_and_the_setting_changes(browser: Any, pages: Path) -> None:
    visit(browser, pages / "rates.html")
    before = find(browser, "#c0-validation .canvas svg").get_attribute("innerHTML")
    switch = next(
        one for one in browser.find_elements("css selector", "#c0-validation .switch") if one.text == "Log scale"
    )
    assert "(log)" not in before
    switch.click()
    assert "(log)" in find(browser, "#c0-validation .canvas svg").get_attribute("innerHTML")
    select = find(browser, "#c0-validation select")
    assert select.text.split("\n") == ["lr 0.002", "lr 0.004", "lr 0.008"]
    select.send_keys(webdriver.Keys.ARROW_DOWN)
    assert browser.execute_script("return document.querySelector('#c0-validation select').value") == "1"
    # Kept when a page that follows a run loads itself again.
    browser.refresh()
    assert browser.execute_script("return document.querySelector('#c0-validation select').value") == "1"
    browser.execute_script("sessionStorage.clear()")


def test_values_are_read_by_mouse_and_by_arrow_keys(browser: Any, pages: Path) -> None:
    visit(browser, pages / "comparison.html")
    plot = find(browser, "#c0-validation .canvas svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    webdriver.ActionChains(browser).move_to_element(plot).perform()
    tip = find(browser, "#c0-validation .tip")
    assert tip.text.startswith("step 1,") and "CS κ=0.7" in tip.text
    scrub = find(browser, "#c0-validation .scrub")
    browser.execute_script("arguments[0].focus()", scrub)
    scrub.send_keys(webdriver.Keys.HOME)
    first = scrub.get_attribute("aria-valuetext")
    scrub.send_keys(webdriver.Keys.ARROW_RIGHT)
    second = scrub.get_attribute("aria-valuetext")
    assert first.startswith("step 200: no scaling 0.26") and second.startswith("step 400: no scaling 0.19")
    assert tip.text.startswith("step 400")
    assert browser.execute_script("return getComputedStyle(arguments[0].parentElement).outlineStyle", scrub) == "solid"


# All elements with text of their own whose contrast is below 4.5, as WCAG computes it.
CONTRASTS = """
const light = (text) => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255);
    const [r, g, b] = parts.map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
    for (; element; element = element.parentElement) {
        const colour = getComputedStyle(element).backgroundColor;
        if (!/, 0\\)$/.test(colour)) return colour;
    }
    return 'rgb(255, 255, 255)';
};
return [...document.querySelectorAll('body *')].filter((element) => element.offsetParent !== null &&
    [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())).map((element) => {
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.tagName + '.' + element.className];
}).filter(([ratio]) => ratio < 4.5)"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["running", "several"])
def test_text_has_contrast_in_both_themes(browser: Any, pages: Path, name: str, theme: str) -> None:
    visit(browser, pages / f"{name}.html", theme=theme)
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(245, 246, 248)", "dark": "rgb(16, 19, 24)"}[theme]
    assert browser.execute_script(CONTRASTS) == []


def test_print_is_light_and_without_controls_even_in_the_dark_theme(browser: Any, pages: Path) -> None:
    visit(browser, pages / "comparison.html", theme="dark", media="print")
    colours = "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    assert browser.execute_script(colours) == ["rgb(255, 255, 255)", "rgb(23, 27, 34)"]
    assert not find(browser, "nav").is_displayed() and not find(browser, ".controls").is_displayed()
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF") and len(printed) > 20_000


def test_the_policy_stops_markup_that_got_into_the_page_after_all(browser: Any, pages: Path) -> None:
    visit(browser, pages / "single.html")
    inject = """const done = arguments[0];
        document.addEventListener('securitypolicyviolation', () => done(window.hacked || 'stopped'));
        document.body.insertAdjacentHTML('beforeend', '<img src="data:," onerror="window.hacked = 1">')"""
    assert browser.execute_async_script(inject) == "stopped"


def test_a_live_page_loads_itself_again_unless_it_is_paused(
    browser: Any, cases: Path, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "RELOAD_SECONDS", 0.3)
    write_page(read_content([cases / "single"]), pages / "live.html", live=True)
    visit(browser, pages / "live.html")
    browser.execute_script("window.before = true")
    deadline = time.monotonic() + 20
    while browser.execute_script("return window.before"):
        assert time.monotonic() < deadline, "the page did not load itself again"
        time.sleep(0.1)
    find(browser, "#pause").click()
    browser.execute_script("window.before = true")
    reloaded = "const done = arguments[0]; setTimeout(() => done(window.before), 900)"
    assert browser.execute_async_script(reloaded) is True
    browser.execute_script("sessionStorage.clear()")
