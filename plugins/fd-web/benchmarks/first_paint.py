"""Seconds until Chromium has painted the page of a running server for the first time.

    fastdeploy serve models/ernie-tiny & python plugins/fd-web/benchmarks/first_paint.py [URL]

Prints the median and the extremes of ten visits, each with an empty cache.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys

from playwright.sync_api import sync_playwright

VISITS = 10
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main() -> None:
    """Visit the page."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8180"
    found = []
    with sync_playwright() as playwright:
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(VISITS):
            context = browser.new_context(viewport={"width": 1280, "height": 800})
            page = context.new_page()
            page.goto(url)
            # Not wait_for_function: in the page it needs an eval, which the page's policy forbids.
            while (painted := page.evaluate(PAINT)) is None:
                page.wait_for_timeout(10)
            found.append(painted / 1000)
            context.close()
        browser.close()
    shown = statistics.median(found), min(found), max(found)
    print("first paint: median {:.3f} s, {:.3f} to {:.3f} s".format(*shown))


if __name__ == "__main__":
    main()
