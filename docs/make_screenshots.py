"""Photograph the report of a comparison for docs/report.md, in Chromium without a window.

python docs/make_screenshots.py runs/digits-comparison     # writes docs/figures/report-*.png; needs chromium-driver
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium import webdriver

from scalelong.report import read_content, write_page

FIGURES = Path(__file__).parent / "figures"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")


@dataclass(frozen=True)
class Shot:
    """One picture: how wide and high, in which theme, and the element at its upper edge."""

    name: str
    width: int
    height: int
    theme: str
    start: str = "body"


SHOTS = (
    Shot("report-desktop-light", 1200, 1560, "light"),
    Shot("report-desktop-dark", 1200, 1560, "dark", "#c0-curves"),
    Shot("report-phone-light", 400, 1300, "light"),
    Shot("report-phone-dark", 400, 1300, "dark", "#c0-curves"),
)


def main() -> None:
    source = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_page(read_content([source]), page)
        browser = open_browser(folder)
        try:
            for shot in SHOTS:
                take(browser, page, shot)
        finally:
            browser.quit()


def open_browser(folder: str) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={folder}/profile", "--hide-scrollbars"):
        options.add_argument(flag)
    # Without the driver's path selenium would look for one on the network.
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def take(browser: Any, page: Path, shot: Shot) -> None:
    size = {"width": shot.width, "height": 900, "deviceScaleFactor": 1, "mobile": shot.width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": shot.theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())
    top = browser.execute_script("return document.querySelector(arguments[0]).getBoundingClientRect().top", shot.start)
    clip = {"x": 0, "y": max(0, top), "width": shot.width, "height": shot.height, "scale": 1}
    options = {"format": "png", "captureBeyondViewport": True, "clip": clip}
    picture = browser.execute_cdp_cmd("Page.captureScreenshot", options)
    target = FIGURES / f"{shot.name}.png"
    target.write_bytes(base64.b64decode(picture["data"]))
    print(target, f"{target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
